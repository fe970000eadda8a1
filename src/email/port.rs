//! Duty: durable e-mail rows, sent by a sender process.
//!
//! The handler commits the e-mail row together with its inbox row; the unique key allows one row
//! for each effect. The sender leases a row, sends the e-mail under a stable Message-ID, and
//! records the outcome. An e-mail whose sending was interrupted is sent again under the same
//! Message-ID; SMTP has no stronger guarantee.

use std::fmt::Debug;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::StoreError;
use crate::inbox::port::waiting::RowLease;

/// An e-mail row that this sender has leased.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmailToSend {
    /// The number of its row in the database.
    pub email_id: i64,
    /// The token of the lease: the sender can record the outcome only while the row has it.
    pub lease: uuid::Uuid,
    /// The unique key; the Message-ID is made from it and stays the same.
    pub unique_key: String,
    /// The address that the e-mail goes to.
    pub recipient: String,
    /// The subject line of the e-mail.
    pub subject: String,
    /// The body of the e-mail, as plain text.
    pub body: String,
    /// The number of this try, from 1.
    pub attempt: u32,
    /// How many earlier tries may each have arrived.
    pub possibly_sent: u32,
}

/// How a try to send an e-mail ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EmailOutcome {
    /// The server accepted the e-mail.
    Sent,
    /// It was not sent, or possibly sent: it is tried again after this time.
    Again {
        /// How long from now it waits for its next try.
        after: Duration,
        /// What the server said.
        error: String,
        /// How many tries may each have arrived, with this one.
        possibly_sent: u32,
    },
    /// Refused for good, or given up.
    Failed {
        /// What the server said.
        error: String,
        /// How many tries may each have arrived, with this one.
        possibly_sent: u32,
    },
    /// Given back at once, and the try is not counted: no e-mail can be sent now, the lease may end
    /// during the sending, or the process stops.
    NotTried,
}

/// Duty: the e-mail rows.
#[async_trait]
pub trait Mailbox: Debug + Send + Sync {
    /// Leases at most `limit` rows that are due, and counts the try, also as one that may have
    /// arrived, until it is settled. If the answer was lost, call [`Mailbox::give_back_emails`].
    async fn lease_emails(&self, limit: usize, lease: &RowLease) -> Result<Vec<EmailToSend>, StoreError>;

    /// Ends this lease on all its rows without counting the try, and returns their number (G10).
    async fn give_back_emails(&self, lease: &RowLease) -> Result<u64, StoreError>;

    /// Records how a try ended; false where the lease is not ours any more. What was sent has
    /// no error.
    async fn settle_email(&self, email: &EmailToSend, outcome: &EmailOutcome) -> Result<bool, StoreError>;

    /// Blanks recipient, subject, body and error of up to `rows_max` e-mails that were sent at
    /// least this long ago, the oldest first, and returns their number. The rows stay, with their
    /// unique keys. What failed stays whole, because it may have to be sent yet.
    async fn blank_emails(&self, settled_for: Duration, rows_max: usize) -> Result<u64, StoreError>;

    /// Deletes up to `rows_max` blank rows of e-mails that were sent at least this long
    /// ago, and returns their number. Their unique keys can be queued again.
    async fn forget_emails(&self, settled_for: Duration, rows_max: usize) -> Result<u64, StoreError>;

    /// How many rows are neither sent nor failed; 10,000 means that or more.
    async fn emails_pending(&self) -> Result<u64, StoreError>;
}
