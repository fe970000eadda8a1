//! Cases of idempotency records that are claimed and finished by separate statements (O2 to O4,
//! O11, O16, M29 to M42, M99, M100): what every [`Keys`] must do, in a database or elsewhere.

use std::time::{Duration, SystemTime};

use uuid::Uuid;

use super::KeysFixture;
use super::trial::eventually;
use oncebox::error::StoreError;
use oncebox::operation::{
    Durability, Identity, Key, KeyFormat, Mode, Record, Resource, Retention, Scope, State, StoredBody, Tombstone,
};
use oncebox::store::{Answer, AnswerBody, Basis, Fenced, KeptBody, KeyClaim, Keys, Owned, RunOutcome};

/// A lease that no case outlives.
pub(super) const LONG: Duration = Duration::from_secs(600);
pub(super) const SHORT: Duration = Duration::from_millis(1);
/// How long a case waits for its turn to write, where it does not test that wait.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);
/// Lifetimes that no case outlives.
pub(super) const KEPT: Retention = Retention { ttl: LONG, body: LONG, metadata: LONG };
/// Lifetimes that are over at once.
pub(super) const GONE: Retention = Retention { ttl: SHORT, body: SHORT, metadata: SHORT };
/// Lifetimes of a key that expires at once, but whose record is kept.
pub(super) const ENDED: Retention = Retention { metadata: LONG, ..GONE };

/// What a tenant's key identifies.
pub(super) fn identity(tenant: &str, key: &str) -> Identity {
    let key = Key::parse(key.as_bytes(), KeyFormat::Opaque).unwrap();
    Identity::new(&Scope::new(tenant, "user-7").unwrap(), "create_payment".parse().unwrap(), key)
}

/// A claim on a key of the tenant `t1`; `command` stands for what is asked.
pub(super) fn claim(mode: Mode, key: &str, command: u8) -> KeyClaim {
    KeyClaim {
        identity: identity("t1", &format!("{key}-0123456789abcdef")),
        principal: format!("sha256:{}", "0b".repeat(32)).parse().unwrap(),
        fingerprint: format!("1:sha256:{}", format!("{command:02x}").repeat(32)).parse().unwrap(),
        mode,
        operation_id: Uuid::now_v7(),
        owner: Uuid::now_v7(),
        lease: LONG,
    }
}

/// An answer with a header that repeats and a body that is no text.
pub(super) fn answer() -> Answer {
    let headers = vec![
        ("link".to_owned(), b"</a>".to_vec()),
        ("link".to_owned(), vec![0xff, 0x00]),
        ("location".to_owned(), b"/payments/7".to_vec()),
    ];
    let body = KeptBody { headers, bytes: vec![0, 1, 0xfe, 0xff], format: 1, kid: Some("k1".to_owned()) };
    Answer { status: 201, schema_version: 3, body: AnswerBody::Kept(body), resource: None }
}

fn payment() -> Resource {
    Resource { kind: "payment".into(), id: "pay_7".into(), location: Some("/payments/7".into()) }
}

/// The outcome of an operation that succeeded with [`answer`].
pub(super) fn completed() -> RunOutcome {
    RunOutcome::Completed(answer())
}

/// The outcome of an operation that failed for good.
pub(super) fn failed() -> RunOutcome {
    RunOutcome::FailedReplayable { answer: answer(), error_code: Some("DECLINED".to_owned()) }
}

/// The outcome of an operation that may run again.
pub(super) fn retryable() -> RunOutcome {
    RunOutcome::FailedRetryable { error_code: None }
}

/// An outcome that leaves a record in this state.
pub(super) fn outcome(state: State) -> RunOutcome {
    match state {
        State::Completed => completed(),
        State::FailedReplayable => failed(),
        State::FailedRetryable => retryable(),
        _ => RunOutcome::Unknown,
    }
}

/// The same request again, by another process and under an operation id of its own.
pub(super) fn again(claim: &KeyClaim) -> KeyClaim {
    KeyClaim { operation_id: Uuid::now_v7(), owner: Uuid::now_v7(), ..claim.clone() }
}

/// A claim on the same key of another operation.
pub(super) fn of_operation(operation: &str, claim: KeyClaim) -> KeyClaim {
    let scope = Scope::new("t1", "user-7").unwrap();
    let identity = Identity::new(&scope, operation.parse().unwrap(), claim.identity.key().clone());
    KeyClaim { identity, ..claim }
}

