//! The rules, step by step, with a provider that answers as it is told.

use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use oncebox::observe::Health;
use oncebox::operation::provider::{Answer, KeyWindow, Matches, QueryAnswer, Strategy};
use oncebox::operation::{Code, Kid, Sealer, Stage};
use oncebox::store::{NewEvidence, Sealed};
use uuid::Uuid;

use crate::flow::{BUDGET, KEY, ONE, Plan, Service, TWO, WINDOW, code, status};
use crate::scripted::{Act, Scripted, declined, done};
use crate::standstill::Standstill;
use crate::support::eventually;
use crate::world::{Rows, SOON};

// Shown by: another key at every send.
async fn o5_m78_a_resend_sends_the_same_bytes_under_the_same_key<S: Rows>(store: S) {
    let told = Scripted::default().answers(Answer::NoAnswer).answers(Answer::status(500)).answers(done());
    let service = Service::start(&store, &Plan::new(KEY), told.clone()).await;
    assert_eq!(status(&service.ask(ONE, 700, BUDGET).await), (201, false));
    let arrived = told.arrived();
    assert_eq!(arrived.iter().map(|one| one.send).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(arrived.iter().all(|one| one.bytes == arrived[0].bytes && one.key == arrived[0].key), "{arrived:?}");
    assert!(!arrived[0].key.contains(ONE));
    service.ended_once("settled").await;
}

// Shown by: beginning a call whatever is left of the lease.
async fn o5_a_call_begins_only_where_its_timeout_fits_into_the_rest_of_the_lease<S: Rows>(store: S) {
    let (plan, told) = (Plan::new(KEY), Scripted::default().answers(done()));
    let service = Service::start(&store, &plan, told.clone()).await;
    // Longer than a whole lease, so it does not fit after a renewal either.
    told.clone().timeout(plan.lease * 2);
    for _ in 0..3 {
        assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
        assert_eq!((told.arrived().len(), service.operation().await.intents[0].sends), (0, 1));
    }
    told.clone().timeout(plan.lease / 3);
    let (reply, _) = service.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, told.arrived().len()), (201, 1));
    service.ended_once("settled").await;
}

// Shown by: sending before the commit; a transaction held across the call (the write below waits
// for its end).
async fn m52_o5_the_intent_is_committed_and_no_transaction_is_open_while_a_provider_is_called<S: Rows>(store: S) {
    let look = store.clone();
    let during = Box::pin(async move {
        let sends =
            format!("select count(*) from {} where sends = 1 and outcome is null", S::table("operation_intent"));
        assert_eq!(look.number(&sends).await, 1);
        assert_eq!(look.number("select count(*) from payment where state = 'pending'").await, 1);
        tokio::time::timeout(Duration::from_secs(8), look.write("update payment set reference = 'seen'"))
            .await
            .unwrap();
    });
    let told = Scripted::default().then(Act::After(during, done())).timeout(Duration::from_secs(18));
    let service = Service::start(&store, &Plan::new(KEY), told).await;
    assert_eq!(status(&service.ask(ONE, 700, BUDGET).await), (201, false));
    assert_eq!(store.number("select count(*) from payment where reference = 'seen'").await, 1);
}

// Shown by: running the flow from its first phase.
async fn m53_a_flow_goes_on_from_its_last_recovery_point<S: Rows>(store: S) {
    let plan = Plan { local: true, ..Plan::new(KEY) };
    plan.trouble.local_fails.store(1, Ordering::SeqCst);
    let service = Service::start(&store, &plan, Scripted::default().answers(done())).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    let operation = service.operation().await;
    assert_eq!((operation.stage, operation.point.as_str()), (Stage::Local, "LOCAL_PAYMENT_CREATED"));
    assert_eq!((store.number("select count(*) from step").await, service.payments("pending").await), (0, 1));
    let (reply, replayed) = service.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, replayed), (201, true));
    assert_eq!(store.number("select count(*) from step").await, 1);
    service.ended_once("settled").await;
}

// Shown by: FAILED after the panic; running the call again.
async fn o13_m74_a_panic_after_an_intent_is_unknown_and_recovers<S: Rows>(store: S) {
    let plan = Plan::new(KEY);
    plan.trouble.settled_panics.store(1, Ordering::SeqCst);
    let told = Scripted::default().answers(done());
    let service = Service::start(&store, &plan, told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    let operation = service.operation().await;
    assert_eq!((operation.stage, service.messages().await), (Stage::Unknown, 0), "the phase was rolled back");
    let (reply, _) = service.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, told.arrived().len()), (201, 1));
    service.ended_once("settled").await;
}

