//! Which fingerprints live processes read and write (O21).

use sqlx::{query, query_as};
use uuid::Uuid;

use super::super::connect::SqliteStore;
use super::super::{millis, now_ms};
use crate::error::StoreError;
use crate::policy::operation::versions::{Announced, FORGOTTEN_AFTER, LIVE_FOR, Versions};
use crate::store::Base;
use crate::store::operations::announced::{Row, announced, row_of};

pub(super) async fn announce(store: &SqliteStore, process: Uuid, versions: &[Versions]) -> Result<(), StoreError> {
    let mut write = store.write().await?;
    for said in versions {
        let (id, operation, oldest, newest, written, kids, write_kid) = row_of(process, said);
        query(concat!(
            "insert into oncebox_operation_process (process_id, operation, oldest, newest, write_version, kids, write_kid, seen_at) \
             values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ",
            now_ms!(),
            ") on conflict (process_id, operation) do update set oldest = excluded.oldest, newest = excluded.newest, \
               write_version = excluded.write_version, kids = excluded.kids, write_kid = excluded.write_kid, seen_at = excluded.seen_at"
        ))
        .bind(id)
        .bind(operation)
        .bind(oldest)
        .bind(newest)
        .bind(written)
        .bind(kids)
        .bind(write_kid)
        .execute(write.connection())
        .await?;
    }
    query(concat!("delete from oncebox_operation_process where seen_at < ", now_ms!(), " - ?1"))
        .bind(millis(FORGOTTEN_AFTER))
        .execute(write.connection())
        .await?;
    write.commit().await
}

pub(in crate::store::sqlite) async fn live(store: &SqliteStore) -> Result<Vec<Announced>, StoreError> {
    let rows = query_as::<_, Row>(concat!(
        "select process_id, operation, oldest, newest, write_version, kids, write_kid from oncebox_operation_process \
          where seen_at > ",
        now_ms!(),
        " - ?1 order by operation, process_id"
    ));
    let rows = rows.bind(millis(LIVE_FOR)).fetch_all(store.pool()).await?;
    rows.into_iter().map(announced).collect()
}
