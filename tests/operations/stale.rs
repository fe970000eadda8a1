//! Claims whose process died and whose client never returns: a sweep ends them, by their mode (O1,
//! O2, O11). Nothing but the sweep asks for their keys.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use oncebox::operation::{Code, Endpoint, Engine, EngineOptions, Mode, Reconciled, Registered, Reply, Route, State};
use oncebox::store::{ActContext, Basis, KeyChange, RunOutcome};
use oncebox::{HandlerError, StoreError};

use super::faulty::{Faults, Faulty};
use super::kit::*;
use super::layer::{edge, layered};

on_all! {
    o11_a_client_that_never_returns_leaves_no_open_record,
    o11_a_claim_that_nobody_drives_is_reconciled_without_its_client,
    o11_an_unknown_outcome_is_asked_for_again_without_its_client,
    o11_what_was_left_alone_for_longest_is_asked_for_first,
    o11_a_route_whose_provider_hangs_holds_up_no_other,
    o11_a_route_that_fails_panics_or_hangs_leaves_the_outcome_unknown,
    o11_a_claim_that_cannot_be_read_hides_no_other,
    o11_a_purge_that_meets_a_lock_leaves_no_claim_open,
    o1_a_committed_claim_without_its_client_becomes_unknown,
    o11_an_operator_resolves_a_claim_that_nobody_drives,
}

/// Leaves a claim behind whose lease is over, as a process does that dies.
async fn left<S: Sql>(world: &World<S>, endpoint: &Registered, key: &str, mode: Mode) {
    world.is_left_behind(&claim(endpoint, key, mode, Duration::from_millis(1))).await;
}

/// The database's time so many minutes ago.
fn ago<S: Sql>(minutes: i32) -> String {
    match S::NAME {
        "sqlite" => format!("cast(strftime('%s', 'now') as integer) * 1000 - {minutes} * 60000"),
        "postgres" => format!("clock_timestamp() - interval '{minutes} minutes'"),
        _ => format!("utc_timestamp(6) - interval {minutes} minute"),
    }
}

async fn state<S: Sql>(world: &World<S>, key: &str) -> Option<State> {
    world.record("t1", key).await.map(|record| record.state)
}

// Shown by: a sweep that does not look at open records (both stay IN_PROGRESS, and the tenant gets
// 429 for ever); one that does not look at their leases.
async fn o11_a_client_that_never_returns_leaves_no_open_record<S: Sql>(world: World<S>) {
    let engine =
        Engine::new(world.store.clone(), EngineOptions { open_per_tenant_max: Some(3), ..EngineOptions::default() });
    let world = World { engine, ..world };
    let endpoint = world.protect(edge());
    let lives = claim(&endpoint, "key-that-lives-0001", Mode::Edge, SOON);
    assert!(world.store.claim(&lives, Basis::New).await.unwrap().is_some());
    left(&world, &endpoint, K1, Mode::Edge).await;
    left(&world, &endpoint, K2, Mode::Bridged).await;
    let stands = world.store.operation_stats().await.unwrap();
    assert_eq!((stands.in_progress, stands.unknown), (3, 0));
    assert_eq!(world.store.open_of_tenant("t1").await.unwrap(), 3);
    let url = layered(&world, Endpoint::raw("other", edge()), &Gate::open()).await + "/put";
    send(post(&url, K1, "{}")).await.is(Code::QuotaExceeded);
    assert_eq!(world.engine.sweep(100).await.unwrap(), 0, "nothing was forgotten");
    let stands = world.store.operation_stats().await.unwrap();
    assert_eq!((stands.in_progress, stands.unknown), (1, 1));
    assert_eq!(state(&world, K1).await, Some(State::UnknownRequiresRecovery));
    assert_eq!(state(&world, K2).await, None, "nothing of it happened");
    assert_eq!(state(&world, "key-that-lives-0001").await, Some(State::InProgress));
    assert_eq!(world.store.open_of_tenant("t1").await.unwrap(), 2);
    assert_eq!(send(post(&url, K1, "{}")).await.status, 201, "the tenant may go on");
    let epoch = world.record("t1", K1).await.map(|record| record.epoch);
    world.engine.sweep(100).await.unwrap();
    assert_eq!(world.record("t1", K1).await.map(|record| record.epoch), epoch, "it is marked once");
}

