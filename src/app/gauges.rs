//! The gauges of `/metrics` that are read from tables, from time to time, beside the work.
//!
//! Promises: a shard or consumer that is gone does not keep its last values. While the tables
//! cannot be read, a gauge shows for how long.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::observe;
use crate::operator::Status;
use crate::store::Duties;
use crate::time::pace::rest_after;

/// The shortest pause between two reads.
const EVERY: Duration = Duration::from_secs(2);

/// The pause between two counts of inbox rows, which change slowly and take longer.
const INBOX_EVERY: Duration = Duration::from_secs(60);

/// Keeps the gauges of one database up to date; it does not end.
pub async fn keep_gauges(store: Arc<dyn Duties>) {
    // Before the first read there is no age, and its absence says that nothing was read.
    let read_at = Mutex::new(None::<Instant>);
    let read_at = || read_at.lock();
    let ages = async {
        loop {
            let age = read_at().map(|at| at.elapsed());
            age.into_iter().for_each(observe::status_stands);
            tokio::time::sleep(EVERY).await;
        }
    };
    let looks = async {
        let mut shown = Shown::default();
        let (mut last, mut counts_inbox_at) = (Status::default(), Instant::now());
        loop {
            let began = Instant::now();
            let counts_inbox = began >= counts_inbox_at;
            let read = if counts_inbox { store.status().await } else { store.status_since(&last).await };
            let took = began.elapsed();
            // A count that failed is not begun again at once: it may have failed because it is
            // slow.
            if counts_inbox {
                counts_inbox_at = Instant::now() + INBOX_EVERY;
            }
            // A long count of inbox rows does not put off the next read, which is without one.
            let pause = if counts_inbox { EVERY } else { rest_after(&read, took, EVERY) };
            match read {
                Ok(status) => {
                    shown.show(&status);
                    *read_at() = Some(began);
                    observe::status_stands(began.elapsed());
                    last = status;
                }
                Err(error) => tracing::debug!(%error, "the status could not be read"),
            }
            tokio::time::sleep(pause).await;
        }
    };
    tokio::join!(ages, looks);
}

/// The consumers and shards whose gauges were set last.
#[derive(Debug, Default)]
struct Shown {
    consumers: BTreeSet<String>,
    shards: BTreeSet<i32>,
}

impl Shown {
    fn show(&mut self, status: &Status) {
        observe::outbox_stands(observe::OutboxGauges {
            pending: status.pending,
            oldest_pending_age_seconds: status.oldest_pending_age_seconds,
            held: status.held,
            oldest_held_age_seconds: status.oldest_held_age_seconds,
            dead: status.dead,
            emails_pending: status.emails_pending,
        });
        let shards: BTreeSet<i32> = status.shards.iter().map(|shard| shard.shard).collect();
        for shard in &status.shards {
            observe::shard_stands(shard.shard, shard.gaps, shard.cursor_age_seconds);
        }
        for gone in self.shards.difference(&shards) {
            observe::shard_stands(*gone, 0, 0.0);
        }
        let consumers: BTreeSet<String> = status.consumers.iter().map(|consumer| consumer.name.clone()).collect();
        for consumer in &status.consumers {
            observe::consumer_stands(
                &consumer.name,
                observe::ConsumerGauges {
                    waiting: consumer.waiting,
                    held: consumer.held,
                    oldest_waiting_age_seconds: consumer.oldest_waiting_age_seconds,
                    dead: consumer.dead,
                    inbox_rows: consumer.inbox_rows,
                },
            );
        }
        // A forgotten consumer would otherwise keep its alert as long as this process lives.
        for gone in self.consumers.difference(&consumers) {
            observe::consumer_stands(gone, observe::ConsumerGauges::default());
        }
        (self.consumers, self.shards) = (consumers, shards);
    }
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;
    use crate::store::base::StoreOptions;
    use crate::store::sqlite::SqliteStore;
    use crate::store::{Base as _, Schema as _, Store as _};

    /// Shown by: an age that counts from the start of the process. The alert for a process that has
    /// never read its tables asks for the absence of the metric, and was silent.
    #[tokio::test]
    async fn before_the_first_read_there_is_no_age_of_it() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", directory.path().join("app.db").display());
        let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(url) }).await.unwrap();
        let recorder = PrometheusBuilder::new().build_recorder();
        let shown = recorder.handle();
        let _recorder = metrics::set_default_local_recorder(&recorder);
        let is_shown = || shown.render().contains("oncebox_status_age_seconds");
        let gauges = keep_gauges(store.clone().into_duties());
        tokio::pin!(gauges);
        // There are no tables yet, so each read fails.
        let _ = tokio::time::timeout(EVERY + EVERY / 2, &mut gauges).await;
        assert!(!is_shown());
        store.migrate().await.unwrap();
        let read = async {
            while !is_shown() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let within = tokio::time::timeout(Duration::from_secs(90), async {
            tokio::select! { () = read => {}, () = &mut gauges => {} }
        });
        within.await.unwrap();
    }
}
