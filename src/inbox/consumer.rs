//! The consumer: takes deliveries, commits the effects of each message once, and acknowledges.
//!
//! Guarantees: a handler's writes commit together with the inbox row of its message (G4). Nothing
//! is acknowledged before the commit returned (G5). Effects of one key run in the key's order, also
//! while one of its messages waits (G6). The same id with other content is an alarm (G7). While a
//! database or broker is away, no attempt is counted (G10).
//!
//! The path of a delivery: `intake` (broker events, low-water marks) → `lane` (one key, one lane;
//! batches of the messages that are there) → `batch` (one transaction) or `lane::alone` (a message
//! that failed or is suspect) → back to `intake`, which acknowledges.
//!
//! Beside it run the retries that are due later (`retries`), the purge of inbox rows older than the
//! horizon (`purge`), and the record of how far each partition is done (`positions`).
//!
//! Not here: SQL of the inbox (`store`), and the rules (`inbox::rules`): which failures are
//! transient and what runs again, which messages run alone, when the next try is, up to where to
//! acknowledge, which messages are too old.

mod admission;
mod aside;
mod batch;
mod blame;
mod calls;
mod failing;
mod handlers;
mod intake;
mod item;
mod lane;
mod loss;
mod options;
mod positions;
mod presence;
mod purge;
mod retries;
mod silence;
mod solo;
mod stored_rows;
mod transaction;
mod unspent;
mod verdict;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::broker::{Broker, Subscription};
use crate::error::{BrokerError, RunEnd, RunError, StoreError};
use crate::inbox::port::ConsumerId;
use crate::inbox::port::waiting::Scope;
use crate::observe::{self, Health, PartState};
use crate::outbox::hint;
use crate::store::{Duties, Store};

pub use self::{
    handlers::Handlers,
    options::{ConsumerOptions, Unhandled},
};
use handlers::ByKind;

use crate::task;
use crate::time::pace::{Pace, sleep_unless};
use silence::Silence;
use solo::Solo;
use unspent::Unspent;

/// A consumer with one name, on one store and one broker.
#[derive(Debug, Clone)]
pub struct Consumer(Arc<Shared>);

/// The state that intake, lanes and retriers share.
#[derive(Debug)]
struct Shared {
    store: Arc<dyn Duties>,
    broker: Arc<dyn Broker>,
    handlers: ByKind,
    options: ConsumerOptions,
    /// Selects the waiting messages that this process may try.
    scope: Scope,
    health: Health,
    part: String,
    /// Makes a suspect message run alone in this process (R26).
    solo: Arc<Solo>,
    /// Since when the database has given no sign of life.
    silence: Silence,
    /// The tries that are counted and not made yet.
    unspent: Unspent,
    /// Signals that a message was stored for a later try or became due, so that a retrier looks.
    parked: Notify,
    /// How many retriers have leased messages; with any, the consumer is not idle.
    retrying: AtomicUsize,
    /// `dead_rows_max` or `waiting_rows_max` is reached: no more messages are taken.
    is_full: AtomicBool,
    /// An operator forgot the consumer while it ran, or accepted another id rule for it.
    is_forgotten: AtomicBool,
}

impl Consumer {
    /// Makes a consumer; [`Consumer::run`] starts its work.
    ///
    /// It knows of no other consumer: a suspect message runs with nothing of this one beside it.
    /// Where a process has several, run them by `app::run_consumers_with`: a suspect message of one
    /// then runs with nothing of any of them beside it.
    pub fn new<S: Store>(
        store: S,
        broker: Arc<dyn Broker>,
        handlers: Handlers<S>,
        options: ConsumerOptions,
        health: Health,
    ) -> Self {
        Self::beside(Arc::default(), store, broker, handlers, options, health)
    }

    /// Makes a consumer beside others in one process: all of them have the same `solo`.
    pub(crate) fn beside<S: Store>(
        solo: Arc<Solo>,
        store: S,
        broker: Arc<dyn Broker>,
        handlers: Handlers<S>,
        options: ConsumerOptions,
        health: Health,
    ) -> Self {
        let options = options.of_store(S::HAS_ONE_WRITER);
        if S::HAS_ONE_WRITER {
            options.warn_of_one_writer();
        }
        let part = format!("consumer {}", options.name);
        let handlers = handlers.by_kind();
        let places = broker.places(&subscription(&options));
        let scope = Scope { topics: options.topics.clone(), places, kinds: handlers.kinds() };
        Self(Arc::new(Shared {
            store: store.into_duties(),
            broker,
            handlers,
            options,
            scope,
            health,
            part,
            solo,
            silence: Silence::default(),
            unspent: Unspent::default(),
            parked: Notify::new(),
            retrying: AtomicUsize::new(0),
            is_full: AtomicBool::new(false),
            is_forgotten: AtomicBool::new(false),
        }))
    }

