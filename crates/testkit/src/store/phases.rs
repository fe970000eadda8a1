//! Cases of operations in phases (O1, O3, O4, O5, O8, O9, O13, O16, O22, M32, M100): one drives,
//! what it knew must still be so, and record, operation and intents change together.

use std::time::Duration;

use uuid::Uuid;

use super::keys::{KEPT, LONG, PATIENCE, SHORT, answer, claim, completed, failed, identity, record, retryable};
use super::transactional::still_works;
use super::trial::{careless, effect, eventually, moved};
use super::{Fixture, Trial};
use oncebox::error::StoreError;
use oncebox::operation::provider::Settled;
use oncebox::operation::{Mode, Retention, Stage, State};
use oncebox::store::{
    AnswerBody, Basis, Begun, Driven, Due, FIRST_POINT, Fenced, KeyClaim, Keys, Leave, NewEvidence, NewIntent,
    NewOperation, PhaseTx, Phases, Proof, RunOutcome, Sealed, StoredOperation, Taken,
};

/// Hands an operation back so that it is due at once and counts no attempt.
pub(super) const AT_ONCE: Due = Due { after: Some(Duration::ZERO), attempt: false };
/// The answer of a phase that moved on.
pub(super) const MOVED: (Proof, Fenced) = (Proof::Same, Fenced::Done);
const LOST: (Proof, Fenced) = (Proof::Same, Fenced::LostOwnership);

type Tx = Box<dyn PhaseTx>;

/// A command under a key of the tenant `t1`, with this lease.
pub(super) fn new_operation(key: &str, lease: Duration) -> NewOperation {
    NewOperation {
        claim: KeyClaim { lease, ..claim(Mode::Phased, key, 1) },
        flow: "create_charge".to_owned(),
        flow_version: 2,
        command: Sealed { bytes: vec![0, 0xff, b'c'], kid: Some("k1".to_owned()) },
    }
}

/// An intent whose bytes are no text.
pub(super) fn intent(effect: &str, provider_key: &str) -> NewIntent {
    NewIntent {
        effect: effect.to_owned(),
        strategy: "key_and_query".to_owned(),
        provider_key: provider_key.to_owned(),
        request: Sealed { bytes: vec![0, 0xfe, b'{', b'}', 0], kid: None },
        adapter: "charges".to_owned(),
        adapter_version: 3,
        undoes: None,
    }
}

/// What a provider said to the first send of `charge`.
pub(super) fn observed(driven: &Driven, verdict: &str) -> NewEvidence {
    NewEvidence {
        operation_id: driven.operation_id,
        effect: "charge".to_owned(),
        epoch: driven.epoch,
        send: 1,
        kind: "answer".to_owned(),
        verdict: verdict.to_owned(),
        status: Some(201),
        bytes: Sealed { bytes: vec![0xff, 0], kid: Some("k2".to_owned()) },
    }
}

/// What a run that had lost its lease reported of its end.
pub(super) fn run_ended(operation_id: Uuid, verdict: &str) -> NewEvidence {
    NewEvidence {
        operation_id,
        effect: String::new(),
        epoch: 1,
        send: 0,
        kind: "run".to_owned(),
        verdict: verdict.to_owned(),
        status: Some(201),
        bytes: Sealed::default(),
    }
}

async fn begin<F: Fixture>(trial: &Trial<F>, new: &NewOperation) -> Tx {
    match trial.store.begin_first(new, Basis::New, PATIENCE).await.unwrap() {
        Begun::Claimed(tx) => tx,
        other => panic!("not claimed: {other:?}"),
    }
}

