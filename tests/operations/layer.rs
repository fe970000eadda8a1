//! Edge operations over HTTP: what is remembered of a handler's end, and what a second request gets
//! (O2, O10, O11, M108).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Json, Request, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post as route_post};
use oncebox::http::idempotency::{IdempotencyLayer, Idempotent, OutcomeTag};
use oncebox::operation::{
    Code, Effects, Endpoint, Guard, GuardError, Mode, Outcome, Reconciled, Reply, Requirement, Route,
    State as Remembered,
};
use oncebox::store::{Bridged, KeyClaim};
use serde::Deserialize;

use super::kit::*;

on_all! {
    m108_a_second_request_gets_the_first_answer_and_its_headers,
    m69_answers_of_a_run_are_kept,
    m6_reads_are_not_protected_and_an_optional_key_may_be_missing,
    m73_a_rate_limit_is_no_outcome_and_the_key_runs_later,
    o10_what_was_called_and_not_seen_to_end_is_unknown,
    m47_a_retryable_failure_runs_again_and_a_replayable_one_does_not,
    o10_m70_what_the_extractor_refuses_frees_the_key_and_later_refusals_do_not,
    o10_the_engines_timeout_answers_409_and_does_not_end_the_handler,
    o11_a_stale_claim_becomes_unknown_and_is_not_run_again,
    o11_a_stale_claim_is_reconciled_where_the_route_can,
    o11_a_stale_claim_runs_again_where_that_is_declared_harmless,
    o2_a_guard_commits_effect_and_outcome_together_whatever_is_answered,
    o2_a_guard_stores_no_success_of_a_transaction_that_has_ended,
    o2_a_stale_guarded_claim_is_taken_over_and_the_late_owner_changes_nothing,
    o2_a_guard_that_lost_its_claim_commits_nothing,
}

/// The operation of the layer's tests has the name of the typed one, so that `identity` names its
/// records. The claim and the handler are within the timeout, on a machine that stands still for
/// seconds too.
pub(crate) fn edge() -> Route {
    Route::new(Mode::Edge)
}

#[derive(Clone)]
struct App<S> {
    store: S,
    gate: Gate,
}

/// What a handler is told to do by its body.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Told {
    #[serde(default)]
    status: Option<u16>,
    #[serde(default)]
    tag: Option<String>,
    #[serde(default)]
    panics: bool,
}

async fn obeys<S: Sql>(State(app): State<App<S>>, Idempotent(Json(told)): Idempotent<Json<Told>>) -> Response {
    app.store.exec("insert into effect (text) values ('x')").await;
    app.gate.pass().await;
    assert!(!told.panics, "on purpose");
    let status = StatusCode::from_u16(told.status.unwrap_or(201)).unwrap();
    let headers = [("location", "/effects/7"), ("set-cookie", "session=1"), ("x-request-id", "1")];
    let mut response = (status, headers, "{\"id\": 7}").into_response();
    response.headers_mut().append("link", "</a>; rel=a".parse().unwrap());
    response.headers_mut().append("link", "</b>; rel=b".parse().unwrap());
    let tag = match told.tag.as_deref() {
        Some("retryable") => Some(Outcome::Retryable(())),
        Some("rejected") => Some(Outcome::Rejected { answer: (), binding: true }),
        Some("dont_store") => Some(Outcome::DontStore(())),
        _ => None,
    };
    if let Some(tag) = tag {
        response.extensions_mut().insert(OutcomeTag(tag));
    }
    response
}

/// The layer around handlers that do as they are told.
pub(crate) async fn layered<S: Sql>(world: &World<S>, endpoint: Endpoint, gate: &Gate) -> String {
    let layer = IdempotencyLayer::new(&world.engine, endpoint).unwrap();
    serve(plain(world, gate).route_layer(layer)).await
}

