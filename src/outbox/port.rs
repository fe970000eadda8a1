//! Duty: the outbox as its relay sees it.
//!
//! A session owns one shard, from the lease that raised the epoch to the first doubt. It reads new
//! rows in position order, makes a checkpoint (a synchronous commit that begins after the read,
//! R5), and marks the rows in order once the broker has proven them. Each adapter has its own kind
//! of cursor (gaps and fences, rows that are present, plain position).
//!
//! Guarantees: every write is fenced by epoch and revision ([`StoreError::Fenced`] ends the
//! session, and nothing was changed). A committed message is read again until a mark has recorded
//! it as proven, or moved it as a whole to the dead and held table.

use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::StoreError;
use crate::message::OutgoingMessage;

/// A request for the lease of a shard.
#[derive(Debug, Clone)]
pub struct LeaseRequest {
    /// The shard; 0 is the only one on MySQL and SQLite.
    pub shard: i32,
    /// Host, process and a random part: unique to one relay of one process.
    pub owner: String,
    /// Length of the lease, in database time.
    pub length: Duration,
    /// How many bytes of messages one read returns at most, unless the first message alone is
    /// larger. It bounds memory for any number of rows (G11).
    pub read_bytes: usize,
}

impl LeaseRequest {
    /// A request for the first shard, with reads of 4 MiB.
    pub fn new(owner: impl Into<String>, length: Duration) -> Self {
        Self { shard: 0, owner: owner.into(), length, read_bytes: 4 << 20 }
    }
}

/// The answer to a request for a lease.
#[derive(Debug)]
pub enum LeaseAnswer {
    /// The shard is ours: the epoch was raised in a synchronous transaction.
    Taken(Box<dyn RelaySession>),
    /// Another owner has the lease, for at most this long unless it is renewed.
    HeldBy {
        /// The name of the owner.
        owner: String,
        /// What is left of the lease.
        left: Duration,
    },
    /// There is no such shard.
    NoShard,
}

/// A row to publish.
#[derive(Debug, Clone)]
pub struct OutboxRow {
    /// The position of the row, which is its order and its identity.
    pub position: i64,
    /// The first byte of the hash of its key, or of its id; a shard owns a range of buckets.
    pub bucket: u8,
    /// The message as it is published.
    pub message: OutgoingMessage,
}

/// The result of one read: a batch of the window, possibly without rows of this shard.
#[derive(Debug)]
pub struct ReadBatch {
    /// Number of this batch within the session, ascending by one.
    pub batch: u64,
    /// New rows of this shard, in position order, none of them in flight.
    pub rows: Vec<OutboxRow>,
    /// True where there was more to read.
    pub more: bool,
    /// True where a checkpoint must follow within a second although there are no rows (gaps were
    /// found, or rows of other shards).
    pub needs_checkpoint: bool,
}

/// Why a row is not sent for now: dead or held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Diversion {
    /// The broker refused the message itself; with `holds` later rows of its key become held.
    Dead {
        /// Why the broker refused it.
        reason: String,
        /// Policy `hold` (true) or `skip`.
        holds: bool,
    },
    /// Stands behind a dead or held row of its key.
    HeldBehind,
    /// Its topic is not there, not routed or denied; released by the relay itself.
    HeldDestination {
        /// What the broker said of the destination.
        reason: String,
    },
}

/// The changes that a mark makes in one fenced transaction.
#[derive(Debug, Clone, Default)]
pub struct Mark {
    /// The cursor moves to the end of this batch; all batches up to it are wholly proven or
    /// diverted here.
    pub through: Option<u64>,
    /// Rows of those batches that are copied as a whole to the dead and held table.
    pub diverted: Vec<(i64, Diversion)>,
    /// Positions of dead or held rows that the broker has proven now: they leave that table.
    pub released: Vec<i64>,
    /// Rows of the dead and held table whose state changes (a released row that was refused again).
    pub changed: Vec<(i64, Diversion)>,
    /// Rows of that table that an operator discarded; the decision is kept.
    pub discarded: Vec<i64>,
}

impl Mark {
    /// True where there is nothing to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.through.is_none()
            && self.diverted.is_empty()
            && self.released.is_empty()
            && self.changed.is_empty()
            && self.discarded.is_empty()
    }
}

/// A row of the dead and held table without its message: what
/// `crate::outbox::rules::diversion` needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DivertedRow {
    /// The position of the row in the outbox.
    pub position: i64,
    /// The topic that the row is published to.
    pub topic: String,
    /// The key that its order is kept by; `None` where it has none.
    pub key: Option<String>,
    /// Dead (and whether it holds), held behind, or held for its destination.
    pub diversion: Diversion,
}

