//! Dead and held rows as the relay reads them.

use sqlx::{Pool, Sqlite, query, query_as};

use super::outbox_row;
use crate::error::StoreError;
use crate::store::{Diversion, DivertedRow, HeldSelect, OperatorRequest, OutboxRow, RequestedAct};

/// At most this many requests are read at once; the rest comes with the next question.
const REQUESTS_MAX: i64 = 1_000;

pub(super) async fn diverted(pool: &Pool<Sqlite>, limit: usize) -> Result<Vec<DivertedRow>, StoreError> {
    let rows = query_as::<_, (i64, String, Option<String>, String, bool, Option<String>)>(
        "select position, topic, key, state, holds, reason from oncebox_outbox_dead order by position limit ?",
    );
    let rows = rows.bind(limit_of(limit)).fetch_all(pool).await?;
    let row = |(position, topic, key, state, holds, reason): (_, _, _, String, _, Option<String>)| {
        let reason = reason.unwrap_or_default();
        let diversion = match state.as_str() {
            "dead" => Diversion::Dead { reason, holds },
            "held-behind" => Diversion::HeldBehind,
            "held-destination" => Diversion::HeldDestination { reason },
            other => return Err(StoreError::Corrupt(format!("`{other}` is no state of a dead or held row"))),
        };
        Ok(DivertedRow { position, topic, key, diversion })
    };
    rows.into_iter().map(row).collect()
}

pub(super) async fn requests(pool: &Pool<Sqlite>) -> Result<Vec<OperatorRequest>, StoreError> {
    let rows = query_as::<_, (i64, String, Option<String>, String)>(
        "select position, topic, key, request from oncebox_outbox_dead where request is not null order by position limit ?",
    );
    let rows = rows.bind(REQUESTS_MAX).fetch_all(pool).await?;
    let request = |(position, topic, key, request): (_, _, _, String)| {
        let act = match request.as_str() {
            "redrive" => RequestedAct::Redrive,
            "discard" => RequestedAct::Discard,
            other => return Err(StoreError::Corrupt(format!("`{other}` is no request"))),
        };
        Ok(OperatorRequest { position, topic, key, act })
    };
    rows.into_iter().map(request).collect()
}

/// Held for the destination, and held behind those: not what stands behind a dead one of its key, which the return of the
/// destination does not release.
const OF_TOPIC: &str = "\
select position, bucket, message_id, topic, key, kind, headers, payload, content_type, created_at
  from oncebox_outbox_dead as h
 where topic = ?1 and position > ?2 and state in ('held-destination', 'held-behind')
   and not exists (select 1 from oncebox_outbox_dead as d
                    where d.topic = h.topic and d.key = h.key and d.position < h.position and d.holds = 1)
 order by position limit ?3";

const OF_KEY: &str = "\
select position, bucket, message_id, topic, key, kind, headers, payload, content_type, created_at
  from oncebox_outbox_dead where topic = ?1 and key = ?4 and position > ?2 order by position limit ?3";

const OF_POSITION: &str = "\
select position, bucket, message_id, topic, key, kind, headers, payload, content_type, created_at
  from oncebox_outbox_dead where position = ?1 and position > ?2 limit ?3";

pub(super) async fn held(
    pool: &Pool<Sqlite>,
    select: HeldSelect<'_>,
    above: i64,
    limit: usize,
) -> Result<Vec<OutboxRow>, StoreError> {
    let select = match select {
        HeldSelect::Topic(topic) => query(OF_TOPIC).bind(topic.to_owned()).bind(above).bind(limit_of(limit)),
        HeldSelect::Key(topic, key) => {
            query(OF_KEY).bind(topic.to_owned()).bind(above).bind(limit_of(limit)).bind(key.to_owned())
        }
        HeldSelect::Position(position) => query(OF_POSITION).bind(position).bind(above).bind(limit_of(limit)),
    };
    let rows = select.fetch_all(pool).await?;
    rows.iter().map(|row| outbox_row(row, 0)).collect()
}

fn limit_of(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}
