//! Runs code of the application. A panic and a timeout become errors, so that the caller decides
//! what the operation becomes (O13).

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;

use crate::error::HandlerError;
use crate::text::panic::panic_text;

/// Awaits `work` for at most `timeout`. `what` names it in the error: "the handler".
///
/// # Errors
/// The error of `work`, or a retryable one that says that it panicked or ran too long.
///
/// # Cancel safety
/// As safe as `work`: it is dropped with this future, and after the timeout.
pub(super) async fn guarded<T>(
    what: &str,
    timeout: Duration,
    work: impl Future<Output = Result<T, HandlerError>>,
) -> Result<T, HandlerError> {
    match tokio::time::timeout(timeout, AssertUnwindSafe(work).catch_unwind()).await {
        Ok(Ok(ended)) => ended,
        Ok(Err(panic)) => Err(HandlerError::retryable(format!("{what} panicked: {}", panic_text(panic.as_ref())))),
        Err(_) => Err(HandlerError::retryable(format!("{what} ran longer than {timeout:?}"))),
    }
}
