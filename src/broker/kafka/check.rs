//! What `doctor` reports about Kafka: what breaks or weakens a promise, with the command that mends
//! it.
//!
//! Promise: a check changes nothing.
//!
//! Not here: our own settings, which are refused before any connection (`config`, `properties`).

use std::collections::{BTreeMap, BTreeSet};
use std::panic::resume_unwind;
use std::sync::Arc;

use rdkafka::metadata::MetadataTopic;

use super::blocking::{self, Asker};
use super::client::ASK_DEADLINE;
use super::config::KafkaConfig;
use super::topology::{self, TopicSettings};
use super::unread::Looker;
use crate::broker::{BETWEEN_LOOKS, STANDS_STILL, Subscription, TopicState};
use crate::error::BrokerError;
use crate::inbox::rules::horizon::TopicRetention;
use crate::observe::Finding;

// What the default limits allow at enqueue, with room for the headers of a record.
const ENQUEUE_BYTES_MAX: usize = 900_000 + 4_096;
/// How many groups are examined at the same time. Each has a client of its own, with its threads.
const GROUPS_AT_ONCE: usize = 16;

pub(super) async fn check(
    config: &Arc<KafkaConfig>,
    subscriptions: &[Subscription],
) -> Result<Vec<Finding>, BrokerError> {
    let (config, subscriptions) = (Arc::clone(config), subscriptions.to_vec());
    blocking::run(move || look(&config, &subscriptions)).await
}

fn look(config: &KafkaConfig, subscriptions: &[Subscription]) -> Result<Vec<Finding>, BrokerError> {
    let asker = Asker::new(config)?;
    let topics: BTreeSet<&str> =
        subscriptions.iter().flat_map(|subscription| &subscription.topics).map(String::as_str).collect();
    let mut findings = vec![reachable(config, &asker)?];
    let mut present = Vec::new();
    for topic in topics {
        let metadata = asker.metadata(Some(topic))?;
        let found = topology::find(&metadata, topic);
        match topology::state(found) {
            TopicState::Ready => {
                let partitions = found.into_iter().flat_map(MetadataTopic::partitions);
                let away =
                    partitions.filter(|partition| !topology::has_leader(partition)).map(|partition| partition.id());
                let away: Vec<i32> = away.collect();
                findings.extend(leaders(config, topic, &away));
                present.push((topic, found.map_or(0, copies)));
            }
            TopicState::NotReady(reason) => findings.push(Finding::warning(
                format!("kafka topic {topic}"),
                format!("cannot be used: {reason}; what is published to it is held, its consumers wait"),
                topology::how_to_create(config, topic),
            )),
        }
    }
    let names: BTreeSet<&str> = present.iter().map(|(topic, _)| *topic).collect();
    let settings =
        if names.is_empty() { BTreeMap::new() } else { topology::settings(config, &names).unwrap_or_default() };
    for (topic, copies) in present {
        match settings.get(topic) {
            Some(settings) => findings.extend(of_topic(config, topic, copies, settings)),
            None => findings.push(Finding::warning(
                format!("kafka topic {topic}"),
                "its settings cannot be read: copies, sizes and retention are not known",
                format!("allow DescribeConfigs on topic `{topic}` to this user"),
            )),
        }
    }
    for some in subscriptions.chunks(GROUPS_AT_ONCE) {
        findings.extend(of_groups(config, &asker, some));
    }
    Ok(findings)
}

/// Examines groups at the same time: each one that lags is watched for a while.
fn of_groups(config: &KafkaConfig, asker: &Asker, subscriptions: &[Subscription]) -> Vec<Finding> {
    std::thread::scope(|scope| {
        let looks = subscriptions.iter().map(|subscription| scope.spawn(move || of_group(config, asker, subscription)));
        // All of them begin before the first one is waited for.
        let looks: Vec<_> = looks.collect();
        let found = looks.into_iter().map(|look| look.join().unwrap_or_else(|panic| resume_unwind(panic)));
        found.collect()
    })
}

