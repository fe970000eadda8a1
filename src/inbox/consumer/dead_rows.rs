//! The limit on dead messages: when it is reached, no more messages are taken and the health says
//! so, until an operator has made room (R31).
//!
//! Not here: the pause itself (`intake`). The number is checked from time to time, not at every
//! message, so it can exceed the limit by what is handled between two checks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::inbox::port::ConsumerId;
use crate::observe::{PartState, Trouble};
use crate::time::pace::sleep_unless;

const LOOK_EVERY: Duration = Duration::from_secs(1);

pub(super) async fn run(shared: Arc<Shared>, consumer: ConsumerId, stop: CancellationToken) {
    let rows_max = shared.options.dead_rows_max;
    let why =
        format!("{rows_max} dead messages, `dead_rows_max` reached: nothing more is taken; see `oncebox dead list`");
    let part = format!("{} dead messages", shared.part);
    let show = |trouble| shared.health.trouble(&shared.part, "dead messages", trouble);
    let mut failed = 0_u32;
    loop {
        let began = Instant::now();
        match shared.store.has_dead(consumer, rows_max).await {
            Ok(is_full) => {
                failed = 0;
                show(None);
                let was_full = shared.is_full.swap(is_full, Ordering::Relaxed);
                if is_full && !was_full {
                    tracing::error!(consumer = %shared.options.name, "{why}");
                }
                if is_full {
                    shared.health.set(&part, PartState::Waiting(why.clone()));
                } else {
                    shared.health.done(&part);
                }
            }
            Err(error) => {
                failed += 1;
                tracing::debug!(consumer = %shared.options.name, %error, "dead messages could not be counted");
                if failed >= 2 {
                    show(Some(Trouble::Stops(format!("dead messages cannot be counted: {error}"))));
                }
            }
        }
        if !sleep_unless(&stop, LOOK_EVERY.max(20 * began.elapsed())).await {
            shared.health.done(&part);
            return show(None);
        }
    }
}
