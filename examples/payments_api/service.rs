//! The service: what it is made of, its routes, its beginning and end.
//!
//! Another operation is a file of its own with its handlers, and a line in [`App`] and in `routes`.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use oncebox::app::config::{Secret, Settings};
use oncebox::app::{AppError, LogFormat, open_broker, run_publisher_with, start_logging, stop_on_signals};
use oncebox::http::idempotency::{IdempotencyLayer, IdempotencyScope, TypedOperation, problem_response, well_known};
use oncebox::observe::Health;
use oncebox::operation::phased::{PhasedEngine, Recovery, RecoveryOptions};
use oncebox::operation::{Code, Endpoint, Engine, EngineOptions, Mode, Problem, Scope};
use oncebox::store::StoreOptions;
use oncebox::{Relay, RelayOptions, StoreError, observe};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::args::{Args, Switch};
use crate::books::Books;
use crate::cards::Cards;
use crate::charges::{Charges, NewCharge};
use crate::deployment::Found;
use crate::payments::NewPayment;
use crate::{accounts, charges, notes, payments};

/// How long two processes that start at once may wait for each other's tables.
const TABLES_WITHIN: Duration = Duration::from_secs(30);
/// Between two sweeps of what is forgotten.
const SWEEP: Duration = Duration::from_secs(60);

/// What handlers share.
#[derive(Debug, Clone)]
pub(crate) struct App<S: Books> {
    pub(crate) store: S,
    pub(crate) engine: Engine<S>,
    pub(crate) payments: TypedOperation<S, NewPayment>,
    pub(crate) charges: Arc<Charges<S>>,
    health: Health,
    metrics: PrometheusHandle,
}

