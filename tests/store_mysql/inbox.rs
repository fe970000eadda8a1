//! The inbox on this database: what `insert ignore` may hide (R24), what ends a transaction here
//! (R23), deadlocks of duplicates, sessions that come back to the pool (R23, R28).

use std::time::{Duration, Instant};

use oncebox::message::MessageId;
use oncebox::store::mysql::MySqlStore;
use oncebox::store::{Base, ConsumerId, Inbox, InboxEntry, InboxTx, Proof, Schema, StoreOptions};
use oncebox::{StoreError, message::ContentHash};
use sqlx::{AssertSqlSafe, MySqlConnection};

use crate::fixture::{DEADLINE, Db, PrivateServer, execute};
use crate::proxy::{Failure, Proxy, When};
use crate::relay::seen_running;
use crate::support::eventually;

const HASH: ContentHash = [7; 16];

fn entry() -> InboxEntry {
    InboxEntry { id: MessageId::new(), hash: HASH }
}

async fn run(connection: &mut MySqlConnection, sql: &str) -> Result<u64, sqlx::Error> {
    let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await;
    done.map(|done| done.rows_affected())
}

#[tokio::test(flavor = "multi_thread")]
async fn r24_more_duplicates_than_the_server_keeps_warnings_are_all_known() {
    let Some(db) = Db::new("r24_more_duplicates_than_the_server_keeps_warnings_are_all_known").await else { return };
    let consumer = db.consumer("ledger").await;
    let known: Vec<InboxEntry> = (0..300).map(|_| entry()).collect();
    let mut tx = db.store.begin(consumer).await.unwrap();
    assert!(tx.admit(&known).await.unwrap().iter().all(Option::is_none));
    tx.commit().await.unwrap();

    let mut batch = known.clone();
    batch.splice(100..100, (0..5).map(|_| entry()));
    batch.reverse();
    let mut tx = db.store.begin(consumer).await.unwrap();
    let answers = tx.admit(&batch).await.unwrap();
    for (entry, answer) in batch.iter().zip(answers) {
        assert_eq!(answer.is_some(), known.contains(entry));
    }
    tx.rollback().await.unwrap();
}

// Shown to fail: without the look at the warnings and at what stands there, both cases pass as new
// or as duplicates.
#[tokio::test(flavor = "multi_thread")]
async fn r24_a_server_that_changes_a_value_fails_the_batch() {
    let Some(db) = Db::new("r24_a_server_that_changes_a_value_fails_the_batch").await else { return };
    let consumer = db.consumer("ledger").await;
    let mut app = db.app().await;
    for (changed, back) in [
        // Ids that share their beginning become one, which `insert ignore` takes for a duplicate.
        ("message_id binary(6) not null comment 'short'", "message_id binary(16) not null comment 'whole'"),
        ("content_hash binary(8) not null comment 'short'", "content_hash binary(16) not null comment 'whole'"),
    ] {
        execute(&mut app, &format!("alter table oncebox_inbox modify {changed}")).await;
        let mut tx = db.store.begin(consumer).await.unwrap();
        let error = tx.admit(&[entry(), entry()]).await.unwrap_err();
        assert!(matches!(error, StoreError::Corrupt(_)), "{error:?}");
        tx.rollback().await.unwrap();
        execute(&mut app, &format!("delete from oncebox_inbox; alter table oncebox_inbox modify {back}")).await;
    }
    let mut tx = db.store.begin(consumer).await.unwrap();
    assert_eq!(tx.admit(&[entry(), entry()]).await.unwrap(), [None, None]);
    tx.rollback().await.unwrap();
}

