//! Cases of dead and held rows (R17, R18).

use std::time::Duration;

use super::relay::{bounded, of_all_sizes, within_bytes};
use super::trial::{context, new_message, payloads, read_nothing, read_rows, through};
use super::{Fixture, Trial};
use oncebox::error::StoreError;
use oncebox::message::{NewMessage, TraceContext};
use oncebox::store::{DeadFilter, DeadState, Diversion, DivertedRow, Mark, Operator, OperatorAct, OutboxRow};

fn dead(holds: bool) -> Diversion {
    Diversion::Dead { reason: "too large".into(), holds }
}

fn destination() -> Diversion {
    Diversion::HeldDestination { reason: "no such topic".into() }
}

/// Enqueues and reads the messages, and diverts the rows with the given numbers.
async fn diverted<F: Fixture>(
    trial: &Trial<F>,
    messages: Vec<NewMessage>,
    diversions: &[(usize, Diversion)],
) -> (super::trial::Session, Vec<OutboxRow>) {
    let count = messages.len();
    trial.enqueue(messages).await;
    let mut session = trial.session("a").await;
    let (rows, batch) = read_rows(&mut session, count).await;
    let diverted = diversions.iter().map(|(number, why)| (rows[*number].position, why.clone())).collect();
    session.checkpoint(Mark { diverted, ..through(batch) }).await.unwrap();
    (session, rows)
}

/// The copy of a dead row equals the row in every part, and the cursor is past the row.
pub async fn r17_a_dead_row_is_copied_whole_in_the_mark<F: Fixture>(trial: &Trial<F>) {
    let trace = Some(TraceContext {
        traceparent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".to_owned(),
        tracestate: Some("a=b".to_owned()),
    });
    let mut message = NewMessage::bytes("blobs", "blob.stored", vec![0, 255, 1]).with_key("k \"ä\"");
    message = message.with_header("b", "1").with_header("a", "ä😀\n");
    message.trace = trace;
    let messages = vec![new_message("k", "0"), message, NewMessage::text("payments", "k", "{}")];
    let (mut session, rows) = diverted(trial, messages, &[(1, dead(true)), (2, dead(false))]).await;
    let positions: Vec<i64> = rows[1..].iter().map(|row| row.position).collect();
    let mut held = session.held(&positions).await.unwrap();
    assert_eq!(held.len(), 2);
    for (held, row) in held.iter_mut().zip(&rows[1..]) {
        assert_eq!((held.position, held.bucket), (row.position, row.bucket));
        held.message.headers.sort();
        let mut message = row.message.clone();
        message.headers.sort();
        assert_eq!(held.message, message);
    }
    read_nothing(&mut session).await;
    drop(session);
    let mut session = trial.session("a").await;
    read_nothing(&mut session).await;
    let status = trial.store.status().await.unwrap();
    assert_eq!((status.dead, status.held, status.pending), (2, 0, 0), "a diverted message is not pending");
}

/// The next session loads the diverted rows. A dead row that holds nothing is not among them,
/// because it would count as held.
pub async fn dead_and_held_rows_come_back_in_position_order<F: Fixture>(trial: &Trial<F>) {
    let messages = ["a", "b", "a", "b", "c"].iter().enumerate();
    let messages = messages.map(|(number, key)| new_message(key, number.to_string())).collect();
    let diversions = [(3, destination()), (0, dead(true)), (2, Diversion::HeldBehind), (4, dead(false))];
    let (session, rows) = diverted(trial, messages, &diversions).await;
    drop(session);
    let mut session = trial.session("a").await;
    let expected = |number: usize, diversion: Diversion| DivertedRow {
        position: rows[number].position,
        topic: "payments".into(),
        key: rows[number].message.key.clone(),
        diversion,
    };
    let all = vec![expected(0, dead(true)), expected(2, Diversion::HeldBehind), expected(3, destination())];
    assert_eq!(session.diverted(100).await.unwrap(), all);
    assert_eq!(session.diverted(2).await.unwrap(), all[..2]);
    let shuffled = [rows[3].position, rows[1].position, rows[0].position, 1 << 40];
    let held = session.held(&shuffled).await.unwrap();
    assert_eq!(payloads(&held), ["0", "3"], "in position order; what is not there is left out");
    assert!(session.held(&[]).await.unwrap().is_empty());
}

