//! The relay: committed messages to the broker, in order per key, none lost.
//!
//! Guarantees: the cursor moves only by the broker's proof, in order (G2); a session starts at or
//! before the first unproven row and on any doubt is dropped whole (R15, G3); a message that cannot
//! be sent holds its own key and nothing else; a destination that is not there, refuses, or says
//! nothing holds its own topic and is released by itself; a broker or database that is away burns
//! no attempts (G10); every write is fenced (G9); ready means that work gets on.
//!
//! The way of a row: `pump` reads and claims → `sending` decides and sends → the broker settles →
//! `pump` marks. Rows that were diverted come back through `release`, those of a blocked topic
//! after a `trial` beside the session.
//!
//! Not here: the cursor (the store's), what a refusal means (room `policy`: `isolate`,
//! `diversion`).

mod ending;
mod options;
mod pump;
mod release;
mod sending;
mod trial;
mod window;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::broker::{Broker, Publisher};
use crate::error::{BrokerError, StoreError};
use crate::observe::{self, Health, PartState};
use crate::policy::isolate::{Isolation, Verdict};
use crate::runtime::pace::{Pace, sleep_unless};
use crate::store::{Diversion, LeaseAnswer, LeaseRequest, Outbox, RelaySession};

use ending::{Doubt, End, Refused};
pub use options::RelayOptions;
use pump::Pump;
use trial::Pauses;

/// How a relay ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayEnd {
    /// It was told to stop.
    Stopped,
    /// The outbox was empty, where `until_empty` is set.
    Empty,
}

/// Why a relay cannot go on by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelayError {
    /// The database refuses, or fails in a way that only a person can mend.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The broker refuses, or fails in a way that only a person can mend.
    #[error(transparent)]
    Broker(#[from] BrokerError),
}

/// The relay of one shard.
#[derive(Debug)]
pub struct Relay {
    store: Arc<dyn Outbox>,
    broker: Arc<dyn Broker>,
    options: RelayOptions,
    health: Health,
    part: String,
}

/// What outlives a session, in memory only: a new process starts without suspicion.
#[derive(Debug, Default)]
struct Memory {
    isolation: Isolation,
    /// Decided at the end of a session, carried out when the next one meets the row.
    verdicts: HashMap<i64, Diversion>,
    /// Rows that the broker refused in company for what they are: they go aside into the table, and
    /// from there alone.
    alone: HashSet<i64>,
    /// Topics that were found blocked, and why, until their rows stand in the table.
    blocked: HashMap<String, String>,
    /// When blocked topics are tried again.
    pauses: Pauses,
    /// Sessions in a row that ended in doubt and marked nothing.
    doubts: u32,
    /// A row was found out since the last end of a session.
    progress: bool,
    /// The database refused the last read: no session is ready before one succeeds.
    refused: bool,
}

/// The trouble of a relay all of whose topics are blocked.
const TOPICS: &str = "topics";
/// So many sessions in a row may end in doubt without a mark until the relay is not ready.
const DOUBTS_SHOWN: u32 = 2;

impl Relay {
    /// Puts a relay together; [`Relay::run`] makes it work.
    pub fn new(store: impl Outbox + 'static, broker: Arc<dyn Broker>, options: RelayOptions, health: Health) -> Self {
        let part = format!("relay {}", options.shard);
        Self { store: Arc::new(store), broker, options, health, part }
    }

    /// Runs until it is told to stop, or the outbox is empty where `until_empty` is set. Waits for
    /// a database or broker that is not there, and stands by while somebody else has the lease.
    ///
    /// # Errors
    /// What a person must mend: no schema, a refused setting, an unknown shard.
    ///
    /// # Cancel safety
    /// Dropped, it loses nothing: what was in flight is sent again by the next session. Prefer the
    /// token.
    pub async fn run(&self, stop: CancellationToken) -> Result<RelayEnd, RelayError> {
        observe::relay_starts(self.broker.name());
        self.health.set(&self.part, PartState::Starting);
        let overdue = async {
            stop.cancelled().await;
            tokio::time::sleep(self.options.shutdown_grace).await;
        };
        tokio::select! {
            ended = self.sessions(&stop) => ended,
            // A database or broker that says nothing keeps nobody. The lease runs out; what is not
            // marked is sent again.
            () = overdue => {
                tracing::warn!(shard = self.options.shard, "the stop took as long as it may: the last mark was not made");
                Ok(RelayEnd::Stopped)
            }
        }
    }