// Shown by: leaving what a refusing phase wrote.
async fn o13_m71_before_an_intent_a_phase_may_refuse_or_forget<S: Rows>(store: S) {
    let service = Service::start(&store, &Plan::new(KEY), Scripted::default()).await;
    let key = |amount: i64| format!("key-000000000000000{amount}");
    for (amount, expected, remembered) in
        [(1, 402, true), (2, 404, false), (3, 409, false), (4, 503, false), (7, 201, true)]
    {
        assert_eq!(status(&service.ask(&key(amount), amount, BUDGET).await), (expected, false), "{amount}");
        assert_eq!(status(&service.ask(&key(amount), amount, BUDGET).await), (expected, remembered), "{amount}");
    }
    for amount in [5, 6] {
        assert_eq!(code(&service.ask(&key(amount), amount, BUDGET).await), Some(Code::OperationFailed));
    }
    assert_eq!(store.number("select count(*) from payment").await, 1, "of the one that succeeded");
    let records = format!("select count(*) from {}", S::table("idempotency_request"));
    assert_eq!(store.number(&records).await, 2);
}

// M26, M27: while its outcome is unknown, after it has succeeded or failed, and when it is left to
// an operator.
async fn m26_another_command_under_the_key_is_refused_in_every_state<S: Rows>(store: S) {
    let told = Scripted::default().answers(Answer::status(500)).answers(done());
    let plan = Plan::new(KEY).one_call();
    let service = Service::start(&store, &plan, told.clone()).await;
    service.ask(ONE, 700, BUDGET).await;
    assert_eq!(service.operation().await.stage, Stage::Unknown);
    assert_eq!(code(&service.ask(ONE, 701, BUDGET).await), Some(Code::KeyReused));
    service.ask_until_known(ONE, 700).await;
    assert_eq!(code(&service.ask(ONE, 701, BUDGET).await), Some(Code::KeyReused));
    assert_eq!(told.arrived().len(), 2);
    service.ended_once("settled").await;
    // Failed, and left to an operator.
    for (answer, strategy, ends) in
        [(declined(), KEY, None), (Answer::NoAnswer, Strategy::None, Some(Code::OutcomeUnknown))]
    {
        let told = Scripted::default().answers(answer);
        let service = Service::start(&store, &Plan::new(strategy), told.clone()).await;
        let key = if ends.is_none() { TWO } else { "key-0000000000000003" };
        assert_eq!(code(&service.ask(key, 700, BUDGET).await), ends);
        assert_eq!(code(&service.ask(key, 701, BUDGET).await), Some(Code::KeyReused), "{ends:?}");
        assert_eq!(told.arrived().len(), 1);
    }
}

// Shown by: taking "not found" for a failure; resending after it.
async fn o6_not_found_never_decides_and_never_resends<S: Rows>(store: S) {
    let told = Scripted::default().answers(Answer::NoAnswer).finds(QueryAnswer::NotFound);
    let service = Service::start(&store, &Plan::new(Strategy::Query), told.clone()).await;
    for _ in 0..3 {
        assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::OutcomeUnknown));
    }
    let operation = service.operation().await;
    assert_eq!(operation.parked.as_deref(), Some("provider-did-not-find-it"));
    assert_eq!((told.arrived().len(), told.asked()), (1, 1));
}

async fn o6_what_a_query_finds_settles<S: Rows>(store: S) {
    let told =
        Scripted::default().answers(Answer::NoAnswer).finds(QueryAnswer::Failed).finds(QueryAnswer::Done(Matches::ALL));
    let service = Service::start(&store, &Plan::new(Strategy::Query), told.clone()).await;
    assert_eq!(status(&service.ask(ONE, 700, BUDGET).await), (201, false));
    assert_eq!((told.arrived().len(), told.asked()), (1, 2));
    service.ended_once("settled").await;
}

