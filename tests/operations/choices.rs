//! Choices of a route that a client sees: what a duplicate gets while the first one runs, the
//! status of a mismatch, which headers belong to a command, and which refusals free the key (M22,
//! M27, M43, O10).

use std::time::Duration;

use axum::Router;
use axum::extract::{Json, Path, Request, State as Of};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post as route_post};
use oncebox::http::idempotency::{IdempotencyLayer, Idempotent, TypedOperation, respond, well_known};
use oncebox::operation::phased::{First, FirstPhase, Flow, Local, LocalPhase, LocalPoint, Phase, PhasedEngine};
use oncebox::operation::{AfterExpiry, Code, Endpoint, KeyFormat, MismatchStatus, Mode, Route, WhileRunning};
use oncebox::store::sqlite::SqliteStore;
use oncebox::{HandlerError, async_trait};

use super::crowd::door;
use super::kept::Answers;
use super::kit::*;
use super::layer::{edge, layered};

on_all! {
    m43_a_duplicate_is_sent_to_the_operation_where_the_route_says_so,
    m43_a_recovery_is_202_where_the_route_says_so,
    o10_release_untagged_frees_what_was_refused_and_nothing_else,
    o10_what_is_refused_before_the_extractor_of_the_body_frees_the_key_by_release_untagged,
}

/// A phased operation that stands at the gate once its effect is committed, and its resource.
async fn phased<S: Sql>(world: &World<S>, route: Route, gate: &Gate, budget: Duration) -> String {
    let (engine, store) = (world.engine.clone(), world.store.clone());
    let typed = TypedOperation::<S, Put>::phased(&engine, Endpoint::typed::<Put>(route)).unwrap();
    let flow = Flow::begin("put", 1, Begins).local(BEGUN, Passes(gate.clone())).build().unwrap();
    let deployment = store.deployment().await.unwrap();
    let phased = PhasedEngine::new(&engine, deployment, [(flow, typed.endpoint())]).unwrap();
    let runs = move |request: Request| {
        let (typed, phased) = (typed.clone(), phased.clone());
        async move {
            let taken = typed.read(request).await.map_err(|refused| *refused)?;
            let (scope, command, permit) = (Some(taken.scoped.scope), taken.scoped.command, Some(taken.permit));
            let answered = phased.execute_phased(typed.endpoint(), scope, taken.key, command, permit, budget).await;
            Ok::<_, Response>(respond(answered))
        }
    };
    let shows = move |Path(id): Path<String>| {
        let store = store.clone();
        async move {
            let found = store.operation(id.parse().unwrap()).await.unwrap().ok_or(StatusCode::NOT_FOUND)?;
            Ok::<_, StatusCode>(found.stage.public())
        }
    };
    serve(Router::new().route("/put", route_post(runs)).route("/operations/{id}", get(shows))).await
}

const BEGUN: LocalPoint = LocalPoint("BEGUN");

struct Begins;

struct Passes(Gate);

#[async_trait]
impl<S: Sql> FirstPhase<S, Put> for Begins {
    async fn run(&self, phase: &mut Phase<'_, S>, put: &Put) -> Result<First, HandlerError> {
        S::run(phase.connection(), &format!("insert into effect (text) values ('{}')", put.text)).await?;
        Ok(First::RecoveryPoint(BEGUN))
    }
}

#[async_trait]
impl<S: Sql> LocalPhase<S, Put> for Passes {
    async fn run(&self, phase: &mut Phase<'_, S>, put: &Put) -> Result<Local, HandlerError> {
        self.0.pass().await;
        Ok(Local::Response(made(&put.text, phase.context().operation_id())))
    }
}

/// A phased route, of whose operations a client may ask where it has a path.
fn phases(while_running: WhileRunning, operation_path: Option<&str>) -> Route {
    Route {
        key_format: KeyFormat::Opaque,
        after_expiry: AfterExpiry::ExecuteAsNew,
        while_running,
        operation_path: operation_path.map(str::to_owned),
        ..Route::new(Mode::Phased)
    }
}

/// It is 202 with the place of the operation of the first request, and says when to come again.
async fn is_accepted<S: Sql>(answer: &Http, code: Code, world: &World<S>) {
    let record = world.record("t1", K1).await.unwrap();
    let id = record.operation_id.to_string();
    assert_eq!((answer.status, answer.code().as_str()), (202, code.as_str()), "{answer:?}");
    assert_eq!(answer.header("location"), Some(format!("/operations/{id}").as_str()));
    let body = answer.json();
    assert_eq!((body["status"].as_u64(), body["operation_id"].as_str()), (Some(202), Some(id.as_str())));
    assert_eq!((answer.header("content-type"), answer.is_replayed()), (Some("application/problem+json"), false));
    let after: u32 = answer.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=40).contains(&after), "{after}");
}

