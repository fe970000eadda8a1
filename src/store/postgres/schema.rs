//! Migrations, in a migration table of our own inside the schema `oncebox`.
//!
//! Guarantees: each migration and its row commit together; two migrators at once take turns; a
//! migration that was changed after it was applied is refused; no program migrates on its own
//! accord.

use sha2::{Digest, Sha256};
use sqlx::{AssertSqlSafe, Postgres, Row};

use super::PostgresStore;
use crate::error::StoreError;
use crate::store::bounded::{Ask, Bounded};
use crate::store::{AppliedMigration, Finding, MigrationText, Schema, SchemaState};

const MIGRATIONS: [MigrationText; 4] = [
    MigrationText {
        version: 1,
        description: "outbox, shards, dead and held rows, partitions",
        serves_from: 1,
        sql: include_str!("../../../migrations/postgres/0001_outbox.sql"),
    },
    MigrationText {
        version: 2,
        description: "doors of the outbox and their limits",
        serves_from: 2,
        sql: include_str!("../../../migrations/postgres/0002_doors.sql"),
    },
    MigrationText {
        version: 3,
        description: "inbox, waiting messages, e-mails, audit",
        serves_from: 3,
        sql: include_str!("../../../migrations/postgres/0003_inbox.sql"),
    },
    MigrationText {
        version: 4,
        description: "operations: idempotency records, bodies, phases",
        serves_from: 4,
        sql: include_str!("../../../migrations/postgres/0004_operations.sql"),
    },
];

/// Migrators of all databases of a server share the number space of advisory locks: eight bytes
/// that nobody else has.
const MIGRATION_LOCK: i64 = i64::from_be_bytes(*b"oncebox\0");

const MIGRATION_TABLE: &str = "
create schema if not exists oncebox;
create table if not exists oncebox.migration (
  version      bigint not null primary key,
  description  text not null,
  checksum     bytea not null,
  serves_from  bigint not null,
  applied_at   timestamptz not null default clock_timestamp(),
  applied_by   text not null default current_user
);
comment on table oncebox.migration is 'migrations of oncebox that were applied';
comment on column oncebox.migration.version is 'number of the migration, ascending from 1';
comment on column oncebox.migration.description is 'what it is for';
comment on column oncebox.migration.checksum is 'SHA-256 of its text';
comment on column oncebox.migration.serves_from is 'programs that know migrations up to this one or later work on the schema after it';
comment on column oncebox.migration.applied_at is 'when it was applied';
comment on column oncebox.migration.applied_by is 'who applied it';
comment on index oncebox.migration_pkey is 'serves migrate up and migrate status: one row by its version';
";

impl Schema for PostgresStore {
    fn migrations() -> &'static [MigrationText] {
        &MIGRATIONS
    }

    fn script() -> String {
        let texts = MIGRATIONS.iter().map(|one| format!("\n-- {} {}\n{}\n", one.version, one.description, text(one)));
        std::iter::once(MIGRATION_TABLE.to_owned()).chain(texts).collect()
    }

    async fn schema(&self) -> Result<SchemaState, StoreError> {
        let mut connection = self.pool.acquire().await?;
        let needed = MIGRATIONS[MIGRATIONS.len() - 1].version;
        let applied = applied(&mut connection).await?;
        let newest = applied.last().map(|(version, _)| *version);
        if let Some(found) = newest.filter(|found| *found > needed) {
            let serves = "select max(serves_from) from oncebox.migration where version > $1";
            let serves_from: i64 = sqlx::query(serves).bind(needed).one(&mut connection).await?.try_get(0)?;
            return Ok(SchemaState::of_newer(found, serves_from, needed));
        }
        Ok(match (newest, changed(&applied)) {
            (None, _) => SchemaState::Missing,
            (Some(_), Some(version)) => SchemaState::Changed { version },
            (Some(found), _) if found < needed => SchemaState::Old { found, needed },
            (Some(found), _) => SchemaState::Current(found),
        })
    }

    async fn migrate(&self) -> Result<Vec<i64>, StoreError> {
        // The lock ends with its connection, whatever happens: it is not given back to the pool. A
        // migration, and the wait for another migrator, may take as long as they take.
        let mut connection = self.dedicated().await?;
        // "already exists, skipping" is what a migration that may run twice expects.
        sqlx::query("set client_min_messages = warning").execute(connection.plain()).await?;
        sqlx::query("select pg_advisory_lock($1)").bind(MIGRATION_LOCK).execute(connection.plain()).await?;
        if applied(&mut connection).await?.is_empty() {
            sqlx::raw_sql(MIGRATION_TABLE).execute(connection.plain()).await?;
        }
        let before = applied(&mut connection).await?;
        let known = MIGRATIONS[MIGRATIONS.len() - 1].version;
        if let Some((found, _)) = before.last().filter(|(found, _)| *found > known) {
            return Err(StoreError::SchemaNewer { found: *found, known });
        }
        if let Some(version) = changed(&before) {
            SchemaState::Changed { version }.require()?;
        }
        let mut done = Vec::new();
        for migration in MIGRATIONS.iter().filter(|one| before.iter().all(|(version, _)| *version != one.version)) {
            sqlx::raw_sql(AssertSqlSafe(text(migration))).execute(connection.plain()).await?;
            done.push(migration.version);
        }
        Ok(done)
    }

    async fn applied(&self) -> Result<Vec<AppliedMigration>, StoreError> {
        let mut connection = self.pool.acquire().await?;
        let applied = applied(&mut connection).await?;
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
        super::check::findings(self).await
    }
}

/// The version of a migration that was applied with another text than it has here.
fn changed(applied: &[(i64, Vec<u8>)]) -> Option<i64> {
    let other = |(version, stored): &&(i64, Vec<u8>)| {
        MIGRATIONS.iter().any(|migration| migration.version == *version && checksum(migration) != *stored)
    };
    applied.iter().find(other).map(|(version, _)| *version)
}

fn checksum(migration: &MigrationText) -> Vec<u8> {
    Sha256::digest(migration.sql.as_bytes()).to_vec()
}

/// A migration and its row, in one transaction: sent as one text, so that no half of it can stand.
fn text(migration: &MigrationText) -> String {
    let hex: String = checksum(migration).iter().map(|byte| format!("{byte:02x}")).collect();
    format!(
        "begin;\n{}\ninsert into oncebox.migration (version, description, checksum, serves_from) values ({}, '{}', '\\x{hex}', {});\ncommit;",
        migration.sql, migration.version, migration.description, migration.serves_from
    )
}

/// Versions and checksums that were applied, ascending; none where the schema is not there.
async fn applied(connection: &mut Bounded<Postgres>) -> Result<Vec<(i64, Vec<u8>)>, StoreError> {
    let there: bool =
        sqlx::query("select to_regclass('oncebox.migration') is not null").one(&mut *connection).await?.try_get(0)?;
    if !there {
        return Ok(Vec::new());
    }
    let rows = sqlx::query("select version, checksum from oncebox.migration order by version").all(connection).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}
