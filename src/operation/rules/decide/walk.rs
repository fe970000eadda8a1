//! Pure: no I/O, no clock.
//! Checks what the decision table must never do, independently of its rows: in all combinations of
//! the facts of a record, then in all combinations of the facts that are looked at before it.
//! Random samples cover the product of both.
//!
//! The label of a property begins with its rule (`o`: docs/reference/rules.md) or its item (`m`:
//! docs/reference/mission.md).
//!
//! Every property is also run against mutants of the table, and one of them must break it.

use proptest::prelude::*;

use super::super::fingerprint::Comparison;
use super::super::identity::PrincipalMatch;
use super::super::record::{Mode, State};
use super::super::route::{AfterExpiry, Effects, Replay, Requirement, WhileRunning};
use super::table::{Body, Facts, Row, Seen, TABLE, judge};
use super::{Decision, Lost, NoKey, TakeOver};
use crate::inbox::rules::horizon::Verdict;

/// Whether the operation's code runs after this decision, if its fenced statement changed the row.
pub(super) fn executes(decision: Decision) -> bool {
    use Decision::{Claim, ExecuteAsNew, PassThrough, Reclaim, TakeOver};
    matches!(decision, PassThrough | Claim | TakeOver(_) | Reclaim | ExecuteAsNew)
}

/// Whether the outcome of the first request is the answer: as it was, as a reference, built anew,
/// or as the word that it was not kept.
fn replays(decision: Decision) -> bool {
    matches!(decision, Decision::Replay | Decision::ReplayReference | Decision::Reconstruct | Decision::NotRetained)
}

const REQUIREMENTS: [Requirement; 3] = [Requirement::Off, Requirement::Optional, Requirement::Required];
const NO_KEYS: [Option<NoKey>; 5] =
    [Some(NoKey::Missing), Some(NoKey::Malformed), Some(NoKey::Unscoped), Some(NoKey::Elsewhere), None];
const SEEN: [Seen; 7] =
    [Seen::NotAsked, Seen::Running, Seen::Unreachable, Seen::Busy, Seen::Nothing, Seen::WrongRecord, Seen::Record];
const AGES: [Option<Verdict>; 4] = [Some(Verdict::GoOn), Some(Verdict::TooOld), Some(Verdict::FromTheFuture), None];
const PRINCIPALS: [PrincipalMatch; 3] = [PrincipalMatch::Same, PrincipalMatch::Other, PrincipalMatch::Unreadable];
const COMPARISONS: [Comparison; 4] =
    [Comparison::Equal, Comparison::Different, Comparison::Unreadable, Comparison::TooOld];
const STATES: [State; 6] = [
    State::InProgress,
    State::Completed,
    State::FailedReplayable,
    State::FailedRetryable,
    State::UnknownRequiresRecovery,
    State::Expired,
];
const BODIES: [Body; 3] = [Body::Kept, Body::Reference, Body::Gone];
const WHILE_RUNNING: [WhileRunning; 3] = [WhileRunning::Conflict, WhileRunning::Accepted, WhileRunning::Wait];
const AFTER_EXPIRY: [AfterExpiry; 2] = [AfterExpiry::ExecuteAsNew, AfterExpiry::Reject];
const REPLAYS: [Replay; 3] = [Replay::Exact, Replay::Reference, Replay::Reconstruct];
const EFFECTS: [Effects; 2] = [Effects::External, Effects::Repeatable];
const BOTH: [bool; 2] = [true, false];

/// Takes the next digit of a case's number.
fn digit<T: Copy>(all: &[T], number: &mut usize) -> T {
    let value = all[*number % all.len()];
    *number /= all.len();
    value
}

/// The columns of a committed record.
fn record_case(number: &mut usize) -> Facts {
    Facts {
        requirement: Requirement::Required,
        no_key: None,
        seen: Seen::Record,
        age: Some(Verdict::GoOn),
        over_quota: digit(&BOTH, number),
        principal: digit(&PRINCIPALS, number),
        fingerprint: digit(&COMPARISONS, number),
        state: digit(&STATES, number),
        mode: digit(&Mode::ALL, number),
        owned: digit(&BOTH, number),
        parked: digit(&BOTH, number),
        body: digit(&BODIES, number),
        while_running: digit(&WHILE_RUNNING, number),
        after_expiry: digit(&AFTER_EXPIRY, number),
        replay: digit(&REPLAYS, number),
        effects: digit(&EFFECTS, number),
        reconciles: digit(&BOTH, number),
    }
}

