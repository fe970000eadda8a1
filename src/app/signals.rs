//! SIGTERM and SIGINT stop a program gracefully; a second one ends it at once.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::exit::AppError;

/// A token that is cancelled by the first SIGTERM or SIGINT; the second exits with 1.
///
/// # Errors
/// Where signals cannot be listened for.
pub fn stop_on_signals() -> Result<CancellationToken, AppError> {
    let token = CancellationToken::new();
    let listen =
        |kind| signal(kind).map_err(|error| AppError::failed(format!("signals cannot be listened for: {error}")));
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    let stop = token.clone();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if stop.is_cancelled() {
                tracing::error!("a second signal: ending at once");
                #[allow(clippy::exit)]
                std::process::exit(1);
            }
            tracing::info!("stopping: what runs is finished or handed back");
            stop.cancel();
        }
    });
    Ok(token)
}
