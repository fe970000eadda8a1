//! Rounds of a pair: a burst of payments, a SIGKILL while at least a hundred messages are in
//! flight, the restart, the check.
//!
//! Services, topics, groups and all data live through all rounds. A kill that hit nothing in flight
//! is no round.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use oncebox::app::config::{ConsumerSettings, OnSettings, Secret, Settings};
use oncebox::broker::Subscription;

use crate::business::{Business, topic};
use crate::checker::{Entry, History, check};
use crate::process::Process;

/// A round counts only if so many committed messages had no effect yet when the kill came.
const IN_FLIGHT_MIN: i64 = 100;
/// Payments of a round, more where a kill hit too little. What a killed consumer had in hand, its
/// successor runs one by one: each beyond what it takes to have so many in flight makes the round
/// longer, and finds nothing.
const BURST: usize = 240;
/// Payments of one transaction of a burst of [`BURST`]; a larger burst has larger ones. Otherwise,
/// where commits are slow, relay and consumer keep up with them however large a burst is.
const PAYMENTS_TOGETHER: usize = 25;
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
        let before = store.ledger_count().await;
        writer.burst(&store, &topic_name, burst).await;
        let victim = usize::from((killed[0] + killed[1]) % 2 == 1);
        // At work, so that the kill hits something: not before the first effect of this burst,
        // unless none comes.
        let waited = Instant::now();
        while store.ledger_count().await == before && waited.elapsed() < Duration::from_millis(500) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        tokio::time::sleep(Duration::from_micros(fastrand::u64(..30_000))).await;
        let in_flight = writer.payments - store.ledger_count().await;
        if victim == 0 {
            publisher.kill_and_restart();
        } else {
            let index = fastrand::usize(..consumers.len());
            consumers[index].kill_and_restart();
        }
        if in_flight >= IN_FLIGHT_MIN {
            killed[victim] += 1;
        } else {
            // Killed all the same, but not counted.
            invalid += 1;
            // A fast machine needs some steps up to the largest burst, also where rounds are few.
            burst = (burst * 3 / 2).min(5_000);
            assert!(invalid <= pair.rounds.max(20), "{}: kills hit nothing in flight; the run is invalid", pair.name);
        }
        settle(&store, &writer, &mut publisher, &mut consumers, &pair).await;
        let history = History {
            payments: store.payments().await,
            topic: topic(&*broker, &topic_name).await,
            ledger: store.ledger().await,
            settled: true,
        };
        let wrong = check(&history);
        assert!(wrong.is_empty(), "{} after {killed:?} kills: {:#?}", pair.name, &wrong[..wrong.len().min(20)]);
    }
    eprintln!(
        "{}: {} kills of the publisher and {} of a consumer with at least {IN_FLIGHT_MIN} in flight ({invalid} more not counted), {} payments",
        pair.name, killed[0], killed[1], writer.payments
    );
    publisher.stop(SETTLE);
    for consumer in consumers {
        consumer.stop(SETTLE);
    }
    store.close().await;
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
