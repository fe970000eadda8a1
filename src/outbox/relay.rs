//! The relay: sends committed messages to the broker, in order per key, and loses none.
//!
//! Guarantees: the cursor moves only past rows that the broker has proven, or that are diverted, in
//! order (G2). A session starts at or before the first unproven row, and on any doubt the whole
//! session is dropped (R15, G3). A message that cannot be sent holds only its own key. A
//! destination that does not exist, refuses, or does not answer holds only its own topic, and is
//! released without a person. A broker or database that is away costs no attempt (G10). Every write
//! is fenced (G9). The relay is ready only while its work makes progress.
//!
//! The path of a row: `pump` reads it and makes a checkpoint, `pump::sending` decides and sends,
//! the broker settles, `pump` marks. Diverted rows return through `pump::release`; rows of a
//! blocked topic return after a `trial`, which runs beside the session.
//!
//! Not here: the cursor (the store's), who is held, and which row makes sessions end (`rules`).

mod ending;
mod options;
mod pump;
mod trial;
mod window;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::broker::{Broker, Publisher};
use crate::error::{BrokerError, RunEnd, RunError, StoreError};
use crate::observe::{self, Health, PartState};
use crate::outbox::hint;
use crate::outbox::port::{Diversion, LeaseAnswer, LeaseRequest, Outbox, RelaySession};
use crate::outbox::rules::isolate::Isolation;
use crate::task;
use crate::time::pace::{Pace, sleep_unless};

use ending::{Doubt, End};
pub use options::RelayOptions;
use pump::{Pump, shown};
use trial::Pauses;

/// The relay of one shard of an outbox.
#[derive(Debug)]
pub struct Relay {
    store: Arc<dyn Outbox>,
    broker: Arc<dyn Broker>,
    options: RelayOptions,
    health: Health,
    part: String,
}

/// State that outlives a session, in memory only: a new process starts without it.
#[derive(Debug, Default)]
struct Memory {
    isolation: Isolation,
    /// Verdicts on rows, by position: decided in one session, carried out when the row is met next.
    verdicts: HashMap<i64, Diversion>,
    /// Rows that the broker refused when they were sent with others: they are stored as held, and
    /// then each is sent alone.
    alone: HashSet<i64>,
    /// Topics that were found blocked, with the reason, until their rows are stored as held.
    blocked: HashMap<String, String>,
    pauses: Pauses,
    /// How many sessions in a row ended in doubt and marked nothing.
    doubts: u32,
    /// True where something was learned of a row or topic since the last session ended.
    progress: bool,
    /// True where the database refused a read or a mark, and nothing was marked since. A read that
    /// succeeds does not show that a mark can be made.
    refused: bool,
    /// The epoch of the last session.
    epoch: Option<i64>,
}

impl Memory {
    /// Notes the epoch of a session that begins. Where it does not follow the last one, another
    /// owner had the lease. That owner draws its own conclusions of rows and topics, and an
    /// operator may have redriven a row that ours are about: ours are forgotten.
    fn begins(&mut self, epoch: i64) {
        if self.epoch.is_some_and(|last| epoch != last + 1) {
            *self = Self { refused: self.refused, doubts: self.doubts, ..Self::default() };
        }
        self.epoch = Some(epoch);
    }

    /// Whether a session may be shown as ready. Where it may not, it first marks something, or
    /// finds that nothing is left to do.
    fn may_be_ready(&self) -> bool {
        !self.refused && self.doubts < DOUBTS_SHOWN
    }
}

/// The names of what may trouble a relay in its health: all topics blocked, many gaps, no tidying.
const TOPICS: &str = "topics";
const GAPS: &str = "gaps";
const HOUSEKEEPING: &str = "housekeeping";
/// What is shown while the broker says nothing to a client that opens a session.
const NO_SESSION: &str = "waits for the broker: it does not answer, and no session with it is open";
/// After so many sessions in a row that ended in doubt without a mark, the relay is not ready.
const DOUBTS_SHOWN: u32 = 2;

