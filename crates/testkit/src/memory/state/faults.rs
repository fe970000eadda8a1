//! The fault switches: each fault lasts until it is switched off.
//!
//! Faults of publishing apply to single rows; the others apply to sessions, topics or the whole
//! broker.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use super::BrokerState;
use oncebox::TopicRetention;
use oncebox::error::BrokerError;
use oncebox::message::OutgoingMessage;

/// What happens to a row that the fault applies to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// It is refused because of the message.
    RefuseMessage(String),
    /// It is refused because of its destination.
    RefuseDestination(String),
    /// It is refused for no known cause, which puts the session in doubt.
    RefuseSession(String),
    /// The session ends before the row is appended.
    BreakBefore,
    /// The session ends after the row was appended: its outcome is unknown.
    BreakAfter,
    /// It is appended twice, as by a retry of the client.
    AppendTwice,
}

type Matcher = Box<dyn FnMut(&OutgoingMessage) -> bool + Send>;

/// The state of the switches.
#[derive(Default)]
pub(in crate::memory) struct Switches {
    on_publish: Vec<(Fault, Matcher)>,
    away: Option<String>,
    pub(in crate::memory) blocked: Option<String>,
    pub(in crate::memory) full: bool,
    pub(in crate::memory) receipts_held: bool,
    pub(in crate::memory) accept_after_refusal: bool,
    pub(in crate::memory) topics_must_exist: bool,
    missing_topics: BTreeSet<String>,
    silent_topics: BTreeSet<String>,
    pub(in crate::memory) deliveries_held: bool,
    pub(in crate::memory) acknowledgements_lost: bool,
    pub(in crate::memory) retention: Option<TopicRetention>,
    pub(in crate::memory) deleted_below: i64,
    pub(in crate::memory) in_flight_unbounded: bool,
    /// Sessions up to this number have ended. The same holds for subscribers below.
    pub(in crate::memory) publishers_ended: u64,
    pub(in crate::memory) subscribers_ended: u64,
}

impl fmt::Debug for Switches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Switches").field("away", &self.away).field("blocked", &self.blocked).finish_non_exhaustive()
    }
}

impl Switches {
    /// The fault that applies to a row. Every matcher is called for every row, so that matchers
    /// that count see all of them.
    pub(in crate::memory) fn meet(&mut self, message: &OutgoingMessage) -> Option<Fault> {
        let mut met = None;
        for (fault, matcher) in &mut self.on_publish {
            if matcher(message) && met.is_none() {
                met = Some(fault.clone());
            }
        }
        met
    }

    pub(in crate::memory) fn available(&self) -> Result<(), BrokerError> {
        match &self.away {
            Some(reason) => Err(BrokerError::Unavailable(reason.clone())),
            None => Ok(()),
        }
    }

    pub(in crate::memory) fn is_silent(&self, topic: &str) -> bool {
        self.silent_topics.contains(topic)
    }

    /// Why a topic cannot be published to. `exists`: whether it was created.
    pub(in crate::memory) fn missing(&self, topic: &str, exists: bool) -> Option<String> {
        let missing = self.missing_topics.contains(topic) || (self.topics_must_exist && !exists);
        missing.then(|| format!("unknown topic `{topic}`"))
    }
}

/// A handle to the fault switches of one broker.
#[derive(Debug, Clone)]
pub struct Faults {
    shared: Arc<BrokerState>,
}

impl Faults {
    pub(in crate::memory) fn new(shared: Arc<BrokerState>) -> Self {
        Self { shared }
    }

    fn set(&self, set: impl FnOnce(&mut Switches)) {
        self.shared.change(|state| set(&mut state.faults));
    }

    /// From now on the fault applies to every row that the matcher accepts, in any session. If
    /// several match, the first one applies.
    pub fn on_publish(&self, fault: Fault, matcher: impl FnMut(&OutgoingMessage) -> bool + Send + 'static) {
        self.set(|faults| faults.on_publish.push((fault, Box::new(matcher))));
    }

