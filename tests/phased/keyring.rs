//! Secrets of fingerprints at door B: a process without them answers 503 and starts nothing, and
//! recovery goes on (O20, O21). And a duplicate that is sent to its operation (M43).

use std::sync::Arc;
use std::time::Duration;

use oncebox::policy::operation::flow::Stage;
use oncebox::policy::operation::provider::Answer;
use oncebox::policy::operation::route::WhileRunning;
use oncebox::policy::operation::{Code, Keyring, Kid};
use oncebox::runtime::operation::{Answered, Problem};
use tokio::sync::Notify;

use crate::flow::{KEY, Plan, Service, code};
use crate::scripted::{Act, Scripted, done};
use crate::support::eventually;
use crate::world::{Rows, SOON};

const ONE: &str = "key-0000000000000001";
const BUDGET: Duration = Duration::from_secs(20);

fn ring(write: &str, kids: &[&str]) -> Keyring {
    let secrets: Vec<(Kid, Vec<u8>)> =
        kids.iter().map(|kid| (kid.parse().unwrap(), kid.repeat(32).into_bytes())).collect();
    Keyring::new(write.parse().unwrap(), secrets.iter().map(|(kid, secret)| (kid.clone(), secret.as_slice()))).unwrap()
}

fn problem(answered: Answered) -> Problem {
    let Answered::Problem(problem) = answered else { panic!("no problem: {answered:?}") };
    problem
}

// Shown by: taking the command for the same (a send by a process that cannot know what was asked);
// calling it different.
async fn o20_o21_a_process_without_the_secret_starts_nothing_and_recovers_what_was_begun<S: Rows>(store: S) {
    let mut newer = Plan { keyring: ring("k2", &["k1", "k2"]), ..Plan::new(KEY) };
    newer.settings.calls_per_drive = 1;
    let older = Plan { keyring: ring("k1", &["k1"]), ..newer.clone() };
    let told = Scripted::default().answers(Answer::NoAnswer);
    let service = Service::start(&store, &newer, told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    let ids = |kid: &str| {
        let table = S::table("idempotency_request");
        format!("select count(*) from {table} where fingerprint like '1:{kid}:%' and principal like '{kid}:%'")
    };
    assert_eq!((store.number(&ids("k2")).await, store.number(&ids("k1")).await), (1, 0));
    let before = service.operation().await;
    let later = Scripted::default().answers(done());
    let blind = Service::start(&store, &older, later.clone()).await;
    for amount in [700, 701] {
        let unknown = problem(blind.ask(ONE, amount, BUDGET).await);
        assert_eq!((unknown.code, unknown.status), (Code::FingerprintVersionUnknown, 503));
        assert!(unknown.retry_after.is_some_and(|seconds| seconds >= 1));
    }
    let after = blind.operation().await;
    assert_eq!((after.stage, after.epoch, later.arrived().len()), (before.stage, before.epoch, 0));
    // Its worker compares no commands: it drives on what stands there.
    let worker = blind.recover();
    eventually("recovered", SOON, || async { (blind.operation().await.stage == Stage::Succeeded).then_some(()) }).await;
    worker.stop().await;
    assert_eq!(code(&blind.ask(ONE, 700, BUDGET).await), Some(Code::FingerprintVersionUnknown));
    assert_eq!(code(&service.ask(ONE, 701, BUDGET).await), Some(Code::KeyReused));
    let (reply, replayed) = service.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, replayed, told.arrived().len(), later.arrived().len()), (201, true, 1, 1));
    service.ended_once("settled").await;
}

async fn m43_a_duplicate_is_sent_to_the_operation_that_runs<S: Rows>(store: S) {
    let (reached, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let held = {
        let (reached, go) = (Arc::clone(&reached), Arc::clone(&go));
        Box::pin(async move {
            reached.notify_one();
            go.notified().await;
        })
    };
    let told = Scripted::default().then(Act::After(held, done())).timeout(Duration::from_secs(50));
    let plan = Plan { while_running: WhileRunning::Accepted, ..Plan::new(KEY).long_lease() };
    let service = Arc::new(Service::start(&store, &plan, told.clone()).await);
    let another = Service::start(&store, &plan, Scripted::default()).await;
    let asking = Arc::clone(&service);
    let first = tokio::spawn(async move { asking.ask(ONE, 700, SOON).await });
    tokio::time::timeout(SOON, reached.notified()).await.expect("the provider is called");
    let operation = service.operation().await;
    let place = format!("/operations/{}", operation.operation_id);
    for service in [&*service, &another] {
        let accepted = problem(service.ask(ONE, 700, BUDGET).await);
        assert_eq!((accepted.status, accepted.location.as_deref()), (202, Some(place.as_str())), "{accepted:?}");
        assert_eq!(accepted.operation_id, Some(operation.operation_id));
        assert!(accepted.retry_after.is_some_and(|seconds| seconds >= 1));
        assert_eq!(code(&service.ask(ONE, 701, BUDGET).await), Some(Code::KeyReused));
    }
    go.notify_one();
    let first = first.await.unwrap();
    assert!(matches!(&first, Answered::Reply { reply, replayed: false } if reply.status == 201), "{first:?}");
    let (reply, replayed) = another.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, replayed, told.arrived().len()), (201, true, 1));
    service.ended_once("settled").await;
}

crate::on_all! {
    o20_o21_a_process_without_the_secret_starts_nothing_and_recovers_what_was_begun;
    m43_a_duplicate_is_sent_to_the_operation_that_runs;
}
