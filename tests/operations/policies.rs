//! What an author chooses: lifetimes, late retries, what is replayed, limits, regions, versions;
//! and which choices are refused (O3, O4, O11, O21, O23, O29, M4, M17, M24, M63, M64, M66, M68,
//! M97, M98, M101, M105, M106, M108, M117).

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use oncebox::HandlerError;
use oncebox::adapter::unreadable;
use oncebox::error::Invalid;
use oncebox::http::idempotency::{IdempotencyLayer, TypedOperation};
use oncebox::operation::{
    AfterExpiry, Answered, Code, EffectTx, Endpoint, Engine, EngineOptions, Keep, KeyFormat, KeyGiven, Mode, Outcome,
    Registered, Replay, Reply, Requirement, Retention, Route, Scope, State,
};
use oncebox::store::KeyFilter;
use oncebox::store::sqlite::SqliteStore;

use super::kit::*;

on_all! {
    m117_o4_a_retry_after_expiry_is_a_new_operation_of_the_same_record,
    o23_m98_a_retry_after_expiry_is_rejected_where_the_route_says_so,
    m101_one_sweep_deletes_batch_after_batch,
    o3_a_known_outcome_expires_and_an_unknown_one_does_not,
    m66_m117_an_answer_outlives_a_change_of_its_schema,
    m63_m68_what_is_not_kept_is_referred_to_rebuilt_or_said_to_be_gone,
    m64_an_exact_replay_is_as_it_was_and_a_rebuilt_one_as_it_is,
    m64_an_answer_that_cannot_be_built_anew_is_503_and_runs_nothing,
    m17_without_a_key_the_server_makes_one_where_it_is_optional,
    o29_a_tenant_over_its_quota_gets_429_and_nothing_is_stored,
    o11_what_is_unresolved_counts_against_the_quota,
    m106_m117_a_key_of_another_region_is_refused_with_its_home,
    o21_m24_a_new_version_of_the_fingerprint_reads_the_old_one,
    m105_a_key_that_cannot_be_read_is_shown_as_such_and_hides_no_other,
}

/// A route that forgets its answers, and remembers that they were.
pub(crate) fn short(ttl: Duration) -> Route {
    Route { retention: Retention { ttl, body: ttl, metadata: Duration::from_secs(86_400) }, ..same_tx() }
}

// Shown by: delete-then-insert (generation 1 again); the operation id of the first run.
async fn m117_o4_a_retry_after_expiry_is_a_new_operation_of_the_same_record<S: Sql>(world: World<S>) {
    let endpoint = world.protect(short(Duration::from_millis(200)));
    let gate = Gate::open();
    let one = first(run(&world, &endpoint, K1, "a", effect(&gate)).await);
    let seen = world.record("t1", K1).await.unwrap();
    world.expires(K1).await;
    problem(run(&world, &endpoint, K1, "b", effect(&gate)).await, Code::KeyReused);
    let two = first(run(&world, &endpoint, K1, "a", effect(&gate)).await);
    let now = world.record("t1", K1).await.unwrap();
    assert_ne!(one.body, two.body);
    assert_ne!(seen.operation_id, now.operation_id);
    assert_eq!((seen.generation, now.generation, now.epoch, now.attempts), (1, 2, 2, 1));
    assert_eq!((gate.calls(), world.effects().await), (2, 2));
}

