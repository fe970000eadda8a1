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
