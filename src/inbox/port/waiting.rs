//! Duty: messages that wait for a retry, ordered per key (R25).
//!
//! A head is claimed for about as long as its handler runs. Messages behind it that were never
//! tried may be claimed with it, as one batch. The handler's transaction removes them only while it
//! has the claim: a process that died or froze loses its claim by database time, and no effect
//! commits twice. A claim that ran out stays in its row. So the next process knows that the
//! previous one died or froze: it counts the try of that message before it runs it alone.

use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;

use super::consumer::ConsumerId;
use crate::error::StoreError;
use crate::message::Message;

/// A message that this process may run now.
#[derive(Debug, Clone)]
pub struct ClaimedMessage {
    /// The number of its row in the waiting table; order within a key follows it.
    pub sequence: i64,
    /// The claim, a random token.
    pub claim: uuid::Uuid,
    /// The tries counted before this one.
    pub tries: u32,
    /// An earlier claim ran out, so the process that had it died or froze.
    pub suspect: bool,
    /// The message, its `attempt` set to this try.
    pub message: Message,
}

/// The longest claim. A claim that ends later than this from now was made before the database's
/// clock went back, and is over (R22).
pub const CLAIM_MAX: Duration = Duration::from_secs(600);

/// A claim on rows: for how long, and under which token. The token is the caller's, so that a claim
/// whose answer was lost can be given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// Unique to this claim.
    pub token: uuid::Uuid,
    /// It ends by itself after this time, by the database's clock.
    pub length: Duration,
}

impl Claim {
    /// A claim with a new token, at most [`CLAIM_MAX`] long.
    #[must_use]
    pub fn new(length: Duration) -> Self {
        Self { token: uuid::Uuid::now_v7(), length: length.min(CLAIM_MAX) }
    }
}

/// Which waiting messages a process may run: those of its topics that it has a handler for. During
/// a rollout a new version may store messages of kinds that an old process of the same consumer
/// does not know; they stay for the new one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scope {
    /// Topics that it reads.
    pub topics: Vec<String>,
    /// The topics or queues of the broker that it reads: a queue may hold messages of other routing
    /// keys.
    pub places: Vec<String>,
    /// Kinds that a handler takes; none where one takes every kind.
    pub kinds: Option<Vec<String>>,
}

/// Duty: the messages that wait for a retry, claimed and given back.
#[async_trait]
pub trait Waiting: Debug + Send + Sync {
    /// Claims the head in the scope that is due first; no try is counted. If the answer was lost,
    /// call [`Waiting::give_back_all`].
    async fn claim_due(
        &self,
        consumer: ConsumerId,
        scope: &Scope,
        claim: &Claim,
    ) -> Result<Option<ClaimedMessage>, StoreError>;

    /// Claims the messages directly behind a claimed head, in order, under the same claim, at most
    /// `limit`. It stops before the first message that was tried or claimed before, is dead and
    /// holds, or has a kind outside the scope.
    async fn claim_behind(
        &self,
        consumer: ConsumerId,
        head: &ClaimedMessage,
        scope: &Scope,
        limit: usize,
        claim: &Claim,
    ) -> Result<Vec<ClaimedMessage>, StoreError>;

    /// Counts this try, in a transaction of its own, before the handler runs. A repeated call
    /// counts nothing more. False where the claim is not ours any more.
    async fn count_try(&self, claimed: &ClaimedMessage) -> Result<bool, StoreError>;

    /// How long until the next head in the scope is due; none where nothing waits. Times that have
    /// passed come as zero.
    async fn next_due(&self, consumer: ConsumerId, scope: &Scope) -> Result<Option<Duration>, StoreError>;

    /// Counts a failed try and ends the claim: the message is due again after this time. False
    /// where the claim is not ours any more.
    async fn postpone(&self, claimed: &ClaimedMessage, after: Duration, error: &str) -> Result<bool, StoreError>;

    /// Ends the claim on messages, with the tries that they had before: a head is due at once,
    /// others wait behind it. Returns how many of them were still claimed.
    async fn give_back(&self, consumer: ConsumerId, claimed: &[ClaimedMessage]) -> Result<u64, StoreError>;

    /// Ends this claim on all its rows, and returns their number. It is for a lost connection,
    /// after which it is not known whether anything was claimed (G10).
    async fn give_back_all(&self, consumer: ConsumerId, claim: &Claim) -> Result<u64, StoreError>;

    /// Makes the message dead, after as many tries as its `attempt` says. With `holds` false the
    /// next message of its key becomes due in the same transaction. False where the claim is not
    /// ours any more.
    async fn bury(&self, claimed: &ClaimedMessage, reason: &str, error: &str, holds: bool) -> Result<bool, StoreError>;

    /// Makes the heads of these keys due where they have no due time. It is called after a commit
    /// that stored messages behind them or removed messages before them: of two concurrent
    /// transactions the one that commits last sees the rows of both.
    async fn wake(&self, consumer: ConsumerId, lanes: &[[u8; 16]]) -> Result<(), StoreError>;

    /// Makes heads due that a race left without a due time, and messages whose claim ends later
    /// than any claim can. Returns their number.
    async fn sweep(&self, consumer: ConsumerId) -> Result<u64, StoreError>;
}
