//! How a session of the relay ends, and over what.

use std::collections::{BTreeSet, HashSet};

use tokio::time::Instant;

use crate::error::StoreError;

/// How a session ended.
#[derive(Debug)]
pub(super) enum End {
    Stopped,
    Empty,
    Doubt(Doubt),
}

/// Why a session cannot be trusted any more.
#[derive(Debug)]
pub(super) enum Doubt {
    /// The database is the reason.
    Store(StoreError),
    /// The broker refused rows.
    Refused(Vec<Refused>),
    /// Topics have neither taken nor refused for too long. `overtaken`: what was sent later was
    /// settled meanwhile, so it is theirs; otherwise the broker as a whole may be silent.
    Silent { topics: Vec<String>, overtaken: bool, why: String },
    /// A row was refused, and a later one of its key is on its way still.
    Held(String),
    /// The session ended. `row`: the first that was sent and not settled.
    Lost { row: Option<i64>, why: String },
}

/// A row that the broker refused.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) position: i64,
    pub(super) topic: String,
    pub(super) key: Option<String>,
    pub(super) of: Of,
    pub(super) why: String,
}

/// What a refusal speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Of {
    /// The row stands aside in the table; what the client holds of its key may be refused too.
    Destination,
    /// The row stands aside in the table; what the client holds of its key it sends.
    Message,
    /// Nothing is known, as after a nack: the session ends over it.
    Session,
}

/// A session that ends: nothing more is sent, and what is in flight may still be proven or refused.
#[derive(Debug)]
pub(super) struct Ending {
    pub(super) until: Instant,
    /// Where all of them stand aside and nothing of their keys is in flight any more, the session
    /// goes on.
    pub(super) refused: Vec<Refused>,
}

impl Ending {
    /// Topics and keys of the refused.
    pub(super) fn keys(&self) -> HashSet<(String, Option<String>)> {
        self.refused.iter().map(|refused| (refused.topic.clone(), refused.key.clone())).collect()
    }

    /// What the session ends over.
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
