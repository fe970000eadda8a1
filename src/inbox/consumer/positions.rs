//! Stores in the database how far each partition is done.
//!
//! Promise: a position is written after the commits that it covers, in a transaction of its own, so
//! no copy of the database has the position without them. It lags by at most a second, or by as
//! long as the database is away. After a crash, messages since then come again, and the inbox knows
//! them. Where positions cannot be written for a while, the health says so: the next start would
//! begin at the last one that was written.
//!
//! A process that has lost a partition may take its row: it was frozen while it opened its rows,
//! and goes on before the broker tells it. The owner finds that when it writes a position. Then it
//! takes the row back ([`take_back`]).
//!
//! Not here: where a partition begins (`rules::position`), and the position at a clean end
//! (`intake`).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;
use uuid::Uuid;

use super::Shared;
use super::failing::Failing;
use super::item::Source;
use crate::error::StoreError;
use crate::inbox::port::{ConsumerId, Holding};
use crate::inbox::rules::position::Position;
use crate::observe::Trouble;

/// The pause between two writes: a longer one repeats more messages after a crash, a shorter one
/// writes more.
const EVERY: Duration = Duration::from_secs(1);

/// After how many tries, one each [`EVERY`], a row is taken back also from an owner. The broker
/// tells a process within its session timeout that it has lost a partition: 45 s on Kafka.
const TRIES: u32 = 60;

/// How far one assignment of a partition is done.
pub(super) struct Told {
    pub(super) source: Arc<Source>,
    pub(super) holding: Holding,
    pub(super) position: Position,
}

/// Writes the last position that it receives of each partition, until the channel closes.
pub(super) async fn keep(shared: Arc<Shared>, consumer: ConsumerId, mut told: UnboundedReceiver<Told>) {
    let mut failing = Failing::new(&shared, "positions", String::new());
    let mut due: HashMap<Uuid, Told> = HashMap::new();
    let mut tries = HashMap::new();
    loop {
        // What could not be written is tried again, also when no further message comes.
        let wait = if due.is_empty() { Duration::MAX } else { EVERY };
        match tokio::time::timeout(wait, told.recv()).await {
            Ok(Some(first)) => {
                due.insert(first.holding.owner, first);
                tokio::time::sleep(EVERY).await;
            }
            Ok(None) => break,
            Err(_) => {}
        }
        while let Ok(next) = told.try_recv() {
            due.insert(next.holding.owner, next);
        }
        match write(&shared, consumer, &due, &mut tries).await {
            Ok(again) => {
                due.retain(|owner, _| again.contains(owner));
                failing.is_well();
            }
            Err(error) => {
                tracing::debug!(consumer = %shared.options.name, %error, "positions could not be written yet");
                failing.fails(Trouble::Shown(format!("positions cannot be written: {error}")));
            }
        }
    }
}

/// Writes what is due, and returns the assignments whose rows are to be tried again. `tries` counts
/// how often in a row an assignment found that another process has its row.
async fn write(
    shared: &Shared,
    consumer: ConsumerId,
    due: &HashMap<Uuid, Told>,
    tries: &mut HashMap<Uuid, u32>,
) -> Result<HashSet<Uuid>, StoreError> {
    let positions: Vec<_> = due.values().map(|told| (told.holding.clone(), told.position.clone())).collect();
    let not_kept = shared.store.keep_positions(consumer, &positions).await?;
    let mut again = HashSet::new();
    for holding in not_kept {
        // A partition that is given up has closed its row, or the next owner has opened it.
        let Some(told) = due.get(&holding.owner).filter(|told| !told.source.is_revoked()) else { continue };
        let tried = tries.entry(holding.owner).or_default();
        *tried = tried.saturating_add(1);
        if take_back(shared, consumer, &holding, &told.position, *tried >= TRIES).await? {
            tries.remove(&holding.owner);
        } else if *tried < TRIES {
            again.insert(holding.owner);
        } else if *tried == TRIES {
            tracing::warn!(
                consumer = %shared.options.name, place = %holding.topic, partition = holding.partition,
                "the position of a partition is not stored: its row in the table of assignments is further, of \
                 another topic of this name, or gone; if no later position is stored either, restart this process"
            );
        }
    }
    Ok(again)
}

/// Takes back the row of a partition that the broker has not taken from this process. Returns false
/// where this process may not have it.
///
/// Two processes may believe that they own a partition, until the broker tells the old one. The row
/// ends with the real owner in both orders:
///
/// * The old process took the row last. Once the broker tells it, it closes the row, which then has
///   no owner. The real owner takes it back at its next try. If the old process died before, the
///   real owner waits for [`TRIES`], and takes the row back then.
/// * The real owner has the row. The old process does not take it within [`TRIES`], and the broker
///   tells it earlier that the partition is lost. Then it tries no more. It may take a row that its
///   owner has closed: the next owner opens the row all the same.
///
/// Tries are counted, not time: a process that was frozen for long has tried only once more. No row
/// goes back here, because a row that is further is left alone. Where a process loses its partition
/// during this call, the row stays open, and the next owner is only too careful (R26).
pub(super) async fn take_back(
    shared: &Shared,
    consumer: ConsumerId,
    holding: &Holding,
    position: &Position,
    also_from_an_owner: bool,
) -> Result<bool, StoreError> {
    let is_back = shared.store.take_back_assignment(consumer, holding, position, also_from_an_owner).await?;
    if is_back {
        tracing::warn!(
            consumer = %shared.options.name, place = %holding.topic, partition = holding.partition, next = position.next,
            "another process, which was frozen perhaps, had taken the row of a partition of this process; it is \
             taken back, and the position is stored"
        );
    }
    Ok(is_back)
}

