//! Whether SQLite may write a file that it has opened.

use std::time::Duration;

use sqlx::sqlite::SqliteConnection;
use sqlx::{AssertSqlSafe, raw_sql};

use crate::error::classify;

/// Whether SQLite opened the file for reading only, as it does on a disk that is mounted read-only.
/// Such a connection never writes, also when the disk can be written again. Nor does another of
/// this process that is opened while it is open, because they share the `-shm` file. At the end the
/// connection has this `busy_timeout`.
pub(crate) async fn is_read_only(
    connection: &mut SqliteConnection,
    busy_timeout: Duration,
) -> Result<bool, sqlx::Error> {
    // A writer that has the lock says nothing about this file: it is not waited for.
    raw_sql("pragma busy_timeout = 0").execute(&mut *connection).await?;
    let mut tried = raw_sql("begin immediate").execute(&mut *connection).await;
    if tried.is_ok() {
        // SQLite begins a transaction all the same, and refuses the first write in it.
        tried = raw_sql("pragma user_version = 1").execute(&mut *connection).await;
        raw_sql("rollback").execute(&mut *connection).await?;
    }
    let wait = format!("pragma busy_timeout = {}", busy_timeout.as_millis());
    raw_sql(AssertSqlSafe(wait)).execute(connection).await?;
    Ok(tried.is_err_and(|error| classify::is_read_only(&error)))
}
