//! Which fingerprints live processes read and write (O21).

use uuid::Uuid;

use super::super::PostgresStore;
use crate::error::StoreError;
use crate::policy::operation::versions::{Announced, FORGOTTEN_AFTER, LIVE_FOR, Versions};
use crate::store::bounded::Ask;
use crate::store::operations::announced::{Row, announced, row_of};

pub(super) async fn announce(store: &PostgresStore, process: Uuid, versions: &[Versions]) -> Result<(), StoreError> {
    let mut connection = store.pool.acquire().await?;
    for said in versions {
        let (_, operation, oldest, newest, written, kids, write_kid) = row_of(process, said);
        sqlx::query(
            "insert into oncebox.operation_process (process_id, operation, oldest, newest, write_version, kids, write_kid) \
             values ($1, $2, $3, $4, $5, $6, $7) \
             on conflict (process_id, operation) do update set oldest = excluded.oldest, newest = excluded.newest, \
               write_version = excluded.write_version, kids = excluded.kids, write_kid = excluded.write_kid, \
               seen_at = clock_timestamp()",
        )
        .bind(process)
        .bind(operation)
        .bind(oldest)
        .bind(newest)
        .bind(written)
        .bind(kids)
        .bind(write_kid)
        .run(&mut connection)
        .await?;
    }
    sqlx::query("delete from oncebox.operation_process where seen_at < clock_timestamp() - $1 * interval '1 second'")
        .bind(FORGOTTEN_AFTER.as_secs_f64())
        .run(&mut connection)
        .await?;
    Ok(())
}

pub(in crate::store::postgres) async fn live(store: &PostgresStore) -> Result<Vec<Announced>, StoreError> {
    let rows = sqlx::query_as::<_, Row>(
        "select uuid_send(process_id), operation, oldest, newest, write_version, kids, write_kid from oncebox.operation_process \
          where seen_at > clock_timestamp() - $1 * interval '1 second' order by operation, process_id",
    );
    let rows = rows.bind(LIVE_FOR.as_secs_f64()).all(&mut store.pool.acquire().await?).await?;
    rows.into_iter().map(announced).collect()
}
