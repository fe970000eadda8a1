//! Drivers that die, workers that take over.

use std::time::Duration;

use oncebox::operation::provider::Answer;
use oncebox::operation::{Answered, Code};
use oncebox::store::Taken;

use crate::faults::adapter;
use crate::flow::{BUDGET, KEY, KEY_AND_QUERY, ONE, Plan, Service, TWO, code, status};
use crate::provider::ProviderProcess;
use crate::scripted::{Act, Scripted, done};
use crate::support::eventually;
use crate::world::{Rows, SOON};

/// A service whose process ends while its first send is out.
async fn dies_in_a_call<S: Rows>(store: &S, plan: &Plan) -> Service<S> {
    let dying = Service::start(store, plan, Scripted::default().then(Act::Dies)).await;
    let answered = dying.ask(ONE, 700, BUDGET).await;
    assert_eq!(code(&answered), Some(Code::RecoveryPending));
    dying
}

// M115, M81. Shown by: another key at every send.
async fn m115_m81_provider_success_then_crash_keeps_the_identity<S: Rows>(store: S) {
    let plan = Plan::new(KEY).short_lease();
    let dying = dies_in_a_call(&store, &plan).await;
    let before = dying.operation().await;
    let told = Scripted::default().answers(done());
    let next = Service::start(&store, &plan, told.clone()).await;
    let worker = next.recover();
    let operation = next.succeeds().await;
    worker.stop().await;
    assert_eq!(operation.operation_id, before.operation_id);
    assert_eq!(told.arrived()[0].key, before.intents[0].intent.provider_key);
    assert_eq!(
        (told.arrived()[0].send, told.arrived()[0].bytes.clone()),
        (2, before.intents[0].intent.request.bytes.clone())
    );
    assert_eq!(told.arrived().len(), 1);
    let (reply, replayed) = next.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, replayed), (201, true));
    // Pitfall 11: the record was finished, and the message enqueued, by the worker.
    next.ended_once("settled").await;
}

// M80, M46: no worker runs, and the repeating request recovers. Shown by: answering pending for
// ever.
async fn m80_m46_the_repeating_request_recovers_within_its_budget<S: Rows>(store: S) {
    let plan = Plan::new(KEY).short_lease();
    dies_in_a_call(&store, &plan).await;
    let told = Scripted::default().answers(done());
    let next = Service::start(&store, &plan, told.clone()).await;
    has_no_driver(&next).await;
    assert_eq!(status(&next.ask(ONE, 700, BUDGET).await), (201, true), "one request is enough");
    assert_eq!(told.arrived().len(), 1);
    next.ended_once("settled").await;
}

async fn has_no_driver<S: Rows>(service: &Service<S>) {
    eventually("an operation without a driver", SOON, || async {
        service.operation().await.lease_until.is_none().then_some(())
    })
    .await;
}

// M46, M83: twenty requests and a worker at once, and one of them recovers. Shown by: no epoch in
// the taking.
async fn m83_m46_of_many_that_try_one_recovers<S: Rows>(store: S) {
    let plan = Plan::new(KEY).short_lease();
    dies_in_a_call(&store, &plan).await;
    let told = Scripted::default().answers(done());
    let next = Service::start(&store, &plan, told.clone()).await;
    has_no_driver(&next).await;
    let worker = next.recover();
    let asks = (0..20).map(|_| next.ask(ONE, 700, BUDGET));
    for answered in futures_util::future::join_all(asks).await {
        match code(&answered) {
            Some(code) => assert!(matches!(code, Code::RecoveryPending | Code::InProgress), "{code:?}"),
            None => assert_eq!(status(&answered), (201, true)),
        }
    }
    worker.stop().await;
    next.ask_until_known(ONE, 700).await;
    assert_eq!(told.arrived().len(), 1);
    next.ended_once("settled").await;
}

// O9, pitfall 10: three calls take longer than the lease, and nobody else takes the operation.
// Shown by: no renewal.
async fn o9_a_lease_is_renewed_while_its_operation_is_driven<S: Rows>(store: S) {
    let slow = |answer| Act::After(Box::pin(tokio::time::sleep(Duration::from_millis(2_500))), answer);
    let told = Scripted::default()
        .then(slow(Answer::status(500)))
        .then(slow(Answer::status(500)))
        .then(slow(done()))
        .timeout(Duration::from_secs(3));
    // Renewed every two seconds: a renewal may be three late, with the slack that a call leaves.
    let plan = Plan::new(KEY).short_lease();
    let service = Service::start(&store, &plan, told.clone()).await;
    let silent = Scripted::default();
    let others = Service::start(&store, &plan, silent.clone()).await;
    let worker = others.recover();
    let answered = service.ask(ONE, 700, BUDGET).await;
    worker.stop().await;
    assert_eq!(status(&answered), (201, false));
    assert_eq!((told.arrived().len(), silent.arrived().len(), service.operation().await.epoch), (3, 0, 1));
    service.ended_once("settled").await;
}

