//! Growth: what relay and consumer reach while much is stored.
//!
//! The store with much and the store with little are two databases on one server, and take turns;
//! many keys and few are measured in one. Beside a relay the gauges of `/metrics` are read, as the
//! program `publisher` reads them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::Load;
use super::bed::{Bed, LINGER};
use super::consume::{Side, sql};
use super::figure::Figure;
use super::keys::FILL;
use super::relay::{fill, rate};
use super::started::Started;
use super::watched::Watched;
use super::work::Maker;
use super::yard::Yard;
use crate::progress::Rounds;
use oncebox::adapter::keep_gauges;
use oncebox::app::AppError;
use oncebox::observe::Health;
use oncebox::store::ConsumerSpec;
use oncebox::{Relay, RelayOptions};

/// Pending rows beside which a relay is measured, and the name of the figure. Sizes beyond
/// `--pending` are left out.
const PENDING: [(usize, &str); 4] = [
    (10_000, "growth.relay.10k"),
    (100_000, "growth.relay.100k"),
    (1_000_000, "growth.relay.1m"),
    (5_000_000, "growth.relay.5m"),
];
/// What each of them is beside: this many rows are pending, or `--messages` where that is more.
const USUAL: usize = 100_000;
/// Inbox rows beside which a consumer is measured. Numbers beyond `--stored` are left out.
const STORED: [(u64, &str); 2] = [(1_000_000, "growth.consume.1m"), (5_000_000, "growth.consume.5m")];
/// Held rows at most; `--pending` where that is less.
const HELD: usize = 200_000;
/// More than are held: otherwise the relay would stop reading.
const HELD_MAX: usize = 2 * HELD;
/// As many as ten thousand topics with a hundred keys each have.
const KEYS: u32 = 1_000_000;
const CONSUMERS: usize = 1_000;
const LANES: usize = 4;
/// How long a relay may prove nothing.
const PATIENCE: Duration = Duration::from_secs(120);

/// Measures beside up to `most` pending rows, and up to `stored` ids in the inbox.
pub(super) async fn measure<S: Yard>(
    bed: &mut Bed<S>,
    load: Load,
    most: usize,
    stored: u64,
) -> Result<Vec<Figure>, AppError> {
    let mut figures = vec![keys(bed, load).await?];
    for phase in [Phase::Consumers, Phase::Inbox, Phase::Held, Phase::Pending] {
        // The embedded broker makes a topic with its first message, so it refuses none.
        if phase == Phase::Held && bed.broker.name() == "embedded" {
            continue;
        }
        let (many, own) = bed.beside().await?;
        let measured = match many.make_tables().await {
            Err(error) => Err(error),
            Ok(()) => match phase {
                Phase::Consumers => consumers(bed, &many, load).await,
                Phase::Inbox => inbox(bed, &many, load, stored).await,
                Phase::Held => held(bed, &many, load, most.clamp(1, HELD)).await.map(|figure| vec![figure]),
                Phase::Pending => pending(bed, &many, load, most).await,
            },
        };
        many.close().await;
        own.drop_it::<S>().await?;
        figures.extend(measured?);
    }
    Ok(figures)
}

/// What is much in the second database. Each has one of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Consumers,
    Inbox,
    Held,
    /// Last, because it leaves rows in the first database.
    Pending,
}

/// A database, and how many rows of its outbox are not relayed.
struct Outbox<'a, S> {
    store: &'a S,
    pending: usize,
}

impl<'a, S: Yard> Outbox<'a, S> {
    fn of(store: &'a S) -> Self {
        Self { store, pending: 0 }
    }

