//! Opens stores and brokers by URL. A URL that needs a missing feature is refused with its name.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use super::config::{Secret, Settings};
use super::exit::AppError;
use crate::broker::Broker;
#[cfg(feature = "kafka")]
use crate::broker::kafka::{KafkaBroker, KafkaConfig};
#[cfg(feature = "rabbitmq")]
use crate::broker::rabbitmq::{RabbitBroker, RabbitConfig};
#[cfg(any(feature = "kafka", feature = "rabbitmq", feature = "embedded"))]
use crate::error::BrokerError;
use crate::error::{StoreError, redact};
use crate::observe::{Health, PartState};
use crate::store::Store;
use crate::store::base::StoreOptions;
use crate::time::pace::Pace;

/// A broker of any kind, behind its trait.
pub type AnyBroker = Arc<dyn Broker>;

/// The stop and the health of a program that waits for a server that is away; `None` where that is
/// an error at once.
pub type Waits<'a> = Option<(&'a CancellationToken, &'a Health)>;

/// The kind of store of a URL: `postgres`, `mysql` or `sqlite`.
pub fn store_kind(url: &str) -> Result<&'static str, AppError> {
    match url.split_once(':').map(|(scheme, _)| scheme) {
        Some("postgres" | "postgresql") => Ok("postgres"),
        Some("mysql" | "mariadb") => Ok("mysql"),
        Some("sqlite") => Ok("sqlite"),
        _ => Err(AppError::usage(format!(
            "the database URL `{}` has no scheme that is known: use postgres://, mysql:// or sqlite://FILE",
            Secret(url.to_owned()).redacted()
        ))),
    }
}

/// Runs an expression with the type of the store that a URL names:
/// `with_store_type!(url, |S| work::<S>().await)`.
#[macro_export]
#[doc(hidden)]
macro_rules! with_store_type {
    ($url:expr, |$store:ident| $body:expr) => {
        match $crate::app::store_kind($url)? {
            #[cfg(feature = "postgres")]
            "postgres" => {
                type $store = $crate::store::postgres::PostgresStore;
                $body
            }
            #[cfg(feature = "mysql")]
            "mysql" => {
                type $store = $crate::store::mysql::MySqlStore;
                $body
            }
            #[cfg(feature = "sqlite")]
            "sqlite" => {
                type $store = $crate::store::sqlite::SqliteStore;
                $body
            }
            kind => Err($crate::app::AppError::usage(format!(
                "this program was built without the feature `{kind}` that the database URL needs"
            ))),
        }
    };
}

/// Runs a generic function with the store that the settings name; the second argument is that of
/// [`open_store`]: `with_store!(settings, None, |store| work(store).await)`.
#[macro_export]
#[doc(hidden)]
macro_rules! with_store {
    ($settings:expr, $waits:expr, |$store:ident| $body:expr) => {{
        let settings: &$crate::app::config::Settings = $settings;
        $crate::with_store_type!(&settings.database.url.0, |NamedStore| {
            let $store = $crate::app::open_store::<NamedStore>(settings, $waits).await?;
            $body
        })
    }};
}

/// Connects to the database.
///
/// # Errors
/// An error that a person must repair, or the stop came first.
pub async fn open_store<S: Store>(settings: &Settings, waits: Waits<'_>) -> Result<S, AppError> {
    open_store_with(settings, |_| (), waits).await
}

/// As [`open_store`], with what `change` changes in the options of the settings.
pub async fn open_store_with<S: Store>(
    settings: &Settings,
    change: impl FnOnce(&mut StoreOptions),
    waits: Waits<'_>,
) -> Result<S, AppError> {
    let mut options = settings.database.options().map_err(AppError::usage)?;
    change(&mut options);
    let kind = store_kind(&options.url)?;
    if kind != S::NAME {
        return Err(AppError::usage(format!(
            "the database URL is of kind `{kind}`, this program is written for `{}`",
            S::NAME
        )));
    }
    exists("database.ca_file", options.ca_file.as_deref())?;
    let name = redact(&options.url);
    let mut wait = Wait::new("database", waits);
    loop {
        match wait.answer(&name, S::connect(&options)).await? {
            Ok(store) => return Ok(store),
            Err(error) if error.is_untrusted() => return Err(AppError::not_ready(format!("{name}: {error}"))),
            Err(error) if waits.is_some() && error.is_transient() => wait.on(&format!("{name}: {error}")).await?,
            // Refused before a connection: a setting cannot be used, and the text names it.
            Err(StoreError::Refused(why)) => return Err(AppError::usage(why)),
            Err(error) => return Err(AppError::from(error).on(&name)),
        }
    }
}

