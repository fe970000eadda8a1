//! Errors that a healthy Kafka does not show, from librdkafka's mock cluster. It is no oracle for
//! the order among partitions; one partition keeps what comes as it comes.

use std::time::{Duration, Instant};

use crate::kit::*;
use oncebox::BrokerError;
use oncebox::broker::kafka::{KafkaBroker, KafkaConfig};
use oncebox::broker::{Broker, Event, Publisher, Refusal, Settled, Subscription, TopicState};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

type Mock = MockCluster<'static, DefaultProducerContext>;

fn mock(topic: &str) -> (Mock, KafkaBroker) {
    mock_with(topic, 1)
}

fn mock_with(topic: &str, partitions: i32) -> (Mock, KafkaBroker) {
    let mock = MockCluster::new(1).unwrap();
    mock.create_topic(topic, partitions, 1).unwrap();
    let mut config = KafkaConfig::from_url(&format!("kafka://{}", mock.bootstrap_servers())).unwrap();
    config.session_timeout = Duration::from_secs(6);
    config.properties.insert("fetch.wait.max.ms".into(), "10".into());
    (mock, KafkaBroker::new(config).unwrap())
}

async fn first_outcome(publisher: &mut Box<dyn Publisher>, topic: &str) -> Settled {
    publish(publisher, vec![message(topic, Some("k"), "x")]).await.remove(0)
}

#[tokio::test]
async fn what_the_broker_answers_decides_whose_fault_it_is() {
    use RDKafkaRespErr as Code;
    let (mock, broker) = mock("t");
    for (error, expected) in [
        (Code::RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE, "message"),
        (Code::RD_KAFKA_RESP_ERR_INVALID_RECORD, "message"),
        (Code::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED, "destination"),
        (Code::RD_KAFKA_RESP_ERR_INVALID_REQUIRED_ACKS, "session"),
        (Code::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION, "retried"),
        (Code::RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT, "retried"),
    ] {
        let mut publisher = ready(&broker, "t").await;
        mock.request_errors(RDKafkaApiKey::Produce, &[error]);
        let settled = first_outcome(&mut publisher, "t").await;
        let found = match &settled.outcome {
            Err(Refusal::Message(_)) => "message",
            Err(Refusal::Destination(_)) => "destination",
            Err(Refusal::Session(_)) => "session",
            Err(Refusal::Behind(_)) => "behind",
            Ok(_) => "retried",
        };
        assert_eq!(found, expected, "{error:?}: {settled:?}");
        mock.clear_request_errors(RDKafkaApiKey::Produce);
        publisher.close().await;
    }
}

/// The second row is put aside behind the first one of the partition, and refused by the client as
/// soon as that is proven; the third one waits for room meanwhile. Shown by: asking only before the
/// wait for room whether a row stands behind a refused one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g3_a_row_that_waits_for_room_stays_behind_an_earlier_one_that_is_refused_meanwhile() {
    let (mock, _) = mock("t");
    let mut config = KafkaConfig::from_url(&format!("kafka://{}", mock.bootstrap_servers())).unwrap();
    config.publish_rows_max = 2;
    config.properties.insert("message.max.bytes".into(), "2000".into());
    let broker = KafkaBroker::new(config).unwrap();
    let mut publisher = ready(&broker, "t").await;
    // Longer than a session waits for the first row of a partition.
    mock.broker_round_trip_time(1, Duration::from_millis(1_500)).unwrap();
    let rows = [("a", "x".to_owned()), ("k", "x".repeat(3_000)), ("k", "x".to_owned())];
    let rows = rows.into_iter().zip(0..).map(|((key, payload), tag)| (tag, message("t", Some(key), payload)));
    publisher.send(rows.collect()).await.unwrap();
    let mut settled = outcomes(&mut publisher, 3).await;
    settled.sort_by_key(|row| row.tag);
    assert!(settled[0].outcome.is_ok(), "{settled:?}");
    assert!(matches!(settled[1].outcome, Err(Refusal::Message(_))), "{settled:?}");
    assert!(matches!(settled[2].outcome, Err(Refusal::Behind(_))), "{settled:?}");
    publisher.close().await;
}

