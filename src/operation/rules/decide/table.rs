//! Pure: no I/O, no clock.
//! The decision table. The first row whose conditions all hold gives the decision.
//!
//! Promise: a case that no row covers executes nothing. Tests show that there is no such case, and
//! that every row is used. Not here: how facts are read from a record ([`decide`](super)).

use super::super::fingerprint::Comparison;
use super::super::identity::PrincipalMatch;
use super::super::record::{Mode, State};
use super::super::route::{AfterExpiry, Effects, Replay, Requirement, WhileRunning};
use super::NoKey;
use super::decision::{Decision, Lost, TakeOver};
use crate::inbox::rules::horizon::Verdict;

/// What is known of the key: the column for [`KeyFound`](super::KeyFound).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    NotAsked,
    Running,
    Unreachable,
    Busy,
    Nothing,
    WrongRecord,
    Record,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body {
    Kept,
    Reference,
    Gone,
}

/// Declares the columns: for each a field in `Facts`, and a condition that a row may set.
macro_rules! columns {
    ($($column:ident: $kind:ty,)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) struct Facts {
            $(pub(super) $column: $kind,)*
        }

        /// The condition of a row: each column has one of its values; `None` accepts any.
        #[derive(Debug, Clone, Copy)]
        pub(super) struct When {
            $(pub(super) $column: Option<&'static [$kind]>,)*
        }

        const ANY: When = When { $($column: None,)* };

        impl When {
            $(const fn $column(mut self, among: &'static [$kind]) -> Self {
                self.$column = Some(among);
                self
            })*

            pub(super) fn holds(&self, facts: &Facts) -> bool {
                $(self.$column.is_none_or(|among| among.contains(&facts.$column)))&&*
            }
        }
    };
}

columns! {
    requirement: Requirement,
    no_key: Option<NoKey>,
    seen: Seen,
    age: Option<Verdict>,
    over_quota: bool,
    principal: PrincipalMatch,
    fingerprint: Comparison,
    state: State,
    mode: Mode,
    owned: bool,
    parked: bool,
    body: Body,
    while_running: WhileRunning,
    after_expiry: AfterExpiry,
    replay: Replay,
    effects: Effects,
    reconciles: bool,
}

impl Facts {
    /// The most conservative facts: with them nothing may run.
    pub(super) const CAREFUL: Self = Self {
        requirement: Requirement::Required,
        no_key: Some(NoKey::Missing),
        seen: Seen::Unreachable,
        age: None,
        over_quota: true,
        principal: PrincipalMatch::Other,
        fingerprint: Comparison::Different,
        state: State::UnknownRequiresRecovery,
        mode: Mode::Transactional,
        owned: true,
        parked: true,
        body: Body::Gone,
        while_running: WhileRunning::Conflict,
        after_expiry: AfterExpiry::Reject,
        replay: Replay::Exact,
        effects: Effects::External,
        reconciles: false,
    };
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    pub(super) when: When,
    pub(super) then: Decision,
}

const fn row(when: When, then: Decision) -> Row {
    Row { when, then }
}

pub(super) fn judge(table: &[Row], facts: &Facts) -> Decision {
    table.iter().find(|row| row.when.holds(facts)).map_or(Decision::StoreUnavailable, |row| row.then)
}

const KNOWN: When = ANY.seen(&[Seen::Record, Seen::Running]);
/// From the rows that use this on, principal and command are known to be the same.
const STANDS: When = ANY.seen(&[Seen::Record]);
const RUNS: When = STANDS.state(&[State::InProgress]);
const OWNED: When = RUNS.owned(&[true]);
const UNKNOWN: When = STANDS.state(&[State::UnknownRequiresRecovery]);
const SUCCEEDED: When = STANDS.state(&[State::Completed]);

const CONFLICT: Decision = Decision::InProgress(WhileRunning::Conflict);
const ACCEPTED: Decision = Decision::InProgress(WhileRunning::Accepted);
const WAIT: Decision = Decision::InProgress(WhileRunning::Wait);
const REPEAT: Decision = Decision::TakeOver(TakeOver::Repeatable);

