//! Records every ten seconds that this process of a consumer runs, so that an operator can tell
//! which consumers are gone. If an operator removed the consumer (`consumers forget`) or accepted
//! another id rule, it says so to the intake, which ends the process: two rules at once would give
//! one message two ids.
//!
//! So it also notices, with work or without, that the database does not answer. It then asks for a
//! sign of life (`silence`).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Shared;
use super::failing::Failing;
use crate::error::StoreError;
use crate::inbox::port::ConsumerId;
use crate::observe::Trouble;
use crate::time::pace::sleep_unless;

/// The pause between two records; well below [`crate::operator::CONSUMER_PRESENT`]. While the
/// database is silent, it is [`ASKS_EVERY`].
const SAYS_EVERY: Duration = Duration::from_secs(10);

/// A record that takes longer makes this task ask for a sign of life, again and again.
const ASKS_EVERY: Duration = Duration::from_secs(2);

/// Runs until the stop. If the database is away, the next round tries again.
pub(super) async fn run(shared: Arc<Shared>, consumer: ConsumerId, stop: CancellationToken) {
    let id_rule = shared.options.id_rule_text();
    let mut failing = Failing::new(&shared, "presence", String::new());
    loop {
        // A stop must not wait for a database that does not answer.
        let Some(said) = stop.run_until_cancelled(say(&shared, consumer, &id_rule)).await else { return };
        match said {
            Ok(true) => failing.is_well(),
            Ok(false) => return shared.is_forgotten.store(true, Ordering::Relaxed),
            Err(error) => {
                tracing::debug!(consumer = %shared.options.name, %error, "its presence was not recorded");
                failing.fails(Trouble::Stops(format!("it cannot record its presence: {error}")));
            }
        }
        let pause = if shared.silence.is_on() { ASKS_EVERY } else { SAYS_EVERY };
        if !sleep_unless(&stop, pause).await {
            return;
        }
    }
}

/// Records it once, and asks for a sign of life if that takes long or fails. Returns false if the
/// consumer was removed or has another id rule.
async fn say(shared: &Shared, consumer: ConsumerId, id_rule: &str) -> Result<bool, StoreError> {
    let mut since = Instant::now();
    let asking = async {
        // Ends with the record.
        loop {
            tokio::time::sleep(ASKS_EVERY).await;
            if shared.ask_for_a_sign(since).await {
                since = Instant::now();
            }
        }
    };
    let said = tokio::select! {
        biased;
        said = shared.store.seen(consumer, id_rule) => said,
        never = asking => never,
    };
    match &said {
        Ok(_) => shared.has_heard(),
        Err(_) => _ = shared.ask_for_a_sign(since).await,
    }
    said
}
