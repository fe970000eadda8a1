//! Phased operations in a process that cannot read all of them: without the secret of a fingerprint
//! it answers 503, starts nothing, and still recovers (O20, O21); a command in plain is not driven
//! where all are sealed; an operation that cannot be read is pending. And requests that get the
//! location of an operation (M17, M43), and the memory that a command takes.

use std::sync::Arc;
use std::time::Duration;

use oncebox::operation::provider::Answer;
use oncebox::operation::{
    Answered, Code, Key, KeyFormat, KeyGiven, Keyring, Kid, Problem, Requirement, Scope, Sealer, Stage, State,
    WhileRunning,
};

use crate::flow::{BUDGET, Charge, KEY, ONE, Plan, Service, code, status};
use crate::scripted::{Scripted, done};
use crate::support::eventually;
use crate::world::{Rows, SOON};

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
    blind.succeeds().await;
    worker.stop().await;
    assert_eq!(code(&blind.ask(ONE, 700, BUDGET).await), Some(Code::FingerprintVersionUnknown));
    assert_eq!(code(&service.ask(ONE, 701, BUDGET).await), Some(Code::KeyReused));
    let (reply, replayed) = service.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, replayed, told.arrived().len(), later.arrived().len()), (201, true, 1, 1));
    service.ended_once("settled").await;
}

async fn m43_a_duplicate_is_sent_to_the_operation_that_runs<S: Rows>(store: S) {
    let (told, held) = Scripted::default().timeout(Duration::from_secs(50)).held(done());
    let plan = Plan { while_running: WhileRunning::Accepted, ..Plan::new(KEY).long_lease() };
    let service = Arc::new(Service::start(&store, &plan, told.clone()).await);
    let another = Service::start(&store, &plan, Scripted::default()).await;
    let asking = Arc::clone(&service);
    let first = tokio::spawn(async move { asking.ask(ONE, 700, SOON).await });
    held.reached().await;
    let operation = service.operation().await;
    let place = format!("/operations/{}", operation.operation_id);
    for service in [&*service, &another] {
        let accepted = problem(service.ask(ONE, 700, BUDGET).await);
        assert_eq!((accepted.status, accepted.location.as_deref()), (202, Some(place.as_str())), "{accepted:?}");
        assert_eq!(accepted.operation_id, Some(operation.operation_id));
        assert!(accepted.retry_after.is_some_and(|seconds| seconds >= 1));
        assert_eq!(code(&service.ask(ONE, 701, BUDGET).await), Some(Code::KeyReused));
    }
    held.go_on();
    let first = first.await.unwrap();
    assert_eq!(status(&first), (201, false));
    let (reply, replayed) = another.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, replayed, told.arrived().len()), (201, true, 1));
    service.ended_once("settled").await;
}

// A client that cannot keep a key asks at the location instead. Shown to fail: without the key of
// the server's own, `or_own` (each answer is 503).
async fn m17_without_a_key_an_operation_begins_and_ends_at_its_location<S: Rows>(store: S) {
    let (told, held) = Scripted::default().timeout(Duration::from_secs(50)).held(done());
    let plan = Plan { requirement: Requirement::Optional, ..Plan::new(KEY).long_lease() };
    let service = Service::start(&store, &plan, told.clone()).await;
    let accepted = eventually("an answer that the database gave", SOON, || async {
        let (scope, command) = (Some(Scope::new("t1", "p1").unwrap()), Charge { amount: 700 });
        let (phased, endpoint) = (&service.phased, &service.endpoint);
        let asked = phased.execute_phased(endpoint, scope, KeyGiven::Missing, command, None, Duration::ZERO).await;
        Some(problem(asked)).filter(|problem| problem.code != Code::StoreUnavailable)
    })
    .await;
    assert_eq!((accepted.code, accepted.status), (Code::RecoveryPending, 202), "{accepted:?}");
    let id = accepted.location.as_deref().and_then(|location| location.strip_prefix("/operations/")).unwrap();
    let at_location = || async { store.operation(id.parse().unwrap()).await.unwrap().unwrap() };
    held.reached().await;
    assert_eq!(at_location().await.stage.public(), "pending");
    held.go_on();
    let ended = eventually("it ends", SOON, || async {
        Some(at_location().await).filter(|operation| operation.stage.public() != "pending")
    });
    assert_eq!(ended.await.stage, Stage::Succeeded);
    assert_eq!((told.arrived().len(), service.operation().await.operation_id.to_string().as_str()), (1, id));
    let completed = format!("state = '{}'", State::Completed);
    let records = format!("select count(*) from {} where {completed}", S::table("idempotency_request"));
    assert_eq!(store.number(&records).await, 1);
    service.ended_once("settled").await;
}

fn sealer() -> Sealer {
    let key: (Kid, &[u8]) = ("e1".parse().unwrap(), &[7; 32]);
    Sealer::encrypting(&key.0.clone(), [key]).unwrap()
}

