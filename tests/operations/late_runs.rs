//! Runs that end after they lost their lease, and bridged runs that commit without their guard:
//! neither is executed a second time.

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post as route_post;
use oncebox::http::idempotency::{IdempotencyLayer, OutcomeTag};
use oncebox::operation::{
    Code, Effects, Endpoint, Guard, Mode, Outcome, Reconciled, Record, Reply, Route, State as Remembered,
};
use oncebox::store::{ActContext, Basis, Begun, Fenced, KeyChange, KeyClaim, Keys};

use super::kit::*;
use super::layer::{edge, layered};

on_all! {
    o11_a_sweep_leaves_what_this_process_runs_to_its_heartbeats,
    what_a_late_run_did_is_not_executed_again_though_its_route_did_not_find_it,
    a_late_success_is_the_outcome_though_its_route_does_not_know,
    a_late_success_is_the_outcome_though_its_route_says_that_it_failed,
    a_failure_that_its_route_has_found_out_is_replayed,
    a_late_run_whose_key_was_freed_meanwhile_is_remembered_all_the_same,
    a_late_run_that_does_not_know_what_it_did_leaves_no_free_key,
    a_late_run_that_did_nothing_says_nothing_of_the_run_after_it,
    a_late_run_that_failed_says_nothing_of_the_run_after_it,
    a_late_run_that_did_nothing_frees_its_key_though_its_route_was_asked_meanwhile,
    a_repeated_run_of_which_nothing_is_stored_keeps_the_id_of_the_operation,
    a_key_whose_run_ended_late_is_not_resolved_as_not_happened,
    what_a_late_run_did_is_not_executed_again_though_its_process_died_after_it_said_so,
    a_bridged_success_that_its_guard_did_not_commit_is_unknown,
    a_bridged_failure_frees_its_key_only_where_nothing_can_have_been_committed,
}

// SQLite has one writer at a time.
mod locked {
    use super::{
        a_release_and_a_late_word_at_once_leave_one_of_them_seen,
        a_transaction_that_runs_a_failed_run_again_does_not_wait_for_its_record,
    };

    crate::kit::on_servers!(
        a_release_and_a_late_word_at_once_leave_one_of_them_seen,
        a_transaction_that_runs_a_failed_run_again_does_not_wait_for_its_record,
    );
}

/// A run that stands still with its handler called, and whose lease is over.
async fn stands_still<S: Sql>(world: &World<S>) -> (Gate, tokio::task::JoinHandle<Http>) {
    stands_still_told(world, "{}").await
}

/// The same of a handler that then does what it is told.
async fn stands_still_told<S: Sql>(world: &World<S>, told: &'static str) -> (Gate, tokio::task::JoinHandle<Http>) {
    let gate = Gate::closed();
    let url = layered(world, Endpoint::raw("put", edge()), &gate).await + "/put";
    let asked = tokio::spawn(async move { send(post(&url, K1, told)).await });
    gate.begun().await;
    let long_ago = long_ago::<S>();
    world.store.exec(&format!("update {}idempotency_request set lease_until = {long_ago}", S::PREFIX)).await;
    (gate, asked)
}

// Shown by: a sweep that does not ask what this process runs (the record is unknown).
async fn o11_a_sweep_leaves_what_this_process_runs_to_its_heartbeats<S: Sql>(world: World<S>) {
    let (gate, asked) = stands_still(&world).await;
    let stale = world.store.stale(&"put".parse().unwrap(), 9).await.unwrap();
    assert_eq!(stale.len(), 1, "to a sweep it is as a claim that nobody drives");
    world.engine.sweep(100).await.unwrap();
    assert_eq!(world.record("t1", K1).await.unwrap().state, Remembered::InProgress);
    gate.let_go();
    assert_eq!(asked.await.unwrap().status, 201);
    assert_eq!(world.record("t1", K1).await.unwrap().state, Remembered::Completed);
    assert_eq!((gate.calls(), world.effects().await), (1, 1));
}

/// Another process of the same route, which asks and is told that nothing happened when the gate
/// lets it go.
async fn not_found<S: Sql>(world: &World<S>) -> (Gate, Gate, String) {
    told_by_its_route(world, || Reconciled::NotHappened).await
}

