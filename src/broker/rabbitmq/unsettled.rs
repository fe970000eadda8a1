//! The state that a publishing session shares with its task: rows without an outcome, and outcomes
//! that the runtime does not have yet.
//!
//! Guarantees: an outcome stays here until it is handed over. A topic without a route is not ready
//! before it is time to try again.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::broker::{Receipt, Refusal, Settled, TopicState};
use crate::error::BrokerError;

#[derive(Debug, Default)]
pub(super) struct Unsettled {
    state: Mutex<State>,
    /// Notified when there are outcomes, an end or room, or when the server blocks or unblocks.
    changed: Notify,
}

/// What the lock protects; it is never held over an await.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Outcomes that were not handed over to the runtime yet.
    outcomes: Vec<Settled>,
    /// How often outcomes were handed over. The runtime sends later rows with their knowledge.
    pub(super) handovers: u64,
    /// The number of rows that were sent and have no outcome.
    outstanding: usize,
    /// The bytes of those rows.
    held_bytes: usize,
    ended: Option<BrokerError>,
    /// Why the server accepts no messages now.
    pub(super) blocked: Option<String>,
    /// Topics whose last message was returned, or refused for its destination: when, and why.
    no_route: HashMap<String, (Instant, String)>,
}

impl State {
    /// Counts rows as sent, and returns how often outcomes were handed over before them. `None`
    /// while there is no room.
    pub(super) fn take_in(
        &mut self,
        rows: usize,
        bytes: usize,
        held_bytes_max: usize,
    ) -> Option<Result<u64, BrokerError>> {
        match &self.ended {
            Some(error) => Some(Err(error.clone())),
            // While the server is blocked no room becomes free. Then `send` must not wait, so that
            // the runtime can ask why.
            None if self.held_bytes >= held_bytes_max && self.blocked.is_none() => None,
            None => {
                self.outstanding += rows;
                self.held_bytes += bytes;
                Some(Ok(self.handovers))
            }
        }
    }

    pub(super) fn settle(&mut self, tag: u64, weight: usize, outcome: Result<Receipt, Refusal>) {
        self.outcomes.push(Settled { tag, outcome });
        self.outstanding = self.outstanding.saturating_sub(1);
        self.held_bytes = self.held_bytes.saturating_sub(weight);
    }

    /// Hands the outcomes over to the runtime. `None` while there is nothing to tell.
    pub(super) fn hand_over(&mut self, settled: &mut Vec<Settled>) -> Option<Result<(), BrokerError>> {
        if !self.outcomes.is_empty() {
            settled.append(&mut self.outcomes);
            self.handovers += 1;
            return Some(Ok(()));
        }
        match &self.ended {
            Some(error) => Some(Err(error.clone())),
            None => (self.outstanding == 0).then_some(Ok(())),
        }
    }

    pub(super) fn ended(&self) -> Result<(), BrokerError> {
        self.ended.clone().map_or(Ok(()), Err)
    }

    /// Notes that the last message of a topic was returned, or refused for its destination.
    pub(super) fn has_no_route(&mut self, topic: &str, why: &str) {
        self.no_route.insert(topic.to_owned(), (Instant::now(), why.to_owned()));
    }

    /// Notes that the last message of a topic arrived.
    pub(super) fn has_a_route(&mut self, topic: &str) {
        self.no_route.remove(topic);
    }

    /// Whether a topic can be sent to. After such a refusal it is not ready for `route_retry`.
    pub(super) fn state_of(&mut self, topic: &str, route_retry: Duration) -> TopicState {
        if let Some((at, why)) = self.no_route.get(topic)
            && at.elapsed() < route_retry
        {
            return TopicState::NotReady(why.clone());
        }
        // AMQP does not show routes in advance: only sending a row shows whether there is one.
        self.no_route.remove(topic);
        TopicState::Ready
    }
}

impl Unsettled {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn notify(&self) {
        self.changed.notify_waiters();
    }

    pub(super) fn end(&self, error: BrokerError) {
        self.lock().ended.get_or_insert(error);
        self.notify();
    }

    /// Waits until `look` returns a value for the state.
    pub(super) async fn until<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(found) = look(&mut self.lock()) {
                return found;
            }
            changed.await;
        }
    }
}
