//! Partitions that move between members: handed over drained, taken over from the dead.

use std::collections::{HashMap, HashSet};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::kit::*;
use oncebox::broker::kafka::KafkaBroker;
use oncebox::broker::{Broker, Event, PartitionId, Subscription};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

type At = (i32, i64);

/// What all members got, how often, and what was acknowledged.
#[derive(Default)]
struct Book {
    got: HashMap<At, usize>,
    acknowledged: HashSet<At>,
    revoked: usize,
}

/// A member as a task: acknowledges half of what is open at each delivery, drains what is revoked.
struct Member {
    stop: CancellationToken,
    work: JoinHandle<()>,
}

impl Member {
    async fn join(broker: &KafkaBroker, subscription: &Subscription, book: &Arc<Mutex<Book>>) -> Self {
        let mut subscriber = broker.subscriber(subscription).await.unwrap();
        let (stop, book) = (CancellationToken::new(), Arc::clone(book));
        let stopped = stop.clone();
        let work = tokio::spawn(async move {
            let mut sources: Vec<PartitionId> = Vec::new();
            let mut open: Vec<(PartitionId, i64)> = Vec::new();
            loop {
                let event = tokio::select! {
                    event = subscriber.next() => event.unwrap(),
                    () = stopped.cancelled() => break,
                };
                let mut finished = Vec::new();
                let mut drained = None;
                match event {
                    Event::Assigned(assigned) => sources.extend(assigned),
                    Event::Deliveries(deliveries) => {
                        for delivery in deliveries {
                            assert!(sources.contains(&delivery.source), "{:?} is not ours", delivery.source);
                            let at = (delivery.source.partition, delivery.sequence);
                            *book.lock().unwrap().got.entry(at).or_default() += 1;
                            open.push((delivery.source, delivery.sequence));
                        }
                        finished.extend(open.drain(..open.len() / 2));
                    }
                    Event::Revoked { sources: revoked, lost, done } => {
                        assert!(!lost);
                        book.lock().unwrap().revoked += revoked.len();
                        finished.append(&mut open);
                        sources.retain(|source| !revoked.contains(source));
                        drained = Some(done);
                    }
                }
                for (source, offset) in finished {
                    subscriber.acknowledge(&source, offset).await.unwrap();
                    book.lock().unwrap().acknowledged.insert((source.partition, offset));
                }
                drop(drained);
            }
            for (source, offset) in open {
                subscriber.acknowledge(&source, offset).await.unwrap();
                book.lock().unwrap().acknowledged.insert((source.partition, offset));
            }
            subscriber.close().await;
        });
        Self { stop, work }
    }

    async fn leave(self) {
        self.stop.cancel();
        self.work.await.unwrap();
    }
}

// Shown: without the commit in `revoke` what was acknowledged comes again, to the new owner.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_and_nothing_drained_comes_again_when_members_come_and_go_under_load() {
    let name = "nothing_is_lost_and_nothing_drained_comes_again_when_members_come_and_go_under_load";
    let Some(kafka) = Kafka::with_topic(name, 4).await else { return };
    let broker = kafka.broker();
    let mut subscription = kafka.subscription(&unique("group"));
    subscription.in_flight_max = 50;
    let book = Arc::<Mutex<Book>>::default();
    let mut publisher = broker.publisher().await.unwrap();
    let mut sent = 0_u64;
    let mut members = vec![Member::join(&broker, &subscription, &book).await];
    // Something is sent, delivered and open all the time while one joins, another one joins, and
    // the first one leaves.
    for turn in 0..3 {
        let before = book.lock().unwrap().got.len();
        let moved = book.lock().unwrap().revoked;
        let start = Instant::now();
        match turn {
            0 | 1 => members.push(Member::join(&broker, &subscription, &book).await),
            _ => members.remove(0).leave().await,
        }
        // Who joined has got a partition of another one.
        let has_moved = || turn > 1 || book.lock().unwrap().revoked > moved;
        while start.elapsed() < Duration::from_secs(4) || book.lock().unwrap().got.len() < before + 100 || !has_moved()
        {
            assert!(start.elapsed() < SOON, "nothing comes any more after {before}, or nothing moved");
            let rows = (0..20).map(|n| (sent + n, message(&kafka.topic, Some(&(sent + n).to_string()), "x"))).collect();
            publisher.send(rows).await.unwrap();
            sent += 20;
            publisher.settle(&mut Vec::new()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let all = usize::try_from(sent).unwrap();
    eventually("all come", SOON, || async { (book.lock().unwrap().got.len() == all).then_some(()) }).await;
    publisher.close().await;
    for member in members {
        member.leave().await;
    }
    let book = book.lock().unwrap();
    let doubled: Vec<_> = book.got.iter().filter(|(_, times)| **times > 1).collect();
    assert!(doubled.is_empty(), "{} of {all} came again although they were acknowledged", doubled.len());
    assert_eq!(book.acknowledged.len(), all);
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
    let (bound, start) = (Duration::from_millis(100), Instant::now());
    drop(first);
    let mut fastest = start.elapsed();
    // On a machine that gave this thread no time: the fastest of some counts.
    for _ in 0..5 {
        if fastest < bound {
            break;
        }
        let mut other = broker.subscriber(&kafka.subscription(&unique("group"))).await.unwrap();
        receive(&mut other, 5).await;
        let start = Instant::now();
        drop(other);
        fastest = fastest.min(start.elapsed());
    }
    assert!(fastest < bound, "dropping waits for nothing: {fastest:?}");
    let mut second = broker.subscriber(&subscription).await.unwrap();
    assert_eq!(texts(&receive(&mut second, 3).await), ["2", "3", "4"]);
    second.close().await;
}

const CHILD: &str = "ONCEBOX_KAFKA_TEST_CHILD";

#[tokio::test]
async fn a_member_that_is_killed_is_taken_over() {
    let name = "a_member_that_is_killed_is_taken_over";
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
