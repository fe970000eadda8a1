//! Topics without a route, or missing: how long another topic's messages take to the broker.
//!
//! The stuck side has a database of its own, so that what is held there is in nobody's way later.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::SLOW_SHARE;
use crate::StoreError;
use crate::app::AppError;
use crate::cli::bench::Load;
use crate::cli::bench::bed::Bed;
use crate::cli::bench::figure::Figure;
use crate::cli::bench::latency::{WARM, percentiles, write};
use crate::cli::bench::watched::Watched;
use crate::cli::bench::work::Maker;
use crate::cli::bench::yard::Yard;
use crate::cli::progress::Rounds;
use crate::observe::Health;
use crate::runtime::{Relay, RelayOptions};

/// How long messages may take after the last of them was written. One that is not in the broker
/// then counts with the time it has waited so far.
const PATIENCE: Duration = Duration::from_secs(120);

/// Median, 99th and 99.9th percentile from commit to broker, in milliseconds.
type Times = [f64; 3];

pub(super) async fn measure<S: Yard>(bed: &mut Bed<S>, load: Load, stuck: u32) -> Result<Vec<Figure>, AppError> {
    let load = Load { messages: (load.messages / SLOW_SHARE).max(1), ..load };
    let progress = Rounds::start("a stuck topic", load.rounds);
    let mut rounds = Vec::new();
    for _ in 0..load.rounds {
        let plain = times(bed, &bed.store.clone(), load, 0).await?;
        let (store, own) = bed.beside().await?;
        let measured = async {
            store.make_tables().await?;
            times(bed, &store, load, stuck).await
        }
        .await;
        store.close().await;
        own.drop::<S>().await?;
        rounds.push((measured?, plain));
        progress.next();
    }
    let against = "the same messages with no stuck topic";
    let figure = |name, at: usize| {
        let pairs: Vec<_> = rounds.iter().map(|(stuck, plain)| (stuck[at], plain[at])).collect();
        Figure::beside(name, "ms", against, &pairs)
    };
    Ok(vec![
        figure("fault.stuck_topic.p50", 0),
        figure("fault.stuck_topic.p99", 1).wanted("<= 1000 ms"),
        figure("fault.stuck_topic.p999", 2),
    ])
}

/// From the commit of a message to the broker's proof, beside so many stuck topics that got one
/// message each just before.
async fn times<S: Yard>(bed: &mut Bed<S>, store: &S, load: Load, stuck: u32) -> Result<Times, AppError> {
    let (topic, _) = bed.topic("flowing", &["sink"]).await?;
    let maker = Maker::new(&topic, load);
    let watched = Watched::each(Arc::clone(&bed.broker));
    let options = RelayOptions::new(format!("bench {topic}"));
    let relay = Relay::new(store.clone(), Arc::new(watched.clone()), options, Health::default());
    let stop = CancellationToken::new();
    let relay_stop = stop.clone();
    let relay = tokio::spawn(async move { relay.run(relay_stop).await });
    let committed = async {
        write(store, &maker, WARM, true).await?;
        proven(&watched, WARM).await;
        let mut tx = store.pool().begin().await.map_err(StoreError::from)?;
        let messages = (0..stuck).map(|at| Maker::new(&format!("{topic}-stuck-{at}"), load).message());
        crate::store::enqueue_all(&mut *tx, messages.collect()).await?;
        crate::store::commit(tx).await?;
        let committed = write(store, &maker, load.messages, true).await?;
        proven(&watched, WARM + load.messages).await;
        Ok::<_, AppError>(committed)
    }
    .await;
    stop.cancel();
    relay.await.map_err(|error| AppError::failed(error.to_string()))??;
    let (committed, now) = (committed?, Instant::now());
    let times = watched.look(|notes| {
        let proof = |id| notes.proven_at.get(id).copied().unwrap_or(now);
        committed.iter().map(|(id, at)| proof(id) - *at).collect()
    });
    Ok(percentiles(times, [0.5, 0.99, 0.999]))
}

/// Waits until so many messages are in the broker, or the patience is over.
async fn proven(watched: &Watched, count: usize) {
    let began = Instant::now();
    while watched.look(|notes| notes.proven_at.len()) < count && began.elapsed() < PATIENCE {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
