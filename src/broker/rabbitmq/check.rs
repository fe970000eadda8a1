//! Finds what breaks or weakens a promise on this server, as far as AMQP shows it, with the remedy.
//!
//! AMQP does not show policies. Where they matter, a finding has the command that shows or sets
//! them.

use super::config::RabbitConfig;
use super::error::again;
use super::repartition;
use super::socket::Link;
use super::topology::{ENABLE_PLUGIN, QueueName, Topology, hash_exchange, queues};
use super::version::ServerVersion;
use crate::broker::{BETWEEN_LOOKS, BrokerFinding, STANDS_STILL, Subscription};
use crate::error::BrokerError;

/// The oldest version with quorum queues, a single active consumer, and redelivery in order.
const OLDEST: (u32, u32) = (3, 10);

/// Examines everything that the publisher and these subscriptions use. Creates nothing.
pub(super) async fn check(
    config: &RabbitConfig,
    version: &ServerVersion,
    subscriptions: &[Subscription],
) -> Result<Vec<BrokerFinding>, BrokerError> {
    let servers = config.servers()?;
    let link = Link::open(config, "oncebox doctor").await?;
    let mut topology = Topology::new(&link, config);
    let names: Vec<String> = servers.iter().map(ToString::to_string).collect();
    let mut findings = vec![finding_version(version, &names.join(", "))];
    let mut waiting = Vec::new();
    if let Some(server) = servers.iter().find(|server| !server.tls && !is_loopback(&server.host)) {
        findings.push(BrokerFinding {
            name: "rabbitmq tls".into(),
            refused: false,
            stuck: false,
            detail: format!("the connection to {server} is not encrypted, and the password goes over it"),
            remedy: Some("use amqps://".into()),
        });
    }
    findings.push(exchange(config, &mut topology).await?);
    if let Some(alternate) = &config.alternate_exchange {
        findings.push(alternate_exchange(alternate, &mut topology).await?);
    }
    for subscription in subscriptions {
        for topic in &subscription.topics {
            for queue in queues(config, subscription, topic) {
                let (finding, ready) = queue_finding(subscription, &queue, version, &mut topology).await?;
                waiting.extend(ready.map(|ready| (findings.len(), queue.name.clone(), ready)));
                findings.push(finding);
            }
            findings.extend(other_layout(config, subscription, topic, &mut topology).await?);
            if config.partitions > 1 {
                let hash = hash_exchange(subscription, topic);
                if !topology.exchange_exists(&hash).await? {
                    findings.push(BrokerFinding {
                        name: format!("exchange {hash}"),
                        refused: false,
                        stuck: false,
                        detail: "the hash exchange is not there yet".into(),
                        remedy: Some("start the consumer, which declares it".into()),
                    });
                }
            }
        }
    }
    look_again(waiting, &mut topology, &mut findings).await?;
    findings.push(policies(&servers[0].vhost));
    link.close(config.close_deadline).await;
    if config.partitions > 1 {
        findings.push(plugin(config).await?);
    }
    Ok(findings)
}

fn finding_version(version: &ServerVersion, server: &str) -> BrokerFinding {
    let ServerVersion { product, version: text } = version;
    let old = product == "RabbitMQ" && version.numbers() < OLDEST;
    BrokerFinding {
        name: "rabbitmq server".into(),
        refused: old,
        stuck: false,
        detail: format!("{product} {text} at {server}"),
        remedy: old.then(|| format!("use RabbitMQ {}.{} or later", OLDEST.0, OLDEST.1)),
    }
}

async fn exchange(config: &RabbitConfig, topology: &mut Topology<'_>) -> Result<BrokerFinding, BrokerError> {
    let name = format!("exchange {}", config.exchange);
    if !topology.exchange_exists(&config.exchange).await? {
        let (detail, remedy) =
            ("not there yet".to_owned(), Some("start `publisher` or `consumer`, which declares it".to_owned()));
        return Ok(BrokerFinding { name, refused: false, stuck: false, detail, remedy });
    }
    // The exchange exists, so declaring it only compares its properties.
    let compared = topology.exchange(config).await;
    difference(name, compared, "a durable topic exchange".into())
}

async fn alternate_exchange(name: &str, topology: &mut Topology<'_>) -> Result<BrokerFinding, BrokerError> {
    let there = topology.exchange_exists(name).await?;
    Ok(BrokerFinding {
        name: format!("alternate exchange {name}"),
        refused: !there,
        stuck: false,
        detail: if there { "there".into() } else { "not there: what cannot be routed is refused instead".into() },
        remedy: (!there)
            .then(|| format!("declare `{name}` and bind a durable queue to it, or unset alternate_exchange")),
    })
}

