//! Secrets of fingerprints and principals, from the engine to the database: what is stored, what a
//! rotation changes, and what a process answers that has not the secret (O20, O21).

use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post as route_post;
use oncebox::http::idempotency::{IdempotencyLayer, OutcomeTag};
use oncebox::operation::{
    Code, EffectTx, Effects, Endpoint, EngineOptions, Keyring, Kid, Mode, Outcome, Record, Reply, Retention, Route,
    State,
};

use super::kit::*;
use super::layer::{edge, layered};

on_all! {
    o20_o21_fingerprints_and_principals_reach_the_store_as_keyed_hashes,
    o21_a_rotation_of_secrets_changes_no_verdict,
    o21_an_unknown_key_id_is_503_in_every_state_and_runs_nothing,
    o21_over_http_an_unknown_key_id_is_503_and_never_422,
    o21_a_key_that_is_run_again_is_written_under_the_new_secret,
}

/// A ring that has the secrets of these ids, each its own.
fn ring(write: &str, kids: &[&str]) -> Keyring {
    let secrets: Vec<(Kid, Vec<u8>)> =
        kids.iter().map(|kid| (kid.parse().unwrap(), kid.repeat(32).into_bytes())).collect();
    Keyring::new(write.parse().unwrap(), secrets.iter().map(|(kid, secret)| (kid.clone(), secret.as_slice()))).unwrap()
}

/// A process with these secrets.
fn with_ring<S: Sql>(world: &World<S>, write: &str, kids: &[&str]) -> World<S> {
    world.process(EngineOptions { keyring: ring(write, kids), ..EngineOptions::default() })
}

/// How many records have exactly these texts.
async fn stored<S: Sql>(world: &World<S>, principal: &str, fingerprint: &str) -> i64 {
    let sql = format!(
        "select count(*) from {}idempotency_request where principal = '{principal}' and fingerprint = '{fingerprint}'",
        S::PREFIX
    );
    world.store.number(&sql).await
}

/// What a process with these secrets stores of one principal and its command.
async fn written<S: Sql>(world: &World<S>, keyring: Keyring, key_text: &str) -> (String, String) {
    let process = world.process(EngineOptions { keyring, ..EngineOptions::default() });
    let endpoint = process.protect(same_tx());
    first(run(&process, &endpoint, key_text, "a", effect(&Gate::open())).await);
    let record = world.record("t1", key_text).await.unwrap();
    (record.principal.to_string(), record.fingerprint.to_string())
}

// Shown by: marking the principal without the engine's secrets; protecting an endpoint without the
// engine's secrets.
async fn o20_o21_fingerprints_and_principals_reach_the_store_as_keyed_hashes<S: Sql>(world: World<S>) {
    let (principal, fingerprint) = written(&world, ring("k1", &["k1"]), K1).await;
    assert!(principal.starts_with("k1:") && fingerprint.starts_with("1:k1:"), "{principal} {fingerprint}");
    assert_eq!(stored(&world, &principal, &fingerprint).await, 1);
    // Who reads the database, and guesses command and principal, cannot show that the guess is
    // right: the hashes of neither are there without the secret, nor with another one.
    let other = Keyring::new("k1".parse().unwrap(), [("k1".parse().unwrap(), [7_u8; 32].as_slice())]).unwrap();
    for (number, guess) in [Keyring::plain(), other].into_iter().enumerate() {
        let (guessed_principal, guessed_fingerprint) = written(&world, guess, &format!("{K1}-{number}")).await;
        for (guessed, true_one) in [(guessed_principal, &principal), (guessed_fingerprint, &fingerprint)] {
            assert_ne!(guessed.rsplit(':').next(), true_one.rsplit(':').next());
        }
    }
    // The layer writes them as well.
    let gate = Gate::open();
    let url = layered(&with_ring(&world, "k1", &["k1"]), Endpoint::raw("put", edge()), &gate).await + "/put";
    assert_eq!(send(post(&url, K2, "{}")).await.status, 201);
    let record = world.record("t1", K2).await.unwrap();
    assert_eq!(record.principal.to_string(), principal);
    assert!(record.fingerprint.to_string().starts_with("1:k1:"), "{:?}", record.fingerprint);
}

