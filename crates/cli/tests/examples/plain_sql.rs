//! Messages of plain SQL, enqueued by each database's own command line.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use url::Url;

use crate::mysql::Db;
use crate::postgres::with_database;
use crate::stage::{ONCEBOX, PUBLISHER, Stage, finished};

fn script(database: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    root.join("examples/plain_sql").join(database).with_extension("sql")
}

/// False where the program is missing, which is said.
fn is_there(test: &str, program: &str) -> bool {
    let there = Command::new(program).arg("--version").output().is_ok();
    if !there {
        assert!(std::env::var("ONCEBOX_TEST_STRICT").as_deref() != Ok("1"), "{test} needs {program}");
        eprintln!("SKIPPED: {test} (no {program})");
    }
    there
}

/// Runs the script, relays, and reads what came to the broker.
async fn enqueues(stage: &Stage, client: Command) {
    stage.run(ONCEBOX, &["migrate", "up"]);
    finished(client);
    stage.run(PUBLISHER, &["--until-empty"]);
    let published = stage.published("invoices").await;
    let seen: Vec<_> = published
        .iter()
        .map(|one| {
            let payload: serde_json::Value = serde_json::from_slice(one.payload.as_deref().unwrap()).unwrap();
            let key = String::from_utf8(one.key.clone().unwrap()).unwrap();
            let tenant = one.headers.iter().find(|(name, _)| name == "tenant").map(|(_, value)| value.as_slice());
            (payload["invoiceId"].as_str().unwrap().to_owned(), key, one.kind.as_deref(), tenant)
        })
        .collect();
    let expected = [("inv-1", "acc-7"), ("inv-2", "acc-8"), ("inv-3", "acc-7")]
        .map(|(invoice, key)| (invoice.to_owned(), key.to_owned(), Some("invoice.issued"), Some(b"t1".as_slice())));
    assert_eq!(seen.len(), expected.len(), "each committed message, and none of the transaction that was rolled back");
    // Only within a key is there an order.
    for key in ["acc-7", "acc-8"] {
        let of_key = |one: &&(String, String, Option<&str>, Option<&[u8]>)| one.1 == key;
        assert_eq!(seen.iter().filter(of_key).collect::<Vec<_>>(), expected.iter().filter(of_key).collect::<Vec<_>>());
    }
}

/// Shown by: `commit` for `rollback` in the script.
#[tokio::test]
async fn psql_enqueues_from_plain_sql() {
    let name = "psql_enqueues_from_plain_sql";
    if !is_there(name, "psql") {
        return;
    }
    with_database(name, |database| async move {
        let stage = Stage::new(Some(&database.url), None);
        let mut psql = Command::new("psql");
        psql.args(["--set", "ON_ERROR_STOP=1", "--file"]).arg(script("postgres")).arg(&database.url);
        enqueues(&stage, psql).await;
    })
    .await;
}

#[tokio::test]
async fn the_mariadb_client_enqueues_from_plain_sql() {
    let name = "the_mariadb_client_enqueues_from_plain_sql";
    let Some(database) = Db::empty(name).await else { return };
    if !is_there(name, "mariadb") {
        return;
    }
    let url = Url::parse(&database.url).unwrap();
    let mut mariadb = Command::new("mariadb");
    mariadb
        .args(["--no-defaults", "--protocol=tcp", "--skip-ssl-verify-server-cert", "--host", url.host_str().unwrap()])
        .args(["--port", &url.port().unwrap().to_string(), "--user", url.username()])
        .env("MYSQL_PWD", url.password().unwrap_or_default())
        .arg(url.path().trim_start_matches('/'))
        .stdin(File::open(script("mariadb")).unwrap());
    enqueues(&Stage::new(Some(&database.url), None), mariadb).await;
}

#[tokio::test]
async fn the_sqlite_client_enqueues_from_plain_sql() {
    if !is_there("the_sqlite_client_enqueues_from_plain_sql", "sqlite3") {
        return;
    }
    let stage = Stage::new(None, None);
    let mut sqlite = Command::new("sqlite3");
    sqlite.arg("-bail").arg(stage.path("service.db")).stdin(File::open(script("sqlite")).unwrap());
    enqueues(&stage, sqlite).await;
}
