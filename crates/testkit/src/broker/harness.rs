//! The code that the cases share: numbered rows, publishing until all is settled, reading until a
//! condition holds.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::{Capabilities, Fixture};
use oncebox::adapter::Position;
use oncebox::broker::{
    Begun, Broker, Delivery, Event, PartitionId, Publisher, Receipt, Settled, Subscriber, Subscription, TopicState,
};
use oncebox::message::{Arrived, OutgoingMessage};

/// A running case, with its broker.
pub(super) struct Case<'f> {
    fixture: &'f dyn Fixture,
    pub(super) can: Capabilities,
    pub(super) broker: Arc<dyn Broker>,
}

impl<'f> Case<'f> {
    pub(super) async fn new(fixture: &'f dyn Fixture) -> Self {
        Self { can: fixture.capabilities(), broker: fixture.broker().await, fixture }
    }

    pub(super) fn name(&self, label: &str) -> String {
        self.fixture.topic(label)
    }

    /// A topic that exists, and a subscription that gets what is published from now on.
    pub(super) async fn topic(&self, label: &str) -> (String, Subscription) {
        let topic = self.name(label);
        let subscription = subscription(&topic);
        self.fixture.prepare(&subscription).await;
        (topic, subscription)
    }

    pub(super) async fn prepare(&self, subscription: &Subscription) {
        self.fixture.prepare(subscription).await;
    }

    pub(super) async fn publisher(&self) -> Box<dyn Publisher> {
        self.within("a publisher", self.broker.publisher()).await.expect("a publisher")
    }

    pub(super) async fn reader(&self, subscription: &Subscription) -> Reader {
        let subscriber = self.within("a subscriber", self.broker.subscriber(subscription)).await.expect("a subscriber");
        Reader { subscriber, patience: self.can.patience, sources: BTreeSet::new(), got: Vec::new(), assigned: 0 }
    }

    /// Publishes rows in one session; all must be proven.
    pub(super) async fn publish(&self, rows: Vec<OutgoingMessage>) {
        let mut publisher = self.publisher().await;
        let settled = self.send_all(publisher.as_mut(), rows).await;
        for Settled { tag, outcome } in settled {
            outcome.unwrap_or_else(|refusal| panic!("row {tag} was refused: {refusal:?}"));
        }
        publisher.close().await;
    }

    /// Publishes rows one by one; repeats each until its topic exists.
    pub(super) async fn publish_once_it_is_there(&self, rows: Vec<OutgoingMessage>) {
        let mut publisher = self.publisher().await;
        for row in rows {
            self.within("the topic to take a row", async {
                loop {
                    let ready = publisher.topic(&row.topic).await.expect("an answer") == TopicState::Ready;
                    if ready && self.send_all(publisher.as_mut(), vec![row.clone()]).await[0].outcome.is_ok() {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    publisher = self.publisher().await;
                }
            })
            .await;
        }
        publisher.close().await;
    }

    /// Sends rows in portions and waits until all are settled; tags count from 0.
    pub(super) async fn send_all(&self, publisher: &mut dyn Publisher, rows: Vec<OutgoingMessage>) -> Vec<Settled> {
        let mut settled = Vec::new();
        let count = rows.len();
        let mut rows = (0_u64..).zip(rows);
        let mut sent = 0;
        self.within("every row to settle", async {
            loop {
                let portion: Vec<_> = rows.by_ref().take(100).collect();
                if portion.is_empty() {
                    break;
                }
                sent += portion.len();
                publisher.send(portion).await.expect("rows are handed over");
                while sent - settled.len() > 1_000 {
                    publisher.settle(&mut settled).await.expect("the session stands");
                }
            }
            while settled.len() < count {
                publisher.settle(&mut settled).await.expect("the session stands");
            }
        })
        .await;
        settled
    }

    pub(super) async fn within<T>(&self, what: &str, future: impl Future<Output = T>) -> T {
        within(self.can.patience, what, future).await
    }
}

pub(super) async fn within<T>(patience: Duration, what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(patience, future).await {
        Ok(answer) => answer,
        Err(_) => panic!("waited {patience:?} for {what}"),
    }
}

/// The default of [`Fixture::prepare`].
pub(super) async fn prepare(broker: &dyn Broker, can: &Capabilities, subscription: &Subscription) {
    within(can.patience, "the broker to declare", async {
        broker.declare(&subscription.topics).await.expect("topics are declared");
        if can.replays {
            return;
        }
        // A queue gets only what is published after it exists, so it is made before.
        let mut subscriber = broker.subscriber(subscription).await.expect("a subscriber");
        while !matches!(subscriber.next().await.expect("an event"), Event::Assigned(_)) {}
        subscriber.close().await;
    })
    .await;
}

/// A subscription of a new consumer to this topic.
pub(super) fn subscription(topic: &str) -> Subscription {
    Subscription::new(format!("c-{}", Uuid::now_v7().simple()), vec![topic.to_owned()])
}

/// A row with a key; its payload is its number.
pub(super) fn row(topic: &str, key: Option<&str>, number: usize) -> OutgoingMessage {
    OutgoingMessage {
        id: Uuid::now_v7(),
        topic: topic.to_owned(),
        key: key.map(str::to_owned),
        kind: "conformance.row".to_owned(),
        headers: Vec::new(),
        payload: number.to_string().into_bytes(),
        content_type: "text/plain".to_owned(),
        trace: None,
        created_at: whole_micros(Utc::now()),
    }
}

/// Rows that are numbered from `from` and spread over `keys` keys.
pub(super) fn rows(topic: &str, keys: usize, from: usize, count: usize) -> Vec<OutgoingMessage> {
    (from..from + count).map(|number| row(topic, Some(&format!("key-{}", number % keys)), number)).collect()
}

/// A time with the precision of the wire.
pub(super) fn whole_micros(time: DateTime<Utc>) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(time.timestamp_micros()).expect("a time of today")
}

