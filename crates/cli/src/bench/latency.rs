//! From the return of COMMIT to the broker's proof, and to the acknowledgement that follows the
//! effect's own commit, at a steady rate.
//!
//! Writer, relay and consumer share this process, so the writer's hint reaches the relay.
//! `latency.announced` is the same where the hint comes through the database, as from another
//! process; `latency.polled` is without any, as from a program that only writes rows.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::task::JoinSet;
use uuid::Uuid;

use super::Load;
use super::bed::Bed;
use super::consume::Effect;
use super::figure::Figure;
use super::started::Started;
use super::watched::Watched;
use super::work::{KIND, Maker};
use super::yard::{ACCOUNTS, Yard};
use crate::progress::Rounds;
use oncebox::app::AppError;
use oncebox::observe::Health;
use oncebox::{Consumer, ConsumerOptions, Handlers, Relay, RelayOptions, StoreError};

/// Transactions that the writer commits per second.
const RATE: u32 = 200;
/// Messages before the first that counts, so that connections, caches and groups are warm.
pub(super) const WARM: usize = 100;

/// Percentiles of one round, in milliseconds.
struct Round {
    proof: [f64; 2],
    effect: [f64; 2],
    /// Median of a publish by the bare client.
    publish: f64,
}

/// How the relay hears of a commit.
#[derive(Clone, Copy)]
pub(super) enum Told<'a> {
    Here,
    /// By whoever is notified after each commit.
    Elsewhere(&'a Notify),
    Nobody,
}

pub(super) async fn measure<S: Yard>(bed: &mut Bed<S>, load: Load) -> Result<Vec<Figure>, AppError> {
    let (mut hinted, mut announced, mut polled) = (Vec::new(), Vec::new(), Vec::new());
    let announces = bed.store.announce_commits().await?;
    for _ in Rounds::start("latency", load.rounds) {
        hinted.push(round(bed, load, Told::Here).await?);
        if announces {
            let (committed, store) = (Arc::new(Notify::new()), bed.store.clone());
            let heard = Arc::clone(&committed);
            let mut announcer = JoinSet::new();
            announcer.spawn(async move {
                loop {
                    heard.notified().await;
                    if let Err(error) = store.announce_commits().await {
                        tracing::warn!(%error, "a commit was not announced");
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            });
            announced.push(round(bed, load, Told::Elsewhere(&committed)).await?);
        }
        polled.push(round(bed, load, Told::Nobody).await?);
    }
    let against = "one publish by the bare client, median";
    let figure = |name, rounds: &[Round], pick: fn(&Round) -> f64| {
        let pairs: Vec<_> = rounds.iter().map(|round| (pick(round), round.publish)).collect();
        Figure::beside(name, "ms", against, &pairs)
    };
    let mut figures = vec![
        figure("latency.proof.p50", &hinted, |round| round.proof[0]).wanted("<= 2"),
        figure("latency.proof.p99", &hinted, |round| round.proof[1]).wanted("<= 4"),
        figure("latency.effect.p50", &hinted, |round| round.effect[0]),
        figure("latency.effect.p99", &hinted, |round| round.effect[1]),
        figure("latency.polled.proof.p50", &polled, |round| round.proof[0]),
        figure("latency.polled.effect.p99", &polled, |round| round.effect[1]),
    ];
    if announces {
        figures.push(figure("latency.announced.proof.p50", &announced, |round| round.proof[0]).wanted("<= 2"));
        figures.push(figure("latency.announced.proof.p99", &announced, |round| round.proof[1]).wanted("<= 4"));
        figures.push(figure("latency.announced.effect.p99", &announced, |round| round.effect[1]));
    }
    Ok(figures)
}

async fn round<S: Yard>(bed: &mut Bed<S>, load: Load, told: Told<'_>) -> Result<Round, AppError> {
    let (topic, names) = bed.topic("latency", &["effects"]).await?;
    let maker = Maker::new(&topic, load);
    let raw = bed.raw(Duration::ZERO).await?;
    let mut publishes = Vec::new();
    for row in maker.rows(100) {
        let began = Instant::now();
        raw.send_one(row).await?;
        publishes.push(began.elapsed());
    }
    let watched = Watched::each(Arc::clone(&bed.broker));
    let relay = Relay::new(
        bed.store.clone(),
        Arc::new(watched.clone()),
        RelayOptions::new(format!("bench {topic}")),
        Health::default(),
    );
    let options = ConsumerOptions::new(names[0].clone(), vec![topic.clone()]);
    let handlers = Handlers::new().on(KIND, Effect);
    let consumer = Consumer::new(bed.store.clone(), Arc::new(watched.clone()), handlers, options, Health::default());
    let relay = Started::begin(move |stop| async move { relay.run(stop).await });
    let consumer = Started::begin(move |stop| async move { consumer.run(stop).await });

    let written = async {
        write(&bed.store, &maker, WARM, told).await?;
        settle(&watched, WARM + publishes.len()).await?;
        let committed = write(&bed.store, &maker, load.messages, told).await?;
        settle(&watched, WARM + publishes.len() + load.messages).await?;
        Ok::<_, AppError>(committed)
    }
    .await;
    let (relayed, consumed) = tokio::join!(relay.stop(), consumer.stop());
    relayed?;
    consumed?;
    let committed = written?;
    Ok(watched.look(|notes| {
        let proof = committed.iter().filter_map(|(id, at)| Some(*notes.proven_at.get(id)? - *at)).collect();
        let effect = committed.iter().filter_map(|(id, at)| Some(*notes.acknowledged_at.get(&id.to_string())? - *at));
        let [publish] = percentiles(publishes, [0.5]);
        let shares = [0.5, 0.99];
        Round { proof: percentiles(proof, shares), effect: percentiles(effect.collect(), shares), publish }
    }))
}

/// Commits a business write and a message at the steady rate. Returns the time of each commit.
pub(super) async fn write<S: Yard>(
    store: &S,
    maker: &Maker,
    count: usize,
    told: Told<'_>,
) -> Result<HashMap<Uuid, Instant>, AppError> {
    let mut committed = HashMap::new();
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / RATE);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for at in 0..count {
        ticks.tick().await;
        let mut tx = store.pool().begin().await.map_err(StoreError::from)?;
        S::business(&mut tx, at as i64 % ACCOUNTS).await?;
        let id = oncebox::store::enqueue(&mut *tx, maker.message()).await?;
        match told {
            Told::Here => oncebox::store::commit(tx).await?,
            Told::Elsewhere(_) | Told::Nobody => tx.commit().await.map_err(StoreError::from)?,
        }
        committed.insert(id, Instant::now());
        if let Told::Elsewhere(others) = told {
            others.notify_one();
        }
    }
    Ok(committed)
}

async fn settle(watched: &Watched, count: usize) -> Result<(), AppError> {
    let began = Instant::now();
    while watched.look(|notes| notes.acknowledged_at.len()) < count {
        if began.elapsed() > Duration::from_secs(60) {
            return Err(AppError::failed("messages were not handled within a minute"));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// Percentiles in milliseconds: the times below which these shares of all times are.
pub(super) fn percentiles<const N: usize>(mut times: Vec<Duration>, shares: [f64; N]) -> [f64; N] {
    times.sort_unstable();
    shares.map(|share| {
        let index = ((times.len() as f64 * share).ceil() as usize).clamp(1, times.len().max(1)) - 1;
        times.get(index).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
    })
}
