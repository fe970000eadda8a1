//! The tables: made by migrations of our own, in a migration table of our own, never by a program
//! on its own accord.

use std::future::Future;

use sha2::{Digest, Sha256};

use super::Base;
use crate::error::StoreError;

/// Where the schema stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchemaState {
    /// Nothing of oncebox is there.
    Missing,
    /// Older than this program needs.
    Old {
        /// The newest version that the database has.
        found: i64,
        /// Version this program needs.
        needed: i64,
    },
    /// What this program was built with.
    Current(i64),
    /// Newer than this program knows, and every migration that it does not know says that it still
    /// serves this program: one that ran before the migration may start again.
    Ahead {
        /// The newest version that the database has.
        found: i64,
        /// The newest version that this program knows.
        known: i64,
    },
    /// Newer than this program knows.
    Newer {
        /// The newest version that the database has.
        found: i64,
        /// The newest version that this program knows.
        known: i64,
    },
    /// A migration was applied with another text than this program has.
    Changed {
        /// The version of the migration whose text differs.
        version: i64,
    },
}

impl SchemaState {
    /// Of a schema with migrations that this program does not know: the newest, and the oldest
    /// version of a program that all of them still serve.
    pub(super) fn of_newer(found: i64, serves_from: i64, known: i64) -> Self {
        if serves_from <= known { Self::Ahead { found, known } } else { Self::Newer { found, known } }
    }

    /// Whether a program may start.
    ///
    /// # Errors
    /// The error that says what to do.
    pub fn require(self) -> Result<(), StoreError> {
        match self {
            Self::Current(_) | Self::Ahead { .. } => Ok(()),
            Self::Missing => Err(StoreError::SchemaMissing("no table of oncebox is there".to_owned())),
            Self::Old { found, needed } => Err(StoreError::SchemaOld { found, needed }),
            Self::Newer { found, known } => Err(StoreError::SchemaNewer { found, known }),
            Self::Changed { version } => Err(StoreError::Refused(format!(
                "migration {version} was applied with another text than this program has; a migration never changes: use the \
                 program that applied it, or a newer one"
            ))),
        }
    }
}

/// A migration as text, for `migrate print`.
#[derive(Debug, Clone, Copy)]
pub struct MigrationText {
    /// Version, ascending from 1.
    pub version: i64,
    /// What it is for.
    pub description: &'static str,
    /// The oldest program that still works on the schema after it, by the newest version that this
    /// program knows; its own version where an older one would do wrong.
    pub serves_from: i64,
    /// The SQL of the migration, as it is run.
    pub sql: &'static str,
}

/// A migration and whether it was applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppliedMigration {
    /// Its number, ascending from 1.
    pub version: i64,
    /// What it is for.
    pub description: String,
    /// True where the database has it.
    pub applied: bool,
}

/// The migrations that a database says were applied, ascending: version, and the SHA-256 of the
/// text where the database keeps it. None: nothing of oncebox is there.
#[derive(Debug, Default)]
pub(super) struct History(pub(super) Vec<(i64, Option<Vec<u8>>)>);

/// SHA-256 of a migration's text.
pub(super) fn checksum(migration: &MigrationText) -> Vec<u8> {
    Sha256::digest(migration.sql.as_bytes()).to_vec()
}

/// The newest version that this program knows.
pub(super) fn newest(known: &[MigrationText]) -> i64 {
    known.last().map_or(0, |migration| migration.version)
}

impl History {
    /// The newest applied version.
    pub(super) fn newest(&self) -> Option<i64> {
        self.0.last().map(|(version, _)| *version)
    }

    /// Whether a migration was applied.
    pub(super) fn has(&self, version: i64) -> bool {
        self.0.iter().any(|(applied, _)| *applied == version)
    }

    /// The version of a migration that was applied with another text than it has here.
    fn changed(&self, known: &[MigrationText]) -> Option<i64> {
        let is_other = |(version, stored): &&(i64, Option<Vec<u8>>)| {
            let known = known.iter().find(|migration| migration.version == *version);
            known.zip(stored.as_ref()).is_some_and(|(migration, stored)| checksum(migration) != *stored)
        };
        self.0.iter().find(is_other).map(|(version, _)| *version)
    }

    /// Where the schema stands, unless it is newer than this program: then see
    /// [`SchemaState::of_newer`].
    pub(super) fn state(&self, known: &[MigrationText]) -> SchemaState {
        let needed = newest(known);
        match (self.newest(), self.changed(known)) {
            (None, _) => SchemaState::Missing,
            (Some(_), Some(version)) => SchemaState::Changed { version },
            (Some(found), _) if known.iter().any(|migration| !self.has(migration.version)) => {
                SchemaState::Old { found, needed }
            }
            (Some(found), _) => SchemaState::Current(found),
        }
    }

