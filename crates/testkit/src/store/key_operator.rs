//! Cases of what an operator does with keys and operations (O6, O8, O9, O11): an act is refused
//! where an effect may have happened, and audited where it is done.

use std::time::{Duration, SystemTime};

use uuid::Uuid;

use super::keys::{
    ENDED, KEPT, LONG, SHORT, claim, completed, failed, outcome, over, record, retryable, run, take, timed,
};
use super::phases::{
    AT_ONCE, MOVED, confirm, end, intent, lease_over, local, new_operation, observed, outstanding, run_ended, step,
    stored, taken,
};
use super::trial::moved;
use super::{Fixture, KeysFixture, Trial};
use oncebox::StoreError;
use oncebox::adapter::{Announced, DbTime, Versions};
use oncebox::operation::provider::{Evidence, Proof as ProviderProof, Settled, Verdict};
use oncebox::operation::{Kid, Mode, Record, Stage, State};
use oncebox::store::{
    ActContext, Driven, Due, Fenced, KeyChange, KeyFilter, KeyOperator, Keys, NewEvidence, NewIntent, OperationFilter,
    Phases, Resolution, RunOutcome, Taken,
};

fn context(dry_run: bool) -> ActContext {
    ActContext { actor: "on-call".to_owned(), reason: "as agreed".to_owned(), dry_run, redrive_age_max: None }
}

pub(super) fn really() -> ActContext {
    context(false)
}

fn all() -> KeyFilter {
    KeyFilter { limit: 100, ..KeyFilter::default() }
}

fn any() -> OperationFilter {
    OperationFilter { limit: 100, ..OperationFilter::default() }
}

async fn audits<F: Fixture>(trial: &Trial<F>, act: &str) -> i64 {
    let where_ = format!("where act = '{act}' and actor = 'on-call' and reason = 'as agreed'");
    trial.number(&format!("select count(*) from {} {where_}", trial.table("audit"))).await
}

/// A record of mode `edge` in this state.
async fn edge<F: Fixture>(trial: &Trial<F>, key: &str, state: State) -> Record {
    let new = claim(Mode::Edge, key, 1);
    if state == State::InProgress {
        take(trial, &new).await;
    } else {
        run(trial, &new, &outcome(state), &KEPT).await;
    }
    record(trial, &new).await
}

fn is_refused(done: &Result<(), StoreError>) -> bool {
    matches!(done, Err(StoreError::Refused(_)))
}

/// The operations that are listed as conflicts, in the order of their ids, and the late runs.
pub(super) async fn conflicts<F: Fixture>(trial: &Trial<F>) -> (Vec<Uuid>, Vec<Uuid>) {
    let found = trial.store.operations(&OperationFilter { conflicts: true, ..any() }).await.unwrap();
    let mut listed: Vec<Uuid> = found.operations.iter().map(|one| one.operation_id).collect();
    listed.sort_unstable();
    (listed, found.orphans)
}

/// Each filter finds what it names, and nothing else.
///
/// Shown by: a query without one of its conditions.
pub async fn keys_are_found_by_every_filter<F: Fixture>(trial: &Trial<F>) {
    edge(trial, "open", State::InProgress).await;
    // Two records of one millisecond would have no oldest.
    let earlier = moved::<F>("created_at", -1);
    trial.run(&format!("update {} set created_at = {earlier}", trial.table("idempotency_request"))).await;
    let open = record(trial, &claim(Mode::Edge, "open", 1)).await;
    let done = edge(trial, "done", State::Completed).await;
    edge(trial, "unknown", State::UnknownRequiresRecovery).await;
    let asked = outstanding(trial, &new_operation("asked", LONG)).await;
    end(trial, &asked, "SENT", &completed(), &KEPT).await;
    run(trial, &claim(Mode::Edge, "ended", 1), &failed(), &ENDED).await;
    over(trial, &claim(Mode::Edge, "ended", 1)).await;
    // A late run of it succeeded, so it must not be forgotten.
    let late = edge(trial, "late", State::FailedRetryable).await;
    trial.store.observe_run(&run_ended(late.operation_id, "success")).await.unwrap();
    let digest = done.identity.digest();
    let cases = [
        (all(), 6),
        (KeyFilter { limit: 2, ..all() }, 2),
        (KeyFilter { digest: digest.to_vec(), ..all() }, 1),
        (KeyFilter { digest: digest[..6].to_vec(), ..all() }, 1),
        (KeyFilter { tenant: Some("t1".to_owned()), ..all() }, 6),
        (KeyFilter { tenant: Some("T1".to_owned()), ..all() }, 0),
        (KeyFilter { operation: Some("create_payment".parse().unwrap()), ..all() }, 6),
        (KeyFilter { operation: Some("create_charge".parse().unwrap()), ..all() }, 0),
        (KeyFilter { state: Some(State::Completed), ..all() }, 2),
        (KeyFilter { state: Some(State::InProgress), ..all() }, 1),
        (KeyFilter { state: Some(State::Expired), ..all() }, 1),
        (KeyFilter { older_than: Some(LONG), ..all() }, 0),
        (KeyFilter { forgettable: true, ..all() }, 2),
    ];
    for (filter, count) in cases {
        assert_eq!(trial.store.keys(&filter).await.unwrap().keys.len(), count, "{filter:?}");
    }
    let first = trial.store.keys(&KeyFilter { older_than: Some(Duration::ZERO), ..all() }).await.unwrap().keys;
    assert_eq!(first[0].record.as_ref(), Some(&open), "oldest first, and whole");
    // In pages: each once, in the order of their digests.
    let (mut after, mut paged) = (Vec::new(), Vec::new());
    loop {
        let page = KeyFilter { after: Some(after), limit: 3, ..all() };
        let page = trial.store.keys(&page).await.unwrap().keys;
        paged.extend(page.iter().map(|look| look.record.as_ref().unwrap().identity.digest()));
        if page.len() < 3 {
            break;
        }
        after = paged.last().unwrap().to_vec();
    }
    assert!(paged.len() == 6 && paged.is_sorted_by(|one, next| one < next), "{paged:?}");
}

