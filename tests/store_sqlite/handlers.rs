//! What handlers can do to a transaction of SQLite, and what it does to them (R23).

use std::time::Duration;

use oncebox::StoreError;
use oncebox::message::MessageId;
use oncebox::store::{Base, Inbox, InboxEntry, InboxTx, Proof, StoreOptions};
use oncebox_testkit::store::{Fixture, Trial};
use sqlx::{Connection, SqliteConnection};

use crate::fixture::SqliteFile;

async fn begin(trial: &Trial<SqliteFile>) -> (Box<dyn InboxTx>, MessageId) {
    let consumer = trial.consumer("c").await;
    let id = MessageId::new();
    let mut tx = trial.store.begin(consumer).await.unwrap();
    tx.admit(&[InboxEntry { id, hash: [1; 16] }]).await.unwrap();
    (tx, id)
}

async fn run(tx: &mut Box<dyn InboxTx>, sql: &str) -> Result<u64, sqlx::Error> {
    SqliteFile::run(tx.connection().unwrap(), sql).await
}

async fn is_known(trial: &Trial<SqliteFile>, id: MessageId) -> bool {
    let consumer = trial.consumer("c").await;
    !trial.store.known(consumer, &[id]).await.unwrap().is_empty()
}

/// Statements after a transaction that SQLite itself rolled back would commit one by one, outside
/// the inbox transaction.
///
/// Shown to fail: without the commit guard the effect stayed, and its message ran again.
#[tokio::test]
async fn r23_nothing_commits_by_itself_after_a_transaction_was_rolled_back() {
    for ending in ["insert or rollback into effect_once values (1)", "rollback", "commit", "end"] {
        let trial = Trial::<SqliteFile>::start("rolled back").await.unwrap();
        trial.run("create table effect_once (a unique)").await;
        trial.run("insert into effect_once values (1)").await;
        let (mut tx, id) = begin(&trial).await;
        let _ = run(&mut tx, ending).await;
        let effect = "insert into effect values ('m', '')";
        assert!(run(&mut tx, effect).await.is_err(), "{ending}: the handler is told");
        assert!(run(&mut tx, "create table made (a)").await.is_err());
        assert_eq!(tx.prove().await.unwrap(), Proof::Aborted, "{ending}: the handler's failure, which is counted");
        let _ = tx.rollback().await;
        assert_eq!(trial.effects("m").await, 0, "{ending}");
        assert!(!is_known(&trial, id).await, "{ending}");
        // The guard goes with the transaction.
        trial.run("insert into effect values ('later', '')").await;
        assert_eq!(trial.effects("later").await, 1);
    }
}

/// Also where the transaction is dropped, not rolled back.
#[tokio::test]
async fn the_commit_guard_ends_with_a_dropped_transaction() {
    let trial = Trial::<SqliteFile>::start("dropped").await.unwrap();
    for _ in 0..30 {
        let (mut tx, _) = begin(&trial).await;
        let _ = run(&mut tx, "commit").await;
        drop(tx);
    }
    for _ in 0..30 {
        let mut connection = trial.store.pool().acquire().await.unwrap();
        SqliteFile::run(&mut connection, "insert into effect values ('later', '')").await.unwrap();
    }
    assert_eq!(trial.effects("later").await, 30);
}

/// Nor does giving up a rollback or a commit half way leave a connection that refuses the commits
/// of others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_commit_guard_ends_with_a_rollback_that_was_given_up() {
    let trial = Trial::<SqliteFile>::start("given up").await.unwrap();
    for round in 0..40 {
        let (mut tx, _) = begin(&trial).await;
        run(&mut tx, "insert into effect values ('m', '')").await.unwrap();
        let patience = Duration::from_micros(20 * (round / 2));
        let _ = if round % 2 == 0 {
            tokio::time::timeout(patience, tx.rollback()).await
        } else {
            tokio::time::timeout(patience, tx.commit()).await
        };
        trial.run("insert into effect values ('later', '')").await;
    }
    assert_eq!(trial.effects("later").await, 40);
    assert!(trial.effects("m").await <= 20);
}

/// The index of a full-text table asks for its pages at COMMIT. Shown by: a full disk as a COMMIT
/// of unknown outcome, after which a message is told as dead that is stored nowhere.
#[tokio::test]
async fn g12_a_commit_that_finds_no_room_is_known_to_have_changed_nothing() {
    let trial = Trial::<SqliteFile>::start("no room").await.unwrap();
    trial.run("create virtual table words using fts4(text, content='')").await;
    let write = "with recursive n (i) as (select 1 union all select i + 1 from n where i < 3000)
        insert into words (docid, text) select 1, group_concat('w' || i, ' ') from n";
    for room in [1, 1_000_000] {
        let (mut tx, id) = begin(&trial).await;
        // Fewer pages than there are mean that the file may not grow.
        run(&mut tx, &format!("pragma max_page_count = {room}")).await.unwrap();
        run(&mut tx, write).await.unwrap();
        assert_eq!(tx.prove().await.unwrap(), Proof::Same);
        let committed = tx.commit().await;
        match room {
            1 => assert!(matches!(&committed, Err(StoreError::Unavailable(_))), "{committed:?}"),
            _ => committed.unwrap(),
        }
        assert_eq!(is_known(&trial, id).await, room > 1);
    }
}

