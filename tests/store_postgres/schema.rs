//! The schema: comments, migrations, and what a server or a role may lack.

use std::time::Duration;

use oncebox::sqlx::postgres::PgConnection;
use oncebox::sqlx::{AssertSqlSafe, Connection, Executor, query_scalar};
use oncebox::store::postgres::PostgresStore;
use oncebox::store::{Base, Finding, Schema, SchemaState, Severity, StoreOptions};

use crate::postgres::{Server, with_database, with_path, with_user};

#[tokio::test]
async fn every_table_column_index_and_function_says_what_it_is_for() {
    with_database("every_table_column_index_and_function_says_what_it_is_for", |database| async move {
        let silent: Vec<String> = database
            .value(
                "select coalesce(array_agg(what order by what), '{}') from (
                   select c.oid::regclass::text as what from pg_class c
                    where c.relnamespace = 'oncebox'::regnamespace and c.relkind in ('r', 'p', 'v', 'S')
                      and obj_description(c.oid, 'pg_class') is null
                      and not exists (select 1 from pg_depend d where d.objid = c.oid and d.deptype = 'i')
                   union all
                   select c.oid::regclass::text || '.' || a.attname from pg_class c join pg_attribute a on a.attrelid = c.oid
                    where c.relnamespace = 'oncebox'::regnamespace and c.relkind in ('r', 'p', 'v') and a.attnum > 0 and not a.attisdropped
                      and not c.relispartition and col_description(c.oid, a.attnum) is null
                   union all
                   select c.oid::regclass::text from pg_class c
                    where c.relnamespace = 'oncebox'::regnamespace and c.relkind in ('i', 'I') and not c.relispartition
                      and coalesce(obj_description(c.oid, 'pg_class'), '') not like 'serves %'
                   union all
                   select p.oid::regprocedure::text from pg_proc p
                    where p.pronamespace = 'oncebox'::regnamespace and obj_description(p.oid, 'pg_proc') is null) silent",
            )
            .await;
        assert_eq!(silent, Vec::<String>::new());
    })
    .await;
}

