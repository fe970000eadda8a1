//! Transactional operations on real databases: one effect, one outcome, whatever the handler and
//! the network do (O1, O2, O15, O16, O18 to O20, O29, M43, M50, M71, M120).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use oncebox::message::TraceContext;
use oncebox::operation::{Answered, Code, EffectTx, Mode, Outcome, Reply, Retention, Route, State, WhileRunning};
use oncebox::store::{Basis, Begun, KeyClaim, OperationTx, Proof};
use oncebox::{HandlerError, NewMessage};

use super::kit::*;

on_all! {
    m50_claim_effect_message_and_answer_commit_together_and_are_replayed,
    m50_a_message_at_the_end_goes_with_the_effects_and_not_with_a_rejection,
    o1_o29_a_message_that_is_refused_at_the_end_leaves_nothing,
    o1_a_handler_that_commits_leaves_unknown_and_never_runs_again,
    o1_a_handler_that_rolls_back_and_goes_on_leaves_unknown_and_never_runs_again,
    o1_a_handler_that_goes_on_outside_and_then_fails_is_found_out_too,
    o1_a_handler_that_hides_what_it_committed_behind_an_aborted_transaction_is_found_out,
    o1_m71_a_binding_rejection_is_replayed_without_its_effects,
    o1_a_run_of_an_old_record_that_ended_its_transaction_is_unknown_too,
    o2_a_committed_claim_is_never_taken_over,
    o15_o19_a_duplicate_in_this_process_gets_409_and_another_command_422,
    o15_o19_a_duplicate_in_another_process_gets_409_whatever_its_body,
    o15_a_request_among_first_ones_is_judged_as_any_other,
    o15_a_duplicate_of_a_record_that_somebody_changes_waits_for_nobody,
    o15_of_one_that_looks_and_one_that_claims_at_once_one_executes,
    o16_two_tenants_with_one_key_are_two_operations,
    o20_another_principal_gets_the_answer_of_a_mismatch,
    o29_an_error_a_panic_and_a_timeout_leave_no_row,
    o29_unkept_outcomes_leave_no_row,
    m43_wait_mode_replays_when_the_first_is_done,
    m43_a_wait_for_another_process_lasts_as_long_as_the_route_says,
    m43_m120_so_many_wait_for_one_key_and_the_others_are_told_at_once,
}

// Shown by: committing before `complete`. That a message goes with its transaction, the test of
// errors, panics and timeouts shows.
async fn m50_claim_effect_message_and_answer_commit_together_and_are_replayed<S: Sql>(world: World<S>) {
    let endpoint = world.protect(same_tx());
    let calls = Arc::new(AtomicU32::new(0));
    let handler = |calls: Arc<AtomicU32>| {
        does::<S, _>(move |put: &Put, mut tx: EffectTx<'_, S>| {
            let (text, calls) = (put.text.clone(), calls.clone());
            Box::pin(async move {
                calls.fetch_add(1, Ordering::SeqCst);
                S::run(tx.connection(), "insert into effect (text) values ('x')").await?;
                tx.enqueue(NewMessage::text("t", "put", "{}").with_key("acc-7")).await?;
                Ok(Outcome::Completed(made(&text, tx.operation_id())))
            })
        })
    };
    let one = first(run(&world, &endpoint, K1, "a", handler(calls.clone())).await);
    let two = replayed(run(&world, &endpoint, K1, "a", handler(calls.clone())).await);
    let other = world.another_process();
    let there = other.protect(same_tx());
    let three = replayed(run(&other, &there, K1, "a", handler(calls.clone())).await);
    for again in [two, three] {
        assert_eq!((again.status, &again.body, &again.headers), (one.status, &one.body, &one.headers));
    }
    assert_eq!((world.effects().await, world.outbox().await, calls.load(Ordering::SeqCst)), (1, 1, 1));
    let record = world.record("t1", K1).await.unwrap();
    assert_eq!((record.state, record.mode, record.attempts), (State::Completed, Mode::Transactional, 1));
}

