//! What the relay needs of a store: the port of the outbox.
//!
//! A session owns one shard: from the moment at which it takes the lease, which raises the epoch,
//! until its first error (but see [`RelaySession`]). It reads new rows in position order. Before
//! they are sent it commits a checkpoint, synchronously and begun after the read (R5: so what was
//! read is as durable as that commit). A checkpoint also carries the mark: the rows that are
//! proven, that is, the broker has said that it stored them.
//!
//! How a store remembers what was proven differs: PostgreSQL by a cursor and the gaps before it,
//! MySQL by the rows that are present, SQLite by a position.
//!
//! Guarantees: every write compares epoch and revision with the row of the lease; if they differ,
//! it changes nothing and returns [`StoreError::Fenced`]. A committed message is read again until a
//! mark has recorded it as proven, or has copied the whole row to the table of dead and held rows.

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
    /// Length of the lease, measured by the clock of the database.
    pub length: Duration,
    /// A read ends with the message that reaches so many bytes. So memory is bounded by this and
    /// one message, for any number of rows.
    pub read_bytes: usize,
}

/// The answer to a request for a lease.
#[derive(Debug)]
pub enum LeaseAnswer {
    /// The caller owns the shard: a synchronous transaction has raised the epoch.
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
    /// The position of the row: its place in the order, and what identifies it.
    pub position: i64,
    /// The first byte of the hash of its key, or of its id; 0 on SQLite. A shard owns a range.
    pub bucket: u8,
    /// The message as it is published.
    pub message: OutgoingMessage,
}

/// The result of one read. It may have no row of this shard.
#[derive(Debug)]
pub struct ReadBatch {
    /// Number of this batch within the session, ascending by one.
    pub batch: u64,
    /// New rows of this shard, in position order; none that an earlier read of this session has
    /// returned.
    pub rows: Vec<OutboxRow>,
    /// True if there was more to read: read again at once.
    pub more: bool,
    /// True if reads have returned every committed row by now. False if there was more to read, and
    /// where no new positions are read because too many gaps are open.
    pub saw_all: bool,
    /// True if a checkpoint must follow within a second although there are no rows: gaps were
    /// found, which it has to fence, or rows of other shards.
    pub needs_checkpoint: bool,
}

/// Why a row is not sent for now: dead or held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Diversion {
    /// The broker refused the message itself. If `holds` is true, later rows of its key are held.
    Dead {
        /// Why the broker refused it.
        reason: String,
        /// True under policy `hold`, false under `skip`.
        holds: bool,
    },
    /// An earlier row of its key is dead or held, or it was refused among others and waits to be
    /// sent alone.
    HeldBehind,
    /// Its topic does not exist, has no route or is denied. The relay tries the topic again and
    /// sends the row then; no operator is needed.
    HeldDestination {
        /// What the broker said of the destination.
        reason: String,
    },
}

/// The changes that a mark makes in one fenced transaction.
#[derive(Debug, Clone, Default)]
pub struct Mark {
    /// The cursor moves to the end of this batch: every row up to there is proven, or in
    /// `diverted`.
    pub through: Option<u64>,
    /// Rows of those batches that are copied as a whole to the dead and held table.
    pub diverted: Vec<(i64, Diversion)>,
    /// Positions of dead or held rows that the broker has proven now: they leave that table. Where
    /// an operator asked to discard one of them meanwhile, an audit row with the act `release` says
    /// that it was sent.
    pub released: Vec<i64>,
    /// Rows of the dead and held table whose state or reason changes (a released row that was
    /// refused again). It ends a request to redrive the row, not one to discard it.
    pub changed: Vec<(i64, Diversion)>,
    /// Rows of that table that an operator discarded. They leave it. Where the outbox keeps proven
    /// rows (PostgreSQL), a decision stays recorded until their outbox rows are freed.
    pub discarded: Vec<i64>,
}

impl Mark {
    pub(crate) fn is_empty(&self) -> bool {
        self.through.is_none() && !self.moves_rows()
    }

    /// True if it says more than that rows are proven: a row comes into the dead and held table,
    /// leaves it, or changes there.
    pub(crate) fn moves_rows(&self) -> bool {
        !(self.diverted.is_empty() && self.released.is_empty() && self.changed.is_empty() && self.discarded.is_empty())
    }
}

/// A row of the dead and held table without its message: enough to decide which later rows have to
/// wait.
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

/// A request that a command wrote into the dead and held table. Only the owner of the shard carries
/// it out, so that nobody else sends rows of its keys (R17).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperatorRequest {
    /// Position of the row.
    pub position: i64,
    /// The topic of the row.
    pub topic: String,
    /// The key of the row; `None` where it has none.
    pub key: Option<String>,
    /// True: delete the row, then publish the rows behind it. False, only for a dead row: publish
    /// it again, then the rows behind it. The message gets the id that the row has now: the
    /// operator's command may have changed it.
    pub discard: bool,
}

