//! Publishing: what is proven, what is refused, in which order it stands in the topic.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::kit::*;
use oncebox::BrokerError;
use oncebox::broker::{Broker, Receipt, Refusal, TopicState};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::{ClientConfig, Message, Offset, TopicPartitionList};

/// Shown to fail on the code before: the record had the clock of the publishing process, and a
/// process whose clock was a day ahead was refused by the broker, message by message.
#[tokio::test]
async fn a_record_has_the_time_of_its_row_and_one_that_the_broker_does_not_take_is_never_the_messages_fault() {
    let test = "a_record_has_the_time_of_its_row_and_one_that_the_broker_does_not_take_is_never_the_messages_fault";
    let Some(kafka) = Kafka::with_topic(test, 1).await else { return };
    let broker = kafka.broker();
    let mut sent = message(&kafka.topic, Some("k"), "an hour old");
    sent.created_at -= chrono::TimeDelta::hours(1);
    publish_all(&broker, vec![sent.clone()]).await;
    let config = ClientConfig::new().set("bootstrap.servers", kafka.servers()).set("group.id", "g").clone();
    let consumer: BaseConsumer = config.create().unwrap();
    let mut place = TopicPartitionList::new();
    place.add_partition_offset(&kafka.topic, 0, Offset::Beginning).unwrap();
    consumer.assign(&place).unwrap();
    let record = consumer.poll(SOON).unwrap().unwrap();
    assert_eq!(record.timestamp().to_millis(), Some(sent.created_at.timestamp_millis()));
    sent.created_at += chrono::TimeDelta::days(2);
    let mut publisher = broker.publisher().await.unwrap();
    let settled = publish(&mut publisher, vec![sent]).await;
    let Err(Refusal::Destination(why)) = &settled[0].outcome else { panic!("{settled:?}") };
    assert!(why.contains("clocks"), "{why}");
    publisher.close().await;
}

#[tokio::test]
async fn g3_messages_of_a_key_stand_in_the_order_they_were_sent() {
    let Some(kafka) = Kafka::with_topic("g3_messages_of_a_key_stand_in_the_order_they_were_sent", 3).await else {
        return;
    };
    let (keys, each) = (40, 100);
    let rows = (0..keys * each).map(|n| message(&kafka.topic, Some(&format!("k{}", n * 7 % keys)), n.to_string()));
    // Small batches handed over without waiting for each other, as the relay does.
    let rows: Vec<_> = rows.zip(0..).map(|(row, tag)| (tag, row)).collect();
    let mut publisher = kafka.broker().publisher().await.unwrap();
    for batch in rows.chunks(130) {
        publisher.send(batch.to_vec()).await.unwrap();
    }
    let settled = outcomes(&mut publisher, rows.len()).await;
    assert!(settled.iter().all(|row| row.outcome.is_ok()));
    publisher.close().await;
    let mut last: HashMap<(Vec<u8>, i32), i32> = HashMap::new();
    let found = kafka.broker().read_all(&kafka.topic).await.unwrap();
    assert_eq!(found.len(), rows.len(), "each once");
    for arrived in found {
        let n: i32 = String::from_utf8(arrived.payload.unwrap()).unwrap().parse().unwrap();
        let before = last.insert((arrived.key.unwrap(), arrived.coordinates.partition), n);
        assert!(before.is_none_or(|before| before < n), "{before:?} before {n}");
    }
    assert_eq!(last.len(), keys as usize, "a key stands in one partition");
}