/// A claim on a key that carries this time.
pub(super) fn timed(at: SystemTime) -> KeyClaim {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let id = Uuid::new_v7(uuid::Timestamp::from_unix(uuid::NoContext, since.as_secs(), since.subsec_nanos()));
    let key = Key::parse(id.to_string().as_bytes(), KeyFormat::UuidV7).unwrap();
    let plain = claim(Mode::Edge, "timed", 1);
    let scope = Scope::new("t1", "user-7").unwrap();
    KeyClaim { identity: Identity::new(&scope, plain.identity.operation().clone(), key), ..plain }
}

/// Makes a claim that must be refused.
async fn refused<F: KeysFixture>(trial: &F, claim: &KeyClaim, basis: Basis<'_>) {
    let claimed = trial.store().claim(claim, basis).await.unwrap();
    assert!(claimed.is_none(), "{claimed:?}");
}

/// Claims the key. The case fails where somebody else has it.
pub(super) async fn take<F: KeysFixture>(trial: &F, claim: &KeyClaim) -> Owned {
    trial.store().claim(claim, Basis::New).await.unwrap().unwrap()
}

/// Claims the key and writes this outcome.
pub(super) async fn run<F: KeysFixture>(
    trial: &F,
    claim: &KeyClaim,
    outcome: &RunOutcome,
    retention: &Retention,
) -> Owned {
    let owner = take(trial, claim).await;
    assert_eq!(trial.store().finish(&owner, outcome, retention).await.unwrap(), Fenced::Done);
    owner
}

/// The record, which must be there.
pub(super) async fn record<F: KeysFixture>(trial: &F, claim: &KeyClaim) -> Record {
    trial.store().find(&claim.identity).await.unwrap().record.unwrap()
}

/// Waits until the lease of the record is over, or its lifetime, and returns the record.
pub(super) async fn over<F: KeysFixture>(trial: &F, claim: &KeyClaim) -> Record {
    eventually("the record is over", || async {
        let look = trial.store().find(&claim.identity).await.unwrap();
        let record = look.record.unwrap();
        let is_over = match record.state {
            State::InProgress => record.lease_left(look.now).is_zero(),
            _ => record.state_at(look.now) == State::Expired,
        };
        is_over.then_some(record)
    })
    .await
}

/// Waits until the lifetime of the body is over, and returns the record.
async fn body_over<F: KeysFixture>(trial: &F, claim: &KeyClaim) -> Record {
    eventually("the body's time is over", || async {
        let found = record(trial, claim).await;
        (found.answer.as_ref()?.body == StoredBody::Tombstone(Tombstone::Purged)).then_some(found)
    })
    .await
}

/// Runs a claim twenty times at once and counts the winners.
async fn winners<F: KeysFixture>(trial: &F, claim: &KeyClaim, basis: Basis<'_>) -> usize {
    let racing = (0..20).map(|_| trial.store().claim(claim, basis));
    let won = futures_util::future::join_all(racing).await;
    won.into_iter().filter(|claimed| claimed.as_ref().unwrap().is_some()).count()
}

/// The unique key decides who gets the claim, not a SELECT before it.
pub async fn m39_of_twenty_claims_at_once_one_owns<F: KeysFixture>(trial: &F) {
    for round in 0..5 {
        let claim = claim(Mode::Edge, &format!("race{round}"), 1);
        assert_eq!(winners(trial, &claim, Basis::New).await, 1);
        assert_eq!(record(trial, &claim).await.state, State::InProgress);
    }
}

/// A claim that is refused changes nothing of the record, whatever command it brings.
pub async fn m42_what_refuses_a_claim_stands_whole<F: KeysFixture>(trial: &F) {
    let first = claim(Mode::Edge, "k", 1);
    let owner = take(trial, &first).await;
    let look = trial.store().find(&first.identity).await.unwrap();
    refused(trial, &claim(Mode::Bridged, "k", 2), Basis::New).await;
    let seen = record(trial, &first).await;
    assert_eq!(Some(&seen), look.record.as_ref());
    assert_eq!((&seen.identity, &seen.principal), (&first.identity, &first.principal));
    assert_eq!((&seen.fingerprint, seen.mode, seen.state), (&first.fingerprint, Mode::Edge, State::InProgress));
    assert_eq!((seen.epoch, seen.generation, seen.attempts), (owner.epoch, 1, 1));
    assert_eq!((seen.operation_id, owner.operation_id), (first.operation_id, first.operation_id));
    assert!(!seen.lease_left(look.now).is_zero() && seen.lease_left(look.now) <= LONG && !seen.parked);
    assert_eq!((seen.outcome_at, seen.expires_at, seen.answer, look.purged_below), (None, None, None, None));
}

