//! A database, a broker in memory, and a handler that does what the test says.

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncebox::broker::Broker;
use oncebox::message::MessageId;
use oncebox::observe::Health;
use oncebox::store::mysql::MySqlStore;
use oncebox::store::postgres::PostgresStore;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{
    ActContext, Base, ConsumerId, ConsumerSpec, ConsumerStatus, DeadFilter, DeadMessage, Enqueue, Holding, InboxEntry,
    InboxTx, LeaseAnswer, LeaseRequest, OperatorAct, RelaySession, Schema, Status, StoreOptions,
};
use oncebox::{
    BatchMessageHandler, Consumer, ConsumerOptions, HandlerError, HandlerTx, Handlers, Message, MessageHandler,
    NewMessage, Relay, RelayOptions, RetryPolicy, RunEnd, RunError, Store,
};
use oncebox_testkit::memory::MemoryBroker;
use sqlx::{AssertSqlSafe, Database, raw_sql};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::proxy::Proxy;
use super::support::eventually;

/// Long enough for a busy machine; a condition that holds ends the wait at once.
pub(crate) const SOON: Duration = Duration::from_secs(60);

pub(crate) type Connection<S> = <<S as Base>::Db as Database>::Connection;

/// What tests need of a database beyond the traits.
#[async_trait]
pub(crate) trait Sql: Store {
    const EFFECT: &'static str;
    /// What stands before the names of oncebox's tables.
    const PREFIX: &'static str;
    /// How a handler commits although the database refuses its COMMIT where it can.
    const COMMIT: &'static str;

    async fn run(connection: &mut Connection<Self>, sql: &str) -> Result<(), sqlx::Error>;
    async fn texts(&self, sql: &str) -> Vec<String>;
    /// The same, inside a transaction.
    async fn texts_in(connection: &mut Connection<Self>, sql: &str) -> Vec<String>;
    /// Enqueues in one transaction; committed or not.
    async fn enqueue_all(&self, messages: Vec<NewMessage>, commit: bool) -> Vec<Uuid>;
}

macro_rules! sql {
    ($store:ty, $begin:literal, $prefix:literal, $commit:literal, $effect:literal) => {
        #[async_trait]
        impl Sql for $store {
            const EFFECT: &'static str = $effect;
            const PREFIX: &'static str = $prefix;
            const COMMIT: &'static str = $commit;

            async fn run(connection: &mut Connection<Self>, sql: &str) -> Result<(), sqlx::Error> {
                raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await.map(|_| ())
            }

            async fn texts(&self, sql: &str) -> Vec<String> {
                sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_all(self.pool()).await.unwrap()
            }

            async fn texts_in(connection: &mut Connection<Self>, sql: &str) -> Vec<String> {
                sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_all(connection).await.unwrap()
            }

            async fn enqueue_all(&self, messages: Vec<NewMessage>, commit: bool) -> Vec<Uuid> {
                let mut tx = self.pool().begin_with($begin).await.unwrap();
                let ids = Enqueue::write(&mut *tx, messages).await.unwrap();
                if commit {
                    oncebox::store::commit(tx).await.unwrap()
                } else {
                    tx.rollback().await.unwrap()
                }
                ids
            }
        }
    };
}

// No unique constraint: a second effect would stand there.
sql!(
    SqliteStore,
    "BEGIN IMMEDIATE",
    "oncebox_",
    "commit",
    "create table effect (no integer primary key autoincrement, text text not null)"
);
sql!(
    PostgresStore,
    "BEGIN",
    "oncebox.",
    "close all; commit",
    "create table effect (no bigserial primary key, text text not null)"
);
sql!(
    MySqlStore,
    "START TRANSACTION",
    "oncebox_",
    "commit",
    "create table effect (no bigint auto_increment primary key, text text not null)"
);

/// A relay or a consumer that runs until it is told to stop.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) stop: CancellationToken,
    pub(crate) task: JoinHandle<Result<RunEnd, RunError>>,
}

impl Running {
    /// Tells it to stop: until then it ran, and it stops without an error.
    pub(crate) async fn end(self) {
        self.stop.cancel();
        assert_eq!(self.ended().await.unwrap(), RunEnd::Stopped);
    }

