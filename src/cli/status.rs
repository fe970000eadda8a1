//! `oncebox status`: how things stand.

use comfy_table::{Table, presets};

use super::common::{CommonArgs, Output};
use crate::app::AppError;
use crate::store::{Status, Store};

pub(super) async fn run(common: &CommonArgs, output: Output) -> Result<(), AppError> {
    let settings = common.load(None)?.settings;
    crate::with_store!(&settings, None, |store| show(store, output).await)
}

async fn show<S: Store>(store: S, output: Output) -> Result<(), AppError> {
    store.schema().await?.require()?;
    let status = store.status().await?;
    match output {
        Output::Json => {
            let text = serde_json::to_string(&status).map_err(|error| AppError::failed(error.to_string()))?;
            println!("{text}");
        }
        Output::Table => print(&status),
    }
    store.close().await;
    Ok(())
}

fn print(status: &Status) {
    println!(
        "outbox: {} pending (oldest {:.1} s), {} held, {} dead; {} e-mails to send",
        status.pending, status.oldest_pending_age_seconds, status.held, status.dead, status.emails_pending
    );
    let mut shards = Table::new();
    shards.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    shards.set_header(["shard", "buckets", "cursor", "gaps", "epoch", "owner", "lease left", "cursor age"]);
    for shard in &status.shards {
        shards.add_row([
            shard.shard.to_string(),
            format!("{}-{}", shard.buckets.0, shard.buckets.1),
            shard.scanned_to.to_string(),
            shard.gaps.to_string(),
            shard.epoch.to_string(),
            shard.owner.clone().unwrap_or_else(|| "-".to_owned()),
            format!("{:.1} s", shard.lease_seconds_left),
            format!("{:.1} s", shard.cursor_age_seconds),
        ]);
    }
    println!("{shards}");
    if !status.consumers.is_empty() {
        let mut consumers = Table::new();
        consumers.load_preset(presets::UTF8_HORIZONTAL_ONLY);
        consumers.set_header(["consumer", "inbox rows", "waiting", "held", "dead"]);
        for consumer in &status.consumers {
            consumers.add_row([
                consumer.name.clone(),
                consumer.inbox_rows.to_string(),
                consumer.waiting.to_string(),
                consumer.held.to_string(),
                consumer.dead.to_string(),
            ]);
        }
        println!("{consumers}");
    }
}
