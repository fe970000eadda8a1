//! A claim that a front has decided to make, and its place in the map of runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::observe::Noted;
use crate::operation::port::{Basis, KeyClaim};
use crate::operation::rules::Record;
use crate::operation::rules::decide::TakeOver;
use crate::operation::running::Entry;

/// A claim to be made. While it or a clone of its `entry` lives, duplicates in this process are
/// answered from the map of runs. Dropping it wakes the duplicates that wait.
#[derive(Debug)]
pub(crate) struct Begin {
    /// The claim. Its operation id is a new one, or that of the record that runs again.
    pub claim: KeyClaim,
    pub(in crate::operation) ground: Ground,
    /// Its place in the map of runs. Work that outlives the request and must end before the key is
    /// used again holds it too.
    pub(in crate::operation) entry: Arc<Entry>,
    /// Whether the claim succeeded before: after a deadlock it is made again, for the same request.
    pub(super) claimed: AtomicBool,
}

/// A [`Basis`] that owns its record, for work that outlives the request.
#[derive(Debug, Clone)]
pub(in crate::operation) enum Ground {
    New,
    TakeOver(TakeOver, Box<Record>),
    Reclaim(Box<Record>),
    Anew(Box<Record>),
}

impl Ground {
    pub(in crate::operation) fn basis(&self) -> Basis<'_> {
        match self {
            Self::New => Basis::New,
            Self::TakeOver(_, record) => Basis::TakeOver(record),
            Self::Reclaim(record) => Basis::Reclaim(record),
            Self::Anew(record) => Basis::Anew(record),
        }
    }
}

impl Begin {
    /// The state of the record that the claim relies on; if it has changed, the store refuses the
    /// claim.
    pub(crate) fn basis(&self) -> Basis<'_> {
        self.ground.basis()
    }

    /// What is counted when the claim succeeds. Nothing the second time, so that a rerun after a
    /// deadlock counts once.
    pub(in crate::operation) fn noted(&self) -> impl Iterator<Item = Noted> {
        let instead = match &self.ground {
            Ground::New => None,
            Ground::TakeOver(TakeOver::Bridged, _) => Some(Noted::TakenOver("bridged")),
            Ground::TakeOver(TakeOver::Repeatable, _) => Some(Noted::TakenOver("repeatable")),
            Ground::Reclaim(_) => Some(Noted::TakenOver("reclaim")),
            Ground::Anew(_) => Some(Noted::Expired("executed")),
        };
        let is_first = !self.claimed.swap(true, Ordering::Relaxed);
        [Some(Noted::Acquired), instead].into_iter().flatten().filter(move |_| is_first)
    }
}