/// An operator's word is on the run that was seen. A key that was forgotten begins again at the
/// same epoch, and its next run is another one.
///
/// Shown by: a change that compares key and epoch only.
pub async fn an_act_on_a_key_changes_no_later_run_of_it<F: Fixture>(trial: &Trial<F>) {
    let resolve = KeyChange::Resolve { outcome: Box::new(completed()), retention: KEPT, against_evidence: false };
    let release = KeyChange::Release { against_evidence: false };
    let purge = KeyChange::Purge { against_evidence: false };
    for (key, change, state) in [
        ("released", &release, State::Completed),
        ("purged", &purge, State::Completed),
        ("resolved", &resolve, State::UnknownRequiresRecovery),
    ] {
        let seen = edge(trial, key, state).await;
        // Meanwhile somebody else forgets it, and its client comes back.
        trial.run(&format!("delete from {} where state = '{state}'", trial.table("idempotency_request"))).await;
        trial.run(&format!("delete from {}", trial.table("idempotency_body"))).await;
        let next = edge(trial, key, state).await;
        assert_eq!(next.epoch, seen.epoch);
        assert!(is_refused(&trial.store.act_on_key(&seen, change, &really()).await), "{key}");
        assert_eq!(record(trial, &claim(Mode::Edge, key, 1)).await, next, "{key}");
        trial.store.act_on_key(&next, change, &really()).await.unwrap();
    }
}

/// A key that may have had an effect is never forgotten (O11).
///
/// Shown by: calling `change_key` without `act_on_key`; not checking the intents.
pub async fn o11_a_key_is_released_and_purged_only_where_nothing_may_have_happened<F: Fixture>(trial: &Trial<F>) {
    let (release, purge) =
        (KeyChange::Release { against_evidence: false }, KeyChange::Purge { against_evidence: false });
    for state in [State::InProgress, State::UnknownRequiresRecovery] {
        let seen = edge(trial, state.as_str(), state).await;
        for change in [&release, &purge] {
            assert!(is_refused(&trial.store.act_on_key(&seen, change, &really()).await), "{state}");
            assert_eq!(trial.store.change_key(&seen, change, &really()).await.unwrap(), Fenced::LostOwnership);
        }
    }
    let asked = outstanding(trial, &new_operation("asked", LONG)).await;
    end(trial, &asked, "SENT", &completed(), &KEPT).await;
    let seen = record(trial, &new_operation("asked", LONG).claim).await;
    for change in [&release, &purge] {
        assert!(is_refused(&trial.store.act_on_key(&seen, change, &really()).await));
        assert_eq!(trial.store.change_key(&seen, change, &really()).await.unwrap(), Fenced::LostOwnership);
    }
    assert_eq!((audits(trial, "release").await, audits(trial, "purge").await), (0, 0));
    for (key, change, state) in [
        ("failed", &release, State::FailedReplayable),
        ("done", &release, State::Completed),
        ("again", &purge, State::FailedRetryable),
    ] {
        let seen = edge(trial, key, state).await;
        trial.store.act_on_key(&seen, change, &context(true)).await.unwrap();
        assert_eq!(trial.store.find(&seen.identity).await.unwrap().record.as_ref(), Some(&seen), "a dry run");
        trial.store.act_on_key(&seen, change, &really()).await.unwrap();
        let look = trial.store.find(&seen.identity).await.unwrap();
        assert_eq!(look.record, None);
        assert_eq!(look.purged_below, None, "its key carries no time");
        assert!(is_refused(&trial.store.act_on_key(&seen, change, &really()).await), "it is gone");
    }
    assert_eq!((audits(trial, "release").await, audits(trial, "purge").await), (2, 1));
    assert_eq!(KeysFixture::bodies(trial).await, 1, "of the one that stays");
}