/// Another process of the same route, which asks and is told this when the gate lets it go.
async fn told_by_its_route<S: Sql>(world: &World<S>, told: fn() -> Reconciled) -> (Gate, Gate, String) {
    let (asked, gate) = (Gate::closed(), Gate::open());
    let asks = asked.clone();
    let endpoint = Endpoint::raw("put", Route { reconciles: true, ..edge() }).reconciled_by(move |_| {
        let asks = asks.clone();
        Box::pin(async move {
            asks.pass().await;
            Ok(told())
        })
    });
    let url = layered(&world.another_process(), endpoint, &gate).await + "/put";
    (asked, gate, url)
}

async fn late_runs<S: Sql>(world: &World<S>) -> usize {
    let Some(record) = world.record("t1", K1).await else { return 0 };
    world.store.runs_of(record.operation_id).await.unwrap().len()
}

// Shown by: a release that does not look at the evidence: two effects.
async fn what_a_late_run_did_is_not_executed_again_though_its_route_did_not_find_it<S: Sql>(world: World<S>) {
    let (slow, _answer) = stands_still(&world).await;
    let (asked, other, url) = not_found(&world).await;
    send(post(&url, K1, "{}")).await.is(Code::RecoveryPending);
    asked.begun().await;
    slow.let_go();
    until("the late run has said so", || async { late_runs(&world).await == 1 }).await;
    asked.let_go();
    world.completes(K1).await;
    send(post(&url, K1, "{}")).await.is(Code::ResultNotRetained);
    assert_eq!((slow.calls(), other.calls(), world.effects().await), (1, 0, 1));
}

// Shown by: writing only what the route says (the record stays UNKNOWN).
async fn a_late_success_is_the_outcome_though_its_route_does_not_know<S: Sql>(world: World<S>) {
    a_late_success_is_the_outcome(&world, || Reconciled::Unknown).await;
}

async fn a_late_success_is_the_outcome_though_its_route_says_that_it_failed<S: Sql>(world: World<S>) {
    a_late_success_is_the_outcome(&world, || Reconciled::Failed(Reply::new(402))).await;
}

/// The run finds that its route is being asked, so it leaves only its evidence.
async fn a_late_success_is_the_outcome<S: Sql>(world: &World<S>, told: fn() -> Reconciled) {
    let (slow, answer) = stands_still(world).await;
    let (asked, other, url) = told_by_its_route(world, told).await;
    send(post(&url, K1, "{}")).await.is(Code::RecoveryPending);
    asked.begun().await;
    slow.let_go();
    answer.await.unwrap().is(Code::ResultNotStored);
    asked.let_go();
    until("the route has answered", || async {
        world.record("t1", K1).await.is_some_and(|record| record.state != Remembered::InProgress)
    })
    .await;
    assert_eq!(world.record("t1", K1).await.unwrap().state, Remembered::Completed);
    send(post(&url, K1, "{}")).await.is(Code::ResultNotRetained);
    assert_eq!((slow.calls(), other.calls(), world.effects().await), (1, 0, 1));
}

async fn a_failure_that_its_route_has_found_out_is_replayed<S: Sql>(world: World<S>) {
    let (_slow, _answer) = stands_still(&world).await;
    let (asked, other, url) = told_by_its_route(&world, || Reconciled::Failed(Reply::new(402))).await;
    send(post(&url, K1, "{}")).await.is(Code::RecoveryPending);
    asked.begun().await;
    asked.let_go();
    until("the route has answered", || async {
        world.record("t1", K1).await.is_some_and(|record| record.state != Remembered::InProgress)
    })
    .await;
    assert_eq!(world.record("t1", K1).await.unwrap().state, Remembered::FailedReplayable);
    for _ in 0..2 {
        let again = send(post(&url, K1, "{}")).await;
        assert_eq!((again.status, again.is_replayed()), (402, true), "{again:?}");
    }
    assert_eq!((asked.calls(), other.calls()), (1, 0));
}

// Who frees the key has read the evidence, and the run writes its own behind that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_run_waits_for_who_frees_its_key_just_now() {
    let test = "a_late_run_waits_for_who_frees_its_key_just_now";
    crate::postgres::with_database(test, |database| async move {
        let world = World::on(database.store.clone(), &database.url).await;
        let (slow, answer) = stands_still(&world).await;
        // Given up, so that the run finds at once that it has lost its lease.
        let seen = world.record("t1", K1).await.unwrap();
        assert_eq!(world.store.mark_unknown(&seen).await.unwrap(), Fenced::Done);
        let frees = world.store.tx("delete from oncebox.idempotency_request").await;
        slow.let_go();
        until("the late run has said so", || async { late_runs(&world).await == 1 }).await;
        one_waits(&world).await;
        frees.commit().await.unwrap();
        assert_eq!(answer.await.unwrap().status, 201);
        assert_eq!(world.record("t1", K1).await.map(|record| record.state), Some(Remembered::Completed));
        assert_eq!((slow.calls(), world.effects().await), (1, 1));
    })
    .await;
}

