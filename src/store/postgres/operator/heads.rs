//! What a list of messages finds by what holds it or is tried next, so that it costs no more the
//! more stand behind.

use sqlx::{Postgres, Row};
use uuid::Uuid;

use crate::error::StoreError;
use crate::store::DeadFilter;
use crate::store::bounded::{Ask, Bounded};
use crate::store::postgres::text::stored;

const HEADS: &str = "
select w.sequence, w.consumer_id, w.lane_id
  from oncebox.waiting w join oncebox.consumer c on c.consumer_id = w.consumer_id
 where w.due_at is not null and ($1::text is null or w.topic = $1) and ($2::bytea is null or w.key = $2)
   and ($3::text is null or c.name = $3)
 order by w.due_at, w.sequence limit $4";

const BEHIND_A_HEAD: &str = "
select sequence from oncebox.waiting
 where consumer_id = $1 and lane_id = $2 and sequence > $3 and state = 'waiting' order by sequence limit $4";

/// How many of a topic are held from a position on.
const HELD_OF_TOPIC: &str = "
select count(*) from (select from oncebox.outbox_dead where topic = $1 and position > $2 and state = 'held' limit 10000) b";

/// How many of a topic are held behind this position.
pub(super) async fn held_of_topic(
    connection: &mut Bounded<Postgres>,
    topic: &str,
    position: i64,
) -> Result<u64, StoreError> {
    let behind = sqlx::query(HELD_OF_TOPIC).bind(topic).bind(position);
    Ok(behind.one(connection).await?.try_get::<i64, _>(0)?.unsigned_abs())
}

/// Those that are tried next, and what stands behind them.
pub(super) async fn waiting(
    connection: &mut Bounded<Postgres>,
    filter: &DeadFilter,
    limit: i64,
) -> Result<Vec<i64>, StoreError> {
    let heads = sqlx::query(HEADS)
        .bind(filter.topic.as_deref().map(stored))
        .bind(filter.key.as_ref().map(String::as_bytes))
        .bind(&filter.consumer)
        .bind(limit);
    let heads = heads.all(&mut *connection).await?;
    let mut found = heads.iter().map(|head| Ok(head.try_get(0)?)).collect::<Result<Vec<i64>, StoreError>>()?;
    for head in &heads {
        let left = limit - i64::try_from(found.len()).unwrap_or(limit);
        let (consumer, lane): (i32, Option<Uuid>) = (head.try_get(1)?, head.try_get(2)?);
        let Some(lane) = lane.filter(|_| left > 0) else { continue };
        let behind = sqlx::query(BEHIND_A_HEAD).bind(consumer).bind(lane).bind(head.try_get::<i64, _>(0)?).bind(left);
        for row in behind.all(&mut *connection).await? {
            found.push(row.try_get(0)?);
        }
    }
    Ok(found)
}