/// What the inbox does not do, and why: shown on this server.
#[tokio::test(flavor = "multi_thread")]
async fn r24_counts_of_rows_and_text_keys_decide_nothing() {
    let Some(db) = Db::new("r24_counts_of_rows_and_text_keys_decide_nothing").await else { return };
    let mut app = db.app().await;
    execute(&mut app, "create table naive (id varchar(16) collate utf8mb4_general_ci primary key)").await;
    let insert = "insert into naive values ('abc') on duplicate key update id = id";
    assert_eq!(run(&mut app, insert).await.unwrap(), 1);
    assert_eq!(run(&mut app, insert).await.unwrap(), 1, "a duplicate counts as a row under CLIENT_FOUND_ROWS");
    for other in ["ABC", "ábc", "abc "] {
        let ignored = format!("insert ignore into naive values ('{other}')");
        assert_eq!(run(&mut app, &ignored).await.unwrap(), 0, "`{other}` is lost as a duplicate of `abc`");
    }
    // The store: ids that differ only in the case or accent of a letter, or in the space or zero
    // at their end, are different.
    let consumer = db.consumer("ledger").await;
    let ending = |last: u8| [[b'a'; 15].as_slice(), &[last]].concat();
    let entries: Vec<InboxEntry> = [b'a', b'A', 0xe1, b' ', 0]
        .map(|last| InboxEntry { id: MessageId::from(uuid::Uuid::from_slice(&ending(last)).unwrap()), hash: HASH })
        .into();
    let mut tx = db.store.begin(consumer).await.unwrap();
    assert!(tx.admit(&entries).await.unwrap().iter().all(Option::is_none));
    tx.commit().await.unwrap();
}

// Shown to fail without `autocommit = 0`: the effect after the swallowed deadlock stays.
#[tokio::test(flavor = "multi_thread")]
async fn r23_after_a_swallowed_deadlock_nothing_stays() {
    let Some(db) = Db::new("r23_after_a_swallowed_deadlock_nothing_stays").await else { return };
    let consumer = db.consumer("ledger").await;
    let mut app = db.app().await;
    execute(&mut app, "create table account (id int primary key, n int); insert into account values (1, 0), (2, 0)")
        .await;
    execute(
        &mut app,
        "create table effect (n int); create table heavy (n int); insert into heavy with recursive n as (select 1 as n union all select n + 1 from n where n < 500) select n from n",
    )
    .await;

    let id = entry();
    let mut tx = db.store.begin(consumer).await.unwrap();
    tx.admit(&[id]).await.unwrap();
    run(tx.connection().unwrap(), "update account set n = 1 where id = 1").await.unwrap();
    // The other transaction has changed more, so the handler's is the victim.
    execute(&mut app, "start transaction; update heavy set n = n + 1; update account set n = 2 where id = 2").await;
    let waiting = tokio::spawn(async move {
        run(&mut app, "update account set n = 2 where id = 1; rollback").await.unwrap();
    });
    db.until_waiting(1, "update account set n = 2 where id = 1%").await;
    let deadlock = run(tx.connection().unwrap(), "update account set n = 1 where id = 2").await.unwrap_err();
    assert!(StoreError::from(deadlock).is_transient());
    // The handler swallows it and goes on.
    run(tx.connection().unwrap(), "insert into effect values (1)").await.unwrap();
    assert_eq!(tx.prove().await.unwrap(), Proof::Ended);
    tx.rollback().await.unwrap();
    waiting.await.unwrap();
    assert_eq!(db.count("effect").await, 0, "what the handler wrote after the deadlock");
    assert!(db.store.known(consumer, &[id.id]).await.unwrap().is_empty(), "so the batch is tried again");
}

// Shown to fail without the savepoint: each way is proven as the same transaction.
#[tokio::test(flavor = "multi_thread")]
async fn r23_every_way_to_end_a_transaction_here_is_found_out_and_the_rest_rolled_back() {
    let Some(db) = Db::new("r23_every_way_to_end_a_transaction_here_is_found_out_and_the_rest_rolled_back").await
    else {
        return;
    };
    let consumer = db.consumer("ledger").await;
    execute(&mut db.app().await, "create table effect (n int); create table other (n int)").await;
    for (n, (way, commits)) in [
        ("commit", true),
        ("start transaction", true),
        ("begin", true),
        ("alter table other add column m int", true),
        ("create table made (n int)", true),
        ("truncate table other", true),
        ("lock tables effect write, oncebox_inbox write; unlock tables", true),
        ("set autocommit = 1", true),
        ("rollback", false),
        ("rollback; start transaction", false),
    ]
    .into_iter()
    .enumerate()
    {
        let id = entry();
        let mut tx = db.store.begin(consumer).await.unwrap();
        tx.admit(&[id]).await.unwrap();
        run(tx.connection().unwrap(), way).await.unwrap_or_else(|error| panic!("{way}: {error}"));
        let before = db.count("effect").await;
        run(tx.connection().unwrap(), &format!("insert into effect values ({n})")).await.unwrap();
        assert_eq!(tx.prove().await.unwrap(), Proof::Ended, "{way}");
        tx.rollback().await.unwrap();
        let known = db.store.known(consumer, &[id.id]).await.unwrap();
        assert_eq!(known.contains(&id.id), commits, "{way}");
        // Nobody can take back what a handler writes with autocommit set by itself.
        if way != "set autocommit = 1" {
            assert_eq!(db.count("effect").await, before, "{way}: the rest is rolled back");
        }
    }
    // A handler's own savepoints, and errors of single statements, end nothing.
    let mut tx = db.store.begin(consumer).await.unwrap();
    tx.admit(&[entry()]).await.unwrap();
    run(tx.connection().unwrap(), "savepoint mine; insert into effect values (100); rollback to savepoint mine")
        .await
        .unwrap();
    run(tx.connection().unwrap(), "insert into effect values ('no number')").await.unwrap_err();
    assert_eq!(tx.prove().await.unwrap(), Proof::Same);
    tx.commit().await.unwrap();
}