/// A handler with an effect and a message at its end, that ends as it is told.
fn sends_last<S: Sql>(message: NewMessage, outcome: Outcome<Reply>) -> impl Does<S> {
    does::<S, _>(move |_: &Put, mut tx: EffectTx<'_, S>| {
        let (message, outcome) = (message.clone(), outcome.clone());
        Box::pin(async move {
            tx.enqueue_last(message)?;
            S::run(tx.connection(), "insert into effect (text) values ('x')").await?;
            Ok(outcome)
        })
    })
}

// Shown by: forgetting the messages of a try that commits; keeping them for a rejection.
async fn m50_a_message_at_the_end_goes_with_the_effects_and_not_with_a_rejection<S: Sql>(world: World<S>) {
    let endpoint = world.protect(same_tx());
    let message = || NewMessage::text("t", "put", "{}").with_key("acc-7");
    let rejected = Outcome::Rejected { answer: Reply::new(402), binding: true };
    assert_eq!(first(run(&world, &endpoint, K1, "a", sends_last(message(), rejected)).await).status, 402);
    assert_eq!((world.effects().await, world.outbox().await), (0, 0));
    let done = || sends_last(message(), Outcome::Completed(Reply::new(201)));
    first(run(&world, &endpoint, K2, "a", done()).await);
    replayed(run(&world, &endpoint, K2, "a", done()).await);
    assert_eq!((world.effects().await, world.outbox().await), (1, 1));
}

// What the library refuses by itself, and what only the database does.
//
// Shown by: refusing a message without asking whether the transaction is still there (PostgreSQL):
// it runs again beside what it has committed.
async fn o1_o29_a_message_that_is_refused_at_the_end_leaves_nothing<S: Sql>(world: World<S>) {
    let endpoint = world.protect(same_tx());
    let of_no_topic = || NewMessage::text("no topic", "put", "{}");
    let of_a_long_key = || NewMessage::text("t", "put", "{}").with_key("k".repeat(5_000));
    let completed = || Outcome::Completed(Reply::new(201));
    for message in [of_no_topic(), of_a_long_key()] {
        let asked = run(&world, &endpoint, K1, "a", sends_last(message, completed())).await;
        problem(asked, Code::OperationFailed);
        assert_eq!((world.effects().await, world.outbox().await, world.record("t1", K1).await), (0, 0, None));
    }
    let good = NewMessage::text("t", "put", "{}");
    first(run(&world, &endpoint, K1, "a", sends_last(good, completed())).await);
    assert_eq!((world.effects().await, world.outbox().await), (1, 1));

    // Behind a transaction that was ended. The server refuses the second message before it looks at
    // any fence.
    let no_text = || NewMessage { trace: Some(no_trace()), ..NewMessage::text("t", "put", "{}") };
    for (key, message) in [("a-key-of-many-0001", of_no_topic()), ("a-key-of-many-0002", no_text())] {
        let ends = does::<S, _>(move |_: &Put, mut tx: EffectTx<'_, S>| {
            let message = message.clone();
            Box::pin(async move {
                S::run(tx.connection(), "rollback").await?;
                S::run(tx.connection(), "insert into effect (text) values ('out')").await?;
                tx.enqueue_last(message)?;
                Ok(Outcome::Completed(Reply::new(201)))
            })
        });
        let asked = run(&world, &endpoint, key, "a", ends).await;
        if S::NOTHING_ESCAPES {
            problem(asked, Code::CommitUnknown);
        } else {
            problem(asked, Code::TransactionEnded);
            assert_eq!(world.record("t1", key).await.unwrap().state, State::UnknownRequiresRecovery);
        }
    }
}

/// A trace context that no text column takes.
fn no_trace() -> TraceContext {
    let traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned();
    TraceContext { traceparent, tracestate: Some("a\0b".to_owned()) }
}

