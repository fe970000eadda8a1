//! The relay as a process: one relay for each shard, until a stop or until the outbox is empty.
//! With the operations of a service, it also recovers them.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::beside::Beside;
use super::config::Settings;
use super::connect::{AnyBroker, Wait, Waits, open_broker, open_store};
use super::exit::AppError;
use crate::error::{BrokerError, StoreError, redact};
use crate::observe::{Health, Severity};
use crate::operation::phased::{PhasedEngine, Recovery, RecoveryOptions};
use crate::operator::Status;
use crate::outbox::relay::{Relay, RelayOptions};
use crate::store::{Duties, Store};
use crate::task;

/// The pause between two searches for new shards.
const SHARDS_LOOKED_FOR: Duration = Duration::from_secs(10);
/// The pause between two looks at the outbox while another publisher has the lease.
const EMPTY_LOOKED_FOR: Duration = Duration::from_secs(1);
/// How long closed connections may wait for the server. The grace of a stop is over then, and a
/// silent server must not keep the process alive.
const CLOSE_MAX: Duration = Duration::from_millis(500);

/// Runs the publisher until the stop, or until the outbox is empty if `until_empty` is set.
pub(crate) async fn run_publisher(
    settings: &Settings,
    until_empty: bool,
    health: Health,
    stop: CancellationToken,
) -> Result<(), AppError> {
    let waits = Some((&stop, &health));
    check_options(settings)?;
    let broker = open_broker(settings, waits).await?;
    crate::with_store!(settings, waits, |store| {
        ready(&store, settings, waits).await?;
        let relayed =
            relay_all(store.clone().into_duties(), broker, settings, until_empty, health.clone(), stop.clone()).await;
        close(&store).await;
        relayed
    })
}

/// Runs the publisher until the stop, or until the outbox is empty if `until_empty` is set, and
/// also recovers phased operations whose process died (O22): a [`Recovery`] runs beside the relay,
/// for the flows of the engine that `operations` makes. Build it with the same flows as the
/// service. The database URL must name its store. With `until_empty` the program does not wait for
/// operations.
///
/// # Errors
/// An error that a person must repair; and the error of `operations`.
pub async fn run_publisher_with<S, F, M>(
    settings: &Settings,
    operations: F,
    until_empty: bool,
    health: Health,
    stop: CancellationToken,
) -> Result<(), AppError>
where
    S: Store,
    F: FnOnce(S) -> M,
    M: Future<Output = Result<PhasedEngine, AppError>>,
{
    let waits = Some((&stop, &health));
    check_options(settings)?;
    let broker = open_broker(settings, waits).await?;
    let store: S = open_store(settings, waits).await?;
    ready(&store, settings, waits).await?;
    let recovery = Recovery::new(&operations(store.clone()).await?, RecoveryOptions::default(), health.clone());
    // The end of one of the two, even by a panic, ends the other.
    let both = stop.child_token();
    let (told, ending) = (both.clone(), both.clone().drop_guard());
    let recovering = task::spawn(async move {
        let _ending = ending;
        recovery.run(told).await
    });
    let relayed = relay_all(store.clone().into_duties(), broker, settings, until_empty, health, both.clone()).await;
    both.cancel();
    let recovered = recovering.await;
    // Closed only now, because the answer of a provider to the last call must still be stored.
    close(&store).await;
    match recovered {
        Ok(ended) => relayed.and(ended.map_err(AppError::from)),
        Err(error) => {
            // It cancelled the relay, whose own end says less.
            if let Err(error) = relayed {
                tracing::warn!(error = %error.message, "the relay ended too");
            }
            Err(AppError::failed(format!("the recovery ended unexpectedly: {error}")))
        }
    }
}

/// Refuses options before anything is waited for.
fn check_options(settings: &Settings) -> Result<(), AppError> {
    settings.publisher.options(owner_name(), settings.shutdown_grace).map(drop).map_err(AppError::usage)
}

