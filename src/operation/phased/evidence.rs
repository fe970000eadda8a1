//! Writes and reads evidence rows: what was observed of a call to a provider, and the verdict on
//! whether its effect happened (O7, O8). Only this file knows the bytes of the rows that it writes.
//!
//! | `kind` of the row | verdict | in its bytes | written by |
//! |---|---|---|---|
//! | answer, query | wait | `proves`, what was seen, `pause_ms` | this file |
//! | answer, query | all others but not_sent | `proves`, what was seen | this file |
//! | error | not_sent, indefinite | `proves`, what was seen | this file |
//! | operator | the word of the row | who and why, in plain JSON | the acts on keys and operations |
//! | run | the word of the row | nothing | an edge operation whose run lost its lease |
//!
//! In rows of this file the word ([`Verdict::word`]) is for people and lists; `proves` is what a
//! process decides from. Of an operator, the word on an effect is the verdict: `success`,
//! `failure` or `waived`. An operator's row without an effect is about the operation as a whole; it
//! is not read here, and neither is a row of kind `run`.
//!
//! The last success or failure of an operator overrides all other rows. One exception: a provider's
//! success that came after an operator's failure is a conflict, and an operator decides again.
//!
//! Guarantees: any process that can open the bytes rebuilds the same [`Evidence`]; a row that this
//! program cannot read is an error, never left out.
//!
//! Not here: the conclusion from all rows ([`Evidence`]), and the cipher of the bytes
//! ([`Sealer`]).

use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::StoreError;
use crate::operation::Sealer;
use crate::operation::port::evidence::{NewEvidence, StoredEvidence};
use crate::operation::rules::provider::{Evidence, Proof, Verdict};

/// The largest number of bytes that are kept of what was observed.
const SAW_MAX: usize = 2_048;
const OPERATOR: &str = "operator";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// The answer to a send.
    Answer,
    /// The answer to a query.
    Query,
    /// A send that got no answer.
    Error,
}

/// An observation of an effect, to be written as a row.
#[derive(Debug)]
pub(super) struct Observation<'a> {
    pub(super) operation_id: Uuid,
    pub(super) effect: &'a str,
    pub(super) epoch: i64,
    /// 0 for a query.
    pub(super) send: u32,
    pub(super) by: By,
    pub(super) verdict: Verdict,
    pub(super) status: Option<u16>,
    pub(super) saw: &'a [u8],
}

#[derive(Debug, Serialize, Deserialize)]
struct Body {
    proves: String,
    #[serde(default, skip_serializing_if = "is_zero")]
    pause_ms: u64,
    saw: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) proof: Proof,
    pub(super) operator: bool,
    pub(super) saw: String,
}

// serde's `skip_serializing_if` hands out a reference.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

pub(super) fn row(sealer: &Sealer, seen: &Observation<'_>) -> Result<NewEvidence, StoreError> {
    let kind = match seen.by {
        By::Answer => "answer",
        By::Query => "query",
        By::Error => "error",
    };
    let pause = if let Verdict::Wait(pause) = seen.verdict { pause } else { Duration::ZERO };
    let body = Body {
        proves: seen.verdict.name().to_owned(),
        pause_ms: u64::try_from(pause.as_millis()).unwrap_or(u64::MAX),
        saw: String::from_utf8_lossy(&seen.saw[..seen.saw.len().min(SAW_MAX)]).into_owned(),
    };
    let bytes = serde_json::to_vec(&body).map_err(|error| StoreError::Corrupt(format!("evidence: {error}")))?;
    Ok(NewEvidence {
        operation_id: seen.operation_id,
        effect: seen.effect.to_owned(),
        epoch: seen.epoch,
        send: seen.send,
        kind: kind.to_owned(),
        verdict: seen.verdict.word().to_owned(),
        status: seen.status,
        bytes: sealer.seal(seen.operation_id, "evidence", &bytes)?,
    })
}

