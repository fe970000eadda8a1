//! Why a cursor cannot be trusted any more.
//!
//! Guarantee: the caller's answer to each of them is the same. The session ends, memory is
//! forgotten, and a new one starts from what is persisted (R2.8).
//!
//! Not here: a lost lease or a moved revision ([`lease`](crate::policy::lease)), and failures of
//! the database itself.

use std::fmt;

/// What the database answered cannot come from the server that this session began on.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CursorError {
    /// [`on_read`](super::GapCursor::on_read) came without a
    /// [`begin_read`](super::GapCursor::begin_read).
    ReadNotBegun,
    /// Positions did not ascend: the plan of the read is not the one it must be.
    NotAscending {
        /// The position that came first.
        before: i64,
        /// The one that followed it.
        after: i64,
    },
    /// A row stands where none was asked for: neither at an open gap nor in the tail.
    Unexpected {
        /// The position of the row that was not expected.
        position: i64,
    },
    /// The oldest running transaction is older than one seen before: another server answers.
    XminWentBack {
        /// What an earlier read saw.
        seen: u64,
        /// What this one says.
        now: u64,
    },
    /// A claim got an id that is not above the ones before: another server answers.
    FenceWentBack {
        /// The fence before this claim, as the id of a transaction.
        last: u64,
        /// The id of the claim's transaction, which is not above `last`.
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
                write!(f, "the transaction id of a claim went back from {last} to {now}")
            }
        }
    }
}

impl std::error::Error for CursorError {}
