//! Repairs a counter of positions that is behind a dead or held row, and rows that got a used
//! position (R7): after a restore, or `truncate table`.
//!
//! Guarantees: the counter is set above every position in use. The rows of the outbox move above
//! all of them in their old order, so that none is before an older held row of its key. A running
//! relay starts again. A message under way may be sent again; none is lost. The counter is set
//! first, by a statement that commits by itself. Where the repair is broken off after that, check
//! and relay still refuse these rows, and the next repair moves them.

use sqlx::{AssertSqlSafe, MySql, raw_sql};

use super::check::positions::State;
use super::{START, is_locked};
use crate::error::StoreError;
use crate::operator::ActContext;
use crate::store::bounded::{Ask, BoundedPool};
use crate::store::sql::audit;
use crate::store::statements::Dialect;

/// Positions kept free for messages that are written while the counter is being set.
const ROOM: u64 = 1_000_000;

/// How long a statement of the repair waits for a lock: all writers wait behind it.
const WAIT: &str = "set session lock_wait_timeout = 5, innodb_lock_wait_timeout = 5";

/// Moves the last row first, so that no row takes the position of another.
const MOVE: &str = "update oncebox_outbox set position = position + ? where position < ? order by position desc";

/// Repairs the counter, or on a dry run describes the repair. Returns nothing where the counter is
/// sound.
pub(super) async fn positions(pool: &BoundedPool<MySql>, context: &ActContext) -> Result<Vec<String>, StoreError> {
    let state = State::read(&mut pool.acquire().await?).await?;
    let Some(fault) = state.fault() else { return Ok(Vec::new()) };
    let mended = format!("{fault}; every message of the outbox gets a position above {}, in order", state.top());
    if context.dry_run {
        return Ok(vec![mended]);
    }
    let mut connection = pool.acquire().await?;
    raw_sql(WAIT).run(&mut connection).await?;
    // This statement waits for every open writer. Positions drawn after it are above those that the
    // moved rows get.
    let next = state.top() + state.rows.map_or(0, |(first, last)| last - first) + ROOM;
    let alter = AssertSqlSafe(format!("alter table oncebox_outbox auto_increment = {next}"));
    raw_sql(alter).run(&mut connection).await.map_err(waited)?;

    connection.begin(START).await?;
    sqlx::query(
        "update oncebox_shard set epoch = epoch + 1, revision = revision + 1, owner = null, lease_until = null, \
         lease_seconds = null",
    )
    .run(&mut connection)
    .await
    .map_err(waited)?;
    let below = State::read_below(&mut connection, next).await?;
    let shift = below.shift();
    if below.rows.is_some_and(|(_, last)| last + shift >= next) {
        connection.rollback().await?;
        return Err(StoreError::Refused("too much was written meanwhile: run `oncebox doctor --fix` again".to_owned()));
    }
    sqlx::query(MOVE).bind(shift).bind(next).run(&mut connection).await.map_err(waited)?;
    audit::mended(&mut connection, Dialect::MySql, &mended, context).await?;
    connection.commit().await?;
    Ok(vec![mended])
}

/// Says what to do where the repair waited for a lock in vain.
fn waited(error: sqlx::Error) -> StoreError {
    if !is_locked(&error) {
        return error.into();
    }
    StoreError::Refused(
        "transactions that write the outbox stay open: stop the writers, end prepared transactions (`xa recover`), then \
         run `oncebox doctor --fix` again"
            .to_owned(),
    )
}
