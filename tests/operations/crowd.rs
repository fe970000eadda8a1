//! Many at once, and a client that goes away (M114, pitfalls 2 and 4).

use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::Request;
use axum::routing::post as route_post;
use futures_util::future::BoxFuture;
use oncebox::HandlerError;
use oncebox::http::idempotency::TypedOperation;
use oncebox::operation::{
    Answered, Code, EffectTx, Endpoint, FingerprintWriter, IdempotentCommand, Outcome, Reply, Route, WhileRunning,
};

use super::gone::goes_away;
use super::kit::*;
use crate::standstill::Standstill;

on_all! {
    pitfall_2_a_client_that_goes_away_does_not_end_the_handler,
    m114_a_thousand_duplicates_have_one_effect,
    o15_a_finished_key_is_never_called_in_progress,
}

// SQLite has one writer at a time.
mod crowded {
    use super::a_slow_operation_leaves_places_to_others;

    crate::kit::on_servers!(a_slow_operation_leaves_places_to_others);
}

pub(crate) fn door<S: Sql>(world: &World<S>, endpoint: Endpoint, gate: &Gate) -> Router {
    let door = TypedOperation::<S, Put>::new(&world.engine, endpoint).unwrap();
    let gate = gate.clone();
    let handler = move |request: Request| {
        let (door, gate) = (door.clone(), gate.clone());
        async move {
            door.serve(request, move |asked, mut tx| {
                let gate = gate.clone();
                Box::pin(async move {
                    let text = &asked.command.text;
                    S::run(tx.connection(), &format!("insert into effect (text) values ('{text}')")).await?;
                    gate.pass().await;
                    Ok(Outcome::Completed(made(text, tx.operation_id())))
                })
            })
            .await
        }
    };
    Router::new().route("/put", route_post(handler))
}

