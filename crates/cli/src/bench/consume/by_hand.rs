//! Consuming by hand: what a team would write with the broker's client and its database.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::bench::bed::Bed;
use crate::bench::relay::rate;
use crate::bench::work::account;
use crate::bench::yard::{Effects, Yard};
use crate::common::failed;
use oncebox::app::AppError;
use oncebox::broker::{Delivery, Event, PartitionId, Subscription};

/// The most messages of a batch, as many as the consumer takes by default.
const BATCH_MAX: usize = 100;

/// Where a delivery came from.
type Place = (PartitionId, i64);
/// A message on its way to a worker: where it came from, its id and its account.
type Note = (Place, (Uuid, i64));

fn note(delivery: Delivery) -> Result<Note, AppError> {
    let id = delivery.arrived.id.as_deref().and_then(|id| Uuid::parse_str(id).ok());
    let id = id.ok_or_else(|| AppError::failed("a message came without the id it was sent with"))?;
    let account = account(delivery.arrived.payload.as_deref().unwrap_or_default());
    Ok(((delivery.source, delivery.sequence), (id, account)))
}

/// Measures the simple loop: begin, id, effect, commit, acknowledge.
pub(super) async fn one_by_one<S: Yard>(bed: &Bed<S>, name: &str, topic: &str, count: usize) -> Result<f64, AppError> {
    let mut subscriber = bed.broker.subscriber(&Subscription::new(name, vec![topic.to_owned()])).await?;
    let (mut began, mut done) = (None, 0);
    while done < count {
        let event = tokio::time::timeout(Duration::from_secs(60), subscriber.next())
            .await
            .map_err(|_| AppError::failed("the broker delivered nothing for a minute"))??;
        let Event::Deliveries(deliveries) = event else { continue };
        began.get_or_insert_with(Instant::now);
        for delivery in deliveries {
            let ((source, sequence), (id, account)) = note(delivery)?;
            bed.store.handle_by_hand(id, account).await?;
            subscriber.acknowledge(&source, sequence).await?;
            done += 1;
            if done == count {
                break;
            }
        }
    }
    let time = began.map(|began| began.elapsed()).unwrap_or_default();
    subscriber.close().await;
    Ok(rate(done, time))
}

/// Measures batches: each worker has its keys, and takes what is there, up to a hundred, into one
/// transaction. What is committed without a gap is acknowledged.
pub(super) async fn in_batches<S: Yard>(
    bed: &Bed<S>,
    name: &str,
    topic: &str,
    count: usize,
    workers: usize,
    effects: Effects,
) -> Result<f64, AppError> {
    let mut subscriber = bed.broker.subscriber(&Subscription::new(name, vec![topic.to_owned()])).await?;
    let (finished, mut done) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    let workers: Vec<UnboundedSender<Note>> = (0..workers)
        .map(|_| {
            let (sender, receiver) = mpsc::unbounded_channel();
            tasks.spawn(work(bed.store.clone(), receiver, effects, finished.clone()));
            sender
        })
        .collect();
    let mut open: HashMap<PartitionId, (BTreeSet<i64>, i64)> = HashMap::new();
    let (mut began, mut left) = (None, count);
    while left > 0 {
        tokio::select! {
            biased;
            Some(places) = done.recv() => {
                left = left.saturating_sub(places.len());
                let mut touched = BTreeSet::new();
                for (source, sequence) in &places {
                    if let Some((open, _)) = open.get_mut(source) {
                        open.remove(sequence);
                        touched.insert(source.partition);
                    }
                }
                for (source, (open, last)) in open.iter().filter(|(source, _)| touched.contains(&source.partition)) {
                    subscriber.acknowledge(source, open.first().map_or(*last, |first| first - 1)).await?;
                }
            }
            Some(ended) = tasks.join_next() => ended.map_err(failed)??,
            event = tokio::time::timeout(Duration::from_secs(60), subscriber.next()) => {
                let event = event.map_err(|_| AppError::failed("the broker delivered nothing for a minute"))??;
                let Event::Deliveries(deliveries) = event else { continue };
                began.get_or_insert_with(Instant::now);
                for delivery in deliveries {
                    let ((source, sequence), message) = note(delivery)?;
                    let (open, last) = open.entry(source.clone()).or_default();
                    open.insert(sequence);
                    *last = sequence;
                    let worker = usize::try_from(message.1).unwrap_or(0) % workers.len();
                    // A worker that is gone has failed: its error comes next.
                    let _ = workers[worker].send(((source, sequence), message));
                }
            }
        }
    }
    let time = began.map(|began| began.elapsed()).unwrap_or_default();
    subscriber.close().await;
    Ok(rate(count, time))
}

async fn work<S: Yard>(
    store: S,
    mut messages: UnboundedReceiver<Note>,
    effects: Effects,
    finished: UnboundedSender<Vec<Place>>,
) -> Result<(), AppError> {
    let mut batch = Vec::with_capacity(BATCH_MAX);
    while messages.recv_many(&mut batch, BATCH_MAX).await > 0 {
        let (places, messages): (Vec<_>, Vec<_>) = batch.drain(..).unzip();
        store.handle_all_by_hand(&messages, effects).await?;
        if finished.send(places).is_err() {
            break;
        }
    }
    Ok(())
}
