//! Claims without an outcome that an operator resolves. Only an abandoned claim can be resolved:
//! its lease is over, or a handler of mode `same_tx` has committed it by itself.
//!
//! Not here: which acts there are ([`KeyOperator`]), and the sweep that ends abandoned claims by
//! itself (`operation::sweep`).

use super::{CHANGED, KeyOperator, changed, ended_late, refused};
use crate::error::StoreError;
use crate::operation::port::{RunOutcome, late_runs};
use crate::operation::rules::{Mode, Record, State};

/// Why an act on a claim of mode `bridged` is refused.
pub(super) const BRIDGED: &str = "it is IN_PROGRESS in mode bridged: without an outcome nothing of it happened. After the end of its lease \
     `Engine::sweep` frees the key, and the next request under it executes";

/// Refuses an outcome that is the opposite of how a run ended that had lost its lease (O8), unless
/// the operator insists.
pub(super) async fn refuse_opposite<K: KeyOperator + ?Sized>(
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
pub(super) async fn given_up<K: KeyOperator + ?Sized>(
    keys: &K,
    seen: &Record,
    dry_run: bool,
) -> Result<Record, StoreError> {
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
