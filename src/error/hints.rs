//! What the consumer asks of a handler's error beside what its author says.

use super::classify::{self, OfDatabase};
use super::{HandlerError, StoreError};

/// What an error says of the next try of its message.
#[derive(Debug, Default)]
pub(super) struct Hints {
    may_be_its_own: bool,
    late: bool,
    of: Option<usize>,
}

impl Hints {
    /// The hints of an error of a database.
    pub(super) fn of(error: OfDatabase<'_>) -> Self {
        let (may_be_its_own, late) = match error {
            OfDatabase::Store(StoreError::Busy(error)) => (false, classify::is_lock_wait(error)),
            OfDatabase::Store(error) => (error.may_be_its_own(), false),
            OfDatabase::Sql(error) => (classify::may_be_caused_by_the_statement(error), classify::is_lock_wait(error)),
            OfDatabase::Said(said) => (classify::may_be_of_a_statement(said), classify::says_lock_wait(said)),
        };
        Self { may_be_its_own, late, of: None }
    }
}

impl StoreError {
    /// Whether the work itself may be the reason, and not the state of the database.
    pub(crate) fn may_be_its_own(&self) -> bool {
        match self {
            Self::Busy(_) | Self::CommitUnknown(_) | Self::Fenced(_) => false,
            Self::SchemaMissing(_) | Self::SchemaOld { .. } | Self::SchemaNewer { .. } => false,
            Self::Unavailable(error) => classify::may_be_caused_by_the_statement(error),
            Self::Refused(_) | Self::Limit(_) | Self::Corrupt(_) | Self::Other(_) => true,
        }
    }
}

impl HandlerError {
    /// The connection was lost while the handler ran. This is a transient failure, unless the
    /// handler's own statement ends the connection every time.
    pub(crate) fn lost_connection(error: impl std::fmt::Display) -> Self {
        let hints = Hints { may_be_its_own: true, ..Hints::default() };
        Self { hints, ..Self::transient(format!("{error}; the connection is lost")) }
    }

    /// The handler exceeded its time limit.
    pub(crate) fn late(error: impl std::fmt::Display) -> Self {
        Self { hints: Hints { late: true, ..Hints::default() }, ..Self::retryable(error) }
    }

    /// Whether the handler exceeded its time limit, or one of its statements gave up waiting for a
    /// lock. The next try may take as long.
    pub(crate) fn is_late(&self) -> bool {
        self.hints.late
    }

    /// The same error, which belongs to the message with this index in the set.
    pub(crate) fn of_message(mut self, index: usize) -> Self {
        self.hints.of = Some(index);
        self
    }

    /// The index of the message in the set to which the error belongs, if the handler told it.
    pub(crate) fn message_index(&self) -> Option<usize> {
        self.hints.of
    }

    /// Whether the handler's own statement may be the reason for a transient failure.
    pub(crate) fn may_be_its_own(&self) -> bool {
        self.hints.may_be_its_own
    }
}
