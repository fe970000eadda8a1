//! `oncebox doctor`: checks everything that the promise depends on. Exit code 3 where something
//! breaks it, is not there yet, or is stuck.

use std::path::Path;
use std::time::Duration;

use clap::Args;
use serde_json::json;

use super::act::{refused, said};
use super::common::{AnyBroker, CommonArgs, Output, listed, plain};
use oncebox::adapter::{Announced, Versions, unreadable};
use oncebox::app::config::{ConsumerSettings, Settings};
use oncebox::app::{AppError, open_broker, say};
use oncebox::broker::Subscription;
use oncebox::error::redact;
use oncebox::operation::OperationName;
use oncebox::store::{ActContext, DeadMessage, Finding, OperationStore, SchemaState, Severity, Store};

/// The most topics with held messages that are looked at.
const HELD_TOPICS_MAX: usize = 100;
/// Kafka is asked about topics by a subscription, so topics of no configured consumer get one of
/// this name. What is found about its group, which does not exist, is not shown.
const NOBODY: &str = "oncebox-doctor";

/// What counts as stuck, and what `doctor` does beside looking.
#[derive(Debug, Clone, Args)]
pub(super) struct DoctorArgs {
    /// A message that is pending, held or waiting for longer than this is stuck, and so is an
    /// e-mail, an operation or a key that waits for longer, and a connection that waits for a lock
    /// which was taken longer ago
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = oncebox::app::config::parse_duration)]
    older_than: Duration,
    /// Mend a sequence of positions that stands behind the cursor, and have the relay read what it
    /// passed
    #[arg(long)]
    fix: bool,
    /// Mend without asking for confirmation
    #[arg(long, requires = "fix")]
    yes: bool,
    /// Why; stored in the audit row
    #[arg(long, value_name = "TEXT", requires = "fix", default_value = "oncebox doctor --fix", value_parser = said)]
    why: String,
    /// Who acts; stored in the audit row
    #[arg(long, value_name = "NAME", requires = "fix", value_parser = said)]
    by: Option<String>,
}

pub(super) async fn run(args: &DoctorArgs, common: &CommonArgs, output: Output) -> Result<(), AppError> {
    let settings = common.load(None)?.settings;
    if args.fix {
        oncebox::with_store!(&settings, None, |store| mend(store, args).await)?;
    }
    let mut findings = Vec::new();
    let broker = broker(&settings).await;
    let refused = match both(&settings, &broker, args.older_than, &mut findings).await {
        Ok(refused) => refused,
        Err(error) => {
            findings.push(unread(error));
            findings.extend(of_broker(&broker, &settings, &[]).await);
            Vec::new()
        }
    };
    findings.extend(unusable(&settings));
    if settings.consumer.is_empty() {
        findings.push(Finding::warning(
            "consumers",
            "no [[consumer]] is configured: their topics, groups, queues and handlers were not looked at",
            "give the file of the consumers: `oncebox doctor --config FILE`",
        ));
    }
    let starts = |consumer: &&ConsumerSettings| refused.iter().all(|(name, _)| *name != consumer.name);
    findings.extend(settings.consumer.iter().filter(starts).filter_map(horizon));
    findings.extend(refused.into_iter().map(|(name, why)| {
        Finding::refused(format!("consumer {name}: start"), why, "mend it, or `consumer` does not start")
    }));
    print(&findings, output)?;
    match findings.iter().map(|finding| finding.severity).max() {
        Some(Severity::Refused) => Err(AppError::not_ready("something that the promise rests on is broken")),
        Some(Severity::Waits) => Err(AppError::not_ready("something is not there yet: programs wait for it")),
        Some(Severity::Stuck) => Err(AppError::not_ready("something is stuck")),
        _ => Ok(()),
    }
}

/// Opens the broker. Returns None where the file of the embedded broker does not exist: `doctor`
/// does not make it.
async fn broker(settings: &Settings) -> Result<Option<AnyBroker>, AppError> {
    let file = settings.broker.url.0.strip_prefix("embedded://").filter(|file| !file.is_empty());
    match file.map(Path::new).filter(|file| !file.exists() && file.parent().is_some_and(is_directory)) {
        Some(_) => Ok(None),
        None => open_broker(settings, None).await.map(Some),
    }
}

fn is_directory(path: &Path) -> bool {
    path.as_os_str().is_empty() || path.is_dir()
}