/// Examines again, after a pause, the queues that have consumers and ready messages, and notes in
/// `findings` whether they make progress. AMQP does not tell how many messages are delivered and
/// not acknowledged; but a consumer that stands still soon takes no more ready messages.
async fn look_again(
    waiting: Vec<(usize, String, u32)>,
    topology: &mut Topology<'_>,
    findings: &mut [BrokerFinding],
) -> Result<(), BrokerError> {
    if waiting.is_empty() {
        return Ok(());
    }
    tokio::time::sleep(BETWEEN_LOOKS).await;
    for (at, queue, before) in waiting {
        let Some(after) = topology.queue_as_it_stands(&queue).await? else { continue };
        let finding = &mut findings[at];
        if after.consumers == 0 || after.ready < before || finding.refused {
            continue;
        }
        let ready = after.ready;
        finding.stuck = ready == before;
        finding.detail = match finding.stuck {
            true => format!("{ready} ready, {} consumers: none was taken in {BETWEEN_LOOKS:?}", after.consumers),
            false => format!(
                "{before} ready, {BETWEEN_LOOKS:?} later {ready}: more comes than its consumer takes, or it stands still"
            ),
        };
        finding.remedy = Some(STANDS_STILL.to_owned());
    }
    Ok(())
}

/// The finding for a queue, and its number of ready messages where it has consumers and messages.
async fn queue_finding(
    subscription: &Subscription,
    queue: &QueueName,
    version: &ServerVersion,
    topology: &mut Topology<'_>,
) -> Result<(BrokerFinding, Option<u32>), BrokerError> {
    let name = format!("queue {}", queue.name);
    let Some(seen) = topology.queue_as_it_stands(&queue.name).await? else {
        let remedy = Some("start the consumer, which declares and binds it".to_owned());
        let detail = format!("not there yet: what is published to `{}` has no route", queue.topic);
        return Ok((BrokerFinding { name, refused: false, stuck: false, detail, remedy }, None));
    };
    let ready = (seen.consumers > 0 && seen.ready > 0).then_some(seen.ready);
    let counts = format!("{} ready, {} consumers", seen.ready, seen.consumers);
    let finding = match topology.queue(&queue.name, version.limits_deliveries()).await {
        Ok(found) if found.limit_as_it_stands && version.limits_deliveries() => Ok(BrokerFinding {
            name,
            refused: true,
            stuck: false,
            detail: format!("{counts}; its delivery limit is not -1: a message delivered too often is thrown away"),
            remedy: Some(unlimited(&queue.name)),
        }),
        Ok(_) if seen.consumers == 0 && seen.ready > 0 => Ok(BrokerFinding {
            name,
            refused: false,
            stuck: true,
            detail: format!("{counts}: nobody reads it"),
            remedy: Some(format!("start the consumer `{}`", subscription.consumer)),
        }),
        compared => difference(name, compared.map(drop), format!("{counts}; quorum, single active consumer")),
    };
    Ok((finding?, ready))
}

/// A finding where queues of another number of partitions exist. Then no consumer starts, or the
/// queues are being drained.
async fn other_layout(
    config: &RabbitConfig,
    subscription: &Subscription,
    topic: &str,
    topology: &mut Topology<'_>,
) -> Result<Option<BrokerFinding>, BrokerError> {
    let other = repartition::other_layout(config, subscription, topic, topology).await?;
    if other.is_empty() {
        return Ok(None);
    }
    let (ready, _) = repartition::left(&other, topology).await?;
    Ok(Some(BrokerFinding {
        name: format!("queues of {topic}"),
        refused: true,
        stuck: false,
        detail: format!(
            "{}, but partitions = {}: nobody reads them",
            repartition::described(topic, &other, ready),
            config.partitions
        ),
        remedy: Some(format!(
            "set partitions = {} again, or change the number with `oncebox queues repartition`",
            other.len()
        )),
    }))
}

/// The command for a policy that replaces the argument on an existing queue.
fn unlimited(queue: &str) -> String {
    let pattern = queue.replace('.', r"\.");
    format!(r#"rabbitmqctl set_policy --apply-to queues "{queue} unlimited" "^{pattern}$" '{{"delivery-limit":-1}}'"#)
}

fn difference(name: String, compared: Result<(), BrokerError>, good: String) -> Result<BrokerFinding, BrokerError> {
    match compared {
        Ok(()) => Ok(BrokerFinding { name, refused: false, stuck: false, detail: good, remedy: None }),
        Err(BrokerError::Refused(why)) => {
            let remedy = Some("delete it when it is empty, or set another name here".to_owned());
            Ok(BrokerFinding { name, refused: true, stuck: false, detail: why, remedy })
        }
        Err(error) => Err(again(&error)),
    }
}

fn policies(vhost: &str) -> BrokerFinding {
    BrokerFinding {
        name: "rabbitmq policies".into(),
        refused: false,
        stuck: false,
        detail:
            "AMQP does not show policies; max-length, message-ttl, expires or a delivery-limit on these queues loses \
                 messages"
                .into(),
        remedy: Some(format!(
            "look at `rabbitmqctl list_policies -p {vhost}`; where a length limit must be, add \
                              \"overflow\":\"reject-publish\""
        )),
    }
}

async fn plugin(config: &RabbitConfig) -> Result<BrokerFinding, BrokerError> {
    // A separate connection, because the server closes it where the plugin is missing.
    let link = Link::open(config, "oncebox doctor").await?;
    let there = Topology::new(&link, config).has_hash_plugin().await?;
    Ok(BrokerFinding {
        name: "rabbitmq consistent-hash plugin".into(),
        refused: !there,
        stuck: false,
        detail: if there { "enabled".into() } else { "not enabled, and partitions are above 1".into() },
        remedy: (!there).then(|| ENABLE_PLUGIN.to_owned()),
    })
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}
