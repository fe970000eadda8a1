//! Later phases whose connection is lost, before a database server (O1, O9, G12): nobody hears how
//! their transaction ended. One that was rolled back runs again; one that its handler had committed
//! by itself goes to an operator, and its effect is there once.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use oncebox::operation::{Code, Stage};
use oncebox::store::StoreOptions;

use crate::flow::{BUDGET, COMMITS_BESIDE, KEY, ONE, Plan, Service, code};
use crate::proxy::{Failure, Proxy, When};
use crate::scripted::{Scripted, done};
use crate::support::eventually;
use crate::world::{Rows, SOON};

/// What a handler does last before its connection is lost.
const LOCAL: &str = "insert into step";
const SETTLED: &str = "update payment";

/// Where the connection is lost, counted from the last statement of the handler.
#[derive(Debug, Clone, Copy)]
enum At {
    /// The server has heard the statement by which the handler itself commits, and the answer
    /// is lost.
    Answer,
    /// So many requests later, before the server hears of it.
    Request(u32),
}

impl At {
    fn arm(self, proxy: &Proxy, since: &'static str, at: &'static str) {
        match self {
            Self::Answer => proxy.fail_at(since, at, 0, When::BeforeAnswer, Failure::Cut),
            Self::Request(later) => proxy.fail_at(since, "", later, When::BeforeRequest, Failure::Cut),
        }
    }
}

pub(crate) async fn behind<S: Rows>(url: &str, clear: &str) -> (S, Proxy) {
    let proxy = Proxy::before(url, clear);
    (S::connect(&StoreOptions::new(proxy.url.clone())).await.unwrap(), proxy)
}

/// A worker recovers the operation until it is parked, and requests change nothing. The caller
/// counts the effect.
async fn is_parked<S: Rows>(service: &Service<S>, proxy: &Proxy) {
    service.ask(ONE, 700, BUDGET).await;
    let worker = service.recover();
    let parked = eventually("parked", SOON, || async {
        let operation = service.operation().await;
        assert_eq!(operation.outcome_at, None, "it ran again");
        operation.parked
    })
    .await;
    worker.stop().await;
    assert!(proxy.has_failed(), "it was cut");
    assert_eq!(parked, "phase-ended-its-transaction");
    assert_eq!(service.operation().await.stage, Stage::Unknown);
    for _ in 0..2 {
        assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::OutcomeUnknown));
    }
}

async fn local_parks<S: Rows>(direct: S, (through, proxy): (S, Proxy), by: &'static str, at: At) {
    let mut plan = Plan { local: true, ..Plan::new(KEY) };
    plan.trouble.commits_by = Some(by);
    plan.trouble.local_commits.store(u32::MAX, Ordering::SeqCst);
    let told = Scripted::default().answers(done());
    let service = Service::start(&through, &plan, told.clone()).await;
    at.arm(&proxy, LOCAL, by);
    is_parked(&service, &proxy).await;
    assert_eq!(direct.number("select count(*) from step").await, 1, "it ran once");
    assert_eq!(told.arrived().len(), 0);
}

async fn settled_parks<S: Rows>(direct: S, (through, proxy): (S, Proxy), by: &'static str, at: At) {
    let mut plan = Plan::new(KEY);
    plan.trouble.commits_by = Some(by);
    plan.trouble.settled_commits.store(u32::MAX, Ordering::SeqCst);
    let told = Scripted::default().answers(done());
    let service = Service::start(&through, &plan, told.clone()).await;
    at.arm(&proxy, SETTLED, by);
    is_parked(&service, &proxy).await;
    let messages = format!("select count(*) from {}", S::table("outbox"));
    assert_eq!((direct.number(&messages).await, told.arrived().len()), (1, 1), "it ran once");
}

/// Its handler took its mark back, and committed something else: nothing but what its driver saw
/// says so, and leaving it to an operator fails once.
async fn without_its_mark_parks<S: Rows>(direct: S, (through, proxy): (S, Proxy)) {
    let mut plan = Plan { local: true, ..Plan::new(KEY) };
    plan.trouble.commits_by = Some(COMMITS_BESIDE);
    plan.trouble.local_commits.store(u32::MAX, Ordering::SeqCst);
    let told = Scripted::default().answers(done());
    let service = Service::start(&through, &plan, told.clone()).await;
    proxy.fail_at("", "set state = coalesce", 0, When::BeforeRequest, Failure::Cut);
    is_parked(&service, &proxy).await;
    assert_eq!(direct.number("select count(*) from step").await, 1, "it ran once");
    assert_eq!(told.arrived().len(), 0);
}

