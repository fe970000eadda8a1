//! Cases of publishing: settling, order, dropped sessions, missing topics.
//!
//! Shown to fail on adapters that append a batch from its end, leave out a row in the middle, or
//! wait for something after they took an outcome from their channel.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::Fixture;
use super::harness::{Case, assert_exactly, assert_order, assert_receipt, number, row, rows, subscription};
use oncebox::broker::{Receipt, Refusal, Settled, TopicState};

/// Every row that is sent settles once, with a receipt of the broker's kind. Without rows in flight
/// `settle` returns at once.
pub async fn every_sent_row_settles_exactly_once_with_a_receipt(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let (topic, _) = case.topic("settle").await;
    let mut publisher = case.publisher().await;
    let mut none = Vec::new();
    case.within("settle without rows", publisher.settle(&mut none)).await.expect("the session stands");
    assert!(none.is_empty());

    let mut all = rows(&topic, 7, 0, 600);
    all.extend((600..1_000).map(|number| row(&topic, None, number)));
    let settled = case.send_all(publisher.as_mut(), all).await;
    let tags: BTreeSet<u64> = settled.iter().map(|settled| settled.tag).collect();
    assert_eq!((tags.len(), settled.len()), (1_000, 1_000), "every tag once");
    assert_eq!(tags.last(), Some(&999));
    settled.iter().for_each(|settled| assert_receipt(&case.can, settled));
    case.within("settle without rows", publisher.settle(&mut none)).await.expect("the session stands");
    assert!(none.is_empty());

    // In a partition the offsets follow the order of sending.
    let mut by_tag: BTreeMap<u64, (i32, i64)> = BTreeMap::new();
    for Settled { tag, outcome } in settled {
        if let Ok(Receipt::Offset { partition, offset }) = outcome {
            by_tag.insert(tag, (partition, offset));
        }
    }
    let mut last: BTreeMap<i32, i64> = BTreeMap::new();
    for (tag, (partition, offset)) in by_tag {
        let before = last.insert(partition, offset);
        assert!(
            before.is_none_or(|before| before < offset),
            "tag {tag} of partition {partition}: {before:?}, {offset}"
        );
    }
    publisher.close().await;
}

/// `settle` is dropped many times; every outcome still comes, once.
pub async fn settle_may_be_dropped_at_any_point_and_no_outcome_is_lost(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let (topic, _) = case.topic("settle-dropped").await;
    let mut publisher = case.publisher().await;
    publisher.send((0..).zip(rows(&topic, 5, 0, 500)).collect()).await.expect("rows are handed over");
    let mut settled: Vec<Settled> = Vec::new();
    case.within("every row to settle", async {
        while settled.len() < 500 {
            tokio::select! {
                biased;
                answer = publisher.settle(&mut settled) => answer.expect("the session stands"),
                () = tokio::time::sleep(Duration::from_micros(200)) => {}
            }
        }
    })
    .await;
    let tags: BTreeSet<u64> = settled.iter().map(|settled| settled.tag).collect();
    assert_eq!((tags.len(), settled.len()), (500, 500), "every tag once");
    publisher.close().await;
}

/// Many rows of many keys are in flight at once; those of a key arrive as sent, each once.
pub async fn the_order_of_every_key_is_kept_with_many_keys_in_flight(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    let (topic, subscription) = case.topic("order").await;
    case.publish(rows(&topic, 40, 0, 4_000)).await;
    let mut reader = case.reader(&subscription).await;
    reader.read(4_000, true).await;
    assert_exactly(reader.arrived(), 0..4_000);
    assert_order(reader.arrived());
    reader.assert_sequences_ascend();
    reader.close().await;
}

/// A session that is dropped with rows in flight leaves a prefix of every key. So the next one,
/// which starts at the first unproven row, puts no key out of order (R15).
pub async fn r15_first_occurrences_of_a_key_are_in_order_when_sessions_are_dropped_in_the_middle(
    fixture: &dyn Fixture,
) {
    let case = Case::new(fixture).await;
    let (topic, subscription) = case.topic("dropped-session").await;
    let all = rows(&topic, 10, 0, 2_000);
    let mut proven = 0;
    for wait_for in [1, 150, 400] {
        let mut publisher = case.publisher().await;
        let left: Vec<_> = (proven..).zip(all.iter().skip(proven).cloned()).collect();
        let portions = left.chunks(200).take(4);
        let mut sent = 0;
        for portion in portions {
            sent += portion.len();
            let tagged = portion.iter().map(|(tag, message)| (*tag as u64, message.clone())).collect();
            publisher.send(tagged).await.expect("rows are handed over");
        }
        let mut settled = Vec::new();
        case.within("some rows to settle", async {
            while settled.len() < wait_for.min(sent) {
                publisher.settle(&mut settled).await.expect("the session stands");
            }
        })
        .await;
        let tags: BTreeSet<u64> = settled.iter().map(|settled| settled.tag).collect();
        while tags.contains(&(proven as u64)) {
            proven += 1;
        }
        // Dropped in the middle: no close, no flush.
        drop(publisher);
    }
    case.publish(all[proven..].to_vec()).await;

    let mut reader = case.reader(&subscription).await;
    reader.read(2_000, true).await;
    assert_order(reader.arrived());
    reader.close().await;
}

/// A topic that does not exist is not ready, or its rows are refused for their destination. Rows of
/// other topics go on. Once the topic exists, it is ready and takes rows.
pub async fn r19_a_topic_that_is_not_there_holds_only_its_own_rows_and_is_ready_once_it_appears(fixture: &dyn Fixture) {
    let case = Case::new(fixture).await;
    if !case.can.missing_topics {
        return;
    }
    let (there, there_subscription) = case.topic("there").await;
    let missing = case.name("missing");
    let mut publisher = case.publisher().await;
    assert_eq!(publisher.topic(&there).await.expect("an answer"), TopicState::Ready);
    let seen = publisher.topic(&missing).await.expect("an answer");
    let mut sent = rows(&there, 3, 0, 100);
    if seen == TopicState::Ready {
        // The broker cannot tell in advance; it refuses the rows instead.
        for (at, row) in rows(&missing, 3, 0, 10).into_iter().enumerate() {
            sent.insert(at * 7, row);
        }
    }
    let topics: Vec<String> = sent.iter().map(|message| message.topic.clone()).collect();
    for settled in case.send_all(publisher.as_mut(), sent).await {
        let at = usize::try_from(settled.tag).expect("a tag");
        if topics[at] == there {
            assert_receipt(&case.can, &settled);
        } else {
            assert!(matches!(settled.outcome, Err(Refusal::Destination(_))), "{settled:?}");
        }
    }
    let mut reader = case.reader(&there_subscription).await;
    reader.read(100, true).await;
    assert_exactly(reader.arrived(), 0..100);
    reader.close().await;

    let subscription = subscription(&missing);
    case.prepare(&subscription).await;
    case.within("the topic to be ready", async {
        while publisher.topic(&missing).await.expect("an answer") != TopicState::Ready {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    let settled = case.send_all(publisher.as_mut(), rows(&missing, 3, 0, 30)).await;
    settled.iter().for_each(|settled| assert_receipt(&case.can, settled));
    publisher.close().await;
    let mut reader = case.reader(&subscription).await;
    reader.read(30, true).await;
    assert_order(reader.arrived());
    assert!(reader.arrived().all(|arrived| number(arrived) < 30));
    reader.close().await;
}
