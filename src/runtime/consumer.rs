//! The consumer: deliveries in, effects committed once, acknowledgements out.
//!
//! Guarantees: a handler's writes commit together with the inbox row of its message (G4); nothing is acknowledged before the
//! commit returned (G5); effects of one key run in the key's order, also while one of its messages waits (G6); the same id
//! with other content is an alarm (G7); a database or broker that is away burns no attempt (G10).
//!
//! The way of a delivery: `intake` (broker events, low-water marks) → `lane` (one key, one lane; batches of what is there) →
//! `batch` (one transaction) or `alone` (a failing or suspicious message) → back to `intake`, which acknowledges.
//!
//! Beside it: retries that are due later (`retries`), inbox rows older than the horizon (`purge`).
//!
//! Not here: SQL of the inbox (room `store`), and what is decided by rule (room `policy`): whose failure it is and what runs
//! again, which messages run alone, when the next try is, up to where to acknowledge, what is too old.

mod admission;
mod alone;
mod batch;
mod calls;
mod handlers;
mod intake;
mod item;
mod lane;
mod options;
mod purge;
mod retries;
mod settle;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, RwLock};
use tokio_util::sync::CancellationToken;

use crate::broker::{Broker, Subscription};
use crate::error::{BrokerError, StoreError};
use crate::observe::{self, Health, PartState};
use crate::policy::horizon::HorizonTooShort;
use crate::store::{ConsumerId, ConsumerSpec, Store};

pub use handlers::Handlers;
pub use options::{ConsumerOptions, DeadPolicy, Unhandled};

use super::pace::Pace;

/// How a consumer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConsumerEnd {
    /// It was told to stop.
    Stopped,
    /// Nothing was left for as long as `until_idle` says.
    Idle,
}

/// A consumer of one name, on a store and a broker.
#[derive(Debug, Clone)]
pub struct Consumer<S: Store>(Arc<Shared<S>>);

/// What intake, lanes and retries share.
#[derive(Debug)]
struct Shared<S: Store> {
    store: S,
    broker: Arc<dyn Broker>,
    handlers: Handlers<S>,
    options: ConsumerOptions,
    health: Health,
    part: String,
    /// A suspicious message runs alone in the process: it takes this for writing, batches for reading (R26).
    solo: RwLock<()>,
    /// A message was stored as due: the retrier looks again.
    parked: Notify,
}

impl<S: Store> Consumer<S> {
    /// Puts a consumer together; [`Consumer::run`] makes it work.
    pub fn new(
        store: S,
        broker: Arc<dyn Broker>,
        handlers: Handlers<S>,
        options: ConsumerOptions,
        health: Health,
    ) -> Self {
        let part = format!("consumer {}", options.name);
        let (solo, parked) = (RwLock::new(()), Notify::new());
        Self(Arc::new(Shared { store, broker, handlers, options, health, part, solo, parked }))
    }

    /// Runs until it is told to stop, or is idle where `until_idle` is set. Waits for a database, broker, topic or queue that
    /// is not there yet.
    ///
    /// # Errors
    /// What a person must mend: no schema, a refused setting, a changed id rule, a horizon that is too short.
    ///
    /// # Cancel safety
    /// Dropped, it stops without acknowledging what runs: those messages come again. Prefer the token.
    pub async fn run(&self, stop: CancellationToken) -> Result<ConsumerEnd, ConsumerError> {
        let shared = &self.0;
        shared.health.set(&shared.part, PartState::Starting);
        observe::consumer_starts(&shared.options.name);
        let Some(consumer) = shared.register(&stop).await? else { return Ok(ConsumerEnd::Stopped) };
        purge::check(shared, consumer, &stop).await?;
        let beside = stop.child_token();
        let retrier = tokio::spawn(retries::run(Arc::clone(shared), consumer, beside.clone()));
        let purge = tokio::spawn(purge::run(Arc::clone(shared), consumer, beside.clone()));
        let end = shared.serve(consumer, &stop).await;
        beside.cancel();
        for (what, task) in [("retrier", retrier), ("purge", purge)] {
            if let Err(error) = task.await {
                tracing::error!(consumer = %shared.options.name, %error, "the {what} ended in disorder");
            }
        }
        end
    }
}

/// Why a consumer cannot go on by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConsumerError {
    /// The database refuses.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The broker refuses.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The inbox would forget what can still come.
    #[error("consumer `{consumer}`: {why}")]
    Horizon {
        /// Whose.
        consumer: String,
        /// What can still come, and for how long.
        why: HorizonTooShort,
    },
}

impl<S: Store> Shared<S> {
    /// Registers the consumer, waiting for a database that is away.
    async fn register(&self, stop: &CancellationToken) -> Result<Option<ConsumerId>, ConsumerError> {
        let spec = ConsumerSpec {
            name: self.options.name.clone(),
            id_rule: self.options.id_rule_text(),
            accept: self.options.accept_id_rule,
        };
        let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(5));
        loop {
            match self.store.register(&spec).await {
                Ok(id) => return Ok(Some(id)),
                Err(error) if error.is_nobodys() => {
                    self.health.set(&self.part, PartState::Waiting(error.to_string()));
                    if !pace.wait(stop).await {
                        return Ok(None);
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Subscribes again and again: any error of a subscriber ends it, and what was not acknowledged comes again.
    async fn serve(
        self: &Arc<Self>,
        consumer: ConsumerId,
        stop: &CancellationToken,
    ) -> Result<ConsumerEnd, ConsumerError> {
        let mut pace = Pace::new(Duration::from_millis(200), Duration::from_secs(5));
        loop {
            if stop.is_cancelled() {
                return Ok(ConsumerEnd::Stopped);
            }
            let error = match self.broker.subscriber(&self.subscription()).await {
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
                return Ok(ConsumerEnd::Stopped);
            }
        }
    }

    fn subscription(&self) -> Subscription {
        Subscription {
            group: self.options.group.clone(),
            queues: self.options.queues.clone(),
            in_flight_max: self.options.in_flight_max,
            drain: self.options.drain,
            ..Subscription::new(self.options.name.clone(), self.options.topics.clone())
        }
    }
}
