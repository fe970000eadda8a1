//! The stage of a demo: a directory, names of its own, and the settings that all its processes share.

use std::path::{Path, PathBuf};

use super::DemoArgs;
use crate::app::AppError;
use crate::app::config::{Secret, Settings, Span};
use crate::cli::common::CommonArgs;

/// Everything that is this demo's own.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) dir: PathBuf,
    /// Made by us, so removed by us.
    dir_is_ours: bool,
    pub(super) settings: Settings,
    pub(super) names: Names,
}

/// Names that no other demo has, so that several may run on one server.
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

impl Stage {
    pub(super) fn set(args: &DemoArgs, common: &CommonArgs) -> Result<Self, AppError> {
        let tag = format!("{:08x}", fastrand::u32(..));
        let (dir, dir_is_ours) = match &args.dir {
            Some(dir) => (dir.clone(), false),
            None => (std::env::temp_dir().join(format!("oncebox-demo-{tag}")), true),
        };
        std::fs::create_dir_all(dir.join("logs"))
            .map_err(|error| AppError::failed(format!("{} cannot be made: {error}", dir.display())))?;
        let dir = std::path::absolute(&dir).map_err(|error| AppError::failed(error.to_string()))?;
        let mut settings = common.load(None)?.settings;
        if common.database.is_none() && std::env::var_os("ONCEBOX_DATABASE__URL").is_none() && common.config.is_none() {
            settings.database.url = Secret(format!("sqlite://{}", dir.join("payments.db").display()));
        }
        if common.broker.is_none() && std::env::var_os("ONCEBOX_BROKER__URL").is_none() && common.config.is_none() {
            settings.broker.url = Secret(format!("embedded://{}", dir.join("broker.db").display()));
        }
        // Takeovers after a kill are what the viewer waits for: short here, longer by default.
        settings.publisher.lease = Span::seconds(2);
        settings.broker.embedded.session_timeout = Span::seconds(2);
        settings.broker.kafka.session_timeout = Span::seconds(6);
        settings.broker.kafka.create_topics = true;
        settings.email.directory = dir.join("emails");
        settings.shutdown_grace = Span::seconds(5);
        let stage = Self { dir, dir_is_ours, settings, names: Names { tag } };
        stage.write_config()?;
        Ok(stage)
    }

    /// The processes read a file: URLs with passwords do not stand in their command lines.
    fn write_config(&self) -> Result<(), AppError> {
        let text = toml::to_string(&self.settings).map_err(|error| AppError::failed(error.to_string()))?;
        let file = self.config_file();
        std::fs::write(&file, text)
            .and_then(|()| private(&file))
            .map_err(|error| AppError::failed(format!("{} cannot be written: {error}", file.display())))
    }

    pub(super) fn config_file(&self) -> PathBuf {
        self.dir.join("oncebox.toml")
    }

    pub(super) fn clear(&self, keep: bool) {
        if keep {
            eprintln!("files: {}", self.dir.display());
        } else if self.dir_is_ours
            && let Err(error) = std::fs::remove_dir_all(&self.dir)
        {
            eprintln!("{} could not be removed: {error}", self.dir.display());
        }
    }
}

/// It may hold passwords.
fn private(file: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o600))
}
