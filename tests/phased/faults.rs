//! The provider of the examples, as a process, with each of its faults: never two charges, never
//! wrongly failed.

use std::sync::Arc;
use std::time::Duration;

use oncebox::operation::{Answered, Code, Stage};
use oncebox::store::{Resolution, StoredEvidence};

use crate::cards::Cards;
use crate::flow::{BUDGET, KEY_AND_QUERY, ONE, Plan, Service, Shared, TWO};
use crate::operator::by_hand;
use crate::provider::ProviderProcess;
use crate::support::eventually;
use crate::world::{Rows, SOON};

/// The adapter of the example, for this provider.
pub(crate) fn adapter(provider: &ProviderProcess) -> Shared {
    Shared(Arc::new(Cards::new(&provider.url, Duration::from_millis(700)).unwrap()))
}

/// The same, with all the time that a busy machine takes: where a second send would show.
fn patient(provider: &ProviderProcess) -> Shared {
    Shared(Arc::new(Cards::new(&provider.url, Duration::from_secs(15)).unwrap()))
}

/// One charge, whatever went wrong on the way, and every later answer is the first one. No worker
/// runs: the repeating request recovers.
async fn one_charge<S: Rows>(store: S, faults: &[(&str, i64, u64)]) {
    let provider = ProviderProcess::start();
    for (fault, times, delay) in faults {
        provider.fault(fault, *times, *delay).await;
    }
    let service = Service::start(&store, &Plan::new(KEY_AND_QUERY), adapter(&provider)).await;
    let (first, _) = service.ask_until_known(ONE, 700).await;
    assert_eq!(first.status, 201, "{faults:?}");
    for (_, _, delay) in faults.iter().filter(|(fault, ..)| *fault == "take_late") {
        comes_late(*delay).await;
    }
    let (again, replayed) = service.ask_until_known(ONE, 700).await;
    assert_eq!((again.status, &again.body, replayed), (201, &first.body, true));
    assert_eq!(provider.count().await, (1, 1), "{faults:?}");
    service.ended_once("settled").await;
    let operation = service.operation().await;
    assert_eq!(operation.stage, Stage::Succeeded);
    // Where a query is made to fail, one was made.
    let failed = |row: &StoredEvidence| row.evidence.kind == "query" && row.evidence.status == Some(404);
    let was_asked = operation.evidence.iter().any(failed);
    assert_eq!(was_asked, faults.iter().any(|(fault, ..)| *fault == "no_query"), "{:?}", operation.evidence);
}

/// A charge that the provider takes so many milliseconds after its request has come by now. Under
/// another key than the answered one it would be the second.
async fn comes_late(delay: u64) {
    tokio::time::sleep(Duration::from_millis(delay + 1_000)).await;
}

// Shown by: settling without the evidence that stands in the deciding transaction.
async fn no_fault<S: Rows>(store: S) {
    let provider = ProviderProcess::start();
    let service = Service::start(&store, &Plan::new(KEY_AND_QUERY), patient(&provider)).await;
    let answered = service.ask(ONE, 700, BUDGET).await;
    let Answered::Reply { reply, replayed: false } = answered else { panic!("{answered:?}") };
    assert_eq!((reply.status, provider.count().await), (201, (1, 1)));
    service.ended_once("settled").await;
    assert_eq!(service.operation().await.intents[0].sends, 1);
}

/// Cases by what the provider does: which fault, how often, and for how many milliseconds.
macro_rules! one_charge {
    ($($name:ident: $($fault:expr),+;)*) => {
        $(async fn $name<S: Rows>(store: S) {
            one_charge(store, &[$($fault),+]).await;
        })*
    };
}

one_charge! {
    o7_late: ("late", 1, 2_500);
    o7_drop_before: ("drop_before", 2, 0);
    o7_drop_after: ("drop_after", 1, 0);
    o7_error_before: ("error_before", 4, 0);
    o7_error_after: ("error_after", 1, 0);
    o7_take_late: ("take_late", 1, 1_500);
    o7_in_progress: ("in_progress", 1, 0);
    o7_a_query_that_fails_leaves_the_key: ("drop_after", 1, 0), ("no_query", -1, 0);
    // Shown by: resending without asking first (two charges under one key).
    o6_a_key_that_was_forgotten_too_early: ("drop_after", 1, 0), ("forget_keys", -1, 0);
}

// Shown by: taking any 4xx for a failure: it failed, and the charge was taken.
async fn o7_a_refusal_of_a_resend_is_no_verdict<S: Rows>(store: S) {
    let provider = ProviderProcess::start();
    provider.fault("take_late", 1, 1_500).await;
    // The first send uses it up once, and is not refused.
    provider.fault("refuse_keys", 3, 0).await;
    let service = Service::start(&store, &Plan::new(KEY_AND_QUERY), adapter(&provider)).await;
    let (reply, _) = service.ask_until_known(ONE, 700).await;
    comes_late(1_500).await;
    assert_eq!((reply.status, provider.count().await), (201, (1, 1)));
    let evidence = service.operation().await.evidence;
    let was_refused = |row: &StoredEvidence| row.evidence.verdict == "refused" && row.evidence.send > 1;
    assert!(evidence.iter().any(was_refused), "no resend was refused: nothing is shown: {evidence:?}");
    service.ended_once("settled").await;
}