    /// Runs until the stop, or until the consumer is idle if `until_idle` is set. Waits for a
    /// database, broker, topic or queue that is not there yet.
    ///
    /// # Errors
    /// Errors that a person must repair: a missing schema, a refused setting, a changed id rule, a
    /// horizon that is too short, a consumer that an operator forgot while it ran.
    ///
    /// # Cancel safety
    /// If the future is dropped, running messages are not acknowledged and come again. Prefer the
    /// token.
    pub fn run(&self, stop: CancellationToken) -> BoxFuture<'_, Result<RunEnd, RunError>> {
        // Boxed, so that this code is compiled with the library and not again in each program.
        Box::pin(self.work(stop))
    }

    async fn work(&self, stop: CancellationToken) -> Result<RunEnd, RunError> {
        let shared = &self.0;
        shared.options.check().map_err(StoreError::Refused)?;
        shared.health.set(&shared.part, PartState::Starting);
        observe::consumer_starts(&shared.options.name, &shared.options.topics);
        let Some(registered) = stop.run_until_cancelled(shared.register()).await else { return Ok(RunEnd::Stopped) };
        let consumer = registered?;
        let (beside, abandon) = (stop.child_token(), CancellationToken::new());
        let desk = Arc::new(retries::Desk::new());
        let retrier = |number| {
            let (abandon, desk) = (&abandon, &desk);
            let run =
                move |shared, stop| retries::run(shared, consumer, stop, abandon.clone(), Arc::clone(desk), number);
            shared.keep_up("retrier", &beside, run)
        };
        let retriers = (0..shared.options.retriers).map(retrier);
        let retriers = futures_util::future::join_all(retriers);
        let purge = shared.keep_up("purge", &beside, move |shared, stop| purge::run(shared, consumer, stop));
        let stored_rows = shared
            .keep_up("look at stored messages", &beside, move |shared, stop| stored_rows::run(shared, consumer, stop));
        let presence = shared.keep_up("presence", &beside, move |shared, stop| presence::run(shared, consumer, stop));
        // What handlers enqueue is published by another process.
        let announcer = shared.keep_up("announcer", &beside, |shared, stop| async move {
            hint::announce(&*shared.store, &stop).await;
        });
        let mut end = Ok(RunEnd::Stopped);
        let serve = async {
            end = shared.serve(consumer, &stop).await;
            beside.cancel();
        };
        // One time limit for everything after a stop, also when neither database nor broker
        // answers.
        let grace = shared.options.shutdown_grace;
        let hand_back = intake::HAND_BACK.min(grace / 2);
        let deadline = async {
            beside.cancelled().await;
            tokio::time::sleep(grace - hand_back).await;
            abandon.cancel();
            tokio::time::sleep(hand_back).await;
        };
        tokio::select! {
            biased;
            _ = async { tokio::join!(serve, retriers, purge, stored_rows, presence, announcer) } => {}
            () = deadline => {
                tracing::warn!(consumer = %shared.options.name, ?grace, "the grace of the stop is over; what was in hand and not handed back comes again");
            }
        }
        end
    }
}

/// Runs the checks of a start on this database and broker, and changes nothing. A database or
/// broker that is away refuses no start: the consumer waits for it.
pub(crate) async fn check_start(
    store: &dyn Duties,
    broker: &dyn Broker,
    options: &ConsumerOptions,
) -> Result<(), RunError> {
    let checked = async {
        let skew = store.check_registration(&options.spec()).await?;
        purge::check_horizon(store, broker, options, skew).await
    };
    checked.await.or_else(|error| if error.is_away() { Ok(()) } else { Err(error) })
}

/// The pause before a task that panicked starts again.
const AFTER_DISORDER: Duration = Duration::from_secs(1);

impl RunError {
    /// Whether the error may end by itself.
    fn is_away(&self) -> bool {
        match self {
            Self::Store(error) => error.is_transient(),
            Self::Broker(error) => !matches!(error, BrokerError::Refused(_)),
            Self::Horizon { .. } => false,
        }
    }
}