/// The broker is away. Rows without a key do not wait for the first one of their partition, and
/// librdkafka's own queue has room for a thousand.
#[tokio::test]
async fn g11_no_more_rows_are_taken_than_may_be_on_their_way() {
    let (mock, _) = mock("t");
    let mut config = KafkaConfig::from_url(&format!("kafka://{}", mock.bootstrap_servers())).unwrap();
    config.publish_rows_max = 10;
    let mut publisher = ready(&KafkaBroker::new(config).unwrap(), "t").await;
    mock.broker_down(1).unwrap();
    publisher.send((0..10).map(|tag| (tag, message("t", None, "x"))).collect()).await.unwrap();
    let more = publisher.send((10..500).map(|tag| (tag, message("t", None, "x"))).collect());
    assert!(tokio::time::timeout(Duration::from_secs(2), more).await.is_err(), "it took all of them");
}

/// The answer for such a batch has no offset, and librdkafka counts the offsets of its rows up from
/// -1. It fails where each offset is judged by itself: then all rows but the first are believed,
/// and this cluster has stored none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g2_no_row_of_a_batch_that_the_broker_calls_a_duplicate_is_proven() {
    let (mock, _) = mock("t");
    let mut config = KafkaConfig::from_url(&format!("kafka://{}", mock.bootstrap_servers())).unwrap();
    // So that the rows share a batch.
    config.linger = Duration::from_millis(100);
    let mut publisher = ready(&KafkaBroker::new(config).unwrap(), "t").await;
    mock.request_errors(RDKafkaApiKey::Produce, &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_DUPLICATE_SEQUENCE_NUMBER; 10]);
    publisher.send((0..10).map(|tag| (tag, message("t", None, "x"))).collect()).await.unwrap();
    let mut settled = Vec::new();
    let ends = async { while publisher.settle(&mut settled).await.is_ok() {} };
    tokio::time::timeout(SOON, ends).await.expect("the session ends");
    assert!(settled.is_empty(), "{settled:?}");
    publisher.close().await;
}