// Shown by: executing where the record is there and over; where it is purged.
async fn o23_m98_a_retry_after_expiry_is_rejected_where_the_route_says_so<S: Sql>(world: World<S>) {
    let ttl = Duration::from_millis(100);
    let reject = Route {
        after_expiry: AfterExpiry::Reject,
        key_format: KeyFormat::UuidV7,
        id_skew: Duration::from_secs(6),
        retention: Retention { ttl, body: ttl, metadata: ttl },
        ..same_tx()
    };
    let endpoint = world.protect(reject);
    let gate = Gate::open();
    let key = uuid::Uuid::now_v7().to_string();
    first(run(&world, &endpoint, &key, "a", effect(&gate)).await);
    world.expires(&key).await;
    problem(run(&world, &endpoint, &key, "a", effect(&gate)).await, Code::KeyExpired);
    until("it is purged", || async {
        world.engine.sweep(100).await.unwrap();
        world.record("t1", &key).await.is_none()
    })
    .await;
    let look = world.store.find(&identity("t1", &key)).await.unwrap();
    assert!(look.purged_below.is_some(), "the purge left its bound");
    problem(run(&world, &endpoint, &key, "a", effect(&gate)).await, Code::KeyExpired);
    // Also behind a request that found no record, after which other routes claim without a look.
    problem(run(&world, &endpoint, &key, "a", effect(&gate)).await, Code::KeyExpired);
    // A clock that is an hour ahead.
    let mut ahead = *uuid::Uuid::now_v7().as_bytes();
    let millis = u64::from_be_bytes([0, 0, ahead[0], ahead[1], ahead[2], ahead[3], ahead[4], ahead[5]]) + 3_600_000;
    ahead[..6].copy_from_slice(&millis.to_be_bytes()[2..]);
    let ahead = uuid::Uuid::from_bytes(ahead).to_string();
    let wrong = problem(run(&world, &endpoint, &ahead, "a", effect(&gate)).await, Code::KeyInvalid);
    assert!(wrong.detail.unwrap().contains("clock"));
    assert_eq!((gate.calls(), world.effects().await), (1, 1));
}

// Shown by: one batch a sweep (a busy service stores more than that).
async fn m101_one_sweep_deletes_batch_after_batch<S: Sql>(world: World<S>) {
    let ttl = Duration::from_millis(1);
    let endpoint = world.protect(Route { retention: Retention { ttl, body: ttl, metadata: ttl }, ..same_tx() });
    let keys: Vec<String> = (0..5).map(|number| format!("key-000000000000000{number}")).collect();
    for key in &keys {
        first(run(&world, &endpoint, key, "a", effect(&Gate::open())).await);
    }
    for key in &keys {
        world.expires(key).await;
    }
    assert_eq!(world.engine.sweep(2).await.unwrap(), 10, "five bodies, and five keys");
    for key in &keys {
        assert_eq!(world.record("t1", key).await, None);
    }
}

// Only an outcome sets the end of a lifetime, so what is unknown has none, however old it is.
async fn o3_a_known_outcome_expires_and_an_unknown_one_does_not<S: Sql>(world: World<S>) {
    let ttl = Duration::from_millis(50);
    let endpoint = world.protect(Route { retention: Retention { ttl, body: ttl, metadata: ttl }, ..same_tx() });
    let gate = Gate::open();
    assert_eq!(first(run(&world, &endpoint, K1, "a", unknown()).await).status, 502);
    first(run(&world, &endpoint, K2, "a", effect(&gate)).await);
    world.expires(K2).await;
    problem(run(&world, &endpoint, K1, "a", effect(&gate)).await, Code::OutcomeUnknown);
    until("the known one is purged", || async {
        world.engine.sweep(100).await.unwrap();
        world.record("t1", K2).await.is_none()
    })
    .await;
    assert_eq!(world.record("t1", K1).await.unwrap().state, State::UnknownRequiresRecovery);
    problem(run(&world, &endpoint, K1, "a", effect(&gate)).await, Code::OutcomeUnknown);
    assert_eq!(gate.calls(), 1);
}

