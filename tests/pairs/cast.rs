//! Real processes of the programs, killed by process id.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running program; killed when dropped.
pub(crate) struct Process {
    program: &'static str,
    config: PathBuf,
    log: PathBuf,
    child: Child,
}

impl Process {
    pub(crate) fn start(program: &'static str, config: &Path, log: &Path) -> Self {
        let child = spawn(program, config, log);
        Self { program, config: config.to_owned(), log: log.to_owned(), child }
    }

    /// SIGKILL, gone, started again.
    pub(crate) fn kill_and_restart(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = spawn(self.program, &self.config, &self.log);
    }

    /// It should run: a program that ended by itself is a failure.
    pub(crate) fn check(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            panic!("{} ended by itself ({status}):\n{}", self.program, tail(&self.log));
        }
    }

    /// SIGTERM; it must end with 0 within the deadline.
    pub(crate) fn stop(mut self, deadline: Duration) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let asked = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(status.success(), "{} ended with {status}:\n{}", self.program, tail(&self.log));
                return;
            }
            assert!(asked.elapsed() < deadline, "{} did not stop:\n{}", self.program, tail(&self.log));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(program: &'static str, config: &Path, log: &Path) -> Child {
    let binary = match program {
        "publisher" => env!("CARGO_BIN_EXE_publisher"),
        "consumer" => env!("CARGO_BIN_EXE_consumer"),
        other => panic!("no program {other}"),
    };
    let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
    Command::new(binary)
        .arg("--config")
        .arg(config)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}

fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}
