//! Duty: durable e-mail rows, sent by a sender process.
//!
//! The handler commits the row with its inbox row; the unique key makes it one row per effect. The
//! sender claims a row, sends it under a stable Message-ID, and records the outcome. A row whose
//! sending was interrupted is sent again under the same Message-ID: SMTP cannot promise more.

use std::future::Future;
use std::time::Duration;

use super::{Base, Claim};
use crate::error::StoreError;

/// An e-mail to be sent once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewEmail {
    /// Unique: for example `receipt_payment_pay_789`.
    pub unique_key: String,
    /// Recipient address.
    pub recipient: String,
    /// Subject line.
    pub subject: String,
    /// Plain text body.
    pub body: String,
}

/// A claimed row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmailToSend {
    /// Its row.
    pub email_id: i64,
    /// The claim.
    pub claim: uuid::Uuid,
    /// The unique key; the Message-ID is made from it and stays the same.
    pub unique_key: String,
    /// Recipient address.
    pub recipient: String,
    /// Subject line.
    pub subject: String,
    /// Plain text body.
    pub body: String,
    /// Which try this is.
    pub attempt: u32,
}

/// How a sending ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EmailOutcome {
    /// The server took it.
    Sent,
    /// Not sent for certain, or possibly sent: again after this time.
    Again {
        /// After this time.
        after: Duration,
        /// What the server said.
        error: String,
    },
    /// Refused for good, or given up.
    Failed(String),
    /// Given back at once, its try uncounted: nobody's failure, or a stop.
    NotTried,
}

/// Duty: the e-mail rows.
pub trait Mailbox: Base {
    /// Inserts a row in the caller's transaction; a second one with the same unique key changes
    /// nothing and gives false.
    fn queue_email(
        connection: &mut <Self::Db as sqlx::Database>::Connection,
        email: &NewEmail,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Claims due rows, at most `limit`, counts the try. Where the answer was lost, see
    /// [`Mailbox::give_back_emails`].
    fn claim_emails(
        &self,
        limit: usize,
        claim: &Claim,
    ) -> impl Future<Output = Result<Vec<EmailToSend>, StoreError>> + Send;

    /// Gives back uncounted whatever stands under this claim, and gives the number of rows (G10).
    fn give_back_emails(&self, claim: &Claim) -> impl Future<Output = Result<u64, StoreError>> + Send;

    /// Records how it ended; false where the claim is not ours any more.
    fn settle_email(
        &self,
        email: &EmailToSend,
        outcome: &EmailOutcome,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Rows not yet sent, and not failed.
    fn emails_pending(&self) -> impl Future<Output = Result<u64, StoreError>> + Send;
}
