//! The edges of a request: keys, content types, bodies (O24, HTTP sections 6 and 11).

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use oncebox::policy::operation::{Code, KeyFormat, Route};
use oncebox::runtime::operation::{Endpoint, Engine};
use oncebox::store::sqlite::SqliteStore;

use super::crowd::door;
use super::kit::*;

const BODY: &str = r#"{"text":"a"}"#;

async fn stage(endpoint: Endpoint) -> (World<SqliteStore>, Gate, String) {
    let (world, gate) = (sqlite().await, Gate::open());
    let url = serve(door(&world, endpoint, &gate)).await + "/put";
    (world, gate, url)
}

fn typed() -> Endpoint {
    Endpoint::typed::<Put>(same_tx())
}

/// What each bad request is answered; nothing of it is stored or run.
async fn refused(url: &str, key: &str, body: impl Into<String>) -> Http {
    send(post(url, key, body)).await
}

// Shown by: reading the key as a structured field (a bare UUID fails); trimming more than white space.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o24_what_is_a_key_and_what_is_none() {
    let (world, gate, url) = stage(typed()).await;
    let uuid = "9b2f0c64-1b5e-4f0e-8a3c-6f1d2e3a4b5c";
    let longest = "k".repeat(255);
    for key in [uuid, "0123456789abcdef", "A-Za-z0-9_.:~-xx", longest.as_str()] {
        let one = send(post(&url, key, BODY)).await;
        assert_eq!((one.status, one.is_replayed()), (201, false), "{key}");
        for same in [key.to_owned(), format!("\"{key}\""), format!("\t {key} ")] {
            let two = send(post(&url, &same, BODY)).await;
            assert!(two.status == 201 && two.is_replayed() && two.body == one.body, "{same}");
        }
    }
    assert_eq!(gate.calls(), 4);
    let too_long = "k".repeat(256);
    let bad = [
        "",
        "\"\"",
        "0123456789abcde",
        too_long.as_str(),
        "0123456789abcdef,0123456789abcdef",
        "0123456789 abcdef",
        "\"0123456789abcdef",
        "\"0123456789abcdef\";a=1",
        "\"0123456789\\\"abcdef\"",
        "0123456789abcdef/",
        "0123456789abcdef\u{e9}",
    ];
    for key in bad {
        let answer = refused(&url, key, BODY).await;
        assert!(answer.is(Code::KeyInvalid).header("link").is_some_and(|link| link.contains("describedby")));
        assert!(key.len() < 16 || !String::from_utf8_lossy(&answer.body).contains(key), "the key is not repeated");
    }
    let twice = post(&url, K1, BODY).header("idempotency-key", K1);
    send(twice).await.is(Code::KeyInvalid);
    let missing = client().post(&url).header("content-type", "application/json").body(BODY);
    let missing = send(missing).await;
    assert!(missing.is(Code::KeyRequired).header("link").is_some_and(|link| link.contains("describedby")));
    assert_eq!((gate.calls(), world.effects().await), (4, 4));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o24_a_uuid_route_takes_uuids_in_any_case() {
    let (_world, gate, url) = stage(Endpoint::typed::<Put>(Route { key_format: KeyFormat::Uuid, ..same_tx() })).await;
    let uuid = "9b2f0c64-1b5e-4f0e-8a3c-6f1d2e3a4b5c";
    assert_eq!(send(post(&url, uuid, BODY)).await.status, 201);
    assert!(send(post(&url, &uuid.to_uppercase(), BODY)).await.is_replayed());
    for bad in [uuid.replace('-', ""), format!("{{{uuid}}}"), K1.to_owned()] {
        refused(&url, &bad, BODY).await.is(Code::KeyInvalid);
    }
    assert_eq!(gate.calls(), 1);
}

// Shown by: taking the scope from a header; assuming a public one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m14_without_a_scope_from_authentication_nothing_runs() {
    let (_world, gate, url) = stage(typed()).await;
    let unscoped = post(&url, K1, BODY).header("test-scope", "none").header("x-tenant-id", "t1");
    send(unscoped).await.is(Code::ScopeRequired);
    assert_eq!(gate.calls(), 0);
}