fn reachable(config: &KafkaConfig, asker: &Asker) -> Result<Finding, BrokerError> {
    asker.reach()?;
    let brokers = asker.metadata(Some("__consumer_offsets")).map_or(0, |metadata| metadata.brokers().len());
    let (_, version) = rdkafka::util::get_rdkafka_version();
    let security = match (config.tls, &config.user) {
        (true, Some(_)) => format!("TLS and {}", config.sasl_mechanism.name()),
        (true, None) => "TLS".to_owned(),
        (false, Some(_)) => format!("{} without TLS", config.sasl_mechanism.name()),
        (false, None) => "no TLS".to_owned(),
    };
    Ok(Finding::ok("kafka", format!("{brokers} broker(s) at {}, {security}, librdkafka {version}", config.bootstrap())))
}

/// The smallest number of copies that a partition of the topic has.
fn copies(topic: &MetadataTopic) -> usize {
    topic.partitions().iter().map(|partition| partition.replicas().len()).min().unwrap_or(0)
}

/// The finding for partitions that have no leader, where the other ones of their topic have one.
fn leaders(config: &KafkaConfig, topic: &str, away: &[i32]) -> Option<Finding> {
    let first = away.first()?;
    let servers = config.bootstrap();
    Some(Finding::warning(
        format!("kafka topic {topic}: leaders"),
        format!("partitions without a leader: {}, {first} among them; what is in them is not consumed", away.len()),
        format!(
            "start the brokers that have their copies: `kafka-topics.sh --bootstrap-server {servers} --describe \
             --topic {topic} --unavailable-partitions` names them"
        ),
    ))
}

fn of_topic(config: &KafkaConfig, topic: &str, copies: usize, settings: &TopicSettings) -> Vec<Finding> {
    let number = |name: &str| settings.get(name).and_then(|value| value.parse::<i64>().ok());
    let alter = |change: &str| {
        let servers = config.bootstrap();
        format!(
            "`kafka-configs.sh --bootstrap-server {servers} --alter --entity-type topics --entity-name {topic} \
             --add-config {change}`"
        )
    };
    let name = |what: &str| format!("kafka topic {topic}: {what}");
    let mut findings = Vec::new();
    let in_sync = number("min.insync.replicas").unwrap_or(1);
    findings.push(match (copies, in_sync) {
        (0 | 1, _) => Finding::warning(
            name("copies"),
            "one copy: the loss of one disk loses messages that were proven",
            "give it three copies (`kafka-reassign-partitions.sh`) and min.insync.replicas=2",
        ),
        (copies, 1) => Finding::warning(
            name("copies"),
            format!("{copies} copies, but a message counts as taken when one has it (min.insync.replicas=1)"),
            alter("min.insync.replicas=2"),
        ),
        (copies, in_sync) => {
            Finding::ok(name("copies"), format!("{copies} copies, {in_sync} before a message counts as taken"))
        }
    });
    if settings.get("unclean.leader.election.enable").is_some_and(|value| value == "true") {
        findings.push(Finding::warning(
            name("elections"),
            "a copy that lags may become leader: messages that were proven can be lost",
            alter("unclean.leader.election.enable=false"),
        ));
    }
    if let Some(max) = number("max.message.bytes").and_then(|max| usize::try_from(max).ok())
        && max < ENQUEUE_BYTES_MAX
    {
        findings.push(Finding::warning(
            name("sizes"),
            format!("takes {max} bytes at most, enqueue lets 900000 through: larger messages will be dead"),
            alter("max.message.bytes=1048588"),
        ));
    }
    findings.push(retention(name("retention"), settings));
    findings
}

fn retention(name: String, settings: &TopicSettings) -> Finding {
    let never = "a message may come again at any time, so the inbox horizon is `never`";
    let detail = match topology::kept(settings) {
        Some(TopicRetention::Compacted) => format!("compacted: {never}"),
        Some(TopicRetention::Unlimited) => format!("unlimited: {never}"),
        Some(TopicRetention::For(kept)) => {
            format!("{}; the inbox horizon must be longer", humantime::format_duration(kept))
        }
        None => "not told by the broker".to_owned(),
    };
    Finding::ok(name, detail)
}

