//! Duty: the outbox as its relay sees it.
//!
//! A session is one ownership of one shard, from the lease that raised the epoch to the first
//! doubt. It reads new rows in position order, claims them with a synchronous commit of its own
//! begun after the read (R5), and marks them in order once the broker has proven them. What the
//! cursor is (gaps and fences, rows present, plain position) is the adapter's own.
//!
//! Guarantees: every write is fenced by epoch and revision ([`StoreError::Fenced`] ends the
//! session, nothing changed); a committed message is read until a mark has proven it or moved it,
//! whole, to dead or held.

use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::StoreError;
use crate::message::OutgoingMessage;

/// Who asks for a shard, and for how long at a time.
#[derive(Debug, Clone)]
pub struct LeaseRequest {
    /// The shard; 0 is the only one on MySQL and SQLite.
    pub shard: i32,
    /// Host, process and a random part: unique to one relay of one process.
    pub owner: String,
    /// Length of the lease, in database time.
    pub length: Duration,
    /// Bytes of messages that one read gives at most, unless the first alone is larger: bounds
    /// memory whatever the number of rows (G11).
    pub read_bytes: usize,
}

impl LeaseRequest {
    /// Of the first shard, with reads of 4 MiB.
    pub fn new(owner: impl Into<String>, length: Duration) -> Self {
        Self { shard: 0, owner: owner.into(), length, read_bytes: 4 << 20 }
    }
}

/// The answer to a request for a lease.
#[derive(Debug)]
pub enum LeaseAnswer {
    /// The shard is ours: the epoch was raised in a synchronous transaction.
    Taken(Box<dyn RelaySession>),
    /// Somebody else's, for at most this long unless renewed.
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
    /// Its position: order, identity of the row.
    pub position: i64,
    /// The first byte of the hash of its key, or of its id; a shard owns a range of buckets.
    pub bucket: u8,
    /// The message as it is published.
    pub message: OutgoingMessage,
}

/// What one read gave: a batch of the window, possibly without rows of ours.
#[derive(Debug)]
pub struct ReadBatch {
    /// Number of this batch within the session, ascending by one.
    pub batch: u64,
    /// New rows of this shard, in position order, none of them in flight.
    pub rows: Vec<OutboxRow>,
    /// True where there was more to read.
    pub more: bool,
    /// True where a claim must follow within a second although there are no rows (gaps found, rows
    /// of other shards).
    pub needs_claim: bool,
}

/// Why a row leaves the way to the broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Diversion {
    /// Refused for what it is; with `holds` later rows of its key follow it as held.
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

/// What a mark does, in one fenced transaction.
#[derive(Debug, Clone, Default)]
pub struct Mark {
    /// The cursor moves to the end of this batch; all batches up to it are wholly proven or
    /// diverted here.
    pub through: Option<u64>,
    /// Rows of those batches that are copied whole to the dead and held table.
    pub diverted: Vec<(i64, Diversion)>,
    /// Positions of dead or held rows that the broker has proven now: they leave that table.
    pub released: Vec<i64>,
    /// Rows of the dead and held table whose state changes (a released row that was refused again).
    pub changed: Vec<(i64, Diversion)>,
    /// Dead rows that an operator discarded; the decision is kept.
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

/// A row of the dead and held table without its message: what [`crate::policy::diversion`] needs.
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

/// What an operator asked for a dead row, or, to be rid of it, for a held one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestedAct {
    /// Publish it again, with the same id or the one the operator's command put there, then what
    /// stands behind it.
    Redrive,
    /// Forget it, then publish what stands behind it.
    Discard,
}

/// A request that a command wrote into the dead and held table; only the owner of the shard acts on
/// it (R17).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperatorRequest {
    /// Position of the row.
    pub position: i64,
    /// The topic of the row that is meant.
    pub topic: String,
    /// The key of the row; `None` where it has none.
    pub key: Option<String>,
    /// What the operator wants to be done.
    pub act: RequestedAct,
}

/// Duty: giving out sessions.
///
/// The relay is compiled once, for any store: a call costs a boxed future beside its round trip.
#[async_trait]
pub trait Outbox: Debug + Send + Sync {
    /// Takes the lease of a shard in one synchronous transaction, or says who has it. A lease that
    /// ends later than now plus its length counts as expired: the clock went back (R22). The same
    /// owner takes its own lease again at once.
    ///
    /// # Cancel safety
    /// A dropped call may have taken the lease; the next one of the same owner takes it again.
    async fn open(&self, request: &LeaseRequest) -> Result<LeaseAnswer, StoreError>;

    /// How long rows that were proven are kept, and so can be sent again.
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
    /// Reads up to `rows_max` new rows in one snapshot, fewer where they reach the bytes that were
    /// asked for. Fenced: the epoch is checked in the same statement.
    async fn read(&mut self, rows_max: usize) -> Result<ReadBatch, StoreError>;

    /// Commits synchronously, after the read: renews the lease, fences the gaps, and carries a mark
    /// where one is due.
    async fn claim(&mut self, mark: Mark) -> Result<(), StoreError>;

    /// Rows of the dead and held table that hold something, in position order, at most `limit`:
    /// loaded at the start of a session. A row that is dead under policy `skip` holds nothing and
    /// counts for nothing here.
    async fn diverted(&mut self, limit: usize) -> Result<Vec<DivertedRow>, StoreError>;

    /// Requests of operators that wait, in position order.
    async fn requests(&mut self) -> Result<Vec<OperatorRequest>, StoreError>;

    /// These dead and held rows, whole, in position order, to be published again; a row that is
    /// gone is left out, and so are the last ones where the others reach the bytes of a read.
    async fn held(&mut self, positions: &[i64]) -> Result<Vec<OutboxRow>, StoreError>;

    /// Housekeeping between reads, bounded and never in the way of the application: partitions
    /// ahead, proven rows deleted.
    async fn tidy(&mut self) -> Result<(), StoreError>;

    /// Positions that may still appear, where they are at least half as many as may be; a store
    /// whose positions have no gaps never says so.
    async fn open_gaps(&mut self) -> Result<Option<OpenGaps>, StoreError> {
        Ok(None)
    }

    /// Gives the lease back, so that a standby need not wait. Fenced.
    async fn release(self: Box<Self>) -> Result<(), StoreError>;
}

/// Gaps between the positions that were read, which transactions may still fill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenGaps {
    /// The number of ranges of positions that may still be filled.
    pub open: usize,
    /// So many may be; then reads cover nothing new.
    pub max: usize,
    /// The oldest transaction that may still write, in words, where one is seen.
    pub held_by: Option<String>,
}

/// Of positions with the bytes of their messages, the first ones: as many as it takes to reach
/// `bytes_max`, and at least one.
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