/// The relay holds a row that was refused among others until it is sent alone, also a row without a
/// key. If the store refused it, that mark would end every session.
pub async fn a_row_without_a_key_is_held_behind_and_comes_back<F: Fixture>(trial: &Trial<F>) {
    let messages = vec![NewMessage::text("payments", "k", "{}"), new_message("k", "1")];
    let (session, rows) = diverted(trial, messages, &[(0, Diversion::HeldBehind)]).await;
    drop(session);
    let mut session = trial.session("a").await;
    let position = rows[0].position;
    let held = DivertedRow { position, topic: "payments".into(), key: None, diversion: Diversion::HeldBehind };
    assert_eq!(session.diverted(100).await.unwrap(), [held]);
    session.checkpoint(Mark { changed: vec![(position, dead(true))], ..Mark::default() }).await.unwrap();
    let status = trial.store.status().await.unwrap();
    assert_eq!((status.dead, status.held, status.pending), (1, 0, 0), "it was refused again, alone");
}

/// A released row was published and is gone. A changed row was refused again and stays, with its
/// new state.
pub async fn a_released_row_leaves_and_a_changed_one_stays<F: Fixture>(trial: &Trial<F>) {
    let messages = (0..3).map(|number| new_message("k", number.to_string())).collect();
    let diversions = [(0, destination()), (1, destination()), (2, destination())];
    let (mut session, rows) = diverted(trial, messages, &diversions).await;
    let mark = Mark {
        released: vec![rows[0].position],
        changed: vec![(rows[1].position, dead(true)), (rows[2].position, Diversion::HeldBehind)],
        ..Mark::default()
    };
    session.checkpoint(mark).await.unwrap();
    let left: Vec<_> =
        session.diverted(100).await.unwrap().into_iter().map(|row| (row.position, row.diversion)).collect();
    assert_eq!(left, [(rows[1].position, dead(true)), (rows[2].position, Diversion::HeldBehind)]);
    drop(session);
    let mut session = trial.session("a").await;
    read_nothing(&mut session).await;
    let status = trial.store.status().await.unwrap();
    assert_eq!((status.dead, status.held), (1, 1));
}

/// Asks to discard the row at this position; returns how many requests were written.
async fn ask_to_discard<F: Fixture>(trial: &Trial<F>, position: i64) -> usize {
    let filter = DeadFilter {
        numbers: vec![format!("o{position}")],
        states: vec![DeadState::Dead, DeadState::Held],
        ..DeadFilter::default()
    };
    trial.store.act(&filter, &OperatorAct::Discard, &context()).await.unwrap().numbers.len()
}

/// The audit, oldest first: who, what, and the number of the message.
async fn audited<F: Fixture>(trial: &Trial<F>) -> Vec<String> {
    let acts = trial.store.audit(None, 10).await.unwrap();
    acts.iter().rev().map(|act| format!("{} {} {}", act.actor, act.act, act.number)).collect()
}

