//! A consumer that is gone is forgotten.

use sqlx::{AssertSqlSafe, MySql, Row};
use uuid::Uuid;

use super::{START, count_of};
use crate::error::StoreError;
use crate::store::bounded::{Ask, BoundedPool};
use crate::store::{ActContext, Forgotten};

pub(super) async fn forget(
    pool: &BoundedPool<MySql>,
    name: &str,
    context: &ActContext,
) -> Result<Forgotten, StoreError> {
    let mut tx = pool.begin(START).await?;
    let found = sqlx::query(
        "select consumer_id, timestampdiff(microsecond, seen_at, utc_timestamp(6)) as seen from oncebox_consumer \
          where name = ? for update",
    );
    let row = found.bind(name.as_bytes()).optional(&mut tx).await?.ok_or_else(|| Forgotten::unknown(name))?;
    let (consumer, seen): (i32, i64) = (row.try_get("consumer_id")?, row.try_get("seen")?);
    Forgotten::check(name, seen as f64 / 1e6)?;
    let mut counts = [0; 2];
    for (count, table) in counts.iter_mut().zip(["oncebox_waiting", "oncebox_inbox"]) {
        let sql = format!("select count(*) from {table} where consumer_id = ?");
        *count = sqlx::query_scalar::<_, i64>(AssertSqlSafe(sql)).bind(consumer).one(&mut tx).await?;
    }
    let forgotten = Forgotten { messages: count_of(counts[0]), inbox_rows: count_of(counts[1]) };
    if context.dry_run {
        tx.rollback().await?;
        return Ok(forgotten);
    }
    for table in ["oncebox_waiting", "oncebox_attempt", "oncebox_assignment"] {
        let delete = format!("delete from {table} where consumer_id = ?");
        sqlx::query(AssertSqlSafe(delete)).bind(consumer).run(&mut tx).await?;
    }
    let rename = "update oncebox_consumer set name = ? where consumer_id = ?";
    sqlx::query(rename).bind(Forgotten::name(consumer).into_bytes()).bind(consumer).run(&mut tx).await?;
    sqlx::query(
        "insert into oncebox_audit (at, actor, reason, act, place, number, message_id, detail) \
         values (utc_timestamp(6), ?, ?, 'forget', ?, '', ?, ?)",
    )
    .bind(&context.actor)
    .bind(&context.reason)
    .bind(name.as_bytes())
    .bind(Uuid::nil())
    .bind(format!("{} messages, {} inbox rows", forgotten.messages, forgotten.inbox_rows))
    .run(&mut tx)
    .await?;
    tx.commit().await?;
    // Its inbox goes in pages. Whoever is stopped here finds the name that it has now in the list,
    // and forgets that.
    let page = "delete from oncebox_inbox where consumer_id = ? limit 10000";
    while sqlx::query(page).bind(consumer).run(pool).await?.rows_affected() > 0 {}
    sqlx::query("delete from oncebox_consumer where consumer_id = ?").bind(consumer).run(pool).await?;
    Ok(forgotten)
}
