//! Another process that takes the key in the moment between `ROLLBACK TO SAVEPOINT`, by which door
//! A on PostgreSQL gives its claim and its lock back, and its second claim (O1, O15).
//!
//! The moment is made by a table lock, for which the other session stands in line: it gets the lock
//! when the claim's own lock on the table goes, and the second claim waits behind it.

use oncebox::HandlerError;
use oncebox::operation::{Answered, Code, EffectTx, Outcome, Reply};
use oncebox::sqlx::{AssertSqlSafe, PgConnection, raw_sql};
use oncebox::store::postgres::PostgresStore;

use super::kit::*;

type Pg = World<PostgresStore>;

/// How the first run ends, by which its effects are taken back.
#[derive(Debug, Clone, Copy)]
enum End {
    Refuses,
    Fails,
}

/// One effect, past the gate, taken back.
fn taken_back(end: End, gate: &Gate) -> impl Does<PostgresStore> + use<> {
    let gate = gate.clone();
    does::<PostgresStore, _>(move |_: &Put, mut tx: EffectTx<'_, PostgresStore>| {
        let gate = gate.clone();
        Box::pin(async move {
            PostgresStore::run(tx.connection(), "insert into effect (text) values ('first')").await?;
            gate.pass().await;
            match end {
                End::Refuses => Ok(Outcome::Rejected { answer: Reply::new(402), binding: true }),
                End::Fails => Err(HandlerError::retryable("no")),
            }
        })
    })
}

/// Runs the operation up to its end, and these statements of another session between the undoing
/// and the second claim. Gives the answer, the other session, and how often the handler was called.
async fn between(
    database: &crate::postgres::Database,
    world: &Pg,
    end: End,
    statements: &str,
) -> (Answered, PgConnection, u32) {
    let endpoint = world.protect(same_tx());
    let gate = Gate::closed();
    let running = tokio::spawn({
        let (world, handler) = (world.clone(), taken_back(end, &gate));
        async move { run(&world, &endpoint, K1, "a", handler).await }
    });
    gate.begun().await;
    let statements =
        format!("begin; lock table oncebox.idempotency_request in access exclusive mode; {statements}; commit");
    let mut session = database.connection().await;
    let other = tokio::spawn(async move {
        raw_sql(AssertSqlSafe(statements)).execute(&mut session).await.unwrap();
        session
    });
    until("the other session stands in line", || async {
        let waiting = "select count(*) from pg_locks where not granted and mode = 'AccessExclusiveLock' \
                         and database = (select oid from pg_database where datname = current_database())";
        world.store.number(waiting).await == 1
    })
    .await;
    assert!(!other.is_finished());
    gate.let_go();
    let session = other.await.unwrap();
    let answered = running.await.unwrap();
    (answered, session, gate.calls())
}

/// Its claim is open: nobody but the lock tells.
async fn an_open_claim(database: crate::postgres::Database, world: Pg, end: End) {
    let digest = identity("t1", K1).digest();
    let number = i64::from_be_bytes(digest[..8].try_into().unwrap());
    let take = format!("select pg_advisory_lock({number})");
    let (answered, session, calls) = between(&database, &world, end, &take).await;
    problem(answered, Code::InProgress);
    assert_eq!((calls, world.effects().await, world.record("t1", K1).await), (1, 0, None));
    drop(session);
    let endpoint = world.protect(same_tx());
    until("the other one is gone, and the key is free", || async {
        matches!(run(&world, &endpoint, K1, "a", effect(&Gate::open())).await, Answered::Reply { .. })
    })
    .await;
    assert_eq!(world.effects().await, 1);
}

/// It has run, and its answer stands.
async fn a_whole_run(database: crate::postgres::Database, world: Pg, end: End) {
    // The other process's run, put aside until the moment.
    let endpoint = world.protect(same_tx());
    let there = first(run(&world, &endpoint, K1, "a", effect(&Gate::open())).await);
    world.store.exec("create table aside as select * from oncebox.idempotency_request").await;
    world.store.exec("delete from oncebox.idempotency_request").await;
    let world = world.another_process();
    let put = "insert into oncebox.idempotency_request select * from aside";
    let (answered, _, calls) = between(&database, &world, end, put).await;
    assert_eq!((replayed(answered).body, calls), (there.body, 1));
    assert_eq!(world.effects().await, 1, "of the other one");
}

macro_rules! between {
    ($($name:ident: $what:ident, $end:expr;)*) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            crate::postgres::with_database(stringify!($name), |database| async move {
                let world = World::on(database.store.clone(), &database.url).await;
                $what(database, world, $end).await;
            })
            .await;
        })*
    };
}

// Shown by: taking the savepoint for the claim (no second claim): the refusal is answered beside
// the other run, and the failure says that the key is free.
between! {
    o1_o15_a_refusal_whose_key_another_process_took_meanwhile_is_in_progress: an_open_claim, End::Refuses;
    o1_o15_a_failure_whose_key_another_process_took_meanwhile_is_in_progress: an_open_claim, End::Fails;
    o1_o15_a_refusal_whose_key_another_process_used_meanwhile_gets_its_answer: a_whole_run, End::Refuses;
    o1_o15_a_failure_whose_key_another_process_used_meanwhile_gets_its_answer: a_whole_run, End::Fails;
}