/// Shown by: leaving out each condition of `oncebox.is_sound_request`, and of
/// `oncebox.refuse_unsound_request` before it.
#[tokio::test]
async fn a_record_whose_columns_contradict_each_other_is_refused_by_the_database() {
    let test = "a_record_whose_columns_contradict_each_other_is_refused_by_the_database";
    with_database(test, |database| async move {
        let columns = "key_digest, tenant, operation, key, principal, fingerprint, mode, state, operation_id";
        let row = |mode: &str, state: &str| {
            format!("sha256('k'), 't1', 'put', 'k', 'sha256:0', '1:sha256:0', '{mode}', '{state}', gen_random_uuid()")
        };
        let request = "oncebox.idempotency_request";
        let open = format!("insert into {request} ({columns}) values ({})", row("same_tx", "IN_PROGRESS"));
        let leased = format!(
            "insert into {request} ({columns}, owner, lease_until, lease_seconds) values ({}, gen_random_uuid(), now(), 1)",
            row("edge", "IN_PROGRESS")
        );
        let done = format!(
            "insert into {request} ({columns}, outcome_at, expires_at, answer_status, schema_version, body, body_expires_at, body_headers, \
             body_bytes, body_format, kept_bytes) values ({}, now(), now(), 201, 1, 'kept', now(), '', '', 0, 0)",
            row("same_tx", "COMPLETED")
        );
        let broken: [(&str, &[&str]); 3] = [
            (
                open.as_str(),
                &[
                    "key_digest = '\\x00'",
                    "epoch = 0",
                    "generation = 0",
                    "attempts = 0",
                    "mode = 'other'",
                    "mode = 'edge'",
                    "state = 'EXPIRED'",
                    "state = 'COMPLETED'",
                    "owner = gen_random_uuid()",
                    "owner = gen_random_uuid(), lease_until = now(), lease_seconds = 1",
                    "lease_until = now()",
                    "lease_seconds = 1",
                    "outcome_at = now(), expires_at = now()",
                    "expires_at = now()",
                    "error_code = 'X'",
                    "answer_status = 201, schema_version = 1, body = 'stream'",
                    "resource_kind = 'effect'",
                    "resource_location = '/effects/1'",
                    "body_expires_at = now()",
                ],
            ),
            (leased.as_str(), &["owner = null", "mode = 'phased'", "state = 'UNKNOWN_REQUIRES_RECOVERY'"]),
            (
                done.as_str(),
                &[
                    "outcome_at = null, expires_at = null",
                    "expires_at = outcome_at - interval '1 second'",
                    "answer_status = null",
                    "schema_version = null",
                    "body = null",
                    "answer_status = null, schema_version = null, body = null, body_expires_at = null, body_headers = null, \
                     body_bytes = null, body_format = null",
                    "body = null, body_expires_at = null, body_headers = null, body_bytes = null, body_format = null",
                    "body = 'lost', body_expires_at = null, body_headers = null, body_bytes = null, body_format = null",
                    "body = 'purged'",
                    "body = 'purged', body_expires_at = null",
                    "body = 'reference', body_expires_at = null, body_headers = null, body_bytes = null, body_format = null",
                    "body_expires_at = null",
                    "body_headers = null",
                    "body_bytes = null",
                    "body_format = null",
                    "body_headers = null, body_bytes = null, body_format = null, body_kid = 'k1'",
                    "kept_bytes = -1",
                    "mode = 'other'",
                    "state = 'EXPIRED'",
                    "state = 'UNKNOWN_REQUIRES_RECOVERY'",
                    "key_digest = '\\x00'",
                    "epoch = 0",
                    "generation = 0",
                    "attempts = 0",
                ],
            ),
        ];
        let mut connection = database.connection().await;
        for (sound, changes) in broken {
            connection.execute(AssertSqlSafe(sound.to_owned())).await.unwrap();
            for change in changes {
                let update = format!("update {request} set {change}");
                let error = connection.execute(AssertSqlSafe(update)).await.expect_err(change);
                let code = error.as_database_error().and_then(|error| error.code().map(std::borrow::Cow::into_owned));
                assert_eq!(code.as_deref(), Some("23514"), "{change}: {error}");
            }
            connection.execute(AssertSqlSafe(format!("delete from {request}"))).await.unwrap();
        }
        // What is let through at a lower price is sound: every column that may be null, and every
        // two of them.
        let values = [
            ("owner", "gen_random_uuid()"),
            ("lease_until", "now()"),
            ("lease_seconds", "1"),
            ("outcome_at", "now()"),
            ("expires_at", "now()"),
            ("error_code", "'X'"),
            ("answer_status", "201"),
            ("schema_version", "1"),
            ("body", "'kept'"),
            ("body_expires_at", "now()"),
            ("body_headers", "''::bytea"),
            ("body_bytes", "''::bytea"),
            ("body_format", "0"),
            ("body_kid", "'k1'"),
            ("kept_bytes", "0"),
            ("resource_kind", "'effect'"),
            ("resource_id", "'1'"),
            ("resource_location", "'/effects/1'"),
        ]
        .map(|(column, value)| format!("{column} = case when {column} is null then {value} end"));
        let ones = values.iter().cloned();
        let twos = (0..values.len()).flat_map(|one| {
            let values = &values;
            (0..one).map(move |two| format!("{}, {}", values[one], values[two]))
        });
        let changes: Vec<String> = ones.chain(twos).collect();
        let (mut sound, mut unsound) = (0, 0);
        for first in [&open, &done] {
            connection.execute(AssertSqlSafe(first.clone())).await.unwrap();
            for change in &changes {
                let update = format!("update {request} set {change}");
                let off = format!("alter table {request} disable trigger idempotency_request_sound");
                let told = format!("begin; {off}; {update}");
                connection.execute(AssertSqlSafe(told)).await.unwrap();
                let is_sound = format!("select oncebox.is_sound_request(r) from {request} r");
                let is_sound: bool = query_scalar(AssertSqlSafe(is_sound)).fetch_one(&mut connection).await.unwrap();
                connection.execute("rollback; begin").await.unwrap();
                let taken = connection.execute(AssertSqlSafe(update)).await.is_ok();
                connection.execute("rollback").await.unwrap();
                assert_eq!(taken, is_sound, "{change}");
                *if taken { &mut sound } else { &mut unsound } += 1;
            }
            connection.execute(AssertSqlSafe(format!("delete from {request}"))).await.unwrap();
        }
        assert!(sound > 3 && unsound > 300, "{sound} and {unsound}");
    })
    .await;
}

