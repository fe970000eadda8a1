//! `oncebox operations`: list, show, retry, resolve, judge. Of the bytes that were sent to a
//! provider it shows only the number.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use uuid::Uuid;

use super::act::{Act, refused};
use super::answer::{AnswerArgs, Says};
use super::common::{CommonArgs, Output, hint_of_more, limit, listed, plain, printable};
use super::keys::moment;
use oncebox::app::{AppError, say};
use oncebox::operation::Stage;
use oncebox::store::{
    FoundOperations, KeyOperator, OperationFilter, OperationStore, Resolution, RunOutcome, Sealed, StoredOperation,
};

/// What to do with operations in phases.
#[derive(Debug, Subcommand)]
pub(crate) enum OperationsCommand {
    /// List operations: those that wait for you first, then what has no outcome, each oldest first
    List(Filter),
    /// Show one with its effects and all evidence
    Show {
        /// The id of the operation
        #[arg(value_parser = operation_id)]
        id: Uuid,
    },
    /// Give operations back to their worker at once; it decides as always what may be sent again
    Retry {
        /// Ids of the operations to retry
        #[arg(required = true)]
        #[arg(value_parser = operation_id)]
        ids: Vec<Uuid>,
        /// Send it again though it may have happened: it may then have happened twice
        #[arg(long)]
        accept_duplicate: bool,
        /// Take it from a process that drives it now
        #[arg(long)]
        take_over: bool,
        #[command(flatten)]
        act: Act,
    },
    /// Say how an operation ended, or what became of one of its effects
    #[command(override_usage = "oncebox operations resolve [OPTIONS] --why <TEXT> --<HOW> <FILE|EFFECT> <ID>")]
    Resolve {
        /// The id of the operation
        #[arg(value_parser = operation_id)]
        id: Uuid,
        #[command(flatten)]
        word: Word,
        #[command(flatten)]
        answer: AnswerArgs,
        /// A code of the failure, kept with it
        #[arg(long, value_name = "CODE", requires = "failed")]
        error_code: Option<String>,
        /// Take it from a process that drives it now
        #[arg(long)]
        take_over: bool,
        /// Though the evidence says the opposite
        #[arg(long)]
        against_evidence: bool,
        #[command(flatten)]
        act: Act,
    },
    /// Say that you have looked at a conflict: it is listed no more, and is forgotten in its time
    Judge {
        /// The id of the operation
        #[arg(value_parser = operation_id)]
        id: Uuid,
        #[command(flatten)]
        act: Act,
    },
}

/// What the operator found out.
#[derive(Debug, Clone, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Word {
    /// It succeeded, and ends here: this file is the body of the answer that is replayed from now
    /// on
    #[arg(long, value_name = "FILE")]
    succeeded: Option<PathBuf>,
    /// It failed, and ends here: this file is the body of the answer; needs --status. Its phases
    /// write nothing more
    #[arg(long, value_name = "FILE")]
    failed: Option<PathBuf>,
    /// This effect happened: the worker goes on with the flow from there
    #[arg(long, value_name = "EFFECT")]
    happened: Option<String>,
    /// This effect did not happen and will not: the worker goes on with the flow from there
    #[arg(long, value_name = "EFFECT")]
    not_happened: Option<String>,
}

fn operation_id(text: &str) -> Result<Uuid, String> {
    text.parse().map_err(|_| "no id of an operation: a UUID, as `oncebox operations list` shows".to_owned())
}

/// Which operations are listed.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Filter {
    /// Only of this flow
    #[arg(long)]
    flow: Option<String>,
    /// Only of this tenant; empty: the public scope
    #[arg(long)]
    tenant: Option<String>,
    /// Only at this stage: received, local, outstanding, settled, succeeded, failed or unknown
    #[arg(long, value_parser = stage)]
    stage: Option<Stage>,
    /// Only those that wait for an operator
    #[arg(long)]
    parked: bool,
    /// Only those whose evidence contradicts their outcome, or that failed with an effect that
    /// stands; until they are judged
    #[arg(long)]
    conflicts: bool,
    /// Only begun longer ago than this, such as 90s or 2h
    #[arg(long, value_name = "DURATION", value_parser = oncebox::app::config::parse_duration)]
    older_than: Option<Duration>,
    /// At most this many
    #[arg(long, default_value_t = 100, value_parser = limit::<u32>())]
    limit: u32,
}

