//! How many commits a relay makes: a mark waits for a checkpoint that carries it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{
    DivertedRow, LeaseAnswer, LeaseRequest, Mark, OpenGaps, OperatorRequest, Outbox, OutboxRow, ReadBatch, RelaySession,
};
use oncebox::{Relay, RelayOptions, StoreError};
use oncebox_testkit::memory::Fault;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

use super::kit::{Running, World, relay_options, sqlite};

/// A mark is never made for its own sake within a test.
const NEVER: Duration = Duration::from_secs(3_600);
/// The checkpoint that renews the lease carries marks too: it comes after a third of this.
const LEASE: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Reads that returned rows.
    reads: AtomicUsize,
    checkpoints: AtomicUsize,
    marks: AtomicUsize,
    /// Reads of dead and held rows with their messages.
    pub(crate) held: AtomicUsize,
    /// Such a read waits while a test has this.
    pub(crate) gate: Mutex<()>,
}

impl Counts {
    fn all(&self) -> [usize; 3] {
        [&self.reads, &self.checkpoints, &self.marks].map(|count| count.load(Ordering::SeqCst))
    }
}

/// A store that counts what its relay sessions do.
#[derive(Debug)]
struct Counted<S> {
    store: S,
    counts: Arc<Counts>,
}

#[derive(Debug)]
struct CountedSession {
    session: Box<dyn RelaySession>,
    counts: Arc<Counts>,
}

#[async_trait]
impl<S: Outbox> Outbox for Counted<S> {
    async fn open(&self, request: &LeaseRequest) -> Result<LeaseAnswer, StoreError> {
        Ok(match self.store.open(request).await? {
            LeaseAnswer::Taken(session) => {
                LeaseAnswer::Taken(Box::new(CountedSession { session, counts: Arc::clone(&self.counts) }))
            }
            other => other,
        })
    }

    async fn proven_kept(&self) -> Result<Duration, StoreError> {
        self.store.proven_kept().await
    }

    async fn shards(&self) -> Result<Vec<i32>, StoreError> {
        self.store.shards().await
    }
}

#[async_trait]
impl RelaySession for CountedSession {
    fn epoch(&self) -> i64 {
        self.session.epoch()
    }

    async fn read(&mut self, rows_max: usize) -> Result<ReadBatch, StoreError> {
        let read = self.session.read(rows_max).await?;
        self.counts.reads.fetch_add(usize::from(!read.rows.is_empty()), Ordering::SeqCst);
        Ok(read)
    }

    async fn checkpoint(&mut self, mark: Mark) -> Result<(), StoreError> {
        self.counts.checkpoints.fetch_add(1, Ordering::SeqCst);
        self.counts.marks.fetch_add(usize::from(mark.through.is_some()), Ordering::SeqCst);
        self.session.checkpoint(mark).await
    }

    async fn diverted(&mut self, limit: usize) -> Result<Vec<DivertedRow>, StoreError> {
        self.session.diverted(limit).await
    }

    async fn has_dead(&mut self, rows: usize) -> Result<bool, StoreError> {
        self.session.has_dead(rows).await
    }

    async fn requests(&mut self, after: i64, limit: usize) -> Result<Vec<OperatorRequest>, StoreError> {
        self.session.requests(after, limit).await
    }

    async fn held(&mut self, positions: &[i64]) -> Result<Vec<OutboxRow>, StoreError> {
        self.counts.held.fetch_add(1, Ordering::SeqCst);
        drop(self.counts.gate.lock().await);
        self.session.held(positions).await
    }

    async fn tidy(&mut self) -> Result<(), StoreError> {
        self.session.tidy().await
    }

    async fn open_gaps(&mut self) -> Result<Option<OpenGaps>, StoreError> {
        self.session.open_gaps().await
    }

    async fn release(self: Box<Self>) -> Result<(), StoreError> {
        self.session.release().await
    }
}

/// A relay whose marks wait for a checkpoint, over a store that counts.
pub(crate) fn counted(world: &World<SqliteStore>, options: RelayOptions) -> (Running, Arc<Counts>) {
    let counts = Arc::<Counts>::default();
    let store = Counted { store: world.store.clone(), counts: Arc::clone(&counts) };
    let options = RelayOptions { mark_after: NEVER, ..options };
    let relay = Relay::new(store, Arc::new(world.broker.clone()), options, world.health.clone());
    let stop = CancellationToken::new();
    let token = stop.clone();
    (Running { stop, task: tokio::spawn(async move { relay.run(token).await }) }, counts)
}

/// With a mark at once there are twice as many commits as batches.
#[tokio::test]
async fn a_batch_costs_one_commit_and_the_checkpoint_of_the_next_one_carries_its_mark() {
    let world = sqlite().await;
    let (relay, counts) = counted(&world, RelayOptions { lease: LEASE, ..relay_options() });
    let names = ["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8", "a9"];
    for n in 0..names.len() {
        world.enqueue("t", &names[n..=n]).await;
        world.until_published("t", &names[..=n]).await;
    }
    let [reads, checkpoints, marks] = counts.all();
    assert_eq!(checkpoints, reads, "one commit a batch");
    assert!(marks > 0, "a checkpoint carries marks");
    assert_eq!(world.status().await.pending, 1, "all but the last one are marked");
    relay.end().await;
    assert_eq!(world.status().await.pending, 0, "a stop marks the last ones");
}

/// Without a look at the window's room nothing is read after the first four.
#[tokio::test]
async fn a_full_window_is_marked_at_once() {
    let world = sqlite().await;
    let names: Vec<String> = (0..20).map(|n| format!("a{n:02}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    world.enqueue("t", &names).await;
    let (relay, counts) = counted(&world, RelayOptions { lease: LEASE, window_rows: 4, ..relay_options() });
    world.until_published("t", &names).await;
    assert!(counts.all()[2] >= 4);
    relay.end().await;
}

/// Without a look at decisions the message is not dead within the test's time.
#[tokio::test]
async fn what_is_dead_or_held_is_stored_at_once() {
    let world = sqlite().await;
    world.broker.faults().on_publish(Fault::RefuseMessage("no".into()), |message| message.payload == b"a1");
    let (relay, _) = counted(&world, RelayOptions { lease: LEASE, ..relay_options() });
    world.enqueue("t", &["a1", "a2", "b1"]).await;
    world.until_status("the first is dead, the second held", |status| status.dead == 1 && status.held == 1).await;
    relay.end().await;
}