const RECORD_CASES: usize = 2 * 3 * 4 * 6 * 4 * 2 * 2 * 3 * 3 * 2 * 3 * 2 * 2;

/// One choice of the columns that are looked at before a record; the others are those of `record`.
fn front_case(number: &mut usize, record: Facts) -> Facts {
    Facts {
        requirement: digit(&REQUIREMENTS, number),
        no_key: digit(&NO_KEYS, number),
        seen: digit(&SEEN, number),
        age: digit(&AGES, number),
        over_quota: digit(&BOTH, number),
        principal: digit(&PRINCIPALS, number),
        fingerprint: digit(&COMPARISONS, number),
        while_running: digit(&WHILE_RUNNING, number),
        after_expiry: digit(&AFTER_EXPIRY, number),
        ..record
    }
}

const FRONT_CASES: usize = 3 * 5 * 7 * 4 * 2 * 3 * 4 * 3 * 2;

/// All choices of the front columns, each with the same record; then all records, each with the
/// same choice of the front columns.
fn cases() -> impl Iterator<Item = Facts> {
    let records = (0..RECORD_CASES).map(|number| record_case(&mut { number }));
    // A finished record that could be replayed, because a wrong table would most likely replay it.
    let tempting = Facts { state: State::Completed, body: Body::Kept, ..record_case(&mut 0) };
    let fronts = (0..FRONT_CASES).map(move |number| front_case(&mut { number }, tempting));
    fronts.chain(records)
}

/// Whether the route uses keys and the request has one that can be used.
fn asked(facts: &Facts) -> bool {
    facts.requirement != Requirement::Off && facts.no_key.is_none()
}

/// Whether a committed record was read, and is of the same principal and command.
fn stands(facts: &Facts) -> bool {
    let same = facts.principal == PrincipalMatch::Same && facts.fingerprint == Comparison::Equal;
    asked(facts) && facts.seen == Seen::Record && same
}

/// Whether a case has a record or a run with which it can be compared.
fn compared(facts: &Facts) -> bool {
    asked(facts) && matches!(facts.seen, Seen::Record | Seen::Running)
}

