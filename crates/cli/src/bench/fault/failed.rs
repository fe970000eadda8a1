//! A key whose first message failed: how fast the messages behind it are handled once it succeeds,
//! beside a key that never failed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;

use super::SLOW_SHARE;
use super::running::{Running, drain};
use crate::bench::Load;
use crate::bench::bed::Bed;
use crate::bench::consume::Effect;
use crate::bench::figure::Figure;
use crate::bench::yard::Yard;
use crate::progress::Rounds;
use oncebox::app::AppError;
use oncebox::error::HandlerError;
use oncebox::message::Message;
use oncebox::{ConsumerOptions, HandlerTx, MessageHandler};

/// The most messages of the key, with the failed one. The status counts no more than twice that.
const BEHIND_MAX: usize = 5_000;
/// The time between two tries of the failed message.
const RETRY: Duration = Duration::from_millis(500);
/// How long it may take to store the waiting messages.
const STORED_MAX: Duration = Duration::from_secs(300);

#[derive(Debug, Default)]
struct State {
    mended: AtomicBool,
    /// When the first message succeeded.
    began: OnceLock<Instant>,
}

/// A handler that fails until `mended` is set.
#[derive(Debug)]
struct Failing(Arc<State>);

#[async_trait]
impl<S: Yard> MessageHandler<S> for Failing {
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError> {
        if !self.0.mended.load(Ordering::Relaxed) {
            return Err(HandlerError::retryable("it fails until it is mended"));
        }
        self.0.began.get_or_init(Instant::now);
        Effect.handle(message, tx).await
    }
}

pub(super) async fn measure<S: Yard>(bed: &mut Bed<S>, load: Load) -> Result<Figure, AppError> {
    let messages = (load.messages / SLOW_SHARE).clamp(1, BEHIND_MAX);
    let load = Load { messages, keys: 1, ..load };
    let mut pairs = Vec::new();
    for _ in Rounds::start("after a failure", load.rounds) {
        let (topic, names) = bed.filled("failed", &["plain", "failed"], load).await?;
        let before = bed.store.effects().await?;
        let plain = drain(bed, &names[0], &topic, before + load.messages).await?.rate(before);
        pairs.push((failed(bed, &names[1], &topic, load.messages).await?, plain));
    }
    let against = "a key that never failed";
    Ok(Figure::beside("fault.after_failure", "effects/s", against, &pairs).wanted(">= 0.25"))
}

/// Effects per second from the first success after the failure, with all messages stored behind it.
async fn failed<S: Yard>(bed: &Bed<S>, name: &str, topic: &str, count: usize) -> Result<f64, AppError> {
    let before = bed.store.effects().await?;
    let mut options = ConsumerOptions::new(name, vec![topic.to_owned()]);
    options.retry.in_place = 0;
    options.retry.attempts_max = 10_000;
    (options.retry.base, options.retry.cap) = (RETRY, RETRY);
    let state = Arc::new(State::default());
    let mut running = Running::start(bed, options, Failing(Arc::clone(&state)));
    let looks = Instant::now();
    while waiting(bed, name).await? < count {
        running.check().await?;
        if looks.elapsed() > STORED_MAX {
            let text = format!("{count} messages were not stored as waiting within {STORED_MAX:?}");
            return Err(AppError::failed(text));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    state.mended.store(true, Ordering::Relaxed);
    while state.began.get().is_none() {
        running.check().await?;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let since = state.began.get().copied().unwrap_or_else(Instant::now);
    let course = running.course(&bed.store, since, before + count).await?;
    running.stop().await?;
    Ok(course.rate(before))
}

async fn waiting<S: Yard>(bed: &Bed<S>, name: &str) -> Result<usize, AppError> {
    let consumers = bed.store.status().await?.consumers;
    let waiting = consumers.iter().find(|one| one.name == name).map_or(0, |one| one.waiting);
    Ok(usize::try_from(waiting).unwrap_or(usize::MAX))
}
