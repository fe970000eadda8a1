//! What an operator sees of the engine: metrics, gauges, spans (M28, M103 to M105, M113, O12). Each
//! test hears its own thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::post as route_post;
use oncebox::HandlerError;
use oncebox::adapter::hex;
use oncebox::http::idempotency::IdempotencyLayer;
use oncebox::operation::{
    Code, EffectTx, Endpoint, Engine, EngineOptions, Guard, Mode, Outcome, Reply, Retention, Route, WhileRunning,
};
use oncebox::sqlx::query_scalar;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Basis, Keys};
use tracing::Level;

use super::crowd::door;
use super::faulty::{Faults, Faulty};
use super::hearing::{Heard, hear};
use super::kit::*;
use super::layer::{edge, layered};
use super::stale::committed_claim;
use super::transactional::runs;

/// Runs each test on PostgreSQL and MariaDB, and gives it what is said and counted on its own
/// thread.
macro_rules! heard_on_servers {
    ($($name:ident),* $(,)?) => {
        mod mariadb {
            $(
                #[tokio::test]
                async fn $name() {
                    let (heard, _hearing) = crate::hearing::hear();
                    let Some(database) = crate::mysql::Db::new(stringify!($name)).await else { return };
                    let world = crate::kit::World::on(database.store.clone(), &database.url).await;
                    super::$name(world, heard).await;
                }
            )*
        }
        mod postgres {
            $(
                #[tokio::test]
                async fn $name() {
                    let (heard, _hearing) = crate::hearing::hear();
                    crate::postgres::with_database(stringify!($name), |database| async move {
                        let world = crate::kit::World::on(database.store.clone(), &database.url).await;
                        super::$name(world, heard).await;
                    })
                    .await;
                }
            )*
        }
    };
}

pub(crate) use heard_on_servers;

/// The same on SQLite too.
macro_rules! heard_on_all {
    ($($name:ident),* $(,)?) => {
        mod sqlite {
            $(
                #[tokio::test]
                async fn $name() {
                    let (heard, _hearing) = crate::hearing::hear();
                    super::$name(crate::kit::sqlite().await, heard).await;
                }
            )*
        }
        crate::observed::heard_on_servers!($($name),*);
    };
}

heard_on_all! {
    m28_another_command_under_a_key_is_said_aloud_and_never_gets_the_failure_that_is_kept,
    m104_a_key_that_stays_locked_is_counted,
    o1_a_transaction_that_its_handler_ended_raises_the_alarm,
}

const CLAIMS: &str = "oncebox_idempotency_claim_count";
const REJECTED: &str = "oncebox_idempotency_rejected_count";
const STORE_ERRORS: &str = "oncebox_idempotency_store_error_count";
const CONFLICTS: &str = "oncebox_idempotency_conflict_different_request_count";
const PRINCIPALS: &str = "oncebox_idempotency_principal_mismatch_count";
const EXPIRED: &str = "oncebox_idempotency_expired_retry_count";
const LOST: &str = "oncebox_idempotency_heartbeat_lost_count";
const IN_PROGRESS: &str = "oncebox_idempotency_in_progress_count";
const RECOVERY: &str = "oncebox_idempotency_recovery_count";
const ENDED: &str = "oncebox_idempotency_transaction_ended_count";
const LOCKED: &str = "oncebox_idempotency_lock_timeout_count";
const PURGED: &str = "oncebox_idempotency_purged_count";
const AGE: &str = "oncebox_idempotency_in_progress_age_max";
const UNKNOWN: &str = "oncebox_idempotency_unknown_state_count";
const OPERATION: &str = "oncebox_idempotency_operation_info";

fn of_put(heard: &Heard, name: &str) -> f64 {
    heard.metric(name, &[("operation", "put")])
}

fn refused(heard: &Heard, code: Code) -> f64 {
    heard.metric(REJECTED, &[("operation", "put"), ("code", code.as_str())])
}

/// The hash of a key as `oncebox keys` lists it: the first 12 digits of the record's digest.
fn hash(key: &str) -> String {
    hex(&identity("t1", key).digest())[..12].to_owned()
}

/// A world whose engine takes bodies of a thousand bytes in all.
async fn narrow() -> World<SqliteStore> {
    sqlite().await.process(EngineOptions { body_memory_max: 1_000, ..EngineOptions::default() })
}

