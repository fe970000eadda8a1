//! Proof that comes late, around a parking, or to a database that refuses it (O8); and drives that
//! come before their time (O9).

use std::sync::atomic::Ordering;
use std::time::Duration;

use oncebox::operation::phased::{Call, Context, Effect, Intent, Prepare, Provider, Sent};
use oncebox::operation::provider::{Answer, Strategy};
use oncebox::operation::{Code, Stage};
use oncebox::store::postgres::PostgresStore;
use oncebox::store::{Base, NewEvidence, Phases, Resolution, Sealed};
use oncebox::{HandlerError, async_trait, sqlx};

use crate::flow::{Adapter, BUDGET, KEY, KEY_AND_QUERY, ONE, Plan, Service, code, status};
use crate::operator::by_hand;
use crate::scripted::{Scripted, done};
use crate::support::eventually;
use crate::world::{Rows, SOON};

// The first driver's lease is over while it waits for its answer; the second one has no means to
// find out, and parks. Shown by: leaving the operation parked (`speak_up` left out).
async fn o8_proof_that_comes_after_the_parking_un_parks<S: Rows>(store: S) {
    let (told, held) = Scripted::default().timeout(3 * SOON).held(done());
    let slow = Service::start(&store, &Plan::new(Strategy::None).long_lease(), told.clone()).await;
    let first = async { slow.ask(ONE, 700, Duration::from_millis(1)).await };
    let (first, ()) = tokio::join!(first, held.reached());
    assert_eq!(code(&first), Some(Code::RecoveryPending));
    store.write(&format!("update {} set lease_until = {}", S::table("operation"), S::year(2020))).await;
    let silent = Scripted::default();
    let next = Service::start(&store, &Plan::new(Strategy::None), silent.clone()).await;
    assert_eq!(code(&next.ask(ONE, 700, BUDGET).await), Some(Code::OutcomeUnknown));
    assert_eq!(next.operation().await.parked.as_deref(), Some("provider-without-key-or-query"));
    held.go_on();
    let worker = slow.recover();
    next.succeeds().await;
    worker.stop().await;
    assert_eq!((told.arrived().len(), silent.arrived().len()), (1, 0));
    next.ended_once("settled").await;
}

// The row is locked from the send to the parking, so that proof comes between the look that decides
// to park and the parking. Shown by: parking without a look at the evidence.
async fn o8_proof_that_comes_before_the_parking_is_used(store: PostgresStore) {
    let (told, held) = Scripted::default().timeout(3 * SOON).held(Answer::NoAnswer);
    let service = Service::start(&store, &Plan::new(Strategy::None).long_lease(), told.clone()).await;
    let asked = service.ask(ONE, 700, 2 * SOON);
    let meanwhile = async {
        held.reached().await;
        let mut lock = store.pool().begin().await.unwrap();
        sqlx::query("select 1 from oncebox.operation for update").execute(&mut *lock).await.unwrap();
        let operation = service.operation().await;
        held.go_on();
        let waiting =
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
        eventually("a parking that waits", SOON, || async { (store.number(waiting).await > 0).then_some(()) }).await;
        let proof = NewEvidence {
            operation_id: operation.operation_id,
            effect: "charge".to_owned(),
            epoch: operation.epoch,
            send: 1,
            kind: "answer".to_owned(),
            verdict: "success".to_owned(),
            status: Some(201),
            bytes: Sealed { bytes: br#"{"proves":"succeeded","saw":""}"#.to_vec(), kid: None },
        };
        store.observe(&proof).await.unwrap();
        lock.commit().await.unwrap();
    };
    let (answered, ()) = tokio::join!(asked, meanwhile);
    assert_eq!(status(&answered), (201, false));
    assert_eq!((told.arrived().len(), service.operation().await.parked), (1, None));
    service.ended_once("settled").await;
}

// Shown by: ending the drive with the error: in doubt, and nobody ever hears of the charge; an
// operator's `--not-happened` that does not look at these words: failed, over a charge.
async fn o8_proof_that_the_database_refuses_goes_to_an_operator_in_words<S: Rows>(store: S) {
    let table = S::table("operation_evidence");
    store
        .write(&match S::NAME {
            "sqlite" => format!(
                "create trigger refused before insert on {table} when new.kind = 'answer' begin select raise(abort, 'refused'); end"
            ),
            _ => format!("alter table {table} add constraint refused check (kind <> 'answer')"),
        })
        .await;
    let mut plan = Plan::new(Strategy::None);
    plan.settings.refused_max = Duration::from_millis(200);
    let told = Scripted::default().answers(done());
    let service = Service::start(&store, &plan, told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::OutcomeUnknown));
    let operation = service.operation().await;
    assert_eq!(
        (operation.stage, operation.parked.as_deref()),
        (Stage::Unknown, Some("evidence-not-stored: charge send 1: succeeded 201"))
    );
    assert_eq!((operation.evidence.len(), told.arrived().len()), (0, 1));
    let word = |happened| Resolution::Effect { effect: "charge".to_owned(), happened };
    let denied = store.resolve(&operation, &word(false), false, false, &by_hand()).await.unwrap_err().to_string();
    assert!(denied.contains("`charge` says the opposite: success"), "{denied}");
    store.resolve(&operation, &word(true), false, false, &by_hand()).await.unwrap();
    let (reply, _) = service.ask_until_known(ONE, 700).await;
    assert_eq!((reply.status, told.arrived().len()), (201, 1));
    service.ended_once("settled").await;
}