// Shown by: writing today's version into an old answer; lifting it where no step is given.
async fn m66_m117_an_answer_outlives_a_change_of_its_schema<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let today = |schema_version| Endpoint::typed::<Put>(Route { schema_version, ..same_tx() });
    let (world, old) = world.deployed(today(2));
    let one = first(run(&world, &old, K1, "a", effect(&gate)).await);
    let (world, exact) = world.deployed(today(3));
    assert_eq!(replayed(run(&world, &exact, K1, "a", effect(&gate)).await).body, one.body);
    let lifted = today(3).upcast(2, |mut reply| {
        reply.body = b"{\"v\":3}".to_vec();
        reply
    });
    let (world, lifted) = world.deployed(lifted);
    assert_eq!(replayed(run(&world, &lifted, K1, "a", effect(&gate)).await).body, b"{\"v\":3}");
    let (world, broken) = world.deployed(today(3).upcast(2, |_| panic!("on purpose")));
    problem(run(&world, &broken, K1, "a", effect(&gate)).await, Code::StoreUnavailable);
    assert_eq!((gate.calls(), world.effects().await), (1, 1));
}

fn keeps<S: Sql>(gate: &Gate, keep: Keep) -> impl Does<S> + use<S> {
    let gate = gate.clone();
    does::<S, _>(move |_: &Put, mut tx: EffectTx<'_, S>| {
        let gate = gate.clone();
        Box::pin(async move {
            S::run(tx.connection(), "insert into effect (text) values ('x')").await?;
            gate.pass().await;
            let reply = Reply::json(201, &"a secret that is shown once")?.made("effect", "7", "/effects/7");
            Ok(Outcome::Completed(Reply { keep, ..reply }))
        })
    })
}

// Shown by: running again where no body is kept.
async fn m63_m68_what_is_not_kept_is_referred_to_rebuilt_or_said_to_be_gone<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    let plain = world.protect(same_tx());
    first(run(&world, &plain, K1, "a", keeps(&gate, Keep::Nothing)).await);
    let gone = problem(run(&world, &plain, K1, "a", keeps(&gate, Keep::Nothing)).await, Code::ResultNotRetained);
    assert_eq!(gone.resource, None, "the status only");
    let (next, refers) = world.deployed(Endpoint::typed::<Put>(Route { replay: Replay::Reference, ..same_tx() }));
    first(run(&next, &refers, K2, "a", keeps(&gate, Keep::Reference)).await);
    let again = replayed(run(&next, &refers, K2, "a", keeps(&gate, Keep::Reference)).await);
    assert_eq!((again.status, again.headers), (303, vec![("location".to_owned(), b"/effects/7".to_vec())]));
    let named = problem(run(&world, &plain, K2, "a", keeps(&gate, Keep::Reference)).await, Code::ResultNotRetained);
    assert_eq!(named.resource.unwrap().id, "7");
    let rebuilt = Endpoint::typed::<Put>(Route { replay: Replay::Reconstruct, ..same_tx() })
        .rebuilt_by(|record| Box::pin(async move { Ok(Reply::json(200, &record.operation_id)?) }));
    let (next, rebuilt) = world.deployed(rebuilt);
    let id = world.record("t1", K1).await.unwrap().operation_id;
    let again = replayed(run(&next, &rebuilt, K1, "a", keeps(&gate, Keep::Nothing)).await);
    assert_eq!(again.body, serde_json::to_vec(&id).unwrap());
    assert_eq!((gate.calls(), world.effects().await), (2, 2));
    let wrong = world.engine.protect(Endpoint::typed::<Put>(Route { replay: Replay::Reconstruct, ..same_tx() }));
    assert!(wrong.is_err_and(|error| error.to_string().contains("needs `rebuilt_by`")));
}

