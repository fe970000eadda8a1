//! Topics that have no route, are missing, or do not answer: how long the messages of another topic
//! take to the broker meanwhile.
//!
//! The side with the fault has a separate database, so that its held rows do not disturb later
//! rounds.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::SLOW_SHARE;
use crate::bench::Load;
use crate::bench::bed::Bed;
use crate::bench::figure::Figure;
use crate::bench::latency::{Told, WARM, percentiles, write};
use crate::bench::started::Started;
use crate::bench::watched::{Notes, Watched};
use crate::bench::work::Maker;
use crate::bench::yard::Yard;
use crate::progress::Rounds;
use oncebox::app::AppError;
use oncebox::observe::Health;
use oncebox::{Relay, RelayOptions, StoreError};

/// How long to wait after the last message was written. A message that is not in the broker then
/// counts with the time that it has waited so far.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a relay that ends waits for a topic that does not answer.
const GRACE: Duration = Duration::from_secs(1);

/// Median, 99th and 99.9th percentile from commit to broker, in milliseconds.
type Times = [f64; 3];

/// What else is sent, beside the topic whose messages are timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// This many topics, each of which refuses one message, sent just before.
    Stuck(u32),
    /// One topic with as many messages, which it accepts.
    Answering,
    /// One topic with as many messages, which it neither accepts nor refuses.
    Silent,
}

/// Measures a topic beside topics that refuse their messages.
pub(super) async fn measure<S: Yard>(bed: &mut Bed<S>, load: Load, stuck: u32) -> Result<Vec<Figure>, AppError> {
    let rounds = both_sides(bed, load, "a stuck topic", [Beside::Stuck(0), Beside::Stuck(stuck)]).await?;
    let against = "the same messages with no stuck topic";
    let names = ["fault.stuck_topic.p50", "fault.stuck_topic.p99", "fault.stuck_topic.p999"];
    Ok(figures(names, against, &rounds))
}

/// Measures a topic beside one that neither accepts nor refuses messages, as a topic below
/// `min.insync.replicas`, or a queue without a majority.
pub(super) async fn measure_silent<S: Yard>(bed: &mut Bed<S>, load: Load) -> Result<Vec<Figure>, AppError> {
    let rounds = both_sides(bed, load, "a silent topic", [Beside::Answering, Beside::Silent]).await?;
    let against = "the same messages, and all topics answer";
    let names = ["fault.silent_topic.p50", "fault.silent_topic.p99", "fault.silent_topic.p999"];
    Ok(figures(names, against, &rounds))
}

/// The times without and with the fault, once a round.
async fn both_sides<S: Yard>(
    bed: &mut Bed<S>,
    load: Load,
    what: &'static str,
    [well, ill]: [Beside; 2],
) -> Result<Vec<(Times, Times)>, AppError> {
    let load = Load { messages: (load.messages / SLOW_SHARE).max(1), ..load };
    let mut rounds = Vec::new();
    for _ in Rounds::start(what, load.rounds) {
        let plain = times(bed, &bed.store.clone(), load, well).await?;
        let (store, own) = bed.beside().await?;
        let measured = async {
            store.make_tables().await?;
            times(bed, &store, load, ill).await
        }
        .await;
        store.close().await;
        own.drop_it::<S>().await?;
        rounds.push((measured?, plain));
    }
    Ok(rounds)
}

fn figures(names: [&'static str; 3], against: &'static str, rounds: &[(Times, Times)]) -> Vec<Figure> {
    let figure = |at: usize| {
        let pairs: Vec<_> = rounds.iter().map(|(ill, well)| (ill[at], well[at])).collect();
        Figure::beside(names[at], "ms", against, &pairs)
    };
    vec![figure(0), figure(1).wanted("<= 1000 ms"), figure(2)]
}

/// Measures the time from the commit of each message to the broker's proof.
async fn times<S: Yard>(bed: &mut Bed<S>, store: &S, load: Load, beside: Beside) -> Result<Times, AppError> {
    let (topic, _) = bed.topic("flowing", &["sink"]).await?;
    let other = match beside {
        Beside::Stuck(_) => None,
        Beside::Answering | Beside::Silent => Some(bed.topic("beside", &["sink"]).await?.0),
    };
    let maker = Maker::new(&topic, load);
    let watched = Watched::each(Arc::clone(&bed.broker));
    let watched = match &other {
        Some(other) if beside == Beside::Silent => watched.silent_of(other),
        _ => watched,
    };
    let options = RelayOptions { shutdown_grace: GRACE, ..RelayOptions::new(format!("bench {topic}")) };
    let relay = Relay::new(store.clone(), Arc::new(watched.clone()), options, Health::default());
    let relay = Started::begin(move |stop| async move { relay.run(stop).await });
    let committed = async {
        let warm = write(store, &maker, WARM, Told::Here).await?;
        proven(&watched, &warm).await;
        if let Beside::Stuck(stuck) = beside {
            let mut tx = store.pool().begin().await.map_err(StoreError::from)?;
            let messages = (0..stuck).map(|at| Maker::new(&format!("{topic}-stuck-{at}"), load).message());
            oncebox::store::enqueue_all(&mut *tx, messages.collect()).await?;
            oncebox::store::commit(tx).await?;
        }
        let others = async {
            match &other {
                Some(other) => write(store, &Maker::new(other, load), load.messages, Told::Here).await.map(drop),
                None => Ok(()),
            }
        };
        let (committed, others) = tokio::join!(write(store, &maker, load.messages, Told::Here), others);
        others?;
        let committed = committed?;
        proven(&watched, &committed).await;
        Ok::<_, AppError>(committed)
    }
    .await;
    relay.stop().await?;
    let (committed, now) = (committed?, Instant::now());
    let times = watched.look(|notes| {
        let proof = |id| notes.proven_at.get(id).copied().unwrap_or(now);
        committed.iter().map(|(id, at)| proof(id) - *at).collect()
    });
    Ok(percentiles(times, [0.5, 0.99, 0.999]))
}

/// Waits until these messages are in the broker, at most for `PATIENCE`.
async fn proven(watched: &Watched, committed: &HashMap<Uuid, Instant>) {
    let began = Instant::now();
    let are_there = |notes: &Notes| committed.keys().all(|id| notes.proven_at.contains_key(id));
    while !watched.look(are_there) && began.elapsed() < PATIENCE {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
