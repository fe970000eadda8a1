//! `publisher` and `consumer`: the relay and the consumers as processes.

use std::future::Future;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser};
use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use super::config::Settings;
use super::consumer::{HandlersByConsumer, Run};
use super::exit::AppError;
use super::listen::listen;
use super::program::{CommonArgs, run};
use super::publisher::{run_publisher, run_publisher_with};
use super::signals::stop_on_signals;
use crate::observe::Health;
use crate::operation::phased::PhasedEngine;
use crate::store::Store;

/// What the program `publisher` takes as arguments.
#[derive(Debug, Clone, Args)]
pub struct PublisherArgs {
    /// Serve /livez, /readyz and /metrics on this address
    #[arg(long, value_name = "ADDR", value_parser = crate::app::config::parse_address)]
    listen: Option<SocketAddr>,
    /// End with 0 when the outbox is empty (dead and held messages are reported, not waited for).
    /// Beside another publisher, end when nothing is pending
    #[arg(long)]
    until_empty: bool,
}

impl PublisherArgs {
    /// Runs the program `publisher`.
    pub fn run(self, common: &CommonArgs) -> BoxFuture<'_, Result<(), AppError>> {
        // Boxed, so that this code is compiled with the library and not again in each program.
        Box::pin(async move {
            let (settings, health, stop) = start("publisher", self.listen, common).await?;
            run_publisher(&settings, self.until_empty, health, stop).await
        })
    }

    /// Runs the program and, beside it, the recovery of phased operations; see
    /// [`run_publisher_with`].
    pub(crate) async fn run_with<S, F, M>(self, common: &CommonArgs, operations: F) -> Result<(), AppError>
    where
        S: Store,
        F: FnOnce(S) -> M,
        M: Future<Output = Result<PhasedEngine, AppError>>,
    {
        let (settings, health, stop) = start("publisher", self.listen, common).await?;
        run_publisher_with(&settings, operations, self.until_empty, health, stop).await
    }
}

/// What the program `consumer` takes as arguments.
#[derive(Debug, Clone, Args)]
pub struct ConsumerArgs {
    /// Serve /livez, /readyz and /metrics on this address
    #[arg(long, value_name = "ADDR", value_parser = crate::app::config::parse_address)]
    listen: Option<SocketAddr>,
    /// End with 0 when nothing came for this long after having caught up, for example 2s
    #[arg(long, value_name = "TIME", value_parser = crate::app::config::parse_duration)]
    until_idle: Option<Duration>,
    /// Take an id rule (id, id_epoch) other than the one that a consumer started with: what was
    /// handled under the old rule is not known under the new one. A process that still runs with
    /// the old rule ends within ten seconds
    #[arg(long)]
    accept: bool,
}

impl ConsumerArgs {
    /// Runs the program with the handlers of the configuration.
    pub fn run(self, common: &CommonArgs) -> BoxFuture<'_, Result<(), AppError>> {
        // Boxed, so that this code is compiled with the library and not again in each program.
        Box::pin(async move {
            let (settings, health, stop) = start("consumer", self.listen, common).await?;
            self.of(&settings, health, stop).configured().await
        })
    }

    /// Runs the program with handlers in Rust.
    pub async fn run_with<S: Store>(
        self,
        common: &CommonArgs,
        handlers: HandlersByConsumer<S>,
    ) -> Result<(), AppError> {
        let (settings, health, stop) = start("consumer", self.listen, common).await?;
        self.of(&settings, health, stop).with(handlers).await
    }

    fn of(self, settings: &Settings, health: Health, stop: CancellationToken) -> Run<'_> {
        Run { settings, until_idle: self.until_idle, accept_id_rule: self.accept, health, stop }
    }
}

/// Starts a program of this name: reads the settings, listens for signals, and serves health and
/// metrics where that is asked for.
pub fn start<'a>(
    program: &'static str,
    address: Option<SocketAddr>,
    common: &'a CommonArgs,
) -> BoxFuture<'a, Result<(Settings, Health, CancellationToken), AppError>> {
    // Boxed, so that this code is compiled with the library and not again in each program.
    Box::pin(async move {
        let settings = common.load(address)?.settings;
        let stop = stop_on_signals()?;
        let health = Health::default();
        if let Some(address) = settings.http.listen {
            listen(address, program, health.clone(), stop.clone()).await?;
        }
        Ok((settings, health, stop))
    })
}

/// Relays committed messages from the outbox to the broker, in order per key, losing none.
///
/// Runs until SIGTERM, SIGINT or SIGHUP, then finishes what is in flight and exits with 0; a second
/// signal ends it at once. Several may run: one works, the others stand by.
#[derive(Debug, Parser)]
#[command(name = "publisher", version)]
struct PublisherProgram {
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    args: PublisherArgs,
}

/// Consumes messages and commits their effects exactly once, with the handlers that the
/// configuration names.
///
/// Runs until SIGTERM, SIGINT or SIGHUP, then finishes or hands back what runs and exits with 0; a
/// second signal ends it at once.
#[derive(Debug, Parser)]
#[command(name = "consumer", version)]
struct ConsumerProgram {
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    args: ConsumerArgs,
}

/// The command lines of the programs `publisher` and `consumer`, for completions.
#[must_use]
pub fn program_commands() -> [clap::Command; 2] {
    [PublisherProgram::command(), ConsumerProgram::command()]
}

/// The program `publisher`; its `main` returns this. It has no operations and recovers none (O22).
pub fn plain_publisher() -> ExitCode {
    let program = PublisherProgram::parse();
    run(program.args.run(&program.common))
}

/// The program `publisher` that also recovers phased operations, for the flows of the engine that
/// `operations` makes. Your own `main` returns this; build it with the same flows as the service
/// (O22). It reads the same flags, environment and file.
pub fn publisher<S, F, M>(operations: F) -> ExitCode
where
    S: Store,
    F: FnOnce(S) -> M,
    M: Future<Output = Result<PhasedEngine, AppError>>,
{
    let program = PublisherProgram::parse();
    run(program.args.run_with(&program.common, operations))
}

/// The program `consumer` with the handlers of the configuration; its `main` returns this.
pub fn configured_consumer() -> ExitCode {
    let program = ConsumerProgram::parse();
    run(program.args.run(&program.common))
}

/// The program `consumer` with handlers in Rust; your own `main` returns this
/// (`examples/consumer.rs`). It reads the same flags, environment and file. A program with more
/// commands uses [`CommonArgs`] and [`ConsumerArgs`] in its own command line instead
/// (`examples/payments`).
pub fn consumer<S: Store>(handlers: HandlersByConsumer<S>) -> ExitCode {
    let program = ConsumerProgram::parse();
    run(program.args.run_with(&program.common, handlers))
}
