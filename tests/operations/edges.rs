//! The edges of a request: keys, content types, bodies (O24).

use std::time::Duration;

use axum::Router;
use axum::extract::{OriginalUri, Request};
use axum::routing::post as route_post;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use oncebox::http::idempotency::TypedOperation;
use oncebox::operation::{Code, Endpoint, EngineOptions, KeyFormat, Mode, Outcome, Route};
use oncebox::store::sqlite::SqliteStore;

use super::crowd::door;
use super::gone;
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

/// Sends a request; the caller says how it is refused, and that nothing ran.
async fn refused(url: &str, key: &str, body: impl Into<String>) -> Http {
    send(post(url, key, body)).await
}

// Shown by: reading the key as a structured field (a bare UUID fails); trimming more than white
// space.
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

// Shown by: `serde_json::Value` in place of the type (a float is rounded, the last of two members
// wins); `serde_json::from_slice` (an array of the fields is the struct).
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
    let (_world, gate, url) = stage(Endpoint::typed::<Put>(Route { request_body_max: 100, ..same_tx() })).await;
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

// Shown by: an unbounded budget.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o29_bodies_beyond_the_memory_get_503_and_nothing_runs() {
    let (world, gate) =
        (sqlite().await.process(EngineOptions { body_memory_max: 1_000, ..EngineOptions::default() }), Gate::open());
    let url = serve(door(&world, Endpoint::typed::<Put>(Route { request_body_max: 10_000, ..same_tx() }), &gate)).await
        + "/put";
    refused(&url, K1, format!(r#"{{"text":"{}"}}"#, "a".repeat(2_000))).await.is(Code::BodyMemoryExceeded);
    assert_eq!(gate.calls(), 0);
    assert_eq!(send(post(&url, K1, BODY)).await.status, 201);
}

/// A request of a tenant that has said how long its body is, and has sent this much of it.
async fn unfinished(url: &str, tenant: &str, length: usize, sent: &[u8]) -> TcpStream {
    let address = url.trim_start_matches("http://").trim_end_matches("/put");
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /put HTTP/1.1\r\nhost: x\r\ntest-scope: {tenant}:p1\r\nidempotency-key: {K1}\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(sent).await.unwrap();
    stream
}

async fn head_of(stream: &mut TcpStream) -> String {
    let mut answer = vec![0; 4_096];
    let read = tokio::time::timeout(SOON, stream.read(&mut answer)).await.unwrap().unwrap();
    String::from_utf8_lossy(&answer[..read]).into_owned()
}

// Shown to fail: with one share for all tenants (503 for the other one). Shown by: memory for what
// was announced and did not come; no end of the wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m107_slow_bodies_of_one_tenant_stop_no_other() {
    let (world, gate) =
        (sqlite().await.process(EngineOptions { body_memory_max: 10_000, ..EngineOptions::default() }), Gate::open());
    let url = serve(door(&world, Endpoint::typed::<Put>(Route { request_body_within: SOON, ..same_tx() }), &gate))
        .await
        + "/put";
    let body = format!(r#"{{"text":"{}"}}"#, "a".repeat(900));
    let as_other = async |key: &str| send(post(&url, key, body.clone()).header("test-scope", "t2:p1")).await.status;
    let mut slow = Vec::new();
    for _ in 0..20 {
        slow.push(unfinished(&url, "t1", 9_000, b"{").await);
    }
    // The tenant's share fills up, and not more: half of the memory, less twenty bytes, is five
    // times 900.
    let (mut full, started) = (tokio::task::JoinSet::new(), "a".repeat(900));
    for _ in 0..8 {
        let mut stream = unfinished(&url, "t1", 9_000, started.as_bytes()).await;
        full.spawn(async move { head_of(&mut stream).await });
    }
    for _ in 0..3 {
        let answer = full.join_next().await.unwrap().unwrap();
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("BODY_MEMORY_EXCEEDED"), "{answer}");
    }
    assert_eq!(as_other(K1).await, 201, "another tenant has its share");
    // Those that have a place are not answered while their bodies do not come.
    let another = tokio::time::timeout(std::time::Duration::from_secs(1), full.join_next()).await;
    assert!(another.is_err(), "{another:?}");
    assert_eq!(as_other(K2).await, 201, "it still has it");
    drop((slow, full));

    let next = world.another_process();
    let hasty =
        Endpoint::typed::<Put>(Route { request_body_within: std::time::Duration::from_millis(200), ..same_tx() });
    let url = serve(door(&next, hasty, &gate)).await + "/put";
    let answer = head_of(&mut unfinished(&url, "t1", 9_000, b"{").await).await;
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("IDEMPOTENCY_BODY_TOO_SLOW"), "{answer}");
    assert_eq!(gate.calls(), 2);
}

// Shown by: a permit that is dropped after the read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o29_a_body_is_held_until_its_run_has_ended() {
    let world = sqlite().await.process(EngineOptions {
        body_memory_max: 1_000,
        body_memory_per_tenant_max: Some(1_000),
        ..EngineOptions::default()
    });
    let gate = Gate::closed();
    let base = serve(door(&world, typed(), &gate)).await;
    let url = format!("{base}/put");
    let body = format!(r#"{{"text":"{}"}}"#, "a".repeat(600));
    let asking = gone::asks(&base, "/put", &body).await;
    gate.begun().await;
    refused(&url, K2, body.clone()).await.is(Code::BodyMemoryExceeded);
    // Who asked goes away; the run goes on, and its command is still there.
    gone::goes(asking).await;
    refused(&url, K2, body.clone()).await.is(Code::BodyMemoryExceeded);
    gate.let_go();
    gate.let_go();
    until("it is given back", || async { send(post(&url, K2, body.clone())).await.status == 201 }).await;
    assert_eq!(gate.calls(), 2);
}

