//! `oncebox audit`: what operators did, and why.

use clap::{Args, Subcommand};
use uuid::Uuid;

use super::act::to_json;
use super::common::{CommonArgs, Output, table};
use oncebox::app::config::Settings;
use oncebox::app::{AppError, require_schema};
use oncebox::store::Store;

/// What to do with the audit.
#[derive(Debug, Subcommand)]
pub(super) enum AuditCommand {
    /// List what operators did, newest first
    List(ListArgs),
}

/// Which acts of operators are listed.
#[derive(Debug, Clone, Args)]
pub(super) struct ListArgs {
    /// Only on this message or operation
    #[arg(long, value_name = "UUID")]
    id: Option<Uuid>,
    /// At most this many
    #[arg(long, default_value_t = 100)]
    limit: usize,
}

pub(super) async fn run(command: &AuditCommand, common: &CommonArgs, output: Output) -> Result<(), AppError> {
    let AuditCommand::List(args) = command;
    let settings = common.load(None)?.settings;
    oncebox::with_store!(&settings, None, |store| list(store, args, &settings, output).await)
}

async fn list<S: Store>(store: S, args: &ListArgs, settings: &Settings, output: Output) -> Result<(), AppError> {
    require_schema(&store, settings).await?;
    let acts = store.audit(args.id, args.limit).await?;
    store.close().await;
    if output == Output::Json {
        data!("{}", to_json(&serde_json::json!({ "audit": acts }))?);
        return Ok(());
    }
    let mut table = table(["when", "who", "act", "why", "of", "number", "id", "detail"]);
    for act in acts {
        let id = if act.message_id.is_nil() { String::new() } else { act.message_id.to_string() };
        let when = act.at.format("%Y-%m-%d %H:%M:%S").to_string();
        table.add_row([when, act.actor, act.act, act.reason, act.place, act.number, id, act.detail]);
    }
    data!("{table}");
    Ok(())
}
