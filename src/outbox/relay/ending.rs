//! How a session of the relay ends, and why.

use std::collections::{BTreeSet, HashMap, HashSet};

use tokio::time::Instant;

use crate::error::StoreError;

#[derive(Debug)]
pub(super) enum End {
    Stopped,
    Empty,
    Doubt(Doubt),
}

/// Why a session cannot be trusted any more.
#[derive(Debug)]
pub(super) enum Doubt {
    /// The database failed or refused.
    Store(StoreError),
    /// The broker refused rows, and nothing more is known.
    Refused(Vec<Refused>),
    /// Rows of these topics, each with its reason, have been neither taken nor refused for too
    /// long. `overtaken`: rows sent later were settled, so these topics are at fault; otherwise the
    /// whole broker may be silent.
    Silent { topics: HashMap<String, String>, overtaken: bool, why: String },
    /// A row was refused while a later one of its key is in flight.
    Held(String),
    /// The session was lost. `row`: the position of the first unsettled row.
    Lost { row: Option<i64>, why: String },
}

#[derive(Debug)]
pub(super) struct Refused {
    pub(super) position: i64,
    pub(super) topic: String,
    pub(super) key: Option<String>,
    pub(super) of: Of,
    pub(super) why: String,
}

impl Refused {
    pub(super) fn key(&self) -> (String, Option<String>) {
        (self.topic.clone(), self.key.clone())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Of {
    /// The destination. The row is diverted; rows of its key in the client may be refused too.
    Destination,
    /// The message. The row is diverted; rows of its key that the client holds would be sent.
    Message,
    /// Not known, as after a nack: the session ends.
    Session,
}

/// A session that is ending: nothing more is sent, but rows in flight may still be settled.
#[derive(Debug)]
pub(super) struct Ending {
    pub(super) until: Instant,
    /// The refused rows that the session ends for. If all of them are diverted and no row of their
    /// keys is in flight any more, the session goes on.
    pub(super) refused: Vec<Refused>,
}

impl Ending {
    pub(super) fn keys(&self) -> HashSet<(String, Option<String>)> {
        self.refused.iter().map(Refused::key).collect()
    }

    /// Takes the refused rows and returns the doubt that the session ends with.
    pub(super) fn doubt(&mut self) -> Doubt {
        let (aside, refused): (Vec<_>, Vec<_>) = self.refused.drain(..).partition(|refused| refused.of != Of::Session);
        if !refused.is_empty() {
            return Doubt::Refused(refused);
        }
        let topics: BTreeSet<_> = aside.iter().map(|refused| format!("`{}`", refused.topic)).collect();
        let topics = topics.into_iter().collect::<Vec<_>>().join(", ");
        Doubt::Held(format!("{topics}: later messages of a key that was refused are in flight"))
    }
}

impl From<StoreError> for Doubt {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