fn stage(text: &str) -> Result<Stage, String> {
    let all = "no stage; received, local, outstanding, settled, succeeded, failed and unknown are";
    text.to_ascii_uppercase().parse().map_err(|_| all.to_owned())
}

pub(super) async fn run(command: &OperationsCommand, common: &CommonArgs, output: Output) -> Result<(), AppError> {
    on_store!(common, OperationStore::into_operator, |store, settings| on(&*store, command, output).await)
}

async fn on(store: &dyn KeyOperator, command: &OperationsCommand, output: Output) -> Result<(), AppError> {
    match command {
        OperationsCommand::List(filter) => list(store, filter, output).await,
        OperationsCommand::Show { id } => show(&one(store, *id).await?, output),
        OperationsCommand::Retry { ids, accept_duplicate, take_over, act } => {
            let (accept_duplicate, take_over) = (*accept_duplicate, *take_over);
            retry(store, ids, accept_duplicate, take_over, act, output).await
        }
        OperationsCommand::Resolve { id, word, answer, error_code, take_over, against_evidence, act } => {
            let resolution = word.resolution(answer, error_code.clone())?;
            let seen = one(store, *id).await?;
            let context = act.context(act.dry_run);
            let done = store.resolve(&seen, &resolution, *take_over, *against_evidence, &context).await;
            done.map_err(|error| refused(error).on(&id.to_string()))?;
            told("resolve", &[*id], act, output)
        }
        OperationsCommand::Judge { id, act } => {
            let judged = store.judge(*id, &act.context(act.dry_run)).await;
            judged.map_err(|error| refused(error).on(&id.to_string()))?;
            told("judge", &[*id], act, output)
        }
    }
}

impl Word {
    fn resolution(&self, answer: &AnswerArgs, error_code: Option<String>) -> Result<Resolution, AppError> {
        let effect = |effect: &String, happened| Resolution::Effect { effect: effect.clone(), happened };
        Ok(match self {
            Self { succeeded: Some(file), .. } => {
                let outcome = RunOutcome::Completed(answer.read(file, Says::Succeeded)?);
                Resolution::Ended(Box::new(outcome), answer.retention())
            }
            Self { failed: Some(file), .. } => {
                let outcome = RunOutcome::FailedReplayable { answer: answer.read(file, Says::Failed)?, error_code };
                Resolution::Ended(Box::new(outcome), answer.retention())
            }
            Self { happened: Some(name), .. } => effect(name, true),
            Self { not_happened: Some(name), .. } => effect(name, false),
            Self { .. } => return Err(AppError::usage("say how it ended")),
        })
    }
}

impl Filter {
    fn to_store(&self) -> OperationFilter {
        OperationFilter {
            operation_id: None,
            flow: self.flow.clone(),
            tenant: self.tenant.clone(),
            stage: self.stage,
            parked: self.parked,
            conflicts: self.conflicts,
            older_than: self.older_than,
            limit: self.limit,
        }
    }
}

async fn one(store: &dyn KeyOperator, id: Uuid) -> Result<StoredOperation, AppError> {
    let found = store.operation(id).await?;
    found.ok_or_else(|| AppError::failed(format!("there is no operation {id}; `oncebox operations list` shows them")))
}

/// The observed bytes as text, or their size where they are encrypted.
fn readable(sealed: &Sealed) -> String {
    match &sealed.kid {
        Some(kid) => format!("{} bytes, encrypted under {kid}", sealed.bytes.len()),
        None => String::from_utf8_lossy(&sealed.bytes).into_owned(),
    }
}

fn fields(one: &StoredOperation) -> Value {
    let effects: Vec<Value> = one
        .intents
        .iter()
        .map(|intent| {
            json!({
                "effect": intent.intent.effect,
                "strategy": intent.intent.strategy,
                "provider_key": intent.intent.provider_key,
                "adapter": intent.intent.adapter,
                "adapter_version": intent.intent.adapter_version,
                "request_bytes": intent.intent.request.bytes.len(),
                "sends": intent.sends,
                "first_sent_at": moment(intent.first_sent_at),
                "last_sent_at": moment(intent.last_sent_at),
                "outcome": intent.outcome,
            })
        })
        .collect();
    let evidence: Vec<Value> = one
        .evidence
        .iter()
        .map(|row| {
            let seen = &row.evidence;
            json!({
                "at": moment(row.at),
                "effect": seen.effect,
                "send": seen.send,
                "kind": seen.kind,
                "verdict": seen.verdict,
                "status": seen.status,
                "epoch": seen.epoch,
                "seen": readable(&seen.bytes),
            })
        })
        .collect();
    json!({
        "operation_id": one.operation_id,
        "tenant": one.identity.as_ref().map(|identity| identity.tenant()),
        "flow": one.flow,
        "flow_version": one.flow_version,
        "point": one.point,
        "stage": one.stage.as_str(),
        "epoch": one.epoch,
        "attempts": one.attempts,
        "parked": one.parked,
        "driven_until": one.lease_until.map(moment),
        "due_at": one.due_at.map(moment),
        "created_at": moment(one.created_at),
        "outcome_at": one.outcome_at.map(moment),
        "effects": effects,
        "evidence": evidence,
    })
}

