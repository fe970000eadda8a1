//! A consumer in a separate process, to be frozen or killed while its transactions are open.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use clap::Args;
use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;
use tokio::sync::Notify;

use crate::bench::bed::Bed;
use crate::bench::consume::Effect;
use crate::bench::work::KIND;
use crate::bench::yard::Yard;
use crate::common::CommonArgs;
use crate::place;
use oncebox::app::config::Settings;
use oncebox::app::{AppError, HandlersByConsumer, run_consumers_with, stop_on_signals};
use oncebox::error::HandlerError;
use oncebox::message::Message;
use oncebox::observe::Health;
use oncebox::{HandlerTx, Handlers, MessageHandler};

/// What the process prints once its transactions stay open.
const HALTED: &str = "halted";
/// How long the process may take until it prints that.
const HALT_MAX: Duration = Duration::from_secs(120);
/// After a silence of this length Kafka gives the partitions to another consumer. By default its
/// servers allow no less.
const SESSION: Duration = Duration::from_secs(6);

/// A process of the benchmark: it handles messages; from a given number on it leaves its
/// transactions open, and says so.
#[derive(Debug, Clone, Args)]
pub(crate) struct PeerArgs {
    /// The name that the consumer has in inbox and broker
    #[arg(long)]
    name: String,
    /// The topic that the consumer reads
    #[arg(long)]
    topic: String,
    /// The message at which it halts, counted from 1
    #[arg(long)]
    halt: usize,
}

pub(crate) async fn run_peer(args: PeerArgs, common: &CommonArgs) -> Result<(), AppError> {
    let settings = common.load(None)?.settings;
    oncebox::with_store_type!(&settings.database.url.0, |S| play::<S>(args, settings).await)
}

async fn play<S: Yard>(args: PeerArgs, mut settings: Settings) -> Result<(), AppError> {
    let PeerArgs { name, topic, halt } = args;
    settings.broker.kafka.session_timeout = SESSION;
    let halted = Arc::new(Notify::new());
    let halting = Halting { begun: AtomicUsize::new(0), halt, halted: Arc::clone(&halted) };
    let handlers = Handlers::<S>::new().on(KIND, halting);
    let handlers = HandlersByConsumer::new().consumer(&name, [topic], handlers);
    let stop = stop_on_signals()?;
    let consume = run_consumers_with::<S>(&settings, handlers, Health::default(), stop);
    let say = async {
        halted.notified().await;
        data!("{HALTED}");
        std::future::pending().await
    };
    tokio::select! {
        ended = consume => ended,
        said = say => said,
    }
}

struct Halting {
    begun: AtomicUsize,
    halt: usize,
    halted: Arc<Notify>,
}

#[async_trait]
impl<S: Yard> MessageHandler<S> for Halting {
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError> {
        Effect.handle(message, tx).await?;
        if self.begun.fetch_add(1, Ordering::Relaxed) + 1 < self.halt {
            return Ok(());
        }
        self.halted.notify_one();
        std::future::pending().await
    }
}

/// The process of the consumer. It is killed when this is dropped.
pub(super) struct Peer(Child);

impl Peer {
    /// Starts the process and waits until its transactions stay open.
    pub(super) async fn halted<S: Yard>(bed: &Bed<S>, name: &str, topic: &str, halt: usize) -> Result<Self, AppError> {
        let mut child = place::this_program()?
            .arg("--config")
            .arg(bed.config_file()?)
            .args(["run", "peer", "--name", name, "--topic", topic, "--halt", &halt.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| AppError::failed(format!("a consumer cannot be started: {error}")))?;
        let stdout = child.stdout.take().ok_or_else(|| AppError::failed("it has no output"))?;
        let mut lines = BufReader::new(stdout).lines();
        match tokio::time::timeout(HALT_MAX, lines.next_line()).await {
            Ok(Ok(Some(line))) if line == HALTED => Ok(Self(child)),
            Ok(_) => Err(AppError::failed("a consumer ended before it halted: see its errors above")),
            Err(_) => Err(AppError::failed(format!("a consumer had no work within {HALT_MAX:?}"))),
        }
    }

    /// Sends SIGSTOP: the process stays and does nothing.
    pub(super) fn freeze(&self) {
        place::signal(&self.0, Signal::STOP);
    }

    /// Sends SIGKILL and waits until the process is gone.
    pub(super) async fn kill(mut self) -> Result<(), AppError> {
        let killed = self.0.kill().await;
        killed.map_err(|error| AppError::failed(format!("a consumer cannot be killed: {error}")))
    }
}
