//! The guide "Add to an axum service": what it shows is the example, and the example does what the
//! guide says.

use axum::body::{Body, to_bytes};
use axum::extract::{Path, State};
use axum::http::{Request, StatusCode};
use axum::routing::delete;
use axum::{Extension, Router};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use oncebox::http::idempotency::{IdempotencyLayer, IdempotencyScope};
use oncebox::operation::{Endpoint, Engine, EngineOptions, Mode, Requirement, Route, Scope};
use oncebox::sqlx::{SqlitePool, query, query_scalar, raw_sql};
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, Schema, StoreOptions};
use tower_service::Service;

/// The example itself.
#[allow(dead_code)]
#[path = "../../../../examples/axum_service.rs"]
mod service;

const GUIDE: &str = include_str!("../../../../docs/guides/add-to-an-axum-service.md");
const README: &str = include_str!("../../../../README.md");
const EXAMPLE: &str = include_str!("../../../../examples/axum_service.rs");
const KEY: &str = "9b2f0c64-1b5e-4f0e-8a3c-6f1d2e3a4b5c";
const OTHER: &str = "1c2f0c64-1b5e-4f0e-8a3c-6f1d2e3a4b5c";

// Shown by: changing a line of the guide; leaving out the handler of the notes.
#[test]
fn the_code_of_the_guide_is_the_example_that_is_run() {
    let code = EXAMPLE.split_once("\n\n").unwrap().1;
    let blocks: Vec<&str> = GUIDE.split("```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(blocks.len() > 3, "{blocks:?}");
    let mut rest = code;
    for block in blocks {
        let (between, after) =
            rest.split_once(block).unwrap_or_else(|| panic!("not in the example, or not in its order:\n{block}"));
        assert!(between.trim().is_empty(), "the guide leaves out:\n{between}");
        rest = after;
    }
    assert!(rest.trim().is_empty(), "the guide leaves out:\n{rest}");
    let shown: Vec<&str> = README.split("```rs\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert_eq!(shown.len(), 2, "the door and the layer");
    for block in shown {
        assert!(EXAMPLE.contains(block), "the README shows what is not in the example:\n{block}");
    }
}

fn metrics() -> PrometheusHandle {
    PrometheusBuilder::new().build_recorder().handle()
}

// Shown by: `/metrics` below `authenticate`.
#[tokio::test]
async fn a_service_made_as_the_guide_says_shows_its_metrics_to_whoever_asks() {
    let shop = Shop::open().await;
    let app = service::app(&shop.engine(), metrics()).unwrap();
    assert_eq!(ask(&app, "t1:p1", PAYMENT.0, KEY, PAYMENT.1).await.status, StatusCode::CREATED);
    let answer = send(&app, Request::get("/metrics").body(Body::empty()).unwrap()).await;
    assert_eq!(answer.status, StatusCode::OK);
}

struct Answer {
    status: StatusCode,
    replayed: bool,
    body: Vec<u8>,
}

async fn send(app: &Router, request: Request<Body>) -> Answer {
    let response = app.clone().call(request).await.unwrap();
    Answer {
        status: response.status(),
        replayed: response.headers().get("idempotent-replayed").is_some_and(|value| value == "true"),
        body: to_bytes(response.into_body(), usize::MAX).await.unwrap().to_vec(),
    }
}

async fn ask(app: &Router, who: &str, path: &str, key: &str, body: &str) -> Answer {
    let mut request = Request::post(path).header("content-type", "application/json").header("idempotency-key", key);
    if !who.is_empty() {
        request = request.header("authorization", format!("Bearer {who}"));
    }
    send(app, request.body(Body::from(body.to_owned())).unwrap()).await
}

/// A database with all tables, in a directory that is kept as long as it.
struct Shop {
    store: SqliteStore,
    _directory: tempfile::TempDir,
}

impl Shop {
    async fn open() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", directory.path().join("shop.db").display());
        let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(url) }).await.unwrap();
        store.migrate().await.unwrap();
        raw_sql(service::TABLES).execute(store.pool()).await.unwrap();
        Self { store, _directory: directory }
    }

    fn engine(&self) -> Engine<SqliteStore> {
        Engine::new(self.store.clone(), EngineOptions::default())
    }

    /// Payments and notes.
    async fn rows(&self) -> (i64, i64) {
        let count = "select (select count(*) from payment) || ' ' || (select count(*) from note)";
        let counted: String = query_scalar(count).fetch_one(self.store.pool()).await.unwrap();
        let (payments, notes) = counted.split_once(' ').unwrap();
        (payments.parse().unwrap(), notes.parse().unwrap())
    }
}