// M82: a provider without key and query is a declared gap. Shown by: resending.
async fn m82_o6_without_key_and_query_an_operator_decides<S: Rows>(store: S) {
    let told = Scripted::default().answers(Answer::NoAnswer);
    let service = Service::start(&store, &Plan::new(Strategy::None), told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::OutcomeUnknown));
    let operation = service.operation().await;
    assert_eq!(operation.parked.as_deref(), Some("provider-without-key-or-query"));
    assert_eq!(told.arrived().len(), 1);
}

// O9. Shown by: FAILED when the attempts are used up.
async fn o9_attempts_never_turn_unknown_into_failed<S: Rows>(store: S) {
    let mut told = Scripted::default();
    for _ in 0..200 {
        told = told.answers(Answer::status(500));
    }
    let mut plan = Plan::new(KEY);
    plan.settings.attempts_max = 3;
    plan.settings.calls_per_drive = 1;
    let service = Service::start(&store, &plan, told.clone()).await;
    service.uses_up_three_attempts().await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::OutcomeUnknown));
    assert_eq!(service.payments("pending").await, 1);
}

async fn m76_a_listed_refusal_is_the_outcome_and_is_replayed<S: Rows>(store: S) {
    let told = Scripted::default().answers(Answer::NoAnswer).answers(declined());
    let service = Service::start(&store, &Plan::new(KEY), told).await;
    assert_eq!(status(&service.ask(ONE, 700, BUDGET).await), (402, false));
    assert_eq!(status(&service.ask(ONE, 700, BUDGET).await), (402, true));
    service.ended_once("failed").await;
}

// O8: an answer that comes after the lease was lost. Shown by: fencing evidence; cancelling the
// call.
async fn o8_an_answer_after_the_lease_was_lost_is_evidence_for_the_next<S: Rows>(store: S) {
    let (told, held) = Scripted::default().timeout(3 * SOON).held(done());
    let slow = Service::start(&store, &Plan::new(Strategy::Query).long_lease(), told.clone()).await;
    let first = async { slow.ask(ONE, 700, Duration::from_millis(1)).await };
    let (first, ()) = tokio::join!(first, held.reached());
    assert_eq!(code(&first), Some(Code::RecoveryPending));
    // The lease is over for everybody but the one who still waits for its answer.
    let (owner, table) = (slow.operation().await.epoch, S::table("operation"));
    store.write(&format!("update {table} set lease_until = {}", S::year(2020))).await;
    let silent = Scripted::default();
    let next = Service::start(&store, &Plan::new(Strategy::Query), silent.clone()).await;
    let before = eventually("another epoch", SOON, || async {
        next.ask(ONE, 700, BUDGET).await;
        let operation = next.operation().await;
        (operation.epoch > owner).then_some(operation)
    })
    .await;
    assert!(
        matches!(before.stage, Stage::Unknown | Stage::Outstanding)
            && before.evidence.iter().all(|row| row.evidence.send == 0)
    );
    held.go_on();
    let (reply, replayed) = next.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, replayed, told.arrived().len(), silent.arrived().len()), (201, true, 1, 0));
    let answer = next.operation().await.evidence.into_iter().find(|row| row.evidence.send == 1).unwrap();
    assert_eq!((answer.evidence.epoch, answer.evidence.verdict.as_str()), (owner, "success"));
    next.ended_once("settled").await;
}

// O8, O9: what an operator saw is evidence, and decides.
async fn o8_m48_an_operator_says_what_happened_and_the_flow_goes_on<S: Rows>(store: S) {
    let told = Scripted::default().answers(Answer::NoAnswer);
    let plan = Plan::new(KEY).one_call();
    let service = Service::start(&store, &plan, told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    let operation = service.operation().await;
    let word = NewEvidence {
        operation_id: operation.operation_id,
        effect: "charge".to_owned(),
        epoch: operation.epoch,
        send: 0,
        kind: "operator".to_owned(),
        verdict: "success".to_owned(),
        status: None,
        bytes: Sealed { bytes: b"seen in the provider's console".to_vec(), kid: None },
    };
    store.observe(&word).await.unwrap();
    let (reply, _) = service.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, told.arrived().len()), (201, 1));
    service.ended_once("settled").await;
}

