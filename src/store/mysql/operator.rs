//! The operator's acts and views that only MySQL and MariaDB can answer. The others are in
//! [`crate::store::sql::operator`].

use std::time::Duration;

use async_trait::async_trait;

use super::MySqlStore;
use crate::error::StoreError;
use crate::operator::{ActContext, LockWait};
use crate::store::bounded::Ask;
use crate::store::sql::operator::OperatorSql;

/// Waits for a table. Every account sees those of its own connections.
const TABLE_WAITS: &str = "\
select cast(id as char), coalesce(left(info, 100), ''), cast(time as double) \
  from information_schema.processlist \
 where db = database() and state like 'Waiting for%lock%' and time >= ? order by time desc limit 20";

/// Waits for a row. Only accounts with the right PROCESS see them. InnoDB gives their times in the
/// time zone of the server's system.
const ROW_WAITS: &str = "\
select cast(t.trx_mysql_thread_id as char), coalesce(left(t.trx_query, 100), ''), \
       cast(timestampdiff(second, convert_tz(t.trx_wait_started, 'SYSTEM', '+00:00'), now()) as double) as waited \
  from information_schema.innodb_trx t join information_schema.processlist p on p.id = t.trx_mysql_thread_id \
 where t.trx_state = 'LOCK WAIT' and p.db = database() having waited >= ? order by waited desc limit 20";

#[async_trait]
impl OperatorSql for MySqlStore {
    /// Connections that wait for a lock. Who holds it is not asked for.
    async fn waits(&self, longer_than: Duration) -> Result<Vec<LockWait>, StoreError> {
        let mut connection = self.pool.acquire().await?;
        let mut waits = Vec::new();
        for sql in [TABLE_WAITS, ROW_WAITS] {
            let waiting: Vec<(String, String, f64)> =
                match sqlx::query_as(sql).bind(longer_than.as_secs()).all(&mut connection).await {
                    Ok(waiting) => waiting,
                    // Most accounts do not have this right: then no row waits are listed.
                    Err(sqlx::Error::Database(_)) if sql == ROW_WAITS => Vec::new(),
                    Err(error) => return Err(error.into()),
                };
            for (connection, statement, seconds) in waiting {
                waits.push(LockWait { connection, statement, seconds, holders: Vec::new() });
            }
        }
        Ok(waits)
    }

    async fn mend_positions(&self, context: &ActContext) -> Result<Vec<String>, StoreError> {
        super::mend::positions(&self.pool, context).await
    }
}