/// The database fails to store so many answers because it is away, and then refuses one.
async fn is_away_and_refuses(store: &PostgresStore, away: u32) {
    store
        .write(&format!(
            "create sequence tried;
             create function fails() returns trigger language plpgsql as $$
             declare number bigint := nextval('public.tried');
             begin
                 if number <= {away} then raise exception 'away' using errcode = '40P01'; end if;
                 if number = {away} + 1 then raise exception 'refused' using errcode = '23514'; end if;
                 return new;
             end $$;
             create trigger fails before insert on oncebox.operation_evidence
                 for each row when (new.kind = 'answer') execute function fails()"
        ))
        .await;
}

// The database asks to try again for longer than `refused_max` (the pauses alone take 600 ms), then
// refuses once. Shown by: counting from the first try (parked at the first refusal).
async fn o8_a_database_that_was_away_before_it_refuses_is_asked_again(store: PostgresStore) {
    is_away_and_refuses(&store, 6).await;
    let mut plan = Plan::new(Strategy::None).long_lease();
    plan.settings.refused_max = Duration::from_millis(200);
    let told = Scripted::default().answers(done());
    let service = Service::start(&store, &plan, told.clone()).await;
    assert_eq!(status(&service.ask(ONE, 700, SOON).await), (201, false));
    assert_eq!((told.arrived().len(), store.number("select last_value from tried").await), (1, 8));
    service.ended_once("settled").await;
}

// Shown by: an instant that is so far away, which panics.
async fn o8_a_refusal_may_last_as_long_as_no_instant_reaches(store: PostgresStore) {
    is_away_and_refuses(&store, 0).await;
    let mut plan = Plan::new(Strategy::None).long_lease();
    plan.settings.refused_max = Duration::MAX;
    let service = Service::start(&store, &plan, Scripted::default().answers(done())).await;
    assert_eq!(status(&service.ask(ONE, 700, Duration::MAX).await), (201, false));
    assert_eq!(store.number("select last_value from tried").await, 2);
    service.ended_once("settled").await;
}

