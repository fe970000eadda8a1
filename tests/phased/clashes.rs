//! Phases that the database rolls back, and first phases that end their transaction by themselves
//! (O1, O17, R27).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use oncebox::operation::{Code, Stage};

use crate::flow::{BUDGET, Clash, KEY, ONE, Plan, Service, TWO, code, status};
use crate::scripted::{Scripted, done};
use crate::world::Rows;

/// Two operations in a deadlock: one of them runs its phase again, within its request.
async fn deadlock<S: Rows>(store: &S, first_phase: bool, hidden: bool) {
    store.write("insert into place values ('x', 0), ('y', 0)").await;
    let clash = Arc::new(Clash { hidden, ..Clash::new(first_phase) });
    let mut plan = Plan { local: true, ..Plan::new(KEY) };
    plan.trouble.clash = Some(Arc::clone(&clash));
    let service = Service::start(store, &plan, Scripted::default().answers(done()).answers(done())).await;
    let (one, two) = tokio::join!(service.ask(ONE, 700, BUDGET), service.ask(TWO, 701, BUDGET));
    for answered in [one, two] {
        assert_eq!(status(&answered), (201, false));
    }
    assert_eq!(clash.runs(), 3, "one of them ran again");
    assert_eq!(store.number("select count(*) from place where n = 2").await, 2);
    for id in store.operation_ids().await {
        let operation = store.operation(id).await.unwrap().unwrap();
        assert_eq!((operation.stage, operation.parked, operation.attempts), (Stage::Succeeded, None, 0));
    }
}

// Shown by: taking the savepoint that InnoDB took away with the transaction for a handler's doing.
async fn o17_r27_a_deadlock_in_the_first_phase_runs_it_again<S: Rows>(store: S) {
    deadlock(&store, true, false).await;
}

// Shown by: taking the savepoint that InnoDB took away for a handler's doing (the operation
// was parked).
async fn o17_r27_a_deadlock_in_a_later_phase_runs_it_again<S: Rows>(store: S) {
    deadlock(&store, false, false).await;
}

// Shown by: asking only the handler's error.
async fn o17_r27_a_deadlock_is_noted_though_the_handler_hides_it<S: Rows>(store: S) {
    deadlock(&store, false, true).await;
}

// Shown by: running again for ever.
async fn r27_what_nobody_failed_runs_again_in_the_drive_but_not_for_ever<S: Rows>(store: S) {
    let plan = Plan { local: true, ..Plan::new(KEY) };
    plan.trouble.local_busy.store(3, Ordering::SeqCst);
    let service = Service::start(&store, &plan, Scripted::default().answers(done()).answers(done())).await;
    assert_eq!(status(&service.ask(ONE, 700, BUDGET).await), (201, false));
    plan.trouble.local_busy.store(100, Ordering::SeqCst);
    assert_eq!(code(&service.ask(TWO, 700, BUDGET).await), Some(Code::RecoveryPending));
    assert_eq!(plan.trouble.local_busy.load(Ordering::SeqCst), 94);
    // Due, as a worker takes it up: that counts nothing either.
    store
        .write(&format!("update {} set due_at = {} where outcome_at is null", S::table("operation"), S::year(2020)))
        .await;
    assert_eq!(code(&service.ask(TWO, 700, BUDGET).await), Some(Code::RecoveryPending));
    assert_eq!(plan.trouble.local_busy.load(Ordering::SeqCst), 88);
    for id in store.operation_ids().await {
        let operation = store.operation(id).await.unwrap().unwrap();
        assert_eq!((operation.attempts, operation.parked), (0, None));
    }
    plan.trouble.local_busy.store(0, Ordering::SeqCst);
    let (reply, _) = service.ask_until_known(TWO, 700).await;
    assert_eq!((reply.status, store.number("select count(*) from step").await), (201, 2));
}

/// A key whose time is over, and a handler that ends the transaction of its first phase: what it
/// wrote after may be done.
///
/// Shown by: inserting the record as unknown, which does nothing where an old one stands: the retry
/// ran it again.
async fn o1_o4_a_key_used_anew_whose_first_phase_ended_by_itself_runs_no_more<S: Rows>(store: S) {
    let plan = Plan::new(KEY);
    let service = Service::start(&store, &plan, Scripted::default().answers(done())).await;
    assert_eq!(status(&service.ask(ONE, 700, BUDGET).await), (201, false));
    let first = service.operation().await.operation_id;
    for table in ["idempotency_request", "operation"] {
        let over = format!("outcome_at = {0}, expires_at = {0}", S::year(2020));
        store.write(&format!("update {} set {over}", S::table(table))).await;
    }
    plan.trouble.first_rolls_back.store(1, Ordering::SeqCst);
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::TransactionEnded));
    for _ in 0..2 {
        assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::OutcomeUnknown));
    }
    let operation = service.operation().await;
    assert_ne!(operation.operation_id, first);
    assert_eq!(
        (operation.stage, operation.parked.as_deref()),
        (Stage::Unknown, Some("first-phase-ended-its-transaction"))
    );
    // On MariaDB what was written after the end waited for a COMMIT.
    let after = i64::from(S::NAME == "postgres");
    assert_eq!(store.number("select count(*) from step").await, after);
}

crate::on_all! {
    r27_what_nobody_failed_runs_again_in_the_drive_but_not_for_ever;
}

mod at_once {
    use super::{
        o1_o4_a_key_used_anew_whose_first_phase_ended_by_itself_runs_no_more,
        o17_r27_a_deadlock_in_a_later_phase_runs_it_again, o17_r27_a_deadlock_in_the_first_phase_runs_it_again,
    };

    crate::on_servers! {
        o1_o4_a_key_used_anew_whose_first_phase_ended_by_itself_runs_no_more;
        o17_r27_a_deadlock_in_the_first_phase_runs_it_again;
        o17_r27_a_deadlock_in_a_later_phase_runs_it_again;
    }
}

mod hidden {
    use super::o17_r27_a_deadlock_is_noted_though_the_handler_hides_it;

    crate::on_mariadb! { o17_r27_a_deadlock_is_noted_though_the_handler_hides_it; }
}