/// Shown to fail on the code before: Kafka takes a producer's batch with any sequence number on a
/// partition where it has stored none of this producer. So it refused the first message of a
/// session, and took the later ones of its key, which were in flight.
#[tokio::test]
async fn g3_nothing_of_its_key_is_taken_behind_the_first_message_of_a_session_that_the_broker_refuses() {
    let test = "g3_nothing_of_its_key_is_taken_behind_the_first_message_of_a_session";
    let Some(mut kafka) = Kafka::without_topic(test) else { return };
    kafka.create(&kafka.topic, 3, &[("max.message.bytes", "20000")]).await;
    // With compression only the broker knows the size that counts.
    kafka.config.properties.insert("compression.type".into(), "lz4".into());
    let mut seed = 7_u64;
    let noise = std::iter::repeat_with(|| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 56) as u8
    });
    let noise: Vec<u8> = noise.take(300_000).collect();
    let mut refused = 0;
    for round in 0..5 {
        let key = format!("k{round}");
        let small = (1..100).map(|n| message(&kafka.topic, Some(&key), format!("{n}{}", "x".repeat(1_000))));
        let rows = std::iter::once(message(&kafka.topic, Some(&key), noise.clone())).chain(small);
        let mut publisher = kafka.broker().publisher().await.unwrap();
        publisher.topic(&kafka.topic).await.unwrap();
        publisher.send(rows.enumerate().map(|(tag, row)| (tag as u64, row)).collect()).await.unwrap();
        let mut settled = Vec::new();
        while let Ok(()) = publisher.settle(&mut settled).await {
            if settled.iter().any(|row| row.outcome.is_err()) {
                break;
            }
        }
        publisher.close().await;
        assert!(settled.iter().all(|row| row.outcome.is_err()), "{settled:?}");
        refused += settled.iter().filter(|row| matches!(row.outcome, Err(Refusal::Message(_)))).count();
        let found = kafka.broker().read_all(&kafka.topic).await.unwrap();
        assert_eq!(found.len(), 0, "round {round}: later messages stand in the topic without the refused one");
    }
    // A session that ends without an outcome would meet all of the above.
    assert!(refused > 0, "the broker refused no message");
}

// Shown: with the checks of `ready` and of `stands_behind` taken out of `send`, r1 and r2 fail as
// unknown and r3 is taken.
#[tokio::test]
async fn r19_nothing_is_produced_to_a_topic_before_it_was_seen() {
    let Some(mut kafka) = Kafka::without_topic("r19_nothing_is_produced_to_a_topic_before_it_was_seen") else { return };
    // How long librdkafka keeps messages of an unknown topic: 30 s unless this is set.
    kafka.config.properties.insert("topic.metadata.propagation.max.ms".into(), "300".into());
    let topic = kafka.topic.clone();
    let row = |name: &str| message(&topic, Some("k"), name);
    let mut publisher = kafka.broker().publisher().await.unwrap();
    assert_eq!(publisher.topic(&topic).await.unwrap(), TopicState::NotReady("the topic does not exist".into()));
    publisher.send(vec![(1, row("r1")), (2, row("r2"))]).await.unwrap();
    // The moment of danger: the topic is made when r1 and r2 have failed, and r3 is on its way.
    tokio::time::sleep(Duration::from_millis(1_000)).await;
    kafka.create(&topic, 1, &[]).await;
    publisher.send(vec![(3, row("r3"))]).await.unwrap();
    for settled in outcomes(&mut publisher, 3).await {
        assert!(matches!(settled.outcome, Err(Refusal::Destination(_))), "{settled:?}");
    }
    // The relay has seen every outcome: now they may go, all of them.
    assert_eq!(publisher.topic(&topic).await.unwrap(), TopicState::Ready);
    let settled = publish(&mut publisher, vec![row("r1"), row("r2"), row("r3")]).await;
    assert!(settled.iter().all(|row| row.outcome.is_ok()), "{settled:?}");
    publisher.close().await;
    assert_eq!(payloads(&kafka.broker(), &topic).await, ["r1", "r2", "r3"]);
}

