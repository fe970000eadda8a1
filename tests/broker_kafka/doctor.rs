//! What `check` says of a real Kafka.

use std::time::Duration;

use crate::kit::*;
use oncebox::TopicRetention;
use oncebox::broker::{Broker, Subscription};
use oncebox::observe::{Finding, Severity};

fn is_stuck(finding: &Finding) -> bool {
    finding.severity == Severity::Stuck
}

#[tokio::test]
async fn the_doctor_names_what_is_missing_and_what_weakens_a_promise() {
    let Some(kafka) = Kafka::without_topic("the_doctor_names_what_is_missing_and_what_weakens_a_promise") else {
        return;
    };
    kafka.create(&kafka.topic, 1, &[("max.message.bytes", "20000"), ("retention.ms", "3600000")]).await;
    let missing = unique("kafka-missing");
    let group = unique("group");
    let broker = kafka.broker();
    let mut subscriber = broker.subscriber(&kafka.subscription(&group)).await.unwrap();
    assigned(&mut subscriber).await;
    let subscription = Subscription::new(group.clone(), vec![kafka.topic.clone(), missing.clone()]);
    let findings = broker.check(&[subscription]).await.unwrap();
    let of = |name: &str| {
        let found = findings.iter().find(|finding| finding.name.contains(name));
        let found = found.unwrap_or_else(|| panic!("{name}: {findings:#?}"));
        (found.detail.clone(), found.remedy.clone().unwrap_or_default())
    };
    assert!(findings[0].name == "kafka" && findings[0].detail.contains("librdkafka"), "{findings:#?}");
    let (detail, remedy) = of(&missing);
    assert!(detail.contains("does not exist"), "{detail}");
    assert!(remedy.contains(&format!("--create --topic {missing} --partitions 3")), "{remedy}");
    assert!(remedy.contains(&kafka.servers()) && remedy.contains("create_topics = true"), "{remedy}");
    assert!(of(": copies").0.contains("one copy"));
    assert!(of(": sizes").0.contains("20000"));
    assert!(of(": retention").0.starts_with("1h"));
    assert!(of(&group).0.contains("1 member"));
    assert!(findings.iter().all(|finding| finding.severity != Severity::Refused), "{findings:#?}");
    // What the horizon of an inbox must exceed; a topic that is not there says nothing.
    let kept = Some(TopicRetention::For(Duration::from_secs(3_600)));
    assert_eq!(broker.retention(&[missing.clone(), kafka.topic.clone()]).await.unwrap(), kept);
    assert_eq!(broker.retention(&[missing]).await.unwrap(), None);
    subscriber.close().await;
}

#[tokio::test]
async fn the_doctor_refuses_a_group_with_members_of_another_kind() {
    use rdkafka::ClientConfig;
    use rdkafka::consumer::{BaseConsumer, Consumer};

    let Some(kafka) = Kafka::with_topic("the_doctor_refuses_a_group_with_members_of_another_kind", 1).await else {
        return;
    };
    let group = unique("group");
    let mut settings = ClientConfig::new();
    settings.set("bootstrap.servers", kafka.servers()).set("group.id", &group);
    settings.set("partition.assignment.strategy", "range");
    let other: BaseConsumer = settings.create().unwrap();
    other.subscribe(&[&kafka.topic]).unwrap();
    eventually("the other member is in", SOON, || async {
        drop(other.poll(std::time::Duration::from_millis(50)));
        (other.assignment().unwrap().count() > 0).then_some(())
    })
    .await;
    let findings = kafka.broker().check(&[kafka.subscription(&group)]).await.unwrap();
    let refused: Vec<_> = findings.iter().filter(|finding| finding.severity == Severity::Refused).collect();
    assert!(refused.len() == 1 && refused[0].detail.contains("`range`"), "{findings:#?}");
    let mut subscriber = kafka.broker().subscriber(&kafka.subscription(&group)).await.unwrap();
    let joined = async {
        loop {
            drop(other.poll(std::time::Duration::from_millis(10)));
            if let Ok(event) = tokio::time::timeout(std::time::Duration::from_millis(50), subscriber.next()).await {
                break event;
            }
        }
    };
    let error = tokio::time::timeout(SOON, joined).await.unwrap().unwrap_err();
    assert!(matches!(&error, oncebox::BrokerError::Refused(why) if why.contains("another kind")), "{error}");
    subscriber.close().await;
}

/// Shown to fail: a group with a member was well, whatever it did.
#[tokio::test]
async fn the_doctor_says_that_a_group_with_members_stands_still_until_it_gets_on() {
    let test = "the_doctor_says_that_a_group_with_members_stands_still_until_it_gets_on";
    let Some(kafka) = Kafka::with_topic(test, 1).await else { return };
    let (group, broker) = (unique("group"), kafka.broker());
    publish_all(&broker, (0..300).map(|n| message(&kafka.topic, Some("k"), n.to_string())).collect()).await;
    let mut subscriber = broker.subscriber(&kafka.subscription(&group)).await.unwrap();
    assigned(&mut subscriber).await;
    let deliveries = receive(&mut subscriber, 300).await;
    let look = || async {
        let findings = broker.check(&[kafka.subscription(&group)]).await.unwrap();
        findings.into_iter().find(|finding| finding.name == format!("kafka group {group}")).unwrap()
    };
    let stands = eventually("it stands still", SOON, || async { Some(look().await).filter(is_stuck) }).await;
    assert!(stands.detail.contains("300 record(s) of partition 0") && stands.remedy.is_some(), "{stands:?}");
    // One after the other: slow, but on its way. A busy machine may commit none of them between
    // the two reads of a look.
    let looks = async { while is_stuck(&look().await) {} };
    let works = async {
        for next in &deliveries[..200] {
            subscriber.acknowledge(&next.source, next.sequence).await.unwrap();
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    };
    tokio::select! {
        () = looks => {}
        () = works => panic!("a group that gets on is called stuck"),
    }
    acknowledge(&mut subscriber, &deliveries).await;
    eventually("nothing is left", SOON, || async { (!is_stuck(&look().await)).then_some(()) }).await;
    subscriber.close().await;
}

/// Shown by: one after the other (each group took two seconds of its own).
#[tokio::test]
async fn the_doctor_watches_groups_that_stand_still_at_the_same_time() {
    let test = "the_doctor_watches_groups_that_stand_still_at_the_same_time";
    let Some(kafka) = Kafka::with_topic(test, 1).await else { return };
    let broker = kafka.broker();
    publish_all(&broker, (0..5).map(|n| message(&kafka.topic, Some("k"), n.to_string())).collect()).await;
    let (mut subscriptions, mut subscribers) = (Vec::new(), Vec::new());
    for _ in 0..6 {
        let subscription = kafka.subscription(&unique("group"));
        let mut subscriber = broker.subscriber(&subscription).await.unwrap();
        assigned(&mut subscriber).await;
        receive(&mut subscriber, 5).await;
        subscriptions.push(subscription);
        subscribers.push(subscriber);
    }
    // Two seconds for each of six, one after the other, never take less than twelve.
    eventually("all of them stand still, in less time than they take by turns", SOON, || async {
        let began = std::time::Instant::now();
        let findings = broker.check(&subscriptions).await.unwrap();
        let stuck = findings.iter().filter(|finding| is_stuck(finding)).count();
        (stuck == 6 && began.elapsed() < Duration::from_secs(12)).then_some(())
    })
    .await;
    for subscriber in subscribers {
        subscriber.close().await;
    }
}
