//! Where a benchmark runs: a database of its own, topics of its own, both removed at the end.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::work::Raw;
use super::yard::Yard;
use crate::app::config::{Secret, Settings, Span};
use crate::app::{AnyBroker, AppError, open_broker, open_store_with};
use crate::broker::Subscription;
use crate::cli::common::CommonArgs;
use crate::cli::place::{self, private_directory};
use crate::observe::Health;
use crate::store::StoreOptions;

/// Settings and names, before anything was made.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) settings: Settings,
    dir: PathBuf,
    tag: String,
}

impl Place {
    pub(super) fn find(common: &CommonArgs) -> Result<Self, AppError> {
        let tag = format!("{:08x}", fastrand::u32(..));
        let dir = std::env::temp_dir().join(format!("oncebox-bench-{tag}"));
        private_directory(&dir)?;
        let mut settings = place::settings_in(common, &dir)?;
        settings.broker.kafka.create_topics = true;
        settings.publisher.lease = Span::seconds(10);
        Ok(Self { settings, dir, tag })
    }
}

/// A place with a database in it.
#[derive(Debug)]
pub(super) struct Bed<S: Yard> {
    pub(super) store: S,
    pub(super) broker: AnyBroker,
    pub(super) settings: Settings,
    tag: String,
    dir: PathBuf,
    server: Secret,
    made: Vec<Subscription>,
}

impl<S: Yard> Bed<S> {
    pub(super) async fn make(place: Place) -> Result<Self, AppError> {
        let Place { mut settings, dir, tag } = place;
        let server = settings.database.url.clone();
        let own = S::make_database(&server.0, &name(&tag), &dir).await?;
        settings.database.url = Secret(own);
        let made = async {
            let store = connect::<S>(&settings).await?;
            store.migrate().await?;
            store.make_tables().await?;
            let broker = open_broker(&settings).await?;
            broker.declare(&[]).await?;
            Ok((store, broker))
        };
        match made.await {
            Ok((store, broker)) => Ok(Self { store, broker, settings, tag, dir, server, made: Vec::new() }),
            Err(error) => {
                S::drop_database(&server.0, &name(&tag)).await?;
                Err(error)
            }
        }
    }

    /// A store of its own, with connections that nobody else uses.
    pub(super) async fn another_store(&self) -> Result<S, AppError> {
        connect(&self.settings).await
    }

    /// A database beside this one, with the same tables and nothing in them. [`Self::clear_beside`] drops it.
    pub(super) async fn beside(&self) -> Result<S, AppError> {
        let mut settings = self.settings.clone();
        settings.database.url = Secret(S::make_database(&self.server.0, &beside(&self.tag), &self.dir).await?);
        let store = connect::<S>(&settings).await?;
        store.migrate().await?;
        Ok(store)
    }

    /// Drops that database.
    pub(super) async fn clear_beside(&self, store: S) -> Result<(), AppError> {
        store.close().await;
        S::drop_database(&self.server.0, &beside(&self.tag)).await
    }

    /// A new topic that these consumers read; on RabbitMQ their queues stand before anything is published.
    pub(super) async fn topic(&mut self, name: &str, consumers: &[&str]) -> Result<(String, Vec<String>), AppError> {
        let topic = format!("bench-{}-{name}-{}", self.tag, self.made.len());
        self.broker.declare(std::slice::from_ref(&topic)).await?;
        let mut names = Vec::new();
        for consumer in consumers {
            let subscription = Subscription::new(format!("{topic}-{consumer}"), vec![topic.clone()]);
            if !self.broker.is_log() {
                self.broker.subscriber(&subscription).await?.close().await;
            }
            names.push(subscription.consumer.clone());
            self.made.push(subscription);
        }
        if self.made.iter().all(|made| !made.topics.contains(&topic)) {
            self.made.push(Subscription::new(format!("{topic}-nobody"), vec![topic.clone()]));
        }
        Ok((topic, names))
    }

    /// The client of this broker without oncebox.
    pub(super) async fn raw(&self, linger: Duration) -> Result<Raw, AppError> {
        Raw::open(&self.settings, &self.broker, linger).await
    }

    /// The settings as a file for a process.
    pub(super) fn config_file(&self) -> Result<PathBuf, AppError> {
        place::write_config(&self.settings, &self.dir)
    }

    /// Removes everything; what cannot be removed is named.
    pub(super) async fn clear(self) -> Result<(), AppError> {
        let topics = self.broker.remove(&self.made).await;
        self.store.close().await;
        let database = S::drop_database(&self.server.0, &name(&self.tag)).await;
        let files = std::fs::remove_dir_all(&self.dir)
            .map_err(|error| AppError::failed(format!("{} cannot be removed: {error}", self.dir.display())));
        topics?;
        database.and(files)
    }
}

fn name(tag: &str) -> String {
    format!("oncebox_bench_{tag}")
}

fn beside(tag: &str) -> String {
    format!("oncebox_bench_{tag}_b")
}

async fn connect<S: Yard>(settings: &Settings) -> Result<S, AppError> {
    let options = StoreOptions {
        create: true,
        connections_max: 24,
        ca_file: settings.database.ca_file.clone(),
        ..StoreOptions::new(settings.database.url.0.clone())
    };
    open_store_with(&options, None, &Health::default()).await
}

/// A SQLite file below the directory of the benchmark.
pub(super) fn file_url(dir: &Path, name: &str) -> String {
    format!("sqlite://{}", dir.join(format!("{name}.db")).display())
}
