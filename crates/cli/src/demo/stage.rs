//! The stage of a demo: a directory, a database, names of its own, and the settings that all its
//! processes share.

use std::path::PathBuf;
use std::time::Duration;

use crate::common::AnyBroker;
use crate::ground::{Ground, OwnDatabase};
use crate::place::{Place, private_directory, write_config};
use oncebox::app::config::Settings;
use oncebox::app::{AppError, open_broker, say};
use oncebox::broker::Subscription;
use oncebox::error::redact;

/// Everything that belongs to this demo only.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) place: Place,
    database: OwnDatabase,
    /// Also removes what it made: on RabbitMQ it knows the queue of its tap.
    pub(super) broker: AnyBroker,
    pub(super) config_file: PathBuf,
    pub(super) settings: Settings,
    pub(super) names: Names,
}

/// Names with a tag of their own, so that several demos may run on one server.
#[derive(Debug, Clone)]
pub(super) struct Names {
    pub(super) tag: String,
}

impl Names {
    pub(super) fn topic(&self) -> String {
        format!("demo-{}-payments", self.tag)
    }

    pub(super) fn consumer(&self, role: &str) -> String {
        format!("demo-{}-{role}", self.tag)
    }

    pub(super) fn payments(&self) -> String {
        format!("demo_{}_payment", self.tag)
    }

    pub(super) fn ledger(&self) -> String {
        format!("demo_{}_ledger_entry", self.tag)
    }

    /// What the two consumers read.
    pub(super) fn subscriptions(&self) -> [Subscription; 2] {
        ["ledger", "receipts"].map(|role| Subscription::new(self.consumer(role), vec![self.topic()]))
    }

    pub(super) fn receipt(&self, payment: &str) -> String {
        format!("demo_{}_receipt_{payment}", self.tag)
    }
}

impl Stage {
    /// Makes the directory and the database. Where it fails, it leaves neither behind, but for a
    /// directory that the user named.
    pub(super) async fn set<S: Ground>(place: Place) -> Result<Self, AppError> {
        let made = OwnDatabase::make::<S>(&place, format!("oncebox_demo_{}", place.tag)).await;
        let database = made.inspect_err(|_| _ = place.remove())?;
        let mut settings = place.settings.clone();
        settings.database.url = database.url.clone();
        // The viewer waits for each takeover after a kill, so the lease is short here.
        settings.publisher.lease = Duration::from_secs(2);
        settings.broker.embedded.session_timeout = Duration::from_secs(2);
        settings.broker.kafka.session_timeout = Duration::from_secs(6);
        settings.email.directory = place.dir.join("emails");
        settings.shutdown_grace = Duration::from_secs(5);
        let made = async {
            private_directory(&place.dir.join("logs"))?;
            Ok((write_config(&settings, &place)?, open_broker(&settings, None).await?))
        };
        match made.await {
            Ok((config_file, broker)) => {
                let names = Names { tag: place.tag.clone() };
                Ok(Self { place, database, broker, config_file, settings, names })
            }
            Err(error) => {
                if let Err(left) = database.drop_it::<S>().await.and(place.remove()) {
                    say("INFO", &left.message);
                }
                Err(error)
            }
        }
    }

    /// Removes topic, groups or queues, database and files, and reports what cannot be removed.
    pub(super) async fn clear<S: Ground>(&self) {
        if let Err(error) = self.broker.remove(&self.names.subscriptions()).await {
            let topic = self.names.topic();
            say("INFO", &format!("the topic {topic} and what reads it could not be removed: {error}"));
        }
        if let Err(error) = self.database.drop_it::<S>().await {
            say("INFO", &format!("the database could not be dropped: {}", error.message));
        }
        if let Err(error) = self.place.remove() {
            say("INFO", &error.message);
        }
    }

    /// Prints where everything is: at the start, for whoever must remove it by hand, and at the end
    /// where it stays.
    pub(super) fn tell(&self) {
        let (files, database) = (self.place.dir.display(), redact(&self.database.url.0));
        let topic = self.names.topic();
        let [ledger, receipts] = ["ledger", "receipts"].map(|role| self.names.consumer(role));
        say(
            "INFO",
            &format!("logs and files: {files}; database: {database}; topic: {topic}; consumers: {ledger}, {receipts}"),
        );
    }
}
