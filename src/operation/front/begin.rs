//! A claim that a front has decided to make, and its place in the map of runs.
//!
//! Not here: the decision ([`Front`](super::Front)), and the claim itself, which each kind of
//! operation makes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::operation::port::{Basis, KeyClaim};
use crate::operation::rules::Record;
use crate::operation::running::Entry;

/// A claim to be made. While it lives (or a place that was taken from it), duplicates in this
/// process are answered from the map of runs. Dropping it wakes the duplicates that wait.
#[derive(Debug)]
pub(crate) struct Begin {
    /// The claim. Its operation id is a new one, or that of the record that runs again.
    pub claim: KeyClaim,
    pub(super) ground: Ground,
    pub(super) entry: Arc<Entry>,
    /// Whether the claim succeeded before: after a deadlock it is made again, for the same request.
    pub(super) claimed: AtomicBool,
}

/// The state of the record that the claim relies on.
#[derive(Debug, Clone)]
pub(in crate::operation) enum Ground {
    New,
    TakeOver(Box<Record>),
    Reclaim(Box<Record>),
    Anew(Box<Record>),
}

impl Ground {
    pub(in crate::operation) fn basis(&self) -> Basis<'_> {
        match self {
            Self::New => Basis::New,
            Self::TakeOver(record) => Basis::TakeOver(record),
            Self::Reclaim(record) => Basis::Reclaim(record),
            Self::Anew(record) => Basis::Anew(record),
        }
    }
}

impl Begin {
    /// The state of the record that the claim relies on; if it has changed, the store refuses the
    /// claim.
    #[must_use]
    pub(crate) fn basis(&self) -> Basis<'_> {
        self.ground.basis()
    }

    /// Returns true the first time the claim succeeds, so that a rerun after a deadlock counts
    /// once.
    pub(in crate::operation) fn is_first_claim(&self) -> bool {
        !self.claimed.swap(true, Ordering::Relaxed)
    }

    /// The same as an owned value, for work that outlives the request.
    pub(in crate::operation) fn ground(&self) -> Ground {
        self.ground.clone()
    }

    /// How long the run has taken so far.
    #[must_use]
    pub(crate) fn ran(&self) -> Duration {
        self.entry.ran()
    }

    /// Its entry in the map of runs, for work that outlives the request and must end before the key
    /// is used again.
    pub(in crate::operation) fn place(&self) -> Arc<Entry> {
        Arc::clone(&self.entry)
    }

    /// Removes the run from the map; see `Entry::leave`.
    pub(in crate::operation) fn has_ended(&self) {
        self.entry.leave();
    }
}