// The adapter lists `card_declined`. It does not list `key_refused`, which is a failure because it
// answers the only send that was begun.
async fn o7_a_listed_verdict_and_a_refusal_of_the_only_send_are_failures<S: Rows>(store: S) {
    for (fault, key) in [("decline", ONE), ("refuse_keys", TWO)] {
        let provider = ProviderProcess::start();
        provider.fault(fault, 1, 0).await;
        let service = Service::start(&store, &Plan::new(KEY_AND_QUERY), patient(&provider)).await;
        let answered = service.ask(key, 700, BUDGET).await;
        let Answered::Reply { reply, replayed: false } = answered else { panic!("{fault}: {answered:?}") };
        let (again, replayed) = service.ask_until_known(key, 700).await;
        assert_eq!((reply.status, again.status, replayed, &again.body), (402, 402, true, &reply.body), "{fault}");
        assert_eq!(provider.count().await, (0, 0), "{fault}");
    }
    assert_eq!((service_failed(&store).await, store.number("select count(*) from payment").await), (2, 2));
}

async fn service_failed<S: Rows>(store: &S) -> i64 {
    store.number("select count(*) from payment where state = 'failed'").await
}

// Shown by: letting all rows count beside an operator's word (it stayed parked).
async fn o7_another_amount_goes_to_an_operator<S: Rows>(store: S) {
    let provider = ProviderProcess::start();
    provider.fault("wrong_amount", 1, 0).await;
    let service = Service::start(&store, &Plan::new(KEY_AND_QUERY), patient(&provider)).await;
    for _ in 0..3 {
        let answered = service.ask(ONE, 700, BUDGET).await;
        let Answered::Problem(problem) = answered else { panic!("{answered:?}") };
        assert_eq!((problem.code, problem.status), (Code::OutcomeUnknown, 409));
    }
    let operation = service.operation().await;
    assert_eq!((operation.stage, operation.parked.as_deref()), (Stage::Unknown, Some("provider-mismatch")));
    assert_eq!((provider.count().await, service.payments("pending").await, service.messages().await), ((1, 1), 1, 0));
    // Whatever was seen, what a person found out decides.
    let resolution = Resolution::Effect { effect: "charge".to_owned(), happened: true };
    store.resolve(&operation, &resolution, false, false, &by_hand()).await.unwrap();
    let (reply, replayed) = service.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, replayed, provider.count().await), (201, true, (1, 1)));
    service.ended_once("settled").await;
}

// G10. Shown by: counting an attempt where nothing left us (it was parked).
async fn g10_a_provider_that_is_away_is_waited_for<S: Rows>(store: S) {
    let provider = ProviderProcess::start();
    // Bound and never listening: nobody else gets the port meanwhile.
    let reserved = tokio::net::TcpSocket::new_v4().unwrap();
    reserved.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let nobody = format!("http://{}", reserved.local_addr().unwrap());
    let mut plan = Plan::new(KEY_AND_QUERY);
    plan.settings.attempts_max = 2;
    let away = Shared(Arc::new(Cards::new(&nobody, Duration::from_millis(700)).unwrap()));
    let service = Service::start(&store, &plan, away).await;
    let Answered::Problem(problem) = service.ask(ONE, 700, BUDGET).await else { panic!("pending") };
    assert_eq!((problem.code, problem.status), (Code::RecoveryPending, 202));
    let worker = service.recover();
    // Each drive of it has an epoch of its own.
    eventually("many drives in vain", SOON, || async { (service.operation().await.epoch > 4).then_some(()) }).await;
    worker.stop().await;
    let operation = service.operation().await;
    assert_eq!((operation.attempts, operation.parked), (0, None));
    assert_eq!((operation.intents[0].sends, operation.evidence.len()), (1, 1), "no try leaves anything behind");
    let back = Service::start(&store, &plan, adapter(&provider)).await;
    let (reply, _) = back.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, provider.count().await), (201, (1, 1)));
}

crate::on_both! {
    no_fault;
    o7_late;
    o7_drop_before;
    o7_drop_after;
    o7_error_before;
    o7_error_after;
    o7_take_late;
    o7_in_progress;
    o7_a_query_that_fails_leaves_the_key;
    o6_a_key_that_was_forgotten_too_early;
    o7_a_refusal_of_a_resend_is_no_verdict;
    o7_a_listed_verdict_and_a_refusal_of_the_only_send_are_failures;
    o7_another_amount_goes_to_an_operator;
    g10_a_provider_that_is_away_is_waited_for;
}

// What differs by the provider only is shown twice already.
crate::on_mariadb! {
    no_fault;
    o7_drop_before;
    o7_drop_after;
    o7_error_after;
    o7_take_late;
    o6_a_key_that_was_forgotten_too_early;
    o7_a_refusal_of_a_resend_is_no_verdict;
    o7_a_listed_verdict_and_a_refusal_of_the_only_send_are_failures;
    o7_another_amount_goes_to_an_operator;
}
