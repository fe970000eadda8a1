//! Deadlocks, lost commits, and a store that is away (O1, O29, M60, M75, R22, R27, R28).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use oncebox::HandlerError;
use oncebox::operation::{
    Answered, Asking, Code, EdgeAnswer, EffectTx, Ended, Endpoint, Engine, EngineOptions, Kept, Mode, Outcome,
    Registered, Reply, Route, State,
};
use oncebox::store::{Basis, Fenced, Keys, StoreOptions};
use tokio::sync::Barrier;

use super::kit::*;
use super::proxy::{Failure, Proxy, When};
use super::transactional::runs;

/// The same database behind a network that can fail, through a pool of two connections.
async fn behind_a_network<S: Sql>(direct: &World<S>) -> (World<S>, Proxy) {
    let proxy = Proxy::before(&direct.url, unencrypted(&direct.url));
    let options = StoreOptions {
        answer_timeout: Some(Duration::from_secs(4)),
        connections_max: 2,
        ..StoreOptions::new(proxy.url.clone())
    };
    let store = S::connect(&options).await.unwrap();
    (World { engine: Engine::new(store.clone(), EngineOptions::default()), store, ..direct.clone() }, proxy)
}

on_servers! {
    o29_a_commit_that_was_lost_sight_of_is_found_out,
    o29_a_commit_is_looked_for_beside_a_pool_that_gives_nothing,
    o29_a_guards_commit_that_was_lost_sight_of_is_found_out,
    r28_an_outcome_that_is_not_answered_ends_in_time,
    o1_a_failure_whose_undo_is_not_answered_in_time_is_no_proof_that_nothing_happened,
    m60_m75_while_the_store_is_away_nothing_runs_and_no_key_is_burnt,
    r27_a_deadlock_runs_again_and_burns_no_key,
}

/// A commit is looked for for so long (O29).
const LOOKED_FOR: Duration = Duration::from_secs(1);

/// Keys of tries, one of which must find what it looks for.
const TRIES: [&str; 4] = [K1, K2, "key-0000000000000003", "key-0000000000000004"];

/// Whether a commit that had arrived was not found within the time that it is looked for: this
/// machine stood still, nothing is shown, and another try must show it.
fn stood_still(answered: &Answered, asked: Instant) -> bool {
    let unknown = matches!(answered, Answered::Problem(problem) if problem.code == Code::CommitUnknown);
    unknown && asked.elapsed() >= LOOKED_FOR
}

// Shown by: answering 503 without a look; answering the reply without a look (then the answer of
// the second case is false).
async fn o29_a_commit_that_was_lost_sight_of_is_found_out<S: Sql>(direct: World<S>) {
    let (through, proxy) = behind_a_network(&direct).await;
    let (endpoint, gate) = (through.protect(same_tx()), Gate::open());
    let stands = async |key: &str| {
        replayed(run(&through, &endpoint, key, key, effect(&gate)).await);
        let effects = direct.store.number(&format!("select count(*) from effect where text = '{key}'")).await;
        assert_eq!(effects, 1, "{key}");
    };
    let mut is_found = false;
    for key in TRIES {
        proxy.fail_at("insert into effect", "COMMIT", 0, When::BeforeAnswer, Failure::Cut);
        let asked = Instant::now();
        let answered = run(&through, &endpoint, key, key, effect(&gate)).await;
        assert!(proxy.has_failed(), "it was cut");
        // It arrived: the look finds it, and the client never knows.
        is_found = !stood_still(&answered, asked);
        if is_found {
            first(answered);
        }
        stands(key).await;
        if is_found {
            break;
        }
    }
    assert!(is_found, "no look found it");
    let key = "a-key-that-never-arrives";
    proxy.fail_at("insert into effect", "COMMIT", 0, When::BeforeRequest, Failure::Cut);
    let unknown = problem(run(&through, &endpoint, key, key, effect(&gate)).await, Code::CommitUnknown);
    assert!(proxy.has_failed() && unknown.code.retryable(), "it was cut");
    first(run(&through, &endpoint, key, key, effect(&gate)).await);
    stands(key).await;
}

