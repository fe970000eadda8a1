//! Cases of operating: what is shown, and what an act does (R17, R31).

use std::time::Duration;

use uuid::Uuid;

use super::trial::{arrived, due, entry, message, new_message, parked, read_rows, through};
use super::{Fixture, Trial};
use crate::error::StoreError;
use crate::message::{Message, MessageId};
use crate::store::{
    ActContext, Claim, ConsumerId, DeadFilter, DeadMessage, DeadPlace, Diversion, EmailOutcome, Inbox, InboxTx,
    Mailbox, Mark, NewEmail, Operator, OperatorAct, OperatorRequest, ParkAs, RelaySession, RequestedAct, Waiting,
};

fn context() -> ActContext {
    ActContext { actor: "ann".into(), reason: "a test".into(), dry_run: false, redrive_age_max: None }
}

fn by_number(dead: &DeadMessage) -> DeadFilter {
    DeadFilter { number: Some(dead.number.clone()), ..DeadFilter::default() }
}

fn dead(holds: bool) -> ParkAs {
    ParkAs::Dead { reason: "terminal".into(), holds }
}

async fn list<F: Fixture>(trial: &Trial<F>) -> Vec<DeadMessage> {
    trial.store.dead(&DeadFilter::default()).await.unwrap()
}

async fn audits<F: Fixture>(trial: &Trial<F>) -> i64 {
    trial.number(&format!("select count(*) from {}", trial.table("audit"))).await
}

async fn claim<F: Fixture>(trial: &Trial<F>, consumer: ConsumerId) -> Vec<Message> {
    let claimed = trial.store.claim_due(consumer, 100, &Claim::new(Duration::from_secs(600))).await.unwrap();
    claimed.into_iter().map(|claimed| claimed.message).collect()
}

/// Two dead outbox rows, the first of which holds one; gives the session and their positions.
async fn dead_outbox<F: Fixture>(trial: &Trial<F>) -> (super::trial::Session<F>, Vec<i64>) {
    trial.enqueue(vec![new_message("a", "1"), new_message("b", "2"), new_message("a", "3")]).await;
    let mut session = trial.session("a").await;
    let (rows, batch) = read_rows(&mut session, 3).await;
    let positions: Vec<i64> = rows.iter().map(|row| row.position).collect();
    let dead = |holds| Diversion::Dead { reason: "too large".into(), holds };
    let diverted = vec![(positions[0], dead(true)), (positions[1], dead(false)), (positions[2], Diversion::HeldBehind)];
    session.claim(Mark { diverted, ..through(batch) }).await.unwrap();
    (session, positions)
}

/// Everything that `oncebox status` prints.
pub async fn the_status_counts_what_is_there<F: Fixture>(trial: &Trial<F>) {
    let status = trial.store.status().await.unwrap();
    assert_eq!((status.pending, status.held, status.dead, status.emails_pending), (0, 0, 0, 0));
    assert_eq!(status.oldest_pending_age_seconds, 0.0);
    assert_eq!(status.shards[0].owner, None);
    let (_session, positions) = dead_outbox(trial).await;
    trial.enqueue((0..3).map(|number| new_message("c", number.to_string())).collect()).await;
    let consumer = trial.consumer("ledger").await;
    trial.park(consumer, &message("due", "1"), due()).await;
    trial.park(consumer, &message("due", "2"), ParkAs::Behind).await;
    trial.park(consumer, &message("dead", "1"), dead(true)).await;
    trial.park(consumer, &message("dead", "2"), ParkAs::Behind).await;
    trial.consumer("email").await;
    let mut tx = trial.begin().await;
    for key in ["1", "2"] {
        let email = NewEmail { unique_key: key.into(), recipient: "a@b".into(), subject: "s".into(), body: "b".into() };
        assert!(F::Store::queue_email(&mut tx, &email).await.unwrap());
    }
    tx.commit().await.unwrap();
    let email = trial.store.claim_emails(1, &Claim::new(Duration::from_secs(60))).await.unwrap().remove(0);
    assert!(trial.store.settle_email(&email, &EmailOutcome::Sent).await.unwrap());

    let status = trial.store.status().await.unwrap();
    assert_eq!((status.pending, status.held, status.dead, status.emails_pending), (3, 1, 2, 1));
    assert!((0.0..600.0).contains(&status.oldest_pending_age_seconds), "{}", status.oldest_pending_age_seconds);
    let shard = &status.shards[0];
    assert_eq!((shard.shard, shard.owner.as_deref()), (0, Some("a")));
    assert!(shard.scanned_to >= positions[2] && shard.lease_seconds_left > 0.0 && shard.cursor_age_seconds < 600.0);
    let [email, ledger] = &status.consumers[..] else { panic!("{:?}", status.consumers) };
    assert_eq!((email.name.as_str(), email.inbox_rows, email.waiting), ("email", 0, 0));
    assert_eq!((ledger.name.as_str(), ledger.inbox_rows, ledger.dead), ("ledger", 4, 1));
    assert_eq!((ledger.waiting, ledger.held), (2, 1), "what stands behind a dead one is held, not waiting");
}

