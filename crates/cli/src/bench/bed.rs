//! Where a benchmark runs: a separate database and separate topics, both removed at the end.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::Load;
use super::work::{Maker, Raw};
use super::yard::Yard;
use crate::common::AnyBroker;
use crate::ground::OwnDatabase;
use crate::place::{Place, write_config};
use oncebox::app::config::Settings;
use oncebox::app::{AppError, open_broker, open_store_with, say};
use oncebox::broker::Subscription;

/// How long Kafka's bare client waits to fill a batch. Those of other brokers have no such wait.
pub(super) const LINGER: Duration = Duration::from_millis(5);

/// A place, and the database that was made in it.
#[derive(Debug)]
pub(super) struct Bed<S: Yard> {
    pub(super) store: S,
    pub(super) broker: AnyBroker,
    pub(super) settings: Settings,
    /// Its settings name the database that the user named, not the one that was made.
    place: Place,
    own: OwnDatabase,
    /// The second database, from the moment at which it may exist.
    second: Option<OwnDatabase>,
    seconds_made: u32,
    made: Vec<Subscription>,
}

impl<S: Yard> Bed<S> {
    pub(super) async fn make(place: Place) -> Result<Self, AppError> {
        let own = OwnDatabase::make::<S>(&place, format!("oncebox_bench_{}", place.tag)).await;
        let own = own.inspect_err(|_| _ = place.remove())?;
        let mut settings = place.settings.clone();
        settings.database.url = own.url.clone();
        let made = async {
            let store = connect::<S>(&settings).await?;
            store.migrate().await?;
            store.make_tables().await?;
            let broker = open_broker(&settings, None).await?;
            broker.declare(&[]).await?;
            Ok((store, broker))
        };
        match made.await {
            Ok((store, broker)) => {
                let (second, seconds_made, made) = (None, 0, Vec::new());
                Ok(Self { store, broker, settings, place, own, second, seconds_made, made })
            }
            Err(error) => {
                if let Err(left) = own.drop_it::<S>().await.and(place.remove()) {
                    say("INFO", &left.message);
                }
                Err(error)
            }
        }
    }

    /// Another store on the same database, with its own connections.
    pub(super) async fn another_store(&self) -> Result<S, AppError> {
        connect(&self.settings).await
    }

    /// Makes a second, empty database with the tables of oncebox only. The caller drops it, or
    /// [`Bed::clear`] does.
    pub(super) async fn beside(&mut self) -> Result<(S, OwnDatabase), AppError> {
        // SQLite keeps the file of one that was dropped, so each has a name of its own.
        self.seconds_made += 1;
        let second = OwnDatabase { name: format!("{}_{}_b", self.own.name, self.seconds_made), ..self.own.clone() };
        // Stored before the database is made, so that nothing stays where the benchmark is stopped
        // in between.
        self.second = Some(second.clone());
        let own = OwnDatabase::make::<S>(&self.place, second.name).await?;
        let mut settings = self.settings.clone();
        settings.database.url = own.url.clone();
        let store = connect::<S>(&settings).await?;
        store.migrate().await?;
        Ok((store, own))
    }

    /// Makes a topic that these consumers read. On RabbitMQ their queues exist before anything is
    /// published.
    pub(super) async fn topic(&mut self, name: &str, consumers: &[&str]) -> Result<(String, Vec<String>), AppError> {
        let topic = format!("bench-{}-{name}-{}", self.place.tag, self.made.len());
        let names: Vec<String> = consumers.iter().map(|consumer| format!("{topic}-{consumer}")).collect();
        let nobody = [format!("{topic}-nobody")];
        let readers = if names.is_empty() { &nobody[..] } else { &names };
        let readers = readers.iter().map(|reader| Subscription::new(reader.clone(), vec![topic.clone()]));
        // Stored before anything is made, so that nothing stays if the benchmark is stopped here.
        let first = self.made.len();
        self.made.extend(readers);
        self.broker.declare(std::slice::from_ref(&topic)).await?;
        if !self.broker.is_log() && !names.is_empty() {
            for subscription in &self.made[first..] {
                self.broker.subscriber(subscription).await?.close().await;
            }
        }
        Ok((topic, names))
    }

    /// As [`Bed::topic`], with the messages of this load in it.
    pub(super) async fn filled(
        &mut self,
        name: &str,
        consumers: &[&str],
        load: Load,
    ) -> Result<(String, Vec<String>), AppError> {
        let (topic, names) = self.topic(name, consumers).await?;
        let rows = Maker::new(&topic, load).rows(load.messages);
        self.raw(LINGER).await?.send_all(Arc::new(rows)).await?;
        Ok((topic, names))
    }

    /// The client of this broker without oncebox.
    pub(super) async fn raw(&self, linger: Duration) -> Result<Raw, AppError> {
        Raw::open(&self.settings, &self.broker, linger).await
    }

    pub(super) fn config_file(&self) -> Result<PathBuf, AppError> {
        write_config(&self.settings, &self.place)
    }

    /// Removes what can be removed. Returns an error for each thing that cannot.
    pub(super) async fn clear(self) -> Vec<AppError> {
        let topics = self.broker.remove(&self.made).await.map_err(AppError::from);
        self.store.close().await;
        let mut removed = vec![topics];
        for database in self.second.iter().chain([&self.own]) {
            removed.push(database.drop_it::<S>().await);
        }
        removed.push(self.place.remove());
        removed.into_iter().filter_map(Result::err).collect()
    }
}

async fn connect<S: Yard>(settings: &Settings) -> Result<S, AppError> {
    open_store_with(settings, |options| (options.create, options.connections_max) = (true, 24), None).await
}