// Shown by: looking through the pool: 503 for what was committed.
async fn o29_a_commit_is_looked_for_beside_a_pool_that_gives_nothing<S: Sql>(direct: World<S>) {
    let (through, proxy) = behind_a_network(&direct).await;
    let endpoint = through.protect(same_tx());
    for (effects, key) in (1..).zip(TRIES) {
        let gate = Gate::closed();
        proxy.fail_at("insert into effect", "COMMIT", 0, When::BeforeAnswer, Failure::Cut);
        let asking = running(&through, &endpoint, key, &gate);
        gate.begun().await;
        // One of the two connections is the operation's; somebody has the other, and somebody else
        // is the next in line.
        let _held = through.store.pool().acquire().await.unwrap();
        let mut next = std::pin::pin!(through.store.pool().acquire());
        assert!(futures_util::poll!(next.as_mut()).is_pending());
        let asked = Instant::now();
        gate.let_go();
        let answered = asking.await.unwrap();
        assert!(proxy.has_failed(), "it was cut");
        assert_eq!((gate.calls(), direct.effects().await), (1, effects));
        if !stood_still(&answered, asked) {
            first(answered);
            return;
        }
    }
    panic!("no look found it");
}

/// A bridged handler on a connection of the pool.
async fn guarded<S: Sql>(world: &World<S>, endpoint: &Registered, text: &'static str) -> EdgeAnswer<()> {
    guarded_of(K1, world, endpoint, text).await
}

/// The same under another key.
async fn guarded_of<S: Sql>(
    key_text: &str,
    world: &World<S>,
    endpoint: &Registered,
    text: &'static str,
) -> EdgeAnswer<()> {
    let asking = Asking { scope: Some(scope("t1", "p1")), key: key(key_text), command: Arc::new(put(text)) };
    let store = world.store.clone();
    let run = move |guard: Option<oncebox::operation::Guard<S>>| async move {
        let tx = store.tx(&format!("insert into effect (text) values ('{text}')")).await;
        let reply = guard.unwrap().commit(tx, Reply::new(201)).await.unwrap_or_else(|error| {
            // What the layer makes of it is its own; this is what the handler said.
            Reply { body: error.to_string().into_bytes(), ..Reply::new(500) }
        });
        Ended { tag: None, kept: Kept::Whole(reply), answer: () }
    };
    world.engine.execute_edge(endpoint, asking, run).await
}

fn bridged() -> Route {
    Route {
        lease: Duration::from_secs(16),
        timeout: Duration::from_secs(10),
        completion_budget: Duration::from_secs(4),
        ..Route::new(Mode::Bridged)
    }
}

fn answered(answer: EdgeAnswer<()>) -> Answered {
    let EdgeAnswer::Answered(answered) = answer else { panic!("the engine answers: {answer:?}") };
    answered
}