/// The number in the payload of a row.
pub(super) fn number(arrived: &Arrived) -> usize {
    let payload = arrived.payload.as_deref().unwrap_or_default();
    std::str::from_utf8(payload).ok().and_then(|text| text.parse().ok()).expect("a number as payload")
}

/// Asserts that first occurrences of a key's rows are in order; repetitions may come later.
pub(super) fn assert_order<'a>(arrived: impl IntoIterator<Item = &'a Arrived>) {
    let mut highest: HashMap<Option<Vec<u8>>, usize> = HashMap::new();
    let mut seen = BTreeSet::new();
    for arrived in arrived {
        let number = number(arrived);
        if !seen.insert(number) || arrived.key.is_none() {
            continue;
        }
        let before = highest.insert(arrived.key.clone(), number);
        let key = arrived.key.as_deref().map(String::from_utf8_lossy);
        assert!(before.is_none_or(|before| before < number), "row {number} of {key:?} came after {before:?}");
    }
}

/// Asserts that exactly these numbers came, each once.
pub(super) fn assert_exactly<'a>(
    arrived: impl IntoIterator<Item = &'a Arrived>,
    expected: impl Iterator<Item = usize>,
) {
    let mut numbers: Vec<usize> = arrived.into_iter().map(number).collect();
    numbers.sort_unstable();
    let expected: Vec<usize> = expected.collect();
    if numbers != expected {
        let missing: Vec<_> = expected.iter().filter(|number| !numbers.contains(number)).take(10).collect();
        let too_many: Vec<_> = numbers.windows(2).filter(|pair| pair[0] == pair[1]).take(10).collect();
        panic!("{} rows came instead of {}; missing {missing:?}, twice {too_many:?}", numbers.len(), expected.len());
    }
}

/// The numbers that came, each at least once.
pub(super) fn numbers<'a>(arrived: impl IntoIterator<Item = &'a Arrived>) -> BTreeSet<usize> {
    arrived.into_iter().map(number).collect()
}

/// A subscriber with its sources and deliveries so far.
pub(super) struct Reader {
    pub(super) subscriber: Box<dyn Subscriber>,
    patience: Duration,
    /// The sources that are assigned now.
    pub(super) sources: BTreeSet<PartitionId>,
    pub(super) got: Vec<Delivery>,
    /// How many sources were ever assigned.
    pub(super) assigned: usize,
}

impl Reader {
    /// Handles an event. Deliveries are acknowledged where `acknowledge` is true; revoked sources
    /// are given up. Returns the new deliveries.
    pub(super) async fn take(&mut self, event: Event, acknowledge: bool) -> &[Delivery] {
        let before = self.got.len();
        match event {
            Event::Assigned(sources) => {
                self.assigned += sources.len();
                self.sources.extend(sources);
            }
            Event::Deliveries(deliveries) => {
                for delivery in &deliveries {
                    assert!(self.sources.contains(&delivery.source), "a delivery of a source that is not assigned");
                }
                if acknowledge {
                    self.acknowledge(deliveries.iter().map(|d| (&d.source, d.sequence))).await;
                }
                self.got.extend(deliveries);
            }
            Event::Revoked { sources, done, .. } => {
                for source in &sources {
                    assert!(self.sources.remove(source), "a source is revoked once, and only after it was assigned");
                }
                drop(done);
            }
        }
        &self.got[before..]
    }

