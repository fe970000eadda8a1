//! From URLs to stores and brokers. A URL that needs a missing feature is refused by naming it.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::config::Settings;
use super::exit::AppError;
use crate::broker::Broker;
use crate::error::{StoreError, redact};
use crate::observe::{Health, PartState};
use crate::runtime::pace::Pace;
use crate::store::{Store, StoreOptions};

/// A broker of any kind.
pub type AnyBroker = Arc<dyn Broker>;

/// Which store a URL leads to: `postgres`, `mysql` or `sqlite`.
///
/// # Errors
/// An unknown scheme, by name.
pub fn store_kind(url: &str) -> Result<&'static str, AppError> {
    match url.split_once(':').map(|(scheme, _)| scheme) {
        Some("postgres" | "postgresql") => Ok("postgres"),
        Some("mysql" | "mariadb") => Ok("mysql"),
        Some("sqlite") => Ok("sqlite"),
        _ => Err(AppError::usage(format!(
            "the database URL `{}` has no scheme that is known: use postgres://, mysql:// or sqlite://FILE",
            redact(url)
        ))),
    }
}

/// Runs a generic function with the store that the settings name: `with_store!(settings, |store| work(store).await)`.
#[macro_export]
#[doc(hidden)]
macro_rules! with_store {
    ($settings:expr, $stop:expr, |$store:ident| $body:expr) => {{
        let settings: &$crate::app::config::Settings = $settings;
        match $crate::app::store_kind(&settings.database.url.0)? {
            #[cfg(feature = "postgres")]
            "postgres" => {
                let $store = $crate::app::open_store::<$crate::store::postgres::PostgresStore>(settings, $stop).await?;
                $body
            }
            #[cfg(feature = "mysql")]
            "mysql" => {
                let $store = $crate::app::open_store::<$crate::store::mysql::MySqlStore>(settings, $stop).await?;
                $body
            }
            #[cfg(feature = "sqlite")]
            "sqlite" => {
                let $store = $crate::app::open_store::<$crate::store::sqlite::SqliteStore>(settings, $stop).await?;
                $body
            }
            kind => Err($crate::app::AppError::usage(format!(
                "this program was built without the feature `{kind}` that the database URL needs"
            ))),
        }
    }};
}

/// Connects to the database. With a stop, a server that is away is waited for, visibly; without, it is an error at once.
///
/// # Errors
/// What a person must mend, or where the stop came first.
pub async fn open_store<S: Store>(settings: &Settings, stop: Option<&CancellationToken>) -> Result<S, AppError> {
    let options = StoreOptions {
        connections_max: settings.database.connections_max,
        ca_file: settings.database.ca_file.clone(),
        ..StoreOptions::new(settings.database.url.0.clone())
    };
    open_store_with(&options, stop, &Health::default()).await
}

/// As [`open_store`], with options of one's own.
///
/// # Errors
/// As [`open_store`].
pub async fn open_store_with<S: Store>(
    options: &StoreOptions,
    stop: Option<&CancellationToken>,
    health: &Health,
) -> Result<S, AppError> {
    let name = redact(&options.url);
    let mut pace = Pace::new(Duration::from_millis(200), Duration::from_secs(5));
    loop {
        let error = match S::connect(options).await {
            Ok(store) => {
                health.set("database", PartState::Ready);
                return Ok(store);
            }
            Err(error) => error,
        };
        let away = matches!(error, StoreError::Unavailable(_) | StoreError::Busy(_));
        match stop {
            Some(stop) if away => {
                health.set("database", PartState::Waiting(format!("{name}: {error}")));
                if !pace.wait(stop).await {
                    return Err(AppError::failed(format!("{name}: stopped while waiting for the database")));
                }
            }
            _ => return Err(AppError::from(error).on(&name)),
        }
    }
}

/// The broker that the settings name. Makes no connection yet, except that an embedded broker opens its file.
///
/// # Errors
/// An unknown scheme or a missing feature, by name; a setting that breaks a promise.
pub async fn open_broker(settings: &Settings) -> Result<AnyBroker, AppError> {
    let url = settings.broker.url.0.as_str();
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    let opened: Result<AnyBroker, AppError> = match scheme {
        #[cfg(feature = "kafka")]
        "kafka" | "kafkas" => kafka(settings),
        #[cfg(not(feature = "kafka"))]
        "kafka" | "kafkas" => Err(missing_feature("kafka")),
        #[cfg(feature = "rabbitmq")]
        "amqp" | "amqps" => rabbitmq(settings),
        #[cfg(not(feature = "rabbitmq"))]
        "amqp" | "amqps" => Err(missing_feature("rabbitmq")),
        #[cfg(feature = "embedded")]
        "embedded" => embedded(settings).await,
        #[cfg(not(feature = "embedded"))]
        "embedded" => Err(missing_feature("embedded")),
        _ => Err(AppError::usage(
            "no scheme that is known: use kafka://HOST:PORT, kafkas://, amqp://, amqps:// or embedded://FILE",
        )),
    };
    opened.map_err(|error| error.on(&format!("broker {}", redact(url))))
}

#[cfg(not(all(feature = "kafka", feature = "rabbitmq", feature = "embedded")))]
fn missing_feature(feature: &str) -> AppError {
    AppError::usage(format!("this program was built without the feature `{feature}` that the broker URL needs"))
}

#[cfg(feature = "kafka")]
fn kafka(settings: &Settings) -> Result<AnyBroker, AppError> {
    use crate::broker::kafka::{KafkaBroker, KafkaConfig};

    let from = &settings.broker.kafka;
    let mut config = KafkaConfig::from_url(&settings.broker.url.0)?;
    config.source.clone_from(&settings.publisher.source);
    config.ca_file.clone_from(&settings.broker.ca_file);
    config.create_topics = from.create_topics;
    config.partitions = from.partitions;
    config.replication = from.replication;
    config.session_timeout = from.session_timeout.0;
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
    Ok(Arc::new(KafkaBroker::new(config)?))
}

#[cfg(feature = "rabbitmq")]
fn rabbitmq(settings: &Settings) -> Result<AnyBroker, AppError> {
    use crate::broker::rabbitmq::{RabbitBroker, RabbitConfig};

    let from = &settings.broker.rabbitmq;
    let mut config = RabbitConfig::new(settings.broker.url.0.clone());
    config.source.clone_from(&settings.publisher.source);
    config.ca_file.clone_from(&settings.broker.ca_file);
    config.exchange.clone_from(&from.exchange);
    config.alternate_exchange.clone_from(&from.alternate_exchange);
    config.pipeline_per_key = from.pipeline_per_key;
    config.partitions = from.partitions;
    Ok(Arc::new(RabbitBroker::new(config)?))
}

#[cfg(feature = "embedded")]
async fn embedded(settings: &Settings) -> Result<AnyBroker, AppError> {
    use crate::broker::embedded::{EmbeddedBroker, EmbeddedConfig};

    let from = &settings.broker.embedded;
    let mut config = EmbeddedConfig::from_url(&settings.broker.url.0)?;
    config.source.clone_from(&settings.publisher.source);
    config.partitions = u32::try_from(from.partitions).unwrap_or(1).max(1);
    config.session_timeout = from.session_timeout.0;
    config.retention = from.retention.duration();
    Ok(Arc::new(EmbeddedBroker::open(config).await?))
}
