//! Real processes, killed by process id.
#![allow(dead_code, clippy::unwrap_used)] // each test binary uses its part

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running program; killed when dropped.
pub(crate) struct Process {
    command: Command,
    log: PathBuf,
    child: Child,
}

impl Process {
    /// Starts it; what it says on stderr is added to the log.
    pub(crate) fn start(mut command: Command, log: &Path) -> Self {
        crate::support::without_settings(&mut command);
        let appended = std::fs::File::options().create(true).append(true).open(log).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(appended);
        let child = command.spawn().unwrap();
        Self { command, log: log.to_owned(), child }
    }

    /// SIGKILL, and gone.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The same command again.
    pub(crate) fn restart(&mut self) {
        self.child = self.command.spawn().unwrap();
    }

    /// SIGKILL, gone, started again.
    pub(crate) fn kill_and_restart(&mut self) {
        self.kill();
        self.restart();
    }

    /// It should run: a program that ended by itself is a failure.
    pub(crate) fn check(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            panic!("{} ended by itself ({status}):\n{}", self.log.display(), self.tail());
        }
    }

    /// SIGTERM; it must end with 0 within the deadline.
    pub(crate) fn stop(mut self, deadline: Duration) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let asked = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(status.success(), "{} ended with {status}:\n{}", self.log.display(), self.tail());
                return;
            }
            assert!(asked.elapsed() < deadline, "{} did not stop:\n{}", self.log.display(), self.tail());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn tail(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