    /// The versions that are still to be applied.
    ///
    /// # Errors
    /// The schema is newer than this program, or a migration was applied with another text.
    pub(super) fn missing(&self, known: &[MigrationText]) -> Result<Vec<i64>, StoreError> {
        let needed = newest(known);
        if let Some(found) = self.newest().filter(|found| *found > needed) {
            return Err(StoreError::SchemaNewer { found, known: needed });
        }
        if let Some(version) = self.changed(known) {
            SchemaState::Changed { version }.require()?;
        }
        Ok(known.iter().map(|migration| migration.version).filter(|version| !self.has(*version)).collect())
    }

    /// All that is known here or applied there.
    pub(super) fn list(&self, known: &[MigrationText]) -> Vec<AppliedMigration> {
        let known_here = known.iter().map(|migration| AppliedMigration {
            version: migration.version,
            description: migration.description.to_owned(),
            applied: self.has(migration.version),
        });
        let is_newer = |version: &i64| known.iter().all(|migration| migration.version != *version);
        let newer = self.0.iter().map(|(version, _)| *version).filter(is_newer).map(|version| AppliedMigration {
            version,
            description: "of a newer program".to_owned(),
            applied: true,
        });
        known_here.chain(newer).collect()
    }
}

/// What an asynchronous failover costs, in words.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const LOST_AT_FAILOVER: &str =
    "a failover undoes what was committed last; Kafka delivers it again, RabbitMQ does not";

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Works, but a promise is weaker or trouble is near.
    Warning,
    /// Something waits and nobody carries it on.
    Stuck,
    /// Nothing can be done now, and it ends by itself: programs wait.
    Waits,
    /// Breaks a promise: programs refuse to start.
    Refused,
}

/// One answer of a check: what was looked at, how it is, what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at, for example `sequence cache`.
    pub name: String,
    /// How much it matters.
    pub severity: Severity,
    /// What was found, in words for the operator.
    pub detail: String,
    /// What to do, where something is to be done.
    pub remedy: Option<String>,
}

impl Finding {
    /// A finding that says that all is well.
    pub fn ok(name: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { name: name.into(), severity: Severity::Ok, detail: detail.into(), remedy: None }
    }

    /// A promise is weaker.
    pub fn warning(name: impl Into<String>, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name: name.into(), severity: Severity::Warning, detail: detail.into(), remedy: Some(remedy.into()) }
    }

    /// Nobody carries it on.
    pub fn stuck(name: impl Into<String>, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name: name.into(), severity: Severity::Stuck, detail: detail.into(), remedy: Some(remedy.into()) }
    }

    /// Nothing can be done yet.
    pub fn waits(name: impl Into<String>, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name: name.into(), severity: Severity::Waits, detail: detail.into(), remedy: Some(remedy.into()) }
    }

    /// A promise is broken.
    pub fn refused(name: impl Into<String>, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name: name.into(), severity: Severity::Refused, detail: detail.into(), remedy: Some(remedy.into()) }
    }
}

/// Duty: the tables, whether they fit this program, and their migrations.
pub trait Schema: Base {
    /// All migrations this program was built with, ascending.
    fn migrations() -> &'static [MigrationText];

    /// Everything that [`Schema::migrate`] runs on a new database, for those who run it themselves:
    /// with the rows that say that it was applied.
    #[must_use]
    fn script() -> String {
        let text = |migration: &MigrationText| {
            format!("-- {} {}\n{}\n", migration.version, migration.description, migration.sql)
        };
        Self::migrations().iter().map(text).collect()
    }

    /// Where the schema stands. A SQLite file that is missing is `Missing`. On MySQL texts are not
    /// compared: its migrations note themselves, also where they are applied by the `mysql` client.
    fn schema(&self) -> impl Future<Output = Result<SchemaState, StoreError>> + Send;

    /// Applies what is missing, under a lock, and says which versions it applied. Safe to run twice
    /// and at once.
    fn migrate(&self) -> impl Future<Output = Result<Vec<i64>, StoreError>> + Send;

    /// Which migrations are known and applied.
    fn applied(&self) -> impl Future<Output = Result<Vec<AppliedMigration>, StoreError>> + Send;

    /// Settings of server and schema that the promise rests on (R1, R7, R10, R13): run at start and
    /// by `doctor`.
    fn check(&self) -> impl Future<Output = Result<Vec<Finding>, StoreError>> + Send;
}
