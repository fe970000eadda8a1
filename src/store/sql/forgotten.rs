//! Deletes what is kept of an operation whose key is used anew or forgotten, in any mode.
//!
//! Guarantee: where a key is used anew, a conflict that nobody has judged stays.
//!
//! Not here: the purge of records whose time is over (`expiry`).

use uuid::Uuid;

use super::{Session, sql};
use crate::error::StoreError;
use crate::operation::port::Basis;
use crate::operation::rules::{Mode, State};

/// Finds a row where a person must judge a conflict of the operation first.
const HAS_CONFLICT: &str = "select 1 from oncebox.operation o where o.operation_id = :id and {piece conflict}";

/// The rows of an operation, without its evidence.
const OPERATION: [&str; 3] = [
    "delete from oncebox.operation where operation_id = :id",
    "delete from oncebox.operation_intent where operation_id = :id",
    "{pg my: delete from oncebox.operation_phase where operation_id = :id}",
];

const EVIDENCE: &str = "delete from oncebox.operation_evidence where operation_id = :id \
    {if but_late_runs: and not (kind = 'run' and verdict = 'success')}";

/// The operation that a key had before it is used anew.
#[derive(Debug, Clone, Copy)]
pub(in crate::store) struct Former {
    operation_id: Uuid,
    mode: Mode,
    state: State,
}

impl Former {
    pub(in crate::store) fn of(basis: Basis<'_>) -> Option<Self> {
        let Basis::Anew(seen) = basis else { return None };
        Some(Self { operation_id: seen.operation_id, mode: seen.mode, state: seen.state })
    }

    /// Deletes what is kept of it, after its key was claimed anew. Evidence that a late run
    /// succeeded stays, unless the outcome says the same.
    pub(in crate::store) async fn forget(self, session: &mut dyn Session) -> Result<(), StoreError> {
        if self.mode == Mode::Phased {
            if !session.rows(sql(HAS_CONFLICT).bind("id", self.operation_id)).await?.is_empty() {
                return Ok(());
            }
            forget_operation(session, self.operation_id).await?;
        }
        forget_evidence(session, self.operation_id, self.state != State::Completed).await
    }
}

/// Deletes what is kept of the operation that the key had before, where it was just claimed anew.
pub(in crate::store) async fn forget_former(session: &mut dyn Session, basis: Basis<'_>) -> Result<(), StoreError> {
    match Former::of(basis) {
        Some(former) => former.forget(session).await,
        None => Ok(()),
    }
}

/// Deletes the rows of an operation in phases, without its evidence.
pub(super) async fn forget_operation(session: &mut dyn Session, operation_id: Uuid) -> Result<(), StoreError> {
    for text in OPERATION {
        session.run(sql(text).bind("id", operation_id)).await?;
    }
    Ok(())
}

/// Deletes the evidence of an operation; with `but_late_runs`, not that a late run succeeded.
pub(super) async fn forget_evidence(
    session: &mut dyn Session,
    operation_id: Uuid,
    but_late_runs: bool,
) -> Result<(), StoreError> {
    session.run(sql(EVIDENCE).bind("id", operation_id).bind("but_late_runs", but_late_runs)).await.map(drop)
}
