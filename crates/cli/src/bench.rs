//! `oncebox bench`: what the promise costs, as ratios inside one run.
//!
//! A figure with a baseline is measured beside it: the same messages, headers and servers, in
//! turns, in as many rounds as `--rounds` says. A rate by itself says more about the machine than
//! about the code.
//!
//! Promise: a benchmark has its own database, topics, queues and groups, and removes them at the
//! end. No figure comes from the counters of the measured programs.

mod append;
mod bed;
mod consume;
mod crowd;
mod fault;
mod figure;
mod growth;
mod keys;
mod latency;
mod memory;
mod pay;
mod relay;
#[cfg(all(feature = "http", feature = "client"))]
mod served;
mod started;
mod stores;
mod transactional;
mod usage;
mod watched;
mod work;
mod yard;

use std::time::Duration;

use clap::{Args, Subcommand};

pub(super) use self::fault::{PeerArgs, run_peer};

use self::bed::Bed;
use self::figure::Figure;
use self::yard::Yard;
use super::common::{CommonArgs, Output};
use super::place::Place;
use oncebox::app::{AppError, say, stop_on_signals};

/// Which part of the system is measured.
#[derive(Debug, Clone, Subcommand)]
pub(super) enum BenchCommand {
    /// The relay: beside the bare client and reader, and beside a loop that awaits and marks each
    /// row
    Relay(BenchArgs),
    /// Enqueuing: in bulk, row by row, and what a message adds to a business transaction
    Append(BenchArgs),
    /// Handlers: batches of messages in one transaction, and one transaction a message
    Consume(BenchArgs),
    /// From the commit of a message to its effect, at a steady rate
    Latency(BenchArgs),
    /// Faults: what the rest still gets while one thing is stuck, frozen, failed or killed
    Fault(FaultArgs),
    /// Requests with an `Idempotency-Key`: what the typed handler and the layer add, replays, and
    /// claims beside many stored keys
    Http(HttpArgs),
    /// Relay and consumer beside many pending, held and handled messages, many keys and consumers,
    /// each beside the same with few
    Growth(GrowthArgs),
}

/// How much a benchmark measures, and how often.
#[derive(Debug, Clone, Args)]
pub(super) struct BenchArgs {
    /// Messages of one round; the default is what the command needs for a steady figure
    #[arg(long, value_parser = clap::value_parser!(u64).range(100..=10_000_000))]
    messages: Option<u64>,
    /// Bytes of a payload
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=800_000))]
    size: u32,
    /// Keys, scattered over the messages
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    keys: u32,
    /// Rounds; the figure is their median
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
}

/// How much, and beside how much.
#[derive(Debug, Clone, Args)]
pub(super) struct HttpArgs {
    #[command(flatten)]
    bench: BenchArgs,
    /// Stored keys beside which claims are measured, against a fifth of them; 0: leave that out.
    /// Filling the tables takes about a minute for each million
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=100_000_000))]
    stored: u64,
}

/// How much, and how many stuck topics.
#[derive(Debug, Clone, Args)]
pub(super) struct FaultArgs {
    #[command(flatten)]
    bench: BenchArgs,
    /// Topics that nobody made (Kafka) or that have no queue (RabbitMQ), beside which another
    /// topic's messages are timed
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    stuck: u32,
}

/// How much, and beside how much.
#[derive(Debug, Clone, Args)]
pub(super) struct GrowthArgs {
    #[command(flatten)]
    bench: BenchArgs,
    /// Pending rows at most: of 10,000, 100,000, 1,000,000 and 5,000,000 those up to here are
    /// measured. Held rows are as many, at most 200,000. A million takes about half a minute to
    /// enqueue, and a gigabyte of disk
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(0..=5_000_000))]
    pending: u64,
    /// Ids in the inbox at most: of 1,000,000 and 5,000,000 those up to here are measured
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(0..=5_000_000))]
    stored: u64,
}

/// The size of a benchmark.
#[derive(Debug, Clone, Copy)]
struct Load {
    messages: usize,
    size: usize,
    keys: u32,
    rounds: u32,
}

impl BenchCommand {
    fn load(&self) -> Load {
        let (args, usual) = match self {
            Self::Relay(args) => (args, 100_000),
            Self::Append(args) | Self::Consume(args) => (args, 20_000),
            Self::Latency(args) => (args, 2_000),
            Self::Fault(args) => (&args.bench, 50_000),
            Self::Http(args) => (&args.bench, 2_000),
            Self::Growth(args) => (&args.bench, 100_000),
        };
        Load {
            messages: usize::try_from(args.messages.unwrap_or(usual)).unwrap_or(usize::MAX),
            size: args.size as usize,
            keys: args.keys,
            rounds: args.rounds,
        }
    }
}

pub(super) async fn run(command: BenchCommand, common: &CommonArgs, output: Output) -> Result<(), AppError> {
    // Faults are made on purpose here, so their warnings are not logged. Nor is a statement that is
    // slow because the benchmark loads the database.
    let log = if matches!(command, BenchCommand::Fault(_)) { "error" } else { "warn,sqlx::query=error" };
    let mut place = Place::find("bench", common, None, log)?;
    place.settings.publisher.lease = Duration::from_secs(10);
    log.clone_into(&mut place.settings.log.filter);
    oncebox::with_store_type!(&place.settings.database.url.0, |S| on::<S>(&command, place, output).await)
}

async fn on<S: Yard>(command: &BenchCommand, place: Place, output: Output) -> Result<(), AppError> {
    let stop = stop_on_signals()?;
    let mut bed = Bed::<S>::make(place).await?;
    let load = command.load();
    // After a signal, what was made is still removed.
    let measured = stop.run_until_cancelled(measure(command, &mut bed, load)).await;
    let measured = measured.unwrap_or_else(|| Err(AppError::failed("stopped")));
    let left = bed.clear().await;
    for error in &left {
        say("INFO", &error.message);
    }
    figure::print(&measured?, output)?;
    match left.is_empty() {
        true => Ok(()),
        false => Err(AppError::failed("not all that the benchmark made could be removed: see above")),
    }
}

async fn measure<S: Yard>(command: &BenchCommand, bed: &mut Bed<S>, load: Load) -> Result<Vec<Figure>, AppError> {
    match command {
        BenchCommand::Relay(_) => {
            let mut figures = relay::measure(bed, load).await?;
            figures.push(memory::measure(bed, load).await?);
            Ok(figures)
        }
        BenchCommand::Append(_) => append::measure(bed, load).await,
        BenchCommand::Consume(_) => consume::measure(bed, load).await,
        BenchCommand::Latency(_) => latency::measure(bed, load).await,
        BenchCommand::Fault(args) => fault::measure(bed, load, args.stuck).await,
        BenchCommand::Growth(args) => {
            let pending = usize::try_from(args.pending).unwrap_or(usize::MAX);
            growth::measure(bed, load, pending, args.stored).await
        }
        BenchCommand::Http(args) => {
            let mut figures = transactional::measure(bed, load).await?;
            if args.stored > 0 {
                figures.extend(keys::measure(bed, load, args.stored).await?);
            }
            Ok(figures)
        }
    }
}