/// What a handler may have changed.
async fn settings(connection: &mut MySqlConnection) -> String {
    let others: String = sqlx::query_scalar(
        "select cast(concat_ws(' ', @@autocommit + 0, @@sql_mode like '%STRICT_ALL_TABLES%', @@time_zone, @@wait_timeout, \
         @@innodb_lock_wait_timeout, @@completion_type) as char)",
    )
    .fetch_one(&mut *connection)
    .await
    .unwrap();
    // Its name differs between servers, and some have both.
    let isolation = "show session variables where variable_name in ('tx_isolation', 'transaction_isolation')";
    let isolation: Vec<(String, String)> = sqlx::query_as(isolation).fetch_all(connection).await.unwrap();
    format!("{others} {}", isolation[0].1)
}

#[tokio::test(flavor = "multi_thread")]
async fn r23_r28_a_connection_comes_back_as_it_was_whatever_a_handler_did() {
    let Some(db) = Db::new("r23_r28_a_connection_comes_back_as_it_was_whatever_a_handler_did").await else { return };
    let consumer = db.consumer("ledger").await;
    let options = StoreOptions {
        connections_max: 1,
        handler_timeout: Duration::from_secs(30),
        ..StoreOptions::new(db.url.as_str())
    };
    let store = MySqlStore::connect(&options).await.unwrap();
    let expected = "1 1 +00:00 45 60 NO_CHAIN READ-COMMITTED";
    let read = async || settings(&mut store.pool().acquire().await.unwrap()).await;
    assert_eq!(read().await, expected);

    for dropped in [false, true] {
        let mut tx = store.begin(consumer).await.unwrap();
        tx.admit(&[entry()]).await.unwrap();
        let inside = settings(tx.connection().unwrap()).await;
        let of_a_handler = expected.replacen('1', "0", 1).replacen(" 60 ", " 5 ", 1);
        assert_eq!(inside, of_a_handler, "a handler runs with autocommit off, and waits less for locks");
        run(
            tx.connection().unwrap(),
            "set session transaction isolation level serializable; set session sql_mode = '', time_zone = '+05:00', \
             completion_type = 'CHAIN', wait_timeout = 9",
        )
        .await
        .unwrap();
        if dropped {
            drop(tx);
        } else {
            tx.rollback().await.unwrap();
        }
        assert_eq!(read().await, expected);
        assert_eq!(db.count("oncebox_inbox").await, 0);
    }
    store.close().await;
}

