//! Connections that die, are frozen, or are not what they should be.

use std::time::Duration;

use oncebox::sqlx::{self, Connection, Executor, PgConnection};
use oncebox::store::postgres::PostgresStore;
use oncebox::store::{
    Base, Inbox, InboxEntry, LeaseAnswer, LeaseRequest, LeasedMessage, Outbox, Proof, RowLease, Schema, StoreOptions,
    Undone, Waiting,
};
use oncebox::{StoreError, message::MessageId};

use crate::another_name::under_another_name;
use crate::postgres::{Server, on_server, with_database, with_path};
use crate::proxy::Proxy;
use crate::support::{eventually, service};
use crate::turns::{consumer_spec, message};

fn entry() -> InboxEntry {
    InboxEntry { id: MessageId::new(), hash: [1; 16] }
}

const KILL_OTHERS: &str = "select pg_terminate_backend(pid) from pg_stat_activity
  where datname = current_database() and pid <> pg_backend_pid() and application_name = 'oncebox'";

/// Shown by beginning without a second try: the first transaction after the loss fails.
#[tokio::test]
async fn connections_that_died_in_the_pool_cost_no_transaction() {
    with_database("connections_that_died_in_the_pool_cost_no_transaction", |database| async move {
        let consumer = database.store.register(&consumer_spec()).await.unwrap();
        let mut warm = Vec::new();
        for _ in 0..4 {
            warm.push(database.store.begin(consumer).await.unwrap());
        }
        for tx in warm {
            tx.rollback().await.unwrap();
        }
        let mut admin = database.connection().await;
        assert!(admin.fetch_all(KILL_OTHERS).await.unwrap().len() >= 4);
        let mut tx = database.store.begin(consumer).await.unwrap();
        assert_eq!(tx.admit(&[entry()]).await.unwrap(), [None]);
        tx.commit().await.unwrap();
    })
    .await;
}

/// The URL of a database for another role.
fn url_of(role: &str, password: &str, database: &str) -> url::Url {
    let mut url = url::Url::parse(database).unwrap();
    url.set_username(role).unwrap();
    url.set_password(Some(password)).unwrap();
    url
}

/// The server gives two connections, both are busy, and a third transaction waits for one of its
/// own. Shown by sqlx's acquire alone: it looks for a resting connection once, and then only asks
/// the server for a new one, for 30 s.
#[tokio::test]
async fn who_waits_for_a_connection_takes_one_that_came_back() {
    with_database("who_waits_for_a_connection_takes_one_that_came_back", |database| async move {
        let consumer = database.store.register(&consumer_spec()).await.unwrap();
        let role = format!("few_{}", MessageId::new().uuid().simple());
        let made = format!(
            "create role {role} login password 'few' connection limit 2; grant usage on schema oncebox to {role};
             grant all on all tables in schema oncebox to {role};
             grant execute on all functions in schema oncebox to {role}"
        );
        database.run(&made).await;
        let store = PostgresStore::connect(&StoreOptions::new(url_of(&role, "few", &database.url))).await.unwrap();
        let busy = [store.begin(consumer).await.unwrap(), store.begin(consumer).await.unwrap()];
        let waiting = tokio::spawn({
            let store = store.clone();
            async move { store.begin(consumer).await }
        });
        // It has found none that rests, and asks the server.
        let third = || async { (store.pool().size() == 3).then_some(()) };
        eventually("a third connection is asked for", Duration::from_secs(20), third).await;
        for tx in busy {
            tx.rollback().await.unwrap();
        }
        let third = tokio::time::timeout(Duration::from_secs(10), waiting).await.expect("within ten seconds");
        third.unwrap().unwrap().rollback().await.unwrap();
        store.close().await;
        database.run(&format!("drop owned by {role}; drop role {role}")).await;
    })
    .await;
}

