//! Deadlocks, lost commits, and a store that is away (O1, O29, M60, M75, R27).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use oncebox::policy::operation::{Code, Keyring, Mode, Outcome, Route};
use oncebox::runtime::operation::{Answered, EffectTx, Reply};
use oncebox::store::postgres::PostgresStore;
use oncebox::store::{Base, Basis, Claimed, Fenced, KeyClaim, Keys, StoreOptions};
use tokio::sync::Barrier;

use super::kit::*;
use super::proxy::{Failure, Proxy, When};

/// A world on PostgreSQL, and the same database behind a network that can fail.
async fn behind<F: Future<Output = ()> + Send + 'static>(
    test: &str,
    body: impl FnOnce(World<PostgresStore>, World<PostgresStore>, Proxy) -> F + Send + 'static,
) {
    crate::postgres::with_database(test, |database| async move {
        let direct = World::on(database.store.clone(), &database.url).await;
        let proxy = Proxy::before(&database.url, "sslmode=disable");
        let options = StoreOptions {
            answer_timeout: Some(Duration::from_secs(2)),
            connections_max: 4,
            ..StoreOptions::new(proxy.url.clone())
        };
        let store = PostgresStore::connect(&options).await.unwrap();
        let through = World {
            engine: oncebox::runtime::operation::Engine::builder(store.clone()).build(),
            store,
            ..direct.clone()
        };
        body(direct, through, proxy).await;
    })
    .await;
}

// Shown by: answering 503 without a look; answering the reply without a look (then the second case lies).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o29_a_commit_that_was_lost_sight_of_is_found_out() {
    behind("o29_a_commit_that_was_lost", |direct, through, proxy| async move {
        let endpoint = through.protect(same_tx());
        for (when, key) in [(When::BeforeAnswer, K1), (When::BeforeRequest, K2)] {
            let gate = Gate::open();
            proxy.fail_at("insert into effect", "COMMIT", 0, when, Failure::Cut);
            let answered = run(&through, &endpoint, key, key, effect(&gate)).await;
            assert!(proxy.has_failed(), "it was cut");
            match when {
                // It arrived: the look finds it, and the client never knows.
                When::BeforeAnswer => drop(first(answered)),
                When::BeforeRequest => {
                    assert!(problem(answered, Code::CommitUnknown).code.retryable());
                    first(run(&through, &endpoint, key, key, effect(&gate)).await);
                }
            }
            replayed(run(&through, &endpoint, key, key, effect(&gate)).await);
            let effects = direct.store.number(&format!("select count(*) from effect where text = '{key}'")).await;
            assert_eq!(effects, 1, "{when:?}");
        }
    })
    .await;
}

// Shown by: running the handler where the key cannot be looked for (fail open); a key that is burnt by it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m60_m75_while_the_store_is_away_nothing_runs_and_no_key_is_burnt() {
    behind("m60_while_the_store_is_away", |direct, through, proxy| async move {
        let endpoint = through.protect(same_tx());
        let gate = Gate::open();
        proxy.fails(Failure::Cut);
        for _ in 0..3 {
            let away = problem(run(&through, &endpoint, K1, "a", effect(&gate)).await, Code::StoreUnavailable);
            assert!(away.retry_after.is_some() && away.status == 503);
        }
        assert_eq!(gate.calls(), 0, "the handler did not run");
        proxy.works();
        until("it is back", || async {
            matches!(run(&through, &endpoint, K1, "a", effect(&gate)).await, Answered::Reply { .. })
        })
        .await;
        assert_eq!((gate.calls(), direct.effects().await), (1, 1));
    })
    .await;
}

// Shown by: answering 500 to a deadlock; running one of the two twice without rolling back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r27_a_deadlock_runs_again_and_both_have_one_effect() {
    crate::postgres::with_database("r27_a_deadlock", |database| async move {
        deadlock(World::on(database.store.clone(), &database.url).await).await;
    })
    .await;
}

// Shown by: taking the savepoint that InnoDB took away with the transaction for a handler's doing: the key is UNKNOWN for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r27_a_deadlock_on_mariadb_burns_no_key() {
    let Some(database) = crate::mysql::Db::new("r27_a_deadlock_burns_no_key").await else { return };
    deadlock(World::on(database.store.clone(), &database.url).await).await;
}

/// Two operations, each of which holds what the other wants.
async fn deadlock<S: Sql>(world: World<S>) {
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

// Shown by: comparing in the one statement that waits: its clock stands still, the new lease seems longer than it can be, and
// a live claim is taken over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r22_whoever_waited_for_a_heartbeat_on_mariadb_sees_its_lease() {
    let Some(database) = crate::mysql::Db::new("r22_whoever_waited").await else { return };
    let world = World::on(database.store.clone(), &database.url).await;
    let endpoint = world.protect(Route { mode: Mode::Edge, ..same_tx() });
    let claim = KeyClaim {
        identity: identity("t1", K1),
        principal: scope("t1", "p1").mark(&Keyring::plain()),
        fingerprint: endpoint.fingerprinter().write(&put("a")),
        mode: Mode::Edge,
        operation_id: uuid::Uuid::now_v7(),
        owner: uuid::Uuid::now_v7(),
        lease: Duration::from_secs(600),
    };
    assert!(matches!(world.store.claim(&claim, Basis::New).await.unwrap(), Claimed::Owned(_)));
    let seen = world.record("t1", K1).await.unwrap();
    for takes_over in [false, true] {
        let mut beat = world.store.tx("select epoch from oncebox_idempotency_request for update").await;
        let (store, claim, record) = (world.store.clone(), claim.clone(), seen.clone());
        let waits = tokio::spawn(async move {
            if takes_over {
                !matches!(store.claim(&claim, Basis::TakeOver(&record)).await.unwrap(), Claimed::Owned(_))
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