/// On both sides, oldest first, by any filter.
pub async fn dead_messages_are_listed_with_their_history<F: Fixture>(trial: &Trial<F>) {
    let (_session, positions) = dead_outbox(trial).await;
    let consumer = trial.consumer("ledger").await;
    let failing = message("k", "payload");
    for error in ["first", "second"] {
        trial.store.failed_attempt(consumer, failing.id, error, true).await.unwrap();
    }
    let mut tx = trial.store.begin(consumer).await.unwrap();
    tx.admit(&[entry(&failing)]).await.unwrap();
    let mut waiting = parked(&failing, due());
    (waiting.attempts, waiting.error) = (2, Some("second".into()));
    tx.park(&[waiting]).await.unwrap();
    tx.clear_attempts(&[failing.id]).await.unwrap();
    tx.commit().await.unwrap();
    let store = &trial.store;
    let head = store.claim_due(consumer, 1, &Claim::new(Duration::from_secs(600))).await.unwrap().remove(0);
    assert!(store.postpone(&head, Duration::ZERO, "third").await.unwrap());
    let head = super::trial::eventually("it is due", || async {
        store.claim_due(consumer, 1, &Claim::new(Duration::from_secs(600))).await.unwrap().pop()
    })
    .await;
    assert!(store.bury(&head, "attempts", "fourth", true).await.unwrap());

    let all = list(trial).await;
    let numbers: Vec<&str> = all.iter().map(|dead| dead.number.as_str()).collect();
    let c = format!("c{}", head.sequence);
    assert_eq!(numbers, [&format!("o{}", positions[0]), &format!("o{}", positions[1]), &c]);
    let (outbox, dead) = (&all[0], &all[2]);
    assert_eq!((&outbox.place, outbox.reason.as_str(), outbox.behind), (&DeadPlace::Outbox, "too large", 1));
    assert_eq!(
        (outbox.topic.as_str(), outbox.key.as_deref(), outbox.requested.as_deref()),
        ("payments", Some("a"), None)
    );
    assert_eq!((outbox.payload.as_slice(), outbox.kind.as_str()), (b"1".as_slice(), "payment.created"));
    assert_eq!(dead.place, DeadPlace::Consumer("ledger".into()));
    assert_eq!((dead.message_id, dead.reason.as_str(), dead.attempts), (failing.id.uuid(), "attempts", 4));
    assert_eq!((dead.key.as_deref(), dead.error.as_deref(), dead.behind), (Some("k"), Some("fourth"), 0));
    let history: Vec<(u32, &str)> = dead.history.iter().map(|entry| (entry.attempt, entry.error.as_str())).collect();
    assert_eq!(history, [(1, "first"), (2, "second"), (3, "third"), (4, "fourth")]);
    assert!(dead.history.iter().all(|entry| (chrono::Utc::now() - entry.at).num_minutes().abs() < 5));
    assert_eq!(dead.headers, [("tenant".to_owned(), "t1".to_owned())]);
    assert_eq!(
        (dead.payload.as_slice(), dead.content_type.as_deref()),
        (b"payload".as_slice(), Some("application/json"))
    );

    let some = |value: &str| Some(value.to_owned());
    let none = DeadFilter::default;
    let filters = [
        (DeadFilter { number: some(&c), ..none() }, 1),
        (DeadFilter { message_id: Some(failing.id.uuid()), ..none() }, 1),
        (DeadFilter { message_id: Some(outbox.message_id), ..none() }, 1),
        (DeadFilter { topic: some("payments"), ..none() }, 3),
        (DeadFilter { topic: some("other"), ..none() }, 0),
        (DeadFilter { key: some("k"), ..none() }, 1),
        (DeadFilter { consumer: some("ledger"), ..none() }, 1),
        (DeadFilter { consumer: some("outbox"), ..none() }, 2),
        (DeadFilter { consumer: some("nobody"), ..none() }, 0),
        (DeadFilter { reason: some("too large"), ..none() }, 2),
        (DeadFilter { limit: 2, ..none() }, 2),
        (DeadFilter { number: some("o999999999"), ..none() }, 0),
    ];
    for (filter, count) in filters {
        assert_eq!(store.dead(&filter).await.unwrap().len(), count, "{filter:?}");
    }
    let nonsense = store.dead(&DeadFilter { number: some("17"), ..none() }).await;
    assert!(matches!(nonsense, Err(StoreError::Refused(_))), "{nonsense:?}");
}

