//! The schema: migrations that can be run again. They run under a lock of the server, and a table
//! records which were applied.
//!
//! MySQL commits each statement of DDL at once, so an interrupted migration is half done. Every
//! statement can therefore run again, and each file ends with the row that records it as applied.
//! The file of the optional function begins with that row, because the server may forbid the rest.
//! The `mysql` client can read the files, `delimiter` included, so `oncebox migrate print` can be
//! piped into it.
//!
//! Not here: sqlx's migrator. After an interrupted migration it stops and needs a manual repair.

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Executor, MySql};

use super::check::{self, Routines};
use super::{MySqlStore, number};
use crate::error::StoreError;
use crate::observe::Finding;
use crate::store::bounded::{Ask, Bounded};
use crate::store::schema::{AppliedMigration, History, Migration, Schema, SchemaState};

const MIGRATIONS: &[Migration] = &[
    Migration::breaking(1, "tables", include_str!("../../../migrations/mysql/0001_tables.sql")),
    Migration::breaking(
        2,
        "the procedure oncebox_enqueue_p",
        include_str!("../../../migrations/mysql/0002_procedure.sql"),
    ),
    Migration::breaking(
        3,
        "the function oncebox_enqueue, where the server allows it",
        include_str!("../../../migrations/mysql/0003_function.sql"),
    ),
    Migration::breaking(4, "operations", include_str!("../../../migrations/mysql/0004_operations.sql")),
];

/// The migration that makes the procedure.
const PROCEDURE: i64 = 2;
/// The migration that makes the function. A server may forbid its last statement.
const FUNCTION: i64 = 3;

/// Errors where functions are forbidden under binary logging (1418, 1419), or the migrator may not
/// make any (1044, 1142, 1227, 1370).
const FORBIDDEN: [u16; 6] = [1418, 1419, 1044, 1142, 1227, 1370];

/// The longest wait for another migrator, in seconds.
const LOCK_SECONDS: i64 = 60;

#[async_trait]
impl Schema for MySqlStore {
    fn script() -> String {
        MIGRATIONS.iter().map(|one| format!("-- {} {}\n{}\n", one.version, one.description, one.sql)).collect()
    }

    async fn schema(&self) -> Result<SchemaState, StoreError> {
        Ok(applied(&mut self.pool.acquire().await?).await?.state(MIGRATIONS))
    }

    async fn migrate(&self) -> Result<Vec<i64>, StoreError> {
        // The connection does not go back to the pool, so the lock ends with it in any case. A
        // migration has no time limit; the wait for another migrator ends after `LOCK_SECONDS`.
        let mut connection = self.pool.dedicated().await?;
        let locked: Option<i64> =
            sqlx::query_scalar("select get_lock(concat('oncebox/', left(sha2(database(), 256), 40)), ?)")
                .bind(LOCK_SECONDS)
                .fetch_one(connection.plain())
                .await?;
        if locked != Some(1) {
            return Err(StoreError::Refused(format!(
                "the lock for migrations was not free within {LOCK_SECONDS} s: another process migrates this database; wait for it, or end it"
            )));
        }
        let outcome = apply(&mut connection).await;
        connection.close().await;
        outcome
    }

    async fn applied(&self) -> Result<Vec<AppliedMigration>, StoreError> {
        Ok(applied(&mut self.pool.acquire().await?).await?.list(MIGRATIONS))
    }

    async fn check(&self) -> Result<Vec<Finding>, StoreError> {
        let mut connection = self.pool.acquire().await?;
        let mut findings = check::of_server(&mut connection).await?;
        if applied(&mut connection).await?.newest().is_some() {
            let routines = Routines::read(&mut connection).await?;
            findings.extend(check::of_schema(&mut connection, routines).await?);
        }
        Ok(findings)
    }
}

async fn applied(connection: &mut Bounded<MySql>) -> Result<History, StoreError> {
    let applied = "select version, serves_from from oncebox_migration order by version";
    let found: sqlx::Result<Vec<(i64, i64)>> = sqlx::query_as(applied).all(connection).await;
    match found {
        Ok(found) => {
            let without_text = |(version, serves_from)| (version, serves_from, None);
            Ok(History(found.into_iter().map(without_text).collect()))
        }
        // The migration table does not exist yet.
        Err(error) if number(&error) == Some(1146) => Ok(History::default()),
        Err(error) => Err(error.into()),
    }
}

async fn apply(connection: &mut Bounded<MySql>) -> Result<Vec<i64>, StoreError> {
    let missing = applied(connection).await?.missing(MIGRATIONS)?;
    let routines = Routines::read(connection).await?;
    for migration in MIGRATIONS {
        // A routine that is missing is made again: `mysqldump` leaves routines out unless it is
        // told otherwise, and the setting that forbade the function may have changed.
        let has_its_routine = match migration.version {
            PROCEDURE => routines.procedure,
            FUNCTION => routines.function,
            _ => true,
        };
        if !missing.contains(&migration.version) && has_its_routine {
            continue;
        }
        for statement in statements(migration.sql) {
            match connection.plain().execute(AssertSqlSafe(statement)).await {
                Ok(_) => {}
                Err(error)
                    if migration.version == FUNCTION
                        && number(&error).is_some_and(|number| FORBIDDEN.contains(&number)) =>
                {
                    // The words of the server do not say how to go on.
                    let error = crate::error::words(&error);
                    tracing::debug!(error, "the function is refused");
                    tracing::warn!(
                        "this server does not allow the function oncebox_enqueue; the procedure oncebox_enqueue_p is there for it. \
                         Where the function is wanted: set global log_bin_trust_function_creators = 1, then run `oncebox migrate up` again"
                    );
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(missing)
}

/// Splits a file at each delimiter that ends a line. A line `delimiter X` changes the delimiter, as
/// in the `mysql` client.
fn statements(sql: &str) -> Vec<String> {
    let (mut found, mut current, mut delimiter) = (Vec::new(), String::new(), ";".to_owned());
    for line in sql.lines() {
        if let Some(other) = line.strip_prefix("delimiter ") {
            other.trim().clone_into(&mut delimiter);
            continue;
        }
        if current.is_empty() && (line.trim().is_empty() || line.starts_with("--")) {
            continue;
        }
        match line.trim_end().strip_suffix(delimiter.as_str()) {
            Some(last) => {
                current.push_str(last);
                found.push(std::mem::take(&mut current));
            }
            None => {
                current.push_str(line);
                current.push('\n');
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_split_at_its_delimiters() {
        let sql = "-- what\n\nset a = 1;\ndelimiter //\ncreate procedure p()\nbegin\n  select 1;\nend\n//\ndelimiter ;\nselect 2;\n";
        assert_eq!(statements(sql), ["set a = 1", "create procedure p()\nbegin\n  select 1;\nend\n", "select 2"]);
    }

    #[test]
    fn every_migration_ends_with_a_delimiter_and_says_that_it_was_applied() {
        for migration in MIGRATIONS {
            let (version, description, serves_from) = (migration.version, migration.description, migration.serves_from);
            let mark = format!("values ({version}, '{description}', {serves_from}, utc_timestamp(6))");
            assert!(statements(migration.sql).iter().any(|statement| statement.ends_with(&mark)), "{mark}");
            let last = migration.sql.trim_end().lines().last().unwrap_or_default();
            assert!(last.ends_with(';'), "{last}");
        }
    }
}
