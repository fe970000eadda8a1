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
use support::{service, unique};

fn main_rounds() -> u32 {
    std::env::var("ONCEBOX_TEST_CRASH_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(50)
}

/// A database of the test's own, dropped at its end.
struct Database {
    url: String,
    admin: Option<String>,
    name: String,
}

impl Database {
    async fn postgres(admin: &str) -> Self {
        let name = unique("pairs").replace('-', "_");
        let mut connection = <sqlx::PgConnection as sqlx::Connection>::connect(admin).await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(format!("create database {name}"))).execute(&mut connection).await.unwrap();
        let url = format!("{}/{name}", admin.rsplit_once('/').unwrap().0);
        Self { url, admin: Some(admin.to_owned()), name }
    }

    async fn mysql(admin: &str) -> Self {
        let name = unique("pairs").replace('-', "_");
        let mut connection = <sqlx::MySqlConnection as sqlx::Connection>::connect(admin).await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(format!("create database {name}"))).execute(&mut connection).await.unwrap();
        let url = format!("{}/{name}", admin.rsplit_once('/').unwrap().0);
        Self { url, admin: Some(admin.to_owned()), name }
    }

    fn sqlite(dir: &std::path::Path) -> Self {
        let url = format!("sqlite://{}", dir.join("business.db").display());
        Self { url, admin: None, name: String::new() }
    }

    async fn drop(self) {
        let Some(admin) = self.admin else { return };
        if admin.starts_with("postgres") {
            let mut connection = <sqlx::PgConnection as sqlx::Connection>::connect(&admin).await.unwrap();
            let sql = format!("drop database {} with (force)", self.name);
            sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
        } else {
            let mut connection = <sqlx::MySqlConnection as sqlx::Connection>::connect(&admin).await.unwrap();
            let sql = format!("drop database {}", self.name);
            sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
        }
    }
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
        Some(url) if url.starts_with("postgres") => Database::postgres(&url).await,
        Some(url) => Database::mysql(&url).await,
        None => Database::sqlite(dir.path()),
    };
    let broker = broker.unwrap_or_else(|| format!("embedded://{}", dir.path().join("broker.db").display()));
    let url = database.url.clone();
    play::<B>(Pair { name, database: url, broker, rounds, consumers, dir: dir.path().to_owned() }).await;
    database.drop().await;
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
