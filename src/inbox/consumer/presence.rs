//! Records every ten seconds that this process of a consumer runs, so that an operator can tell
//! which consumers are gone. Ends the process if an operator forgot its consumer or accepted
//! another id rule: two rules at once would give one message two ids.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::Shared;
use super::failing::Failing;
use crate::inbox::port::ConsumerId;
use crate::observe::Trouble;
use crate::time::pace::sleep_unless;

/// The pause between two records; well below [`crate::operator::CONSUMER_PRESENT`].
const SAYS_EVERY: Duration = Duration::from_secs(10);

/// Runs until the stop. If the database is away, the next round tries again.
pub(super) async fn run(shared: Arc<Shared>, consumer: ConsumerId, stop: CancellationToken) {
    let id_rule = shared.options.id_rule_text();
    let mut failing = Failing::new(&shared, "presence", String::new());
    loop {
        // A stop must not wait for a database that does not answer.
        let said = tokio::select! {
            said = shared.store.seen(consumer, &id_rule) => said,
            () = stop.cancelled() => return,
        };
        match said {
            Ok(true) => failing.is_well(),
            Ok(false) => return shared.is_forgotten.store(true, Ordering::Relaxed),
            Err(error) => {
                tracing::debug!(consumer = %shared.options.name, %error, "its presence was not noted");
                failing.fails(Trouble::Stops(format!("it cannot note that it is there: {error}")));
            }
        }
        if !sleep_unless(&stop, SAYS_EVERY).await {
            return;
        }
    }
}