impl Relay {
    /// Makes a relay; it does nothing before [`Relay::run`].
    pub fn new(store: impl Outbox + 'static, broker: Arc<dyn Broker>, options: RelayOptions, health: Health) -> Self {
        Self::of(Arc::new(store), broker, options, health)
    }

    /// As [`Relay::new`], of a store that is an object already.
    pub(crate) fn of(store: Arc<dyn Outbox>, broker: Arc<dyn Broker>, options: RelayOptions, health: Health) -> Self {
        let part = format!("relay {}", options.shard);
        Self { store, broker, options, health, part }
    }

    /// Runs until the token is cancelled, or until the outbox is empty where `until_empty` is set.
    /// Waits for a database or broker that is away, and stands by while another relay has the
    /// lease.
    ///
    /// # Errors
    /// Errors for a person to mend: no schema, a refused setting, an unknown shard.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing: rows in flight are sent again by the next session.
    /// Cancelling the token is better, because it also marks and releases the lease.
    pub fn run(&self, stop: CancellationToken) -> BoxFuture<'_, Result<RunEnd, RunError>> {
        // Boxed, so that this code is compiled with the library and not again in each program.
        Box::pin(self.work(stop))
    }

    async fn work(&self, stop: CancellationToken) -> Result<RunEnd, RunError> {
        self.options.check()?;
        observe::relay_starts(self.broker.name());
        self.health.set(&self.part, PartState::Starting);
        let overdue = async {
            stop.cancelled().await;
            tokio::time::sleep(self.options.shutdown_grace).await;
        };
        // A task of its own, because the client of a database may only be dropped in a runtime.
        // Dropping the set ends it.
        let mut beside = JoinSet::new();
        let store = Arc::clone(&self.store);
        beside.spawn(task::boxed(async move { hint::listen(&*store).await }));
        tokio::select! {
            ended = self.sessions(&stop) => ended,
            // A database or broker that does not answer, or a client that does not end, cannot
            // delay the stop further. The lease runs out, and rows that are not marked are sent
            // again.
            () = overdue => {
                tracing::warn!(shard = self.options.shard, "`shutdown_grace` is over: the lease runs out by itself, and rows that are not marked are sent again");
                Ok(RunEnd::Stopped)
            }
        }
    }

    async fn sessions(&self, stop: &CancellationToken) -> Result<RunEnd, RunError> {
        let mut memory = Memory::default();
        let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(5));
        loop {
            let Some(publisher) = self.connect(stop).await? else { return Ok(RunEnd::Stopped) };
            let Some(session) = self.lease(stop, &mut memory).await? else {
                publisher.close().await;
                return Ok(RunEnd::Stopped);
            };
            observe::session_began(self.broker.name());
            let began = tokio::time::Instant::now();
            let doubt = match Pump::new(self, session, publisher, &mut memory).run(stop).await {
                End::Stopped => return Ok(RunEnd::Stopped),
                End::Empty => return Ok(RunEnd::Idle),
                End::Doubt(doubt) => doubt,
            };
            self.learn(&mut memory, doubt).await?;
            // Taken each time: the progress of one session must not excuse the end of the next.
            let progress = std::mem::take(&mut memory.progress);
            if progress || began.elapsed() > Duration::from_secs(10) {
                pace.worked();
            }
            if !pace.wait(stop).await {
                return Ok(RunEnd::Stopped);
            }
        }
    }

    /// Opens a session with the broker. While the broker is away, retries with backoff.
    async fn connect(&self, stop: &CancellationToken) -> Result<Option<Box<dyn Publisher>>, BrokerError> {
        let mut pace = Pace::new(Duration::from_millis(200), Duration::from_secs(10));
        loop {
            let opening = shown(self, NO_SESSION, self.broker.publisher());
            let Some((opened, _)) = stop.run_until_cancelled(opening).await else { return Ok(None) };
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

    /// Takes the lease of the shard. Waits while the database is away or another relay has it.
    async fn lease(
        &self,
        stop: &CancellationToken,
        memory: &mut Memory,
    ) -> Result<Option<Box<dyn RelaySession>>, StoreError> {
        let request = LeaseRequest {
            shard: self.options.shard,
            owner: self.options.owner.clone(),
            length: self.options.lease,
            read_bytes: self.options.read_bytes,
        };
        let lease = format!("the lease row of shard {}", self.options.shard);
        let waits = format!("waits for {lease}: the database does not answer, or another session has locked it");
        let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(5));
        loop {
            if stop.is_cancelled() {
                return Ok(None);
            }
            let (opened, late) = shown(self, &waits, self.store.open(&request)).await;
            match opened {
                Ok(LeaseAnswer::Taken(session)) => {
                    memory.begins(session.epoch());
                    if memory.may_be_ready() {
                        self.health.set(&self.part, PartState::Ready);
                    } else if late {
                        let why = "the lease is taken, and nothing is marked yet".to_owned();
                        self.health.set(&self.part, PartState::Waiting(why));
                    }
                    return Ok(Some(session));
                }
                Ok(LeaseAnswer::HeldBy { owner, left }) => {
                    self.health.set(&self.part, PartState::Standby(format!("{owner} has the lease")));
                    // These are now the other owner's to show.
                    for trouble in [TOPICS, GAPS, HOUSEKEEPING] {
                        self.health.trouble(&self.part, trouble, None);
                    }
                    let wait = left.min(self.options.lease / 4).max(Duration::from_millis(50));
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
                    self.health.set(&self.part, PartState::Waiting(format!("{lease} is not taken: {error}")));
                    if !pace.wait(stop).await {
                        return Ok(None);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Notes what the next session must do differently after this doubt (R16).
    async fn learn(&self, memory: &mut Memory, doubt: Doubt) -> Result<(), StoreError> {
        let shard = self.options.shard;
        let (why, row) = match doubt {
            // Seen again and again, it is shown like any other doubt: a mark may fail although the
            // database can be reached and read.
            Doubt::Store(error) if error.is_transient() => (error.to_string(), None),
            Doubt::Store(error) => return self.learn_of_store(memory, error),
            Doubt::Refused(refused) => {
                let first = refused.iter().min_by_key(|refused| refused.position);
                let (why, row) = first.map_or((String::new(), None), |first| (first.why.clone(), Some(first.position)));
                // A nack does not tell whether the message, the topic or only this session is at
                // fault; the topic's trial in a new session finds out (R21).
                memory.progress |= !refused.is_empty();
                memory.blocked.extend(refused.into_iter().map(|refused| (refused.topic, refused.why)));
                (why, row)
            }
            Doubt::Silent { topics, overtaken, why } => {
                // The topics are blocked only if the broker as a whole answers.
                if overtaken || self.broker_answers().await {
                    memory.progress = true;
                    memory.blocked.extend(topics);
                }
                (why, None)
            }
            Doubt::Held(why) => {
                memory.progress = true;
                (why, None)
            }
            Doubt::Lost { row, why } => {
                if let Some(row) = row
                    && memory.isolation.on_session_end(row)
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
                // The next owner draws its own conclusions. Ours, if kept, could apply to a row
                // that was redriven since.
                *memory = Memory::default();
                tracing::error!(shard, %why, "the lease is lost");
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
        let asked = tokio::time::timeout(Duration::from_secs(10), self.broker.publisher());
        match shown(self, NO_SESSION, asked).await.0 {
            Ok(Ok(publisher)) => {
                publisher.close().await;
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shown by: forgetting only where the other owner was seen.
    #[test]
    fn what_was_concluded_is_forgotten_where_another_owner_came_and_went() {
        let mut memory = Memory { doubts: 3, ..Memory::default() };
        memory.begins(4);
        memory.alone.insert(40);
        memory.begins(5);
        assert!(memory.alone.contains(&40), "it is the next lease");
        memory.begins(7);
        assert_eq!((memory.alone.len(), memory.doubts), (0, 3));
        memory.alone.insert(90);
        memory.begins(8);
        assert!(memory.alone.contains(&90));
    }
}
