//! How the record of a key may change its state (M31): the table has all changes. A test reads it
//! and compares it with [`allowed`]; the cases compare what statements do with [`allowed`].
//!
//! | from \ to | (none) | IN_PROGRESS | COMPLETED | FAILED_REPLAYABLE | FAILED_RETRYABLE | UNKNOWN_REQUIRES_RECOVERY | EXPIRED |
//! |---|---|---|---|---|---|---|---|
//! | (none) | - | claim | - | - | - | lose | - |
//! | IN_PROGRESS | release | heartbeat, take-over | finish, recover | finish, recover | finish, recover | finish, lose | - |
//! | COMPLETED | forget | - | - | - | - | - | time |
//! | FAILED_REPLAYABLE | forget | - | - | - | - | - | time |
//! | FAILED_RETRYABLE | forget | reclaim | - | - | - | - | time |
//! | UNKNOWN_REQUIRES_RECOVERY | - | take-over | recover, resolve | recover, resolve | recover, resolve | - | - |
//! | EXPIRED | forget, purge | execute-as-new | - | - | - | - | - |
//!
//! Guarantees: an outcome is never rewritten; no record leaves IN_PROGRESS or UNKNOWN because of
//! time or age; only an expired record is purged. Each change but `time` is one statement. On an
//! existing record the statement compares the epoch, and every change of owner raises the epoch.
//!
//! Not here: which request may cause which change (`operation/rules/decide` of the library).

use oncebox::operation::State;

/// What changes a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Event {
    /// A request inserts the record and owns it.
    Claim,
    /// Its owner extends the lease.
    Heartbeat,
    /// Its owner writes how the run ended.
    Finish,
    /// Its owner deletes the record, because nothing happened and nothing must be remembered.
    Release,
    /// Another request becomes the owner and executes, only where that is proven or declared
    /// harmless (O2, O11).
    TakeOver,
    /// The outcome became unknown: a stale edge claim, a committed claim of a transactional
    /// operation, a transaction that a handler ended.
    Lose,
    /// Recovery or a route's `reconcile` found out how it ended, from evidence.
    Recover,
    /// An operator said how it ended.
    Resolve,
    /// A request runs an operation again that failed without an effect outstanding.
    Reclaim,
    /// The record's lifetime ends. Nothing is written.
    Time,
    /// A request uses the key again after expiry: epoch and generation are raised, and a new
    /// operation id is made (O4).
    ExecuteAsNew,
    /// The lifetime of the metadata is over too, and the record is deleted.
    Purge,
    /// An operator deletes a record with a known outcome (`keys release`, `keys purge`).
    Forget,
}

impl Event {
    /// Every event, in the order of declaration.
    pub(super) const ALL: [Self; 13] = [
        Self::Claim,
        Self::Heartbeat,
        Self::Finish,
        Self::Release,
        Self::TakeOver,
        Self::Lose,
        Self::Recover,
        Self::Resolve,
        Self::Reclaim,
        Self::Time,
        Self::ExecuteAsNew,
        Self::Purge,
        Self::Forget,
    ];
}

/// Whether a record may change from one state to another by this event. `None` means "no record".
pub(super) fn allowed(from: Option<State>, event: Event, to: Option<State>) -> bool {
    use State::{Completed, Expired, FailedReplayable, FailedRetryable, InProgress, UnknownRequiresRecovery};
    let outcome = matches!(to, Some(Completed | FailedReplayable | FailedRetryable));
    let unknown = to == Some(UnknownRequiresRecovery);
    let owned = to == Some(InProgress);
    match (from, event) {
        (None, Event::Claim) => owned,
        (None, Event::Lose) => unknown,
        (Some(InProgress), Event::Heartbeat | Event::TakeOver) => owned,
        (Some(InProgress), Event::Finish) => outcome || unknown,
        (Some(InProgress), Event::Release) => to.is_none(),
        (Some(InProgress), Event::Lose) => unknown,
        (Some(InProgress), Event::Recover) => outcome,
        (Some(UnknownRequiresRecovery), Event::Recover | Event::Resolve) => outcome,
        (Some(UnknownRequiresRecovery), Event::TakeOver) => owned,
        (Some(FailedRetryable), Event::Reclaim) => owned,
        (Some(Completed | FailedReplayable | FailedRetryable), Event::Time) => to == Some(Expired),
        (Some(Expired), Event::ExecuteAsNew) => owned,
        (Some(Expired), Event::Purge) => to.is_none(),
        (Some(Completed | FailedReplayable | FailedRetryable | Expired), Event::Forget) => to.is_none(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [Option<State>; 7] = [
        None,
        Some(State::InProgress),
        Some(State::Completed),
        Some(State::FailedReplayable),
        Some(State::FailedRetryable),
        Some(State::UnknownRequiresRecovery),
        Some(State::Expired),
    ];

    fn name(event: Event) -> String {
        let camel = format!("{event:?}");
        let dashed =
            camel.char_indices().map(|(at, c)| if at > 0 && c.is_uppercase() { format!("-{c}") } else { c.into() });
        dashed.collect::<String>().to_lowercase()
    }

    // The cells of the table above, row by row. Shown by: allowing COMPLETED to be finished again;
    // a purge of UNKNOWN; taking a word out of the table.
    #[test]
    fn m31_the_machine_is_the_one_that_is_drawn_for_every_pair_and_event() {
        let rows: Vec<Vec<&str>> = include_str!("machine.rs")
            .lines()
            .filter_map(|line| line.strip_prefix("//! | "))
            .map(|line| line.trim_end_matches(" |").split(" | ").collect())
            .collect();
        let names = STATES.map(|state| state.map_or("(none)", State::as_str));
        assert_eq!(rows[0][1..], names, "the columns");
        assert_eq!(rows.len(), 8);
        for (row, from) in rows[1..].iter().zip(STATES) {
            assert_eq!((row[0], row.len()), (from.map_or("(none)", State::as_str), 8));
            for (cell, to) in row[1..].iter().zip(STATES) {
                let mut drawn: Vec<&str> = cell.split(", ").filter(|word| *word != "-").collect();
                let mut allowed: Vec<String> =
                    Event::ALL.into_iter().filter(|&event| allowed(from, event, to)).map(name).collect();
                drawn.sort_unstable();
                allowed.sort_unstable();
                assert_eq!(drawn, allowed, "from {from:?} to {to:?}");
            }
        }
    }

    #[test]
    fn m100_nothing_leaves_in_progress_or_unknown_because_of_time() {
        for from in [State::InProgress, State::UnknownRequiresRecovery] {
            for to in STATES {
                for event in [Event::Time, Event::Purge, Event::Forget, Event::ExecuteAsNew] {
                    assert!(!allowed(Some(from), event, to), "{from} {event:?} {to:?}");
                }
            }
        }
    }
}
