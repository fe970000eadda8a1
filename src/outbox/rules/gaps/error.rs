//! Pure: no I/O, no clock.
//! The errors after which a cursor must not be used any more.
//!
//! Guarantee: the caller does the same after each of them. The session ends, its memory is dropped,
//! and a new session starts from what is persisted.
//!
//! Not here: a lost lease or a changed revision ([`lease`](crate::time::lease)), and failures of
//! the database itself.

use std::fmt;

/// The database answered something that the server on which this session began cannot answer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub(crate) enum CursorError {
    /// [`on_read`](super::GapCursor::on_read) was called without a
    /// [`begin_read`](super::GapCursor::begin_read) before it.
    ReadNotBegun,
    /// The positions did not ascend: the database did not execute the read with the expected plan.
    NotAscending {
        /// The position that came first.
        before: i64,
        /// The one that followed it.
        after: i64,
    },
    /// The read returned a row that it did not ask for: neither at an open gap nor in the tail.
    Unexpected {
        /// The position of the row that was not expected.
        position: i64,
    },
    /// The oldest running transaction is older than an earlier one: another server answers.
    XminWentBack {
        /// What an earlier read saw.
        seen: u64,
        /// What this one says.
        now: u64,
    },
    /// The transaction id of a checkpoint is not above the earlier ones: another server answers.
    FenceWentBack {
        /// The fence before this checkpoint, as the id of a transaction.
        last: u64,
        /// The id of the checkpoint's transaction, which is not above `last`.
        now: u64,
    },
}

impl fmt::Display for CursorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ReadNotBegun => write!(f, "a read was reported that had not begun"),
            Self::NotAscending { before, after } => {
                write!(f, "positions do not ascend: {after} came after {before}")
            }
            Self::Unexpected { position } => {
                write!(f, "position {position} is neither an open gap nor beyond what was read")
            }
            Self::XminWentBack { seen, now } => {
                write!(f, "the oldest running transaction went back from {seen} to {now}")
            }
            Self::FenceWentBack { last, now } => {
                write!(f, "the transaction id of a checkpoint went back from {last} to {now}")
            }
        }
    }
}

impl std::error::Error for CursorError {}
