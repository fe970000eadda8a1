//! Edge operations when the store fails: nothing is said that is not remembered, and nothing runs
//! that cannot be claimed (O12, M60).

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use oncebox::http::idempotency::IdempotencyLayer;
use oncebox::operation::{
    Asking, Code, EdgeAnswer, Effects, Ended, Endpoint, Engine, EngineOptions, Kept, Mode, Reply, Route, State,
};
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Fenced, Keys};

use super::faulty::{Faults, Faulty};
use super::kit::*;
use super::layer::edge;

struct Stage {
    world: World<SqliteStore>,
    store: Faulty<SqliteStore>,
    gate: Gate,
    url: String,
}

async fn stage(gate: Gate, route: Route) -> Stage {
    stage_with(gate, route, Faults::default()).await
}

async fn stage_with(gate: Gate, route: Route, faults: Faults) -> Stage {
    let world = sqlite().await;
    let store = Faulty { inner: world.store.clone(), faults: std::sync::Arc::new(faults) };
    let engine = Engine::new(store.clone(), EngineOptions::default());
    let layer = IdempotencyLayer::new(&engine, Endpoint::raw("put", route)).unwrap();
    let url = serve(gated(&gate, "done").route_layer(layer)).await + "/put";
    Stage { world, store, gate, url }
}

/// A lease that a test waits for the end of. The claim is written, and an open handler ends, within
/// half of it: that is for the disk.
const SHORT: Duration = Duration::from_secs(6);

fn leased(lease: Duration) -> Route {
    Route { lease, timeout: lease / 2, completion_budget: lease / 4, ..edge() }
}

// Shown by: passing the request on when the store is away (pitfall 27).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m60_a_store_that_is_away_runs_nothing() {
    let Stage { world, store, gate, url } = stage(Gate::open(), edge()).await;
    for fault in [&store.faults.find, &store.faults.claim] {
        fault.store(true, Ordering::SeqCst);
        send(post(&url, K1, "{}")).await.is(Code::StoreUnavailable);
        assert_eq!(gate.calls(), 0);
        fault.store(false, Ordering::SeqCst);
    }
    assert_eq!(send(post(&url, K1, "{}")).await.status, 201, "the key was not burnt");
    assert_eq!(world.record("t1", K1).await.unwrap().state, State::Completed);
}

// Shown by: sending the answer that nobody will remember; giving up after one try.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o12_an_outcome_that_cannot_be_written_is_tried_until_it_is() {
    let Stage { world, store, gate, url } = stage(Gate::open(), leased(Duration::from_secs(60))).await;
    store.faults.finish.store(true, Ordering::SeqCst);
    send(post(&url, K1, "{}")).await.is(Code::ResultNotStored);
    until("it is tried again", || async { store.faults.finishes.load(Ordering::SeqCst) > 3 }).await;
    send(post(&url, K1, "{}")).await.is(Code::InProgress);
    store.faults.finish.store(false, Ordering::SeqCst);
    world.completes(K1).await;
    until("it is replayed", || async { send(post(&url, K1, "{}")).await.is_replayed() }).await;
    assert_eq!(gate.calls(), 1);
}

// Shown by: trying for ever; executing again when the lease is over; trying as long as the heart
// beats (it goes on for ever: the key answers 409 until the process ends).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o12_what_cannot_be_written_is_given_up_after_one_lease_whether_the_heart_beats_or_not() {
    let given_up = [true, false].map(async |beats: bool| {
        let Stage { world, store, gate, url } = stage(Gate::open(), leased(SHORT)).await;
        store.faults.finish.store(true, Ordering::SeqCst);
        store.faults.heartbeat.store(!beats, Ordering::SeqCst);
        send(post(&url, K1, "{}")).await.is(Code::ResultNotStored);
        let what = format!("it is unknown, beats: {beats}");
        until(&what, || async { send(post(&url, K1, "{}")).await.code() == Code::OutcomeUnknown.as_str() }).await;
        let state = world.record("t1", K1).await.unwrap().state;
        assert_eq!((state, gate.calls()), (State::UnknownRequiresRecovery, 1), "beats: {beats}");
        let finishes = store.faults.finishes.load(Ordering::SeqCst);
        assert!(!beats || finishes >= 5, "it is tried until then: {finishes}");
    });
    futures_util::future::join_all(given_up).await;
}