/// An unknown key gets the outcome that the operator found out, once. A phased key is refused,
/// because its operation decides.
pub async fn o11_an_unknown_key_is_resolved_once<F: Fixture>(trial: &Trial<F>) {
    let resolve = |outcome| KeyChange::Resolve { outcome: Box::new(outcome), retention: KEPT, against_evidence: false };
    for (key, outcome, state) in [("done", completed(), State::Completed), ("not", retryable(), State::FailedRetryable)]
    {
        let seen = edge(trial, key, State::UnknownRequiresRecovery).await;
        assert!(is_refused(&trial.store.act_on_key(&seen, &resolve(RunOutcome::Unknown), &really()).await));
        trial.store.act_on_key(&seen, &resolve(outcome.clone()), &really()).await.unwrap();
        let found = record(trial, &claim(Mode::Edge, key, 1)).await;
        assert_eq!((found.state, found.expires_at), (state, found.outcome_at.map(|at| at.after(KEPT.ttl))));
        assert_eq!(trial.store.body(&found).await.unwrap().is_some(), state == State::Completed);
        let rewritten = trial.store.act_on_key(&found, &resolve(failed()), &really()).await;
        assert!(is_refused(&rewritten), "no outcome is rewritten");
        assert!(is_refused(&trial.store.act_on_key(&seen, &resolve(failed()), &really()).await), "it has changed");
    }
    let running = edge(trial, "running", State::InProgress).await;
    assert!(is_refused(&trial.store.act_on_key(&running, &resolve(completed()), &really()).await));
    let driven = outstanding(trial, &new_operation("phased", LONG)).await;
    trial.store.park(&driven, "not found").await.unwrap();
    let phased = record(trial, &new_operation("phased", LONG).claim).await;
    assert!(is_refused(&trial.store.act_on_key(&phased, &resolve(completed()), &really()).await));
    assert_eq!(audits(trial, "resolve").await, 2);
}

