//! Consumers as a process: those that the configuration names, with the handlers it names or with handlers in Rust.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::config::{ConsumerSettings, Settings};
use super::connect::{AnyBroker, open_broker, store_kind};
use super::exit::{AppError, Exit};
use super::publisher::{keep_gauges, ready};
use crate::observe::Health;
use crate::runtime::{Consumer, Handlers};
use crate::store::{Store, StoreOptions};

/// Handlers in Rust by consumer name; a consumer that is not named here has those of the configuration.
pub type HandlersByConsumer<S> = BTreeMap<String, Handlers<S>>;

/// Runs the consumers of the settings until they are told to stop, or all are idle where `until_idle` is set.
///
/// # Errors
/// What a person must mend.
pub async fn run_consumers(
    settings: &Settings,
    until_idle: Option<Duration>,
    health: Health,
    stop: CancellationToken,
) -> Result<(), AppError> {
    let run = Run { settings, until_idle, health, stop };
    match store_kind(&settings.database.url.0)? {
        #[cfg(feature = "postgres")]
        "postgres" => run.with::<crate::store::postgres::PostgresStore>(BTreeMap::new()).await,
        #[cfg(feature = "mysql")]
        "mysql" => run.with::<crate::store::mysql::MySqlStore>(BTreeMap::new()).await,
        #[cfg(feature = "sqlite")]
        "sqlite" => run.with::<crate::store::sqlite::SqliteStore>(BTreeMap::new()).await,
        kind => Err(AppError::usage(format!(
            "this program was built without the feature `{kind}` that the database URL needs"
        ))),
    }
}

/// As [`run_consumers`], with handlers in Rust; the database URL must lead to their store.
///
/// # Errors
/// As [`run_consumers`].
pub async fn run_consumers_with<S: Store>(
    settings: &Settings,
    handlers: HandlersByConsumer<S>,
    until_idle: Option<Duration>,
    health: Health,
    stop: CancellationToken,
) -> Result<(), AppError> {
    let kind = store_kind(&settings.database.url.0)?;
    if kind != S::NAME {
        return Err(AppError::usage(format!(
            "the database URL is of kind `{kind}`, these handlers are written for `{}`",
            S::NAME
        )));
    }
    Run { settings, until_idle, health, stop }.with(handlers).await
}

struct Run<'a> {
    settings: &'a Settings,
    until_idle: Option<Duration>,
    health: Health,
    stop: CancellationToken,
}

impl Run<'_> {
    async fn with<S: Store>(self, mut handlers: HandlersByConsumer<S>) -> Result<(), AppError> {
        if self.settings.consumer.is_empty() {
            return Err(AppError::usage(
                "no consumer is configured\nhint: add [[consumer]] to the configuration file; `oncebox config template` shows one",
            ));
        }
        for name in handlers.keys() {
            if !self.settings.consumer.iter().any(|consumer| consumer.name == *name) {
                return Err(AppError::usage(format!(
                    "there are handlers for the consumer `{name}`, but no [[consumer]] of that name"
                )));
            }
        }
        let is_sqlite = S::NAME == "sqlite";
        let mut options = Vec::new();
        for consumer in &self.settings.consumer {
            let mut one = consumer.options(is_sqlite, self.settings.shutdown_grace).map_err(AppError::usage)?;
            one.until_idle = self.until_idle;
            one.redrive_age_max = self.settings.publisher.redrive_age_max.0;
            options.push((consumer, one));
        }
        let broker = open_broker(self.settings).await?;
        let lanes: usize = options.iter().map(|(_, options)| options.lanes + 2).sum();
        let timeout = options.iter().map(|(_, options)| options.handler_timeout).max().unwrap_or_default();
        let store_options = StoreOptions {
            // Each lane keeps one; attempts and the retrier take another.
            connections_max: self.settings.database.connections_max.max(u32::try_from(lanes).unwrap_or(64)),
            handler_timeout: timeout,
            ca_file: self.settings.database.ca_file.clone(),
            ..StoreOptions::new(self.settings.database.url.0.clone())
        };
        let store: S = super::open_store_with(&store_options, Some(&self.stop), &self.health).await?;
        ready(&store, &self.stop).await?;
        let all = self.stop.child_token();
        let mut running = JoinSet::new();
        for (settings, options) in options {
            let handlers = match handlers.remove(&settings.name) {
                Some(handlers) => handlers,
                None => configured::<S>(&store, settings).await?,
            };
            let consumer =
                Consumer::new(store.clone(), AnyBroker::clone(&broker), handlers, options, self.health.clone());
            let stop = all.clone();
            running.spawn(async move { consumer.run(stop).await });
        }
        let gauges = tokio::spawn(keep_gauges(store.clone(), all.clone()));
        let mut outcome = Ok(());
        while let Some(ended) = running.join_next().await {
            let ended = ended.map_err(|error| AppError::failed(format!("a consumer ended in disorder: {error}")));
            if let Err(error) = ended.and_then(|end| end.map(drop).map_err(AppError::from)) {
                all.cancel();
                outcome = Err(error);
            }
        }
        all.cancel();
        let _ = gauges.await;
        if outcome.is_ok() && self.until_idle.is_some() {
            for consumer in store.status().await?.consumers {
                if consumer.waiting + consumer.dead > 0 {
                    tracing::warn!(consumer = %consumer.name, waiting = consumer.waiting, dead = consumer.dead, "idle, but messages wait or are dead; see `oncebox dead list`");
                }
            }
        }
        store.close().await;
        outcome
    }
}

/// The handlers that the configuration names.
async fn configured<S: Store>(store: &S, settings: &ConsumerSettings) -> Result<Handlers<S>, AppError> {
    let mut handlers = Handlers::new();
    if settings.on.is_empty() {
        return Err(AppError::usage(format!(
            "consumer `{}` has no [[consumer.on]] and no handler in Rust",
            settings.name
        )));
    }
    for on in &settings.on {
        if on.handler != "sql" {
            return Err(AppError::usage(format!(
                "consumer `{}`: unknown handler `{}`; known is `sql`",
                settings.name, on.handler
            )));
        }
        let spec = crate::runtime::SqlSpec {
            statements: on.sql.clone(),
            params: on.params.clone(),
            optional: on.optional.clone(),
        };
        let handler = crate::runtime::SqlHandler::prepare(store, spec).await.map_err(|error| AppError {
            message: format!("consumer `{}`: {error}", settings.name),
            exit: Exit::Usage,
        })?;
        handlers = match &on.kind {
            Some(kind) => handlers.on(kind.clone(), handler),
            None => handlers.otherwise(handler),
        };
    }
    Ok(handlers)
}
