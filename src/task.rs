//! Tasks: how the library starts work that runs by itself.
//!
//! Promise: the future of a task is boxed. So Tokio's code for a task, 2,000 lines of LLVM IR, is
//! compiled for each type of result and not for each future.

use std::future::Future;

use futures_util::future::BoxFuture;
use tokio::task::JoinHandle;

/// Starts a task in the current runtime, as [`tokio::spawn`] does.
pub(crate) fn spawn<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(boxed(work))
}

/// Boxes work that a [`JoinSet`](tokio::task::JoinSet), a tracker or a runtime's handle starts.
pub(crate) fn boxed<T>(work: impl Future<Output = T> + Send + 'static) -> BoxFuture<'static, T> {
    Box::pin(work)
}