/// A key belongs to its tenant. No collation, padding or case folding makes two keys equal.
pub async fn o16_keys_and_tenants_that_differ_in_one_byte_are_different<F: KeysFixture>(trial: &F) {
    let tenants = ["acme", "ACME", "acme ", "acm\u{e9}", "acme\0", "acm", "e"];
    let keys = ["abcdefghijklmnop", "abcdefghijklmnoP", "abcdefghijklmnop-", "eabcdefghijklmnop"];
    let claims = tenants.iter().flat_map(|tenant| keys.iter().map(move |key| identity(tenant, key)));
    let claims: Vec<KeyClaim> = claims.map(|identity| KeyClaim { identity, ..claim(Mode::Edge, "k", 1) }).collect();
    for one in &claims {
        take(trial, &again(one)).await;
    }
    for one in &claims {
        assert_eq!(record(trial, one).await.identity, one.identity);
    }
}

/// Every part of an answer comes back, and lifetimes count from the outcome (O3).
pub async fn o3_an_answer_comes_back_as_it_was<F: KeysFixture>(trial: &F) {
    let tombstone = AnswerBody::Tombstone(Tombstone::Stream);
    let reference = (AnswerBody::Reference, StoredBody::Reference, Some(payment()));
    let bodies = [None, Some(payment())].into_iter().flat_map(|resource| {
        let tombstone = (tombstone.clone(), StoredBody::Tombstone(Tombstone::Stream), resource.clone());
        [(answer().body, StoredBody::Kept, resource), tombstone]
    });
    for (number, (body, stored, resource)) in bodies.chain([reference]).enumerate() {
        let claim = claim(Mode::Edge, &format!("k{number}"), 1);
        let outcome = RunOutcome::FailedReplayable {
            answer: Answer { body: body.clone(), resource: resource.clone(), ..answer() },
            error_code: Some("INSUFFICIENT_FUNDS".to_owned()),
        };
        run(trial, &claim, &outcome, &KEPT).await;
        let found = record(trial, &claim).await;
        assert_eq!((found.state, found.lease), (State::FailedReplayable, None));
        assert_eq!(found.expires_at, found.outcome_at.map(|at| at.after(KEPT.ttl)));
        assert!(found.outcome_at >= Some(found.created_at));
        let kept = found.answer.clone().unwrap();
        assert_eq!((kept.status, kept.schema_version, kept.body, kept.resource), (201, 3, stored, resource));
        assert_eq!(found.error_code.as_deref(), Some("INSUFFICIENT_FUNDS"));
        let body = match body {
            AnswerBody::Kept(body) => Some(body),
            _ => None,
        };
        let until = found.outcome_at.filter(|_| body.is_some()).map(|at| at.after(KEPT.body));
        assert_eq!(kept.body_until, until);
        assert_eq!(trial.store().body(&found).await.unwrap(), body);
    }
}

/// The resource outlives the body, on a key that is used anew it is that of the last run, and a run
/// without one has none (M34).
///
/// Shown by: writing the resource only where nothing else is kept; a claim that leaves it.
pub async fn m34_m99_a_resource_outlives_the_body_and_not_its_run<F: KeysFixture>(trial: &F) {
    let claim = claim(Mode::Edge, "k", 1);
    let made = RunOutcome::Completed(Answer { resource: Some(payment()), ..answer() });
    run(trial, &claim, &made, &ENDED).await;
    let purged = body_over(trial, &claim).await;
    assert_eq!(purged.answer.as_ref().unwrap().resource, Some(payment()), "also before it is taken away");
    trial.store().expire_bodies(100).await.unwrap();
    assert_eq!(record(trial, &claim).await.answer.unwrap().resource, Some(payment()));
    if trial.forgets_by_itself() {
        return;
    }
    let expired = over(trial, &claim).await;
    let owner = trial.store().claim(&again(&claim), Basis::Anew(&expired)).await.unwrap().unwrap();
    trial.store().finish(&owner, &completed(), &KEPT).await.unwrap();
    assert_eq!(record(trial, &claim).await.answer.unwrap().resource, None);
}

/// The database decides whether a lease is over. Until then nobody takes the claim over, and a
/// heartbeat renews the lease.
///
/// Shown by: a lease that always counts as over.
pub async fn o2_a_claim_is_taken_over_only_when_its_lease_is_over<F: KeysFixture>(trial: &F) {
    let claim = KeyClaim { lease: SHORT, ..claim(Mode::Bridged, "k", 1) };
    let owner = take(trial, &claim).await;
    let stale = over(trial, &claim).await;
    assert_eq!(trial.store().heartbeat(&owner, LONG).await.unwrap(), Fenced::Done);
    assert_eq!(winners(trial, &claim, Basis::TakeOver(&stale)).await, 0);
    assert_eq!(trial.store().heartbeat(&owner, SHORT).await.unwrap(), Fenced::Done);
    let stale = over(trial, &claim).await;
    let next = KeyClaim { lease: LONG, ..again(&claim) };
    assert_eq!(winners(trial, &next, Basis::TakeOver(&stale)).await, 1);
    let taken = record(trial, &claim).await;
    assert!(taken.epoch > stale.epoch, "whoever owned it is fenced out");
    assert_eq!((taken.generation, taken.attempts, taken.created_at), (1, 2, stale.created_at));
    assert_eq!(taken.operation_id, claim.operation_id, "the run keeps its identity");
}