// Shown by: taking a commit whose answer was lost for none (the first case is a failure), and for
// one (the second lies).
async fn o29_a_guards_commit_that_was_lost_sight_of_is_found_out<S: Sql>(direct: World<S>) {
    let (through, proxy) = behind_a_network(&direct).await;
    let endpoint = through.engine.protect(Endpoint::typed::<Put>(bridged())).unwrap();
    proxy.fail_at("insert into effect", "COMMIT", 0, When::BeforeRequest, Failure::Cut);
    problem(answered(guarded(&through, &endpoint, "a").await), Code::CommitUnknown);
    assert!(proxy.has_failed(), "it was cut");
    assert_eq!(direct.effects().await, 0);
    assert_eq!(
        direct.record("t1", K1).await.unwrap().state,
        State::InProgress,
        "the claim stands until its lease ends"
    );
    // Taken over then, and its commit arrives, unheard.
    let (mut armed, still) = (false, AtomicBool::new(false));
    until("the guarded claim is taken over", || {
        if !std::mem::replace(&mut armed, true) {
            proxy.fail_at("insert into effect", "COMMIT", 0, When::BeforeAnswer, Failure::Cut);
        }
        async {
            let asked = Instant::now();
            match answered(guarded(&through, &endpoint, "a").await) {
                Answered::Reply { reply, replayed } => {
                    assert_eq!((reply.status, replayed), (201, still.load(Ordering::SeqCst)), "the look finds it");
                    true
                }
                unknown if stood_still(&unknown, asked) => {
                    still.store(true, Ordering::SeqCst);
                    false
                }
                Answered::Problem(busy) => {
                    assert_eq!(busy.code, Code::InProgress);
                    false
                }
            }
        }
    })
    .await;
    assert!(proxy.has_failed(), "it was cut");
    replayed(answered(guarded(&through, &endpoint, "a").await));
    assert_eq!(direct.effects().await, 1);
    // Where nothing was shown of the look, another key shows it.
    let mut is_found = !still.load(Ordering::SeqCst);
    for (effects, key) in (2..).zip(&TRIES[1..]) {
        if is_found {
            break;
        }
        proxy.fail_at("insert into effect", "COMMIT", 0, When::BeforeAnswer, Failure::Cut);
        let asked = Instant::now();
        let said = answered(guarded_of(key, &through, &endpoint, "a").await);
        assert!(proxy.has_failed() && direct.effects().await == effects, "it was cut, and had arrived");
        is_found = !stood_still(&said, asked);
        if is_found {
            first(said);
        }
    }
    assert!(is_found, "no look found it");
}

// Shown by: taking the silence for an undo: 500 OPERATION_FAILED, by which the key would be free.
async fn o1_a_failure_whose_undo_is_not_answered_in_time_is_no_proof_that_nothing_happened<S: Sql>(direct: World<S>) {
    let (through, proxy) = behind_a_network(&direct).await;
    let endpoint = through.protect(Route { completion_budget: Duration::from_millis(500), ..same_tx() });
    proxy.fail_at("insert into effect", "rollback to", 0, When::BeforeRequest, Failure::Silence);
    let commits = does::<S, _>(|put: &Put, mut tx: EffectTx<'_, S>| {
        let insert = format!("insert into effect (text) values ('{}')", put.text);
        Box::pin(async move {
            S::run(tx.connection(), &insert).await?;
            S::run(tx.connection(), "commit").await?;
            Err(HandlerError::retryable("it goes on after its own commit"))
        })
    });
    let asked = tokio::time::timeout(SOON, run(&through, &endpoint, K1, "a", commits)).await.expect("it is answered");
    assert!(proxy.has_failed(), "it fell silent");
    // The look found what the handler had committed; or nobody answered that either.
    let Answered::Problem(said) = asked else { panic!("it failed") };
    assert!(matches!(said.code, Code::TransactionEnded | Code::CommitUnknown), "{said:?}");
    let retried = run(&direct, &direct.protect(same_tx()), K1, "a", effect(&Gate::open())).await;
    problem(retried, Code::OutcomeUnknown);
    assert_eq!(direct.effects().await, 1);
}

// Shown by: writing the outcome on the plain connection, where nothing bounds an answer: a
// transactional operation and the handler of an edge operation hang.
async fn r28_an_outcome_that_is_not_answered_ends_in_time<S: Sql>(direct: World<S>) {
    let (through, proxy) = behind_a_network(&direct).await;
    let postgres = "update oncebox.idempotency_request r set state";
    let outcome = if S::NAME == "postgres" { postgres } else { "update oncebox_idempotency_request set state" };
    let endpoint = through.protect(same_tx());
    let gate = Gate::open();
    proxy.fail_at("insert into effect", outcome, 0, When::BeforeRequest, Failure::Silence);
    let asked = tokio::time::timeout(SOON, run(&through, &endpoint, K2, "a", effect(&gate))).await;
    problem(asked.expect("it is answered"), Code::StoreUnavailable);
    assert!(proxy.has_failed(), "it fell silent");
    until("nobody holds the key any more", || async {
        matches!(run(&through, &endpoint, K2, "a", effect(&gate)).await, Answered::Reply { .. })
    })
    .await;
    assert_eq!(direct.effects().await, 1);

    let other = through.another_process();
    let endpoint = other.engine.protect(Endpoint::typed::<Put>(bridged())).unwrap();
    proxy.fail_at("insert into effect", "release savepoint", 0, When::BeforeRequest, Failure::Silence);
    let EdgeAnswer::Ran { .. } = guarded(&other, &endpoint, "b").await else { panic!("the handler has ended") };
    assert!(proxy.has_failed(), "it fell silent");
    assert_eq!(direct.effects().await, 1);
    assert_eq!(direct.record("t1", K1).await.unwrap().state, State::FailedRetryable, "it committed nothing");
}

