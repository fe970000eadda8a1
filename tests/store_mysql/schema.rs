//! Migrations: run twice, at once, after a cut; every table and column says what it is for.

use oncebox::StoreError;
use oncebox::store::mysql::MySqlStore;
use oncebox::store::{Base, Schema, SchemaState, StoreOptions};

use crate::another_name::under_another_name;
use crate::fixture::{Db, execute};
use crate::support::service;

#[tokio::test(flavor = "multi_thread")]
async fn migrations_run_twice_and_at_once_and_say_what_they_did() {
    let Some(db) = Db::empty("migrations_run_twice_and_at_once_and_say_what_they_did").await else { return };
    assert_eq!(db.store.schema().await.unwrap(), SchemaState::Missing);
    assert!(db.store.applied().await.unwrap().iter().all(|migration| !migration.applied));

    let (one, two) = tokio::join!(db.store.migrate(), db.store.migrate());
    let mut applied = [one.unwrap(), two.unwrap()];
    applied.sort();
    assert_eq!(applied, [vec![], vec![1, 2, 3, 4]], "one of them applies all, the other waits and finds nothing to do");
    assert_eq!(db.store.schema().await.unwrap(), SchemaState::Current(4));
    assert!(db.store.migrate().await.unwrap().is_empty());

    execute(&mut db.app().await, "insert into oncebox_migration values (99, 'from the future', 99, utc_timestamp(6))")
        .await;
    assert_eq!(db.store.schema().await.unwrap(), SchemaState::Newer { found: 99, known: 4 });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_was_cut_off_is_finished_by_the_next_run() {
    let Some(db) = Db::new("a_migration_that_was_cut_off_is_finished_by_the_next_run").await else { return };
    // As a process leaves it that was killed between two statements: DDL commits by itself.
    let mut app = db.app().await;
    execute(&mut app, "delete from oncebox_migration where version = 1; drop table oncebox_email, oncebox_audit").await;
    execute(&mut app, "drop procedure oncebox_enqueue_p; delete from oncebox_migration where version = 2").await;
    assert_eq!(db.store.schema().await.unwrap(), SchemaState::Old { found: 4, needed: 4 });
    assert_eq!(db.store.migrate().await.unwrap(), [1, 2]);
    assert_eq!(db.store.schema().await.unwrap(), SchemaState::Current(4));
    assert_eq!(db.count("oncebox_email").await, 0);
    execute(&mut app, "call oncebox_enqueue_p('t', null, 'k', '', null, null, null, @id)").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_table_column_and_index_says_what_it_is_for() {
    let Some(db) = Db::new("every_table_column_and_index_says_what_it_is_for").await else { return };
    let silent: Vec<String> = sqlx::query_scalar(
        "select cast(concat(table_name, ' ', what) as char) from ( \
           select table_name, '' as what, table_comment as said from information_schema.tables where table_schema = database() \
           union all select table_name, column_name, column_comment from information_schema.columns where table_schema = database() \
           union all select table_name, index_name, index_comment from information_schema.statistics where table_schema = database() \
         ) everything where said = ''",
    )
    .fetch_all(db.store.pool())
    .await
    .unwrap();
    assert!(silent.is_empty(), "{silent:?}");
}

/// Shown to fail: with the list taken for one name.
#[tokio::test(flavor = "multi_thread")]
async fn of_several_hosts_the_first_that_is_there_is_used() {
    let test = "of_several_hosts_the_first_that_is_there_is_used";
    let Some(url) = service(test, "ONCEBOX_TEST_MARIADB") else { return };
    let store = MySqlStore::connect(&StoreOptions::new(url.replace("@", "@127.0.0.1:1,"))).await.unwrap();
    let one: i64 = sqlx::query_scalar("select 1").fetch_one(store.pool()).await.unwrap();
    assert_eq!(one, 1);
    store.close().await;
    let error =
        MySqlStore::connect(&StoreOptions::new("mysql://app:s3cret@127.0.0.1:1,localhost:2/app")).await.unwrap_err();
    let said = error.to_string();
    assert!(matches!(error, StoreError::Unavailable(_)) && !said.contains("s3cret"), "{said}");
    for words in ["127.0.0.1:1: Connection refused", "localhost:2: Connection refused"] {
        assert!(said.contains(words), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s1_tls_is_verified_against_the_given_authority_and_name() {
    let test = "s1_tls_is_verified_against_the_given_authority_and_name";
    let Some(url) = service(test, "ONCEBOX_TEST_MARIADB_TLS") else { return };
    let Some(other) = service(test, "ONCEBOX_TEST_OTHER_CA") else { return };
    let Some(ca) = service(test, "ONCEBOX_TEST_CA") else { return };
    let plain = url.split('?').next().unwrap().to_owned();
    let connect = async |url: String, ca: Option<&str>| {
        let options = StoreOptions { ca_file: ca.map(Into::into), ..StoreOptions::new(url) };
        MySqlStore::connect(&options).await
    };
    connect(url.clone(), None).await.unwrap().close().await;
    connect(format!("{plain}?ssl-mode=VERIFY_IDENTITY"), Some(&ca)).await.unwrap().close().await;
    let renamed = under_another_name(&plain).await;
    connect(format!("{renamed}?ssl-mode=VERIFY_CA"), Some(&ca)).await.unwrap().close().await;
    for (what, url, ca) in [
        ("another authority", format!("{plain}?ssl-mode=VERIFY_IDENTITY"), Some(other.as_str())),
        ("no authority", format!("{plain}?ssl-mode=VERIFY_IDENTITY"), None),
        // The certificate is for localhost and 127.0.0.1.
        ("another name", format!("{renamed}?ssl-mode=VERIFY_IDENTITY"), Some(ca.as_str())),
    ] {
        let error = connect(url, ca).await.err().unwrap_or_else(|| panic!("{what} was accepted")).to_string();
        assert!(error.contains("certificate") && !error.contains("secret"), "{what}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_there_is_unavailable_at_once() {
    let started = std::time::Instant::now();
    let error = MySqlStore::connect(&StoreOptions::new("mysql://app:s3cret@127.0.0.1:1/app")).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
    assert!(started.elapsed().as_secs() < 10 && !error.to_string().contains("s3cret"));
}

/// A migrator without SUPER can make neither triggers nor functions under binary logging.
///
/// Shown by: adding a trigger of one line to the migration of the doors.
#[tokio::test(flavor = "multi_thread")]
async fn r12_there_is_no_trigger_and_every_pattern_ends_at_the_very_end() {
    let Some(db) = Db::new("r12_there_is_no_trigger_and_every_pattern_ends_at_the_very_end").await else { return };
    assert_eq!(db.count("information_schema.triggers where trigger_schema = database()").await, 0);
    let script = MySqlStore::script();
    let patterns: Vec<&str> = script.lines().filter(|line| line.contains("regexp") || line.contains("rlike")).collect();
    assert!(patterns.len() >= 5, "{patterns:?}");
    for line in patterns {
        assert!(line.contains(r"'\\A") && !line.contains("$'"), "a `$` takes a trailing newline: {line}");
    }
}
