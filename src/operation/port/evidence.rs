//! What was observed of an effect or a run, and bytes as they are stored.
//!
//! Not here: what evidence proves ([`provider`](crate::operation::rules::provider)), and encryption
//! of the bytes.

use uuid::Uuid;

use crate::time::db_time::DbTime;

/// Bytes as they are stored: plain, or encrypted under the key of this id.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Sealed {
    /// The bytes as they are stored; the ciphertext where `kid` is set.
    pub bytes: Vec<u8>,
    /// The id of the key that encrypted them.
    pub kid: Option<String>,
}

impl std::fmt::Debug for Sealed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sealed({} bytes, {:?})", self.bytes.len(), self.kid)
    }
}

/// What was observed of an effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewEvidence {
    /// The id of the operation that was observed.
    pub operation_id: Uuid,
    /// The name of the effect; empty where the evidence is of no single effect.
    pub effect: String,
    /// The epoch of the observer.
    pub epoch: i64,
    /// The send that it answers, from 1; 0 for what answers none.
    pub send: u32,
    /// `answer`, `query`, `error`, `operator` or `run`.
    pub kind: String,
    /// The word of a [`Verdict`](crate::operation::rules::provider::Verdict::word); of an operator
    /// `success`, `failure`, `waived`, `not-sent` or `indefinite`; of a run `success`, `failure`,
    /// `not-sent` or `indefinite`.
    pub verdict: String,
    /// The status of the provider's answer.
    pub status: Option<u16>,
    /// What was observed, as its reader wrote it; never a secret in plain.
    pub bytes: Sealed,
}

impl NewEvidence {
    /// Whether it comes from a run that lost its lease, or from an operator about the run as a
    /// whole.
    pub(crate) fn is_of_run(&self) -> bool {
        self.kind == "run" || (self.kind == "operator" && self.effect.is_empty())
    }

    /// Whether the provider only asks to be called again later.
    pub(crate) fn asks_to_wait(&self) -> bool {
        self.verdict == "wait"
    }
}

/// Evidence as it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredEvidence {
    /// As it was written.
    pub evidence: NewEvidence,
    /// Database time of the row.
    pub at: DbTime,
}
