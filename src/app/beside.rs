//! What a program runs beside its relays or consumers: the gauges of `/metrics`, and the first look
//! at the broker.
//!
//! Promise: if the gauges panic, or the first look finds a broker that is not to be trusted, the
//! program ends with that error.

use std::future::Future;
use std::sync::Arc;

use tokio::task::{JoinError, JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use super::config::Settings;
use super::connect::AnyBroker;
use super::exit::{AppError, Exit};
use super::gauges::keep_gauges;
use crate::error::{BrokerError, redact};
use crate::store::Duties;
use crate::task;

/// This work, until [`Beside::end`].
#[derive(Debug)]
pub(super) struct Beside {
    gauges: JoinSet<()>,
    first_look: JoinHandle<Result<(), AppError>>,
    all: CancellationToken,
}

impl Beside {
    /// Starts it. It cancels `all` where the certificate of the broker is not trusted.
    pub(super) fn start(
        store: Arc<dyn Duties>,
        broker: &AnyBroker,
        settings: &Settings,
        all: &CancellationToken,
    ) -> Self {
        let mut gauges = JoinSet::new();
        gauges.spawn(task::boxed(keep_gauges(store)));
        let look = first_look(AnyBroker::clone(broker), redact(&settings.broker.url.0), all.clone());
        Self { gauges, first_look: or_end(all, look), all: all.clone() }
    }

    /// Waits until a part or the gauges have ended; `None` when no part is left. `what` names a
    /// part in errors.
    ///
    /// # Cancel safety
    /// Safe: no end is lost.
    pub(super) async fn next_end<T, E>(
        &mut self,
        parts: &mut JoinSet<Result<T, E>>,
        what: &str,
    ) -> Option<Result<(), AppError>>
    where
        T: 'static,
        E: Into<AppError> + 'static,
    {
        tokio::select! {
            ended = parts.join_next() => Some(match ended? {
                Ok(ended) => ended.map(drop).map_err(Into::into),
                Err(error) => Err(unexpectedly(what, &error)),
            }),
            Some(ended) = self.gauges.join_next() => {
                Some(ended.map_err(|error| unexpectedly("the gauges of /metrics", &error)))
            }
        }
    }

    /// Cancels all parts after an error. The first one is that of the program; one that follows
    /// is logged.
    pub(super) fn ends_with(&self, outcome: &mut Result<(), AppError>, error: AppError) {
        self.all.cancel();
        match outcome {
            Ok(()) => *outcome = Err(error),
            Err(_) => tracing::error!(error = %error.message, "another part failed too"),
        }
    }

    /// Cancels all parts, stops the gauges, and returns how the program ends. The error of the
    /// first look goes before that of the parts, which end for it: theirs is logged then.
    pub(super) async fn end(mut self, outcome: Result<(), AppError>) -> Result<(), AppError> {
        self.all.cancel();
        self.gauges.shutdown().await;
        let looked = (&mut self.first_look).await;
        let looked = looked.unwrap_or_else(|error| Err(unexpectedly("the first look at the broker", &error)));
        let (mut ended, outcome) = if looked.is_ok() { (outcome, Ok(())) } else { (looked, outcome) };
        if let Err(error) = outcome
            && error.exit != Exit::Done
        {
            self.ends_with(&mut ended, error);
        }
        ended
    }
}

fn unexpectedly(what: &str, error: &JoinError) -> AppError {
    AppError::failed(format!("{what} ended unexpectedly: {error}"))
}

/// Starts a look that cancels `all` where it ends with an error or a panic.
fn or_end(
    all: &CancellationToken,
    look: impl Future<Output = Result<(), AppError>> + Send + 'static,
) -> JoinHandle<Result<(), AppError>> {
    let ends = all.clone().drop_guard();
    task::spawn(async move {
        look.await?;
        ends.disarm();
        Ok(())
    })
}

/// With TLS, checks once whether the certificate of the broker is trusted; if not, waiting does not
/// help. Whether the broker is there is found out by the work itself.
async fn first_look(broker: AnyBroker, name: String, all: CancellationToken) -> Result<(), AppError> {
    let settings_use_tls = ["kafkas:", "amqps:"].iter().any(|scheme| name.starts_with(scheme));
    if !settings_use_tls {
        return Ok(());
    }
    match all.run_until_cancelled(broker.check(&[])).await {
        Some(Err(error @ BrokerError::Untrusted(_))) => Err(AppError::from(error).on(&name)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shown by: leaving the error out (the program continues with gauges that never change).
    #[tokio::test]
    async fn gauges_that_panic_are_told_to_the_program_once() {
        let mut gauges = JoinSet::<()>::new();
        gauges.spawn(async { std::panic::panic_any("a fault") });
        let first_look = tokio::spawn(async { Ok(()) });
        let mut beside = Beside { gauges, first_look, all: CancellationToken::new() };
        let mut parts = JoinSet::<Result<(), AppError>>::new();
        parts.spawn(std::future::pending());
        let told = beside.next_end(&mut parts, "a part").await;
        assert!(matches!(told, Some(Err(error)) if error.message.contains("unexpectedly")));
        parts.abort_all();
        assert!(
            matches!(beside.next_end(&mut parts, "a part").await, Some(Err(error)) if error.message.contains("a part"))
        );
        assert!(beside.next_end(&mut parts, "a part").await.is_none());
    }

    /// Shown by: taking the end of a look that panicked for one that found nothing.
    #[tokio::test]
    async fn a_first_look_that_panics_ends_the_program_and_one_that_finds_nothing_does_not() {
        let of = |all: &CancellationToken, first_look| Beside { gauges: JoinSet::new(), first_look, all: all.clone() };
        let all = CancellationToken::new();
        let looked = of(&all, or_end(&all, async { std::panic::panic_any("a fault") }));
        tokio::time::timeout(std::time::Duration::from_secs(60), all.cancelled()).await.expect("it ends all");
        let ended = looked.end(Err(AppError::failed("a part"))).await;
        assert!(ended.is_err_and(|error| error.message.contains("first look")));
        let all = CancellationToken::new();
        let looked = or_end(&all, async { Ok(()) });
        while !looked.is_finished() {
            tokio::task::yield_now().await;
        }
        assert!(!all.is_cancelled() && of(&all, looked).end(Ok(())).await.is_ok());
        let nothing_found = of(&all, or_end(&all, async { Ok(()) }));
        let ended = nothing_found.end(Err(AppError::failed("a part"))).await;
        assert!(ended.is_err_and(|error| error.message == "a part"));
    }
}
