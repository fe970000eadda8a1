//! `oncebox queues`: what an operator does with the queues of consumers on RabbitMQ.
//!
//! Guarantee: a command may be interrupted and run again. No queue that holds a message is deleted.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::common::{CommonArgs, Output, tabled};
use oncebox::app::AppError;
use oncebox::app::config::Settings;

/// The pause between two checks of what is left.
const PAUSE: Duration = Duration::from_millis(500);

/// Queues of consumers on RabbitMQ
#[derive(Debug, Subcommand)]
pub(super) enum QueuesCommand {
    /// Go over to the number of queues that [broker.rabbitmq] `partitions` says, with every key in
    /// its order
    ///
    /// New messages go to the new queues at once. Consumers with the old number read the old queues
    /// empty: keep them running until this command says that they are to be stopped. Then it
    /// deletes the old queues, and consumers with the new number can start; before, they are
    /// refused. Run it again where it was broken off.
    Repartition(RepartitionArgs),
}

#[derive(Debug, Args)]
pub(super) struct RepartitionArgs {
    /// Only this consumer of the settings
    #[arg(long, value_name = "NAME")]
    consumer: Option<String>,
    /// Give up after so long, with exit code 3; without it, wait until it is done
    #[arg(long, value_name = "DURATION", value_parser = oncebox::app::config::parse_duration)]
    wait: Option<Duration>,
}

pub(super) async fn run(command: &QueuesCommand, common: &CommonArgs, output: Output) -> Result<(), AppError> {
    let QueuesCommand::Repartition(args) = command;
    let settings = common.load(None)?.settings;
    repartition(args, &settings, output).await
}

#[cfg(feature = "rabbitmq")]
async fn repartition(args: &RepartitionArgs, settings: &Settings, output: Output) -> Result<(), AppError> {
    use oncebox::app::say;
    use oncebox::broker::rabbitmq::{RabbitBroker, Repartition};

    if !matches!(settings.broker.url.0.split_once(':'), Some(("amqp" | "amqps", _))) {
        return Err(AppError::usage("only RabbitMQ has queues of consumers; set [broker] url to amqp:// or amqps://"));
    }
    // Settings with which `consumer` does not start are refused here too. Where two consumers or
    // topics share a queue, it would be deleted with the messages of both. Under a wrong name, new
    // queues would fill that no consumer reads.
    if let Some((.., why)) = settings.mistakes().into_iter().find(|(program, ..)| *program == "consumer") {
        return Err(AppError::usage(why));
    }
    let broker = RabbitBroker::new(settings.into())?;
    let partitions = settings.broker.rabbitmq.partitions;
    let begun = tokio::time::Instant::now();
    let mut done = Vec::new();
    for (subscription, topic) in subscriptions(args, settings)? {
        let mut said = String::new();
        loop {
            let Repartition::Draining { from, ready, consumers } = broker.repartition(&subscription, &topic).await?
            else {
                break;
            };
            let next = match (ready, consumers) {
                (0, _) => format!(
                    "nothing is ready in the old queues: stop the consumers with partitions = {from}; what they have and \
                     do not finish is ready again then"
                ),
                (_, 0) => {
                    format!("{ready} messages left and nobody reads them: start consumers with partitions = {from}")
                }
                _ => format!("{ready} messages left: keep the consumers with partitions = {from} running"),
            };
            if next != said {
                say("INFO", &format!("consumer {}, topic {topic}: {next}", subscription.consumer));
                said = next;
            }
            if args.wait.is_some_and(|wait| begun.elapsed() >= wait) {
                return Err(AppError::not_ready(format!(
                    "consumer {}, topic {topic}: {said}; then run this command again",
                    subscription.consumer
                )));
            }
            tokio::time::sleep(PAUSE).await;
        }
        done.push((subscription.consumer, topic));
    }
    match output {
        Output::Json => {
            for (consumer, topic) in done {
                data!("{}", serde_json::json!({ "consumer": consumer, "topic": topic, "partitions": partitions }));
            }
        }
        Output::Table => {
            let rows = done.into_iter().map(|(consumer, topic)| [consumer, topic, partitions.to_string()]);
            tabled(["consumer", "topic", "partitions"], rows)?;
        }
    }
    Ok(())
}

#[cfg(not(feature = "rabbitmq"))]
async fn repartition(_: &RepartitionArgs, _: &Settings, _: Output) -> Result<(), AppError> {
    Err(AppError::usage("this program was built without the feature `rabbitmq`"))
}

#[cfg(feature = "rabbitmq")]
fn subscriptions(
    args: &RepartitionArgs,
    settings: &Settings,
) -> Result<Vec<(oncebox::broker::Subscription, String)>, AppError> {
    let wanted = |name: &str| args.consumer.as_deref().is_none_or(|only| only == name);
    let found: Vec<_> = settings
        .consumer
        .iter()
        .filter(|consumer| wanted(&consumer.name))
        .flat_map(|consumer| consumer.topics.iter().map(move |topic| (consumer.into(), topic.clone())))
        .collect();
    if found.is_empty() {
        let named = args.consumer.as_deref().map_or_else(String::new, |name| format!(" named `{name}`"));
        return Err(AppError::usage(format!("the settings have no [[consumer]]{named}; give its file with --config")));
    }
    Ok(found)
}
