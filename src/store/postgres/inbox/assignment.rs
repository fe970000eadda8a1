//! Partitions: who holds each, and up to where it is done.

use sqlx::Row;

use super::super::PostgresStore;
use super::super::text::stored;
use crate::error::StoreError;
use crate::policy::position::Position;
use crate::store::bounded::Ask;
use crate::store::{ConsumerId, Holding, Opened};

/// Notes that a partition was assigned.
pub(super) async fn open(store: &PostgresStore, consumer: ConsumerId, holding: &Holding) -> Result<Opened, StoreError> {
    // The subquery sees the row as it was before this statement.
    let row = sqlx::query(
        "insert into oncebox.assignment as a (consumer_id, topic, partition_no, state, owner) values ($1, $2, $3, 'open', $4)
         on conflict (consumer_id, topic, partition_no)
         do update set state = 'open', owner = excluded.owner, changed_at = clock_timestamp()
         returning exists (select 1 from oncebox.assignment b where b.consumer_id = a.consumer_id
                            and b.topic = a.topic and b.partition_no = a.partition_no and b.state = 'open'),
                   topic_id, next_offset,
                   a.id_rule <> (select c.id_rule from oncebox.consumer c where c.consumer_id = a.consumer_id)",
    )
    .bind(consumer.0)
    .bind(stored(&holding.topic))
    .bind(holding.partition)
    .bind(holding.owner)
    .one(&store.pool)
    .await?;
    let (topic_id, next): (Option<String>, Option<i64>) = (row.try_get(1)?, row.try_get(2)?);
    Ok(Opened {
        was_open: row.try_get(0)?,
        position: next.map(|next| Position { topic_id, next }),
        has_new_ids: row.try_get::<Option<bool>, _>(3)? == Some(true),
    })
}

/// Remembers positions, where their owners still hold the partitions.
pub(super) async fn keep_positions(
    store: &PostgresStore,
    consumer: ConsumerId,
    positions: &[(Holding, Position)],
) -> Result<(), StoreError> {
    sqlx::query(
        "update oncebox.assignment a
            set topic_id = n.topic_id, next_offset = n.next, id_rule = c.id_rule, changed_at = clock_timestamp()
           from oncebox.consumer c, unnest($2::text[], $3::integer[], $4::uuid[], $5::text[], $6::bigint[])
                n (topic, partition_no, owner, topic_id, next)
          where c.consumer_id = a.consumer_id and a.consumer_id = $1 and a.topic = n.topic and a.partition_no = n.partition_no and a.owner = n.owner",
    )
    .bind(consumer.0)
    .bind(positions.iter().map(|(holding, _)| stored(&holding.topic)).collect::<Vec<_>>())
    .bind(positions.iter().map(|(holding, _)| holding.partition).collect::<Vec<_>>())
    .bind(positions.iter().map(|(holding, _)| holding.owner).collect::<Vec<_>>())
    .bind(positions.iter().map(|(_, position)| position.topic_id.clone()).collect::<Vec<_>>())
    .bind(positions.iter().map(|(_, position)| position.next).collect::<Vec<_>>())
    .run(&store.pool)
    .await?;
    Ok(())
}

/// Notes a clean end.
pub(super) async fn close(
    store: &PostgresStore,
    consumer: ConsumerId,
    holding: &Holding,
    position: Option<&Position>,
) -> Result<(), StoreError> {
    sqlx::query(
        "update oncebox.assignment set state = 'closed', owner = null, changed_at = clock_timestamp(),
                topic_id = case when $5 is null then topic_id else $6 end, next_offset = coalesce($5, next_offset)
          where consumer_id = $1 and topic = $2 and partition_no = $3 and owner = $4",
    )
    .bind(consumer.0)
    .bind(stored(&holding.topic))
    .bind(holding.partition)
    .bind(holding.owner)
    .bind(position.map(|position| position.next))
    .bind(position.and_then(|position| position.topic_id.as_deref()))
    .run(&store.pool)
    .await?;
    Ok(())
}