// O6: the breath before a send, and whatever else comes between, counts. Shown by: not looking at
// the window again before the call.
async fn o6_no_send_leaves_after_the_window<S: Rows>(store: S) {
    let open = Duration::from_millis(1_500);
    let window = KeyWindow { retention: WINDOW.max_in_flight + open, ..WINDOW };
    let told = (0..40).fold(Scripted::default(), |told, _| told.answers(Answer::NoAnswer));
    let mut plan = Plan::new(Strategy::Key(window));
    plan.settings.calls_per_drive = 40;
    let still = Standstill::watch();
    let service = Service::start(&store, &plan, told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::OutcomeUnknown));
    let operation = service.operation().await;
    assert_eq!(operation.parked.as_deref(), Some("provider-may-have-forgotten-the-key"));
    let first = u64::try_from(operation.intents[0].first_sent_at.millis()).unwrap();
    let end = SystemTime::UNIX_EPOCH + Duration::from_millis(first) + open;
    let late = told.arrived().iter().filter_map(|one| one.at.duration_since(end).ok()).max().unwrap_or_default();
    // Nobody sends while the machine gives this process no time.
    let bound = still.allows(Duration::from_millis(50));
    assert!(late < bound, "a send left {late:?} after the window");
}

// O9, O13: an error that no retry helps counts, and goes to a person. Shown by: ending the drive
// with the error (for ever).
async fn o9_what_cannot_be_driven_goes_to_a_person<S: Rows>(store: S) {
    let told = Scripted::default().answers(Answer::NoAnswer);
    let mut plan = Plan::new(KEY).one_call();
    plan.settings.attempts_max = 2;
    let service = Service::start(&store, &plan, told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    let operation = service.operation().await;
    let newer = NewEvidence {
        operation_id: operation.operation_id,
        effect: "charge".to_owned(),
        epoch: operation.epoch,
        send: 1,
        kind: "answer".to_owned(),
        verdict: "indefinite".to_owned(),
        status: Some(200),
        bytes: Sealed { bytes: br#"{"proves":"quantum","saw":""}"#.to_vec(), kid: None },
    };
    store.observe(&newer).await.unwrap();
    let worker = service.recover();
    let parked = service.is_parked().await;
    worker.stop().await;
    assert_eq!((parked.as_str(), service.operation().await.stage), ("drive-failed", Stage::Unknown));
    assert_eq!(told.arrived().len(), 1);
}

// O6. Shown by: the strategy that is declared today (a second send).
async fn o6_an_effect_keeps_the_strategy_that_it_was_intended_with<S: Rows>(store: S) {
    let plan = Plan::new(Strategy::None).short_lease();
    let service = Service::start(&store, &plan, Scripted::default().then(Act::Dies)).await;
    service.ask(ONE, 700, BUDGET).await;
    let told = Scripted::default().answers(done());
    let next = Service::start(&store, &Plan { strategy: Strategy::Repeatable, ..plan }, told.clone()).await;
    let parked = eventually("parked", SOON, || async {
        next.ask(ONE, 700, BUDGET).await;
        next.operation().await.parked
    })
    .await;
    assert_eq!((parked.as_str(), told.arrived().len()), ("another-strategy", 0));
}

// Shown by: looking for an effect at that point.
async fn an_operation_that_was_given_up_before_its_intent_can_go_on<S: Rows>(store: S) {
    let mut plan = Plan { local: true, ..Plan::new(KEY) };
    plan.settings.attempts_max = 0;
    plan.trouble.local_fails.store(1, Ordering::SeqCst);
    let service = Service::start(&store, &plan, Scripted::default().answers(done())).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::OutcomeUnknown));
    assert_eq!(service.operation().await.parked.as_deref(), Some("phase-failed"));
    store.write(&format!("update {} set parked = null, due_at = created_at", S::table("operation"))).await;
    let (reply, _) = service.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, store.number("select count(*) from step").await), (201, 1));
    service.ended_once("settled").await;
}