// A payment goes from PENDING to SETTLED between two answers. Shown to fail: with
// `not_retained` in place of `rebuild`, and in place of `replay`.
async fn m64_an_exact_replay_is_as_it_was_and_a_rebuilt_one_as_it_is<S: Sql>(world: World<S>) {
    let pays = |keep: Keep| {
        does::<S, _>(move |_: &Put, mut tx: EffectTx<'_, S>| {
            Box::pin(async move {
                S::run(tx.connection(), "insert into effect (text) values ('PENDING')").await?;
                Ok(Outcome::Completed(Reply { keep, ..Reply::json(201, &"PENDING")? }))
            })
        })
    };
    let exact = world.protect(same_tx());
    let one = first(run(&world, &exact, K1, "a", pays(Keep::Exact)).await);
    let store = world.store.clone();
    let reads = move |_| -> BoxFuture<'static, Result<Reply, HandlerError>> {
        let store = store.clone();
        Box::pin(async move {
            let pending = store.number("select count(*) from effect where text = 'PENDING'").await;
            Ok(Reply::json(200, &if pending > 0 { "PENDING" } else { "SETTLED" })?)
        })
    };
    let rebuilt = Endpoint::typed::<Put>(Route { replay: Replay::Reconstruct, ..same_tx() }).rebuilt_by(reads);
    let (next, rebuilt) = world.deployed(rebuilt);
    first(run(&next, &rebuilt, K2, "a", pays(Keep::Nothing)).await);
    for now in ["PENDING", "SETTLED"] {
        world.store.exec(&format!("update effect set text = '{now}'")).await;
        let kept = replayed(run(&world, &exact, K1, "a", pays(Keep::Exact)).await);
        assert_eq!((kept.status, &kept.body), (201, &one.body), "{now}");
        let read = replayed(run(&next, &rebuilt, K2, "a", pays(Keep::Nothing)).await);
        assert_eq!((read.status, read.body), (200, serde_json::to_vec(now).unwrap()));
    }
    assert_eq!(world.effects().await, 2);
}

async fn m64_an_answer_that_cannot_be_built_anew_is_503_and_runs_nothing<S: Sql>(world: World<S>) {
    let gate = Gate::open();
    first(run(&world, &world.protect(same_tx()), K1, "a", keeps(&gate, Keep::Nothing)).await);
    for how in ["fails", "panics", "panics before the future", "hangs"] {
        let rebuilds = move |_| -> BoxFuture<'static, Result<Reply, HandlerError>> {
            assert_ne!(how, "panics before the future", "on purpose");
            Box::pin(async move {
                match how {
                    "fails" => Err(HandlerError::retryable("no")),
                    "panics" => panic!("on purpose"),
                    _ => std::future::pending().await,
                }
            })
        };
        let timeout = Duration::from_secs(2);
        let route = Route { replay: Replay::Reconstruct, timeout, ..same_tx() };
        let (next, endpoint) = world.deployed(Endpoint::typed::<Put>(route).rebuilt_by(rebuilds));
        problem(run(&next, &endpoint, K1, "a", keeps(&gate, Keep::Nothing)).await, Code::StoreUnavailable);
    }
    assert_eq!((gate.calls(), world.effects().await), (1, 1));
}

async fn m17_without_a_key_the_server_makes_one_where_it_is_optional<S: Sql>(world: World<S>) {
    let endpoint = world.protect(Route { requirement: Requirement::Optional, ..same_tx() });
    let gate = Gate::open();
    let asks = |scope: Option<Scope>| {
        world.engine.execute_transactional(&endpoint, scope, KeyGiven::Missing, put("a"), effect(&gate))
    };
    let one = first(asks(Some(scope("t1", "p1"))).await);
    let two = first(asks(Some(scope("t1", "p1"))).await);
    assert_ne!(one.body, two.body);
    assert_eq!((gate.calls(), world.effects().await), (2, 2));
    let records = format!("select count(*) from {}idempotency_request", S::PREFIX);
    assert_eq!(world.store.number(&records).await, 2, "each has a key of its own");
    let (next, required) = world.deployed(Endpoint::typed::<Put>(same_tx()));
    let (scoped, missing) = (Some(scope("t1", "p1")), KeyGiven::Missing);
    let missing = next.engine.execute_transactional(&required, scoped, missing, put("a"), effect(&gate));
    problem(missing.await, Code::KeyRequired);
    let unscoped = next.engine.execute_transactional(&required, None, key(K1), put("a"), effect(&gate)).await;
    problem(unscoped, Code::ScopeRequired);
    assert_eq!(gate.calls(), 2);
}

