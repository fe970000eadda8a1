//! A consumer gets its number at its first start, and keeps its id rule.

use sqlx::{MySql, Row};

use super::DUPLICATE;
use crate::error::StoreError;
use crate::store::bounded::{Ask, BoundedPool};
use crate::store::mysql::START;
use crate::store::mysql::schema::number;
use crate::store::{ConsumerId, ConsumerSpec};

pub(super) async fn register(pool: &BoundedPool<MySql>, spec: &ConsumerSpec) -> Result<ConsumerId, StoreError> {
    let inserted = sqlx::query(
        "insert into oncebox_consumer (name, id_rule, registered_at, seen_at, purged_below) \
         values (?, ?, utc_timestamp(6), utc_timestamp(6), null)",
    )
    .bind(spec.name.as_bytes())
    .bind(&spec.id_rule)
    .run(pool)
    .await;
    match inserted {
        Ok(_) => {}
        Err(error) if number(&error) == Some(DUPLICATE) => {}
        Err(error) => return Err(error.into()),
    }
    let mut transaction = pool.begin(START).await?;
    let found = sqlx::query("select consumer_id, id_rule from oncebox_consumer where name = ? for update")
        .bind(spec.name.as_bytes())
        .one(&mut transaction)
        .await?;
    let (id, id_rule): (i32, String) = (found.try_get("consumer_id")?, found.try_get("id_rule")?);
    if spec.changes(&id_rule)? {
        sqlx::query("update oncebox_consumer set id_rule = ? where consumer_id = ?")
            .bind(&spec.id_rule)
            .bind(id)
            .run(&mut transaction)
            .await?;
    }
    transaction.commit().await?;
    Ok(ConsumerId(id))
}
