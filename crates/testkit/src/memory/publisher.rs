//! Publishing into memory: in order, with the faults that apply to each row.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use async_trait::async_trait;
use tokio::sync::watch;

use super::state::faults::Fault;
use super::state::{BrokerState, State};
use super::topics::Record;
use oncebox::adapter;
use oncebox::broker::{Publisher, Receipt, Refusal, Settled, TopicState};
use oncebox::error::BrokerError;
use oncebox::message::OutgoingMessage;

/// The header `ce_source` of every published message.
const SOURCE: &str = "oncebox";

/// One publishing session on the broker in memory.
#[derive(Debug)]
pub(super) struct MemoryPublisher {
    shared: Arc<BrokerState>,
    session: u64,
    changes: watch::Receiver<u64>,
    /// Rows that wait because the broker is blocked or their topic is silent.
    waiting: VecDeque<(u64, OutgoingMessage)>,
    outcomes: Vec<Settled>,
    /// (topic, key) of refused rows, until the runtime received the refusals and sends again.
    broken_keys: HashSet<(String, String)>,
    is_known: bool,
    broken: bool,
}

impl MemoryPublisher {
    pub(super) fn open(shared: Arc<BrokerState>) -> Result<Self, BrokerError> {
        let session = shared.change(|state| {
            state.faults.available()?;
            state.sessions += 1;
            Ok::<_, BrokerError>(state.sessions)
        })?;
        Ok(Self {
            session,
            changes: shared.changes(),
            shared,
            waiting: VecDeque::new(),
            outcomes: Vec::new(),
            broken_keys: HashSet::new(),
            is_known: false,
            broken: false,
        })
    }

    /// Appends the waiting rows, as far as the switches allow it.
    fn work(&mut self) -> Result<(), BrokerError> {
        let shared = Arc::clone(&self.shared);
        if self.waiting.is_empty() {
            return shared.look(|state| self.alive(state));
        }
        shared.change(|state| {
            self.alive(state)?;
            let mut left = VecDeque::new();
            while state.faults.blocked.is_none() && !self.broken {
                let Some((tag, message)) = self.waiting.pop_front() else { break };
                if state.faults.is_silent(&message.topic) {
                    left.push_back((tag, message));
                } else {
                    self.one(state, tag, message);
                }
            }
            left.append(&mut self.waiting);
            self.waiting = left;
            Ok(())
        })
    }

    fn alive(&self, state: &State) -> Result<(), BrokerError> {
        if state.faults.publishers_ended >= self.session {
            state.faults.available()?;
            return Err(BrokerError::Session("the broker ended the publishing session".to_owned()));
        }
        Ok(())
    }

    fn one(&mut self, state: &mut State, tag: u64, message: OutgoingMessage) {
        let key = message.key.clone().map(|key| (message.topic.clone(), key));
        let fault = state.faults.meet(&message);
        let exists = state.topics.contains_key(&message.topic);
        let refusal = match &fault {
            _ if key.as_ref().is_some_and(|key| self.broken_keys.contains(key)) => {
                Some(Refusal::Behind("an earlier row of its key was refused".to_owned()))
            }
            Some(Fault::RefuseMessage(reason)) => Some(Refusal::Message(reason.clone())),
            Some(Fault::RefuseDestination(reason)) => Some(Refusal::Destination(reason.clone())),
            Some(Fault::RefuseSession(reason)) => Some(Refusal::Session(reason.clone())),
            _ => state.faults.missing(&message.topic, exists).map(Refusal::Destination),
        };
        if let Some(refusal) = refusal {
            if !state.faults.accept_after_refusal {
                self.broken_keys.extend(key);
                self.is_known = false;
            }
            self.outcomes.push(Settled { tag, outcome: Err(refusal) });
            return;
        }
        if fault == Some(Fault::BreakBefore) {
            self.broken = true;
            return;
        }
        let headers = adapter::headers(&message, SOURCE);
        let record = Record {
            headers: headers.into_iter().map(|(name, value)| (name, value.into_bytes())).collect(),
            key: message.key.clone().map(String::into_bytes),
            payload: Some(message.payload),
            appended_at: chrono::Utc::now(),
        };
        state.ensure_topic(&message.topic);
        let hashed = message.key.as_ref().map_or(message.id.as_bytes().as_slice(), |key| key.as_bytes());
        let (partition, offset) = state.append(&message.topic, hashed, record.clone());
        if fault == Some(Fault::AppendTwice) {
            state.append(&message.topic, hashed, record);
        }
        if fault == Some(Fault::BreakAfter) {
            self.broken = true;
            return;
        }
        self.outcomes.push(Settled { tag, outcome: Ok(Receipt::Offset { partition, offset }) });
    }
}

#[async_trait]
impl Publisher for MemoryPublisher {
    async fn topics(&mut self, topics: &[String]) -> Result<Vec<TopicState>, BrokerError> {
        self.shared.look(|state| {
            self.alive(state)?;
            let missing = |topic: &String| state.faults.missing(topic, state.topics.contains_key(topic));
            Ok(topics.iter().map(|topic| missing(topic).map_or(TopicState::Ready, TopicState::NotReady)).collect())
        })
    }

    async fn send(&mut self, rows: Vec<(u64, OutgoingMessage)>) -> Result<(), BrokerError> {
        // The runtime knows of these refusals now: rows that come from here on may be appended.
        if std::mem::take(&mut self.is_known) {
            self.broken_keys.clear();
        }
        loop {
            self.changes.mark_unchanged();
            let full = self.shared.look(|state| state.faults.full);
            if !full || self.changes.changed().await.is_err() {
                break;
            }
        }
        self.waiting.extend(rows);
        // The error is returned by `settle`.
        let _ = self.work();
        Ok(())
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), BrokerError> {
        loop {
            self.changes.mark_unchanged();
            self.work()?;
            let held = self.shared.look(|state| state.faults.receipts_held);
            if !held && !self.outcomes.is_empty() {
                settled.append(&mut self.outcomes);
                self.is_known = true;
                return Ok(());
            }
            if self.broken && self.outcomes.is_empty() {
                return Err(BrokerError::Session("the connection to the broker was lost".to_owned()));
            }
            if self.waiting.is_empty() && self.outcomes.is_empty() {
                return Ok(());
            }
            if self.changes.changed().await.is_err() {
                return Ok(());
            }
        }
    }

    fn blocked(&self) -> Option<String> {
        self.shared.turns.fetch_add(1, Ordering::Relaxed);
        self.shared.look(|state| state.faults.blocked.clone())
    }

    async fn close(self: Box<Self>) {}
}
