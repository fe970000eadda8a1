//! Answers whose body is a stream, fails, or does not end: nothing waits for them without a bound,
//! and nothing else is stored in their place (pitfall 19, O2).

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post as route_post;
use futures_util::stream::{self, StreamExt};
use http_body_util::Limited;
use oncebox::http::idempotency::IdempotencyLayer;
use oncebox::operation::{Code, Endpoint, Guard, Mode, Route, State as Remembered};

use super::kit::*;
use super::layer::edge;

on_all! {
    o2_a_guard_takes_back_what_it_cannot_answer_with_and_its_key_runs_again,
    o2_a_guard_that_cannot_read_its_answer_does_not_free_a_key_whose_transaction_was_committed,
}

/// A body that begins with `begun`, and then goes on as it is told. Only `stream` says no length.
fn body(told: &str, gate: &Gate) -> Body {
    let begun = stream::iter([Ok::<_, std::io::Error>("begun ")]);
    let gate = gate.clone();
    let rest = match told {
        "fails" => stream::iter([Err(std::io::Error::other("on purpose"))]).boxed(),
        _ => stream::once(async move {
            gate.pass().await;
            Ok("and ended")
        })
        .boxed(),
    };
    let body = Body::from_stream(begun.chain(rest));
    if told == "stream" { body } else { Body::new(Limited::new(body, 1_000)) }
}

#[derive(Clone)]
struct App<S>(S, Gate);

/// Commits with its guard an answer whose body does what the header says.
async fn guarded<S: Sql>(State(App(store, gate)): State<App<S>>, guard: Guard<S>, told: HeaderMap) -> Response {
    let mut tx = store.tx("insert into effect (text) values ('guarded')").await;
    if told.contains_key("test-commits") {
        S::run(&mut tx, "commit").await.unwrap();
    }
    let body = told.get("test-body").map_or_else(|| Body::from("whole"), |told| body(told.to_str().unwrap(), &gate));
    match guard.commit_response(tx, (StatusCode::CREATED, body).into_response()).await {
        Ok(response) => response,
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn with_guard<S: Sql>(world: &World<S>, gate: &Gate) -> String {
    let route = Route { mode: Mode::Bridged, ..edge() };
    let layer = IdempotencyLayer::new(&world.engine, Endpoint::raw("put", route)).unwrap();
    let router = Router::new().route("/put", route_post(guarded::<S>)).route_layer(layer);
    serve(router.with_state(App(world.store.clone(), gate.clone()))).await + "/put"
}

async fn in_time(request: reqwest::RequestBuilder) -> Http {
    tokio::time::timeout(SOON, send(request)).await.expect("no body holds the request for ever")
}

// The test waits for the end of the completion budget. It bounds each statement too, so a shorter
// one than the default would ask how fast the machine is. Shown by: reading without a bound (the
// request, its transaction and its place never end); storing what came before the error as the
// answer.
async fn o2_a_guard_takes_back_what_it_cannot_answer_with_and_its_key_runs_again<S: Sql>(world: World<S>) {
    let gate = Gate::closed();
    let url = with_guard(&world, &gate).await;
    for (number, told, why) in
        [(0, "stream", "a stream"), (1, "stalls", "did not end within 5s"), (2, "fails", "failed")]
    {
        let key = format!("key-000000000000000{number}");
        let refused = in_time(post(&url, &key, "{}").header("test-body", told)).await;
        let text = String::from_utf8(refused.body.clone()).unwrap();
        assert_eq!(refused.status, 500, "{text}");
        assert!(text.contains(why) && text.ends_with("the guard committed nothing"), "{text}");
        assert_eq!(world.effects().await, number, "{told}");
        assert_eq!(world.record("t1", &key).await.unwrap().state, Remembered::FailedRetryable, "{told}");
        let again = send(post(&url, &key, "{}")).await;
        assert_eq!((again.status, again.body.as_slice(), again.is_replayed()), (201, &b"whole"[..], false), "{told}");
        assert_eq!(world.effects().await, number + 1, "{told}");
    }
}

// Shown by: taking every such end for a rollback: the key runs again, and the effect is there
// twice.
async fn o2_a_guard_that_cannot_read_its_answer_does_not_free_a_key_whose_transaction_was_committed<S: Sql>(
    world: World<S>,
) {
    let gate = Gate::closed();
    let url = with_guard(&world, &gate).await;
    let refused = in_time(post(&url, K1, "{}").header("test-body", "fails").header("test-commits", "1")).await;
    assert_eq!(refused.status, 500, "{refused:?}");
    assert_eq!(world.record("t1", K1).await.unwrap().state, Remembered::UnknownRequiresRecovery);
    send(post(&url, K1, "{}")).await.is(Code::OutcomeUnknown);
    assert_eq!(world.effects().await, 1);
}

/// A route of the layer alone, whose answer has such a body.
async fn unguarded<S: Sql>(world: &World<S>, told: &'static str, gate: &Gate) -> String {
    let layer = IdempotencyLayer::new(&world.engine, Endpoint::raw("put", edge())).unwrap();
    let gate = gate.clone();
    let handler = move || {
        let gate = gate.clone();
        async move { (StatusCode::CREATED, body(told, &gate)) }
    };
    serve(Router::new().route("/put", route_post(handler)).route_layer(layer)).await + "/put"
}

// Shown by: an empty body in place of the one that failed: the first client takes it for the
// answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m68_an_answer_whose_body_fails_is_cut_off_and_leaves_a_tombstone() {
    let world = sqlite().await;
    let url = unguarded(&world, "fails", &Gate::open()).await;
    // The server may break off before or after the head of its answer.
    let cut_off = async { post(&url, K1, "{}").send().await?.bytes().await };
    cut_off.await.unwrap_err();
    send(post(&url, K1, "{}")).await.is(Code::ResultNotRetained);
    assert_eq!(world.record("t1", K1).await.unwrap().state, Remembered::Completed);
}

// Shown by: waiting for the end of the body without a bound (the claim never gets its outcome);
// cutting the client's answer off at the bound.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m68_an_answer_whose_body_is_slow_is_sent_whole_and_its_outcome_waits_for_no_body() {
    let (world, gate) = (sqlite().await, Gate::closed());
    let url = unguarded(&world, "stalls", &gate).await;
    let answer = tokio::spawn(send(post(&url, K1, "{}")));
    world.completes(K1).await;
    gate.let_go();
    let answer = answer.await.unwrap();
    assert_eq!((answer.status, answer.body.as_slice()), (201, &b"begun and ended"[..]));
    send(post(&url, K1, "{}")).await.is(Code::ResultNotRetained);
}