// Shown to fail: with an engine that remembers for good under which keys its store failed.
async fn m60_m75_while_the_store_is_away_nothing_runs_and_no_key_is_burnt<S: Sql>(direct: World<S>) {
    let (through, proxy) = behind_a_network(&direct).await;
    let endpoint = through.protect(same_tx());
    let gate = Gate::open();
    proxy.fails(Failure::Cut);
    for _ in 0..3 {
        let away = problem(run(&through, &endpoint, K1, "a", effect(&gate)).await, Code::StoreUnavailable);
        assert!(away.retry_after.is_some() && away.status == 503);
    }
    assert_eq!(gate.calls(), 0, "the handler did not run");
    // Then it goes away once more, under the handler.
    proxy.fail_at("idempotency_request", "insert into effect", 0, When::BeforeRequest, Failure::Cut);
    proxy.works();
    until("it is back", || async {
        matches!(run(&through, &endpoint, K1, "a", effect(&gate)).await, Answered::Reply { .. })
    })
    .await;
    assert!(proxy.has_failed(), "it went away under the handler");
    assert_eq!((gate.calls(), direct.effects().await), (1, 1));
    let record = direct.record("t1", K1).await.unwrap();
    assert_eq!((record.state, record.attempts), (State::Completed, 1));
}

// A hot standby after a failover answers, and takes no writes: what has its outcome is replayed,
// also behind a first request that was refused; what is new does not run, and its key is not burnt.
//
// Shown by: answering 503 where a claim without a look was refused (then the replay is none).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m60_m75_a_store_that_takes_no_writes_replays_and_runs_nothing() {
    crate::postgres::with_database("m60_m75_a_store_that_takes_no_writes_replays_and_runs_nothing", |database| async move {
        let world = World::on(database.store.clone(), &database.url).await;
        let gate = Gate::open();
        first(run(&world, &world.protect(same_tx()), K1, "a", effect(&gate)).await);
        // What a standby says to every statement that may write.
        world
            .store
            .exec(
                "create function stands_by() returns trigger language plpgsql as \
                 $$ begin raise exception 'cannot execute INSERT in a read-only transaction' using errcode = '25006'; end $$; \
                 create trigger stands_by before insert or update on oncebox.idempotency_request \
                 for each statement execute function stands_by()",
            )
            .await;
        let standby = world.another_process();
        let endpoint = standby.protect(same_tx());
        for _ in 0..2 {
            problem(run(&standby, &endpoint, K2, "a", effect(&gate)).await, Code::StoreUnavailable);
            replayed(run(&standby, &endpoint, K1, "a", effect(&gate)).await);
            problem(run(&standby, &endpoint, K2, "a", effect(&gate)).await, Code::StoreUnavailable);
            problem(run(&standby, &endpoint, K1, "b", effect(&gate)).await, Code::KeyReused);
        }
        world.store.exec("drop trigger stands_by on oncebox.idempotency_request").await;
        first(run(&standby, &endpoint, K2, "a", effect(&gate)).await);
        assert_eq!((gate.calls(), world.effects().await), (2, 2));
    })
    .await;
}

