//! Which fingerprints live processes read and write, on every database (O21).

use uuid::Uuid;

use super::{Row, SqlStore, sql};
use crate::error::StoreError;
use crate::policy::operation::versions::{Announced, FORGOTTEN_AFTER, LIVE_FOR, Versions};

const ANNOUNCE: &str = "insert into oncebox.operation_process \
      (process_id, operation, oldest, newest, write_version, kids, write_kid, seen_at) \
    values (:process, :operation, :oldest, :newest, :written, :kids, :write_kid, {clock}) \
    {pg lite: on conflict (process_id, operation) do update set oldest = excluded.oldest, newest = excluded.newest, \
       write_version = excluded.write_version, kids = excluded.kids, write_kid = excluded.write_kid, \
       seen_at = excluded.seen_at}\
    {my: on duplicate key update oldest = values(oldest), newest = values(newest), \
       write_version = values(write_version), kids = values(kids), write_kid = values(write_kid), \
       seen_at = values(seen_at)}";

const FORGET: &str = "delete from oncebox.operation_process where seen_at < {clock} - {span :after}";

const LIVE: &str = "\
    select process_id, operation, oldest, newest, write_version, kids, write_kid from oncebox.operation_process \
     where seen_at > {clock} - {span :live} order by operation, process_id";

/// Says what a process reads and writes, all of it at once, and forgets who has said nothing for
/// long.
pub(in crate::store) async fn announce(
    store: &dyn SqlStore,
    process: Uuid,
    versions: &[Versions],
) -> Result<(), StoreError> {
    let mut transaction = store.begin_sql().await?;
    for said in versions {
        // No key id has a comma.
        let kids = said.kids.iter().map(|kid| kid.as_str()).collect::<Vec<_>>().join(",");
        let announce = sql(ANNOUNCE)
            .bind("process", process)
            .bind("operation", said.operation.as_str().as_bytes())
            .bind("oldest", i64::from(*said.readable.start()))
            .bind("newest", i64::from(*said.readable.end()))
            .bind("written", i64::from(said.write_version))
            .bind("kids", kids)
            .bind("write_kid", said.write_kid.to_string());
        transaction.session().run(announce).await?;
    }
    transaction.commit().await?;
    // On its own: it looks at the rows of others, who look at ours.
    store.run_alone(sql(FORGET).bind("after", FORGOTTEN_AFTER)).await?;
    Ok(())
}

/// What every process has said that is still alive.
pub(in crate::store) async fn live(store: &dyn SqlStore) -> Result<Vec<Announced>, StoreError> {
    let rows = store.reader().await?.rows(sql(LIVE).bind("live", LIVE_FOR)).await?;
    rows.iter().map(|row| announced(&**row)).collect()
}

fn announced(row: &dyn Row) -> Result<Announced, StoreError> {
    fn corrupt(error: impl std::fmt::Display) -> StoreError {
        StoreError::Corrupt(format!("what a process said of its fingerprints: {error}"))
    }
    let version = |at| u32::try_from(row.get::<i64>(at)?).map_err(corrupt);
    let (operation, kids): (Vec<u8>, String) = (row.get(1)?, row.get(5)?);
    Ok(Announced {
        process: row.get(0)?,
        versions: Versions {
            operation: std::str::from_utf8(&operation).map_err(corrupt)?.parse().map_err(corrupt)?,
            readable: version(2)?..=version(3)?,
            write_version: version(4)?,
            kids: kids.split(',').map(|kid| kid.parse().map_err(corrupt)).collect::<Result<_, _>>()?,
            write_kid: row.get::<String>(6)?.parse().map_err(corrupt)?,
        },
    })
}