pub(crate) async fn run<S: Books>(args: Args) -> Result<(), AppError> {
    if let Some(point) = &args.pause_at {
        crate::points::pause_at(point);
    }
    let metrics = PrometheusBuilder::new().install_recorder().map_err(failed)?;
    observe::describe("payments_api");
    start_logging(LogFormat::Text, &std::env::var("RUST_LOG").unwrap_or_else(|_| "warn".to_owned())).map_err(failed)?;
    if args.recovery == Switch::Only {
        return recover_only::<S>(args).await;
    }
    let (store, found): (S, _) = open(&args.database).await?;
    let deployment = found.ours(&args)?;
    let health = Health::default();
    let mut options = EngineOptions { health: health.clone(), ..EngineOptions::default() };
    if let Some(here) = &args.region {
        let home = |scope: &Scope| scope.tenant().split_once('.').map(|(home, _)| home.to_owned());
        options.region = Some((here.clone(), Arc::new(home)));
    }
    let engine = Engine::new(store.clone(), options);
    let payment = Endpoint::typed::<NewPayment>(args.route(Mode::Transactional)).served_at("POST", "/payments");
    let payments = TypedOperation::new(&engine, payment).map_err(failed)?;
    let charges = Arc::new(charges(&args, deployment, &engine)?);
    let phased = charges.phased.clone();
    let app = App { store: store.clone(), engine: engine.clone(), payments, charges, health, metrics };
    let router = routes(app, &args)?;

    let stop = stop_on_signals()?;
    let mut background = tokio::task::JoinSet::new();
    match &args.broker {
        Some(broker) => background.spawn(relay(store.clone(), broker.clone(), stop.clone())),
        // Another process publishes, and need not wait for its next poll.
        None => background.spawn(announce(store.clone(), stop.clone())),
    };
    background.spawn(sweep(engine.clone(), stop.clone()));
    if let (Some(phased), Switch::On) = (&phased, args.recovery) {
        background.spawn(recover(Recovery::new(phased, RecoveryOptions::default(), Health::default()), stop.clone()));
    }
    tracing::info!(
        provider = args.provider.as_deref().unwrap_or("none"),
        recovery = args.recovery == Switch::On,
        charge_budget = args.charge_budget,
        "starting"
    );
    let listener = TcpListener::bind(&args.listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    println!("listening on {address}");
    let stopped = stop.clone();
    let served = axum::serve(listener, router).with_graceful_shutdown(async move { stopped.cancelled().await }).await;
    if let Some(phased) = &phased {
        phased.stop();
    }
    engine.drain(Duration::from_secs_f64(args.lease).mul_f64(0.8)).await;
    while background.join_next().await.is_some() {}
    store.close().await;
    served.map_err(failed)
}

fn failed(error: impl std::fmt::Display) -> AppError {
    AppError::failed(error.to_string())
}

/// The engine of `/charges`, where there is a provider.
fn charges<S: Books>(args: &Args, deployment: Uuid, engine: &Engine<S>) -> Result<Charges<S>, AppError> {
    let endpoint = Endpoint::typed::<NewCharge>(args.route(Mode::Phased)).served_at("POST", "/charges");
    let typed = TypedOperation::phased(engine, endpoint).map_err(failed)?;
    let phased = match &args.provider {
        None => None,
        Some(url) => {
            let cards = Cards::new(url, args.provider_timeout()).map_err(failed)?;
            let flow = charges::flow(S::clone(engine.store()), cards).map_err(failed)?;
            Some(PhasedEngine::new(engine, deployment, [(flow, typed.endpoint())]).map_err(failed)?)
        }
    };
    Ok(Charges { typed, phased, budget: Duration::from_secs_f64(args.charge_budget.max(0.0)) })
}

/// A process of its own that recovers, and carries messages: what `oncebox::app::publisher` is for
/// a `main` that has its flags.
async fn recover_only<S: Books>(args: Args) -> Result<(), AppError> {
    let mut settings = Settings::default();
    settings.database.url = Secret(args.database.clone());
    settings.broker.url = Secret(args.broker.clone().ok_or_else(|| AppError::usage("--recovery only needs --broker"))?);
    settings.broker.kafka.create_topics = true;
    let phased = async |store: S| {
        let engine = Engine::new(store.clone(), EngineOptions::default());
        let deployment = Found::read(&store).await?.ours(&args)?;
        let charges = charges(&args, deployment, &engine)?;
        charges.phased.ok_or_else(|| AppError::usage("--recovery only needs --provider"))
    };
    run_publisher_with(&settings, phased, false, Health::default(), stop_on_signals()?).await
}

/// The recovery worker, in the service's process.
async fn recover(recovery: Recovery, stop: CancellationToken) {
    if let Err(error) = recovery.run(stop).await {
        tracing::error!(%error, "the recovery ended");
    }
}

fn routes<S: Books>(app: App<S>, args: &Args) -> Result<Router, AppError> {
    let note = Endpoint::raw("create_note", args.route(Mode::Edge)).served_at("POST", "/notes");
    let layer = IdempotencyLayer::new(&app.engine, note).map_err(failed)?;
    let protected = Router::new()
        // Layers on the method, not on the router: there they would see other methods too, which
        // get 405.
        .route("/notes", post(notes::create::<S>).route_layer(layer))
        .route("/notes/{id}", get(notes::show::<S>).route_layer(from_fn(readable)))
        .route("/payments", post(payments::create::<S>))
        .route("/payments/{id}", get(payments::show::<S>).route_layer(from_fn(readable)))
        .route("/charges", post(charges::create::<S>))
        .route("/operations/{id}", get(charges::show::<S>).route_layer(from_fn(readable)))
        .route("/accounts/{id}", put(accounts::put::<S>).route_layer(from_fn(readable)))
        // The last layer is the outermost: who is not authenticated reaches no key.
        .layer(from_fn(authenticate));
    let open = Router::new()
        .route("/.well-known/idempotency", get(async |State(app): State<App<S>>| well_known(&app.engine)))
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(ready::<S>))
        .route("/metrics", get(show_metrics::<S>));
    #[cfg(feature = "openapi")]
    let open = {
        let document = crate::openapi::document(&app.engine).map_err(failed)?;
        open.route("/openapi.json", get(async move || axum::Json(document)))
    };
    Ok(protected.merge(open).with_state(app))
}

/// No database keeps a NUL in a text, and PostgreSQL refuses the statement that asks for one:
/// nothing has such an id.
async fn readable(request: Request, next: Next) -> Response {
    if request.uri().path().contains("%00") { StatusCode::NOT_FOUND.into_response() } else { next.run(request).await }
}