#[tokio::test]
async fn a_migration_that_was_changed_after_it_was_applied_is_refused() {
    with_database("a_migration_that_was_changed_after_it_was_applied_is_refused", |database| async move {
        database.run("update oncebox.migration set checksum = '\\x00' where version = 2").await;
        let error = database.store.migrate().await.unwrap_err().to_string();
        assert!(error.contains("migration 2 was applied with another text"), "{error}");
    })
    .await;
}

/// Shown to fail: with the server's error, "canceling statement due to lock timeout".
#[tokio::test]
async fn a_migrator_that_waits_too_long_for_another_one_says_so() {
    with_database("a_migrator_that_waits_too_long_for_another_one_says_so", |database| async move {
        let mut other = database.connection().await;
        other.execute(r"select pg_advisory_lock(x'6f6e6365626f7800'::bit(64)::bigint)").await.unwrap();
        // The wait ends five seconds after it.
        let handler_timeout = Duration::from_millis(100);
        let options = StoreOptions { handler_timeout, ..StoreOptions::new(database.url.clone()) };
        let store = PostgresStore::connect(&options).await.unwrap();
        let error = store.migrate().await.unwrap_err().to_string();
        assert!(error.contains("another process has been migrating this database"), "{error}");
        other.close().await.unwrap();
        assert!(store.migrate().await.unwrap().is_empty());
        store.close().await;
    })
    .await;
}

#[tokio::test]
async fn a_migrator_that_may_not_create_roles_is_told_what_to_run() {
    let test = "a_migrator_that_may_not_create_roles_is_told_what_to_run";
    // The role is one for a whole server: on a shared one another test has made it.
    let Some(server) = Server::start(test, "fsync = off").await else { return };
    let mut admin = PgConnection::connect(&server.url()).await.unwrap();
    admin.execute("create role migrator login password 'x'").await.unwrap();
    admin.execute("create database app owner migrator").await.unwrap();
    let url = with_user(&with_path(&server.url(), "app"), "migrator", "x");
    let store = PostgresStore::connect(&StoreOptions::new(url)).await.unwrap();
    let error = store.migrate().await.unwrap_err().to_string();
    assert!(error.contains("role oncebox_app is missing"), "{error}");
    assert_eq!(store.schema().await.unwrap(), SchemaState::Missing, "no half of it stands");
    admin.execute("create role oncebox_app nologin").await.unwrap();
    assert_eq!(store.migrate().await.unwrap().len(), store.applied().await.unwrap().len());
    let worst = store.check().await.unwrap().into_iter().max_by_key(|finding| finding.severity).unwrap();
    // The server runs without fsync.
    assert!(worst.severity < Severity::Refused, "{worst:?}");
    // As a member of the owner leaves it, that made a partition as itself.
    let ownership = async || {
        let findings = store.check().await.unwrap();
        findings.into_iter().find(|finding| finding.name == "ownership").unwrap()
    };
    assert_eq!(ownership().await.severity, Severity::Ok);
    let mut admin = PgConnection::connect(&with_path(&server.url(), "app")).await.unwrap();
    admin.execute("alter table oncebox.outbox_p1 owner to current_user").await.unwrap();
    let finding = ownership().await;
    assert!(finding.severity == Severity::Warning && finding.detail.contains("outbox_p1"), "{finding:?}");
    store.close().await;
}

/// The names of what the check refuses.
fn refused(findings: &[Finding]) -> Vec<&str> {
    let refused = findings.iter().filter(|finding| finding.severity == Severity::Refused);
    refused.map(|finding| finding.name.as_str()).collect()
}

#[tokio::test]
async fn row_security_on_the_outbox_is_refused() {
    with_database("row_security_on_the_outbox_is_refused", |database| async move {
        database.run("alter table oncebox.outbox enable row level security").await;
        let findings = database.store.check().await.unwrap();
        assert_eq!(refused(&findings), ["ownership"]);
        assert!(findings.iter().all(|finding| (finding.severity == Severity::Ok) == finding.remedy.is_none()));
    })
    .await;
}

/// A name on the path is printed without its schema. Shown to fail: with the path of the database
/// (the defaults of the outbox "were changed").
#[tokio::test]
async fn a_search_path_with_our_schema_is_no_reason_to_refuse() {
    with_database("a_search_path_with_our_schema_is_no_reason_to_refuse", |database| async move {
        database.run(&format!("alter database {} set search_path = oncebox, public", database.name)).await;
        let store = database.another_store().await;
        assert_eq!(refused(&store.check().await.unwrap()), Vec::<&str>::new());
        store.close().await;
    })
    .await;
}

