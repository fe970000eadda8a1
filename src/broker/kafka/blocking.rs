//! Runs the blocking calls of librdkafka on threads that may wait, and its pollers on their own.
//!
//! Promise: no executor thread waits for the broker. A wrong password ends the wait early;
//! librdkafka itself would try again until the deadline.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::{Client, DefaultClientContext};
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::error::KafkaResult;
use rdkafka::metadata::Metadata;
use rdkafka::producer::{BaseProducer, Producer};
use rdkafka::{ClientConfig, ClientContext};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::client;
use super::config::KafkaConfig;
use super::context::{AskContext, Reports};
use super::properties;
use crate::error::BrokerError;

// The first wait for an answer; each next one is twice as long.
const FIRST_SLICE: Duration = Duration::from_millis(250);

// If so long a wait got no answer while all brokers are away, the question ends early.
const SURE_AFTER: Duration = Duration::from_secs(1);

/// How long reports are served after a question. librdkafka gives one report or log line per poll.
pub(super) const SERVE: Duration = Duration::from_millis(10);

/// Runs blocking work on a thread for such work.
///
/// # Cancel safety
/// When the future is dropped, the work still runs to its end; its answer is lost.
pub(super) async fn run<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, BrokerError> + Send + 'static,
) -> Result<T, BrokerError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(answer) => answer,
        Err(error) => Err(BrokerError::Session(format!("a call of the kafka client failed: {error}"))),
    }
}

/// Runs work on a thread of its own. The token is cancelled when it has ended, also by a panic.
pub(super) fn on_a_thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<CancellationToken, BrokerError> {
    let ended = CancellationToken::new();
    let says_so = ended.clone().drop_guard();
    let run = move || {
        let _says_so = says_so;
        work();
    };
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(run)
        .map(|_| ended)
        .map_err(|error| BrokerError::Session(format!("a thread for the {name}: {error}")))
}

/// Waits until a broker answers, refuses this client, or `OPEN_DEADLINE` passes; not so long where
/// all brokers are away.
pub(super) fn reach<C: ClientContext>(
    client: &Client<C>,
    reports: &Reports,
    serve: impl Fn(),
) -> Result<(), BrokerError> {
    let ask = |slice| client.fetch_cluster_id(slice).ok_or_else(|| "no answer in time".to_owned());
    ask_until(reports, client::OPEN_DEADLINE, serve, ask).map(drop)
}

/// Asks for the metadata of one topic, or of all, until it is answered, the broker refuses this
/// client, or `ASK_DEADLINE` passes; not so long where all brokers are away.
pub(super) fn metadata<C: ClientContext>(
    client: &Client<C>,
    reports: &Reports,
    topic: Option<&str>,
    serve: impl Fn(),
) -> Result<Metadata, BrokerError> {
    let ask = |slice| client.fetch_metadata(topic, slice).map_err(|error| error.to_string());
    ask_until(reports, client::ASK_DEADLINE, serve, ask)
}

fn ask_until<T>(
    reports: &Reports,
    deadline: Duration,
    serve: impl Fn(),
    ask: impl Fn(Duration) -> Result<T, String>,
) -> Result<T, BrokerError> {
    let end = Instant::now() + deadline;
    let mut slice = FIRST_SLICE;
    loop {
        let answer = ask(slice.min(end.saturating_duration_since(Instant::now())));
        serve();
        match answer {
            Ok(answer) => {
                reports.works();
                return Ok(answer);
            }
            Err(error)
                if reports.unauthorised().is_some()
                    || Instant::now() >= end
                    || (slice > SURE_AFTER && reports.all_down().is_some()) =>
            {
                return Err(reports.explain("kafka did not answer", &error));
            }
            // Without a connection the call may come back at once.
            Err(_) => std::thread::sleep(SERVE),
        }
        slice *= 2;
    }
}

/// The ids of the topics that have these names now, where the broker tells them.
pub(super) fn topic_ids(config: &KafkaConfig, topics: &[&str]) -> Result<Vec<(String, String)>, BrokerError> {
    let asker = Asker::with(&client::topic_asker(config))?;
    let mut ids = Vec::new();
    for topic in topics {
        asker.metadata(Some(topic))?;
        // The id comes in a log line after the answer. Old brokers do not tell it.
        let end = Instant::now() + SURE_AFTER;
        while asker.reports.topic_id(topic).is_none() && Instant::now() < end {
            asker.producer.poll(SERVE);
        }
        ids.extend(asker.reports.topic_id(topic).map(|id| ((*topic).to_owned(), id)));
    }
    Ok(ids)
}

pub(super) struct Asker {
    producer: BaseProducer<AskContext>,
    reports: Arc<Reports>,
}

impl Asker {
    pub(super) fn new(config: &KafkaConfig) -> Result<Self, BrokerError> {
        Self::with(&client::asker(config))
    }

    fn with(settings: &ClientConfig) -> Result<Self, BrokerError> {
        let context = AskContext::default();
        let reports = Arc::clone(&context.reports);
        let producer =
            BaseProducer::from_config_and_context(settings, context).map_err(|error| properties::refused(&error))?;
        Ok(Self { producer, reports })
    }

    pub(super) fn reach(&self) -> Result<(), BrokerError> {
        reach(self.client(), &self.reports, || self.producer.poll(SERVE))
    }

    pub(super) fn metadata(&self, topic: Option<&str>) -> Result<Metadata, BrokerError> {
        metadata(self.client(), &self.reports, topic, || self.producer.poll(SERVE))
    }

    pub(super) fn client(&self) -> &Client<AskContext> {
        self.producer.client()
    }
}

/// A client for administration. It does not report connection errors: first ask an [`Asker`]
/// whether the broker can be reached.
pub(super) struct Admin(Option<AdminClient<DefaultClientContext>>);

impl Admin {
    pub(super) fn new(config: &KafkaConfig) -> Result<Self, BrokerError> {
        let client = AdminClient::from_config_and_context(&client::asker(config), DefaultClientContext)
            .map_err(|error| properties::refused(&error))?;
        Ok(Self(Some(client)))
    }

    /// Sends one request to the broker and blocks the thread until the answer comes.
    /// `what` names the request in an error.
    pub(super) fn ask<T>(
        &self,
        what: &str,
        request: impl AsyncFnOnce(&AdminClient<DefaultClientContext>, &AdminOptions) -> KafkaResult<T>,
    ) -> Result<T, BrokerError> {
        let unavailable = |why: String| BrokerError::Unavailable(format!("{what}: {why}"));
        let client = self.0.as_ref().ok_or_else(|| unavailable("the client is gone".to_owned()))?;
        let options = AdminOptions::new()
            .request_timeout(Some(client::ASK_DEADLINE))
            .operation_timeout(Some(client::ASK_DEADLINE));
        Handle::current().block_on(request(client, &options)).map_err(|error| unavailable(error.to_string()))
    }
}

impl Drop for Admin {
    // Destroying the client takes 0.1 s, because it waits for a thread of its own. A new thread
    // does it, so that the caller does not wait.
    fn drop(&mut self) {
        let client = self.0.take();
        std::thread::spawn(move || drop(client));
    }
}