    /// Removes all faults of rows.
    pub fn clear_on_publish(&self) {
        self.set(|faults| faults.on_publish.clear());
    }

    /// Later rows of a key are appended although an earlier one was refused, as by a client that
    /// does not keep order. By default they are refused as
    /// [`Refusal::Behind`](oncebox::broker::Refusal::Behind), so that the broker has a prefix of
    /// each key (R15).
    pub fn accept_after_refusal(&self, accept: bool) {
        self.set(|faults| faults.accept_after_refusal = accept);
    }

    /// The broker takes nothing for now, as with a memory alarm. Rows wait, nothing fails.
    pub fn block(&self, reason: Option<&str>) {
        self.set(|faults| faults.blocked = reason.map(str::to_owned));
    }

    /// The client takes no rows until this is switched off: `send` waits, as where its buffer is
    /// full.
    pub fn take_no_rows(&self, full: bool) {
        self.set(|faults| faults.full = full);
    }

    /// Rows are appended, but their outcomes are held back until this is switched off.
    pub fn hold_receipts(&self, hold: bool) {
        self.set(|faults| faults.receipts_held = hold);
    }

    /// Ends every open publishing session. The outcome of its unsettled rows is unknown.
    pub fn drop_publishers(&self) {
        self.shared.change(|state| state.faults.publishers_ended = state.sessions);
    }

    /// The broker is away, with this reason: sessions end, and none can be opened.
    pub fn away(&self, reason: Option<&str>) {
        self.shared.change(|state| {
            state.faults.away = reason.map(str::to_owned);
            if reason.is_some() {
                state.faults.publishers_ended = state.sessions;
                state.faults.subscribers_ended = state.sessions;
            }
        });
    }

    /// Topics are no longer created at their first use, only when they are declared.
    pub fn topics_must_exist(&self, must: bool) {
        self.set(|faults| faults.topics_must_exist = must);
    }

    /// A topic neither takes nor refuses, like a queue without a majority; or it answers again.
    pub fn silent_topic(&self, topic: &str, silent: bool) {
        self.set(|faults| switch(&mut faults.silent_topics, topic, silent));
    }

    /// A topic does not exist for publishers, or exists again.
    pub fn missing_topic(&self, topic: &str, missing: bool) {
        self.set(|faults| switch(&mut faults.missing_topics, topic, missing));
    }

    /// Nothing is delivered until this is switched off.
    pub fn hold_deliveries(&self, hold: bool) {
        self.set(|faults| faults.deliveries_held = hold);
    }

    /// Acknowledgements are lost until this is switched off. Their messages come again after a
    /// rebalance.
    pub fn lose_acknowledgements(&self, lose: bool) {
        self.set(|faults| faults.acknowledgements_lost = lose);
    }

    /// Subscribers get more than `in_flight_max`: the next batch comes although they have not
    /// acknowledged enough.
    pub fn deliver_without_bound(&self, unbounded: bool) {
        self.set(|faults| faults.in_flight_unbounded = unbounded);
    }

    /// What the broker answers when it is asked for the retention of topics; `None`: it does not
    /// tell. It keeps everything in any case.
    pub fn says_retention(&self, retention: Option<TopicRetention>) {
        self.set(|faults| faults.retention = retention);
    }

    /// Tells consumers that start that offsets below this one do not exist any more, in any
    /// partition.
    pub fn delete_below(&self, offset: i64) {
        self.set(|faults| faults.deleted_below = offset);
    }

    /// The members of a group lose all their partitions, as after a freeze longer than the session
    /// timeout, and share them anew. Unacknowledged messages come again.
    pub fn expire_leases(&self, group: &str) {
        self.shared.change(|state| {
            if let Some(group) = state.groups.get_mut(group) {
                group.expire_leases();
            }
        });
    }
}

fn switch(topics: &mut BTreeSet<String>, topic: &str, on: bool) {
    if on {
        topics.insert(topic.to_owned());
    } else {
        topics.remove(topic);
    }
}