// Somebody who writes to the database makes another charge of it. Shown by: opening what is plain.
async fn a_command_in_plain_is_not_driven_where_only_sealed_ones_are<S: Rows>(store: S) {
    for (table, column, plain) in [("operation", "command", r#"{"amount":7}"#), ("operation_intent", "request", "7")] {
        let mut plan = Plan { sealer: sealer().sealed_only(), ..Plan::new(KEY) };
        plan.settings.calls_per_drive = 1;
        plan.settings.attempts_max = 2;
        let told = Scripted::default().answers(Answer::NoAnswer).answers(done());
        let service = Service::start(&store, &plan, told.clone()).await;
        assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
        let table = S::table(table);
        store.write(&format!("update {table} set {column} = '{plain}', {column}_kid = null")).await;
        let worker = service.recover();
        for _ in 0..3 {
            let code = code(&service.ask(ONE, 700, BUDGET).await);
            assert!(matches!(code, Some(Code::RecoveryPending | Code::OutcomeUnknown)), "{code:?}");
        }
        worker.stop().await;
        assert_eq!((told.arrived().len(), service.payments("settled").await), (1, 0), "{column}");
        // What is believed where plain is opened is driven. How many tries the worker counted
        // before depends on how often it came.
        let mut open = plan.clone();
        open.sealer = sealer();
        let (operation, past) = (S::table("operation"), S::year(2020));
        store.write(&format!("update {operation} set parked = null, attempts = 0, due_at = {past}")).await;
        let believing = Service::start(&store, &open, told.clone()).await;
        let worker = believing.recover();
        eventually("driven", SOON, || async { (told.arrived().len() == 2).then_some(()) }).await;
        worker.stop().await;
        for table in ["idempotency_request", "operation", "operation_intent", "operation_evidence"] {
            store.write(&format!("delete from {}", S::table(table))).await;
        }
        store.write("delete from payment").await;
    }
}

// A request's body stays counted as long as its driver needs the command. Shown by: a permit that
// ends with the request.
async fn the_memory_of_a_command_is_held_until_its_driver_has_ended<S: Rows>(store: S) {
    let (told, held) = Scripted::default().timeout(Duration::from_secs(50)).held(done());
    let service = Service::start(&store, &Plan::new(KEY).long_lease(), told).await;
    let asked = eventually("an answer that the database gave", SOON, || async {
        let mut permit = service.engine.body_memory("t1");
        while permit.grow(1 << 20) {}
        let (scope, key) = (Scope::new("t1", "p1").unwrap(), Key::parse(ONE.as_bytes(), KeyFormat::Opaque).unwrap());
        let (key, charge, budget) = (KeyGiven::Given(key), Charge { amount: 700 }, Duration::from_millis(1));
        let (phased, endpoint) = (&service.phased, &service.endpoint);
        let asked = phased.execute_phased(endpoint, Some(scope), key, charge, Some(permit), budget).await;
        (code(&asked) != Some(Code::StoreUnavailable)).then_some(asked)
    });
    let (asked, ()) = tokio::join!(asked, held.reached());
    assert_eq!(code(&asked), Some(Code::RecoveryPending));
    assert!(!service.engine.body_memory("t1").grow(1 << 20), "its driver has the command");
    held.go_on();
    eventually("given back", SOON, || async { service.engine.body_memory("t1").grow(1 << 20).then_some(()) }).await;
    eventually("settled", SOON, || async { (service.payments("settled").await == 1).then_some(()) }).await;
}

// There is an operation, and nothing says that it did nothing. Shown by: the answer of a store that
// is away (`STORE_UNAVAILABLE`: nothing was done).
async fn an_operation_that_cannot_be_read_for_its_client_is_pending<S: Rows>(store: S) {
    let plan = Plan::new(KEY).one_call();
    let told = Scripted::default().answers(Answer::NoAnswer).answers(done());
    let service = Service::start(&store, &plan, told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    let (table, gone) = (S::table("operation_evidence"), "hidden_evidence");
    let hidden = if S::NAME == "postgres" { format!("oncebox.{gone}") } else { gone.to_owned() };
    store.write(&format!("alter table {table} rename to {gone}")).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    let back = if S::NAME == "postgres" { "operation_evidence".to_owned() } else { table };
    store.write(&format!("alter table {hidden} rename to {back}")).await;
    let (reply, _) = service.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, told.arrived().len()), (201, 2));
    service.ended_once("settled").await;
}

crate::on_all! {
    a_command_in_plain_is_not_driven_where_only_sealed_ones_are;
    the_memory_of_a_command_is_held_until_its_driver_has_ended;
    an_operation_that_cannot_be_read_for_its_client_is_pending;
    o20_o21_a_process_without_the_secret_starts_nothing_and_recovers_what_was_begun;
    m43_a_duplicate_is_sent_to_the_operation_that_runs;
    m17_without_a_key_an_operation_begins_and_ends_at_its_location;
}