/// The lease was written before the clock went back (R22).
pub async fn r22_a_claim_whose_lease_is_longer_than_its_length_is_stale<F: KeysFixture>(trial: &F) {
    let claim = claim(Mode::Bridged, "k", 1);
    take(trial, &claim).await;
    trial.shorten_leases().await;
    let stale = over(trial, &claim).await;
    assert_eq!(winners(trial, &claim, Basis::TakeOver(&stale)).await, 1);
}

/// The heartbeat, outcome and release of an old owner change nothing, and those of the new owner
/// do.
///
/// Shown to fail: a `finish` whose UPDATE does not compare the epoch, on PostgreSQL and on SQLite.
/// Shown by: one that does not compare the token.
pub async fn o2_an_owner_that_was_taken_over_changes_nothing<F: KeysFixture>(trial: &F) {
    let claim = KeyClaim { lease: SHORT, ..claim(Mode::Bridged, "k", 1) };
    let old = take(trial, &claim).await;
    let stale = over(trial, &claim).await;
    let next = KeyClaim { lease: LONG, owner: Uuid::now_v7(), ..claim.clone() };
    let new = trial.store().claim(&next, Basis::TakeOver(&stale)).await.unwrap().unwrap();
    let before = record(trial, &claim).await;
    // Forged owners: one has the new epoch, the other the new token.
    let forged = [Owned { epoch: new.epoch, ..old.clone() }, Owned { owner: new.owner, ..old.clone() }];
    for owner in [&old, &forged[0], &forged[1]] {
        assert_eq!(trial.store().heartbeat(owner, SHORT).await.unwrap(), Fenced::LostOwnership);
        assert_eq!(trial.store().finish(owner, &completed(), &KEPT).await.unwrap(), Fenced::LostOwnership);
        assert_eq!(trial.store().release(owner).await.unwrap(), Fenced::LostOwnership);
    }
    assert_eq!(record(trial, &claim).await, before);
    assert_eq!(trial.bodies().await, 0);
    assert_eq!(trial.store().finish(&new, &completed(), &KEPT).await.unwrap(), Fenced::Done);
    assert_eq!(
        trial.store().finish(&new, &RunOutcome::Unknown, &KEPT).await.unwrap(),
        Fenced::LostOwnership,
        "no outcome is rewritten"
    );
    assert_eq!(trial.store().release(&new).await.unwrap(), Fenced::LostOwnership);
    assert_eq!(record(trial, &claim).await.state, State::Completed);
}

/// A release says that nothing happened, so the key is free. A key with an outcome is not released.
pub async fn o11_a_release_frees_the_key_only_while_it_runs<F: KeysFixture>(trial: &F) {
    let claim = claim(Mode::Edge, "k", 1);
    let first = take(trial, &claim).await;
    assert_eq!(trial.store().release(&first).await.unwrap(), Fenced::Done);
    assert_eq!(trial.store().find(&claim.identity).await.unwrap().record, None);
    let second = take(trial, &again(&claim)).await;
    assert_eq!(trial.store().release(&first).await.unwrap(), Fenced::LostOwnership, "another's claim is not freed");
    assert_eq!(trial.store().finish(&second, &RunOutcome::Unknown, &KEPT).await.unwrap(), Fenced::Done);
    assert_eq!(trial.store().release(&second).await.unwrap(), Fenced::LostOwnership, "what is unknown is never freed");
    assert_eq!(record(trial, &claim).await.state, State::UnknownRequiresRecovery);
}