// Shown to fail without the reset of what was lent: the second handler wrote into the first one's
// temporary table, and its effect was gone.
#[tokio::test(flavor = "multi_thread")]
async fn r23_r28_nothing_of_a_handlers_session_reaches_the_next_handler() {
    let Some(db) = Db::new("r23_r28_nothing_of_a_handlers_session_reaches_the_next_handler").await else { return };
    let consumer = db.consumer("ledger").await;
    let mut app = db.app().await;
    execute(&mut app, "create table ledger (n int)").await;
    let options = StoreOptions { connections_max: 1, ..StoreOptions::new(db.url.as_str()) };
    let store = MySqlStore::connect(&options).await.unwrap();
    let leftovers = [
        "create temporary table ledger (n int)",
        "use information_schema",
        "set session foreign_key_checks = 0, unique_checks = 0, sql_select_limit = 1, sql_safe_updates = 1",
        "set session div_precision_increment = 9, lc_time_names = 'de_DE', default_week_format = 3, \
         auto_increment_increment = 7, auto_increment_offset = 3",
        "set names latin1",
        "set role none",
        "do get_lock('of a handler', 0)",
        "lock tables ledger write",
        "set session transaction read only",
        "set timestamp = 1, group_concat_max_len = 8, sql_big_selects = 0",
        "/*M! set session check_constraint_checks = 0 */ /*!80000 do 0 */",
    ];
    // Only MariaDB can leave the checks out.
    let state = "select concat_ws(' ', database(), /*M! @@check_constraint_checks, */ \
         abs(timestampdiff(second, utc_timestamp(), convert_tz(sysdate(), @@time_zone, '+00:00'))) < 5, \
         @@group_concat_max_len, @@sql_big_selects, @@foreign_key_checks, @@unique_checks, @@sql_select_limit, \
         @@sql_safe_updates, @@div_precision_increment, @@lc_time_names, @@default_week_format, \
         @@auto_increment_increment, @@auto_increment_offset, @@character_set_client, @@collation_connection, current_role(), \
         is_used_lock('of a handler'))";
    let read = async |tx: &mut dyn InboxTx| -> String {
        let connection: &mut MySqlConnection = tx.connection().unwrap();
        let state: (Vec<u8>,) = sqlx::query_as(state).fetch_one(connection).await.unwrap();
        String::from_utf8(state.0).unwrap()
    };
    let mut first = store.begin(consumer).await.unwrap();
    let expected = read(&mut *first).await;
    first.rollback().await.unwrap();
    for (n, leftover) in leftovers.into_iter().enumerate() {
        let mut tx = store.begin(consumer).await.unwrap();
        run(tx.connection().unwrap(), leftover).await.unwrap();
        tx.rollback().await.unwrap();

        let mut tx = store.begin(consumer).await.unwrap();
        assert_eq!(read(&mut *tx).await, expected, "{leftover}");
        tx.admit(&[entry()]).await.unwrap();
        run(tx.connection().unwrap(), "insert into ledger values (1)").await.unwrap();
        tx.commit().await.unwrap();
        assert_eq!(db.count("ledger").await, i64::try_from(n).unwrap() + 1, "the effect behind `{leftover}`");
    }
    store.close().await;
}

// Shown to fail with neither of the two guards: a connection whose `begin` was dropped is closed,
// and every connection that comes back is rolled back.
#[tokio::test(flavor = "multi_thread")]
async fn r28_a_begin_that_is_given_up_loses_no_later_write() {
    let Some(db) = Db::new("r28_a_begin_that_is_given_up_loses_no_later_write").await else { return };
    let consumer = db.consumer("ledger").await;
    execute(&mut db.app().await, "create table effect (n int)").await;
    let options = StoreOptions { connections_max: 1, ..StoreOptions::new(db.url.as_str()) };
    let store = MySqlStore::connect(&options).await.unwrap();
    for n in 0..60_u64 {
        let _ = tokio::time::timeout(Duration::from_micros(n * 20), store.begin(consumer)).await.map(drop);
        sqlx::query("insert into effect values (?)").bind(n).execute(store.pool()).await.unwrap();
        assert_eq!(db.count("effect").await, i64::try_from(n).unwrap() + 1, "the write after begin {n} is lost");
    }
    store.close().await;
}

