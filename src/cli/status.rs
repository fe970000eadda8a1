//! `oncebox status`: how things stand.

use super::common::{CommonArgs, Output, table};
use super::consumers::seen;
use crate::app::config::Settings;
use crate::app::{AppError, require_schema};
use crate::store::{Status, Store};

pub(super) async fn run(common: &CommonArgs, output: Output) -> Result<(), AppError> {
    let settings = common.load(None)?.settings;
    crate::with_store!(&settings, None, |store| show(store, &settings, output).await)
}

async fn show<S: Store>(store: S, settings: &Settings, output: Output) -> Result<(), AppError> {
    require_schema(&store, settings).await?;
    let status = store.status().await?;
    match output {
        Output::Json => {
            let text = serde_json::to_string(&status).map_err(|error| AppError::failed(error.to_string()))?;
            data!("{text}");
        }
        Output::Table => print(&status)?,
    }
    store.close().await;
    Ok(())
}

fn print(status: &Status) -> Result<(), AppError> {
    data!(
        "outbox: {} pending (oldest {:.1} s), {} held (oldest {:.1} s), {} dead; {} e-mails to send",
        status.pending,
        status.oldest_pending_age_seconds,
        status.held,
        status.oldest_held_age_seconds,
        status.dead,
        status.emails_pending
    );
    let mut shards = table(["shard", "buckets", "cursor", "gaps", "epoch", "owner", "lease left", "cursor age"]);
    for shard in &status.shards {
        shards.add_row([
            shard.shard.to_string(),
            format!("{}-{}", shard.buckets.0, shard.buckets.1),
            shard.scanned_to.to_string(),
            shard.gaps.to_string(),
            shard.epoch.to_string(),
            shard.owner.clone().unwrap_or_else(|| "nobody".to_owned()),
            format!("{:.1} s", shard.lease_seconds_left),
            format!("{:.1} s", shard.cursor_age_seconds),
        ]);
    }
    data!("{shards}");
    if !status.consumers.is_empty() {
        let mut consumers = table(["consumer", "last seen", "inbox rows", "waiting", "held", "oldest", "dead"]);
        for consumer in &status.consumers {
            consumers.add_row([
                consumer.name.clone(),
                seen(consumer),
                consumer.inbox_rows.to_string(),
                consumer.waiting.to_string(),
                consumer.held.to_string(),
                format!("{:.1} s", consumer.oldest_waiting_age_seconds),
                consumer.dead.to_string(),
            ]);
        }
        data!("{consumers}");
    }
    Ok(())
}