/// Shown to fail by asking for the size of the table by its name: the check ended with an error of
/// the server, and nothing else was looked at.
#[tokio::test]
async fn a_default_partition_that_was_dropped_is_told() {
    with_database("a_default_partition_that_was_dropped_is_told", |database| async move {
        let partitions = async || {
            let findings = database.store.check().await.unwrap();
            findings.into_iter().find(|finding| finding.name == "partitions").unwrap().severity
        };
        assert_eq!(partitions().await, Severity::Ok);
        let in_default = "insert into oncebox.idempotency_body values ('', 1, now() + interval '99 days', '', '', 0)";
        database.run(in_default).await;
        assert_eq!(partitions().await, Severity::Warning, "bodies for whose end no range was made");
        database.run("drop table oncebox.idempotency_body_default").await;
        assert_eq!(partitions().await, Severity::Refused);
        database.run("drop table oncebox.outbox_default").await;
        let findings = database.store.check().await.unwrap();
        assert_eq!(refused(&findings), ["partitions"]);
    })
    .await;
}

#[tokio::test]
async fn partitions_of_the_inbox_are_made_ahead_and_take_the_ids_of_their_days() {
    let test = "partitions_of_the_inbox_are_made_ahead_and_take_the_ids_of_their_days";
    with_database(test, |database| async move {
        use oncebox::store::{ConsumerSpec, Inbox};
        let ranges = "select count(*) from pg_partition_tree('oncebox.inbox_timed') where isleaf";
        let before: i64 = database.value(ranges).await;
        database.run("update oncebox.setting set value = 12 where name = 'inbox_ranges_ahead'").await;
        let spec = ConsumerSpec { name: "c".into(), id_rule: "envelope".into(), accept: false };
        database.store.register(&spec).await.unwrap();
        assert!(database.value::<i64>(ranges).await > before);
        let mut tx = database.connection().await;
        let insert = "insert into oncebox.inbox_timed (message_id, content_hash, consumer_id) values ";
        for moment in ["now()", "now() + interval '2 days'", "now() + interval '9 days'"] {
            let row = format!("{insert} (oncebox.uuid_bound({moment}), gen_random_uuid(), 1)");
            tx.execute(AssertSqlSafe(row)).await.unwrap();
        }
        assert_eq!(database.value::<i64>("select count(*) from oncebox.inbox_timed_default").await, 0);
        tx.execute(AssertSqlSafe(format!("{insert} ('00000000-0000-7000-8000-000000000000', gen_random_uuid(), 1)")))
            .await
            .unwrap();
        assert_eq!(database.value::<i64>("select count(*) from oncebox.inbox_timed_default").await, 1);
        assert_eq!(database.value::<i64>("select count(*) from oncebox.inbox").await, 4);
    })
    .await;
}

/// Shown by leaving the advisory lock out: a consumer that started beside another ended with an
/// error of the catalogue.
#[tokio::test]
async fn consumers_that_start_at_once_make_the_partitions_of_the_inbox_together() {
    let test = "consumers_that_start_at_once_make_the_partitions_of_the_inbox_together";
    with_database(test, |database| async move {
        use oncebox::store::{ConsumerSpec, Inbox};
        let spec = ConsumerSpec { name: "c".into(), id_rule: "envelope".into(), accept: false };
        database.store.register(&spec).await.unwrap();
        let ranges = "select count(*) from pg_partition_tree('oncebox.inbox_timed') where isleaf";
        let before: i64 = database.value(ranges).await;
        for round in 0..20 {
            let ahead = 12 + 4 * round;
            database
                .run(&format!("update oncebox.setting set value = {ahead} where name = 'inbox_ranges_ahead'"))
                .await;
            let fresh = (0..6).map(|_| async {
                // A store that has not looked yet.
                let store = database.another_store().await;
                (store.register(&spec).await, store.close().await).0
            });
            for registered in futures_util::future::join_all(fresh).await {
                registered.unwrap();
            }
        }
        assert!(database.value::<i64>(ranges).await > before, "nobody made a partition");
    })
    .await;
}