/// The same, and the database is away until the lease is over: its driver still leaves it to an
/// operator, and never gives it back.
async fn without_its_mark_parks_after_its_lease<S: Rows>(direct: S, (through, proxy): (S, Proxy)) {
    let mut plan = Plan { local: true, ..Plan::new(KEY).short_lease() };
    plan.trouble.commits_by = Some(COMMITS_BESIDE);
    plan.trouble.local_commits.store(u32::MAX, Ordering::SeqCst);
    let told = Scripted::default().answers(done());
    let service = Service::start(&through, &plan, told.clone()).await;
    // So many tries fail that the pause before the next one leaves time for the cut.
    proxy.fail_times_at(8, "", "set state = coalesce", When::BeforeRequest, Failure::Cut);
    assert_eq!(code(&service.ask(ONE, 700, Duration::from_millis(1)).await), Some(Code::RecoveryPending));
    eventually("it could not be parked", SOON, || async { proxy.has_failed().then_some(()) }).await;
    proxy.fails(Failure::Cut);
    let operation = direct.operation(direct.operation_ids().await[0]).await.unwrap().unwrap();
    assert_eq!((operation.stage, operation.parked), (Stage::Local, None), "it is away before that");
    let now = if S::NAME == "postgres" { "now()" } else { "utc_timestamp(6)" };
    let over = format!("select count(*) from {} where lease_until < {now}", S::table("operation"));
    eventually("the lease is over", SOON, || async { (direct.number(&over).await == 1).then_some(()) }).await;
    // Longer than the longest pause between two tries: one of them has seen the end of the lease.
    tokio::time::sleep(Duration::from_secs(3)).await;
    proxy.works();
    assert_eq!(service.is_parked().await, "phase-ended-its-transaction");
    for _ in 0..2 {
        assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::OutcomeUnknown));
    }
    assert_eq!(direct.number("select count(*) from step").await, 1, "it ran once");
    assert_eq!(told.arrived().len(), 0);
}

/// It committed nothing, or what should have committed it never arrived: it runs again, and nobody
/// is asked. Where its driver committed it, and only the answer was lost, the operation goes on.
async fn runs_again<S: Rows>(direct: S, (through, proxy): (S, Proxy), commits: u32, since: &'static str, at: At) {
    let plan = Plan { local: true, ..Plan::new(KEY) };
    plan.trouble.local_commits.store(commits, Ordering::SeqCst);
    let told = Scripted::default().answers(done());
    let service = Service::start(&through, &plan, told.clone()).await;
    at.arm(&proxy, since, "commit");
    let (reply, _) = service.ask_until_known(ONE, 700).await;
    assert!(proxy.has_failed(), "it was cut");
    assert_eq!((reply.status, told.arrived().len()), (201, 1));
    assert_eq!(direct.number("select count(*) from step").await, 1);
    let operation = service.operation().await;
    assert_eq!((operation.stage, operation.parked, operation.attempts), (Stage::Succeeded, None, 0));
    service.ended_once("settled").await;
}

/// Each on a database of its own behind a network that can fail.
macro_rules! behind_a_network {
    ($($(#[$doc:meta])* $name:ident: $body:expr;)*) => {
        behind_a_network! { on_postgres: $($name: $body;)* }
        behind_a_network! { on_mariadb: $($name: $body;)* }
    };
    (on_postgres: $($name:ident: $body:expr;)*) => {
        mod on_postgres {
            use super::*;
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                crate::postgres::with_database(stringify!($name), |database| async move {
                    let behind = behind(&database.url, "sslmode=disable").await;
                    let run = $body;
                    run(crate::world::prepared(database.store).await, behind).await;
                })
                .await;
            })*
        }
    };
    (on_mariadb: $($name:ident: $body:expr;)*) => {
        mod on_mariadb {
            use super::*;
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let Some(database) = crate::mysql::Db::new(stringify!($name)).await else { return };
                let behind = behind(&database.url, "ssl-mode=DISABLED").await;
                let run = $body;
                run(crate::world::prepared(database.store.clone()).await, behind).await;
            })*
        }
    };
}

pub(crate) use behind_a_network;

// Shown by: giving it back where it could not be parked at once (it ran again, and its effect was
// there twice).
mod without_its_mark {
    use super::*;

    behind_a_network! {
        o1_a_phase_that_ended_its_transaction_is_parked_although_that_fails_once: without_its_mark_parks;
        o1_a_phase_that_ended_its_transaction_is_parked_although_the_lease_is_over_before:
            without_its_mark_parks_after_its_lease;
    }
}

