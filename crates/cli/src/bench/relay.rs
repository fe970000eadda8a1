//! The relay: rows per second, CPU, log and dead row versions per row.
//!
//! A round appends the rows, then runs the plain reader, the bare client and the relay in turn. The
//! loop that awaits each publish and updates each row is so slow that it gets only a part of the
//! rows. Therefore rates are compared, not times.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Load;
use super::bed::{Bed, LINGER};
use super::figure::Figure;
use super::started::Started;
use super::watched::Watched;
use super::work::Maker;
use super::yard::Yard;
use crate::progress::Rounds;
use oncebox::app::AppError;
use oncebox::observe::Health;
use oncebox::{Relay, RelayOptions};

/// The simple loop gets `messages / SLOW_SHARE` rows, and at least 100.
const SLOW_SHARE: usize = 50;

struct Round {
    relay: f64,
    producer: f64,
    reader: f64,
    one_by_one: f64,
    cpu_micros: f64,
    log: Option<f64>,
    versions: Option<f64>,
}

pub(super) async fn measure<S: Yard>(bed: &mut Bed<S>, load: Load) -> Result<Vec<Figure>, AppError> {
    let mut rounds = Vec::new();
    for _ in Rounds::start("relay", load.rounds) {
        rounds.push(round(bed, load).await?);
    }
    let beside = |name, against, pick: fn(&Round) -> (f64, f64)| {
        Figure::beside(name, "rows/s", against, &rounds.iter().map(pick).collect::<Vec<_>>())
    };
    let of_client = beside("relay.of_client", "the bare warmed client", |round| (round.relay, round.producer));
    // Kafka's client takes rows faster than any database gives them.
    let of_client = match bed.broker.name() {
        "rabbitmq" => of_client.wanted(">= 0.9"),
        "embedded" => of_client.wanted(">= 0.7"),
        _ => of_client,
    };
    let smaller = "the smaller of the bare warmed client and the plain reader";
    let limit = "a row read plainly, then sent by the bare client";
    let both = |round: &Round| (round.relay, 1.0 / (1.0 / round.producer + 1.0 / round.reader));
    let one_by_one = "select, await each publish, update each row";
    let cpu: Vec<f64> = rounds.iter().map(|round| round.cpu_micros).collect();
    let mut figures = vec![
        beside("relay.rows", smaller, |round| (round.relay, round.producer.min(round.reader))).wanted(">= 0.40"),
        beside("relay.of_limit", limit, both).wanted(">= 0.9"),
        of_client,
        beside("relay.of_reader", "a plain reader of the same rows", |round| (round.relay, round.reader)),
        beside("relay.of_one_by_one", one_by_one, |round| (round.relay, round.one_by_one)).wanted(">= 20"),
        Figure::alone("relay.cpu", "us/row", &cpu).wanted("<= 5"),
    ];
    let log: Option<Vec<f64>> = rounds.iter().map(|round| round.log).collect();
    if let Some(log) = log {
        figures.push(Figure::alone("relay.log", "bytes/row", &log).wanted("<= 20"));
    }
    let versions: Option<Vec<f64>> = rounds.iter().map(|round| round.versions).collect();
    if let Some(versions) = versions {
        figures.push(Figure::alone("relay.dead_versions", "versions/row", &versions).wanted("<= 0.01"));
    }
    Ok(figures)
}

