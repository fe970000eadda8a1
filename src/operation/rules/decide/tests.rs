//! Pure: no I/O, no clock.
//! Tests of `decide` with whole records, from which it reads the facts for the table of decisions:
//! at every edge of time.

use std::time::Duration;

use proptest::prelude::*;
use uuid::Uuid;

use super::super::canonical::FingerprintWriter;
use super::super::key::{Key, KeyFormat};
use super::super::keyring::Keyring;
use super::super::problem::{Code, KeyState};
use super::super::record::{Mode, Resource, State, Tombstone, tests::answer, tests::record};
use super::super::route::{AfterExpiry, Effects, Replay, Requirement, WhileRunning};
use super::*;

const KEY: &str = "0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b";

struct Payment(i64);

impl Canonical for Payment {
    fn write_canonical(&self, _version: u32, writer: &mut FingerprintWriter) {
        writer.field("amountMinor", &self.0);
    }
}

fn fingerprinter() -> Fingerprinter {
    let operation = "create_payment".parse().expect("a name");
    Fingerprinter::new(operation, 1..=2, Some(1), Keyring::plain()).expect("settings")
}

fn scope(principal: &str) -> Scope {
    Scope::new("acme", principal).expect("a scope")
}

fn identity() -> Identity {
    let key = Key::parse(KEY.as_bytes(), KeyFormat::UuidV7).expect("a key");
    Identity::new(&scope("alice"), "create_payment".parse().expect("a name"), key)
}

fn at(millis: i64) -> DbTime {
    DbTime::from_millis(millis)
}

/// Alice's record of a payment of 1,000: claimed at 0 s for 30 s. A terminal one has its outcome at
/// 10 s and lives 100 s from then.
fn first(mode: Mode, state: State) -> Record {
    let mark = scope("alice").mark(fingerprinter().keyring());
    record(identity(), mark, fingerprinter().write(&Payment(1_000)), mode, state)
}

/// The decision on a second request.
fn second(route: &Route, principal: &str, amount: i64, found: KeyFound<'_>) -> Decision {
    under(&identity(), route, principal, amount, false, found)
}

/// The decision on a request under this key.
fn under(
    identity: &Identity,
    route: &Route,
    principal: &str,
    amount: i64,
    over_quota: bool,
    found: KeyFound<'_>,
) -> Decision {
    let (scope, command, fingerprinter) = (&scope(principal), &Payment(amount), &fingerprinter());
    decide(route, Ok(&Request { scope, identity, command, fingerprinter, over_quota }), found)
}

fn again(route: &Route, record: &Record, now: i64) -> Decision {
    second(route, "alice", 1_000, KeyFound::Record(record, at(now)))
}

fn edge() -> Route {
    Route::new(Mode::Edge)
}

#[test]
fn m3_the_six_second_requests_are_told_apart() {
    let route = edge();
    assert_eq!(again(&route, &first(Mode::Edge, State::Completed), 20_000), Decision::Replay);
    assert_eq!(
        again(&route, &first(Mode::Edge, State::InProgress), 20_000),
        Decision::InProgress(WhileRunning::Conflict)
    );
    assert_eq!(again(&Route::new(Mode::Phased), &first(Mode::Phased, State::InProgress), 30_000), Decision::Recover);
    let unknown = first(Mode::Edge, State::UnknownRequiresRecovery);
    assert_eq!(again(&route, &unknown, i64::MAX), Decision::UnknownOutcome);
    let completed = first(Mode::Edge, State::Completed);
    assert_eq!(second(&route, "alice", 10_000, KeyFound::Record(&completed, at(20_000))), Decision::Mismatch);
    assert_eq!(again(&route, &completed, 110_001), Decision::ExecuteAsNew);
    let reject = Route { after_expiry: AfterExpiry::Reject, ..route };
    assert_eq!(again(&reject, &completed, 110_001), Decision::Expired);
}

