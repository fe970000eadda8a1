//! An axum service whose POSTs may be sent twice: the code of
//! `docs/guides/add-to-an-axum-service.md`, whole.
//!
//! It needs the tables of oncebox (`oncebox migrate up`), and makes its own. `POST /payments` is a
//! typed operation, `POST /notes` an ordinary handler behind the layer.

use std::time::Duration;

use axum::Router;
use axum::extract::{Json, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use oncebox::HandlerError;
use oncebox::app::{LogFormat, start_logging, stop_on_signals};
use oncebox::error::Invalid;
use oncebox::http::idempotency::{IdempotencyLayer, IdempotencyScope, Idempotent, JsonCommand, Scoped, TypedOperation};
use oncebox::operation::{
    EffectTx, Endpoint, Engine, EngineOptions, FingerprintWriter, IdempotentCommand, Mode, Outcome, Reply, Route, Scope,
};
use oncebox::sqlx::{SqlitePool, query, raw_sql};
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, Schema, StoreOptions};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Pay {
    account: String,
    cents: i64,
}

impl IdempotentCommand for Pay {
    const OPERATION: &'static str = "pay";
    const VERSION: u32 = 1;

    fn fingerprint(&self, _version: u32, writer: &mut FingerprintWriter) {
        writer.field("account", self.account.as_str()).field("cents", &self.cents);
    }
}

impl JsonCommand for Pay {
    fn check(&self) -> Result<(), String> {
        if self.cents > 0 { Ok(()) } else { Err("cents must be more than 0".to_owned()) }
    }
}

fn payments(engine: &Engine<SqliteStore>) -> Result<Router, Invalid> {
    let typed = TypedOperation::<_, Pay>::new(engine, Endpoint::typed::<Pay>(Route::new(Mode::Transactional)))?;
    let serve = async move |request: Request| typed.serve(request, |asked, tx| Box::pin(pay(asked, tx))).await;
    Ok(Router::new().route("/payments", post(serve)))
}

async fn pay(asked: &Scoped<Pay>, mut tx: EffectTx<'_, SqliteStore>) -> Result<Outcome<Reply>, HandlerError> {
    let insert = query("insert into payment (account, cents) values (?, ?)");
    insert.bind(&asked.command.account).bind(asked.command.cents).execute(tx.connection()).await?;
    Ok(Outcome::Completed(Reply::json(201, &tx.operation_id())?))
}

#[derive(Deserialize)]
struct Note {
    text: String,
}

async fn create_note(State(pool): State<SqlitePool>, Idempotent(Json(note)): Idempotent<Json<Note>>) -> StatusCode {
    match query("insert into note (text) values (?)").bind(note.text).execute(&pool).await {
        Ok(_) => StatusCode::CREATED,
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

fn notes(engine: &Engine<SqliteStore>, pool: SqlitePool) -> Result<Router, Invalid> {
    let layer = IdempotencyLayer::new(engine, Endpoint::raw("create_note", Route::new(Mode::Edge)))?;
    Ok(Router::new().route("/notes", post(create_note).route_layer(layer)).with_state(pool))
}

async fn authenticate(mut request: Request, next: Next) -> Response {
    match verified(request.headers()) {
        Some(scope) => {
            request.extensions_mut().insert(IdempotencyScope(scope));
            next.run(request).await
        }
        None => StatusCode::UNAUTHORIZED.into_response(),
    }
}

/// Stands for the check of a token, which says who asks: a tenant, and in it a principal.
fn verified(headers: &HeaderMap) -> Option<Scope> {
    let token = headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")?;
    let (tenant, principal) = token.split_once(':')?;
    Scope::new(tenant, principal).ok()
}

pub(crate) fn app(engine: &Engine<SqliteStore>, metrics: PrometheusHandle) -> Result<Router, Invalid> {
    let notes = notes(engine, engine.store().pool().clone())?;
    let service = payments(engine)?.merge(notes).layer(from_fn(authenticate));
    Ok(service.route("/metrics", get(async move || metrics.render())))
}

pub(crate) const TABLES: &str = "create table if not exists payment (account text not null, cents integer not null);
    create table if not exists note (text text not null)";

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    start_logging(LogFormat::Text, "info")?;
    let metrics = PrometheusBuilder::new().install_recorder()?;
    let url = std::env::var("ONCEBOX_DATABASE__URL").unwrap_or_else(|_| "sqlite://oncebox.db".to_owned());
    let store = SqliteStore::connect(&StoreOptions::new(url.clone())).await?;
    // Without the tables of oncebox it ends here, and says what to do.
    store.schema().await?.require().map_err(|why| format!("{url}: {why}"))?;
    raw_sql(TABLES).execute(store.pool()).await?;
    let engine = Engine::new(store, EngineOptions::default());

    let sweeper = engine.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(60)).await;
            if let Err(error) = sweeper.sweep(1_000).await {
                tracing::warn!(%error, "a sweep failed");
            }
            if let Err(error) = sweeper.measure().await {
                tracing::warn!(%error, "what is open was not counted");
            }
        }
    });

    let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
    let stop = stop_on_signals()?.cancelled_owned();
    axum::serve(listener, app(&engine, metrics)?).with_graceful_shutdown(stop).await?;
    engine.drain(Duration::from_secs(20)).await;
    Ok(())
}
