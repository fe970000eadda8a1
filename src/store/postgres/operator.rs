//! The operator's acts and views that only PostgreSQL can answer. The others are in
//! [`crate::store::sql::operator`].

use std::time::Duration;

use async_trait::async_trait;

use super::PostgresStore;
use crate::error::StoreError;
use crate::operator::{ActContext, LockWait};
use crate::store::bounded::Ask;
use crate::store::sql::operator::OperatorSql;

/// Prepared transactions have no process: all of them are 0 among the blocking ones. So those are
/// listed that hold a lock on the same object. Of the sessions of other roles only some roles see
/// when their transaction began.
const LOCK_WAITS: &str = "
select w.pid::text, left(w.query, 100), extract(epoch from clock_timestamp() - coalesce(l.since, w.query_start))::float8,
       h.holders, extract(epoch from clock_timestamp() - h.began)::float8
  from pg_stat_activity w
 cross join lateral (select min(k.waitstart) as since, pg_blocking_pids(w.pid) as blocking
                       from pg_locks k where k.pid = w.pid and not k.granted) l
 cross join lateral (
   select coalesce(array_agg(b.holder), '{}') as holders, min(b.began) as began
     from (select format('connection %s%s, %s', b.pid, coalesce(' of ' || nullif(b.application_name, ''), ''), coalesce(b.state, 'unknown')),
                  b.xact_start
             from pg_stat_activity b where b.pid = any (l.blocking)
            union all
           select format('the prepared transaction `%s`', p.gid), p.prepared
             from pg_prepared_xacts p
            where 0 = any (l.blocking) and exists (
              select 1 from pg_locks k
                join pg_locks h on h.granted and h.pid is null
                               and (h.locktype, h.database, h.relation, h.page, h.tuple, h.transactionid, h.classid, h.objid, h.objsubid)
                                   is not distinct from
                                   (k.locktype, k.database, k.relation, k.page, k.tuple, k.transactionid, k.classid, k.objid, k.objsubid)
                join pg_locks t on t.virtualtransaction = h.virtualtransaction and t.transactionid = p.transaction and t.granted
               where k.pid = w.pid and not k.granted)) b (holder, began)) h
 where w.datname = current_database() and w.wait_event_type = 'Lock'
   and coalesce(l.since, w.query_start) < clock_timestamp() - $1 * interval '1 second'
 order by 3 desc limit 20";

#[async_trait]
impl OperatorSql for PostgresStore {
    async fn waits(&self, longer_than: Duration) -> Result<Vec<LockWait>, StoreError> {
        let waits: Vec<(String, String, f64, Vec<String>, Option<f64>)> =
            sqlx::query_as(LOCK_WAITS).bind(longer_than.as_secs_f64()).all(&mut self.pool.acquire().await?).await?;
        let wait = |(connection, statement, seconds, holders, held_seconds)| LockWait {
            connection,
            statement,
            seconds,
            holders,
            held_seconds,
        };
        Ok(waits.into_iter().map(wait).collect())
    }

    async fn mend_positions(&self, context: &ActContext) -> Result<Vec<String>, StoreError> {
        super::mend::sequence(self, context).await
    }
}
