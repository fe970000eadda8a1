//! Finds out the outcome of an edge run whose end was not recorded, where its route can (O11).
//!
//! Promises: however many requests and sweeps start a reconciliation, one of them asks. It takes
//! the record over with the fenced claim, so a slow answer that arrives after another's changes
//! nothing. If the outcome cannot be found out, the record is UNKNOWN. Evidence of a run that ended
//! after it had lost its lease overrides the answer of the route: the key of a run that ended is
//! not freed.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::task::JoinHandle;

use super::codec::{Kept, error_code};
use super::endpoint::{Reconciled, Registered};
use super::engine::Core;
use crate::error::StoreError;
use crate::operation::port::evidence::NewEvidence;
use crate::operation::port::{Answer, AnswerBody, Basis, Fenced, KeyClaim, Owned, RunOutcome, late_runs};
use crate::operation::rules::Record;
use crate::operation::rules::record::Tombstone;
use crate::text::panic::panic_text;

/// Starts a reconciliation in a task of its own. `None`: the route cannot find it out.
pub(super) fn wake(engine: &Core, endpoint: &Registered, record: &Record) -> Option<JoinHandle<()>> {
    let ask = endpoint.endpoint().reconcile.clone()?;
    let (engine_of_task, endpoint, record) = (engine.clone(), endpoint.clone(), record.clone());
    Some(engine.spawn(async move {
        let engine = engine_of_task;
        let claim = claim_of(&endpoint, &record);
        let owned = match engine.store().claim(&claim, Basis::Reconcile(&record)).await {
            Ok(Some(owned)) => owned,
            // Another task asks, or the outcome is known by now.
            Ok(None) => return,
            Err(error) => return tracing::debug!(%error, "a record could not be taken over for reconciliation"),
        };
        let seen = record.clone();
        let limit = endpoint.route().lease.saturating_sub(endpoint.route().completion_budget);
        // A panic must not leave the claim behind: the next sweep would take it over and panic
        // again.
        let asking = AssertUnwindSafe(async move { ask(seen).await }).catch_unwind();
        let found = match tokio::time::timeout(limit.max(Duration::from_millis(1)), asking).await {
            Ok(Ok(Ok(found))) => found,
            Ok(Ok(Err(error))) => {
                tracing::warn!(operation = %endpoint.operation(), %error, "reconciliation failed");
                Reconciled::Unknown
            }
            Ok(Err(panic)) => {
                tracing::error!(operation = %endpoint.operation(), panic = panic_text(panic.as_ref()), "a reconciliation panicked");
                Reconciled::Unknown
            }
            Err(_) => Reconciled::Unknown,
        };
        let encode = |reply| engine.encode(&endpoint, &record.identity, &record.fingerprint, &Kept::Whole(reply));
        let outcome = match found {
            Reconciled::NotHappened => {
                if let Err(error) = free(&engine, &endpoint, &record, &owned).await {
                    unwritten(&endpoint, &error);
                }
                return;
            }
            Reconciled::Completed(reply) => encode(reply).map(RunOutcome::Completed),
            found @ (Reconciled::Failed(_) | Reconciled::Unknown) => {
                match (late_success(&engine, &record).await, found) {
                    (Ok(Some(run)), _) => Ok(outcome_of(&endpoint, &run)),
                    (Ok(None), Reconciled::Failed(reply)) => {
                        let error_code = error_code(endpoint.endpoint(), &reply);
                        encode(reply).map(|answer| RunOutcome::FailedReplayable { answer, error_code })
                    }
                    // Nothing is decided against evidence that cannot be read.
                    _ => Ok(RunOutcome::Unknown),
                }
            }
        };
        let outcome = outcome.unwrap_or_else(|error| {
            tracing::error!(operation = %endpoint.operation(), %error, "what was found out could not be sealed");
            RunOutcome::Unknown
        });
        if let Err(error) = engine.store().finish(&owned, &outcome, &endpoint.route().retention).await {
            unwritten(&endpoint, &error);
        }
    }))
}