/// The token that was sent identifies the claim: where the answer was lost, nobody knows its epoch.
///
/// Shown by: a token that the store makes, or a comparison of the epoch (Redis): the claim stays.
pub async fn o11_a_claim_whose_answer_was_lost_can_be_taken_back<F: KeysFixture>(trial: &F) {
    let lost = KeyClaim { lease: SHORT, ..claim(Mode::Bridged, "k", 1) };
    // Nothing to release yet.
    assert_eq!(trial.store().take_back(&lost, Basis::New).await.unwrap(), Fenced::LostOwnership);
    take(trial, &lost).await;
    let again = KeyClaim { owner: Uuid::now_v7(), ..lost.clone() };
    assert_eq!(trial.store().take_back(&again, Basis::New).await.unwrap(), Fenced::LostOwnership);
    let seen = over(trial, &lost).await;
    let taken = trial.store().claim(&again, Basis::TakeOver(&seen)).await.unwrap();
    assert!(taken.is_some(), "{taken:?}");
    assert_eq!(trial.store().take_back(&lost, Basis::New).await.unwrap(), Fenced::LostOwnership);
    assert_eq!(trial.store().take_back(&again, Basis::TakeOver(&seen)).await.unwrap(), Fenced::Done);
    assert_eq!(trial.store().find(&lost.identity).await.unwrap().record, None);
}

/// A claim that repeats a run of unknown outcome is taken back to UNKNOWN, under the id of the
/// operation: that run may have had an effect.
///
/// Shown by: a store that deletes whatever it takes back (Redis).
pub async fn o11_a_repeat_that_is_taken_back_is_unknown_again<F: KeysFixture>(trial: &F) {
    let first = KeyClaim { lease: SHORT, ..claim(Mode::Edge, "k", 1) };
    take(trial, &first).await;
    let seen = over(trial, &first).await;
    let again = KeyClaim { lease: LONG, owner: Uuid::now_v7(), ..first.clone() };
    let repeats = Basis::TakeOver(&seen);
    assert_eq!(trial.store().take_back(&again, repeats).await.unwrap(), Fenced::LostOwnership, "it has not arrived");
    trial.store().claim(&again, repeats).await.unwrap().unwrap();
    assert_eq!(trial.store().take_back(&again, repeats).await.unwrap(), Fenced::Done);
    let found = record(trial, &first).await;
    assert_eq!((found.state, found.lease), (State::UnknownRequiresRecovery, None));
    assert_eq!(found.operation_id, first.operation_id);
    let stats = trial.store().operation_stats().await.unwrap();
    assert_eq!((stats.in_progress, stats.unknown), (0, 1));
}

/// One fenced UPDATE makes an edge claim unknown when its lease is over. The old owner writes
/// nothing more.
///
/// Shown by: a lease that always counts as over; a reconciliation that counts as an attempt.
pub async fn o11_a_stale_edge_claim_becomes_unknown_once<F: KeysFixture>(trial: &F) {
    let live = claim(Mode::Edge, "live", 1);
    take(trial, &live).await;
    let seen = record(trial, &live).await;
    assert_eq!(trial.store().mark_unknown(&seen).await.unwrap(), Fenced::LostOwnership, "its lease lives");
    let bridged = KeyClaim { lease: SHORT, ..claim(Mode::Bridged, "bridged", 1) };
    take(trial, &bridged).await;
    let seen = over(trial, &bridged).await;
    assert_eq!(
        trial.store().mark_unknown(&seen).await.unwrap(),
        Fenced::LostOwnership,
        "it proves that nothing happened"
    );
    let stale = KeyClaim { lease: SHORT, ..claim(Mode::Edge, "stale", 1) };
    let owner = take(trial, &stale).await;
    let seen = over(trial, &stale).await;
    assert_eq!(trial.store().mark_unknown(&seen).await.unwrap(), Fenced::Done);
    assert_eq!(trial.store().mark_unknown(&seen).await.unwrap(), Fenced::LostOwnership);
    assert_eq!(trial.store().finish(&owner, &completed(), &KEPT).await.unwrap(), Fenced::LostOwnership);
    let unknown = record(trial, &stale).await;
    assert_eq!((unknown.state, unknown.lease), (State::UnknownRequiresRecovery, None));
    assert!(unknown.epoch > seen.epoch);
    // Who finds out how it ended executes nothing, so that is no attempt.
    let asks = KeyClaim { lease: LONG, owner: Uuid::now_v7(), ..stale.clone() };
    let asker = trial.store().claim(&asks, Basis::Reconcile(&unknown)).await.unwrap().unwrap();
    assert_eq!((asker.attempts, asker.operation_id), (1, stale.operation_id));
    assert_eq!(trial.store().finish(&asker, &RunOutcome::Unknown, &KEPT).await.unwrap(), Fenced::Done);
    let unknown = record(trial, &stale).await;
    assert_eq!((unknown.state, unknown.attempts), (State::UnknownRequiresRecovery, 1));
    // A route that declared its effects repeatable may execute it again.
    assert_eq!(winners(trial, &stale, Basis::TakeOver(&unknown)).await, 1);
}

