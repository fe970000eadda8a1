//! A directory with the settings of one test, and the programs and examples that run with them.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use oncebox::NewMessage;
use oncebox::app::config::{ConsumerSettings, Secret, Settings};
use oncebox::broker::Broker;
use oncebox::message::Arrived;

use crate::process::Process;
use crate::support::{eventually, unique, without_settings};

/// Long enough for a busy machine and a rebalance of Kafka; a condition that holds ends the wait at
/// once.
pub(crate) const SOON: Duration = Duration::from_secs(120);

/// The two programs of the stage.
pub(crate) const ONCEBOX: &str = env!("CARGO_BIN_EXE_oncebox");
pub(crate) const PUBLISHER: &str = env!("CARGO_BIN_EXE_publisher");

pub(crate) struct Stage {
    dir: tempfile::TempDir,
    pub(crate) settings: Settings,
    /// A name that no other test has; topics and groups are shared on a real broker.
    pub(crate) tag: String,
}

impl Stage {
    /// SQLite and the embedded broker in a directory, unless URLs are given.
    pub(crate) fn new(database: Option<&str>, broker: Option<&str>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = |scheme: &str, name: &str| format!("{scheme}://{}", dir.path().join(name).display());
        let mut settings = Settings::default();
        settings.database.url = Secret(database.map_or_else(|| file("sqlite", "service.db"), str::to_owned));
        settings.broker.url = Secret(broker.map_or_else(|| file("embedded", "broker.db"), str::to_owned));
        settings.broker.kafka.create_topics = true;
        // Takeovers after a kill are what the test waits for.
        settings.broker.kafka.session_timeout = Duration::from_secs(6);
        settings.broker.embedded.session_timeout = Duration::from_secs(2);
        settings.publisher.lease = Duration::from_secs(2);
        settings.email.directory = dir.path().join("emails");
        Self { dir, settings, tag: unique("examples") }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A program or example with the settings of this stage, and those of its consumer where it is
    /// one.
    pub(crate) fn command(&self, binary: &str, args: &[&str], consumer: Option<ConsumerSettings>) -> Command {
        let settings = Settings { consumer: consumer.into_iter().collect(), ..self.settings.clone() };
        let config = self.path(&format!("{}.toml", unique("config")));
        std::fs::write(&config, toml::to_string(&settings).unwrap()).unwrap();
        let mut command = Command::new(binary);
        command.args(args).env("ONCEBOX_CONFIG", config).env("NO_PROXY", "127.0.0.1").current_dir(self.dir.path());
        command
    }

    /// Runs it to its end, which must be a good one; gives what it printed.
    pub(crate) fn run(&self, binary: &str, args: &[&str]) -> String {
        finished(self.command(binary, args, None))
    }

    /// Starts it with a log of this name.
    pub(crate) fn start(&self, mut command: Command, log: &str) -> Process {
        command.env("RUST_BACKTRACE", "1");
        Process::start(command, &self.path(&format!("{log}.log")))
    }

    /// What stands in a topic.
    pub(crate) async fn published(&self, topic: &str) -> Vec<Arrived> {
        self.broker().await.read_all(topic).await.unwrap()
    }

    pub(crate) async fn broker(&self) -> Arc<dyn Broker> {
        oncebox::app::open_broker(&self.settings, None).await.unwrap()
    }
}

/// Runs a command to its end, which must be a good one; gives what it printed.
pub(crate) fn finished(mut command: Command) -> String {
    without_settings(&mut command);
    let output = command.output().unwrap();
    // Its arguments may hold a password.
    let (program, said) = (command.get_program(), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program:?}: {}: {said}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// The same messages once more: the same ids, the same bytes.
pub(crate) fn repeated(arrived: &[Arrived]) -> Vec<NewMessage> {
    let again = |one: &Arrived| {
        let payload = String::from_utf8(one.payload.clone().unwrap()).unwrap();
        let message = NewMessage::text(&one.topic, one.kind.clone().unwrap(), payload);
        let key = String::from_utf8(one.key.clone().unwrap()).unwrap();
        message.with_key(key).with_id(one.id.as_deref().unwrap().parse().unwrap())
    };
    arrived.iter().map(again).collect()
}

/// Waits until the answer is yes.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut ask: impl FnMut() -> F) {
    eventually(what, SOON, || {
        let asked = ask();
        async move { asked.await.then_some(()) }
    })
    .await;
}