/// Adds what is found in the database, also where an error ends the look, and at the broker.
/// Returns the consumers that the two let not start: the name of each, and why.
///
/// # Errors
/// The database cannot be connected to. Then nothing was looked at.
async fn both(
    settings: &Settings,
    broker: &Result<Option<AnyBroker>, AppError>,
    older_than: Duration,
    findings: &mut Vec<Finding>,
) -> Result<Vec<(String, String)>, AppError> {
    oncebox::with_store!(settings, None, |store| {
        let held = look(&store, settings, older_than, findings).await.unwrap_or_else(|error| {
            findings.push(unread(error));
            Vec::new()
        });
        findings.extend(of_broker(broker, settings, &held).await);
        let refused = match broker {
            Ok(Some(broker)) if !findings.iter().any(is_out_of_reach) => {
                settings.refused_starts(&*store.clone().into_duties(), &**broker).await
            }
            _ => Vec::new(),
        };
        oncebox::store::Base::close(&store).await;
        Ok(refused)
    })
}

fn unread(error: AppError) -> Finding {
    Finding::refused("database", error.message, "see the message; the rest of the database was not looked at")
}

/// Whether database or broker cannot be asked anything.
fn is_out_of_reach(finding: &Finding) -> bool {
    finding.severity == Severity::Refused && ["database", "schema", "broker"].contains(&finding.name.as_str())
}

/// What is found at the broker; `held` has the first message of each topic that cannot be sent to.
async fn of_broker(
    broker: &Result<Option<AnyBroker>, AppError>,
    settings: &Settings,
    held: &[DeadMessage],
) -> Vec<Finding> {
    match broker {
        Ok(Some(broker)) => broker_findings(broker, settings, held).await,
        Ok(None) => vec![Finding::warning(
            "broker",
            format!("{}: the file is not there yet", settings.broker.url.0),
            "start `publisher` or `consumer`, which make it, or mend [broker] url",
        )],
        Err(error) => {
            let remedy = "mend the broker's settings, or what its message names";
            vec![Finding::refused("broker", error.message.clone(), remedy)]
        }
    }
}

/// Mends what is broken. Without `--yes` nothing is changed, and an error says what would be done.
async fn mend<S: OperationStore>(store: S, args: &DoctorArgs) -> Result<(), AppError> {
    store.schema().await?.require()?;
    let actor = args.by.clone().unwrap_or_else(super::act::actor);
    let context = ActContext { actor, reason: args.why.clone(), dry_run: true, redrive_age_max: None };
    let duties = store.clone().into_duties();
    let broken = duties.mend(&context).await.map_err(refused)?;
    if broken.is_empty() {
        say("INFO", "nothing to mend");
    } else if !args.yes {
        return Err(AppError::refused(format!("this would be done: {}\nhint: give --yes", broken.join("; "))));
    } else {
        for mended in duties.mend(&ActContext { dry_run: false, ..context }).await.map_err(refused)? {
            say("INFO", &format!("mended: {mended}"));
        }
    }
    store.close().await;
    Ok(())
}

async fn look<S: OperationStore>(
    store: &S,
    settings: &Settings,
    older_than: Duration,
    findings: &mut Vec<Finding>,
) -> Result<Vec<DeadMessage>, AppError> {
    let name = redact(&settings.database.url.0);
    let schema = store.schema().await.map_err(|error| AppError::from(error).on(&name))?;
    if let Err(error) = schema.require() {
        let remedy = match schema {
            SchemaState::Newer { .. } | SchemaState::Changed { .. } => "use the program that migrated this database",
            _ => "run `oncebox migrate up`",
        };
        findings.push(Finding::refused("schema", format!("{name}: {error}"), remedy));
        return Ok(Vec::new());
    }
    findings.push(match schema {
        SchemaState::Ahead { found, known } => Finding::warning(
            "schema",
            format!("{name}: migration {found} is applied, this program knows up to {known} and is still served"),
            "roll the newer program out",
        ),
        _ => Finding::ok("schema", format!("{name}: all migrations are applied")),
    });
    findings.extend(store.check().await?);
    findings.extend(versions(&store.clone().into_operator().live_versions().await?));
    let duties = store.clone().into_duties();
    let status = duties.status().await?;
    let consumers = status.consumers.iter().map(|one| (format!("consumer {}", one.name), one.dead, one.held));
    for (place, dead, held) in std::iter::once(("outbox".to_owned(), status.dead, status.held)).chain(consumers) {
        if dead + held > 0 {
            let detail = format!("{dead} dead and {held} held messages");
            findings.push(Finding::warning(place, detail, "see `oncebox dead list`"));
        }
    }
    super::stuck::look(&*duties, &status, older_than, findings).await?;
    findings.extend(super::stuck::handlers(store, &*duties, settings).await);
    Ok(duties.held_topics(HELD_TOPICS_MAX).await?)
}