// The task of sqlx that would close it can spin without end (`bounded::rest`). Shown by:
// `max_lifetime` as sqlx has it; no task of ours, and the server ends the connection after 16 s.
#[tokio::test]
async fn r28_a_connection_that_rests_is_touched_before_the_server_ends_it() {
    let Some(db) = Db::new("r28_a_connection_that_rests_is_touched_before_the_server_ends_it").await else { return };
    let options = StoreOptions { handler_timeout: Duration::from_secs(1), ..StoreOptions::new(db.url.clone()) };
    let store = MySqlStore::connect(&options).await.unwrap();
    let options = store.pool().options();
    let (lifetime, idle) = (options.get_max_lifetime(), options.get_idle_timeout());
    assert_eq!((lifetime, idle, options.get_min_connections()), (None, None, 0));
    let id: u64 = sqlx::query_scalar("select cast(connection_id() as unsigned)").fetch_one(store.pool()).await.unwrap();
    let mut admin = db.app().await;
    let mut longest = 0;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    // At least three seconds of rest that something has ended.
    loop {
        let rests = sqlx::query_scalar("select cast(time as signed) from information_schema.processlist where id = ?");
        let rests: i64 = rests.bind(id).fetch_one(&mut admin).await.expect("the server ended it");
        if longest >= 3 && rests < longest {
            break;
        }
        longest = rests;
        assert!(tokio::time::Instant::now() < deadline, "it rests for {longest} s");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    store.close().await;
}

// A firewall on the way has forgotten the connection, so nothing arrives. Shown by: a touch that
// may take as long as a statement; the one place of the pool is taken for 36 s.
#[tokio::test(flavor = "multi_thread")]
async fn r28_a_resting_connection_that_is_silent_keeps_its_place_for_seconds() {
    let Some(db) = Db::new("r28_a_resting_connection_that_is_silent_keeps_its_place_for_seconds").await else { return };
    let proxy = Proxy::before(&db.url, "ssl-mode=disabled");
    let handler_timeout = Duration::from_secs(1);
    let options = StoreOptions { handler_timeout, connections_max: 1, ..StoreOptions::new(proxy.url.clone()) };
    let store = MySqlStore::connect(&options).await.unwrap();
    let id =
        async || sqlx::query_scalar::<_, u64>("select cast(connection_id() as unsigned)").fetch_one(store.pool()).await;
    let before = id().await.unwrap();
    let resting = async |count| (store.pool().num_idle() == count).then_some(());
    eventually("it rests", DEADLINE, async || resting(1).await).await;
    proxy.fail_at("", "rollback", 0, When::BeforeRequest, Failure::Silence);
    eventually("it is touched", DEADLINE, async || proxy.has_failed().then_some(())).await;
    let touched = Instant::now();
    let after = id().await.unwrap();
    assert!(after != before && touched.elapsed() < Duration::from_secs(15), "after {:?}", touched.elapsed());
    store.close().await;
}

// A planned failover behind one name: the former primary keeps its connections and takes no writes.
// Shown by: using these connections as long as they live, which is half an hour.
#[tokio::test(flavor = "multi_thread")]
async fn g10_a_server_that_takes_no_writes_is_left_for_new_connections() {
    let test = "g10_a_server_that_takes_no_writes_is_left_for_new_connections";
    let Some(server) = PrivateServer::start(test, &[]) else { return };
    let db = Db::on(&server.url().await).await;
    db.store.migrate().await.unwrap();
    let consumer = db.consumer("ledger").await;
    let mut admin = db.app().await;
    // Root may write on a read-only server.
    execute(&mut admin, "create user service@localhost").await;
    execute(&mut admin, "grant select, insert, update, delete, execute on *.* to service@localhost").await;
    let url = db.url.replacen("root@", "service@", 1);
    let store = MySqlStore::connect(&StoreOptions { connections_max: 1, ..StoreOptions::new(url) }).await.unwrap();
    let id = async || -> i64 {
        sqlx::query_scalar("select cast(connection_id() as signed)").fetch_one(store.pool()).await.unwrap()
    };
    let before = id().await;
    assert_eq!(id().await, before);
    execute(&mut admin, "set global read_only = 1").await;
    let mut tx = store.begin(consumer).await.unwrap();
    let refused = tx.admit(&[entry()]).await.unwrap_err();
    assert!(matches!(refused, StoreError::Unavailable(_)), "{refused}");
    tx.rollback().await.unwrap();
    assert_ne!(id().await, before, "the same connection leads to the same server");
    execute(&mut admin, "set global read_only = 0").await;
    let mut tx = store.begin(consumer).await.unwrap();
    assert_eq!(tx.admit(&[entry()]).await.unwrap(), [None]);
    tx.commit().await.unwrap();
    store.close().await;
}

// Without the retry this fails: the server ends one of the three.
#[tokio::test(flavor = "multi_thread")]
async fn a8_a_deadlock_of_duplicates_is_transient_and_its_retry_finds_the_truth() {
    let Some(db) = Db::new("a8_a_deadlock_of_duplicates_is_transient_and_its_retry_finds_the_truth").await else {
        return;
    };
    let consumer = db.consumer("ledger").await;
    let id = entry();
    let mut first = db.store.begin(consumer).await.unwrap();
    assert_eq!(first.admit(&[id]).await.unwrap(), [None]);
    let contender = || {
        let store = db.store.clone();
        tokio::spawn(async move {
            let mut deadlocks = 0;
            loop {
                let mut tx = store.begin(consumer).await.unwrap();
                match tx.admit(&[id]).await {
                    Ok(admission) => {
                        tx.commit().await.unwrap();
                        return (admission[0].is_none(), deadlocks);
                    }
                    Err(error) => {
                        assert!(error.is_transient(), "{error:?}");
                        deadlocks += 1;
                        tx.rollback().await.unwrap();
                    }
                }
            }
        })
    };
    let (second, third) = (contender(), contender());
    db.until_waiting(2, "insert ignore into oncebox\\_inbox%").await;
    first.rollback().await.unwrap();
    let (second, third) = (second.await.unwrap(), third.await.unwrap());
    assert!(second.0 != third.0, "one of the two is new, the other a duplicate: {second:?} {third:?}");
    assert!(second.1 + third.1 > 0, "the server made no deadlock of it, so this test shows nothing");
    assert_eq!(db.count("oncebox_inbox").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn r24_ids_are_looked_up_by_the_unique_key() {
    let Some(db) = Db::new("r24_ids_are_looked_up_by_the_unique_key").await else { return };
    let store = db.store.clone();
    let looks = tokio::spawn(async move {
        loop {
            store.known(ConsumerId(1), &[entry().id]).await.unwrap();
        }
    });
    let sql = seen_running(&db, "oncebox_inbox", "json_table").await;
    looks.abort();
    let sql = ["'[\"00\"]'", "1"].iter().fold(sql, |sql, value| sql.replacen('?', value, 1));
    let rows = sqlx::raw_sql(AssertSqlSafe(format!("explain {sql}"))).fetch_all(&mut db.app().await).await.unwrap();
    let last: String = sqlx::Row::get(rows.last().unwrap(), "type");
    assert_eq!(last, "eq_ref");
}

/// As that of a process that was killed: it would hold its locks until it is done. On MySQL nothing
/// ends a statement that writes.
// Shown to fail without `max_statement_time`: the statement runs for its five minutes.
#[tokio::test(flavor = "multi_thread")]
async fn a_statement_whose_process_is_gone_ends_soon_and_is_the_handlers_failure() {
    let Some(db) = Db::new("a_statement_whose_process_is_gone_ends_soon_and_is_the_handlers_failure").await else {
        return;
    };
    let consumer = db.consumer("ledger").await;
    let options = StoreOptions { handler_timeout: Duration::from_secs(1), ..StoreOptions::new(db.url.as_str()) };
    let store = MySqlStore::connect(&options).await.unwrap();
    let mut app = db.app().await;
    execute(&mut app, "create table held (id int primary key); insert into held values (1)").await;
    let mut tx = store.begin(consumer).await.unwrap();
    tx.admit(&[entry()]).await.unwrap();
    let slow = "update held set id = 1 + sleep(300)";
    assert!(tokio::time::timeout(Duration::from_millis(500), run(tx.connection().unwrap(), slow)).await.is_err());
    // Its socket is closed, and the server does not look.
    drop(tx);
    db.until_waiting(0, "update held %").await;
    execute(&mut app, "set session innodb_lock_wait_timeout = 1; update held set id = 2").await;

    let mut tx = store.begin(consumer).await.unwrap();
    tx.admit(&[entry()]).await.unwrap();
    let error = run(tx.connection().unwrap(), slow).await.unwrap_err();
    assert!(!StoreError::from(error).is_transient(), "it counts as the handler's own time");
    tx.rollback().await.unwrap();
    let usual: i64 =
        sqlx::query_scalar("select cast(@@max_statement_time as signed)").fetch_one(store.pool()).await.unwrap();
    assert_eq!(usual, 0, "of handlers alone");
    store.close().await;
}