// Shown by: writing the same again whatever the store said of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o12_a_body_that_the_store_refuses_leaves_a_tombstone_and_not_unknown() {
    let Stage { world, store, gate, url } = stage(Gate::open(), leased(Duration::from_secs(20))).await;
    store.faults.bodies.store(true, Ordering::SeqCst);
    send(post(&url, K1, "{}")).await.is(Code::ResultNotStored);
    world.completes(K1).await;
    until("its run has ended", || async { send(post(&url, K1, "{}")).await.code() != Code::InProgress.as_str() }).await;
    send(post(&url, K1, "{}")).await.is(Code::ResultNotRetained);
    assert_eq!(gate.calls(), 1);
}

// A failover of Redis: the name leads to the former primary for a while. Shown by: taking any error
// that is not transient for one about the content (the body was lost).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o12_a_server_that_is_refused_for_a_while_costs_no_body() {
    let Stage { world, store, gate, url } = stage(Gate::open(), leased(Duration::from_secs(60))).await;
    store.faults.finish_refused.store(true, Ordering::SeqCst);
    send(post(&url, K1, "{}")).await.is(Code::ResultNotStored);
    until("it is tried again", || async { store.faults.finishes.load(Ordering::SeqCst) > 1 }).await;
    store.faults.finish_refused.store(false, Ordering::SeqCst);
    world.completes(K1).await;
    until("it is replayed", || async { send(post(&url, K1, "{}")).await.is_replayed() }).await;
    assert_eq!(gate.calls(), 1);
}

// Shown by: answering 503 and leaving the claim that arrived: nobody drives it, and it is UNKNOWN
// for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o11_a_claim_whose_answer_was_lost_is_released() {
    let Stage { world, store, gate, url } = stage(Gate::open(), edge()).await;
    store.faults.claim_answer.store(true, Ordering::SeqCst);
    send(post(&url, K1, "{}")).await.is(Code::StoreUnavailable);
    store.faults.claim_answer.store(false, Ordering::SeqCst);
    until("it is released", || async { world.record("t1", K1).await.is_none() }).await;
    until("it runs", || async { send(post(&url, K1, "{}")).await.status == 201 }).await;
    assert_eq!(gate.calls(), 1);
}

// An operation in mode bridged holds a connection; here there is one. Shown by: a search for the
// claim that keeps the place of its run (503 to every other key, for a lease).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o11_a_claim_whose_answer_was_lost_holds_no_place_while_it_is_looked_for() {
    let route = Route { mode: Mode::Bridged, ..leased(Duration::from_secs(600)) };
    let faults = Faults { connections: AtomicU32::new(1), claim_answer: AtomicBool::new(true), ..Faults::default() };
    let Stage { world: _world, store, gate, url } = stage_with(Gate::open(), route, faults).await;
    // No release is answered, so the search goes on for the lease.
    store.faults.finish.store(true, Ordering::SeqCst);
    send(post(&url, K1, "{}")).await.is(Code::StoreUnavailable);
    store.faults.claim_answer.store(false, Ordering::SeqCst);
    until("another key runs", || async {
        send(post(&url, K2, "{}")).await;
        gate.calls() == 1
    })
    .await;
}

// Shown by: taking the first answer of the release for its end: the claim comes behind it, and
// nobody drives it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o11_a_claim_that_arrives_behind_its_release_is_released() {
    let Stage { world, store, gate, url } = stage(Gate::open(), leased(Duration::from_secs(60))).await;
    store.faults.claim_late.store(true, Ordering::SeqCst);
    send(post(&url, K1, "{}")).await.is(Code::StoreUnavailable);
    until("it has arrived", || async { store.faults.has_arrived.load(Ordering::SeqCst) }).await;
    until("it is released", || async { world.record("t1", K1).await.is_none() }).await;
    assert_eq!(send(post(&url, K1, "{}")).await.status, 201, "its place in the process is free too");
    assert_eq!(gate.calls(), 1);
}

// Shown by: claiming in the request's own future: the claim stands, and no handler is ever called.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o11_a_client_that_goes_away_while_its_key_is_claimed_leaves_a_run() {
    let (world, gate) = (sqlite().await, Gate::open());
    let store = Faulty { inner: world.store.clone(), faults: std::sync::Arc::new(Faults::default()) };
    let engine = Engine::new(store.clone(), EngineOptions::default());
    let endpoint = engine.protect(Endpoint::typed::<Put>(edge())).unwrap();
    store.faults.claim_waits.store(true, Ordering::SeqCst);
    let held = gate.clone();
    let request = tokio::spawn(async move {
        let asking = Asking { scope: Some(scope("t1", "p1")), key: key(K1), command: std::sync::Arc::new(put("a")) };
        let run = move |_| async move {
            held.pass().await;
            Ended { tag: None, kept: Kept::Whole(Reply::new(201)), answer: () }
        };
        engine.execute_edge(&endpoint, asking, run).await
    });
    until("it is claimed", || async { world.record("t1", K1).await.is_some() }).await;
    request.abort();
    assert!(request.await.unwrap_err().is_cancelled());
    store.faults.claim_waits.store(false, Ordering::SeqCst);
    world.completes(K1).await;
    assert_eq!(gate.calls(), 1);
}

