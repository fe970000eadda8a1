//! How what a process says of its fingerprints is stored, for all databases alike (O21).

use uuid::Uuid;

use crate::error::StoreError;
use crate::policy::operation::versions::{Announced, Versions};

/// Process, operation, oldest, newest and written version, key ids with commas between them, key id
/// that is written with.
pub(in crate::store) type Row = (Vec<u8>, Vec<u8>, i64, i64, i64, String, String);

/// The row of what was said. No key id has a comma.
pub(in crate::store) fn row_of(process: Uuid, said: &Versions) -> Row {
    let kids = said.kids.iter().map(|kid| kid.as_str()).collect::<Vec<_>>().join(",");
    (
        process.as_bytes().to_vec(),
        said.operation.as_str().as_bytes().to_vec(),
        i64::from(*said.readable.start()),
        i64::from(*said.readable.end()),
        i64::from(said.write_version),
        kids,
        said.write_kid.to_string(),
    )
}

/// What was said, from a row.
pub(in crate::store) fn announced(
    (process, operation, oldest, newest, write, kids, write_kid): Row,
) -> Result<Announced, StoreError> {
    fn corrupt(error: impl std::fmt::Display) -> StoreError {
        StoreError::Corrupt(format!("what a process said of its fingerprints: {error}"))
    }
    let version = |number: i64| u32::try_from(number).map_err(corrupt);
    Ok(Announced {
        process: Uuid::from_slice(&process).map_err(corrupt)?,
        versions: Versions {
            operation: std::str::from_utf8(&operation).map_err(corrupt)?.parse().map_err(corrupt)?,
            readable: version(oldest)?..=version(newest)?,
            write_version: version(write)?,
            kids: kids.split(',').map(|kid| kid.parse().map_err(corrupt)).collect::<Result<_, _>>()?,
            write_kid: write_kid.parse().map_err(corrupt)?,
        },
    })
}