/// An operator asked to discard a row that the relay had taken for sending already. Shown to fail:
/// the audit said `discard` alone, although the message was sent.
pub async fn a_message_that_was_sent_before_its_discard_is_audited_as_sent<F: Fixture>(trial: &Trial<F>) {
    let messages = ["a", "b", "c", "d"].map(|key| new_message(key, key)).to_vec();
    let diversions = [(0, destination()), (1, destination()), (2, dead(true)), (3, dead(true))];
    let (mut session, rows) = diverted(trial, messages, &diversions).await;
    let positions: Vec<i64> = rows.iter().map(|row| row.position).collect();
    for number in [0, 2] {
        assert_eq!(ask_to_discard(trial, positions[number]).await, 1);
    }
    let redriven = DeadFilter { numbers: vec![format!("o{}", positions[3])], ..DeadFilter::default() };
    trial.store.act(&redriven, &OperatorAct::Redrive, &context()).await.unwrap();
    session.checkpoint(Mark { released: positions.clone(), ..Mark::default() }).await.unwrap();
    assert!(session.held(&positions).await.unwrap().is_empty(), "all of them are gone");
    let [a, _, c, d] = &positions[..] else { panic!("{positions:?}") };
    let mut said = audited(trial).await;
    said[3..].sort();
    let asked = [format!("ann discard o{a}"), format!("ann discard o{c}"), format!("ann redrive o{d}")];
    let sent = [format!("relay release o{a}"), format!("relay release o{c}")];
    assert_eq!(said, [&asked[..], &sent[..]].concat());
    let of_one = trial.store.audit(Some(rows[0].message.id), 10).await.unwrap();
    assert_eq!(of_one[0].reason, "sent before its discard could be carried out");
    assert!(of_one[0].detail.contains("sent, not discarded"), "{}", of_one[0].detail);
    assert_eq!(ask_to_discard(trial, positions[1]).await, 0, "there is nothing to discard any more");
    assert_eq!(audited(trial).await.len(), 5);
    drop(session);
    let mut session = trial.session("a").await;
    read_nothing(&mut session).await;
}

/// The transaction of the discard is open while the mark is made: the mark waits for it, and sees
/// the request. Shown by: a look for requests before the rows are deleted, which does not wait.
pub async fn a_discard_that_meets_the_mark_of_its_message_is_audited_as_sent<F: Fixture>(trial: &Trial<F>) {
    let (mut session, rows) = diverted(trial, vec![new_message("a", "a")], &[(0, dead(true))]).await;
    let position = rows[0].position;
    if F::CONCURRENT_WRITERS {
        let (table, now) = (trial.table("outbox_dead"), "current_timestamp");
        let mut tx = trial.begin().await;
        let ask = format!(
            "update {table} set requested = 'discard', requested_at = {now}, requested_by = 'ann' where position = {position}"
        );
        assert_eq!(F::run(&mut tx, &ask).await.unwrap(), 1);
        let mark = session.checkpoint(Mark { released: vec![position], ..Mark::default() });
        let mut mark = std::pin::pin!(mark);
        let waits = tokio::time::timeout(Duration::from_millis(300), mark.as_mut()).await;
        assert!(waits.is_err(), "the row is locked");
        tx.commit().await.unwrap();
        mark.await.unwrap();
        assert_eq!(audited(trial).await, [format!("relay release o{position}")]);
    } else {
        session.checkpoint(Mark { released: vec![position], ..Mark::default() }).await.unwrap();
    }
    assert_eq!(ask_to_discard(trial, position).await, 0, "it is gone");
}

/// A discarded row is removed, and no later session reads it.
pub async fn a_discarded_row_is_gone_for_good<F: Fixture>(trial: &Trial<F>) {
    let messages = (0..2).map(|number| new_message("k", number.to_string())).collect();
    let (mut session, rows) = diverted(trial, messages, &[(0, dead(true)), (1, Diversion::HeldBehind)]).await;
    session.checkpoint(Mark { discarded: vec![rows[0].position], ..Mark::default() }).await.unwrap();
    let left = session.diverted(100).await.unwrap();
    assert_eq!(left.iter().map(|row| row.position).collect::<Vec<_>>(), [rows[1].position]);
    drop(session);
    let mut session = trial.session("a").await;
    read_nothing(&mut session).await;
    assert!(session.held(&[rows[0].position]).await.unwrap().is_empty());
}