    async fn sessions(&self, stop: &CancellationToken) -> Result<RelayEnd, RelayError> {
        let mut memory = Memory::default();
        let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(5));
        loop {
            let Some(publisher) = self.connect(stop).await? else { return Ok(RelayEnd::Stopped) };
            let Some(session) = self.lease(stop, memory.refused || memory.doubts >= DOUBTS_SHOWN).await? else {
                publisher.close().await;
                return Ok(RelayEnd::Stopped);
            };
            observe::session_began(self.broker.name());
            let began = tokio::time::Instant::now();
            let doubt = match Pump::new(self, session, publisher, &mut memory).run(stop).await {
                End::Stopped => return Ok(RelayEnd::Stopped),
                End::Empty => return Ok(RelayEnd::Empty),
                End::Doubt(doubt) => doubt,
            };
            self.learn(&mut memory, doubt).await?;
            if began.elapsed() > Duration::from_secs(10) || std::mem::take(&mut memory.progress) {
                pace.worked();
            }
            if !pace.wait(stop).await {
                return Ok(RelayEnd::Stopped);
            }
        }
    }

    /// A fresh session with the broker; waits, paced, for one that is away.
    async fn connect(&self, stop: &CancellationToken) -> Result<Option<Box<dyn Publisher>>, BrokerError> {
        let mut pace = Pace::new(Duration::from_millis(200), Duration::from_secs(10));
        loop {
            let opened = tokio::select! {
                opened = self.broker.publisher() => opened,
                () = stop.cancelled() => return Ok(None),
            };
            match opened {
                Ok(publisher) => return Ok(Some(publisher)),
                Err(error @ BrokerError::Refused(_)) => return Err(error),
                Err(error) => {
                    self.health.set(&self.part, PartState::Waiting(error.to_string()));
                    if !pace.wait(stop).await {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// The lease of the shard; waits for a database that is away and for an owner to stop.
    async fn lease(
        &self,
        stop: &CancellationToken,
        in_trouble: bool,
    ) -> Result<Option<Box<dyn RelaySession>>, StoreError> {
        let request = LeaseRequest {
            shard: self.options.shard,
            owner: self.options.owner.clone(),
            length: self.options.lease,
            read_bytes: self.options.read_bytes,
        };
        let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(5));
        loop {
            if stop.is_cancelled() {
                return Ok(None);
            }
            match self.store.open(&request).await {
                Ok(LeaseAnswer::Taken(session)) => {
                    if !in_trouble {
                        self.health.set(&self.part, PartState::Ready);
                    }
                    return Ok(Some(session));
                }
                Ok(LeaseAnswer::HeldBy { owner, left }) => {
                    self.health.set(&self.part, PartState::Standby(format!("{owner} has the lease")));
                    self.health.trouble(&self.part, TOPICS, None);
                    let wait = left.clamp(Duration::from_millis(50), self.options.lease / 4);
                    if !sleep_unless(stop, wait).await {
                        return Ok(None);
                    }
                }
                Ok(LeaseAnswer::NoShard) => {
                    return Err(StoreError::Refused(format!(
                        "there is no shard {} in this database; `oncebox status` lists them",
                        self.options.shard
                    )));
                }
                Err(error) if error.is_transient() => {
                    self.health.set(&self.part, PartState::Waiting(error.to_string()));
                    if !pace.wait(stop).await {
                        return Ok(None);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Learns from the end of a session what the next one must do differently (R16).
    async fn learn(&self, memory: &mut Memory, doubt: Doubt) -> Result<(), StoreError> {
        let shard = self.options.shard;
        let (why, row) = match doubt {
            Doubt::Store(error) => return self.learn_of_store(memory, error),
            Doubt::Refused(refused) => {
                let first = refused.iter().min_by_key(|refused| refused.position);
                let (why, row) = first.map_or((String::new(), None), |first| (first.why.clone(), Some(first.position)));
                judge(memory, refused);
                (why, row)
            }
            Doubt::Silent { topics, overtaken, why } => {
                // Whether the broker answers is found out before anything is concluded from its
                // silence.
                if overtaken || self.broker_answers().await {
                    memory.progress = true;
                    memory.blocked.extend(topics.into_iter().map(|topic| (topic, why.clone())));
                }
                (why, None)
            }
            Doubt::Held(why) => {
                memory.progress = true;
                (why, None)
            }
            Doubt::Lost { row, why } => {
                if let Some(row) = row
                    && memory.isolation.on_session_end(row) == Verdict::Dead
                {
                    memory.verdicts.insert(row, Diversion::Dead { reason: why.clone(), holds: true });
                }
                (why, row)
            }
        };
        tracing::warn!(shard, %why, row, "a relay session ended in doubt");
        observe::session_doubted(self.broker.name());
        memory.doubts = memory.doubts.saturating_add(1);
        if memory.doubts >= DOUBTS_SHOWN {
            let why = format!("{} sessions in a row ended and got nothing marked: {why}", memory.doubts);
            self.health.set(&self.part, PartState::Waiting(why));
        }
        Ok(())
    }

    fn learn_of_store(&self, memory: &mut Memory, error: StoreError) -> Result<(), StoreError> {
        let shard = self.options.shard;
        match error {
            StoreError::Fenced(why) => {
                observe::lease_lost();
                // What was concluded is the next owner's to conclude; kept, it would judge a row
                // that was redriven since.
                *memory = Memory::default();
                tracing::error!(shard, %why, "the lease is lost");
            }
            error if error.is_transient() => {
                tracing::warn!(shard, %error, "the database went away");
            }
            error @ (StoreError::SchemaMissing(_) | StoreError::SchemaNewer { .. } | StoreError::SchemaOld { .. }) => {
                return Err(error);
            }
            error => {
                memory.refused = true;
                self.health.set(&self.part, PartState::Waiting(error.to_string()));
                tracing::error!(shard, %error, "the outbox could not be read or written");
            }
        }
        Ok(())
    }

    async fn broker_answers(&self) -> bool {
        match tokio::time::timeout(Duration::from_secs(10), self.broker.publisher()).await {
            Ok(Ok(publisher)) => {
                publisher.close().await;
                true
            }
            _ => false,
        }
    }
}

/// A nack says nothing of the message, and may be of the topic or of this session only: the topic's
/// trial, on a fresh session, finds out at once (R21).
fn judge(memory: &mut Memory, refused: Vec<Refused>) {
    for Refused { topic, why, .. } in refused {
        memory.progress = true;
        memory.blocked.insert(topic, why);
    }
}