// Shown by: no mark (each effect was there twice, and more often).
behind_a_network! {
    o1_a_phase_that_committed_and_lost_the_answer_is_not_run_again:
        |direct, behind| local_parks(direct, behind, "commit", At::Answer);
    o1_a_phase_that_committed_and_was_cut_off_before_it_moved_on_is_not_run_again:
        |direct, behind| local_parks(direct, behind, "commit", At::Request(2));
    o1_a_phase_behind_an_effect_that_committed_and_lost_the_answer_is_not_run_again:
        |direct, behind| settled_parks(direct, behind, "commit", At::Answer);
    o9_a_phase_that_was_cut_off_before_it_moved_on_runs_again:
        |direct, behind| runs_again(direct, behind, 0, LOCAL, At::Request(1));
    o9_a_phase_whose_own_commit_never_arrived_runs_again:
        |direct, behind| runs_again(direct, behind, 1, LOCAL, At::Request(1));
    o9_a_phase_behind_an_effect_that_was_cut_off_runs_again:
        |direct, behind| runs_again(direct, behind, 0, SETTLED, At::Request(1));
    o9_a_phase_whose_driver_committed_and_lost_the_answer_goes_on:
        |direct, behind| runs_again(direct, behind, 0, LOCAL, At::Answer);
    o9_a_phase_behind_an_effect_whose_driver_committed_and_lost_the_answer_goes_on:
        |direct, behind| runs_again(direct, behind, 0, SETTLED, At::Answer);
}

/// A provider is called, and the database is away when the time of the request is over.
async fn is_pending_while_the_database_is_away<S: Rows>(direct: S, (through, proxy): (S, Proxy)) {
    let (told, held) = Scripted::default().timeout(SOON).held(done());
    let service = Arc::new(Service::start(&through, &Plan::new(KEY).long_lease(), told.clone()).await);
    let asking = Arc::clone(&service);
    let asked = tokio::spawn(async move { asking.ask_once(ONE, 700, Duration::from_secs(10)).await });
    held.reached().await;
    proxy.fails(Failure::Cut);
    assert!(!asked.is_finished(), "its time was over before the cut: nothing is shown");
    let answered = asked.await.unwrap();
    assert_eq!(code(&answered), Some(Code::RecoveryPending), "{answered:?}");
    assert_eq!(direct.number("select count(*) from payment").await, 1);
    proxy.works();
    held.go_on();
    let (reply, _) = service.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, told.arrived().len()), (201, 1));
    service.ended_once("settled").await;
}

/// Its handler commits, and the database cannot be told at once that nobody knows how it ended.
async fn a_first_phase_is_parked_later<S: Rows>(direct: S, (through, proxy): (S, Proxy)) {
    let plan = Plan::new(KEY).short_lease();
    plan.trouble.first_commits.store(1, Ordering::SeqCst);
    let told = Scripted::default().answers(done());
    let service = Service::start(&through, &plan, told.clone()).await;
    proxy.fail_at("", "set state = coalesce", 0, When::BeforeRequest, Failure::Cut);
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::TransactionEnded));
    assert!(proxy.has_failed(), "it was cut");
    let worker = service.recover();
    assert_eq!(service.is_parked().await, "first-phase-ended-its-transaction");
    worker.stop().await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::OutcomeUnknown));
    assert_eq!((direct.number("select count(*) from payment").await, told.arrived().len()), (1, 0));
}

// Shown to fail: with the answer that the store is away, which says that the request did nothing.
mod says_what_happened {
    use super::*;

    behind_a_network! {
        g12_a_request_whose_operation_is_stored_is_not_told_that_it_did_nothing: is_pending_while_the_database_is_away;
        o1_a_first_phase_that_committed_is_told_so_although_it_cannot_be_parked: a_first_phase_is_parked_later;
    }
}

mod tables {
    use super::*;

    const MAKES: &str = "create table if not exists made_by_handler (a int)";

    // MariaDB commits before it makes a table. Shown by: no mark.
    behind_a_network! { on_mariadb:
        o1_a_phase_that_made_a_table_and_lost_the_answer_is_not_run_again:
            |direct, behind| local_parks(direct, behind, MAKES, At::Answer);
        o1_a_phase_that_made_a_table_and_was_cut_off_before_it_moved_on_is_not_run_again:
            |direct, behind| local_parks(direct, behind, MAKES, At::Request(2));
    }
}