/// The reason of a dead or held row is kept up to its bound: a session loads all reasons when it
/// begins, and what it holds in memory is bounded (G11).
pub async fn g11_a_reason_is_kept_up_to_its_bound<F: Fixture>(trial: &Trial<F>) {
    let long = || Diversion::HeldDestination { reason: "é".repeat(5_000) };
    let messages = (0..2).map(|number| new_message("k", number.to_string())).collect();
    let (mut session, rows) = diverted(trial, messages, &[(0, long()), (1, destination())]).await;
    session.checkpoint(Mark { changed: vec![(rows[1].position, long())], ..Mark::default() }).await.unwrap();
    let kept = session.diverted(100).await.unwrap();
    assert_eq!(kept.len(), 2);
    for row in kept {
        let Diversion::HeldDestination { reason } = row.diversion else { panic!("{row:?}") };
        assert_eq!(reason, "é".repeat(2_048), "{}", row.position);
    }
}

/// A mark that diverts a row which was not read, or changes one that was not diverted, fails with
/// `Corrupt`, and changes nothing. Otherwise a row could be passed without a trace.
pub async fn a_mark_that_cannot_be_whole_changes_nothing<F: Fixture>(trial: &Trial<F>) {
    trial.enqueue((0..2).map(|number| new_message("k", number.to_string())).collect()).await;
    let mut session = trial.session("a").await;
    let (rows, batch) = read_rows(&mut session, 2).await;
    let unread = rows[1].position + 1_000;
    let mark = Mark { diverted: vec![(rows[0].position, dead(true)), (unread, dead(true))], ..through(batch) };
    let outcome = session.checkpoint(mark).await;
    assert!(matches!(outcome, Err(StoreError::Corrupt(_))), "{outcome:?}");
    drop(session);
    let mut session = trial.session("a").await;
    let (rows, batch) = read_rows(&mut session, 2).await;
    assert_eq!(payloads(&rows), ["0", "1"]);
    assert_eq!(trial.store.status().await.unwrap().dead, 0);
    let diverted = vec![(rows[0].position, dead(true))];
    let mark = Mark { diverted, changed: vec![(rows[1].position, dead(true))], ..through(batch) };
    let outcome = session.checkpoint(mark).await;
    assert!(matches!(outcome, Err(StoreError::Corrupt(_))), "{outcome:?}");
    assert_eq!(trial.store.status().await.unwrap().dead, 0);
    // Nor did the cursor pass them.
    drop(session);
    let mut session = trial.session("a").await;
    assert_eq!(payloads(&read_rows(&mut session, 2).await.0), ["0", "1"]);
}

/// Held rows that are read again obey the bound of bytes, as every read does. A read returns the
/// first of the requested rows, and at least one.
pub async fn g11_rows_on_their_way_back_come_within_the_bytes_of_a_read<F: Fixture>(trial: &Trial<F>) {
    let messages = of_all_sizes();
    let all: Vec<(usize, Diversion)> = (0..messages.len()).map(|number| (number, dead(true))).collect();
    let (session, rows) = diverted(trial, messages, &all).await;
    drop(session);
    let mut session = bounded(trial).await;
    let mut left: Vec<i64> = rows.iter().map(|row| row.position).collect();
    let mut back = Vec::new();
    while !left.is_empty() {
        let held = session.held(&left).await.unwrap();
        within_bytes(&held);
        let positions: Vec<i64> = held.iter().map(|row| row.position).collect();
        assert!(!positions.is_empty() && left.starts_with(&positions), "{positions:?} of {left:?}");
        left.drain(..positions.len());
        back.extend(held);
    }
    assert_eq!(payloads(&back), payloads(&rows));
    assert!(session.held(&[]).await.unwrap().is_empty());
}

/// The bound at which a shard stops reading counts rows that are dead, whether they hold their key
/// or not, and no held ones.
pub async fn g11_dead_rows_of_every_policy_are_counted_up_to_a_bound<F: Fixture>(trial: &Trial<F>) {
    let messages = ["a", "b", "c", "d"].map(|key| new_message(key, key)).to_vec();
    let diversions = [(0, dead(true)), (1, dead(false)), (2, destination())];
    let (mut session, _) = diverted(trial, messages, &diversions).await;
    for (rows, has) in [(1, true), (2, true), (3, false)] {
        assert_eq!(session.has_dead(rows).await.unwrap(), has, "at least {rows}");
    }
}