/// A handler that runs these statements, each by itself, then says that all is well, or fails.
pub(crate) fn runs<S: Sql>(
    statements: &'static [&'static str],
    calls: &Arc<AtomicU32>,
    fails: bool,
) -> impl Does<S> + use<S> {
    let calls = calls.clone();
    does::<S, _>(move |_: &Put, mut tx: EffectTx<'_, S>| {
        let calls = calls.clone();
        Box::pin(async move {
            calls.fetch_add(1, Ordering::SeqCst);
            for statement in statements {
                S::run(tx.connection(), statement).await?;
            }
            if fails { Err(HandlerError::retryable("after all")) } else { Ok(Outcome::Completed(Reply::new(201))) }
        })
    })
}

async fn is_unknown_for_ever<S: Sql>(
    world: World<S>,
    statements: &'static [&'static str],
    fails: bool,
    committed: i64,
) {
    let endpoint = world.protect(same_tx());
    let calls = Arc::new(AtomicU32::new(0));
    if S::NOTHING_ESCAPES {
        // Proven: no statement behind the transaction was committed. The same key may come again.
        let asked = run(&world, &endpoint, K1, "a", runs(statements, &calls, fails)).await;
        assert!(problem(asked, Code::CommitUnknown).code.retryable());
        assert_eq!((world.effects().await, world.record("t1", K1).await), (0, None));
        let gate = Gate::open();
        first(run(&world, &endpoint, K1, "a", effect(&gate)).await);
        assert_eq!(world.effects().await, 1);
        return;
    }
    let ended = problem(run(&world, &endpoint, K1, "a", runs(statements, &calls, fails)).await, Code::TransactionEnded);
    assert_eq!(ended.retry_after, None);
    assert_eq!(world.record("t1", K1).await.unwrap().state, State::UnknownRequiresRecovery);
    for world in [world.another_process(), world.clone()] {
        let endpoint = world.protect(same_tx());
        let again = run(&world, &endpoint, K1, "a", runs(statements, &calls, fails)).await;
        assert_eq!(problem(again, Code::OutcomeUnknown).retry_after, Some(30));
        let other = run(&world, &endpoint, K1, "b", runs(statements, &calls, fails)).await;
        problem(other, Code::KeyReused);
    }
    let effects = committed + i64::from(S::AUTOCOMMITS);
    assert_eq!((world.effects().await, calls.load(Ordering::SeqCst)), (effects, 1), "it ran once");
}

// Shown by: answering 503 where the proof fails; taking over a stale claim of a transactional
// operation: two effects.
async fn o1_a_handler_that_commits_leaves_unknown_and_never_runs_again<S: Sql>(world: World<S>) {
    let statements = &["insert into effect (text) values ('in')", "commit", "insert into effect (text) values ('out')"];
    is_unknown_for_ever(world, statements, false, 1).await;
}

// Shown by: "no record, so nothing happened".
async fn o1_a_handler_that_rolls_back_and_goes_on_leaves_unknown_and_never_runs_again<S: Sql>(world: World<S>) {
    let statements =
        &["insert into effect (text) values ('in')", "rollback", "insert into effect (text) values ('out')"];
    is_unknown_for_ever(world, statements, false, 0).await;
}

// Shown by: rolling back after an error without asking for the token.
async fn o1_a_handler_that_goes_on_outside_and_then_fails_is_found_out_too<S: Sql>(world: World<S>) {
    let statements = &["rollback", "insert into effect (text) values ('out')"];
    is_unknown_for_ever(world, statements, true, 0).await;
}

// Shown by: taking an aborted transaction for ours without asking for the savepoint (503, and then
// two effects).
async fn o1_a_handler_that_hides_what_it_committed_behind_an_aborted_transaction_is_found_out<S: Sql>(world: World<S>) {
    let statements = &["rollback", "insert into effect (text) values ('out')", "begin"];
    let endpoint = world.protect(same_tx());
    let calls = Arc::new(AtomicU32::new(0));
    let hides = || {
        let calls = calls.clone();
        does::<S, _>(move |_: &Put, mut tx: EffectTx<'_, S>| {
            let calls = calls.clone();
            Box::pin(async move {
                calls.fetch_add(1, Ordering::SeqCst);
                for statement in statements {
                    S::run(tx.connection(), statement).await?;
                }
                let _ = S::run(tx.connection(), "insert into no_such_table (a) values (1)").await;
                Ok(Outcome::Completed(Reply::new(201)))
            })
        })
    };
    let asked = run(&world, &endpoint, K1, "a", hides()).await;
    if S::NOTHING_ESCAPES {
        problem(asked, Code::CommitUnknown);
        assert_eq!(world.effects().await, 0);
        return;
    }
    problem(asked, Code::TransactionEnded);
    problem(run(&world, &endpoint, K1, "a", hides()).await, Code::OutcomeUnknown);
    assert_eq!((world.effects().await, calls.load(Ordering::SeqCst)), (1, 1), "it ran once");
}

