//! A database, an engine, an operation with one text, and a handler that does what the test says.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use oncebox::HandlerError;
use oncebox::http::idempotency::{IdempotencyScope, JsonCommand};
use oncebox::operation::{
    Answered, Code, EffectTx, Endpoint, Engine, EngineOptions, FingerprintWriter, IdempotentCommand, Identity, Key,
    KeyFormat, KeyGiven, Mode, Outcome, Problem, Record, Registered, Reply, Route, Scope, State,
};
use oncebox::sqlx::{AssertSqlSafe, Database, query_scalar, raw_sql};
use oncebox::store::OperationStore;
use oncebox::store::mysql::MySqlStore;
use oncebox::store::postgres::PostgresStore;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, Basis, KeyClaim, Schema, StoreOptions};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

/// Long enough for a busy machine; a condition that holds ends the wait at once.
pub(crate) const SOON: Duration = Duration::from_secs(60);
pub(crate) const K1: &str = "key-0000000000000001";
pub(crate) const K2: &str = "key-0000000000000002";

pub(crate) type Connection<S> = <<S as Base>::Db as Database>::Connection;

/// What tests need of a database beyond the traits.
#[async_trait]
pub(crate) trait Sql: OperationStore {
    /// No unique constraint: a second effect would stand there.
    const EFFECT: &'static str;
    /// What stands before the names of oncebox's tables.
    const PREFIX: &'static str;
    /// A handler cannot commit, nor write behind its transaction: the connection refuses it.
    const NOTHING_ESCAPES: bool;
    /// What a handler writes behind its transaction is committed at once, and not part of another
    /// that is rolled back.
    const AUTOCOMMITS: bool;

    async fn run(connection: &mut Connection<Self>, sql: &str) -> Result<(), oncebox::sqlx::Error>;
    async fn number(&self, sql: &str) -> i64;
    async fn exec(&self, sql: &str);
    /// A transaction of the application's own, in which these statements ran.
    async fn tx(&self, sql: &str) -> oncebox::sqlx::Transaction<'static, Self::Db>;
}

macro_rules! sql {
    ($store:ty, $prefix:literal, $escapes:literal, $autocommits:literal, $begin:literal, $effect:literal) => {
        #[async_trait]
        impl Sql for $store {
            const EFFECT: &'static str = $effect;
            const PREFIX: &'static str = $prefix;
            const NOTHING_ESCAPES: bool = $escapes;
            const AUTOCOMMITS: bool = $autocommits;

            async fn run(connection: &mut Connection<Self>, sql: &str) -> Result<(), oncebox::sqlx::Error> {
                raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await.map(|_| ())
            }

            async fn number(&self, sql: &str) -> i64 {
                query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(self.pool()).await.unwrap()
            }

            async fn exec(&self, sql: &str) {
                raw_sql(AssertSqlSafe(sql.to_owned())).execute(self.pool()).await.unwrap();
            }

            async fn tx(&self, sql: &str) -> oncebox::sqlx::Transaction<'static, Self::Db> {
                let mut tx = self.pool().begin_with($begin).await.unwrap();
                raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut *tx).await.unwrap();
                tx
            }
        }
    };
}

sql!(
    SqliteStore,
    "oncebox_",
    true,
    true,
    "BEGIN IMMEDIATE",
    "create table effect (no integer primary key autoincrement, text text not null)"
);
sql!(
    MySqlStore,
    "oncebox_",
    false,
    false,
    "START TRANSACTION",
    "create table effect (no bigint auto_increment primary key, text text not null)"
);
sql!(
    PostgresStore,
    "oncebox.",
    false,
    true,
    "BEGIN",
    "create table effect (no bigserial primary key, text text not null)"
);

/// A time that is over, as columns of oncebox have it.
pub(crate) fn long_ago<S: Sql>() -> &'static str {
    match S::NAME {
        "sqlite" => "strftime('%s', '2020-01-01') * 1000",
        _ => "timestamp '2020-01-01 00:00:00'",
    }
}