#[tokio::test]
async fn a_broker_that_is_away_blocks_and_is_no_failure() {
    let (mock, broker) = mock("t");
    let mut publisher = ready(&broker, "t").await;
    assert_eq!(publisher.blocked(), None);
    mock.broker_down(1).unwrap();
    publisher.send(vec![(0, message("t", Some("k"), "x"))]).await.unwrap();
    let blocked = Instant::now();
    while publisher.blocked().is_none() {
        assert!(blocked.elapsed() < SOON);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    mock.broker_up(1).unwrap();
    assert!(outcomes(&mut publisher, 1).await[0].outcome.is_ok());
    assert_eq!(publisher.blocked(), None);
    publisher.close().await;
}

/// Shown to fail without the client's log of metadata: until the publisher sent something, the
/// broker counted as away.
#[tokio::test]
async fn a_broker_that_was_away_is_back_also_for_a_publisher_that_sends_nothing() {
    let (mock, broker) = mock("t");
    let publisher = ready(&broker, "t").await;
    mock.broker_down(1).unwrap();
    eventually("it is away", SOON, async || publisher.blocked()).await;
    mock.broker_up(1).unwrap();
    eventually("it is back", SOON, async || publisher.blocked().is_none().then_some(())).await;
    publisher.close().await;
}

// An idempotent producer keeps its messages back until it has its id, which it asks for every 500
// ms. Shown: without the wait for the id in `warm` the first message takes a second.
#[tokio::test]
async fn a_session_is_warm_when_it_opens() {
    let (mock, broker) = mock("t");
    // Once for what a broker learns of a topic.
    publish_all(&broker, vec![message("t", None, "x")]).await;
    let not_yet = RDKafkaRespErr::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS;
    let (bound, mut fastest) = (Duration::from_millis(400), Duration::MAX);
    // One that the machine leaves alone is enough: a session that is not warm needs its second
    // every time.
    for _ in 0..5 {
        mock.request_errors(RDKafkaApiKey::InitProducerId, &[not_yet; 3]);
        let mut publisher = broker.publisher().await.unwrap();
        let start = Instant::now();
        assert_eq!(publisher.topic("t").await.unwrap(), TopicState::Ready);
        publish(&mut publisher, vec![message("t", None, "x")]).await;
        fastest = fastest.min(start.elapsed());
        publisher.close().await;
        if fastest < bound {
            return;
        }
    }
    panic!("{fastest:?}");
}

// Shown: with a `Drop` that waits for the polling thread it takes 50 ms at best.
#[tokio::test]
async fn dropping_a_session_waits_for_nothing() {
    let (mock, broker) = mock("t");
    let (bound, mut fastest) = (Duration::from_millis(40), Duration::MAX);
    for _ in 0..30 {
        let mut publisher = ready(&broker, "t").await;
        mock.broker_down(1).unwrap();
        publisher.send((0..1_000).map(|tag| (tag, message("t", None, "x"))).collect()).await.unwrap();
        let start = Instant::now();
        drop(publisher);
        fastest = fastest.min(start.elapsed());
        mock.broker_up(1).unwrap();
        if fastest < bound {
            return;
        }
    }
    panic!("{fastest:?}");
}

#[tokio::test]
async fn g10_a_broker_that_is_not_there_is_named() {
    let broker = KafkaBroker::new(KafkaConfig::from_url("kafka://127.0.0.1:1").unwrap()).unwrap();
    for error in [
        broker.publisher().await.err().unwrap(),
        broker.subscriber(&Subscription::new("g", vec!["t".into()])).await.err().unwrap(),
        broker.check(&[]).await.unwrap_err(),
        broker.read_all("t").await.unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(matches!(error, BrokerError::Unavailable(_)) && text.contains("127.0.0.1:1"), "{text}");
    }
}

#[tokio::test]
async fn a_user_who_may_not_produce_is_told_when_the_session_opens() {
    let (mock, broker) = mock("t");
    let denied = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED; 3];
    mock.request_errors(RDKafkaApiKey::InitProducerId, &denied);
    let error = broker.publisher().await.err().unwrap();
    assert!(matches!(&error, BrokerError::Unauthorised(why) if why.contains("idempotent")), "{error}");
}

#[tokio::test]
async fn a_group_that_is_denied_ends_the_subscriber_with_the_reason() {
    let (mock, broker) = mock("t");
    mock.request_errors(
        RDKafkaApiKey::FindCoordinator,
        &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED; 20],
    );
    let mut subscriber = broker.subscriber(&Subscription::new("g", vec!["t".into()])).await.unwrap();
    let error = tokio::time::timeout(SOON, subscriber.next()).await.unwrap().unwrap_err();
    assert!(matches!(&error, BrokerError::Destination(why) if why.contains("group")), "{error}");
}

/// Shown by: only logging it (a consumer that may not read its topic looked well).
#[tokio::test]
async fn a_topic_that_may_not_be_read_is_shown() {
    let (mock, broker) = mock("t");
    mock.request_errors(RDKafkaApiKey::Fetch, &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED; 20]);
    let mut subscriber = broker.subscriber(&Subscription::new("g", vec!["t".into()])).await.unwrap();
    let sources = assigned(&mut subscriber).await;
    subscriber.begin(sources.into_iter().map(|source| (source, None)).collect()).await.unwrap();
    let why = eventually("it is shown", SOON, || async { subscriber.away() }).await;
    assert!(why.contains("may not be read"), "{why}");
    subscriber.close().await;
}