// Shown by: marking every edge claim unknown; a page without its limit.
async fn o11_a_claim_that_nobody_drives_is_reconciled_without_its_client<S: Sql>(world: World<S>) {
    let asked = Gate::open();
    let asks = asked.clone();
    let endpoint = Endpoint::typed::<Put>(Route { reconciles: true, ..edge() }).reconciled_by(move |run| {
        let asks = asks.clone();
        Box::pin(async move {
            asks.pass().await;
            assert_eq!(run.identity.tenant(), "t1");
            Ok(if asks.calls() == 1 { Reconciled::Completed(Reply::json(201, &"found")?) } else { Reconciled::Unknown })
        })
    });
    let endpoint = world.engine.protect(endpoint).unwrap();
    left(&world, &endpoint, K1, Mode::Edge).await;
    left(&world, &endpoint, K2, Mode::Edge).await;
    for calls in [1, 2, 2] {
        world.engine.sweep(1).await.unwrap();
        assert_eq!(asked.calls(), calls);
    }
    let mut ends = [state(&world, K1).await, state(&world, K2).await];
    ends.sort_by_key(|state| state.map(State::as_str));
    assert_eq!(ends, [Some(State::Completed), Some(State::UnknownRequiresRecovery)]);
}

// Shown by: a sweep that reads claims in progress only (nobody asks again); one that asks each
// time; a pause that does not grow, or that grows without a bound; one that ends only when a clock
// that went back has caught up.
async fn o11_an_unknown_outcome_is_asked_for_again_without_its_client<S: Sql>(world: World<S>) {
    let asked = Gate::open();
    let asks = asked.clone();
    let endpoint = Endpoint::typed::<Put>(Route { reconciles: true, ..edge() }).reconciled_by(move |_| {
        let asks = asks.clone();
        Box::pin(async move {
            asks.pass().await;
            Ok(if asks.calls() == 4 { Reconciled::Completed(Reply::json(201, &"found")?) } else { Reconciled::Unknown })
        })
    });
    let endpoint = world.engine.protect(endpoint).unwrap();
    left(&world, &endpoint, K1, Mode::Edge).await;
    world.engine.sweep(10).await.unwrap();
    assert_eq!((asked.calls(), state(&world, K1).await), (1, Some(State::UnknownRequiresRecovery)));
    world.engine.sweep(10).await.unwrap();
    assert_eq!(asked.calls(), 1, "at most once in a lease");
    // So many minutes ago the key was claimed, and the route was asked last; at the end before the
    // clock went back.
    for (claimed, last, calls) in [(40, 10, 1), (15, 10, 2), (600, 50, 2), (600, 70, 3), (600, -70, 4)] {
        let set = format!("created_at = {}, updated_at = {}", ago::<S>(claimed), ago::<S>(last));
        world.store.exec(&format!("update {}idempotency_request set {set}", S::PREFIX)).await;
        world.engine.sweep(10).await.unwrap();
        assert_eq!(asked.calls(), calls, "claimed {claimed} minutes ago, asked {last} minutes ago");
    }
    let record = world.record("t1", K1).await.unwrap();
    assert_eq!((record.state, record.attempts), (State::Completed, 1));
}