/// One database, and an engine of one process on it.
#[derive(Debug, Clone)]
pub(crate) struct World<S: OperationStore> {
    pub(crate) store: S,
    pub(crate) engine: Engine<S>,
    pub(crate) url: String,
    pub(crate) _directory: Option<Arc<tempfile::TempDir>>,
}

impl<S: Sql> World<S> {
    pub(crate) async fn on(store: S, url: &str) -> Self {
        // A test that fails shows what the engine warned of: an answer names no error of a store.
        let warnings = tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_ansi(false);
        let _ = warnings.with_test_writer().try_init();
        store.exec(S::EFFECT).await;
        let engine = Engine::new(store.clone(), EngineOptions::default());
        Self { store, engine, url: url.to_owned(), _directory: None }
    }

    /// An engine as another process has it: the same store, another map of what runs.
    pub(crate) fn another_process(&self) -> Self {
        self.process(EngineOptions::default())
    }

    /// Another process, whose engine has these settings.
    pub(crate) fn process(&self, options: EngineOptions) -> Self {
        Self { engine: Engine::new(self.store.clone(), options), ..self.clone() }
    }

    /// The same database through a pool of so many connections.
    pub(crate) async fn with_pool_of(&self, connections_max: u32) -> Self {
        let options = StoreOptions { connections_max, ..StoreOptions::new(self.url.clone()) };
        let store = S::connect(&options).await.unwrap();
        Self { engine: Engine::new(store.clone(), EngineOptions::default()), store, ..self.clone() }
    }

    /// The same service with another definition of the operation, as its next version is deployed.
    pub(crate) fn deployed(&self, endpoint: Endpoint) -> (Self, Registered) {
        let next = self.another_process();
        let registered = next.engine.protect(endpoint).unwrap();
        (next, registered)
    }

    pub(crate) fn protect(&self, route: Route) -> Registered {
        self.engine.protect(Endpoint::typed::<Put>(route)).unwrap()
    }

    pub(crate) async fn effects(&self) -> i64 {
        self.store.number("select count(*) from effect").await
    }

    pub(crate) async fn outbox(&self) -> i64 {
        self.store.number(&format!("select count(*) from {}outbox", S::PREFIX)).await
    }

    pub(crate) async fn record(&self, tenant: &str, key: &str) -> Option<Record> {
        self.store.find(&identity(tenant, key)).await.unwrap().record
    }

    /// Waits until the outcome of a key is stored.
    pub(crate) async fn completes(&self, key: &str) {
        until("its outcome is stored", || async {
            self.record("t1", key).await.is_some_and(|record| record.state == State::Completed)
        })
        .await;
    }

    /// Waits until the time of a key is over.
    pub(crate) async fn expires(&self, key: &str) {
        until("its time is over", || async {
            let look = self.store.find(&identity("t1", key)).await.unwrap();
            look.record.is_some_and(|record| record.state_at(look.now) == State::Expired)
        })
        .await;
    }

    /// Makes a claim as a process that dies after it, and waits until its lease is over.
    pub(crate) async fn is_left_behind(&self, claim: &KeyClaim) {
        assert!(self.store.claim(claim, Basis::New).await.unwrap().is_some());
        // A sweep leaves a claim alone until its lease has been over for half of its length.
        until("its lease has long been over", || async {
            let look = self.store.find(&claim.identity).await.unwrap();
            look.record.and_then(|record| record.lease).is_some_and(|lease| lease.until.after(lease.length) <= look.now)
        })
        .await;
    }
}

pub(crate) async fn sqlite() -> World<SqliteStore> {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", directory.path().join("operations.db").display());
    let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(url.clone()) }).await.unwrap();
    store.migrate().await.unwrap();
    World { _directory: Some(Arc::new(directory)), ..World::on(store, &url).await }
}

/// Runs each test on PostgreSQL and MariaDB.
macro_rules! on_servers {
    ($($name:ident),* $(,)?) => {
        mod mariadb {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    let Some(database) = crate::mysql::Db::new(stringify!($name)).await else { return };
                    super::$name(crate::kit::World::on(database.store.clone(), &database.url).await).await;
                }
            )*
        }
        mod postgres {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    crate::postgres::with_database(stringify!($name), |database| async move {
                        super::$name(crate::kit::World::on(database.store.clone(), &database.url).await).await;
                    })
                    .await;
                }
            )*
        }
    };
}
pub(crate) use on_servers;

