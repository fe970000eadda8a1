//! Partitions: who holds each, and up to where it is done.

use sqlx::MySql;

use super::super::START;
use super::super::schema::number;
use super::DUPLICATE;
use crate::error::StoreError;
use crate::policy::position::Position;
use crate::store::bounded::{Ask, BoundedPool};
use crate::store::{ConsumerId, Holding, Opened};

/// Notes that a partition was assigned.
pub(super) async fn open(
    pool: &BoundedPool<MySql>,
    consumer: ConsumerId,
    holding: &Holding,
) -> Result<Opened, StoreError> {
    let mut transaction = pool.begin(START).await?;
    // The insert decides who is first; whoever is second waits for its lock and sees what the first
    // one wrote.
    let inserted = sqlx::query(
        "insert into oncebox_assignment (consumer_id, topic, partition_no, state, owner, changed_at) \
         values (?, ?, ?, 'open', ?, utc_timestamp(6))",
    )
    .bind(consumer.0)
    .bind(holding.topic.as_bytes())
    .bind(holding.partition)
    .bind(holding.owner)
    .run(&mut transaction)
    .await;
    let opened = match inserted {
        Ok(_) => Opened { was_open: false, position: None, has_new_ids: false },
        Err(error) if number(&error) == Some(DUPLICATE) => {
            let (state, topic_id, next, has_new_ids): (String, Option<String>, Option<i64>, bool) = sqlx::query_as(
                "select a.state, a.topic_id, a.next_offset, \
                        coalesce(a.id_rule <> (select c.id_rule from oncebox_consumer c \
                                                where c.consumer_id = a.consumer_id), false) \
                   from oncebox_assignment a \
                  where a.consumer_id = ? and a.topic = ? and a.partition_no = ? for update",
            )
            .bind(consumer.0)
            .bind(holding.topic.as_bytes())
            .bind(holding.partition)
            .one(&mut transaction)
            .await?;
            sqlx::query(
                "update oncebox_assignment set state = 'open', owner = ?, changed_at = utc_timestamp(6) \
                 where consumer_id = ? and topic = ? and partition_no = ?",
            )
            .bind(holding.owner)
            .bind(consumer.0)
            .bind(holding.topic.as_bytes())
            .bind(holding.partition)
            .run(&mut transaction)
            .await?;
            let position = next.map(|next| Position { topic_id, next });
            Opened { was_open: state == "open", position, has_new_ids }
        }
        Err(error) => return Err(error.into()),
    };
    transaction.commit().await?;
    Ok(opened)
}

/// Remembers positions, where their owners still hold the partitions.
pub(super) async fn keep_positions(
    pool: &BoundedPool<MySql>,
    consumer: ConsumerId,
    positions: &[(Holding, Position)],
) -> Result<(), StoreError> {
    let mut transaction = pool.begin(START).await?;
    for (holding, position) in positions {
        sqlx::query(
            "update oncebox_assignment set topic_id = ?, next_offset = ?, changed_at = utc_timestamp(6), \
               id_rule = (select c.id_rule from oncebox_consumer c \
                           where c.consumer_id = oncebox_assignment.consumer_id) \
             where consumer_id = ? and topic = ? and partition_no = ? and owner = ?",
        )
        .bind(position.topic_id.as_deref())
        .bind(position.next)
        .bind(consumer.0)
        .bind(holding.topic.as_bytes())
        .bind(holding.partition)
        .bind(holding.owner)
        .run(&mut transaction)
        .await?;
    }
    transaction.commit().await
}

/// Notes a clean end.
pub(super) async fn close(
    pool: &BoundedPool<MySql>,
    consumer: ConsumerId,
    holding: &Holding,
    position: Option<&Position>,
) -> Result<(), StoreError> {
    let next = position.map(|position| position.next);
    sqlx::query(
        "update oncebox_assignment set state = 'closed', owner = null, changed_at = utc_timestamp(6), \
           topic_id = if(? is null, topic_id, ?), next_offset = coalesce(?, next_offset) \
         where consumer_id = ? and topic = ? and partition_no = ? and owner = ?",
    )
    .bind(next)
    .bind(position.and_then(|position| position.topic_id.as_deref()))
    .bind(next)
    .bind(consumer.0)
    .bind(holding.topic.as_bytes())
    .bind(holding.partition)
    .bind(holding.owner)
    .run(pool)
    .await?;
    Ok(())
}
