//! Migrations, in a migration table of our own inside the schema `oncebox`.
//!
//! Guarantees: each migration and its row commit together; two migrators at once take turns; a
//! migration that was changed after it was applied is refused; no program migrates by itself.

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Postgres};

use super::{PostgresStore, code};
use crate::error::StoreError;
use crate::observe::Finding;
use crate::store::bounded::{Ask, Bounded};
use crate::store::schema::{AppliedMigration, History, Migration, Schema, SchemaState, checksum};
use crate::text::hex::hex;

const MIGRATIONS: [Migration; 4] = [
    Migration::breaking(
        1,
        "outbox, shards, dead and held rows, partitions",
        include_str!("../../../migrations/postgres/0001_outbox.sql"),
    ),
    Migration::breaking(
        2,
        "doors of the outbox and their limits",
        include_str!("../../../migrations/postgres/0002_doors.sql"),
    ),
    Migration::breaking(
        3,
        "inbox, waiting messages, e-mails, audit",
        include_str!("../../../migrations/postgres/0003_inbox.sql"),
    ),
    Migration::breaking(
        4,
        "operations: idempotency records, bodies, phases",
        include_str!("../../../migrations/postgres/0004_operations.sql"),
    ),
];

/// All programs of a database share the numbers of advisory locks, so this is eight bytes that
/// nobody else uses.
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

#[async_trait]
impl Schema for PostgresStore {
    fn script() -> String {
        let texts = MIGRATIONS.iter().map(|one| format!("\n-- {} {}\n{}\n", one.version, one.description, text(one)));
        std::iter::once(MIGRATION_TABLE.to_owned()).chain(texts).collect()
    }

    async fn schema(&self) -> Result<SchemaState, StoreError> {
        Ok(applied(&mut self.pool.acquire().await?).await?.state(&MIGRATIONS))
    }

    async fn migrate(&self) -> Result<Vec<i64>, StoreError> {
        // The connection does not go back to the pool, so the lock ends with it in any case. A
        // migration has no time limit; each wait for a lock ends after the session's
        // `lock_timeout`.
        let mut connection = self.pool.dedicated().await?;
        // Hides the notices "already exists, skipping" of `create schema if not exists`.
        sqlx::query("set client_min_messages = warning").execute(connection.plain()).await?;
        let lock = sqlx::query("select pg_advisory_lock($1)").bind(MIGRATION_LOCK);
        if let Err(error) = lock.execute(connection.plain()).await {
            return Err(match code(&error).as_deref() {
                Some("55P03") => StoreError::Refused(format!(
                    "another process has been migrating this database for more than {} s; wait for it, or end it",
                    self.server_timeout().as_secs()
                )),
                _ => error.into(),
            });
        }
        if applied(&mut connection).await?.0.is_empty() {
            sqlx::raw_sql(MIGRATION_TABLE).execute(connection.plain()).await?;
        }
        let missing = applied(&mut connection).await?.missing(&MIGRATIONS)?;
        for migration in MIGRATIONS.iter().filter(|migration| missing.contains(&migration.version)) {
            sqlx::raw_sql(AssertSqlSafe(text(migration))).execute(connection.plain()).await?;
        }
        Ok(missing)
    }

    async fn applied(&self) -> Result<Vec<AppliedMigration>, StoreError> {
        Ok(applied(&mut self.pool.acquire().await?).await?.list(&MIGRATIONS))
    }

    async fn check(&self) -> Result<Vec<Finding>, StoreError> {
        super::check::findings(self).await
    }
}

/// A migration and its row as one text in one transaction, so that never only half of it is
/// applied. With the search path of the session, functions of the migration could be bound for ever
/// to an operator that somebody else made in `public`. Limits are changed at `read committed` only.
fn text(migration: &Migration) -> String {
    let hex = hex(&checksum(migration));
    format!(
        "begin isolation level read committed;\nset local search_path = pg_catalog, pg_temp;\n{}\ninsert into oncebox.migration (version, description, checksum, serves_from) values ({}, '{}', '\\x{hex}', {});\ncommit;",
        migration.sql, migration.version, migration.description, migration.serves_from
    )
}

async fn applied(connection: &mut Bounded<Postgres>) -> Result<History, StoreError> {
    let there: bool =
        sqlx::query_scalar("select to_regclass('oncebox.migration') is not null").one(&mut *connection).await?;
    if !there {
        return Ok(History::default());
    }
    let applied = "select version, serves_from, checksum from oncebox.migration order by version";
    Ok(History(sqlx::query_as(applied).all(connection).await?))
}
