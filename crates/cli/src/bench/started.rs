//! Work in a task of its own, which does not go on without its owner.

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::common::failed;
use oncebox::app::AppError;

/// Work that was started. If this is dropped, as when a signal ends the benchmark, the work ends: a
/// consumer that went on would keep its group, and the store could not be closed.
pub(super) struct Started<T> {
    stop: CancellationToken,
    task: JoinHandle<Result<T, AppError>>,
}

impl<T> Drop for Started<T> {
    fn drop(&mut self) {
        self.stop.cancel();
        self.task.abort();
    }
}

impl<T: Send + 'static> Started<T> {
    /// Starts work that ends soon after its token is cancelled.
    pub(super) fn begin<F, E>(work: impl FnOnce(CancellationToken) -> F) -> Self
    where
        F: Future<Output = Result<T, E>> + Send + 'static,
        AppError: From<E>,
    {
        let stop = CancellationToken::new();
        let work = work(stop.clone());
        Self { stop, task: tokio::spawn(async move { Ok(work.await?) }) }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.task.is_finished()
    }

    /// Waits until the work ends by itself.
    pub(super) async fn ended(&mut self) -> Result<T, AppError> {
        (&mut self.task).await.map_err(failed)?
    }

    /// Tells the work to end, and waits for the end.
    pub(super) async fn stop(mut self) -> Result<T, AppError> {
        self.stop.cancel();
        self.ended().await
    }
}