pub(super) const TABLE: &[Row] = &[
    // Before the store is asked.
    row(ANY.requirement(&[Requirement::Off]), Decision::PassThrough),
    row(ANY.no_key(&[Some(NoKey::Malformed)]), Decision::KeyInvalid),
    row(ANY.no_key(&[Some(NoKey::Missing)]).requirement(&[Requirement::Optional]), Decision::PassThrough),
    row(ANY.no_key(&[Some(NoKey::Missing)]), Decision::KeyRequired),
    row(ANY.no_key(&[Some(NoKey::Unscoped)]), Decision::ScopeRequired),
    row(ANY.no_key(&[Some(NoKey::Elsewhere)]), Decision::WrongRegion),
    row(ANY.seen(&[Seen::NotAsked]), Decision::Look),
    // The store cannot be used: nothing runs (M60).
    row(ANY.seen(&[Seen::Unreachable]), Decision::StoreUnavailable),
    row(ANY.seen(&[Seen::WrongRecord]), Decision::WrongRecord),
    // In this order (O3): principal, fingerprint version, fingerprint.
    row(KNOWN.principal(&[PrincipalMatch::Other]), Decision::PrincipalMismatch),
    row(KNOWN.principal(&[PrincipalMatch::Unreadable]), Decision::FingerprintUnreadable),
    row(KNOWN.fingerprint(&[Comparison::Unreadable]), Decision::FingerprintUnreadable),
    row(KNOWN.fingerprint(&[Comparison::TooOld]), Decision::FingerprintTooOld),
    row(KNOWN.fingerprint(&[Comparison::Different]), Decision::Mismatch),
    // The key runs in this process, or another has a claim that is not committed (O15, O19). No
    // operation is committed yet whose location could be answered.
    row(ANY.seen(&[Seen::Running, Seen::Busy]).while_running(&[WhileRunning::Wait]), WAIT),
    row(ANY.seen(&[Seen::Running, Seen::Busy]), CONFLICT),
    // There is no record: the verdict on the time in the key decides, if it has one (O23).
    row(
        ANY.seen(&[Seen::Nothing]).after_expiry(&[AfterExpiry::Reject]).age(&[Some(Verdict::TooOld)]),
        Decision::Expired,
    ),
    row(
        ANY.seen(&[Seen::Nothing]).after_expiry(&[AfterExpiry::Reject]).age(&[Some(Verdict::FromTheFuture)]),
        Decision::KeyFromTheFuture,
    ),
    row(ANY.seen(&[Seen::Nothing]).after_expiry(&[AfterExpiry::Reject]).age(&[None]), Decision::KeyInvalid),
    row(ANY.seen(&[Seen::Nothing]).over_quota(&[true]), Decision::QuotaExceeded),
    row(ANY.seen(&[Seen::Nothing]), Decision::Claim),
    // In progress. The committed claim of a transactional operation comes first, because its lease
    // does not matter (O1, O2).
    row(RUNS.mode(&[Mode::Transactional]), Decision::MarkUnknown(Lost::CommittedClaim)),
    row(OWNED.while_running(&[WhileRunning::Conflict]), CONFLICT),
    row(OWNED.while_running(&[WhileRunning::Accepted]), ACCEPTED),
    row(OWNED.while_running(&[WhileRunning::Wait]), WAIT),
    row(RUNS.mode(&[Mode::Bridged]), Decision::TakeOver(TakeOver::Bridged)),
    row(RUNS.mode(&[Mode::Phased]).parked(&[true]), Decision::UnknownOutcome),
    row(RUNS.mode(&[Mode::Phased]), Decision::Recover),
    row(RUNS.mode(&[Mode::Edge]).effects(&[Effects::Repeatable]).reconciles(&[false]), REPEAT),
    row(RUNS.mode(&[Mode::Edge]), Decision::MarkUnknown(Lost::StaleEdge)),
    // The outcome is unknown (O9, O11).
    row(UNKNOWN.mode(&[Mode::Phased]).parked(&[true]), Decision::UnknownOutcome),
    row(UNKNOWN.mode(&[Mode::Phased]).owned(&[true]), Decision::RecoveryPending),
    row(UNKNOWN.mode(&[Mode::Phased]), Decision::Recover),
    row(UNKNOWN.mode(&[Mode::Edge]).reconciles(&[true]), Decision::Reconcile),
    row(UNKNOWN.mode(&[Mode::Edge]).effects(&[Effects::Repeatable]), REPEAT),
    row(UNKNOWN, Decision::UnknownOutcome),
    // The record has expired (O3, O4).
    row(STANDS.state(&[State::Expired]).after_expiry(&[AfterExpiry::Reject]), Decision::Expired),
    row(STANDS.state(&[State::Expired]).over_quota(&[true]), Decision::QuotaExceeded),
    row(STANDS.state(&[State::Expired]), Decision::ExecuteAsNew),
    // The outcome is known.
    row(STANDS.state(&[State::FailedRetryable]).over_quota(&[true]), Decision::QuotaExceeded),
    row(STANDS.state(&[State::FailedRetryable]), Decision::Reclaim),
    row(STANDS.state(&[State::Completed, State::FailedReplayable]).body(&[Body::Kept]), Decision::Replay),
    row(SUCCEEDED.replay(&[Replay::Reconstruct]), Decision::Reconstruct),
    row(SUCCEEDED.replay(&[Replay::Reference]).body(&[Body::Reference]), Decision::ReplayReference),
    row(STANDS.state(&[State::Completed, State::FailedReplayable]), Decision::NotRetained),
];
