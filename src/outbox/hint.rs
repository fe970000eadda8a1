//! Hints that messages were committed: a relay that hears one need not wait for its next poll.
//!
//! Promise: a hint changes only when the next read begins. A lost one delays that read until the
//! next poll. No hint is a part of the transaction that it is about: a NOTIFY in it would make the
//! commits of PostgreSQL wait for each other.

use tokio::sync::Notify;
#[cfg(feature = "duties")]
use {
    super::port::Outbox,
    crate::time::pace::{Pace, sleep_unless},
    std::time::Duration,
    tokio_util::sync::CancellationToken,
};

/// Wakes one relay of this process. With several it may be that of another shard than the rows'
/// own, which then finds them by its next poll. To wake all would cost a read of each shard for
/// each commit.
static HERE: Notify = Notify::const_new();
/// Wakes the task that tells other processes.
static ELSEWHERE: Notify = Notify::const_new();

/// The pause after other processes were told.
#[cfg(feature = "duties")]
const BETWEEN: Duration = Duration::from_millis(1);
/// How long telling them may take.
#[cfg(feature = "duties")]
const ANSWER: Duration = Duration::from_secs(2);

/// A call that took longer has listened: no connection takes so long to be made. What ended it,
/// such as a proxy that cuts connections, kept no commit from being heard.
#[cfg(feature = "relay")]
const LISTENED: Duration = Duration::from_secs(60);

/// Tells that this process committed messages.
pub fn hint() {
    HERE.notify_one();
    ELSEWHERE.notify_one();
}

/// Waits for the next hint of any process.
#[cfg(feature = "relay")]
pub(crate) async fn hinted() {
    HERE.notified().await;
}

/// Tells the relays of other processes that this process committed messages, until the stop. Run
/// one such task in a service whose messages another process publishes; a consumer has one of its
/// own. It ends where the database has no means for that; only PostgreSQL has.
///
/// It takes a connection of the pool for each hint, at most one for each millisecond. A hint does
/// not say which database was written to: of several such tasks in a process, one takes it.
///
/// # Cancel safety
/// Safe. Without it, a relay of another process finds messages by its polls.
#[cfg(feature = "duties")]
pub async fn announce(store: &dyn Outbox, stop: &CancellationToken) {
    let mut pace = Pace::new(Duration::from_millis(100), Duration::from_secs(5));
    loop {
        if stop.run_until_cancelled(ELSEWHERE.notified()).await.is_none() {
            return;
        }
        let announcing = tokio::time::timeout(ANSWER, store.announce_commits());
        let Some(announced) = stop.run_until_cancelled(announcing).await else { return };
        let pause = match announced {
            Ok(Ok(false)) => return,
            Ok(Ok(true)) => {
                pace.worked();
                BETWEEN
            }
            // The polls of the relay find the messages, and whoever needs the database says so.
            failed => {
                tracing::debug!(?failed, "no other process was told of a commit");
                ELSEWHERE.notify_one();
                pace.next_wait()
            }
        };
        if !sleep_unless(stop, pause).await {
            return;
        }
    }
}

/// Wakes relays of this process when other processes announce commits. It never returns.
#[cfg(feature = "relay")]
pub(crate) async fn listen(store: &dyn Outbox) {
    let mut pace = Pace::new(Duration::from_millis(500), Duration::from_secs(30));
    let mut failed = 0;
    loop {
        let began = tokio::time::Instant::now();
        let heard = store.hear_commits(|| HERE.notify_one()).await;
        if heard.is_ok() || began.elapsed() > LISTENED {
            pace.worked();
            failed = 0;
        }
        let pause = match heard {
            Ok(()) => Duration::ZERO,
            Err(error) => {
                failed += 1;
                // One or two may be a server that starts again.
                if failed == 3 {
                    tracing::warn!(%error, "commits of other processes are not heard: messages wait for the polls");
                }
                pace.next_wait()
            }
        };
        tokio::time::sleep(pause).await;
    }
}

#[cfg(all(test, feature = "relay"))]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use async_trait::async_trait;

    use super::super::port::{LeaseAnswer, LeaseRequest};
    use super::*;
    use crate::error::StoreError;

    /// A database behind a proxy that cuts a connection after this time.
    #[derive(Debug)]
    struct Cut(Duration, AtomicU32);

    #[async_trait]
    impl Outbox for Cut {
        async fn hear_commits(&self, _: fn()) -> Result<(), StoreError> {
            self.1.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(self.0).await;
            Err(StoreError::Refused("cut".to_owned()))
        }

        async fn open(&self, _: &LeaseRequest) -> Result<LeaseAnswer, StoreError> {
            Ok(LeaseAnswer::NoShard)
        }

        async fn proven_kept(&self) -> Result<Duration, StoreError> {
            Ok(Duration::ZERO)
        }

        async fn shards(&self) -> Result<Vec<i32>, StoreError> {
            Ok(Vec::new())
        }
    }

    /// How often it listens within so much time.
    async fn listens(cut_after: Duration, within: Duration) -> u32 {
        let store = Cut(cut_after, AtomicU32::new(0));
        let _ = tokio::time::timeout(within, listen(&store)).await;
        store.1.load(Ordering::SeqCst)
    }

    /// Shown by: taking a call as a success only where it ends without an error.
    #[tokio::test(start_paused = true)]
    async fn a_connection_that_is_cut_after_it_has_listened_is_made_again_at_once() {
        let minute = Duration::from_secs(60);
        assert_eq!(listens(2 * minute, 202 * minute).await, 101);
        assert!(listens(minute / 60, 202 * minute).await < 1_000, "the pauses grow where it cannot listen");
    }
}
