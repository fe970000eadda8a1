//! The processes of the demo: started from this binary, killed by process id, stopped at the end.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use tokio::process::Child;

use super::stage::Stage;
use crate::common::failed;
use crate::place;
use oncebox::app::AppError;

#[derive(Debug)]
pub(super) struct Process {
    pub(super) name: &'static str,
    args: Vec<String>,
    child: Child,
    log: std::path::PathBuf,
}

impl Process {
    /// Starts `oncebox` with these arguments and the stage's configuration.
    pub(super) fn start(stage: &Stage, name: &'static str, args: &[&str]) -> Result<Self, AppError> {
        let mut all = vec!["--config".to_owned(), stage.config_file.display().to_string()];
        all.extend(args.iter().map(|arg| (*arg).to_owned()));
        let log = stage.place.dir.join("logs").join(format!("{name}.log"));
        let child = spawn(&all, &log)?;
        Ok(Self { name, args: all, child, log })
    }

    /// Sends SIGKILL, waits until the process is gone, and starts it again.
    pub(super) async fn kill_and_restart(&mut self) -> Result<(), AppError> {
        self.child
            .kill()
            .await
            .map_err(|error| AppError::failed(format!("{} cannot be killed: {error}", self.name)))?;
        self.child = spawn(&self.args, &self.log)?;
        Ok(())
    }

    /// Returns an error where the process ended by itself.
    pub(super) fn check(&mut self) -> Result<(), AppError> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => {
                Err(AppError::failed(format!("the process {} ended ({status}); see {}", self.name, self.log.display())))
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// Waits until the process ends. Returns an error unless its exit code is 0.
    pub(super) async fn finished(&mut self) -> Result<(), AppError> {
        let status = self.child.wait().await.map_err(failed)?;
        if status.success() {
            return Ok(());
        }
        Err(AppError::failed(format!("the process {} failed ({status}); see {}", self.name, self.log.display())))
    }

    pub(super) fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// Sends SIGTERM, and SIGKILL where the process does not end in time.
    pub(super) async fn stop(mut self) {
        place::signal(&self.child, rustix::process::Signal::TERM);
        if tokio::time::timeout(Duration::from_secs(10), self.child.wait()).await.is_err() {
            let _ = self.child.kill().await;
        }
    }
}

/// Starts this program. The log is appended to: a process that is started again keeps what the
/// killed one wrote.
fn spawn(args: &[String], log: &Path) -> Result<Child, AppError> {
    let open = || File::options().create(true).append(true).open(log);
    let (out, err) = open()
        .and_then(|out| Ok((out, open()?)))
        .map_err(|error| AppError::failed(format!("{} cannot be written: {error}", log.display())))?;
    place::this_program()?
        .args(args)
        .stdout(out)
        .stderr(err)
        .spawn()
        .map_err(|error| AppError::failed(format!("a process cannot be started: {error}")))
}