// The layer's command is a copy of the body that no memory permit counts. Shown by: a front that
// keeps it: that of the request, that of the run, or that of the search for a lost claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o29_nothing_holds_the_command_of_a_request_once_its_claim_was_made() {
    let world = sqlite().await;
    let faults = std::sync::Arc::new(Faults::default());
    let store = Faulty { inner: world.store.clone(), faults: std::sync::Arc::clone(&faults) };
    let engine = Engine::new(store, EngineOptions::default());
    let endpoint = engine.protect(Endpoint::typed::<Put>(leased(Duration::from_secs(600)))).unwrap();
    let ask = async |number: &str| {
        let command = std::sync::Arc::new(put("a"));
        let held = std::sync::Arc::downgrade(&command);
        let in_run = held.clone();
        let run = move |_| async move {
            let answer = in_run.strong_count();
            Ended { tag: None, kept: Kept::Whole(Reply::new(201)), answer }
        };
        let asking = Asking { scope: Some(scope("t1", "p1")), key: key(number), command };
        (engine.execute_edge(&endpoint, asking, run).await, held)
    };
    let (answered, _) = ask(K1).await;
    assert!(matches!(answered, EdgeAnswer::Ran { answer: 0, .. }), "{answered:?}");
    // No release is answered, so the search goes on for the lease.
    faults.claim_answer.store(true, Ordering::SeqCst);
    faults.finish.store(true, Ordering::SeqCst);
    let (answered, held) = ask(K2).await;
    assert!(matches!(answered, EdgeAnswer::Answered(_)), "{answered:?}");
    until("it is dropped", || async { held.strong_count() == 0 }).await;
}

// A handler that ends before the first heartbeat is due, a third of its lease after the claim,
// costs a claim and an outcome.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o12_a_handler_shorter_than_a_third_of_its_lease_costs_two_writes() {
    let Stage { world, store, gate, url } = stage(Gate::closed(), leased(Duration::from_secs(600))).await;
    for key in [K1, K2] {
        let asking = tokio::spawn(send(post(&url, key, "{}")));
        gate.begun().await;
        assert_eq!(world.record("t1", key).await.unwrap().state, State::InProgress);
        gate.let_go();
        assert_eq!(asking.await.unwrap().status, 201);
        assert!(send(post(&url, key, "{}")).await.is_replayed());
    }
    let count = |number: &std::sync::atomic::AtomicU32| number.load(Ordering::SeqCst);
    let faults = &store.faults;
    assert_eq!((count(&faults.claims), count(&faults.finishes)), (2, 2));
    assert_eq!((count(&faults.heartbeats), count(&faults.releases), count(&faults.other_writes)), (0, 0, 0));
}

// The record that refused a claim is gone when it is read (pitfall 12). Shown by: running the
// handler without owning the key; answering 409 at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m42_what_refused_a_claim_and_vanished_is_looked_for_again() {
    let Stage { world, store, gate, url } = stage(Gate::open(), edge()).await;
    store.faults.claims_vanish.store(3, Ordering::SeqCst);
    assert_eq!(send(post(&url, K1, "{}")).await.status, 201);
    assert_eq!((store.faults.claims.load(Ordering::SeqCst), gate.calls()), (4, 1));
    let record = world.record("t1", K1).await.unwrap();
    assert_eq!((record.state, record.epoch), (State::Completed, 1));
    assert!(send(post(&url, K1, "{}")).await.is_replayed());
}

// Shown by: looking again without a bound (the request never ends); running the handler at the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m42_a_claim_that_vanishes_for_ever_is_given_up_and_burns_nothing() {
    let Stage { world, store, gate, url } = stage(Gate::open(), edge()).await;
    store.faults.claims_vanish.store(u32::MAX, Ordering::SeqCst);
    let answer = tokio::time::timeout(SOON, send(post(&url, K1, "{}"))).await.expect("it gives up");
    answer.is(Code::InProgress);
    let claims = store.faults.claims.load(Ordering::SeqCst);
    assert!((3..=10).contains(&claims), "{claims}");
    assert_eq!((gate.calls(), world.record("t1", K1).await), (0, None));
    store.faults.claims_vanish.store(0, Ordering::SeqCst);
    assert_eq!(send(post(&url, K1, "{}")).await.status, 201);
    assert_eq!(gate.calls(), 1);
}

