//! Pure: no I/O, no clock.
//! The errors after which a cursor must not be used any more.
//!
//! Guarantee: the caller does the same after each of them. The session ends, its memory is dropped,
//! and a new session starts from what is persisted.
//!
//! Not here: a lost lease or a changed revision ([`lease`](crate::time::lease)), and failures of
//! the database itself.

/// The database answered something that the server on which this session began cannot answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CursorError {
    /// [`on_read`](super::GapCursor::on_read) was called without a
    /// [`begin_read`](super::GapCursor::begin_read) before it.
    #[error("a read was reported that had not begun")]
    ReadNotBegun,
    /// The positions did not ascend: the database did not execute the read with the expected plan.
    #[error("positions do not ascend: {after} came after {before}")]
    NotAscending { before: i64, after: i64 },
    /// The read returned a row that it did not ask for: neither at an open gap nor in the tail.
    #[error("position {position} is neither an open gap nor beyond what was read")]
    Unexpected { position: i64 },
    /// The oldest running transaction is older than an earlier one: another server answers.
    #[error("the oldest running transaction went back from {seen} to {now}")]
    XminWentBack { seen: u64, now: u64 },
    /// The transaction id of a checkpoint is not above the earlier ones: another server answers.
    #[error("the transaction id of a checkpoint went back from {last} to {now}")]
    FenceWentBack { last: u64, now: u64 },
}
