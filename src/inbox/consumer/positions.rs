//! Stores in the database how far each partition is done.
//!
//! Promise: a position is written after the commits that it covers, in a transaction of its own, so
//! no copy of the database has the position without them. It lags by at most a second, or by as
//! long as the database is away. After a crash, messages since then come again, and the inbox knows
//! them. Where positions cannot be written for a while, the health says so: the next start would
//! begin at the last one that was written.
//!
//! Not here: where a partition begins (`rules::position`), and the position at a clean end
//! (`intake`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;
use uuid::Uuid;

use super::Shared;
use super::failing::Failing;
use crate::inbox::port::{ConsumerId, Holding};
use crate::inbox::rules::position::Position;
use crate::observe::Trouble;

/// The pause between two writes: a longer one repeats more messages after a crash, a shorter one
/// writes more.
const EVERY: Duration = Duration::from_secs(1);

/// Writes the last position that it receives of each partition, until the channel closes.
pub(super) async fn keep(shared: Arc<Shared>, consumer: ConsumerId, mut told: UnboundedReceiver<(Holding, Position)>) {
    let mut failing = Failing::new(&shared, "positions", String::new());
    let mut due: HashMap<Uuid, (Holding, Position)> = HashMap::new();
    loop {
        // What could not be written is tried again, also when no further message comes.
        let wait = if due.is_empty() { Duration::MAX } else { EVERY };
        match tokio::time::timeout(wait, told.recv()).await {
            Ok(Some(first)) => {
                due.insert(first.0.owner, first);
                tokio::time::sleep(EVERY).await;
            }
            Ok(None) => break,
            Err(_) => {}
        }
        while let Ok(next) = told.try_recv() {
            due.insert(next.0.owner, next);
        }
        let positions: Vec<_> = due.values().cloned().collect();
        match shared.store.keep_positions(consumer, &positions).await {
            Ok(()) => {
                due.clear();
                failing.is_well();
            }
            Err(error) => {
                tracing::debug!(consumer = %shared.options.name, %error, "positions could not be written yet");
                failing.fails(Trouble::Shown(format!("positions cannot be written: {error}")));
            }
        }
    }
}

#[cfg(all(test, feature = "sqlite", feature = "embedded"))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::sync::mpsc::unbounded_channel;

    use super::*;
    use crate::inbox::consumer::Handlers;
    use crate::inbox::consumer::fixture::{options, parts};
    use crate::inbox::port::Inbox;
    use crate::observe::PartState;
    use crate::store::base::Base;

    /// Shown by: a write only when the next position is told.
    #[tokio::test]
    async fn a_position_that_could_not_be_written_is_written_later_though_none_is_told_after_it() {
        let parts = parts(options(), Handlers::new()).await;
        let (consumer, health) = (parts.register().await, &parts.shared.health);
        health.set(&parts.shared.part, PartState::Ready);
        let holding = Holding { topic: "t".into(), partition: 0, owner: Uuid::now_v7() };
        parts.store.open_assignment(consumer, &holding).await.unwrap();
        let refuse = "create trigger refuse before update on oncebox_assignment begin select raise(abort, 'no'); end";
        sqlx::query(refuse).execute(parts.store.pool()).await.unwrap();
        let (tell, told) = unbounded_channel();
        let keeper = tokio::spawn(keep(Arc::clone(&parts.shared), consumer, told));
        tell.send((holding, Position { topic_id: None, next: 7 })).unwrap();
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
