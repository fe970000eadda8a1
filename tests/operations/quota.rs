//! The quotas of a tenant, on stored bytes and on what runs: what would run for the first time is
//! refused, and nothing else (M120, O29).

use std::sync::atomic::Ordering;
use std::time::Duration;

use oncebox::http::idempotency::IdempotencyLayer;
use oncebox::operation::{Code, Endpoint, Engine, EngineOptions, Route};

use super::faulty::{Faults, Faulty};
use super::kit::*;
use super::layer::{edge, layered};
use super::policies::short;

on_all! {
    m120_a_tenant_with_its_bytes_used_up_runs_nothing_new,
    m120_a_key_whose_time_is_over_runs_anew_only_within_the_quota,
    m120_over_http_a_full_tenant_gets_429_for_what_is_new_and_its_answers_for_the_rest,
}

/// A process whose tenants may have so many bytes stored.
fn bounded<S: Sql>(world: &World<S>, bytes: u64) -> World<S> {
    world.process(EngineOptions { stored_bytes_per_tenant_max: Some(bytes), ..EngineOptions::default() })
}

// Shown by: refusing nothing; counting all tenants together; asking before the key is looked for;
// claims unseen with a quota.
async fn m120_a_tenant_with_its_bytes_used_up_runs_nothing_new<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    first(run(&world, &world.protect(same_tx()), K1, "a", effect(&gate)).await);
    let stored = world.store.stored_of_tenant("t1").await.unwrap();
    let full = bounded(&world, stored);
    let endpoint = full.protect(same_tx());
    let over = problem(run(&full, &endpoint, K2, "a", effect(&gate)).await, Code::QuotaExceeded);
    assert_eq!((over.status, gate.calls(), world.record("t1", K2).await), (429, 1, None));
    assert!(over.retry_after.is_some_and(|seconds| seconds >= 30) && over.detail.is_some(), "{over:?}");
    replayed(run(&full, &endpoint, K1, "a", effect(&gate)).await);
    problem(run(&full, &endpoint, K1, "b", effect(&gate)).await, Code::KeyReused);
    first(run_as("t2:p1", &full, &endpoint, K2, "a", effect(&gate)).await);
    // A first request makes the next one probably a first one too, which is claimed without a look:
    // it is counted all the same.
    problem(run(&full, &endpoint, &format!("{K2}-third"), "a", effect(&gate)).await, Code::QuotaExceeded);
    // The key is not burnt; one byte more is enough for the next one.
    let roomy = bounded(&world, stored + 1);
    let endpoint = roomy.protect(same_tx());
    first(run(&roomy, &endpoint, K2, "a", effect(&gate)).await);
    assert_eq!(gate.calls(), 3);
}

// Shown by: refusing claims of new keys only.
async fn m120_a_key_whose_time_is_over_runs_anew_only_within_the_quota<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let short = short(Duration::from_millis(50));
    first(run(&world, &world.protect(short.clone()), K1, "a", effect(&gate)).await);
    world.expires(K1).await;
    let next = world.another_process();
    first(run(&next, &next.protect(same_tx()), K2, "a", effect(&gate)).await);
    let stored = world.store.stored_of_tenant("t1").await.unwrap();
    let full = bounded(&world, stored);
    problem(run(&full, &full.protect(short.clone()), K1, "a", effect(&gate)).await, Code::QuotaExceeded);
    let roomy = bounded(&world, stored + 1);
    first(run(&roomy, &roomy.protect(short), K1, "a", effect(&gate)).await);
    assert_eq!(gate.calls(), 3);
}