// Shown by: leaving the map with the answer: a second effect before the record stands.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o1_a_key_is_not_free_while_it_is_tried_to_make_its_record_stand() {
    crate::postgres::with_database("o1_a_key_is_not_free_while_it_is_tried_to_make_its_record_stand", |database| async move {
        let world = World::on(database.store.clone(), &database.url).await;
        let endpoint = world.protect(same_tx());
        let body = "begin if new.state like 'UNKNOWN%' then raise exception 'the disk is full'; end if; return new; end";
        world.store.exec(&format!("create function full_disk() returns trigger language plpgsql as $$ {body} $$")).await;
        let trigger = "create trigger full_disk before insert on oncebox.idempotency_request for each row execute function full_disk()";
        world.store.exec(trigger).await;
        let calls = Arc::new(AtomicU32::new(0));
        let statements = &["rollback", "insert into effect (text) values ('out')"];
        let ends = || runs(statements, &calls, false);
        problem(run(&world, &endpoint, K1, "a", ends()).await, Code::TransactionEnded);
        for _ in 0..3 {
            problem(run(&world, &endpoint, K1, "a", ends()).await, Code::InProgress);
        }
        world.store.exec("drop trigger full_disk on oncebox.idempotency_request").await;
        until("its record stands", || async { world.record("t1", K1).await.is_some() }).await;
        until("the key is free", || async {
            matches!(run(&world, &endpoint, K1, "a", ends()).await, Answered::Problem(problem) if problem.code == Code::OutcomeUnknown)
        })
        .await;
        assert_eq!((calls.load(Ordering::SeqCst), world.effects().await), (1, 1));
    })
    .await;
}

/// Runs these, swallowing every error, then fails as a deadlock does.
fn deadlocks_after<S: Sql>(statements: &'static [&'static str], calls: &Arc<AtomicU32>) -> impl Does<S> + use<S> {
    let calls = calls.clone();
    does::<S, _>(move |_: &Put, mut tx: EffectTx<'_, S>| {
        let calls = calls.clone();
        Box::pin(async move {
            if calls.fetch_add(1, Ordering::SeqCst) > 0 {
                return Ok(Outcome::Completed(Reply::new(201)));
            }
            for statement in statements {
                let _ = S::run(tx.connection(), statement).await;
            }
            Err(HandlerError::transient("1213: deadlock found when trying to get lock"))
        })
    })
}

// Shown by: running again where the savepoint is gone and no record is there: two effects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o1_r27_a_deadlock_runs_again_only_where_nothing_was_committed_on_mariadb() {
    let test = "o1_r27_a_deadlock_runs_again_only_where_nothing_was_committed_on_mariadb";
    let Some(database) = crate::mysql::Db::new(test).await else { return };
    let world = World::on(database.store.clone(), &database.url).await;
    world.store.exec("create procedure commits() begin commit; end").await;
    let endpoint = world.protect(same_tx());
    const WRITE: &str = "insert into effect (text) values ('out')";
    let cases: [(&'static [&'static str], bool); 8] = [
        (&["rollback"], true),
        (&["rollback", WRITE], true),
        (&["rollback", WRITE, "savepoint mine", WRITE, "rollback to mine", "rollback"], true),
        (&["rollback", WRITE, "commit"], false),
        (&["rollback", WRITE, "begin"], false),
        (&["rollback", WRITE, "create table if not exists made (a int)"], false),
        (&["rollback", WRITE, "call commits()"], false),
        (&["rollback", "set session autocommit = 1", WRITE], false),
    ];
    for (number, (statements, again)) in cases.into_iter().enumerate() {
        world.store.exec("delete from effect").await;
        let (key, calls) = (format!("{K1}-{number}"), Arc::new(AtomicU32::new(0)));
        let answered = run(&world, &endpoint, &key, "a", deadlocks_after(statements, &calls)).await;
        if again {
            first(answered);
            assert_eq!((calls.load(Ordering::SeqCst), world.effects().await), (2, 0), "{statements:?}");
        } else {
            problem(answered, Code::TransactionEnded);
            assert_eq!((calls.load(Ordering::SeqCst), world.effects().await), (1, 1), "{statements:?}");
            assert_eq!(world.record("t1", &key).await.unwrap().state, State::UnknownRequiresRecovery);
        }
    }
}