/// The transaction of a claim that is free.
async fn begins<S: Sql>(world: &World<S>, claim: &KeyClaim) -> Box<dyn OperationTx> {
    match world.store.begin_operation(claim, Basis::New, SOON).await.unwrap() {
        Begun::Claimed(tx) => tx,
        other => panic!("it is free: {other:?}"),
    }
}

// Shown by: taking the record that the run began from for another run's, or for its outcome: it
// runs again beside its effect.
async fn o1_a_run_of_an_old_record_that_ended_its_transaction_is_unknown_too<S: Sql>(world: World<S>) {
    for (key, reclaims) in [(K1, false), (K2, true)] {
        let claim = claim(&world.protect(same_tx()), key, Mode::Transactional, SOON);
        let mut tx = begins(&world, &claim).await;
        let outcome = oncebox::store::RunOutcome::FailedRetryable { error_code: None };
        let ttl = if reclaims { SOON } else { Duration::from_millis(1) };
        let retention = Retention { ttl, body: ttl, ..Retention::default() };
        assert_eq!(tx.complete(Vec::new(), &outcome, &retention).await.unwrap(), Proof::Same);
        tx.commit().await.unwrap();
        if !reclaims {
            world.expires(key).await;
        }
        let endpoint = world.protect(same_tx());
        let calls = Arc::new(AtomicU32::new(0));
        let statements = &["rollback", "insert into effect (text) values ('out')"];
        let asked = run(&world, &endpoint, key, "a", runs(statements, &calls, false)).await;
        let found = world.record("t1", key).await.unwrap();
        if S::NOTHING_ESCAPES {
            problem(asked, Code::CommitUnknown);
            assert_eq!(found.state, State::FailedRetryable);
        } else {
            problem(asked, Code::TransactionEnded);
            assert_eq!((found.state, found.epoch), (State::UnknownRequiresRecovery, 2), "reclaims: {reclaims}");
            problem(run(&world, &endpoint, key, "a", runs(statements, &calls, false)).await, Code::OutcomeUnknown);
        }
        assert_eq!(calls.load(Ordering::SeqCst), 1);
    }
}

// Shown by: rolling the whole transaction back (pitfall 18); completing with the effects still
// in place.
async fn o1_m71_a_binding_rejection_is_replayed_without_its_effects<S: Sql>(world: World<S>) {
    let endpoint = world.protect(same_tx());
    let calls = Arc::new(AtomicU32::new(0));
    let handler = || {
        let calls = calls.clone();
        does::<S, _>(move |_: &Put, mut tx: EffectTx<'_, S>| {
            let calls = calls.clone();
            Box::pin(async move {
                calls.fetch_add(1, Ordering::SeqCst);
                S::run(tx.connection(), "insert into effect (text) values ('x')").await?;
                let answer = Reply::json(402, &serde_json::json!({"code": "INSUFFICIENT_FUNDS"}))?;
                Ok(Outcome::Rejected { answer, binding: true })
            })
        })
    };
    let one = first(run(&world, &endpoint, K1, "a", handler()).await);
    let two = replayed(run(&world, &endpoint, K1, "a", handler()).await);
    assert_eq!((one.status, one.body.clone()), (402, two.body));
    assert_eq!((world.effects().await, calls.load(Ordering::SeqCst)), (0, 1));
    assert_eq!(world.record("t1", K1).await.unwrap().state, State::FailedReplayable);
    problem(run(&world, &endpoint, K1, "b", handler()).await, Code::KeyReused);
}