/// Each run raises the number of attempts and keeps the operation id. There is no maximum.
pub async fn o29_what_failed_with_nothing_outstanding_runs_again<F: KeysFixture>(trial: &F) {
    let claim = claim(Mode::Edge, "k", 1);
    let mut owner = take(trial, &claim).await;
    let failed = RunOutcome::FailedRetryable { error_code: Some("TRY_AGAIN".to_owned()) };
    for attempt in 1..=5 {
        assert_eq!(owner.attempts, attempt);
        assert_eq!(trial.store().finish(&owner, &failed, &KEPT).await.unwrap(), Fenced::Done);
        let seen = record(trial, &claim).await;
        assert_eq!((seen.state, seen.attempts), (State::FailedRetryable, attempt));
        let anew = again(&claim);
        refused(trial, &anew, Basis::Anew(&seen)).await;
        owner = trial.store().claim(&anew, Basis::Reclaim(&seen)).await.unwrap().unwrap();
        refused(trial, &anew, Basis::Reclaim(&seen)).await;
        assert!(Some(record(trial, &claim).await.created_at) >= seen.outcome_at, "it begins again");
        assert_eq!((owner.operation_id, owner.generation), (claim.operation_id, 1));
    }
}

/// One UPDATE uses a key anew, with one winner and a new operation id, and only after its lifetime
/// is over.
///
/// Shown by: a renewal that does not compare `expires_at`; one that keeps `created_at`.
pub async fn o4_a_key_is_used_anew_only_after_its_time<F: KeysFixture>(trial: &F) {
    let first = claim(Mode::Edge, "k", 1);
    let owner = take(trial, &first).await;
    let anew = again(&first);
    let running = record(trial, &first).await;
    refused(trial, &anew, Basis::Anew(&running)).await;
    trial.store().finish(&owner, &completed(), &ENDED).await.unwrap();
    let expired = over(trial, &first).await;
    assert_eq!(winners(trial, &anew, Basis::Reclaim(&expired)).await, 0, "it did not fail");
    assert_eq!(winners(trial, &anew, Basis::Anew(&expired)).await, 1);
    let found = record(trial, &first).await;
    assert!(found.epoch > expired.epoch && Some(found.created_at) > expired.expires_at, "{found:?}");
    assert_eq!((found.state, found.generation, found.attempts), (State::InProgress, 2, 1));
    assert_eq!((found.operation_id, found.outcome_at, found.answer), (anew.operation_id, None, None));
    let kept = claim(Mode::Edge, "kept", 1);
    run(trial, &kept, &completed(), &KEPT).await;
    let seen = record(trial, &kept).await;
    assert_eq!(winners(trial, &kept, Basis::Anew(&seen)).await, 0, "its time is not over");
}

/// A body is removed at its time. Its record stays, so that the use of the key is still known.
pub async fn m99_bodies_go_and_their_records_stay<F: KeysFixture>(trial: &F) {
    let short = Retention { body: SHORT, ..KEPT };
    let claims: Vec<KeyClaim> = (0..5).map(|number| claim(Mode::Edge, &format!("k{number}"), 1)).collect();
    for one in &claims {
        run(trial, one, &completed(), &short).await;
    }
    let kept = claim(Mode::Edge, "kept", 1);
    run(trial, &kept, &completed(), &KEPT).await;
    for one in &claims {
        let purged = body_over(trial, one).await;
        assert_eq!(trial.store().body(&purged).await.unwrap(), None, "also before it is taken away");
        assert_eq!((purged.state, purged.fingerprint), (State::Completed, one.fingerprint.clone()));
    }
    trial.store().expire_bodies(2).await.unwrap();
    if trial.bodies_go_in_batches() {
        assert_eq!(trial.bodies().await, 4, "a batch is bounded");
        trial.store().expire_bodies(100).await.unwrap();
        assert_eq!(trial.bodies().await, 1);
    }
    let found = record(trial, &kept).await;
    assert!(trial.store().body(&found).await.unwrap().is_some());
    assert_eq!(trial.records().await, 6);
}

