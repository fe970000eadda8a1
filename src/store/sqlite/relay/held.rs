//! Dead and held rows as the relay reads them.

use futures::TryStreamExt;
use sqlx::{Pool, Sqlite, query, query_as};

use super::mark::positions_json;
use super::outbox_row;
use crate::error::StoreError;
use crate::outbox::port::{Diversion, DivertedRow, OperatorRequest, OutboxRow, RequestedAct};

pub(super) async fn diverted(pool: &Pool<Sqlite>, limit: usize) -> Result<Vec<DivertedRow>, StoreError> {
    let rows = query_as::<_, (i64, String, Option<String>, String, bool, Option<String>)>(
        "select position, topic, key, state, holds, reason from oncebox_outbox_dead \
          where state <> 'dead' or holds order by position limit ?",
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

pub(super) async fn requests(
    pool: &Pool<Sqlite>,
    after: i64,
    limit: usize,
) -> Result<Vec<OperatorRequest>, StoreError> {
    let rows = query_as::<_, (i64, String, Option<String>, String)>(
        "select position, topic, key, requested from oncebox_outbox_dead \
         where requested is not null and position > ? order by position limit ?",
    );
    let rows = rows.bind(after).bind(limit_of(limit)).fetch_all(pool).await?;
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

pub(super) async fn held(
    pool: &Pool<Sqlite>,
    positions: &[i64],
    bytes_max: usize,
) -> Result<Vec<OutboxRow>, StoreError> {
    let stored = query(
        "select position, bucket, message_id, topic, key, kind, headers, payload, content_type, created_at \
         from oncebox_outbox_dead where position in (select value from json_each(?)) order by position",
    );
    let mut stream = stored.bind(positions_json(positions)).fetch(pool);
    let (mut rows, mut bytes) = (Vec::new(), 0);
    while let Some(row) = stream.try_next().await? {
        let row = outbox_row(&row, 0)?;
        bytes += row.message.weight();
        rows.push(row);
        if bytes >= bytes_max {
            break;
        }
    }
    Ok(rows)
}

fn limit_of(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}