/// Stands for verified authentication: `Authorization: Bearer TENANT:PRINCIPAL`.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let good = |part: &str| {
        (1..=64).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
    };
    let bearer = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let scope = bearer
        .and_then(|value| value.strip_prefix("Bearer "))
        .and_then(|token| token.split_once(':'))
        .filter(|(tenant, principal)| good(tenant) && good(principal))
        .and_then(|(tenant, principal)| Scope::new(tenant, principal).ok());
    match scope {
        Some(scope) => {
            request.extensions_mut().insert(IdempotencyScope(scope));
            next.run(request).await
        }
        None => problem_response(&Problem::new(Code::Unauthenticated)),
    }
}

/// The answer where a handler could not read.
pub(crate) fn unread(error: &(dyn std::error::Error + 'static)) -> Response {
    tracing::warn!(error = words(error), "a read failed");
    problem_response(&Problem::new(Code::StoreUnavailable))
}

/// The answer where a plain handler could not write, which may have happened all the same: the same
/// request again is right.
pub(crate) fn unwritten(error: &(dyn std::error::Error + 'static)) -> Response {
    tracing::warn!(error = words(error), "a write failed");
    problem_response(&Problem::new(Code::CommitUnknown))
}

/// What an error says; one of the database in the database's own words.
fn words(error: &(dyn std::error::Error + 'static)) -> String {
    let of_database = error.downcast_ref::<oncebox::sqlx::Error>();
    of_database.map_or_else(|| error.to_string(), oncebox::error::words)
}

async fn ready<S: Books>(State(app): State<App<S>>) -> Response {
    let status = if app.health.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, app.health.lines().join("\n") + "\n").into_response()
}

async fn show_metrics<S: Books>(State(app): State<App<S>>) -> Response {
    if let Err(error) = app.engine.measure().await {
        tracing::warn!(%error, "the gauges are old");
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.metrics.render()).into_response()
}

/// Connects, makes the tables, and reads whose deployment it is. Of two that start at once one
/// makes the tables; the other one tries again, and so does one whose connection is lost.
async fn open<S: Books>(url: &str) -> Result<(S, Found), AppError> {
    let options = StoreOptions { create: true, ..StoreOptions::new(url) };
    let deadline = tokio::time::Instant::now() + TABLES_WITHIN;
    loop {
        match make::<S>(&options).await {
            Ok(opened) => return Ok(opened),
            Err(error) if tokio::time::Instant::now() >= deadline => return Err(error.into()),
            Err(error) => tracing::debug!(%error, "the tables could not be made yet"),
        }
        tokio::time::sleep(Duration::from_millis(some_millis())).await;
    }
}

/// Some time, not the same in two processes.
fn some_millis() -> u64 {
    100 + u64::from(Uuid::now_v7().as_bytes()[15])
}

async fn make<S: Books>(options: &StoreOptions) -> Result<(S, Found), StoreError> {
    let store = S::connect(options).await?;
    store.migrate().await?;
    store.make_tables().await?;
    store.make_charges().await?;
    let found = Found::read(&store).await?;
    Ok((store, found))
}

/// The relay, in the same process.
async fn relay<S: Books>(store: S, broker: String, stop: CancellationToken) {
    let mut settings = Settings::default();
    settings.broker.url = Secret(broker);
    settings.broker.kafka.create_topics = true;
    let broker = match open_broker(&settings, None).await {
        Ok(broker) => broker,
        Err(error) => return tracing::error!(%error, "no broker"),
    };
    let owner = format!("payments-api-{}", Uuid::now_v7().simple());
    let relay = Relay::new(store, broker, RelayOptions::new(owner), Health::default());
    while !stop.is_cancelled() {
        if let Err(error) = relay.run(stop.clone()).await {
            tracing::error!(%error, "the relay ended");
            let pause = tokio::time::sleep(Duration::from_secs(1));
            stop.run_until_cancelled(pause).await;
        }
    }
}

async fn announce<S: Books>(store: S, stop: CancellationToken) {
    oncebox::announce(&store, &stop).await;
}

/// Forgets what nobody was promised any more.
async fn sweep<S: Books>(engine: Engine<S>, stop: CancellationToken) {
    while stop.run_until_cancelled(tokio::time::sleep(SWEEP)).await.is_some() {
        if let Err(error) = engine.sweep(1_000).await {
            tracing::warn!(%error, "a sweep failed");
        }
    }
}
