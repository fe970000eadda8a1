//! Finds what breaks or weakens a promise on this server, as far as AMQP shows it, with the remedy.
//!
//! AMQP does not show policies. Where they matter, a finding has the command that shows or sets
//! them.

use super::config::Known;
use super::repartition;
use super::socket::Link;
use super::topology::{ENABLE_PLUGIN, Limit, QueueState, Topology, hash_exchange, queues};
use super::version::ServerVersion;
use crate::broker::{BETWEEN_LOOKS, STANDS_STILL, Subscription};
use crate::error::BrokerError;
use crate::observe::{Finding, Severity};
use crate::text::loopback::is_loopback;

/// The oldest version with quorum queues, a single active consumer, and redelivery in order.
const OLDEST: (u32, u32) = (3, 10);

/// Examines everything that the publisher and these subscriptions use. Leaves nothing behind.
pub(super) async fn check(
    config: &Known,
    version: &ServerVersion,
    subscriptions: &[Subscription],
) -> Result<Vec<Finding>, BrokerError> {
    let servers = config.servers()?;
    let link = Link::open(config, "oncebox doctor").await?;
    let mut topology = Topology::new(&link, config);
    let names: Vec<String> = servers.iter().map(ToString::to_string).collect();
    let mut findings = vec![finding_version(version, &names.join(", "))];
    let mut waiting = Vec::new();
    if let Some(server) = servers.iter().find(|server| !server.tls() && !is_loopback(server.host())) {
        let detail = format!("the connection to {server} is not encrypted, and the password goes over it");
        findings.push(Finding::warning("rabbitmq tls", detail, "use amqps://"));
    }
    findings.push(exchange(&mut topology).await?);
    if let Some(alternate) = &config.alternate_exchange {
        findings.push(alternate_exchange(alternate, &mut topology).await?);
    }
    for subscription in subscriptions {
        for topic in &subscription.topics {
            let queue = subscription.queue(topic);
            for one in queues(config, &queue) {
                let (finding, ready) = queue_finding(subscription, topic, &one, version, &mut topology).await?;
                waiting.extend(ready.map(|ready| (findings.len(), one, ready)));
                findings.push(finding);
            }
            findings.extend(other_layout(subscription, topic, &mut topology).await?);
            if config.partitions > 1 {
                let hash = hash_exchange(&queue);
                if !topology.exchange_exists(&hash).await? {
                    findings.push(Finding::warning(
                        format!("exchange {hash}"),
                        "the hash exchange is not there yet",
                        "start the consumer, which declares it; one that runs does so within two minutes",
                    ));
                }
            }
        }
    }
    look_again(waiting, &mut topology, &mut findings).await?;
    findings.push(policies(&servers[0].0.vhost));
    link.close().await;
    if config.partitions > 1 {
        findings.push(plugin(config).await?);
    }
    Ok(findings)
}

fn finding_version(version: &ServerVersion, server: &str) -> Finding {
    let ServerVersion { product, version: text } = version;
    let (name, detail) = ("rabbitmq server", format!("{product} {text} at {server}"));
    if product == "RabbitMQ" && version.numbers() < OLDEST {
        return Finding::refused(name, detail, format!("use RabbitMQ {}.{} or later", OLDEST.0, OLDEST.1));
    }
    Finding::ok(name, detail)
}

async fn exchange(topology: &mut Topology<'_>) -> Result<Finding, BrokerError> {
    let exchange = &topology.config.exchange;
    let name = format!("exchange {exchange}");
    if !topology.exchange_exists(exchange).await? {
        let remedy =
            "start `publisher` or `consumer`, which declares it; a consumer that runs does so within two minutes";
        return Ok(Finding::warning(name, "not there yet", remedy));
    }
    // The exchange exists, so declaring it only compares its properties.
    let compared = topology.exchange().await;
    difference(name, compared, "a durable topic exchange".into())
}

async fn alternate_exchange(name: &str, topology: &mut Topology<'_>) -> Result<Finding, BrokerError> {
    let called = format!("alternate exchange {name}");
    if topology.exchange_exists(name).await? {
        return Ok(Finding::ok(called, "there"));
    }
    let remedy = format!("declare `{name}` and bind a durable queue to it, or unset alternate_exchange");
    Ok(Finding::refused(called, "not there: what cannot be routed is refused instead", remedy))
}

/// Examines again, after a pause, the queues that have consumers and ready messages, and notes in
/// `findings` whether they make progress. AMQP does not tell how many messages are delivered and
/// not acknowledged; but a consumer that stands still soon takes no more ready messages.
async fn look_again(
    waiting: Vec<(usize, String, u32)>,
    topology: &mut Topology<'_>,
    findings: &mut [Finding],
) -> Result<(), BrokerError> {
    if waiting.is_empty() {
        return Ok(());
    }
    tokio::time::sleep(BETWEEN_LOOKS).await;
    for (at, queue, before) in waiting {
        let Some(after) = topology.queue_as_it_stands(&queue).await? else { continue };
        let finding = &mut findings[at];
        if after.consumers == 0 || after.ready < before || finding.severity == Severity::Refused {
            continue;
        }
        let ready = after.ready;
        let name = std::mem::take(&mut finding.name);
        *finding = if ready == before {
            let detail = format!("{ready} ready, {} consumers: none was taken in {BETWEEN_LOOKS:?}", after.consumers);
            Finding::stuck(name, detail, STANDS_STILL)
        } else {
            let detail = format!(
                "{before} ready, {BETWEEN_LOOKS:?} later {ready}: more comes than its consumer takes, or it stands still"
            );
            Finding::warning(name, detail, STANDS_STILL)
        };
    }
    Ok(())
}