/// The same handlers without a layer.
fn plain<S: Sql>(world: &World<S>, gate: &Gate) -> Router {
    Router::new()
        .route("/put", route_post(obeys::<S>))
        .route("/put/{id}", route_post(obeys::<S>))
        .route("/read", get(|| async { "read" }).options(|| async { "GET, HEAD, OPTIONS" }))
        .with_state(App { store: world.store.clone(), gate: gate.clone() })
}

// Shown by: a deny-list of headers; `insert` for repeated ones; no fingerprint of path parameters;
// a query that counts as it was decoded.
async fn m108_a_second_request_gets_the_first_answer_and_its_headers<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let url = layered(&world, Endpoint::raw("put", edge()), &gate).await;
    let one = send(post(&format!("{url}/put"), K1, "{}")).await;
    assert_eq!((one.status, one.is_replayed(), one.header("set-cookie")), (201, false, Some("session=1")));
    // The same request in other words.
    let two = send(post(&format!("{url}/put"), &format!("\"{K1}\""), " { } ")).await;
    assert_eq!((two.status, two.is_replayed(), &two.body), (201, true, &one.body));
    assert_eq!((two.header("set-cookie"), two.header("x-request-id")), (None, None));
    assert_eq!(two.header("location"), Some("/effects/7"));
    let links: Vec<_> = two.headers.get_all("link").iter().map(|value| value.to_str().unwrap()).collect();
    assert_eq!(links, ["</a>; rel=a", "</b>; rel=b"]);
    assert_eq!(two.header("content-length"), Some(two.body.len().to_string().as_str()));
    send(post(&format!("{url}/put"), K1, r#"{"status":200}"#)).await.is(Code::KeyReused);
    send(post(&format!("{url}/put?dry=1"), K1, "{}")).await.is(Code::KeyReused);
    send(post(&format!("{url}/put/7"), K2, "{}")).await;
    send(post(&format!("{url}/put/8"), K2, "{}")).await.is(Code::KeyReused);
    send(post(&format!("{url}/put"), K1, "{}").header("test-scope", "t1:p2")).await.is(Code::KeyReused);
    assert_eq!((gate.calls(), world.effects().await), (2, 2));
    // A handler may read the bytes of a query that are no UTF-8.
    send(post(&format!("{url}/put?x=%FF"), "key-000000000000query", "{}")).await;
    send(post(&format!("{url}/put?x=%FE"), "key-000000000000query", "{}")).await.is(Code::KeyReused);
    assert_eq!((gate.calls(), world.effects().await), (3, 3));
}

// Shown by: keeping 2xx only; releasing what was not found.
async fn m69_answers_of_a_run_are_kept<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let url = layered(&world, Endpoint::raw("put", edge()), &gate).await + "/put";
    for (calls, status) in (1..).zip([200, 201, 204, 303, 402, 404, 409, 410, 412, 423]) {
        let (key, body) = (format!("key-0000000000000{status}"), format!("{{\"status\":{status}}}"));
        let one = send(post(&url, &key, &body)).await;
        assert_eq!((one.status, one.is_replayed()), (status, false));
        let two = send(post(&url, &key, &body)).await;
        assert_eq!((two.status, two.is_replayed(), &two.body), (status, true, &one.body), "{status}");
        assert_eq!((gate.calls(), world.effects().await), (calls, i64::from(calls)), "{status}");
    }
}

// Shown to fail: without HEAD, and without OPTIONS, among the methods that the layer leaves alone.
async fn m6_reads_are_not_protected_and_an_optional_key_may_be_missing<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let url =
        layered(&world, Endpoint::raw("put", Route { requirement: Requirement::Optional, ..edge() }), &gate).await;
    let read = send(client().get(format!("{url}/read")).header("idempotency-key", "no key")).await;
    assert_eq!((read.status, read.body.as_slice()), (200, &b"read"[..]));
    for (method, body) in [(Method::HEAD, ""), (Method::OPTIONS, "GET, HEAD, OPTIONS")] {
        let request = client().request(method.clone(), format!("{url}/read")).header("idempotency-key", "no key");
        let read = send(request).await;
        assert_eq!((read.status, read.body.as_slice()), (200, body.as_bytes()), "{method}");
    }
    for _ in 0..2 {
        let plain = client().post(format!("{url}/put")).header("content-type", "application/json").body("{}");
        assert!(!send(plain).await.is_replayed());
    }
    assert_eq!(gate.calls(), 2);
    send(post(&format!("{url}/put"), "no key", "{}")).await.is(Code::KeyInvalid);
    send(post(&format!("{url}/put"), K1, "{}").header("test-scope", "none")).await.is(Code::ScopeRequired);
}