    /// Rows per second of the first `count` rows, with this many pending at the beginning.
    async fn relay(&mut self, bed: &Bed<S>, maker: &Maker, pending: usize, count: usize) -> Result<f64, AppError> {
        fill(self.store, maker, pending.saturating_sub(self.pending)).await?;
        self.pending = self.pending.max(pending);
        let watched = Watched::new(Arc::clone(&bed.broker));
        let options = RelayOptions { held_rows_max: HELD_MAX, ..RelayOptions::new("growth") };
        let relay = Relay::new(self.store.clone(), Arc::new(watched.clone()), options, Health::default());
        let mut gauges = JoinSet::new();
        gauges.spawn(keep_gauges(self.store.clone().into_duties()));
        let mut relay = Started::begin(move |stop| async move { relay.run(stop).await });
        let measured = tokio::select! {
            measured = proven(&watched, count) => measured,
            ended = relay.ended() => {
                ended?;
                return Err(AppError::failed("the relay ended before its rows were sent"));
            }
        };
        relay.stop().await?;
        self.pending = self.pending.saturating_sub(watched.look(|notes| notes.proven));
        measured
    }
}

/// Waits until this many messages are proven. Returns messages per second, from the opening of the
/// session to the last proof.
async fn proven(watched: &Watched, count: usize) -> Result<f64, AppError> {
    let (mut moved_at, mut before) = (Instant::now(), 0);
    loop {
        let (proven, begin, end) = watched.look(|notes| (notes.proven, notes.warm, notes.last_proof));
        if let (Some(begin), Some(end)) = (begin, end)
            && proven >= count
        {
            return Ok(rate(proven, end.at - begin.at));
        }
        if proven > before {
            (moved_at, before) = (Instant::now(), proven);
        } else if moved_at.elapsed() > PATIENCE {
            return Err(AppError::failed(format!(
                "{proven} messages of the relay were proven, and none for two minutes"
            )));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn pending<S: Yard>(bed: &mut Bed<S>, many: &S, load: Load, most: usize) -> Result<Vec<Figure>, AppError> {
    let (topic, _) = bed.topic("growth", &["sink"]).await?;
    let maker = Maker::new(&topic, load);
    let few = bed.store.clone();
    let (mut many, mut few) = (Outbox::of(many), Outbox::of(&few));
    let mut figures = Vec::new();
    for (size, name) in PENDING.into_iter().filter(|(size, _)| *size <= most) {
        let mut pairs = Vec::new();
        for _ in Rounds::start(name, load.rounds) {
            let count = load.messages.min(size);
            let usual = few.relay(bed, &maker, USUAL.max(count), count).await?;
            pairs.push((many.relay(bed, &maker, size, count).await?, usual));
        }
        let against = "the same number of rows, with 100,000 pending, or --messages where that is more";
        figures.push(Figure::beside(name, "rows/s", against, &pairs).wanted(">= 0.85"));
    }
    Ok(figures)
}

async fn held<S: Yard>(bed: &mut Bed<S>, many: &S, load: Load, held: usize) -> Result<Figure, AppError> {
    let (topic, _) = bed.topic("held", &["sink"]).await?;
    // Nobody makes this one.
    fill(many, &Maker::new(&format!("{topic}-nowhere"), load), held).await?;
    let holder = RelayOptions { until_empty: true, held_rows_max: HELD_MAX, ..RelayOptions::new("growth") };
    Relay::new(many.clone(), Arc::clone(&bed.broker), holder, Health::default()).run(CancellationToken::new()).await?;
    let maker = Maker::new(&topic, load);
    let mut pairs = Vec::new();
    for _ in Rounds::start("held rows", load.rounds) {
        let few = bed.store.clone();
        let usual = Outbox::of(&few).relay(bed, &maker, load.messages, load.messages).await?;
        pairs.push((Outbox::of(many).relay(bed, &maker, load.messages, load.messages).await?, usual));
    }
    Ok(Figure::beside("growth.relay.held", "rows/s", "the same with no held rows", &pairs).wanted(">= 0.85"))
}

/// The relay with a million keys.
async fn keys<S: Yard>(bed: &mut Bed<S>, load: Load) -> Result<Figure, AppError> {
    let (topic, _) = bed.topic("keys", &["sink"]).await?;
    let (usual, many) = (Maker::new(&topic, load), Maker::new(&topic, Load { keys: KEYS, ..load }));
    let store = bed.store.clone();
    // The first session on a topic makes its files.
    Outbox::of(&store).relay(bed, &usual, load.messages, load.messages).await?;
    let mut pairs = Vec::new();
    for _ in Rounds::start("keys", load.rounds) {
        let usual = Outbox::of(&store).relay(bed, &usual, load.messages, load.messages).await?;
        pairs.push((Outbox::of(&store).relay(bed, &many, load.messages, load.messages).await?, usual));
    }
    Ok(Figure::beside("growth.relay.keys", "rows/s", "the same with `--keys` keys", &pairs).wanted(">= 0.85"))
}

/// Relay and consumer beside a thousand registered consumers.
async fn consumers<S: Yard>(bed: &mut Bed<S>, many: &S, load: Load) -> Result<Vec<Figure>, AppError> {
    for at in 0..CONSUMERS {
        many.register(&ConsumerSpec { name: format!("growth-{at}"), id_rule: "envelope".into(), accept: false })
            .await?;
    }
    let (topic, names) = bed.topic("consumers", &["few", "many"]).await?;
    let (maker, few) = (Maker::new(&topic, load), bed.store.clone());
    let (mut relayed, mut consumed) = (Vec::new(), Vec::new());
    for _ in Rounds::start("registered consumers", load.rounds) {
        let usual = Outbox::of(&few).relay(bed, &maker, load.messages, load.messages).await?;
        relayed.push((Outbox::of(many).relay(bed, &maker, load.messages, load.messages).await?, usual));
        let usual = consume(bed, &few, &topic, &names[0], 2 * load.messages).await?;
        consumed.push((consume(bed, many, &topic, &names[1], 2 * load.messages).await?, usual));
    }
    let against = "the same with no other consumer";
    Ok(vec![
        Figure::beside("growth.relay.consumers", "rows/s", against, &relayed).wanted(">= 0.85"),
        Figure::beside("growth.consume.consumers", "effects/s", against, &consumed).wanted(">= 0.85"),
    ])
}

/// A consumer beside what it has handled.
async fn inbox<S: Yard>(bed: &mut Bed<S>, many: &S, load: Load, most: u64) -> Result<Vec<Figure>, AppError> {
    let (topic, names) = bed.topic("inbox", &["few", "many"]).await?;
    let (raw, few) = (bed.raw(LINGER).await?, bed.store.clone());
    let rows = || Arc::new(Maker::new(&topic, load).rows(load.messages));
    // It registers with its first run.
    raw.send_all(rows()).await?;
    for (store, name) in [(&few, &names[0]), (many, &names[1])] {
        consume(bed, store, &topic, name, load.messages).await?;
    }
    let mut figures = Vec::new();
    let mut filled = 0;
    for (size, figure) in STORED.into_iter().filter(|(size, _)| *size <= most) {
        while filled < size {
            many.fill_inbox(&names[1], filled, filled + FILL).await?;
            filled += FILL;
        }
        let mut pairs = Vec::new();
        for _ in Rounds::start(figure, load.rounds) {
            raw.send_all(rows()).await?;
            let usual = consume(bed, &few, &topic, &names[0], load.messages).await?;
            pairs.push((consume(bed, many, &topic, &names[1], load.messages).await?, usual));
        }
        let against = "the same with an inbox of these messages only";
        figures.push(Figure::beside(figure, "effects/s", against, &pairs).wanted(">= 0.9"));
    }
    Ok(figures)
}

/// Effects per second of the sql handler.
async fn consume<S: Yard>(bed: &Bed<S>, store: &S, topic: &str, name: &str, count: usize) -> Result<f64, AppError> {
    let lanes = LANES.min(S::WRITERS);
    let side = Side { store, broker: &bed.broker, topic, count, lanes };
    side.run(name, sql(store).await?).await
}
