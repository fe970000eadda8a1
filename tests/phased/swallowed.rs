//! Later phases that swallow an error by which their transaction was lost: where the server proves
//! that nothing of them was committed, they have failed, and run again (O1, O9, R23, R27).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use oncebox::operation::{Code, Stage};

use crate::flow::{BUDGET, COMMITS_BESIDE, Clash, KEY, ONE, Plan, Service, TWO, code};
use crate::scripted::{Scripted, done};
use crate::support::eventually;
use crate::world::{Rows, SOON};

// Shown by: parking whatever is not proven to be the same transaction.
async fn o9_r23_a_phase_that_swallowed_an_error_has_failed_and_runs_again<S: Rows>(store: S) {
    let plan = Plan { local: true, ..Plan::new(KEY) };
    plan.trouble.local_swallows.store(1, Ordering::SeqCst);
    plan.trouble.settled_swallows.store(1, Ordering::SeqCst);
    let told = Scripted::default().answers(done());
    let service = Service::start(&store, &plan, told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    let operation = service.operation().await;
    assert_eq!((operation.stage, operation.parked.as_deref()), (Stage::Local, None));
    assert_eq!((told.arrived().len(), store.number("select count(*) from step").await), (0, 0), "nothing of it stands");
    let after_the_effect = eventually("the phase behind the effect", SOON, || async {
        assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
        let operation = service.operation().await;
        assert_eq!(operation.parked, None);
        (operation.stage == Stage::Unknown).then_some(operation)
    })
    .await;
    assert!(after_the_effect.intents.iter().all(|intent| intent.outcome.as_deref() == Some("succeeded")));
    assert_eq!((service.payments("pending").await, service.messages().await), (1, 0));
    let (reply, _) = service.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, told.arrived().len()), (201, 1));
    assert_eq!(store.number("select count(*) from step").await, 1);
    service.ended_once("settled").await;
}

// Shown by: counting no attempt (it runs for ever).
async fn o9_a_phase_that_always_swallows_an_error_is_left_to_an_operator_in_the_end<S: Rows>(store: S) {
    let mut plan = Plan { local: true, ..Plan::new(KEY) };
    plan.settings.attempts_max = 2;
    plan.trouble.local_swallows.store(u32::MAX, Ordering::SeqCst);
    let service = Service::start(&store, &plan, Scripted::default()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    let worker = service.recover();
    let parked = service.is_parked().await;
    worker.stop().await;
    assert_eq!((parked.as_str(), service.operation().await.attempts), ("phase-failed", 2));
    assert_eq!(store.number("select count(*) from step").await, 0);
}

/// Two operations in a deadlock, and the victim goes on as if nothing had been. On MariaDB what it
/// writes then stands in a transaction of its own, which is not committed.
///
/// Shown by: parking where the savepoint is gone, without asking what was committed.
async fn o1_o17_a_deadlock_that_a_phase_swallowed_runs_it_again<S: Rows>(store: S) {
    store.write("insert into place values ('x', 0), ('y', 0)").await;
    let clash = Arc::new(Clash { swallowed: true, ..Clash::new(false) });
    let mut plan = Plan { local: true, ..Plan::new(KEY) };
    plan.trouble.clash = Some(Arc::clone(&clash));
    let told = Scripted::default().answers(done()).answers(done());
    let service = Service::start(&store, &plan, told.clone()).await;
    tokio::join!(service.ask(ONE, 700, BUDGET), service.ask(TWO, 701, BUDGET));
    for (key, amount) in [(ONE, 700), (TWO, 701)] {
        let (reply, _) = service.ask_until_known(key, amount).await;
        assert_eq!(reply.status, 201);
    }
    assert_eq!((clash.runs(), told.arrived().len()), (3, 2), "one of them ran again");
    assert_eq!(store.number("select count(*) from place where n = 2").await, 2);
    assert_eq!(store.number("select count(*) from step where name = 'after'").await, 0);
    for id in store.operation_ids().await {
        let operation = store.operation(id).await.unwrap().unwrap();
        assert_eq!((operation.stage, operation.parked), (Stage::Succeeded, None));
    }
}

/// A phase that commits by itself, and says that all is well, does not run again.
///
/// Shown by: asking nothing where the savepoint is gone.
async fn o1_a_phase_that_committed_by_itself_is_left_to_an_operator<S: Rows>(store: S) {
    let plan = Plan { local: true, ..Plan::new(KEY) };
    plan.trouble.local_commits.store(1, Ordering::SeqCst);
    let service = Service::start(&store, &plan, Scripted::default()).await;
    for _ in 0..2 {
        let answered = service.ask(ONE, 700, BUDGET).await;
        assert_eq!(code(&answered), Some(Code::OutcomeUnknown));
    }
    assert_eq!(service.operation().await.parked.as_deref(), Some("phase-ended-its-transaction"));
    assert_eq!(store.number("select count(*) from step").await, 1, "it ran once");
}

/// It says that it failed, and its mark is gone: nothing but its transaction, which is not the one
/// that began, tells that it wrote.
///
/// Shown by: running a phase again that failed, whatever became of its transaction (it wrote
/// twice).
async fn o1_a_phase_that_committed_by_itself_and_failed_is_left_to_an_operator<S: Rows>(store: S) {
    let mut plan = Plan { local: true, ..Plan::new(KEY) };
    plan.trouble.commits_by = Some(COMMITS_BESIDE);
    plan.trouble.local_commits.store(u32::MAX, Ordering::SeqCst);
    plan.trouble.local_fails.store(u32::MAX, Ordering::SeqCst);
    let service = Service::start(&store, &plan, Scripted::default()).await;
    for _ in 0..2 {
        assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::OutcomeUnknown));
    }
    assert_eq!(service.operation().await.parked.as_deref(), Some("phase-ended-its-transaction"));
    assert_eq!(store.number("select count(*) from step").await, 1, "it ran once");
}

crate::on_postgres! {
    o9_r23_a_phase_that_swallowed_an_error_has_failed_and_runs_again;
    o9_a_phase_that_always_swallows_an_error_is_left_to_an_operator_in_the_end;
}

mod at_once {
    use super::{
        o1_a_phase_that_committed_by_itself_and_failed_is_left_to_an_operator,
        o1_a_phase_that_committed_by_itself_is_left_to_an_operator,
        o1_o17_a_deadlock_that_a_phase_swallowed_runs_it_again,
    };

    crate::on_servers! {
        o1_o17_a_deadlock_that_a_phase_swallowed_runs_it_again;
        o1_a_phase_that_committed_by_itself_is_left_to_an_operator;
        o1_a_phase_that_committed_by_itself_and_failed_is_left_to_an_operator;
    }
}