// Shown by: leaving a record that is gone as it is.
async fn a_late_run_whose_key_was_freed_meanwhile_is_remembered_all_the_same<S: Sql>(world: World<S>) {
    let (slow, _answer) = stands_still(&world).await;
    let (asked, other, url) = not_found(&world).await;
    send(post(&url, K1, "{}")).await.is(Code::RecoveryPending);
    asked.begun().await;
    asked.let_go();
    until("its key is free", || async { world.record("t1", K1).await.is_none() }).await;
    slow.let_go();
    world.completes(K1).await;
    let again = send(post(&url, K1, "{}")).await;
    assert_eq!((again.status, again.is_replayed()), (201, true));
    assert_eq!((slow.calls(), other.calls(), world.effects().await), (1, 0, 1));
    assert_eq!(late_runs(&world).await, 1);
}

// Shown by: remembering only late successes and failures (the key is free).
async fn a_late_run_that_does_not_know_what_it_did_leaves_no_free_key<S: Sql>(world: World<S>) {
    const BREAKS: &str = r#"{"status":500}"#;
    let (slow, answer) = stands_still_told(&world, BREAKS).await;
    let (asked, other, url) = not_found(&world).await;
    send(post(&url, K1, BREAKS)).await.is(Code::RecoveryPending);
    asked.begun().await;
    asked.let_go();
    until("its key is free", || async { world.record("t1", K1).await.is_none() }).await;
    slow.let_go();
    assert_eq!(answer.await.unwrap().status, 500);
    assert_eq!(world.record("t1", K1).await.unwrap().state, Remembered::UnknownRequiresRecovery);
    assert_eq!((slow.calls(), other.calls(), late_runs(&world).await), (1, 0, 1));
}

