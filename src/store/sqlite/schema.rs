//! Migrations of the SQLite store, in a table of their own.
//!
//! All that is missing is applied in one `BEGIN IMMEDIATE` transaction: the write lock makes it safe to run at once, and a
//! migration that fails leaves nothing behind.

use sha2::{Digest, Sha256};
use sqlx::{Executor, query, query_as, query_scalar};

use super::connect::SqliteStore;
use super::now_ms;
use crate::error::StoreError;
use crate::store::{AppliedMigration, Base, Finding, MigrationText, Schema, SchemaState};

const MIGRATIONS: &[MigrationText] = &[
    MigrationText {
        version: 1,
        description: "outbox",
        sql: include_str!("../../../migrations/sqlite/0001_outbox.sql"),
    },
    MigrationText { version: 2, description: "inbox", sql: include_str!("../../../migrations/sqlite/0002_inbox.sql") },
    MigrationText {
        version: 3,
        description: "operator and e-mail",
        sql: include_str!("../../../migrations/sqlite/0003_operator_email.sql"),
    },
    MigrationText {
        version: 4,
        description: "operations",
        sql: include_str!("../../../migrations/sqlite/0004_operations.sql"),
    },
];

const MIGRATION_TABLE: &str = "\
create table if not exists oncebox_migration (
    version     integer primary key not null,   -- ascending from 1
    description text not null,                  -- what it is for
    checksum    blob not null,                  -- SHA-256 of its text
    applied_at  integer not null                -- when, milliseconds since 1970
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

    /// The newest version that was applied; none where nothing of oncebox is there.
    async fn newest(&self) -> Result<Option<i64>, StoreError> {
        if !self.can_open() {
            return Ok(None);
        }
        let mut connection = self.pool().acquire().await?;
        let applied = Self::applied_versions(&mut connection).await?;
        Ok(applied.and_then(|applied| applied.last().map(|(version, _)| *version)))
    }
}

impl Schema for SqliteStore {
    fn migrations() -> &'static [MigrationText] {
        MIGRATIONS
    }

    async fn schema(&self) -> Result<SchemaState, StoreError> {
        let known = MIGRATIONS.last().map_or(0, |migration| migration.version);
        Ok(match self.newest().await? {
            None => SchemaState::Missing,
            Some(found) if found < known => SchemaState::Old { found, needed: known },
            Some(found) if found > known => SchemaState::Newer { found, known },
            Some(found) => SchemaState::Current(found),
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
        let mut done = Vec::new();
        for migration in MIGRATIONS {
            let checksum = Sha256::digest(migration.sql.as_bytes()).to_vec();
            match applied.iter().find(|(version, _)| *version == migration.version) {
                Some((_, stored)) if *stored == checksum => {}
                Some(_) => {
                    return Err(StoreError::Refused(format!(
                        "migration {} ({}) was applied with another text than this program has; a migration never changes",
                        migration.version, migration.description
                    )));
                }
                None => {
                    write.connection().execute(sqlx::raw_sql(migration.sql)).await?;
                    let note = concat!("insert into oncebox_migration values (?, ?, ?, ", now_ms!(), ")");
                    let note = query(note).bind(migration.version).bind(migration.description).bind(checksum);
                    note.execute(write.connection()).await?;
                    done.push(migration.version);
                }
            }
        }
        write.commit().await?;
        Ok(done)
    }

    async fn applied(&self) -> Result<Vec<AppliedMigration>, StoreError> {
        let newest = self.newest().await?.unwrap_or(0);
        let of = |migration: &MigrationText| AppliedMigration {
            version: migration.version,
            description: migration.description.to_owned(),
            applied: migration.version <= newest,
        };
        Ok(MIGRATIONS.iter().map(of).collect())
    }

    async fn check(&self) -> Result<Vec<Finding>, StoreError> {
        super::check::check(self).await
    }
}
