//! A transactional operation and the layer through HTTP, beside the same handler without them: one
//! process, loopback, connections that stay open. `http.by_hand` is, beside the same handler, the
//! least that a key costs when it is written by hand: a row of two columns is inserted and
//! answered, but never compared, checked or purged.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Json, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use uuid::Uuid;

use super::Load;
use super::bed::Bed;
use super::crowd::crowd;
use super::figure::Figure;
use super::pay::{CLIENTS, Pay, milliseconds, paid};
use super::work::Maker;
use super::yard::Yard;
use crate::common::failed;
use crate::progress::Rounds;
use oncebox::StoreError;
use oncebox::app::AppError;
use oncebox::http::idempotency::{IdempotencyLayer, IdempotencyScope, JsonCommand, TypedOperation};
use oncebox::operation::{Endpoint, Engine, EngineOptions, Mode, Route, Scope};

impl JsonCommand for Pay {}

struct Shop<S> {
    store: S,
    maker: Arc<Maker>,
}

/// A running service, which ends when this is dropped.
struct Service {
    url: String,
    client: reqwest::Client,
    served: JoinHandle<()>,
}

impl Drop for Service {
    fn drop(&mut self) {
        self.served.abort();
    }
}

pub(super) async fn measure<S: Yard>(bed: &Bed<S>, maker: &Arc<Maker>, load: Load) -> Result<Vec<Figure>, AppError> {
    let service = Arc::new(Service::start(bed.store.clone(), maker).await?);
    for path in ["bare", "hand", "typed", "layer"] {
        service.ask(path, load.messages / 10).await?;
    }
    let (mut hand, mut typed, mut layer) = (Vec::new(), Vec::new(), Vec::new());
    for _ in Rounds::start("http through HTTP", load.rounds) {
        let without = milliseconds(service.ask("bare", load.messages).await?);
        hand.push((milliseconds(service.ask("hand", load.messages).await?), without));
        typed.push((milliseconds(service.ask("typed", load.messages).await?), without));
        layer.push((milliseconds(service.ask("layer", load.messages).await?), without));
    }
    Ok(vec![
        Figure::beside("http.by_hand", "ms", "the same handler without a key, through HTTP", &hand),
        Figure::beside("http.handler", "ms", "the same handler without the engine, through HTTP", &typed)
            .wanted("<= 1.25"),
        Figure::beside("http.layer", "ms", "the same handler without the layer, through HTTP", &layer).wanted("<= 1.6"),
    ])
}

impl Service {
    async fn start<S: Yard>(store: S, maker: &Arc<Maker>) -> Result<Self, AppError> {
        let engine = Engine::new(store.clone(), EngineOptions::default());
        let typed = TypedOperation::<S, Pay>::new(&engine, Endpoint::typed::<Pay>(Route::new(Mode::Transactional)));
        let layer = IdempotencyLayer::new(&engine, Endpoint::raw("bench_layer", Route::new(Mode::Edge)));
        let shop = Arc::new(Shop { store, maker: Arc::clone(maker) });
        let routes = Router::new()
            .route("/typed", post(through(typed.map_err(failed)?, Arc::clone(maker))))
            .route("/layer", post(by_hand::<S>).layer(layer.map_err(failed)?))
            .route("/bare", post(by_hand::<S>))
            .route("/hand", post(keyed_by_hand::<S>))
            .layer(from_fn(authenticate))
            .with_state(shop);
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.map_err(failed)?;
        let url = format!("http://{}", listener.local_addr().map_err(failed)?);
        let client = reqwest::Client::builder().no_proxy().build().map_err(failed)?;
        let served = tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, routes).await {
                tracing::error!(%error, "the service of the benchmark has ended");
            }
        });
        Ok(Self { url, client, served })
    }

    /// Sends `count` requests to `path` and returns the requests per second.
    async fn ask(self: &Arc<Self>, path: &'static str, count: usize) -> Result<f64, AppError> {
        let service = Arc::clone(self);
        let one = move |_| {
            let service = Arc::clone(&service);
            async move {
                let pay = Pay::any();
                let body = serde_json::json!({ "account": pay.account, "amount": pay.amount, "note": pay.note });
                let request = service
                    .client
                    .post(format!("{}/{path}", service.url))
                    .header("content-type", "application/json")
                    .header("idempotency-key", Uuid::now_v7().to_string())
                    .body(body.to_string());
                let answer = request.send().await.map_err(failed)?;
                let status = answer.status().as_u16();
                // The connection can be used again once the body was read.
                answer.bytes().await.map_err(failed)?;
                if status == 201 { Ok(()) } else { Err(failed(format!("{path} was answered {status}"))) }
            }
        };
        crowd(CLIENTS, count, one).await
    }
}

/// Takes the place of verified authentication.
async fn authenticate(mut request: Request, next: Next) -> Response {
    if let Ok(scope) = Scope::new("t1", "p1") {
        request.extensions_mut().insert(IdempotencyScope(scope));
    }
    next.run(request).await
}

/// The handler without the engine.
async fn by_hand<S: Yard>(State(shop): State<Arc<Shop<S>>>, Json(pay): Json<Pay>) -> Response {
    answered(shop.pay(&pay, None).await)
}

/// The handler with the least that a key costs.
async fn keyed_by_hand<S: Yard>(
    State(shop): State<Arc<Shop<S>>>,
    headers: HeaderMap,
    Json(pay): Json<Pay>,
) -> Response {
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok()).and_then(|key| key.parse().ok());
    match key {
        Some(key) => answered(shop.pay(&pay, Some(key)).await),
        None => StatusCode::BAD_REQUEST.into_response(),
    }
}

fn answered(paid: Result<serde_json::Value, StoreError>) -> Response {
    match paid {
        Ok(paid) => (StatusCode::CREATED, Json(paid)).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

impl<S: Yard> Shop<S> {
    async fn pay(&self, pay: &Pay, key: Option<Uuid>) -> Result<serde_json::Value, StoreError> {
        let mut tx = self.store.pool().begin().await?;
        if let Some(key) = key {
            S::claim_by_hand(&mut tx, key).await?;
        }
        let id = Uuid::now_v7();
        S::pay(&mut tx, id, pay.account, pay.amount).await?;
        oncebox::store::enqueue(&mut *tx, self.maker.message()).await?;
        let paid = serde_json::json!({ "id": id, "status": "settled", "amount": pay.amount });
        if let Some(key) = key {
            S::answer_by_hand(&mut tx, key, paid.to_string().into_bytes()).await?;
        }
        tx.commit().await?;
        Ok(paid)
    }
}

/// Makes a handler that runs the payment as a transactional operation.
fn through<S: Yard>(
    typed: TypedOperation<S, Pay>,
    maker: Arc<Maker>,
) -> impl Fn(Request) -> futures_util::future::BoxFuture<'static, Response> + Clone + Send + Sync + 'static {
    move |request| {
        let (typed, maker) = (typed.clone(), Arc::clone(&maker));
        Box::pin(async move {
            typed
                .serve(request, move |asked, tx| {
                    let maker = Arc::clone(&maker);
                    Box::pin(async move { paid(tx, &asked.command, &maker).await })
                })
                .await
        })
    }
}
