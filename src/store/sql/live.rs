//! Which fingerprints live processes read and write, on every database (O21).
//!
//! Guarantee: a process has one row for each operation, with its last announcement. The row counts
//! as live for a while, and is deleted after a day without a new announcement.

use uuid::Uuid;

use super::{Row, SqlStore, sql};
use crate::error::StoreError;
use crate::operation::rules::versions::{Announced, FORGOTTEN_AFTER, LIVE_FOR, Versions};

const ANNOUNCE: &str = "insert into oncebox.operation_process \
    (process_id, operation, oldest, newest, write_version, kids, write_kid, seen_at) \
    values (:process, :operation, :oldest, :newest, :written, :kids, :write_kid, {now}) \
    {or update process_id, operation} oldest = {new oldest}, newest = {new newest}, write_version = {new write_version}, \
      kids = {new kids}, write_kid = {new write_kid}, seen_at = {new seen_at}";

const FORGET: &str = "delete from oncebox.operation_process where seen_at < {now} - {span :after}";

const LIVE: &str = "select process_id, operation, oldest, newest, write_version, kids, write_kid \
    from oncebox.operation_process where seen_at > {now} - {span :for} order by operation, process_id";

/// Stores what a process reads and writes, then deletes old rows of other processes. The delete has
/// a transaction of its own, because it may wait for rows that others have locked.
pub(super) async fn announce(store: &dyn SqlStore, process: Uuid, versions: &[Versions]) -> Result<(), StoreError> {
    let mut transaction = store.begin_sql().await?;
    for said in versions {
        // No key id has a comma.
        let kids = said.kids.iter().map(|kid| kid.as_str()).collect::<Vec<_>>().join(",");
        let announce = sql(ANNOUNCE)
            .bind("process", process)
            .bind("operation", said.operation.as_str().as_bytes())
            .bind("oldest", *said.readable.start())
            .bind("newest", *said.readable.end())
            .bind("written", said.write_version)
            .bind("kids", kids)
            .bind("write_kid", said.write_kid.to_string());
        transaction.session().run(announce).await?;
    }
    transaction.commit().await?;
    store.run_alone(sql(FORGET).bind("after", FORGOTTEN_AFTER)).await.map(drop)
}

/// The announcements of live processes, by operation and process.
pub(super) async fn live(store: &dyn SqlStore) -> Result<Vec<Announced>, StoreError> {
    let rows = store.reader().await?.rows(sql(LIVE).bind("for", LIVE_FOR)).await?;
    rows.iter().map(|row| announced(&**row)).collect()
}

fn announced(row: &dyn Row) -> Result<Announced, StoreError> {
    fn corrupt(error: impl std::fmt::Display) -> StoreError {
        StoreError::Corrupt(format!("what a process said of its fingerprints: {error}"))
    }
    let (operation, kids): (Vec<u8>, String) = (row.get(1)?, row.get(5)?);
    Ok(Announced {
        process: row.get(0)?,
        versions: Versions {
            operation: std::str::from_utf8(&operation).map_err(corrupt)?.parse().map_err(corrupt)?,
            readable: row.get(2)?..=row.get(3)?,
            write_version: row.get(4)?,
            kids: kids.split(',').map(|kid| kid.parse().map_err(corrupt)).collect::<Result<_, _>>()?,
            write_kid: row.get::<String>(6)?.parse().map_err(corrupt)?,
        },
    })
}
