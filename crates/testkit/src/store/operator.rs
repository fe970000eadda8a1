//! Cases of what an operator sees and does (R17, R31).

use std::time::Duration;

use uuid::Uuid;

use super::trial::{
    LEASE, Session, arrived, context, dead, due, entry, eventually, everything, message, moved, new_message, parked,
    read_rows, spec, through,
};
use super::waiting::{lease, payloads};
use super::{Fixture, Trial};
use oncebox::error::StoreError;
use oncebox::message::{Message, MessageId};
use oncebox::store::{
    ActContext, DeadFilter, DeadMessage, DeadPlace, DeadState, Diversion, EmailOutcome, Enqueue, Forgotten, Holding,
    Inbox, Mailbox, Mark, NewEmail, Operator, OperatorAct, OperatorOutcome, OperatorRequest, ParkAs, RowLease, Waiting,
};

fn by_number(dead: &DeadMessage) -> DeadFilter {
    DeadFilter { numbers: vec![dead.number.clone()], ..DeadFilter::default() }
}

async fn list<F: Fixture>(trial: &Trial<F>) -> Vec<DeadMessage> {
    trial.store.dead(&DeadFilter::default()).await.unwrap()
}

async fn audits<F: Fixture>(trial: &Trial<F>) -> i64 {
    trial.rows("audit").await
}

/// Makes two dead outbox rows, the first of which holds another row. Returns the session and their
/// positions.
async fn dead_outbox<F: Fixture>(trial: &Trial<F>) -> (Session, Vec<i64>) {
    trial.enqueue(vec![new_message("a", "1"), new_message("b", "2"), new_message("a", "3")]).await;
    let mut session = trial.session("a").await;
    let (rows, batch) = read_rows(&mut session, 3).await;
    let positions: Vec<i64> = rows.iter().map(|row| row.position).collect();
    let dead = |holds| Diversion::Dead { reason: "too large".into(), holds };
    let diverted = vec![(positions[0], dead(true)), (positions[1], dead(false)), (positions[2], Diversion::HeldBehind)];
    session.checkpoint(Mark { diverted, ..through(batch) }).await.unwrap();
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
        assert!(tx.queue_email(&email).await.unwrap());
    }
    tx.commit().await.unwrap();
    let email = trial.store.lease_emails(1, &RowLease::new(LEASE)).await.unwrap().remove(0);
    assert!(trial.store.settle_email(&email, &EmailOutcome::Sent).await.unwrap());
    // On SQLite a time has milliseconds: what is as young as that has no age.
    for (table, column) in [("outbox_dead", "created_at"), ("waiting", "stored_at")] {
        let earlier = moved::<F>(column, -1);
        trial.run(&format!("update {} set {column} = {earlier}", trial.table(table))).await;
    }

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
    assert!((0.0..600.0).contains(&status.oldest_held_age_seconds), "{}", status.oldest_held_age_seconds);
    assert_eq!(email.oldest_waiting_age_seconds, 0.0);
    assert!(status.oldest_held_age_seconds > 0.0 && ledger.oldest_waiting_age_seconds > 0.0, "{status:?}");
    eventually("what is pending has an age, and so has the cursor", || async {
        let status = trial.store.status().await.unwrap();
        (status.oldest_pending_age_seconds > 0.0 && status.shards[0].cursor_age_seconds > 0.0).then_some(())
    })
    .await;
}

