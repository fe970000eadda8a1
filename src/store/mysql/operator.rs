//! The operator's acts and views that only MySQL and MariaDB can answer. The others are in
//! [`crate::store::sql::operator`].

use std::time::Duration;

use async_trait::async_trait;
use sqlx::MySql;

use super::MySqlStore;
use crate::error::StoreError;
use crate::operator::{ActContext, LockWait};
use crate::store::bounded::{Ask, Bounded};
use crate::store::sql::operator::OperatorSql;

/// Waits for a table; the server does not tell who holds it. Every account sees those of its
/// own connections.
const TABLE_WAITS: &str = "\
select cast(id as char), coalesce(left(info, 100), ''), cast(time as double), null, cast(null as double) \
  from information_schema.processlist \
 where db = database() and state like 'Waiting for%lock%' and time >= ? order by time desc limit 20";

/// Waits for a row, with a line for each holder. Only accounts with the right PROCESS see them.
/// InnoDB gives their times in the time zone of the server's system.
macro_rules! row_waits {
    ($holder:literal, $joined:literal) => {
        concat!(
            "select cast(t.trx_mysql_thread_id as char), coalesce(left(t.trx_query, 100), ''), \
                    cast(timestampdiff(second, convert_tz(t.trx_wait_started, 'SYSTEM', '+00:00'), now()) as double) as waited, ",
            $holder,
            " from information_schema.innodb_trx t join information_schema.processlist p on p.id = t.trx_mysql_thread_id ",
            $joined,
            " where t.trx_state = 'LOCK WAIT' and p.db = database() having waited >= ? order by waited desc, 1 limit 20"
        )
    };
}

/// MariaDB and MySQL keep the holders in different tables.
const ROW_WAITS: &str = row_waits!(
    "concat('connection ', hp.id, ' of ', hp.user, ', ', lower(hp.command)), \
     cast(timestampdiff(second, convert_tz(h.trx_started, 'SYSTEM', '+00:00'), now()) as double)",
    "left join /*M! information_schema.innodb_lock_waits w on w.requesting_trx_id = t.trx_id */ \
       /*!80000 performance_schema.data_lock_waits w on w.requesting_engine_transaction_id = t.trx_id */ \
     left join information_schema.innodb_trx h on h.trx_id = /*M! w.blocking_trx_id */ /*!80000 w.blocking_engine_transaction_id */ \
     left join information_schema.processlist hp on hp.id = h.trx_mysql_thread_id"
);

/// For accounts of MySQL that may not read its tables of holders.
const ROW_WAITS_ALONE: &str = row_waits!("null, cast(null as double)", "");

/// The waits that a text finds. The lines of one connection follow each other.
async fn listed(
    connection: &mut Bounded<MySql>,
    sql: &'static str,
    longer_than: Duration,
) -> Result<Vec<LockWait>, sqlx::Error> {
    type Line = (String, String, f64, Option<String>, Option<f64>);
    let lines: Vec<Line> = sqlx::query_as(sql).bind(longer_than.as_secs()).all(connection).await?;
    let mut waits: Vec<LockWait> = Vec::new();
    for (connection, statement, seconds, holder, held) in lines {
        if waits.last().is_none_or(|last| last.connection != connection) {
            waits.push(LockWait { connection, statement, seconds, holders: Vec::new(), held_seconds: None });
        }
        if let Some(wait) = waits.last_mut() {
            wait.holders.extend(holder);
            wait.held_seconds = wait.held_seconds.into_iter().chain(held).reduce(f64::max);
        }
    }
    Ok(waits)
}

#[async_trait]
impl OperatorSql for MySqlStore {
    async fn waits(&self, longer_than: Duration) -> Result<Vec<LockWait>, StoreError> {
        let mut connection = self.pool.acquire().await?;
        let mut waits = listed(&mut connection, TABLE_WAITS, longer_than).await?;
        for sql in [ROW_WAITS, ROW_WAITS_ALONE] {
            match listed(&mut connection, sql, longer_than).await {
                Ok(for_rows) => {
                    waits.extend(for_rows);
                    break;
                }
                // Most accounts do not have this right: then no row waits are listed.
                Err(sqlx::Error::Database(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(waits)
    }

    async fn mend_positions(&self, context: &ActContext) -> Result<Vec<String>, StoreError> {
        super::mend::positions(&self.pool, context).await
    }
}