/// Due now, under its own id, with all tries ahead of it.
pub async fn a_redriven_consumer_message_runs_again_and_is_audited<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("ledger").await;
    let first = message("k", "1");
    trial.park(consumer, &first, dead(true)).await;
    trial.park(consumer, &message("k", "2"), ParkAs::Behind).await;
    trial.park(consumer, &message("other", "3"), dead(true)).await;
    let filter = DeadFilter { message_id: Some(first.id.uuid()), ..DeadFilter::default() };
    let outcome = trial.store.act(&filter, &OperatorAct::Redrive, &context()).await.unwrap();
    assert_eq!((outcome.numbers.len(), outcome.dry_run), (1, false));
    assert_eq!(audits(trial).await, 1);
    let claimed = claim(trial, consumer).await;
    assert_eq!(claimed, [Message { attempt: 1, ..first.clone() }]);
    assert_eq!(list(trial).await.len(), 1);
    assert_eq!(trial.store.known(consumer, &[first.id]).await.unwrap().len(), 1, "a second copy is a duplicate");
    let outcome = trial.store.act(&filter, &OperatorAct::Redrive, &context()).await.unwrap();
    assert!(outcome.numbers.is_empty(), "it is not dead any more");
    assert_eq!(audits(trial).await, 1);
}

/// Gone; what stood behind it is due.
pub async fn a_discarded_consumer_message_lets_its_key_go_on<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("ledger").await;
    let first = message("k", "1");
    trial.park(consumer, &first, dead(true)).await;
    trial.park(consumer, &message("k", "2"), ParkAs::Behind).await;
    trial.park(consumer, &message("k", "3"), ParkAs::Behind).await;
    let filter = by_number(&list(trial).await[0]);
    trial.store.act(&filter, &OperatorAct::Discard, &context()).await.unwrap();
    assert!(list(trial).await.is_empty());
    assert_eq!(audits(trial).await, 1);
    let claimed = claim(trial, consumer).await;
    assert_eq!(claimed.iter().map(|message| message.payload.as_slice()).collect::<Vec<_>>(), [b"2"]);
    assert_eq!(trial.store.known(consumer, &[first.id]).await.unwrap().len(), 1, "a redelivery is still a duplicate");
}