fn of_group(config: &KafkaConfig, asker: &Asker, subscription: &Subscription) -> Finding {
    let group = subscription.group();
    let groups = match asker.client().fetch_group_list(Some(group), ASK_DEADLINE) {
        Ok(groups) => groups,
        Err(error) => return untold(group, &format!("who is in it cannot be told: {error}")),
    };
    // A group that never had a member is in no list.
    let found = groups.groups().iter().find(|found| found.name() == group);
    let (members, state, protocol) =
        found.map_or((0, "", ""), |found| (found.members().len(), found.state(), found.protocol()));
    let name = format!("kafka group {group}");
    if members > 0 && !protocol.is_empty() && protocol != "cooperative-sticky" {
        let detail = format!("{members} member(s) of another kind: their assignment strategy is `{protocol}`");
        return Finding::refused(name, detail, "stop them, or give the consumer another `group`");
    }
    let looker = Looker::new(config, subscription);
    let Some(unread) = looker.as_ref().and_then(Looker::unread) else {
        return untold(group, &format!("{members} member(s); what they have not read cannot be told"));
    };
    if members == 0
        && let Some(first) = unread.first()
    {
        let detail = format!("nobody is in it, and it has not read {first}");
        return Finding::stuck(name, detail, format!("start the consumer `{}`", subscription.consumer));
    }
    // While the group rebalances, nothing moves: only a stable group is examined.
    if members > 0
        && state == "Stable"
        && !unread.is_empty()
        && let Some(stands) = looker.and_then(|looker| looker.stands(&unread))
    {
        let detail = format!("{members} member(s), and it stands still: {stands}, and none was in {BETWEEN_LOOKS:?}");
        return Finding::stuck(name, detail, STANDS_STILL);
    }
    Finding::ok(name, format!("{members} member(s), {}", if state.is_empty() { "not used yet" } else { state }))
}

/// The finding for a group that could not be examined: what is unknown must not look good.
fn untold(group: &str, what: &str) -> Finding {
    Finding::warning(
        format!("kafka group {group}"),
        what,
        format!("allow Describe on group `{group}` and on its topics to this user, and see whether the broker answers"),
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn findings(copies: usize, settings: &[(&str, &str)]) -> Vec<Finding> {
        let settings = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        of_topic(&KafkaConfig::from_url("kafka://a:1").unwrap(), "t", copies, &settings)
    }

    #[test]
    fn what_weakens_a_proof_is_named_with_its_remedy() {
        let safe =
            [("min.insync.replicas", "2"), ("unclean.leader.election.enable", "false"), ("retention.ms", "1000")];
        assert!(findings(3, &safe).iter().all(|finding| finding.remedy.is_none()));
        let told = |copies, settings: &[(&str, &str)]| {
            let weak = findings(copies, settings).into_iter().filter(|finding| finding.remedy.is_some());
            weak.map(|finding| format!("{} {}", finding.detail, finding.remedy.unwrap())).collect::<Vec<_>>().join("\n")
        };
        assert!(told(1, &safe).contains("three copies"));
        assert!(told(3, &[("min.insync.replicas", "1")]).contains("--add-config min.insync.replicas=2"));
        assert!(told(3, &[("unclean.leader.election.enable", "true")]).contains("can be lost"));
        assert!(told(3, &[("max.message.bytes", "20000")]).contains("20000 bytes at most"));
    }

    #[test]
    fn partitions_without_a_leader_are_named_with_the_command_that_shows_their_brokers() {
        let config = KafkaConfig::from_url("kafka://a:1").unwrap();
        assert_eq!(leaders(&config, "t", &[]), None);
        let found = leaders(&config, "t", &[1, 4]).unwrap();
        assert!(found.detail.starts_with("partitions without a leader: 2, 1 among them"), "{found:?}");
        assert!(found.remedy.unwrap().contains("--topic t --unavailable-partitions"));
    }

    #[test]
    fn retention_is_said_because_the_horizon_must_exceed_it() {
        let last = |settings: &[(&str, &str)]| findings(3, settings).pop().unwrap().detail;
        assert!(last(&[("retention.ms", "604800000"), ("cleanup.policy", "delete")]).starts_with("7days"));
        assert!(last(&[("retention.ms", "-1"), ("cleanup.policy", "delete")]).contains("`never`"));
        assert!(last(&[("retention.ms", "1"), ("cleanup.policy", "compact,delete")]).contains("`never`"));
    }
}