/// A limiter around a router: it refuses while it is full, and tags its answer.
fn limited(router: Router, full: &Arc<AtomicBool>, tag: Option<Outcome<()>>) -> Router {
    let full = Arc::clone(full);
    router.layer(from_fn(move |request: Request, next: Next| {
        let (is_full, tag) = (full.load(Ordering::SeqCst), tag.clone());
        async move {
            if !is_full {
                return next.run(request).await;
            }
            let mut refused = StatusCode::TOO_MANY_REQUESTS.into_response();
            if let Some(tag) = tag {
                refused.extensions_mut().insert(OutcomeTag(tag));
            }
            refused
        }
    }))
}

// Outside of the layer a limiter needs no tag, inside it says that nothing was done. Shown to fail:
// without the tag inside (the key is UNKNOWN); with `DontStore` settled as a binding refusal.
async fn m73_a_rate_limit_is_no_outcome_and_the_key_runs_later<S: Sql>(world: World<S>) {
    let (gate, full) = (Gate::open(), Arc::new(AtomicBool::new(true)));
    let layer = || IdempotencyLayer::new(&world.engine, Endpoint::raw("put", edge())).unwrap();
    let outside = limited(plain(&world, &gate).route_layer(layer()), &full, None);
    let inside = limited(plain(&world, &gate), &full, Some(Outcome::DontStore(()))).route_layer(layer());
    for (router, key, calls) in [(outside, K1, 1), (inside, K2, 2)] {
        let url = serve(router).await + "/put";
        full.store(true, Ordering::SeqCst);
        assert_eq!(send(post(&url, key, "{}")).await.status, 429);
        assert_eq!((world.record("t1", key).await, gate.calls()), (None, calls - 1));
        full.store(false, Ordering::SeqCst);
        let one = send(post(&url, key, "{}")).await;
        let two = send(post(&url, key, "{}")).await;
        assert_eq!((one.status, one.is_replayed(), two.status, two.is_replayed()), (201, false, 201, true));
        assert_eq!(gate.calls(), calls);
    }
}