/// The finding for a queue, and its number of ready messages where it has consumers and messages.
async fn queue_finding(
    subscription: &Subscription,
    topic: &str,
    queue: &str,
    version: &ServerVersion,
    topology: &mut Topology<'_>,
) -> Result<(Finding, Option<u32>), BrokerError> {
    let name = format!("queue {queue}");
    let Some(seen) = topology.queue_as_it_stands(queue).await? else {
        let detail = format!("not there yet: what is published to `{topic}` has no route");
        let remedy = "start the consumer, which declares and binds it";
        return Ok((Finding::warning(name, detail, remedy), None));
    };
    let ready = (seen.consumers > 0 && seen.ready > 0).then_some(seen.ready);
    let counts = format!("{} ready, {} consumers", seen.ready, seen.consumers);
    let finding = match topology.queue(queue, version.limits_deliveries()).await {
        Ok(QueueState { limit: Limit::Other(_), .. }) if version.limits_deliveries() => {
            let detail =
                format!("{counts}; its delivery limit is not -1: a message delivered too often is thrown away");
            Finding::refused(name, detail, unlimited(queue))
        }
        // Older servers have no limit by default, and know no policy that takes one away.
        Ok(QueueState { limit: Limit::Other(Some(limit)), .. }) if limit >= 0 => {
            let detail =
                format!("{counts}; its delivery limit is {limit}: a message delivered more often is thrown away");
            Finding::refused(name, detail, "delete it when it is empty; its consumer declares it without a limit")
        }
        Ok(_) if seen.consumers == 0 && seen.ready > 0 => {
            let remedy = format!("start the consumer `{}`", subscription.consumer);
            Finding::stuck(name, format!("{counts}: nobody reads it"), remedy)
        }
        Ok(QueueState { limit: Limit::Unknown, .. }) => Finding::warning(
            name,
            format!(
                "{counts}; this user may not declare it, so it is not known whether it is a quorum queue with a single \
                 active consumer and without a delivery limit"
            ),
            "run `oncebox doctor` as a user who may configure it, or look at `rabbitmqctl list_queues name arguments`",
        ),
        compared => difference(name, compared.map(drop), format!("{counts}; quorum, single active consumer"))?,
    };
    Ok((finding, ready))
}

/// A finding where queues of another number of partitions exist. Then no consumer starts, or the
/// queues are being drained.
async fn other_layout(
    subscription: &Subscription,
    topic: &str,
    topology: &mut Topology<'_>,
) -> Result<Option<Finding>, BrokerError> {
    let queue = subscription.queue(topic);
    let other = repartition::other_layout(&queue, topology).await?;
    if other.is_empty() {
        return Ok(None);
    }
    let (ready, _) = repartition::left(&other, topology).await?;
    let (found, wanted) = (repartition::described(&queue, topic, &other, ready), topology.config.partitions);
    Ok(Some(Finding::refused(
        format!("queues of {topic}"),
        format!("{found}, but partitions = {wanted}: nobody reads them"),
        repartition::remedy(&queue, &other),
    )))
}

/// The command for a policy that replaces the argument on an existing queue.
fn unlimited(queue: &str) -> String {
    let pattern = queue.replace('.', r"\.");
    format!(r#"rabbitmqctl set_policy --apply-to queues "{queue} unlimited" "^{pattern}$" '{{"delivery-limit":-1}}'"#)
}

fn difference(name: String, compared: Result<(), BrokerError>, good: String) -> Result<Finding, BrokerError> {
    match compared {
        Ok(()) => Ok(Finding::ok(name, good)),
        Err(BrokerError::Refused(why)) => {
            Ok(Finding::refused(name, why, "delete it when it is empty, or set another name here"))
        }
        Err(error) => Err(error),
    }
}

fn policies(vhost: &str) -> Finding {
    Finding::warning(
        "rabbitmq policies",
        "AMQP does not show policies; max-length, message-ttl, expires or a delivery-limit on these queues loses \
         messages",
        format!(
            "look at `rabbitmqctl list_policies -p {vhost}`; where a length limit must be, add \
             \"overflow\":\"reject-publish\""
        ),
    )
}

async fn plugin(config: &Known) -> Result<Finding, BrokerError> {
    // A separate connection, because the server closes it where the plugin is missing.
    let link = Link::open(config, "oncebox doctor").await?;
    let name = "rabbitmq consistent-hash plugin";
    if Topology::new(&link, config).has_hash_plugin().await? {
        return Ok(Finding::ok(name, "enabled"));
    }
    Ok(Finding::refused(name, "not enabled, and partitions are above 1", ENABLE_PLUGIN))
}
