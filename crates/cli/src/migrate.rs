//! `oncebox migrate`: up, status, print. Programs never migrate by themselves.

use clap::Subcommand;

use super::common::{CommonArgs, Output, require_schema};
use oncebox::app::config::Settings;
use oncebox::app::{AppError, open_store_with};
use oncebox::error::redact;
use oncebox::store::{Schema, Store};

/// What to do with the tables.
#[derive(Debug, Subcommand)]
pub(super) enum MigrateCommand {
    /// Apply what is missing; makes a SQLite file that is not there
    Up,
    /// Show which migrations are known and applied; exit code 3 where the schema does not fit
    Status,
    /// Print the SQL of all migrations, for those who apply it themselves
    Print,
}

pub(super) async fn run(command: &MigrateCommand, common: &CommonArgs, output: Output) -> Result<(), AppError> {
    let settings = common.load(None)?.settings;
    oncebox::with_store_type!(&settings.database.url.0, |S| on::<S>(command, &settings, output).await)
}

async fn on<S: Store>(command: &MigrateCommand, settings: &Settings, output: Output) -> Result<(), AppError> {
    if let MigrateCommand::Print = command {
        data!("{}", <S as Schema>::script().trim_end());
        return Ok(());
    }
    let makes_it = matches!(command, MigrateCommand::Up);
    let name = redact(&settings.database.url.0);
    let store: S = open_store_with(settings, |options| options.create = makes_it, None).await?;
    if let MigrateCommand::Up = command {
        let applied = store.migrate().await.map_err(|error| AppError::from(error).on(&name))?;
        match output {
            Output::Json => data!("{}", serde_json::json!({ "applied": applied })),
            Output::Table if applied.is_empty() => data!("no migration to apply"),
            Output::Table => {
                for version in applied {
                    data!("applied {version}");
                }
            }
        }
    } else {
        let known = store.applied().await.map_err(|error| AppError::from(error).on(&name))?;
        match output {
            Output::Json => data!("{}", serde_json::json!({ "migrations": known })),
            Output::Table => {
                for migration in &known {
                    let mark = if migration.applied { "applied" } else { "missing" };
                    data!("{:>4}  {mark}  {}", migration.version, migration.description);
                }
            }
        }
        require_schema(&store, settings).await?;
    }
    store.close().await;
    Ok(())
}
