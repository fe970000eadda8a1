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
    let vhost = &*servers[0].0.vhost;
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
                let (finding, ready) = queue_finding(subscription, topic, &one, version, vhost, &mut topology).await?;
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
    findings.push(policies(vhost));
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
    match topology.exchange().await {
        Ok(()) => Ok(Finding::ok(name, "a durable topic exchange")),
        Err(BrokerError::Refused(why)) => {
            Ok(Finding::refused(name, why, "stop the publishers before you delete it, or set the same here"))
        }
        Err(error) => Err(error),
    }
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
    vhost: &str,
    topology: &mut Topology<'_>,
) -> Result<(Finding, Option<u32>), BrokerError> {
    let name = format!("queue {queue}");
    let Some(seen) = topology.queue_as_it_stands(queue).await? else {
        let detail = format!("not there yet: what is published to `{topic}` has no route");
        let remedy = "start the consumer, which declares and binds it";
        return Ok((Finding::warning(name, detail, remedy), None));
    };
    let ready = (seen.consumers > 0 && seen.ready > 0).then_some(seen.ready);
    let by_default = version.limits_deliveries();
    let finding = match topology.queue(queue, by_default).await {
        Ok(QueueState { limit, .. }) => {
            queue_that_fits(&subscription.consumer, queue, vhost, &QueueState { limit, ..seen }, by_default)
        }
        Err(BrokerError::Refused(why)) => {
            Finding::refused(name, why, "delete it when it is empty, or set another name here")
        }
        Err(error) => return Err(error),
    };
    Ok((finding, ready))
}

/// The finding for a queue that has our arguments, except maybe the delivery limit.
fn queue_that_fits(consumer: &str, queue: &str, vhost: &str, state: &QueueState, by_default: bool) -> Finding {
    let QueueState { ready, consumers, limit } = state;
    let name = format!("queue {queue}");
    let counts = format!("{ready} ready, {consumers} consumers");
    match (limit, limit.fault(by_default)) {
        // No policy takes it away: the server takes the number from the declaration also beside -1.
        (Limit::Other(Some(_)), Some(fault)) => Finding::refused(
            name,
            format!("{counts}; {fault}"),
            "delete it when it is empty; its consumer declares it without a limit",
        ),
        _ if *consumers == 0 && *ready > 0 => {
            Finding::stuck(name, format!("{counts}: nobody reads it"), format!("start the consumer `{consumer}`"))
        }
        (_, Some(fault)) => Finding::warning(name, format!("{counts}; {fault}"), unlimited(queue, vhost)),
        (Limit::Unknown, None) => Finding::warning(
            name,
            format!(
                "{counts}; this user may not declare it, so it is not known whether it is a quorum queue with a single \
                 active consumer and without a delivery limit"
            ),
            "run `oncebox doctor` as a user who may configure it, or look at `rabbitmqctl list_queues name arguments`",
        ),
        _ => Finding::ok(name, format!("{counts}; quorum, single active consumer")),
    }
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
    let (ready, consumers) = repartition::left(&other, topology).await?;
    let (found, wanted) = (repartition::described(&queue, topic, &other, ready), topology.config.partitions);
    let readers = match consumers {
        0 => "nobody reads them".to_owned(),
        many => format!("{many} consumers still empty them"),
    };
    Ok(Some(Finding::refused(
        format!("queues of {topic}"),
        format!("{found}, but partitions = {wanted}: {readers}"),
        repartition::remedy(&queue, &other),
    )))
}

/// The command for a policy that takes the server's own limit away from an existing queue.
fn unlimited(queue: &str, vhost: &str) -> String {
    let pattern = queue.replace('.', r"\.");
    format!(
        r#"`rabbitmqctl set_policy -p {vhost} --apply-to queues "{queue} unlimited" "^{pattern}$" '{{"delivery-limit":-1}}'`; "#
    ) + "of several policies only one holds for a queue. Once it is set, this warning stays"
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Both were refused. The remedy for a queue without a limit is a policy, which AMQP does
    /// not show, so that the exit code stayed 3; and for a queue with a limit no policy helps.
    #[test]
    fn r30_a_limit_of_the_declaration_is_refused_and_one_that_a_policy_may_take_away_is_a_warning() {
        let found = |limit, by_default, ready, consumers| {
            queue_that_fits("ledger", "t.ledger", "pay", &QueueState { ready, consumers, limit }, by_default)
        };
        for by_default in [false, true] {
            let limited = found(Limit::Other(Some(5)), by_default, 1, 0);
            assert_eq!(limited.severity, Severity::Refused);
            assert!(limited.remedy.is_some_and(|remedy| remedy.contains("delete it")));
            assert_eq!(found(Limit::Other(Some(-1)), by_default, 0, 1).severity, Severity::Ok);
            assert_eq!(found(Limit::AsAsked, by_default, 0, 1).severity, Severity::Ok);
        }
        let unknown = found(Limit::Other(None), true, 1, 1);
        assert_eq!(unknown.severity, Severity::Warning);
        let command = r#"`rabbitmqctl set_policy -p pay --apply-to queues "t.ledger unlimited" "^t\.ledger$" '{"delivery-limit":-1}'`"#;
        assert!(unknown.remedy.is_some_and(|remedy| remedy.starts_with(command) && remedy.contains("stays")));
        assert_eq!(found(Limit::Other(None), true, 1, 0).severity, Severity::Stuck, "nobody reads it");
        assert_eq!(found(Limit::Other(None), false, 1, 1).severity, Severity::Ok);
    }
}
