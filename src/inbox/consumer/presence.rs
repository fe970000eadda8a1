//! Records every ten seconds that this process of a consumer runs, so that an operator can tell
//! which consumers are gone. Ends the process if an operator forgot its consumer or accepted
//! another id rule: two rules at once would give one message two ids.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::inbox::port::ConsumerId;
use crate::observe::Trouble;
use crate::time::pace::sleep_unless;

/// The pause between two records; well below [`crate::operator::CONSUMER_PRESENT`].
const SAYS_EVERY: Duration = Duration::from_secs(10);

/// Runs until the stop. If the database is away, the next round tries again.
pub(super) async fn run(shared: Arc<Shared>, consumer: ConsumerId, stop: CancellationToken) {
    let id_rule = shared.options.id_rule_text();
    let show = |trouble| shared.health.trouble(&shared.part, "presence", trouble);
    let mut failed = 0_u32;
    loop {
        // A stop must not wait for a database that does not answer.
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
