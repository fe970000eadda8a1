//! A separate database beside the one that a URL names, for `demo` and `bench`.
//!
//! Promise: a publisher of `demo` or `bench` never reads an outbox that others write.

use std::path::Path;

#[cfg(any(feature = "postgres", feature = "mysql"))]
use sqlx::{AssertSqlSafe, Executor};

use super::common::require_schema;
use super::place::{Place, file_url, private_directory};
use oncebox::StoreError;
use oncebox::app::config::{Secret, Settings};
use oncebox::app::{AppError, open_store};
use oncebox::error::redact;
use oncebox::store::{OperationStore, SchemaState, Store};

/// A store that can make a separate database beside the one that a URL names.
pub(super) trait Ground: OperationStore {
    /// Makes an empty database on the server that these settings name, and returns its URL. For
    /// SQLite it only names a file in `dir`.
    fn create_database(
        server: &Settings,
        name: &str,
        dir: &Path,
    ) -> impl Future<Output = Result<String, AppError>> + Send;

    /// Drops the database from its server. For SQLite it does nothing: the file goes with its
    /// directory, unless the user named that ([`Place::remove`]).
    fn drop_database(server: &Settings, name: &str) -> impl Future<Output = Result<(), AppError>> + Send;
}

/// A database that nobody else uses, until [`OwnDatabase::drop_it`].
#[derive(Debug, Clone)]
pub(super) struct OwnDatabase {
    pub(super) name: String,
    pub(super) url: Secret,
    pub(super) server: Settings,
}

impl OwnDatabase {
    /// Makes the directory, and the database as [`Ground::create_database`] does. Refused where the
    /// outbox of the named database has messages: it is in use, and was probably named by mistake.
    pub(super) async fn make<S: Ground>(place: &Place, name: String) -> Result<Self, AppError> {
        // The driver would prefer it to the path, into which the name of the new database goes.
        let url = url::Url::parse(&place.settings.database.url.0);
        if url.is_ok_and(|url| url.query_pairs().any(|(name, _)| name == "dbname")) {
            let why = "the database URL has `dbname` in its query: write the database into the path";
            return Err(AppError::usage(why));
        }
        refuse_messages_of_others::<S>(&place.settings).await?;
        private_directory(&place.dir)?;
        let made = S::create_database(&place.settings, &name, &place.dir).await;
        let url = Secret(made.map_err(|error| error.on(&format!("the separate database {name} cannot be made")))?);
        Ok(Self { name, url, server: place.settings.clone() })
    }

    /// Drops the database as [`Ground::drop_database`] does.
    pub(super) async fn drop_it<S: Ground>(&self) -> Result<(), AppError> {
        S::drop_database(&self.server, &self.name).await.map_err(|error| error.on(&self.name))
    }
}

async fn refuse_messages_of_others<S: Store>(settings: &Settings) -> Result<(), AppError> {
    let url = &settings.database.url;
    let file = url.0.strip_prefix("sqlite://").and_then(|rest| rest.split('?').next());
    let is_missing_file = file.is_some_and(|file| !Path::new(file).exists());
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
    ($store:ty, $drop:literal) => {
        impl Ground for $store {
            async fn create_database(server: &Settings, name: &str, _: &Path) -> Result<String, AppError> {
                let mut url = url::Url::parse(&server.database.url.0)
                    .map_err(|error| AppError::usage(format!("the database URL: {error}; name one host")))?;
                url.set_path(name);
                run::<$store>(server, format!("create database {name}")).await?;
                Ok(url.to_string())
            }

            async fn drop_database(server: &Settings, name: &str) -> Result<(), AppError> {
                run::<$store>(server, format!($drop, name)).await
            }
        }
    };
}
#[cfg(feature = "postgres")]
on_server!(oncebox::store::postgres::PostgresStore, "drop database if exists {} with (force)");
#[cfg(feature = "mysql")]
on_server!(oncebox::store::mysql::MySqlStore, "drop database if exists {}");

/// Runs a statement on the server of these settings, with their TLS.
#[cfg(any(feature = "postgres", feature = "mysql"))]
async fn run<S: Store>(server: &Settings, sql: String) -> Result<(), AppError>
where
    for<'c> &'c sqlx::Pool<S::Db>: Executor<'c, Database = S::Db>,
{
    let store: S = open_store(server, None).await?;
    let ran = store.pool().execute(AssertSqlSafe(sql)).await.map_err(StoreError::from);
    store.close().await;
    Ok(ran.map(drop)?)
}

#[cfg(feature = "sqlite")]
impl Ground for oncebox::store::sqlite::SqliteStore {
    async fn create_database(_: &Settings, name: &str, dir: &Path) -> Result<String, AppError> {
        Ok(file_url(dir, name).0)
    }

    async fn drop_database(_: &Settings, _: &str) -> Result<(), AppError> {
        Ok(())
    }
}
