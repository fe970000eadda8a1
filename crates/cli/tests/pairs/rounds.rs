//! Rounds of a pair: a burst of payments, a SIGKILL while the killed process has work, the restart,
//! the check.
//!
//! The publisher is killed during the burst, with at least one committed message that is not
//! proven. A consumer is killed with at least a hundred messages that are in the topic and have no
//! effect yet. A kill with less is no round. After many rounds messages must stand in the topic
//! twice: else no kill hit the publisher between sending and marking. Services, topics, groups and
//! all data live through all rounds.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use oncebox::app::config::{ConsumerSettings, OnSettings, Secret, Settings};
use oncebox::broker::{Broker, Subscription};

use crate::business::{Business, topic};
use crate::checker::{Entry, History, check};
use crate::process::Process;

/// A kill of a consumer counts only if so many messages were in the topic and had no effect yet.
const IN_FLIGHT_MIN: i64 = 100;
/// From so many rounds on, some kill of the publisher must have made it send a message twice. One
/// in about ten does; fewer rounds would fail by chance.
const ROUNDS_WITH_REPEATS: u32 = 200;
/// Payments of a round, more where a kill hit too little. What a killed consumer had in hand, its
/// successor runs one by one: each beyond what it takes to have so many in flight makes the round
/// longer, and finds nothing.
const BURST: usize = 240;
/// Payments of one transaction of a burst of [`BURST`]; a larger burst has larger ones. Otherwise,
/// where commits are slow, relay and consumer keep up with them however large a burst is.
const PAYMENTS_TOGETHER: usize = 25;
/// How long a round waits for a consumer that is at work with enough in hand.
const AT_WORK: Duration = Duration::from_secs(5);
/// How long a round may take to settle: a takeover costs up to the session timeout, a loaded
/// machine is slow.
const SETTLE: Duration = Duration::from_secs(120);

pub(crate) struct Pair {
    pub(crate) name: &'static str,
    pub(crate) database: String,
    pub(crate) broker: String,
    pub(crate) rounds: u32,
    /// Consumers of the same name.
    pub(crate) consumers: usize,
    pub(crate) dir: PathBuf,
}