/// `body` returns the body of the last run of a key, whatever the sizes of earlier ones. A body
/// that `find` returns beside the record is the same, and `find_settled` returns it too.
///
/// Shown by: a claim that leaves the small body of the run before (PostgreSQL); a `find_settled`
/// that leaves out the body beside the record (PostgreSQL, MySQL).
pub async fn o4_a_body_of_any_size_is_that_of_the_last_run<F: KeysFixture>(trial: &F) {
    if trial.forgets_by_itself() {
        return;
    }
    let claim = claim(Mode::Edge, "k", 1);
    let ended = Retention { ttl: SHORT, ..KEPT };
    let mut owner = take(trial, &claim).await;
    for size in [5_000, 4, 6_000, 2_000, 2_500, 3] {
        let body = KeptBody { bytes: vec![7; size], ..KeptBody::default() };
        let answer = Answer { body: AnswerBody::Kept(body.clone()), ..answer() };
        assert_eq!(trial.store().finish(&owner, &RunOutcome::Completed(answer), &ended).await.unwrap(), Fenced::Done);
        let look = trial.store().find(&claim.identity).await.unwrap();
        assert_eq!(trial.store().find_settled(&claim.identity).await.unwrap().body, look.body, "{size}");
        assert!(look.body.is_none_or(|beside| beside == body), "{size}");
        assert_eq!(trial.store().body(&look.record.unwrap()).await.unwrap(), Some(body));
        let expired = over(trial, &claim).await;
        owner = trial.store().claim(&again(&claim), Basis::Anew(&expired)).await.unwrap().unwrap();
        assert_eq!(trial.store().find(&claim.identity).await.unwrap().body, None, "it runs");
    }
    // A released key begins at the first epoch again, of which a body is still stored. Shown by: a
    // body that is inserted beside it (on SQLite and MySQL the answer of the run is lost).
    assert_eq!(trial.store().release(&owner).await.unwrap(), Fenced::Done);
    let body = KeptBody { bytes: vec![8; 5_000], ..KeptBody::default() };
    let outcome = RunOutcome::Completed(Answer { body: AnswerBody::Kept(body.clone()), ..answer() });
    run(trial, &again(&claim), &outcome, &KEPT).await;
    assert_eq!(trial.store().body(&record(trial, &claim).await).await.unwrap(), Some(body));
}

/// A purge removes no record by its age alone: one that runs or is unknown stays. It records its
/// bound (O23), and its batches are bounded.
///
/// Shown by: a purge by age alone (PostgreSQL).
pub async fn m100_a_purge_takes_only_what_has_its_outcome<F: KeysFixture>(trial: &F) {
    let operation = claim(Mode::Edge, "k", 1).identity.operation().clone();
    let (running, unknown) = (claim(Mode::Edge, "running", 1), claim(Mode::Edge, "unknown", 1));
    take(trial, &KeyClaim { lease: SHORT, ..running.clone() }).await;
    run(trial, &unknown, &RunOutcome::Unknown, &GONE).await;
    let kept = claim(Mode::Edge, "kept", 1);
    run(trial, &kept, &completed(), &KEPT).await;
    let old: Vec<KeyClaim> = (0..5).map(|number| claim(Mode::Edge, &format!("old{number}"), 1)).collect();
    for one in &old {
        run(trial, one, &completed(), &GONE).await;
        if !trial.forgets_by_itself() {
            over(trial, one).await;
        }
    }
    let other = "another_operation".parse().unwrap();
    let skew = Duration::from_secs(60);
    assert_eq!(trial.store().purge_keys(&other, &GONE, skew, 100).await.unwrap(), 0);
    if !trial.forgets_by_itself() {
        assert_eq!(trial.store().find(&running.identity).await.unwrap().purged_below, None, "nothing was purged yet");
        let purged = eventually("two are old enough", || async {
            let purged = trial.store().purge_keys(&operation, &GONE, skew, 2).await.unwrap();
            (purged > 0).then_some(purged)
        })
        .await;
        assert!(purged <= 2, "a batch is bounded");
    }
    let (now, bound) = eventually("a record went", || async {
        let look = trial.store().find(&running.identity).await.unwrap();
        Some((look.now, look.purged_below?))
    })
    .await;
    assert!(bound > now && bound < now.after(skew), "above the time of every key that went");
    eventually("all are gone", || async {
        let _ = trial.store().purge_keys(&operation, &GONE, skew, 100).await.unwrap();
        (trial.records().await == 3).then_some(())
    })
    .await;
    assert_eq!(trial.store().purge_keys(&operation, &GONE, skew, 100).await.unwrap(), 0);
    for (one, state) in
        [(running, State::InProgress), (unknown, State::UnknownRequiresRecovery), (kept, State::Completed)]
    {
        assert_eq!(record(trial, &one).await.state, state);
    }
    // The bound stays.
    let later = trial.store().find(&old[0].identity).await.unwrap();
    assert!(later.record.is_none() && later.purged_below >= Some(bound));
}

fn is_guard(store: &dyn Keys) -> bool {
    store.durability() == Durability::Guard
}

