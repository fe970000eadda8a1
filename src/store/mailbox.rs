//! Duty: durable e-mail rows, sent by a sender process.
//!
//! The handler commits the row with its inbox row; the unique key makes it one row per effect. The
//! sender claims a row, sends it under a stable Message-ID, and records the outcome. A row whose
//! sending was interrupted is sent again under the same Message-ID: SMTP cannot promise more.

use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;

use super::Claim;
use crate::error::StoreError;

/// An e-mail to be sent once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewEmail {
    /// Unique: for example `receipt_payment_pay_789`.
    pub unique_key: String,
    /// The address that the e-mail goes to.
    pub recipient: String,
    /// The subject line of the e-mail.
    pub subject: String,
    /// The body of the e-mail, as plain text.
    pub body: String,
}

/// An e-mail row that this sender has claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmailToSend {
    /// The number of its row in the database.
    pub email_id: i64,
    /// The token of the claim: only under it the sender records the outcome.
    pub claim: uuid::Uuid,
    /// The unique key; the Message-ID is made from it and stays the same.
    pub unique_key: String,
    /// The address that the e-mail goes to.
    pub recipient: String,
    /// The subject line of the e-mail.
    pub subject: String,
    /// The body of the e-mail, as plain text.
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
        /// How long from now it waits for its next try.
        after: Duration,
        /// What the server said.
        error: String,
    },
    /// Refused for good, or given up.
    Failed(String),
    /// Given back at once, its try uncounted: a transient failure, or a stop.
    NotTried,
}

/// Duty: the e-mail rows.
#[async_trait]
pub trait Mailbox: Debug + Send + Sync {
    /// Claims due rows, at most `limit`, counts the try. Where the answer was lost, see
    /// [`Mailbox::give_back_emails`].
    async fn claim_emails(&self, limit: usize, claim: &Claim) -> Result<Vec<EmailToSend>, StoreError>;

    /// Gives back uncounted whatever stands under this claim, and gives the number of rows (G10).
    async fn give_back_emails(&self, claim: &Claim) -> Result<u64, StoreError>;

    /// Records how it ended; false where the claim is not ours any more.
    async fn settle_email(&self, email: &EmailToSend, outcome: &EmailOutcome) -> Result<bool, StoreError>;

    /// Rows not yet sent, and not failed.
    async fn emails_pending(&self) -> Result<u64, StoreError>;
}