/// Shown by the words of the server alone.
#[tokio::test]
async fn a_missing_right_and_a_missing_database_are_said_with_what_to_do() {
    with_database("a_missing_right_and_a_missing_database_are_said_with_what_to_do", |database| async move {
        let role = format!("none_{}", MessageId::new().uuid().simple());
        database.run(&format!("create role {role} login password 'none'")).await;
        let mut url = url_of(&role, "none", &database.url);
        let store = PostgresStore::connect(&StoreOptions::new(url.clone())).await.unwrap();
        let denied = store.register(&consumer_spec()).await.unwrap_err().to_string();
        assert!(denied.contains("permission denied") && denied.contains("production.md, Rights"), "{denied}");
        store.close().await;
        url.set_path(&role);
        let absent = PostgresStore::connect(&StoreOptions::new(url)).await.unwrap_err().to_string();
        assert!(absent.contains(&role) && absent.ends_with("create this database first"), "{absent}");
        database.run(&format!("drop role {role}")).await;
    })
    .await;
}

/// Such a task can spin without end (`bounded::rest`). Shown by: `max_lifetime` as sqlx has it.
#[tokio::test]
async fn the_pool_starts_no_task_of_sqlx() {
    with_database("the_pool_starts_no_task_of_sqlx", |database| async move {
        let options = database.store.pool().options();
        let (lifetime, idle) = (options.get_max_lifetime(), options.get_idle_timeout());
        assert_eq!((lifetime, idle, options.get_min_connections()), (None, None, 0));
    })
    .await;
}