// Shown by: comparing with `locked_until` one instant off; by reading the lease against the wrong
// clock end.
#[test]
fn m42_a_lease_is_stale_from_its_end_on_and_an_answer_over_after_its_time() {
    let running = first(Mode::Bridged, State::InProgress);
    let route = Route::new(Mode::Bridged);
    assert_eq!(again(&route, &running, 29_999), Decision::InProgress(WhileRunning::Conflict));
    assert_eq!(again(&route, &running, 30_000), Decision::TakeOver(TakeOver::Bridged));
    assert_eq!(again(&route, &running, -1), Decision::TakeOver(TakeOver::Bridged), "the clock went back (R22)");
    let ended = first(Mode::Bridged, State::Completed);
    assert_eq!(again(&route, &ended, 110_000), Decision::Replay);
    assert_eq!(again(&route, &ended, 110_001), Decision::ExecuteAsNew);
}

// Shown by: taking the route's mode for the record's.
#[test]
fn o2_the_mode_that_claimed_decides_not_todays_route() {
    for now in [20_000, 40_000] {
        let claimed = first(Mode::Transactional, State::InProgress);
        for mode in Mode::ALL {
            assert_eq!(again(&Route::new(mode), &claimed, now), Decision::MarkUnknown(Lost::CommittedClaim));
        }
    }
    let edge_claim = first(Mode::Edge, State::InProgress);
    assert_eq!(again(&Route::new(Mode::Bridged), &edge_claim, 40_000), Decision::MarkUnknown(Lost::StaleEdge));
    let repeatable = Route { effects: Effects::Repeatable, ..edge() };
    assert_eq!(again(&repeatable, &edge_claim, 40_000), Decision::TakeOver(TakeOver::Repeatable));
    assert_eq!(again(&repeatable, &first(Mode::Phased, State::InProgress), 40_000), Decision::Recover);
    let reconciles = Route { reconciles: true, ..edge() };
    assert_eq!(again(&reconciles, &edge_claim, 40_000), Decision::MarkUnknown(Lost::StaleEdge));
    assert_eq!(again(&reconciles, &first(Mode::Edge, State::UnknownRequiresRecovery), 0), Decision::Reconcile);
}

#[test]
fn o9_an_operation_that_was_given_to_an_operator_is_not_recovered_by_requests() {
    let route = Route::new(Mode::Phased);
    for state in [State::InProgress, State::UnknownRequiresRecovery] {
        let open = Record { lease: None, ..first(Mode::Phased, state) };
        assert_eq!(again(&route, &open, 40_000), Decision::Recover);
        assert_eq!(again(&route, &Record { parked: true, ..open }, 40_000), Decision::UnknownOutcome);
    }
    assert_eq!(again(&route, &first(Mode::Phased, State::UnknownRequiresRecovery), 20_000), Decision::RecoveryPending);
}

// Shown by: not comparing the parts (O16).
#[test]
fn o16_a_record_of_another_identity_under_the_digest_is_never_answered_from() {
    let mut other = first(Mode::Edge, State::Completed);
    other.identity = Identity::from_stored(b"ACME", b"create_payment", KEY.as_bytes()).expect("an identity");
    assert_eq!(again(&edge(), &other, 20_000), Decision::WrongRecord);
    assert_eq!(Decision::WrongRecord.problem(), Decision::StoreUnavailable.problem());
}

// Shown by: a code of its own for another principal.
#[test]
fn o20_another_principal_gets_exactly_the_answer_of_a_mismatch() {
    for state in State::STORED {
        let first = first(Mode::Edge, state);
        let decision = second(&edge(), "bob", 1_000, KeyFound::Record(&first, at(20_000)));
        assert_eq!(decision, Decision::PrincipalMismatch);
        assert_eq!(decision.problem(), Decision::Mismatch.problem());
    }
}

#[test]
fn o21_a_fingerprint_of_another_program_is_503_or_not_retained() {
    let hash = "0".repeat(64);
    for (stored, decision) in [
        (format!("3:sha256:{hash}"), Decision::FingerprintUnreadable),
        (format!("1:other:{hash}"), Decision::FingerprintUnreadable),
        (format!("0:sha256:{hash}"), Decision::FingerprintTooOld),
        (format!("2:sha256:{hash}"), Decision::Mismatch),
    ] {
        for state in State::STORED {
            let first = Record { fingerprint: stored.parse().expect("a fingerprint"), ..first(Mode::Edge, state) };
            assert_eq!(again(&edge(), &first, 20_000), decision, "{stored} {state}");
        }
    }
    let (code, key_state) = Decision::FingerprintTooOld.problem().expect("a problem");
    assert_eq!((code, key_state), (Code::ResultNotRetained, KeyState::Unknown), "its outcome may be unknown");
}

