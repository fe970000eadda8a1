//! Repairs a sequence of positions that is behind the cursor (R7): after a restore, or a switch to
//! a logical replica.
//!
//! Guarantees: the sequence is set above every position that was ever used. A message at a position
//! that its relay had passed gets a new position above all used ones, in the old order, and is read
//! next. Writers wait meanwhile, and a running relay starts again. A message that was enqueued less
//! than a minute before the cursor last moved may be sent again; none is lost.

use sqlx::{AssertSqlSafe, Postgres, Row, raw_sql};

use super::connect::BEGIN;
use super::{PostgresStore, code};
use crate::error::StoreError;
use crate::operator::ActContext;
use crate::store::bounded::{Ask, Bounded};
use crate::store::sql::audit;
use crate::store::statements::Dialect;

/// Blocks writers, so that no position is drawn, and fences a running relay.
const HOLD: &str = "
set local lock_timeout = '5s';
set local statement_timeout = 0;
lock table oncebox.outbox in share row exclusive mode;
update oncebox.shard set epoch = epoch + 1, revision = revision + 1, owner = null, lease_until = null, lease_seconds = null";

const STATE: &str = "
select (select last_value from oncebox.outbox_position_seq), (select coalesce(max(scanned_to), 0) from oncebox.shard),
       greatest((select max(scanned_to) from oncebox.shard), (select last_value from oncebox.outbox_position_seq),
         (select max(position) from oncebox.outbox), (select max(position) from oncebox.outbox_dead),
         (select max(position) from oncebox.decision))";

/// Rows that were never read: below the cursor of their shard, in none of its gaps, and written
/// after the cursor was. The minute is there because a batch under way when the sequence was set
/// back may have moved the cursor a little later. A decision, or a dead row, at the same position
/// counts only if it is about this row and not an earlier one.
const UNREAD: &str = "
select o.position
  from oncebox.outbox o join oncebox.shard s on o.bucket between s.bucket_from and s.bucket_to
 where o.position <= s.scanned_to and not s.gaps @> o.position and o.created_at > s.updated_at - interval '1 minute'
   and not exists (select 1 from oncebox.decision d where d.position = o.position and d.decided_at >= o.created_at)
   and not exists (select 1 from oncebox.outbox_dead t where t.position = o.position and t.created_at = o.created_at)";

const MOVE: &str = "
with moved as (delete from oncebox.outbox where position = any($1) returning *)
insert into oncebox.outbox (position, bucket, message_id, topic, key, kind, headers, payload, content_type, traceparent, tracestate,
  created_at)
select $2 + row_number() over (order by position), bucket, message_id, topic, key, kind, headers, payload, content_type, traceparent,
  tracestate, created_at from moved";

/// Repairs the sequence, or on a dry run describes the repair. Returns nothing where the sequence
/// is sound.
pub(super) async fn sequence(store: &PostgresStore, context: &ActContext) -> Result<Vec<String>, StoreError> {
    let mut connection = store.pool.dedicated().await?;
    connection.begin(BEGIN).await?;
    let mended = within(&mut connection, context).await;
    match &mended {
        Ok(mended) if !mended.is_empty() && !context.dry_run => connection.commit().await?,
        Ok(_) => connection.rollback().await?,
        // It ends with the connection, which may be broken: this error says why.
        Err(_) => {}
    }
    connection.close().await;
    mended
}

async fn within(connection: &mut Bounded<Postgres>, context: &ActContext) -> Result<Vec<String>, StoreError> {
    if !context.dry_run
        && let Err(error) = raw_sql(HOLD).run(&mut *connection).await
    {
        return Err(match code(&error).as_deref() {
            Some("55P03") => StoreError::Refused(
                "transactions that write the outbox stay open, or a relay holds its row of oncebox.shard: stop the writers and \
                 the publishers, end prepared transactions, then try again"
                    .to_owned(),
            ),
            _ => error.into(),
        });
    }
    let state = raw_sql(STATE).one(&mut *connection).await?;
    let (last_value, scanned_to, used): (i64, i64, i64) = (state.try_get(0)?, state.try_get(1)?, state.try_get(2)?);
    if last_value >= scanned_to {
        return Ok(Vec::new());
    }
    let unread: Vec<i64> = sqlx::query_scalar(UNREAD).all(&mut *connection).await?;
    let count = i64::try_from(unread.len()).unwrap_or(i64::MAX);
    let mended = format!(
        "the last position drawn was {last_value}, and the relay has passed {scanned_to}: the next is {}; {count} messages that \
         stood below the cursor unread get positions from {} on",
        used + count + 1,
        used + 1
    );
    if context.dry_run {
        return Ok(vec![mended]);
    }
    sqlx::query(MOVE).bind(&unread).bind(used).run(&mut *connection).await?;
    let set = format!("select setval('oncebox.outbox_position_seq', {})", used + count);
    raw_sql(AssertSqlSafe(set)).run(&mut *connection).await?;
    audit::mended(connection, Dialect::Postgres, &mended, context).await?;
    Ok(vec![mended])
}