// Shown to fail: with `Front::decide` answering `PassThrough` for `KeyRequired` (201, at each
// door).
async fn m12_a_request_without_a_key_is_refused_at_every_door_and_runs_nothing<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let url = serve(door(&world, typed(), &gate)).await + "/put";
    let next = world.another_process();
    let layered = super::layer::layered(&next, Endpoint::raw("put", super::layer::edge()), &gate).await;
    for url in [url, layered + "/put"] {
        for _ in 0..2 {
            let bare = client().post(&url).header("content-type", "application/json").body(BODY);
            let refused = send(bare).await;
            let shown = refused.is(Code::KeyRequired).json();
            let said = (refused.status, &shown["retryable"], &shown["key_state"]);
            assert_eq!(said, (400, &false.into(), &"free".into()));
        }
    }
    let records = world.store.number(&format!("select count(*) from {}idempotency_request", S::PREFIX)).await;
    assert_eq!((gate.calls(), world.effects().await, records), (0, 0, 0));
}

on_all!(
    m12_a_request_without_a_key_is_refused_at_every_door_and_runs_nothing,
    m23_the_path_parameters_and_the_query_of_a_typed_operation_belong_to_its_command,
);

/// A typed operation whose handler acts on what its URL names, at more than one place.
fn accounts<S: Sql>(world: &World<S>) -> Router {
    let door = TypedOperation::<S, Put>::new(&world.engine, typed()).unwrap();
    let close = move |OriginalUri(uri): OriginalUri, request: Request| {
        let (door, uri) = (door.clone(), uri.to_string());
        async move {
            door.serve(request, move |_, mut tx| {
                let uri = uri.clone();
                Box::pin(async move {
                    S::run(tx.connection(), &format!("insert into effect (text) values ('{uri}')")).await?;
                    Ok(Outcome::Completed(made("closed", tx.operation_id())))
                })
            })
            .await
        }
    };
    let nested = Router::new().route("/close", route_post(close.clone()));
    Router::new()
        .route("/accounts/{id}/close", route_post(close.clone()))
        .route("/close", route_post(close))
        .nest("/v2", nested)
}

// Pitfall 24: the same key and body for another resource. Shown to fail: with the command alone
// written (the second resource gets the answer of the first one and is never closed); with the
// path parameters alone, and with the query alone; with parts that are no UTF-8 left out or
// replaced; with the whole path written (422 at the other mount).
async fn m23_the_path_parameters_and_the_query_of_a_typed_operation_belong_to_its_command<S: Sql>(world: World<S>) {
    let url = serve(accounts(&world)).await;
    let close = async |number: usize, target: &str| {
        send(post(&format!("{url}{target}"), &format!("{K1}-{number}"), BODY)).await
    };
    let closed =
        async |target: &str| world.store.number(&format!("select count(*) from effect where text = '{target}'")).await;
    let others = [
        ("/accounts/a/close", "/accounts/b/close"),
        ("/accounts/a/close?by=x", "/accounts/a/close?by=y"),
        ("/close?by=x", "/close"),
        ("/close", "/close?by=z"),
        ("/accounts/%FF/close", "/accounts/%FE/close"),
        ("/close?by=%FF", "/close?by=%FE"),
    ];
    for (number, (target, other)) in others.into_iter().enumerate() {
        let one = close(number, target).await;
        assert_eq!((one.status, one.is_replayed()), (201, false), "{target}");
        let before = closed(other).await;
        close(number, other).await.is(Code::KeyReused);
        assert_eq!(closed(other).await, before, "{other}");
        let again = close(number, target).await;
        assert_eq!((again.status, again.is_replayed(), again.body), (201, true, one.body), "{target}");
    }
    assert_eq!(world.effects().await, 6);
    // One command in other words, and at another mount.
    for (number, target, same) in
        [(7, "/close?a=1&b=2", "/close?b=2&a=%31"), (8, "/close", "/v2/close"), (9, "/v2/close?a=1", "/close?a=1")]
    {
        assert!(!close(number, target).await.is_replayed(), "{target}");
        assert!(close(number, same).await.is_replayed(), "{same}");
    }
    let endpoint = world.another_process().protect(same_tx());
    let alone = claim(&endpoint, K1, Mode::Transactional, Duration::from_secs(1)).fingerprint;
    let stored = world.record("t1", &format!("{K1}-8")).await.unwrap().fingerprint;
    assert_eq!(stored, alone, "without both, the fingerprint is the command's");
}

// Shown by: leaving the name out; showing what serde says of values.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_is_refused_says_which_member_is_wrong_and_repeats_no_value() {
    let (_world, gate, url) = stage(typed()).await;
    for (body, says) in [
        (r#"{"text":"a","amuont":7}"#, Some("unknown field `amuont`")),
        (r#"{"amount":7}"#, Some("missing field `text`")),
        (r#"{"text":"a","text":"b"}"#, Some("duplicate field `text`")),
        (r#"{"text":"a","amount":"s3cret"}"#, None),
    ] {
        let answer = refused(&url, K1, body).await;
        let shown = answer.is(Code::RequestInvalid).json();
        let detail = shown["detail"].as_str().unwrap().to_owned();
        assert!(!detail.contains("s3cret") && says.is_none_or(|says| detail.contains(says)), "{detail}");
        assert_eq!((&shown["retryable"], &shown["key_state"]), (&true.into(), &"not_said".into()));
    }
    assert_eq!(gate.calls(), 0);
    assert_eq!(send(post(&url, K1, BODY)).await.status, 201, "corrected, under the same key");
}