// Shown by: comparing under the id that is written today.
async fn o21_a_rotation_of_secrets_changes_no_verdict<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let key_of = |number: usize| format!("{K1}-{number}");
    // One step at a time: every process reads a secret before any writes with it, and the old one
    // goes last.
    let steps = [("sha256", ""), ("sha256", "k1"), ("k1", "k1"), ("k1", "k1 k2"), ("k2", "k1 k2")]
        .map(|(write, kids)| (write, kids.split_whitespace().collect::<Vec<_>>()));
    let processes: Vec<_> = steps.iter().map(|(write, kids)| with_ring(&world, write, kids)).collect();
    let endpoints: Vec<_> = processes.iter().map(|process| process.protect(same_tx())).collect();
    let mut bodies = Vec::new();
    for (number, (process, endpoint)) in processes.iter().zip(&endpoints).enumerate() {
        bodies.push(first(run(process, endpoint, &key_of(number), "a", effect(&gate)).await).body);
        let fingerprint = world.record("t1", &key_of(number)).await.unwrap().fingerprint.to_string();
        assert!(fingerprint.starts_with(&format!("1:{}:", steps[number].0)), "{fingerprint}");
        // Those before that have the secret stand beside it while it is deployed.
        let write = steps[number].0;
        let beside = steps.iter().position(|(_, kids)| write == "sha256" || kids.contains(&write)).unwrap();
        for ((_, kids), (process, endpoint)) in steps.iter().zip(processes.iter().zip(&endpoints)).skip(beside) {
            let key_text = key_of(number);
            let again = replayed(run(process, endpoint, &key_text, "a", effect(&gate)).await);
            assert_eq!(again.body, bodies[number], "{write} is read with {kids:?}");
            problem(run(process, endpoint, &key_text, "b", effect(&gate)).await, Code::KeyReused);
            problem(run_as("t1:p2", process, endpoint, &key_text, "a", effect(&gate)).await, Code::KeyReused);
        }
    }
    assert_eq!((gate.calls(), world.effects().await), (5, 5));
}

fn kept_for(time: Duration) -> Route {
    Route { retention: Retention { ttl: time, body: time, metadata: Duration::from_secs(86_400) }, ..same_tx() }
}

/// The record, and its state now.
async fn seen<S: Sql>(world: &World<S>, key: &str) -> (Record, State) {
    let look = world.store.find(&identity("t1", key)).await.unwrap();
    let record = look.record.unwrap();
    let state = record.state_at(look.now);
    (record, state)
}

// Shown by: calling the command different, the principal another, or both the same; judging the
// state first (an expired key runs anew).
async fn o21_an_unknown_key_id_is_503_in_every_state_and_runs_nothing<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let (newer, short) = (with_ring(&world, "k2", &["k1", "k2"]), with_ring(&world, "k2", &["k1", "k2"]));
    let endpoint = newer.protect(same_tx());
    let key_of = |state: State| format!("{K1}-{state}");
    let rejected = does::<S, _>(|_: &Put, _: EffectTx<'_, S>| {
        Box::pin(async { Ok(Outcome::Rejected { answer: Reply::new(402), binding: true }) })
    });
    first(run(&newer, &endpoint, &key_of(State::Completed), "a", effect(&gate)).await);
    first(run(&newer, &endpoint, &key_of(State::FailedReplayable), "a", rejected).await);
    first(run(&newer, &endpoint, &key_of(State::UnknownRequiresRecovery), "a", unknown()).await);
    let expiring = short.protect(kept_for(Duration::from_millis(50)));
    first(run(&short, &expiring, &key_of(State::Expired), "a", effect(&gate)).await);
    world.expires(&key_of(State::Expired)).await;
    let calls = gate.calls();
    for (blind, knows) in [(with_ring(&world, "k1", &["k1"]), "k1"), (world.another_process(), "no secret")] {
        let endpoint = blind.protect(same_tx());
        for state in [State::Completed, State::FailedReplayable, State::UnknownRequiresRecovery, State::Expired] {
            let key_text = key_of(state);
            let before = seen(&world, &key_text).await;
            assert_eq!(before.1, state);
            // Whatever is asked, and by whom.
            for (who, text) in [("t1:p1", "a"), ("t1:p1", "b"), ("t1:p2", "a")] {
                let answered = run_as(who, &blind, &endpoint, &key_text, text, effect(&gate)).await;
                let unknown = problem(answered, Code::FingerprintVersionUnknown);
                assert_eq!((unknown.status, unknown.code.retryable()), (503, true), "{state}, {knows}");
                assert!(unknown.retry_after.is_some_and(|seconds| seconds >= 1) && unknown.operation_id.is_none());
            }
            assert_eq!(seen(&world, &key_text).await, before, "{state}, {knows}: nothing was changed");
        }
    }
    // Those who have the secret go on.
    replayed(run(&newer, &endpoint, &key_of(State::Completed), "a", effect(&gate)).await);
    assert_eq!((gate.calls(), world.effects().await), (calls, 2));
}

