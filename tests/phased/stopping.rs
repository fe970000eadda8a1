//! A worker whose database fails it for a moment, or while the worker is stopped (O8, O9, G10).

use std::time::Duration;

use oncebox::operation::{Code, Stage};

use crate::cut::{behind, behind_a_network};
use crate::flow::{BUDGET, KEY, ONE, Plan, Service, code};
use crate::proxy::{Failure, Proxy, When};
use crate::scripted::{Act, Scripted, done};
use crate::world::{Rows, SOON};

/// An operation whose process ended in its first call, and which is due.
async fn left<S: Rows>(direct: &S, plan: &Plan) {
    let dying = Service::start(direct, plan, Scripted::default().then(Act::Dies)).await;
    assert_eq!(code(&dying.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    direct.write(&format!("update {} set lease_until = {}", S::table("operation"), S::year(2020))).await;
}

async fn settles<S: Rows>(service: &Service<S>) {
    service.succeeds().await;
    service.ended_once("settled").await;
}

/// One read of the operation's record fails.
async fn is_due_soon<S: Rows>(direct: S, (through, proxy): (S, Proxy), reads: &'static str) {
    let mut plan = Plan::new(KEY).long_lease();
    left(&direct, &plan).await;
    plan.settings.backoff_max = 10 * SOON;
    let told = Scripted::default().answers(done());
    let service = Service::start(&through, &plan, told.clone()).await;
    proxy.fail_at("", reads, 0, When::BeforeRequest, Failure::Cut);
    let worker = service.recover();
    settles(&service).await;
    assert!(proxy.has_failed(), "it was cut");
    worker.stop().await;
    assert_eq!(told.arrived().len(), 1);
}

/// The provider did it, and the database is away when that is to be stored; then the worker is
/// stopped. The next worker sends the same again.
async fn a_stop_ends<S: Rows>(direct: S, (through, proxy): (S, Proxy), failure: Failure) {
    let mut plan = Plan::new(KEY).long_lease();
    left(&direct, &plan).await;
    plan.settings.shutdown_grace = Duration::from_millis(300);
    let (told, held) = Scripted::default().timeout(SOON / 2).held(done());
    let service = Service::start(&through, &plan, told.clone()).await;
    let worker = service.recover();
    held.reached().await;
    proxy.fails(failure);
    held.go_on();
    tokio::time::timeout(SOON, worker.stop()).await.expect("the worker ends");
    let operation = direct.operation(direct.operation_ids().await[0]).await.unwrap().unwrap();
    assert_eq!((operation.stage, operation.evidence.len()), (Stage::Outstanding, 0));
    direct.write(&format!("update {} set lease_until = {}", S::table("operation"), S::year(2020))).await;
    let again = Scripted::default().answers(done());
    let next = Service::start(&direct, &plan, again.clone()).await;
    let worker = next.recover();
    settles(&next).await;
    worker.stop().await;
    let (first, second) = (told.arrived(), again.arrived());
    assert_eq!((first.len(), second.len()), (1, 1));
    assert_eq!((&second[0].key, &second[0].bytes), (&first[0].key, &first[0].bytes));
}

// Shown by: `backoff_max` for every error (it was due ten minutes later).
behind_a_network! { on_postgres:
    o9_an_operation_that_could_not_be_read_for_a_moment_is_due_soon:
        |direct, behind| is_due_soon(direct, behind, "oncebox.idempotency_purge");
    // Shown by: storing as long as the error is transient (the worker did not end).
    g10_a_stop_while_the_database_is_away_ends_the_worker: |direct, behind| a_stop_ends(direct, behind, Failure::Cut);
    g10_a_stop_while_the_database_is_silent_ends_the_worker:
        |direct, behind| a_stop_ends(direct, behind, Failure::Silence);
}
behind_a_network! { on_mariadb:
    o9_an_operation_that_could_not_be_read_for_a_moment_is_due_soon:
        |direct, behind| is_due_soon(direct, behind, "oncebox_idempotency_purge");
    g10_a_stop_while_the_database_is_away_ends_the_worker: |direct, behind| a_stop_ends(direct, behind, Failure::Cut);
}
