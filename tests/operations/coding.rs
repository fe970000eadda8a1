//! Content codings around the layer and inside of it: an answer in the coding of one client is
//! nobody else's (pitfall 22).

use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use oncebox::http::idempotency::IdempotencyLayer;
use oncebox::operation::{Code, Endpoint};

use super::kept::{Answers, BODY};
use super::kit::*;
use super::layer::edge;

/// What a compression layer does: the client that takes zstd gets zstd.
async fn compresses(request: Request, next: Next) -> Response {
    let takes = request.headers().get(header::ACCEPT_ENCODING).is_some_and(|value| value == "zstd");
    let response = next.run(request).await;
    if !takes || response.headers().contains_key(header::CONTENT_ENCODING) {
        return response;
    }
    let (mut parts, body) = response.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    parts.headers.remove(header::CONTENT_LENGTH);
    parts.headers.insert(header::CONTENT_ENCODING, "zstd".parse().unwrap());
    Response::from_parts(parts, Body::from(zstd::encode_all(&body[..], 0).unwrap()))
}

async fn ask_taking(coding: Option<&str>, url: &str, key: &str) -> Http {
    let request = post(url, key, BODY);
    send(match coding {
        Some(coding) => request.header("accept-encoding", coding),
        None => request,
    })
    .await
}

// Shown by: keeping bytes that came compressed, without the header that says so (noise for whoever
// asks again).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pitfall_22_each_client_gets_the_coding_it_takes_and_nobody_anothers() {
    let text = "a line that comes again\n".repeat(100);
    let answers = Answers::new("text/plain", text.as_str());
    let plain = |answer: &Http| match answer.header("content-encoding") {
        Some("zstd") => ("zstd", zstd::decode_all(&answer.body[..]).unwrap()),
        None => ("identity", answer.body.clone()),
        other => panic!("{other:?}"),
    };
    let (world, gate) = (sqlite().await, Gate::open());
    // Where it belongs: outside. What is stored has no coding.
    let layer = IdempotencyLayer::new(&world.engine, Endpoint::raw("put", edge())).unwrap();
    let outside = answers.router(&gate).route_layer(layer).layer(from_fn(compresses));
    let url = serve(outside).await + "/put";
    for (key, codings) in [(K1, [Some("zstd"), None, Some("zstd")]), (K2, [None, Some("zstd"), None])] {
        for (number, coding) in codings.into_iter().enumerate() {
            let answer = ask_taking(coding, &url, key).await;
            assert_eq!((answer.status, answer.is_replayed()), (201, number > 0));
            assert_eq!(plain(&answer), (coding.unwrap_or("identity"), text.clone().into_bytes()));
        }
    }
    assert_eq!(gate.calls(), 2);
    // Inside, its bytes are of one client's coding: they are nobody else's answer, and nothing runs
    // again to get another.
    let inner = world.another_process();
    let layer = IdempotencyLayer::new(&inner.engine, Endpoint::raw("put", edge())).unwrap();
    let inside = answers.router(&gate).layer(from_fn(compresses)).route_layer(layer);
    let url = serve(inside).await + "/put";
    let key = format!("{K1}-inside");
    let one = ask_taking(Some("zstd"), &url, &key).await;
    assert_eq!(plain(&one), ("zstd", text.clone().into_bytes()), "the first client has its answer");
    for coding in [None, Some("zstd")] {
        ask_taking(coding, &url, &key).await.is(Code::ResultNotRetained);
    }
    // A client that took none leaves an answer for all.
    let key = format!("{K2}-inside");
    for number in 0..2 {
        let answer = ask_taking(None, &url, &key).await;
        assert_eq!((answer.status, answer.is_replayed(), &answer.body), (201, number > 0, &text.clone().into_bytes()));
    }
    assert_eq!(gate.calls(), 4);
}