pub(crate) async fn play<B: Business>(pair: Pair) {
    let tag = format!("{:08x}", fastrand::u32(..));
    let topic_name = format!("pairs-{tag}");
    let consumer = format!("ledger-{tag}");
    let store = B::set_up(&pair.database).await;
    let settings = settings(&pair, &topic_name, &consumer);
    let config = pair.dir.join("oncebox.toml");
    std::fs::write(&config, toml::to_string(&settings).unwrap()).unwrap();
    let broker = oncebox::app::open_broker(&settings, None).await.unwrap();
    broker.declare(std::slice::from_ref(&topic_name)).await.unwrap();
    if !broker.is_log() {
        let subscription = Subscription::new(consumer.clone(), vec![topic_name.clone()]);
        broker.subscriber(&subscription).await.unwrap().close().await;
    }
    broker.tap(&topic_name).await.unwrap();

    let start = |binary: &str, log: &str| Process::start(with_config(binary, &config), &pair.dir.join(log));
    let mut publisher = start(env!("CARGO_BIN_EXE_publisher"), "publisher.log");
    let mut consumers: Vec<Process> = (0..pair.consumers)
        .map(|number| start(env!("CARGO_BIN_EXE_consumer"), &format!("consumer-{number}.log")))
        .collect();

    let mut writer = Writer { numbers: vec![0; 40], payments: 0 };
    // Warm: the first join of a group is slow, and says nothing about kills.
    writer.burst(&store, &topic_name, 50).await;
    settle(&store, &writer, &mut publisher, &mut consumers, &pair).await;
    let mut killed = [0_u32; 2];
    let mut burst = BURST;
    let mut invalid = 0;
    while killed[0] + killed[1] < pair.rounds {
        let victim = usize::from((killed[0] + killed[1]) % 2 == 1);
        let has_hit = if victim == 0 {
            let is_written = Cell::new(false);
            let burst = async {
                writer.burst(&store, &topic_name, burst).await;
                is_written.set(true);
            };
            let kill = async {
                while pending(&store).await == 0 && !is_written.get() {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                tokio::time::sleep(Duration::from_micros(fastrand::u64(..30_000))).await;
                let unproven = pending(&store).await;
                publisher.kill_and_restart();
                unproven > 0
            };
            tokio::join!(burst, kill).1
        } else {
            let before = store.ledger_count().await;
            writer.burst(&store, &topic_name, burst).await;
            // How many wait in the topic, and how many have their effect. Read in this order, the
            // first number is never too large.
            let in_flight = async || {
                let proven = writer.payments - pending(&store).await;
                let booked = store.ledger_count().await;
                (proven - booked, booked)
            };
            // At work and with enough in hand, so that the kill hits something; unless the consumer
            // is as fast as the publisher.
            let waited = Instant::now();
            loop {
                let (waiting, booked) = in_flight().await;
                let is_at_work = booked > before && waiting >= IN_FLIGHT_MIN;
                if is_at_work || booked >= writer.payments || waited.elapsed() > AT_WORK {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            tokio::time::sleep(Duration::from_micros(fastrand::u64(..30_000))).await;
            let (waiting, _) = in_flight().await;
            let index = fastrand::usize(..consumers.len());
            consumers[index].kill_and_restart();
            waiting >= IN_FLIGHT_MIN
        };
        if has_hit {
            killed[victim] += 1;
        } else {
            // Killed all the same, but not counted.
            invalid += 1;
            // A fast machine needs some steps up to the largest burst, also where rounds are few.
            burst = (burst * 3 / 2).min(5_000);
            assert!(invalid <= pair.rounds.max(20), "{}: kills hit no work; the run is invalid", pair.name);
        }
        settle(&store, &writer, &mut publisher, &mut consumers, &pair).await;
        require_whole(&pair, &store, &*broker, &topic_name, killed).await;
    }
    publisher.stop(SETTLE);
    for consumer in consumers {
        consumer.stop(SETTLE);
    }
    let records = require_whole(&pair, &store, &*broker, &topic_name, killed).await;
    let repeated = i64::try_from(records).unwrap() - writer.payments;
    eprintln!(
        "{}: {} kills of the publisher and {} of a consumer ({invalid} more not counted), {} payments, {repeated} sent twice",
        pair.name, killed[0], killed[1], writer.payments
    );
    assert!(
        repeated > 0 || pair.rounds < ROUNDS_WITH_REPEATS,
        "{}: no kill hit between sending and marking",
        pair.name
    );
    store.close().await;
    let subscription = Subscription::new(consumer, vec![topic_name]);
    broker.remove(&[subscription]).await.unwrap();
}

/// Everything committed has arrived, once and in order. Gives how many records the topic has.
async fn require_whole<B: Business>(
    pair: &Pair,
    store: &B,
    broker: &dyn Broker,
    topic_name: &str,
    killed: [u32; 2],
) -> usize {
    let (payments, ledger) = (store.payments().await, store.ledger().await);
    let history = History { payments, topic: topic(broker, topic_name).await, ledger };
    let wrong = check(&history);
    assert!(wrong.is_empty(), "{} after {killed:?} kills: {:#?}", pair.name, &wrong[..wrong.len().min(20)]);
    history.topic.len()
}

/// How many committed messages the publisher has not marked as proven.
async fn pending<B: Business>(store: &B) -> i64 {
    i64::try_from(store.status().await.unwrap().pending).unwrap()
}

fn with_config(binary: &str, config: &Path) -> Command {
    let mut command = Command::new(binary);
    command.arg("--config").arg(config);
    command
}

struct Writer {
    /// The number of the last payment of each account.
    numbers: Vec<i64>,
    payments: i64,
}

impl Writer {
    /// Scattered keys, several writers at once; writers of one account come one after the other.
    async fn burst<B: Business>(&mut self, store: &B, topic: &str, count: usize) {
        const WRITERS: usize = 4;
        let mut work: Vec<Vec<Entry>> = vec![Vec::new(); WRITERS];
        for _ in 0..count {
            let account = fastrand::usize(..self.numbers.len());
            self.numbers[account] += 1;
            self.payments += 1;
            work[account % WRITERS].push(Entry {
                payment: format!("pay-{}", self.payments),
                account: format!("acc-{account}"),
                number: self.numbers[account],
                amount: fastrand::i64(1..100_000),
            });
        }
        let most = (PAYMENTS_TOGETHER * count / BURST).max(PAYMENTS_TOGETHER);
        let writers = work.iter().map(|entries| async move {
            for together in entries.chunks(most) {
                loop {
                    match store.pay(together, topic).await {
                        Ok(()) => break,
                        Err(oncebox::StoreError::Busy(_)) => tokio::time::sleep(Duration::from_millis(5)).await,
                        Err(error) => panic!("a payment failed: {error}"),
                    }
                }
            }
        });
        futures_util::future::join_all(writers).await;
    }
}

async fn settle<B: Business>(
    store: &B,
    writer: &Writer,
    publisher: &mut Process,
    consumers: &mut [Process],
    pair: &Pair,
) {
    let mut moved = (Instant::now(), -1);
    loop {
        let count = store.ledger_count().await;
        if count >= writer.payments {
            return;
        }
        publisher.check();
        consumers.iter_mut().for_each(Process::check);
        if count != moved.1 {
            moved = (Instant::now(), count);
        }
        if moved.0.elapsed() > SETTLE {
            let status = store.status().await;
            panic!(
                "{}: stuck at {count} of {} effects; logs in {}; {status:#?}",
                pair.name,
                writer.payments,
                pair.dir.display()
            );
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn settings(pair: &Pair, topic: &str, consumer: &str) -> Settings {
    let mut settings = Settings::default();
    settings.database.url = Secret(pair.database.clone());
    settings.broker.url = Secret(pair.broker.clone());
    settings.broker.kafka.create_topics = true;
    settings.broker.kafka.session_timeout = Duration::from_secs(6);
    settings.broker.embedded.session_timeout = Duration::from_secs(2);
    settings.publisher.lease = Duration::from_secs(2);
    let mut ledger = ConsumerSettings::new(consumer, vec![topic.to_owned()]);
    // Small batches: with large ones a burst is done with its first commit, and a kill of the
    // consumer hits nothing.
    ledger.batch_max = Some(20);
    let params = ["payment", "account", "number", "amount"].map(|name| (name.to_owned(), format!("/{name}")));
    ledger.on.push(OnSettings {
        kind: Some("payment.created".into()),
        handler: "sql".into(),
        sql: vec![
            "insert into ledger (payment, account, number, amount) values (:payment, :account, :number, :amount)"
                .into(),
        ],
        params: params.into(),
        optional: Vec::new(),
    });
    settings.consumer.push(ledger);
    settings
}
