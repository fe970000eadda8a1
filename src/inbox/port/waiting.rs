//! Duty: messages that wait for a retry, ordered per key (R25).
//!
//! A head is leased for about as long as its handler runs. Messages behind it that were never
//! tried may be leased with it, as one batch. The handler's transaction removes them only while it
//! has the lease: a process that died or froze loses its lease by database time, and no effect
//! commits twice. A lease that ran out stays in its row. So the next process knows that the
//! previous one died or froze: it counts the try of that message before it runs it alone.

use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;

use super::ConsumerId;
use crate::error::StoreError;
use crate::message::Message;

/// A message that this process may run now.
#[derive(Debug, Clone)]
pub struct LeasedMessage {
    /// The number of its row in the waiting table; order within a key follows it.
    pub sequence: i64,
    /// The lease, a random token.
    pub lease: uuid::Uuid,
    /// The tries counted before this one.
    pub tries: u32,
    /// An earlier lease ran out, so the process that had it died or froze.
    pub suspect: bool,
    /// The message, its `attempt` set to this try.
    pub message: Message,
}

/// The longest time of a lease.
const LEASE_MAX: Duration = Duration::from_secs(600);

/// A lease that ends later than this from now was made before the database's clock went back, and
/// is over (R22). It is more than [`LEASE_MAX`]: a statement knows the time of its beginning only,
/// and another process may lease a row while it waits.
pub(crate) const LEASE_END_MAX: Duration = LEASE_MAX.saturating_add(Duration::from_secs(60));

/// A lease on rows: for how long, and under which token. The token is the caller's, so that a lease
/// whose answer was lost can be given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowLease {
    /// Unique to this lease.
    pub token: uuid::Uuid,
    /// It ends by itself after this time, by the database's clock.
    pub length: Duration,
}

impl RowLease {
    /// A lease with a new token, at most ten minutes long.
    #[must_use]
    pub fn new(length: Duration) -> Self {
        Self { token: uuid::Uuid::now_v7(), length: length.min(LEASE_MAX) }
    }
}

/// Which waiting messages a process may run: those of its topics that it has a handler for. During
/// a rollout a new version may store messages of kinds that an old process of the same consumer
/// does not know; they stay for the new one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scope {
    /// Topics that it reads.
    pub topics: Vec<String>,
    /// The topics or queues of the broker that it reads: a queue may hold messages of other topics
    /// than `topics`.
    pub places: Vec<String>,
    /// Kinds that a handler takes; none where one takes every kind.
    pub kinds: Option<Vec<String>>,
}

/// Duty: the messages that wait for a retry, leased and given back.
#[async_trait]
pub trait Waiting: Debug + Send + Sync {
    /// Leases the head in the scope that is due first; no try is counted. If the answer was lost,
    /// call [`Waiting::give_back_all`].
    async fn lease_due(
        &self,
        consumer: ConsumerId,
        scope: &Scope,
        lease: &RowLease,
    ) -> Result<Option<LeasedMessage>, StoreError>;

    /// Leases the messages directly behind a leased head, in order, under the same lease, at most
    /// `limit`, and a few megabytes of payload in all (G11). It stops before the first message that
    /// was tried or leased before, is dead and holds, or has a kind outside the scope.
    async fn lease_behind(
        &self,
        consumer: ConsumerId,
        head: &LeasedMessage,
        scope: &Scope,
        limit: usize,
        lease: &RowLease,
    ) -> Result<Vec<LeasedMessage>, StoreError>;

    /// Counts this try, in a transaction of its own, before the handler runs. A repeated call
    /// counts nothing more. False where the lease is not ours any more.
    async fn count_try(&self, leased: &LeasedMessage) -> Result<bool, StoreError>;

    /// Lets the lease end this long from now, and counts no try: for a head that waits for its
    /// turn. False where the lease is not ours any more.
    async fn renew(&self, leased: &LeasedMessage, length: Duration) -> Result<bool, StoreError>;

    /// How long until the next head in the scope is due; none where nothing waits. Times that have
    /// passed come as zero.
    async fn next_due(&self, consumer: ConsumerId, scope: &Scope) -> Result<Option<Duration>, StoreError>;

    /// Counts a failed try and ends the lease: the message is due again after this time. False
    /// where the lease is not ours any more.
    async fn postpone(&self, leased: &LeasedMessage, after: Duration, error: &str) -> Result<bool, StoreError>;

    /// Ends the lease on messages, with the tries that they had before: a head is due at once,
    /// others wait behind it. Returns how many of them were still leased.
    async fn give_back(&self, consumer: ConsumerId, leased: &[LeasedMessage]) -> Result<u64, StoreError>;

    /// Ends this lease on all its rows, and returns their number. It is for a lost connection,
    /// after which it is not known whether anything was leased (G10).
    async fn give_back_all(&self, consumer: ConsumerId, lease: &RowLease) -> Result<u64, StoreError>;

    /// Makes the message dead, after as many tries as its `attempt` says. With `holds` false the
    /// next message of its key becomes due in the same transaction. False where the lease is not
    /// ours any more.
    async fn bury(&self, leased: &LeasedMessage, reason: &str, error: &str, holds: bool) -> Result<bool, StoreError>;

    /// Makes the heads of these keys due where they have no due time. It is called after a commit
    /// that stored messages behind them or removed messages before them: of two concurrent
    /// transactions the one that commits last sees the rows of both.
    async fn wake(&self, consumer: ConsumerId, lanes: &[[u8; 16]]) -> Result<(), StoreError>;

    /// Makes heads due that a race left without a due time, and messages whose lease ends later
    /// than any lease can. Returns their number.
    async fn sweep(&self, consumer: ConsumerId) -> Result<u64, StoreError>;
}