// O22, M67. Shown by: storing the command in plain.
async fn o22_commands_requests_and_evidence_are_sealed_and_recovered_by_who_has_the_key<S: Rows>(store: S) {
    let kid: Kid = "k1".parse().unwrap();
    let key = [7_u8; 32];
    let sealer = Sealer::encrypting(&kid, [(kid.clone(), key.as_slice())]).unwrap();
    let mut plan = Plan { sealer, ..Plan::new(KEY) };
    plan.settings.calls_per_drive = 1;
    let told = Scripted::default().answers(Answer::status(500)).answers(done());
    let service = Service::start(&store, &plan, told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 4_242, BUDGET).await), Some(Code::RecoveryPending));
    let operation = service.operation().await;
    let holds = |bytes: &[u8]| bytes.windows(4).any(|part| part == b"4242");
    assert!(operation.command.kid.is_some() && !holds(&operation.command.bytes));
    assert!(!holds(&operation.intents[0].intent.request.bytes));
    assert!(!operation.evidence.is_empty());
    assert!(operation.evidence.iter().all(|row| row.evidence.bytes.kid.as_deref() == Some("k1")));
    // Without the key nothing is sent and nothing is decided.
    let blind = Service::start(&store, &Plan::new(KEY), told.clone()).await;
    assert_eq!(code(&blind.ask(ONE, 4_242, BUDGET).await), Some(Code::RecoveryPending));
    assert_eq!((told.arrived().len(), blind.operation().await.parked), (1, None));
    let (reply, _) = service.ask_until_known(ONE, 4_242).await;
    assert_eq!((reply.status, holds(&told.arrived()[1].bytes)), (201, true));
}

/// Who copies a database says by hand to which deployment the copy belongs.
async fn belongs_to<S: Rows>(store: &S, deployment: Uuid) {
    let (table, id) = (S::table("deployment"), deployment.simple());
    let id = if S::NAME == "postgres" { format!("'{id}'") } else { format!("x'{id}'") };
    store.write(&format!("update {table} set deployment_id = {id}")).await;
}

// O22. Shown by: leaving the comparison out.
async fn o22_in_a_cloned_database_nothing_is_sent<S: Rows>(store: S) {
    let told = Scripted::default().answers(Answer::status(500)).answers(done());
    let plan = Plan::new(KEY).one_call();
    let service = Service::start(&store, &plan, told.clone()).await;
    service.ask(ONE, 700, BUDGET).await;
    let ours = store.deployment().await.unwrap();
    belongs_to(&store, Uuid::now_v7()).await;
    // What the configuration of the services says is still the old one.
    let clone = Service::start(&store, &Plan { deployment: Some(ours), ..plan.clone() }, told.clone()).await;
    assert_eq!(code(&clone.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    assert_eq!(code(&clone.ask_once(TWO, 700, BUDGET).await), Some(Code::StoreUnavailable));
    // It is due, so only the comparison keeps a worker from it.
    store.write(&format!("update {} set due_at = {}", S::table("operation"), S::year(2020))).await;
    let before = service.operation().await;
    let health = Health::default();
    let worker = clone.recover_with(health.clone());
    eventually("the worker has seen it", SOON, || async {
        let lines = health.lines();
        lines.iter().any(|line| line.contains("this database belongs to another deployment")).then_some(())
    })
    .await;
    worker.stop().await;
    let after = service.operation().await;
    assert_eq!((told.arrived().len(), after.attempts, after.epoch), (1, 0, before.epoch));
    belongs_to(&store, ours).await;
    let (reply, _) = service.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, told.arrived().len()), (201, 2));
}

crate::on_both! {
    o9_what_cannot_be_driven_goes_to_a_person;
    o6_an_effect_keeps_the_strategy_that_it_was_intended_with;
    an_operation_that_was_given_up_before_its_intent_can_go_on;
    o6_no_send_leaves_after_the_window;
    o5_m78_a_resend_sends_the_same_bytes_under_the_same_key;
    o5_a_call_begins_only_where_its_timeout_fits_into_the_rest_of_the_lease;
    m52_o5_the_intent_is_committed_and_no_transaction_is_open_while_a_provider_is_called;
    m53_a_flow_goes_on_from_its_last_recovery_point;
    o13_m74_a_panic_after_an_intent_is_unknown_and_recovers;
    o13_m71_before_an_intent_a_phase_may_refuse_or_forget;
    m26_another_command_under_the_key_is_refused_in_every_state;
    o6_not_found_never_decides_and_never_resends;
    o6_what_a_query_finds_settles;
    m82_o6_without_key_and_query_an_operator_decides;
    o9_attempts_never_turn_unknown_into_failed;
    m76_a_listed_refusal_is_the_outcome_and_is_replayed;
    o8_an_answer_after_the_lease_was_lost_is_evidence_for_the_next;
    o8_m48_an_operator_says_what_happened_and_the_flow_goes_on;
    o22_commands_requests_and_evidence_are_sealed_and_recovered_by_who_has_the_key;
    o22_in_a_cloned_database_nothing_is_sent;
}
