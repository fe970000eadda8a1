//! Consuming: effects per second from the real broker.
//!
//! Both sides read the same topic, under different names, and update the same table. The clock of a
//! side runs from its first delivery to its last acknowledgement, so that neither pays for joining
//! a group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::Load;
use super::bed::Bed;
use super::figure::Figure;
use super::relay::rate;
use super::watched::Watched;
use super::work::{KIND, Maker, account};
use super::yard::Yard;
use crate::progress::Rounds;
use oncebox::app::AppError;
use oncebox::broker::{Event, Subscription};
use oncebox::error::HandlerError;
use oncebox::message::Message;
use oncebox::observe::Health;
use oncebox::{Consumer, ConsumerOptions, HandlerTx, Handlers, MessageHandler};

/// The side with one transaction a message gets `messages / SLOW_SHARE` messages.
const SLOW_SHARE: usize = 4;
pub(super) const LINGER: Duration = Duration::from_millis(5);

/// A handler that does one business write for each message.
#[derive(Debug)]
pub(super) struct Effect;

#[async_trait]
impl<S: Yard> MessageHandler<S> for Effect {
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError> {
        Ok(S::business(tx.connection(), account(&message.payload)).await?)
    }
}

pub(super) async fn measure<S: Yard>(bed: &mut Bed<S>, load: Load) -> Result<Vec<Figure>, AppError> {
    let progress = Rounds::start("consume", load.rounds);
    let (mut one_lane, mut lanes) = (Vec::new(), Vec::new());
    for _ in 0..load.rounds {
        let (topic, names) = bed.topic("consume", &["hand", "lane", "lanes"]).await?;
        let raw = bed.raw(LINGER).await?;
        raw.send_all(Arc::new(Maker::new(&topic, load).rows(load.messages))).await?;
        let hand = by_hand(bed, &names[0], &topic, load.messages / SLOW_SHARE).await?;
        one_lane.push((consumer(bed, &names[1], &topic, load.messages, 1).await?, hand));
        if S::WRITERS > 1 {
            lanes.push((consumer(bed, &names[2], &topic, load.messages, 4).await?, hand));
        }
        progress.next();
    }
    let against = "one transaction a message, by hand, on one connection";
    let mut figures = vec![Figure::beside("consume.batches", "effects/s", against, &one_lane).wanted(">= 3.5")];
    if !lanes.is_empty() {
        figures.push(Figure::beside("consume.lanes", "effects/s", against, &lanes));
    }
    Ok(figures)
}

/// Measures the consumer runtime with this many lanes.
async fn consumer<S: Yard>(bed: &Bed<S>, name: &str, topic: &str, count: usize, lanes: usize) -> Result<f64, AppError> {
    let watched = Watched::new(Arc::clone(&bed.broker));
    let options = ConsumerOptions {
        lanes,
        until_idle: Some(Duration::from_millis(500)),
        ..ConsumerOptions::new(name, vec![topic.to_owned()])
    };
    let handlers = Handlers::new().on(KIND, Effect);
    let consumer = Consumer::new(bed.store.clone(), Arc::new(watched.clone()), handlers, options, Health::default());
    consumer.run(CancellationToken::new()).await?;
    watched.look(|notes| match (notes.first_delivery, notes.last_acknowledged) {
        (Some(begin), Some(end)) if notes.deliveries >= count => Ok(rate(notes.deliveries, end.at - begin.at)),
        _ => Err(AppError::failed(format!("{count} messages were to be consumed, {} came", notes.deliveries))),
    })
}

/// Measures the simple loop: begin, id, effect, commit, acknowledge.
async fn by_hand<S: Yard>(bed: &Bed<S>, name: &str, topic: &str, count: usize) -> Result<f64, AppError> {
    let subscription = Subscription::new(name, vec![topic.to_owned()]);
    let mut subscriber = bed.broker.subscriber(&subscription).await?;
    let (mut began, mut done) = (None, 0);
    while done < count {
        let event = tokio::time::timeout(Duration::from_secs(60), subscriber.next())
            .await
            .map_err(|_| AppError::failed("the broker delivered nothing for a minute"))??;
        let Event::Deliveries(deliveries) = event else { continue };
        began.get_or_insert_with(Instant::now);
        for delivery in deliveries {
            let id = delivery.arrived.id.as_deref().and_then(|id| Uuid::parse_str(id).ok());
            let id = id.ok_or_else(|| AppError::failed("a message came without the id it was sent with"))?;
            bed.store.handle_by_hand(id, account(delivery.arrived.payload.as_deref().unwrap_or_default())).await?;
            subscriber.acknowledge(&delivery.source, delivery.sequence).await?;
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
