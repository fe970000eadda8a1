//! Migrations of the SQLite store, in a table of their own.
//!
//! All that is missing is applied in one `BEGIN IMMEDIATE` transaction: the write lock makes it
//! safe to run at once, and a migration that fails leaves nothing behind.

use sha2::{Digest, Sha256};
use sqlx::{AssertSqlSafe, Executor, query_as, query_scalar};

use super::connect::SqliteStore;
use super::now_ms;
use crate::error::StoreError;
use crate::store::{AppliedMigration, Base, Finding, MigrationText, Schema, SchemaState};

const MIGRATIONS: &[MigrationText] = &[
    MigrationText {
        version: 1,
        description: "outbox",
        serves_from: 1,
        sql: include_str!("../../../migrations/sqlite/0001_outbox.sql"),
    },
    MigrationText {
        version: 2,
        description: "inbox",
        serves_from: 2,
        sql: include_str!("../../../migrations/sqlite/0002_inbox.sql"),
    },
    MigrationText {
        version: 3,
        description: "operator and e-mail",
        serves_from: 3,
        sql: include_str!("../../../migrations/sqlite/0003_operator_email.sql"),
    },
    MigrationText {
        version: 4,
        description: "operations",
        serves_from: 4,
        sql: include_str!("../../../migrations/sqlite/0004_operations.sql"),
    },
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
    /// Versions and checksums that were applied; none where the table is not there.
    async fn applied_versions(
        connection: &mut sqlx::SqliteConnection,
    ) -> Result<Option<Vec<(i64, Vec<u8>)>>, StoreError> {
        let table = "select count(*) from sqlite_schema where type = 'table' and name = 'oncebox_migration'";
        if query_scalar::<_, i64>(table).fetch_one(&mut *connection).await? == 0 {
            return Ok(None);
        }
        let applied = "select version, checksum from oncebox_migration order by version";
        Ok(Some(query_as(applied).fetch_all(&mut *connection).await?))
    }

    /// What was applied, ascending; none where nothing of oncebox is there.
    async fn applied_migrations(&self) -> Result<Option<Vec<(i64, Vec<u8>)>>, StoreError> {
        if !self.can_open() {
            return Ok(None);
        }
        let mut connection = self.pool().acquire().await?;
        Self::applied_versions(&mut connection).await
    }
}

/// The version of a migration that was applied with another text than it has here.
fn changed(applied: &[(i64, Vec<u8>)]) -> Option<i64> {
    let other = |(version, stored): &&(i64, Vec<u8>)| {
        MIGRATIONS.iter().any(|migration| migration.version == *version && checksum(migration) != *stored)
    };
    applied.iter().find(other).map(|(version, _)| *version)
}

/// The statement that notes a migration as applied.
fn row(migration: &MigrationText) -> String {
    let hex: String = checksum(migration).iter().map(|byte| format!("{byte:02x}")).collect();
    let MigrationText { version, description, serves_from, .. } = migration;
    format!(
        concat!("insert into oncebox_migration values ({}, '{}', x'{}', ", now_ms!(), ", {})"),
        version, description, hex, serves_from
    )
}

fn checksum(migration: &MigrationText) -> Vec<u8> {
    Sha256::digest(migration.sql.as_bytes()).to_vec()
}

impl Schema for SqliteStore {
    fn migrations() -> &'static [MigrationText] {
        MIGRATIONS
    }

    fn script() -> String {
        let texts = MIGRATIONS
            .iter()
            .map(|one| format!("\n-- {} {}\n{}\n{};\n", one.version, one.description, one.sql, row(one)));
        let all: String = texts.collect();
        format!("begin immediate;\n{MIGRATION_TABLE};\n{all}commit;\n")
    }

    async fn schema(&self) -> Result<SchemaState, StoreError> {
        let known = MIGRATIONS.last().map_or(0, |migration| migration.version);
        let applied = self.applied_migrations().await?.unwrap_or_default();
        let newest = applied.last().map(|(version, _)| *version);
        if let Some(found) = newest.filter(|found| *found > known) {
            let serves = query_scalar("select max(serves_from) from oncebox_migration where version > ?").bind(known);
            return Ok(SchemaState::of_newer(found, serves.fetch_one(self.pool()).await?, known));
        }
        Ok(match (newest, changed(&applied)) {
            (None, _) => SchemaState::Missing,
            (Some(_), Some(version)) => SchemaState::Changed { version },
            (Some(found), _) if found < known => SchemaState::Old { found, needed: known },
            (Some(found), _) => SchemaState::Current(found),
        })
    }

    async fn migrate(&self) -> Result<Vec<i64>, StoreError> {
        let mut write = self.write().await?;
        write.connection().execute(MIGRATION_TABLE).await?;
        let applied = Self::applied_versions(write.connection()).await?.unwrap_or_default();
        let known = MIGRATIONS.last().map_or(0, |migration| migration.version);
        if let Some((found, _)) = applied.last().filter(|(found, _)| *found > known) {
            return Err(StoreError::SchemaNewer { found: *found, known });
        }
        if let Some(version) = changed(&applied) {
            SchemaState::Changed { version }.require()?;
        }
        let mut done = Vec::new();
        for migration in MIGRATIONS.iter().filter(|one| applied.iter().all(|(version, _)| *version != one.version)) {
            write.connection().execute(sqlx::raw_sql(migration.sql)).await?;
            write.connection().execute(AssertSqlSafe(row(migration))).await?;
            done.push(migration.version);
        }
        write.commit().await?;
        Ok(done)
    }

    async fn applied(&self) -> Result<Vec<AppliedMigration>, StoreError> {
        let applied = self.applied_migrations().await?.unwrap_or_default();
        let known = MIGRATIONS.iter().map(|migration| AppliedMigration {
            version: migration.version,
            description: migration.description.to_owned(),
            applied: applied.iter().any(|(version, _)| *version == migration.version),
        });
        let newer = applied.iter().filter(|(version, _)| MIGRATIONS.iter().all(|one| one.version != *version));
        let newer = newer.map(|(version, _)| AppliedMigration {
            version: *version,
            description: "of a newer program".to_owned(),
            applied: true,
        });
        Ok(known.chain(newer).collect())
    }

    async fn check(&self) -> Result<Vec<Finding>, StoreError> {
        super::check::check(self).await
    }
}