/// Appends a record whose checksum is wrong to a partition of topic `t`. The mock cluster keeps
/// what it gets; a real broker refuses such a record.
async fn append_damaged(mock: &Mock, partition: i32) {
    let number = |number: usize| i32::try_from(number).unwrap().to_be_bytes();
    // The leader's epoch, the version, the checksum, attributes and times, no producer, one record.
    let checked =
        [&[0_u8; 4][..], &[2], &[0xBA; 4], &[0; 2 + 4 + 8 + 8], &[0xFF; 8 + 2 + 4], &number(1), b"one record"].concat();
    let batch = [&[0_u8; 8][..], &number(checked.len()), &checked].concat();
    // Produce, version 7, from client `c`: no transaction, acks of the leader, one topic, one
    // partition.
    let start = [&[0_u8, 0, 0, 7][..], &number(1), &[0, 1, b'c'], &[0xFF, 0xFF], &[0, 1], &number(10_000)].concat();
    let place = [&number(1)[..], &[0, 1, b't'], &number(1), &partition.to_be_bytes(), &number(batch.len())].concat();
    let request = [start, place, batch].concat();
    let mut broker = tokio::net::TcpStream::connect(mock.bootstrap_servers()).await.unwrap();
    broker.write_all(&[&number(request.len())[..], &request].concat()).await.unwrap();
    // Its length, the number of the request, and the place again, before the code.
    let mut answer = [0; 4 + 4 + 4 + 3 + 4 + 4 + 2];
    broker.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer[23..], [0, 0], "{answer:?}");
}

/// Shown by: ending the subscriber. The member joined anew every few seconds, and the other
/// partition was read only in between.
#[tokio::test]
async fn g6_a_record_that_cannot_be_read_stops_its_partition_alone_and_is_shown() {
    let (mock, broker) = mock_with("t", 2);
    let rows = || (0..20).map(|n| message("t", Some(format!("k{n}").as_str()), n.to_string())).collect::<Vec<_>>();
    publish_all(&broker, rows()).await;
    let mut member = broker.subscriber(&Subscription::new(unique("group"), vec!["t".into()])).await.unwrap();
    let deliveries = receive(&mut member, 20).await;
    acknowledge(&mut member, &deliveries).await;
    let of_the_first = deliveries.iter().filter(|delivery| delivery.source.partition == 0).count();
    assert!((1..20).contains(&of_the_first), "{of_the_first} of 20");
    append_damaged(&mock, 0).await;
    let why = eventually("it is shown", SOON, || async { member.away() }).await;
    assert!(why.contains("t/0") && why.contains(&format!("at offset {of_the_first} ")), "{why}");
    publish_all(&broker, rows()).await;
    let read = receive(&mut member, 20 - of_the_first).await;
    assert!(read.iter().all(|delivery| delivery.source.partition == 1), "{read:?}");
    assert!(member.away().is_some());
    let more = tokio::time::timeout(Duration::from_secs(1), member.next()).await;
    assert!(more.is_err(), "nothing behind the damaged one: {more:?}");
    member.close().await;
}

#[tokio::test]
async fn what_was_lost_is_revoked_as_lost_and_not_committed() {
    let (mock, broker) = mock("t");
    publish_all(&broker, (0..4).map(|n| message("t", None, n.to_string())).collect()).await;
    let subscription = Subscription::new(unique("group"), vec!["t".into()]);
    let mut subscriber = broker.subscriber(&subscription).await.unwrap();
    let first = assigned(&mut subscriber).await;
    let deliveries = receive(&mut subscriber, 4).await;
    mock.request_errors(RDKafkaApiKey::Heartbeat, &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID]);
    // Kept, as by a runtime that still works: what it acknowledges meanwhile is not committed.
    let _done = match next(&mut subscriber).await {
        Event::Revoked { sources, lost, done } => {
            assert!(lost && sources == first, "{sources:?} {lost}");
            done
        }
        other => panic!("{other:?}"),
    };
    acknowledge(&mut subscriber, &deliveries).await;
    let second = assigned(&mut subscriber).await;
    assert_ne!(first, second, "another generation of the same partition");
    let again = receive(&mut subscriber, 4).await;
    assert_eq!(texts(&again), ["0", "1", "2", "3"], "the late acknowledgement committed nothing");
    subscriber.close().await;
}
