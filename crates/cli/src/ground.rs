//! A separate database beside the one that a URL names, for `demo` and `bench`.
//!
//! Promise: a publisher of `demo` or `bench` never reads an outbox that others write.

use std::path::Path;

#[cfg(any(feature = "postgres", feature = "mysql"))]
use sqlx::{AssertSqlSafe, Connection, Executor};

use super::common::require_schema;
use super::place::{Place, file_url, private_directory};
use oncebox::StoreError;
use oncebox::app::config::{DatabaseSettings, Secret, Settings};
use oncebox::app::{AppError, open_store};
use oncebox::error::redact;
use oncebox::store::{OperationStore, SchemaState, Store};

/// A store that can make a separate database beside the one that a URL names.
pub(super) trait Ground: OperationStore {
    /// Makes an empty database on the server of this URL and returns its URL. For SQLite it only
    /// names a file in `dir`.
    fn create_database(server: &str, name: &str, dir: &Path) -> impl Future<Output = Result<String, AppError>> + Send;

    /// Drops the database. A SQLite file is removed with its directory.
    fn drop_database(server: &str, name: &str) -> impl Future<Output = Result<(), AppError>> + Send;
}

/// A database that nobody else uses. [`OwnDatabase::drop`] removes it.
#[derive(Debug, Clone)]
pub(super) struct OwnDatabase {
    pub(super) name: String,
    pub(super) url: Secret,
    pub(super) server: Secret,
}

impl OwnDatabase {
    /// Makes the database on the server of the settings, or in the directory for SQLite. Refused
    /// where the named database has an outbox with messages: it is in use, so it was probably named
    /// by mistake.
    pub(super) async fn make<S: Ground>(place: &Place, name: String) -> Result<Self, AppError> {
        refuse_messages_of_others::<S>(&place.settings).await?;
        private_directory(&place.dir)?;
        let server = place.settings.database.url.clone();
        let made = S::create_database(&server.0, &name, &place.dir).await;
        let url = Secret(made.map_err(|error| error.on(&format!("a database of its own, {name}, cannot be made")))?);
        Ok(Self { name, url, server })
    }

    /// Drops the database from its server. A SQLite file is removed with its directory.
    pub(super) async fn drop<S: Ground>(&self) -> Result<(), AppError> {
        S::drop_database(&self.server.0, &self.name).await.map_err(|error| error.on(&self.name))
    }
}

async fn refuse_messages_of_others<S: Store>(settings: &Settings) -> Result<(), AppError> {
    let DatabaseSettings { url, .. } = &settings.database;
    let is_missing_file = url.0.strip_prefix("sqlite://").is_some_and(|file| !Path::new(file).exists());
    if is_missing_file {
        return Ok(());
    }
    let store: S = open_store(settings, None).await?;
    let looked = async {
        if store.schema().await? == SchemaState::Missing {
            return Ok(());
        }
        require_schema(&store, settings).await?;
        let status = store.clone().into_duties().status().await?;
        let (pending, held, dead) = (status.pending, status.held, status.dead);
        if pending + held + dead == 0 {
            return Ok(());
        }
        Err(AppError::refused(format!(
            "{}: its outbox holds messages of others ({pending} pending, {held} held, {dead} dead); name a database that nobody \
             works with, or none for a file of its own",
            redact(&url.0)
        )))
    };
    let looked = looked.await;
    store.close().await;
    looked
}

#[cfg(any(feature = "postgres", feature = "mysql"))]
macro_rules! on_server {
    ($store:ty, $connection:ty, $drop:literal) => {
        impl Ground for $store {
            async fn create_database(server: &str, name: &str, _: &Path) -> Result<String, AppError> {
                let mut admin = <$connection>::connect(server).await.map_err(StoreError::from)?;
                admin.execute(AssertSqlSafe(format!("create database {name}"))).await.map_err(StoreError::from)?;
                admin.close().await.map_err(StoreError::from)?;
                let mut url = url::Url::parse(server).map_err(|error| AppError::usage(error.to_string()))?;
                url.set_path(name);
                Ok(url.to_string())
            }

            async fn drop_database(server: &str, name: &str) -> Result<(), AppError> {
                let mut admin = <$connection>::connect(server).await.map_err(StoreError::from)?;
                admin.execute(AssertSqlSafe(format!($drop, name))).await.map_err(StoreError::from)?;
                Ok(admin.close().await.map_err(StoreError::from)?)
            }
        }
    };
}
#[cfg(feature = "postgres")]
on_server!(oncebox::store::postgres::PostgresStore, sqlx::PgConnection, "drop database if exists {} with (force)");
#[cfg(feature = "mysql")]
on_server!(oncebox::store::mysql::MySqlStore, sqlx::MySqlConnection, "drop database if exists {}");

#[cfg(feature = "sqlite")]
impl Ground for oncebox::store::sqlite::SqliteStore {
    async fn create_database(_: &str, name: &str, dir: &Path) -> Result<String, AppError> {
        Ok(file_url(dir, name).0)
    }

    async fn drop_database(_: &str, _: &str) -> Result<(), AppError> {
        Ok(())
    }
}
