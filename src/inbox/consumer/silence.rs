//! How long the database has given this process no sign of life.
//!
//! A consumer whose own way to the database is cut handles nothing, but it holds partitions, or on
//! RabbitMQ the queue, that another process of this consumer could serve. So after [`SILENCE_MAX`]
//! it leaves the broker, and it subscribes again only when the database has answered.
//!
//! Promise: a pool without a free connection, or a statement that fails, is no silence. Only a sign
//! of life that is refused or late is: it has a connection of its own.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::Shared;
use crate::observe::Trouble;
use crate::time::pace::sleep_unless;

/// The longest silence before a consumer leaves the broker; a shorter handler timeout shortens it.
/// A usual failover of the database ends within it, so it moves no partition.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// How long a sign of life may take. No consumer leaves the broker after a shorter silence.
const SIGN_MAX: Duration = Duration::from_secs(5);

/// How often a consumer that has left looks whether the silence is over.
const LOOKS_EVERY: Duration = Duration::from_millis(200);

/// The name of the trouble of a consumer that hears nothing from the database.
const SILENT: &str = "silence";

/// Since when the database is silent, and how the last question ended; `None`: it answers.
#[derive(Debug, Default)]
pub(super) struct Silence(Mutex<Option<(Instant, String)>>);

impl Silence {
    /// Whether the last question for a sign of life got no answer.
    pub(super) fn is_on(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Why the consumer must leave the broker, if it must.
    pub(super) fn drives_away(&self, handler_timeout: Duration) -> Option<String> {
        let silence = self.0.lock();
        let (since, why) = silence.as_ref()?;
        let most = handler_timeout.clamp(SIGN_MAX, SILENCE_MAX);
        (since.elapsed() >= most).then(|| {
            format!("no sign of life from the database for {most:?}, so the broker is left to other processes: {why}")
        })
    }
}

impl Shared {
    /// Asks the database for a sign of life, and returns whether it gave one. `since`: the last
    /// one, or the start of the work that got no answer.
    pub(super) async fn ask_for_a_sign(&self, since: Instant) -> bool {
        let why = match timeout(SIGN_MAX, self.store.sign_of_life()).await {
            Ok(Ok(())) => {
                self.has_heard();
                return true;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("it did not answer within {SIGN_MAX:?}"),
        };
        let mut silence = self.silence.0.lock();
        let stops = Trouble::Stops(format!("the database gives no sign of life: {why}"));
        self.health.trouble(&self.part, SILENT, Some(stops));
        let since = silence.as_ref().map_or(since, |(first, _)| *first);
        *silence = Some((since, why));
        false
    }

    /// The database has answered: a silence is over.
    pub(super) fn has_heard(&self) {
        if self.silence.0.lock().take().is_some() {
            self.health.trouble(&self.part, SILENT, None);
        }
    }

    /// Waits until the database answers. Returns false if the stop came first.
    pub(super) async fn until_it_answers(&self, stop: &CancellationToken) -> bool {
        while self.silence.is_on() {
            self.health.beat(&self.part);
            if !sleep_unless(stop, LOOKS_EVERY).await {
                return false;
            }
        }
        true
    }
}