const PAYMENT: (&str, &str) = ("/payments", r#"{"account":"acc-7","cents":100}"#);
const NOTE: (&str, &str) = ("/notes", r#"{"text":"a"}"#);

// Shown by: `authenticate` that lets everybody in; a route of the guide without its door.
#[tokio::test]
async fn m108_a_service_made_as_the_guide_says_answers_the_second_request() {
    let shop = Shop::open().await;
    let app = service::app(&shop.engine(), metrics()).unwrap();
    for ((path, body), other) in [(PAYMENT, r#"{"account":"acc-7","cents":900}"#), (NOTE, r#"{"text":"b"}"#)] {
        assert_eq!(ask(&app, "", path, KEY, body).await.status, StatusCode::UNAUTHORIZED);
        let first = ask(&app, "t1:p1", path, KEY, body).await;
        assert_eq!((first.status, first.replayed), (StatusCode::CREATED, false), "{path}");
        let second = ask(&app, "t1:p1", path, KEY, body).await;
        assert_eq!((second.status, second.replayed), (StatusCode::CREATED, true), "{path}");
        assert_eq!(first.body, second.body);
        assert_eq!(ask(&app, "t1:p1", path, KEY, other).await.status, StatusCode::UNPROCESSABLE_ENTITY);
        assert_eq!(ask(&app, "t1:p1", path, "short", body).await.status, StatusCode::BAD_REQUEST);
    }
    assert_eq!(shop.rows().await, (1, 1));
    // What is refused before it is claimed, or by the extractor, leaves the key free for the body
    // that was meant.
    for ((path, meant), wrong) in [(PAYMENT, r#"{"account":"acc-7","cents":0}"#), (NOTE, r#"{"note":"a"}"#)] {
        assert!(ask(&app, "t1:p1", path, OTHER, wrong).await.status.is_client_error(), "{path}");
        let mended = ask(&app, "t1:p1", path, OTHER, meant).await;
        assert_eq!((mended.status, mended.replayed), (StatusCode::CREATED, false), "{path}");
    }
    assert_eq!(shop.rows().await, (2, 2));
}

/// The retry of a request whose resource somebody has deleted since is still that request, not a
/// new one.
// Shown by: taking the records away with the rows.
#[tokio::test]
async fn m119_a_retry_after_the_resource_was_deleted_makes_it_not_again() {
    let shop = Shop::open().await;
    let app = service::app(&shop.engine(), metrics()).unwrap();
    for (path, body) in [PAYMENT, NOTE] {
        let first = ask(&app, "t1:p1", path, KEY, body).await;
        raw_sql("delete from payment; delete from note").execute(shop.store.pool()).await.unwrap();
        let again = ask(&app, "t1:p1", path, KEY, body).await;
        assert_eq!((again.status, again.replayed, again.body), (StatusCode::CREATED, true, first.body), "{path}");
        assert_eq!(shop.rows().await, (0, 0), "{path}");
    }
}

async fn delete_note(State(pool): State<SqlitePool>, Path(text): Path<String>) -> StatusCode {
    let deleted = query("delete from note where text = ?").bind(text).execute(&pool).await.unwrap().rows_affected();
    if deleted > 0 { StatusCode::NO_CONTENT } else { StatusCode::NOT_FOUND }
}

/// A DELETE by name needs no key: the second one finds nothing, which is the same effect and
/// another answer. Under a key the answer is the same too.
// Shown by: `requirement: Required` (400 without a key); without the layer (404 under the key).
#[tokio::test]
async fn m120_a_repeated_delete_is_404_and_under_its_key_204_again() {
    let shop = Shop::open().await;
    let optional = Route { requirement: Requirement::Optional, ..Route::new(Mode::Edge) };
    let layer = IdempotencyLayer::new(&shop.engine(), Endpoint::raw("delete_note", optional)).unwrap();
    let app = Router::new().route("/notes/{text}", delete(delete_note).route_layer(layer));
    let app = app.with_state(shop.store.pool().clone());
    let app = app.layer(Extension(IdempotencyScope(Scope::new("t1", "p1").unwrap())));
    for (key, second) in [(None, (StatusCode::NOT_FOUND, false)), (Some(KEY), (StatusCode::NO_CONTENT, true))] {
        query("insert into note (text) values ('a')").execute(shop.store.pool()).await.unwrap();
        for expected in [(StatusCode::NO_CONTENT, false), second, second] {
            let request = key
                .into_iter()
                .fold(Request::delete("/notes/a"), |request, key| request.header("idempotency-key", key));
            let answer = send(&app, request.body(Body::empty()).unwrap()).await;
            assert_eq!((answer.status, answer.replayed), expected, "{key:?}");
        }
        assert_eq!(shop.rows().await, (0, 0));
    }
}