// Shown by: writing the pause as it is: PostgreSQL and MySQL refuse such an instant, and the
// operation keeps the lease of a driver that has ended.
async fn o9_a_pause_that_no_instant_reaches_gives_the_operation_back<S: Rows>(store: S) {
    let mut plan = Plan { local: true, ..Plan::new(KEY) };
    (plan.settings.backoff_first, plan.settings.backoff_max) = (Duration::MAX, Duration::MAX);
    plan.trouble.local_fails.store(1, Ordering::SeqCst);
    let service = Service::start(&store, &plan, Scripted::default()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    let operation = service.operation().await;
    assert!(
        operation.due_at.is_some_and(|due| operation.now.until(due) > Duration::from_secs(86_400)),
        "{operation:?}"
    );
}

// Shown by: giving it back for a time counted from the drive.
async fn o9_a_request_that_comes_before_its_time_moves_nothing<S: Rows>(store: S) {
    let plan = Plan::new(KEY).one_call();
    let told = (0..4).fold(Scripted::default(), |told, _| told.answers(Answer::status(500)));
    let service = Service::start(&store, &plan, told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    store.write(&format!("update {} set due_at = {}", S::table("operation"), S::year(2037))).await;
    let due = service.operation().await.due_at;
    for _ in 0..2 {
        assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    }
    let operation = service.operation().await;
    assert_eq!((told.arrived().len(), operation.due_at, operation.attempts), (3, due, 0));
    // One that is due is moved.
    store.write(&format!("update {} set due_at = {}", S::table("operation"), S::year(2020))).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    let operation = service.operation().await;
    assert!(operation.due_at > Some(operation.created_at) && operation.due_at < due);
    assert_eq!(operation.attempts, 1);
}

// Shown by: a row of evidence for each try that did not leave us (57 million for ten thousand
// charges and a day).
async fn a_provider_that_is_away_for_long_leaves_no_row_for_each_try<S: Rows>(store: S) {
    let away = (0..40).fold(Scripted::default(), |told, _| told.answers(Answer::NotConnected));
    let told = away.answers(done());
    let service = Service::start(&store, &Plan::new(KEY), told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    let worker = service.recover();
    let operation = eventually("it is sent", SOON, || async {
        let operation = service.operation().await;
        assert_eq!((operation.attempts, operation.parked.as_deref()), (0, None), "a provider that is away counts none");
        (operation.stage == Stage::Succeeded).then_some(operation)
    })
    .await;
    worker.stop().await;
    assert_eq!((told.arrived().len(), operation.intents[0].sends), (41, 2));
    let rows: Vec<_> =
        operation.evidence.iter().map(|row| (row.evidence.send, row.evidence.verdict.as_str())).collect();
    assert_eq!(rows, [(1, "not-sent"), (2, "success")]);
    service.ended_once("settled").await;
}

/// It asks to come again after this.
fn asks_to_wait(pause: Duration) -> Answer {
    let Answer::Status { listed, in_progress, replayed, matches, .. } = Answer::status(429) else { unreachable!() };
    Answer::Status { status: 429, listed, in_progress, replayed, matches, retry_after: Some(pause) }
}

// A rate limit that is asked for all day is as an outage: what it says is said once. Each pause
// ends a drive. Shown by: a row of evidence for each answer (14 million for ten thousand charges, a
// day and `Retry-After: 60`).
async fn a_provider_that_asks_to_wait_for_a_day_leaves_bounded_rows<S: Rows>(store: S) {
    const ASKS: u32 = 40;
    let mut plan = Plan::new(KEY);
    plan.settings.wait_max = Duration::ZERO;
    // On a busy machine a pause may be over before it is looked at, and then a drive counts.
    plan.settings.attempts_max = 1_000;
    let pause = Duration::from_millis(20);
    let told = (0..ASKS).fold(Scripted::default(), |told, _| told.answers(asks_to_wait(pause))).answers(done());
    let service = Service::start(&store, &plan, told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    let worker = service.recover();
    let operation = eventually("it is sent", SOON, || async {
        let operation = service.operation().await;
        assert!(operation.evidence.len() <= 2, "{} rows", operation.evidence.len());
        assert_eq!(operation.parked, None);
        (operation.stage == Stage::Succeeded).then_some(operation)
    })
    .await;
    worker.stop().await;
    assert_eq!((told.arrived().len(), operation.intents[0].sends), (41, ASKS + 1));
    let rows: Vec<_> =
        operation.evidence.iter().map(|row| (row.evidence.send, row.evidence.verdict.as_str())).collect();
    assert_eq!(rows, [(ASKS, "wait"), (ASKS + 1, "success")]);
    service.ended_once("settled").await;
}

// A process that is older than its flow's version, as there are in each deploy. Shown by: making it
// due at once for each request.
async fn clients_of_a_process_without_the_flow_do_not_use_up_its_attempts<S: Rows>(store: S) {
    let mut plan = Plan { version: 2, ..Plan::new(KEY) };
    plan.settings.calls_per_drive = 1;
    plan.settings.attempts_max = 2;
    let told = Scripted::default().answers(Answer::status(500)).answers(done());
    let newer = Service::start(&store, &plan, told.clone()).await;
    assert_eq!(code(&newer.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    store.write(&format!("update {} set due_at = {}", S::table("operation"), S::year(2037))).await;
    let due = newer.operation().await.due_at;
    let older = Service::start(&store, &Plan::new(KEY), Scripted::default()).await;
    let worker = newer.recover();
    for _ in 0..10 {
        assert_eq!(code(&older.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    }
    worker.stop().await;
    let operation = newer.operation().await;
    assert_eq!((operation.due_at, operation.attempts, told.arrived().len()), (due, 0, 1));
    let (reply, _) = newer.ask_until_known(ONE, 700).await;
    assert_eq!(reply.status, 201);
}

// Shown by: trying for ever what cannot even be asked.
async fn what_cannot_be_sent_at_all_is_left_to_a_person_in_the_end<S: Rows>(store: S) {
    let mut plan = Plan::new(KEY);
    plan.settings.attempts_max = 3;
    let told = (0..60).fold(Scripted::default(), |told, _| told.answers(Answer::NotMade));
    let service = Service::start(&store, &plan, told.clone()).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    let worker = service.recover();
    let parked = service.is_parked().await;
    worker.stop().await;
    let operation = service.operation().await;
    assert_eq!((parked.as_str(), operation.stage, operation.intents[0].sends), ("cannot-be-sent", Stage::Unknown, 1));
    assert_eq!(operation.attempts, 2, "the third attempt parks it, and is not counted");
}

/// A provider without a query: it has the one of the trait.
#[derive(Debug, Clone)]
struct WithoutQuery(Scripted);

#[async_trait]
impl Provider for WithoutQuery {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn version(&self) -> u32 {
        self.0.version()
    }

    fn timeout(&self) -> Duration {
        Provider::timeout(&self.0)
    }

    async fn send(&self, call: &Call<'_>) -> Sent {
        self.0.send(call).await
    }
}

impl Prepare<i64> for WithoutQuery {
    fn prepare(&self, amount: &i64, key: &str) -> Result<Vec<u8>, HandlerError> {
        self.0.prepare(amount, key)
    }
}

impl Adapter for WithoutQuery {
    fn intent(effect: &Effect<Self>, context: &Context, amount: i64, _: &str) -> Result<Intent, HandlerError> {
        effect.intend(context, &amount)
    }
}

// O6, O9. Shown by: a query that cannot be made as one that failed (it was asked for ever, and no
// attempt counted).
async fn o9_an_effect_whose_query_cannot_be_made_is_left_to_a_person_in_the_end<S: Rows>(store: S) {
    let mut plan = Plan::new(Strategy::Query);
    plan.settings.attempts_max = 3;
    let told = Scripted::default().answers(Answer::NoAnswer);
    let service = Service::start(&store, &plan, WithoutQuery(told.clone())).await;
    service.uses_up_three_attempts().await;
    assert_eq!(told.arrived().len(), 1);
}

// G10. Shown by: counting a query that cannot be made also before a resend (it was parked).
async fn g10_a_provider_without_a_query_that_is_away_is_waited_for<S: Rows>(store: S) {
    let mut plan = Plan::new(KEY_AND_QUERY);
    plan.settings.attempts_max = 2;
    let lost = Scripted::default().answers(Answer::NoAnswer);
    let away = (0..40).fold(lost, |told, _| told.answers(Answer::NotConnected));
    let service = Service::start(&store, &plan, WithoutQuery(away.answers(done()))).await;
    assert_eq!(code(&service.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
    let worker = service.recover();
    eventually("it is sent", SOON, || async {
        let operation = service.operation().await;
        assert_eq!((operation.attempts, operation.parked.as_deref()), (0, None), "a provider that is away counts none");
        (operation.stage == Stage::Succeeded).then_some(())
    })
    .await;
    worker.stop().await;
    service.ended_once("settled").await;
}

crate::on_all! {
    o9_an_effect_whose_query_cannot_be_made_is_left_to_a_person_in_the_end;
    g10_a_provider_without_a_query_that_is_away_is_waited_for;
    o8_proof_that_comes_after_the_parking_un_parks;
    o8_proof_that_the_database_refuses_goes_to_an_operator_in_words;
    o9_a_pause_that_no_instant_reaches_gives_the_operation_back;
    o9_a_request_that_comes_before_its_time_moves_nothing;
    a_provider_that_is_away_for_long_leaves_no_row_for_each_try;
    a_provider_that_asks_to_wait_for_a_day_leaves_bounded_rows;
    clients_of_a_process_without_the_flow_do_not_use_up_its_attempts;
    what_cannot_be_sent_at_all_is_left_to_a_person_in_the_end;
}

mod locked {
    use super::{
        o8_a_database_that_was_away_before_it_refuses_is_asked_again,
        o8_a_refusal_may_last_as_long_as_no_instant_reaches, o8_proof_that_comes_before_the_parking_is_used,
    };

    crate::on_postgres! {
        o8_proof_that_comes_before_the_parking_is_used;
        o8_a_database_that_was_away_before_it_refuses_is_asked_again;
        o8_a_refusal_may_last_as_long_as_no_instant_reaches;
    }
}