// Shown by: executing on it (M118: an orphan is not safe because it is old).
async fn o2_a_committed_claim_is_never_taken_over<S: Sql>(world: World<S>) {
    let endpoint = world.protect(same_tx());
    let claim = claim(&endpoint, K1, Mode::Transactional, Duration::from_millis(1));
    // A process that committed its claim by raw SQL, and died.
    let mut tx = begins(&world, &claim).await;
    let committed = S::run(tx.connection().unwrap(), "commit").await;
    let _ = tx.rollback().await;
    let gate = Gate::open();
    if S::NOTHING_ESCAPES {
        assert!(committed.is_err());
        first(run(&world, &endpoint, K1, "a", effect(&gate)).await);
        return;
    }
    until("the claim is committed", || async { world.record("t1", K1).await.is_some() }).await;
    problem(run(&world, &endpoint, K1, "a", effect(&gate)).await, Code::OutcomeUnknown);
    problem(run(&world, &endpoint, K1, "a", effect(&gate)).await, Code::OutcomeUnknown);
    assert_eq!((gate.calls(), world.effects().await), (0, 0));
    assert_eq!(world.record("t1", K1).await.unwrap().state, State::UnknownRequiresRecovery);
}

// Shown by: leaving the map out (SQLite would wait); answering from it without comparing.
async fn o15_o19_a_duplicate_in_this_process_gets_409_and_another_command_422<S: Sql>(world: World<S>) {
    let endpoint = world.protect(same_tx());
    let gate = Gate::closed();
    let begun = running(&world, &endpoint, K1, &gate);
    gate.begun().await;
    for _ in 0..3 {
        let again = problem(run(&world, &endpoint, K1, "a", effect(&gate)).await, Code::InProgress);
        assert!(again.retry_after.is_some_and(|seconds| (1..=40).contains(&seconds)), "{again:?}");
        let other = problem(run(&world, &endpoint, K1, "b", effect(&gate)).await, Code::KeyReused);
        assert_eq!((other.status, other.retry_after), (422, None));
    }
    gate.let_go();
    let one = first(begun.await.unwrap());
    assert_eq!(replayed(run(&world, &endpoint, K1, "a", effect(&gate)).await).body, one.body);
    assert_eq!((gate.calls(), world.effects().await), (1, 1));
}

// Shown by: waiting for the lock without a bound; 503 in its place.
async fn o15_o19_a_duplicate_in_another_process_gets_409_whatever_its_body<S: Sql>(world: World<S>) {
    // The first has time for its turn, whatever else the machine does.
    let (endpoint, other) = (world.protect(same_tx()), world.another_process());
    let there = other.protect(Route { wait_max: Duration::from_millis(100), ..same_tx() });
    let gate = Gate::closed();
    let begun = running(&world, &endpoint, K1, &gate);
    gate.begun().await;
    for text in ["a", "b"] {
        problem(run(&other, &there, K1, text, effect(&gate)).await, Code::InProgress);
    }
    gate.let_go();
    let one = first(begun.await.unwrap());
    problem(run(&other, &there, K1, "b", effect(&gate)).await, Code::KeyReused);
    assert_eq!(replayed(run(&other, &there, K1, "a", effect(&gate)).await).body, one.body);
    assert_eq!((gate.calls(), world.effects().await), (1, 1));
}

