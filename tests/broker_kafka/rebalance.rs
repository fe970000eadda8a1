//! Partitions that move between members: handed over drained, taken over from the dead.

use std::collections::HashMap;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::kit::*;
use oncebox::broker::{Broker, Event, PartitionId, Subscriber};

/// What a member does in these tests: notes what it gets, acknowledges it a little later, drains what is revoked.
struct Member {
    subscriber: Box<dyn Subscriber>,
    sources: Vec<PartitionId>,
    open: Vec<(PartitionId, i64)>,
    got: Vec<(i32, i64)>,
    acknowledged: Vec<(i32, i64)>,
}

impl Member {
    fn new(subscriber: Box<dyn Subscriber>) -> Self {
        Self { subscriber, sources: vec![], open: vec![], got: vec![], acknowledged: vec![] }
    }

    async fn acknowledge(&mut self, until: usize) {
        for (source, offset) in self.open.drain(..until) {
            self.subscriber.acknowledge(&source, offset).await.unwrap();
            self.acknowledged.push((source.partition, offset));
        }
    }

    /// Takes what happens next, if anything does within the time.
    async fn step(&mut self, wait: Duration) {
        match tokio::time::timeout(wait, self.subscriber.next()).await {
            Err(_) => {}
            Ok(Err(error)) => panic!("{error}"),
            Ok(Ok(Event::Assigned(sources))) => self.sources.extend(sources),
            Ok(Ok(Event::Deliveries(deliveries))) => {
                for delivery in deliveries {
                    assert!(self.sources.contains(&delivery.source), "{:?} is not ours", delivery.source);
                    self.got.push((delivery.source.partition, delivery.sequence));
                    self.open.push((delivery.source, delivery.sequence));
                }
                // Something is always in flight.
                self.acknowledge(self.open.len() / 2).await;
            }
            Ok(Ok(Event::Revoked { sources, lost, done })) => {
                assert!(!lost);
                self.acknowledge(self.open.len()).await;
                self.sources.retain(|source| !sources.contains(source));
                drop(done);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn g4_nothing_is_lost_and_nothing_drained_comes_again_when_a_member_joins_under_load() {
    let name = "g4_nothing_is_lost_and_nothing_drained_comes_again_when_a_member_joins_under_load";
    let Some(kafka) = Kafka::with_topic(name, 4).await else { return };
    let broker = kafka.broker();
    let mut subscription = kafka.subscription(&unique("group"));
    subscription.in_flight_max = 50;
    let mut publisher = broker.publisher().await.unwrap();
    let mut sent = 0_u64;
    let mut members = vec![Member::new(broker.subscriber(&subscription).await.unwrap())];
    let start = Instant::now();
    let mut shared_at = None;
    while shared_at.is_none_or(|at: Instant| at.elapsed() < Duration::from_secs(3)) {
        assert!(start.elapsed() < SOON, "the second member got nothing");
        let rows = (0..20).map(|n| (sent + n, message(&kafka.topic, Some(&(sent + n).to_string()), "x"))).collect();
        publisher.send(rows).await.unwrap();
        sent += 20;
        publisher.settle(&mut Vec::new()).await.unwrap();
        for member in &mut members {
            member.step(Duration::from_millis(20)).await;
        }
        if members.len() == 1 && members[0].got.len() > 100 {
            members.push(Member::new(broker.subscriber(&subscription).await.unwrap()));
        }
        if members.len() == 2 && members[1].got.len() > 20 {
            shared_at.get_or_insert_with(Instant::now);
        }
    }
    // A third comes and goes: every kind of hand-over under load.
    let mut third = Member::new(broker.subscriber(&subscription).await.unwrap());
    while third.sources.is_empty() {
        assert!(start.elapsed() < 2 * SOON, "the third member got nothing");
        for member in members.iter_mut().chain([&mut third]) {
            member.step(Duration::from_millis(20)).await;
        }
    }
    third.acknowledge(third.open.len()).await;
    third.subscriber.close().await;
    let all = |members: &[Member], third: &[(i32, i64)]| {
        let mut times: HashMap<(i32, i64), usize> = HashMap::new();
        for at in members.iter().flat_map(|member| &member.got).chain(third) {
            *times.entry(*at).or_default() += 1;
        }
        times
    };
    while all(&members, &third.got).len() < usize::try_from(sent).unwrap() {
        assert!(start.elapsed() < 3 * SOON, "{} of {sent}", all(&members, &third.got).len());
        for member in &mut members {
            member.step(Duration::from_millis(20)).await;
        }
    }
    // What was acknowledged before its partition went was committed with it, so nobody got it again.
    let times = all(&members, &third.got);
    let doubled = members.iter().flat_map(|member| &member.acknowledged).filter(|at| times[at] > 1).count();
    assert_eq!(doubled, 0, "of {sent}");
    assert!(members.iter().all(|member| !member.sources.is_empty()));
    publisher.close().await;
    for member in members {
        member.subscriber.close().await;
    }
}

// Shown: without the deadline in `revoke` the second member waits until the first one is closed.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_is_not_drained_goes_at_the_deadline() {
    let Some(kafka) = Kafka::with_topic("a_partition_that_is_not_drained_goes_at_the_deadline", 2).await else {
        return;
    };
    let broker = kafka.broker();
    publish_all(&broker, (0..50).map(|n| message(&kafka.topic, Some(&n.to_string()), "x")).collect()).await;
    let mut subscription = kafka.subscription(&unique("group"));
    subscription.drain = Duration::from_secs(1);
    let mut first = broker.subscriber(&subscription).await.unwrap();
    receive(&mut first, 50).await;
    let mut second = broker.subscriber(&subscription).await.unwrap();
    let _stuck = loop {
        if let Event::Revoked { done, lost, .. } = next(&mut first).await {
            assert!(!lost);
            break done;
        }
    };
    assert_eq!(assigned(&mut second).await.len(), 1);
    assert!(!receive(&mut second, 1).await.is_empty(), "what was not acknowledged comes again");
    second.close().await;
    first.close().await;
}

#[tokio::test]
async fn a_member_that_is_dropped_is_replaced() {
    let Some(kafka) = Kafka::with_topic("a_member_that_is_dropped_is_replaced", 1).await else { return };
    let broker = kafka.broker();
    publish_all(&broker, (0..5).map(|n| message(&kafka.topic, None, n.to_string())).collect()).await;
    let subscription = kafka.subscription(&unique("group"));
    let mut first = broker.subscriber(&subscription).await.unwrap();
    let deliveries = receive(&mut first, 5).await;
    acknowledge(&mut first, &deliveries[..2]).await;
    let start = Instant::now();
    drop(first);
    assert!(start.elapsed() < Duration::from_millis(100), "dropping waits for nothing");
    let mut second = broker.subscriber(&subscription).await.unwrap();
    assert_eq!(texts(&receive(&mut second, 3).await), ["2", "3", "4"]);
    second.close().await;
}

const CHILD: &str = "ONCEBOX_KAFKA_TEST_CHILD";

#[tokio::test]
async fn g4_a_member_that_is_killed_is_taken_over() {
    let name = "g4_a_member_that_is_killed_is_taken_over";
    if let Ok(work) = std::env::var(CHILD) {
        return be_killed(&work).await;
    }
    let Some(kafka) = Kafka::with_topic(name, 1).await else { return };
    let broker = kafka.broker();
    publish_all(&broker, (0..5).map(|n| message(&kafka.topic, None, n.to_string())).collect()).await;
    let group = unique("group");
    let mut child = Killed(
        Command::new(std::env::current_exe().unwrap())
            .args([&format!("rebalance::{name}"), "--exact", "--nocapture"])
            .env(CHILD, format!("{} {group}", kafka.topic))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let out = child.0.stdout.take().unwrap();
    let ready = tokio::task::spawn_blocking(move || {
        use std::io::BufRead;
        std::io::BufReader::new(out).lines().map_while(Result::ok).any(|line| line.contains("holding"))
    });
    assert!(tokio::time::timeout(SOON, ready).await.unwrap().unwrap());
    let mut second = broker.subscriber(&kafka.subscription(&group)).await.unwrap();
    drop(child);
    assert_eq!(texts(&receive(&mut second, 5).await), ["0", "1", "2", "3", "4"]);
    second.close().await;
}

/// Takes everything, acknowledges nothing, and holds it until it is killed.
async fn be_killed(work: &str) {
    let (topic, group) = work.split_once(' ').unwrap();
    let mut kafka = Kafka::without_topic("child").unwrap();
    kafka.topic = topic.to_owned();
    let mut subscriber = kafka.broker().subscriber(&kafka.subscription(group)).await.unwrap();
    receive(&mut subscriber, 5).await;
    println!("holding");
    std::future::pending::<()>().await;
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}
