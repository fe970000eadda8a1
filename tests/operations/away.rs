//! The database goes away, and comes back, behind a service that goes on (M60, O29); a pool that
//! slow operations use up.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use oncebox::observe::Health;
use oncebox::operation::{Code, EngineOptions, Route, WhileRunning};
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, Keys, Schema, StoreOptions};

use super::crowd::door;
use super::hearing::Heard;
use super::kit::*;
use super::provider::ProviderProcess;
use super::proxy::{Failure, Proxy, When};
use super::service::{Service, count, payment, records};
use super::standstill::Standstill;
use super::support::eventually;

/// What a request takes at most that is refused because the database is away, and the first one
/// that it answers when it is back.
const AT_MOST: Duration = Duration::from_secs(2);

/// A database, and the network before it, which can fail.
async fn network(direct: String) -> (String, Proxy) {
    let proxy = Proxy::before(&direct, unencrypted(&direct));
    (direct, proxy)
}

on_empty_servers! {
    crate::away::network;
    while_the_database_is_away_every_request_is_refused_within_two_seconds_and_no_key_is_burnt,
    a_service_whose_connection_is_lost_while_it_starts_starts_all_the_same,
}

const BODIES: [(&str, &str); 3] = [("/payments", "payment"), ("/charges", "charge"), ("/notes", "note")];