// Shown by: counting all tenants together; storing the refused one.
async fn o29_a_tenant_over_its_quota_gets_429_and_nothing_is_stored<S: Sql>(world: World<S>) {
    let world = world.process(EngineOptions { open_per_tenant_max: Some(1), ..EngineOptions::default() });
    let endpoint = world.protect(same_tx());
    let (gate, open) = (Gate::closed(), Gate::open());
    let running = running(&world, &endpoint, K1, &gate);
    gate.begun().await;
    let over = problem(run(&world, &endpoint, K2, "a", effect(&open)).await, Code::QuotaExceeded);
    assert_eq!((over.status, open.calls()), (429, 0));
    // Another tenant is free to go. On SQLite it would wait for the one writer.
    if S::NAME != "sqlite" {
        first(run_as("t2:p1", &world, &endpoint, K2, "a", effect(&open)).await);
    }
    gate.let_go();
    first(running.await.unwrap());
    assert_eq!(world.record("t1", K2).await, None);
    first(run(&world, &endpoint, K2, "a", effect(&open)).await);
}

// Shown by: counting what runs here only; counting what has its outcome.
async fn o11_what_is_unresolved_counts_against_the_quota<S: Sql>(world: World<S>) {
    let world = world.process(EngineOptions { open_per_tenant_max: Some(1), ..EngineOptions::default() });
    let endpoint = world.protect(same_tx());
    let gate = Gate::open();
    first(run(&world, &endpoint, K1, "a", effect(&gate)).await);
    first(run(&world, &endpoint, K2, "a", unknown()).await);
    let third = format!("{K2}-third");
    problem(run(&world, &endpoint, &third, "a", effect(&gate)).await, Code::QuotaExceeded);
    replayed(run(&world, &endpoint, K1, "a", effect(&gate)).await);
    first(run_as("t2:p1", &world, &endpoint, &third, "a", effect(&gate)).await);
    assert_eq!(gate.calls(), 2);
}

// Shown by: a list that ends with the first record that cannot be read; one that leaves it out.
async fn m105_a_key_that_cannot_be_read_is_shown_as_such_and_hides_no_other<S: Sql>(world: World<S>) {
    let (endpoint, gate) = (world.protect(same_tx()), Gate::open());
    first(run(&world, &endpoint, K1, "a", effect(&gate)).await);
    world.store.exec(&format!("update {}idempotency_request set principal = 'none'", S::PREFIX)).await;
    first(run(&world, &endpoint, K2, "a", effect(&gate)).await);
    let all = KeyFilter { limit: 10, ..KeyFilter::default() };
    for filter in [all.clone(), KeyFilter { after: Some(Vec::new()), ..all }] {
        let found = world.store.keys(&filter).await.unwrap();
        let read: Vec<_> = found.keys.iter().map(|look| look.record.as_ref().unwrap().identity.clone()).collect();
        assert_eq!(read, [identity("t1", K2)]);
        let unreadable: Vec<_> = found.unreadable.iter().map(|(digest, _)| digest.as_slice()).collect();
        assert_eq!(unreadable, [&identity("t1", K1).digest()[..]]);
    }
}

// Two services on one database: the one that is not the home of a tenant runs nothing, and replays
// nothing. Shown by: not asking.
async fn m106_m117_a_key_of_another_region_is_refused_with_its_home<S: Sql>(world: World<S>) {
    let home = |scope: &Scope| scope.tenant().split_once('.').map(|(home, _)| home.to_owned());
    let services = ["eu", "us"].map(|here| {
        world.process(EngineOptions { region: Some((here.to_owned(), Arc::new(home))), ..EngineOptions::default() })
    });
    let gate = Gate::open();
    for (number, service) in services.iter().enumerate() {
        let endpoint = service.protect(same_tx());
        for (tenant, is_home) in [("eu.t1", number == 0), ("us.t1", number == 1)] {
            let answered = run_as(&format!("{tenant}:p1"), service, &endpoint, K1, "a", effect(&gate)).await;
            if is_home {
                first(answered);
            } else {
                let elsewhere = problem(answered, Code::WrongRegion);
                let home = tenant.split_once('.').map(|t| t.0);
                assert_eq!((elsewhere.status, elsewhere.home_region.as_deref()), (421, home));
            }
        }
    }
    assert_eq!((gate.calls(), world.effects().await), (2, 2));
}