/// Lists every state that an operator may ask for, of outbox and consumers. Shown by: a list of
/// dead ones only.
pub async fn what_is_held_and_what_waits_is_listed_with_its_reason_and_its_next_try<F: Fixture>(trial: &Trial<F>) {
    let (mut session, positions) = dead_outbox(trial).await;
    let consumer = trial.consumer("ledger").await;
    let foreign = arrived(Some("due"), "1", "evt-17");
    trial.park(consumer, &foreign, due()).await;
    trial.park(consumer, &message("due", "2"), ParkAs::Behind).await;
    trial.park(consumer, &message("dead", "1"), dead(true)).await;
    trial.park(consumer, &message("dead", "2"), ParkAs::Behind).await;
    let listed = |states: Vec<DeadState>| async move {
        trial.store.dead(&DeadFilter { states, ..DeadFilter::default() }).await.unwrap()
    };
    let payloads = |messages: &[DeadMessage]| -> Vec<String> {
        let mut found: Vec<_> = messages
            .iter()
            .map(|one| format!("{} {}", one.key.clone().unwrap_or_default(), String::from_utf8_lossy(&one.payload)))
            .collect();
        found.sort();
        found
    };
    let held = listed(vec![DeadState::Held]).await;
    assert_eq!(payloads(&held), ["a 3", "dead 2"]);
    assert!(held.iter().all(|one| one.state == DeadState::Held && one.next_try.is_none()), "{held:?}");
    assert!(held.iter().all(|one| one.reason.starts_with("behind a")), "{held:?}");
    assert!(held.iter().any(|one| one.number == format!("o{}", positions[2])), "{held:?}");
    // The dead message that holds each is named, also where its redrive is refused.
    let dead_of_consumer = listed(Vec::new()).await.into_iter().find(|one| one.number.starts_with('c')).unwrap();
    for one in &held {
        let holder = match one.place {
            DeadPlace::Outbox => format!("o{}", positions[0]),
            DeadPlace::Consumer(_) => dead_of_consumer.number.clone(),
        };
        assert_eq!(one.held_by.as_ref(), Some(&holder), "{one:?}");
        let only = DeadFilter { states: vec![DeadState::Held], ..by_number(one) };
        let refused = trial.store.act(&only, &OperatorAct::Redrive, &context()).await;
        assert!(matches!(&refused, Err(StoreError::Refused(why)) if why.contains(&holder)), "{refused:?}");
    }

    let waiting = listed(vec![DeadState::Waiting]).await;
    assert_eq!(payloads(&waiting), ["due 1", "due 2"]);
    let (head, behind) = (&waiting[0], &waiting[1]);
    assert_eq!((head.reason.as_str(), head.error.as_deref(), head.behind), ("retry", Some("no"), 1));
    assert!(head.next_try.is_some_and(|at| (chrono::Utc::now() - at).num_minutes().abs() < 5), "{head:?}");
    assert_eq!((behind.reason.as_str(), behind.next_try), ("behind a waiting message of its key", None));
    // The id of the producer is shown beside the UUID that was made of it.
    assert_eq!((head.message_id, head.sent_id.as_deref()), (foreign.id.uuid(), Some("evt-17")));
    assert_eq!(behind.sent_id, None, "a UUID is shown once");

    assert_eq!(payloads(&listed(vec![DeadState::Dead]).await), ["a 1", "b 2", "dead 1"]);
    assert_eq!(listed(Vec::new()).await, listed(vec![DeadState::Dead]).await, "unless told otherwise, dead ones");
    let all = listed(vec![DeadState::Dead, DeadState::Held, DeadState::Waiting]).await;
    assert_eq!(all.len(), 7);
    assert!(all.is_sorted_by_key(|one| one.since), "oldest first, whatever their state");
    // An act on all of them finds them without a limit.
    for states in [vec![DeadState::Dead], vec![DeadState::Held], vec![DeadState::Waiting]] {
        let of_state = DeadFilter { states: states.clone(), limit: 1, ..DeadFilter::default() };
        let mut numbers = trial.store.dead_numbers(&of_state).await.unwrap();
        let mut expected: Vec<String> = listed(states).await.into_iter().map(|one| one.number).collect();
        numbers.sort();
        expected.sort();
        assert_eq!(numbers, expected);
    }
    let named = DeadFilter { numbers: vec![all[0].number.clone(), all[6].number.clone()], ..DeadFilter::default() };
    let named = DeadFilter { states: vec![DeadState::Dead, DeadState::Held, DeadState::Waiting], ..named };
    assert_eq!(trial.store.dead(&named).await.unwrap(), [all[0].clone(), all[6].clone()]);
    assert_eq!(trial.store.dead_numbers(&named).await.unwrap(), named.numbers);
    assert!(trial.store.held_topics(10).await.unwrap().is_empty(), "what stands behind another one of its key");

    // All later rows of a topic that takes nothing stand behind its first one.
    let orders = |key: &str| oncebox::message::NewMessage::text("orders", "order.created", "{}").with_key(key);
    trial.enqueue(vec![orders("a"), orders("b"), orders("b")]).await;
    let (rows, batch) = read_rows(&mut session, 3).await;
    let held = || Diversion::HeldDestination { reason: "not there".into() };
    let diverted = rows.iter().map(|row| (row.position, held())).collect();
    session.checkpoint(Mark { diverted, ..through(batch) }).await.unwrap();
    let of_orders = DeadFilter { states: vec![DeadState::Held], topic: Some("orders".into()), ..DeadFilter::default() };
    let shown = trial.store.dead(&of_orders).await.unwrap();
    let behind: Vec<u64> = shown.iter().map(|one| one.behind).collect();
    assert_eq!(behind, [2, 0, 0]);
    assert!(shown.iter().all(|one| one.reason == "not there" && one.state == DeadState::Held), "{shown:?}");
    let last = DeadFilter { numbers: vec![shown[1].number.clone()], ..of_orders.clone() };
    assert_eq!(trial.store.dead(&last).await.unwrap()[0].behind, 1);
    assert_eq!(trial.store.held_topics(10).await.unwrap(), [shown[0].clone()]);

    // The topic takes messages again, and refuses one of them for what it is. What stands behind
    // that one of its key waits for it, whatever it was held for. What stands before it does not.
    let dead = Diversion::Dead { reason: "too large".into(), holds: true };
    session.checkpoint(Mark { changed: vec![(rows[1].position, dead)], ..Mark::default() }).await.unwrap();
    let shown = trial.store.dead(&of_orders).await.unwrap();
    let (first, behind) = (&shown[0], &shown[1]);
    assert_eq!((first.reason.as_str(), first.held_by.as_ref(), first.behind), ("not there", None, 1));
    assert_eq!(behind.held_by, Some(format!("o{}", rows[1].position)));
    assert_eq!((behind.reason.as_str(), &behind.error), ("behind a dead message of its key", &None));
    assert_eq!(trial.store.held_topics(10).await.unwrap(), std::slice::from_ref(first));
    session.checkpoint(Mark { discarded: vec![rows[0].position], ..Mark::default() }).await.unwrap();
    assert!(trial.store.held_topics(10).await.unwrap().is_empty(), "the topic is not blocked");
}

