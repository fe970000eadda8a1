//! What `check` says of servers set up in a way that breaks a promise. Each on a private server:
//! the shared one is not touched.

use oncebox::store::mysql::MySqlStore;
use oncebox::store::{ActContext, Base, Finding, Operator, Schema, Severity, StoreOptions};
use sqlx::Connection;

use crate::fixture::{Db, PrivateServer, execute};

fn find<'a>(findings: &'a [Finding], name: &str) -> &'a Finding {
    findings.iter().find(|finding| finding.name == name).unwrap_or_else(|| panic!("no finding `{name}`: {findings:?}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn r10_a_server_that_fits_is_refused_for_nothing() {
    let Some(db) = Db::new("r10_a_server_that_fits_is_refused_for_nothing").await else { return };
    let findings = db.store.check().await.unwrap();
    let refused: Vec<_> = findings.iter().filter(|finding| finding.severity == Severity::Refused).collect();
    assert!(refused.is_empty(), "{refused:?}");
    assert_eq!(find(&findings, "isolation").severity, Severity::Ok);
    assert_eq!(find(&findings, "sql_mode").severity, Severity::Ok);
    assert_eq!(find(&findings, "purge lag").severity, Severity::Ok);
}

#[tokio::test(flavor = "multi_thread")]
async fn r10_settings_that_break_the_cursor_are_refused_and_weak_commits_reported() {
    let test = "r10_settings_that_break_the_cursor_are_refused_and_weak_commits_reported";
    let settings = [
        "--log-bin=binlog",
        "--binlog-format=STATEMENT",
        "--auto-increment-increment=2",
        "--innodb-flush-log-at-trx-commit=2",
        "--sync-binlog=0",
        "--max-allowed-packet=1M",
        "--sql-mode=",
    ];
    let Some(server) = PrivateServer::start(test, &settings) else { return };
    let db = Db::on(&server.url().await).await;
    // Under STATEMENT nothing can be written at READ COMMITTED: the check comes first, and does not
    // need the schema.
    let findings = db.store.check().await.unwrap();
    for (name, severity) in [
        ("binary log", Severity::Refused),
        ("auto_increment", Severity::Refused),
        ("durability", Severity::Warning),
        ("binary log durability", Severity::Warning),
        ("max_allowed_packet", Severity::Warning),
        // The server is not strict, our sessions are.
        ("sql_mode", Severity::Ok),
    ] {
        let finding = find(&findings, name);
        assert_eq!(finding.severity, severity, "{finding:?}");
        assert_eq!(finding.remedy.is_some(), severity != Severity::Ok, "{finding:?}");
    }
}

/// Shown by: leaving the finding out; nothing was refused, and no program starts.
#[tokio::test(flavor = "multi_thread")]
async fn a_user_that_may_only_read_is_refused() {
    let test = "a_user_that_may_only_read_is_refused";
    let Some(server) = PrivateServer::start(test, &[]) else { return };
    let db = Db::on(&server.url().await).await;
    db.store.migrate().await.unwrap();
    let mut admin = db.app().await;
    execute(&mut admin, "create user reader@localhost").await;
    execute(&mut admin, "grant select on *.* to reader@localhost").await;
    let url = db.url.replacen("root@", "reader@", 1);
    let reader = MySqlStore::connect(&StoreOptions::new(url)).await.unwrap();
    let findings = reader.check().await.unwrap();
    let rights = find(&findings, "rights");
    assert!(rights.severity == Severity::Refused && rights.detail.contains("UPDATE command denied"), "{rights:?}");
    assert_eq!(find(&db.store.check().await.unwrap(), "rights").severity, Severity::Ok);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_counter_behind_a_diverted_row_and_a_table_without_transactions_are_refused() {
    let test = "a_counter_behind_a_diverted_row_and_a_table_without_transactions_are_refused";
    let Some(db) = Db::new(test).await else { return };
    let mut app = db.app().await;
    execute(
        &mut app,
        "insert into oncebox_outbox_dead (position, bucket, message_id, topic, kind, payload, content_type, created_at, state, cause, \
           reason, holds, attempts, history, diverted_at) \
         values (7, 0, unhex(repeat('00', 16)), 't', 'k', '', 'text/plain', utc_timestamp(6), 'dead', 'refused', 'too large', 0, 1, \
           '[]', utc_timestamp(6))",
    )
    .await;
    let finding = db.store.check().await.unwrap();
    let finding = find(&finding, "sequence behind cursor");
    assert_eq!(finding.severity, Severity::Refused);
    assert_eq!(finding.remedy.as_deref(), Some("run `oncebox doctor --fix`"));
    let context =
        |dry_run| ActContext { actor: "ann".into(), reason: "restored".into(), dry_run, redrive_age_max: None };
    assert_eq!(db.store.mend(&context(true)).await.unwrap().len(), 1);
    assert_eq!(find(&db.store.check().await.unwrap(), "sequence behind cursor").severity, Severity::Refused);
    db.store.mend(&context(false)).await.unwrap();
    assert!(db.store.mend(&context(false)).await.unwrap().is_empty(), "it is mended");
    execute(&mut app, "alter table oncebox_audit engine = MyISAM").await;
    let findings = db.store.check().await.unwrap();
    assert_eq!(find(&findings, "sequence behind cursor").severity, Severity::Ok);
    assert_eq!(find(&findings, "storage engine").severity, Severity::Refused);
    assert!(findings.iter().all(|finding| finding.name != "tables without transactions"));
    execute(&mut app, "create table plain (x int) engine = Aria").await;
    let findings = db.store.check().await.unwrap();
    let finding = find(&findings, "tables without transactions");
    assert!(finding.severity == Severity::Warning && finding.detail.ends_with(": plain"), "{finding:?}");
}

/// As a database is restored from a dump that was made without `--routines`. Shown to fail by
/// making only the function again: `doctor` said that the procedure was there, and nothing made it.
#[tokio::test(flavor = "multi_thread")]
async fn routines_that_a_dump_left_out_are_told_and_made_again() {
    let Some(db) = Db::new("routines_that_a_dump_left_out_are_told_and_made_again").await else { return };
    let whole = find(&db.store.check().await.unwrap(), "SQL door").clone();
    let mut app = db.app().await;
    execute(&mut app, "drop procedure oncebox_enqueue_p; drop function if exists oncebox_enqueue").await;
    let findings = db.store.check().await.unwrap();
    let door = find(&findings, "SQL door");
    assert!(door.severity == Severity::Warning && door.detail.contains("no service can enqueue by SQL"), "{door:?}");
    assert!(db.store.migrate().await.unwrap().is_empty());
    assert_eq!(find(&db.store.check().await.unwrap(), "SQL door"), &whole);
    execute(&mut app, "call oncebox_enqueue_p('t', null, 'k', '', null, null, null, @id)").await;
    assert_eq!(db.count("oncebox_outbox").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migrator_without_super_gets_the_schema_under_binary_logging_and_the_function_later() {
    let test = "a_migrator_without_super_gets_the_schema_under_binary_logging_and_the_function_later";
    let Some(server) = PrivateServer::start(test, &["--log-bin=binlog", "--binlog-format=ROW"]) else { return };
    let root = server.url().await;
    let db = Db::on(&root).await;
    let mut admin = sqlx::MySqlConnection::connect(&root).await.unwrap();
    let name = url::Url::parse(&db.url).unwrap().path().trim_matches('/').to_owned();
    execute(
        &mut admin,
        &format!("create user app@localhost identified by 'x'; grant all privileges on {name}.* to app@localhost"),
    )
    .await;
    let options = oncebox::store::StoreOptions::new(db.url.replace("root@", "app:x@"));
    let store = oncebox::store::mysql::MySqlStore::connect(&options).await.unwrap();
    assert_eq!(store.migrate().await.unwrap(), [1, 2, 3, 4]);
    let findings = store.check().await.unwrap();
    assert_eq!(find(&findings, "SQL door").severity, Severity::Warning);
    assert!(findings.iter().all(|finding| finding.severity != Severity::Refused), "{findings:?}");

    let mut app = sqlx::MySqlConnection::connect(&options.url).await.unwrap();
    execute(&mut app, "call oncebox_enqueue_p('t', null, 'k', 'p', null, null, null, @id)").await;
    execute(&mut admin, "set global log_bin_trust_function_creators = 1").await;
    assert!(store.migrate().await.unwrap().is_empty());
    assert_eq!(find(&store.check().await.unwrap(), "SQL door").severity, Severity::Ok);
    let id: String = sqlx::query_scalar("select oncebox_enqueue('t', null, 'k', 'p', null, null, null)")
        .fetch_one(&mut app)
        .await
        .unwrap();
    assert_eq!(uuid::Uuid::parse_str(&id).unwrap().get_version_num(), 7);
    assert_eq!(db.count("oncebox_outbox").await, 2);
    store.close().await;
}