// Shown by: running the handler in the request's own future (axum drops it: started 1, finished 0).
async fn pitfall_2_a_client_that_goes_away_does_not_end_the_handler<S: Sql>(world: World<S>) {
    let gate = Gate::closed();
    let base = serve(door(&world, Endpoint::typed::<Put>(same_tx()), &gate)).await;
    goes_away(&base, "/put", r#"{"text":"a"}"#, &gate).await;
    let url = base + "/put";
    send(post(&url, K1, r#"{"text":"a"}"#)).await.is(Code::InProgress);
    gate.let_go();
    world.completes(K1).await;
    let again = send(post(&url, K1, r#"{"text":"a"}"#)).await;
    assert!(again.status == 201 && again.is_replayed(), "{again:?}");
    assert_eq!((gate.calls(), world.effects().await), (1, 1));
    assert!(world.engine.drain(SOON).await);
}

// Shown by: an engine without the map and the lock (503 from the pool); a store without its primary
// key.
async fn m114_a_thousand_duplicates_have_one_effect<S: Sql>(world: World<S>) {
    let (endpoint, other) = (world.protect(same_tx()), world.another_process());
    let there = other.protect(same_tx());
    let gate = Gate::open();
    let mut racing = tokio::task::JoinSet::new();
    for number in 0..1_000 {
        let (world, endpoint) =
            if number % 2 == 0 { (world.clone(), endpoint.clone()) } else { (other.clone(), there.clone()) };
        let gate = gate.clone();
        racing.spawn(async move { run(&world, &endpoint, K1, "a", effect(&gate)).await });
    }
    let (mut firsts, mut replays, mut bodies) = (0, 0, std::collections::HashSet::new());
    for answered in racing.join_all().await {
        match answered {
            Answered::Reply { reply, replayed } => {
                if replayed {
                    replays += 1
                } else {
                    firsts += 1
                }
                bodies.insert(reply.body);
            }
            Answered::Problem(problem) => assert_eq!(problem.code, Code::InProgress),
        }
    }
    assert_eq!((firsts, bodies.len(), gate.calls(), world.effects().await), (1, 1, 1, 1), "{replays} replays");
}

// Shown by: the lock before the read (528 of 640 false 409).
async fn o15_a_finished_key_is_never_called_in_progress<S: Sql>(world: World<S>) {
    let endpoint = world.protect(same_tx());
    let gate = Gate::open();
    let one = first(run(&world, &endpoint, K1, "a", effect(&gate)).await);
    let mut racing = tokio::task::JoinSet::new();
    for number in 0..200 {
        let world = if number % 2 == 0 { world.clone() } else { world.another_process() };
        let gate = gate.clone();
        racing.spawn(async move {
            let endpoint = world.protect(same_tx());
            run(&world, &endpoint, K1, "a", effect(&gate)).await
        });
    }
    for answered in racing.join_all().await {
        assert_eq!(replayed(answered).body, one.body);
    }
    assert_eq!(gate.calls(), 1);
}

/// The operation of others, of the same engine.
const OTHER: &str = "other";

/// The same command as another operation.
#[derive(Debug, Clone)]
struct Other;

impl IdempotentCommand for Other {
    const OPERATION: &'static str = OTHER;
    const VERSION: u32 = 1;

    fn fingerprint(&self, _: u32, _: &mut FingerprintWriter) {}
}

/// One effect and 201.
fn at_once<S: Sql>() -> impl for<'t> Fn(&'t Other, EffectTx<'t, S>) -> BoxFuture<'t, Done> + Send + Sync + 'static {
    fn typed<S: Sql, F>(handler: F) -> F
    where
        F: for<'t> Fn(&'t Other, EffectTx<'t, S>) -> BoxFuture<'t, Done> + Send + Sync + 'static,
    {
        handler
    }
    typed::<S, _>(|_: &Other, mut tx: EffectTx<'_, S>| {
        Box::pin(async move {
            S::run(tx.connection(), "insert into effect (text) values ('other')").await?;
            Ok(Outcome::Completed(Reply::new(201)))
        })
    })
}

type Done = Result<Outcome<Reply>, HandlerError>;

// Thirty keys of one operation stand still in a pool of ten. Shown by: no share of an operation:
// all places are theirs, and the other operation gets 503 until one of them ends.
async fn a_slow_operation_leaves_places_to_others<S: Sql>(world: World<S>) {
    let world = world.with_pool_of(10).await;
    let (slow, other) = (world.protect(same_tx()), world.engine.protect(Endpoint::typed::<Other>(same_tx())).unwrap());
    let gate = Gate::closed();
    let mut asked = tokio::task::JoinSet::new();
    let ask = |number: u32| {
        let (world, slow, gate) = (world.clone(), slow.clone(), gate.clone());
        async move { run(&world, &slow, &format!("key-slow-000000{number:03}"), "a", effect(&gate)).await }
    };
    for number in 0..30 {
        asked.spawn(ask(number));
    }
    // As many as the share holds run, and all others are refused: on a machine that is too busy to
    // give a connection in time, perhaps one more, in whose place another one asks.
    let mut refused = 0;
    let used_up = async {
        while asked.len() > 6 || gate.calls() < 6 {
            while let Some(answered) = asked.try_join_next() {
                problem(answered.unwrap(), Code::StoreUnavailable);
                refused += 1;
                if asked.len() < 6 {
                    asked.spawn(ask(30 + refused));
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, used_up).await.expect("the share is used up");
    assert!(refused >= 24, "{refused}");
    for number in 0..5 {
        let still = Standstill::watch();
        let (began, scope) = (Instant::now(), Some(scope("t1", "p1")));
        let asked = key(&format!("key-other-000000{number:02}"));
        let answered = world.engine.execute_transactional(&other, scope, asked, Other, at_once::<S>()).await;
        assert_eq!(first(answered).status, 201);
        let took = began.elapsed();
        assert!(took < still.allows(ANOTHER_KEY), "another operation's key waited for {took:?}");
    }
    for _ in 0..6 {
        gate.let_go();
    }
    while let Some(answered) = asked.join_next().await {
        first(answered.unwrap());
    }
    assert_eq!((gate.calls(), world.effects().await), (6, 6 + 5));
}

/// What another key may take beside runs that stand still, or duplicates that wait.
const ANOTHER_KEY: Duration = Duration::from_secs(1);

// Shown by: waiting inside a transaction; duplicates that hold a connection while they wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o15_fifty_duplicates_on_a_pool_of_two_starve_nobody() {
    crate::postgres::with_database("o15_fifty_duplicates", |database| async move {
        let world = World::on(database.store.clone(), &database.url).await;
        // What the same operation takes at the same time where no duplicate is: a busy machine
        // slows both down.
        let control = world.with_pool_of(2).await;
        let unhindered = control.protect(same_tx());
        for while_running in [WhileRunning::Conflict, WhileRunning::Wait] {
            let world = world.with_pool_of(2).await;
            let other = world.another_process();
            let (lease, timeout) = (Duration::from_secs(120), Duration::from_secs(90));
            let route = Route { while_running, wait_max: Duration::from_secs(10), lease, timeout, ..same_tx() };
            let (endpoint, there) = (world.protect(route.clone()), other.protect(route));
            let key = format!("{K1}-{while_running:?}");
            let (gate, open) = (Gate::closed(), Gate::open());
            let running = tokio::spawn({
                let (world, endpoint, gate, key) = (world.clone(), endpoint.clone(), gate.clone(), key.clone());
                async move { run(&world, &endpoint, &key, "a", effect(&gate)).await }
            });
            gate.begun().await;
            let mut duplicates = tokio::task::JoinSet::new();
            for number in 0..50 {
                let (world, endpoint) =
                    if number % 2 == 0 { (world.clone(), endpoint.clone()) } else { (other.clone(), there.clone()) };
                let (gate, key) = (gate.clone(), key.clone());
                duplicates.spawn(async move { run(&world, &endpoint, &key, "a", effect(&gate)).await });
            }
            for number in 0..3 {
                let key = format!("{K2}-{while_running:?}-{number}");
                let control_key = format!("{key}-control");
                let still = Standstill::watch();
                let (took, alone) = tokio::join!(
                    took(run(&world, &endpoint, &key, "b", effect(&open))),
                    took(run(&control, &unhindered, &control_key, "b", effect(&open)))
                );
                // Before it in the pool, and again before its commit, stand the short turns of
                // those whom the map does not answer, each no longer than the whole operation takes
                // alone. Behind one that holds a connection while it waits it would be ten seconds,
                // and behind fifty more.
                let bound = (still.allows(ANOTHER_KEY) + alone * 25).min(Duration::from_secs(9));
                assert!(took < bound, "{while_running:?}: another key waited for {took:?}, alone it took {alone:?}");
            }
            for answered in duplicates.join_all().await {
                problem(answered, Code::InProgress);
            }
            gate.let_go();
            first(running.await.unwrap());
            assert_eq!(gate.calls(), 1);
        }
    })
    .await;
}

async fn took(first_request: impl Future<Output = Answered>) -> Duration {
    let asked = Instant::now();
    first(first_request.await);
    asked.elapsed()
}