// Shown by: skipping the principal in the map; by claiming from it.
#[test]
fn o15_the_map_of_what_runs_here_answers_409_or_422_and_never_executes() {
    let running = first(Mode::Transactional, State::InProgress);
    let found = KeyFound::Running { principal: &running.principal, fingerprint: &running.fingerprint };
    let route = Route::new(Mode::Transactional);
    assert_eq!(second(&route, "alice", 1_000, found), Decision::InProgress(WhileRunning::Conflict));
    assert_eq!(second(&route, "alice", 10_000, found), Decision::Mismatch);
    assert_eq!(second(&route, "bob", 1_000, found), Decision::PrincipalMismatch);
}

#[test]
fn o18_o19_an_uncommitted_claim_is_409_whatever_the_body_or_waited_for() {
    let route = Route::new(Mode::Transactional);
    for amount in [1_000, 10_000] {
        assert_eq!(second(&route, "alice", amount, KeyFound::Busy), Decision::InProgress(WhileRunning::Conflict));
    }
    let wait = Route { while_running: WhileRunning::Wait, ..route };
    assert_eq!(second(&wait, "alice", 1_000, KeyFound::Busy), Decision::InProgress(WhileRunning::Wait));
    let accepted = Route { while_running: WhileRunning::Accepted, ..Route::new(Mode::Phased) };
    assert_eq!(second(&accepted, "alice", 1_000, KeyFound::Busy), Decision::InProgress(WhileRunning::Conflict));
}

// Shown by: letting keys from the future in; reading the key's time in other units.
#[test]
fn o23_a_key_without_a_record_is_judged_by_its_time_where_late_retries_are_rejected() {
    let made = 0x0197_a1b2_c3d4;
    let bounds = |purged_below: Option<i64>, now| {
        KeyFound::Nothing(Some(Bounds {
            purged_below: purged_below.map(at),
            now: at(now),
            id_skew: Duration::from_secs(60),
        }))
    };
    let reject = Route::new(Mode::Phased);
    for (found, decision) in [
        (bounds(None, made), Decision::Claim),
        (bounds(Some(made), made), Decision::Claim),
        (bounds(Some(made + 1), made), Decision::Expired),
        (bounds(None, made - 60_000), Decision::Claim),
        (bounds(None, made - 60_001), Decision::KeyFromTheFuture),
    ] {
        assert_eq!(second(&reject, "alice", 1_000, found), decision, "{found:?}");
        assert_eq!(second(&edge(), "alice", 1_000, found), Decision::Claim);
    }
    let opaque = Key::parse(b"0123456789abcdef", KeyFormat::Opaque).expect("a key");
    let identity = Identity::new(&scope("alice"), "create_payment".parse().expect("a name"), opaque);
    let opaque = |route: &Route, over_quota| under(&identity, route, "alice", 1, over_quota, bounds(None, made));
    assert_eq!(opaque(&reject, false), Decision::KeyInvalid);
    assert_eq!(opaque(&edge(), true), Decision::QuotaExceeded);
}

#[test]
fn m12_m60_what_is_answered_before_and_without_the_store() {
    let required = edge();
    let optional = Route { requirement: Requirement::Optional, ..edge() };
    let off = Route { requirement: Requirement::Off, ..edge() };
    for (no_key, decision) in [
        (NoKey::Missing, Decision::KeyRequired),
        (NoKey::Malformed, Decision::KeyInvalid),
        (NoKey::Unscoped, Decision::ScopeRequired),
        (NoKey::Elsewhere, Decision::WrongRegion),
    ] {
        assert_eq!(decide(&required, Err(no_key), KeyFound::NotAsked), decision);
        assert_eq!(decide(&off, Err(no_key), KeyFound::NotAsked), Decision::PassThrough);
    }
    assert_eq!(decide(&optional, Err(NoKey::Missing), KeyFound::NotAsked), Decision::PassThrough);
    assert_eq!(decide(&optional, Err(NoKey::Malformed), KeyFound::NotAsked), Decision::KeyInvalid);
    assert_eq!(second(&required, "alice", 1_000, KeyFound::NotAsked), Decision::Look);
    assert_eq!(second(&required, "alice", 1_000, KeyFound::Unreachable), Decision::StoreUnavailable);
}