// A first request makes the next one claim without a look of its own, where the store has that.
async fn o15_a_request_among_first_ones_is_judged_as_any_other<S: Sql>(world: World<S>) {
    let endpoint = world.protect(same_tx());
    let (open, other) = (Gate::open(), world.another_process());
    let there = other.protect(same_tx());
    let keys: Vec<String> = (0..8).map(|n| format!("a-key-of-many-{n:04}")).collect();
    for key in &keys[..4] {
        first(run(&world, &endpoint, key, "a", effect(&open)).await);
    }
    replayed(run(&world, &endpoint, &keys[3], "a", effect(&open)).await);
    first(run(&world, &endpoint, &keys[4], "a", effect(&open)).await);
    problem(run(&world, &endpoint, &keys[3], "b", effect(&open)).await, Code::KeyReused);
    first(run(&world, &endpoint, &keys[5], "a", effect(&open)).await);
    first(run(&other, &there, &keys[6], "a", effect(&open)).await);
    assert_eq!((open.calls(), world.effects().await), (7, 7));
    // SQLite has one writer: the duplicate of another process would wait for its turn (O18).
    if !world.engine.store().claims_unseen() {
        return;
    }
    let closed = Gate::closed();
    let running = tokio::spawn({
        let (world, endpoint, key, closed) = (world.clone(), endpoint.clone(), keys[7].clone(), closed.clone());
        async move { run(&world, &endpoint, &key, "a", effect(&closed)).await }
    });
    closed.begun().await;
    problem(run(&world, &endpoint, &keys[7], "a", effect(&open)).await, Code::InProgress);
    problem(run(&world, &endpoint, &keys[7], "b", effect(&open)).await, Code::KeyReused);
    problem(run(&other, &there, &keys[7], "b", effect(&open)).await, Code::InProgress);
    closed.let_go();
    first(running.await.unwrap());
    replayed(run(&other, &there, &keys[7], "a", effect(&open)).await);
    assert_eq!((closed.calls(), world.effects().await), (1, 8));
}

// A purge, an expiry of bodies or an operator has the row; whoever inserts beside it waits for it,
// and holds a connection.
//
// Shown by: a claim that does not look at the record first, behind a first request (PostgreSQL).
async fn o15_a_duplicate_of_a_record_that_somebody_changes_waits_for_nobody<S: Sql>(world: World<S>) {
    let (endpoint, gate) = (world.protect(same_tx()), Gate::open());
    first(run(&world, &endpoint, K1, "a", effect(&gate)).await);
    let table = if S::NAME == "postgres" { "oncebox.idempotency_request" } else { "oncebox_idempotency_request" };
    let changing = world.store.tx(&format!("update {table} set attempts = attempts + 1")).await;
    let asked = tokio::time::timeout(Duration::from_secs(15), run(&world, &endpoint, K1, "a", effect(&gate))).await;
    replayed(asked.expect("it is answered while the row is held"));
    changing.rollback().await.unwrap();
    assert_eq!(gate.calls(), 1);
}

// In one process. What each has seen last decides whether it looks or claims at once.
//
// Shown by: making way, with the claim in hand, for one that is in the map and cannot claim: both
// are told that the other runs.
async fn o15_of_one_that_looks_and_one_that_claims_at_once_one_executes<S: Sql>(world: World<S>) {
    let (looks, claims, gate) = (world.protect(same_tx()), world.protect(same_tx()), Gate::open());
    first(run(&world, &looks, K1, "a", effect(&gate)).await);
    for round in 0..40 {
        replayed(run(&world, &looks, K1, "a", effect(&gate)).await);
        first(run(&world, &claims, &format!("a-key-of-its-own-{round:04}"), "a", effect(&gate)).await);
        let asking = [&looks, &claims].map(|endpoint| {
            let (world, endpoint, gate) = (world.clone(), endpoint.clone(), gate.clone());
            let key = format!("a-key-of-both-{round:04}");
            tokio::spawn(async move { run(&world, &endpoint, &key, "a", effect(&gate)).await })
        });
        let mut executed = 0;
        for asked in asking {
            match asked.await.unwrap() {
                Answered::Reply { replayed, .. } => executed += u32::from(!replayed),
                Answered::Problem(problem) => assert_eq!(problem.code, Code::InProgress),
            }
        }
        assert_eq!(executed, 1, "round {round}");
    }
    assert_eq!((gate.calls(), world.effects().await), (81, 81));
}