fn read(sealer: &Sealer, stored: &StoredEvidence) -> Result<Row, StoreError> {
    let row = &stored.evidence;
    let unreadable = |what: &dyn std::fmt::Display| {
        StoreError::Corrupt(format!("evidence of the operation {} cannot be read: {what}", row.operation_id))
    };
    let operator = row.kind == OPERATOR;
    let (verdict, saw) = if operator {
        let verdict = match row.verdict.as_str() {
            "success" => Verdict::Succeeded,
            "failure" => Verdict::Failed,
            "waived" => Verdict::Waived,
            word => return Err(unreadable(&format!("`{word}` is no word of an operator that this program knows"))),
        };
        // The command line has no keys, so it writes in plain; these rows are used all the same.
        (verdict, String::from_utf8_lossy(&row.bytes.bytes).into_owned())
    } else {
        let bytes = sealer.open(row.operation_id, "evidence", &row.bytes)?;
        let body: Body = serde_json::from_slice(&bytes).map_err(|error| unreadable(&error))?;
        let verdict = Verdict::from_row(&body.proves, Duration::from_millis(body.pause_ms))
            .ok_or_else(|| unreadable(&format!("`{}` is no verdict that this program knows", body.proves)))?;
        (verdict, body.saw)
    };
    let proof = Proof { send: (row.send > 0).then_some(row.send), verdict, at: stored.at };
    Ok(Row { proof, operator, saw })
}

/// What providers said of an effect. An operator's rows that waive a send count too: without them a
/// declined duplicate would look like a failure.
pub(super) fn providers(sealer: &Sealer, stored: &[StoredEvidence], effect: &str) -> Result<Evidence, StoreError> {
    let mut rows = all(sealer, stored, effect)?;
    rows.retain(|row| !row.operator || row.proof.verdict == Verdict::Waived);
    Ok(Evidence::of(rows.iter().map(|row| row.proof)))
}

/// The evidence of an effect from which its outcome is decided: that of the rows which [`rows`]
/// returns.
pub(super) fn evidence(sealer: &Sealer, stored: &[StoredEvidence], effect: &str) -> Result<Evidence, StoreError> {
    Ok(Evidence::of(rows(sealer, stored, effect)?.iter().map(|row| row.proof)))
}

/// The rows of an effect that decide: the operator's last success or failure alone, or all rows
/// where there is none. Beside an operator's failure a provider's later success stays: the operator
/// cannot have known it, so it is decided again.
pub(super) fn rows(sealer: &Sealer, stored: &[StoredEvidence], effect: &str) -> Result<Vec<Row>, StoreError> {
    let mut rows = all(sealer, stored, effect)?;
    let decided = |row: &Row| row.operator && matches!(row.proof.verdict, Verdict::Succeeded | Verdict::Failed);
    let Some(at) = rows.iter().rposition(decided) else { return Ok(rows) };
    let mut since = rows.split_off(at);
    let failed = since[0].proof.verdict == Verdict::Failed;
    let mut one = 0;
    since.retain(|row| {
        one += 1;
        one == 1 || failed && row.proof.verdict == Verdict::Succeeded
    });
    Ok(since)
}