fn relay_all(
    store: Arc<dyn Duties>,
    broker: AnyBroker,
    settings: &Settings,
    until_empty: bool,
    health: Health,
    stop: CancellationToken,
) -> BoxFuture<'_, Result<(), AppError>> {
    // Boxed, so that this code is compiled with the library and not again in each program.
    Box::pin(async move {
        let mut relays = JoinSet::new();
        // One failing relay ends all: the process reports why, and its supervisor starts it again.
        let all = stop.child_token();
        // Begun before the waits: the alerts must see what is pending while a server is away.
        let mut beside = Beside::start(Arc::clone(&store), &broker, settings, &all);
        let shards = match shards(&store, &broker, settings, Some((&all, &health))).await {
            Ok(shards) => shards,
            // If the first look at the broker ended the wait, its error says why.
            Err(error) => return beside.end(Err(error)).await,
        };
        let mut served = BTreeSet::new();
        let mut serve = |relays: &mut JoinSet<_>, shards: Vec<i32>| -> Result<(), AppError> {
            for shard in shards {
                if !served.insert(shard) {
                    continue;
                }
                let owner = owner_name();
                let options = settings.publisher.options(owner, settings.shutdown_grace).map_err(AppError::usage)?;
                let declare_topics = settings.broker.kafka.create_topics;
                let options = RelayOptions { shard, until_empty, declare_topics, ..options };
                let relay = Relay::of(Arc::clone(&store) as _, Arc::clone(&broker), options, health.clone());
                let stop = all.clone();
                relays.spawn(task::boxed(async move { relay.run(stop).await }));
            }
            Ok(())
        };
        serve(&mut relays, shards)?;
        let mut outcome = Ok(());
        loop {
            let ended = tokio::select! {
                ended = beside.next_end(&mut relays, "a relay") => match ended {
                    None => break,
                    Some(ended) => ended,
                },
                () = tokio::time::sleep(SHARDS_LOOKED_FOR), if !until_empty && !all.is_cancelled() => {
                    let Some(shards) = all.run_until_cancelled(store.shards()).await else { continue };
                    match shards {
                        Ok(shards) => serve(&mut relays, shards)?,
                        // The relays report such an error themselves.
                        Err(error) => tracing::debug!(%error, "the shards could not be read"),
                    }
                    continue;
                }
                () = tokio::time::sleep(EMPTY_LOOKED_FOR), if until_empty && !all.is_cancelled() => {
                    // Where others have every lease, only the tables show that nothing is left.
                    if health.standbys() == relays.len() && is_sent(&*store).await {
                        tracing::info!("nothing is pending; another publisher has the lease");
                        all.cancel();
                    }
                    continue;
                }
            };
            if let Err(error) = ended {
                beside.ends_with(&mut outcome, error);
            }
        }
        outcome = beside.end(outcome).await;
        // Stopped before its end, it knows nothing of the outbox, and need not wait for a database.
        if outcome.is_ok() && until_empty && !stop.is_cancelled() {
            report(&store.status().await?);
        }
        outcome
    })
}

/// Whether no committed message is pending. False where the database does not say it: the relays
/// report such an error themselves.
async fn is_sent(store: &dyn Duties) -> bool {
    store.status_since(&Status::default()).await.is_ok_and(|status| status.pending == 0)
}

/// Declares the exchange of RabbitMQ, and reads the shards. Waits while broker or database is away.
async fn shards(
    store: &Arc<dyn Duties>,
    broker: &AnyBroker,
    settings: &Settings,
    waits: Waits<'_>,
) -> Result<Vec<i32>, AppError> {
    let is_away = |error: &BrokerError| !matches!(error, BrokerError::Refused(_) | BrokerError::Untrusted(_));
    let name = redact(&settings.broker.url.0);
    Wait::new("broker", waits).until(&name, is_away, || broker.declare(&[])).await?;
    let (name, is_away) = (redact(&settings.database.url.0), StoreError::is_transient);
    Wait::new("database", waits).until(&name, is_away, || store.shards()).await
}

/// Checks the schema and everything that the promises rely on. Waits for a database that is away,
/// or is a standby.
///
/// # Errors
/// An error that a person must repair, or the stop came first.
pub async fn ready<S: Store>(store: &S, settings: &Settings, waits: Waits<'_>) -> Result<(), AppError> {
    let name = redact(&settings.database.url.0);
    let mut wait = Wait::new("database", waits);
    let findings = loop {
        let looked = async {
            store.require_schema().await?;
            store.check().await
        };
        match wait.answer("its first answer", looked).await? {
            Ok(findings) => match findings.iter().find(|finding| finding.severity == Severity::Waits) {
                Some(waits) => wait.on(&format!("{name}: {}: {}", waits.name, waits.detail)).await?,
                None => break findings,
            },
            Err(error) if error.is_transient() => wait.on(&format!("{name}: {error}")).await?,
            Err(error) => return Err(AppError::from(error).on(&name)),
        }
    };
    for finding in findings {
        match finding.severity {
            // Findings that wait were handled above.
            Severity::Ok | Severity::Waits => {}
            Severity::Warning | Severity::Stuck => tracing::warn!(
                check = %finding.name,
                remedy = finding.remedy.as_deref().unwrap_or(""),
                detail = %finding.detail,
                "a check of the database"
            ),
            Severity::Refused => {
                let remedy = finding.remedy.map(|remedy| format!("\nhint: {remedy}")).unwrap_or_default();
                let refused = format!("{}: {}{remedy}", finding.name, finding.detail);
                return Err(AppError::not_ready(refused).on(&name));
            }
        }
    }
    Ok(())
}

/// The name of an owner: host, process and a random part.
pub(super) fn owner_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "host" } else { host.trim() };
    format!("{host}/{}/{:08x}", std::process::id(), fastrand::u32(..))
}

/// Closes the connections, without waiting for a server that is silent.
pub async fn close<S: Store>(store: &S) {
    if tokio::time::timeout(CLOSE_MAX, store.close()).await.is_err() {
        tracing::debug!("the database did not answer when its connections were closed");
    }
}

fn report(status: &Status) {
    if status.dead + status.held > 0 {
        tracing::warn!(
            dead = status.dead,
            held = status.held,
            "the outbox is empty but for dead and held messages; see `oncebox dead list`"
        );
    }
}