    /// Waits until it ends, by itself where nobody told it to stop.
    pub(crate) async fn ended(self) -> Result<RunEnd, RunError> {
        tokio::time::timeout(SOON, self.task).await.expect("it ends in time").unwrap()
    }
}

/// One database and one broker.
#[derive(Debug, Clone)]
pub(crate) struct World<S: Store> {
    pub(crate) store: S,
    pub(crate) broker: MemoryBroker,
    pub(crate) health: Health,
    pub(crate) url: String,
    _directory: Option<Arc<tempfile::TempDir>>,
}

pub(crate) async fn sqlite() -> World<SqliteStore> {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", directory.path().join("contract.db").display());
    let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(url.clone()) }).await.unwrap();
    store.migrate().await.unwrap();
    World { url, _directory: Some(Arc::new(directory)), ..World::on(store).await }
}

impl<S: Sql> World<S> {
    pub(crate) async fn on(store: S) -> Self {
        let mut connection = store.pool().acquire().await.unwrap();
        S::run(&mut connection, S::EFFECT).await.unwrap();
        drop(connection);
        Self::with(store)
    }

    /// On a database that is made already.
    pub(crate) fn with(store: S) -> Self {
        // One partition: what stands there stands in one order.
        let broker = MemoryBroker::with_partitions(1);
        Self { store, broker, health: Health::default(), url: String::new(), _directory: None }
    }

    /// The same with another broker.
    pub(crate) fn with_broker(self, broker: MemoryBroker) -> Self {
        Self { broker, ..self }
    }

    pub(crate) async fn run(&self, sql: &str) {
        let mut connection = self.store.pool().acquire().await.unwrap();
        S::run(&mut connection, sql).await.unwrap();
    }

    /// `a1` is the message `a1` of the key `a`; all of them in one transaction.
    pub(crate) async fn enqueue(&self, topic: &str, names: &[&str]) -> Vec<Uuid> {
        self.store.enqueue_all(names.iter().map(|name| message(topic, name)).collect(), true).await
    }

    /// What a topic holds, in order.
    pub(crate) async fn published(&self, topic: &str) -> Vec<String> {
        let all = self.broker.read_all(topic).await.unwrap();
        all.into_iter().map(|arrived| String::from_utf8(arrived.payload.unwrap()).unwrap()).collect()
    }

