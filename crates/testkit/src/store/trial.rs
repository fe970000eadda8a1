//! The private database of a case, and short helpers for what most cases do.

use std::time::Duration;

use sqlx::Transaction;
use uuid::Uuid;

use super::{Connection, Fixture, KeysFixture};
use oncebox::message::{Arrived, ContentHash, Coordinates, IdRule, Message, MessageId, NewMessage};
use oncebox::store::{
    ActContext, Base, ConsumerId, ConsumerSpec, Inbox, InboxEntry, InboxTx, LeaseAnswer, LeaseRequest, Mark, Operator,
    Outbox, OutboxRow, ParkAs, Parked, RelaySession, Scope,
};

/// How long a case waits for something that must happen.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);
/// A lease that no case outlives.
pub(super) const LEASE: Duration = Duration::from_secs(600);

/// A relay's session with the store of a trial.
pub(super) type Session = Box<dyn RelaySession>;
/// A consumer's transaction on the store of a trial.
pub(super) type Tx = Box<dyn InboxTx>;

/// One case on one private database.
#[derive(Debug)]
pub struct Trial<F: Fixture> {
    /// The private database of this case.
    pub fixture: F,
    /// A store connected to it.
    pub store: F::Store,
}

impl<F: Fixture> Trial<F> {
    /// Makes a database with the schema, and a table `effect (message, note)` for the effects of
    /// handlers. None, with a line on stderr, where the service does not run.
    pub async fn start(case: &str) -> Option<Self> {
        // The cases of the schema begin without a schema.
        let without = ["a_new_database_has_no_schema", "migrat"];
        let has_schema = !without.iter().any(|prefix| case.starts_with(prefix));
        let Some(fixture) = (if has_schema { F::migrated().await } else { F::empty().await }) else {
            eprintln!("SKIPPED: {case} (the service of {} is not there)", F::Store::NAME);
            return None;
        };
        let trial = Self { store: fixture.connect().await, fixture };
        if has_schema {
            trial.run("create table effect (message varchar(64) not null, note varchar(64) not null)").await;
        }
        Some(trial)
    }

    /// Drops the database. Not called when a case fails, so that its rows can be examined.
    pub async fn end(self) {
        self.store.close().await;
        self.fixture.remove().await;
    }

    /// The full name of a table of oncebox.
    #[must_use]
    pub fn table(&self, name: &str) -> String {
        format!("{}{name}", F::PREFIX)
    }

    /// Runs SQL in its own transaction. Returns the number of rows that it changed.
    pub async fn run(&self, sql: &str) -> u64 {
        let mut tx = self.begin().await;
        let changed = F::run(&mut tx, sql).await.unwrap();
        tx.commit().await.unwrap();
        changed
    }

    /// Runs a query that returns a number.
    pub async fn number(&self, sql: &str) -> i64 {
        let mut connection = self.store.pool().acquire().await.unwrap();
        F::number(&mut connection, sql).await.unwrap()
    }

    /// How many rows this table of oncebox has.
    pub async fn rows(&self, table: &str) -> i64 {
        self.number(&format!("select count(*) from {}", self.table(table))).await
    }

    /// Sets the length of every lease in this table to a second and keeps its end, as if the clock
    /// had gone back.
    pub(super) async fn shorten_leases_of(&self, table: &str) {
        let length = if F::Store::NAME == "sqlite" { "lease_ms = 1000" } else { "lease_seconds = 1" };
        self.run(&format!("update {} set {length}", self.table(table))).await;
    }

    /// How many effects of a message are in the table.
    pub async fn effects(&self, message: &str) -> i64 {
        self.number(&format!("select count(*) from effect where message = '{message}'")).await
    }

