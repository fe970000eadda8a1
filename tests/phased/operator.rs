//! What an operator may do with an operation whose provider may have acted, and what it proves.

use oncebox::operation::provider::{Answer, Strategy};
use oncebox::operation::{Code, Stage};
use oncebox::store::ActContext;

use crate::flow::{BUDGET, KEY, ONE, Plan, Service, code};
use crate::scripted::{Scripted, declined, done};
use crate::support::eventually;
use crate::world::{Rows, SOON};

pub(crate) fn by_hand() -> ActContext {
    ActContext { actor: "ada".to_owned(), reason: "as agreed".to_owned(), dry_run: false, redrive_age_max: None }
}

async fn retry<S: Rows>(service: &Service<S>, accept_duplicate: bool) {
    let seen = service.operation().await;
    service.store.retry(&seen, accept_duplicate, false, &by_hand()).await.unwrap();
}

async fn parked<S: Rows>(service: &Service<S>) -> Option<String> {
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::OutcomeUnknown));
    service.operation().await.parked
}

// Shown by: a worker that sends whatever an operator hands it; `retry` that waives by itself.
async fn an_operator_has_it_sent_within_the_window_only_unless_a_duplicate_is_accepted<S: Rows>(store: S) {
    let mut plan = Plan::new(KEY).one_call();
    (plan.settings.backoff_first, plan.settings.backoff_max) = (10 * SOON, 10 * SOON);
    let told = Scripted::default().answers(Answer::NoAnswer).answers(Answer::NoAnswer).answers(done());
    let service = Service::start(&store, &plan, told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    // Within the window. No worker would come to it by itself for some minutes.
    retry(&service, false).await;
    let worker = service.recover();
    eventually("a worker sends it", SOON, || async { (told.arrived().len() == 2).then_some(()) }).await;
    worker.stop().await;
    let (intents, long_ago) = (S::table("operation_intent"), S::year(2020));
    store.write(&format!("update {intents} set first_sent_at = {long_ago}")).await;
    retry(&service, false).await;
    assert_eq!(parked(&service).await.as_deref(), Some("provider-may-have-forgotten-the-key"));
    assert_eq!(told.arrived().len(), 2, "nothing is sent beyond the window");
    retry(&service, true).await;
    let (reply, _) = service.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, told.arrived().len()), (201, 3));
    service.ended_once("settled").await;
}

// The first send took the charge, and nobody heard. Shown by: a waived send that counts as one that
// never left us.
async fn a_refused_duplicate_does_not_say_that_the_first_send_failed<S: Rows>(store: S) {
    for (number, refusal) in [Answer::status(401), declined()].into_iter().enumerate() {
        store.write("delete from payment").await;
        let told = Scripted::default().answers(Answer::NoAnswer).answers(refusal).answers(done());
        let key = format!("key-000000000000000{number}");
        let service = Service::start(&store, &Plan::new(Strategy::None), told.clone()).await;
        assert_eq!(code(&service.ask(&key, 700, BUDGET).await), Some(Code::OutcomeUnknown));
        let unknown = || async {
            let mut found = Vec::new();
            for id in store.operation_ids().await {
                found.extend(store.operation(id).await.unwrap().filter(|one| one.stage == Stage::Unknown));
            }
            assert_eq!(found.len(), 1, "it has its outcome");
            found.remove(0)
        };
        store.retry(&unknown().await, true, false, &by_hand()).await.unwrap();
        assert_eq!(code(&service.ask(&key, 700, BUDGET).await), Some(Code::OutcomeUnknown));
        assert_eq!(unknown().await.parked.as_deref(), Some("accepted-duplicate-was-refused"));
        assert_eq!((service.payments("pending").await, told.arrived().len()), (1, 2));
        // Once more, by name.
        store.retry(&unknown().await, true, false, &by_hand()).await.unwrap();
        let (reply, _) = service.ask_until_known(&key, 700).await;
        assert_eq!((reply.status, told.arrived().len()), (201, 3));
    }
}

// Shown by: one flag for "a send was refused", whichever it was.
async fn an_earlier_refusal_does_not_settle_a_duplicate_that_has_no_answer<S: Rows>(store: S) {
    let told = Scripted::default().answers(Answer::NoAnswer).answers(Answer::status(401)).answers(Answer::NoAnswer);
    let mut plan = Plan::new(KEY);
    plan.settings.calls_per_drive = 2;
    let service = Service::start(&store, &plan, told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    assert_eq!(told.arrived().len(), 2);
    let (intents, long_ago) = (S::table("operation_intent"), S::year(2020));
    store.write(&format!("update {intents} set first_sent_at = {long_ago}")).await;
    retry(&service, true).await;
    assert_eq!(parked(&service).await.as_deref(), Some("provider-may-have-forgotten-the-key"));
    assert_eq!((service.operation().await.stage, told.arrived().len()), (Stage::Unknown, 3));
}

crate::on_all! {
    an_operator_has_it_sent_within_the_window_only_unless_a_duplicate_is_accepted;
    a_refused_duplicate_does_not_say_that_the_first_send_failed;
    an_earlier_refusal_does_not_settle_a_duplicate_that_has_no_answer;
}