/// A claim as this record, whose process died.
async fn left_behind<S: Sql>(world: &World<S>, of: Record, key_text: &str) {
    let claim = claim(&world.another_process().protect(edge()), key_text, Mode::Edge, Duration::from_millis(1));
    world
        .is_left_behind(&oncebox::store::KeyClaim { principal: of.principal, fingerprint: of.fingerprint, ..claim })
        .await;
}

// Shown by: giving up a stale claim, or running it again, before its fingerprint is judged; calling
// the command different (422).
async fn o21_over_http_an_unknown_key_id_is_503_and_never_422<S: Sql>(world: World<S>) {
    let (open, held, blind) = (Gate::open(), Gate::closed(), Gate::open());
    let newer = with_ring(&world, "k2", &["k1", "k2"]);
    let url = layered(&newer, Endpoint::raw("put", edge()), &open).await + "/put";
    let slow = layered(&with_ring(&world, "k2", &["k2"]), Endpoint::raw("put", edge()), &held).await + "/put";
    let ended = [
        (State::Completed, "{}"),
        (State::FailedReplayable, r#"{"status":404}"#),
        (State::FailedRetryable, r#"{"status":503,"tag":"retryable"}"#),
        (State::UnknownRequiresRecovery, r#"{"status":500}"#),
    ];
    for (state, body) in ended {
        send(post(&url, &format!("{K1}-{state}"), body)).await;
        assert_eq!(world.record("t1", &format!("{K1}-{state}")).await.unwrap().state, state);
    }
    let running = tokio::spawn(send(post(&slow, &format!("{K1}-{}", State::InProgress), "{}")));
    held.begun().await;
    let runs = world.record("t1", &format!("{K1}-{}", State::InProgress)).await.unwrap();
    left_behind(&world, runs, &format!("{K1}-stale")).await;
    let states = ended.map(|(state, _)| state.to_string());
    let keys = states.iter().map(String::as_str).chain([State::InProgress.as_str(), "stale"]);
    let keys: Vec<String> = keys.map(|state| format!("{K1}-{state}")).collect();
    for effects in [Effects::External, Effects::Repeatable] {
        let older = with_ring(&world, "k1", &["k1"]);
        let older = layered(&older, Endpoint::raw("put", Route { effects, ..edge() }), &blind).await + "/put";
        for key_text in &keys {
            let before = world.record("t1", key_text).await;
            for body in ["{}", r#"{"status":404}"#] {
                send(post(&older, key_text, body)).await.is(Code::FingerprintVersionUnknown);
                let other = post(&older, key_text, body).header("test-scope", "t1:p2");
                send(other).await.is(Code::FingerprintVersionUnknown);
            }
            let after = world.record("t1", key_text).await;
            // A live owner extends its lease.
            let stands = |record: &Option<Record>| record.as_ref().map(|record| (record.state, record.epoch));
            assert_eq!(stands(&after), stands(&before), "{key_text}");
        }
    }
    held.let_go();
    assert_eq!(running.await.unwrap().status, 201);
    assert_eq!((blind.calls(), open.calls(), held.calls()), (0, 4, 1));
    assert!(send(post(&url, &keys[4], "{}")).await.is_replayed(), "by another one that has the secret");
}

/// A process with these secrets, whose answers are sealed for their fingerprint.
fn sealing<S: Sql>(world: &World<S>, write: &str, kids: &[&str]) -> World<S> {
    let options = EngineOptions { keyring: ring(write, kids), ..EngineOptions::default() };
    #[cfg(feature = "encrypt")]
    let options = {
        let kid: Kid = "e1".parse().unwrap();
        let secret = [9_u8; 32];
        let sealer = oncebox::operation::Sealer::encrypting(&kid, [(kid.clone(), secret.as_slice())]).unwrap();
        EngineOptions { sealer, ..options }
    };
    world.process(options)
}

/// A route whose first run of all fails, with nothing outstanding.
async fn fails_once<S: Sql>(world: &World<S>, gate: &Gate) -> String {
    let layer = Endpoint::raw("put", Route { effects: Effects::Repeatable, ..edge() });
    let layer = IdempotencyLayer::new(&world.engine, layer).unwrap();
    let gate = gate.clone();
    let handler = move || {
        let gate = gate.clone();
        async move {
            gate.pass().await;
            if gate.calls() > 1 {
                return (StatusCode::CREATED, "done").into_response();
            }
            let mut response: Response = StatusCode::SERVICE_UNAVAILABLE.into_response();
            response.extensions_mut().insert(OutcomeTag(Outcome::Retryable(())));
            response
        }
    };
    serve(Router::new().route("/put", route_post(handler)).route_layer(layer)).await + "/put"
}

async fn is_written_under<S: Sql>(world: &World<S>, key: &str, kid: &str) {
    let record = world.record("t1", key).await.unwrap();
    let (principal, fingerprint) = (record.principal.to_string(), record.fingerprint.to_string());
    assert!(principal.starts_with(&format!("{kid}:")) && fingerprint.starts_with(&format!("1:{kid}:")), "{record:?}");
}

// A new answer is sealed for the new fingerprint. Shown by: claiming again under the one that
// stands there.
async fn o21_a_key_that_is_run_again_is_written_under_the_new_secret<S: Sql>(world: World<S>) {
    let (older, newer) = (sealing(&world, "k1", &["k1", "k2"]), sealing(&world, "k2", &["k1", "k2"]));
    let gate = Gate::open();
    let (old_url, new_url) = (fails_once(&older, &gate).await, fails_once(&newer, &gate).await);
    // It failed, and runs again.
    assert_eq!(send(post(&old_url, K1, "{}")).await.status, 503);
    is_written_under(&world, K1, "k1").await;
    assert_eq!(send(post(&new_url, K1, "{}")).await.status, 201);
    is_written_under(&world, K1, "k2").await;
    for url in [&old_url, &new_url] {
        let again = send(post(url, K1, "{}")).await;
        assert_eq!((again.status, again.is_replayed(), again.body.as_slice()), (201, true, &b"done"[..]));
    }
    assert_eq!(gate.calls(), 2);
    // Its time is over, and it is a new operation.
    let (older, newer) = (sealing(&world, "k1", &["k1", "k2"]), sealing(&world, "k2", &["k1", "k2"]));
    let gate = Gate::open();
    let expiring = older.protect(kept_for(Duration::from_millis(50)));
    first(run(&older, &expiring, K2, "a", effect(&gate)).await);
    is_written_under(&world, K2, "k1").await;
    world.expires(K2).await;
    let endpoint = newer.protect(same_tx());
    let anew = first(run(&newer, &endpoint, K2, "a", effect(&gate)).await);
    is_written_under(&world, K2, "k2").await;
    let older = sealing(&world, "k1", &["k1", "k2"]);
    for process in [&older, &newer] {
        let endpoint = process.protect(same_tx());
        assert_eq!(replayed(run(process, &endpoint, K2, "a", effect(&gate)).await).body, anew.body);
        problem(run(process, &endpoint, K2, "b", effect(&gate)).await, Code::KeyReused);
    }
    assert_eq!((gate.calls(), world.effects().await), (2, 2));
}