/// A former primary keeps the connections of the pool. Shown by hearing only connections that go
/// back to the pool: the relay takes its own out of it, and met the old ones one after the other.
#[tokio::test]
async fn g10_a_relay_meets_a_server_that_takes_no_writes_once() {
    with_database("g10_a_relay_meets_a_server_that_takes_no_writes_once", |database| async move {
        let pool = database.store.pool();
        let mut former = Vec::new();
        for _ in 0..3 {
            let mut connection = pool.acquire().await.unwrap();
            connection.execute("set default_transaction_read_only = on").await.unwrap();
            former.push(connection);
        }
        drop(former);
        let back = || async { (pool.num_idle() == 3).then_some(()) };
        eventually("they are back in the pool", Duration::from_secs(30), back).await;
        let request =
            LeaseRequest { shard: 0, owner: "relay".into(), length: Duration::from_secs(60), read_bytes: 4 << 20 };
        let refused = database.store.open(&request).await;
        assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
        let LeaseAnswer::Taken(session) = database.store.open(&request).await.unwrap() else { panic!("it is free") };
        session.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn g12_a_connection_that_is_lost_during_commit_leaves_the_outcome_unknown() {
    with_database("g12_a_connection_that_is_lost_during_commit_leaves_the_outcome_unknown", |database| async move {
        let consumer = database.store.register(&consumer_spec()).await.unwrap();
        let mut tx = database.store.begin(consumer).await.unwrap();
        tx.admit(&[entry()]).await.unwrap();
        assert_eq!(tx.prove().await.unwrap(), Proof::Same);
        database.connection().await.execute(KILL_OTHERS).await.unwrap();
        let outcome = tx.commit().await;
        assert!(matches!(outcome, Err(StoreError::CommitUnknown(_))), "{outcome:?}");
    })
    .await;
}

/// R28: without the server's own timeout the row locks of a frozen process would stop its key for
/// ever.
#[tokio::test]
async fn r28_a_process_that_froze_inside_a_transaction_is_ended_by_the_server() {
    with_database("r28_a_process_that_froze_inside_a_transaction_is_ended_by_the_server", |database| async move {
        let settings: Vec<String> = {
            let rows = database
                .store
                .pool()
                .fetch_all(
                    "select current_setting('idle_in_transaction_session_timeout') union all select current_setting('lock_timeout')
                     union all select current_setting('synchronous_commit') union all select current_setting('default_transaction_isolation')",
                )
                .await
                .unwrap();
            rows.iter().map(|row| sqlx::Row::get(row, 0)).collect()
        };
        assert_eq!(settings, ["35s", "35s", "on", "read committed"]);
        let options = StoreOptions { handler_timeout: Duration::ZERO, ..StoreOptions::new(database.url.clone()) };
        let impatient = PostgresStore::connect(&options).await.unwrap();
        let consumer = impatient.register(&consumer_spec()).await.unwrap();
        let one = entry();
        let mut frozen = impatient.begin(consumer).await.unwrap();
        frozen.admit(&[one]).await.unwrap();
        // The same message elsewhere waits for the frozen transaction, each time as long as a
        // handler's statement may, and goes on when the server ends it.
        eventually("the server ended it", Duration::from_secs(60), || async {
            let mut other = database.store.begin(consumer).await.unwrap();
            match other.admit(&[one]).await {
                Ok(admission) => assert_eq!(admission, [None]),
                Err(busy) => {
                    assert!(matches!(busy, StoreError::Busy(_)), "{busy}");
                    other.rollback().await.unwrap();
                    return None;
                }
            }
            other.commit().await.unwrap();
            Some(())
        })
        .await;
        assert!(frozen.commit().await.is_err());
        impatient.close().await;
    })
    .await;
}

/// A program that is killed in the middle of a long statement leaves no server process behind that
/// holds its locks.
#[tokio::test]
async fn a_statement_of_a_client_that_is_gone_is_ended_by_the_server() {
    with_database("a_statement_of_a_client_that_is_gone_is_ended_by_the_server", |database| async move {
        let mut connection = database.store.pool().acquire().await.unwrap();
        let sleeps = connection.execute("select pg_sleep(300)");
        assert!(tokio::time::timeout(Duration::from_millis(500), sleeps).await.is_err());
        let running = "select count(*) from pg_stat_activity where datname = current_database() and query = 'select pg_sleep(300)'";
        eventually("the server runs the statement", Duration::from_secs(60), || async {
            (database.value::<i64>(running).await == 1).then_some(())
        })
        .await;
        // Its socket is closed without a word.
        drop(connection.detach());
        eventually("the server ended the statement", Duration::from_secs(60), || async {
            (database.value::<i64>(running).await == 0).then_some(())
        })
        .await;
    })
    .await;
}

/// What one handler sets of its session is not there for the next one.
#[tokio::test]
async fn the_session_that_a_handler_changed_is_set_back() {
    with_database("the_session_that_a_handler_changed_is_set_back", |database| async move {
        let options = StoreOptions { connections_max: 1, ..StoreOptions::new(database.url.clone()) };
        let store = PostgresStore::connect(&options).await.unwrap();
        let consumer = store.register(&consumer_spec()).await.unwrap();
        let state =
            "select current_setting('search_path') || ' ' || current_setting('lock_timeout') || ' ' || current_user
            || ' ' || (select count(*) from pg_class where relname = 'left_over')::text
            || ' ' || (select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid())::text
            || ' ' || pg_backend_pid()::text";
        let seen = || async { sqlx::query_scalar::<_, String>(state).fetch_one(store.pool()).await.unwrap() };
        let before = seen().await;
        for commit in [true, false] {
            let mut tx = store.begin(consumer).await.unwrap();
            tx.admit(&[entry()]).await.unwrap();
            let changes = "set search_path = 'tenant'; set lock_timeout = 1; set role pg_monitor;
                create temporary table left_over (n int); select pg_advisory_lock(7)";
            tx.connection::<PgConnection>().unwrap().execute(changes).await.unwrap();
            if commit {
                tx.connection::<PgConnection>().unwrap().execute("reset role").await.unwrap();
                tx.commit().await.unwrap();
            } else {
                tx.undo().await.unwrap();
                drop(tx);
            }
            assert_eq!(seen().await, before, "committed: {commit}");
        }
        store.close().await;
    })
    .await;
}

/// Shown by leaving its transaction open: the connection is closed with it.
#[tokio::test]
async fn a_lease_that_is_lost_costs_no_connection() {
    with_database("a_lease_that_is_lost_costs_no_connection", |database| async move {
        let options = StoreOptions { connections_max: 1, ..StoreOptions::new(database.url.clone()) };
        let store = PostgresStore::connect(&options).await.unwrap();
        let lease = RowLease::new(Duration::from_secs(1)).token;
        let message = message("k", MessageId::new().uuid());
        let lost = LeasedMessage { sequence: 1, lease, tries: 0, suspect: false, message };
        let server =
            || async { sqlx::query_scalar::<_, i32>("select pg_backend_pid()").fetch_one(store.pool()).await.unwrap() };
        let before = server().await;
        assert!(!store.bury(&lost, "attempts", "no", true).await.unwrap());
        assert_eq!(server().await, before);
        store.close().await;
    })
    .await;
}

/// R28. Shown by giving back to the pool a connection whose `begin` was dropped: later writes on it
/// are lost.
#[tokio::test]
async fn r28_a_begin_that_is_dropped_at_any_moment_loses_no_later_write() {
    with_database("r28_a_begin_that_is_dropped_at_any_moment_loses_no_later_write", |database| async move {
        let options = StoreOptions { connections_max: 1, ..StoreOptions::new(database.url.clone()) };
        let store = PostgresStore::connect(&options).await.unwrap();
        database.run("create table written (n int)").await;
        let consumer = store.register(&consumer_spec()).await.unwrap();
        for n in 0..200_u64 {
            let _ = tokio::time::timeout(Duration::from_micros(10 * n), store.begin(consumer)).await;
            sqlx::query("insert into written values ($1)")
                .bind(i32::try_from(n).unwrap())
                .execute(store.pool())
                .await
                .unwrap();
        }
        assert_eq!(database.value::<i64>("select count(*) from written").await, 200);
        store.close().await;
    })
    .await;
}

/// What a batch asks of the server between BEGIN and COMMIT, beside its handler: the admission with
/// what stands in its way, and the proof.
#[tokio::test]
async fn a_batch_takes_two_round_trips_beside_its_handler() {
    with_database("a_batch_takes_two_round_trips_beside_its_handler", |database| async move {
        let proxy = Proxy::before(&database.url, "sslmode=disable");
        let options = StoreOptions { connections_max: 1, ..StoreOptions::new(proxy.url.clone()) };
        let store = PostgresStore::connect(&options).await.unwrap();
        let consumer = store.register(&consumer_spec()).await.unwrap();
        // The first batch of a connection prepares its statements.
        for trips in [4, 2] {
            let mut tx = store.begin(consumer).await.unwrap();
            let before = proxy.requests();
            let (admission, standing) = tx.admit_and_look(&[entry(), entry()], &[[7; 16]]).await.unwrap();
            assert_eq!((admission.as_slice(), standing.unwrap().blocked.len()), ([None, None].as_slice(), 0));
            assert!(tx.connection::<PgConnection>().is_ok(), "as for a handler");
            assert_eq!(tx.prove().await.unwrap(), Proof::Same);
            assert_eq!(proxy.requests() - before, trips);
            tx.commit().await.unwrap();
        }
        store.close().await;
    })
    .await;
}

/// R23: sqlx answers Ok to a commit that the server turned into a rollback.
#[tokio::test]
async fn r23_only_the_transaction_that_admitted_the_message_is_proven() {
    with_database("r23_only_the_transaction_that_admitted_the_message_is_proven", |database| async move {
        database.run("create table effect (n int primary key)").await;
        let consumer = database.store.register(&consumer_spec()).await.unwrap();
        for (handler, proof) in [
            ("insert into effect values (1)", Proof::Same),
            ("savepoint s; insert into effect values (2); rollback to savepoint s", Proof::Same),
            ("savepoint s; insert into effect values (3); release savepoint s", Proof::Same),
            ("insert into effect values (1)", Proof::Aborted),
            ("delete from oncebox.inbox_timed", Proof::Aborted),
            ("truncate oncebox.inbox_timed", Proof::Aborted),
            ("update oncebox.inbox_timed set message_id = oncebox.uuid_v7()", Proof::Aborted),
            ("savepoint s; delete from oncebox.inbox_timed; rollback to savepoint s", Proof::Same),
            ("set track_counts = off; delete from oncebox.inbox_timed", Proof::Aborted),
            ("insert into effect values (4); commit", Proof::Ended),
            ("rollback; insert into effect values (5)", Proof::Ended),
            ("insert into effect values (6); commit; begin; insert into effect values (7)", Proof::Ended),
            ("rollback; begin; insert into effect values (8)", Proof::Ended),
            ("commit and chain; insert into effect values (9)", Proof::Ended),
        ] {
            let mut tx = database.store.begin(consumer).await.unwrap();
            assert_eq!(tx.admit(&[entry()]).await.unwrap(), [None]);
            let _ = sqlx::raw_sql(handler).execute(tx.connection::<PgConnection>().unwrap()).await;
            assert_eq!(tx.prove().await.unwrap(), proof, "{handler}");
            match proof {
                Proof::Same => tx.commit().await.unwrap(),
                _ => tx.rollback().await.unwrap(),
            }
        }
    })
    .await;
}

/// What a guard would find that looks up its names by the path of the handler.
const ASTRAY: &str = "create schema astray;
    create function astray.pg_current_xact_id() returns xid8 language sql as $$ select '7'::xid8 $$;
    create function astray.current_setting(text) returns text language sql as $$ select '' $$;
    create function astray.current_setting(text, boolean) returns text language sql as $$ select '' $$";

/// A process that dies behind the COMMIT of its handler loses nothing: what comes again is new.
/// Without the guard the inbox rows stand, so it is a duplicate.
#[tokio::test]
async fn r23_a_commit_of_the_handler_is_refused_and_nothing_of_it_stays() {
    with_database("r23_a_commit_of_the_handler_is_refused_and_nothing_of_it_stays", |database| async move {
        database.run(ASTRAY).await;
        database.run("create table effect (n int)").await;
        let consumer = database.store.register(&consumer_spec()).await.unwrap();
        for commit in [
            "commit",
            "end",
            "commit and chain",
            "commit; begin; insert into effect values (2)",
            "prepare transaction 'prepared'",
            "savepoint s; commit",
            "set search_path = astray, pg_catalog; commit",
            "set role pg_monitor; commit",
            "set session_replication_role = replica; commit",
        ] {
            let ours = [entry(), entry()];
            let mut tx = database.store.begin(consumer).await.unwrap();
            assert_eq!(tx.admit(&ours).await.unwrap(), [None, None]);
            let handler = format!("insert into effect values (1); {commit}");
            let ended =
                sqlx::raw_sql(sqlx::AssertSqlSafe(handler)).execute(tx.connection::<PgConnection>().unwrap()).await;
            let code = ended.unwrap_err().as_database_error().and_then(|error| error.code()).unwrap().into_owned();
            let expected = if commit.starts_with("prepare") { "0A000" } else { "2D000" };
            assert_eq!(code, expected, "{commit}");
            drop(tx);
            let mut again = database.store.begin(consumer).await.unwrap();
            assert_eq!(again.admit(&ours).await.unwrap(), [None, None], "{commit}");
            again.rollback().await.unwrap();
            assert_eq!(database.value::<i64>("select count(*) from effect").await, 0, "{commit}");
        }
    })
    .await;
}

/// The guard is in no way of a handler that leaves the end of its transaction to the consumer.
#[tokio::test]
async fn r23_the_guard_against_a_commit_fails_no_good_handler() {
    with_database("r23_the_guard_against_a_commit_fails_no_good_handler", |database| async move {
        database.run(ASTRAY).await;
        database.run("create table effect (n int)").await;
        let consumer = database.store.register(&consumer_spec()).await.unwrap();
        for handler in [
            "set constraints all immediate",
            "savepoint s; insert into effect values (1); release savepoint s",
            "savepoint s",
            "truncate effect",
            "alter table effect add column m int",
            "begin",
            "declare mine cursor with hold for select n from effect; fetch mine; close mine",
            "set search_path = astray, pg_catalog",
            "close all",
        ] {
            let ours = entry();
            let mut tx = database.store.begin(consumer).await.unwrap();
            tx.admit(&[ours]).await.unwrap();
            sqlx::raw_sql(handler).execute(tx.connection::<PgConnection>().unwrap()).await.unwrap();
            assert_eq!(tx.prove().await.unwrap(), Proof::Same, "{handler}");
            tx.commit().await.unwrap();
            assert_eq!(database.store.known(consumer, &[ours.id]).await.unwrap().len(), 1, "{handler}");
        }
    })
    .await;
}

/// Shown to fail: it stayed off, and a crash of the server took back what was acknowledged.
#[tokio::test]
async fn g4_a_handler_cannot_make_its_commit_less_durable() {
    with_database("g4_a_handler_cannot_make_its_commit_less_durable", |database| async move {
        let consumer = database.store.register(&consumer_spec()).await.unwrap();
        for (handler, stands) in [
            ("set local synchronous_commit = off", "on"),
            ("set local synchronous_commit = local", "on"),
            ("set synchronous_commit = off", "on"),
            ("set local synchronous_commit = remote_apply", "remote_apply"),
        ] {
            let mut tx = database.store.begin(consumer).await.unwrap();
            tx.admit(&[entry()]).await.unwrap();
            sqlx::raw_sql(handler).execute(tx.connection::<PgConnection>().unwrap()).await.unwrap();
            assert_eq!(tx.prove().await.unwrap(), Proof::Same);
            let set: String = sqlx::query_scalar("show synchronous_commit")
                .fetch_one(tx.connection::<PgConnection>().unwrap())
                .await
                .unwrap();
            assert_eq!(set, stands, "{handler}");
            tx.commit().await.unwrap();
        }
    })
    .await;
}

/// sqlx prefers TLS and verifies nothing unless it is told to.
#[tokio::test]
async fn s1_another_authority_and_another_name_are_refused() {
    let test = "s1_another_authority_and_another_name_are_refused";
    let (Some(url), Some(other_ca)) =
        (service(test, "ONCEBOX_TEST_POSTGRES_TLS"), service(test, "ONCEBOX_TEST_OTHER_CA"))
    else {
        return;
    };
    let plain = url.split('?').next().unwrap().to_owned();
    let good = url::Url::parse(&url).unwrap();
    let ca = good.query_pairs().find(|(name, _)| name == "sslrootcert").unwrap().1.into_owned();
    let connects = async |url: String, ca: &str| {
        let options = StoreOptions { ca_file: Some(ca.into()), ..StoreOptions::new(url) };
        let store = PostgresStore::connect(&options).await?;
        let outcome = store.pool().execute("select 1").await.map(drop);
        store.close().await;
        outcome.map_err(StoreError::from)
    };
    let refused = async |url: String, ca: &str| {
        let error = connects(url, ca).await.unwrap_err().to_string();
        assert!(error.contains("certificate"), "{error}");
    };
    connects(format!("{plain}?sslmode=verify-full"), &ca).await.unwrap();
    refused(format!("{plain}?sslmode=verify-full"), &other_ca).await;
    let renamed = under_another_name(&plain).await;
    connects(format!("{renamed}?sslmode=verify-ca"), &ca).await.unwrap();
    refused(format!("{renamed}?sslmode=verify-full"), &ca).await;
}

/// A primary that dies, a standby that is promoted, and the same store on both. Shown to fail: with
/// the standby taken at the start; with nobody looking for another host.
#[tokio::test]
async fn of_several_hosts_the_primary_is_used_also_after_a_failover() {
    let test = "of_several_hosts_the_primary_is_used_also_after_a_failover";
    let Some(mut primary) = Server::start(test, "wal_level = logical").await else { return };
    let standby = primary.standby().await;
    let address = |server: &Server| server.url().split(['@', '/']).nth(3).unwrap().to_owned();
    let (first, second) = (address(&standby), address(&primary));
    let url = format!("postgres://postgres@127.0.0.1:1,{first},{second}/postgres");
    let store = PostgresStore::connect(&StoreOptions::new(url)).await.unwrap();
    let port = async || -> sqlx::Result<String> {
        sqlx::query_scalar("select current_setting('port')").fetch_one(store.pool()).await
    };
    assert_eq!(port().await.unwrap(), second.rsplit_once(':').unwrap().1);
    store.migrate().await.unwrap();
    crate::operator::standbys_are_told(&primary).await;
    primary.kill();
    let mut there = PgConnection::connect(&standby.url()).await.unwrap();
    let promoted: bool = sqlx::query_scalar("select pg_promote()").fetch_one(&mut there).await.unwrap();
    assert!(promoted);
    eventually("the promoted one is used", Duration::from_secs(60), || async {
        let port = port().await.ok()?;
        (port == first.rsplit_once(':').unwrap().1).then_some(())
    })
    .await;
    let mut tx = store.pool().begin().await.unwrap();
    oncebox::store::enqueue(&mut *tx, oncebox::NewMessage::text("t", "k", "x")).await.unwrap();
    tx.commit().await.unwrap();
    // The old primary comes back as what it was, and stands first in this URL.
    // The one that works is kept.
    let url = format!("postgres://postgres@{second},{first}/postgres");
    let kept = PostgresStore::connect(&StoreOptions::new(url)).await.unwrap();
    primary.run().await;
    let mut looks = Vec::new();
    for _ in 0..20 {
        // Each look takes a connection of its own.
        let mut connection = kept.pool().acquire().await.unwrap();
        let port: String =
            sqlx::query_scalar("select current_setting('port')").fetch_one(&mut *connection).await.unwrap();
        assert_eq!(port, first.rsplit_once(':').unwrap().1);
        looks.push(connection.detach());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    kept.close().await;
    store.close().await;
}

/// A pooler that shares servers between sessions would break leases, fences and prepared
/// statements. Here is none, and the check takes nothing for one.
#[tokio::test]
async fn a_server_without_a_pooler_is_not_refused_as_one() {
    let Some(server) = service("a_server_without_a_pooler_is_not_refused_as_one", "ONCEBOX_TEST_POSTGRES") else {
        return;
    };
    on_server(&server, |database| async move {
        use oncebox::store::{Schema, Severity};
        let findings = database.store.check().await.unwrap();
        let pooler = findings.iter().find(|finding| finding.name == "pooler").unwrap();
        assert_eq!(pooler.severity, Severity::Ok);
        let mut reader = PgConnection::connect(&with_path(&database.url, &database.name)).await.unwrap();
        reader.ping().await.unwrap();
        eventually("the check's own connections are gone", Duration::from_secs(60), || async {
            let left: i64 = database
                .value("select count(*) from pg_stat_activity where datname = current_database() and application_name = 'oncebox' and pid <> pg_backend_pid()")
                .await;
            (left <= 1).then_some(())
        })
        .await;
    })
    .await;
}

/// What a crash took back, and whose id the server gives to others that commit under it, was not
/// committed. Shown to fail by asking `pg_xact_status` alone: an id that is given again was
/// `Committed`, and one that is not given yet an error that kept a lane for ever.
#[tokio::test]
async fn a_transaction_whose_id_a_crash_gave_to_another_was_not_committed() {
    let test = "a_transaction_whose_id_a_crash_gave_to_another_was_not_committed";
    // What is not on disk is lost by a kill: no commit waits for it, and nobody writes it in the
    // background.
    let lazy = "synchronous_commit = off\nwal_writer_delay = 10s\nwal_writer_flush_after = 1GB\nautovacuum = off";
    let Some(mut server) = Server::start(test, lazy).await else { return };
    let store = PostgresStore::connect(&StoreOptions::new(server.url())).await.unwrap();
    store.migrate().await.unwrap();
    let consumer = store.register(&consumer_spec()).await.unwrap();
    let next_id = async |server: &Server| -> i64 {
        let mut connection = PgConnection::connect(&server.url()).await.unwrap();
        let next = "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint";
        sqlx::query_scalar(next).fetch_one(&mut connection).await.unwrap()
    };
    for given_again in [false, true] {
        let mut spent = 0;
        let (mut tx, ours) = loop {
            // Others' transactions that are lost too, so that ids are taken back.
            let mut other = PgConnection::connect(&server.url()).await.unwrap();
            other.execute("checkpoint").await.unwrap();
            for _ in 0..20 {
                other.execute("update oncebox.limits set value = value where name = 'headers_max'").await.unwrap();
            }
            let mut tx = store.begin(consumer).await.unwrap();
            assert_eq!(tx.admit(&[entry()]).await.unwrap(), [None]);
            let id = "select pg_current_xact_id()::text::bigint";
            let ours: i64 = sqlx::query_scalar(id).fetch_one(tx.connection::<PgConnection>().unwrap()).await.unwrap();
            server.kill();
            server.run().await;
            if next_id(&server).await < ours {
                break (tx, ours);
            }
            spent += 1;
            assert!(spent < 5, "the server keeps what is not on disk");
        };
        if given_again {
            let mut other = PgConnection::connect(&server.url()).await.unwrap();
            while next_id(&server).await <= ours {
                other.execute("select pg_current_xact_id()").await.unwrap();
            }
            let status = format!("select pg_xact_status('{ours}'::xid8)");
            let status: String = sqlx::query_scalar(sqlx::AssertSqlSafe(status)).fetch_one(&mut other).await.unwrap();
            assert_eq!(status, "committed", "another's");
        }
        assert_eq!(tx.undo().await.unwrap(), Undone::Lost, "given again: {given_again}");
    }
    store.close().await;
}

/// The transaction of a former owner may hang in its COMMIT, and keeps the row of the shard locked.
/// The lease is waited for then. Shown by: the same time for a lock and for a statement (the server
/// cancels the statement, and the relay ends with that error).
#[tokio::test]
async fn g10_a_lease_whose_row_is_locked_is_waited_for() {
    with_database("g10_a_lease_whose_row_is_locked_is_waited_for", |database| async move {
        let mut former = database.connection().await;
        former.execute("begin; update oncebox.shard set revision = revision + 1").await.unwrap();
        let options =
            StoreOptions { handler_timeout: Duration::from_millis(100), ..StoreOptions::new(database.url.clone()) };
        let store = PostgresStore::connect(&options).await.unwrap();
        let request =
            LeaseRequest { shard: 0, owner: "relay".into(), length: Duration::from_secs(60), read_bytes: 4 << 20 };
        let locked = store.open(&request).await;
        assert!(matches!(locked, Err(StoreError::Busy(_))), "{locked:?}");
        former.execute("rollback").await.unwrap();
        let LeaseAnswer::Taken(session) = store.open(&request).await.unwrap() else { panic!("it is free") };
        session.release().await.unwrap();
        store.close().await;
    })
    .await;
}
