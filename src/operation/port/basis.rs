//! The state of a record that a claim of its key relies on.
//!
//! Guarantee: if the record is another one by then, the claim is refused (O4).

use crate::operation::rules::{Mode, Record};

/// What a claim requires to succeed: no record, or a record that is exactly as it was read.
#[derive(Debug, Clone, Copy)]
pub enum Basis<'a> {
    /// No record: insert first.
    New,
    /// A claim of mode `bridged` or `edge` whose lease is over by database time, or an UNKNOWN of
    /// mode `edge`. Whether it may be executed again is decided before (O2, O11).
    TakeOver(&'a Record),
    /// As `Self::TakeOver`, but only to find out or to write how the run ended: the claimer
    /// executes nothing, so the attempts stay. A run that ends late knows by them that no other run
    /// began.
    Reconcile(&'a Record),
    /// FAILED_RETRYABLE whose time is not over: attempts are raised. Refused where a run that lost
    /// its lease has left evidence that it succeeded or failed
    /// ([`observe_run`](super::Keys::observe_run)), and no operator has overruled it: what happened
    /// is not executed again.
    Reclaim(&'a Record),
    /// As `Self::Reclaim`, but only to write the outcome of such a late run: the claimer executes
    /// nothing, and the attempts stay.
    Late(&'a Record),
    /// A terminal state whose time is over: the generation is raised, the operation id is a new one
    /// (O4).
    Anew(&'a Record),
}

impl<'a> Basis<'a> {
    /// The record that the claim renews; none for one that inserts.
    pub(crate) fn seen(self) -> Option<&'a Record> {
        match self {
            Self::New => None,
            Self::TakeOver(seen)
            | Self::Reconcile(seen)
            | Self::Reclaim(seen)
            | Self::Late(seen)
            | Self::Anew(seen) => Some(seen),
        }
    }

    /// Whether the claim repeats a run of mode `edge` whose outcome is unknown. That run may have
    /// had an effect under its operation id, so its record must not be deleted.
    pub(crate) fn repeats(self) -> bool {
        matches!(self, Self::TakeOver(record) if record.mode == Mode::Edge)
    }
}
