//! A publishing session: the runtime's side.
//!
//! Guarantees: `settle` loses nothing when it is dropped, because outcomes stay in the state that
//! the session shares with its task (`unsettled`) until they are handed over. Dropping the session
//! cuts its connection.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::config::Known;
use super::confirms::{Confirms, Rows};
use super::cuts::Cuts;
use super::socket::Link;
use super::topology::Topology;
use super::unsettled::Unsettled;
use crate::broker::{Publisher, Settled, TopicState};
use crate::error::BrokerError;
use crate::message::OutgoingMessage;
use crate::task;

pub(super) struct RabbitPublisher {
    link: Arc<Link>,
    shared: Arc<Unsettled>,
    rows: Option<mpsc::UnboundedSender<Rows>>,
    task: JoinHandle<()>,
    config: Arc<Known>,
    exchange_seen: bool,
}

impl RabbitPublisher {
    /// Opens the connection and its confirm channels, so that the first message does not wait.
    pub(super) async fn open(config: &Arc<Known>, cuts: &Arc<Cuts>) -> Result<Self, BrokerError> {
        let link = Arc::new(Link::open(config, "oncebox publisher").await?);
        let shared = Arc::new(Unsettled::default());
        let (rows, receiver) = mpsc::unbounded_channel();
        let confirms = Confirms::open(config, Arc::clone(&link), Arc::clone(&shared), Arc::clone(cuts)).await?;
        Ok(Self {
            link,
            shared,
            rows: Some(rows),
            task: task::spawn(confirms.run(receiver)),
            config: Arc::clone(config),
            exchange_seen: false,
        })
    }

    fn ended(&self) -> Result<(), BrokerError> {
        self.shared.lock().ended()
    }
}

#[async_trait]
impl Publisher for RabbitPublisher {
    async fn topics(&mut self, topics: &[String]) -> Result<Vec<TopicState>, BrokerError> {
        self.ended()?;
        // R16 needs this to tell a missing destination from a lost broker. It is asked only before
        // the session sends anything, because a server that blocks the connection answers nothing
        // on it. If the exchange is deleted later, the next publish ends the session, and a new one
        // asks, and declares it.
        if !self.exchange_seen {
            match Topology::new(&self.link, &self.config).exchange_where_missing().await {
                Ok(()) => self.exchange_seen = true,
                Err(BrokerError::Destination(why) | BrokerError::Refused(why)) => {
                    let why = format!(
                        "the exchange `{}` is not there and cannot be declared: {why}; declare it, or give this user the right to",
                        self.config.exchange
                    );
                    return Ok(vec![TopicState::NotReady(why); topics.len()]);
                }
                Err(error) => return Err(error),
            }
        }
        let mut state = self.shared.lock();
        Ok(topics.iter().map(|topic| state.state_of(topic, self.config.route_retry)).collect())
    }

    async fn send(&mut self, rows: Vec<(u64, OutgoingMessage)>) -> Result<(), BrokerError> {
        let held_bytes_max = self.config.held_bytes_max;
        let bytes: usize = rows.iter().map(|(_, message)| message.weight()).sum();
        let known = self.shared.until(|state| state.take_in(rows.len(), bytes, held_bytes_max)).await?;
        let sent = self.rows.as_ref().is_some_and(|sender| sender.send(Rows { rows, known }).is_ok());
        if sent { Ok(()) } else { self.ended().and(Err(BrokerError::Session("the session has ended".to_owned()))) }
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), BrokerError> {
        self.shared.until(|state| state.hand_over(settled)).await
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
