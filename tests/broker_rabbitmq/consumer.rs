//! A consumer on a real RabbitMQ: a handler that outlasts the server's patience, and one that kills
//! its process.

use std::sync::Arc;

use async_trait::async_trait;
use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use oncebox::broker::Broker;
use oncebox::broker::rabbitmq::{RabbitBroker, RabbitConfig};
use oncebox::observe::Health;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base as _, ConsumerStatus, Operator as _, Schema as _, StoreOptions};
use oncebox::{
    Consumer, ConsumerOptions, HandlerError, HandlerTx, Handlers, Message, MessageHandler, RetryPolicy, RunEnd,
};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::fixture::{Corner, SOON, message, number, numbered, publish};
use crate::private::Private;
use crate::support::{deaths_of, eventually};

/// A database with a table of effects, in which a second one would stand too.
async fn database(directory: &tempfile::TempDir) -> (SqliteStore, String) {
    let url = format!("sqlite://{}", directory.path().join("inbox.db").display());
    let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(url.clone()) }).await.unwrap();
    store.migrate().await.unwrap();
    let table = "create table effect (no integer primary key autoincrement, number integer not null)";
    sqlx::raw_sql(table).execute(store.pool()).await.unwrap();
    (store, url)
}

async fn effects(store: &SqliteStore) -> Vec<u64> {
    let numbers = sqlx::query_scalar("select number from effect order by no").fetch_all(store.pool()).await.unwrap();
    numbers.into_iter().map(|number: i64| u64::try_from(number).unwrap()).collect()
}

async fn status(store: &SqliteStore) -> ConsumerStatus {
    store.status().await.unwrap().consumers.into_iter().next().unwrap_or_default()
}

/// Writes the number of a message as its effect, then does what the function says.
struct Does<F>(F);

#[async_trait]
impl<F, W> MessageHandler<SqliteStore> for Does<F>
where
    F: Fn(u64) -> W + Send + Sync,
    W: Future<Output = ()> + Send,
{
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, SqliteStore>) -> Result<(), HandlerError> {
        let number = number(&message.payload);
        let insert = sqlx::query("insert into effect (number) values (?)").bind(i64::try_from(number).unwrap());
        insert.execute(&mut *tx.connection()).await?;
        (self.0)(number).await;
        Ok(())
    }
}

fn options(topic: &str) -> ConsumerOptions {
    ConsumerOptions {
        lanes: 1,
        handler_timeout: SOON,
        retry: RetryPolicy { attempts_max: 2, ..RetryPolicy::default() },
        ..ConsumerOptions::new("ledger", vec![topic.to_owned()])
    }
}

type Running = (CancellationToken, JoinHandle<Result<RunEnd, String>>);

fn consume(
    store: &SqliteStore,
    broker: RabbitBroker,
    topic: &str,
    handler: impl MessageHandler<SqliteStore> + 'static,
) -> Running {
    let (handlers, broker) = (Handlers::all(handler), Arc::new(broker));
    let consumer = Consumer::new(store.clone(), broker, handlers, options(topic), Health::default());
    let stop = CancellationToken::new();
    let token = stop.clone();
    (stop, tokio::spawn(async move { consumer.run(token).await.map_err(|error| error.to_string()) }))
}

