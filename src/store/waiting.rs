//! Duty: messages that wait for a retry, ordered per key (R25).
//!
//! A head is claimed, and its try counted, in one transaction before its handler runs; the handler's transaction removes it
//! only while the claim stands. So a process that died or froze loses its claim by database time, its try stays counted, and
//! no effect commits twice.

use std::future::Future;
use std::time::Duration;

use super::{Base, ConsumerId};
use crate::error::StoreError;
use crate::message::Message;

/// A head that this process may run now.
#[derive(Debug, Clone)]
pub struct ClaimedMessage {
    /// Its row.
    pub sequence: i64,
    /// The claim, a random token.
    pub claim: uuid::Uuid,
    /// The message, its `attempt` set to this try.
    pub message: Message,
}

/// A claim on rows: for how long, and under which token. The token is the caller's, so that a claim whose answer was lost can be
/// given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// Unique to this claim.
    pub token: uuid::Uuid,
    /// It ends by itself after this time, by the database's clock.
    pub length: Duration,
}

impl Claim {
    /// With a token of its own.
    #[must_use]
    pub fn new(length: Duration) -> Self {
        Self { token: uuid::Uuid::now_v7(), length }
    }
}

/// Duty: waiting messages.
pub trait Waiting: Base {
    /// Claims due heads of different keys, at most `limit`, and counts a try for each. Where the answer was lost, see
    /// [`Waiting::give_back_all`].
    fn claim_due(
        &self,
        consumer: ConsumerId,
        limit: usize,
        claim: &Claim,
    ) -> impl Future<Output = Result<Vec<ClaimedMessage>, StoreError>> + Send;

    /// How long until the next head is due; none where nothing waits. Zero or negative times come as zero.
    fn next_due(&self, consumer: ConsumerId) -> impl Future<Output = Result<Option<Duration>, StoreError>> + Send;

    /// The try failed: due again after this time. False where the claim is not ours any more.
    fn postpone(
        &self,
        claimed: &ClaimedMessage,
        after: Duration,
        error: &str,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// The claim is given back uncounted and due at once: nobody's failure, or a stop.
    fn give_back(&self, claimed: &ClaimedMessage) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Gives back uncounted whatever stands under this claim, and gives the number of rows: the database went away, and whether
    /// it had claimed anything is not known (G10).
    fn give_back_all(
        &self,
        consumer: ConsumerId,
        claim: &Claim,
    ) -> impl Future<Output = Result<u64, StoreError>> + Send;

    /// The message is dead. With `holds` false the next of its key becomes due in the same transaction.
    fn bury(
        &self,
        claimed: &ClaimedMessage,
        reason: &str,
        error: &str,
        holds: bool,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Makes heads due that a race left without a due time; gives their number.
    fn sweep(&self, consumer: ConsumerId) -> impl Future<Output = Result<u64, StoreError>> + Send;
}