/// The cost of `status` must not grow with the number of rows: a count stops at 10,000, which means
/// that number or more. So do the counts of a consumer that is forgotten; it goes all the same.
/// Shown by: counting its whole inbox; leaving out the pages of its waiting messages.
pub async fn g11_the_status_counts_no_further_than_its_bound<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("ledger").await;
    trial.park(consumer, &message("dead", "1"), dead(true)).await;
    for _ in 0..21 {
        let behind: Vec<Message> = (0..500).map(|_| message("dead", "2")).collect();
        let mut tx = trial.store.begin(consumer).await.unwrap();
        tx.admit(&behind.iter().map(entry).collect::<Vec<_>>()).await.unwrap();
        tx.park(&behind.iter().map(|one| parked(one, ParkAs::Behind)).collect::<Vec<_>>()).await.unwrap();
        tx.commit().await.unwrap();
    }
    let ledger = trial.store.status().await.unwrap().consumers.remove(0);
    assert_eq!((ledger.held, ledger.waiting, ledger.dead), (10_000, 0, 1));
    assert!(ledger.inbox_rows >= 10_000, "{}", ledger.inbox_rows);
    trial.park(consumer, &message("due", "3"), due()).await;
    let ledger = trial.store.status().await.unwrap().consumers.remove(0);
    assert_eq!((ledger.held, ledger.waiting), (10_000, 1), "what is due is seen beside any number that is held");

    let age = format!("update {} set seen_at = {}", trial.table("consumer"), moved::<F>("seen_at", -3_600));
    trial.run(&age).await;
    let forgotten = trial.store.forget_consumer("ledger", &context()).await.unwrap();
    assert_eq!((forgotten.messages, forgotten.inbox_rows), (10_000, 10_000));
    assert_eq!((trial.rows("waiting").await, trial.rows("inbox").await, trial.rows("consumer").await), (0, 0, 0));
}