// Shown by: comparing with what would be written today; writing the newest version where nobody
// asked for it.
async fn o21_m24_a_new_version_of_the_fingerprint_reads_the_old_one<S: Sql>(world: World<S>) {
    use oncebox::operation::{FingerprintWriter, IdempotentCommand};
    struct Newer(Put);
    impl IdempotentCommand for Newer {
        const OPERATION: &'static str = "put";
        const VERSION: u32 = 2;
        const OLDEST: u32 = 1;
        fn fingerprint(&self, version: u32, writer: &mut FingerprintWriter) {
            self.0.fingerprint(1, writer);
            if version > 1 {
                writer.field("unit", "piece");
            }
        }
    }
    fn newer<S: Sql, F>(handler: F) -> F
    where
        F: for<'t> Fn(&'t Newer, EffectTx<'t, S>) -> BoxFuture<'t, Result<Outcome<Reply>, HandlerError>>,
    {
        handler
    }
    let gate = Gate::open();
    let old = world.protect(same_tx());
    let one = first(run(&world, &old, K1, "a", effect(&gate)).await);
    let (next, endpoint) = world.deployed(Endpoint::typed::<Newer>(same_tx()));
    let (early, raised) = world.deployed(Endpoint::typed::<Newer>(Route { write_version: Some(2), ..same_tx() }));
    let asks = |(world, endpoint): (&World<S>, &Registered), key_text: &'static str, text: &'static str| {
        let handler =
            newer::<S, _>(|_: &Newer, _: EffectTx<'_, S>| Box::pin(async { Ok(Outcome::Completed(Reply::new(201))) }));
        let (engine, endpoint) = (world.engine.clone(), endpoint.clone());
        async move {
            engine
                .execute_transactional(&endpoint, Some(scope("t1", "p1")), key(key_text), Newer(put(text)), handler)
                .await
        }
    };
    assert_eq!(replayed(asks((&next, &endpoint), K1, "a").await).body, one.body);
    problem(asks((&next, &endpoint), K1, "b").await, Code::KeyReused);
    // In the middle of a deploy, processes of both versions answer each other's keys.
    first(asks((&next, &endpoint), K2, "a").await);
    replayed(run(&world, &old, K2, "a", effect(&gate)).await);
    const K3: &str = "key-0000000000000003";
    first(asks((&early, &raised), K3, "a").await);
    problem(run(&world, &old, K3, "a", effect(&gate)).await, Code::FingerprintVersionUnknown);
    assert_eq!(gate.calls(), 1);
    // An operator sees that it was raised too early, before a client does.
    for engine in [&world.engine, &early.engine] {
        engine.measure().await.unwrap();
    }
    let live = world.store.live_versions().await.unwrap();
    assert_eq!(live.len(), 2, "{live:?}");
    let found = unreadable(&live);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].0.as_str() == "put" && found[0].1.contains(" writes version 2, "), "{found:?}");
}

