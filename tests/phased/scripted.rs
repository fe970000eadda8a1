//! A provider that answers as it is told, and remembers what it was sent.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;
use oncebox::operation::phased::{Asked, Call, Prepare, Provider, Sent};
use oncebox::operation::provider::{Answer, Matches, QueryAnswer};
use oncebox::{HandlerError, async_trait};
use tokio::sync::Notify;

use crate::world::SOON;

/// What a call does.
pub(crate) enum Act {
    Answers(Answer),
    /// The process ends here: its task dies with the call.
    Dies,
    /// Runs this first.
    After(BoxFuture<'static, ()>, Answer),
}

/// A send that arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Arrived {
    pub(crate) send: u32,
    pub(crate) key: String,
    pub(crate) bytes: Vec<u8>,
    pub(crate) at: SystemTime,
}

/// A call that stands still.
#[derive(Clone, Default)]
pub(crate) struct Held {
    reached: Arc<Notify>,
    go: Arc<Notify>,
}

impl Held {
    /// Waits until the provider is called.
    pub(crate) async fn reached(&self) {
        tokio::time::timeout(SOON, self.reached.notified()).await.expect("the provider is called");
    }

    pub(crate) fn go_on(&self) {
        self.go.notify_one();
    }
}

#[derive(Clone, Default)]
pub(crate) struct Scripted(Arc<Inner>);

#[derive(Default)]
struct Inner {
    acts: Mutex<VecDeque<Act>>,
    queries: Mutex<VecDeque<QueryAnswer>>,
    arrived: Mutex<Vec<Arrived>>,
    asked: AtomicU32,
    prepared: AtomicU32,
    slow: Mutex<Option<Duration>>,
}

/// It did what was asked.
pub(crate) fn done() -> Answer {
    Answer::Status {
        status: 201,
        listed: false,
        in_progress: false,
        replayed: false,
        matches: Matches::ALL,
        retry_after: None,
    }
}

/// It refused for good.
pub(crate) fn declined() -> Answer {
    Answer::Status {
        status: 402,
        listed: true,
        in_progress: false,
        replayed: false,
        matches: Matches::default(),
        retry_after: None,
    }
}

impl Scripted {
    pub(crate) fn then(self, act: Act) -> Self {
        self.0.acts.lock().unwrap().push_back(act);
        self
    }

    pub(crate) fn answers(self, answer: Answer) -> Self {
        self.then(Act::Answers(answer))
    }

    /// Answers this when it may go on.
    pub(crate) fn held(self, answer: Answer) -> (Self, Held) {
        let held = Held::default();
        let waits = held.clone();
        let until_told = Box::pin(async move {
            waits.reached.notify_one();
            waits.go.notified().await;
        });
        (self.then(Act::After(until_told, answer)), held)
    }

    pub(crate) fn finds(self, answer: QueryAnswer) -> Self {
        self.0.queries.lock().unwrap().push_back(answer);
        self
    }

    /// With a timeout of its own; else one second.
    pub(crate) fn timeout(self, timeout: Duration) -> Self {
        *self.0.slow.lock().unwrap() = Some(timeout);
        self
    }

    pub(crate) fn arrived(&self) -> Vec<Arrived> {
        self.0.arrived.lock().unwrap().clone()
    }

    pub(crate) fn asked(&self) -> u32 {
        self.0.asked.load(Ordering::SeqCst)
    }
}

impl std::fmt::Debug for Scripted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Scripted")
    }
}

#[async_trait]
impl Provider for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn version(&self) -> u32 {
        1
    }

    fn timeout(&self) -> Duration {
        self.0.slow.lock().unwrap().unwrap_or(Duration::from_secs(1))
    }

    async fn send(&self, call: &Call<'_>) -> Sent {
        let (key, bytes) = (call.key.to_string(), call.bytes.to_vec());
        let arrived = Arrived { send: call.send, key, bytes, at: SystemTime::now() };
        self.0.arrived.lock().unwrap().push(arrived);
        let act = self.0.acts.lock().unwrap().pop_front();
        let answer = match act {
            Some(Act::Answers(answer)) => answer,
            Some(Act::Dies) => panic!("the process ends here"),
            Some(Act::After(first, answer)) => {
                first.await;
                answer
            }
            None => panic!("one send more than was told"),
        };
        Sent { answer, saw: format!("answer to send {}", call.send).into_bytes() }
    }

    async fn query(&self, _: &Call<'_>) -> Asked {
        self.0.asked.fetch_add(1, Ordering::SeqCst);
        let answer = self.0.queries.lock().unwrap().pop_front().unwrap_or(QueryAnswer::Failed);
        Asked { answer, status: Some(200), saw: b"query".to_vec() }
    }
}

impl Prepare<i64> for Scripted {
    fn prepare(&self, amount: &i64, _: &str) -> Result<Vec<u8>, HandlerError> {
        // Bytes that are never made the same twice.
        let made = self.0.prepared.fetch_add(1, Ordering::SeqCst);
        Ok(format!("{amount} made {made} {:?}", SystemTime::now()).into_bytes())
    }
}