/// Waits for a server that is away: with a backoff, shown in the health, until a stop.
#[derive(Debug)]
pub(super) struct Wait {
    part: &'static str,
    health: Health,
    stop: CancellationToken,
    pace: Pace,
}

impl Wait {
    /// Without `waits`, nobody sees the health, and no stop comes.
    pub(super) fn new(part: &'static str, waits: Waits<'_>) -> Self {
        let (stop, health) = waits.map_or_else(Default::default, |(stop, health)| (stop.clone(), health.clone()));
        health.set(part, PartState::Starting);
        Self { part, health, stop, pace: Pace::new(Duration::from_millis(200), Duration::from_secs(5)) }
    }

    /// Asks until the server is there, and returns its answer, or the first error that does not say
    /// that it is away; an error too if the stop comes before. `name` is the server's, for
    /// messages.
    pub(super) async fn until<T, E, F>(
        &mut self,
        name: &str,
        is_away: impl Fn(&E) -> bool,
        ask: impl Fn() -> F,
    ) -> Result<T, AppError>
    where
        AppError: From<E>,
        E: Display,
        F: Future<Output = Result<T, E>>,
    {
        loop {
            match self.answer(name, ask()).await? {
                Ok(answer) => return Ok(answer),
                Err(error) if is_away(&error) => self.on(&format!("{name}: {error}")).await?,
                Err(error) => return Err(AppError::from(error).on(name)),
            }
        }
    }

    /// Waits until the next attempt; an error if the stop comes before.
    pub(super) async fn on(&mut self, why: &str) -> Result<(), AppError> {
        self.health.set(self.part, PartState::Waiting(why.to_owned()));
        if self.pace.wait(&self.stop).await {
            return Ok(());
        }
        Err(self.stopped(why))
    }

    /// Waits for one answer, which may take half a minute; an error if the stop comes before.
    /// `what` says what was waited for.
    pub(super) async fn answer<T>(&self, what: &str, asked: impl Future<Output = T>) -> Result<T, AppError> {
        self.stop.run_until_cancelled(asked).await.ok_or_else(|| self.stopped(what))
    }

    /// What a program ends with whose stop comes while it waits.
    fn stopped(&self, why: &str) -> AppError {
        AppError::stopped(format!("stopped while waiting for the {}: {why}", self.part))
    }
}

/// The wait is over or given up; the parts that use the server report their own health.
impl Drop for Wait {
    fn drop(&mut self) {
        self.health.done(self.part);
    }
}

/// Makes the broker that the settings name. It does not connect yet, except that an embedded broker
/// opens its file.
///
/// # Errors
/// An unknown scheme, a missing feature (with its name), or a setting that breaks a promise; of an
/// embedded broker also a file that cannot be opened, or a stop that comes first.
pub fn open_broker<'a>(settings: &'a Settings, waits: Waits<'a>) -> BoxFuture<'a, Result<AnyBroker, AppError>> {
    // Boxed, so that this code is compiled with the library and not again in each program.
    Box::pin(open_named(settings, waits))
}

async fn open_named(settings: &Settings, waits: Waits<'_>) -> Result<AnyBroker, AppError> {
    let url = settings.broker.url.0.as_str();
    if url.is_empty() {
        return Err(AppError::usage(
            "no broker is named\nhint: give --broker, ONCEBOX_BROKER__URL or [broker] url; with a database server there is no default",
        ));
    }
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    exists("broker.ca_file", settings.broker.ca_file.as_deref())?;
    match scheme {
        #[cfg(feature = "kafka")]
        "kafka" | "kafkas" => KafkaConfig::try_from(settings)
            .and_then(KafkaBroker::new)
            .map(|broker| Arc::new(broker) as AnyBroker)
            .map_err(wrong_setting),
        #[cfg(not(feature = "kafka"))]
        "kafka" | "kafkas" => Err(missing_feature("kafka")),
        #[cfg(feature = "rabbitmq")]
        "amqp" | "amqps" => {
            RabbitBroker::new(settings.into()).map(|broker| Arc::new(broker) as AnyBroker).map_err(wrong_setting)
        }
        #[cfg(not(feature = "rabbitmq"))]
        "amqp" | "amqps" => Err(missing_feature("rabbitmq")),
        #[cfg(feature = "embedded")]
        "embedded" => embedded(settings, waits).await,
        #[cfg(not(feature = "embedded"))]
        "embedded" => Err(missing_feature("embedded")),
        _ => Err(AppError::usage(format!(
            "the broker URL `{}` has no scheme that is known: use kafka://HOST:PORT, kafkas://, amqp://, amqps:// or \
             embedded://FILE",
            settings.broker.url.redacted()
        ))),
    }
}

