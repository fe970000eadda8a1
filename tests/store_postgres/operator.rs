//! What an operator is shown of this server, and what is said of repairs and partitions.

use std::time::Duration;

use oncebox::message::MessageId;
use oncebox::sqlx::postgres::PgConnection;
use oncebox::sqlx::{AssertSqlSafe, Connection, Executor, query_scalar};
use oncebox::store::postgres::PostgresStore;
use oncebox::store::{ActContext, Base, Keys, Operator, Schema, StoreOptions};
use tracing::Level;

use crate::bodies::drop_last;
use crate::observed::hear;
use crate::postgres::{Server, with_database, with_user};
use crate::proxy::{Failure, Proxy, When};
use crate::support::eventually;

/// Shown to fail: by leaving the prepared ones out; nobody was named.
#[tokio::test]
async fn a_prepared_transaction_that_others_wait_for_is_named() {
    with_database("a_prepared_transaction_that_others_wait_for_is_named", |database| async move {
        database.run("create table effect (n int); insert into effect values (1)").await;
        let gid = format!("left_{}", MessageId::new().uuid().simple());
        let prepare = format!("begin; update effect set n = 2; prepare transaction '{gid}'");
        database.run(&prepare).await;
        for waits in ["update effect set n = 3", "lock table effect"] {
            let mut waiter = database.connection().await;
            let waiting = tokio::spawn(async move { waiter.execute(AssertSqlSafe(format!("begin; {waits}"))).await });
            let shown = eventually("somebody waits", Duration::from_secs(30), || async {
                database.store.lock_waits(Duration::ZERO).await.unwrap().pop()
            })
            .await;
            assert_eq!(shown.holders, [format!("the prepared transaction `{gid}`")], "{waits}: {shown:?}");
            waiting.abort();
            eventually("nobody waits any more", Duration::from_secs(30), || async {
                let kill = "select pg_terminate_backend(pid) from pg_stat_activity
                    where datname = current_database() and wait_event_type = 'Lock'";
                database.run(kill).await;
                database.store.lock_waits(Duration::ZERO).await.unwrap().is_empty().then_some(())
            })
            .await;
        }
        database.run(&format!("rollback prepared '{gid}'")).await;
    })
    .await;
}

/// Shown by: the error of the ROLLBACK, that the connection was given up.
#[tokio::test]
async fn a_server_that_falls_silent_under_a_repair_or_a_new_partition_is_told() {
    let test = "a_server_that_falls_silent_under_a_repair_or_a_new_partition_is_told";
    with_database(test, |database| async move {
        database.run(&drop_last(2)).await;
        let proxy = Proxy::before(&database.url, "sslmode=disable");
        let answer_timeout = Some(Duration::from_secs(5));
        let options = StoreOptions { answer_timeout, ..StoreOptions::new(proxy.url.clone()) };
        let store = PostgresStore::connect(&options).await.unwrap();
        proxy.fail_at("begin", "lock table oncebox.outbox", 0, When::BeforeRequest, Failure::Silence);
        let context =
            ActContext { actor: "ann".into(), reason: "restored".into(), dry_run: false, redrive_age_max: None };
        let repair = store.mend(&context).await.unwrap_err().to_string();
        assert!(repair.contains("has said nothing for 5s"), "{repair}");
        proxy.fail_at("begin", "attach_body_range", 0, When::BeforeRequest, Failure::Silence);
        let partition = store.expire_bodies(1).await.unwrap_err().to_string();
        assert!(partition.contains("has said nothing for 5s"), "{partition}");
        store.close().await;
    })
    .await;
}

/// Shown by: a warning at each look.
#[tokio::test]
async fn a_role_that_may_make_no_partitions_is_told_once() {
    let (heard, _hearing) = hear();
    with_database("a_role_that_may_make_no_partitions_is_told_once", |database| async move {
        let role = format!("guest_{}", MessageId::new().uuid().simple());
        let made = format!(
            "create role {role} login password 'guest'; grant usage on schema oncebox to {role};
             grant all on all tables in schema oncebox to {role};
             grant execute on all functions in schema oncebox to {role}"
        );
        database.run(&made).await;
        database.run(&drop_last(2)).await;
        let store = PostgresStore::connect(&StoreOptions::new(with_user(&database.url, &role, "guest"))).await.unwrap();
        for _ in 0..3 {
            store.expire_bodies(1).await.unwrap();
        }
        let said: Vec<_> =
            heard.said().into_iter().filter(|said| format!("{:?}", said.fields).contains("partitions")).collect();
        assert!(said.len() >= 3, "{said:?}");
        assert_eq!(said.iter().filter(|said| said.level == Level::WARN).count(), 1, "{said:?}");
        store.close().await;
        database.run(&format!("drop owned by {role}; drop role {role}")).await;
    })
    .await;
}

/// The check counts the one standby, and not who reads logical changes beside it. A server whose
/// commits wait for it, but not those of applications, is told too. Shown to fail: by counting all
/// that `pg_stat_replication` shows; by asking for the setting of our own session.
pub(crate) async fn standbys_are_told(primary: &Server) {
    let mut reader = primary
        .command("pg_recvlogical")
        .args(["-d", &primary.url(), "--slot=cdc", "--plugin=pgoutput", "-o", "proto_version=1"])
        .args(["-o", "publication_names=cdc", "--create-slot", "--start", "--no-loop", "-f", "/dev/null"])
        .spawn()
        .unwrap();
    let mut admin = PgConnection::connect(&primary.url()).await.unwrap();
    let told = async |detail: &str| {
        eventually(detail, Duration::from_secs(60), || async {
            // A session that was there before has the setting that was reloaded.
            let store = PostgresStore::connect(&StoreOptions::new(primary.url())).await.unwrap();
            let findings = store.check().await.unwrap();
            store.close().await;
            let finding = findings.into_iter().find(|finding| finding.name == "standbys").unwrap();
            finding.detail.starts_with(detail).then_some(())
        })
        .await;
    };
    eventually("both read", Duration::from_secs(60), || async {
        let streaming = "select count(*) from pg_stat_replication where state = 'streaming'";
        let mut admin = PgConnection::connect(&primary.url()).await.unwrap();
        let streaming: i64 = query_scalar(streaming).fetch_one(&mut admin).await.unwrap();
        (streaming == 2).then_some(())
    })
    .await;
    told("1 connected, asynchronous").await;
    for (names, commit, detail) in [("walreceiver", "on", "synchronous"), ("walreceiver", "local", "1 connected")] {
        for (setting, value) in [("synchronous_standby_names", names), ("synchronous_commit", commit)] {
            let set = format!("alter system set {setting} = '{value}'");
            admin.execute(AssertSqlSafe(set)).await.unwrap();
        }
        admin.execute("select pg_reload_conf()").await.unwrap();
        told(detail).await;
    }
    admin.execute("alter system reset all").await.unwrap();
    admin.execute("select pg_reload_conf()").await.unwrap();
    reader.kill().unwrap();
    reader.wait().unwrap();
}