// Shown to fail: with an operation that stays in the map of the process, which knows no id (409);
// with the location of another id.
async fn m43_a_duplicate_is_sent_to_the_operation_where_the_route_says_so<S: Sql>(world: World<S>) {
    let gate = Gate::closed();
    let route = phases(WhileRunning::Accepted, Some("/operations/"));
    let here = phased(&world, route.clone(), &gate, SOON).await;
    let there = phased(&world.another_process(), route, &gate, SOON).await;
    let first = tokio::spawn(send(post(&format!("{here}/put"), K1, PUT)));
    gate.begun().await;
    let mut place = String::new();
    for base in [&here, &there] {
        let url = format!("{base}/put");
        let accepted = send(post(&url, K1, PUT)).await;
        is_accepted(&accepted, Code::InProgress, &world).await;
        assert_eq!(accepted.json()["key_state"], "in_progress");
        place = format!("{base}{}", accepted.header("location").unwrap());
        stands(&place, "pending").await;
        send(post(&url, K1, r#"{"text":"b"}"#)).await.is(Code::KeyReused);
        send(post(&url, K1, PUT).header("test-scope", "t1:p2")).await.is(Code::KeyReused);
    }
    gate.let_go();
    let first = first.await.unwrap();
    assert_eq!((first.status, first.is_replayed()), (201, false));
    stands(&place, "succeeded").await;
    for base in [&here, &there] {
        let again = send(post(&format!("{base}/put"), K1, PUT)).await;
        assert_eq!((again.status, again.is_replayed(), &again.body), (201, true, &first.body));
    }
    assert_eq!((gate.calls(), world.effects().await), (1, 1));
}

const PUT: &str = r#"{"text":"a"}"#;

async fn stands(place: &str, stage: &str) {
    let shown = send(client().get(place)).await;
    assert_eq!((shown.status, shown.body.as_slice()), (200, stage.as_bytes()));
}

// Shown by: 409, whatever the route says. Shown to fail: with 202 where there is no location.
async fn m43_a_recovery_is_202_where_the_route_says_so<S: Sql>(world: World<S>) {
    let (gate, budget) = (Gate::closed(), Duration::from_millis(1));
    let base = phased(&world, phases(WhileRunning::Conflict, Some("/operations/")), &gate, budget).await;
    let url = format!("{base}/put");
    let pending = send(post(&url, K1, PUT)).await;
    is_accepted(&pending, Code::RecoveryPending, &world).await;
    stands(&format!("{base}{}", pending.header("location").unwrap()), "pending").await;
    gate.begun().await;
    send(post(&url, K1, PUT)).await.is(Code::InProgress);
    gate.let_go();
    world.completes(K1).await;
    let found = send(post(&url, K1, PUT)).await;
    assert_eq!((found.status, found.is_replayed(), gate.calls()), (201, true, 1));

    let next = world.another_process();
    let url = phased(&next, phases(WhileRunning::Conflict, None), &gate, budget).await + "/put";
    let pending = send(post(&url, K2, PUT)).await;
    assert_eq!(pending.is(Code::RecoveryPending).header("location"), None);
    gate.let_go();
    world.completes(K2).await;
}

// Shown by: 422 whatever the route says; a document that leaves the mismatch out where its status
// is another problem's too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m27_the_status_of_a_mismatch_is_the_routes_and_is_published() {
    for (mismatch, status) in
        [(MismatchStatus::Unprocessable, 422), (MismatchStatus::Conflict, 409), (MismatchStatus::BadRequest, 400)]
    {
        let (world, gate) = (sqlite().await, Gate::open());
        let typed = Endpoint::typed::<Put>(Route { mismatch, ..same_tx() }).served_at("POST", "/put");
        let typed = published(&world, door(&world, typed, &gate)).await;
        let next = world.another_process();
        let raw = layered(&next, Endpoint::raw("put", Route { mismatch, ..edge() }), &gate).await;
        for (url, same, other) in [(&typed, r#"{"text":"a"}"#, r#"{"text":"b"}"#), (&raw, "{}", r#"{"status":200}"#)] {
            let (key, url) = (format!("{K1}-{same}").replace(['"', '{', '}'], "~"), format!("{url}/put"));
            assert_eq!(send(post(&url, &key, same)).await.status, 201);
            for asked in [post(&url, &key, other), post(&url, &key, same).header("test-scope", "t1:p2")] {
                let refused = send(asked).await;
                assert_eq!((refused.status, refused.code().as_str()), (status, Code::KeyReused.as_str()));
                let body = refused.json();
                assert_eq!((body["status"].as_u64(), &body["retryable"]), (Some(status.into()), &false.into()));
                assert_eq!(refused.header("retry-after"), None);
            }
            assert!(send(post(&url, &key, same)).await.is_replayed());
        }
        assert_eq!(gate.calls(), 2);
        let document = send(client().get(format!("{typed}/.well-known/idempotency"))).await.json();
        assert_eq!(document["operations"][0]["mismatchStatus"], status, "{document}");
        #[cfg(feature = "openapi")]
        is_described(&world, status);
    }
}

async fn published(world: &World<SqliteStore>, router: Router) -> String {
    let engine = world.engine.clone();
    let publishes = move || {
        let engine = engine.clone();
        async move { well_known(&engine) }
    };
    serve(router.route("/.well-known/idempotency", get(publishes))).await
}

#[cfg(feature = "openapi")]
fn is_described(world: &World<SqliteStore>, status: u16) {
    let responses = serde_json::json!({"responses": {"201": {"description": "made"}}});
    let mut operation: utoipa::openapi::path::Operation = serde_json::from_value(responses).unwrap();
    oncebox::http::idempotency::describe(&world.engine.protected()[0], &mut operation).unwrap();
    let document = serde_json::to_value(&operation).unwrap();
    assert_eq!(document["x-idempotency"]["mismatchStatus"], status);
    // M65. Shown to fail: without these words.
    let replayed = document["responses"]["201"]["headers"]["Idempotent-Replayed"]["description"].as_str().unwrap();
    assert!(replayed.contains("do not depend on it"), "{replayed}");
    let about = document["responses"][status.to_string()]["description"].as_str().unwrap();
    assert!(about.contains("different request"), "{about}");
    assert_eq!(document["responses"].get("422").is_some(), status == 422, "{document}");
    for (other, about) in [("409", "The first request runs"), ("400", "The key or the request is not valid")] {
        let said = document["responses"][other]["description"].as_str().unwrap();
        assert!(said.contains(about), "{said}");
    }
}

// Shown by: leaving 202 out of the document. Shown to fail: with 202 only for `Accepted`; with 202
// for every route that has a path.
#[cfg(feature = "openapi")]
#[tokio::test]
async fn m43_the_openapi_document_says_202_where_the_route_does() {
    let path = Some("/operations/");
    let here = Route { operation_path: path.map(str::to_owned), ..edge() };
    for (route, says) in [
        (phases(WhileRunning::Accepted, path), true),
        (phases(WhileRunning::Conflict, path), true),
        (phases(WhileRunning::Conflict, None), false),
        (here, false),
        (edge(), false),
    ] {
        let world = sqlite().await;
        let endpoint = world.engine.protect(Endpoint::raw("put", route)).unwrap();
        let mut operation = utoipa::openapi::path::Operation::new();
        oncebox::http::idempotency::describe(&endpoint, &mut operation).unwrap();
        let document = serde_json::to_value(&operation).unwrap();
        assert_eq!(document["responses"].get("202").is_some(), says, "{document}");
    }
}

/// Refuses what its body says, with that status, and else has its effect. It has no
/// `Idempotent<E>`: whether it began, only its author knows.
async fn judges<S: Sql>(Of((store, gate)): Of<(S, Gate)>, body: String) -> StatusCode {
    gate.pass().await;
    if let Some(status) = body.strip_prefix("refuse ") {
        return StatusCode::from_u16(status.parse().unwrap()).unwrap();
    }
    store.exec("insert into effect (text) values ('x')").await;
    StatusCode::CREATED
}

// Shown by: releasing whatever the route says; never releasing; releasing 404 too.
async fn o10_release_untagged_frees_what_was_refused_and_nothing_else<S: Sql>(world: World<S>) {
    for release_untagged in [true, false] {
        let (world, gate) = (world.another_process(), Gate::open());
        let layer = IdempotencyLayer::new(&world.engine, Endpoint::raw("put", Route { release_untagged, ..edge() }));
        let router = Router::new().route("/put", route_post(judges::<S>)).route_layer(layer.unwrap());
        let url = serve(router.with_state((world.store.clone(), gate.clone()))).await + "/put";
        for (status, frees) in [(400, true), (403, true), (422, true), (402, false), (404, false), (409, false)] {
            let key = format!("{K1}-{release_untagged}-{status}");
            let refusal = format!("refuse {status}");
            let refused = send(post_text(&url, &key, &refusal)).await;
            assert_eq!((refused.status, refused.is_replayed()), (status, false));
            let mended = send(post_text(&url, &key, "mended")).await;
            if release_untagged && frees {
                assert_eq!((mended.status, mended.is_replayed()), (201, false), "{status}: the key is free");
                assert!(send(post_text(&url, &key, "mended")).await.is_replayed());
            } else {
                mended.is(Code::KeyReused);
                let again = send(post_text(&url, &key, &refusal)).await;
                assert_eq!((again.status, again.is_replayed()), (status, true));
            }
        }
        // What nobody saw the end of is unknown all the same.
        let key = format!("{K2}-{release_untagged}");
        assert_eq!(send(post_text(&url, &key, "refuse 429")).await.status, 429);
        send(post_text(&url, &key, "refuse 429")).await.is(Code::OutcomeUnknown);
        assert_eq!(gate.calls(), if release_untagged { 10 } else { 7 });
    }
    assert_eq!(world.effects().await, 3);
}

/// Its path is read before its body is, and a middleware inside of the layer comes before both.
async fn asks<S: Sql>(
    Of((store, gate)): Of<(S, Gate)>,
    _: Path<u32>,
    Idempotent(Json(status)): Idempotent<Json<u16>>,
) -> StatusCode {
    gate.pass().await;
    store.exec("insert into effect (text) values ('x')").await;
    StatusCode::from_u16(status).unwrap()
}

// Pitfall 16: axum runs the extractor of the body last. Shown to fail: with a setting that frees
// nothing (422 to the corrected path, the old 403 to the request that may); with a setting that
// also frees what the handler refused after it had begun.
async fn o10_what_is_refused_before_the_extractor_of_the_body_frees_the_key_by_release_untagged<S: Sql>(
    world: World<S>,
) {
    let may = from_fn(|request: Request, next: Next| async move {
        if request.headers().contains_key("test-forbidden") {
            return StatusCode::FORBIDDEN.into_response();
        }
        next.run(request).await
    });
    for release_untagged in [true, false] {
        let (world, gate) = (world.another_process(), Gate::open());
        let layer = IdempotencyLayer::new(&world.engine, Endpoint::raw("put", Route { release_untagged, ..edge() }));
        let handler = route_post(asks::<S>).layer(may.clone()).layer(layer.unwrap());
        let router = Router::new().route("/put/{number}", handler).with_state((world.store.clone(), gate.clone()));
        let url = serve(router).await + "/put";
        let key = |name: &str| format!("{K1}-{release_untagged}-{name}");
        let (path, forbidden) = (key("path"), key("forbidden"));
        assert_eq!(send(post(&format!("{url}/x"), &path, "201")).await.status, 400);
        assert_eq!(send(post(&format!("{url}/1"), &forbidden, "201").header("test-forbidden", "1")).await.status, 403);
        assert_eq!(gate.calls(), 0);
        let corrected = send(post(&format!("{url}/2"), &path, "201")).await;
        let allowed = send(post(&format!("{url}/1"), &forbidden, "201")).await;
        if release_untagged {
            for answer in [corrected, allowed] {
                assert_eq!((answer.status, answer.is_replayed()), (201, false), "the key is free");
            }
        } else {
            corrected.is(Code::KeyReused);
            assert_eq!((allowed.status, allowed.is_replayed()), (403, true));
        }
        // The handler has begun: its refusal is the outcome, whatever the route says.
        let before = gate.calls();
        for replayed in [false, true] {
            let refused = send(post(&format!("{url}/1"), &key("begun"), "403")).await;
            assert_eq!((refused.status, refused.is_replayed()), (403, replayed));
        }
        assert_eq!(gate.calls() - before, 1);
    }
    assert_eq!(world.effects().await, 4);
}

fn post_text(url: &str, key: &str, body: &str) -> reqwest::RequestBuilder {
    client().post(url).header("idempotency-key", key).header("content-type", "text/plain").body(body.to_owned())
}

// Shown by: counting no header; leaving `If-Match` out of those that always count; counting all
// headers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m22_listed_headers_belong_to_the_command_and_no_others() {
    const COUNTED: [(&str, &str, &str); 3] = [
        ("prefer", "return=minimal", "return=representation"),
        ("if-match", "\"1\"", "\"2\""),
        ("x-api-version", "2", "3"),
    ];
    let (world, gate) = (sqlite().await, Gate::open());
    let route = Route { counts_headers: vec![("X-Api-Version".to_owned(), 1)], ..edge() };
    let url = layered(&world, Endpoint::raw("put", route), &gate).await + "/put";
    let asks = |change: Option<(&'static str, Option<&'static str>)>| {
        let mut request = post(&url, K1, "{}");
        for (name, value, _) in COUNTED {
            let value = match change {
                Some((changed, other)) if changed == name => other,
                _ => Some(value),
            };
            if let Some(value) = value {
                request = request.header(name, value);
            }
        }
        request
    };
    assert_eq!(send(asks(None)).await.status, 201);
    assert!(send(asks(None)).await.is_replayed());
    for (name, _, other) in COUNTED {
        send(asks(Some((name, Some(other))))).await.is(Code::KeyReused);
        send(asks(Some((name, None)))).await.is(Code::KeyReused);
        // Another line of it is another command too.
        send(asks(None).header(name, other)).await.is(Code::KeyReused);
    }
    // A retry may have fresh credentials, a new trace and another client.
    let others = [
        ("authorization", "Bearer fresh"),
        ("cookie", "session=2"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("user-agent", "another"),
        ("accept", "text/html"),
        ("x-other", "1"),
    ];
    for (name, value) in others {
        assert!(send(asks(None).header(name, value)).await.is_replayed(), "{name}");
    }
    assert_eq!(gate.calls(), 1);
}

// A deploy between a request and its retry. Shown by: counting the header from the first version
// on; reading no newer version than the oldest of all counted headers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m24_a_header_that_a_route_counts_from_today_on_refuses_no_retry_of_yesterday() {
    let (world, gate) = (sqlite().await, Gate::open());
    let counts = |write_version| {
        let counts_headers = vec![("X-Api-Version".to_owned(), 2), ("X-Other".to_owned(), 1)];
        Endpoint::raw("put", Route { counts_headers, write_version, ..edge() })
    };
    let serves = async |world: World<SqliteStore>, endpoint| layered(&world, endpoint, &gate).await + "/put";
    let before = serves(world.clone(), Endpoint::raw("put", edge())).await;
    let deployed = serves(world.another_process(), counts(None)).await;
    let raised = serves(world.another_process(), counts(Some(2))).await;
    let ask =
        async |url: &str, key: &str, version: &str| send(post(url, key, "{}").header("x-api-version", version)).await;
    assert_eq!(ask(&before, K1, "2").await.status, 201);
    for url in [&deployed, &raised] {
        assert!(ask(url, K1, "2").await.is_replayed(), "it was stored without the header");
    }
    assert_eq!(ask(&raised, K2, "2").await.status, 201);
    assert!(ask(&deployed, K2, "2").await.is_replayed());
    ask(&deployed, K2, "3").await.is(Code::KeyReused);
    ask(&before, K2, "2").await.is(Code::FingerprintVersionUnknown);
    assert_eq!(gate.calls(), 2);
}

// Shown by: taking any content type (a retry gets 422, for its boundary alone).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m18_a_multipart_body_is_refused_by_the_layer_unless_the_route_takes_it() {
    let (world, gate) = (sqlite().await, Gate::open());
    let answers = Answers::new("text/plain", "done");
    let upload = |url: &str, content_type: &str| {
        let request = client().post(url).header("idempotency-key", K1).header("content-type", content_type);
        request.body("--b\r\ncontent-disposition: form-data; name=a\r\n\r\n1\r\n--b--\r\n")
    };
    let refuses = answers.raw(&world, |route| route, &gate).await;
    for content_type in ["multipart/form-data; boundary=b", "Multipart/Mixed;boundary=b", "multipart/form-data"] {
        let refused = send(upload(&refuses, content_type)).await;
        assert!(refused.is(Code::UnsupportedMediaType).json()["detail"].as_str().unwrap().contains("boundary"));
    }
    assert_eq!((gate.calls(), world.record("t1", K1).await), (0, None), "the key is free");
    let takes = answers.raw(&world.another_process(), |_| Route { takes_multipart: true, ..edge() }, &gate).await;
    for is_replayed in [false, true] {
        let taken = send(upload(&takes, "multipart/form-data; boundary=b")).await;
        assert_eq!((taken.status, taken.is_replayed()), (201, is_replayed), "{taken:?}");
    }
    assert_eq!(gate.calls(), 1);
}