// Shown: with `batch.size` left at its default, thousands of small messages are refused with the
// batch they travel in.
#[tokio::test]
async fn r19_a_message_that_is_too_large_is_refused_alone_and_the_others_go() {
    let Some(kafka) = Kafka::without_topic("r19_a_message_that_is_too_large_is_refused_alone_and_the_others_go") else {
        return;
    };
    let (small, usual) = (kafka.topic.clone(), unique("kafka"));
    kafka.create(&small, 1, &[("max.message.bytes", "20000")]).await;
    kafka.create(&usual, 1, &[]).await;
    let broker = kafka.broker();
    let mut publisher = ready(&broker, &small).await;
    let mut rows: Vec<_> = (0..3_000).map(|n| message(&small, Some("k"), vec![b'.'; 100 + n % 50])).collect();
    rows.insert(1_500, message(&small, Some("large"), vec![b'x'; 30_000]));
    rows.insert(1_700, message(&usual, Some("k"), vec![b'x'; 500_000]));
    rows.push(message(&small, Some("k"), vec![b'y'; 19_000]));
    let settled = publish(&mut publisher, rows).await;
    let refused: Vec<_> = settled.iter().filter(|row| row.outcome.is_err()).collect();
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert_eq!(refused[0].tag, 1_500);
    assert!(matches!(&refused[0].outcome, Err(Refusal::Message(why)) if why.contains(&small)), "{refused:?}");
    publisher.close().await;
    assert_eq!(broker.read_all(&small).await.unwrap().len(), 3_001);
    assert_eq!(broker.read_all(&usual).await.unwrap().len(), 1);
}

// Shown: without `stands_behind` in `send` the second row is taken before the relay knows that the
// first was refused.
#[tokio::test]
async fn r15_nothing_follows_a_refused_message_of_its_key_until_the_refusal_was_seen() {
    let Some(mut kafka) =
        Kafka::with_topic("r15_nothing_follows_a_refused_message_of_its_key_until_the_refusal_was_seen", 1).await
    else {
        return;
    };
    // What the client itself refuses, it refuses while the rows are handed over.
    kafka.config.properties.insert("message.max.bytes".into(), "2000".into());
    let row = |key: &str, payload: &str| message(&kafka.topic, Some(key), payload);
    let mut publisher = kafka.broker().publisher().await.unwrap();
    let settled =
        publish(&mut publisher, vec![row("a", "a1"), row("a", &"x".repeat(3_000)), row("a", "a3"), row("b", "b")])
            .await;
    assert!(settled[0].outcome.is_ok() && settled[3].outcome.is_ok(), "{settled:?}");
    assert!(matches!(settled[1].outcome, Err(Refusal::Message(_))), "{settled:?}");
    assert!(matches!(settled[2].outcome, Err(Refusal::Behind(_))), "{settled:?}");
    // The relay has seen it: what it sends now is meant.
    assert!(publish(&mut publisher, vec![row("a", "a4")]).await[0].outcome.is_ok());
    publisher.close().await;
    assert_eq!(payloads(&kafka.broker(), &kafka.topic).await, ["a1", "b", "a4"]);
}

// Only the broker knows what a message is compressed; the client has later ones of its key on their
// way by then. Shown: with `enable.gapless.guarantee=false` they are in the topic, for whoever
// sends is slower than the client.
#[tokio::test]
async fn r15_nothing_follows_a_message_that_the_broker_refused_though_its_outcome_is_looked_at_late() {
    let Some(mut kafka) = Kafka::with_topic("r15_nothing_follows_a_message_that_the_broker_refused", 1).await else {
        return;
    };
    let small = unique("kafka");
    kafka.create(&small, 1, &[("max.message.bytes", "20000")]).await;
    kafka.config.properties.insert("compression.type".into(), "gzip".into());
    let broker = kafka.broker();
    let mut publisher = ready(&broker, &small).await;
    let row = |n: u64| {
        let large = if n == 100 { 100_000 } else { 10 };
        let text: String = (0..large).map(|_| fastrand::alphanumeric()).collect();
        (n, message(&small, Some("k"), format!("{n} {text}")))
    };
    publisher.send((0..200).map(row).collect()).await.unwrap();
    // Nobody asks for outcomes meanwhile.
    let began = Instant::now();
    while broker.read_all(&small).await.unwrap().len() < 100 && began.elapsed() < SOON {}
    tokio::time::sleep(Duration::from_secs(1)).await;
    let found = payloads(&broker, &small).await;
    let found: Vec<u64> = found.iter().map(|text| text.split(' ').next().unwrap().parse().unwrap()).collect();
    assert_eq!(found, (0..100).collect::<Vec<_>>());
    // The refusal is told before the session's end.
    let mut settled = Vec::new();
    while publisher.settle(&mut settled).await.is_ok() {}
    let refused: Vec<_> =
        settled.iter().filter(|row| matches!(row.outcome, Err(Refusal::Message(_)))).map(|row| row.tag).collect();
    assert_eq!(refused, [100]);
    publisher.close().await;
}