// Shown by: registering without validating.
#[tokio::test]
async fn m4_choices_that_cannot_keep_the_promise_are_refused_when_they_are_registered() {
    let world = sqlite().await;
    let typed = |route: Route| Endpoint::typed::<Put>(route);
    let off = |mode| typed(Route { requirement: Requirement::Off, ..Route::new(mode) });
    for (endpoint, why) in [
        (
            typed(Route { keeps_headers: vec!["Set-Cookie".to_owned()], ..same_tx() }),
            "the header `set-cookie` is never stored",
        ),
        (typed(Route { redacts: vec!["id".to_owned()], ..same_tx() }), "`id` is no JSON pointer"),
        (
            typed(Route { counts_headers: vec![("Cookie".to_owned(), 1)], ..same_tx() }),
            "the header `cookie` is no part of a command",
        ),
        (
            typed(Route { counts_headers: vec![("x-other".to_owned(), 1)], ..same_tx() }),
            "`counts_headers` is for the layer",
        ),
        (Endpoint::raw("a b", same_tx()), "`a b` is no name of an operation"),
        (off(Mode::Transactional), "`requirement = off` is for the layer"),
        (off(Mode::Phased), "`requirement = off` is for the layer"),
        (typed(Route { reconciles: true, ..Route::new(Mode::Edge) }), "`reconciles` needs `reconciled_by`"),
        (
            typed(Route { request_body_within: Duration::MAX, ..same_tx() }),
            "`request_body_within` must be at most 100 years",
        ),
    ] {
        let refused = world.engine.protect(endpoint).expect_err(why).to_string();
        assert!(refused.starts_with(why), "{refused}");
    }
    world.engine.protect(typed(same_tx())).unwrap();
}

// Shown by: registering whatever mode comes: each request gets 503 for ever.
#[tokio::test]
async fn m4_a_mode_that_the_door_does_not_serve_is_refused_with_both_names() {
    type Register = fn(&Engine<SqliteStore>, Endpoint) -> Result<(), Invalid>;
    let world = sqlite().await;
    let doors: [(&str, &[Mode], Register); 3] = [
        ("the layer", &[Mode::Edge, Mode::Bridged], |engine, endpoint| {
            IdempotencyLayer::new(engine, endpoint).map(drop)
        }),
        ("a typed operation", &[Mode::Transactional], |engine, endpoint| {
            TypedOperation::<_, Put>::new(engine, endpoint).map(drop)
        }),
        ("a typed operation in phases", &[Mode::Phased], |engine, endpoint| {
            TypedOperation::<_, Put>::phased(engine, endpoint).map(drop)
        }),
    ];
    for (door, takes, register) in doors {
        for mode in [Mode::Transactional, Mode::Bridged, Mode::Edge, Mode::Phased] {
            let engine = Engine::new(world.store.clone(), EngineOptions::default());
            let registered = register(&engine, Endpoint::typed::<Put>(Route::new(mode)));
            if takes.contains(&mode) {
                registered.unwrap();
                continue;
            }
            let takes = takes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
            let refused = registered.unwrap_err().to_string();
            assert_eq!(refused, format!("the operation `put` is of mode {mode}, and {door} takes mode {takes}"));
            assert!(engine.protected().is_empty());
        }
    }
}

// Shown by: pushing whatever comes: two definitions of one name, which share keys and whichever
// lifetime is shorter.
#[tokio::test]
async fn m4_two_operations_of_one_name_are_refused_unless_they_are_one() {
    let world = sqlite().await;
    let protect = |endpoint: Endpoint| world.engine.protect(endpoint);
    let put = || Endpoint::typed::<Put>(same_tx());
    let there = protect(put().served_at("PUT", "/put")).unwrap();
    protect(put().served_at("POST", "/put/again")).expect("one operation at two places");
    protect(Endpoint::typed::<Put>(there.route().clone())).expect("a route is what its author chose, and no more");
    assert_eq!(world.engine.protected().len(), 3);
    let longer = Retention { metadata: Duration::from_secs(900 * 86_400), ..same_tx().retention };
    for other in [
        Endpoint::typed::<Put>(Route { retention: longer, ..same_tx() }),
        Endpoint::typed::<Put>(Route { kept_body_max: 1, ..same_tx() }),
        Endpoint::typed::<Put>(Route { operation_path: Some("/operations/".to_owned()), ..same_tx() }),
        Endpoint::raw("put", same_tx()),
        Endpoint::typed::<Put>(Route { schema_version: 2, ..same_tx() }),
        Endpoint::typed::<Put>(Route { keeps_headers: vec!["x-other".to_owned()], ..same_tx() }),
        put().upcast(1, |reply| reply),
    ] {
        let refused = protect(other).expect_err("another definition");
        let twice = format!("`{}` is protected already, and otherwise", there.operation());
        assert!(refused.to_string().starts_with(&twice), "{refused}");
    }
    protect(Endpoint::raw("other", same_tx())).expect("another name");
    protect(Endpoint::raw("layer", Route::new(Mode::Edge))).unwrap();
    let counts_headers = vec![("x-other".to_owned(), 1)];
    protect(Endpoint::raw("layer", Route { counts_headers, ..Route::new(Mode::Edge) }))
        .expect_err("another definition");
    assert_eq!(world.engine.protected().len(), 5);
}