/// Each act is refused while a process handles the message, and writes an audit row when it is
/// done. Shown by: an act that ignores the state of the row.
pub async fn a_waiting_message_is_tried_now_buried_or_discarded_unless_a_process_runs_it<F: Fixture>(trial: &Trial<F>) {
    let store = &trial.store;
    let consumer = trial.consumer("ledger").await;
    let later = || ParkAs::Due(Duration::from_secs(3_600));
    trial.park(consumer, &message("a", "1"), later()).await;
    trial.park(consumer, &message("a", "2"), ParkAs::Behind).await;
    let all =
        || DeadFilter { states: vec![DeadState::Dead, DeadState::Held, DeadState::Waiting], ..DeadFilter::default() };
    let look = || async move { store.dead(&all()).await.unwrap() };
    let act = |message: &DeadMessage, act: OperatorAct| {
        let filter = DeadFilter { numbers: vec![message.number.clone()], ..all() };
        async move { store.act(&filter, &act, &context()).await.map(|outcome| outcome.numbers.len()) }
    };
    let is_refused = |done: Result<usize, StoreError>, words: &str| {
        assert!(matches!(&done, Err(StoreError::Refused(why)) if why.contains(words)), "{words}: {done:?}");
    };
    let waiting = look().await;
    let (head, behind) = (&waiting[0], &waiting[1]);
    is_refused(act(behind, OperatorAct::Redrive).await, "waits for an earlier message");
    is_refused(act(head, OperatorAct::RedriveAs { id: Uuid::now_v7(), payload: None }).await, "bury it first");
    assert!(lease(trial, consumer).await.is_empty(), "nothing is due");
    // The redrive makes it due at once, and a process takes it.
    assert_eq!(act(head, OperatorAct::Redrive).await.unwrap(), 1);
    let leased = RowLease::new(LEASE);
    let running = store.lease_due(consumer, &everything(), &leased).await.unwrap().unwrap();
    for wanted in [OperatorAct::Redrive, OperatorAct::Bury, OperatorAct::Discard] {
        is_refused(act(head, wanted).await, "is handling it now");
    }
    assert!(store.postpone(&running, Duration::from_secs(3_600), "no").await.unwrap(), "its lease stands");
    // It is buried: it is dead, and the message behind it is held.
    assert_eq!(act(head, OperatorAct::Bury).await.unwrap(), 1);
    let states: Vec<DeadState> = look().await.iter().map(|one| one.state).collect();
    assert!(states.len() == 2 && states.contains(&DeadState::Dead) && states.contains(&DeadState::Held), "{states:?}");
    is_refused(act(head, OperatorAct::Bury).await, "dead already");
    assert!(!store.postpone(&running, Duration::ZERO, "late").await.unwrap(), "who had it is fenced");
    // It is discarded: it is gone, and the next message of its key is due.
    assert_eq!(act(head, OperatorAct::Redrive).await.unwrap(), 1);
    assert_eq!(act(head, OperatorAct::Discard).await.unwrap(), 1);
    let left = look().await;
    assert_eq!((left.len(), left[0].state, left[0].next_try.is_some()), (1, DeadState::Waiting, true), "{left:?}");
    assert_eq!(lease(trial, consumer).await.len(), 1);
    let acts = store.audit(None, 10).await.unwrap();
    let names: Vec<&str> = acts.iter().map(|one| one.act.as_str()).collect();
    assert_eq!(names, ["discard", "redrive", "bury", "redrive"], "refusals leave none");
}

/// The relay carries out the request as it does for a dead row. Shown by: requests for dead rows
/// only, so that nobody could discard a held one.
pub async fn a_held_message_is_discarded_by_request_and_by_nothing_else<F: Fixture>(trial: &Trial<F>) {
    let (mut session, positions) = dead_outbox(trial).await;
    let held = DeadFilter { states: vec![DeadState::Held], ..DeadFilter::default() };
    for act in [OperatorAct::Redrive, OperatorAct::Bury] {
        let refused = trial.store.act(&held, &act, &context()).await;
        assert!(matches!(refused, Err(StoreError::Refused(_))), "{refused:?}");
    }
    assert_eq!(trial.store.dead_numbers(&held).await.unwrap().len(), 1);
    assert_eq!(trial.store.act(&held, &OperatorAct::Discard, &context()).await.unwrap().numbers.len(), 1);
    assert!(trial.store.dead_numbers(&held).await.unwrap().is_empty(), "its request is there already");
    let asked = session.requests(0, 1_000).await.unwrap();
    assert_eq!(asked.iter().map(|one| (one.position, one.discard)).collect::<Vec<_>>(), [(positions[2], true)]);
    session.checkpoint(Mark { discarded: vec![positions[2]], ..Mark::default() }).await.unwrap();
    assert!(trial.store.dead(&held).await.unwrap().is_empty());
    assert_eq!((list(trial).await.len(), audits(trial).await), (2, 1));
}

