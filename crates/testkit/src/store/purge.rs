//! Cases of the purge: what it removes, what it keeps, and that a message whose inbox row was
//! purged is found to be too old (R31, G8).

use std::time::Duration;

use super::trial::{arrived, dead, due, entry, parked};
use super::{Fixture, Trial};
use oncebox::adapter::{Age, DbTime, Verdict, judge};
use oncebox::message::{MessageId, identity};
use oncebox::store::{ConsumerId, Inbox, InboxEntry, ParkAs};

/// A message id with a time in it: this many seconds from now, by the clock of the database.
async fn id_at<F: Fixture>(trial: &Trial<F>, consumer: ConsumerId, seconds: i64) -> MessageId {
    let now = trial.store.bounds(consumer).await.unwrap().now;
    let millis = u64::try_from(now.millis() + seconds * 1_000).unwrap();
    let at =
        uuid::Timestamp::from_unix(uuid::NoContext, millis / 1_000, u32::try_from(millis % 1_000).unwrap() * 1_000_000);
    MessageId::from(uuid::Uuid::new_v7(at))
}

async fn admit<F: Fixture>(trial: &Trial<F>, consumer: ConsumerId, ids: &[MessageId]) {
    let entries: Vec<InboxEntry> = ids.iter().map(|id| InboxEntry { id: *id, hash: [7; 16] }).collect();
    trial.admit(consumer, &entries).await;
}

/// The time in an id that has one.
fn time_in(id: MessageId) -> DbTime {
    let (seconds, nanoseconds) = id.uuid().get_timestamp().unwrap().to_unix();
    DbTime::from_millis(i64::try_from(seconds * 1_000 + u64::from(nanoseconds) / 1_000_000).unwrap())
}

/// A bound that is later than everything received until now.
async fn soon<F: Fixture>(trial: &Trial<F>, consumer: ConsumerId) -> DbTime {
    let now = trial.store.bounds(consumer).await.unwrap().now;
    DbTime::from_millis(now.after(Duration::from_secs(60)).millis())
}

/// Runs all steps of a purge. Returns the number of rows that were removed.
async fn purge<F: Fixture>(trial: &Trial<F>, consumer: ConsumerId, below: DbTime, page: usize) -> u64 {
    let (mut rows, mut after, mut steps) = (0, None, 0);
    loop {
        let purged = trial.store.purge(consumer, below, after, page).await.unwrap();
        assert!(purged.rows <= page as u64, "a step is bounded");
        rows += purged.rows;
        after = purged.next;
        steps += 1;
        assert!(steps < 200, "it comes to an end");
        if after.is_none() {
            return rows;
        }
    }
}

async fn known<F: Fixture>(trial: &Trial<F>, consumer: ConsumerId, ids: &[MessageId]) -> Vec<bool> {
    let known = trial.store.known(consumer, ids).await.unwrap();
    ids.iter().map(|id| known.contains(id)).collect()
}

/// A row is purged only if both times are below the bound: the time in its id, where there is one,
/// and the time of receipt.
pub async fn r31_a_purge_takes_what_is_past_and_nothing_else<F: Fixture>(trial: &Trial<F>) {
    let (consumer, other) = (trial.consumer("c").await, trial.consumer("other").await);
    let old = id_at(trial, consumer, -86_400).await;
    let ids = [
        old,
        id_at(trial, consumer, -1).await,
        id_at(trial, consumer, 600).await,
        identity("shop", "a text"),
        MessageId::from(uuid::Uuid::from_u128(0x0001_0000_0000_4000_8000_0000_0000_0001)),
        MessageId::from(uuid::Uuid::from_u128(0xfff1_0000_0000_4000_8000_0000_0000_0001)),
    ];
    admit(trial, consumer, &ids).await;
    admit(trial, other, &ids).await;
    let received_later = DbTime::from_millis(soon(trial, consumer).await.before(Duration::from_secs(3_600)).millis());
    assert_eq!(purge(trial, consumer, received_later, 100).await, 0, "all were received after that");
    assert_eq!(purge(trial, consumer, soon(trial, consumer).await, 100).await, 5);
    assert_eq!(known(trial, consumer, &ids).await, [false, false, true, false, false, false]);
    assert_eq!(known(trial, other, &ids).await, [true; 6], "what another consumer remembers is its own affair");
    assert_eq!(trial.store.bounds(other).await.unwrap().purged_below, None);
}