/// Runs each test on MariaDB and PostgreSQL, with what is made of the URL of an empty database.
macro_rules! on_empty_servers {
    ($make:path; $($name:ident),* $(,)?) => {
        mod mariadb {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    let Some(database) = crate::mysql::Db::empty(stringify!($name)).await else { return };
                    super::$name($make(database.url.clone()).await).await;
                }
            )*
        }
        mod postgres {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    crate::postgres::with_database(stringify!($name), |database| async move {
                        super::$name($make(database.url.clone()).await).await;
                    })
                    .await;
                }
            )*
        }
    };
}
pub(crate) use on_empty_servers;

/// What the URL of a database says besides, so that a proxy before it reads what is sent.
pub(crate) fn unencrypted(url: &str) -> &'static str {
    if url.starts_with("postgres") { "sslmode=disable" } else { "ssl-mode=DISABLED" }
}

/// Runs each test on SQLite, PostgreSQL and MariaDB.
macro_rules! on_all {
    ($($name:ident),* $(,)?) => {
        mod sqlite {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name(crate::kit::sqlite().await).await;
                }
            )*
        }
        crate::kit::on_servers!($($name),*);
    };
}
pub(crate) use on_all;

/// The operation of the tests.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Put {
    pub(crate) text: String,
    #[serde(default)]
    pub(crate) amount: i64,
}

impl IdempotentCommand for Put {
    const OPERATION: &'static str = "put";
    const VERSION: u32 = 1;

    fn fingerprint(&self, _: u32, writer: &mut FingerprintWriter) {
        writer.field("text", &self.text).field("amount", &self.amount);
    }
}

impl JsonCommand for Put {}

pub(crate) fn put(text: &str) -> Put {
    Put { text: text.to_owned(), amount: 0 }
}

pub(crate) fn scope(tenant: &str, principal: &str) -> Scope {
    Scope::new(tenant, principal).unwrap()
}

pub(crate) fn key(text: &str) -> KeyGiven {
    KeyGiven::Given(Key::parse(text.as_bytes(), KeyFormat::Opaque).unwrap())
}

pub(crate) fn identity(tenant: &str, key: &str) -> Identity {
    let key = Key::parse(key.as_bytes(), KeyFormat::Opaque).unwrap();
    Identity::new(&scope(tenant, "p1"), "put".parse().unwrap(), key)
}

/// The principal `p1` of tenant `t1`, and `put("a")`, as they are stored without a secret.
const PRINCIPAL: &str = "sha256:8ba932e56e3482d064ee8abed934d5e5e2ea1296270ee8a0afd053d79825d400";
const PUT_A: &str = "1:sha256:489e9e19da9685fe4ab10c52d2016b6f4ac820d7ce6b5a9ad292e2f2a03963ae";

/// A claim of tenant `t1` for the command with the text `a`, without a request.
pub(crate) fn claim(endpoint: &Registered, key: &str, mode: Mode, lease: Duration) -> KeyClaim {
    let key = Key::parse(key.as_bytes(), KeyFormat::Opaque).unwrap();
    KeyClaim {
        identity: Identity::new(&scope("t1", "p1"), endpoint.operation().clone(), key),
        principal: PRINCIPAL.parse().unwrap(),
        fingerprint: PUT_A.parse().unwrap(),
        mode,
        operation_id: uuid::Uuid::now_v7(),
        owner: uuid::Uuid::now_v7(),
        lease,
    }
}

/// A route of a transactional operation whose waits are short.
pub(crate) fn same_tx() -> Route {
    Route { wait_max: Duration::from_secs(2), ..Route::new(Mode::Transactional) }
}

/// Counts calls, says when one has begun, and holds it until it may go on.
#[derive(Debug, Clone)]
pub(crate) struct Gate(Arc<(AtomicU32, Semaphore, Semaphore)>);

