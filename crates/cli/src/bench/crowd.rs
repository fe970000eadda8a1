//! Many concurrent tasks, which stand for writers or clients. Each does one piece of work after
//! another.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use tokio::task::JoinSet;

use super::relay::rate;
use crate::common::failed;
use oncebox::app::AppError;

/// Runs `count` pieces of work, numbered downwards, in `tasks` tasks. Returns the pieces per
/// second, or the first error.
pub(super) async fn crowd<W, F>(tasks: usize, count: usize, work: W) -> Result<f64, AppError>
where
    W: Fn(usize) -> F + Send + Sync + 'static,
    F: Future<Output = Result<(), AppError>> + Send,
{
    let (left, work) = (Arc::new(AtomicUsize::new(count)), Arc::new(work));
    let began = Instant::now();
    let mut running = JoinSet::new();
    for _ in 0..tasks {
        let (left, work) = (Arc::clone(&left), Arc::clone(&work));
        running.spawn(async move {
            while let Ok(before) = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)) {
                work(before - 1).await?;
            }
            Ok::<(), AppError>(())
        });
    }
    while let Some(ended) = running.join_next().await {
        ended.map_err(failed)??;
    }
    Ok(rate(count, began.elapsed()))
}