fn all(sealer: &Sealer, stored: &[StoredEvidence], effect: &str) -> Result<Vec<Row>, StoreError> {
    // A row of kind `run` records that a handler ended after its lease was lost; it is not about a
    // provider.
    let of_it = stored.iter().filter(|one| one.evidence.effect == effect && one.evidence.kind != "run");
    of_it.map(|one| read(sealer, one)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::port::evidence::Sealed;
    use crate::operation::rules::provider::{Sends, Settled};
    use crate::time::db_time::DbTime;

    fn observed(verdict: Verdict, send: u32, by: By) -> StoredEvidence {
        let seen = Observation {
            operation_id: Uuid::from_u128(7),
            effect: "charge",
            epoch: 1,
            send,
            by,
            verdict,
            status: Some(409),
            saw: b"{\"code\":\"in_progress\"}",
        };
        StoredEvidence { evidence: row(&Sealer::default(), &seen).expect("a row"), at: DbTime::from_millis(5) }
    }

    fn operators(verdict: &str) -> StoredEvidence {
        let mut one = observed(Verdict::Indefinite, 0, By::Query);
        one.evidence.kind = OPERATOR.to_owned();
        one.evidence.verdict = verdict.to_owned();
        one.evidence.bytes = Sealed { bytes: b"seen in the provider's console".to_vec(), kid: None };
        one
    }

    // Shown by: leaving the pause out; the row's word instead of `proves`.
    #[test]
    fn o8_every_verdict_is_read_back_as_it_was_written() {
        let pause = Duration::from_millis(2_500);
        for verdict in [
            Verdict::Succeeded,
            Verdict::Failed,
            Verdict::Refused,
            Verdict::NotSent,
            Verdict::Waived,
            Verdict::Wait(pause),
            Verdict::Mismatch,
            Verdict::NotFound,
            Verdict::StoredError,
            Verdict::Indefinite,
        ] {
            for (send, by) in [(3, By::Answer), (0, By::Query), (1, By::Error)] {
                let read = rows(&Sealer::default(), &[observed(verdict, send, by)], "charge").expect("read");
                assert_eq!(read[0].proof.verdict, verdict);
                assert_eq!(read[0].proof.send, (send > 0).then_some(send));
                assert_eq!(read[0].saw, "{\"code\":\"in_progress\"}");
            }
        }
        let other = rows(&Sealer::default(), &[observed(Verdict::Succeeded, 1, By::Answer)], "refund").expect("read");
        assert!(other.is_empty(), "of another effect");
    }

    // Shown by: skipping what cannot be read; an operator's unknown word as `Indefinite`.
    #[test]
    fn o8_a_row_of_a_newer_program_is_an_error_and_not_left_out() {
        let mut newer = observed(Verdict::Succeeded, 1, By::Answer);
        newer.evidence.bytes.bytes = br#"{"proves":"quantum","saw":""}"#.to_vec();
        assert!(matches!(rows(&Sealer::default(), &[newer], "charge"), Err(StoreError::Corrupt(_))));
        let operators_newer = rows(&Sealer::default(), &[operators("undone")], "charge");
        assert!(operators_newer.is_err_and(|why| why.to_string().contains("`undone` is no word of an operator")));
    }

    // Shown by: counting the mismatch beside the operator's decision: the operation was parked
    // again and again.
    #[test]
    fn o9_the_last_word_of_an_operator_decides_alone() {
        let mismatch = observed(Verdict::Mismatch, 1, By::Answer);
        let read = rows(
            &Sealer::default(),
            &[mismatch.clone(), operators("failure"), operators("success"), mismatch],
            "charge",
        );
        let read = read.expect("read");
        assert_eq!(read.iter().map(|row| row.proof.verdict).collect::<Vec<_>>(), [Verdict::Succeeded]);
    }

    // Shown by: using the operator's last decision alone (failed, although the effect had
    // happened).
    #[test]
    fn o8_proof_that_comes_after_an_operators_failure_is_a_conflict_until_it_is_judged() {
        let (sealer, proof) = (Sealer::default(), observed(Verdict::Succeeded, 1, By::Answer));
        let sends = Sends { first_sent_at: Some(DbTime::from_millis(1)), begun: 1 };
        let settled = |stored: &[StoredEvidence]| evidence(&sealer, stored, "charge").expect("read").settled(sends);
        let failure = operators("failure");
        assert_eq!(settled(std::slice::from_ref(&failure)), Some(Settled::Failed));
        assert_eq!(settled(&[failure.clone(), proof.clone()]), None);
        // The operator decided again, against the evidence.
        assert_eq!(settled(&[failure.clone(), proof.clone(), failure.clone()]), Some(Settled::Failed));
        let said = providers(&sealer, &[proof, failure], "charge").expect("read");
        assert!(said.contradicts(Settled::Failed));
    }
}
