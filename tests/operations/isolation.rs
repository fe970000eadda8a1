//! Serialization failures of PostgreSQL (40001; pitfall 5, R27): a transactional operation on
//! connections that begin above READ COMMITTED, and a guard that commits a transaction which does.
//! It is a transient failure: never a 500, no key burnt, one effect.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use oncebox::StoreError;
use oncebox::operation::{
    Asking, EdgeAnswer, EffectTx, Ended, Endpoint, Guard, GuardError, Kept, Mode, Outcome, Reply, Route, State,
};
use oncebox::sqlx::{AssertSqlSafe, raw_sql};
use oncebox::store::Base;
use oncebox::store::postgres::PostgresStore;
use tokio::sync::Barrier;

use super::kit::*;
use crate::postgres::{Database, with_database};

type Pg = World<PostgresStore>;

const LEVELS: [&str; 2] = ["repeatable read", "serializable"];

/// Another process whose two connections begin every transaction at this level, as a handler of an
/// application can set them.
async fn at(world: &Pg, level: &str) -> Pg {
    let world = world.with_pool_of(2).await;
    let mut connections = [world.store.pool().acquire().await.unwrap(), world.store.pool().acquire().await.unwrap()];
    for connection in &mut connections {
        let set = format!("set session characteristics as transaction isolation level {level}");
        raw_sql(AssertSqlSafe(set)).execute(&mut **connection).await.unwrap();
    }
    drop(connections);
    world
}

/// Two operations at once, each of which runs this when both have begun. Both are answered as first
/// ones; gives how often they ran.
async fn both(world: &Pg, keys: [&'static str; 2], level: &'static str, statement: &'static str) -> u32 {
    let endpoint = world.protect(same_tx());
    let (meet, calls) = (Arc::new(Barrier::new(2)), Arc::new(AtomicU32::new(0)));
    let mut both = tokio::task::JoinSet::new();
    for key in keys {
        let (world, endpoint, meet, calls) = (world.clone(), endpoint.clone(), meet.clone(), calls.clone());
        let tried = Arc::new(AtomicU32::new(0));
        let handler = does::<PostgresStore, _>(move |_: &Put, mut tx: EffectTx<'_, PostgresStore>| {
            let (meet, calls, tried) = (meet.clone(), calls.clone(), tried.clone());
            Box::pin(async move {
                calls.fetch_add(1, Ordering::SeqCst);
                if tried.fetch_add(1, Ordering::SeqCst) == 0 {
                    let is: String = oncebox::sqlx::query_scalar("select current_setting('transaction_isolation')")
                        .fetch_one(&mut *tx.connection())
                        .await?;
                    assert_eq!(is, level);
                    meet.wait().await;
                }
                PostgresStore::run(tx.connection(), statement).await?;
                Ok(Outcome::Completed(Reply::new(201)))
            })
        });
        both.spawn(async move { run(&world, &endpoint, key, "a", handler).await });
    }
    for answered in both.join_all().await {
        first(answered);
    }
    calls.load(Ordering::SeqCst)
}

// Shown by: taking 40001 for the operation's own failure (500 OPERATION_FAILED), and at COMMIT for
// an unknown outcome (503).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r27_pitfall_5_a_serialization_failure_of_the_handler_or_of_commit_runs_again() {
    with_database("r27_pitfall_5_runs_again", |database| async move {
        let direct = World::on(database.store.clone(), &database.url).await;
        direct.store.exec("create table place (n int not null); insert into place values (0)").await;
        for (number, level) in LEVELS.into_iter().enumerate() {
            let world = at(&direct, level).await;
            // The second one to write the row gets 40001 in its handler.
            let keys =
                [["key-0000000000000001", "key-0000000000000002"], ["key-0000000000000003", "key-0000000000000004"]];
            let calls = both(&world, keys[number], level, "update place set n = n + 1").await;
            assert!(calls >= 3, "{level}: one of them ran again: {calls}");
            assert_eq!(world.store.number("select n::bigint from place").await, 2 * (number as i64 + 1), "{level}");
        }
        // Each counts what it does not see of the other. Who is faster decides where that is found
        // out: at the second one's insert, at the statement of its outcome, or at COMMIT.
        let world = at(&direct, "serializable").await;
        let counts = "insert into effect (text) select count(*)::text from effect";
        let calls = both(&world, ["key-0000000000000005", "key-0000000000000006"], "serializable", counts).await;
        assert!(calls >= 3, "one of them ran again: {calls}");
        assert_eq!(direct.store.number("select count(distinct text) from effect").await, 2);
        // At COMMIT for certain: what is deferred until then fails the first time.
        let body = "begin if nextval('tries') = 1 then raise exception 'on purpose' using errcode = '40001'; end if; \
                    return null; end";
        let function = format!("create function fails() returns trigger language plpgsql as $$ {body} $$");
        let trigger = "create constraint trigger fails after insert on effect deferrable initially deferred \
                       for each row execute function fails()";
        direct.store.exec(&format!("create sequence tries; {function}; {trigger}")).await;
        let (endpoint, gate) = (direct.protect(same_tx()), Gate::open());
        first(run(&direct, &endpoint, "key-0000000000000007", "once", effect(&gate)).await);
        let once = direct.store.number("select count(*) from effect where text = 'once'").await;
        assert_eq!((gate.calls(), once), (2, 1));
    })
    .await;
}

