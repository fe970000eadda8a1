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

/// Duty: waiting messages.
pub trait Waiting: Base {
    /// Claims due heads of different keys, at most `limit`, and counts a try for each. A claim ends by itself after `claim_for`.
    fn claim_due(
        &self,
        consumer: ConsumerId,
        limit: usize,
        claim_for: Duration,
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
