//! The row of each partition: its owner, and the position up to which everything is done.
//! Guarantee: only the current owner changes the position or closes the row.

use crate::error::StoreError;
use crate::inbox::port::{ConsumerId, Holding, Opened};
use crate::inbox::rules::position::Position;
use crate::store::sql::{SqlStore, Statement, foreign, sql};

/// Inserts the row, closed and without an owner, if it is not there. Of two processes the second
/// waits here for the first, and then reads what that wrote.
const KNOW: &str = "insert into oncebox.assignment (consumer_id, topic, partition_no, state, changed_at) \
    values (:consumer, :topic, :partition, 'closed', {clock}) \
    {pg lite: on conflict (consumer_id, topic, partition_no) do nothing}{my: on duplicate key update state = state}";

const STOOD: &str = "select a.state = 'open', a.topic_id, a.next_offset, \
      coalesce(a.id_rule <> (select c.id_rule from oncebox.consumer c where c.consumer_id = a.consumer_id), false) \
    from oncebox.assignment a where a.consumer_id = :consumer and a.topic = :topic and a.partition_no = :partition {lock}";

const OPEN: &str = "update oncebox.assignment set state = 'open', owner = :owner, changed_at = {clock} \
    where consumer_id = :consumer and topic = :topic and partition_no = :partition";

const KEEP: &str = "update oncebox.assignment set topic_id = :topic_id, next_offset = :next, changed_at = {clock}, \
      id_rule = (select c.id_rule from oncebox.consumer c where c.consumer_id = :consumer) \
    where consumer_id = :consumer and topic = :topic and partition_no = :partition and owner = :owner";

const CLOSE: &str = "update oncebox.assignment set state = 'closed', owner = null, changed_at = {clock} \
      {if next: , topic_id = :topic_id, next_offset = :next} \
    where consumer_id = :consumer and topic = :topic and partition_no = :partition and owner = :owner";

fn of(text: &'static str, consumer: ConsumerId, holding: &Holding) -> Statement {
    sql(text)
        .bind("consumer", consumer)
        .bind("topic", foreign(&holding.topic))
        .bind("partition", holding.partition)
        .bind("owner", holding.owner)
}

fn at(statement: Statement, position: Option<&Position>) -> Statement {
    let topic_id = position.and_then(|position| position.topic_id.as_ref());
    statement.bind("topic_id", topic_id).bind("next", position.map(|position| position.next))
}

/// Opens the row of a partition, and returns what it was before.
pub(super) async fn open(store: &dyn SqlStore, consumer: ConsumerId, holding: &Holding) -> Result<Opened, StoreError> {
    let mut transaction = store.begin_sql().await?;
    let session = transaction.session();
    session.run(of(KNOW, consumer, holding)).await?;
    let stood = session.only(of(STOOD, consumer, holding)).await?;
    let (topic_id, next): (_, Option<i64>) = (stood.get_opt(1)?, stood.get_opt(2)?);
    let position = next.map(|next| Position { topic_id, next });
    let opened = Opened { was_open: stood.get(0)?, position, has_new_ids: stood.get(3)? };
    session.run(of(OPEN, consumer, holding)).await?;
    transaction.commit().await?;
    Ok(opened)
}

/// Stores positions of partitions that their owners still hold.
pub(super) async fn keep_positions(
    store: &dyn SqlStore,
    consumer: ConsumerId,
    positions: &[(Holding, Position)],
) -> Result<(), StoreError> {
    if positions.is_empty() {
        return Ok(());
    }
    let mut transaction = store.begin_sql().await?;
    for (holding, position) in positions {
        transaction.session().run(at(of(KEEP, consumer, holding), Some(position))).await?;
    }
    transaction.commit().await
}

/// Closes the row, with the position where one is given.
pub(super) async fn close(
    store: &dyn SqlStore,
    consumer: ConsumerId,
    holding: &Holding,
    position: Option<&Position>,
) -> Result<(), StoreError> {
    store.run_alone(at(of(CLOSE, consumer, holding), position)).await.map(drop)
}