/// The claim stands in line for the table, its snapshot taken; then another process's whole run of
/// this key stands there, unseen.
///
/// Shown by: taking 40001 for another failure of the store (503 for what stands there).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r27_pitfall_5_a_claim_that_cannot_see_what_it_conflicts_with_replays_it() {
    with_database("r27_pitfall_5_a_claim", |database| async move {
        let direct = World::on(database.store.clone(), &database.url).await;
        let endpoint = direct.protect(same_tx());
        let there = first(run(&direct, &endpoint, K1, "a", effect(&Gate::open())).await);
        direct.store.exec("create table aside as select * from oncebox.idempotency_request").await;
        for level in LEVELS {
            // The claim after a look, and the claim whose statement looks.
            for warm in [false, true] {
                direct.store.exec("delete from oncebox.idempotency_request").await;
                let world = at(&direct, level).await;
                let (endpoint, gate) = (world.protect(same_tx()), Gate::open());
                if warm {
                    first(run(&world, &endpoint, K2, "b", effect(&gate)).await);
                }
                let before = gate.calls();
                let asking = behind_the_table(&database, &direct, || running(&world, &endpoint, K1, &gate)).await;
                let reply = replayed(asking.await.unwrap());
                assert_eq!((&reply.body, gate.calls()), (&there.body, before), "{level}, {warm}");
            }
        }
    })
    .await;
}

/// Begins this while the table of records is locked, and puts aside's rows into it once it waits.
async fn behind_the_table<T>(database: &Database, world: &Pg, begin: impl FnOnce() -> T) -> T {
    let mut session = database.connection().await;
    // Reads pass.
    let lock = "begin; lock table oncebox.idempotency_request in exclusive mode";
    raw_sql(lock).execute(&mut session).await.unwrap();
    let begun = begin();
    until("the claim stands in line", || async {
        let waiting = "select count(*) from pg_locks where not granted and relation = 'oncebox.idempotency_request'::regclass \
                         and database = (select oid from pg_database where datname = current_database())";
        world.store.number(waiting).await == 1
    })
    .await;
    let put = "insert into oncebox.idempotency_request select * from aside; commit";
    raw_sql(put).execute(&mut session).await.unwrap();
    begun
}

/// What happens beside a bridged handler's transaction, after its first statement.
#[derive(Debug, Clone, Copy)]
enum Beside {
    Nothing,
    /// Its lease is extended.
    Heartbeat,
    /// One that reads what it writes, and writes what it reads.
    Skew,
}

const COUNTS: &str = "insert into effect (text) select count(*)::text from effect";

/// A bridged handler at this level. Gives what its guard said where that was an error.
async fn guarded(
    database: &Database,
    world: &Pg,
    level: &'static str,
    beside: Beside,
) -> (EdgeAnswer<()>, Option<GuardError>) {
    let endpoint = world.engine.protect(Endpoint::typed::<Put>(Route::new(Mode::Bridged))).unwrap();
    let asking = Asking { scope: Some(scope("t1", "p1")), key: key(K1), command: Arc::new(put("a")) };
    let (store, mut session) = (world.store.clone(), database.connection().await);
    let said = Arc::new(Mutex::new(None));
    let say = said.clone();
    let handler = move |guard: Option<Guard<PostgresStore>>| async move {
        let mut tx = store.pool().begin_with(AssertSqlSafe(format!("begin isolation level {level}"))).await.unwrap();
        raw_sql(COUNTS).execute(&mut *tx).await.unwrap();
        let other = match beside {
            Beside::Nothing => String::new(),
            Beside::Heartbeat => "update oncebox.idempotency_request set updated_at = clock_timestamp()".to_owned(),
            Beside::Skew => format!("begin isolation level {level}; {COUNTS}; commit"),
        };
        raw_sql(AssertSqlSafe(other)).execute(&mut session).await.unwrap();
        let reply = guard.unwrap().commit(tx, Reply::new(201)).await.unwrap_or_else(|error| {
            *say.lock().unwrap() = Some(error);
            Reply::new(503)
        });
        Ended { tag: None, kept: Kept::Whole(reply), answer: () }
    };
    let answered = world.engine.execute_edge(&endpoint, asking, handler).await;
    let error = said.lock().unwrap().take();
    (answered, error)
}

// Shown to fail: with what the guard undid finished as FAILED_REPLAYABLE. Shown by: taking 40001
// for a failure of another kind (the guard's error is not Busy).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r27_o2_a_guard_whose_transaction_cannot_be_serialized_commits_nothing_and_frees_the_key() {
    let cases =
        [("repeatable read", Beside::Heartbeat), ("serializable", Beside::Heartbeat), ("serializable", Beside::Skew)];
    for (level, beside) in cases {
        with_database("r27_o2_a_guard", move |database| async move {
            let world = World::on(database.store.clone(), &database.url).await;
            let (ran, error) = guarded(&database, &world, level, beside).await;
            assert!(matches!(ran, EdgeAnswer::Ran { .. }), "{level}, {beside:?}: {ran:?}");
            assert!(matches!(error, Some(GuardError::Store(StoreError::Busy(_)))), "{level}, {beside:?}: {error:?}");
            assert_eq!(world.record("t1", K1).await.unwrap().state, State::FailedRetryable, "{level}, {beside:?}");
            let others = i64::from(matches!(beside, Beside::Skew));
            assert_eq!(world.effects().await, others, "{level}, {beside:?}: it committed nothing");
            // The same again, undisturbed.
            let (answer, error) = guarded(&database, &world, level, Beside::Nothing).await;
            assert!(error.is_none(), "{level}, {beside:?}: {error:?}");
            let EdgeAnswer::Answered(answered) = answer else { panic!("{level}, {beside:?}: {answer:?}") };
            assert_eq!(first(answered).status, 201);
            let (again, _) = guarded(&database, &world, level, Beside::Nothing).await;
            let EdgeAnswer::Answered(again) = again else { panic!("{level}, {beside:?}: {again:?}") };
            assert_eq!(replayed(again).status, 201);
            assert_eq!(world.effects().await, others + 1, "{level}, {beside:?}");
        })
        .await;
    }
}
