//! Consuming: effects per second from the real broker.
//!
//! A side is one way to consume: by hand (`by_hand`), or the consumer of oncebox with one of its
//! handlers. All sides read the same topic, under different names, and update the same table. The
//! clock of a side runs from its first delivery to its last acknowledgement, so that none pays for
//! joining a group. The benchmark fails unless the sides together had as many effects as they had
//! messages; the loop by hand is not counted.

mod by_hand;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use super::Load;
use super::bed::{Bed, LINGER};
use super::figure::Figure;
use super::relay::rate;
use super::watched::Watched;
use super::work::{KIND, Maker, account};
use super::yard::{Effects, Yard};
use crate::common::{AnyBroker, failed};
use crate::progress::Rounds;
use oncebox::app::AppError;
use oncebox::error::HandlerError;
use oncebox::message::Message;
use oncebox::observe::Health;
use oncebox::{
    BatchMessageHandler, Consumer, ConsumerOptions, HandlerTx, Handlers, MessageHandler, SqlHandler, SqlSpec,
};

/// The loop by hand is slow, with a commit for each message: it gets `messages / SLOW_SHARE`.
const SLOW_SHARE: usize = 4;

/// A handler that does one business write for each message.
#[derive(Debug)]
pub(super) struct Effect;

#[async_trait]
impl<S: Yard> MessageHandler<S> for Effect {
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError> {
        Ok(S::business(tx.connection(), account(&message.payload)).await?)
    }
}

/// The same for a set, in one statement.
#[derive(Debug)]
struct InSets;