/// Each step begins where the last one ended, whatever the ids are and whatever their order is.
pub async fn a_purge_goes_on_where_its_last_step_ended<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let (mut ids, mut later) = (Vec::new(), Vec::new());
    for number in 0..30 {
        ids.push(identity("shop", &number.to_string()));
        ids.push(id_at(trial, consumer, -1_000 + number).await);
        // This row has a time in the future: the purge skips it.
        later.push(id_at(trial, consumer, 600 + number).await);
    }
    admit(trial, consumer, &later).await;
    admit(trial, consumer, &ids).await;
    assert_eq!(purge(trial, consumer, soon(trial, consumer).await, 7).await, 60);
    assert!(trial.store.known(consumer, &ids).await.unwrap().is_empty());
    assert_eq!(known(trial, consumer, &later).await, [true; 30]);
    assert_eq!(purge(trial, consumer, soon(trial, consumer).await, 7).await, 0);
}

/// The redrive of a waiting or dead message inserts no inbox row, so the row must still be there.
pub async fn r31_messages_that_wait_or_are_dead_keep_their_rows<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let mut ids = Vec::new();
    for (key, park_as) in [("due", due()), ("due", ParkAs::Behind), ("dead", dead(true))] {
        for id in [id_at(trial, consumer, -10).await.to_string(), format!("{key} as a text {}", ids.len())] {
            let message = arrived(Some(key), "1", &id);
            trial.park(consumer, &message, park_as.clone()).await;
            ids.push(message.id);
        }
    }
    let handled = id_at(trial, consumer, -10).await;
    admit(trial, consumer, &[handled]).await;
    assert_eq!(purge(trial, consumer, soon(trial, consumer).await, 2).await, 1);
    assert_eq!(known(trial, consumer, &ids).await, vec![true; ids.len()]);
}

/// The bound is the newest time of the removed rows, not the time of the purge: messages that came
/// since are not too old. It is never lowered, and there is none before the first row was removed.
pub async fn r31_the_bound_is_recorded_with_the_first_row_and_never_lowered<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let before = trial.store.bounds(consumer).await.unwrap();
    assert_eq!((before.purged_below, before.id_skew), (None, Duration::from_secs(3_600)));
    assert!(before.now > DbTime::from_millis(1_700_000_000_000), "{before:?}");
    let below = soon(trial, consumer).await;
    assert_eq!(purge(trial, consumer, below, 10).await, 0);
    assert_eq!(trial.store.bounds(consumer).await.unwrap().purged_below, None, "nothing was taken");
    let mut ids = Vec::new();
    for seconds in [-500, -900, -100] {
        ids.push(id_at(trial, consumer, seconds).await);
    }
    let own = |id: MessageId| Some(time_in(id).after(Duration::from_millis(1)));
    for (taken, bound) in [(ids[0], ids[0]), (ids[1], ids[0]), (ids[2], ids[2])] {
        admit(trial, consumer, &[taken]).await;
        assert_eq!(purge(trial, consumer, soon(trial, consumer).await, 10).await, 1);
        assert_eq!(trial.store.bounds(consumer).await.unwrap().purged_below, own(bound));
    }
    // An id without a time counts with its time of receipt.
    let received = trial.store.bounds(consumer).await.unwrap().now;
    admit(trial, consumer, &[identity("shop", "a text")]).await;
    assert_eq!(purge(trial, consumer, soon(trial, consumer).await, 10).await, 1);
    let bound = trial.store.bounds(consumer).await.unwrap().purged_below.unwrap();
    assert!(received < bound && bound <= soon(trial, consumer).await, "{received:?} {bound:?}");
    trial.run(&format!("update {} set value = 5 where name = 'id_skew_seconds'", trial.table("limits"))).await;
    assert_eq!(trial.store.bounds(consumer).await.unwrap().id_skew, Duration::from_secs(5));
}

