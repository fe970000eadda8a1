//! The end-to-end promise with real processes: enqueue, relay, consume, with kills, on all nine
//! pairs of store and broker.
//!
//! The three main pairs live through at least fifty kills each (`ONCEBOX_TEST_CRASH_ROUNDS` for
//! more); the other six, with two consumers of one name, through a few.
#![allow(clippy::unwrap_used)]

mod business;
mod checker;
#[path = "../../../../tests/support/process.rs"]
mod process;
mod rounds;
#[path = "../../../../tests/support/mod.rs"]
mod support;

use business::Business;
use oncebox::store::mysql::MySqlStore;
use oncebox::store::postgres::PostgresStore;
use oncebox::store::sqlite::SqliteStore;
use rounds::{Pair, play};
use sqlx::{AssertSqlSafe, Connection, MySqlConnection, PgConnection};
use support::{service, unique};

fn main_rounds() -> u32 {
    std::env::var("ONCEBOX_TEST_CRASH_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(50)
}

/// A database of the test's own on a server, dropped at its end.
struct Database {
    url: String,
    admin: String,
    name: String,
}

impl Database {
    async fn on(admin: String) -> Self {
        let name = unique("pairs").replace('-', "_");
        run(&admin, format!("create database {name}")).await;
        Self { url: format!("{}/{name}", admin.rsplit_once('/').unwrap().0), admin, name }
    }

    async fn drop(self) {
        let force = if self.admin.starts_with("postgres") { " with (force)" } else { "" };
        run(&self.admin, format!("drop database {}{force}", self.name)).await;
    }
}

async fn run(server: &str, statement: String) {
    let sql = sqlx::raw_sql(AssertSqlSafe(statement));
    let done = if server.starts_with("postgres") {
        sql.execute(&mut PgConnection::connect(server).await.unwrap()).await.map(drop)
    } else {
        sql.execute(&mut MySqlConnection::connect(server).await.unwrap()).await.map(drop)
    };
    done.unwrap();
}

async fn pair<B: Business>(
    name: &'static str,
    database: Option<&str>,
    broker: Option<&str>,
    rounds: u32,
    consumers: usize,
) {
    let wanted = |variable: Option<&str>| match variable {
        Some(variable) => service(name, variable).map(Some),
        None => Some(None),
    };
    let (Some(database), Some(broker)) = (wanted(database), wanted(broker)) else { return };
    let dir = tempfile::tempdir().unwrap();
    let database = match database {
        Some(server) => Some(Database::on(server).await),
        None => None,
    };
    let file = |scheme: &str, name: &str| format!("{scheme}://{}", dir.path().join(name).display());
    let url = database.as_ref().map_or_else(|| file("sqlite", "business.db"), |database| database.url.clone());
    let broker = broker.unwrap_or_else(|| file("embedded", "broker.db"));
    play::<B>(Pair { name, database: url, broker, rounds, consumers, dir: dir.path().to_owned() }).await;
    if let Some(database) = database {
        database.drop().await;
    }
}

macro_rules! pairs {
    ($($test:ident: $store:ty, $database:expr, $broker:expr, $rounds:expr, $consumers:expr;)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            pair::<$store>(stringify!($test), $database, $broker, $rounds, $consumers).await;
        }
    )*};
}

const POSTGRES: Option<&str> = Some("ONCEBOX_TEST_POSTGRES");
const MARIADB: Option<&str> = Some("ONCEBOX_TEST_MARIADB");
const KAFKA: Option<&str> = Some("ONCEBOX_TEST_KAFKA");
const RABBITMQ: Option<&str> = Some("ONCEBOX_TEST_RABBITMQ");

pairs! {
    postgres_with_kafka_lives_through_kills: PostgresStore, POSTGRES, KAFKA, main_rounds(), 1;
    postgres_with_rabbitmq_lives_through_kills: PostgresStore, POSTGRES, RABBITMQ, main_rounds(), 1;
    sqlite_with_embedded_lives_through_kills: SqliteStore, None, None, main_rounds(), 1;
    postgres_with_embedded_keeps_the_promise: PostgresStore, POSTGRES, None, 4, 2;
    mariadb_with_kafka_keeps_the_promise: MySqlStore, MARIADB, KAFKA, 4, 2;
    mariadb_with_rabbitmq_keeps_the_promise: MySqlStore, MARIADB, RABBITMQ, 4, 2;
    mariadb_with_embedded_keeps_the_promise: MySqlStore, MARIADB, None, 4, 2;
    sqlite_with_kafka_keeps_the_promise: SqliteStore, None, KAFKA, 4, 2;
    sqlite_with_rabbitmq_keeps_the_promise: SqliteStore, None, RABBITMQ, 4, 2;
}