/// Shown by: forgetting without a check whether the consumer is there, or with one that does not
/// count a start; leaving rows of it behind.
pub async fn a_consumer_that_is_gone_is_forgotten_and_one_that_is_there_is_not<F: Fixture>(trial: &Trial<F>) {
    let (gone, stays) = (trial.consumer("gone").await, trial.consumer("stays").await);
    let rule = spec("gone").id_rule;
    assert!(!trial.store.seen(stays, "another rule").await.unwrap(), "one that another rule was accepted for");
    for consumer in [gone, stays] {
        trial.park(consumer, &message("a", "1"), dead(true)).await;
        trial.park(consumer, &message("a", "2"), ParkAs::Behind).await;
        trial.store.begin_attempt(consumer, message("b", "1").id).await.unwrap();
        let holding = Holding { topic: "payments".into(), partition: 0, owner: Uuid::now_v7() };
        trial.store.open_assignment(consumer, &holding).await.unwrap();
        assert!(trial.store.seen(consumer, &rule).await.unwrap());
    }
    let refused = trial.store.forget_consumer("gone", &context()).await.unwrap_err();
    assert!(matches!(&refused, StoreError::Refused(why) if why.contains("consumer `gone` was seen")), "{refused}");
    let (consumers, earlier) = (trial.table("consumer"), moved::<F>("seen_at", -3_600));
    let age = format!("update {consumers} set seen_at = {earlier} where consumer_id = {}", gone.0);
    trial.run(&age).await;
    assert_eq!(trial.consumer("gone").await, gone);
    let refused = trial.store.forget_consumer("gone", &context()).await.unwrap_err();
    assert!(matches!(&refused, StoreError::Refused(why) if why.contains("was seen")), "who starts is there: {refused}");
    trial.run(&age).await;
    let status = trial.store.status().await.unwrap();
    let seen: Vec<_> = status.consumers.iter().map(|one| (one.name.as_str(), one.seen_seconds_ago > 600.0)).collect();
    assert_eq!(seen, [("gone", true), ("stays", false)]);

    let expected = Forgotten { messages: 2, inbox_rows: 2 };
    let dry_run = ActContext { dry_run: true, ..context() };
    assert_eq!(trial.store.forget_consumer("gone", &dry_run).await.unwrap(), expected);
    assert_eq!(trial.store.status().await.unwrap().consumers.len(), 2, "a dry run changes nothing");
    assert_eq!(trial.store.forget_consumer("gone", &context()).await.unwrap(), expected);
    for (table, left) in [("waiting", 2), ("inbox", 2), ("attempt", 1), ("assignment", 1), ("consumer", 1)] {
        assert_eq!(trial.rows(table).await, left, "{table}");
    }
    assert!(!trial.store.seen(gone, &rule).await.unwrap(), "whoever still runs is told");
    assert!(matches!(trial.store.forget_consumer("gone", &context()).await, Err(StoreError::Refused(_))));
    assert_ne!(trial.consumer("gone").await, gone, "who starts under its name is a new one");
    let acts = trial.store.audit(None, 10).await.unwrap();
    assert_eq!((acts[0].act.as_str(), acts[0].place.as_str()), ("forget", "gone"));
}

/// Every act is listed, with its actor and reason.
pub async fn what_operators_did_is_read_newest_first<F: Fixture>(trial: &Trial<F>) {
    let (_session, _) = dead_outbox(trial).await;
    let dead = list(trial).await;
    let act = |number: usize, act: OperatorAct, actor: &str| {
        let context = ActContext { actor: actor.into(), reason: format!("why {number}"), ..context() };
        let filter = by_number(&dead[number]);
        async move { trial.store.act(&filter, &act, &context).await.unwrap() }
    };
    act(0, OperatorAct::Discard, "ann").await;
    act(1, OperatorAct::Redrive, "bob").await;
    let acts = trial.store.audit(None, 10).await.unwrap();
    let said: Vec<String> = acts.iter().map(|one| format!("{} {} {}", one.actor, one.act, one.reason)).collect();
    assert_eq!(said, ["bob redrive why 1", "ann discard why 0"]);
    assert_eq!((acts[1].message_id, acts[1].number.as_str()), (dead[0].message_id, dead[0].number.as_str()));
    assert!(acts.iter().all(|one| (chrono::Utc::now() - one.at).num_minutes().abs() < 5));
    let of_one = trial.store.audit(Some(dead[0].message_id), 10).await.unwrap();
    assert_eq!(of_one, [acts[1].clone()]);
    assert_eq!(trial.store.audit(None, 1).await.unwrap(), [acts[0].clone()]);
}

