//! Finds out whether an error of the database belongs to one message. A statement that needs more
//! than the server allows, that ends its connection, or that meets the same lock each time, fails
//! with the same codes as a server in trouble.
//!
//! Promise: a database that is down counts no attempt (G10). A message that the database cannot
//! take stops its lane only until that is found out: for seconds, because a server in trouble takes
//! small rows before it takes large ones again.

use std::time::Duration;

use tokio::time::Instant;

use super::Shared;
use super::transaction::roll_back;
use crate::error::StoreError;
use crate::inbox::port::{ConsumerId, InboxEntry};
use crate::inbox::rules::split::PAUSE_MAX;
use crate::message::MessageId;
use crate::time::retry::pause;

/// How often a message must fail while the database works for others right after it.
const TIMES: u32 = 3;
/// The longest pause after the first failure. It doubles with each further failure.
const PAUSE_FIRST: Duration = Duration::from_millis(250);
/// How long it must have failed before it is stored without its content. A full disk or a lack of
/// memory may be over by then, and what is not stored would be lost here.
const LOSS_AFTER: Duration = Duration::from_secs(20);
/// The time limit for the work that proves this.
const WORKS_MAX: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// It is not known yet, or the database works for no message at all.
    Transient,
    /// It belongs to this message, but its code says that no attempt counts: somebody holds a lock,
    /// or writes the same rows again and again.
    Lasting,
    /// It belongs to this message, and the attempt counts.
    Its,
}

/// Counts failures in a row of one message that runs alone, each of them while the database worked
/// for others right after it.
#[derive(Debug, Default)]
pub(super) struct Blame {
    times: u32,
    since: Option<Instant>,
}

impl Blame {
    /// Judges an error of the database. `may_be_its_own`: a statement that can never succeed has
    /// this code too.
    pub(super) async fn of(&mut self, shared: &Shared, consumer: ConsumerId, may_be_its_own: bool) -> Fault {
        if works(shared, consumer).await {
            self.times += 1;
            self.since.get_or_insert_with(Instant::now);
        } else {
            *self = Self::default();
        }
        match self.times >= TIMES {
            false => Fault::Transient,
            true if may_be_its_own => Fault::Its,
            true => Fault::Lasting,
        }
    }

    /// The pause before the next try of the message, while the database works for others.
    pub(super) fn pause(&self) -> Duration {
        pause(PAUSE_FIRST, PAUSE_MAX, self.times, fastrand::f64())
    }

    /// Whether it has failed for so long that it may be stored without its content.
    pub(super) fn lasts(&self) -> bool {
        self.since.is_some_and(|since| since.elapsed() >= LOSS_AFTER)
    }

    /// Whether the database worked after the last failure, so that the cause will be known soon.
    pub(super) fn is_open(&self) -> bool {
        self.times > 0
    }
}

/// The text for a failure that lasts while the database works for others.
pub(super) fn lasting(error: &impl std::fmt::Display) -> String {
    format!("{error}; the database works for others, and no try is counted for a failure of this kind")
}

/// Whether the database works for others: commits a transaction that inserts a row into the inbox
/// and deletes it again. A rollback would not show that the disk of a SQLite file is full, because
/// only a commit writes to the file.
async fn works(shared: &Shared, consumer: ConsumerId) -> bool {
    let id = MessageId::new();
    let work = async {
        let mut tx = shared.store.begin(consumer).await?;
        let written = async {
            tx.admit(&[InboxEntry { id, hash: [0; 16] }]).await?;
            tx.forget(&[id]).await
        };
        match written.await {
            Ok(()) => tx.commit().await,
            Err(error) => {
                roll_back(tx).await;
                Err(error)
            }
        }
    };
    let worked: Result<Result<(), StoreError>, _> = tokio::time::timeout(WORKS_MAX, work).await;
    matches!(worked, Ok(Ok(())))
}
