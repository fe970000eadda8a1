//! `oncebox demo`: shows the promise while processes are killed.
//!
//! Payments are taken (business row and message in one transaction), relayed, and consumed by a
//! ledger and an e-mail consumer, each in a process of its own; deliveries are repeated on purpose;
//! publisher and consumers are killed with SIGKILL in the middle and started again. The verdict is
//! counted from tables, files and broker by `count`, which shares nothing with the counters of the
//! programs.

mod count;
mod processes;
mod roles;
mod show;
mod stage;
mod tables;

use std::path::PathBuf;

use clap::Args;

use super::common::{CommonArgs, Output};
use super::place::Place;
use oncebox::app::{AppError, stop_on_signals};

pub(super) use roles::{RoleArgs, run_role};

/// What the demo shows.
#[derive(Debug, Clone, Args)]
pub(super) struct DemoArgs {
    /// How many payments are taken, at most 1,000,000
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    messages: u64,
    /// How often a process is killed with SIGKILL, at most 1,000 times
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(0..=1_000))]
    kills: u32,
    /// How many messages are put into the broker again, in percent of all, at most 1,000
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=1_000))]
    duplicates: u32,
    /// Where files go, beside those that are there; a directory of its own below the system's
    /// temporary one by default
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Leave files, database and topic behind; a demo that fails does so too
    #[arg(long)]
    keep: bool,
    /// Show no progress while the demo runs
    #[arg(long)]
    no_progress: bool,
}

pub(super) async fn run(args: DemoArgs, common: &CommonArgs, output: Output) -> Result<(), AppError> {
    let place = Place::find("demo", common, args.dir.as_deref(), "warn")?;
    oncebox::with_store_type!(&place.settings.database.url.0, |S| on::<S>(&args, place, output).await)
}

async fn on<S: tables::Tables>(args: &DemoArgs, place: Place, output: Output) -> Result<(), AppError> {
    // At a signal the show is dropped, and its processes with it.
    let stop = stop_on_signals()?;
    let stage = stage::Stage::set::<S>(place).await?;
    stage.tell();
    let shown = stop.run_until_cancelled(show::show::<S>(args, &stage)).await;
    let (done, left_behind) = match shown {
        None => (Err(AppError::failed("interrupted: nothing was counted")), args.keep),
        Some(Err(error)) => (Err(error), true),
        Some(Ok(verdict)) => {
            // Where it cannot be printed, something still stays, or is removed.
            let printed = verdict.print(output);
            let agrees = verdict.agrees();
            let done = if agrees { printed } else { Err(AppError::failed("the counts do not agree")) };
            (done, args.keep || !agrees)
        }
    };
    if left_behind {
        stage.tell();
    } else {
        stage.clear::<S>().await;
    }
    done
}
