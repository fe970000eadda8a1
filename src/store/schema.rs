//! The tables and their migrations, which a migration table of our own records. A program never
//! migrates by itself at start. Not here: the SQL of the migrations, and their checks.

use async_trait::async_trait;
use sha2::{Digest, Sha256};

use crate::error::StoreError;
use crate::observe::Finding;
use crate::store::base::Base;

/// How the schema of a database compares with this program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchemaState {
    /// The database has no table of oncebox.
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
    /// Newer than this program knows, but every newer migration declares that it still serves this
    /// program. So a program that ran before the migration may start again.
    Ahead {
        /// The newest version that the database has.
        found: i64,
        /// The newest version that this program knows.
        known: i64,
    },
    /// Newer than this program knows, and it may not start.
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
    /// Whether a program may start.
    ///
    /// # Errors
    /// The error says what to do.
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

/// A migration that this program was built with. Their versions ascend from 1.
pub(super) struct Migration {
    pub(super) version: i64,
    pub(super) description: &'static str,
    /// The oldest program that still works after this migration, named by the newest migration that
    /// it knows. It is the migration's own version where older programs would do wrong.
    pub(super) serves_from: i64,
    pub(super) sql: &'static str,
}

impl Migration {
    /// A migration after which programs that do not know it would do wrong.
    pub(super) const fn breaking(version: i64, description: &'static str, sql: &'static str) -> Self {
        Self { version, description, serves_from: version, sql }
    }
}

/// A migration and whether it was applied.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct AppliedMigration {
    /// Its number, ascending from 1.
    pub version: i64,
    /// What it is for.
    pub description: String,
    /// Whether it was applied to the database.
    pub applied: bool,
}

/// An applied migration: its version, the oldest program that it serves, and the SHA-256 of its
/// text where the database keeps it.
type Applied = (i64, i64, Option<Vec<u8>>);

/// The applied migrations of a database, ascending. Empty where no table of oncebox is there.
#[derive(Debug, Default)]
pub(super) struct History(pub(super) Vec<Applied>);

/// SHA-256 of a migration's text.
pub(super) fn checksum(migration: &Migration) -> Vec<u8> {
    Sha256::digest(migration.sql.as_bytes()).to_vec()
}

impl History {
    /// The newest applied version.
    pub(super) fn newest(&self) -> Option<i64> {
        self.0.last().map(|(version, ..)| *version)
    }

    /// Whether a migration was applied.
    fn has(&self, version: i64) -> bool {
        self.0.iter().any(|(applied, ..)| *applied == version)
    }

    /// The first version that was applied with another text than this program has.
    fn changed(&self, known: &[Migration]) -> Option<i64> {
        let is_other = |(version, _, stored): &&Applied| {
            let known = known.iter().find(|migration| migration.version == *version);
            known.zip(stored.as_ref()).is_some_and(|(migration, stored)| checksum(migration) != *stored)
        };
        self.0.iter().find(is_other).map(|(version, ..)| *version)
    }

    /// How the schema compares with this program.
    pub(super) fn state(&self, known: &[Migration]) -> SchemaState {
        let needed = known.last().map_or(0, |migration| migration.version);
        if let Some(found) = self.newest().filter(|found| *found > needed) {
            let mut newer = self.0.iter().filter(|(version, ..)| *version > needed);
            let serves = newer.all(|(_, serves_from, _)| *serves_from <= needed);
            let known = needed;
            return if serves { SchemaState::Ahead { found, known } } else { SchemaState::Newer { found, known } };
        }
        match (self.newest(), self.changed(known)) {
            (None, _) => SchemaState::Missing,
            (Some(_), Some(version)) => SchemaState::Changed { version },
            (Some(found), _) if known.iter().any(|migration| !self.has(migration.version)) => {
                SchemaState::Old { found, needed }
            }
            (Some(found), _) => SchemaState::Current(found),
        }
    }

    /// The versions that are still to be applied. A newer schema, also one that still serves this
    /// program, is an error, and so is a changed migration.
    pub(super) fn missing(&self, known: &[Migration]) -> Result<Vec<i64>, StoreError> {
        match self.state(known) {
            SchemaState::Missing | SchemaState::Old { .. } => {}
            SchemaState::Ahead { found, known } => return Err(StoreError::SchemaNewer { found, known }),
            state => state.require()?,
        }
        Ok(known.iter().map(|migration| migration.version).filter(|version| !self.has(*version)).collect())
    }

    /// All migrations that this program knows or the database has applied.
    pub(super) fn list(&self, known: &[Migration]) -> Vec<AppliedMigration> {
        let known_here = known.iter().map(|migration| AppliedMigration {
            version: migration.version,
            description: migration.description.to_owned(),
            applied: self.has(migration.version),
        });
        let is_newer = |version: &i64| known.iter().all(|migration| migration.version != *version);
        let newer = self.0.iter().map(|(version, ..)| *version).filter(is_newer).map(|version| AppliedMigration {
            version,
            description: "of a newer program".to_owned(),
            applied: true,
        });
        known_here.chain(newer).collect()
    }
}

/// A sentence about what is lost in an asynchronous failover.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const LOST_AT_FAILOVER: &str =
    "a failover undoes what was committed last; Kafka delivers it again, RabbitMQ does not";

/// The tables, whether they fit this program, and their migrations.
#[async_trait]
pub trait Schema: Base {
    /// The SQL that [`Schema::migrate`] runs on a new database, for operators who run it
    /// themselves. It includes the rows that record that it was applied.
    #[must_use]
    fn script() -> String;

    /// The state of the schema. A SQLite file that does not exist is `Missing`. On MySQL texts are
    /// not compared, because its migrations record themselves, also when the `mysql` client applies
    /// them.
    async fn schema(&self) -> Result<SchemaState, StoreError>;

    /// Whether a program may start, as [`SchemaState::require`].
    ///
    /// # Errors
    /// The error says what to do.
    async fn require_schema(&self) -> Result<(), StoreError> {
        self.schema().await?.require()
    }

    /// Applies the missing migrations under a lock, and returns their versions. It is safe to run
    /// twice, and in several processes at the same time.
    async fn migrate(&self) -> Result<Vec<i64>, StoreError>;

    /// The migrations that are known or applied.
    async fn applied(&self) -> Result<Vec<AppliedMigration>, StoreError>;

    /// Checks the settings of server and schema that the promises need. The relay and the consumer
    /// run it at start, and `doctor` at any time.
    async fn check(&self) -> Result<Vec<Finding>, StoreError>;
}
