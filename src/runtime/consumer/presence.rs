//! A consumer's process says every ten seconds that it is there, so that an operator can tell who
//! is gone; and it ends where an operator forgot its consumer, or another id rule was accepted: two
//! rules at once would give one message two ids.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::observe::Trouble;
use crate::runtime::pace::sleep_unless;
use crate::store::ConsumerId;

/// How often a process says that it is there; well below
/// [`crate::store::CONSUMER_PRESENT`].
const SAYS_EVERY: Duration = Duration::from_secs(10);

/// Until it is told to stop. A database that is away is asked again; what it missed is at most a
/// minute.
pub(super) async fn run(shared: Arc<Shared>, consumer: ConsumerId, stop: CancellationToken) {
    let id_rule = shared.options.id_rule_text();
    let show = |trouble| shared.health.trouble(&shared.part, "presence", trouble);
    let mut failed = 0_u32;
    loop {
        // A stop does not wait for a database that says nothing.
        let said = tokio::select! {
            said = shared.store.seen(consumer, &id_rule) => said,
            () = stop.cancelled() => return show(None),
        };
        match said {
            Ok(true) => {
                failed = 0;
                show(None);
            }
            Ok(false) => return shared.is_forgotten.store(true, Ordering::Relaxed),
            Err(error) => {
                failed += 1;
                tracing::debug!(consumer = %shared.options.name, %error, "its presence was not noted");
                if failed >= 2 {
                    show(Some(Trouble::Stops(format!("it cannot note that it is there: {error}"))));
                }
            }
        }
        if !sleep_unless(&stop, SAYS_EVERY).await {
            return show(None);
        }
    }
}