fn body(path: &str, number: usize) -> String {
    if path == "/notes" { format!(r#"{{"text":"{number}"}}"#) } else { payment(1, &format!("order-{number}")) }
}

async fn answered<T>(what: &str, at_most: Duration, asked: impl Future<Output = T>) -> T {
    let (still, began) = (Standstill::watch(), Instant::now());
    let answer = asked.await;
    let took = began.elapsed();
    assert!(took < still.allows(at_most), "{what}: {took:?}");
    answer
}

// Shown by: an engine that asks nobody whether its store is there (30 s each where connections are
// refused, 40 s behind silence); `/readyz` that asks the database; calls that are not given up.
async fn while_the_database_is_away_every_request_is_refused_within_two_seconds_and_no_key_is_burnt(
    (direct, proxy): (String, Proxy),
) {
    let provider = ProviderProcess::start();
    let service =
        Service::ready(Service::begin(&proxy.url, &["--provider", &provider.url, "--deployment", "database"])).await;
    let get = async |path: &str| send(client().get(format!("{}{path}", service.url))).await;
    for (round, failure) in [Failure::Cut, Failure::Silence].into_iter().enumerate() {
        assert_eq!(get("/readyz").await.status, 200);
        proxy.fails(failure);
        for number in 0..3 {
            // Each key of its own, all at once, and more than the pool has connections.
            let mut asking = tokio::task::JoinSet::new();
            for (path, _) in BODIES {
                for at in 0..8 {
                    let (key, number) = (format!("{K1}-{round}-{number}-{at}"), (round * 10 + number) * 100 + at);
                    let request = service.ask(path, &key, &body(path, number));
                    asking.spawn(answered(path, AT_MOST, async move { (path, send(request).await) }));
                }
            }
            for (path, answer) in asking.join_all().await {
                println!("{failure:?} {path}: {}", answer.status);
                answer.is(Code::StoreUnavailable);
            }
            for path in ["/payments/pay_1", "/notes/note_1"] {
                answered(path, AT_MOST, service.get(path)).await.is(Code::StoreUnavailable);
            }
            let ready = answered("/readyz", Duration::from_secs(1), get("/readyz")).await;
            assert_eq!(ready.status, 503, "{}", String::from_utf8_lossy(&ready.body));
            assert_eq!(answered("/metrics", AT_MOST, get("/metrics")).await.status, 200);
        }
        for (path, table) in BODIES {
            assert_eq!(count(&direct, &format!("select count(*) from {table}")).await, round as i64, "{path} ran");
        }
        assert_eq!(records(&direct).await, 3 * round as i64, "no key was burnt");
        proxy.works();
        let back = Instant::now();
        let still = Standstill::watch();
        until("it is ready", || async { get("/readyz").await.status == 200 }).await;
        let mut recovered = false;
        for (path, table) in BODIES {
            let was_pending = AtomicBool::new(false);
            let key = format!("{K1}-{round}-0-0");
            // Right after the cut another connection of its pool may still be one of before. Where
            // it breaks before the call, the answer is 503; between two phases of a call it is 202,
            // and the outcome may then be made before it is asked for.
            let answer = eventually(path, SOON, || async {
                let answer = service.post(path, &key, &body(path, round * 1_000)).await;
                was_pending.fetch_or(answer.status == 202, Ordering::Relaxed);
                Some(answer).filter(|answer| ![202, 503].contains(&answer.status))
            })
            .await;
            assert_eq!(answer.status, 201, "{path}: {answer:?}");
            assert!(!answer.is_replayed() || was_pending.load(Ordering::Relaxed), "{path}: {answer:?}");
            let ran = count(&direct, &format!("select count(*) from {table}")).await;
            assert_eq!(ran, round as i64 + 1, "{path} ran once more");
            recovered |= was_pending.load(Ordering::Relaxed);
        }
        // What was pending waited for the recovery, which has a pace of its own.
        let took = back.elapsed();
        assert!(recovered || took < still.allows(AT_MOST), "{failure:?}: back after {took:?}");
    }
}

// Shown by: reading the id of the deployment once.
async fn a_service_whose_connection_is_lost_while_it_starts_starts_all_the_same((_, proxy): (String, Proxy)) {
    let provider = ProviderProcess::start();
    proxy.fail_at("", "select deployment_id", 0, When::BeforeRequest, Failure::Cut);
    let service =
        Service::ready(Service::begin(&proxy.url, &["--provider", &provider.url, "--deployment", "database"])).await;
    assert!(proxy.has_failed(), "it was cut");
    // Right after the cut a connection may be refused with 503, as to any client.
    until("it charges", || async { service.post("/charges", K1, &payment(1, "order-1")).await.status == 201 }).await;
}

// SQLite has one writer at a time, and a bound on the wait for a turn.
mod crowded {
    use super::{
        slow_operations_leave_room_for_what_is_short_and_the_rest_is_refused_soon,
        what_waits_for_another_process_when_the_database_goes_away_has_not_begun,
    };

    crate::kit::on_servers!(
        slow_operations_leave_room_for_what_is_short_and_the_rest_is_refused_soon,
        what_waits_for_another_process_when_the_database_goes_away_has_not_begun,
    );
}

mod heard {
    use super::what_waits_for_a_place_when_the_database_goes_away_has_not_begun;

    crate::observed::heard_on_servers!(what_waits_for_a_place_when_the_database_goes_away_has_not_begun);
}

// Shown by: no bound on what begins: the fourth waits for a connection as long as the pool lets it,
// and a replay behind it.
async fn slow_operations_leave_room_for_what_is_short_and_the_rest_is_refused_soon<S: Sql>(world: World<S>) {
    let world = world.with_pool_of(4).await;
    let (gate, open) = (Gate::closed(), Gate::open());
    let door = |gate: &Gate| door(&world, oncebox::operation::Endpoint::typed::<Put>(same_tx()), gate);
    let (slow, quick) = (serve(door(&gate)).await + "/put", serve(door(&open)).await + "/put");
    let ask = async |url: &str, key: &str| send(post(url, key, r#"{"text":"a"}"#)).await;
    // Where a busy machine gives no connection in time the answer is 503, and a client asks again.
    let is_made = |key: String| {
        let quick = quick.clone();
        async move { until("it is made", || async { ask(&quick, &key).await.status == 201 }).await }
    };
    is_made(K1.to_owned()).await;
    let mut running = Vec::new();
    for number in 0..3 {
        // Here too a busy machine may give no connection in time.
        let begins = async {
            loop {
                let mut asked = tokio::spawn(send(post(&slow, &format!("{K2}-{number}"), r#"{"text":"a"}"#)));
                tokio::select! {
                    () = gate.begun() => return running.push(asked),
                    answer = &mut asked => assert_eq!(answer.unwrap().status, 503),
                }
            }
        };
        answered("a slow call begins", SOON, begins).await;
    }
    // A second, on a busy machine; a pool lets whoever stands in line for a connection wait for 30.
    let enough = Duration::from_secs(6);
    let refused = async |key: &str| {
        answered("another key", enough, ask(&quick, key)).await.is(Code::StoreUnavailable);
    };
    // Many at once wait no longer than one.
    let keys: Vec<String> = (0..20).map(|number| format!("{K2}-refused-{number}")).collect();
    futures_util::future::join_all(keys.iter().map(|key| refused(key))).await;
    let replay = until("a replay", || async { ask(&quick, K1).await.is_replayed() });
    answered("a replay", enough, replay).await;
    answered("a duplicate", enough, ask(&quick, &format!("{K2}-0"))).await.is(Code::InProgress);
    for _ in 0..3 {
        gate.let_go();
    }
    for asked in running {
        let answer = asked.await.unwrap();
        assert!([201, 503].contains(&answer.status), "{answer:?}");
    }
    for number in 0..3 {
        is_made(format!("{K2}-{number}")).await;
    }
    // The keys of those that were refused are free.
    is_made(keys[0].clone()).await;
    assert_eq!(world.effects().await, 5, "one of each key that was made, none of those that were refused");
}

// Shown to fail: with a wait for a place that does not end when the database goes away, because its
// request then gets 503 `IDEMPOTENCY_COMMIT_UNKNOWN`.
async fn what_waits_for_a_place_when_the_database_goes_away_has_not_begun<S: Sql>(direct: World<S>, heard: Heard) {
    let (url, proxy) = network(direct.url.clone()).await;
    for round in 0..5 {
        let through = World { url: proxy.url.clone(), ..direct.clone() }.with_pool_of(4).await;
        let (endpoint, gate) = (through.protect(same_tx()), Gate::closed());
        let ask = |name: String| running(&through, &endpoint, name.leak(), &gate);
        let slow = [1, 2, 3].map(|number| ask(format!("key-slow-of-round-{round}-{number}")));
        for _ in &slow {
            gate.begun().await;
        }
        let (sent, admitted) = (proxy.requests(), failed_to_admit(&heard));
        let waiting = [1, 2, 3, 4, 5].map(|number| ask(format!("key-that-waits-{round}-{number}")));
        until("their keys are looked for", || async { proxy.requests() >= sent + 5 }).await;
        proxy.fails(Failure::Cut);
        let mut in_vain = 0;
        for asked in waiting {
            // One that has waited for too long is told so: that is no news of the database.
            in_vain += u32::from(problem(asked.await.unwrap(), Code::StoreUnavailable).detail.is_some());
        }
        for asked in slow {
            problem(asked.await.unwrap(), Code::CommitUnknown);
        }
        assert_eq!((gate.calls(), count(&url, "select count(*) from effect").await), (3, 0));
        if failed_to_admit(&heard) - admitted > f64::from(in_vain) {
            return;
        }
        // The signs of life count as requests: all were still to look for their keys.
        proxy.works();
    }
    panic!("none waited for a place when the database went away");
}

/// How many have waited for a place and got none.
fn failed_to_admit(heard: &Heard) -> f64 {
    heard.metric("oncebox_idempotency_store_error_count", &[("operation", "put"), ("stage", "admit")])
}

// Shown to fail: with a wait in the task of a run, and a grace for such a task (`reach`) that is
// shorter than the pause between two looks, because the request then gets 503
// `IDEMPOTENCY_COMMIT_UNKNOWN`.
async fn what_waits_for_another_process_when_the_database_goes_away_has_not_begun<S: Sql>(direct: World<S>) {
    let (url, proxy) = network(direct.url.clone()).await;
    let through = World { url: proxy.url.clone(), ..direct.clone() }.with_pool_of(10).await;
    let (lease, timeout) = (Duration::from_secs(120), Duration::from_secs(90));
    let route = Route { while_running: WhileRunning::Wait, wait_max: SOON, lease, timeout, ..same_tx() };
    let gate = Gate::closed();
    let runs = running(&direct, &direct.protect(route.clone()), K1, &gate);
    gate.begun().await;
    let sent = proxy.requests();
    let waiting: Vec<_> = (0..4)
        .map(|_| {
            let process = through.another_process();
            running(&process, &process.protect(route.clone()), K1, &gate)
        })
        .collect();
    // Each of them has made its claim in vain, and rests half a second between two looks. On a
    // machine without time for the signs of life one may have its answer already: the same one.
    let is_answered = || waiting.iter().any(tokio::task::JoinHandle::is_finished);
    until("they wait", || async { proxy.requests() >= sent + 4 * 80 || is_answered() }).await;
    proxy.fails(Failure::Cut);
    assert!(!waiting.iter().all(tokio::task::JoinHandle::is_finished), "some wait when it goes away");
    for asked in waiting {
        problem(asked.await.unwrap(), Code::StoreUnavailable);
    }
    gate.let_go();
    first(runs.await.unwrap());
    assert_eq!((gate.calls(), count(&url, "select count(*) from effect").await), (1, 1));
}

// Shown by: a health that knows signs of life only; one that shows it until the next request.
#[tokio::test]
async fn a_service_without_the_schema_is_not_ready_and_says_so_until_it_is_migrated() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", directory.path().join("operations.db").display());
    let unmade = SqliteStore::connect(&StoreOptions::new(url.clone())).await.unwrap();
    let unread = unmade.find(&identity("t1", K1)).await.unwrap_err();
    assert!(unread.to_string().contains("operations.db is not there; run `oncebox migrate up`"), "{unread}");
    let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(url.clone()) }).await.unwrap();
    let health = Health::default();
    let world =
        World::on(store, &url).await.process(EngineOptions { health: health.clone(), ..EngineOptions::default() });
    let route = world.protect(same_tx());
    problem(run(&world, &route, K1, "a", effect(&Gate::open())).await, Code::StoreUnavailable);
    let lines = health.lines().join("\n");
    assert!(!health.is_ready() && lines.contains("run `oncebox migrate up`"), "{lines}");
    world.store.migrate().await.unwrap();
    until("it is ready", || async { health.is_ready() }).await;
    assert_eq!(health.lines().len(), 1, "{:?}", health.lines());
    first(run(&world, &route, K1, "a", effect(&Gate::open())).await);
}
