//! What an operator sees of a phased operation: claims, take-ups, transactions that ended, commits
//! that were lost (M103 to M105). Each test hears its own thread.

use std::sync::atomic::Ordering;

use oncebox::adapter::hex;
use oncebox::operation::provider::{Answer, Strategy};
use oncebox::operation::{Answered, Code, Identity, Key, KeyFormat, Scope};
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, StoreOptions};

use crate::flow::{BUDGET, KEY, ONE, Plan, Service, TWO, code};
use crate::hearing::{Heard, hear};
use crate::proxy::{Failure, Proxy, When};
use crate::scripted::{Scripted, done};
use crate::support::eventually;
use crate::world::SOON;

const CLAIMS: &str = "oncebox_idempotency_claim_count";
const TAKEN: &str = "oncebox_idempotency_takeover_count";
const ENDED: &str = "oncebox_idempotency_transaction_ended_count";
const UNKNOWN: &str = "oncebox_idempotency_unknown_state_count";
const LOST: &str = "oncebox_idempotency_commit_unknown_count";

fn counted(heard: &Heard, name: &str) -> f64 {
    heard.metric(name, &[("operation", "create_charge")])
}

fn taken_up(heard: &Heard) -> f64 {
    heard.metric(TAKEN, &[("operation", "create_charge"), ("kind", "recovery")])
}

/// The spans of this name are those of the first key.
fn are_of_one(heard: &Heard, name: &str) -> usize {
    let spans = heard.spans(name);
    let key = Key::parse(ONE.as_bytes(), KeyFormat::Opaque).unwrap();
    let identity = Identity::new(&Scope::new("t1", "p1").unwrap(), "create_charge".parse().unwrap(), key);
    let hash = &hex(&identity.digest())[..12];
    assert!(spans.iter().all(|span| span["operation"] == "create_charge" && span["key"] == *hash), "{spans:?}");
    spans.len()
}

/// A service whose first send proved nothing: the operation is left for later.
async fn left(store: &SqliteStore) -> Service<SqliteStore> {
    let plan = Plan::new(KEY).one_call();
    let told = Scripted::default().answers(Answer::status(500)).answers(done());
    let service = Service::start(store, &plan, told).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    service
}

// Shown by: a phased operation that notes no claim, and a worker that notes nothing.
#[tokio::test]
async fn m103_m105_door_b_counts_its_claims_and_a_worker_what_it_takes_up() {
    let (heard, _hearing) = hear();
    let directory = tempfile::tempdir().unwrap();
    let store = crate::world::sqlite(directory.path()).await;
    let service = left(&store).await;
    assert_eq!((counted(&heard, CLAIMS), are_of_one(&heard, "idempotency.acquire")), (1.0, 1));
    assert_eq!(taken_up(&heard), 0.0);
    let worker = service.recover();
    service.succeeds().await;
    worker.stop().await;
    assert!(taken_up(&heard) >= 1.0 && are_of_one(&heard, "idempotency.recovery") >= 1);
    let again = service.ask(ONE, 700, BUDGET).await;
    assert!(matches!(again, Answered::Reply { replayed: true, .. }), "{again:?}");
    assert_eq!((counted(&heard, CLAIMS), counted(&heard, ENDED), counted(&heard, LOST)), (1.0, 0.0, 0.0));
}

// Shown by: a worker that counts nothing (its process showed 0 while operations waited for a
// person).
#[tokio::test]
async fn m103_a_worker_shows_what_is_unknown() {
    let (heard, _hearing) = hear();
    let directory = tempfile::tempdir().unwrap();
    let store = crate::world::sqlite(directory.path()).await;
    let told = Scripted::default().answers(Answer::NoAnswer);
    let service = Service::start(&store, &Plan::new(Strategy::None), told).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::OutcomeUnknown));
    assert_eq!(heard.metric(UNKNOWN, &[]), 0.0, "nobody has counted yet");
    let worker = service.recover();
    eventually("it is shown", SOON, || async { (heard.metric(UNKNOWN, &[]) == 1.0).then_some(()) }).await;
    worker.stop().await;
}

// Shown by: a request that notes no take-up.
#[tokio::test]
async fn m103_m105_a_request_that_takes_its_operation_up_is_counted() {
    let (heard, _hearing) = hear();
    let directory = tempfile::tempdir().unwrap();
    let store = crate::world::sqlite(directory.path()).await;
    let service = left(&store).await;
    let before = are_of_one(&heard, "idempotency.recovery");
    let (reply, _) = service.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, counted(&heard, CLAIMS)), (201, 1.0));
    assert!(taken_up(&heard) >= 1.0);
    // One for the request that met it, one for the taking.
    assert!(are_of_one(&heard, "idempotency.recovery") >= before + 2);
}

// Shown by: answering without a note, in the first phase and in a later one.
#[tokio::test]
async fn o1_m103_a_phase_that_ended_its_transaction_is_counted() {
    let (heard, _hearing) = hear();
    crate::postgres::with_database("o1_m103_a_phase_that_ended", |database| async move {
        let store = crate::world::prepared(database.store).await;
        let plan = Plan { local: true, ..Plan::new(KEY) };
        let service = Service::start(&store, &plan, Scripted::default()).await;
        plan.trouble.first_rolls_back.store(1, Ordering::SeqCst);
        assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::TransactionEnded));
        assert_eq!((counted(&heard, CLAIMS), counted(&heard, ENDED)), (1.0, 1.0));
        plan.trouble.local_commits.store(1, Ordering::SeqCst);
        assert_eq!(code(&service.ask(TWO, 701, BUDGET).await), Some(Code::OutcomeUnknown));
        assert_eq!((counted(&heard, CLAIMS), counted(&heard, ENDED)), (2.0, 2.0));
    })
    .await;
}

// Shown by: answering without a note, in the first phase and in a later one.
#[tokio::test]
async fn o29_m103_a_commit_of_a_phase_that_was_lost_sight_of_is_counted() {
    let (heard, _hearing) = hear();
    crate::postgres::with_database("o29_m103_a_commit_of_a_phase", |database| async move {
        crate::world::prepared(database.store).await;
        let proxy = Proxy::before(&database.url, "sslmode=disable");
        let through = oncebox::store::postgres::PostgresStore::connect(&StoreOptions::new(proxy.url.clone())).await;
        let plan = Plan { local: true, ..Plan::new(KEY) };
        let service = Service::start(&through.unwrap(), &plan, Scripted::default().answers(done())).await;
        proxy.fail_at("insert into payment", "COMMIT", 0, When::BeforeRequest, Failure::Cut);
        assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::CommitUnknown));
        assert!(proxy.has_failed(), "it was cut");
        assert_eq!(counted(&heard, LOST), 1.0);
        // A later phase, whose driver looks for itself what became of it.
        proxy.fail_at("insert into step", "COMMIT", 0, When::BeforeAnswer, Failure::Cut);
        let (reply, _) = service.ask_until_known(TWO, 701).await;
        assert!(proxy.has_failed(), "it was cut");
        assert_eq!((reply.status, counted(&heard, LOST), counted(&heard, ENDED)), (201, 2.0, 0.0));
    })
    .await;
}