impl Shared {
    /// Runs a task beside the lanes until the stop. After a panic the part is not ready until the
    /// task runs again.
    async fn keep_up<T: Future<Output = ()> + Send + 'static>(
        self: &Arc<Self>,
        what: &str,
        stop: &CancellationToken,
        work: impl Fn(Arc<Self>, CancellationToken) -> T,
    ) {
        let part = format!("{} {what}", self.part);
        // Dropping this future drops the set, which aborts the task.
        let mut tasks = JoinSet::new();
        loop {
            tasks.spawn(task::boxed(work(Arc::clone(self), stop.clone())));
            let Some(Err(error)) = tasks.join_next().await else { break };
            tracing::error!(consumer = %self.options.name, %error, "the {what} panicked; restarting");
            self.health.set(&part, PartState::Waiting(format!("it panicked: {error}")));
            if !sleep_unless(stop, AFTER_DISORDER).await {
                break;
            }
            // It has no loop that beats: while it runs, it is no part of the health.
            self.health.done(&part);
        }
    }

    /// Registers the consumer, and checks its horizon. Waits for a database or broker that is away.
    async fn register(&self) -> Result<ConsumerId, RunError> {
        let mut spec = self.options.spec();
        let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(5));
        loop {
            let registered = async {
                let consumer = self.store.register(&spec).await?;
                // Once is enough: a rule that is accepted for another process meanwhile stays.
                spec.accept = false;
                purge::check(self, consumer).await.map(|()| consumer)
            };
            match registered.await {
                Err(error) if error.is_away() => {
                    self.health.set(&self.part, PartState::Waiting(error.to_string()));
                    tokio::time::sleep(pace.next_wait()).await;
                }
                ended => {
                    // What an operator did during an earlier run does not end this one.
                    self.is_forgotten.store(false, Ordering::Relaxed);
                    return ended;
                }
            }
        }
    }

    /// Subscribes, and subscribes again after each error of a subscriber that is no refusal, but
    /// not while the database is silent: another process may have a way to it. Messages that were
    /// not acknowledged come again.
    async fn serve(self: &Arc<Self>, consumer: ConsumerId, stop: &CancellationToken) -> Result<RunEnd, RunError> {
        let mut pace = Pace::new(Duration::from_millis(200), Duration::from_secs(5));
        loop {
            if stop.is_cancelled() || !self.until_it_answers(stop).await {
                return Ok(RunEnd::Stopped);
            }
            let subscribing = async {
                match self.take_back_unspent(consumer).await {
                    Ok(()) => self.broker.subscriber(&subscription(&self.options)).await,
                    Err(error) => Err(BrokerError::Session(error.to_string())),
                }
            };
            // A database or a broker that is silent would keep the stop waiting.
            let Some(subscribed) = stop.run_until_cancelled(subscribing).await else { return Ok(RunEnd::Stopped) };
            let error = match subscribed {
                Ok(subscriber) => {
                    let began = tokio::time::Instant::now();
                    let end = intake::run(self, consumer, subscriber, stop).await;
                    if began.elapsed() > Duration::from_secs(10) {
                        pace.worked();
                    }
                    match end {
                        Ok(end) => return Ok(end),
                        Err(error) => error,
                    }
                }
                Err(error) => error,
            };
            if let BrokerError::Refused(_) = error {
                return Err(error.into());
            }
            self.health.set(&self.part, PartState::Waiting(error.to_string()));
            if !pace.wait(stop).await {
                return Ok(RunEnd::Stopped);
            }
        }
    }
}

fn subscription(options: &ConsumerOptions) -> Subscription {
    Subscription {
        group: options.group.clone(),
        queues: options.queues.clone(),
        in_flight_max: options.in_flight_max,
        drain: options.drain,
        ..Subscription::new(options.name.clone(), options.topics.clone())
    }
}

/// A consumer on files of its own that does not run, for the tests of its parts.
#[cfg(all(test, feature = "sqlite", feature = "embedded"))]
mod fixture {
    #![allow(clippy::unwrap_used)]
    use super::item::{Item, Source};
    use super::*;
    use crate::broker::embedded::{EmbeddedBroker, EmbeddedConfig};
    use crate::broker::{Delivery, PartitionId, envelope};
    use crate::inbox::rules::suspicion::Suspicion;
    use crate::message::Coordinates;
    use crate::store::base::{Base, StoreOptions};
    use crate::store::schema::Schema;
    use crate::store::sqlite::SqliteStore;

    pub(super) struct Parts {
        pub(super) shared: Arc<Shared>,
        pub(super) store: SqliteStore,
        _directory: tempfile::TempDir,
    }

    /// A database without tables, and an empty broker.
    pub(super) async fn parts(options: ConsumerOptions, handlers: Handlers<SqliteStore>) -> Parts {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", directory.path().join("consumer.db").display());
        let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(url) }).await.unwrap();
        let broker = EmbeddedBroker::open(EmbeddedConfig::new(directory.path().join("broker.db"))).await.unwrap();
        let shared = Consumer::new(store.clone(), Arc::new(broker), handlers, options, Health::default()).0;
        Parts { shared, store, _directory: directory }
    }

    pub(super) fn options() -> ConsumerOptions {
        ConsumerOptions::new("ledger", vec!["t".into()])
    }

    /// Two deliveries of one key.
    pub(super) fn two(shared: &Shared) -> [Item; 2] {
        let id = PartitionId { place: "t".into(), partition: 0, generation: 1 };
        let source = Source::new(id.clone(), Suspicion::closed());
        [1, 2].map(|sequence| {
            let headers = [("ce_id", sequence.to_string()), ("ce_type", "made".into()), ("ce_source", "test".into())];
            let headers = headers.map(|(name, value)| (name.to_owned(), value.into_bytes())).to_vec();
            let coordinates = Coordinates { place: "t".into(), partition: 0, offset: sequence };
            let arrived = envelope::arrive(Some(b"a".to_vec()), headers, Some(b"1".to_vec()), None, coordinates);
            let delivery = Delivery { source: id.clone(), sequence, redelivered: false, arrived };
            Item::identify(delivery, Arc::clone(&source), &shared.options, true)
        })
    }

    impl Parts {
        /// Makes the tables, and registers the consumer in them.
        pub(super) async fn register(&self) -> ConsumerId {
            self.store.migrate().await.unwrap();
            self.shared.register().await.unwrap()
        }
    }
}