// The limit is one key, and both are due each time. Shown by: a page without an order (one key is
// asked for again and again, and the other one never).
async fn o11_what_was_left_alone_for_longest_is_asked_for_first<S: Sql>(world: World<S>) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let asks = Arc::clone(&asked);
    let endpoint = Endpoint::typed::<Put>(Route { reconciles: true, ..edge() }).reconciled_by(move |run| {
        asks.lock().unwrap().push(run.operation_id);
        Box::pin(async { Ok(Reconciled::Unknown) })
    });
    let endpoint = world.engine.protect(endpoint).unwrap();
    let mut expected = Vec::new();
    for key in [K1, K2] {
        left(&world, &endpoint, key, Mode::Edge).await;
        expected.push(world.record("t1", key).await.unwrap().operation_id);
    }
    world.engine.sweep(2).await.unwrap();
    asked.lock().unwrap().clear();
    let table = format!("{}idempotency_request", S::PREFIX);
    for (longest, other) in [(K1, K2), (K2, K1)] {
        for (key, minutes) in [(longest, 90), (other, 80)] {
            let digest: String = identity("t1", key).digest().iter().map(|byte| format!("{byte:02x}")).collect();
            let digest = if S::NAME == "postgres" { format!("'\\x{digest}'") } else { format!("x'{digest}'") };
            let set = format!("updated_at = {}", ago::<S>(minutes));
            world.store.exec(&format!("update {table} set {set} where key_digest = {digest}")).await;
        }
        world.engine.sweep(1).await.unwrap();
    }
    assert_eq!(*asked.lock().unwrap(), expected);
}

// Its lease is longer than the test waits. Shown by: asking for one route after the other.
async fn o11_a_route_whose_provider_hangs_holds_up_no_other<S: Sql>(world: World<S>) {
    let (hangs, answers) = (Gate::closed(), Gate::open());
    let route = || Route { reconciles: true, lease: SOON * 10, ..edge() };
    let asking = |endpoint: Endpoint, gate: &Gate| {
        let asks = gate.clone();
        endpoint.reconciled_by(move |_| {
            let asks = asks.clone();
            Box::pin(async move {
                asks.pass().await;
                Ok(Reconciled::Unknown)
            })
        })
    };
    let first = world.engine.protect(asking(Endpoint::typed::<Put>(route()), &hangs)).unwrap();
    let second = world.engine.protect(asking(Endpoint::raw("other", route()), &answers)).unwrap();
    left(&world, &first, K1, Mode::Edge).await;
    left(&world, &second, K2, Mode::Edge).await;
    let engine = world.engine.clone();
    let sweeps = tokio::spawn(async move { engine.sweep(10).await });
    hangs.begun().await;
    answers.begun().await;
    hangs.let_go();
    sweeps.await.unwrap().unwrap();
}

async fn o11_a_route_that_fails_panics_or_hangs_leaves_the_outcome_unknown<S: Sql>(world: World<S>) {
    let lease = Duration::from_secs(2);
    let route = Route { reconciles: true, lease, timeout: lease / 2, completion_budget: lease / 4, ..edge() };
    for (number, how) in ["fails", "panics", "panics before the future", "hangs"].into_iter().enumerate() {
        let asks = move |_| -> BoxFuture<'static, Result<Reconciled, HandlerError>> {
            assert_ne!(how, "panics before the future", "on purpose");
            Box::pin(async move {
                match how {
                    "fails" => Err(HandlerError::retryable("no")),
                    "panics" => panic!("on purpose"),
                    _ => std::future::pending().await,
                }
            })
        };
        let (next, endpoint) = world.deployed(Endpoint::typed::<Put>(route.clone()).reconciled_by(asks));
        let key = format!("key-000000000000000{number}");
        left(&next, &endpoint, &key, Mode::Edge).await;
        tokio::time::timeout(SOON, next.engine.sweep(10)).await.expect("it is given up").unwrap();
        assert_eq!(state(&next, &key).await, Some(State::UnknownRequiresRecovery), "{how}");
    }
}

// The limit is one claim, and the one that cannot be read is the oldest. Shown by: a page without
// room for what cannot be read (the other claim stays open).
async fn o11_a_claim_that_cannot_be_read_hides_no_other<S: Sql>(world: World<S>) {
    let endpoint = world.protect(edge());
    left(&world, &endpoint, K1, Mode::Edge).await;
    world.store.exec(&format!("update {}idempotency_request set principal = 'none'", S::PREFIX)).await;
    left(&world, &endpoint, K2, Mode::Edge).await;
    world.engine.sweep(1).await.unwrap();
    assert_eq!(state(&world, K2).await, Some(State::UnknownRequiresRecovery));
}