/// Shown to fail: the server's reply to a channel whose deliveries stay unacknowledged for too long
/// has the code of a wrong declaration, and ended the consumer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d8_a_consumer_whose_handler_outlasts_the_consumer_timeout_goes_on_and_each_message_has_one_effect() {
    let Some(private) = Private::of("d8_a_consumer_whose_handler_outlasts") else { return };
    let _shared = private.peace.read().await;
    let corner = Corner::at(&private.url()).await;
    let broker = corner.broker();
    broker.subscriber(&corner.subscription()).await.unwrap().close().await;
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = database(&directory).await;
    publish(&broker, numbered(&corner.topic, 1, 5)).await;
    let (began, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begins, goes_on) = (Arc::clone(&began), Arc::clone(&go_on));
    let outlasts = move |number| {
        let (begins, goes_on) = (Arc::clone(&begins), Arc::clone(&goes_on));
        async move {
            if number == 0 {
                begins.notify_one();
                goes_on.notified().await;
            }
        }
    };
    let (stop, consumer) = consume(&store, broker.clone(), &corner.topic, Does(outlasts));
    tokio::time::timeout(SOON, began.notified()).await.expect("the handler begins");
    eventually("the server closes the channel", SOON, || async {
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue = corner.channel.queue_declare(corner.queue().as_str().into(), passive, FieldTable::default());
        (queue.await.unwrap().consumer_count() == 0).then_some(())
    })
    .await;
    go_on.notify_one();
    publish(&broker, vec![(5, message(&corner.topic, Some("k0"), 5))]).await;
    eventually("the consumer goes on", SOON, || async {
        assert!(!consumer.is_finished(), "it ended");
        (effects(&store).await.last() == Some(&5)).then_some(())
    })
    .await;
    stop.cancel();
    let end = tokio::time::timeout(SOON, consumer).await.expect("it stops").unwrap();
    assert!(matches!(end, Ok(RunEnd::Stopped)), "{end:?}");
    assert_eq!(effects(&store).await, [0, 1, 2, 3, 4, 5]);
    // Another channel may be told of what was there before the last acknowledgements.
    eventually("all is acknowledged", SOON, || async {
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue = corner.channel.queue_declare(corner.queue().as_str().into(), passive, FieldTable::default());
        (queue.await.unwrap().message_count() == 0).then_some(())
    })
    .await;
}

const CHILD: [&str; 4] = ["DATABASE", "SERVER", "EXCHANGE", "TOPIC"];

fn variable(name: &str) -> String {
    format!("ONCEBOX_KILLER_{name}")
}

/// The child: it ends in order only once nothing is left that could kill it.
#[tokio::test]
async fn a_child_whose_handler_aborts() {
    let Ok(url) = std::env::var(variable(CHILD[0])) else { return };
    let [server, exchange, topic] = [1, 2, 3].map(|at| std::env::var(variable(CHILD[at])).unwrap());
    let store = SqliteStore::connect(&StoreOptions::new(url)).await.unwrap();
    let broker = RabbitBroker::new(RabbitConfig { exchange, ..RabbitConfig::new(server) }).unwrap();
    let aborts = |number| async move {
        if number == 2 {
            std::process::abort();
        }
    };
    let (stop, consumer) = consume(&store, broker, &topic, Does(aborts));
    eventually("the killer is dead", SOON, || async {
        let status = status(&store).await;
        ((status.dead, status.held) == (1, 1)).then_some(())
    })
    .await;
    stop.cancel();
    consumer.await.unwrap().unwrap();
}

/// RabbitMQ has no row of an assignment that a dead process leaves open: only its redelivered flag
/// says that a message was in hand. Shown to fail without the flag: it killed without end.
#[tokio::test]
async fn r26_a_handler_that_kills_the_process_is_dead_after_one_kill_more_than_it_has_attempts() {
    let Some(corner) = Corner::of("r26_a_handler_that_kills_the_process").await else { return };
    let server = std::env::var("ONCEBOX_TEST_RABBITMQ").unwrap();
    let broker = corner.broker();
    broker.subscriber(&corner.subscription()).await.unwrap().close().await;
    let directory = tempfile::tempdir().unwrap();
    let (store, url) = database(&directory).await;
    let rows = [("b", 1), ("a", 2), ("a", 3)];
    publish(&broker, rows.map(|(key, number)| (number, message(&corner.topic, Some(key), number))).to_vec()).await;
    let values = [url, server, corner.config.exchange.clone(), corner.topic.clone()];
    let variables = CHILD.iter().map(|name| variable(name)).zip(values).collect();
    let (kills, said) = deaths_of("consumer::a_child_whose_handler_aborts", variables).await;
    assert_eq!(kills, 3, "{said}");
    // The first kill took the batch of 1 with it; then 1 ran, once, and 3 stands behind the dead
    // one.
    assert_eq!(effects(&store).await, [1]);
    corner.finish().await;
}