/// What an operator requested for a dead row. For a held row only `Self::Discard` can be
/// requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestedAct {
    /// Publish it again, with its id or the new id that the operator's command wrote, then the rows
    /// behind it.
    Redrive,
    /// Delete it, then publish the rows behind it.
    Discard,
}

/// A request that a command wrote into the dead and held table; only the owner of the shard acts on
/// it (R17).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperatorRequest {
    /// Position of the row.
    pub position: i64,
    /// The topic of the row.
    pub topic: String,
    /// The key of the row; `None` where it has none.
    pub key: Option<String>,
    /// What the owner of the shard has to do.
    pub act: RequestedAct,
}

/// Duty: giving out sessions.
///
/// The relay is compiled once, for any store: a call costs a boxed future beside its round trip.
#[async_trait]
pub trait Outbox: Debug + Send + Sync {
    /// Takes the lease of a shard in one synchronous transaction, or returns its current owner. A
    /// lease that ends later than now plus its length counts as expired, because the clock went
    /// back (R22). The same owner can take its own lease again at once.
    ///
    /// # Cancel safety
    /// A dropped call may have taken the lease; the next one of the same owner takes it again.
    async fn open(&self, request: &LeaseRequest) -> Result<LeaseAnswer, StoreError>;

    /// How long proven rows are kept, so that they can be sent again.
    async fn proven_kept(&self) -> Result<Duration, StoreError>;

    /// The ids of all shards.
    async fn shards(&self) -> Result<Vec<i32>, StoreError>;
}

/// One ownership of one shard. Any error but [`StoreError::Limit`] is a doubt: drop the session and
/// open a new one.
///
/// # Cancel safety
/// No method may be dropped before it returns unless the session is dropped with it.
#[async_trait]
pub trait RelaySession: Debug + Send {
    /// Reads up to `rows_max` new rows in one snapshot, fewer where they reach `read_bytes` of the
    /// request. It is fenced: the same statement checks the epoch.
    async fn read(&mut self, rows_max: usize) -> Result<ReadBatch, StoreError>;

    /// Commits synchronously, after the read: renews the lease, fences the gaps, and carries a mark
    /// where one is due.
    async fn checkpoint(&mut self, mark: Mark) -> Result<(), StoreError>;

    /// Rows of the dead and held table that hold later rows, in position order, at most `limit`.
    /// They are loaded at the start of a session. A row that is dead under policy `skip` holds
    /// nothing, and is neither returned nor counted.
    async fn diverted(&mut self, limit: usize) -> Result<Vec<DivertedRow>, StoreError>;

    /// Whether at least `rows` messages of the outbox are dead, of any shard and under any policy.
    async fn has_dead(&mut self, rows: usize) -> Result<bool, StoreError>;

    /// Requests of operators that are not carried out yet, in position order.
    async fn requests(&mut self) -> Result<Vec<OperatorRequest>, StoreError>;

    /// These dead and held rows with their messages, in position order, to be published again. Rows
    /// that are gone are left out. So are the last ones, where the rows before them reach
    /// `read_bytes`.
    async fn held(&mut self, positions: &[i64]) -> Result<Vec<OutboxRow>, StoreError>;

    /// Housekeeping between reads: makes partitions ahead, and deletes proven rows. It is bounded
    /// and does not block the application.
    async fn tidy(&mut self) -> Result<(), StoreError>;

    /// The open gaps, where there are at least half as many as the bound allows; none otherwise,
    /// and always none in a store whose positions have no gaps.
    async fn open_gaps(&mut self) -> Result<Option<OpenGaps>, StoreError> {
        Ok(None)
    }

    /// Releases the lease, so that a standby need not wait for its end. It is fenced.
    async fn release(self: Box<Self>) -> Result<(), StoreError>;
}

/// Gaps between the positions that were read, which transactions may still fill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenGaps {
    /// The number of ranges of positions that may still be filled.
    pub open: usize,
    /// The bound: when it is reached, reads return no new positions.
    pub max: usize,
    /// The oldest transaction that may still write, in words, where one is seen.
    pub held_by: Option<String>,
}

/// From pairs of position and message size, the first positions until their sizes reach
/// `bytes_max`; at least one.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) fn first_within(weights: Vec<(i64, i64)>, bytes_max: usize) -> Vec<i64> {
    let mut bytes = 0;
    let room = |(_, weight): &(i64, i64)| {
        let has_room = bytes < bytes_max;
        bytes += usize::try_from(*weight).unwrap_or(0);
        has_room
    };
    weights.into_iter().take_while(room).map(|(position, _)| position).collect()
}