    /// Acknowledges the highest sequence of every source among these.
    pub(super) async fn acknowledge<'a>(&mut self, handled: impl Iterator<Item = (&'a PartitionId, i64)>) {
        let mut through: HashMap<&PartitionId, i64> = HashMap::new();
        for (source, sequence) in handled {
            let highest = through.entry(source).or_insert(sequence);
            *highest = sequence.max(*highest);
        }
        for (source, sequence) in through {
            self.subscriber.acknowledge(source, sequence).await.expect("an acknowledgement is taken");
        }
    }

    /// Acknowledges all deliveries so far.
    pub(super) async fn acknowledge_all(&mut self) {
        let handled: Vec<_> = self.got.iter().map(|d| (d.source.clone(), d.sequence)).collect();
        self.acknowledge(handled.iter().map(|(source, sequence)| (source, *sequence))).await;
    }

    /// Acknowledges the first half of what came of every source. Returns the messages of it.
    pub(super) async fn acknowledge_half(&mut self) -> Vec<Arrived> {
        let mut by_source: BTreeMap<&PartitionId, Vec<&Delivery>> = BTreeMap::new();
        for delivery in &self.got {
            by_source.entry(&delivery.source).or_default().push(delivery);
        }
        let mut handled = Vec::new();
        for delivered in by_source.into_values() {
            let half = &delivered[..delivered.len() / 2];
            handled.extend(half.iter().map(|one| (one.source.clone(), one.sequence, one.arrived.clone())));
        }
        self.acknowledge(handled.iter().map(|(source, sequence, _)| (source, *sequence))).await;
        handled.into_iter().map(|(_, _, arrived)| arrived).collect()
    }

    /// Takes and acknowledges events until the subscriber has caught up.
    pub(super) async fn catch_up(&mut self) {
        within(self.patience, "the subscriber to catch up", async {
            while !self.subscriber.caught_up().await.expect("an answer") {
                // An adapter may learn this only while its events are taken.
                if let Ok(event) = tokio::time::timeout(Duration::from_millis(50), self.subscriber.next()).await {
                    self.take(event.expect("the subscriber stands"), true).await;
                }
            }
        })
        .await;
    }

    pub(super) async fn next(&mut self) -> Event {
        within(self.patience, "an event", self.subscriber.next()).await.expect("the subscriber stands")
    }

    /// Reads until so many different rows have come in total.
    pub(super) async fn read(&mut self, distinct: usize, acknowledge: bool) {
        within(self.patience, &format!("{distinct} rows"), async {
            let mut seen = numbers(self.arrived());
            while seen.len() < distinct {
                let event = self.subscriber.next().await.expect("the subscriber stands");
                let new = self.take(event, acknowledge).await;
                seen.extend(new.iter().map(|delivery| number(&delivery.arrived)));
            }
        })
        .await;
    }

    /// Reads until nothing has come for `quiet`. Returns how many rows came.
    pub(super) async fn read_until_quiet(&mut self, quiet: Duration) -> usize {
        let mut came = 0;
        while let Ok(event) = tokio::time::timeout(quiet, self.subscriber.next()).await {
            came += self.take(event.expect("the subscriber stands"), false).await.len();
        }
        came
    }

    /// Reads events until a source is assigned.
    pub(super) async fn assigned(&mut self) {
        while self.assigned == 0 {
            let event = self.next().await;
            self.take(event, false).await;
        }
    }

    /// Reads events until sources are assigned, and begins them with the remembered positions.
    pub(super) async fn begin(&mut self, remembered: impl Fn(&PartitionId) -> Option<Position>) -> Vec<Begun> {
        loop {
            let event = self.next().await;
            let sources = if let Event::Assigned(sources) = &event { sources.clone() } else { Vec::new() };
            self.take(event, false).await;
            if !sources.is_empty() {
                let remembered = sources.into_iter().map(|source| (source.clone(), remembered(&source)));
                return self.subscriber.begin(remembered.collect()).await.expect("what is assigned begins");
            }
        }
    }

    pub(super) fn arrived(&self) -> impl Iterator<Item = &Arrived> {
        self.got.iter().map(|delivery| &delivery.arrived)
    }

    /// Asserts that sequences ascend within every source.
    pub(super) fn assert_sequences_ascend(&self) {
        let mut last: HashMap<&PartitionId, i64> = HashMap::new();
        for delivery in &self.got {
            let before = last.insert(&delivery.source, delivery.sequence);
            let ascends = before.is_none_or(|before| before < delivery.sequence);
            assert!(ascends, "sequences of a source ascend: {delivery:?}");
        }
    }

    pub(super) async fn close(self) {
        within(self.patience, "the subscriber to close", self.subscriber.close()).await;
    }
}

/// Asserts that a receipt is of the broker's kind.
pub(super) fn assert_receipt(can: &Capabilities, settled: &Settled) {
    match settled.outcome {
        Ok(Receipt::Offset { partition, offset }) => {
            assert!(can.offsets && partition >= 0 && offset >= 0, "{settled:?}");
        }
        Ok(Receipt::Confirm) => assert!(!can.offsets, "{settled:?}"),
        Err(_) => panic!("a row was refused: {settled:?}"),
    }
}