// Shown by: an identity without the tenant, or one that the database compares without case.
async fn o16_two_tenants_with_one_key_are_two_operations<S: Sql>(world: World<S>) {
    let endpoint = world.protect(same_tx());
    let gate = Gate::open();
    for (tenant, text) in [("t1", "a"), ("t2", "b"), ("T1", "c"), ("t1 ", "d")] {
        let who = format!("{tenant}:p1");
        let one = first(run_as(&who, &world, &endpoint, K1, text, effect(&gate)).await);
        let again = replayed(run_as(&who, &world, &endpoint, K1, text, effect(&gate)).await);
        assert_eq!(again.body, one.body, "{tenant}");
    }
    assert_eq!((gate.calls(), world.effects().await), (4, 4));
}

// Shown by: replaying to whoever has the key; an answer of its own, which would tell that the key
// is in use.
async fn o20_another_principal_gets_the_answer_of_a_mismatch<S: Sql>(world: World<S>) {
    let endpoint = world.protect(same_tx());
    let gate = Gate::open();
    first(run(&world, &endpoint, K1, "a", effect(&gate)).await);
    let mismatch = problem(run(&world, &endpoint, K1, "b", effect(&gate)).await, Code::KeyReused);
    for text in ["a", "b"] {
        let other = run_as("t1:p2", &world, &endpoint, K1, text, effect(&gate)).await;
        assert_eq!(problem(other, Code::KeyReused), mismatch);
    }
    assert_eq!(gate.calls(), 1);
}

// Shown by: storing a failure; dropping the transaction without rolling back; guarding the future
// of the handler alone (503 COMMIT_UNKNOWN).
async fn o29_an_error_a_panic_and_a_timeout_leave_no_row<S: Sql>(world: World<S>) {
    // Long enough for those that do not hang, and short enough to be waited for.
    let route = Route { timeout: Duration::from_secs(3), ..same_tx() };
    let endpoint = world.protect(route);
    for how in ["error", "panic", "panic before the future", "timeout"] {
        let handler = does::<S, _>(move |_: &Put, mut tx: EffectTx<'_, S>| {
            assert_ne!(how, "panic before the future", "on purpose");
            Box::pin(async move {
                S::run(tx.connection(), "insert into effect (text) values ('x')").await?;
                tx.enqueue(NewMessage::text("t", "put", "{}")).await?;
                match how {
                    "error" => Err(HandlerError::retryable("no")),
                    "panic" => panic!("on purpose"),
                    _ => std::future::pending().await,
                }
            })
        });
        problem(run(&world, &endpoint, K1, "a", handler).await, Code::OperationFailed);
        until("the row is gone", || async { world.record("t1", K1).await.is_none() }).await;
        assert_eq!((world.effects().await, world.outbox().await), (0, 0), "{how}");
    }
    // In a process that lets it run for as long as usual.
    let (gate, other) = (Gate::open(), world.another_process());
    first(run(&other, &other.protect(same_tx()), K1, "b", effect(&gate)).await);
    assert_eq!(world.effects().await, 1, "the key was not burnt, for another command either");
}

// Shown by: FAILED_RETRYABLE written in a transactional operation.
async fn o29_unkept_outcomes_leave_no_row<S: Sql>(world: World<S>) {
    let endpoint = world.protect(same_tx());
    let ends: [fn(Reply) -> Outcome<Reply>; 3] =
        [Outcome::Retryable, Outcome::DontStore, |answer| Outcome::Rejected { answer, binding: false }];
    for end in ends {
        let handler = does::<S, _>(move |_: &Put, mut tx: EffectTx<'_, S>| {
            Box::pin(async move {
                S::run(tx.connection(), "insert into effect (text) values ('x')").await?;
                Ok(end(Reply::new(429)))
            })
        });
        assert_eq!(first(run(&world, &endpoint, K1, "a", handler).await).status, 429);
        assert_eq!((world.record("t1", K1).await, world.effects().await), (None, 0));
    }
}

