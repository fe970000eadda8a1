//! `oncebox consumers`: which consumers started here, which of them are there, and how one that is
//! gone is forgotten.

use std::time::Duration;

use clap::Subcommand;

use super::act::{Act, refused};
use super::common::{CommonArgs, Output, bound, limit, listed};
use oncebox::app::AppError;
use oncebox::store::{ConsumerStatus, Duties, Status, Store};

/// What to do with consumers.
#[derive(Debug, Subcommand)]
pub(super) enum ConsumersCommand {
    /// List the consumers that started here and were not forgotten, and when each was last there
    List {
        /// At most this many
        #[arg(long, default_value_t = 100, value_parser = limit::<usize>())]
        limit: usize,
    },
    /// Forget one that is gone, with its waiting, held and dead messages and what its inbox
    /// remembers
    Forget {
        /// The name of the consumer to forget
        name: String,
        #[command(flatten)]
        act: Act,
    },
}

pub(super) async fn run(command: &ConsumersCommand, common: &CommonArgs, output: Output) -> Result<(), AppError> {
    on_store!(common, Store::into_duties, |store, settings| on(&*store, command, output).await)
}

async fn on(store: &dyn Duties, command: &ConsumersCommand, output: Output) -> Result<(), AppError> {
    match command {
        ConsumersCommand::List { limit } => list(store.status().await?.consumers, *limit, output),
        ConsumersCommand::Forget { name, act } => forget(store, name, act, output).await,
    }
}

fn list(mut consumers: Vec<ConsumerStatus>, limit: usize, output: Output) -> Result<(), AppError> {
    bound(&mut consumers, limit, "consumers");
    listed(output, &serde_json::json!({ "consumers": consumers }), COLUMNS, consumers.iter().map(row))
}

/// The columns of a table of consumers.
pub(super) const COLUMNS: [&str; 7] = ["consumer", "last seen", "inbox rows", "waiting", "held", "oldest", "dead"];

/// A row of a table of consumers.
pub(super) fn row(consumer: &ConsumerStatus) -> [String; 7] {
    [
        consumer.name.clone(),
        seen(consumer),
        consumer.inbox_rows.to_string(),
        consumer.waiting.to_string(),
        consumer.held.to_string(),
        format!("{:.1} s", consumer.oldest_waiting_age_seconds),
        consumer.dead.to_string(),
    ]
}

/// A consumer that was not seen for this long is not there: each of its processes reports every ten
/// seconds.
const ABSENT: Duration = Duration::from_secs(60);

/// Whether no process of this consumer runs.
pub(super) fn is_absent(consumer: &ConsumerStatus) -> bool {
    consumer.seen_seconds_ago > ABSENT.as_secs_f64()
}

/// When a process of this consumer was last seen, for people.
pub(super) fn seen(consumer: &ConsumerStatus) -> String {
    let ago = Duration::from_secs(consumer.seen_seconds_ago as u64);
    match ago < ABSENT {
        true => "there".to_owned(),
        false => format!("{} ago", humantime::format_duration(ago)),
    }
}

/// Returns the text that there is no consumer of this name; none where there is one.
pub(super) async fn unknown(store: &dyn Duties, name: &str) -> Result<Option<String>, AppError> {
    let is_known = store.status_since(&Status::default()).await?.consumers.iter().any(|consumer| consumer.name == name);
    Ok((!is_known).then(|| format!("there is no consumer `{name}`; `oncebox consumers list` shows them")))
}

async fn forget(store: &dyn Duties, name: &str, act: &Act, output: Output) -> Result<(), AppError> {
    if let Some(why) = unknown(store, name).await? {
        return Err(AppError::failed(why));
    }
    let mut left = store.forget_consumer(name, &act.context(true)).await.map_err(refused)?;
    // The inbox counts too: without it, what the broker still has would be handled again.
    let count = usize::try_from(left.messages + left.inbox_rows).unwrap_or(usize::MAX);
    act.confirm_loss(count, "messages and inbox rows", "lost with it")?;
    if !act.dry_run {
        left = store.forget_consumer(name, &act.context(false)).await.map_err(refused)?;
    }
    if output == Output::Json {
        let value = serde_json::json!({ "act": "forget", "dry_run": act.dry_run, "consumer": name, "left": left });
        data!("{value}");
        return Ok(());
    }
    let would = if act.dry_run { "would forget" } else { "forgot" };
    data!("{would} {name}: {} messages, {} inbox rows", left.messages, left.inbox_rows);
    Ok(())
}