impl Gate {
    pub(crate) fn open() -> Self {
        Self(Arc::new((AtomicU32::new(0), Semaphore::new(0), Semaphore::new(Semaphore::MAX_PERMITS))))
    }

    pub(crate) fn closed() -> Self {
        Self(Arc::new((AtomicU32::new(0), Semaphore::new(0), Semaphore::new(0))))
    }

    /// In the handler.
    pub(crate) async fn pass(&self) {
        self.0.0.fetch_add(1, Ordering::SeqCst);
        self.0.1.add_permits(1);
        self.0.2.acquire().await.unwrap().forget();
    }

    /// In the test: waits until a call has begun.
    pub(crate) async fn begun(&self) {
        tokio::time::timeout(SOON, self.0.1.acquire()).await.expect("a call begins").unwrap().forget();
    }

    /// Lets one call go on.
    pub(crate) fn let_go(&self) {
        self.0.2.add_permits(1);
    }

    pub(crate) fn calls(&self) -> u32 {
        self.0.0.load(Ordering::SeqCst)
    }
}

/// What a handler does inside its transaction.
pub(crate) trait Does<S: Sql>:
    for<'t> Fn(&'t Put, EffectTx<'t, S>) -> BoxFuture<'t, Result<Outcome<Reply>, HandlerError>> + Send + Sync + 'static
{
}

impl<S: Sql, F> Does<S> for F where
    F: for<'t> Fn(&'t Put, EffectTx<'t, S>) -> BoxFuture<'t, Result<Outcome<Reply>, HandlerError>>
        + Send
        + Sync
        + 'static
{
}

/// Gives a closure the type that doors want.
pub(crate) fn does<S: Sql, F>(handler: F) -> F
where
    F: for<'t> Fn(&'t Put, EffectTx<'t, S>) -> BoxFuture<'t, Result<Outcome<Reply>, HandlerError>>
        + Send
        + Sync
        + 'static,
{
    handler
}

/// One effect and 201, past the gate.
pub(crate) fn effect<S: Sql>(gate: &Gate) -> impl Does<S> + use<S> {
    let gate = gate.clone();
    does::<S, _>(move |put: &Put, mut tx: EffectTx<'_, S>| {
        let (gate, text) = (gate.clone(), put.text.clone());
        Box::pin(async move {
            S::run(tx.connection(), &format!("insert into effect (text) values ('{text}')")).await?;
            gate.pass().await;
            Ok(Outcome::Completed(made(&text, tx.operation_id())))
        })
    })
}

