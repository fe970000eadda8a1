//! Remembers in the database up to where each partition is done.
//!
//! Promise: a position is written after the commits it stands for, in a transaction of its own, so
//! that no copy of the database has it without them. It lags by a second at most, or by as long as
//! the database is away: what was done meanwhile comes again after a crash, and the inbox knows it.
//!
//! Not here: where a partition begins (`policy::position`), the position at a clean end (`intake`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;
use uuid::Uuid;

use super::Shared;
use crate::policy::position::Position;
use crate::store::{ConsumerId, Holding};

/// How much may come again for nothing, against one small write in each such time.
const EVERY: Duration = Duration::from_secs(1);

/// Writes what it is told, the last of each partition, until nobody tells it any more.
pub(super) async fn keep(shared: Arc<Shared>, consumer: ConsumerId, mut told: UnboundedReceiver<(Holding, Position)>) {
    let mut due: HashMap<Uuid, (Holding, Position)> = HashMap::new();
    while let Some(first) = told.recv().await {
        due.insert(first.0.owner, first);
        tokio::time::sleep(EVERY).await;
        while let Ok(next) = told.try_recv() {
            due.insert(next.0.owner, next);
        }
        let positions: Vec<_> = due.values().cloned().collect();
        match shared.store.keep_positions(consumer, &positions).await {
            Ok(()) => due.clear(),
            Err(error) => {
                tracing::debug!(consumer = %shared.options.name, %error, "positions could not be written; with the next ones");
            }
        }
    }
}