async fn round<S: Yard>(bed: &mut Bed<S>, load: Load) -> Result<Round, AppError> {
    let (topic, _) = bed.topic("relay", &["sink"]).await?;
    let (raw_topic, _) = bed.topic("raw", &["sink"]).await?;
    let after = append(bed, &Maker::new(&topic, load), load.messages).await?;
    let slow = (load.messages / SLOW_SHARE).max(100);
    bed.store.copy_with_status(slow).await?;

    let began = Instant::now();
    let (mut position, mut read) = (after, 0);
    loop {
        let rows = bed.store.read_plainly(position).await?;
        let Some((last, _)) = rows.last() else { break };
        position = *last;
        read += rows.len();
    }
    let reader = rate(read, began.elapsed());

    let raw = bed.raw(LINGER).await?;
    let maker = Maker::new(&raw_topic, load);
    // The first message of an idempotent producer waits for the producer's id, which no rate must
    // include.
    raw.send_all(Arc::new(maker.rows(1_000))).await?;
    let rows = Arc::new(maker.rows(load.messages));
    let began = Instant::now();
    raw.send_all(rows).await?;
    let producer = rate(load.messages, began.elapsed());

    let one = bed.raw(Duration::ZERO).await?;
    one.send_one(maker.rows(1).remove(0)).await?;
    let one_by_one = one_by_one(bed, &one, slow).await?;

    let (log, versions) = (bed.store.log_written().await?, bed.store.left_behind().await?);
    let watched = Watched::new(Arc::clone(&bed.broker));
    let store = bed.another_store().await?;
    let options = RelayOptions { until_empty: true, ..RelayOptions::new("bench") };
    let relay = Relay::new(store.clone(), Arc::new(watched.clone()), options, Health::default());
    // In a task of its own, as in the programs: the main thread hands every wake-up on.
    Started::begin(move |stop| async move { relay.run(stop).await }).ended().await?;
    store.close().await;
    let per_row = |after: Option<f64>, before: Option<f64>| Some((after? - before?) / load.messages as f64);
    let log = per_row(bed.store.log_written().await?, log);
    let versions = per_row(bed.store.left_behind().await?, versions);
    watched.look(|notes| {
        let (Some(begin), Some(end)) = (notes.warm, notes.last_proof) else {
            return Err(AppError::failed("the relay sent nothing"));
        };
        if notes.proven != load.messages || notes.refused > 0 {
            return Err(AppError::failed(format!(
                "the relay was to send {} messages, {} were proven and {} refused",
                load.messages, notes.proven, notes.refused
            )));
        }
        Ok(Round {
            relay: rate(load.messages, end.at - begin.at),
            producer,
            reader,
            one_by_one,
            cpu_micros: (end.cpu - begin.cpu).as_secs_f64() * 1e6 / load.messages as f64,
            log,
            versions,
        })
    })
}

/// Enqueues this many messages. Returns the position before the first.
async fn append<S: Yard>(bed: &Bed<S>, maker: &Maker, count: usize) -> Result<i64, AppError> {
    let mut last = 0;
    while let Some((position, _)) = bed.store.read_plainly(last).await?.last() {
        last = *position;
    }
    fill(&bed.store, maker, count).await?;
    Ok(last)
}

/// How many messages are enqueued in one transaction.
pub(super) const BULK: usize = 1_000;

/// Enqueues this many messages, in bulk.
pub(super) async fn fill<S: Yard>(store: &S, maker: &Maker, count: usize) -> Result<(), AppError> {
    let mut left = count;
    while left > 0 {
        let some = left.min(BULK);
        let mut tx = store.pool().begin().await.map_err(oncebox::StoreError::from)?;
        oncebox::store::enqueue_all(&mut *tx, (0..some).map(|_| maker.message()).collect()).await?;
        oncebox::store::commit(tx).await?;
        left -= some;
    }
    Ok(())
}

/// The simple loop that a team writes first: publish, await, mark each row.
async fn one_by_one<S: Yard>(bed: &Bed<S>, raw: &super::work::Raw, rows: usize) -> Result<f64, AppError> {
    let began = Instant::now();
    let mut sent = 0;
    loop {
        let some = bed.store.read_unmarked().await?;
        if some.is_empty() {
            break;
        }
        for (position, message) in some {
            raw.send_one(message).await?;
            bed.store.mark(position).await?;
            sent += 1;
        }
    }
    if sent != rows {
        return Err(AppError::failed(format!("{rows} rows were to be sent one by one, {sent} were")));
    }
    Ok(rate(sent, began.elapsed()))
}

pub(super) fn rate(count: usize, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64()
}
