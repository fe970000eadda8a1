//! SIGTERM, SIGINT and SIGHUP stop a program gracefully; a second signal ends it at once. SIGHUP,
//! which a closed terminal sends, does nothing in a program that was started with `nohup`.
//!
//! Some senders send the same signal twice, to the process and to its group (`timeout` of GNU). A
//! signal that comes shortly after the first counts as the first.

use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::exit::AppError;

use crate::task;

/// No person sends a second signal so soon after the first.
const SAME_SIGNAL: Duration = Duration::from_millis(100);

/// Returns a token that the first SIGTERM, SIGINT or SIGHUP cancels; the second one exits with 1.
pub fn stop_on_signals() -> Result<CancellationToken, AppError> {
    let token = CancellationToken::new();
    let listen =
        |kind| signal(kind).map_err(|error| AppError::failed(format!("signals cannot be listened for: {error}")));
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    let mut hangup = if is_hangup_ignored() { None } else { Some(listen(SignalKind::hangup())?) };
    let stop = token.clone();
    task::spawn(async move {
        let mut first: Option<Instant> = None;
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
                Some(_) = async { hangup.as_mut()?.recv().await } => {}
            }
            if first.is_some_and(|first| first.elapsed() < SAME_SIGNAL) {
                continue;
            }
            if first.is_some() {
                tracing::error!("a second signal: ending at once");
                #[allow(clippy::exit)]
                std::process::exit(1);
            }
            tracing::info!("stopping: what runs is finished or handed back");
            first = Some(Instant::now());
            stop.cancel();
        }
    });
    Ok(token)
}

/// Whether whoever started this program has it ignore SIGHUP, as `nohup` does. Listening for the
/// signal would end that. True where the system does not tell: the signal does then what it does
/// without this module.
fn is_hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_none_or(|mask| mask & 1 == 1)
}