/// The numbers that an alarm and a quota use count the open records of all operations.
///
/// Shown by: counting the open records of the first operation only, or of the last (PostgreSQL).
pub async fn m103_what_is_open_is_counted<F: KeysFixture>(trial: &F) {
    assert_eq!(trial.store().operation_stats().await.unwrap(), oncebox::store::OperationStats::default());
    let of = |operation: &str, key: &str| of_operation(operation, claim(Mode::Edge, key, 1));
    for (operation, key) in [("create_payment", "a"), ("refund", "b")] {
        take(trial, &of(operation, key)).await;
    }
    for (operation, key, outcome) in [("cancel", "c", RunOutcome::Unknown), ("list", "d", completed())] {
        run(trial, &of(operation, key), &outcome, &KEPT).await;
    }
    let stats = trial.store().operation_stats().await.unwrap();
    assert_eq!((stats.in_progress, stats.unknown), (2, 1));
    let open = [trial.store().open_of_tenant("t1").await.unwrap(), trial.store().open_of_tenant("t2").await.unwrap()];
    // A guard need not count them.
    assert!(open == [3, 0] || is_guard(trial.store()) && open == [0, 0], "{open:?}");
    assert!(stats.oldest_in_progress.is_some_and(|age| age < LONG));
}

/// A success whose body has this many bytes.
fn of_size(bytes: usize) -> RunOutcome {
    let body = AnswerBody::Kept(KeptBody { bytes: vec![7; bytes], ..KeptBody::default() });
    RunOutcome::Completed(Answer { body, ..answer() })
}

/// The quota on stored bytes counts the bodies of a tenant, small and large, until their lifetime
/// is over.
pub async fn m120_what_a_tenant_has_stored_is_counted<F: KeysFixture>(trial: &F) {
    if is_guard(trial.store()) {
        let refused = trial.store().stored_of_tenant("t1").await;
        assert!(matches!(refused, Err(StoreError::Refused(_))), "{refused:?}");
        return;
    }
    let stored = async || trial.store().stored_of_tenant("t1").await.unwrap();
    let of = |key| claim(Mode::Edge, key, 1);
    assert_eq!(stored().await, 0);
    // Each header counts with the bytes of its name and value, and eight more.
    run(trial, &of("a"), &completed(), &KEPT).await;
    let headers = 3 * 8 + ("link".len() + 4) + ("link".len() + 2) + ("location".len() + 11);
    let mut sum = u64::try_from(headers + 4).unwrap();
    assert_eq!(stored().await, sum);
    for (key, bytes) in [("b", 0), ("c", 1_000), ("d", 100_000)] {
        run(trial, &of(key), &of_size(bytes), &KEPT).await;
        sum += bytes as u64;
        assert_eq!(stored().await, sum, "{bytes}");
    }
    let RunOutcome::Completed(failure) = of_size(500) else { panic!("it is a success") };
    run(trial, &of("e"), &RunOutcome::FailedReplayable { answer: failure, error_code: None }, &KEPT).await;
    sum += 500;
    // These do not count: no body, no outcome, another tenant.
    let tombstone = Answer { body: AnswerBody::Tombstone(Tombstone::Oversize), ..answer() };
    run(trial, &of("f"), &RunOutcome::Completed(tombstone), &KEPT).await;
    run(trial, &of("g"), &RunOutcome::Unknown, &KEPT).await;
    take(trial, &of("h")).await;
    let others = KeyClaim { identity: identity("t2", "i-0123456789abcdef"), ..of("i") };
    run(trial, &others, &of_size(7), &KEPT).await;
    assert_eq!((stored().await, trial.store().stored_of_tenant("t2").await.unwrap()), (sum, 7));
    // Bodies whose lifetime is over do not count, removed or not, small or large. Nor does the body
    // that a key had before it was used anew.
    for (key, bytes) in [("j", 1_000), ("k", 100_000)] {
        run(trial, &of(key), &of_size(bytes), &ENDED).await;
    }
    let seen = over(trial, &of("k")).await;
    eventually("the bodies are over", || async { (stored().await == sum).then_some(()) }).await;
    trial.store().expire_bodies(10).await.unwrap();
    assert_eq!(stored().await, sum);
    let owner = trial.store().claim(&of("k"), Basis::Anew(&seen)).await.unwrap().unwrap();
    assert_eq!(stored().await, sum);
    trial.store().finish(&owner, &of_size(3_000), &KEPT).await.unwrap();
    assert_eq!(stored().await, sum + 3_000);
}

/// A claim in one of these modes that is committed alone would never get its outcome.
pub async fn o2_a_claim_of_another_door_is_refused<F: KeysFixture>(trial: &F) {
    for mode in [Mode::Transactional, Mode::Phased] {
        let claimed = trial.store().claim(&claim(mode, "k", 1), Basis::New).await;
        assert!(matches!(claimed, Err(StoreError::Refused(_))), "{mode}: {claimed:?}");
    }
    let stats = trial.store().operation_stats().await.unwrap();
    assert_eq!((stats.in_progress, stats.unknown), (0, 0));
}