// Shown by: a text of its own in one of the two; whole seconds only.
#[cfg(feature = "openapi")]
#[tokio::test]
async fn m97_a_lifetime_is_published_alike_in_both_documents() {
    use oncebox::http::idempotency::{describe, well_known};
    for (millis, text) in [(500, "PT0.5S"), (86_400_000, "PT24H"), (90_000, "PT90S")] {
        let world = sqlite().await;
        let endpoint = world.protect(short(Duration::from_millis(millis)));
        let mut operation = utoipa::openapi::path::Operation::default();
        describe(&endpoint, &mut operation).unwrap();
        let described = serde_json::to_value(&operation).unwrap();
        assert_eq!(described["x-idempotency"]["ttl"], text, "{described}");
        let known = axum::body::to_bytes(well_known(&world.engine).into_body(), 10_000).await.unwrap();
        let known: serde_json::Value = serde_json::from_slice(&known).unwrap();
        assert_eq!(known["operations"][0]["ttl"], text, "{known}");
    }
}

// Shown by: describing the route by hand.
#[cfg(feature = "openapi")]
#[tokio::test]
async fn m108_the_openapi_document_says_what_the_endpoint_does() {
    use oncebox::http::idempotency::describe;
    let world = sqlite().await;
    let endpoint = world.protect(same_tx());
    let mut operation: utoipa::openapi::path::Operation = serde_json::from_value(serde_json::json!({
        "responses": {"201": {"description": "made"}, "400": {"description": "ours"}},
    }))
    .unwrap();
    describe(&endpoint, &mut operation).unwrap();
    let document = serde_json::to_value(&operation).unwrap();
    let key = &document["parameters"][0];
    assert_eq!((key["name"].as_str(), key["in"].as_str()), (Some("Idempotency-Key"), Some("header")));
    assert_eq!((key["required"].as_bool(), key["schema"]["minLength"].as_u64()), (Some(true), Some(16)));
    assert!(document["responses"]["201"]["headers"]["Idempotent-Replayed"].is_object(), "{document}");
    assert_eq!(document["responses"]["400"]["description"], "ours");
    for status in ["409", "413", "422", "503"] {
        assert!(document["responses"][status]["content"]["application/problem+json"].is_object(), "{status}");
    }
    let said = serde_json::json!({"operation": "put", "mode": "same_tx", "replay": "exact", "mismatchStatus": 422});
    for (name, value) in said.as_object().unwrap() {
        assert_eq!(&document["x-idempotency"][name], value, "{name}");
    }
}

/// Shown by: loops without a bound (the request never ends, and its thread is never free again).
#[test]
fn m4_a_door_that_claims_every_request_refuses_a_route_with_keys_off() {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let answered = runtime.block_on(async {
            let world = sqlite().await;
            let off = Route { requirement: Requirement::Off, ..Route::new(Mode::Edge) };
            let endpoint = world.protect(off);
            run(&world, &endpoint, K1, "a", effect(&Gate::open())).await
        });
        tell.send(answered).unwrap();
    });
    let answered: Answered = told.recv_timeout(SOON).expect("an answer comes");
    problem(answered, Code::StoreUnavailable);
}