/// The lease of the reconciliation ends, and the next sweep or request asks again.
fn unwritten(endpoint: &Registered, error: &StoreError) {
    tracing::warn!(operation = %endpoint.operation(), %error, "what was found out could not be written");
}

/// The claim with which this process takes a record over, to end it: it executes nothing.
pub(super) fn claim_of(endpoint: &Registered, record: &Record) -> KeyClaim {
    KeyClaim {
        identity: record.identity.clone(),
        principal: record.principal.clone(),
        fingerprint: record.fingerprint.clone(),
        mode: record.mode,
        operation_id: record.operation_id,
        owner: KeyClaim::new_owner(),
        lease: endpoint.route().lease,
    }
}

/// Replaces a failure that may be retried by the outcome that a late run reported as evidence. So
/// an effect that happened is not executed again, even if the process of that run died before it
/// wrote its outcome. Returns false if no run reported an end: the key may run again.
pub(super) async fn end_of_late_run(engine: &Core, endpoint: &Registered, seen: &Record) -> Result<bool, StoreError> {
    let Some(run) = how_it_ended(engine, seen).await? else { return Ok(false) };
    let claim = claim_of(endpoint, seen);
    if let Some(owned) = engine.store().claim(&claim, Basis::Late(seen)).await? {
        // Nobody else ends this claim: without the write it would become unknown.
        let outcome = outcome_of(endpoint, &run);
        patiently(|| engine.store().finish(&owned, &outcome, &endpoint.route().retention)).await?;
    }
    Ok(true)
}

/// Repeats work for a few seconds while it fails with transient errors.
pub(super) async fn patiently<T, F>(work: impl Fn() -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let mut pause = Duration::from_millis(100);
    loop {
        match work().await {
            Err(error) if error.is_transient() && pause < Duration::from_secs(2) => {
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
            ended => return ended,
        }
    }
}

/// Frees the key of a claim. Returns false where the store refuses that, because a run that lost
/// its lease has reported how it ended: that is the outcome then. Where somebody else took the
/// claim over meanwhile, that write is refused too.
pub(super) async fn free(
    engine: &Core,
    endpoint: &Registered,
    record: &Record,
    owned: &Owned,
) -> Result<bool, StoreError> {
    if engine.store().release(owned).await? == Fenced::Done {
        return Ok(true);
    }
    let run = how_it_ended(engine, record).await?;
    let outcome = run.map_or(RunOutcome::Unknown, |run| outcome_of(endpoint, &run));
    engine.store().finish(owned, &outcome, &endpoint.route().retention).await?;
    Ok(false)
}

/// The last report of runs that lost their lease. A success overrides a failure.
async fn how_it_ended(engine: &Core, record: &Record) -> Result<Option<NewEvidence>, StoreError> {
    let said = engine.store().runs_of(record.operation_id).await?;
    let of = |verdict: &str| late_runs(&said).find(|run| run.verdict == verdict);
    Ok(of("success").or_else(|| of("failure")).cloned())
}

/// The outcome of such a run. Its answer is not kept.
fn outcome_of(endpoint: &Registered, run: &NewEvidence) -> RunOutcome {
    tracing::warn!(operation = %endpoint.operation(), verdict = %run.verdict, "a run had ended that the route did not find");
    let body = AnswerBody::Tombstone(Tombstone::Withheld);
    let (status, schema_version) = (run.status.unwrap_or(200), endpoint.route().schema_version);
    let answer = Answer { status, schema_version, body, resource: None };
    match run.verdict.as_str() {
        "success" => RunOutcome::Completed(answer),
        _ => RunOutcome::FailedReplayable { answer, error_code: None },
    }
}

/// The success of a run that ended while the route was asked: it found the record in use, so it
/// left only its evidence. A success is the outcome, whatever other runs did; a failure says
/// nothing of a run after it.
async fn late_success(engine: &Core, record: &Record) -> Result<Option<NewEvidence>, StoreError> {
    Ok(how_it_ended(engine, record).await?.filter(|run| run.verdict == "success"))
}