type Property = (&'static str, fn(&Facts, Decision) -> bool);

const PROPERTIES: &[Property] = &[
    ("m12: only a route without keys or with an optional one runs without a key", |facts, decision| {
        let keyless = facts.no_key == Some(NoKey::Missing) && facts.requirement == Requirement::Optional;
        (decision == Decision::PassThrough) == (facts.requirement == Requirement::Off || keyless)
    }),
    ("m40: only what was read from the store is executed or replayed", |facts, decision| {
        let read = asked(facts) && matches!(facts.seen, Seen::Nothing | Seen::Record);
        let shown = executes(decision) && decision != Decision::PassThrough || replays(decision);
        !shown || read
    }),
    ("o20: another principal gets one answer in every case", |facts, decision| {
        let other = compared(facts) && facts.principal == PrincipalMatch::Other;
        other == (decision == Decision::PrincipalMismatch)
    }),
    ("o21: what cannot be compared is never called different", |facts, decision| {
        let unreadable = facts.principal == PrincipalMatch::Unreadable || facts.fingerprint == Comparison::Unreadable;
        let judged = compared(facts) && facts.principal != PrincipalMatch::Other;
        !judged || unreadable == (decision == Decision::FingerprintUnreadable)
    }),
    ("m26 m27: another command is a mismatch in every state", |facts, decision| {
        let other = facts.fingerprint == Comparison::Different && facts.principal == PrincipalMatch::Same;
        (compared(facts) && other) == (decision == Decision::Mismatch)
    }),
    ("m27: nothing but the same command of the same principal executes or replays", |facts, decision| {
        let shown = executes(decision) || replays(decision);
        !compared(facts) || stands(facts) || !shown
    }),
    ("o21: what nobody can judge any more is neither executed nor replayed as it is", |facts, decision| {
        let readable = facts.principal == PrincipalMatch::Same;
        let too_old = compared(facts) && readable && facts.fingerprint == Comparison::TooOld;
        too_old == (decision == Decision::FingerprintTooOld)
    }),
    ("o11: a stale claim is executed again only in mode bridged or declared repeatable", |facts, decision| {
        let stale = facts.state == State::InProgress && !facts.owned;
        let unknown = facts.state == State::UnknownRequiresRecovery;
        let bridged = facts.mode == Mode::Bridged && stale;
        let declared = facts.effects == Effects::Repeatable && !facts.reconciles && facts.mode == Mode::Edge;
        match decision {
            Decision::TakeOver(TakeOver::Bridged) => stands(facts) && bridged,
            Decision::TakeOver(TakeOver::Repeatable) => stands(facts) && declared && (stale || unknown),
            _ => true,
        }
    }),
    ("o2: a committed claim of a transactional operation is an alarm, whatever its lease says", |facts, decision| {
        let committed = stands(facts) && facts.state == State::InProgress && facts.mode == Mode::Transactional;
        committed == (decision == Decision::MarkUnknown(Lost::CommittedClaim))
    }),
    ("o3: expiry says nothing of IN_PROGRESS and UNKNOWN", |facts, decision| {
        let running = matches!(facts.state, State::InProgress | State::UnknownRequiresRecovery);
        let over = matches!(decision, Decision::Expired | Decision::ExecuteAsNew | Decision::Reclaim);
        !(stands(facts) && running && over)
    }),
    ("m98: an expired outcome follows the route's policy; only the quota can refuse a new run", |facts, decision| {
        let over = stands(facts) && facts.state == State::Expired;
        let expected = match facts.after_expiry {
            AfterExpiry::Reject => Decision::Expired,
            AfterExpiry::ExecuteAsNew if facts.over_quota => Decision::QuotaExceeded,
            AfterExpiry::ExecuteAsNew => Decision::ExecuteAsNew,
        };
        if over { decision == expected } else { decision != Decision::ExecuteAsNew }
    }),
    ("m42: a known outcome is replayed or said to be gone, never run again", |facts, decision| {
        let known = matches!(facts.state, State::Completed | State::FailedReplayable);
        !(stands(facts) && known) || replays(decision)
    }),
    ("m68: an outcome is replayed if, and only if, its bytes are kept", |facts, decision| {
        let known = matches!(facts.state, State::Completed | State::FailedReplayable);
        (stands(facts) && known && facts.body == Body::Kept) == (decision == Decision::Replay)
    }),
    ("m47: what failed with no effect outstanding is claimed again, and nothing else is", |facts, decision| {
        let retryable = stands(facts) && facts.state == State::FailedRetryable && !facts.over_quota;
        retryable == (decision == Decision::Reclaim)
    }),
    ("m46: a request never executes a phased operation: it is recovered", |facts, decision| {
        let open = matches!(facts.state, State::InProgress | State::UnknownRequiresRecovery);
        !(stands(facts) && facts.mode == Mode::Phased && open && executes(decision))
    }),
    (
        "m46: recovery begins only in mode phased, without an owner, and where the operation is not parked",
        |facts, decision| decision != Decision::Recover || !facts.owned && !facts.parked && facts.mode == Mode::Phased,
    ),
    ("m43: while the first request runs, the answer is the one that the route chose", |facts, decision| {
        let runs =
            stands(facts) && facts.state == State::InProgress && facts.owned && facts.mode != Mode::Transactional;
        !runs || decision == Decision::InProgress(facts.while_running)
    }),
    ("o19: an uncommitted claim is waited for or answered with 409", |facts, decision| {
        let waits = facts.while_running == WhileRunning::Wait;
        let expected = Decision::InProgress(if waits { WhileRunning::Wait } else { WhileRunning::Conflict });
        !(asked(facts) && facts.seen == Seen::Busy) || decision == expected
    }),
    (
        "o23: where late retries are rejected, a key without a record runs only if its time is fine",
        |facts, decision| {
            let fine = facts.age == Some(Verdict::GoOn) || facts.after_expiry == AfterExpiry::ExecuteAsNew;
            decision != Decision::Claim || facts.seen == Seen::Nothing && fine && !facts.over_quota
        },
    ),
    ("o11: a request does not end UNKNOWN, unless the route is declared repeatable", |facts, decision| {
        let unknown = stands(facts) && facts.state == State::UnknownRequiresRecovery;
        let answers = matches!(
            decision,
            Decision::Recover
                | Decision::RecoveryPending
                | Decision::Reconcile
                | Decision::UnknownOutcome
                | Decision::TakeOver(TakeOver::Repeatable)
        );
        !unknown || answers
    }),
    ("m60: while the store cannot be reached, nothing runs, and the answer says so", |facts, decision| {
        let away = asked(facts) && facts.seen == Seen::Unreachable;
        away == (decision == Decision::StoreUnavailable)
    }),
];

fn broken(table: &[Row], facts: &Facts) -> Vec<&'static str> {
    let decision = judge(table, facts);
    PROPERTIES.iter().filter(|(_, holds)| !holds(facts, decision)).map(|(name, _)| *name).collect()
}