/// The history of errors is bounded in number and in length, alike in each database. An error is
/// never cut in the middle of a character.
pub async fn g11_of_a_message_the_last_fifty_errors_are_kept_each_up_to_its_bound<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("ledger").await;
    let failing = message("k", "payload");
    for number in 1..=60 {
        let error = format!("{number} \0{}", "ä".repeat(5_000));
        trial.store.failed_attempt(consumer, failing.id, &error, true).await.unwrap();
    }
    trial.park(consumer, &failing, dead(true)).await;
    let history = list(trial).await.remove(0).history;
    let attempts: Vec<u32> = history.iter().map(|entry| entry.attempt).collect();
    assert!(attempts.len() == 50 && attempts[0] > 10, "{attempts:?}");
    let kept = &history[attempts.iter().position(|attempt| *attempt == 60).unwrap()].error;
    assert!(kept.starts_with("60 ") && kept.ends_with('ä') && (4_090..=4_100).contains(&kept.len()), "{}", kept.len());
}

/// Dead messages of outbox and consumers are listed, oldest first, by any filter.
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
    let head = store.lease_due(consumer, &everything(), &RowLease::new(LEASE)).await.unwrap().unwrap();
    assert!(store.postpone(&head, Duration::ZERO, "third").await.unwrap());
    let head = eventually("it is due", || async {
        store.lease_due(consumer, &everything(), &RowLease::new(LEASE)).await.unwrap()
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
        (DeadFilter { numbers: vec![c.clone()], ..none() }, 1),
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
        (DeadFilter { numbers: vec!["o999999999".into()], ..none() }, 0),
    ];
    for (filter, count) in filters {
        assert_eq!(store.dead(&filter).await.unwrap().len(), count, "{filter:?}");
    }
    let nonsense = store.dead(&DeadFilter { numbers: vec!["17".into()], ..none() }).await;
    assert!(matches!(nonsense, Err(StoreError::Refused(_))), "{nonsense:?}");
}

/// A redriven message is due at once, has its own id, and has all tries again.
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
    let leased = lease(trial, consumer).await;
    let leased: Vec<&Message> = leased.iter().map(|one| &one.message).collect();
    assert_eq!(leased, [&Message { attempt: 1, ..first.clone() }]);
    assert_eq!(list(trial).await.len(), 1);
    assert_eq!(trial.store.known(consumer, &[first.id]).await.unwrap().len(), 1, "a second copy is a duplicate");
    let outcome = trial.store.act(&filter, &OperatorAct::Redrive, &context()).await.unwrap();
    assert!(outcome.numbers.is_empty(), "it is not dead any more");
    assert_eq!(audits(trial).await, 1);
}

/// A discarded message is gone, and the message behind it is due.
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
    assert_eq!(payloads(&lease(trial, consumer).await), ["2"]);
    assert_eq!(trial.store.known(consumer, &[first.id]).await.unwrap().len(), 1, "a redelivery is still a duplicate");
}

/// An edited message gets a new id and a header with the old one. A known id is refused.
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
    let leased = lease(trial, consumer).await.remove(0).message;
    assert_eq!((leased.id.uuid(), leased.payload.as_slice()), (id, b"edited".as_slice()));
    assert_eq!((&leased.topic, &leased.key, &leased.kind), (&first.topic, &first.key, &first.kind));
    let cause = ("oncebox-causation-id".to_owned(), first.id.uuid().to_string().into_bytes());
    assert_eq!(leased.headers, [&first.headers[..], &[cause]].concat(), "it names the id that it had");
    let ids = [first.id, MessageId::from(id)];
    assert_eq!(trial.store.known(consumer, &ids).await.unwrap().len(), 2, "both are known from now on");
    trial.park(consumer, &message("x", "1"), dead(true)).await;
    trial.park(consumer, &message("y", "1"), dead(true)).await;
    let many = trial.store.act(&DeadFilter::default(), &act, &context()).await;
    assert!(matches!(many, Err(StoreError::Refused(_))), "one id is for one message: {many:?}");
}