/// Two operations, each of which holds what the other wants. Shown by: answering 500 to a deadlock;
/// running one of the two twice without rolling back; on MariaDB, taking the savepoint that InnoDB
/// took away with the transaction for a handler's doing: the key is UNKNOWN for ever.
async fn r27_a_deadlock_runs_again_and_burns_no_key<S: Sql>(world: World<S>) {
    world.store.exec("create table place (name varchar(10) primary key, n int not null)").await;
    world.store.exec("insert into place values ('x', 0), ('y', 0)").await;
    let endpoint = world.protect(same_tx());
    let (meet, calls) = (Arc::new(Barrier::new(2)), Arc::new(AtomicU32::new(0)));
    let mut both = tokio::task::JoinSet::new();
    for (key, one, two) in [(K1, "x", "y"), (K2, "y", "x")] {
        let (world, endpoint, meet, calls) = (world.clone(), endpoint.clone(), meet.clone(), calls.clone());
        let tried = Arc::new(AtomicU32::new(0));
        let handler = does::<S, _>(move |_: &Put, mut tx: EffectTx<'_, S>| {
            let (meet, calls, tried) = (meet.clone(), calls.clone(), tried.clone());
            Box::pin(async move {
                calls.fetch_add(1, Ordering::SeqCst);
                let update = |name| format!("update place set n = n + 1 where name = '{name}'");
                S::run(tx.connection(), &update(one)).await?;
                if tried.fetch_add(1, Ordering::SeqCst) == 0 {
                    meet.wait().await;
                }
                S::run(tx.connection(), &update(two)).await?;
                Ok(Outcome::Completed(Reply::new(201)))
            })
        });
        both.spawn(async move { run(&world, &endpoint, key, "a", handler).await });
    }
    for answered in both.join_all().await {
        first(answered);
    }
    assert_eq!(calls.load(Ordering::SeqCst), 3, "one of them ran again");
    assert_eq!(world.store.number("select count(*) from place where n = 2").await, 2);
}

// Shown by: comparing in the one statement that waits: its clock stands still, the new lease seems
// longer than it can be, and a live claim is taken over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r22_whoever_waited_for_a_heartbeat_on_mariadb_sees_its_lease() {
    let test = "r22_whoever_waited_for_a_heartbeat_on_mariadb_sees_its_lease";
    let Some(database) = crate::mysql::Db::new(test).await else { return };
    let world = World::on(database.store.clone(), &database.url).await;
    let endpoint = world.protect(Route { mode: Mode::Edge, ..same_tx() });
    let claim = claim(&endpoint, K1, Mode::Edge, Duration::from_secs(600));
    assert!(world.store.claim(&claim, Basis::New).await.unwrap().is_some());
    let seen = world.record("t1", K1).await.unwrap();
    for takes_over in [false, true] {
        let mut beat = world.store.tx("select epoch from oncebox_idempotency_request for update").await;
        let (store, claim, record) = (world.store.clone(), claim.clone(), seen.clone());
        let waits = tokio::spawn(async move {
            if takes_over {
                store.claim(&claim, Basis::TakeOver(&record)).await.unwrap().is_none()
            } else {
                store.mark_unknown(&record).await.unwrap() == Fenced::LostOwnership
            }
        });
        database.until_waiting(1, "%for update%").await;
        let extended = "update oncebox_idempotency_request \
            set lease_until = utc_timestamp(6) + interval round(lease_seconds * 1000000) microsecond";
        oncebox::store::mysql::MySqlStore::run(&mut beat, extended).await.unwrap();
        beat.commit().await.unwrap();
        assert!(waits.await.unwrap(), "a live claim stays its owner's (takes over: {takes_over})");
    }
}