    /// Begins a transaction as an application does.
    pub async fn begin(&self) -> Transaction<'static, <F::Store as Base>::Db> {
        F::begin(&self.store).await
    }

    /// Enqueues in one committed transaction.
    pub async fn enqueue(&self, messages: Vec<NewMessage>) -> Vec<Uuid> {
        let mut tx = self.begin().await;
        let ids = oncebox::store::enqueue_all(&mut *tx, messages).await.unwrap();
        oncebox::store::commit(tx).await.unwrap();
        ids
    }

    /// Opens the session of an owner. The case fails where the lease is not free.
    pub async fn session(&self, owner: &str) -> Session {
        taken(self.store.open(&lease(owner)).await.unwrap())
    }

    /// Ends the lease of the current owner and opens a session for this one.
    pub async fn take_over(&self, owner: &str) -> Session {
        F::set_lease_end(&self.store, -1).await;
        self.session(owner).await
    }

    /// Registers a consumer with this name and returns its number in the database.
    pub async fn consumer(&self, name: &str) -> ConsumerId {
        self.store.register(&spec(name)).await.unwrap()
    }

    /// Makes the server end this connection. Returns false, with a line on stderr, where there is
    /// no server: such a case proves nothing there.
    pub async fn end_connection(&self, case: &str, connection: &mut Connection<F>) -> bool {
        let Some((number, kill)) = F::KILL else {
            eprintln!("{case}: {} has no connections that could be lost", F::Store::NAME);
            return false;
        };
        let number = F::number(connection, number).await.unwrap();
        let mut other = self.store.pool().acquire().await.unwrap();
        F::run(&mut other, &kill.replace("{}", &number.to_string())).await.unwrap();
        true
    }

    /// Waits until this many connections of the database wait for a lock. Only where several
    /// transactions may write at once.
    pub(super) async fn locks_wait(&self, count: usize) {
        eventually("connections wait for a lock", || async {
            // MariaDB makes its list anew only where nobody has read it for a tenth of a second.
            tokio::time::sleep(Duration::from_millis(150)).await;
            let waits = self.store.lock_waits(Duration::ZERO).await.unwrap();
            (waits.len() >= count).then_some(())
        })
        .await;
    }

    /// Admits messages in one committed transaction. Returns what was known of each.
    pub(super) async fn admit(&self, consumer: ConsumerId, entries: &[InboxEntry]) -> Vec<Option<ContentHash>> {
        let mut tx = self.store.begin(consumer).await.unwrap();
        let known = tx.admit(entries).await.unwrap();
        tx.commit().await.unwrap();
        known
    }

    /// Stores a message as dead for a verdict that leaves no inbox row.
    pub(super) async fn refuse(&self, consumer: ConsumerId, message: &Message, reason: &str) {
        let mut tx = self.store.begin(consumer).await.unwrap();
        tx.admit(&[entry(message)]).await.unwrap();
        tx.forget(&[message.id]).await.unwrap();
        tx.park(&[parked(message, ParkAs::Dead { reason: reason.into(), holds: false })]).await.unwrap();
        tx.commit().await.unwrap();
    }

    /// Parks a message together with its inbox row, in one committed transaction.
    pub async fn park(&self, consumer: ConsumerId, message: &Message, park_as: ParkAs) {
        let mut tx = self.store.begin(consumer).await.unwrap();
        let known = tx.admit(&[entry(message)]).await.unwrap();
        assert_eq!(known, vec![None], "a case parks what is new");
        tx.park(&[parked(message, park_as)]).await.unwrap();
        tx.commit().await.unwrap();
    }
}

impl<F: Fixture> KeysFixture for Trial<F> {
    type Store = F::Store;

    async fn start(case: &str) -> Option<Self> {
        Self::start(case).await
    }

    fn store(&self) -> &F::Store {
        &self.store
    }

    async fn shorten_leases(&self) {
        self.shorten_leases_of("idempotency_request").await;
    }

    async fn records(&self) -> i64 {
        self.rows("idempotency_request").await
    }

    async fn bodies(&self) -> i64 {
        let large = self.rows("idempotency_body").await;
        if F::Store::NAME == "sqlite" {
            return large;
        }
        let small = format!("select count(*) from {} where body_format is not null", self.table("idempotency_request"));
        large + self.number(&small).await
    }

    async fn end(self) {
        Self::end(self).await;
    }
}

/// Writes an effect through a handler's transaction.
pub(super) async fn effect<F: Fixture>(
    connection: &mut Connection<F>,
    message: &str,
    note: &str,
) -> Result<u64, sqlx::Error> {
    F::run(connection, &format!("insert into effect (message, note) values ('{message}', '{note}')")).await
}

/// Runs SQL as a careless handler does: it ignores an error.
pub(super) async fn careless<F: Fixture>(connection: &mut Connection<F>, sql: &str) {
    let _ = F::run(connection, sql).await;
}

/// A request for the first shard.
pub(super) fn lease(owner: &str) -> LeaseRequest {
    LeaseRequest { shard: 0, owner: owner.into(), length: LEASE, read_bytes: 4 << 20 }
}

/// The session in an answer, which must have one.
pub(super) fn taken(answer: LeaseAnswer) -> Session {
    match answer {
        LeaseAnswer::Taken(session) => session,
        LeaseAnswer::HeldBy { owner, left } => panic!("the shard is held by {owner} for {left:?}"),
        LeaseAnswer::NoShard => panic!("there is no shard 0"),
    }
}

/// The reason with which messages are dead until the end of their handlers.
pub(super) const ENDED: &str = "transaction-ended";

/// A consumer with the usual id rule.
pub(super) fn spec(name: &str) -> ConsumerSpec {
    ConsumerSpec { name: name.to_owned(), id_rule: "envelope".to_owned(), accept: false }
}

