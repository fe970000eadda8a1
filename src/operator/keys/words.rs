//! What an operator states, as evidence of kind `operator` (O8), with name and reason.
//!
//! Not here: which acts are allowed ([`KeyOperator`](super::KeyOperator)).

use uuid::Uuid;

use super::{Audit, refused};
use crate::error::StoreError;
use crate::operation::port::RunOutcome;
use crate::operation::port::evidence::{NewEvidence, Sealed};
use crate::operation::port::phases::StoredOperation;
use crate::operation::rules::{Identity, Record};
use crate::operator::ActContext;
use crate::text::hex::hex;

/// The evidence of an operator who has judged a conflict.
pub(crate) fn judgement(seen: &StoredOperation, context: &ActContext) -> Result<NewEvidence, StoreError> {
    if seen.outcome_at.is_none() {
        return refused(format!("it is {}: there is no outcome to judge; resolve it", seen.stage.as_str()));
    }
    Ok(says(seen, "", 0, "indefinite", context))
}

/// The audit row of a judgement.
pub(crate) fn judged(operation_id: Uuid, seen: Option<&StoredOperation>) -> Audit<'_> {
    Audit {
        act: "judge",
        place: seen.map_or("", |seen| &seen.flow),
        digest: seen.and_then(|seen| seen.identity.as_ref()).map(Identity::digest),
        operation_id,
        detail: seen.map_or_else(|| "evidence alone".to_owned(), |seen| seen.stage.as_str().to_owned()),
    }
}

/// The error for an id with neither an operation nor left-over evidence.
pub(crate) fn nothing_known() -> StoreError {
    StoreError::Refused("there is nothing to judge: `oncebox operations list --conflicts` shows what is".to_owned())
}

/// The error for evidence of a late run whose record says that it failed. Without the evidence the
/// next request under the key would execute again.
pub(crate) fn still_stands(digest: &[u8], state: &str) -> StoreError {
    let hash = hex(&digest[..digest.len().min(6)]);
    StoreError::Refused(format!(
        "its key {hash} stands as {state}, and this evidence keeps it from being executed again. If nothing happened, \
         `oncebox keys release {hash} --against-evidence` forgets both. If it happened, correct the business rows, and \
         judge it when the key is gone"
    ))
}

/// The evidence of an operator who resolves a key against late runs. After it those runs no longer
/// prevent the key from running again.
pub(crate) fn overruled(seen: &Record, outcome: &RunOutcome, context: &ActContext) -> NewEvidence {
    let verdict = match outcome {
        RunOutcome::Completed(_) => "success",
        RunOutcome::FailedReplayable { .. } => "failure",
        RunOutcome::FailedRetryable { .. } => "not-sent",
        RunOutcome::Unknown => "indefinite",
    };
    word_of(seen.operation_id, seen.epoch, ("", 0), verdict, context)
}

/// Evidence of the operator, with name and reason.
pub(super) fn says(
    seen: &StoredOperation,
    effect: &str,
    send: u32,
    verdict: &str,
    context: &ActContext,
) -> NewEvidence {
    word_of(seen.operation_id, seen.epoch, (effect, send), verdict, context)
}

fn word_of(
    operation_id: Uuid,
    epoch: i64,
    (effect, send): (&str, u32),
    verdict: &str,
    context: &ActContext,
) -> NewEvidence {
    let bytes = serde_json::json!({ "actor": context.actor, "reason": context.reason }).to_string().into_bytes();
    NewEvidence {
        operation_id,
        effect: effect.to_owned(),
        epoch,
        send,
        kind: "operator".to_owned(),
        verdict: verdict.to_owned(),
        status: None,
        bytes: Sealed { bytes, kid: None },
    }
}