    pub(crate) async fn until_published(&self, topic: &str, names: &[&str]) {
        let what = format!("first occurrences {names:?} in {topic}");
        let mut seen = Vec::new();
        let start = std::time::Instant::now();
        while start.elapsed() < SOON {
            seen = first_occurrences(self.published(topic).await);
            if seen == names {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{what}: there are {seen:?}; {:?}; {:?}", self.health.lines(), self.status().await);
    }

    /// Whether a line of the health has these words.
    pub(crate) fn says(&self, words: &str) -> bool {
        self.health.lines().iter().any(|line| line.contains(words))
    }

    pub(crate) async fn status(&self) -> Status {
        self.store.status().await.unwrap()
    }

    pub(crate) async fn until_status(&self, what: &str, holds: impl Fn(&Status) -> bool) -> Status {
        eventually(what, SOON, || async { Some(self.status().await).filter(&holds) }).await
    }

    pub(crate) async fn consumer_status(&self) -> ConsumerStatus {
        self.status().await.consumers.into_iter().find(|one| one.name == "ledger").unwrap_or_default()
    }

    pub(crate) async fn until_consumer(&self, what: &str, holds: impl Fn(&ConsumerStatus) -> bool) -> ConsumerStatus {
        eventually(what, SOON, || async { Some(self.consumer_status().await).filter(&holds) }).await
    }

    pub(crate) async fn effects(&self) -> Vec<String> {
        self.store.texts("select text from effect order by no").await
    }

    pub(crate) async fn until_effects(&self, names: &[&str]) {
        let start = std::time::Instant::now();
        let mut seen = Vec::new();
        while start.elapsed() < SOON {
            seen = self.effects().await;
            if seen == names {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("effects {names:?}: there are {seen:?}; {:?}; {:?}", self.health.lines(), self.status().await);
    }

    /// The tries that are counted of messages that do not wait.
    pub(crate) async fn attempts(&self) -> Vec<String> {
        self.store.texts(&format!("select cast(attempts as char(9)) from {}attempt", S::PREFIX)).await
    }

    pub(crate) async fn dead(&self) -> Vec<DeadMessage> {
        self.store.dead(&DeadFilter::default()).await.unwrap()
    }

    pub(crate) async fn act(&self, act: OperatorAct) {
        self.act_on(&DeadFilter::default(), act).await;
    }

    pub(crate) async fn act_on(&self, filter: &DeadFilter, act: OperatorAct) {
        let context =
            ActContext { actor: "test".into(), reason: "because".into(), dry_run: false, redrive_age_max: None };
        self.store.act(filter, &act, &context).await.unwrap();
    }

    pub(crate) fn relay(&self, options: RelayOptions) -> Running {
        self.relay_to(Arc::new(self.broker.clone()), options)
    }

    /// To another broker than the one in memory.
    pub(crate) fn relay_to(&self, broker: Arc<dyn Broker>, options: RelayOptions) -> Running {
        let relay = Relay::new(self.store.clone(), broker, options, self.health.clone());
        let stop = CancellationToken::new();
        let token = stop.clone();
        Running { stop, task: tokio::spawn(async move { relay.run(token).await }) }
    }

    pub(crate) fn consumer(&self, options: ConsumerOptions, handler: impl MessageHandler<S> + 'static) -> Running {
        self.consumer_of(options, Handlers::all(handler))
    }

    pub(crate) fn consumer_of(&self, options: ConsumerOptions, handlers: Handlers<S>) -> Running {
        let broker = Arc::new(self.broker.clone());
        let consumer = Consumer::new(self.store.clone(), broker, handlers, options, self.health.clone());
        let stop = CancellationToken::new();
        let token = stop.clone();
        Running { stop, task: tokio::spawn(async move { consumer.run(token).await }) }
    }

    /// Another owner of the shard, as soon as nobody has the lease.
    pub(crate) async fn other_owner(&self) -> Box<dyn RelaySession> {
        let request =
            LeaseRequest { shard: 0, owner: "other".into(), length: Duration::from_secs(600), read_bytes: 4 << 20 };
        eventually("the lease is free", SOON, || async {
            match self.store.open(&request).await.unwrap() {
                LeaseAnswer::Taken(session) => Some(session),
                _ => None,
            }
        })
        .await
    }

    /// A message straight into the broker, with this id.
    pub(crate) fn deliver(&self, id: &str, kind: &str, name: &str) {
        let headers = [("ce_id", id.as_bytes()), ("ce_type", kind.as_bytes()), ("ce_source", b"test".as_slice())];
        self.broker.append("t", Some(&name.as_bytes()[..1]), &headers, Some(name.as_bytes()));
    }

    /// Messages straight into the broker, ids of their own.
    pub(crate) fn deliver_all(&self, names: &[&str]) {
        for name in names {
            self.deliver(&Uuid::now_v7().to_string(), "made", name);
        }
    }

    /// The consumer of the tests, registered as its process does it.
    pub(crate) async fn registered(&self) -> ConsumerId {
        let spec = ConsumerSpec { name: "ledger".into(), id_rule: "envelope".into(), accept: false };
        self.store.register(&spec).await.unwrap()
    }

    /// The last owner of these partitions died. The next one finds them open, and suspects all that
    /// the dead one may have had in flight.
    pub(crate) async fn left_open(&self, partitions: Range<i32>) {
        let consumer = self.registered().await;
        for partition in partitions {
            let holding = Holding { topic: "t".into(), partition, owner: Uuid::now_v7() };
            self.store.open_assignment(consumer, &holding).await.unwrap();
        }
    }

    /// These messages come, and the open transaction of a frozen process has their inbox rows.
    pub(crate) async fn frozen(&self, names: &[&str]) -> Box<dyn InboxTx> {
        let mut entries = Vec::new();
        for name in names {
            let id = Uuid::now_v7();
            entries.push(InboxEntry { id: MessageId::from(id), hash: [1; 16] });
            self.deliver(&id.to_string(), "made", name);
        }
        let mut frozen = self.store.begin(self.registered().await).await.unwrap();
        frozen.admit(&entries).await.unwrap();
        frozen
    }
}

pub(crate) fn message(topic: &str, name: &str) -> NewMessage {
    NewMessage::text(topic, "made", name).with_key(&name[..1])
}

pub(crate) fn first_occurrences(names: Vec<String>) -> Vec<String> {
    let mut seen = std::collections::HashSet::new();
    names.into_iter().filter(|name| seen.insert(name.clone())).collect()
}

/// The lease is longer than a busy machine stands still: a relay that lost it would try again what
/// it had in hand.
pub(crate) fn relay_options() -> RelayOptions {
    RelayOptions {
        lease: Duration::from_secs(20),
        poll_max: Duration::from_millis(5),
        probe: Duration::from_millis(100),
        ..RelayOptions::new(super::support::unique("relay"))
    }
}

/// How long a handler may run that a test lets hang: those that only wait for their turn, or for a
/// disk, are not to fail by it.
pub(crate) const HANGS: Duration = Duration::from_secs(2);

/// No try fails by its time, however busy the machine is: it would count, and tests count tries.
pub(crate) fn consumer_options() -> ConsumerOptions {
    ConsumerOptions {
        lanes: 1,
        handler_timeout: Duration::from_secs(20),
        retry: RetryPolicy {
            in_place: 1,
            in_place_delay: Duration::from_millis(5),
            attempts_max: 4,
            base: Duration::from_millis(20),
            cap: Duration::from_millis(50),
            ..RetryPolicy::default()
        },
        ..ConsumerOptions::new("ledger", vec!["t".into()])
    }
}

/// What a handler does after it wrote its effect.
pub(crate) enum Act {
    Done,
    Fail(HandlerError),
    Panic,
    /// Panics with a value that panics once more when it is dropped: nobody expects that.
    Bomb,
    /// Runs this and fails by its error.
    Run(&'static str),
    /// Waits longer than it may.
    Hang,
    /// Runs this, swallows its error, and says that all is well.
    Swallow(&'static str),
    /// Runs this and fails.
    RunAndFail(&'static str),
    /// Runs this, swallows its error, then goes on.
    Then(&'static str, Box<Act>),
}

/// Writes the payload as an effect, then does what the function says.
pub(crate) struct Does<F>(pub(crate) F);

#[async_trait]
impl<S, F> MessageHandler<S> for Does<F>
where
    S: Sql,
    F: Fn(&str, &Message) -> Act + Send + Sync,
{
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError> {
        let name = String::from_utf8(message.payload.clone()).unwrap();
        let insert = format!("insert into effect (text) values ('{name}')");
        S::run(tx.connection(), &insert).await?;
        carry_out((self.0)(&name, message), tx).await
    }
}

/// Writes the payloads of a set as effects, in one statement, then does what the function says.
pub(crate) struct DoesAll<F>(pub(crate) F);

#[async_trait]
impl<S, F> BatchMessageHandler<S> for DoesAll<F>
where
    S: Sql,
    F: Fn(&[&str]) -> Act + Send + Sync,
{
    async fn handle_batch(&self, messages: &[&Message], tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError> {
        let names: Vec<&str> = messages.iter().map(|message| std::str::from_utf8(&message.payload).unwrap()).collect();
        let insert = format!("insert into effect (text) values ('{}')", names.join("'), ('"));
        S::run(tx.connection(), &insert).await?;
        carry_out((self.0)(&names), tx).await
    }
}

struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("the panic itself panics");
    }
}

async fn carry_out<S: Sql>(act: Act, tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError> {
    match act {
        Act::Done => Ok(()),
        Act::Fail(error) => Err(error),
        Act::Panic => panic!("the handler was told to"),
        Act::Bomb => std::panic::panic_any(Bomb),
        Act::Run(sql) => Ok(S::run(tx.connection(), sql).await?),
        Act::Hang => {
            std::future::pending::<()>().await;
            Ok(())
        }
        Act::Swallow(sql) => {
            let _ = S::run(tx.connection(), sql).await;
            Ok(())
        }
        Act::RunAndFail(sql) => {
            let _ = S::run(tx.connection(), sql).await;
            Err(HandlerError::retryable("after that it failed"))
        }
        Act::Then(sql, act) => {
            let _ = S::run(tx.connection(), sql).await;
            Box::pin(carry_out(*act, tx)).await
        }
    }
}

pub(crate) fn fails() -> Act {
    Act::Fail(HandlerError::retryable("not today"))
}

/// A test on a PostgreSQL database of its own.
pub(crate) async fn on_postgres<F>(test: &str, body: impl FnOnce(World<PostgresStore>) -> F + Send + 'static)
where
    F: Future<Output = ()> + Send + 'static,
{
    super::postgres::with_database(test, |database| async move {
        let world = World { url: database.url.clone(), ..World::on(database.store.clone()).await };
        body(world).await;
    })
    .await;
}

/// A test on a MariaDB database of its own.
pub(crate) async fn on_mariadb<F>(test: &str, body: impl FnOnce(World<MySqlStore>) -> F)
where
    F: Future<Output = ()>,
{
    let Some(db) = super::mysql::Db::new(test).await else { return };
    let world = World { url: db.url.clone(), ..World::on(db.store.clone()).await };
    body(world).await;
    db.store.close().await;
}

/// Runs each test on PostgreSQL and MariaDB.
macro_rules! on_servers {
    ($($name:ident),* $(,)?) => {
        mod on_postgres {
            $(
                #[tokio::test]
                async fn $name() {
                    $crate::kit::on_postgres(stringify!($name), super::$name).await;
                }
            )*
        }
        mod on_mariadb {
            $(
                #[tokio::test]
                async fn $name() {
                    $crate::kit::on_mariadb(stringify!($name), super::$name).await;
                }
            )*
        }
    };
}
pub(crate) use on_servers;

/// Runs each test on SQLite, PostgreSQL and MariaDB.
macro_rules! on_all {
    ($($name:ident),* $(,)?) => {
        mod on_sqlite {
            $(
                #[tokio::test]
                async fn $name() {
                    super::$name($crate::kit::sqlite().await).await;
                }
            )*
        }
        $crate::kit::on_servers!($($name),*);
    };
}
pub(crate) use on_all;

/// A world whose processes reach their database through a proxy, while the test looks at it
/// directly.
#[derive(Debug)]
pub(crate) struct Behind<S: Store> {
    pub(crate) direct: World<S>,
    pub(crate) through: World<S>,
    pub(crate) proxy: Proxy,
}

impl<S: Sql> Behind<S> {
    /// `clear` says in the URL that nothing is encrypted.
    pub(crate) async fn new(direct: World<S>, clear: &str, options: StoreOptions) -> Self {
        let proxy = Proxy::before(&direct.url, clear);
        let store = S::connect(&StoreOptions { url: proxy.url.clone(), ..options }).await.unwrap();
        let through = World { store, ..direct.clone() };
        Self { direct, through, proxy }
    }
}

/// A test on PostgreSQL and one on MariaDB, each behind a proxy.
macro_rules! behind_a_proxy {
    ($($(#[$doc:meta])* $name:ident: $body:expr, $options:expr;)*) => {$(
        $(#[$doc])*
        mod $name {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn on_postgres() {
                $crate::kit::on_postgres(stringify!($name), |world| async move {
                    let behind = $crate::kit::Behind::new(world, "sslmode=disable", $options).await;
                    $body(behind).await;
                })
                .await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn on_mariadb() {
                $crate::kit::on_mariadb(stringify!($name), |world| async move {
                    let behind = $crate::kit::Behind::new(world, "ssl-mode=DISABLED", $options).await;
                    $body(behind).await;
                })
                .await;
            }
        }
    )*};
}
pub(crate) use behind_a_proxy;

/// The same, for what fails before requests and for what fails before answers at once, each in a
/// database of its own behind a proxy of its own: nearly all of their time they wait.
macro_rules! behind_two_proxies {
    ($($(#[$doc:meta])* $name:ident: $body:expr, $options:expr;)*) => {$(
        $(#[$doc])*
        mod $name {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn on_postgres() {
                let fails = |when: When| {
                    $crate::kit::on_postgres(stringify!($name), move |world| async move {
                        let behind = $crate::kit::Behind::new(world, "sslmode=disable", $options).await;
                        $body(behind, when).await;
                    })
                };
                tokio::join!(fails(When::BeforeRequest), fails(When::BeforeAnswer));
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn on_mariadb() {
                let fails = |when: When| {
                    $crate::kit::on_mariadb(stringify!($name), move |world| async move {
                        let behind = $crate::kit::Behind::new(world, "ssl-mode=DISABLED", $options).await;
                        $body(behind, when).await;
                    })
                };
                tokio::join!(fails(When::BeforeRequest), fails(When::BeforeAnswer));
            }
        }
    )*};
}
pub(crate) use behind_two_proxies;