#[test]
fn m42_the_table_keeps_every_promise_in_every_case() {
    for facts in cases() {
        let broken = broken(TABLE, &facts);
        assert!(broken.is_empty(), "{facts:#?}\n{:?}: {broken:?}", judge(TABLE, &facts));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    // Samples of the product of all columns; the walk above fixes some of them.
    #[test]
    fn m42_the_table_keeps_every_promise_in_any_product_of_columns(record in 0..RECORD_CASES, front in 0..FRONT_CASES) {
        let facts = front_case(&mut { front }, record_case(&mut { record }));
        prop_assert_eq!(broken(TABLE, &facts), Vec::<&str>::new(), "{:?}", facts);
    }
}

#[test]
fn m42_every_case_has_a_row_and_no_row_is_idle() {
    let mut used = vec![0_u64; TABLE.len()];
    for facts in cases() {
        let row = TABLE.iter().position(|row| row.when.holds(&facts)).unwrap_or_else(|| panic!("no row: {facts:#?}"));
        used[row] += 1;
    }
    for (row, used) in TABLE.iter().zip(used) {
        assert!(used > 0, "never used: {row:?}");
    }
}

/// A plausible wrong table, and the property that it breaks.
struct Mutant {
    breaks: &'static str,
    table: Vec<Row>,
}

/// The table with each row changed by `change`; `None` removes the row.
fn changed(change: impl Fn(Row) -> Option<Row>) -> Vec<Row> {
    let table: Vec<Row> = TABLE.iter().filter_map(|row| change(*row)).collect();
    let same = table.len() == TABLE.len() && table.iter().zip(TABLE).all(|(a, b)| format!("{a:?}") == format!("{b:?}"));
    assert!(!same, "a mutant that changes nothing");
    table
}

fn mutants() -> Vec<Mutant> {
    let without = |gone: Decision| changed(move |row| (row.then != gone).then_some(row));
    let instead = |old: Decision, new: Decision| {
        changed(move |row| Some(Row { then: if row.then == old { new } else { row.then }, ..row }))
    };
    let first = |then: Decision| {
        let at = TABLE.iter().position(|row| row.then == then).expect("a row");
        let mut table = TABLE.to_vec();
        let row = table.remove(at);
        table.insert(0, row);
        table
    };
    // Puts a row before the first row that looks at a record's state.
    let ahead = |row: Row| {
        let at = TABLE.iter().position(|row| row.when.state.is_some()).expect("a row");
        let mut table = TABLE.to_vec();
        table.insert(at, row);
        table
    };
    let any = TABLE.last().expect("a row").when;
    let state = |state: &'static [State]| super::table::When { state: Some(state), body: None, ..any };
    let wide = |then: Decision, widen: fn(&mut super::table::When)| {
        changed(move |mut row| {
            if row.then == then {
                widen(&mut row.when);
            }
            Some(row)
        })
    };
    let repeat = Decision::TakeOver(TakeOver::Repeatable);
    let mutant = |breaks, table| Mutant { breaks, table };
    vec![
        mutant("m12:", instead(Decision::KeyRequired, Decision::PassThrough)),
        mutant("m40:", instead(Decision::Look, Decision::Claim)),
        mutant("m40:", instead(Decision::WrongRecord, Decision::Replay)),
        mutant("o20:", without(Decision::PrincipalMismatch)),
        mutant("o20:", instead(Decision::PrincipalMismatch, Decision::Mismatch)),
        mutant("o21: what cannot", instead(Decision::FingerprintUnreadable, Decision::Mismatch)),
        mutant("o21: what nobody", instead(Decision::FingerprintTooOld, Decision::Mismatch)),
        mutant("m26 m27:", without(Decision::Mismatch)),
        mutant("m26 m27:", first(Decision::Replay)),
        mutant("m27: nothing", first(Decision::Reclaim)),
        mutant("o11: a stale", instead(Decision::MarkUnknown(Lost::StaleEdge), repeat)),
        mutant("o11: a stale", wide(Decision::TakeOver(TakeOver::Bridged), |when| when.mode = None)),
        mutant("o11: a stale", wide(repeat, |when| when.reconciles = None)),
        mutant("o2:", ahead(*TABLE.iter().find(|row| row.when.owned == Some(&[true])).expect("a row"))),
        mutant("o2:", without(Decision::MarkUnknown(Lost::CommittedClaim))),
        mutant("o3:", ahead(Row { when: state(&[State::InProgress]), then: Decision::Expired })),
        mutant("o3:", ahead(Row { when: state(&[State::UnknownRequiresRecovery]), then: Decision::ExecuteAsNew })),
        mutant("m98:", without(Decision::ExecuteAsNew)),
        mutant(
            "m98:",
            wide(Decision::ExecuteAsNew, |when| when.state = Some(&[State::Expired, State::FailedRetryable])),
        ),
        mutant("m42:", instead(Decision::NotRetained, Decision::Reclaim)),
        mutant("m68:", wide(Decision::Replay, |when| when.body = None)),
        mutant(
            "m47:",
            wide(Decision::Reclaim, |when| when.state = Some(&[State::FailedRetryable, State::FailedReplayable])),
        ),
        mutant("m46: a request", instead(Decision::Recover, Decision::TakeOver(TakeOver::Bridged))),
        mutant("m46: recovery", without(Decision::RecoveryPending)),
        mutant("m43:", instead(Decision::InProgress(WhileRunning::Wait), Decision::InProgress(WhileRunning::Conflict))),
        mutant(
            "o19:",
            wide(Decision::Claim, |when| when.seen = Some(&[Seen::Nothing, Seen::Busy]))
                .into_iter()
                .filter(|row| row.when.seen != Some(&[Seen::Running, Seen::Busy]))
                .collect(),
        ),
        mutant(
            "o19:",
            instead(Decision::InProgress(WhileRunning::Conflict), Decision::InProgress(WhileRunning::Accepted)),
        ),
        mutant("o23:", without(Decision::Expired)),
        mutant("o23:", without(Decision::KeyFromTheFuture)),
        mutant("o11: a request", instead(Decision::UnknownOutcome, Decision::Reclaim)),
        mutant("m60:", instead(Decision::StoreUnavailable, Decision::Claim)),
    ]
}

#[test]
fn every_property_of_the_table_is_broken_by_a_mutant_and_every_mutant_breaks_its_property() {
    let mutants = mutants();
    for mutant in &mutants {
        let named = PROPERTIES.iter().filter(|(name, _)| name.starts_with(mutant.breaks)).count();
        assert_eq!(named, 1, "{} names one property", mutant.breaks);
    }
    for (number, mutant) in mutants.iter().enumerate() {
        let killed =
            cases().any(|facts| broken(&mutant.table, &facts).iter().any(|name| name.starts_with(mutant.breaks)));
        assert!(killed, "mutant {number} keeps {}", mutant.breaks);
    }
    for (name, _) in PROPERTIES {
        assert!(mutants.iter().any(|mutant| name.starts_with(mutant.breaks)), "no mutant for {name}");
    }
}