// Shown by: `serde_json::Value` in place of the type (a float is rounded, the last of two members wins); `serde_json::from_slice`
// (an array of the fields is the struct).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m70_a_body_that_is_not_the_command_is_refused_and_frees_the_key() {
    let (_world, gate, url) = stage(typed()).await;
    let bad = [
        "",
        "{",
        "[]",
        r#"["a"]"#,
        r#"["a",1]"#,
        "null",
        r#"{"text":"a""#,
        r#"{"text":"a"} x"#,
        r#"{"text":"a","text":"b"}"#,
        r#"{"text":"a","more":1}"#,
        r#"{"amount":1}"#,
        r#"{"text":1}"#,
        r#"{"text":"a","amount":1.0}"#,
        r#"{"text":"a","amount":"1"}"#,
        r#"{"text":"a","amount":9223372036854775808}"#,
        r#"{"text":"a","amount":1e3}"#,
        r#"{"text":"a","amount":null}"#,
    ];
    for body in bad {
        let answer = refused(&url, K1, body).await;
        assert!(answer.is(Code::RequestInvalid).json()["detail"].is_string(), "{body}");
    }
    for content_type in ["text/plain", "application/x-www-form-urlencoded", "application/jsonx"] {
        let other = client().post(&url).header("idempotency-key", K1).header("content-type", content_type).body(BODY);
        send(other).await.is(Code::UnsupportedMediaType);
    }
    let untyped = client().post(&url).header("idempotency-key", K1).body(BODY);
    send(untyped).await.is(Code::UnsupportedMediaType);
    assert_eq!(gate.calls(), 0);
    // Integers are exact to i64: two that JCS writes alike are two commands (pitfall 1).
    let big = |n: i64| format!(r#"{{"text":"a","amount":{n}}}"#);
    assert_eq!(send(post(&url, K1, big(9_007_199_254_740_993))).await.status, 201);
    refused(&url, K1, big(9_007_199_254_740_992)).await.is(Code::KeyReused);
    assert!(send(post(&url, K1, big(9_007_199_254_740_993))).await.is_replayed());
    assert_eq!(send(post(&url, K2, big(i64::MAX))).await.status, 201);
}

// Shown by: `to_bytes(usize::MAX)` (pitfall 23); reading before comparing the length.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pitfall_23_bodies_are_bounded_whether_their_length_is_said_or_not() {
    let (_world, gate, url) = stage(typed().request_body_max(100)).await;
    let of = |length: usize| format!(r#"{{"text":"{}"}}"#, "a".repeat(length - 11));
    assert_eq!(send(post(&url, K1, of(100))).await.status, 201);
    refused(&url, K2, of(101)).await.is(Code::BodyTooLarge);
    // It is refused before it is sent.
    let head = format!("content-length: 1000000000\r\nidempotency-key: {K2}\r\ncontent-type: application/json\r\n\r\n");
    assert!(raw(&url, &head).await.starts_with("HTTP/1.1 413"));
    let chunked = |body: &str, trailer: &str| {
        format!(
            "transfer-encoding: chunked\r\ntrailer: x-a\r\nidempotency-key: {K2}\r\ncontent-type: application/json\r\n\r\n\
             {:x}\r\n{body}\r\n0\r\n{trailer}\r\n",
            body.len()
        )
    };
    assert!(raw(&url, &chunked(&of(101), "")).await.starts_with("HTTP/1.1 413"));
    let trailed = raw(&url, &chunked(&of(100), "x-a: 1\r\n")).await;
    assert!(trailed.starts_with("HTTP/1.1 400") && trailed.contains("REQUEST_INVALID"), "{trailed}");
    assert_eq!(gate.calls(), 1);
    assert!(raw(&url, &chunked(&of(100), "")).await.starts_with("HTTP/1.1 201"));
    assert_eq!(gate.calls(), 2);
}

/// A request of these header lines and this body; gives what comes back first.
async fn raw(url: &str, rest: &str) -> String {
    let address = url.trim_start_matches("http://").trim_end_matches("/put");
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("POST /put HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{rest}").as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    tokio::time::timeout(SOON, stream.read_to_end(&mut answer)).await.unwrap().unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

// Shown by: an unbounded budget; a permit that is dropped after the read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o29_bodies_beyond_the_memory_get_503_and_nothing_runs() {
    let world = sqlite().await;
    let engine = Engine::builder(world.store.clone()).body_memory_max(1_000).build();
    let world = World { engine, ..world };
    let gate = Gate::open();
    let url = serve(door(&world, typed().request_body_max(10_000), &gate)).await + "/put";
    refused(&url, K1, format!(r#"{{"text":"{}"}}"#, "a".repeat(2_000))).await.is(Code::BodyMemoryExceeded);
    assert_eq!(gate.calls(), 0);
    assert_eq!(send(post(&url, K1, BODY)).await.status, 201);
}
