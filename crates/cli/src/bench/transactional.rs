//! Measures what a transactional operation costs, beside the same transaction without the engine.
//!
//! Each request is one transaction: a payment by the statements of the example service, and one
//! message. [`CLIENTS`] clients send at the same time. Both sides use the same pool, commit
//! synchronously, and are measured in turns.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use uuid::Uuid;

use super::Load;
use super::bed::Bed;
use super::crowd::crowd;
use super::figure::Figure;
use super::pay::{CLIENTS, Pay, milliseconds, paid};
use super::usage::resident;
use super::work::Maker;
use super::yard::Yard;
use crate::common::failed;
use crate::progress::Rounds;
use oncebox::StoreError;
use oncebox::app::AppError;
use oncebox::operation::{
    Answered, Code, Endpoint, Engine, EngineOptions, Key, KeyFormat, KeyGiven, Mode, Registered, Route, Scope,
};

const DUPLICATES: usize = 1_000;

/// How a request was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    Executed,
    Replayed,
    InProgress,
}

impl Seen {
    fn must_be(self, expected: Self) -> Result<(), AppError> {
        if self == expected {
            return Ok(());
        }
        Err(AppError::failed(format!("a request that should be {expected:?} was {self:?}")))
    }
}

/// A typed operation in one transaction, and all that its requests need.
struct Transactional<S: Yard> {
    engine: Engine<S>,
    pay: Registered,
    maker: Arc<Maker>,
    scope: Scope,
}

impl<S: Yard> Transactional<S> {
    fn open(store: S, maker: &Arc<Maker>) -> Result<Self, AppError> {
        let engine = Engine::new(store, EngineOptions::default());
        let pay = engine.protect(Endpoint::typed::<Pay>(Route::new(Mode::Transactional))).map_err(failed)?;
        let scope = Scope::new("t1", "p1").map_err(failed)?;
        Ok(Self { engine, pay, maker: Arc::clone(maker), scope })
    }

    /// Sends one request and returns how it was answered.
    async fn ask(&self, key: &str, command: Pay) -> Result<Seen, AppError> {
        let key = Key::parse(key.as_bytes(), KeyFormat::Opaque).map_err(failed)?;
        let maker = Arc::clone(&self.maker);
        let answered = self
            .engine
            .execute_transactional(
                &self.pay,
                Some(self.scope.clone()),
                KeyGiven::Given(key),
                command,
                move |pay: &Pay, tx| {
                    let maker = Arc::clone(&maker);
                    Box::pin(async move { paid(tx, pay, &maker).await })
                },
            )
            .await;
        match answered {
            Answered::Reply { reply, replayed } if reply.status == 201 => {
                Ok(if replayed { Seen::Replayed } else { Seen::Executed })
            }
            Answered::Problem(problem) if problem.code == Code::InProgress => Ok(Seen::InProgress),
            Answered::Reply { reply, .. } => Err(AppError::failed(format!("a payment was answered {}", reply.status))),
            Answered::Problem(problem) => Err(AppError::failed(format!("a payment was answered {}", problem.code))),
        }
    }
}

pub(super) async fn measure<S: Yard>(bed: &mut Bed<S>, load: Load) -> Result<Vec<Figure>, AppError> {
    let (topic, _) = bed.topic("http", &[]).await?;
    let maker = Arc::new(Maker::new(&topic, load));
    let operation = Arc::new(Transactional::open(bed.store.clone(), &maker)?);
    // Warms the connections up: each prepares its statements and compiles its functions once.
    bare(bed, &maker, load.messages / 10).await?;
    through(&operation, load.messages / 10).await?;
    let (mut same_tx, mut replays) = (Vec::new(), Vec::new());
    for _ in Rounds::start("http", load.rounds) {
        let without = bare(bed, &maker, load.messages).await?;
        same_tx.push((milliseconds(through(&operation, load.messages).await?), milliseconds(without)));
        replays.push((replayed(&operation, load.messages).await?, without));
    }
    let memory = duplicates(&operation).await?;
    let figures = vec![
        Figure::beside("http.same_tx", "ms", "the same payment and message in a transaction of one's own", &same_tx)
            .wanted("<= 1.7"),
        Figure::beside("http.replay", "requests/s", "that transaction, per second", &replays).wanted(">= 1"),
        Figure::alone("http.duplicates", "MB", &[memory]).wanted("<= 64"),
    ];
    #[cfg(all(feature = "http", feature = "client"))]
    let figures = [figures, super::served::measure(bed, &maker, load).await?].concat();
    Ok(figures)
}