async fn list(store: &dyn KeyOperator, filter: &Filter, output: Output) -> Result<(), AppError> {
    let FoundOperations { operations: found, unreadable, orphans } = store.operations(&filter.to_store()).await?;
    hint_of_more(found.len() + unreadable.len(), filter.limit as usize);
    if output == Output::Table {
        for (id, why) in &unreadable {
            say("ERROR", &format!("operation {id} cannot be read, and nothing drives it: {}", printable(why)));
        }
        for id in &orphans {
            say(
                "ERROR",
                &format!(
                    "evidence says that something of operation {id} happened, and its record is gone or says that it failed: find out what it did, then `oncebox operations judge {id}`; while the record stands, that command refuses and says what to do instead"
                ),
            );
        }
    }
    let operations: Vec<Value> = found.iter().map(fields).collect();
    let unreadable = unreadable.iter().map(|(id, why)| json!({ "operation_id": id, "error": why }));
    let unreadable: Vec<Value> = unreadable.collect();
    let as_json = json!({ "operations": operations, "unreadable": unreadable, "orphans": orphans });
    let header = ["operation", "tenant", "flow", "stage", "point", "effects", "tries", "parked", "due", "since"];
    let rows = found.iter().map(|one| {
        let effects = one
            .intents
            .iter()
            .map(|intent| format!("{}: {}", intent.intent.effect, intent.outcome.as_deref().unwrap_or("open")));
        [
            one.operation_id.to_string(),
            one.identity.as_ref().map(|identity| identity.tenant().to_owned()).unwrap_or_default(),
            format!("{} v{}", one.flow, one.flow_version),
            one.stage.as_str().to_owned(),
            one.point.clone(),
            effects.collect::<Vec<String>>().join(", "),
            one.attempts.to_string(),
            one.parked.clone().unwrap_or_default(),
            one.due_at.map(moment).unwrap_or_default(),
            moment(one.created_at),
        ]
    });
    listed(output, &as_json, header, rows)
}

fn show(one: &StoredOperation, output: Output) -> Result<(), AppError> {
    let fields = fields(one);
    if output == Output::Json {
        data!("{fields}");
        return Ok(());
    }
    for (name, value) in fields.as_object().into_iter().flatten() {
        match value.as_array() {
            None => data!("{:<15} {}", name.replace('_', " "), plain(value)),
            Some(rows) => {
                for row in rows {
                    let parts = row.as_object().into_iter().flatten();
                    let parts = parts.map(|(name, value)| format!("{} {}", name.replace('_', " "), plain(value)));
                    data!("{:<15} {}", name, parts.collect::<Vec<String>>().join(", "));
                }
            }
        }
    }
    Ok(())
}

async fn retry(
    store: &dyn KeyOperator,
    ids: &[Uuid],
    accept_duplicate: bool,
    take_over: bool,
    act: &Act,
    output: Output,
) -> Result<(), AppError> {
    let mut seen: Vec<StoredOperation> = Vec::new();
    for id in ids {
        // Named twice, it would be changed when its second turn comes.
        if seen.iter().all(|other| other.operation_id != *id) {
            seen.push(one(store, *id).await?);
        }
    }
    let ids: Vec<Uuid> = seen.iter().map(|one| one.operation_id).collect();
    act.confirm(seen.len(), "operations", "taken up again")?;
    for dry_run in act.runs() {
        for one in &seen {
            let done = store.retry(one, accept_duplicate, take_over, &act.context(*dry_run)).await;
            done.map_err(|error| refused(error).on(&one.operation_id.to_string()))?;
        }
    }
    told("retry", &ids, act, output)
}

fn told(verb: &str, ids: &[Uuid], act: &Act, output: Output) -> Result<(), AppError> {
    let ids: Vec<String> = ids.iter().map(Uuid::to_string).collect();
    act.told(verb, "operations", &ids, 0, output)
}