#[async_trait]
impl<S: Yard> BatchMessageHandler<S> for InSets {
    async fn handle_batch(&self, messages: &[&Message], tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError> {
        let accounts: Vec<i64> = messages.iter().map(|message| account(&message.payload)).collect();
        Ok(S::business_all(tx.connection(), &accounts).await?)
    }
}

/// The same by configuration.
pub(super) async fn sql<S: Yard>(store: &S) -> Result<Handlers<S>, AppError> {
    let spec = SqlSpec {
        statements: vec!["update bench_account set balance = balance + 1 where account = :account".to_owned()],
        params: [("account".to_owned(), "/account".to_owned())].into(),
        optional: Vec::new(),
    };
    let handler = SqlHandler::prepare(store, spec).await.map_err(failed)?;
    let handlers = Handlers::new();
    Ok(if handler.gains_by_sets() { handlers.on_batch(KIND, handler) } else { handlers.on(KIND, handler) })
}

/// Effects per second of each side, in one round.
struct Round {
    loop_by_hand: f64,
    /// First with one lane; then with four, where the database has several writers.
    lanes: Vec<Lanes>,
}

struct Lanes {
    /// By hand in batches, with one statement for the effects of a batch.
    by_hand: f64,
    /// By hand in batches, with a statement a message.
    each_by_hand: f64,
    /// oncebox with [`Effect`], a handler of one message.
    one: f64,
    /// oncebox with [`InSets`], a handler of sets.
    sets: f64,
    /// oncebox with the handler that is configured as SQL.
    sql: f64,
    /// Messages per second that had come before.
    duplicates: f64,
}

pub(super) async fn measure<S: Yard>(bed: &mut Bed<S>, load: Load) -> Result<Vec<Figure>, AppError> {
    let mut rounds = Vec::new();
    for _ in Rounds::start("consume", load.rounds) {
        let numbers: &[usize] = if S::WRITERS > 1 { &[1, 4] } else { &[1] };
        let sides = ["loop", "hand1", "each1", "one1", "sets1", "sql1", "hand4", "each4", "one4", "sets4", "sql4"];
        let (topic, names) = bed.topic("consume", &sides[..1 + 5 * numbers.len()]).await?;
        let raw = bed.raw(LINGER).await?;
        let messages = Arc::new(Maker::new(&topic, load).rows(load.messages));
        raw.send_all(Arc::clone(&messages)).await?;
        let loop_by_hand = by_hand::one_by_one(bed, &names[0], &topic, load.messages / SLOW_SHARE).await?;
        bed.store.forget_by_hand().await?;
        let mut of_lanes = Vec::new();
        for (lanes, names) in numbers.iter().copied().zip(names[1..].chunks(5)) {
            let side = Side { store: &bed.store, broker: &bed.broker, topic: &topic, count: load.messages, lanes };
            let before = bed.store.effects().await?;
            let mut hands = [0.0; 2];
            for (at, effects) in [Effects::Together, Effects::Each].into_iter().enumerate() {
                hands[at] = by_hand::in_batches(bed, &names[at], &topic, load.messages, lanes, effects).await?;
                bed.store.forget_by_hand().await?;
            }
            let [by_hand, each_by_hand] = hands;
            let one = side.run(&names[2], Handlers::new().on(KIND, Effect)).await?;
            let sets = side.run(&names[3], Handlers::new().on_batch(KIND, InSets)).await?;
            let sql_handler = side.run(&names[4], sql(&bed.store).await?).await?;
            let done = bed.store.effects().await? - before;
            if done != 5 * load.messages {
                return Err(AppError::failed(format!("{done} effects came of {} messages", 5 * load.messages)));
            }
            of_lanes.push(Lanes { by_hand, each_by_hand, one, sets, sql: sql_handler, duplicates: 0.0 });
        }
        raw.send_all(messages).await?;
        let before = bed.store.effects().await?;
        for (lanes, (of, names)) in numbers.iter().copied().zip(of_lanes.iter_mut().zip(names[1..].chunks(5))) {
            let side = Side { store: &bed.store, broker: &bed.broker, topic: &topic, count: load.messages, lanes };
            of.duplicates = side.run(&names[4], sql(&bed.store).await?).await?;
        }
        if bed.store.effects().await? != before {
            return Err(AppError::failed("a message that came twice had a second effect"));
        }
        rounds.push(Round { loop_by_hand, lanes: of_lanes });
    }
    Ok(figures(&rounds))
}

fn figures(rounds: &[Round]) -> Vec<Figure> {
    const LOOP: &str = "one transaction a message, by hand, on one connection";
    const BATCH: &str = "by hand: 100 a transaction, ids and effects each in one statement";
    const EFFECT: &str = "an effect of the sql handler";
    const EACH: &str = "by hand: 100 a transaction, ids in one statement, effects in one each";
    // For one lane and for four, in this order: one message against the loop, against a batch by
    // hand, and against a statement each; sets; sql; a duplicate.
    const NAMES: [[&str; 6]; 2] = [
        ["consume.batches", "consume.one", "consume.one.of_each", "consume.sets", "consume.sql", "consume.duplicate"],
        [
            "consume.lanes",
            "consume.one.lanes",
            "consume.one.of_each.lanes",
            "consume.sets.lanes",
            "consume.sql.lanes",
            "consume.duplicate.lanes",
        ],
    ];
    let numbers = rounds.first().map_or(0, |round| round.lanes.len());
    let mut figures = Vec::new();
    for (at, names) in NAMES.iter().enumerate().take(numbers) {
        let figure = |name: usize, unit, against, of: fn(&Round, &Lanes) -> (f64, f64)| {
            let pairs: Vec<_> = rounds.iter().map(|round| of(round, &round.lanes[at])).collect();
            Figure::beside(names[name], unit, against, &pairs)
        };
        let looped = figure(0, "effects/s", LOOP, |round, lanes| (lanes.one, round.loop_by_hand));
        figures.extend([
            if at == 0 { looped.wanted(">= 3.5") } else { looped },
            figure(1, "effects/s", BATCH, |_, lanes| (lanes.one, lanes.by_hand)).wanted(">= 0.5"),
            figure(2, "effects/s", EACH, |_, lanes| (lanes.one, lanes.each_by_hand)),
            figure(3, "effects/s", BATCH, |_, lanes| (lanes.sets, lanes.by_hand)).wanted(">= 0.9"),
            figure(4, "effects/s", BATCH, |_, lanes| (lanes.sql, lanes.by_hand)).wanted(">= 0.9"),
            figure(5, "us", EFFECT, |_, lanes| (1e6 / lanes.duplicates, 1e6 / lanes.sql)).wanted("<= 0.2"),
        ]);
    }
    if numbers > 1 {
        // A partition has one worker by hand; here the lanes share its keys.
        const WORKER: &str = "by hand, the one worker that a partition has";
        let figure = |name, of: fn(&Lanes) -> f64| {
            let pairs: Vec<_> = rounds.iter().map(|round| (of(&round.lanes[1]), round.lanes[0].by_hand)).collect();
            Figure::beside(name, "effects/s", WORKER, &pairs)
        };
        figures.extend([
            figure("consume.one.partition", |lanes| lanes.one).wanted(">= 0.5"),
            figure("consume.sets.partition", |lanes| lanes.sets).wanted(">= 0.9"),
            figure("consume.sql.partition", |lanes| lanes.sql).wanted(">= 0.9"),
        ]);
    }
    figures
}

/// The consumer of oncebox, with some lanes.
pub(super) struct Side<'a, S: Yard> {
    pub(super) store: &'a S,
    pub(super) broker: &'a AnyBroker,
    pub(super) topic: &'a str,
    /// How many messages are there for it.
    pub(super) count: usize,
    pub(super) lanes: usize,
}

impl<S: Yard> Side<'_, S> {
    /// Consumes until nothing comes any more; messages per second.
    pub(super) async fn run(&self, name: &str, handlers: Handlers<S>) -> Result<f64, AppError> {
        let watched = Watched::new(Arc::clone(self.broker));
        let options = ConsumerOptions {
            lanes: self.lanes,
            until_idle: Some(Duration::from_millis(500)),
            ..ConsumerOptions::new(name, vec![self.topic.to_owned()])
        };
        let consumer =
            Consumer::new(self.store.clone(), Arc::new(watched.clone()), handlers, options, Health::default());
        consumer.run(CancellationToken::new()).await?;
        watched.look(|notes| match (notes.first_delivery, notes.last_acknowledged) {
            (Some(begin), Some(end)) if notes.deliveries >= self.count => Ok(rate(notes.deliveries, end.at - begin.at)),
            _ => {
                Err(AppError::failed(format!("{} messages were to be consumed, {} came", self.count, notes.deliveries)))
            }
        })
    }
}