/// The bound stands before the first row is gone: a process that is killed between would leave
/// messages that are new to the insert and not too old to the verdict.
pub async fn r31_no_row_is_gone_before_the_bound_is_recorded<F: Fixture>(trial: &Trial<F>) {
    if !F::CONCURRENT_WRITERS {
        // Nobody can see what a single writer has done before it commits.
        return;
    }
    let consumer = trial.consumer("c").await;
    let id = id_at(trial, consumer, -10).await;
    admit(trial, consumer, &[id]).await;
    let below = soon(trial, consumer).await;
    let mut other = trial.begin().await;
    let hold = format!("update {} set seen_at = seen_at where name = 'c'", trial.table("consumer"));
    assert_eq!(F::run(&mut other, &hold).await.unwrap(), 1);
    let held = async {
        trial.locks_wait(1).await;
        assert_eq!(known(trial, consumer, &[id]).await, [true], "its bound is not recorded yet");
        other.rollback().await.unwrap();
    };
    let (purged, ()) = futures_util::future::join(purge(trial, consumer, below, 10), held).await;
    assert_eq!((purged, known(trial, consumer, &[id]).await), (1, vec![false]));
    assert!(trial.store.bounds(consumer).await.unwrap().purged_below.is_some());
}

/// The insert finds a purged message new. The bounds, read in the same transaction, show that it is
/// too old.
pub async fn g8_what_was_purged_is_new_to_the_insert_and_too_old_to_the_verdict<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let old = arrived(Some("k"), "1", &id_at(trial, consumer, -10).await.to_string());
    admit(trial, consumer, &[old.id]).await;
    let mut tx = trial.store.begin(consumer).await.unwrap();
    if F::CONCURRENT_WRITERS {
        // Here the transaction begins before the purge.
        purge(trial, consumer, soon(trial, consumer).await, 10).await;
    } else {
        tx.rollback().await.unwrap();
        purge(trial, consumer, soon(trial, consumer).await, 10).await;
        tx = trial.store.begin(consumer).await.unwrap();
    }
    assert_eq!(tx.admit(&[entry(&old)]).await.unwrap(), vec![None]);
    let bounds = tx.standing(&[]).await.unwrap().bounds;
    assert_eq!(judge(Age::InId(time_in(old.id)), bounds), Verdict::TooOld);
    tx.forget(&[old.id]).await.unwrap();
    tx.park(&[parked(&old, ParkAs::Dead { reason: "too-old".into(), holds: false })]).await.unwrap();
    tx.commit().await.unwrap();
    assert!(trial.store.known(consumer, &[old.id]).await.unwrap().is_empty());
}

/// The age of a message is judged at the time when its row was received, however long ago that was.
/// Otherwise a row could be received so early that a purge removes it while its duplicate is still
/// called new.
pub async fn r31_ages_are_judged_by_the_time_of_receipt<F: Fixture>(trial: &Trial<F>) {
    let consumer = trial.consumer("c").await;
    let mut tx = trial.store.begin(consumer).await.unwrap();
    tx.admit(&[InboxEntry { id: identity("shop", "1"), hash: [7; 16] }]).await.unwrap();
    let asked = tx.standing(&[]).await.unwrap().bounds.now;
    // The clock of the database goes on; the time of the bounds stays.
    tokio::time::sleep(Duration::from_millis(30)).await;
    let again = tx.standing(&[]).await.unwrap().bounds.now;
    assert_eq!(asked, again);
    tx.commit().await.unwrap();
    assert!(trial.store.bounds(consumer).await.unwrap().now > again);
}

/// A process that did not know of the tries handles the message in a batch. Without this step, the
/// row of its tries would stay for ever.
pub async fn g11_tries_of_what_was_handled_since_are_forgotten<F: Fixture>(trial: &Trial<F>) {
    let (consumer, other) = (trial.consumer("ledger").await, trial.consumer("other").await);
    let ids = [MessageId::new(), MessageId::new(), MessageId::new()];
    for id in ids {
        trial.store.failed_attempt(consumer, id, "no", true).await.unwrap();
    }
    trial.store.failed_attempt(other, ids[0], "no", true).await.unwrap();
    admit(trial, consumer, &ids[..2]).await;
    assert_eq!(trial.store.forget_attempts(consumer, 1).await.unwrap(), 1, "a step is bounded");
    assert_eq!(trial.store.forget_attempts(consumer, 10).await.unwrap(), 1);
    assert_eq!(trial.store.forget_attempts(consumer, 10).await.unwrap(), 0);
    let left = trial.store.attempts(consumer, &ids).await.unwrap();
    assert_eq!(left, [(ids[2], 1)], "it was not handled yet");
    assert_eq!(trial.store.attempts(other, &ids).await.unwrap().len(), 1, "another's tries are its own");
}