/// The outbox of one store, which opens sessions.
///
/// The relay is not generic over the store. So each call makes a boxed future, which is little
/// beside its round trip.
#[async_trait]
pub trait Outbox: Debug + Send + Sync {
    /// Tells every process that listens that messages were committed. False where the database has
    /// no such means, and never will.
    ///
    /// # Cancel safety
    /// A dropped call may have told them.
    async fn announce_commits(&self) -> Result<bool, StoreError> {
        Ok(false)
    }

    /// Calls `heard` once it listens, and after each announcement. It returns after a while, to be
    /// called again, and never where the database has no such means.
    ///
    /// # Cancel safety
    /// Safe, within a runtime.
    async fn hear_commits(&self, heard: fn()) -> Result<(), StoreError> {
        let _ = heard;
        std::future::pending().await
    }

    /// Takes the lease of a shard in one synchronous transaction, or says who has it, or that there
    /// is no such shard. When a lease has expired is what `time::lease` decides. The same owner can
    /// take its own lease again at once.
    ///
    /// # Cancel safety
    /// A dropped call may have taken the lease; the next one of the same owner takes it again.
    async fn open(&self, request: &LeaseRequest) -> Result<LeaseAnswer, StoreError>;

    /// How long proven rows are kept; until then an operator can have them sent again.
    async fn proven_kept(&self) -> Result<Duration, StoreError>;

    /// The ids of all shards.
    async fn shards(&self) -> Result<Vec<i32>, StoreError>;
}

/// The ownership of one shard. After an error nobody knows what took effect: drop the session and
/// open another. An error of [`tidy`](Self::tidy) that does not pass by itself is no such end.
///
/// # Cancel safety
/// Do not drop the future of a method before it is done, unless you drop the session with it.
#[async_trait]
pub trait RelaySession: Debug + Send {
    /// The epoch of this lease: one more than that of the lease before it, whoever had it.
    fn epoch(&self) -> i64;

    /// Reads up to `rows_max` new rows in one snapshot, fewer where they reach `read_bytes` of the
    /// request. It is fenced: the same statement checks the epoch.
    async fn read(&mut self, rows_max: usize) -> Result<ReadBatch, StoreError>;

    /// Commits synchronously, after the read: renews the lease, fences the new gaps, and writes the
    /// mark, which may be empty, with the gaps that are open still.
    async fn checkpoint(&mut self, mark: Mark) -> Result<(), StoreError>;

    /// Rows of the dead and held table that hold later rows, in position order, at most `limit`.
    /// They are loaded at the start of a session. A row that is dead under policy `skip` holds
    /// nothing: it is not returned and does not count for `limit`.
    async fn diverted(&mut self, limit: usize) -> Result<Vec<DivertedRow>, StoreError>;

    /// Whether at least `rows` rows of the outbox are dead, in any shard and under any policy.
    async fn has_dead(&mut self, rows: usize) -> Result<bool, StoreError>;

    /// The first `limit` requests of operators beyond the position `after` (0 for the first ones)
    /// that are not carried out yet, in position order.
    async fn requests(&mut self, after: i64, limit: usize) -> Result<Vec<OperatorRequest>, StoreError>;

    /// These dead and held rows with their messages, in position order, to be published again. It
    /// ends where `read_bytes` is reached: ask again for the rest. A position that is missing
    /// before the last one returned has no row any more.
    async fn held(&mut self, positions: &[i64]) -> Result<Vec<OutboxRow>, StoreError>;

    /// Housekeeping between reads: makes the next partitions, and deletes proven rows. It is
    /// bounded and does not block the application. After an error that does not pass by itself the
    /// session must be usable, and the next call must try again: one that does nothing would count
    /// as a success. A store whose mark deletes what is proven has nothing to tidy.
    async fn tidy(&mut self) -> Result<(), StoreError> {
        Ok(())
    }

    /// The open gaps, once there are half as many as the bound allows; otherwise none. Always none
    /// in a store whose positions have no gaps.
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
    /// The oldest transaction that may still fill a gap, in words, if one is seen.
    pub held_by: Option<String>,
}

/// From pairs of position and message size, the first positions, up to the one whose size reaches
/// `bytes_max`.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) fn first_within(sizes: Vec<(i64, i64)>, bytes_max: usize) -> Vec<i64> {
    let mut bytes = 0;
    let room = |(_, size): &(i64, i64)| {
        let has_room = bytes < bytes_max;
        bytes += usize::try_from(*size).unwrap_or(0);
        has_room
    };
    sizes.into_iter().take_while(room).map(|(position, _)| position).collect()
}
