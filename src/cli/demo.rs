//! `oncebox demo`: the promise, shown with kills.
//!
//! Payments are taken (business row and message in one transaction), relayed, and consumed by a ledger and an e-mail consumer,
//! each in a process of its own; deliveries are repeated on purpose; publisher and consumers are killed with SIGKILL in the
//! middle and started again. The verdict is counted from tables, files and broker by `count`, which shares nothing with the
//! counters of the programs.

mod count;
mod processes;
mod roles;
mod show;
mod stage;

use std::path::PathBuf;

use clap::Args;

use super::common::{CommonArgs, Output};
use crate::app::{AppError, stop_on_signals, store_kind};

pub(super) use roles::{Role, run_role};

/// What the demo shows.
#[derive(Debug, Clone, Args)]
pub(super) struct DemoArgs {
    /// Payments to take
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    messages: u64,
    /// How often a process is killed with SIGKILL
    #[arg(long, default_value_t = 6)]
    kills: u32,
    /// How many percent of the messages are put into the broker a second time
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=1_000))]
    duplicates: u32,
    /// Where files go; a directory of its own below the system's temporary one by default
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Leave files, tables and topics behind
    #[arg(long)]
    keep: bool,
    /// Show no progress
    #[arg(long)]
    no_progress: bool,
}

pub(super) async fn run(args: DemoArgs, common: &CommonArgs, output: Output) -> Result<(), AppError> {
    let stage = stage::Stage::set(&args, common)?;
    let kind = store_kind(&stage.settings.database.url.0)?;
    // Told to stop, the show is dropped, and its processes with it.
    let stop = stop_on_signals().map_err(|error| AppError::failed(error.to_string()))?;
    let show = async {
        match kind {
            #[cfg(feature = "sqlite")]
            "sqlite" => show::show::<crate::store::sqlite::SqliteStore>(&args, &stage).await,
            #[cfg(feature = "postgres")]
            "postgres" => show::show::<crate::store::postgres::PostgresStore>(&args, &stage).await,
            #[cfg(feature = "mysql")]
            "mysql" => show::show::<crate::store::mysql::MySqlStore>(&args, &stage).await,
            kind => Err(AppError::usage(format!(
                "this program was built without the feature `{kind}` that the database URL needs"
            ))),
        }
    };
    let shown: Result<count::Verdict, AppError> = tokio::select! {
        shown = show => shown,
        () = stop.cancelled() => Err(AppError::failed("interrupted: nothing was counted")),
    };
    let verdict = match shown {
        Ok(verdict) => verdict,
        Err(error) => {
            eprintln!("logs and files: {}", stage.dir.display());
            return Err(error);
        }
    };
    verdict.print(output)?;
    if verdict.agrees() {
        stage.clear(args.keep);
        Ok(())
    } else {
        eprintln!("logs and files: {}", stage.dir.display());
        Err(AppError::failed("the counts do not agree"))
    }
}