// Shown by: freeing whatever is unknown under the operation id of the late run.
async fn a_late_run_that_did_nothing_says_nothing_of_the_run_after_it<S: Sql>(world: World<S>) {
    says_nothing_of_the_run_after_it(&world, r#"{"tag":"retryable"}"#).await;
}

// Shown by: asking the late run only whether it did nothing: the key says FAILED, and the run after
// it may have had an effect.
async fn a_late_run_that_failed_says_nothing_of_the_run_after_it<S: Sql>(world: World<S>) {
    says_nothing_of_the_run_after_it(&world, r#"{"status":402}"#).await;
}

async fn says_nothing_of_the_run_after_it<S: Sql>(world: &World<S>, told: &'static str) {
    let (slow, answer) = stands_still_told(world, told).await;
    let seen = world.record("t1", K1).await.unwrap();
    assert_eq!(world.store.mark_unknown(&seen).await.unwrap(), Fenced::Done);
    // The operation runs again under its id, and nobody knows how that run ended.
    let seen = world.record("t1", K1).await.unwrap();
    let endpoint = world.another_process().engine.protect(Endpoint::raw("put", edge())).unwrap();
    let again = KeyClaim { operation_id: seen.operation_id, ..claim(&endpoint, K1, Mode::Edge, SOON) };
    let Some(owned) = world.store.claim(&again, Basis::TakeOver(&seen)).await.unwrap() else { panic!("not taken") };
    let unknown = oncebox::store::RunOutcome::Unknown;
    assert_eq!(world.store.finish(&owned, &unknown, &edge().retention).await.unwrap(), Fenced::Done);
    slow.let_go();
    answer.await.unwrap();
    assert_eq!(late_runs(world).await, 1, "the first run ended late");
    assert_eq!(world.record("t1", K1).await.unwrap().state, Remembered::UnknownRequiresRecovery);
}

// Shown by: a reconciliation that counts as an attempt: the run takes it for a run after itself,
// and its record stays UNKNOWN.
async fn a_late_run_that_did_nothing_frees_its_key_though_its_route_was_asked_meanwhile<S: Sql>(world: World<S>) {
    const NOTHING: &str = r#"{"tag":"retryable"}"#;
    let (slow, answer) = stands_still_told(&world, NOTHING).await;
    let (asked, _, url) = told_by_its_route(&world, || Reconciled::Unknown).await;
    send(post(&url, K1, NOTHING)).await.is(Code::RecoveryPending);
    asked.begun().await;
    asked.let_go();
    until("nobody knows", || async {
        world.record("t1", K1).await.is_some_and(|record| record.state == Remembered::UnknownRequiresRecovery)
    })
    .await;
    slow.let_go();
    answer.await.unwrap();
    let record = world.record("t1", K1).await.unwrap();
    assert_eq!((record.state, record.attempts), (Remembered::FailedRetryable, 1));
}

// What removes duplicates downstream knows the operation by its id. Shown by: deleting the record
// of the run before (the next request has another id).
async fn a_repeated_run_of_which_nothing_is_stored_keeps_the_id_of_the_operation<S: Sql>(world: World<S>) {
    const NOTHING: &str = r#"{"tag":"dont_store"}"#;
    let (_slow, _answer) = stands_still_told(&world, NOTHING).await;
    let first = world.record("t1", K1).await.unwrap();
    let (gate, route) = (Gate::open(), Route { effects: Effects::Repeatable, ..edge() });
    let url = layered(&world.another_process(), Endpoint::raw("put", route), &gate).await + "/put";
    assert_eq!(send(post(&url, K1, NOTHING)).await.status, 201);
    let second = world.record("t1", K1).await.expect("the first run may have had an effect");
    assert_eq!((second.state, second.operation_id), (Remembered::UnknownRequiresRecovery, first.operation_id));
    send(post(&url, K1, "{}")).await.is(Code::KeyReused);
    assert_eq!(gate.calls(), 1);
}

// Shown by: `resolve` that does not look at the evidence.
async fn a_key_whose_run_ended_late_is_not_resolved_as_not_happened<S: Sql>(world: World<S>) {
    layer_left_unknown(&world).await;
    let seen = world.record("t1", K1).await.unwrap();
    world.store.observe_run(&succeeded(&seen)).await.unwrap();
    let act = act();
    let refused = world.store.act_on_key(&seen, &not_happened(false), &act).await.unwrap_err();
    assert!(refused.to_string().contains("ended with success"), "{refused}");
    world.store.act_on_key(&seen, &not_happened(true), &act).await.unwrap();
    assert_eq!(world.record("t1", K1).await.unwrap().state, Remembered::FailedRetryable);
}

fn act() -> ActContext {
    ActContext { actor: "ada".to_owned(), reason: "as agreed".to_owned(), dry_run: false, redrive_age_max: None }
}

fn not_happened(against_evidence: bool) -> KeyChange {
    KeyChange::Resolve {
        outcome: Box::new(oncebox::store::RunOutcome::FailedRetryable { error_code: None }),
        retention: edge().retention,
        against_evidence,
    }
}

/// What a run says that succeeded after it had lost its lease.
fn succeeded(seen: &Record) -> oncebox::store::NewEvidence {
    oncebox::store::NewEvidence {
        operation_id: seen.operation_id,
        effect: String::new(),
        epoch: 1,
        send: 0,
        kind: "run".to_owned(),
        verdict: "success".to_owned(),
        status: Some(201),
        bytes: oncebox::store::Sealed::default(),
    }
}

// Shown by: a retry of what failed that does not look at the evidence (it executes); a claim that
// only refuses it (409 in progress); a judgement that forgets the evidence (it executes).
async fn what_a_late_run_did_is_not_executed_again_though_its_process_died_after_it_said_so<S: Sql>(world: World<S>) {
    layer_left_unknown(&world).await;
    let seen = world.record("t1", K1).await.unwrap();
    world.store.act_on_key(&seen, &not_happened(false), &act()).await.unwrap();
    // The run says it, and its process dies.
    world.store.observe_run(&succeeded(&seen)).await.unwrap();
    // An operator finds it among the conflicts, and judges it before the client comes back.
    let judged = world.store.judge(seen.operation_id, &act()).await.unwrap_err().to_string();
    assert!(judged.contains("stands as FAILED_RETRYABLE") && judged.contains("keys release"), "{judged}");
    let gate = Gate::open();
    let url = layered(&world.another_process(), Endpoint::raw("put", edge()), &gate).await + "/put";
    for _ in 0..2 {
        send(post(&url, K1, "{}")).await.is(Code::ResultNotRetained);
    }
    let record = world.record("t1", K1).await.unwrap();
    assert_eq!((record.state, record.operation_id), (Remembered::Completed, seen.operation_id));
    assert_eq!((gate.calls(), world.effects().await), (0, 1), "it is not executed again");
}

/// Waits until a statement of this database waits for a lock. InnoDB's own list of them is renewed
/// only while nobody asks often; what runs on the table there for that long can only be waiting.
async fn one_waits<S: Sql>(world: &World<S>) {
    let waiting = match S::NAME {
        "postgres" => {
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        }
        _ => {
            "select count(*) from information_schema.processlist where db = database() and command <> 'Sleep' \
               and info like '%idempotency_request%' and id <> connection_id() and time_ms > 500"
        }
    };
    until("a statement waits for a lock", || async { world.store.number(waiting).await == 1 }).await;
}

// One statement that frees a key reads the evidence as it was when the statement began, though it
// waited for the row. Shown by: a release, a reclaim, or a release by hand that is one statement; a
// look that does not wait for who frees the key.
async fn a_release_and_a_late_word_at_once_leave_one_of_them_seen<S: Sql>(world: World<S>) {
    let table = format!("{}idempotency_request", S::PREFIX);
    let endpoint = world.engine.protect(Endpoint::raw("put", edge())).unwrap();
    for (number, freed_by) in (0..).zip(["release", "reclaim", "by hand"]) {
        let wanted = claim(&endpoint, &format!("key-000000000000000{number}"), Mode::Edge, SOON);
        let Some(owned) = world.store.claim(&wanted, Basis::New).await.unwrap() else { panic!("not new") };
        if freed_by != "release" {
            let failed = oncebox::store::RunOutcome::FailedRetryable { error_code: None };
            world.store.finish(&owned, &failed, &edge().retention).await.unwrap();
        }
        let seen = world.store.find(&wanted.identity).await.unwrap().record.unwrap();
        // Who frees it waits behind another one, and the run says meanwhile that it succeeded.
        let holds = world.store.tx(&format!("select * from {table} for update")).await;
        let (store, evidence, by_hand) = (world.store.clone(), succeeded(&seen), act());
        let frees = tokio::spawn(async move {
            match freed_by {
                "release" => store.release(&owned).await.unwrap() == Fenced::Done,
                "reclaim" => {
                    let again = KeyClaim { owner: uuid::Uuid::now_v7(), ..wanted };
                    store.claim(&again, Basis::Reclaim(&seen)).await.unwrap().is_some()
                }
                _ => {
                    let release = KeyChange::Release { against_evidence: false };
                    store.change_key(&seen, &release, &by_hand).await.unwrap() == Fenced::Done
                }
            }
        });
        one_waits(&world).await;
        world.store.observe_run(&evidence).await.unwrap();
        holds.rollback().await.unwrap();
        assert!(!frees.await.unwrap(), "{freed_by} did not see what the run had said");
    }
    // And who has said it waits for who frees the key just now.
    let identity = identity("t1", "key-0000000000000000");
    let frees = world.store.tx(&format!("delete from {table}")).await;
    let (store, asked) = (world.store.clone(), identity.clone());
    let looks = tokio::spawn(async move { store.find_settled(&asked).await.unwrap() });
    one_waits(&world).await;
    frees.commit().await.unwrap();
    assert_eq!(looks.await.unwrap().record, None, "it looked past who frees the key");
}

// A route was of mode `edge` once, and its late run may report a success while another process has
// the record locked. Shown by: a claim that waits for the record, and so reads the evidence as it
// was before the wait.
async fn a_transaction_that_runs_a_failed_run_again_does_not_wait_for_its_record<S: Sql>(world: World<S>) {
    let endpoint = world.engine.protect(Endpoint::raw("put", edge())).unwrap();
    let wanted = claim(&endpoint, K1, Mode::Edge, SOON);
    let Some(owned) = world.store.claim(&wanted, Basis::New).await.unwrap() else { panic!("not new") };
    let failed = oncebox::store::RunOutcome::FailedRetryable { error_code: None };
    world.store.finish(&owned, &failed, &edge().retention).await.unwrap();
    let seen = world.record("t1", K1).await.unwrap();
    let holds = world.store.tx(&format!("select * from {}idempotency_request for update", S::PREFIX)).await;
    let again = KeyClaim { mode: Mode::Transactional, ..wanted };
    let begins = world.store.begin_operation(&again, Basis::Reclaim(&seen), SOON);
    // A claim of MariaDB that waits gives up after a second, and is then answered as one that
    // does not.
    let begun = tokio::select! {
        biased;
        begun = begins => begun.unwrap(),
        () = one_waits(&world) => panic!("it waits for the lock"),
    };
    assert!(matches!(begun, Begun::Existing(_) | Begun::Locked), "{begun:?}");
    holds.rollback().await.unwrap();
    let free = world.store.begin_operation(&again, Basis::Reclaim(&seen), SOON).await.unwrap();
    let Begun::Claimed(tx) = free else { panic!("nobody holds it: {free:?}") };
    tx.rollback().await.unwrap();
}

async fn layer_left_unknown<S: Sql>(world: &World<S>) {
    let (_slow, _answer) = stands_still(world).await;
    let seen = world.record("t1", K1).await.unwrap();
    assert_eq!(world.store.mark_unknown(&seen).await.unwrap(), Fenced::Done);
}

#[derive(Clone)]
struct App<S>(S);

/// Does what its header says, mostly without its guard.
async fn careless<S: Sql>(State(App(store)): State<App<S>>, guard: Guard<S>, told: HeaderMap) -> Response {
    let told = told["test-does"].to_str().unwrap();
    if told.starts_with("commits") {
        store.tx("insert into effect (text) values ('by itself')").await.commit().await.unwrap();
    }
    assert!(!told.ends_with("panics"), "on purpose");
    match told {
        "commits" | "says success" => StatusCode::CREATED.into_response(),
        "says retryable" => {
            let mut response = StatusCode::SERVICE_UNAVAILABLE.into_response();
            response.extensions_mut().insert(OutcomeTag(Outcome::Retryable(())));
            response
        }
        "ends the transaction" => {
            let mut tx = store.tx("insert into effect (text) values ('by itself')").await;
            S::run(&mut tx, "commit").await.unwrap();
            let refused = guard.commit_response(tx, StatusCode::CREATED.into_response()).await;
            (StatusCode::INTERNAL_SERVER_ERROR, refused.unwrap_err().to_string()).into_response()
        }
        _ => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn bridged<S: Sql>(world: &World<S>) -> String {
    let layer = IdempotencyLayer::new(&world.engine, Endpoint::raw("put", Route { mode: Mode::Bridged, ..edge() }));
    let router = Router::new().route("/put", route_post(careless::<S>)).route_layer(layer.unwrap());
    serve(router.with_state(App(world.store.clone()))).await + "/put"
}

async fn does<S: Sql>(world: &World<S>, url: &str, key: &str, told: &str) -> (Http, Option<Remembered>) {
    let answer = send(post(url, key, "{}").header("test-does", told)).await;
    (answer, world.record("t1", key).await.map(|record| record.state))
}

// A kill between such a commit and the outcome executes again, which no run shows. Shown by:
// COMPLETED whatever the mode.
async fn a_bridged_success_that_its_guard_did_not_commit_is_unknown<S: Sql>(world: World<S>) {
    let url = bridged(&world).await;
    for (key, told, effects) in [(K1, "commits", 1), (K2, "says success", 1)] {
        let (answer, state) = does(&world, &url, key, told).await;
        answer.is(Code::TransactionEnded);
        assert_eq!(state, Some(Remembered::UnknownRequiresRecovery), "{told}");
        does(&world, &url, key, told).await.0.is(Code::OutcomeUnknown);
        assert_eq!(world.effects().await, effects, "{told}");
    }
}

// Shown by: FAILED_RETRYABLE for every failure in mode bridged (the key is free at once, and what
// was committed runs again).
async fn a_bridged_failure_frees_its_key_only_where_nothing_can_have_been_committed<S: Sql>(world: World<S>) {
    let url = bridged(&world).await;
    let told = ["commits and panics", "commits and fails", "ends the transaction", "says retryable"];
    for (number, told) in (0..).zip(told) {
        let key = format!("key-000000000000000{number}");
        let (_, state) = does(&world, &url, &key, told).await;
        let expected = match told {
            "says retryable" => Remembered::FailedRetryable,
            _ => Remembered::UnknownRequiresRecovery,
        };
        assert_eq!(state, Some(expected), "{told}");
    }
    assert_eq!(world.effects().await, 3, "the first three have committed");
    for number in 0..3 {
        does(&world, &url, &format!("key-000000000000000{number}"), "commits").await.0.is(Code::OutcomeUnknown);
    }
    assert_eq!(world.effects().await, 3);
    does(&world, &url, "key-0000000000000003", "commits").await.0.is(Code::TransactionEnded);
    assert_eq!(world.effects().await, 4, "the last key was free");
}
