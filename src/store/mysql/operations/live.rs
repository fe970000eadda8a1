//! Which fingerprints live processes read and write (O21).

use uuid::Uuid;

use super::super::{MySqlStore, micros};
use crate::error::StoreError;
use crate::policy::operation::versions::{Announced, FORGOTTEN_AFTER, LIVE_FOR, Versions};
use crate::store::bounded::Ask;
use crate::store::operations::announced::{Row, announced, row_of};

pub(super) async fn announce(store: &MySqlStore, process: Uuid, versions: &[Versions]) -> Result<(), StoreError> {
    let mut connection = store.pool.acquire().await?;
    for said in versions {
        let (id, operation, oldest, newest, written, kids, write_kid) = row_of(process, said);
        sqlx::query(
            "insert into oncebox_operation_process (process_id, operation, oldest, newest, write_version, kids, write_kid, seen_at) \
             values (?, ?, ?, ?, ?, ?, ?, utc_timestamp(6)) \
             on duplicate key update oldest = values(oldest), newest = values(newest), write_version = values(write_version), \
               kids = values(kids), write_kid = values(write_kid), seen_at = values(seen_at)",
        )
        .bind(id)
        .bind(operation)
        .bind(oldest)
        .bind(newest)
        .bind(written)
        .bind(kids)
        .bind(write_kid)
        .run(&mut connection)
        .await?;
    }
    sqlx::query("delete from oncebox_operation_process where seen_at < utc_timestamp(6) - interval ? microsecond")
        .bind(micros(FORGOTTEN_AFTER))
        .run(&mut connection)
        .await?;
    Ok(())
}

pub(in crate::store::mysql) async fn live(store: &MySqlStore) -> Result<Vec<Announced>, StoreError> {
    let rows = sqlx::query_as::<_, Row>(
        "select process_id, operation, oldest, newest, write_version, kids, write_kid from oncebox_operation_process \
          where seen_at > utc_timestamp(6) - interval ? microsecond order by operation, process_id",
    );
    let rows = rows.bind(micros(LIVE_FOR)).all(&mut store.pool.acquire().await?).await?;
    rows.into_iter().map(announced).collect()
}