/// Each filter finds what it names. A conflict is evidence that contradicts the outcome of the
/// effect, or, where that has none, of the operation.
///
/// Shown by: a query without one of its conditions; conflicts that ignore the outcome of the
/// intent.
pub async fn o8_operations_are_found_by_every_filter_and_conflicts_are_seen<F: Fixture>(trial: &Trial<F>) {
    let parked = outstanding(trial, &new_operation("parked", LONG)).await;
    trial.store.park(&parked, "not found").await.unwrap();
    local(trial, &new_operation("local", LONG)).await;
    // The charge succeeded, was paid back, and the operation failed: this is no conflict.
    let undone = outstanding(trial, &new_operation("undone", LONG)).await;
    trial.store.observe(&observed(&undone, "success")).await.unwrap();
    let refund = NewIntent { undoes: Some("charge".to_owned()), ..intent("refund", "refund-undone") };
    let mut tx = trial.store.begin_phase(&undone).await.unwrap();
    tx.settle("charge", Settled::Succeeded);
    assert_eq!(tx.advance("SENT", "REFUND", Stage::Outstanding, &[refund]).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
    let mut tx = trial.store.begin_phase(&undone).await.unwrap();
    tx.settle("refund", Settled::Succeeded);
    assert_eq!(tx.finish("REFUND", &failed(), &KEPT).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
    let stored_undone = stored(trial, &undone).await;
    assert_eq!(stored_undone.intents[1].intent.undoes.as_deref(), Some("charge"));
    // The operation ended as a success although its effect had no outcome. Later evidence says
    // otherwise.
    let wrong = outstanding(trial, &new_operation("wrong", LONG)).await;
    end(trial, &wrong, "SENT", &completed(), &KEPT).await;
    trial.store.observe(&observed(&wrong, "indefinite")).await.unwrap();
    assert!(conflicts(trial).await.0.is_empty());
    trial.store.observe(&observed(&wrong, "failure")).await.unwrap();
    let cases = [
        (any(), 4),
        (OperationFilter { limit: 3, ..any() }, 3),
        (OperationFilter { operation_id: Some(parked.operation_id), ..any() }, 1),
        (OperationFilter { flow: Some("create_charge".to_owned()), ..any() }, 4),
        (OperationFilter { flow: Some("refund".to_owned()), ..any() }, 0),
        (OperationFilter { tenant: Some("t1".to_owned()), ..any() }, 4),
        (OperationFilter { tenant: Some("t2".to_owned()), ..any() }, 0),
        (OperationFilter { stage: Some(Stage::Unknown), ..any() }, 1),
        (OperationFilter { stage: Some(Stage::Failed), ..any() }, 1),
        (OperationFilter { parked: true, ..any() }, 1),
        (OperationFilter { older_than: Some(LONG), ..any() }, 0),
        (OperationFilter { conflicts: true, ..any() }, 1),
    ];
    for (filter, count) in cases {
        assert_eq!(trial.store.operations(&filter).await.unwrap().operations.len(), count, "{filter:?}");
    }
    assert_eq!(conflicts(trial).await.0, [wrong.operation_id]);
    trial.store.observe(&observed(&undone, "failure")).await.unwrap();
    assert_eq!(conflicts(trial).await.0.len(), 2);
}

/// The table accepts every word of a verdict and no other. A mismatch contradicts any outcome until
/// an operator has judged it.
///
/// Shown by: a table that does not allow one of the words; a list of conflicts without mismatches,
/// or with one that an operator has judged.
pub async fn o8_every_verdict_has_its_word_and_a_mismatch_is_a_conflict_until_it_is_judged<F: Fixture>(
    trial: &Trial<F>,
) {
    let driven = outstanding(trial, &new_operation("k", LONG)).await;
    let see = |verdict: Verdict| observed(&driven, verdict.word());
    for verdict in [
        Verdict::Succeeded,
        Verdict::Refused,
        Verdict::NotSent,
        Verdict::Wait(LONG),
        Verdict::NotFound,
        Verdict::StoredError,
        Verdict::Indefinite,
    ] {
        trial.store.observe(&see(verdict)).await.unwrap();
    }
    assert!(trial.store.observe(&observed(&driven, "charged-back")).await.is_err());
    end(trial, &driven, "SENT", &completed(), &KEPT).await;
    assert!(conflicts(trial).await.0.is_empty());
    let word = NewEvidence { kind: "operator".to_owned(), ..see(Verdict::Succeeded) };
    for (evidence, expected) in [(see(Verdict::Mismatch), 1), (word, 0), (see(Verdict::Mismatch), 1)] {
        trial.store.observe(&evidence).await.unwrap();
        assert_eq!(conflicts(trial).await.0.len(), expected, "{evidence:?}");
    }
    trial.store.observe(&see(Verdict::Failed)).await.unwrap();
    assert_eq!(conflicts(trial).await.0.len(), 1);
}

/// Makes an ended operation: its effect `charge` has this strategy and outcome, and may be undone.
async fn ended<F: Fixture>(trial: &Trial<F>, key: &str, (strategy, outcome, undone, stage): Shape) -> Driven {
    let driven = local(trial, &new_operation(key, LONG)).await;
    let charge = NewIntent { strategy: strategy.to_owned(), ..intent("charge", &format!("charge-{key}")) };
    step(trial, &driven, "LOCAL", "SENT", Stage::Outstanding, &[charge]).await;
    if undone {
        let refund = NewIntent { undoes: Some("charge".to_owned()), ..intent("refund", &format!("refund-{key}")) };
        step(trial, &driven, "SENT", "REFUND", Stage::Outstanding, &[refund]).await;
    }
    let mut tx = trial.store.begin_phase(&driven).await.unwrap();
    if undone {
        tx.settle("refund", Settled::Succeeded);
    }
    if let Some(outcome) = outcome {
        tx.settle("charge", outcome);
    }
    let end = if stage == Stage::Succeeded { completed() } else { failed() };
    assert_eq!(tx.finish(if undone { "REFUND" } else { "SENT" }, &end, &KEPT).await.unwrap(), MOVED);
    tx.commit().await.unwrap();
    driven
}

type Shape = (&'static str, Option<Settled>, bool, Stage);

/// The list of conflicts, which are kept until a person has judged them, agrees with the pure
/// functions: for each set of up to three different verdicts about an effect, and for each way in
/// which the effect and its operation ended. The verdicts come in the order of `verdicts`, and with
/// a waiver also the other way round.
///
/// Shown to fail: with a waiver without a send that counts like one for a send; with a statement
/// that does not check whether an operator had accepted the declined send as a duplicate.
pub async fn the_list_of_conflicts_is_what_the_evidence_says<F: Fixture>(trial: &Trial<F>) {
    let (table, from) = (trial.table("operation_evidence"), trial.table("operation"));
    let mut shapes: Vec<Shape> = Vec::new();
    for strategy in ["key_and_query", "repeatable"] {
        for outcome in [None, Some(Settled::Succeeded), Some(Settled::Failed)] {
            for undone in [false, true] {
                shapes.extend([Stage::Succeeded, Stage::Failed].map(|stage| (strategy, outcome, undone, stage)));
            }
        }
    }
    // Keeps the shapes that differ in their evidence. Undone, repeatable or open effects matter
    // only where an effect may stand.
    shapes.retain(|(strategy, outcome, undone, stage)| {
        (*stage == Stage::Failed && *outcome == Some(Settled::Succeeded)) || (*strategy == "key_and_query" && !undone)
    });
    let mut operations = Vec::new();
    for (number, shape) in shapes.iter().enumerate() {
        let driven = ended(trial, &format!("shape{number}"), *shape).await;
        let (strategy, outcome, undone, stage) = *shape;
        let happened = outcome == Some(Settled::Succeeded);
        let stands = stage == Stage::Failed && happened && strategy != "repeatable" && !undone;
        operations.push((driven.operation_id, *shape, stands));
    }
    let verdicts = [
        Verdict::Succeeded,
        Verdict::Failed,
        Verdict::Refused,
        Verdict::NotSent,
        Verdict::Waived,
        Verdict::Wait(LONG),
        Verdict::Mismatch,
        Verdict::NotFound,
        Verdict::StoredError,
        Verdict::Indefinite,
    ];
    // Verdicts that are judged by their send occur without a send, for the first, and for the
    // second.
    let mut said: Vec<Vec<(usize, u32)>> = vec![Vec::new()];
    for verdict in 0..verdicts.len() {
        for before in said.clone().into_iter().filter(|before| before.len() < 3) {
            let sends = if matches!(verdict, 1 | 3 | 4) { &[0, 1, 2][..] } else { &[1][..] };
            said.extend(sends.iter().map(|send| [&before[..], &[(verdict, *send)]].concat()));
        }
    }
    // An operator waives a send that was declined, or the send after the waiver is declined.
    let waived = said.clone().into_iter().filter(|rows| rows.iter().any(|row| verdicts[row.0] == Verdict::Waived));
    said.extend(waived.map(|rows| rows.into_iter().rev().collect()));
    let mut listed_once = false;
    for rows in said {
        trial.run(&format!("delete from {table}")).await;
        for (verdict, send) in &rows {
            let verdict = verdicts[*verdict];
            let kind = if verdict == Verdict::Waived { "operator" } else { "answer" };
            let (word, columns) =
                (verdict.word(), "operation_id, effect, epoch, send, kind, verdict, bytes, observed_at");
            let values = format!("operation_id, 'charge', 1, {send}, '{kind}', '{word}', '', created_at");
            trial.run(&format!("insert into {table} ({columns}) select {values} from {from}")).await;
        }
        let proofs = rows.iter().map(|(verdict, send)| {
            let send = (*send > 0).then_some(*send);
            ProviderProof { send, verdict: verdicts[*verdict], at: DbTime { micros: 0 } }
        });
        let evidence = Evidence::of(proofs);
        let expected = operations.iter().filter(|(_, (_, outcome, _, stage), stands)| {
            let succeeded = outcome.map_or(*stage == Stage::Succeeded, |outcome| outcome == Settled::Succeeded);
            *stands || evidence.contradicts(if succeeded { Settled::Succeeded } else { Settled::Failed })
        });
        let mut expected: Vec<Uuid> = expected.map(|(id, ..)| *id).collect();
        let (found, _) = conflicts(trial).await;
        expected.sort_unstable();
        listed_once |= found.len() > 1;
        let words: Vec<_> = rows.iter().map(|(verdict, send)| (verdicts[*verdict].word(), *send)).collect();
        let shapes_of = |ids: &[Uuid]| {
            let shape = |id: &Uuid| operations.iter().find(|one| one.0 == *id).map(|one| one.1);
            ids.iter().map(shape).collect::<Vec<_>>()
        };
        assert!(found == expected, "{words:?}: {:?} is listed, {:?} is due", shapes_of(&found), shapes_of(&expected));
    }
    assert!(listed_once);
}

/// A lease that ends later than its length allows was written before the clock went back. It counts
/// as over for an operator, as it does for a worker.
///
/// Shown by: a change that compares the end of the lease with the clock alone.
pub async fn r22_an_operator_may_change_what_a_clock_that_went_back_left_owned<F: Fixture>(trial: &Trial<F>) {
    let driven = outstanding(trial, &new_operation("k", LONG)).await;
    let held = stored(trial, &driven).await;
    assert!(is_refused(&trial.store.retry(&held, false, false, &really()).await), "somebody drives it");
    trial.shorten_leases_of("operation").await;
    let seen = stored(trial, &driven).await;
    assert_eq!(seen.lease_until, None);
    trial.store.retry(&seen, false, false, &really()).await.unwrap();
    assert_eq!(trial.store.drive_on(&driven, LONG).await.unwrap(), Fenced::LostOwnership);
}

/// Parked operations come first, then those without an outcome, whatever the age of the others.
///
/// Shown by: an order that ignores parked operations, or those without an outcome.
pub async fn what_waits_for_a_person_is_listed_first_then_what_is_open<F: Fixture>(trial: &Trial<F>) {
    let ended = outstanding(trial, &new_operation("ended", LONG)).await;
    end(trial, &ended, "SENT", &completed(), &KEPT).await;
    let open = outstanding(trial, &new_operation("open", LONG)).await;
    let parked = outstanding(trial, &new_operation("parked", LONG)).await;
    trial.store.park(&parked, "not found").await.unwrap();
    let all = [parked.operation_id, open.operation_id, ended.operation_id];
    for limit in 1..=3 {
        let found = trial.store.operations(&OperationFilter { limit, ..any() }).await.unwrap().operations;
        let found: Vec<Uuid> = found.into_iter().map(|one| one.operation_id).collect();
        assert_eq!(found, all[..limit as usize]);
    }
}

/// A retry makes an operation due at once and counts its attempts anew. Where its effect may not be
/// repeated, the operator must accept a duplicate, and this is stored as evidence (O6).
///
/// Shown by: a retry that does not check the lease, or the strategy.
pub async fn o6_a_retry_is_the_workers_and_a_duplicate_is_accepted_by_name<F: Fixture>(trial: &Trial<F>) {
    let driven = outstanding(trial, &new_operation("k", LONG)).await;
    assert_eq!(trial.store.begin_send(&driven, "charge").await.unwrap(), Some(2));
    let seen = stored(trial, &driven).await;
    assert!(is_refused(&trial.store.retry(&seen, false, false, &really()).await), "somebody drives it");
    trial.store.hand_back(&driven, Due { after: Some(LONG), attempt: true }).await.unwrap();
    let (driven, _) = taken(trial, driven.operation_id).await;
    trial.store.park(&driven, "window over").await.unwrap();
    let seen = stored(trial, &driven).await;
    assert_eq!(seen.attempts, 1, "what the retry sets back");
    trial.store.retry(&seen, false, false, &context(true)).await.unwrap();
    assert_eq!(stored(trial, &driven).await.parked.as_deref(), Some("window over"), "a dry run");
    trial.store.retry(&seen, false, false, &really()).await.unwrap();
    assert!(is_refused(&trial.store.retry(&seen, false, false, &really()).await), "it has changed");
    let found = stored(trial, &driven).await;
    assert_eq!((found.parked.clone(), found.attempts, found.stage), (None, 0, Stage::Unknown));
    assert_eq!(found.evidence.len(), 0, "without a duplicate accepted nothing is said");
    let due = trial.store.take_due("create_charge", &[2], 10, LONG, &[]).await.unwrap();
    assert_eq!(due.len(), 1);
    trial.store.park(&due[0].0, "window over").await.unwrap();
    trial.store.retry(&stored(trial, &driven).await, true, false, &really()).await.unwrap();
    let words = stored(trial, &driven).await.evidence;
    let said: Vec<_> = words.iter().map(|word| &word.evidence).collect();
    assert_eq!(said.iter().map(|word| word.send).collect::<Vec<u32>>(), [1, 2], "of both sends");
    assert!(said.iter().all(|word| (word.kind.as_str(), word.verdict.as_str()) == ("operator", "waived")));
    assert!(String::from_utf8_lossy(&said[0].bytes.bytes).contains("as agreed"));
    assert_eq!(audits(trial, "retry").await, 2);
    // The effect has neither key nor query: nothing can be repeated or asked.
    let mute = local(trial, &new_operation("mute", LONG)).await;
    let none = NewIntent { strategy: "none".to_owned(), ..intent("charge", "mute") };
    step(trial, &mute, "LOCAL", "SENT", Stage::Outstanding, &[none]).await;
    trial.store.park(&mute, "no means").await.unwrap();
    let seen = stored(trial, &mute).await;
    assert!(is_refused(&trial.store.retry(&seen, false, false, &really()).await));
    trial.store.retry(&seen, true, false, &really()).await.unwrap();
    // A phase that was given up runs again. One whose handler ended its transaction runs again only
    // if a duplicate is accepted (O1).
    for (reason, careless) in [("phase-failed", false), ("phase-ended-its-transaction", true)] {
        let given_up = local(trial, &new_operation(reason, LONG)).await;
        trial.store.park(&given_up, reason).await.unwrap();
        let seen = stored(trial, &given_up).await;
        assert_eq!(is_refused(&trial.store.retry(&seen, false, false, &really()).await), careless);
        if careless {
            trial.store.retry(&seen, true, false, &really()).await.unwrap();
        }
        assert_eq!(stored(trial, &given_up).await.stage, Stage::Local);
        assert_eq!(record(trial, &new_operation(reason, LONG).claim).await.state, State::InProgress);
    }
}

/// One commit, fenced, writes operation, record, body and the evidence of the operator. It is
/// refused while somebody drives the operation, or against the evidence.
///
/// Shown by: a statement that does not check the lease, the epoch, or the evidence.
pub async fn o9_a_resolved_operation_and_its_record_have_one_outcome<F: Fixture>(trial: &Trial<F>) {
    let new = new_operation("k", LONG);
    let driven = outstanding(trial, &new).await;
    let seen = stored(trial, &driven).await;
    let success = Resolution::Ended(Box::new(completed()), KEPT);
    assert!(is_refused(&trial.store.resolve(&seen, &success, false, false, &really()).await), "somebody drives it");
    trial.store.resolve(&seen, &success, true, false, &context(true)).await.unwrap();
    assert_eq!(stored(trial, &driven).await.stage, Stage::Outstanding, "a dry run");
    // Evidence came after the operator read the operation, so it was not judged.
    trial.store.observe(&observed(&driven, "failure")).await.unwrap();
    assert!(is_refused(&trial.store.resolve(&seen, &success, true, false, &really()).await));
    let seen = stored(trial, &driven).await;
    assert!(is_refused(&trial.store.resolve(&seen, &success, true, false, &really()).await), "against the evidence");
    for outcome in [RunOutcome::Unknown, retryable()] {
        let end = Resolution::Ended(Box::new(outcome), KEPT);
        assert!(is_refused(&trial.store.resolve(&seen, &end, true, true, &really()).await));
    }
    trial.store.resolve(&seen, &success, true, true, &really()).await.unwrap();
    let (found, seen) = (stored(trial, &driven).await, record(trial, &new.claim).await);
    assert_eq!((found.stage, seen.state), (Stage::Succeeded, State::Completed));
    assert_eq!((found.outcome_at, seen.expires_at), (seen.outcome_at, seen.outcome_at.map(|at| at.after(KEPT.ttl))));
    assert!(trial.store.body(&seen).await.unwrap().is_some());
    let word = &found.evidence[1].evidence;
    assert_eq!((word.kind.as_str(), word.verdict.as_str(), word.effect.as_str()), ("operator", "success", ""));
    assert_eq!(trial.store.drive_on(&driven, LONG).await.unwrap(), Fenced::LostOwnership, "it was taken over");
    assert!(is_refused(&trial.store.resolve(&found, &success, true, true, &really()).await), "no outcome is rewritten");
    assert_eq!(audits(trial, "resolve").await, 1);
    // An operation whose driver is dead needs no takeover.
    let dead = outstanding(trial, &new_operation("dead", SHORT)).await;
    lease_over(trial, &dead).await;
    let failure = Resolution::Ended(Box::new(failed()), KEPT);
    let seen = stored(trial, &dead).await;
    // But here the driver was only slow: it renews its lease after the operator read the operation.
    assert_eq!(trial.store.drive_on(&dead, LONG).await.unwrap(), Fenced::Done);
    assert!(is_refused(&trial.store.resolve(&seen, &failure, false, false, &really()).await));
    assert_eq!(trial.store.drive_on(&dead, SHORT).await.unwrap(), Fenced::Done);
    lease_over(trial, &dead).await;
    trial.store.resolve(&stored(trial, &dead).await, &failure, false, false, &really()).await.unwrap();
    assert_eq!(record(trial, &new_operation("dead", SHORT).claim).await.state, State::FailedReplayable);
}

/// An operation is not failed against an effect that is settled as done, the strongest evidence,
/// unless the operator overrules it. It is then listed as a conflict. An effect that may happen
/// again, or that another one undid, does not stand.
///
/// Shown by: ignoring settled effects; a list that compares evidence only with the outcome of its
/// effect; a rule that knows neither repeatable nor undone effects.
pub async fn an_operation_does_not_fail_while_an_effect_of_it_stands<F: Fixture>(trial: &Trial<F>) {
    let driven = outstanding(trial, &new_operation("k", LONG)).await;
    confirm(trial, &driven).await;
    trial.store.park(&driven, "phase-failed").await.unwrap();
    let seen = stored(trial, &driven).await;
    let failure = Resolution::Ended(Box::new(failed()), KEPT);
    assert!(is_refused(&trial.store.resolve(&seen, &failure, false, false, &really()).await));
    trial.store.resolve(&seen, &failure, false, true, &really()).await.unwrap();
    assert_eq!(conflicts(trial).await, (vec![driven.operation_id], vec![]));
    trial.store.judge(driven.operation_id, &context(true)).await.unwrap();
    assert_eq!(conflicts(trial).await.0.len(), 1, "a dry run");
    trial.store.judge(driven.operation_id, &really()).await.unwrap();
    assert_eq!((conflicts(trial).await, audits(trial, "judge").await), ((vec![], vec![]), 1));
    assert!(is_refused(&trial.store.judge(Uuid::now_v7(), &really()).await), "nothing is known of it");
    let open = outstanding(trial, &new_operation("open", LONG)).await;
    assert!(is_refused(&trial.store.judge(open.operation_id, &really()).await), "there is nothing to judge yet");
    for (key, strategy, undone) in [("repeatable", "repeatable", false), ("undone", "key_and_query", true)] {
        let driven = local(trial, &new_operation(key, LONG)).await;
        let charge = NewIntent { strategy: strategy.to_owned(), ..intent("charge", &format!("charge-{key}")) };
        step(trial, &driven, "LOCAL", "SENT", Stage::Outstanding, &[charge]).await;
        confirm(trial, &driven).await;
        if undone {
            let refund = NewIntent { undoes: Some("charge".to_owned()), ..intent("refund", &format!("refund-{key}")) };
            step(trial, &driven, "CONFIRMED", "REFUND", Stage::Outstanding, &[refund]).await;
            let half = stored(trial, &driven).await;
            assert!(is_refused(&trial.store.resolve(&half, &failure, true, false, &really()).await), "not undone yet");
            let mut tx = trial.store.begin_phase(&driven).await.unwrap();
            tx.settle("refund", Settled::Succeeded);
            assert_eq!(tx.advance("REFUND", "REFUNDED", Stage::Settled, &[]).await.unwrap(), MOVED);
            tx.commit().await.unwrap();
        }
        trial.store.park(&driven, "phase-failed").await.unwrap();
        trial.store.resolve(&stored(trial, &driven).await, &failure, false, false, &really()).await.unwrap();
        assert!(conflicts(trial).await.0.is_empty(), "{key}");
    }
}

/// The purge records the time inside the key, whatever the clock of the client and the skew of the
/// route.
///
/// Shown by: a bound made of the time of the outcome and a fixed skew (a key beyond it looks new,
/// and executes again).
pub async fn a_key_that_was_purged_by_hand_is_too_old_however_far_its_clock_was_ahead<F: Fixture>(trial: &Trial<F>) {
    let new = timed(SystemTime::now() + LONG);
    run(trial, &new, &completed(), &KEPT).await;
    let seen = record(trial, &new).await;
    trial.store.act_on_key(&seen, &KeyChange::Purge { against_evidence: false }, &really()).await.unwrap();
    let look = trial.store.find(&new.identity).await.unwrap();
    let below = look.purged_below.expect("it is recorded");
    let time = new.identity.key().time().expect("it carries its time");
    assert!(time < below && below <= time.after(Duration::from_millis(1)), "{time:?} {below:?}");
}

/// What the operator says of an effect is stored as evidence, and the worker continues the flow.
pub async fn o8_an_effect_is_resolved_and_its_flow_goes_on<F: Fixture>(trial: &Trial<F>) {
    let driven = outstanding(trial, &new_operation("k", LONG)).await;
    trial.store.park(&driven, "not found").await.unwrap();
    let seen = stored(trial, &driven).await;
    let effect = |effect: &str, happened| Resolution::Effect { effect: effect.to_owned(), happened };
    assert!(is_refused(&trial.store.resolve(&seen, &effect("refund", true), false, false, &really()).await));
    trial.store.resolve(&seen, &effect("charge", true), false, false, &really()).await.unwrap();
    let due = trial.store.take_due("create_charge", &[2], 10, LONG, &[]).await.unwrap();
    let (next, found): &(Driven, _) = &due[0];
    assert_eq!((found.evidence[0].evidence.verdict.as_str(), found.stage), ("success", Stage::Unknown));
    confirm(trial, next).await;
    trial.store.hand_back(next, AT_ONCE).await.unwrap();
    let settled = stored(trial, next).await;
    assert!(is_refused(&trial.store.resolve(&settled, &effect("charge", false), false, false, &really()).await));
    assert!(matches!(trial.store.take_operation(next.operation_id, LONG).await.unwrap(), Taken::Driven(..)));
}

/// Shows the newest announcement of each process and operation. Old ones are not shown, and later
/// removed.
pub async fn o21_what_live_processes_say_of_their_fingerprints_is_shown<F: Fixture>(trial: &Trial<F>) {
    let kids = |text: &[&str]| -> Vec<Kid> { text.iter().map(|kid| kid.parse().unwrap()).collect() };
    let said = |operation: &str, newest: u32, ring: &[&str]| Versions {
        operation: operation.parse().unwrap(),
        readable: 1..=newest,
        write_version: newest,
        write_kid: kids(ring).pop().unwrap(),
        kids: kids(ring),
    };
    let [one, two] = [Uuid::from_u128(1), Uuid::from_u128(2)];
    let announced = |process: Uuid, versions: &Versions| Announced { process, versions: versions.clone() };
    let (note, pay) = (said("note", 1, &["sha256"]), said("pay", 2, &["sha256", "k-1.x"]));
    trial.store.announce(two, std::slice::from_ref(&pay)).await.unwrap();
    trial.store.announce(one, &[said("pay", 7, &["sha256"]), note.clone()]).await.unwrap();
    trial.store.announce(one, &[pay.clone(), note.clone()]).await.unwrap();
    let live = trial.store.live_versions().await.unwrap();
    assert_eq!(live, [announced(one, &note), announced(one, &pay), announced(two, &pay)]);
    let set_back = async |seconds: i64| {
        let at = moved::<F>("seen_at", -seconds);
        trial.run(&format!("update {} set seen_at = {at}", trial.table("operation_process"))).await;
    };
    set_back(100).await;
    assert_eq!(trial.store.live_versions().await.unwrap().len(), 3, "seen a short time ago");
    set_back(-100).await;
    for (age, kept) in [(130, 3), (90_000, 1)] {
        set_back(age).await;
        assert_eq!(trial.store.live_versions().await.unwrap(), [], "{age} s ago");
        trial.store.announce(one, std::slice::from_ref(&note)).await.unwrap();
        assert_eq!(trial.store.live_versions().await.unwrap(), [announced(one, &note)]);
        assert_eq!(trial.rows("operation_process").await, kept, "{age} s ago");
    }
}