#[test]
fn m62_m63_m68_what_is_replayed_follows_from_what_was_kept() {
    let kept = |body: StoredBody, resource: Option<&Resource>| {
        let answer = Some(answer(body, resource.cloned()));
        Record { answer, ..first(Mode::Edge, State::Completed) }
    };
    let resource = Resource { kind: "payment".into(), id: "pay_789".into(), location: None };
    let reference = kept(StoredBody::Reference, Some(&resource));
    let [purged, oversize] = [Tombstone::Purged, Tombstone::Oversize].map(StoredBody::Tombstone);
    let located = [kept(purged, Some(&resource)), kept(oversize.clone(), Some(&resource))];
    let tombstone = kept(oversize, None);
    let nothing = Record { answer: None, ..first(Mode::Edge, State::Completed) };
    let replay = |replay: Replay, record: &Record| again(&Route { replay, ..edge() }, record, 20_000);
    for record in [&reference, &tombstone, &nothing] {
        assert_eq!(replay(Replay::Exact, record), Decision::NotRetained);
        assert_eq!(replay(Replay::Reconstruct, record), Decision::Reconstruct);
    }
    for record in [&reference, &located[0], &located[1]] {
        assert_eq!(replay(Replay::Reference, record), Decision::ReplayReference);
    }
    assert_eq!(replay(Replay::Reference, &kept(StoredBody::Kept, Some(&resource))), Decision::Replay);
    assert_eq!(replay(Replay::Reference, &tombstone), Decision::NotRetained);
    let failure = Record { answer: nothing.answer, ..first(Mode::Edge, State::FailedReplayable) };
    assert_eq!(replay(Replay::Reconstruct, &failure), Decision::NotRetained, "a failure made no resource");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    // Starts from rows and times instead of facts. Only the same command of the same principal is
    // executed or replayed, and IN_PROGRESS and UNKNOWN never expire. Shown by: deriving EXPIRED
    // for every state.
    #[test]
    fn m26_o3_no_row_and_no_time_executes_another_command_or_ends_an_open_one(
        state in prop::sample::select(State::STORED.to_vec()), mode in prop::sample::select(Mode::ALL.to_vec()),
        route_mode in prop::sample::select(Mode::ALL.to_vec()), reject in any::<bool>(), repeatable in any::<bool>(),
        amount in 999_i64..=1_001, principal in prop::sample::select(vec!["alice", "bob"]),
        now in prop_oneof![-10_000_i64..200_000, any::<i64>()], expires in proptest::option::of(-10_000_i64..200_000),
        parked in any::<bool>(), lease in any::<bool>(),
    ) {
        let mut first = Record { parked, operation_id: Uuid::nil(), ..first(mode, state) };
        first.expires_at = expires.map(at).or(first.expires_at);
        first.lease = first.lease.filter(|_| lease);
        let mut route = Route::new(route_mode);
        route.after_expiry = if reject { AfterExpiry::Reject } else { AfterExpiry::ExecuteAsNew };
        route.effects = if repeatable { Effects::Repeatable } else { Effects::External };
        let decision = second(&route, principal, amount, KeyFound::Record(&first, at(now)));
        if principal != "alice" {
            prop_assert_eq!(decision, Decision::PrincipalMismatch);
        } else if amount != 1_000 {
            prop_assert_eq!(decision, Decision::Mismatch);
        } else if !state.is_terminal() {
            prop_assert!(!matches!(decision, Decision::Expired | Decision::ExecuteAsNew | Decision::Reclaim));
            let bridged = mode == Mode::Bridged && state == State::InProgress && first.lease_left(at(now)).is_zero();
            let declared = mode == Mode::Edge && repeatable;
            prop_assert!(!walk::executes(decision) || bridged || declared, "{:?}", decision);
        } else if first.expires_at.is_some_and(|over| at(now) > over) {
            let expected = if reject { Decision::Expired } else { Decision::ExecuteAsNew };
            prop_assert_eq!(decision, expected);
        }
    }
}
