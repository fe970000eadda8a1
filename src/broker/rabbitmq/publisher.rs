//! A publishing session: the runtime's side, and the state that it shares with its task.
//!
//! Guarantees: `settle` loses nothing when it is dropped, because outcomes stay in the shared state
//! until they are handed over. Dropping the session cuts its connection. A topic without a route is
//! not ready before it is time to try again.
//!
//! Not here: confirms, returns and channels (`confirms`), the order of a key (`lanes`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;

use super::config::RabbitConfig;
use super::confirms::{Confirms, Rows};
use super::cuts::Cuts;
use super::socket::Link;
use super::topology::Topology;
use crate::broker::{Publisher, Receipt, Refusal, Settled, TopicState};
use crate::error::BrokerError;
use crate::message::OutgoingMessage;

/// The state that the publisher and the task share.
#[derive(Debug, Default)]
pub(super) struct Unsettled {
    state: Mutex<State>,
    /// Notified when there are outcomes, an end or room, or when the server blocks or unblocks.
    changed: Notify,
}

/// What the lock protects; it is never held over an await.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Outcomes that were not handed over to the runtime yet.
    pub(super) outcomes: Vec<Settled>,
    /// How often outcomes were handed over. The runtime sends later rows with their knowledge.
    pub(super) handovers: u64,
    /// The number of rows that were sent and have no outcome.
    pub(super) outstanding: usize,
    /// Bytes of those rows.
    pub(super) held_bytes: usize,
    /// Why the session ended.
    pub(super) ended: Option<BrokerError>,
    /// Why the server accepts no messages now.
    pub(super) blocked: Option<String>,
    /// Topics whose last message was returned: when, and why.
    pub(super) no_route: HashMap<String, (Instant, String)>,
}

impl State {
    /// Whether a topic can be sent to. After a message was returned the topic is not ready for this
    /// time.
    fn state_of(&mut self, topic: &str, route_retry: Duration) -> TopicState {
        if let Some((at, why)) = self.no_route.get(topic)
            && at.elapsed() < route_retry
        {
            return TopicState::NotReady(why.clone());
        }
        // AMQP does not show routes in advance: only sending a row shows whether there is one.
        self.no_route.remove(topic);
        TopicState::Ready
    }

    /// Records the outcome of a row.
    pub(super) fn settle(&mut self, tag: u64, weight: usize, outcome: Result<Receipt, Refusal>) {
        self.outcomes.push(Settled { tag, outcome });
        self.outstanding = self.outstanding.saturating_sub(1);
        self.held_bytes = self.held_bytes.saturating_sub(weight);
    }
}

impl Unsettled {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn notify(&self) {
        self.changed.notify_waiters();
    }

    pub(super) fn end(&self, error: BrokerError) {
        self.lock().ended.get_or_insert(error);
        self.notify();
    }

    /// Waits until `look` returns a value for the state.
    async fn until<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(found) = look(&mut self.lock()) {
                return found;
            }
            changed.await;
        }
    }
}

/// One publishing session on RabbitMQ, with a connection of its own.
pub(super) struct RabbitPublisher {
    link: Arc<Link>,
    shared: Arc<Unsettled>,
    rows: Option<mpsc::UnboundedSender<Rows>>,
    task: JoinHandle<()>,
    config: RabbitConfig,
    /// True once the exchange was seen in this session.
    exchange_seen: bool,
}

impl RabbitPublisher {
    /// Opens the connection and its confirm channels, so that the first message does not wait.
    pub(super) async fn open(config: &RabbitConfig, cuts: &Arc<Cuts>) -> Result<Self, BrokerError> {
        let link = Arc::new(Link::open(config, "oncebox publisher").await?);
        let shared = Arc::new(Unsettled::default());
        let (rows, receiver) = mpsc::unbounded_channel();
        let confirms = Confirms::open(config, Arc::clone(&link), Arc::clone(&shared), Arc::clone(cuts)).await?;
        Ok(Self {
            link,
            shared,
            rows: Some(rows),
            task: tokio::spawn(confirms.run(receiver)),
            config: config.clone(),
            exchange_seen: false,
        })
    }

    fn ended(&self) -> Result<(), BrokerError> {
        self.shared.lock().ended.clone().map_or(Ok(()), Err)
    }
}

#[async_trait]
impl Publisher for RabbitPublisher {
    async fn topics(&mut self, topics: &[String]) -> Result<Vec<TopicState>, BrokerError> {
        self.ended()?;
        // R16 needs this to tell a missing destination from a lost broker. It is asked only before
        // the session sends anything, because a server that blocks the connection answers nothing
        // on it. If the exchange is deleted later, the next publish ends the session, and a new one
        // asks.
        if !self.exchange_seen {
            let exchange = &self.config.exchange;
            self.exchange_seen = Topology::new(&self.link, &self.config).exchange_exists(exchange).await?;
            if !self.exchange_seen {
                let why = format!("the exchange `{exchange}` is not there; `publisher` declares it at its start");
                return Ok(vec![TopicState::NotReady(why); topics.len()]);
            }
        }
        let mut state = self.shared.lock();
        Ok(topics.iter().map(|topic| state.state_of(topic, self.config.route_retry)).collect())
    }

    async fn send(&mut self, rows: Vec<(u64, OutgoingMessage)>) -> Result<(), BrokerError> {
        let held_bytes_max = self.config.held_bytes_max;
        let bytes: usize = rows.iter().map(|(_, message)| message.weight()).sum();
        let known = self
            .shared
            .until(|state| match &state.ended {
                Some(error) => Some(Err(error.clone())),
                // While the server is blocked no room becomes free. Then `send` must not wait, so
                // that the runtime can ask why.
                None if state.held_bytes >= held_bytes_max && state.blocked.is_none() => None,
                None => {
                    state.outstanding += rows.len();
                    state.held_bytes += bytes;
                    Some(Ok(state.handovers))
                }
            })
            .await?;
        let sent = self.rows.as_ref().is_some_and(|sender| sender.send(Rows { rows, known }).is_ok());
        if sent { Ok(()) } else { self.ended().and(Err(BrokerError::Session("the session has ended".to_owned()))) }
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), BrokerError> {
        self.shared
            .until(|state| {
                if !state.outcomes.is_empty() {
                    settled.append(&mut state.outcomes);
                    state.handovers += 1;
                    return Some(Ok(()));
                }
                match &state.ended {
                    Some(error) => Some(Err(error.clone())),
                    None => (state.outstanding == 0).then_some(Ok(())),
                }
            })
            .await
    }

    fn blocked(&self) -> Option<String> {
        self.shared.lock().blocked.clone()
    }

    async fn close(mut self: Box<Self>) {
        // The task ends when its sender is dropped.
        self.rows = None;
        let _ = tokio::time::timeout(self.config.close_deadline, &mut self.task).await;
        // A server that blocks the connection does not read the request. The drop cuts it.
        if self.blocked().is_none() {
            self.link.close().await;
        }
    }
}

impl Drop for RabbitPublisher {
    fn drop(&mut self) {
        self.task.abort();
        self.link.cut();
    }
}
