//! What a program runs beside its relays or consumers: the gauges of `/metrics`, and the first look
//! at the broker.
//!
//! Promise: an error of any of them ends the program with that error.

use std::sync::Arc;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::config::Settings;
use super::connect::{AnyBroker, FirstLook};
use super::exit::AppError;
use super::gauges::Gauges;
use crate::store::Duties;

/// The work beside, until [`Beside::end`].
#[derive(Debug)]
pub(super) struct Beside {
    gauges: Gauges,
    first_look: FirstLook,
    all: CancellationToken,
}

impl Beside {
    /// Starts it; it ends with `all`, which it cancels where the broker cannot be trusted.
    pub(super) fn start(
        store: Arc<dyn Duties>,
        broker: &AnyBroker,
        settings: &Settings,
        all: &CancellationToken,
    ) -> Self {
        let first_look = FirstLook::at(broker, settings, all);
        Self { gauges: Gauges::keep(store, all.clone()), first_look, all: all.clone() }
    }

    /// Waits until one of the parts, each of which is `what`, or of the work beside has ended;
    /// `None` when no part is left.
    ///
    /// # Cancel safety
    /// Safe: the next call returns the end.
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
                Err(error) => Err(AppError::failed(format!("{what} ended unexpectedly: {error}"))),
            }),
            Some(ended) = self.gauges.ended() => Some(ended),
        }
    }

    /// Cancels the token of all parts, and waits until the gauges and the first look have ended.
    ///
    /// # Errors
    /// The first look found that the broker cannot be trusted.
    pub(super) async fn end(mut self) -> Result<(), AppError> {
        self.all.cancel();
        let _ = self.gauges.ended().await;
        self.first_look.end().await.map_or(Ok(()), Err)
    }
}
