//! A directory, settings and child processes for `demo` and `bench`.
//!
//! Promise: children of `demo` and `bench` take their settings from their command line and files,
//! not from `ONCEBOX_` variables, and none of them outlives its parent. A new file that may hold
//! passwords is readable by its owner only.

use std::io::{PipeReader, PipeWriter};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

use super::common::{CommonArgs, failed};
use oncebox::app::config::{Secret, Settings};
use oncebox::app::{AppError, start_logging};

/// A directory, settings, and a tag for names that nobody else has. Nothing of it is made yet.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) settings: Settings,
    pub(super) dir: PathBuf,
    /// Nobody named the directory, so it is removed in the end.
    dir_is_ours: bool,
    pub(super) tag: String,
}

impl Place {
    /// Reads the settings from the command line alone: the environment or a file may name a
    /// database that others work with. If it names no database, that is a file in `dir`; so is the
    /// broker. Without `dir`, that is one below the system's temporary directory. `log` is the
    /// filter of this process's log, unless `RUST_LOG` names one.
    pub(super) fn find(what: &str, common: &CommonArgs, dir: Option<&Path>, log: &str) -> Result<Self, AppError> {
        if common.config.is_some() && common.config != std::env::var_os("ONCEBOX_CONFIG").map(PathBuf::from) {
            return Err(AppError::usage("this command reads no configuration file: give it --database and --broker"));
        }
        let tag = format!("{:08x}", fastrand::u32(..));
        let ours = std::env::temp_dir().join(format!("oncebox-{what}-{tag}"));
        let absolute = std::path::absolute(dir.unwrap_or(&ours));
        let absolute = absolute.map_err(failed)?;
        let mut settings = Settings::default();
        settings.log.format = common.log_format.unwrap_or_default();
        start_logging(settings.log.format, log).map_err(AppError::usage)?;
        settings.database.url = common.database.clone().map_or_else(|| file_url(&absolute, "payments"), Secret);
        let broker = || format!("embedded://{}", absolute.join(format!("broker-{tag}.db")).display());
        settings.broker.url = Secret(common.broker.clone().unwrap_or_else(broker));
        settings.broker.kafka.create_topics = true;
        Ok(Self { settings, dir: absolute, dir_is_ours: dir.is_none(), tag })
    }

    /// Removes the directory, unless somebody named it.
    pub(super) fn remove(&self) -> Result<(), AppError> {
        if !self.dir_is_ours {
            return Ok(());
        }
        std::fs::remove_dir_all(&self.dir)
            .map_err(|error| AppError::failed(format!("{} cannot be removed: {error}", self.dir.display())))
    }
}

/// Makes a directory that only its owner can enter. One that is there keeps its mode.
pub(super) fn private_directory(dir: &Path) -> Result<(), AppError> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|error| AppError::failed(format!("{} cannot be made: {error}", dir.display())))
}

/// The URL of a SQLite file with this name in `dir`.
pub(super) fn file_url(dir: &Path, name: &str) -> Secret {
    Secret(format!("sqlite://{}", dir.join(format!("{name}.db")).display()))
}

/// The pipe that all children have as stdin. Only this process can write into it, and it never
/// does: so a child reads its end when this process has ended, also by SIGKILL.
static TIE: LazyLock<std::io::Result<(PipeReader, PipeWriter)>> = LazyLock::new(std::io::pipe);

/// Ends this process, which is a child of `demo` or `bench`, when its parent has ended: nobody
/// would stop it then.
pub(super) fn end_with_parent() {
    std::thread::spawn(|| {
        let _its_end = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        #[allow(clippy::exit)]
        std::process::exit(1);
    });
}

/// A command that starts this program as a child, without the `ONCEBOX_` variables of the
/// environment.
pub(super) fn this_program() -> Result<Command, AppError> {
    let this = std::env::current_exe()
        .map_err(|error| AppError::failed(format!("the path of this program is not known: {error}")))?;
    let mut command = Command::new(this);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().to_ascii_uppercase().starts_with("ONCEBOX_") {
            command.env_remove(name);
        }
    }
    let (tie, _) = TIE.as_ref().map_err(failed)?;
    // A parent that ends in order, also after an error, leaves no child behind.
    command.stdin(tie.try_clone().map_err(failed)?).kill_on_drop(true);
    Ok(command)
}

/// Sends a signal to a child, unless it has ended.
pub(super) fn signal(child: &Child, signal: Signal) {
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    if let Some(pid) = pid {
        let _it_may_end_just_now = kill_process(pid, signal);
    }
}

/// Writes the settings, passwords included, to a file that only its owner can read: a command line
/// can be read by everybody. Its name has the tag of the place, because a directory that the user
/// named may hold the settings of others. A benchmark writes its file more than once.
pub(super) fn write_config(settings: &Settings, place: &Place) -> Result<PathBuf, AppError> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let text = toml::to_string(settings).map_err(failed)?;
    let file = place.dir.join(format!("oncebox-{}.toml", place.tag));
    let mut options = std::fs::File::options();
    options
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&file)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(|error| AppError::failed(format!("{} cannot be written: {error}", file.display())))?;
    Ok(file)
}