// O22. Shown by: taking every version.
async fn o22_a_worker_takes_only_versions_that_it_has<S: Rows>(store: S) {
    let mut old = Plan::new(KEY);
    old.settings.calls_per_drive = 1;
    let first = Service::start(&store, &old, Scripted::default().answers(Answer::status(500))).await;
    first.ask(ONE, 700, BUDGET).await;
    let told = Scripted::default().answers(Answer::status(500)).answers(done()).answers(done());
    let newer = Service::start(&store, &Plan { version: 2, ..old.clone() }, told.clone()).await;
    let theirs = store.operation_ids().await[0];
    store.write(&format!("update {} set due_at = {}", S::table("operation"), S::year(2020))).await;
    let before = store.operation(theirs).await.unwrap().unwrap();
    let worker = newer.recover();
    for _ in 0..5 {
        let answered = newer.ask(ONE, 700, BUDGET).await;
        assert_eq!(code(&answered), Some(Code::RecoveryPending));
    }
    // It is at work: one of its own, whose call gets no answer, is ended by it.
    assert_eq!(code(&newer.ask(TWO, 700, BUDGET).await), Some(Code::RecoveryPending));
    eventually("the worker ends one of its own", SOON, || async {
        (newer.payments("settled").await == 1).then_some(())
    })
    .await;
    worker.stop().await;
    assert_eq!(told.arrived().len(), 2);
    let after = store.operation(theirs).await.unwrap().unwrap();
    assert_eq!((after.epoch, after.attempts, after.stage), (before.epoch, before.attempts, before.stage));
    let same = Service::start(&store, &old, told.clone()).await;
    same.ask_until_known(ONE, 700).await;
    assert_eq!(told.arrived().len(), 3);
}

// The driver of a request gives its operation back when its process stops, and a worker goes on.
async fn a_driver_that_is_stopped_leaves_no_lease_behind<S: Rows>(store: S) {
    let plan = Plan::new(KEY_AND_QUERY);
    let provider = ProviderProcess::start();
    provider.fault("in_progress", -1, 0).await;
    let service = Service::start(&store, &plan, adapter(&provider)).await;
    let answered = service.ask(ONE, 700, Duration::from_millis(300)).await;
    assert!(matches!(answered, Answered::Problem(ref problem) if problem.status == 202), "{answered:?}");
    service.phased.stop();
    assert!(service.engine.drain(SOON).await);
    assert_eq!(service.operation().await.lease_until, None);
    provider.no_faults().await;
    let next = Service::start(&store, &plan, adapter(&provider)).await;
    let worker = next.recover();
    next.succeeds().await;
    worker.stop().await;
    assert_eq!(provider.count().await, (1, 1));
    next.ended_once("settled").await;
}

// The pause between two calls of a drive ends with the stop. Shown by: calling once more then.
async fn a_stop_between_two_calls_begins_no_further_one<S: Rows>(store: S) {
    let told = (0..40).fold(Scripted::default(), |told, _| told.answers(Answer::NoAnswer));
    let mut plan = Plan::new(KEY);
    plan.settings.calls_per_drive = 40;
    let service = Service::start(&store, &plan, told.clone()).await;
    service.ask(ONE, 700, Duration::from_millis(300)).await;
    // By now the pauses are long.
    eventually("called", SOON, || async { (told.arrived().len() >= 6).then_some(()) }).await;
    service.phased.stop();
    let calls = told.arrived().len();
    assert!(service.engine.drain(SOON).await);
    assert!(calls < 40, "every call was made before the stop: nothing is shown");
    assert_eq!((told.arrived().len(), service.operation().await.lease_until), (calls, None));
}

// O1: an operation at RECEIVED was committed by its handler, and is left to an operator.
async fn o1_a_committed_first_phase_without_a_point_is_parked<S: Rows>(store: S) {
    let plan = Plan::new(KEY).short_lease();
    let dying = dies_in_a_call(&store, &plan).await;
    let id = dying.operation().await.operation_id;
    let table = S::table("operation");
    store.write(&format!("update {table} set state = 'RECEIVED', point = 'RECEIVED'")).await;
    let told = Scripted::default().answers(done());
    let next = Service::start(&store, &plan, told.clone()).await;
    let parked = eventually("parked", SOON, || async {
        next.ask(ONE, 700, BUDGET).await;
        next.operation().await.parked
    })
    .await;
    assert_eq!(parked, "first-phase-ended-its-transaction");
    assert!(matches!(store.take_operation(id, plan.lease).await.unwrap(), Taken::Not(_)));
    assert_eq!(told.arrived().len(), 0);
}

crate::on_both! {
    m115_m81_provider_success_then_crash_keeps_the_identity;
    m80_m46_the_repeating_request_recovers_within_its_budget;
    m83_m46_of_many_that_try_one_recovers;
    o9_a_lease_is_renewed_while_its_operation_is_driven;
    o22_a_worker_takes_only_versions_that_it_has;
    a_driver_that_is_stopped_leaves_no_lease_behind;
    a_stop_between_two_calls_begins_no_further_one;
    o1_a_committed_first_phase_without_a_point_is_parked;
}
