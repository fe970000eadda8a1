//! `oncebox audit`: what operators did, and why.

use clap::{Args, Subcommand};
use uuid::Uuid;

use super::common::{CommonArgs, Output, hint_of_more, limit, listed};
use oncebox::app::AppError;
use oncebox::store::{Duties, Store};

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
    #[arg(long, default_value_t = 100, value_parser = limit::<usize>())]
    limit: usize,
}

pub(super) async fn run(command: &AuditCommand, common: &CommonArgs, output: Output) -> Result<(), AppError> {
    let AuditCommand::List(args) = command;
    on_store!(common, Store::into_duties, |store, settings| list(&*store, args, output).await)
}

async fn list(store: &dyn Duties, args: &ListArgs, output: Output) -> Result<(), AppError> {
    let acts = store.audit(args.id, args.limit).await?;
    hint_of_more(acts.len(), args.limit);
    let as_json = serde_json::json!({ "audit": acts });
    let rows = acts.into_iter().map(|act| {
        let id = if act.message_id.is_nil() { String::new() } else { act.message_id.to_string() };
        let when = act.at.format("%Y-%m-%d %H:%M:%S").to_string();
        [when, act.actor, act.act, act.reason, act.place, act.number, id, act.detail]
    });
    listed(output, &as_json, ["when", "who", "act", "why", "of", "number", "id", "detail"], rows)
}
