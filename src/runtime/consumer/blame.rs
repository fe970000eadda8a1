//! Whose failure it is that looks like the database's: a statement that needs more than the server
//! gives it, that ends its connection, or that runs into the same lock every time, fails with the
//! same codes as a server in distress.
//!
//! Promise: a database that is down burns no attempt (G10), and a message that the database cannot
//! take stops its lane no longer than it takes to find that out.

use std::time::Duration;

use super::Shared;
use super::batch::roll_back;
use crate::error::StoreError;
use crate::message::MessageId;
use crate::store::{ConsumerId, InboxEntry};

/// So often a message fails, and the database works for others right after it.
const TIMES: u32 = 3;
/// How long that work may take.
const WORKS_MAX: Duration = Duration::from_secs(5);

/// Whose failure it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// Not known yet, or that of a database that works for nobody.
    Transient,
    /// It belongs to this message, and its code says that no try is to be counted for it: somebody
    /// holds a lock, or writes the same rows again and again.
    Lasting,
    /// The failure is the message's own: its try counts.
    Its,
}

/// Failures in a row of one message that runs alone.
#[derive(Debug, Default)]
pub(super) struct Blame(u32);

impl Blame {
    /// After a failure of the message that looks like the database's; `may_be_its_own` where its
    /// code is also that of a statement that can never succeed.
    pub(super) async fn of(&mut self, shared: &Shared, consumer: ConsumerId, may_be_its_own: bool) -> Fault {
        self.0 = if works(shared, consumer).await { self.0 + 1 } else { 0 };
        match self.0 >= TIMES {
            false => Fault::Transient,
            true if may_be_its_own => Fault::Its,
            true => Fault::Lasting,
        }
    }

    /// The database worked after the last failure: soon it is known whose it is.
    pub(super) fn is_open(&self) -> bool {
        self.0 > 0
    }
}

/// What is said of a failure that lasts while the database works for others.
pub(super) fn lasting(error: &impl std::fmt::Display) -> String {
    format!("{error}; the database works for others, and no try is counted for a failure of this kind")
}

/// Whether the database does for others what it is there for: a row goes into the inbox, and is
/// taken back.
async fn works(shared: &Shared, consumer: ConsumerId) -> bool {
    let work = async {
        let mut tx = shared.store.begin(consumer).await?;
        let inserted = tx.admit(&[InboxEntry { id: MessageId::new(), hash: [0; 16] }]).await;
        roll_back(tx).await;
        inserted.map(drop)
    };
    let worked: Result<Result<(), StoreError>, _> = tokio::time::timeout(WORKS_MAX, work).await;
    matches!(worked, Ok(Ok(())))
}