// All of them wait before the first one goes on. Fails where a duplicate is told at once that the
// key is in use.
async fn m43_wait_mode_replays_when_the_first_is_done<S: Sql>(world: World<S>) {
    let route = Route { while_running: WhileRunning::Wait, wait_max: SOON, ..same_tx() };
    let (endpoint, other) = (world.protect(route.clone()), world.another_process());
    let there = other.protect(route);
    let gate = Gate::closed();
    let begun = running(&world, &endpoint, K1, &gate);
    gate.begun().await;
    let waiting = [(&world, &endpoint), (&other, &there), (&world, &endpoint)];
    let mut waiting = waiting.map(|(world, endpoint)| running(world, endpoint, K1, &gate));
    let early = futures_util::future::select_all(waiting.iter_mut());
    let all_wait = tokio::time::timeout(Duration::from_millis(300), early).await.is_err();
    assert!(all_wait, "one is answered while the first one runs");
    gate.let_go();
    let one = first(begun.await.unwrap());
    for waits in waiting {
        assert_eq!(replayed(waits.await.unwrap()).body, one.body);
    }
    assert_eq!((gate.calls(), world.effects().await), (1, 1));
}

// Shown by: counting what a wait asks in between as rounds (2 s, whatever the route says).
async fn m43_a_wait_for_another_process_lasts_as_long_as_the_route_says<S: Sql>(world: World<S>) {
    let wait_max = Duration::from_secs(4);
    let route = Route { while_running: WhileRunning::Wait, wait_max, ..same_tx() };
    let (endpoint, other) = (world.protect(route.clone()), world.another_process());
    let there = other.protect(route);
    let gate = Gate::closed();
    let begun = running(&world, &endpoint, K1, &gate);
    gate.begun().await;
    let asked = Instant::now();
    problem(run(&other, &there, K1, "a", effect(&gate)).await, Code::InProgress);
    assert!(asked.elapsed() >= wait_max, "{:?}", asked.elapsed());
    gate.let_go();
    first(begun.await.unwrap());
    assert_eq!(gate.calls(), 1);
}

// Shown by: no bound: nobody is answered while it runs.
async fn m43_m120_so_many_wait_for_one_key_and_the_others_are_told_at_once<S: Sql>(world: World<S>) {
    let route = Route { while_running: WhileRunning::Wait, wait_max: SOON * 3, waiters_max: 2, ..same_tx() };
    let endpoint = world.protect(route);
    for key in [K1, K2] {
        let gate = Gate::closed();
        let begun = running(&world, &endpoint, key, &gate);
        gate.begun().await;
        // Of four two are answered while it runs, whichever they are.
        let mut asked: Vec<_> = (0..4).map(|_| running(&world, &endpoint, key, &gate)).collect();
        for _ in 0..2 {
            let (answered, _, others) =
                tokio::time::timeout(SOON, futures_util::future::select_all(asked)).await.unwrap();
            problem(answered.unwrap(), Code::InProgress);
            asked = others;
        }
        gate.let_go();
        let one = first(begun.await.unwrap());
        for waits in asked {
            assert_eq!(replayed(waits.await.unwrap()).body, one.body);
        }
        assert_eq!(gate.calls(), 1);
    }
}

// Shown by: 503 at the bound.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o18_a_duplicate_waits_its_turn_at_a_sqlite_file_and_replays_and_is_409_at_the_bound() {
    let world = sqlite().await;
    let other = world.with_pool_of(1).await;
    let bound = Duration::from_millis(300);
    let (endpoint, gate) = (world.protect(same_tx()), Gate::closed());
    let (bounded, patient) = (other.another_process(), other.another_process());
    let at_its_bound = bounded.protect(Route { wait_max: bound, ..same_tx() });
    let until_its_turn = patient.protect(Route { wait_max: SOON * 3, ..same_tx() });
    let begun = running(&world, &endpoint, K1, &gate);
    gate.begun().await;
    let asked = std::time::Instant::now();
    problem(run(&bounded, &at_its_bound, K1, "a", effect(&gate)).await, Code::InProgress);
    assert!(asked.elapsed() >= bound, "it waited");
    let mut waits = running(&patient, &until_its_turn, K1, &gate);
    assert!(tokio::time::timeout(bound, &mut waits).await.is_err(), "it has no answer before its turn");
    gate.let_go();
    let one = first(begun.await.unwrap());
    assert_eq!(replayed(waits.await.unwrap()).body, one.body);
    assert_eq!((gate.calls(), world.effects().await), (1, 1));
}
