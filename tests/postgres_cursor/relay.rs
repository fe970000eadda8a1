//! A relay without a broker: what it sends is noted.

use std::time::{Duration, Instant};

use oncebox::NewMessage;
use oncebox::sqlx::PgConnection;
use oncebox::store::postgres::PostgresStore;
use oncebox::store::{LeaseAnswer, LeaseRequest, Mark, Outbox, OutboxRow, RelaySession, enqueue};

use crate::postgres::Database;

pub(crate) const SOON: Duration = Duration::from_secs(60);

/// A relay without a broker: what it sends is noted.
pub(crate) struct Relay {
    pub(crate) session: Box<dyn RelaySession>,
    pub(crate) sent: Vec<String>,
}

impl Relay {
    pub(crate) async fn of(store: &PostgresStore) -> Self {
        Self { session: open(store, "relay").await, sent: Vec::new() }
    }

    /// Reads, makes a checkpoint, sends and marks once; false where there was nothing.
    pub(crate) async fn step(&mut self) -> bool {
        let batch = self.session.read(500).await.unwrap();
        self.session.checkpoint(Mark::default()).await.unwrap();
        self.sent.extend(batch.rows.iter().map(payload));
        let mark = Mark { through: Some(batch.batch), ..Mark::default() };
        self.session.checkpoint(mark).await.unwrap();
        !batch.rows.is_empty() || batch.more
    }

    /// As often as there is something.
    pub(crate) async fn drain(&mut self) -> &[String] {
        while self.step().await {}
        &self.sent
    }
}

pub(crate) const NO_GAPS: &str = "select isempty(gaps) from oncebox.shard";

impl Relay {
    /// Drains and tidies until a query is true.
    pub(crate) async fn drain_until(&mut self, database: &Database, query: &str) {
        let began = Instant::now();
        loop {
            // Drained before the query is asked: it may be true already while rows wait.
            self.drain().await;
            self.session.tidy().await.unwrap();
            if database.value::<bool>(query).await {
                return;
            }
            assert!(began.elapsed() < SOON, "not within {SOON:?}: {query}");
        }
    }
}

pub(crate) fn payload(row: &OutboxRow) -> String {
    String::from_utf8(row.message.payload.clone()).unwrap()
}

pub(crate) fn request(owner: &str) -> LeaseRequest {
    LeaseRequest { shard: 0, owner: owner.into(), length: Duration::from_secs(10), read_bytes: 4 << 20 }
}

pub(crate) async fn open(store: &PostgresStore, owner: &str) -> Box<dyn RelaySession> {
    take(store, &request(owner)).await
}

pub(crate) async fn take(store: &PostgresStore, request: &LeaseRequest) -> Box<dyn RelaySession> {
    match store.open(request).await.unwrap() {
        LeaseAnswer::Taken(session) => session,
        other => panic!("the lease was not given: {other:?}"),
    }
}

pub(crate) fn message(text: &str) -> NewMessage {
    NewMessage::text("payments", "k", text).with_key("acc-7")
}

pub(crate) async fn put(connection: &mut PgConnection, text: &str) {
    enqueue(connection, message(text)).await.unwrap();
}

pub(crate) async fn gaps(database: &Database) -> String {
    database.value("select gaps::text from oncebox.shard").await
}

pub(crate) async fn scanned_to(database: &Database) -> i64 {
    database.value("select scanned_to from oncebox.shard").await
}
