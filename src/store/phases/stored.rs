//! How operations, intents and evidence stand in tables, the same in every adapter.
//!
//! A row is read by position, as [`operations::stored`](crate::store::operations::stored) reads
//! records: times in microseconds, numbers as 64 bits, ids as 16 bytes, so there is one reader.

use sqlx::{ColumnIndex, Decode, Row, Type};
use uuid::Uuid;

use super::{NewEvidence, NewIntent, Sealed, StoredEvidence, StoredIntent, StoredOperation};
use crate::error::StoreError;
use crate::policy::db_time::DbTime;
use crate::policy::operation::Identity;
use crate::policy::operation::flow::Stage;
use crate::store::operations::stored::{corrupt, number};

fn stage(name: &str) -> Result<Stage, StoreError> {
    let known = Stage::ALL.into_iter().find(|stage| stage.as_str() == name);
    known.ok_or_else(|| corrupt(format!("`{name}` is no state")))
}

/// What was read, or which column of it is not what it should be: a row that this program cannot
/// read is one row's trouble.
fn named<T>(columns: &str, read: Result<T, StoreError>) -> Result<T, StoreError> {
    read.map_err(|error| match error {
        StoreError::Other(sqlx::Error::ColumnDecode { index, source }) => {
            let name = index.parse().ok().and_then(|at| columns.split(' ').nth(at));
            corrupt(format!("the column {}: {source}", name.unwrap_or(&index)))
        }
        error => error,
    })
}

const OPERATION: &str = "now operation_id tenant operation key flow flow_version point state command command_kid epoch \
    lease_until attempts due_at parked created_at outcome_at";
const INTENT: &str = "effect strategy provider_key request request_kid adapter adapter_version first_sent_at last_sent_at sends \
    outcome undoes";
const EVIDENCE: &str = "operation_id effect epoch send kind verdict status bytes bytes_kid observed_at";

/// A row of [`OPERATION`]: tenant, operation and key are null where there is no record, and the end
/// of the lease where it is over.
///
/// # Errors
/// [`StoreError::Corrupt`], with the column; the same below.
pub(in crate::store) fn operation_of<R>(
    row: &R,
    intents: Vec<StoredIntent>,
    evidence: Vec<StoredEvidence>,
) -> Result<StoredOperation, StoreError>
where
    R: Row,
    usize: ColumnIndex<R>,
    for<'r> i64: Decode<'r, R::Database> + Type<R::Database>,
    for<'r> String: Decode<'r, R::Database> + Type<R::Database>,
    for<'r> Vec<u8>: Decode<'r, R::Database> + Type<R::Database>,
{
    let read = || -> Result<StoredOperation, StoreError> {
        let time = |index: usize| -> Result<Option<DbTime>, StoreError> {
            Ok(row.try_get::<Option<i64>, _>(index)?.map(DbTime::from_micros))
        };
        let identity = match row.try_get::<Option<Vec<u8>>, _>(2)? {
            None => None,
            Some(tenant) => {
                let (operation, key): (Vec<u8>, Vec<u8>) = (row.try_get(3)?, row.try_get(4)?);
                Some(Identity::from_stored(&tenant, &operation, &key).map_err(corrupt)?)
            }
        };
        Ok(StoredOperation {
            now: DbTime::from_micros(row.try_get(0)?),
            operation_id: Uuid::from_slice(&row.try_get::<Vec<u8>, _>(1)?).map_err(corrupt)?,
            identity,
            flow: row.try_get(5)?,
            flow_version: number("flow_version", row.try_get(6)?)?,
            point: row.try_get(7)?,
            stage: stage(&row.try_get::<String, _>(8)?)?,
            command: Sealed { bytes: row.try_get(9)?, kid: row.try_get(10)? },
            epoch: row.try_get(11)?,
            lease_until: time(12)?,
            attempts: number("attempts", row.try_get(13)?)?,
            due_at: time(14)?,
            parked: row.try_get(15)?,
            created_at: DbTime::from_micros(row.try_get(16)?),
            outcome_at: time(17)?,
            intents,
            evidence,
        })
    };
    named(OPERATION, read())
}

/// A row of [`INTENT`].
pub(in crate::store) fn intent_of<R>(row: &R) -> Result<StoredIntent, StoreError>
where
    R: Row,
    usize: ColumnIndex<R>,
    for<'r> i64: Decode<'r, R::Database> + Type<R::Database>,
    for<'r> String: Decode<'r, R::Database> + Type<R::Database>,
    for<'r> Vec<u8>: Decode<'r, R::Database> + Type<R::Database>,
{
    let read = || -> Result<StoredIntent, StoreError> {
        let intent = NewIntent {
            effect: row.try_get(0)?,
            strategy: row.try_get(1)?,
            provider_key: row.try_get(2)?,
            request: Sealed { bytes: row.try_get(3)?, kid: row.try_get(4)? },
            adapter: row.try_get(5)?,
            adapter_version: number("adapter_version", row.try_get(6)?)?,
            undoes: row.try_get(11)?,
        };
        Ok(StoredIntent {
            intent,
            first_sent_at: DbTime::from_micros(row.try_get(7)?),
            last_sent_at: DbTime::from_micros(row.try_get(8)?),
            sends: number("sends", row.try_get(9)?)?,
            outcome: row.try_get(10)?,
        })
    };
    named(INTENT, read())
}

/// A row of [`EVIDENCE`].
pub(in crate::store) fn evidence_of<R>(row: &R) -> Result<StoredEvidence, StoreError>
where
    R: Row,
    usize: ColumnIndex<R>,
    for<'r> i64: Decode<'r, R::Database> + Type<R::Database>,
    for<'r> String: Decode<'r, R::Database> + Type<R::Database>,
    for<'r> Vec<u8>: Decode<'r, R::Database> + Type<R::Database>,
{
    let read = || -> Result<StoredEvidence, StoreError> {
        let status: Option<i64> = row.try_get(6)?;
        let evidence = NewEvidence {
            operation_id: Uuid::from_slice(&row.try_get::<Vec<u8>, _>(0)?).map_err(corrupt)?,
            effect: row.try_get(1)?,
            epoch: row.try_get(2)?,
            send: number("send", row.try_get(3)?)?,
            kind: row.try_get(4)?,
            verdict: row.try_get(5)?,
            status: status.map(|status| number("status", status)).transpose()?,
            bytes: Sealed { bytes: row.try_get(7)?, kid: row.try_get(8)? },
        };
        Ok(StoredEvidence { evidence, at: DbTime::from_micros(row.try_get(9)?) })
    };
    named(EVIDENCE, read())
}
