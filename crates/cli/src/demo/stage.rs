//! The stage of a demo: a directory, a database, names of its own, and the settings that all its
//! processes share.

use std::path::PathBuf;

use super::DemoArgs;
use crate::common::CommonArgs;
use crate::ground::{Ground, OwnDatabase};
use crate::place::{self, private_directory};
use oncebox::app::AppError;
use oncebox::app::config::{Settings, Span};
use oncebox::error::redact;

/// Everything that belongs to this demo only.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) dir: PathBuf,
    /// The demo made the directory, so it removes it.
    dir_is_ours: bool,
    database: OwnDatabase,
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

    pub(super) fn receipt(&self, payment: &str) -> String {
        format!("demo_{}_receipt_{payment}", self.tag)
    }
}

/// Settings and directory, before the database is made.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) settings: Settings,
    dir: PathBuf,
    dir_is_ours: bool,
    tag: String,
}

impl Place {
    pub(super) fn find(args: &DemoArgs, common: &CommonArgs) -> Result<Self, AppError> {
        let tag = format!("{:08x}", fastrand::u32(..));
        let (dir, dir_is_ours) = match &args.dir {
            Some(dir) => (dir.clone(), false),
            None => (std::env::temp_dir().join(format!("oncebox-demo-{tag}")), true),
        };
        private_directory(&dir)?;
        private_directory(&dir.join("logs"))?;
        let dir = std::path::absolute(&dir).map_err(|error| AppError::failed(error.to_string()))?;
        let mut settings = place::settings_in(common, &dir, "warn")?;
        // The viewer waits for each takeover after a kill, so the lease is short here.
        settings.publisher.lease = Span::seconds(2);
        settings.broker.embedded.session_timeout = Span::seconds(2);
        settings.broker.kafka.session_timeout = Span::seconds(6);
        settings.broker.kafka.create_topics = true;
        settings.email.directory = dir.join("emails");
        settings.shutdown_grace = Span::seconds(5);
        Ok(Self { settings, dir, dir_is_ours, tag })
    }
}

impl Stage {
    pub(super) async fn set<S: Ground>(place: Place) -> Result<Self, AppError> {
        let Place { mut settings, dir, dir_is_ours, tag } = place;
        let database = match OwnDatabase::make::<S>(&settings, format!("oncebox_demo_{tag}"), &dir).await {
            Ok(database) => database,
            Err(error) => {
                if dir_is_ours {
                    let _ = std::fs::remove_dir_all(&dir);
                }
                return Err(error);
            }
        };
        settings.database.url = database.url.clone();
        let config_file = place::write_config(&settings, &dir)?;
        Ok(Self { dir, dir_is_ours, database, config_file, settings, names: Names { tag } })
    }

    /// Removes database and files, and reports what cannot be removed.
    pub(super) async fn clear<S: Ground>(&self) {
        if let Err(error) = self.database.drop::<S>().await {
            eprintln!("the database {} could not be dropped: {error}", self.database.name);
        }
        if self.dir_is_ours
            && let Err(error) = std::fs::remove_dir_all(&self.dir)
        {
            eprintln!("{} could not be removed: {error}", self.dir.display());
        }
    }

    /// Prints where everything is that stays.
    pub(super) fn leave(&self) {
        eprintln!("logs and files: {}; database: {}", self.dir.display(), redact(&self.database.url.0));
    }
}
