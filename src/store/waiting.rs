//! Duty: messages that wait for a retry, ordered per key (R25).
//!
//! A head is claimed for about as long as its handler runs; what was never tried of its key may be
//! claimed with it, as one batch. The handler's transaction removes them only while the claim
//! stands: a process that died or froze loses its claim by database time, and no effect commits
//! twice. A claim that ran out stays in its row, so whoever comes next knows that the one before
//! did not live to say how it ended: it counts the try of that message before it runs it, alone.

use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;

use super::ConsumerId;
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
    /// Who had claimed it before let the claim run out: it died, or froze.
    pub suspect: bool,
    /// The message, its `attempt` set to this try.
    pub message: Message,
}

/// No claim is longer. One that ends later than this from now was made before the database's clock
/// went back, and is over (R22).
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
    /// With a token of its own, at most [`CLAIM_MAX`] long.
    #[must_use]
    pub fn new(length: Duration) -> Self {
        Self { token: uuid::Uuid::now_v7(), length: length.min(CLAIM_MAX) }
    }
}

/// Which waiting messages a process may run: those that it reads, and has a handler for. What
/// another process of the same consumer stored stays for that one: a new version knows kinds that
/// the old one beside it does not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scope {
    /// Topics that it reads.
    pub topics: Vec<String>,
    /// The topics or queues where they stand in the broker: a queue may hold messages of other
    /// routing keys.
    pub places: Vec<String>,
    /// Kinds that a handler takes; none where one takes every kind.
    pub kinds: Option<Vec<String>>,
}

/// Duty: the messages that wait for a retry, claimed and given back.
#[async_trait]
pub trait Waiting: Debug + Send + Sync {
    /// Claims the head in the scope that is due first; no try is counted. Where the answer was
    /// lost, see [`Waiting::give_back_all`].
    async fn claim_due(
        &self,
        consumer: ConsumerId,
        scope: &Scope,
        claim: &Claim,
    ) -> Result<Option<ClaimedMessage>, StoreError>;

    /// Claims what stands right behind a claimed head, in order, under the same claim: at most
    /// `limit`, up to the first that was tried or claimed before, is dead and holds, or is of a
    /// kind out of the scope.
    async fn claim_behind(
        &self,
        consumer: ConsumerId,
        head: &ClaimedMessage,
        scope: &Scope,
        limit: usize,
        claim: &Claim,
    ) -> Result<Vec<ClaimedMessage>, StoreError>;

    /// Counts this try, in a transaction of its own, before the handler runs; asked again it counts
    /// no more. False where the claim is not ours any more.
    async fn count_try(&self, claimed: &ClaimedMessage) -> Result<bool, StoreError>;

    /// How long until the next head in the scope is due; none where nothing waits. Times that have
    /// passed come as zero.
    async fn next_due(&self, consumer: ConsumerId, scope: &Scope) -> Result<Option<Duration>, StoreError>;

    /// The try failed, and is counted: due again after this time. False where the claim is not ours
    /// any more.
    async fn postpone(&self, claimed: &ClaimedMessage, after: Duration, error: &str) -> Result<bool, StoreError>;

    /// Messages of one claim are given back with the tries that they had: a head is due at once,
    /// others wait behind theirs. Gives the number of those that were still claimed.
    async fn give_back(&self, consumer: ConsumerId, claimed: &[ClaimedMessage]) -> Result<u64, StoreError>;

    /// Gives back whatever stands under this claim, and gives the number of rows: the database went
    /// away, and whether it had claimed anything is not known (G10).
    async fn give_back_all(&self, consumer: ConsumerId, claim: &Claim) -> Result<u64, StoreError>;

    /// The message is dead, after as many tries as its `attempt` says. With `holds` false the next
    /// of its key becomes due in the same transaction.
    async fn bury(&self, claimed: &ClaimedMessage, reason: &str, error: &str, holds: bool) -> Result<bool, StoreError>;

    /// Makes the heads of these keys due where they have no due time: asked after a commit that
    /// stored something behind them, or removed something before them, by whoever committed last.
    async fn wake(&self, consumer: ConsumerId, lanes: &[[u8; 16]]) -> Result<(), StoreError>;

    /// Makes heads due that a race left without a due time, and whose claim ends too late to be
    /// true; gives their number.
    async fn sweep(&self, consumer: ConsumerId) -> Result<u64, StoreError>;
}
