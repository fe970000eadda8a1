//! The limits on stored messages, dead ones and all of them: at a limit no more messages are taken
//! and the health says so, until there is room again (G11). What waits is tried on meanwhile.
//!
//! The numbers are checked from time to time, not at every message, so they can exceed a limit by
//! what is stored between two checks. Not here: the pause itself (`intake`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Shared;
use super::failing::Failing;
use crate::error::StoreError;
use crate::inbox::port::ConsumerId;
use crate::observe::{PartState, Trouble};
use crate::time::pace::{rest_after, sleep_unless};

const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A limit that is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Full {
    /// `dead_rows_max`: an operator makes room.
    Dead,
    /// `waiting_rows_max`: handlers that succeed make room, or an operator who acts on a dead
    /// message that holds its key.
    Stored,
}

impl Full {
    fn why(self, shared: &Shared) -> String {
        let options = &shared.options;
        match self {
            Self::Dead => format!(
                "{} dead messages, `dead_rows_max` reached: nothing more is taken; see `oncebox dead list`",
                options.dead_rows_max
            ),
            Self::Stored => format!(
                "{} waiting and dead messages, `waiting_rows_max` reached: nothing more is taken until a tenth of them is gone, and \
                 what waits is tried on; `oncebox dead list` shows what fails and what it holds",
                options.waiting_rows_max
            ),
        }
    }
}

/// Which limit is reached. A tenth must be free before the limit on all messages ends, so that a
/// consumer that stands at it does not pause and go on at every look.
async fn look(shared: &Shared, consumer: ConsumerId, was: Option<Full>) -> Result<Option<Full>, StoreError> {
    if shared.store.has_dead(consumer, shared.options.dead_rows_max).await? {
        return Ok(Some(Full::Dead));
    }
    let rows_max = shared.options.waiting_rows_max;
    let at = if was == Some(Full::Stored) { rows_max - rows_max / 10 } else { rows_max };
    Ok(shared.store.has_stored(consumer, at).await?.then_some(Full::Stored))
}

pub(super) async fn run(shared: Arc<Shared>, consumer: ConsumerId, stop: CancellationToken) {
    let part = format!("{} stored messages", shared.part);
    let mut failing = Failing::new(&shared, "stored messages", String::new());
    let mut full = None;
    loop {
        // The part stands while a limit is reached. If the looks fail then, only this beat shows
        // that the loop turns.
        shared.health.beat(&part);
        let began = Instant::now();
        let looked = look(&shared, consumer, full).await;
        let rest = rest_after(&looked, began.elapsed(), LOOK_EVERY);
        match looked {
            Ok(now) => {
                failing.is_well();
                shared.is_full.store(now.is_some(), Ordering::Relaxed);
                match now.map(|now| now.why(&shared)) {
                    Some(why) => {
                        if now != full {
                            tracing::error!(consumer = %shared.options.name, "{why}");
                        }
                        shared.health.set(&part, PartState::Waiting(why));
                    }
                    None => {
                        if full.is_some() {
                            tracing::info!(consumer = %shared.options.name, "there is room for messages again");
                        }
                        shared.health.done(&part);
                    }
                }
                full = now;
            }
            Err(error) => {
                tracing::debug!(consumer = %shared.options.name, %error, "stored messages could not be counted");
                failing.fails(Trouble::Stops(format!("stored messages cannot be counted: {error}")));
            }
        }
        if !sleep_unless(&stop, rest).await {
            return shared.health.done(&part);
        }
    }
}

#[cfg(all(test, feature = "sqlite", feature = "embedded"))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::inbox::consumer::Handlers;
    use crate::inbox::consumer::fixture::{options, parts};

    /// The tables are not there, so each look fails. Shown by: a beat after successful looks only.
    #[tokio::test]
    async fn a_part_at_its_limit_beats_while_messages_cannot_be_counted() {
        let parts = parts(options(), Handlers::new()).await;
        let shared = &parts.shared;
        shared.health.set(&format!("{} stored messages", shared.part), PartState::Waiting("full".into()));
        let stop = CancellationToken::new();
        let looks = tokio::spawn(run(Arc::clone(shared), ConsumerId(1), stop.clone()));
        for is_late in [true, false] {
            let turns = async {
                while shared.health.stuck(LOOK_EVERY / 2).is_empty() == is_late {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(60), turns).await.unwrap();
        }
        stop.cancel();
        looks.await.unwrap();
    }
}