#[tokio::test]
async fn r19_a_session_that_sent_already_starts_anew_for_a_smaller_topic() {
    let Some(kafka) = Kafka::with_topic("r19_a_session_that_sent_already_starts_anew_for_a_smaller_topic", 1).await
    else {
        return;
    };
    let small = unique("kafka");
    kafka.create(&small, 1, &[("max.message.bytes", "20000")]).await;
    let broker = kafka.broker();
    let mut publisher = broker.publisher().await.unwrap();
    publish(&mut publisher, vec![message(&kafka.topic, None, "x")]).await;
    let error = publisher.topic(&small).await.unwrap_err();
    assert!(matches!(&error, BrokerError::Session(why) if why.contains(&small) && why.contains("20000")), "{error}");
    publisher.close().await;
    // What was learned stays: the next session fits from its start.
    let mut publisher = ready(&broker, &kafka.topic).await;
    publish(&mut publisher, vec![message(&kafka.topic, None, "x")]).await;
    assert_eq!(publisher.topic(&small).await.unwrap(), TopicState::Ready);
    publisher.close().await;
}

/// Shown to fail on the code before: the session took another producer, and the outcome was lost
/// with the one before it.
#[tokio::test]
async fn g2_the_outcome_of_a_message_that_was_never_sent_is_kept_when_a_smaller_topic_is_asked_for() {
    let Some(kafka) = Kafka::without_topic("g2_the_outcome_of_a_message_that_was_never_sent") else { return };
    let smaller = unique("kafka");
    for (topic, limit) in [(&kafka.topic, "20000"), (&smaller, "10000")] {
        kafka.create(topic, 1, &[("max.message.bytes", limit)]).await;
    }
    let mut publisher = ready(&kafka.broker(), &kafka.topic).await;
    publisher.send(vec![(7, message(&kafka.topic, Some("k"), vec![b'x'; 30_000]))]).await.unwrap();
    let error = publisher.topic(&smaller).await.unwrap_err();
    assert!(matches!(&error, BrokerError::Session(why) if why.contains(&smaller)), "{error}");
    let settled = outcomes(&mut publisher, 1).await;
    assert!(settled[0].tag == 7 && matches!(settled[0].outcome, Err(Refusal::Message(_))), "{settled:?}");
    publisher.close().await;
}