// Shown by: releasing 429 and 408, or 5xx as "retryable" (M118: then a failure after the effect has
// happened runs it twice).
async fn o10_what_was_called_and_not_seen_to_end_is_unknown<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let url = layered(&world, Endpoint::raw("put", edge()), &gate).await + "/put";
    let mut calls = 0;
    for status in [408, 425, 429, 500, 501, 502, 503, 505] {
        let key = format!("{K1}-{status}");
        let body = format!("{{\"status\":{status}}}");
        assert_eq!(send(post(&url, &key, body.as_str())).await.status, status);
        send(post(&url, &key, body.as_str())).await.is(Code::OutcomeUnknown);
        calls += 1;
        assert_eq!(gate.calls(), calls, "{status}");
    }
    send(post(&url, K1, r#"{"panics":true}"#)).await.is(Code::OutcomeUnknown);
    send(post(&url, K1, r#"{"panics":true}"#)).await.is(Code::OutcomeUnknown);
    assert_eq!(gate.calls(), calls + 1);
    for (tag, state) in [("retryable", Remembered::FailedRetryable), ("rejected", Remembered::FailedReplayable)] {
        let key = format!("{K1}-{tag}");
        let body = format!("{{\"status\":503,\"tag\":\"{tag}\"}}");
        let one = send(post(&url, &key, body.as_str())).await;
        assert_eq!(world.record("t1", &key).await.unwrap().state, state);
        let again = send(post(&url, &key, body.as_str())).await;
        assert_eq!((one.status, again.status, again.is_replayed()), (503, 503, tag == "rejected"));
        assert_eq!(one.header("retry-after").is_some(), tag == "retryable");
    }
    let key = format!("{K1}-dont");
    send(post(&url, &key, r#"{"status":503,"tag":"dont_store"}"#)).await;
    assert_eq!(world.record("t1", &key).await, None);
}

// Shown to fail: with a retryable end finished as FAILED_REPLAYABLE (1 run of 3), and a binding
// refusal as FAILED_RETRYABLE (3 runs).
async fn m47_a_retryable_failure_runs_again_and_a_replayable_one_does_not<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let url = layered(&world, Endpoint::raw("put", edge()), &gate).await + "/put";
    for (key, tag, runs) in [(K1, "retryable", 3), (K2, "rejected", 1)] {
        let (body, before) = (format!(r#"{{"status":503,"tag":"{tag}"}}"#), gate.calls());
        let mut answers = Vec::new();
        for _ in 0..3 {
            answers.push(send(post(&url, key, body.as_str())).await);
        }
        assert_eq!(gate.calls() - before, runs, "{tag}");
        assert!(answers.iter().all(|answer| answer.status == 503 && answer.body == answers[0].body));
        let replayed = answers.iter().filter(|answer| answer.is_replayed()).count();
        assert_eq!(replayed, if tag == "rejected" { 2 } else { 0 });
    }
}

// Shown by: storing extractor rejections (pitfall 16); freeing the key after the handler began.
async fn o10_m70_what_the_extractor_refuses_frees_the_key_and_later_refusals_do_not<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let url = layered(&world, Endpoint::raw("put", edge()), &gate).await + "/put";
    let typo = send(post(&url, K1, r#"{"statsu":201}"#)).await;
    assert_eq!((typo.status, gate.calls()), (422, 0));
    assert_eq!(world.record("t1", K1).await, None);
    let mended = send(post(&url, K1, r#"{"status":201}"#)).await;
    assert_eq!((mended.status, mended.is_replayed()), (201, false), "the corrected body under the same key");
    for status in [400, 403, 422, 402, 404, 409] {
        let key = format!("{K1}-{status}");
        let body = format!("{{\"status\":{status}}}");
        let one = send(post(&url, &key, body.as_str())).await;
        let two = send(post(&url, &key, body.as_str())).await;
        assert_eq!((one.status, two.status, two.is_replayed()), (status, status, true));
    }
    assert_eq!(gate.calls(), 7);
}

// Shown by: dropping the handler at the timeout; a second run beside the first.
async fn o10_the_engines_timeout_answers_409_and_does_not_end_the_handler<S: Sql>(world: World<S>) {
    let gate = Gate::closed();
    let route = Route { timeout: Duration::from_millis(100), ..edge() };
    let url = layered(&world, Endpoint::raw("put", route), &gate).await + "/put";
    send(post(&url, K1, "{}")).await.is(Code::InProgress);
    send(post(&url, K1, "{}")).await.is(Code::InProgress);
    send(post(&url, K1, r#"{"status":200}"#)).await.is(Code::KeyReused);
    gate.let_go();
    until("it ended", || async { send(post(&url, K1, "{}")).await.status == 201 }).await;
    assert!(send(post(&url, K1, "{}")).await.is_replayed());
    assert_eq!((gate.calls(), world.effects().await), (1, 1));
}

/// The stored fingerprint of `POST /put` with the JSON body `{}`.
const POST_PUT: &str = "1:sha256:c5064f61b7cc54c0597fc1ca96b4a9c8a55a433c395a27b9ceeda1c5edb92668";

/// A claim for `POST /put` of a process that died after it, whatever its handler did.
async fn left_behind<S: Sql>(world: &World<S>, mode: Mode) {
    let endpoint = world.another_process().protect(Route::new(mode));
    let claim = claim(&endpoint, K1, mode, Duration::from_millis(1));
    world.is_left_behind(&KeyClaim { fingerprint: POST_PUT.parse().unwrap(), ..claim }).await;
}

// Shown by: taking a stale claim over (M118: blind re-execution); deriving a failure from age.
async fn o11_a_stale_claim_becomes_unknown_and_is_not_run_again<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let url = layered(&world, Endpoint::raw("put", edge()), &gate).await + "/put";
    left_behind(&world, Mode::Edge).await;
    for _ in 0..3 {
        let unknown = send(post(&url, K1, "{}")).await;
        assert_eq!(unknown.is(Code::OutcomeUnknown).header("retry-after"), Some("30"));
    }
    send(post(&url, K1, r#"{"status":200}"#)).await.is(Code::KeyReused);
    assert_eq!(gate.calls(), 0);
    let record = world.record("t1", K1).await.unwrap();
    assert_eq!((record.state, record.epoch), (Remembered::UnknownRequiresRecovery, 2), "marked once");
}

// Shown by: asking in each request; running the handler after "it happened".
async fn o11_a_stale_claim_is_reconciled_where_the_route_can<S: Sql>(world: World<S>) {
    let (gate, asked) = (Gate::open(), Gate::open());
    let asks = asked.clone();
    let endpoint = Endpoint::raw("put", Route { reconciles: true, ..edge() }).reconciled_by(move |run| {
        let asks = asks.clone();
        Box::pin(async move {
            asks.pass().await;
            assert_eq!(run.identity.tenant(), "t1");
            Ok(if asks.calls() == 1 { Reconciled::Unknown } else { Reconciled::Completed(Reply::json(201, &"found")?) })
        })
    });
    let url = layered(&world, endpoint, &gate).await + "/put";
    left_behind(&world, Mode::Edge).await;
    send(post(&url, K1, "{}")).await.is(Code::RecoveryPending);
    until("it is found out", || async { send(post(&url, K1, "{}")).await.status == 201 }).await;
    let found = send(post(&url, K1, "{}")).await;
    assert_eq!((found.is_replayed(), found.body.as_slice()), (true, &b"\"found\""[..]));
    assert_eq!((gate.calls(), asked.calls()), (0, 2), "the handler never ran, and nobody was asked again");
}

// In two processes.
async fn o11_a_stale_claim_runs_again_where_that_is_declared_harmless<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let endpoint = || Endpoint::raw("put", Route { effects: Effects::Repeatable, ..edge() });
    let one = layered(&world, endpoint(), &gate).await + "/put";
    let two = layered(&world.another_process(), endpoint(), &gate).await + "/put";
    left_behind(&world, Mode::Edge).await;
    let mut twenty = tokio::task::JoinSet::new();
    for url in [&one, &two].into_iter().cycle().take(20) {
        let url = url.clone();
        twenty.spawn(async move { send(post(&url, K1, "{}")).await });
    }
    for answer in twenty.join_all().await {
        assert!(answer.status == 201 || answer.code() == "IDEMPOTENCY_REQUEST_IN_PROGRESS", "{answer:?}");
    }
    assert_eq!((gate.calls(), world.effects().await), (1, 1), "of twenty that take it over one wins");
    let record = world.record("t1", K1).await.unwrap();
    assert_eq!((record.state, record.epoch), (Remembered::Completed, 2));
}

/// Commits with the guard, then a layer inside answers something else, or it commits once more.
async fn guarded<S: Sql>(State(app): State<App<S>>, guard: Guard<S>, headers: HeaderMap) -> Response {
    app.gate.pass().await;
    let mut tx = app.store.tx("insert into effect (text) values ('guarded')").await;
    if headers.contains_key("test-ends") {
        S::run(&mut tx, "rollback").await.unwrap();
    }
    let response = (StatusCode::CREATED, [("location", "/effects/9")], "committed").into_response();
    match guard.commit_response(tx, response).await {
        Ok(_) if headers.contains_key("test-again") => {
            let tx = app.store.tx("insert into effect (text) values ('again')").await;
            let again = guard.commit_response(tx, StatusCode::CREATED.into_response()).await;
            assert!(matches!(again, Err(GuardError::Again)), "{again:?}");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
        Ok(_) if headers.contains_key("test-spoils") => StatusCode::REQUEST_TIMEOUT.into_response(),
        Ok(response) => response,
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn with_guard<S: Sql>(world: &World<S>, gate: &Gate, route: Route) -> String {
    let layer =
        IdempotencyLayer::new(&world.engine, Endpoint::raw("put", Route { mode: Mode::Bridged, ..route })).unwrap();
    let router = Router::new().route("/put", route_post(guarded::<S>)).route_layer(layer);
    serve(router.with_state(App { store: world.store.clone(), gate: gate.clone() })).await + "/put"
}

// Shown by: classifying what inner layers answered (axum's timeout said 408 with the effect done).
async fn o2_a_guard_commits_effect_and_outcome_together_whatever_is_answered<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let url = with_guard(&world, &gate, edge()).await;
    for (key, told) in [(K1, "test-is-good"), (K2, "test-spoils"), ("key-0000000000000003", "test-again")] {
        let one = send(post(&url, key, "{}").header(told, "1")).await;
        assert_eq!((one.status, one.body.as_slice(), one.is_replayed()), (201, &b"committed"[..], false));
        let two = send(post(&url, key, "{}")).await;
        assert_eq!((two.status, two.body.as_slice(), two.is_replayed()), (201, &b"committed"[..], true));
        assert_eq!(two.header("location"), Some("/effects/9"));
    }
    assert_eq!((gate.calls(), world.effects().await), (3, 3));
}

// Shown by: writing the outcome on a connection that is in no transaction any more: it commits by
// itself, without the effect. Nobody knows whether the handler ended its transaction by ROLLBACK or
// by COMMIT, so the key is not free either.
async fn o2_a_guard_stores_no_success_of_a_transaction_that_has_ended<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let url = with_guard(&world, &gate, edge()).await;
    let ended = send(post(&url, K1, "{}").header("test-ends", "1")).await;
    assert_eq!(ended.status, 500, "{ended:?}");
    assert_eq!(world.record("t1", K1).await.unwrap().state, Remembered::UnknownRequiresRecovery);
    assert_eq!(world.effects().await, 0);
}

// The late owner meets an outcome here, so the state alone refuses it. That epoch and token are
// compared too, `o2_an_owner_that_was_taken_over_changes_nothing` shows.
async fn o2_a_stale_guarded_claim_is_taken_over_and_the_late_owner_changes_nothing<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    left_behind(&world, Mode::Bridged).await;
    let stale = world.record("t1", K1).await.unwrap();
    let url = with_guard(&world, &gate, edge()).await;
    let one = send(post(&url, K1, "{}")).await;
    assert_eq!((one.status, one.is_replayed()), (201, false), "nothing had happened, so it runs");
    assert_eq!((gate.calls(), world.effects().await), (1, 1));
    // The first owner comes back with its transaction.
    let late = oncebox::store::Owned {
        identity: stale.identity.clone(),
        owner: Some(uuid::Uuid::now_v7()),
        epoch: stale.epoch,
        generation: stale.generation,
        operation_id: stale.operation_id,
        attempts: 1,
    };
    let mut tx = world.store.tx("insert into effect (text) values ('late')").await;
    let outcome = oncebox::store::RunOutcome::Unknown;
    let fenced = tx.finish_in(&late, &outcome, &edge().retention).await.unwrap();
    assert_eq!(fenced, oncebox::store::Fenced::LostOwnership);
    tx.rollback().await.unwrap();
    assert_eq!(world.effects().await, 1);
}

// The claim is taken over while its handler runs, before it begins its transaction.
async fn o2_a_guard_that_lost_its_claim_commits_nothing<S: Sql>(world: World<S>) {
    let (held, open) = (Gate::closed(), Gate::open());
    let url = with_guard(&world, &held, edge()).await;
    let late = tokio::spawn(send(post(&url, K1, "{}")));
    held.begun().await;
    let ends = format!("update {}idempotency_request set lease_until = {}", S::PREFIX, long_ago::<S>());
    world.store.exec(&ends).await;
    let other = with_guard(&world.another_process(), &open, edge()).await;
    let one = send(post(&other, K1, "{}")).await;
    assert_eq!((one.status, one.is_replayed()), (201, false), "{one:?}");
    held.let_go();
    late.await.unwrap().is(Code::ResultNotStored);
    let again = send(post(&url, K1, "{}")).await;
    assert_eq!((again.status, again.is_replayed(), &again.body), (201, true, &one.body));
    let record = world.record("t1", K1).await.unwrap();
    assert_eq!((record.state, record.epoch, record.attempts), (Remembered::Completed, 2, 2));
    assert_eq!((held.calls(), open.calls(), world.effects().await), (1, 1, 1));
}

// Shown by: counting the parameters of the path alone, of which a fallback has none: `/b` is
// answered with what `/a` did.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m23_pitfall_24_the_path_counts_where_no_route_says_parameters() {
    let world = sqlite().await;
    let layer = IdempotencyLayer::new(&world.engine, Endpoint::raw("put", edge())).unwrap();
    let inner = Router::new().fallback(|| async { (StatusCode::CREATED, "done") }).layer(layer);
    let url = serve(Router::new().nest_service("/in", inner)).await;
    assert_eq!(send(post(&format!("{url}/in/a"), K1, "{}")).await.status, 201);
    send(post(&format!("{url}/in/b"), K1, "{}")).await.is(Code::KeyReused);
    assert!(send(post(&format!("{url}/in/a"), K1, "{}")).await.is_replayed());
}

/// A body of this length, or a stream without one.
pub(crate) fn body_of(length: usize, streams: bool) -> Body {
    let bytes = vec![b'a'; length];
    if !streams {
        return Body::from(bytes);
    }
    let chunks = bytes.chunks(1_000).map(|chunk| Ok::<_, std::io::Error>(chunk.to_vec())).collect::<Vec<_>>();
    Body::from_stream(futures_util::stream::iter(chunks))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m68_streams_and_long_answers_leave_tombstones_and_never_run_twice() {
    let world = sqlite().await;
    let gate = Gate::open();
    let layer = IdempotencyLayer::new(&world.engine, Endpoint::raw("put", edge())).unwrap();
    let handler = |length: usize, streams: bool| {
        let gate = gate.clone();
        route_post(move || {
            let gate = Arc::new(gate.clone());
            async move {
                gate.pass().await;
                (StatusCode::CREATED, body_of(length, streams))
            }
        })
    };
    let router = Router::new()
        .route("/stream", handler(5_000, true))
        .route("/long", handler(300 << 10, false))
        .route("/limit", handler(256 << 10, false))
        .route_layer(layer);
    let url = serve(router).await;
    for (path, length, kept) in [("stream", 5_000, false), ("long", 300 << 10, false), ("limit", 256 << 10, true)] {
        let (url, key) = (format!("{url}/{path}"), format!("{K1}-{path}"));
        let one = send(post(&url, &key, "{}")).await;
        assert_eq!((one.status, one.body.len(), one.is_replayed()), (201, length, false), "{path}");
        let two = send(post(&url, &key, "{}")).await;
        assert!(two.is_replayed(), "{path}");
        if kept {
            assert_eq!((two.status, two.body.len()), (201, length));
        } else {
            two.is(Code::ResultNotRetained);
        }
    }
    assert_eq!(gate.calls(), 3);
}