async fn bare<S: Yard>(bed: &Bed<S>, maker: &Arc<Maker>, count: usize) -> Result<f64, AppError> {
    let (store, maker) = (bed.store.clone(), Arc::clone(maker));
    let one = move |_| {
        let (store, maker) = (store.clone(), Arc::clone(&maker));
        async move {
            let mut tx = store.pool().begin().await.map_err(StoreError::from)?;
            let pay = Pay::any();
            S::pay(&mut tx, Uuid::now_v7(), pay.account, pay.amount).await?;
            oncebox::store::enqueue(&mut *tx, maker.message()).await?;
            tx.commit().await.map_err(StoreError::from)?;
            Ok(())
        }
    };
    crowd(CLIENTS, count, one).await
}

async fn through<S: Yard>(operation: &Arc<Transactional<S>>, count: usize) -> Result<f64, AppError> {
    let operation = Arc::clone(operation);
    let one = move |_| {
        let operation = Arc::clone(&operation);
        async move { operation.ask(&Uuid::now_v7().to_string(), Pay::any()).await?.must_be(Seen::Executed) }
    };
    crowd(CLIENTS, count, one).await
}

/// Replays per second: repeats requests of payments that were made before.
async fn replayed<S: Yard>(operation: &Arc<Transactional<S>>, count: usize) -> Result<f64, AppError> {
    let keys: Arc<Vec<String>> = Arc::new((0..CLIENTS * 8).map(|_| Uuid::now_v7().to_string()).collect());
    let ask = |expected: Seen| {
        let (operation, keys) = (Arc::clone(operation), Arc::clone(&keys));
        move |at: usize| {
            let (operation, key) = (Arc::clone(&operation), keys[at % keys.len()].clone());
            async move {
                let pay = Pay { account: 7, amount: 1_000, note: String::new() };
                operation.ask(&key, pay).await?.must_be(expected)
            }
        }
    };
    crowd(CLIENTS, keys.len(), ask(Seen::Executed)).await?;
    crowd(CLIENTS, count, ask(Seen::Replayed)).await
}

/// By how many megabytes the memory of this process, which is that of the clients too, grows while
/// a thousand equal requests of 1 KB are answered.
async fn duplicates<S: Yard>(operation: &Arc<Transactional<S>>) -> Result<f64, AppError> {
    let key = Uuid::now_v7().to_string();
    let before = resident(std::process::id())?;
    let mut tasks = JoinSet::new();
    for _ in 0..DUPLICATES {
        let (operation, key) = (Arc::clone(operation), key.clone());
        // Those that come while the first runs are answered as in progress, later ones by a replay.
        tasks.spawn(async move {
            let pay = Pay { account: 7, amount: 1_000, note: "x".repeat(1_024) };
            operation.ask(&key, pay).await
        });
    }
    let (mut peak, mut ran) = (before, 0);
    let mut looks = tokio::time::interval(Duration::from_millis(1));
    loop {
        tokio::select! {
            _ = looks.tick() => peak = peak.max(resident(std::process::id())?),
            ended = tasks.join_next() => {
                let Some(ended) = ended else { break };
                let seen = ended.map_err(failed)??;
                ran += usize::from(seen == Seen::Executed);
            }
        }
    }
    if ran != 1 {
        return Err(AppError::failed(format!("of {DUPLICATES} equal requests {ran} were executed, not 1")));
    }
    Ok((peak - before) / 1e6)
}