// Shown by: refusing nothing; storing the refused one; refusing before the key is looked for.
async fn m120_over_http_a_full_tenant_gets_429_for_what_is_new_and_its_answers_for_the_rest<S: Sql>(world: World<S>) {
    let (open, held) = (Gate::open(), Gate::closed());
    let (lease, timeout) = (Duration::from_secs(120), Duration::from_secs(90));
    let endpoint = || Endpoint::raw("put", Route { lease, timeout, ..edge() });
    let url = layered(&world, endpoint(), &open).await;
    let one = send(post(&format!("{url}/put"), K1, "{}")).await;
    assert_eq!(one.status, 201);
    let slow = layered(&world.another_process(), endpoint(), &held).await;
    let running = tokio::spawn(send(post(&format!("{slow}/put"), K2, "{}")));
    held.begun().await;
    let stored = world.store.stored_of_tenant("t1").await.unwrap();
    let full = layered(&bounded(&world, stored), endpoint(), &open).await + "/put";
    let third = format!("{K2}-third");
    let over = send(post(&full, &third, "{}")).await;
    over.is(Code::QuotaExceeded);
    assert_eq!((over.header("idempotent-replayed"), over.json()["key_state"].as_str()), (None, Some("not_said")));
    assert_eq!(world.record("t1", &third).await, None);
    let again = send(post(&full, K1, "{}")).await;
    assert_eq!((again.status, again.is_replayed(), &again.body), (201, true, &one.body));
    send(post(&full, K1, r#"{"status":200}"#)).await.is(Code::KeyReused);
    send(post(&full, K2, "{}")).await.is(Code::InProgress);
    assert_eq!(send(post(&full, &third, "{}").header("test-scope", "t2:p1")).await.status, 201);
    held.let_go();
    assert_eq!(running.await.unwrap().status, 201);
    until("it is replayed", || async { send(post(&full, K2, "{}")).await.is_replayed() }).await;
    assert_eq!((open.calls(), held.calls()), (2, 1));
}

// Shown by: counting what runs before the store is asked, and not where the run is entered (both of
// them run).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o29_of_requests_that_come_at_once_no_more_run_than_the_quota_allows() {
    let (world, gate) = (sqlite().await, Gate::closed());
    let store = Faulty { inner: world.store.clone(), faults: std::sync::Arc::new(Faults::default()) };
    let engine = Engine::new(store.clone(), EngineOptions { open_per_tenant_max: Some(1), ..EngineOptions::default() });
    let layer = IdempotencyLayer::new(&engine, Endpoint::raw("put", edge())).unwrap();
    let url = serve(gated(&gate, "done").route_layer(layer)).await + "/put";
    // Each was told that nothing runs and that nothing is open, and none has begun.
    store.faults.opens_wait.store(true, Ordering::SeqCst);
    let ask = |key: &str| tokio::time::timeout(SOON, send(post(&url, key, "{}")));
    let (one, two) = (tokio::spawn(ask(K1)), tokio::spawn(ask(K2)));
    until("both have counted", || async { store.faults.opens.load(Ordering::SeqCst) == 2 }).await;
    store.faults.opens_wait.store(false, Ordering::SeqCst);
    let (refused, runs) = futures_util::future::select(one, two).await.into_inner();
    refused.unwrap().expect("one is refused while the other runs").is(Code::QuotaExceeded);
    gate.begun().await;
    gate.let_go();
    assert_eq!((runs.await.unwrap().unwrap().status, gate.calls()), (201, 1));
}

// Shown by: asking before each claim; letting pass what cannot be counted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m120_m60_the_store_is_asked_now_and_then_and_one_that_cannot_say_runs_nothing() {
    let world = sqlite().await;
    let store = Faulty { inner: world.store.clone(), faults: std::sync::Arc::new(Faults::default()) };
    let gate = Gate::open();
    let serving = async || {
        let engine = Engine::new(
            store.clone(),
            EngineOptions { stored_bytes_per_tenant_max: Some(1 << 20), ..EngineOptions::default() },
        );
        let layer = IdempotencyLayer::new(&engine, Endpoint::raw("put", edge())).unwrap();
        serve(gated(&gate, "done").route_layer(layer)).await + "/put"
    };
    let url = serving().await;
    for key in 0..20 {
        assert_eq!(send(post(&url, &format!("{K1}-{key}"), "{}")).await.status, 201);
    }
    let asked = store.faults.stored.load(Ordering::SeqCst);
    // Now and then five seconds may have passed on a busy machine.
    assert!((1..20).contains(&asked), "{asked}");
    store.faults.stored_away.store(true, Ordering::SeqCst);
    let url = serving().await;
    send(post(&url, K2, "{}")).await.is(Code::StoreUnavailable);
    assert!(send(post(&url, &format!("{K1}-0"), "{}")).await.is_replayed());
    assert_eq!((gate.calls(), world.record("t1", K2).await), (20, None));
    store.faults.stored_away.store(false, Ordering::SeqCst);
    assert_eq!(send(post(&url, K2, "{}")).await.status, 201);
}