// Shown by: a heartbeat that stops with the request; one that is never sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o12_a_handler_slower_than_its_lease_keeps_it_by_heartbeats() {
    let Stage { world, store, gate, url } = stage(Gate::closed(), leased(SHORT)).await;
    send(post(&url, K1, "{}")).await.is(Code::InProgress);
    // Three to a lease.
    until("more than its lease has passed", || async { store.faults.heartbeats.load(Ordering::SeqCst) >= 5 }).await;
    assert!(is_owned(&world).await);
    gate.let_go();
    until("it ended", || async { send(post(&url, K1, "{}")).await.is_replayed() }).await;
    let record = world.record("t1", K1).await.unwrap();
    assert_eq!((record.state, record.epoch, gate.calls()), (State::Completed, 1, 1));
}

// Shown by: cancelling the handler when the lease is lost; forgetting what it did (its client would
// hear "unknown" for a day).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o12_a_lost_lease_does_not_end_the_handler_and_its_late_outcome_is_remembered() {
    let Stage { world, store, gate, url } = stage(Gate::closed(), leased(SHORT)).await;
    store.faults.heartbeat.store(true, Ordering::SeqCst);
    send(post(&url, K1, "{}")).await.is(Code::InProgress);
    // Another process finds the claim stale, and gives it up as unknown.
    until("it is given up", || async {
        let record = world.record("t1", K1).await.unwrap();
        world.store.mark_unknown(&record).await.unwrap() == Fenced::Done
    })
    .await;
    store.faults.heartbeat.store(false, Ordering::SeqCst);
    gate.let_go();
    until("its outcome is known", || async { send(post(&url, K1, "{}")).await.is_replayed() }).await;
    let record = world.record("t1", K1).await.unwrap();
    assert_eq!((record.state, record.epoch, gate.calls()), (State::Completed, 3, 1));
    assert_eq!(evidence(&world).await, 1, "what the run came to is a fact, whoever owned the record (O8)");
}

// Shown by: writing the late outcome over the new owner's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o12_a_late_outcome_never_touches_another_owners_record() {
    let route = Route { effects: Effects::Repeatable, ..leased(SHORT) };
    let Stage { world, store, gate, url } = stage(Gate::closed(), route).await;
    store.faults.heartbeat.store(true, Ordering::SeqCst);
    send(post(&url, K1, "{}")).await.is(Code::InProgress);
    until("its lease is over", || async { !is_owned(&world).await }).await;
    let other = stage_on(&world, Gate::open()).await;
    let taken = send(post(&other, K1, "{}")).await;
    assert_eq!((taken.status, taken.is_replayed(), taken.body.as_slice()), (201, false, &b"other"[..]));
    gate.let_go();
    until("the late one has ended", || async { send(post(&url, K1, "{}")).await.status == 201 }).await;
    let again = send(post(&url, K1, "{}")).await;
    assert_eq!((again.is_replayed(), again.body.as_slice()), (true, &b"other"[..]));
    assert_eq!(world.record("t1", K1).await.unwrap().epoch, 2);
    until("the late outcome is evidence", || async { evidence(&world).await == 1 }).await;
}

/// The runs that said that they succeeded after they had lost their lease, as `oncebox keys show`
/// has them.
async fn evidence(world: &World<SqliteStore>) -> usize {
    let operation_id = world.record("t1", K1).await.unwrap().operation_id;
    let runs = world.store.runs_of(operation_id).await.unwrap();
    runs.iter().filter(|run| (run.evidence.verdict.as_str(), run.evidence.status) == ("success", Some(201))).count()
}

/// Another process with the same operation, whose handler answers `other`.
async fn stage_on(world: &World<SqliteStore>, gate: Gate) -> String {
    let engine = Engine::new(world.store.clone(), EngineOptions::default());
    let route = Route { effects: Effects::Repeatable, ..edge() };
    let layer = IdempotencyLayer::new(&engine, Endpoint::raw("put", route)).unwrap();
    serve(gated(&gate, "other").route_layer(layer)).await + "/put"
}

/// Whether somebody owns the record now.
async fn is_owned(world: &World<SqliteStore>) -> bool {
    let look = world.store.find(&identity("t1", K1)).await.unwrap();
    !look.record.unwrap().lease_left(look.now).is_zero()
}