/// A dry run returns what it would do, and writes nothing.
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
    assert!(session.requests(0, 1_000).await.unwrap().is_empty());
    assert!(lease(trial, consumer).await.is_empty());
}

/// An act on an outbox row only writes a request. Only the owner of the shard publishes or discards
/// the row.
pub async fn r17_acts_on_outbox_rows_are_requests_to_the_owner<F: Fixture>(trial: &Trial<F>) {
    let (mut session, positions) = dead_outbox(trial).await;
    assert!(session.requests(0, 1_000).await.unwrap().is_empty());
    let all = list(trial).await;
    let id = Uuid::now_v7();
    let edit = OperatorAct::RedriveAs { id, payload: Some(b"edited".to_vec()) };
    trial.store.act(&by_number(&all[0]), &edit, &context()).await.unwrap();
    trial.store.act(&by_number(&all[1]), &OperatorAct::Discard, &context()).await.unwrap();
    assert_eq!(audits(trial).await, 2);
    let request = |position: i64, key: &str, discard| OperatorRequest {
        position,
        topic: "payments".into(),
        key: Some(key.into()),
        discard,
    };
    let asked = session.requests(0, 1_000).await.unwrap();
    let expected = [request(positions[0], "a", false), request(positions[1], "b", true)];
    assert_eq!(asked, expected);
    assert_eq!(session.requests(0, 1).await.unwrap(), expected[..1]);
    assert_eq!(session.requests(positions[0], 1).await.unwrap(), expected[1..], "the first one hides no other");
    let listed = list(trial).await;
    assert!(listed.iter().all(|dead| dead.requested.is_some()), "they stand until the owner has acted");
    for (number, act) in [(0, &OperatorAct::Discard), (1, &OperatorAct::Redrive), (0, &OperatorAct::Redrive)] {
        let outcome = trial.store.act(&by_number(&all[number]), act, &context()).await.unwrap();
        assert_eq!(outcome, OperatorOutcome::default(), "what was asked first is done, and a second request says so");
    }
    assert_eq!(list(trial).await, listed);
    assert_eq!(audits(trial).await, 2);
    assert_eq!(session.requests(0, 1_000).await.unwrap(), asked);
    let held = session.held(&[positions[0]]).await.unwrap().remove(0).message;
    assert_eq!((held.id, held.payload.as_slice(), held.headers.len()), (id, b"edited".as_slice(), 1));
    let released = Mark { released: vec![positions[0]], discarded: vec![positions[1]], ..Mark::default() };
    session.checkpoint(released).await.unwrap();
    assert!(session.requests(0, 1_000).await.unwrap().is_empty());
    assert!(list(trial).await.is_empty());

    // The broker refuses the row again: it is dead again, and the request is done.
    trial.enqueue(vec![new_message("c", "4")]).await;
    let (rows, batch) = read_rows(&mut session, 1).await;
    let dead = || Diversion::Dead { reason: "too large".into(), holds: true };
    session.checkpoint(Mark { diverted: vec![(rows[0].position, dead())], ..through(batch) }).await.unwrap();
    trial.store.act(&DeadFilter::default(), &OperatorAct::Redrive, &context()).await.unwrap();
    assert_eq!(session.requests(0, 1_000).await.unwrap().len(), 1);
    session.checkpoint(Mark { changed: vec![(rows[0].position, dead())], ..Mark::default() }).await.unwrap();
    assert!(session.requests(0, 1_000).await.unwrap().is_empty());

    // A row whose discard was asked for is refused again, or held for another reason, before the
    // owner has seen the request. Shown by: clearing each request (the operator's act was lost).
    trial.store.act(&DeadFilter::default(), &OperatorAct::Discard, &context()).await.unwrap();
    session.checkpoint(Mark { changed: vec![(rows[0].position, dead())], ..Mark::default() }).await.unwrap();
    assert_eq!(session.requests(0, 1_000).await.unwrap(), [request(rows[0].position, "c", true)]);
}

