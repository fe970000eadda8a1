//! Which keys an operator may resolve, and which may be forgotten. Of claims in progress only an
//! abandoned one can be resolved: its lease is over, or a handler of mode `same_tx` has committed
//! it by itself.
//!
//! Not here: which acts there are ([`KeyOperator`]), and the sweep that ends abandoned claims by
//! itself (`operation::sweep`).

use super::{CHANGED, KeyOperator, changed, ended_late, refused};
use crate::error::StoreError;
use crate::operation::port::{RunOutcome, late_runs};
use crate::operation::rules::{Mode, Record, State};

/// Why an act on a claim of mode `bridged` is refused.
const BRIDGED: &str = "it is IN_PROGRESS in mode bridged: without an outcome nothing of it happened. After the end of its lease \
     `Engine::sweep` frees the key, and the next request under it executes";

/// Checks whether this outcome may be recorded, and returns the record to change. An abandoned
/// claim in progress is made UNKNOWN first; in a dry run it is only checked.
pub(super) async fn resolvable<K: KeyOperator + ?Sized>(
    keys: &K,
    seen: &Record,
    outcome: &RunOutcome,
    against_evidence: bool,
    dry_run: bool,
) -> Result<Record, StoreError> {
    if seen.mode == Mode::Phased {
        return refused(format!("it is an operation in phases: `oncebox operations resolve {}`", seen.operation_id));
    }
    if *outcome == RunOutcome::Unknown {
        return refused("an unknown outcome resolves nothing");
    }
    let record = match seen.state {
        State::InProgress => {
            // What is refused below must be refused before the claim is changed.
            refuse_opposite(keys, seen, outcome, against_evidence).await?;
            given_up(keys, seen, dry_run).await?
        }
        State::UnknownRequiresRecovery => seen.clone(),
        state => return refused(format!("it is {state}: only an unknown outcome is resolved")),
    };
    refuse_opposite(keys, &record, outcome, against_evidence).await?;
    Ok(record)
}

/// Refuses to forget a key that may have had an effect: one in progress or unknown, one with an
/// intent, and one against which a late run reported a success, unless the operator insists.
pub(super) async fn refuse_unforgettable<K: KeyOperator + ?Sized>(
    keys: &K,
    seen: &Record,
    against_evidence: bool,
) -> Result<(), StoreError> {
    match seen.state {
        State::InProgress if seen.mode == Mode::Bridged => return refused(BRIDGED),
        State::InProgress => {
            return refused(
                "it is IN_PROGRESS: what it does may happen yet. If its process is gone, it is resolved after the end of \
                 its lease, not forgotten",
            );
        }
        State::UnknownRequiresRecovery => {
            return refused("its outcome is unknown: it may have happened, so it is resolved, not forgotten");
        }
        _ => {}
    }
    if keys.operation(seen.operation_id).await?.is_some_and(|operation| !operation.intents.is_empty()) {
        return refused("a provider was asked for it: it stays until its time is over");
    }
    let said = keys.runs_of(seen.operation_id).await?;
    let succeeded = seen.state != State::Completed && late_runs(&said).any(|run| run.verdict == "success");
    if succeeded && !against_evidence {
        return refused(ended_late("success"));
    }
    Ok(())
}

/// Refuses an outcome that is the opposite of how a run ended that had lost its lease (O8), unless
/// the operator insists.
async fn refuse_opposite<K: KeyOperator + ?Sized>(
    keys: &K,
    seen: &Record,
    outcome: &RunOutcome,
    against_evidence: bool,
) -> Result<(), StoreError> {
    let opposite = if matches!(outcome, RunOutcome::Completed(_)) { "failure" } else { "success" };
    if !against_evidence && late_runs(&keys.runs_of(seen.operation_id).await?).any(|run| run.verdict == opposite) {
        return refused(ended_late(opposite));
    }
    Ok(())
}

/// Makes an abandoned claim UNKNOWN, and returns its record. In a dry run it only checks, and
/// returns the record as it would be.
async fn given_up<K: KeyOperator + ?Sized>(keys: &K, seen: &Record, dry_run: bool) -> Result<Record, StoreError> {
    let look = keys.find(&seen.identity).await?;
    let Some(record) = look.record.filter(|record| record.epoch == seen.epoch && record.state == seen.state) else {
        return refused(CHANGED);
    };
    if record.mode == Mode::Bridged {
        return refused(BRIDGED);
    }
    let left = record.lease_left(look.now);
    if !left.is_zero() {
        let left = left.as_secs() + 1;
        return refused(format!(
            "it is IN_PROGRESS: what it does may happen yet. If its process is gone, its lease is over in {left} s: \
             resolve it then"
        ));
    }
    if dry_run {
        return Ok(Record { state: State::UnknownRequiresRecovery, ..record });
    }
    changed(keys.mark_unknown(&record).await?)?;
    let marked = keys.find(&seen.identity).await?.record;
    marked.filter(|marked| marked.operation_id == record.operation_id).map_or_else(|| refused(CHANGED), Ok)
}