#[cfg(all(test, feature = "sqlite", feature = "embedded"))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::sync::mpsc::unbounded_channel;

    use super::*;
    use crate::broker::PartitionId;
    use crate::inbox::consumer::Handlers;
    use crate::inbox::consumer::fixture::{options, parts};
    use crate::inbox::port::Inbox;
    use crate::inbox::rules::suspicion::Suspicion;
    use crate::observe::PartState;
    use crate::store::base::Base;

    fn source() -> Arc<Source> {
        Source::new(PartitionId { place: "t".into(), partition: 0, generation: 1 }, Suspicion::closed())
    }

    /// What one assignment of partition 0 has to write.
    fn due(holding: &Holding, next: i64) -> HashMap<Uuid, Told> {
        let position = Position { topic_id: None, next };
        HashMap::from([(holding.owner, Told { source: source(), holding: holding.clone(), position })])
    }

    fn holding() -> Holding {
        Holding { topic: "t".into(), partition: 0, owner: Uuid::now_v7() }
    }

    /// The row was closed when the partition was given up, and the last write comes late. Shown by
    /// taking back without asking for the revocation.
    #[tokio::test]
    async fn the_row_of_a_partition_that_was_given_up_is_not_taken_back() {
        let parts = parts(options(), Handlers::new()).await;
        let (consumer, holding) = (parts.register().await, holding());
        for is_revoked in [true, false] {
            parts.store.open_assignment(consumer, &holding).await.unwrap();
            parts.store.close_assignment(consumer, &holding, None).await.unwrap();
            let due = due(&holding, 7);
            if is_revoked {
                due[&holding.owner].source.revoke();
            }
            let again = write(&parts.shared, consumer, &due, &mut HashMap::new()).await.unwrap();
            assert!(again.is_empty(), "{again:?}");
            let opened = parts.store.open_assignment(consumer, &self::holding()).await.unwrap();
            assert_eq!(opened.was_open, !is_revoked, "only whoever has the partition takes its row back");
        }
    }

    /// The other process may be the owner, and the broker tells this one soon. Where the broker
    /// does not, the other one is gone. Shown by taking back at once.
    #[tokio::test]
    async fn a_row_that_has_an_owner_is_taken_back_only_when_the_broker_had_time_to_tell() {
        let parts = parts(options(), Handlers::new()).await;
        let (consumer, ours, other) = (parts.register().await, holding(), holding());
        for holding in [&ours, &other] {
            parts.store.open_assignment(consumer, holding).await.unwrap();
        }
        let (due, mut tries) = (due(&ours, 7), HashMap::new());
        for _ in 1..TRIES {
            let again = write(&parts.shared, consumer, &due, &mut tries).await.unwrap();
            assert!(again.contains(&ours.owner), "it is tried again, also when no further message comes");
        }
        let theirs = [(other.clone(), Position { topic_id: None, next: 3 })];
        assert_eq!(parts.store.keep_positions(consumer, &theirs).await.unwrap(), [], "it is still the other one's");
        assert!(write(&parts.shared, consumer, &due, &mut tries).await.unwrap().is_empty());
        assert_eq!(parts.store.keep_positions(consumer, &theirs).await.unwrap(), [other], "it is ours again");
        assert!(tries.is_empty(), "the next time it waits again: {tries:?}");
    }

    /// Shown by: a write only when the next position is told.
    #[tokio::test]
    async fn a_position_that_could_not_be_written_is_written_later_though_none_is_told_after_it() {
        let parts = parts(options(), Handlers::new()).await;
        let (consumer, health) = (parts.register().await, &parts.shared.health);
        health.set(&parts.shared.part, PartState::Ready);
        let holding = holding();
        parts.store.open_assignment(consumer, &holding).await.unwrap();
        let refuse = "create trigger refuse before update on oncebox_assignment begin select raise(abort, 'no'); end";
        sqlx::query(refuse).execute(parts.store.pool()).await.unwrap();
        let (tell, told) = unbounded_channel();
        let keeper = tokio::spawn(keep(Arc::clone(&parts.shared), consumer, told));
        tell.send(Told { source: source(), holding, position: Position { topic_id: None, next: 7 } }).unwrap();
        let fails = async {
            while !format!("{:?}", health.lines()).contains("positions cannot be written") {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), fails).await.unwrap();
        sqlx::query("drop trigger refuse").execute(parts.store.pool()).await.unwrap();
        let next = "select next_offset from oncebox_assignment";
        let written = async {
            while sqlx::query_scalar::<_, Option<i64>>(next).fetch_one(parts.store.pool()).await.unwrap() != Some(7) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), written).await.unwrap();
        drop(tell);
        keeper.await.unwrap();
    }
}