/// An edited message gets a new id; one that is taken is refused.
pub async fn a_redrive_under_a_new_id_is_another_message<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("ledger").await;
    let first = message("k", "1");
    trial.park(consumer, &first, dead(true)).await;
    let filter = by_number(&list(trial).await[0]);
    let taken = OperatorAct::RedriveAs { id: first.id.uuid(), payload: Some(b"edited".to_vec()) };
    let refused = trial.store.act(&filter, &taken, &context()).await;
    assert!(matches!(refused, Err(StoreError::Refused(_))), "{refused:?}");
    assert_eq!(audits(trial).await, 0);
    let id = Uuid::now_v7();
    let act = OperatorAct::RedriveAs { id, payload: Some(b"edited".to_vec()) };
    trial.store.act(&filter, &act, &context()).await.unwrap();
    assert_eq!(audits(trial).await, 1);
    let claimed = claim(trial, consumer).await.remove(0);
    assert_eq!((claimed.id.uuid(), claimed.payload.as_slice()), (id, b"edited".as_slice()));
    assert_eq!((&claimed.topic, &claimed.key, &claimed.kind), (&first.topic, &first.key, &first.kind));
    let ids = [first.id, MessageId::from_uuid(id)];
    assert_eq!(trial.store.known(consumer, &ids).await.unwrap().len(), 2, "both are known from now on");
    trial.park(consumer, &message("x", "1"), dead(true)).await;
    trial.park(consumer, &message("y", "1"), dead(true)).await;
    let many = trial.store.act(&DeadFilter::default(), &act, &context()).await;
    assert!(matches!(many, Err(StoreError::Refused(_))), "one id is for one message: {many:?}");
}

/// It says what it would do.
pub async fn a_dry_run_writes_nothing<F: Fixture>(trial: &Trial<F>) {
    let (mut session, _) = dead_outbox(trial).await;
    let consumer = trial.consumer("ledger").await;
    trial.park(consumer, &message("k", "1"), dead(true)).await;
    let before = list(trial).await;
    for act in [OperatorAct::Redrive, OperatorAct::Discard] {
        let dry = ActContext { dry_run: true, ..context() };
        let outcome = trial.store.act(&DeadFilter::default(), &act, &dry).await.unwrap();
        assert_eq!((outcome.numbers.len(), outcome.dry_run), (3, true));
    }
    assert_eq!(list(trial).await, before);
    assert_eq!(audits(trial).await, 0);
    assert!(session.requests().await.unwrap().is_empty());
    assert!(claim(trial, consumer).await.is_empty());
}

/// A command writes a request; only the owner publishes or forgets.
pub async fn r17_acts_on_outbox_rows_are_requests_to_the_owner<F: Fixture>(trial: &Trial<F>) {
    let (mut session, positions) = dead_outbox(trial).await;
    assert!(session.requests().await.unwrap().is_empty());
    let all = list(trial).await;
    let id = Uuid::now_v7();
    let edit = OperatorAct::RedriveAs { id, payload: Some(b"edited".to_vec()) };
    trial.store.act(&by_number(&all[0]), &edit, &context()).await.unwrap();
    trial.store.act(&by_number(&all[1]), &OperatorAct::Discard, &context()).await.unwrap();
    assert_eq!(audits(trial).await, 2);
    let request = |position: i64, key: &str, act| OperatorRequest {
        position,
        topic: "payments".into(),
        key: Some(key.into()),
        act,
    };
    let asked = session.requests().await.unwrap();
    let expected =
        [request(positions[0], "a", RequestedAct::Redrive), request(positions[1], "b", RequestedAct::Discard)];
    assert_eq!(asked, expected);
    let listed = list(trial).await;
    assert!(listed.iter().all(|dead| dead.requested.is_some()), "they stand until the owner has acted");
    let held = session.held(&[positions[0]]).await.unwrap().remove(0).message;
    assert_eq!((held.id, held.payload.as_slice()), (id, b"edited".as_slice()));
    let released = Mark { released: vec![positions[0]], discarded: vec![positions[1]], ..Mark::default() };
    session.claim(released).await.unwrap();
    assert!(session.requests().await.unwrap().is_empty());
    assert!(list(trial).await.is_empty());

    // Refused again: dead again, and the request is done with.
    trial.enqueue(vec![new_message("c", "4")]).await;
    let (rows, batch) = read_rows(&mut session, 1).await;
    let dead = || Diversion::Dead { reason: "too large".into(), holds: true };
    session.claim(Mark { diverted: vec![(rows[0].position, dead())], ..through(batch) }).await.unwrap();
    trial.store.act(&DeadFilter::default(), &OperatorAct::Redrive, &context()).await.unwrap();
    assert_eq!(session.requests().await.unwrap().len(), 1);
    session.claim(Mark { changed: vec![(rows[0].position, dead())], ..Mark::default() }).await.unwrap();
    assert!(session.requests().await.unwrap().is_empty());
}

