//! The values that an outcome writes, the same in every adapter, and the format of headers beside a
//! body. Not here: the statements that write them.

use std::time::Duration;

use super::{Answer, AnswerBody, KeptBody, RunOutcome};
use crate::error::StoreError;
use crate::operation::rules::State;
use crate::operation::rules::record::{Resource, StoredBody, Tombstone};
use crate::operation::rules::retention::Retention;
use crate::time::db_time::DbTime;

/// Up to how many bytes of headers and body an adapter may keep in the row of the claim. A page has
/// room for several such rows, and the database need not move a row because of it.
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
const SMALL_BODY_MAX: u64 = 2_048;

/// The error for a stored value that cannot be read.
pub(crate) fn corrupt(error: impl std::fmt::Display) -> StoreError {
    StoreError::Corrupt(format!("a stored operation: {error}"))
}

impl KeptBody {
    /// How many bytes headers and body take when stored; headers in the format of `pack`.
    #[must_use]
    pub fn stands_in(&self) -> u64 {
        let headers = self.headers.iter().map(|(name, value)| 8 + name.len() as u64 + value.len() as u64);
        headers.sum::<u64>() + self.bytes.len() as u64
    }
}

/// The values that an outcome writes.
#[derive(Debug)]
pub struct Columns<'a> {
    /// The state that the record has from now on.
    pub state: State,
    /// How long the answer is replayed, where there is one.
    pub ttl: Option<Duration>,
    pub(crate) status: Option<i64>,
    pub(crate) schema_version: Option<i64>,
    pub(crate) body: Option<&'static str>,
    /// How long the body is kept, where there is one.
    pub body_ttl: Option<Duration>,
    pub(crate) resource: Option<&'a Resource>,
    pub(crate) error_code: Option<&'a str>,
    /// The body itself, where it is kept.
    pub kept: Option<&'a KeptBody>,
}

impl<'a> Columns<'a> {
    /// The columns of an outcome.
    #[must_use]
    pub fn of(outcome: &'a RunOutcome, retention: &Retention) -> Self {
        let (state, answer, error_code): (_, Option<&Answer>, _) = match outcome {
            RunOutcome::Completed(answer) => (State::Completed, Some(answer), None),
            RunOutcome::FailedReplayable { answer, error_code } => {
                (State::FailedReplayable, Some(answer), error_code.as_deref())
            }
            RunOutcome::FailedRetryable { error_code } => (State::FailedRetryable, None, error_code.as_deref()),
            RunOutcome::Unknown => (State::UnknownRequiresRecovery, None, None),
        };
        let (body, kept) = match answer.map(|answer| &answer.body) {
            None => (None, None),
            Some(AnswerBody::Kept(kept)) => (Some("kept"), Some(kept)),
            Some(AnswerBody::Tombstone(reason)) => (Some(reason.as_str()), None),
            Some(AnswerBody::Reference) => (Some("reference"), None),
        };
        Self {
            state,
            ttl: state.is_terminal().then_some(retention.ttl),
            status: answer.map(|answer| answer.status.into()),
            schema_version: answer.map(|answer| answer.schema_version.into()),
            body,
            body_ttl: kept.map(|_| retention.body),
            resource: answer.and_then(|answer| answer.resource.as_ref()),
            error_code,
            kept,
        }
    }

    /// How many bytes headers and body take where they are kept.
    pub(crate) fn kept_bytes(&self) -> Option<i64> {
        self.kept.map(|kept| i64::try_from(kept.stands_in()).unwrap_or(i64::MAX))
    }

    #[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
    pub(crate) fn small(&self) -> Option<&'a KeptBody> {
        self.kept.filter(|kept| kept.stands_in() <= SMALL_BODY_MAX)
    }

    #[cfg(feature = "postgres")]
    pub(crate) fn large(&self) -> Option<&'a KeptBody> {
        if self.small().is_some() { None } else { self.kept }
    }
}

/// Reads the word that [`Columns`] wrote of a body. A kept body counts as purged at the end of its
/// time.
pub(crate) fn body_of(word: &str, until: Option<DbTime>, now: DbTime) -> Result<StoredBody, StoreError> {
    Ok(match word {
        "kept" if until.is_some_and(|until| until > now) => StoredBody::Kept,
        "kept" => StoredBody::Tombstone(Tombstone::Purged),
        "reference" => StoredBody::Reference,
        reason => StoredBody::Tombstone(reason.parse().map_err(corrupt)?),
    })
}

/// Writes names and values, each after its length in four bytes, most significant byte first.
pub(crate) fn pack(headers: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut packed = Vec::new();
    for part in headers.iter().flat_map(|(name, value)| [name.as_bytes(), value]) {
        packed.extend_from_slice(&u32::try_from(part.len()).unwrap_or(u32::MAX).to_be_bytes());
        packed.extend_from_slice(part);
    }
    packed
}

/// Reads the names and values back that [`pack`] wrote; fails where the bytes are cut off.
pub(crate) fn unpack(mut packed: &[u8]) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
    let mut part = || -> Option<Vec<u8>> {
        let (length, rest) = packed.split_first_chunk::<4>()?;
        let (part, rest) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
        packed = rest;
        Some(part.to_vec())
    };
    let mut headers = Vec::new();
    while let Some(name) = part() {
        let name = String::from_utf8(name).map_err(corrupt)?;
        headers.push((name, part().ok_or_else(|| corrupt("a header without a value"))?));
    }
    if packed.is_empty() { Ok(headers) } else { Err(corrupt("headers that are cut off")) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn headers_come_back_as_they_were_and_nothing_is_guessed() {
        let headers = vec![
            ("link".to_owned(), b"<a>".to_vec()),
            ("link".to_owned(), vec![0xff, 0]),
            ("location".to_owned(), Vec::new()),
        ];
        let packed = pack(&headers);
        assert_eq!(unpack(&packed).unwrap(), headers);
        assert!(unpack(&[]).unwrap().is_empty());
        for end in 1..packed.len() {
            assert!(unpack(&packed[..end]).is_ok_and(|found| found.len() < 3) || unpack(&packed[..end]).is_err());
        }
        assert!(unpack(&packed[..packed.len() - 1]).is_err());
        assert!(unpack(&[0xff; 8]).is_err());
    }

    // Shown by: forgetting the lengths of headers.
    #[test]
    fn what_is_counted_of_an_answer_is_what_stands() {
        let headers = vec![("link".to_owned(), b"<a>".to_vec()), ("location".to_owned(), Vec::new())];
        let kept = KeptBody { headers: headers.clone(), bytes: vec![7; 100], ..KeptBody::default() };
        let answer = |body| RunOutcome::Completed(Answer { status: 201, schema_version: 1, body, resource: None });
        let of = |outcome: &RunOutcome| Columns::of(outcome, &Retention::default()).kept_bytes();
        let stand = pack(&headers).len() + 100;
        assert_eq!(of(&answer(AnswerBody::Kept(kept))), Some(i64::try_from(stand).unwrap()));
        assert_eq!(of(&answer(AnswerBody::Kept(KeptBody::default()))), Some(0));
        assert_eq!(of(&answer(AnswerBody::Tombstone(Tombstone::Oversize))), None);
        assert_eq!(of(&RunOutcome::Unknown), None);
    }
}