/// An error before the first connection is about the settings.
#[cfg(any(feature = "kafka", feature = "rabbitmq", feature = "embedded"))]
fn wrong_setting(error: BrokerError) -> AppError {
    match error {
        BrokerError::Refused(why) => AppError::usage(why),
        other => other.into(),
    }
}

/// A missing file must not look like a server that is away.
fn exists(setting: &str, file: Option<&Path>) -> Result<(), AppError> {
    match file.filter(|file| !file.is_file()) {
        None => Ok(()),
        Some(file) => Err(AppError::usage(format!("{setting}: there is no file `{}`", file.display()))),
    }
}

#[cfg(not(all(feature = "kafka", feature = "rabbitmq", feature = "embedded")))]
fn missing_feature(feature: &str) -> AppError {
    AppError::usage(format!("this program was built without the feature `{feature}` that the broker URL needs"))
}

/// The configuration of Kafka from the settings.
#[cfg(feature = "kafka")]
impl TryFrom<&Settings> for KafkaConfig {
    type Error = BrokerError;

    fn try_from(settings: &Settings) -> Result<Self, BrokerError> {
        let from = &settings.broker.kafka;
        let mut config = Self::from_url(&settings.broker.url.0)?;
        config.source.clone_from(&settings.publisher.source);
        config.ca_file.clone_from(&settings.broker.ca_file);
        config.in_flight_bytes_max = settings.broker.in_flight_bytes_max;
        config.create_topics = from.create_topics;
        config.partitions = from.partitions;
        config.replication = from.replication;
        config.session_timeout = from.session_timeout;
        config.properties.clone_from(&from.properties);
        if let Some(mechanism) = &from.sasl_mechanism {
            config.sasl_mechanism = mechanism.parse()?;
        }
        if from.username.is_some() {
            config.user.clone_from(&from.username);
        }
        if let Some(password) = &from.password {
            config.password = Some(password.0.clone());
        }
        Ok(config)
    }
}

/// The configuration of RabbitMQ from the settings.
#[cfg(feature = "rabbitmq")]
impl From<&Settings> for RabbitConfig {
    fn from(settings: &Settings) -> Self {
        let from = &settings.broker.rabbitmq;
        let mut config = Self::new(settings.broker.url.0.clone());
        config.source.clone_from(&settings.publisher.source);
        config.ca_file.clone_from(&settings.broker.ca_file);
        config.in_flight_bytes_max = settings.broker.in_flight_bytes_max;
        config.exchange.clone_from(&from.exchange);
        config.alternate_exchange.clone_from(&from.alternate_exchange);
        config.pipeline_per_key = from.pipeline_per_key;
        config.partitions = from.partitions;
        config
    }
}

#[cfg(feature = "embedded")]
async fn embedded(settings: &Settings, waits: Waits<'_>) -> Result<AnyBroker, AppError> {
    use crate::broker::embedded::{EmbeddedBroker, EmbeddedConfig};

    let from = &settings.broker.embedded;
    let mut config = EmbeddedConfig::from_url(&settings.broker.url.0).map_err(wrong_setting)?;
    config.source.clone_from(&settings.publisher.source);
    config.in_flight_bytes_max = settings.broker.in_flight_bytes_max;
    config.partitions = u32::try_from(from.partitions).unwrap_or(0);
    config.session_timeout = from.session_timeout;
    config.retention = from.retention;
    config.validate().map_err(wrong_setting)?;
    let is_away = |error: &BrokerError| waits.is_some() && matches!(error, BrokerError::Unavailable(_));
    let name = redact(&settings.broker.url.0);
    let opened = Wait::new("broker", waits).until(&name, is_away, || EmbeddedBroker::open(config.clone())).await?;
    Ok(Arc::new(opened))
}