// Shown by: a sweep that ends with the first error of a purge (the claim stays open).
async fn o11_a_purge_that_meets_a_lock_leaves_no_claim_open<S: Sql>(world: World<S>) {
    let faults = Arc::new(Faults::default());
    let engine =
        Engine::new(Faulty { inner: world.store.clone(), faults: Arc::clone(&faults) }, EngineOptions::default());
    let endpoint = engine.protect(Endpoint::typed::<Put>(edge())).unwrap();
    left(&world, &endpoint, K1, Mode::Edge).await;
    faults.purge_busy.store(true, Ordering::SeqCst);
    let failed = engine.sweep(100).await.unwrap_err();
    assert!(matches!(failed, StoreError::Busy(_)), "it is said all the same: {failed}");
    assert_eq!(state(&world, K1).await, Some(State::UnknownRequiresRecovery));
}

/// Leaves the claim of a transactional operation that its handler committed, as the only record.
pub(crate) async fn committed_claim<S: Sql>(world: &World<S>, endpoint: &Registered, key: &str) {
    left(world, endpoint, key, Mode::Edge).await;
    let table = format!("{}idempotency_request", S::PREFIX);
    let length = if S::NAME == "sqlite" { "lease_ms" } else { "lease_seconds" };
    let set = format!("mode = 'same_tx', owner = null, lease_until = null, {length} = null");
    world.store.exec(&format!("update {table} set {set}")).await;
}

// Shown by: a sweep that looks at leases alone, which such a claim has not.
async fn o1_a_committed_claim_without_its_client_becomes_unknown<S: Sql>(world: World<S>) {
    let endpoint = world.protect(same_tx());
    committed_claim(&world, &endpoint, K1).await;
    world.engine.sweep(100).await.unwrap();
    let record = world.record("t1", K1).await.unwrap();
    assert_eq!((record.state, record.epoch), (State::UnknownRequiresRecovery, 2));
    problem(run(&world, &endpoint, K1, "a", effect(&Gate::open())).await, Code::OutcomeUnknown);
}

// Shown by: refusing what is IN_PROGRESS; marking it in a dry run; not asking for the lease.
async fn o11_an_operator_resolves_a_claim_that_nobody_drives<S: Sql>(world: World<S>) {
    let endpoint = world.protect(edge());
    let act = |dry_run| ActContext {
        actor: "on-call".to_owned(),
        reason: "the service is gone".to_owned(),
        dry_run,
        redrive_age_max: None,
    };
    let resolve = KeyChange::Resolve {
        outcome: Box::new(RunOutcome::FailedRetryable { error_code: None }),
        retention: endpoint.route().retention,
        against_evidence: false,
    };
    let lives = claim(&endpoint, "key-that-lives-0001", Mode::Edge, SOON);
    assert!(world.store.claim(&lives, Basis::New).await.unwrap().is_some());
    left(&world, &endpoint, K1, Mode::Edge).await;
    left(&world, &endpoint, K2, Mode::Bridged).await;
    for (key, why) in [("key-that-lives-0001", "its lease is over in"), (K2, "`Engine::sweep` frees the key")] {
        let seen = world.record("t1", key).await.unwrap();
        let refused = world.store.act_on_key(&seen, &resolve, &act(false)).await.unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
        assert_eq!(state(&world, key).await, Some(State::InProgress));
    }
    let seen = world.record("t1", K1).await.unwrap();
    let release = KeyChange::Release { against_evidence: false };
    let refused = world.store.act_on_key(&seen, &release, &act(false)).await.unwrap_err().to_string();
    assert!(refused.contains("it is resolved"), "{refused}");
    world.store.act_on_key(&seen, &resolve, &act(true)).await.unwrap();
    assert_eq!(world.record("t1", K1).await.as_ref(), Some(&seen), "a dry run");
    world.store.act_on_key(&seen, &resolve, &act(false)).await.unwrap();
    assert_eq!(state(&world, K1).await, Some(State::FailedRetryable));
}