pub(super) async fn local<F: Fixture>(trial: &Trial<F>, new: &NewOperation) -> Driven {
    let mut tx = begin(trial, new).await;
    let driven = tx.driven().clone();
    assert_eq!(tx.advance(FIRST_POINT, "LOCAL", Stage::Local, &[]).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
    driven
}

/// Moves the operation on and commits.
pub(super) async fn step<F: Fixture>(
    trial: &Trial<F>,
    driven: &Driven,
    from: &str,
    to: &str,
    stage: Stage,
    intents: &[NewIntent],
) {
    let mut tx = trial.store.begin_phase(driven).await.unwrap();
    assert_eq!(tx.advance(from, to, stage, intents).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
}

/// Ends the operation and commits.
pub(super) async fn end<F: Fixture>(
    trial: &Trial<F>,
    driven: &Driven,
    from: &str,
    outcome: &RunOutcome,
    retention: &Retention,
) {
    let mut tx = trial.store.begin_phase(driven).await.unwrap();
    assert_eq!(tx.finish(from, outcome, retention).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
}

/// Settles the effect `charge` as done, and moves on from `SENT`.
pub(super) async fn confirm<F: Fixture>(trial: &Trial<F>, driven: &Driven) {
    let mut tx = trial.store.begin_phase(driven).await.unwrap();
    tx.settle("charge", Settled::Succeeded);
    assert_eq!(tx.advance("SENT", "CONFIRMED", Stage::Settled, &[]).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
}

/// Waits until the lease of the operation is over.
pub(super) async fn lease_over<F: Fixture>(trial: &Trial<F>, driven: &Driven) {
    eventually("its lease is over", || async { stored(trial, driven).await.lease_until.is_none().then_some(()) }).await;
}

/// An operation with the intent `charge`, at the point `SENT`, driven by us.
pub(super) async fn outstanding<F: Fixture>(trial: &Trial<F>, new: &NewOperation) -> Driven {
    let driven = local(trial, new).await;
    let intents = [intent("charge", &format!("charge-{}", driven.operation_id))];
    step(trial, &driven, "LOCAL", "SENT", Stage::Outstanding, &intents).await;
    driven
}

pub(super) async fn stored<F: Fixture>(trial: &Trial<F>, driven: &Driven) -> StoredOperation {
    trial.store.operation(driven.operation_id).await.unwrap().unwrap()
}

/// Takes an operation up once its lease is over.
pub(super) async fn taken<F: Fixture>(trial: &Trial<F>, operation_id: Uuid) -> (Driven, StoredOperation) {
    eventually("the lease is over", || async {
        match trial.store.take_operation(operation_id, LONG).await.unwrap() {
            Taken::Driven(driven, found) => Some((driven, *found)),
            Taken::Not(_) => None,
            Taken::Missing => panic!("it is gone"),
        }
    })
    .await
}

/// The operation without the time at which it was read, which differs in every read.
fn apart(operation: StoredOperation) -> StoredOperation {
    StoredOperation { now: oncebox::adapter::DbTime { micros: 0 }, ..operation }
}

/// Before the commit nothing of the operation is there, and after it everything. A duplicate is
/// refused meanwhile.
///
/// Shown by: inserting the operation on another connection.
pub async fn o22_claim_command_operation_and_first_phase_commit_together<F: Fixture>(trial: &Trial<F>) {
    let new = new_operation("k", LONG);
    for commit in [false, true] {
        let mut tx = begin(trial, &new).await;
        assert_eq!((tx.driven().operation_id, tx.driven().epoch), (new.claim.operation_id, 1));
        effect::<F>(tx.connection().unwrap(), "charge", "1").await.unwrap();
        let again = new_operation("k", LONG);
        let begins = trial.store.begin_first(&again, Basis::New, Duration::from_millis(50));
        // Less than the usual lock wait of a server.
        let other = tokio::time::timeout(PATIENCE, begins).await.unwrap().unwrap();
        assert!(matches!(other, Begun::Locked), "{other:?}");
        let intents = [intent("charge", "charge-7")];
        assert_eq!(tx.advance(FIRST_POINT, "SENT", Stage::Outstanding, &intents).await.unwrap(), MOVED);
        if commit {
            tx.commit().await.unwrap();
            break;
        }
        tx.rollback().await.unwrap();
        assert_eq!(trial.store.find(&new.claim.identity).await.unwrap().record, None);
        assert_eq!(trial.store.operation(new.claim.operation_id).await.unwrap(), None);
        assert_eq!(trial.effects("charge").await, 0);
    }
    let found = trial.store.operation(new.claim.operation_id).await.unwrap().unwrap();
    assert_eq!(found.identity.as_ref(), Some(&new.claim.identity));
    assert_eq!((found.flow.as_str(), found.flow_version, &found.command), ("create_charge", 2, &new.command));
    assert_eq!((found.point.as_str(), found.stage, found.epoch, found.attempts), ("SENT", Stage::Outstanding, 1, 0));
    assert!(found.lease_until > Some(found.now) && found.due_at.is_some() && found.parked.is_none());
    assert_eq!((found.intents.len(), found.evidence.len(), found.outcome_at), (1, 0, None));
    assert_eq!(trial.effects("charge").await, 1);
    let look = trial.store.find(&new.claim.identity).await.unwrap();
    let seen = look.record.unwrap();
    assert_eq!((seen.mode, seen.state, seen.operation_id), (Mode::Phased, State::InProgress, found.operation_id));
    assert!(!seen.lease_left(look.now).is_zero(), "the lease is that of the operation");
    match trial.store.begin_first(&new_operation("k", LONG), Basis::New, PATIENCE).await.unwrap() {
        Begun::Existing(record) => assert_eq!(*record, seen),
        other => panic!("a key was claimed twice: {other:?}"),
    }
    let another = NewOperation { claim: claim(Mode::Transactional, "other", 1), ..new };
    assert!(trial.store.begin_first(&another, Basis::New, PATIENCE).await.is_err(), "a claim of another mode");
}

/// One of twenty drives it, also where the driver before died. A lease that ended counts as an
/// attempt; an operation that was handed back does not.
///
/// Shown by: a take-over that does not check the lease.
pub async fn o9_of_twenty_that_take_an_operation_up_one_drives_it<F: Fixture>(trial: &Trial<F>) {
    let live = local(trial, &new_operation("live", LONG)).await;
    assert!(
        matches!(trial.store.take_operation(live.operation_id, LONG).await.unwrap(), Taken::Not(_)),
        "it is driven"
    );
    assert!(matches!(trial.store.take_operation(Uuid::now_v7(), LONG).await.unwrap(), Taken::Missing));
    let free = local(trial, &new_operation("free", LONG)).await;
    assert_eq!(trial.store.hand_back(&free, Due { after: Some(LONG), attempt: false }).await.unwrap(), Fenced::Done);
    let dead = local(trial, &new_operation("dead", SHORT)).await;
    lease_over(trial, &dead).await;
    for (old, attempts) in [(free, 0), (dead, 1)] {
        let racing = (0..20).map(|_| trial.store.take_operation(old.operation_id, LONG));
        let mut won = Vec::new();
        for taken in futures_util::future::join_all(racing).await {
            match taken.unwrap() {
                Taken::Driven(driven, found) => won.push((driven, found)),
                Taken::Not(found) => assert_eq!(found.epoch, 2),
                Taken::Missing => panic!("it is gone"),
            }
        }
        assert_eq!(won.len(), 1);
        assert_eq!((won[0].0.epoch, won[0].1.epoch, won[0].1.attempts), (2, 2, attempts));
        assert_eq!(won[0].1.point, "LOCAL");
    }
}

/// The lease was written before the clock went back (R22).
pub async fn r22_a_lease_of_an_operation_longer_than_its_length_is_over<F: Fixture>(trial: &Trial<F>) {
    let driven = outstanding(trial, &new_operation("k", LONG)).await;
    trial.shorten_leases_of("operation").await;
    assert_eq!(stored(trial, &driven).await.lease_until, None);
    assert_eq!(trial.store.begin_send(&driven, "charge").await.unwrap(), None, "its lease is over");
    let (next, _) = taken(trial, driven.operation_id).await;
    assert_eq!(next.epoch, 2);
}

/// Each due operation is taken once, the longest due first. An operation that is not due, of
/// another flow, or of a version that the worker does not have is not taken.
///
/// Shown by: a query without the versions; a statement not fenced by the lease.
pub async fn o22_twenty_workers_take_different_due_operations_of_their_versions<F: Fixture>(trial: &Trial<F>) {
    let mut due = Vec::new();
    for number in 0..40 {
        let driven = local(trial, &new_operation(&format!("k{number}"), LONG)).await;
        assert_eq!(trial.store.hand_back(&driven, AT_ONCE).await.unwrap(), Fenced::Done);
        due.push(driven.operation_id);
    }
    let newer = NewOperation { flow_version: 3, ..new_operation("newer", LONG) };
    let other = NewOperation { flow: "refund".to_owned(), ..new_operation("other", LONG) };
    for new in [newer, other] {
        let driven = local(trial, &new).await;
        trial.store.hand_back(&driven, AT_ONCE).await.unwrap();
    }
    let later = local(trial, &new_operation("later", LONG)).await;
    trial.store.hand_back(&later, Due { after: Some(LONG), attempt: true }).await.unwrap();
    local(trial, &new_operation("driven", LONG)).await;
    let first = trial.store.take_due("create_charge", &[1, 2], 3, LONG, &[]).await.unwrap();
    let first: Vec<Uuid> = first.into_iter().map(|(driven, _)| driven.operation_id).collect();
    assert_eq!(first, due[..3]);
    let racing = (0..20).map(|_| trial.store.take_due("create_charge", &[1, 2], 3, LONG, &[]));
    let mut won: Vec<Uuid> = first;
    let mut winners = 0;
    for taken in futures_util::future::join_all(racing).await {
        let taken = taken.unwrap();
        winners += usize::from(!taken.is_empty());
        for (driven, found) in taken {
            assert_eq!((driven.operation_id, driven.epoch, found.epoch), (found.operation_id, 2, 2));
            assert_eq!(trial.store.drive_on(&driven, LONG).await.unwrap(), Fenced::Done);
            won.push(driven.operation_id);
        }
    }
    assert!(winners > 1 || !F::CONCURRENT_WRITERS, "{winners} got any");
    won.extend(
        trial.store.take_due("create_charge", &[2], 100, LONG, &[]).await.unwrap().iter().map(|(d, _)| d.operation_id),
    );
    won.sort();
    assert_eq!(won, due, "each once, and no other");
    assert!(trial.store.take_due("create_charge", &[], 100, LONG, &[]).await.unwrap().is_empty());
    assert_eq!(trial.store.take_due("create_charge", &[3, 4], 100, LONG, &[]).await.unwrap().len(), 1);
    let later = stored(trial, &later).await;
    assert_eq!((later.attempts, later.due_at > Some(later.now)), (1, true));
}

/// The operations of such a tenant are not taken, however long they are due. Those of other tenants
/// are.
///
/// Shown to fail: with a query that ignores the tenants to leave out.
pub async fn a_tenant_that_has_its_share_is_left_out<F: Fixture>(trial: &Trial<F>) {
    let mut due = Vec::new();
    for (number, tenant) in ["t1", "t1", "t2", "t1", "t3"].into_iter().enumerate() {
        let new = new_operation(&format!("k{number}"), LONG);
        let identity = identity(tenant, &format!("k{number}-0123456789abcdef"));
        let new = NewOperation { claim: KeyClaim { identity, ..new.claim }, ..new };
        let driven = local(trial, &new).await;
        assert_eq!(trial.store.hand_back(&driven, AT_ONCE).await.unwrap(), Fenced::Done);
        due.push(driven.operation_id);
    }
    let mut rounds = Vec::new();
    for (limit, but) in [(1, &["t1"][..]), (10, &["t1", "t2"]), (10, &["t1"]), (10, &["nobody"])] {
        let but: Vec<Vec<u8>> = but.iter().map(|tenant| tenant.as_bytes().to_vec()).collect();
        let taken = trial.store.take_due("create_charge", &[2], limit, LONG, &but).await.unwrap();
        rounds.push(taken.into_iter().map(|(driven, _)| driven.operation_id).collect::<Vec<_>>());
    }
    assert_eq!(rounds, [vec![due[2]], vec![due[4]], vec![], vec![due[0], due[1], due[3]]]);
}

/// An old driver changes nothing, in every fenced statement. The evidence that it brings is kept
/// (O8).
///
/// Shown by: each statement without its comparison of the epoch, and of the token.
pub async fn o9_a_driver_of_an_older_epoch_changes_nothing_and_its_evidence_is_kept<F: Fixture>(trial: &Trial<F>) {
    let new = new_operation("k", Duration::from_millis(400));
    let old = outstanding(trial, &new).await;
    let (mine, _) = taken(trial, old.operation_id).await;
    let before = (apart(stored(trial, &mine).await), record(trial, &new.claim).await);
    // Forged owners: one has the new epoch, the other the new token.
    let forged = [Driven { epoch: mine.epoch, ..old.clone() }, Driven { owner: mine.owner, ..old.clone() }];
    for stale in [&old, &forged[0], &forged[1]] {
        assert_eq!(trial.store.drive_on(stale, LONG).await.unwrap(), Fenced::LostOwnership);
        assert_eq!(trial.store.begin_send(stale, "charge").await.unwrap(), None);
        assert_eq!(trial.store.hand_back(stale, AT_ONCE).await.unwrap(), Fenced::LostOwnership);
        assert_eq!(trial.store.leave(stale, Leave::Doubt(AT_ONCE)).await.unwrap(), Fenced::LostOwnership);
        assert_eq!(trial.store.park(stale, "no").await.unwrap(), Fenced::LostOwnership);
        let mut tx = trial.store.begin_phase(stale).await.unwrap();
        tx.settle("charge", Settled::Succeeded);
        assert_eq!(tx.advance("SENT", "CONFIRMED", Stage::Settled, &[]).await.unwrap(), LOST);
        tx.commit().await.unwrap();
        let mut tx = trial.store.begin_phase(stale).await.unwrap();
        assert_eq!(tx.finish("SENT", &completed(), &KEPT).await.unwrap(), LOST);
        tx.commit().await.unwrap();
    }
    assert_eq!((apart(stored(trial, &mine).await), record(trial, &new.claim).await), before);
    let evidence = observed(&old, "success");
    trial.store.observe(&evidence).await.unwrap();
    let mut tx = trial.store.begin_phase(&mine).await.unwrap();
    let seen = tx.evidence().await.unwrap();
    assert_eq!((seen.len(), &seen[0].evidence), (1, &evidence), "the deciding transaction sees it");
    assert_eq!(tx.finish("SENT", &completed(), &KEPT).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
    let late = observed(&old, "failure");
    trial.store.observe(&late).await.unwrap();
    let found = stored(trial, &mine).await;
    assert_eq!((found.stage, found.evidence.len()), (Stage::Succeeded, 2));
    assert!(found.evidence[0].at <= found.evidence[1].at);
    let mut tx = trial.store.begin_phase(&mine).await.unwrap();
    assert_eq!(tx.finish("SENT", &completed(), &KEPT).await.unwrap(), LOST, "no outcome is rewritten");
    tx.rollback().await.unwrap();
}

/// A phase that comes second does not move on, and its effects are rolled back.
///
/// Shown by: an UPDATE that does not compare the point.
pub async fn o9_a_phase_moves_on_only_from_the_point_it_knew<F: Fixture>(trial: &Trial<F>) {
    let driven = local(trial, &new_operation("k", LONG)).await;
    for finish in [false, true] {
        let mut tx = trial.store.begin_phase(&driven).await.unwrap();
        effect::<F>(tx.connection().unwrap(), "late", "1").await.unwrap();
        let moved = if finish {
            tx.finish("SENT", &completed(), &KEPT).await.unwrap()
        } else {
            tx.advance("SENT", "LOCAL", Stage::Local, &[]).await.unwrap()
        };
        assert_eq!(moved, LOST);
        tx.rollback().await.unwrap();
    }
    assert_eq!((stored(trial, &driven).await.point.as_str(), trial.effects("late").await), ("LOCAL", 0));
    step(trial, &driven, "LOCAL", "NEXT", Stage::Local, &[]).await;
    let mut tx = trial.store.begin_phase(&driven).await.unwrap();
    assert_eq!(tx.advance("LOCAL", "NEXT", Stage::Local, &[]).await.unwrap(), LOST, "once");
    tx.rollback().await.unwrap();
    let unknown = Driven { operation_id: Uuid::now_v7(), ..driven };
    assert!(trial.store.begin_phase(&unknown).await.is_err());
}

/// The bytes of an intent come back unchanged. A second effect with the same name, or with the same
/// provider's key, is refused together with its phase.
///
/// Shown by: storing the request as text; having no unique key.
pub async fn o5_an_effect_its_key_and_its_bytes_are_committed_once<F: Fixture>(trial: &Trial<F>) {
    let driven = local(trial, &new_operation("k", LONG)).await;
    let every_byte = Sealed { bytes: (0..=255).collect(), kid: Some("k9".to_owned()) };
    let first = NewIntent { request: every_byte, ..intent("charge", "\u{e9}-Key") };
    step(trial, &driven, "LOCAL", "SENT", Stage::Outstanding, std::slice::from_ref(&first)).await;
    let found = stored(trial, &driven).await;
    assert_eq!((&found.intents[0].intent, found.intents[0].sends), (&first, 1));
    assert_eq!((found.intents[0].first_sent_at, &found.intents[0].outcome), (found.intents[0].last_sent_at, &None));
    let other = local(trial, &new_operation("other", LONG)).await;
    for (whose, from, twice) in [
        (&driven, "SENT", intent("charge", "another")),
        (&driven, "SENT", intent("again", "\u{e9}-Key")),
        (&other, "LOCAL", intent("charge", "\u{e9}-Key")),
    ] {
        let mut tx = trial.store.begin_phase(whose).await.unwrap();
        let refused = tx.advance(from, "NEXT", Stage::Outstanding, &[twice]).await;
        assert!(matches!(refused, Err(oncebox::StoreError::Refused(_))), "{refused:?}");
        tx.rollback().await.unwrap();
        assert_eq!(stored(trial, whose).await.point, from);
    }
    // Keys that differ in one byte are different, and so are equal keys of different adapters.
    let others = [intent("folded", "\u{e9}-key"), intent("padded", "\u{e9}-Key ")];
    let elsewhere = NewIntent { adapter: "refunds".to_owned(), ..intent("elsewhere", "\u{e9}-Key") };
    let intents = [&others[..], &[elsewhere]].concat();
    step(trial, &other, "LOCAL", "SENT", Stage::Outstanding, &intents).await;
    assert_eq!(stored(trial, &other).await.intents.len(), 3);
}

/// Each send gets a new number, whoever begins it. An effect that is settled is not sent.
///
/// Shown by: counting the number outside the statement.
pub async fn o5_sends_are_counted_under_races_and_after_a_crash<F: Fixture>(trial: &Trial<F>) {
    let driven = outstanding(trial, &new_operation("k", LONG)).await;
    let racing = (0..20).map(|_| trial.store.begin_send(&driven, "charge"));
    let sends: Vec<u32> =
        futures_util::future::join_all(racing).await.into_iter().map(|sent| sent.unwrap().unwrap()).collect();
    let mut sorted = sends.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (2..=21).collect::<Vec<u32>>());
    assert_eq!(trial.store.begin_send(&driven, "refund").await.unwrap(), None, "there is no such effect");
    // The driver dies, and the next one continues the count.
    assert_eq!(trial.store.drive_on(&driven, SHORT).await.unwrap(), Fenced::Done);
    let (next, _) = taken(trial, driven.operation_id).await;
    assert_eq!(trial.store.begin_send(&driven, "charge").await.unwrap(), None);
    assert_eq!(trial.store.begin_send(&next, "charge").await.unwrap(), Some(22));
    let found = stored(trial, &next).await;
    assert!(found.intents[0].first_sent_at < found.intents[0].last_sent_at);
    confirm(trial, &next).await;
    assert_eq!(trial.store.begin_send(&next, "charge").await.unwrap(), None, "it is settled");
    // A driver whose lease is over begins no send, also where nobody has taken the operation yet.
    let dead = outstanding(trial, &new_operation("dead", LONG)).await;
    trial.store.drive_on(&dead, SHORT).await.unwrap();
    lease_over(trial, &dead).await;
    assert_eq!(trial.store.begin_send(&dead, "charge").await.unwrap(), None);
}

/// After each step the state of the record fits the stage of the operation (O9). Both have the
/// outcome, and the record has its body (M49).
///
/// Shown by: each of the steps without its change of the record; a step that gives the record a new
/// time though it keeps its state (on PostgreSQL it then costs entries of all indexes).
pub async fn m32_the_record_is_in_the_state_of_the_stage_after_each_step<F: Fixture>(trial: &Trial<F>) {
    let new = new_operation("k", LONG);
    let check = |driven: Driven, stage: Stage| {
        let claim = new.claim.clone();
        async move {
            let (found, seen) = (stored(trial, &driven).await, record(trial, &claim).await);
            assert_eq!((found.stage, seen.state), (stage, stage.record()));
            assert_eq!(
                (found.outcome_at, seen.outcome_at.is_some()),
                (seen.outcome_at, matches!(stage, Stage::Succeeded | Stage::Failed))
            );
        }
    };
    let mut driven = local(trial, &new).await;
    check(driven.clone(), Stage::Local).await;
    let records = trial.table("idempotency_request");
    trial.run(&format!("update {records} set updated_at = {}", moved::<F>("created_at", -60))).await;
    let unchanged = format!("select count(*) from {records} where updated_at < created_at");
    step(trial, &driven, "LOCAL", "SENT", Stage::Outstanding, &[intent("charge", "c")]).await;
    check(driven.clone(), Stage::Outstanding).await;
    assert_eq!(trial.number(&unchanged).await, 1, "its state stays");
    let due = Due { after: Some(Duration::ZERO), attempt: true };
    trial.store.leave(&driven, Leave::Doubt(due)).await.unwrap();
    check(driven.clone(), Stage::Unknown).await;
    assert_eq!(trial.number(&unchanged).await, 0, "its state is another one");
    let (next, found) = taken(trial, driven.operation_id).await;
    assert_eq!(found.attempts, 1);
    driven = next;
    check(driven.clone(), Stage::Unknown).await;
    trial.store.hand_back(&driven, AT_ONCE).await.unwrap();
    driven = taken(trial, driven.operation_id).await.0;
    check(driven.clone(), Stage::Unknown).await;
    let mut tx = trial.store.begin_phase(&driven).await.unwrap();
    tx.settle("charge", Settled::Failed);
    assert_eq!(tx.advance("SENT", "CONFIRMED", Stage::Settled, &[]).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
    check(driven.clone(), Stage::Settled).await;
    assert_eq!(stored(trial, &driven).await.intents[0].outcome.as_deref(), Some("failed"));
    trial.store.leave(&driven, Leave::Doubt(AT_ONCE)).await.unwrap();
    driven = taken(trial, driven.operation_id).await.0;
    for outcome in [RunOutcome::Unknown, retryable()] {
        let mut tx = trial.store.begin_phase(&driven).await.unwrap();
        assert!(tx.finish("CONFIRMED", &outcome, &KEPT).await.is_err(), "{outcome:?} is no end");
        tx.rollback().await.unwrap();
    }
    for commit in [false, true] {
        let mut tx = trial.store.begin_phase(&driven).await.unwrap();
        effect::<F>(tx.connection().unwrap(), "void", "1").await.unwrap();
        assert_eq!(tx.finish("CONFIRMED", &failed(), &KEPT).await.unwrap(), MOVED);
        if commit {
            tx.commit().await.unwrap();
            check(driven.clone(), Stage::Failed).await;
        } else {
            tx.rollback().await.unwrap();
            check(driven.clone(), Stage::Unknown).await;
        }
        assert_eq!(trial.effects("void").await, i64::from(commit));
    }
    let (found, seen) = (stored(trial, &driven).await, record(trial, &new.claim).await);
    assert_eq!((found.lease_until, found.due_at, seen.lease), (None, None, None));
    let AnswerBody::Kept(body) = answer().body else { panic!("a kept body") };
    assert_eq!(trial.store.body(&seen).await.unwrap(), Some(body));
    let differ = format!(
        "select count(*) from {} o join {} r on r.operation_id = o.operation_id where o.expires_at <> r.expires_at",
        trial.table("operation"),
        trial.table("idempotency_request")
    );
    assert_eq!(trial.number(&differ).await, 0, "one life for both");
}

/// `advance` refuses a stage with an outcome, which `finish` writes, and an intent at a stage
/// before the first intent (O13).
pub async fn o13_a_phase_does_not_move_on_to_what_it_is_not<F: Fixture>(trial: &Trial<F>) {
    let driven = local(trial, &new_operation("k", LONG)).await;
    for (stage, intents) in [
        (Stage::Succeeded, vec![]),
        (Stage::Failed, vec![]),
        (Stage::Local, vec![intent("charge", "c")]),
        (Stage::Received, vec![intent("charge", "c")]),
    ] {
        let mut tx = trial.store.begin_phase(&driven).await.unwrap();
        let moved = tx.advance("LOCAL", "NEXT", stage, &intents).await;
        assert!(matches!(moved, Err(StoreError::Refused(_))), "{stage:?}: {moved:?}");
        tx.rollback().await.unwrap();
    }
    let mut tx = trial.store.begin_phase(&driven).await.unwrap();
    tx.settle("charge", Settled::Succeeded);
    let moved = tx.advance("LOCAL", "NEXT", Stage::Local, &[]).await;
    assert!(matches!(moved, Err(StoreError::Refused(_))), "an effect that is not there: {moved:?}");
    tx.rollback().await.unwrap();
    assert_eq!(stored(trial, &driven).await.point, "LOCAL");
}

/// After a rejection the claim stays with its answer, and nothing else of the first phase.
pub async fn o13_a_rejection_of_the_first_phase_is_remembered_without_its_effects<F: Fixture>(trial: &Trial<F>) {
    for swallows in [false, true] {
        let key = format!("k{swallows}");
        let new = new_operation(&key, LONG);
        let mut tx = begin(trial, &new).await;
        effect::<F>(tx.connection().unwrap(), &key, "1").await.unwrap();
        if swallows {
            careless::<F>(tx.connection().unwrap(), "insert into no_such_table (a) values (1)").await;
        }
        assert_eq!(tx.undo_effects().await.unwrap(), Proof::Same);
        assert_eq!(tx.finish(FIRST_POINT, &failed(), &KEPT).await.unwrap(), MOVED);
        tx.commit().await.unwrap();
        let found = record(trial, &new.claim).await;
        assert_eq!((found.state, trial.effects(&key).await), (State::FailedReplayable, 0));
        let AnswerBody::Kept(body) = answer().body else { panic!("a kept body") };
        assert_eq!(trial.store.body(&found).await.unwrap(), Some(body));
    }
}

/// The proof finds this, whatever the handler did. What the handler committed stays, so the
/// operation is parked and no phase runs again.
///
/// Where something stands, the answer is `Ended`: after `Aborted` a driver runs the phase again.
///
/// Shown by: not comparing the transaction id; taking a lost savepoint for proof.
pub async fn o1_a_handler_that_ends_the_transaction_of_a_phase_is_found_out<F: Fixture>(trial: &Trial<F>) {
    let ends: [&[&str]; 5] =
        [&["commit"], &["commit", "begin"], &["rollback"], &["rollback", "begin"], &["commit", "start transaction"]];
    for (number, statements) in ends.into_iter().enumerate() {
        let ways = ["finish", "advance", "undo"];
        for (first, way) in ways.into_iter().flat_map(|way| [(true, way), (false, way)]) {
            let key = format!("end{number}{first}{way}");
            let new = new_operation(&key, LONG);
            let driven = if first { None } else { Some(outstanding(trial, &new).await) };
            let mut tx = match &driven {
                None => begin(trial, &new).await,
                Some(driven) => trial.store.begin_phase(driven).await.unwrap(),
            };
            let driven = tx.driven().clone();
            let from = if first { FIRST_POINT } else { "SENT" };
            effect::<F>(tx.connection().unwrap(), &key, "before").await.unwrap();
            for statement in statements {
                careless::<F>(tx.connection().unwrap(), statement).await;
            }
            let _ = effect::<F>(tx.connection().unwrap(), &key, "after").await;
            let proof = match way {
                "finish" => tx.finish(from, &completed(), &KEPT).await.map(|(proof, _)| proof),
                "undo" => tx.undo_effects().await,
                _ => {
                    tx.settle("charge", Settled::Succeeded);
                    tx.advance(from, "NEXT", Stage::Settled, &[intent("more", &key)]).await.map(|(proof, _)| proof)
                }
            };
            // After the handler ended the transaction, there may be nothing to roll back.
            let _ = tx.rollback().await;
            // Whoever may not tell says that it is to be tried again.
            let proof = match proof {
                Err(error) if way == "undo" && error.is_transient() => Proof::Aborted,
                proof => proof.unwrap(),
            };
            assert_ne!(proof, Proof::Same, "{statements:?} {first} {way}");
            let committed = statements[0] == "commit" && F::CONCURRENT_WRITERS;
            let stands = trial.effects(&key).await > 0;
            assert!(stands || !committed, "{statements:?}");
            assert!(proof == Proof::Ended || !stands, "{statements:?}: `Aborted` says that nothing stands");
            let found = trial.store.operation(driven.operation_id).await.unwrap();
            assert_eq!(found.is_some(), committed || !first, "{statements:?}");
            if let Some(found) = found {
                assert_eq!((found.point.as_str(), found.outcome_at), (from, None), "{statements:?}");
                assert!(found.intents.iter().all(|intent| intent.outcome.is_none()));
                assert_eq!(trial.store.park(&driven, "transaction-ended").await.unwrap(), Fenced::Done);
                assert_eq!(record(trial, &new.claim).await.state, State::UnknownRequiresRecovery);
            }
        }
    }
    still_works(trial).await;
}

/// The number of the send is free again for the driver of the operation. No other driver can take a
/// send back, and only the last send can be taken back.
///
/// Shown by: a statement that does not compare the epoch, or the number of the send.
pub async fn a_send_that_did_not_leave_is_taken_back_by_its_driver_alone<F: Fixture>(trial: &Trial<F>) {
    let driven = outstanding(trial, &new_operation("k", LONG)).await;
    let back =
        |driven: Driven, send: u32| async move { trial.store.take_back_send(&driven, "charge", send).await.unwrap() };
    let begin = |driven: Driven| async move { trial.store.begin_send(&driven, "charge").await.unwrap() };
    assert_eq!(back(driven.clone(), 1).await, Fenced::LostOwnership, "the first stands with its intent");
    for _ in 0..3 {
        assert_eq!(begin(driven.clone()).await, Some(2));
        assert_eq!(back(driven.clone(), 2).await, Fenced::Done);
        assert_eq!(back(driven.clone(), 2).await, Fenced::LostOwnership, "once");
    }
    assert_eq!((begin(driven.clone()).await, begin(driven.clone()).await), (Some(2), Some(3)));
    assert_eq!(back(driven.clone(), 2).await, Fenced::LostOwnership, "another one was begun since");
    trial.store.hand_back(&driven, AT_ONCE).await.unwrap();
    let (next, found) = taken(trial, driven.operation_id).await;
    assert_eq!(found.intents[0].sends, 3);
    assert_eq!(back(driven, 3).await, Fenced::LostOwnership, "it is another's by now");
    assert_eq!(back(next, 3).await, Fenced::Done);
}