/// Consumers may have purged what could answer whether they handled it.
pub async fn r31_an_old_outbox_row_needs_a_new_id<F: Fixture>(trial: &Trial<F>) {
    let (mut session, _) = dead_outbox(trial).await;
    let filter = by_number(&list(trial).await[0]);
    let strict = ActContext { redrive_age_max: Some(Duration::ZERO), ..context() };
    // Older than zero: the clock of the database has gone on.
    super::trial::eventually("it is too old", || async {
        let dry = ActContext { dry_run: true, ..strict.clone() };
        let outcome = trial.store.act(&filter, &OperatorAct::Redrive, &dry).await;
        outcome.is_err().then_some(())
    })
    .await;
    let refused = trial.store.act(&filter, &OperatorAct::Redrive, &strict).await;
    assert!(matches!(&refused, Err(StoreError::Refused(why)) if why.contains("--new-id")), "{refused:?}");
    assert!(session.requests().await.unwrap().is_empty());
    assert_eq!(audits(trial).await, 0);
    let renamed = OperatorAct::RedriveAs { id: Uuid::now_v7(), payload: None };
    trial.store.act(&filter, &renamed, &strict).await.unwrap();
    assert_eq!(session.requests().await.unwrap().len(), 1);
    let lenient = ActContext { redrive_age_max: Some(Duration::from_secs(86_400)), ..context() };
    let rest = DeadFilter { key: Some("b".into()), ..DeadFilter::default() };
    trial.store.act(&rest, &OperatorAct::Redrive, &lenient).await.unwrap();
    assert_eq!(session.requests().await.unwrap().len(), 2);
}

/// The operator's word that it was never handled: from then on a second copy is a duplicate.
pub async fn r31_redriving_what_left_no_inbox_row_inserts_it<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("ledger").await;
    let old = message("k", "1");
    let mut tx = trial.store.begin(consumer).await.unwrap();
    tx.admit(&[entry(&old)]).await.unwrap();
    tx.forget(&[old.id]).await.unwrap();
    let too_old = ParkAs::Dead { reason: "too-old".into(), holds: false };
    tx.park(&[parked(&old, too_old)]).await.unwrap();
    tx.commit().await.unwrap();
    assert!(trial.store.known(consumer, &[old.id]).await.unwrap().is_empty());
    trial.store.act(&DeadFilter::default(), &OperatorAct::Redrive, &context()).await.unwrap();
    assert_eq!(trial.store.known(consumer, &[old.id]).await.unwrap().len(), 1);
    assert_eq!(claim(trial, consumer).await.len(), 1);

    // What was refused because its id is another message's must not run under that id.
    let first = message("k2", "1");
    trial.park(consumer, &first, dead(false)).await;
    let reused = arrived(Some("k2"), "another", &first.id_text);
    let mut tx = trial.store.begin(consumer).await.unwrap();
    tx.park(&[parked(&reused, ParkAs::Dead { reason: "id-reused".into(), holds: false })]).await.unwrap();
    tx.commit().await.unwrap();
    let filter = DeadFilter { reason: Some("id-reused".into()), ..DeadFilter::default() };
    let refused = trial.store.act(&filter, &OperatorAct::Redrive, &context()).await;
    assert!(matches!(refused, Err(StoreError::Refused(_))), "{refused:?}");
}
