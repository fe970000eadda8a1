//! Pure: no I/O, no clock.
//! How a request is answered: the whole decision table of the engine (O3, O4, O11, O15, O18 to O21,
//! O23, O29, M42).
//!
//! Guarantees. Tests check each in all combinations of the facts of a record, in all of the facts
//! that come before it, and with mutants of the table:
//!
//! * The facts are judged in this order: principal, fingerprint version, fingerprint, state. Expiry
//!   counts only for terminal states (O3).
//! * Another command under the key executes nothing and replays nothing, in any state (M26, M27).
//!   Another principal gets exactly the same answer.
//! * A stale claim is executed again in two cases only: in mode `bridged`, and on an edge route
//!   that is declared repeatable and cannot find out how a run ended. A committed claim of a
//!   transactional operation is never taken over: it is an alarm.
//! * IN_PROGRESS and UNKNOWN never expire. What this process cannot judge (a secret that it does
//!   not have, a newer version, a store that is away) is answered with 503, and nothing runs (M60).
//!
//! An operation asks more than once (O15): first with [`KeyFound::NotAsked`], before it takes a
//! connection; with [`KeyFound::Running`], if the key runs in this process; with the result of a
//! plain read; and, if the lock or the insert was refused, with the result of a second read or
//! [`KeyFound::Busy`]. Only the result of a read may lead to an execution, and then by one fenced
//! statement: an INSERT for [`Decision::Claim`], an UPDATE that compares the epoch for the others.
//! If that statement changed no row, read and ask again. One exception: a key that is probably new
//! is inserted without a read. A transaction that holds the insert asks with [`KeyFound::Nothing`].
//!
//! Not here: the statements (`store`), the answers' texts (`http`), and how a run ends
//! ([`classify`](super::classify)).

mod decision;
mod table;

use super::fingerprint::{Canonical, Fingerprint, Fingerprinter};
use super::identity::{Identity, PrincipalMark, Scope};
use super::record::{Record, StoredAnswer, StoredBody};
use super::route::Route;
use crate::inbox::rules::horizon::{self, Age, Bounds};
use crate::time::db_time::DbTime;

pub(crate) use self::decision::{Decision, Lost, TakeOver};
use self::table::{Body, Facts, Seen, judge};

/// Why a request has no key that can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoKey {
    Missing,
    /// A key was sent that is not valid ([`Key::parse`](super::key::Key::parse)).
    Malformed,
    /// A key was sent, and the caller is not authenticated.
    Unscoped,
    /// A key was sent whose home is another region (M106).
    Elsewhere,
}

/// A request under a key, with its body read and validated.
pub(crate) struct Request<'a> {
    /// The tenant and principal, from verified authentication.
    pub scope: &'a Scope,
    pub identity: &'a Identity,
    pub command: &'a dyn Canonical,
    /// Which fingerprints of the operation this process reads and writes.
    pub fingerprinter: &'a Fingerprinter,
    /// Whether as many operations of the tenant run in this process as may.
    pub over_quota: bool,
}

/// What is known of the key.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KeyFound<'a> {
    NotAsked,
    Running {
        principal: &'a PrincipalMark,
        fingerprint: &'a Fingerprint,
    },
    /// The store does not answer, or takes no writes.
    Unreachable,
    /// There is no committed record, and the lock or the insert was refused: another process has a
    /// claim that is not committed yet (O19).
    Busy,
    /// There is no committed record. The bounds are database time and the operation's purge bound,
    /// read in the same statement; `None` after an insert without a read. Without them, a route
    /// that checks the age of keys refuses the key.
    Nothing(Option<Bounds>),
    /// A committed record, and the database time of the read.
    Record(&'a Record, DbTime),
}

pub(crate) fn decide(route: &Route, asked: Result<&Request<'_>, NoKey>, found: KeyFound<'_>) -> Decision {
    judge(table::TABLE, &facts(route, asked, found))
}

/// Builds the facts for the table. Facts that do not apply keep the most conservative value
/// ([`Facts::CAREFUL`]).
fn facts(route: &Route, asked: Result<&Request<'_>, NoKey>, found: KeyFound<'_>) -> Facts {
    let mut facts = Facts {
        requirement: route.requirement,
        no_key: asked.err(),
        while_running: route.while_running,
        after_expiry: route.after_expiry,
        replay: route.replay,
        effects: route.effects,
        reconciles: route.reconciles,
        over_quota: asked.map_or(true, |request| request.over_quota),
        ..Facts::CAREFUL
    };
    let Ok(request) = asked else { return facts };
    let compare = |facts: &mut Facts, principal: &PrincipalMark, fingerprint: &Fingerprint| {
        facts.principal = request.scope.compare(principal, request.fingerprinter.keyring());
        facts.fingerprint = request.fingerprinter.compare(fingerprint, request.command);
    };
    match found {
        KeyFound::NotAsked => facts.seen = Seen::NotAsked,
        KeyFound::Unreachable => facts.seen = Seen::Unreachable,
        KeyFound::Busy => facts.seen = Seen::Busy,
        KeyFound::Running { principal, fingerprint } => {
            facts.seen = Seen::Running;
            compare(&mut facts, principal, fingerprint);
        }
        KeyFound::Nothing(bounds) => {
            facts.seen = Seen::Nothing;
            let timed = request.identity.key().time().zip(bounds);
            facts.age = timed.map(|(time, bounds)| horizon::judge(Age::InId(time), bounds));
        }
        KeyFound::Record(record, _) if record.identity != *request.identity => facts.seen = Seen::WrongRecord,
        KeyFound::Record(record, now) => {
            facts.seen = Seen::Record;
            compare(&mut facts, &record.principal, &record.fingerprint);
            facts.state = record.state_at(now);
            facts.mode = record.mode;
            facts.owned = !record.lease_left(now).is_zero();
            facts.parked = record.parked;
            facts.body = match &record.answer {
                Some(StoredAnswer { body: StoredBody::Kept, .. }) => Body::Kept,
                Some(StoredAnswer { resource: Some(_), .. }) => Body::Reference,
                Some(StoredAnswer { resource: None, .. }) | None => Body::Gone,
            };
        }
    }
    facts
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod walk;
