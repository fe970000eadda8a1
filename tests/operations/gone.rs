//! A client that goes away in the middle of the handler of a route behind the layer, and of an
//! operation in phases (pitfall 2); and how a client goes away in other tests.
//!
//! That the server has seen it go is shown and not guessed: the client ends what it sends, and
//! waits for the end of what it gets.

use axum::extract::Json;
use axum::http::StatusCode;
use axum::routing::post as route_post;
use oncebox::operation::{Code, Endpoint};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::kit::*;
use super::layer::{edge, layered};
use super::service::{Service, count, messages, payment};
use super::services::{Two, two_services};

on_all! {
    pitfall_2_a_client_that_goes_away_does_not_end_a_handler_behind_the_layer,
}

mod example {
    use super::{Two, a_charge_whose_client_goes_away, two_services};

    two_services! {
        pitfall_2_a_client_that_goes_away_does_not_end_a_charge,
    }

    async fn pitfall_2_a_client_that_goes_away_does_not_end_a_charge(two: Two) {
        a_charge_whose_client_goes_away(two).await;
    }
}

/// Sends a request, and does not wait for its answer.
pub(crate) async fn asks(url: &str, path: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(url.trim_start_matches("http://")).await.unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer t1:p1\r\nidempotency-key: {K1}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    stream
}

/// Goes; ends when the server has seen that, and has dropped the request.
pub(crate) async fn goes(mut stream: TcpStream) {
    stream.shutdown().await.unwrap();
    let mut answer = Vec::new();
    // Its end, or a reset.
    let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut answer)).await.expect("the server sees it go");
    assert_eq!(String::from_utf8_lossy(&answer), "", "it was answered");
}

/// Sends a request, waits until its handler has begun, and goes.
pub(crate) async fn goes_away(url: &str, path: &str, body: &str, handler: &Gate) {
    let stream = asks(url, path, body).await;
    handler.begun().await;
    goes(stream).await;
}

// Shown by: a run that is aborted with the request that waits for it (for ever in progress).
async fn pitfall_2_a_client_that_goes_away_does_not_end_a_handler_behind_the_layer<S: Sql>(world: World<S>) {
    let gate = Gate::closed();
    let url = layered(&world, Endpoint::raw("put", edge()), &gate).await;
    goes_away(&url, "/put", "{}", &gate).await;
    send(post(&format!("{url}/put"), K1, "{}")).await.is(Code::InProgress);
    gate.let_go();
    world.completes(K1).await;
    let again = send(post(&format!("{url}/put"), K1, "{}")).await;
    assert_eq!((again.status, again.is_replayed()), (201, true), "{again:?}");
    assert_eq!((gate.calls(), world.effects().await), (1, 1));
    assert!(world.engine.drain(SOON).await);
}

/// A card provider that holds every charge at a gate.
async fn provider(gate: &Gate) -> String {
    let gate = gate.clone();
    let charge = move |Json(mut charge): Json<Value>| {
        let gate = gate.clone();
        async move {
            gate.pass().await;
            charge["id"] = json!("ch_1");
            (StatusCode::CREATED, Json(charge))
        }
    };
    serve(axum::Router::new().route("/charges", route_post(charge))).await
}

// Shown by: a driver that is aborted with the request that waits for it. Nobody else drives: no
// worker recovers, and the request comes again only when the charge has its outcome.
async fn a_charge_whose_client_goes_away(two: Two) {
    let url = two.url.clone();
    drop(two);
    let gate = Gate::closed();
    let provider = provider(&gate).await;
    let flags = [
        "--provider",
        &provider,
        "--deployment",
        "database",
        "--recovery",
        "off",
        "--charge-budget",
        "60",
        "--lease",
        "60",
    ];
    let service = Service::ready(Service::begin(&url, &flags)).await;
    let body = payment(700, "order-1");
    goes_away(&service.url, "/charges", &body, &gate).await;
    gate.let_go();
    until("it is settled", || async { count(&url, "select count(*) from charge where status = 'settled'").await == 1 })
        .await;
    let again = service.post("/charges", K1, &body).await;
    assert_eq!((again.status, again.is_replayed()), (201, true), "{again:?}");
    assert_eq!(count(&url, "select count(*) from charge").await, 1);
    assert_eq!((gate.calls(), messages(&url, "payment.created").await), (1, 1));
}
