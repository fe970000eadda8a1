//! Migrations of the SQLite store, recorded in a table of their own.
//!
//! All missing migrations are applied in one `BEGIN IMMEDIATE` transaction. The write lock makes
//! concurrent migrators safe, and a migration that fails leaves nothing behind.

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Executor, query_as, query_scalar};

use super::SqliteStore;
use super::now_ms;
use crate::error::StoreError;
use crate::observe::Finding;
use crate::store::base::Base;
use crate::store::schema::{AppliedMigration, History, Migration, Schema, SchemaState, checksum};
use crate::text::hex::hex;

const MIGRATIONS: &[Migration] = &[
    Migration::breaking(1, "outbox", include_str!("../../../migrations/sqlite/0001_outbox.sql")),
    Migration::breaking(2, "inbox", include_str!("../../../migrations/sqlite/0002_inbox.sql")),
    Migration::breaking(3, "operator and e-mail", include_str!("../../../migrations/sqlite/0003_operator_email.sql")),
    Migration::breaking(4, "operations", include_str!("../../../migrations/sqlite/0004_operations.sql")),
];

const MIGRATION_TABLE: &str = "\
create table if not exists oncebox_migration (
    version     integer primary key not null,   -- ascending from 1
    description text not null,                  -- what it is for
    checksum    blob not null,                  -- SHA-256 of its text
    applied_at  integer not null,               -- when, milliseconds since 1970
    serves_from integer not null                -- programs that know migrations up to this one or later work on the schema after it
)";

impl SqliteStore {
    async fn applied_versions(connection: &mut sqlx::SqliteConnection) -> Result<History, StoreError> {
        let table = "select count(*) from sqlite_schema where type = 'table' and name = 'oncebox_migration'";
        if query_scalar::<_, i64>(table).fetch_one(&mut *connection).await? == 0 {
            return Ok(History::default());
        }
        let applied = "select version, serves_from, checksum from oncebox_migration order by version";
        Ok(History(query_as(applied).fetch_all(&mut *connection).await?))
    }

    async fn history(&self) -> Result<History, StoreError> {
        if !self.can_open() {
            return Ok(History::default());
        }
        let mut connection = self.pool().acquire().await?;
        Self::applied_versions(&mut connection).await
    }
}

/// The statement that records a migration as applied.
fn row(migration: &Migration) -> String {
    let hex = hex(&checksum(migration));
    let Migration { version, description, serves_from, .. } = migration;
    format!(
        concat!("insert into oncebox_migration values ({}, '{}', x'{}', ", now_ms!(), ", {})"),
        version, description, hex, serves_from
    )
}

#[async_trait]
impl Schema for SqliteStore {
    fn script() -> String {
        let texts = MIGRATIONS
            .iter()
            .map(|one| format!("\n-- {} {}\n{}\n{};\n", one.version, one.description, one.sql, row(one)));
        let all: String = texts.collect();
        format!("begin immediate;\n{MIGRATION_TABLE};\n{all}commit;\n")
    }

    async fn schema(&self) -> Result<SchemaState, StoreError> {
        Ok(self.history().await?.state(MIGRATIONS))
    }

    /// Names a file that is not there: more often the wrong one is named than a migration missing.
    async fn require_schema(&self) -> Result<(), StoreError> {
        self.check_there()?;
        self.schema().await?.require()
    }

    async fn migrate(&self) -> Result<Vec<i64>, StoreError> {
        let mut write = self.write().await?;
        write.connection().execute(MIGRATION_TABLE).await?;
        let missing = Self::applied_versions(write.connection()).await?.missing(MIGRATIONS)?;
        for migration in MIGRATIONS.iter().filter(|migration| missing.contains(&migration.version)) {
            write.connection().execute(sqlx::raw_sql(migration.sql)).await?;
            write.connection().execute(AssertSqlSafe(row(migration))).await?;
        }
        write.commit().await?;
        Ok(missing)
    }

    async fn applied(&self) -> Result<Vec<AppliedMigration>, StoreError> {
        Ok(self.history().await?.list(MIGRATIONS))
    }

    async fn check(&self) -> Result<Vec<Finding>, StoreError> {
        super::check::check(self).await
    }
}