/// sqlx makes savepoints of them.
#[tokio::test]
async fn a_handler_may_use_nested_transactions() {
    let trial = Trial::<SqliteFile>::start("nested").await.unwrap();
    let (mut tx, id) = begin(&trial).await;
    let mut inner = tx.connection::<SqliteConnection>().unwrap().begin().await.unwrap();
    sqlx::query("insert into effect values ('kept', '')").execute(&mut *inner).await.unwrap();
    inner.commit().await.unwrap();
    let mut inner = tx.connection::<SqliteConnection>().unwrap().begin().await.unwrap();
    sqlx::query("insert into effect values ('taken back', '')").execute(&mut *inner).await.unwrap();
    drop(inner);
    assert_eq!(tx.prove().await.unwrap(), Proof::Same);
    tx.commit().await.unwrap();
    assert_eq!((trial.effects("kept").await, trial.effects("taken back").await), (1, 0));
    assert!(is_known(&trial, id).await);
}

/// Readers see the state before, and do not wait.
#[tokio::test]
async fn readers_do_not_wait_for_a_handler() {
    let trial = Trial::<SqliteFile>::start("readers").await.unwrap();
    let (mut tx, _) = begin(&trial).await;
    run(&mut tx, "insert into effect values ('m', '')").await.unwrap();
    assert_eq!(trial.effects("m").await, 0);
    assert_eq!(oncebox::store::Operator::status(&trial.store).await.unwrap().pending, 0);
    tx.prove().await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(trial.effects("m").await, 1);
}

/// R28: a statement without end holds the write lock of the file. The rollback of the one who gave
/// it up ends it, and so does dropping the transaction.
///
/// Shown to fail: without the interrupt the run did not end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r28_giving_a_handler_up_interrupts_its_statement() {
    let endless = "with recursive n(i) as (select 1 union all select i + 1 from n) insert into effect select i, '' from n where i < 0";
    let trial = Trial::<SqliteFile>::start("endless").await.unwrap();
    for drop_it in [false, true] {
        let (mut tx, id) = begin(&trial).await;
        let given_up = tokio::time::timeout(Duration::from_millis(100), run(&mut tx, endless)).await;
        assert!(given_up.is_err());
        let deadline = Duration::from_secs(60);
        if drop_it {
            drop(tx);
        } else {
            tokio::time::timeout(deadline, tx.rollback()).await.unwrap().unwrap();
        }
        let consumer = trial.consumer("c").await;
        let next = tokio::time::timeout(deadline, trial.store.begin(consumer)).await.unwrap().unwrap();
        next.commit().await.unwrap();
        assert!(!is_known(&trial, id).await);
    }
    // Nobody who uses the connection later is interrupted.
    let long =
        "with recursive n(i) as (select 1 union all select i + 1 from n where i < 200000) select count(*) from n";
    for _ in 0..12 {
        assert_eq!(trial.number(long).await, 200_000);
    }
}

/// Temporary tables hide those of the application and of oncebox; settings decide what the next
/// statement does.
///
/// Shown to fail: with every connection back in the pool, the next transaction could not write, and
/// read the temporary table.
#[tokio::test(flavor = "multi_thread")]
async fn the_session_that_a_handler_changed_is_closed_before_anybody_else_gets_it() {
    let case = "the_session_that_a_handler_changed_is_closed_before_anybody_else_gets_it";
    let trial = Trial::<SqliteFile>::start(case).await.unwrap();
    trial.store.close().await;
    let options = StoreOptions { connections_max: 1, ..StoreOptions::new(trial.fixture.url()) };
    let trial = Trial { store: oncebox::store::sqlite::SqliteStore::connect(&options).await.unwrap(), ..trial };
    // The whole session, in the words of this test.
    let session = "select json_array((select count(*) from sqlite_temp_schema), (select count(*) from pragma_database_list), \
        (select * from pragma_query_only), (select * from pragma_recursive_triggers), (select * from pragma_foreign_keys), \
        (select * from pragma_ignore_check_constraints), (select * from pragma_busy_timeout), (select * from pragma_locking_mode), \
        (select * from pragma_trusted_schema), (select * from pragma_writable_schema), (select * from pragma_max_page_count), \
        (select * from pragma_reverse_unordered_selects), (select * from pragma_read_uncommitted))";
    let session = async || sqlx::query_scalar::<_, String>(session).fetch_one(trial.store.pool()).await.unwrap();
    let expected = session().await;
    for change in [
        "create temp table effect (message text, note text)",
        "attach ':memory:' as other",
        "pragma trusted_schema = off",
        "pragma writable_schema = on",
        "pragma reverse_unordered_selects = on",
        "pragma read_uncommitted = on",
        // No page more than there are.
        "pragma max_page_count = 1",
        "pragma query_only = on",
        "pragma recursive_triggers = on",
        "pragma ignore_check_constraints = on",
        "pragma busy_timeout = 1",
        "pragma locking_mode = exclusive",
        "create temp trigger t after insert on main.oncebox_outbox begin select raise(ignore); end",
    ] {
        for commits in [true, false] {
            let (mut tx, id) = begin(&trial).await;
            run(&mut tx, change).await.unwrap();
            if commits {
                tx.commit().await.unwrap();
            } else {
                tx.undo().await.unwrap();
                drop(tx);
            }
            assert_eq!(is_known(&trial, id).await, commits, "{change}");
            assert_eq!(session().await, expected, "{change}, committed: {commits}");
            let (mut tx, _) = begin(&trial).await;
            run(&mut tx, "insert into effect values ('works', '')").await.unwrap();
            tx.commit().await.unwrap();
        }
    }
    assert_eq!(trial.effects("works").await, 26);
    // A connection that nobody changed is used again.
    let mut one = trial.store.pool().acquire().await.unwrap();
    SqliteFile::run(&mut one, "select 1").await.unwrap();
    drop(one);
    assert_eq!(trial.store.pool().size(), 1);
    trial.end().await;
}