pub(super) fn new_message(key: &str, payload: impl Into<String>) -> NewMessage {
    NewMessage::text("payments", "payment.created", payload).with_key(key)
}

/// A message as it arrived, with an id of its own.
pub(super) fn message(key: &str, payload: &str) -> Message {
    arrived(Some(key), payload, &Uuid::now_v7().to_string())
}

/// A message as it arrived.
pub(super) fn arrived(key: Option<&str>, payload: &str, id: &str) -> Message {
    let arrived = Arrived {
        topic: "payments".to_owned(),
        key: key.map(|key| key.as_bytes().to_vec()),
        headers: vec![("tenant".to_owned(), b"t1".to_vec())],
        payload: Some(payload.as_bytes().to_vec()),
        id: Some(id.to_owned()),
        kind: Some("payment.created".to_owned()),
        source: Some("shop".to_owned()),
        time: Some("2026-11-01T10:11:12.123456Z".parse().unwrap()),
        content_type: Some("application/json".to_owned()),
        coordinates: Coordinates { place: "payments".to_owned(), partition: 3, offset: 41 },
    };
    Message::identify(arrived, &IdRule::Envelope, "", true).0
}

/// An inbox entry of a message.
pub(super) fn entry(message: &Message) -> InboxEntry {
    InboxEntry { id: message.id, hash: message.content_hash() }
}

/// An inbox entry with an id of its own.
pub(super) fn new_entry() -> InboxEntry {
    InboxEntry { id: MessageId::new(), hash: [7; 16] }
}

/// A message to park: after one try, or behind another one and never tried.
pub(super) fn parked(message: &Message, park_as: ParkAs) -> Parked {
    let tried = park_as != ParkAs::Behind;
    Parked { message: message.clone(), park_as, attempts: u32::from(tried), error: tried.then(|| "no".to_owned()) }
}

/// All kinds of the topic that cases use.
pub(super) fn everything() -> Scope {
    Scope { topics: vec!["payments".to_owned()], places: Vec::new(), kinds: None }
}

/// The time in this column, moved by this number of seconds, in the words of the database.
pub(super) fn moved<F: Fixture>(column: &str, seconds: i64) -> String {
    match F::Store::NAME {
        "sqlite" => format!("{column} + {}", seconds * 1_000),
        "mysql" => format!("{column} + interval {seconds} second"),
        _ => format!("{column} + interval '{seconds} seconds'"),
    }
}

/// Who acts, where the case does not ask for it.
pub(super) fn context() -> ActContext {
    ActContext { actor: "ann".into(), reason: "a test".into(), dry_run: false, redrive_age_max: None }
}

/// Parks a message so that it is due at once.
pub(super) fn due() -> ParkAs {
    ParkAs::Due(Duration::ZERO)
}

/// Parks a message as dead. Where it `holds`, later messages of its key wait.
pub(super) fn dead(holds: bool) -> ParkAs {
    ParkAs::Dead { reason: "terminal".into(), holds }
}

/// Reads, with a checkpoint after each read as the relay does, until this many rows came. Returns
/// the rows and the last batch.
pub(super) async fn read_rows(session: &mut Session, wanted: usize) -> (Vec<OutboxRow>, u64) {
    let began = std::time::Instant::now();
    let mut rows = Vec::new();
    loop {
        let read = session.read(100).await.unwrap();
        rows.extend(read.rows);
        session.checkpoint(Mark::default()).await.unwrap();
        if rows.len() >= wanted {
            return (rows, read.batch);
        }
        assert!(began.elapsed() < DEADLINE, "{} of {wanted} rows after {DEADLINE:?}", rows.len());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Reads a few times and finds nothing.
pub(super) async fn read_nothing(session: &mut Session) -> u64 {
    let mut batch = 0;
    for _ in 0..3 {
        let read = session.read(100).await.unwrap();
        let positions: Vec<i64> = read.rows.iter().map(|row| row.position).collect();
        assert!(positions.is_empty(), "unexpected rows at {positions:?}");
        session.checkpoint(Mark::default()).await.unwrap();
        batch = read.batch;
    }
    batch
}

/// A mark up to and with this batch.
pub(super) fn through(batch: u64) -> Mark {
    Mark { through: Some(batch), ..Mark::default() }
}

/// Payloads as text, in order.
pub(super) fn payloads(rows: &[OutboxRow]) -> Vec<String> {
    rows.iter().map(|row| String::from_utf8_lossy(&row.message.payload).into_owned()).collect()
}

/// Repeats a question until it has an answer. Fails at the deadline.
pub(super) async fn eventually<T, A: Future<Output = Option<T>>>(what: &str, mut ask: impl FnMut() -> A) -> T {
    let began = std::time::Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(began.elapsed() < DEADLINE, "after {DEADLINE:?} still not: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