/// Consumers may have purged the inbox row that shows whether they handled the message.
pub async fn r31_an_old_outbox_row_needs_a_new_id<F: Fixture>(trial: &Trial<F>) {
    let (mut session, _) = dead_outbox(trial).await;
    let filter = by_number(&list(trial).await[0]);
    let strict = ActContext { redrive_age_max: Some(Duration::ZERO), ..context() };
    // Every row is older than zero as soon as the clock of the database has moved on.
    eventually("it is too old", || async {
        let dry = ActContext { dry_run: true, ..strict.clone() };
        let outcome = trial.store.act(&filter, &OperatorAct::Redrive, &dry).await;
        outcome.is_err().then_some(())
    })
    .await;
    let refused = trial.store.act(&filter, &OperatorAct::Redrive, &strict).await;
    assert!(matches!(&refused, Err(StoreError::Refused(why)) if why.contains("--new-id")), "{refused:?}");
    assert!(session.requests(0, 1_000).await.unwrap().is_empty());
    assert_eq!(audits(trial).await, 0);
    let renamed = OperatorAct::RedriveAs { id: Uuid::now_v7(), payload: None };
    trial.store.act(&filter, &renamed, &strict).await.unwrap();
    assert_eq!(session.requests(0, 1_000).await.unwrap().len(), 1);
    let lenient = ActContext { redrive_age_max: Some(Duration::from_secs(86_400)), ..context() };
    let rest = DeadFilter { key: Some("b".into()), ..DeadFilter::default() };
    trial.store.act(&rest, &OperatorAct::Redrive, &lenient).await.unwrap();
    assert_eq!(session.requests(0, 1_000).await.unwrap().len(), 2);
}

/// By the redrive the operator states that the message was never handled. Its inbox row is
/// inserted, so a second copy is a duplicate from then on.
pub async fn r31_redriving_what_left_no_inbox_row_inserts_it<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("ledger").await;
    let old = message("k", "1");
    trial.refuse(consumer, &old, "too-old").await;
    assert!(trial.store.known(consumer, &[old.id]).await.unwrap().is_empty());
    trial.store.act(&DeadFilter::default(), &OperatorAct::Redrive, &context()).await.unwrap();
    assert_eq!(trial.store.known(consumer, &[old.id]).await.unwrap().len(), 1);
    assert_eq!(lease(trial, consumer).await.len(), 1);

    // A message that was refused because another message has its id must not run under that id.
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

/// A second copy was handled meanwhile, as a new message. The redrive of the first discards it, so
/// that the effect does not happen twice.
pub async fn r31_what_another_copy_did_since_is_discarded_by_its_redrive<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("ledger").await;
    for reason in ["too-old", "from-the-future"] {
        let dead = message("k", reason);
        trial.refuse(consumer, &dead, reason).await;
        assert_eq!(trial.admit(consumer, &[entry(&dead)]).await, [None], "the second copy is new");

        let filter = by_number(&list(trial).await[0]);
        let dry = ActContext { dry_run: true, ..context() };
        let outcome = trial.store.act(&filter, &OperatorAct::Redrive, &dry).await.unwrap();
        assert_eq!(outcome.already_handled, outcome.numbers, "a dry run says so");
        let before = audits(trial).await;
        let outcome = trial.store.act(&filter, &OperatorAct::Redrive, &context()).await.unwrap();
        assert_eq!((outcome.numbers.len(), &outcome.already_handled), (1, &outcome.numbers));
        assert!(lease(trial, consumer).await.is_empty(), "{reason}: it does not run again");
        assert!(list(trial).await.is_empty(), "{reason}: nothing is left to do");
        assert_eq!(audits(trial).await, before + 1);
    }

    // Another content came under the same id, so it is another message. The operator must say which
    // of them is meant.
    let dead = message("k", "one");
    let mut tx = trial.store.begin(consumer).await.unwrap();
    tx.park(&[parked(&dead, ParkAs::Dead { reason: "too-old".into(), holds: false })]).await.unwrap();
    tx.admit(&[entry(&arrived(Some("k"), "another", &dead.id_text))]).await.unwrap();
    tx.commit().await.unwrap();
    let refused = trial.store.act(&DeadFilter::default(), &OperatorAct::Redrive, &context()).await;
    assert!(matches!(&refused, Err(StoreError::Refused(why)) if why.contains("--new-id")), "{refused:?}");
    assert_eq!(list(trial).await.len(), 1);
}
