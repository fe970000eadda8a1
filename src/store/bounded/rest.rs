//! Attends to the connections that rest in a pool.
//!
//! Promise: a connection that rests is touched so often that neither the server nor a firewall
//! takes it for dead. One that does not answer is closed, and one that is old is closed when it
//! comes back, also if nobody used it: a pool without work is empty after [`LIVES_MAX`].
//!
//! sqlx has a task for this, which `idle_timeout` and `max_lifetime` of a pool start. It can run
//! without end and without a pause, and so hold a thread of the runtime, or the whole runtime where
//! there is one thread: its count of resting connections may be below zero for a moment, and it
//! counts up to that number (sqlx issue 3645; no release has the mend). So the pools have neither.

use std::time::Duration;

use sqlx::Pool;
use sqlx::pool::PoolConnectionMetadata;
use tokio::time::{sleep, timeout};

use super::Remote;

/// How long a connection is used, as sqlx has it by default.
const LIVES_MAX: Duration = Duration::from_secs(30 * 60);

/// A connection that rests is touched after this time: before a firewall on the way forgets it.
pub(in crate::store) const RESTS_MAX: Duration = Duration::from_secs(3 * 60);

/// Whether a connection that comes back is too old to be used again.
pub(super) fn is_old(connection: &PoolConnectionMetadata) -> bool {
    connection.age > LIVES_MAX
}

/// Touches every resting connection once in `every`, until the pool is closed. A touch takes a
/// place of the pool, which may have only one, so it may take `touch_max` at most.
pub(super) async fn attend<Db: Remote>(pool: Pool<Db>, every: Duration, touch_max: Duration) {
    while !pool.is_closed() {
        sleep(every).await;
        for _ in 0..pool.size() {
            // The one that has rested longest; it comes back behind the others.
            let Some(mut resting) = pool.try_acquire() else { break };
            // The return pings. Where no answer comes, the connection is closed with this future.
            let _ = timeout(touch_max, resting.return_to_pool()).await;
        }
    }
}