/// Nobody knows how it ended, and it has no effect.
pub(crate) fn unknown<S: Sql>() -> impl Does<S> + use<S> {
    does::<S, _>(|_: &Put, _: EffectTx<'_, S>| Box::pin(async { Ok(Outcome::Unknown(Reply::new(502))) }))
}

pub(crate) fn made(text: &str, id: uuid::Uuid) -> Reply {
    let body = serde_json::json!({"id": id, "text": text});
    Reply::json(201, &body).unwrap().header("location", format!("/effects/{id}").into_bytes())
}

/// Runs the operation as tenant `t1`, principal `p1`.
pub(crate) async fn run<S: Sql>(
    world: &World<S>,
    endpoint: &Registered,
    key_text: &str,
    text: &str,
    handler: impl Does<S>,
) -> Answered {
    run_as("t1:p1", world, endpoint, key_text, text, handler).await
}

/// Runs it as this tenant and principal.
pub(crate) async fn run_as<S: Sql>(
    who: &str,
    world: &World<S>,
    endpoint: &Registered,
    key_text: &str,
    text: &str,
    handler: impl Does<S>,
) -> Answered {
    let (tenant, principal) = who.split_once(':').unwrap();
    let scope = Some(scope(tenant, principal));
    let answered = world.engine.execute_transactional(endpoint, scope, key(key_text), put(text), handler);
    // Longer than any test lets one wait.
    tokio::time::timeout(SOON * 5, answered).await.expect("it is answered")
}

/// The same in a task of its own: one effect, past the gate.
pub(crate) fn running<S: Sql>(
    world: &World<S>,
    endpoint: &Registered,
    key_text: &'static str,
    gate: &Gate,
) -> JoinHandle<Answered> {
    let (world, endpoint, gate) = (world.clone(), endpoint.clone(), gate.clone());
    tokio::spawn(async move { run(&world, &endpoint, key_text, "a", effect(&gate)).await })
}

pub(crate) fn first(answered: Answered) -> Reply {
    let Answered::Reply { reply, replayed: false } = answered else { panic!("not a first answer: {answered:?}") };
    reply
}

pub(crate) fn replayed(answered: Answered) -> Reply {
    let Answered::Reply { reply, replayed: true } = answered else { panic!("not replayed: {answered:?}") };
    reply
}

pub(crate) fn problem(answered: Answered, code: Code) -> Problem {
    let Answered::Problem(problem) = answered else { panic!("no problem, but {answered:?}; {code} expected") };
    assert_eq!(problem.code, code);
    problem
}

/// An answer over HTTP.
#[derive(Debug, Clone)]
pub(crate) struct Http {
    pub(crate) status: u16,
    pub(crate) headers: reqwest::header::HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl Http {
    pub(crate) async fn of(response: reqwest::Response) -> Self {
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Self { status, headers, body: response.bytes().await.unwrap().to_vec() }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(crate) fn is_replayed(&self) -> bool {
        self.header("idempotent-replayed") == Some("true")
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|_| panic!("no JSON: {}", String::from_utf8_lossy(&self.body)))
    }

    pub(crate) fn code(&self) -> String {
        self.json()["code"].as_str().unwrap_or_default().to_owned()
    }

    /// It is this problem of the engine, whole.
    pub(crate) fn is(&self, code: Code) -> &Self {
        let problem = Problem::new(code);
        assert_eq!((self.status, self.code().as_str()), (problem.status, code.as_str()), "{self:?}");
        assert_eq!(self.header("content-type"), Some("application/problem+json"));
        let after = self.header("retry-after").map(|value| value.parse::<u32>().unwrap());
        assert_eq!(after.is_some(), problem.retry_after.is_some(), "{self:?}");
        assert!(after.is_none_or(|seconds| (1..=40).contains(&seconds)), "{self:?}");
        self
    }
}

/// Serves a router on a port of its own, until the test ends; every request is of tenant `t1` and
/// principal `p1`, unless the header `test-scope: TENANT:PRINCIPAL` says so. Gives the base URL.
pub(crate) async fn serve(router: axum::Router) -> String {
    let scoped =
        axum::middleware::from_fn(|mut request: axum::extract::Request, next: axum::middleware::Next| async move {
            let given = request.headers().get("test-scope").map(|value| value.to_str().unwrap().to_owned());
            if given.as_deref() != Some("none") {
                let (tenant, principal) = given.as_deref().map_or(("t1", "p1"), |given| given.split_once(':').unwrap());
                request.extensions_mut().insert(IdempotencyScope(scope(tenant, principal)));
            }
            next.run(request).await
        });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router.layer(scoped)).await });
    url
}

/// A router whose route `/put` passes the gate, and answers 201 with this text.
pub(crate) fn gated(gate: &Gate, text: &'static str) -> axum::Router {
    let gate = gate.clone();
    let handler = move || {
        let gate = gate.clone();
        async move {
            gate.pass().await;
            (axum::http::StatusCode::CREATED, text)
        }
    };
    axum::Router::new().route("/put", axum::routing::post(handler))
}

/// A client without retries, redirects and proxies.
pub(crate) fn client() -> reqwest::Client {
    reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .no_proxy()
        .build()
        .unwrap()
}

/// A POST of JSON under a key.
pub(crate) fn post(url: &str, key: &str, body: impl Into<String>) -> reqwest::RequestBuilder {
    client().post(url).header("idempotency-key", key).header("content-type", "application/json").body(body.into())
}

pub(crate) async fn send(request: reqwest::RequestBuilder) -> Http {
    Http::of(request.send().await.unwrap()).await
}

/// Waits until something holds.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut ask: impl FnMut() -> F) {
    crate::support::eventually(what, SOON, || {
        let asked = ask();
        async { asked.await.then_some(()) }
    })
    .await;
}
