//! Reads operations and intents from rows, the same for every database. Columns are read by
//! position, times in microseconds. Not here: the statements.

use crate::error::StoreError;
use crate::operation::port::evidence::{Sealed, StoredEvidence};
use crate::operation::port::phases::{NewIntent, StoredIntent, StoredOperation};
use crate::operation::port::stored::corrupt;
use crate::operation::rules::Identity;
use crate::store::sql::Row;

/// A row of [`OPERATION`](super::OPERATION): tenant, operation and key are null where there is no
/// record; `lease_until` is null where the lease is over.
pub(super) fn operation_of(
    row: &dyn Row,
    intents: Vec<StoredIntent>,
    evidence: Vec<StoredEvidence>,
) -> Result<StoredOperation, StoreError> {
    let identity = match row.get_opt::<Vec<u8>>(2)? {
        None => None,
        Some(tenant) => {
            let (operation, key): (Vec<u8>, Vec<u8>) = (row.get(3)?, row.get(4)?);
            Some(Identity::from_stored(&tenant, &operation, &key).map_err(corrupt)?)
        }
    };
    Ok(StoredOperation {
        now: row.get(0)?,
        operation_id: row.get(1)?,
        identity,
        flow: row.get(5)?,
        flow_version: row.get(6)?,
        point: row.get(7)?,
        stage: row.get::<String>(8)?.parse().map_err(corrupt)?,
        command: Sealed { bytes: row.get(9)?, kid: row.get_opt(10)? },
        epoch: row.get(11)?,
        lease_until: row.get_opt(12)?,
        attempts: row.get(13)?,
        due_at: row.get_opt(14)?,
        parked: row.get_opt(15)?,
        created_at: row.get(16)?,
        outcome_at: row.get_opt(17)?,
        intents,
        evidence,
    })
}

/// A row of [`INTENTS`](super::INTENTS).
pub(super) fn intent_of(row: &dyn Row) -> Result<StoredIntent, StoreError> {
    let intent = NewIntent {
        effect: row.get(0)?,
        strategy: row.get(1)?,
        provider_key: row.get(2)?,
        request: Sealed { bytes: row.get(3)?, kid: row.get_opt(4)? },
        adapter: row.get(5)?,
        adapter_version: row.get(6)?,
        undoes: row.get_opt(11)?,
    };
    Ok(StoredIntent {
        intent,
        first_sent_at: row.get(7)?,
        last_sent_at: row.get(8)?,
        sends: row.get(9)?,
        outcome: row.get_opt(10)?,
    })
}