// Shown by: answering without counting.
#[tokio::test]
async fn m104_what_a_typed_door_refuses_by_itself_is_counted() {
    let (heard, _hearing) = hear();
    let world = narrow().await;
    let gate = Gate::open();
    let url = serve(door(&world, Endpoint::typed::<Put>(Route { request_body_max: 2_000, ..same_tx() }), &gate)).await
        + "/put";
    let text = |length: usize| format!(r#"{{"text":"{}"}}"#, "a".repeat(length));
    send(post(&url, K1, "{")).await.is(Code::RequestInvalid);
    send(post(&url, K1, r#"{"text":1}"#)).await.is(Code::RequestInvalid);
    send(post(&url, K1, text(2_000))).await.is(Code::BodyTooLarge);
    send(post(&url, K1, text(1_500))).await.is(Code::BodyMemoryExceeded);
    let untyped = client().post(&url).header("idempotency-key", K1).header("content-type", "text/plain").body("a");
    send(untyped).await.is(Code::UnsupportedMediaType);
    // What the engine refuses before a body is read.
    send(post(&url, "short", text(1))).await.is(Code::KeyInvalid);
    send(client().post(&url).body("a")).await.is(Code::KeyRequired);
    for (code, times) in [
        (Code::RequestInvalid, 2.0),
        (Code::BodyTooLarge, 1.0),
        (Code::BodyMemoryExceeded, 1.0),
        (Code::UnsupportedMediaType, 1.0),
        (Code::KeyInvalid, 1.0),
        (Code::KeyRequired, 1.0),
    ] {
        assert_eq!(refused(&heard, code), times, "{code}");
    }
    assert_eq!((of_put(&heard, REJECTED), of_put(&heard, CLAIMS), gate.calls()), (7.0, 0.0, 0));
}

// The other run loses its lease, later than a heartbeat of the first would have come. Shown by: a
// heart that beats on after the guard has committed the outcome, and takes its end for a loss.
#[tokio::test]
async fn o12_a_run_whose_guard_has_committed_loses_no_lease() {
    let (heard, _hearing) = hear();
    let (world, gate) = (sqlite().await, Gate::closed());
    let (lease, timeout, completion_budget) = (Duration::from_secs(6), Duration::from_secs(3), Duration::from_secs(2));
    let serves = async |operation: &'static str, mode: Mode| {
        let route = Route { mode, lease, timeout, completion_budget, ..edge() };
        let layer = IdempotencyLayer::new(&world.engine, Endpoint::raw(operation, route)).unwrap();
        let (store, gate) = (world.store.clone(), gate.clone());
        let handler = move |guard: Guard<SqliteStore>| {
            let (store, gate) = (store.clone(), gate.clone());
            async move {
                if mode == Mode::Bridged {
                    let tx = store.tx("insert into effect (text) values ('guarded')").await;
                    guard.commit_response(tx, StatusCode::CREATED.into_response()).await.unwrap();
                }
                gate.pass().await;
                StatusCode::CREATED
            }
        };
        serve(Router::new().route("/put", route_post(handler)).route_layer(layer)).await + "/put"
    };
    let committed = tokio::spawn(send(post(&serves("put", Mode::Bridged).await, K1, "{}")));
    gate.begun().await;
    let lost = tokio::spawn(send(post(&serves("other", Mode::Edge).await, K2, "{}")));
    gate.begun().await;
    world.store.exec("delete from oncebox_idempotency_request where state = 'IN_PROGRESS'").await;
    until("the loss of the other is counted", || async { heard.metric(LOST, &[("operation", "other")]) > 0.0 }).await;
    assert_eq!(of_put(&heard, LOST), 0.0);
    gate.let_go();
    gate.let_go();
    committed.await.unwrap();
    lost.await.unwrap();
}

// Shown by: answering without counting.
#[tokio::test]
async fn m104_what_the_layer_refuses_by_itself_is_counted() {
    let (heard, _hearing) = hear();
    let world = narrow().await;
    let gate = Gate::open();
    let url = layered(&world, Endpoint::raw("put", Route { request_body_max: 2_000, ..edge() }), &gate).await + "/put";
    send(post(&url, K1, "{")).await.is(Code::RequestInvalid);
    send(post(&url, K1, "a".repeat(2_001))).await.is(Code::BodyTooLarge);
    send(post(&url, K1, "a".repeat(1_500))).await.is(Code::BodyMemoryExceeded);
    for code in [Code::RequestInvalid, Code::BodyTooLarge, Code::BodyMemoryExceeded] {
        assert_eq!(refused(&heard, code), 1.0, "{code}");
    }
    assert_eq!((of_put(&heard, REJECTED), gate.calls()), (3.0, 0));
}

// The first answer is a failure that is remembered: nobody else's request gets it. Shown to fail:
// with the fingerprint of a record that is FAILED_REPLAYABLE taken for equal (402 to another
// command); without the warning; without the count; with one count of the two where the time of
// the key is over too.
async fn m28_another_command_under_a_key_is_said_aloud_and_never_gets_the_failure_that_is_kept<S: Sql>(
    world: World<S>,
    heard: Heard,
) {
    let gate = Gate::open();
    let url = layered(&world, Endpoint::raw("put", edge()), &gate).await + "/put";
    let refusal = r#"{"status":402,"tag":"rejected"}"#;
    let one = send(post(&url, K1, refusal)).await;
    assert_eq!((one.status, one.is_replayed()), (402, false));
    let record = world.record("t1", K1).await;
    for times in 1..3 {
        let other = send(post(&url, K1, "{}")).await;
        assert_eq!((other.is(Code::KeyReused).status, other.is_replayed()), (422, false));
        let shown = String::from_utf8_lossy(&other.body).into_owned();
        assert!(!shown.contains(r#""id": 7"#) && !shown.contains(":402"), "nothing of the first answer: {shown}");
        assert_eq!(other.headers.get("location"), None, "nothing of the first answer");
        let said = heard.said().into_iter().filter(|said| {
            let (text, key) = (said.fields.get("message"), said.fields.get("key"));
            said.is_event
                && said.level == Level::WARN
                && text.is_some_and(|text| text.contains("used with a different request"))
                && key == Some(&hash(K1))
        });
        assert_eq!((said.count(), of_put(&heard, CONFLICTS)), (times, times as f64));
    }
    assert_eq!(world.record("t1", K1).await, record, "the record stands as it was");
    let again = send(post(&url, K1, refusal)).await;
    assert_eq!((again.status, again.is_replayed(), &again.body, gate.calls()), (402, true, &one.body, 1));
    assert_eq!(of_put(&heard, EXPIRED), 0.0);
    let over = format!("outcome_at = {0}, expires_at = {0}", long_ago::<S>());
    world.store.exec(&format!("update {}idempotency_request set {over}", S::PREFIX)).await;
    send(post(&url, K1, "{}")).await.is(Code::KeyReused);
    assert_eq!((of_put(&heard, CONFLICTS), of_put(&heard, EXPIRED)), (3.0, 1.0));
    send(post(&url, K1, refusal).header("test-scope", "t1:p2")).await.is(Code::KeyReused);
    assert_eq!((of_put(&heard, CONFLICTS), of_put(&heard, EXPIRED)), (3.0, 2.0));
    assert_eq!(of_put(&heard, PRINCIPALS), 1.0, "another principal is counted apart (O20)");
}

// Shown by: not counting a store that does not answer.
#[tokio::test]
async fn m104_a_store_that_does_not_answer_is_counted_by_stage() {
    let (heard, _hearing) = hear();
    let (world, faults) = (sqlite().await, Arc::new(Faults::default()));
    let store = Faulty { inner: world.store.clone(), faults: Arc::clone(&faults) };
    let engine = Engine::new(store, EngineOptions::default());
    let layer = IdempotencyLayer::new(&engine, Endpoint::raw("put", edge())).unwrap();
    let url = serve(gated(&Gate::open(), "done").route_layer(layer)).await + "/put";
    let failed = |stage| heard.metric(STORE_ERRORS, &[("operation", "put"), ("stage", stage)]);
    for (times, (stage, fault)) in
        (1..).zip([("find", &faults.find), ("claim", &faults.claim), ("complete", &faults.finish)])
    {
        assert_eq!(failed(stage), 0.0, "{stage}");
        fault.store(true, Ordering::SeqCst);
        assert_eq!(send(post(&url, &format!("{K1}-{stage}"), "{}")).await.status, 503, "{stage}");
        fault.store(false, Ordering::SeqCst);
        assert_eq!((failed(stage), of_put(&heard, STORE_ERRORS)), (1.0, f64::from(times)), "{stage}");
    }
}

// A handler that ends its transaction, and a claim that only such a handler can have committed.
async fn o1_a_transaction_that_its_handler_ended_raises_the_alarm<S: Sql>(world: World<S>, heard: Heard) {
    let endpoint = world.protect(same_tx());
    committed_claim(&world, &endpoint, K1).await;
    assert_eq!(of_put(&heard, ENDED), 0.0);
    for _ in 0..2 {
        world.engine.sweep(100).await.unwrap();
        assert_eq!(of_put(&heard, ENDED), 1.0, "once");
    }
    // On SQLite a handler cannot.
    if !S::NOTHING_ESCAPES {
        let calls = Arc::new(AtomicU32::new(0));
        for code in [Code::TransactionEnded, Code::OutcomeUnknown] {
            problem(run(&world, &endpoint, K2, "a", runs(&["commit"], &calls, false)).await, code);
            assert_eq!(of_put(&heard, ENDED), 2.0, "once");
        }
    }
}

// Shown by: counting each run of the handler.
#[tokio::test]
async fn m103_a_claim_that_the_database_asks_to_try_again_is_counted_once() {
    let (heard, _hearing) = hear();
    let world = sqlite().await;
    let (endpoint, gate) = (world.protect(same_tx()), Gate::open());
    assert_eq!(of_put(&heard, CLAIMS), 0.0);
    let calls = gate.clone();
    let again = does::<SqliteStore, _>(move |_: &Put, mut tx: EffectTx<'_, SqliteStore>| {
        let gate = calls.clone();
        Box::pin(async move {
            let seen: i64 = query_scalar("select count(*) from effect").fetch_one(tx.connection()).await?;
            gate.pass().await;
            match gate.calls() {
                1 => Err(HandlerError::transient("the database asks to try again")),
                _ => Ok(Outcome::Completed(Reply::json(201, &seen)?)),
            }
        })
    });
    first(run(&world, &endpoint, K1, "a", again).await);
    assert_eq!((gate.calls(), of_put(&heard, CLAIMS)), (2, 1.0));
}

// A key that another process holds in an open transaction, then one that runs here for longer than
// a duplicate waits.
//
// Shown by: counting no refusal of a key that nobody sees, and none after a wait.
async fn m104_a_key_that_stays_locked_is_counted<S: Sql>(world: World<S>, heard: Heard) {
    let (other, patient) = (world.another_process(), world.another_process());
    let endpoint = world.protect(same_tx());
    let there = other.protect(Route { wait_max: Duration::from_millis(100), ..same_tx() });
    let waits = patient.protect(Route { while_running: WhileRunning::Wait, ..same_tx() });
    let gate = Gate::closed();
    let begun = running(&world, &endpoint, K1, &gate);
    gate.begun().await;
    // It runs in this process: nobody waits, and no lock is asked for.
    problem(run(&world, &endpoint, K1, "a", effect(&gate)).await, Code::InProgress);
    assert_eq!(of_put(&heard, LOCKED), 0.0);
    problem(run(&other, &there, K1, "a", effect(&gate)).await, Code::InProgress);
    assert_eq!(of_put(&heard, LOCKED), 1.0);
    problem(run(&patient, &waits, K1, "a", effect(&gate)).await, Code::InProgress);
    assert_eq!(of_put(&heard, LOCKED), 2.0);
    gate.let_go();
    first(begun.await.unwrap());
    // In the process itself, after a wait.
    let held = running(&patient, &waits, K2, &gate);
    gate.begun().await;
    problem(run(&patient, &waits, K2, "a", effect(&gate)).await, Code::InProgress);
    assert_eq!(of_put(&heard, LOCKED), 3.0);
    gate.let_go();
    first(held.await.unwrap());
    replayed(run(&other, &there, K1, "a", effect(&gate)).await);
    assert_eq!((of_put(&heard, LOCKED), of_put(&heard, IN_PROGRESS)), (3.0, 4.0));
}

// Shown by: sweeping without counting; one count for both.
#[tokio::test]
async fn m104_what_is_forgotten_is_counted_by_its_kind() {
    let (heard, _hearing) = hear();
    let world = sqlite().await;
    let (body, ttl) = (Duration::from_millis(1), Duration::from_millis(50));
    let endpoint = world.protect(Route { retention: Retention { ttl, body, metadata: ttl }, ..same_tx() });
    let gone = |kind| heard.metric(PURGED, &[("kind", kind)]);
    for key in [K1, K2] {
        first(run(&world, &endpoint, key, "a", effect(&Gate::open())).await);
    }
    let mut bodies = world.store.number("select count(*) from oncebox_idempotency_body").await;
    assert_eq!((gone("bodies"), gone("keys"), bodies), (0.0, 0.0, 2));
    until("the bodies are over", || async {
        let look = world.store.find(&identity("t1", K2)).await.unwrap();
        look.record.is_some_and(|record| record.outcome_at.is_some_and(|at| at.until(look.now) > ttl))
    })
    .await;
    until("all is forgotten", || async {
        world.engine.sweep(1).await.unwrap();
        world.record("t1", K1).await.is_none() && world.record("t1", K2).await.is_none()
    })
    .await;
    bodies = world.store.number("select count(*) from oncebox_idempotency_body").await;
    assert_eq!((gone("bodies"), gone("keys"), bodies), (2.0, 2.0, 0));
}

// No other process sees an uncommitted claim (pitfall 6), so each counts its own runs beside the
// committed rows. Shown by: gauges that are never set; a measure without what runs in this process,
// and without what the store has.
#[tokio::test]
async fn m103_the_gauges_show_what_is_open_and_what_is_unknown() {
    let (heard, _hearing) = hear();
    let world = sqlite().await;
    let endpoint = world.protect(same_tx());
    let shown = async || {
        world.engine.measure().await.unwrap();
        (heard.metric(AGE, &[]), heard.metric(UNKNOWN, &[]))
    };
    assert_eq!(shown().await, (0.0, 0.0));
    first(run(&world, &endpoint, K2, "a", unknown()).await);
    assert_eq!(shown().await, (0.0, 1.0));
    // A payment that is open in this process: nobody else sees it.
    let gate = Gate::closed();
    let held = running(&world, &endpoint, K1, &gate);
    gate.begun().await;
    let young = shown().await.0;
    until("it is older", || async { shown().await.0 > young }).await;
    assert!(young > 0.0);
    gate.let_go();
    first(held.await.unwrap());
    assert_eq!(shown().await, (0.0, 1.0));
    // One that another process has claimed.
    let claim = claim(&endpoint, "key-0000000000000003", Mode::Edge, Duration::from_secs(600));
    assert!(world.store.claim(&claim, Basis::New).await.unwrap().is_some());
    until("it has an age", || async { shown().await.0 > 0.0 }).await;
    assert_eq!(shown().await.1, 1.0);
}

// The mode says which promise a route has. Shown by: one mode for all.
#[tokio::test]
async fn m104_each_operation_shows_the_mode_of_its_door() {
    let (heard, _hearing) = hear();
    let world = sqlite().await;
    for mode in [Mode::Transactional, Mode::Bridged, Mode::Edge, Mode::Phased] {
        world.engine.protect(Endpoint::raw(&format!("in_{}", mode.as_str()), Route::new(mode))).unwrap();
    }
    for mode in ["same_tx", "bridged", "edge", "phased"] {
        let name = format!("in_{mode}");
        assert_eq!(heard.metric(OPERATION, &[("operation", &name), ("mode", mode)]), 1.0);
        assert_eq!(heard.metric(OPERATION, &[("operation", &name)]), 1.0);
    }
}

// A different body under a key is logged (M113). Shown by: no span, no warning; the key itself in
// place of its hash.
#[tokio::test]
async fn m105_m113_each_turn_of_a_key_has_its_span_and_a_mismatch_its_warning() {
    let (heard, _hearing) = hear();
    let world = sqlite().await;
    let endpoint = world.protect(same_tx());
    let gate = Gate::closed();
    let spans = |name: &str| heard.spans(&format!("idempotency.{name}"));
    let held = running(&world, &endpoint, K1, &gate);
    gate.begun().await;
    problem(run(&world, &endpoint, K1, "a", effect(&gate)).await, Code::InProgress);
    gate.let_go();
    first(held.await.unwrap());
    assert!(spans("replay").is_empty() && spans("mismatch").is_empty() && spans("recovery").is_empty());
    replayed(run(&world, &endpoint, K1, "a", effect(&gate)).await);
    problem(run(&world, &endpoint, K1, "b", effect(&gate)).await, Code::KeyReused);
    first(run(&world, &endpoint, K2, "a", unknown()).await);
    problem(run(&world, &endpoint, K2, "a", effect(&gate)).await, Code::OutcomeUnknown);
    assert_eq!((of_put(&heard, IN_PROGRESS), of_put(&heard, RECOVERY)), (1.0, 1.0));
    for (name, keys) in [
        ("acquire", vec![K1, K2]),
        ("in_progress", vec![K1]),
        ("replay", vec![K1]),
        ("mismatch", vec![K1]),
        ("recovery", vec![K2]),
    ] {
        let seen: Vec<_> = spans(name).iter().map(|span| (span["operation"].clone(), span["key"].clone())).collect();
        let expected: Vec<_> = keys.into_iter().map(|key| ("put".to_owned(), hash(key))).collect();
        assert_eq!(seen, expected, "{name}");
    }
    let said = heard.said();
    let warned = said.iter().find(|said| said.is_event && said.span == Some("idempotency.mismatch")).unwrap();
    assert_eq!(
        (warned.level, &warned.fields["operation"], &warned.fields["key"]),
        (Level::WARN, &"put".to_owned(), &hash(K1))
    );
    let raw = said.iter().flat_map(|said| said.fields.values()).find(|value| value.contains(K1) || value.contains(K2));
    assert_eq!(raw, None, "a key is shown as a short hash only");
}