/// Shown to fail on the code before: sessions ended one after the other with batches that were too
/// large, and rows of a producer that had ended were blamed on their topic, which was then blocked.
#[tokio::test]
async fn r19_a_limit_that_was_lowered_ends_one_session_and_says_nothing_of_rows_sent_after() {
    let Some(kafka) = Kafka::with_topic("r19_a_limit_that_was_lowered_ends_one_session", 1).await else { return };
    let broker = kafka.broker();
    let rows = |count| (0..count).map(|_| message(&kafka.topic, Some("k"), vec![b'x'; 1_000]));
    for limit in ["40000", "20000"] {
        let mut publisher = ready(&broker, &kafka.topic).await;
        publish(&mut publisher, rows(1).collect()).await;
        kafka.set(&kafka.topic, "max.message.bytes", limit).await;
        let mut settled = Vec::new();
        let ends = async {
            loop {
                // So many that the producer ends while rows are handed to it.
                publisher.send((0..).zip(rows(5_000)).collect()).await?;
                let before = settled.len();
                while settled.len() < before + 5_000 {
                    publisher.settle(&mut settled).await?;
                }
            }
        };
        let ended: Result<(), BrokerError> = tokio::time::timeout(SOON, ends).await.expect("it ends");
        assert!(matches!(&ended, Err(BrokerError::Session(why)) if why.contains("smaller batches")), "{ended:?}");
        assert!(settled.iter().all(|row| row.outcome.is_ok()), "{settled:?}");
        publisher.close().await;
        // The next one makes batches that fit.
        assert_eq!(publish_all(&broker, rows(500).collect()).await.len(), 500);
    }
}

#[tokio::test]
async fn g11_the_client_holds_a_bounded_number_of_rows_and_waits_instead_of_failing() {
    let Some(mut kafka) =
        Kafka::with_topic("g11_the_client_holds_a_bounded_number_of_rows_and_waits_instead_of_failing", 3).await
    else {
        return;
    };
    kafka.config.publish_rows_max = 10;
    let rows = (0..1_000).map(|n| message(&kafka.topic, Some(&n.to_string()), "x")).collect();
    assert_eq!(publish_all(&kafka.broker(), rows).await.len(), 1_000);
    kafka.config.publish_rows_max = 20_000;
    kafka.config.publish_bytes_max = 1_000;
    let rows = (0..100).map(|n| message(&kafka.topic, Some(&n.to_string()), vec![b'x'; 2_000])).collect();
    assert_eq!(publish_all(&kafka.broker(), rows).await.len(), 100);
}

// The vectors are those of Apache Kafka's own test of `Utils.murmur2`; the Java client takes
// `toPositive(hash) % partitions`.
#[tokio::test]
async fn keys_go_to_the_partition_that_the_java_client_would_take() {
    let Some(kafka) = Kafka::with_topic("keys_go_to_the_partition_that_the_java_client_would_take", 7).await else {
        return;
    };
    let vectors = [
        ("21", -973_932_308_i32),
        ("foobar", -790_332_482),
        ("a-little-bit-long-string", -985_981_536),
        ("a-little-bit-longer-string", -1_486_304_829),
        ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
        ("abc", 479_470_107),
    ];
    let rows = vectors.iter().map(|(key, _)| message(&kafka.topic, Some(key), "x")).collect();
    let receipts = publish_all(&kafka.broker(), rows).await;
    for ((key, hash), receipt) in vectors.into_iter().zip(receipts) {
        let Receipt::Offset { partition, .. } = receipt else { panic!("{receipt:?}") };
        assert_eq!(partition, (hash & 0x7fff_ffff) % 7, "{key}");
    }
}

#[tokio::test]
async fn a_topic_is_created_only_where_that_was_asked_for() {
    let Some(mut kafka) = Kafka::without_topic("a_topic_is_created_only_where_that_was_asked_for") else { return };
    // A name given twice crashes librdkafka's administration, as rdkafka 0.39 uses it.
    let topics = [kafka.topic.clone(), kafka.topic.clone()];
    kafka.broker().declare(&topics).await.unwrap();
    let mut publisher = kafka.broker().publisher().await.unwrap();
    assert!(matches!(publisher.topic(&kafka.topic).await.unwrap(), TopicState::NotReady(_)));
    kafka.config.create_topics = true;
    kafka.broker().declare(&topics).await.unwrap();
    assert_eq!(publisher.topic(&kafka.topic).await.unwrap(), TopicState::Ready);
    kafka.broker().declare(&topics).await.unwrap();
    publisher.close().await;
}