async fn broker_findings(broker: &AnyBroker, settings: &Settings, held: &[DeadMessage]) -> Vec<Finding> {
    let mut subscriptions: Vec<Subscription> = settings.consumer.iter().map(Subscription::from).collect();
    let is_configured = |topic: &String| settings.consumer.iter().any(|consumer| consumer.topics.contains(topic));
    let held: Vec<&DeadMessage> = held.iter().filter(|first| !is_configured(&first.topic)).collect();
    // Only Kafka has topics that must be made before anybody subscribes to them.
    let is_kafka = broker.name() == "kafka";
    if is_kafka && !held.is_empty() {
        let topics = held.iter().map(|first| first.topic.clone()).collect();
        subscriptions.push(Subscription::new(NOBODY, topics));
    }
    let of_nobody = format!("kafka group {NOBODY}");
    let name = redact(&settings.broker.url.0);
    let mut findings: Vec<Finding> = match broker.check(&subscriptions).await {
        Ok(found) => found.into_iter().filter(|finding| finding.name != of_nobody).collect(),
        Err(error) => vec![Finding::refused("broker", format!("{name}: {error}"), "start it, or mend [broker] url")],
    };
    if !is_kafka {
        findings.extend(held.into_iter().map(|first| held_topic(first, broker, settings)));
    }
    findings
}

/// The finding for a topic whose messages the outbox holds; its remedy says how they can be sent.
fn held_topic(first: &DeadMessage, broker: &AnyBroker, settings: &Settings) -> Finding {
    let DeadMessage { topic, reason, number, behind, .. } = first;
    let detail = format!("{number} is held for it, with {behind} behind: {reason}");
    let remedy = match broker.name() {
        "rabbitmq" => {
            let exchange = &settings.broker.rabbitmq.exchange;
            format!("start its consumer, or bind a queue to exchange `{exchange}` with routing key `{topic}`")
        }
        _ => "mend what its reason names; the publisher tries it again by itself".to_owned(),
    };
    Finding::warning(format!("outbox: topic {topic}"), detail, remedy)
}

/// Whether every live process can read the fingerprints that the others write (O21).
fn versions(live: &[Announced]) -> Vec<Finding> {
    let name = |operation: &OperationName| format!("operation {operation}: fingerprints");
    if live.is_empty() {
        let detail = "no process has said in the last two minutes which fingerprints it reads";
        return vec![Finding::ok("operations: fingerprints", detail)];
    }
    let mut found: Vec<Finding> = live
        .chunk_by(|one, next| one.versions.operation == next.versions.operation)
        .map(|of_one| {
            let said = of_one.iter().map(|one| {
                let Versions { readable, write_version, kids, write_kid, .. } = &one.versions;
                let kids = kids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                format!(
                    "process {} reads versions {} to {} with key ids {kids}, and writes {write_version} with {write_kid}",
                    one.process,
                    readable.start(),
                    readable.end(),
                )
            });
            Finding::ok(name(&of_one[0].versions.operation), said.collect::<Vec<_>>().join("; "))
        })
        .collect();
    found.extend(unreadable(live).into_iter().map(|(operation, why)| {
        Finding::warning(
            name(operation),
            why,
            "lower `write_version` or the key id that is written with until every process reads it: else second requests are answered 503 or 409",
        )
    }));
    found
}

/// The settings with which a program does not start.
fn unusable(settings: &Settings) -> Vec<Finding> {
    let refused = |(program, name, why): (&str, String, String)| {
        Finding::refused(name, why, format!("mend it, or `{program}` does not start"))
    };
    settings.mistakes().into_iter().map(refused).collect()
}

/// Says what an inbox with a horizon cannot recognise (G8).
fn horizon(consumer: &ConsumerSettings) -> Option<Finding> {
    let horizon = consumer.horizon?;
    let name = format!("consumer {}: horizon", consumer.name);
    let detail = format!(
        "the inbox forgets after {}; what comes again later is told by the time in its id, else by its ce_time or the broker's \
         record time; a message with neither would run again",
        humantime::format_duration(horizon)
    );
    Some(Finding::ok(name, detail))
}

fn print(findings: &[Finding], output: Output) -> Result<(), AppError> {
    let as_json = json!({ "findings": findings });
    let rows = findings.iter().map(|Finding { name, severity, detail, remedy }| {
        [plain(&json!(severity)), name.clone(), detail.clone(), remedy.clone().unwrap_or_default()]
    });
    listed(output, &as_json, ["", "looked at", "found", "to do"], rows)
}
