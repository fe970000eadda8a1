//! Databases as an application sees them: its own connection, plain SQL, on all three kinds. Those
//! on servers are the test's own and dropped at its end.

use std::time::Duration;

use oncebox::sqlx::sqlite::SqliteConnectOptions;
use oncebox::sqlx::{self, AssertSqlSafe, ConnectOptions, Connection, MySqlConnection, PgConnection, SqliteConnection};

use super::kit::block_on;
use super::support::unique;

/// Runs statements, each committed by itself.
pub(crate) fn run(url: &str, statements: &str) -> Result<(), sqlx::Error> {
    let sql = || sqlx::raw_sql(AssertSqlSafe(statements.to_owned()));
    block_on(async {
        match kind(url) {
            "postgres" => sql().execute(&mut PgConnection::connect(url).await?).await.map(drop),
            "mysql" => sql().execute(&mut MySqlConnection::connect(url).await?).await.map(drop),
            _ => sql().execute(&mut sqlite(url).await?).await.map(drop),
        }
    })
}

/// The statement by which an application enqueues a payment, on this kind of database.
pub(crate) fn enqueue(url: &str, topic: &str, key: &str, payload: &str) -> String {
    let of = "payment.created";
    match kind(url) {
        "postgres" => format!("select oncebox.enqueue('{topic}', '{of}', '{payload}'::text, '{key}')"),
        "mysql" => format!("call oncebox_enqueue_p('{topic}', '{key}', '{of}', '{payload}', null, null, null, @id)"),
        _ => format!(
            "insert into oncebox_outbox (topic, key, kind, payload) values ('{topic}', '{key}', '{of}', '{payload}')"
        ),
    }
}

/// The first column of a query, as text.
pub(crate) fn column(url: &str, query: &str) -> Vec<String> {
    let sql = AssertSqlSafe(query.to_owned());
    let rows = block_on(async {
        match kind(url) {
            "postgres" => sqlx::query_scalar(sql).fetch_all(&mut PgConnection::connect(url).await?).await,
            "mysql" => sqlx::query_scalar(sql).fetch_all(&mut MySqlConnection::connect(url).await?).await,
            _ => sqlx::query_scalar(sql).fetch_all(&mut sqlite(url).await?).await,
        }
    });
    rows.unwrap_or_else(|error| panic!("{query}: {error}"))
}

/// Waits longer for its turn at a file than the five seconds of sqlx: others share the disk.
async fn sqlite(url: &str) -> Result<SqliteConnection, sqlx::Error> {
    let options: SqliteConnectOptions = url.parse()?;
    options.busy_timeout(Duration::from_secs(60)).connect().await
}

fn kind(url: &str) -> &str {
    url.split(':').next().unwrap()
}

/// A database of its own on a server.
#[derive(Debug)]
pub(crate) struct Database {
    pub(crate) url: String,
    server: String,
    name: String,
}

impl Database {
    /// Empty: without the tables of oncebox.
    pub(crate) fn on(server: &str) -> Self {
        let name = unique("cli").replace('-', "_");
        run(server, &format!("create database {name}")).unwrap();
        let mut url = url::Url::parse(server).unwrap();
        url.set_path(&name);
        Self { url: url.into(), server: server.to_owned(), name }
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let force = if kind(&self.server) == "postgres" { " with (force)" } else { "" };
        if let Err(error) = run(&self.server, &format!("drop database {}{force}", self.name)) {
            eprintln!("{} was not dropped: {error}", self.name);
        }
    }
}

/// The write lock of a SQLite file, held until it is dropped.
pub(crate) struct Locked {
    runtime: tokio::runtime::Runtime,
    connection: Option<SqliteConnection>,
}

impl Locked {
    pub(crate) fn on(url: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let connection = runtime.block_on(async {
            let mut connection = sqlite(url).await.unwrap();
            sqlx::raw_sql("begin immediate").execute(&mut connection).await.unwrap();
            connection
        });
        Self { runtime, connection: Some(connection) }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.runtime.block_on(connection.close()).unwrap();
        }
    }
}
