//! Plans that cannot turn: what every batch, poll and reading of the gauges asks is planned while
//! the tables are small, and must look rows up by an index when they are large, although nobody
//! analysed them meanwhile.

use std::time::Duration;

use oncebox::message::{Arrived, Coordinates, IdRule, Message, MessageId};
use oncebox::operation::{Identity, Key, KeyFormat, Mode, Retention, Scope as KeyScope, Stage, Tombstone};
use oncebox::store::postgres::PostgresStore;
use oncebox::store::{
    Answer, AnswerBody, Base, Basis, Begun, ConsumerId, ConsumerSpec, FIRST_POINT, Fenced, Inbox, InboxEntry, KeyClaim,
    Keys, LeaseAnswer, LeaseRequest, Mailbox, Mark, NewOperation, Operations, Operator, Outbox, ParkAs, Parked, Phases,
    Proof, RowLease, RunOutcome, Scope, Sealed, StoreOptions, Undone, Waiting,
};
use uuid::Uuid;

use crate::postgres::{Database, with_database};
use crate::support::eventually;

/// Rows of each large table.
const ROWS: i64 = 50_000;
/// Rows that a table must have lost or won before the server vacuums or analyses it.
const MAINTAINED: i64 = 5_000;
/// Rows that may be read in the order of a table, by all statements together: the small tables, and
/// the large ones while they were small.
const IN_ORDER_MAX: i64 = ROWS / 2;

const LEASE: Duration = Duration::from_secs(600);

/// The server keeps a plan for good after the fifth run of a statement.
const RUNS: usize = 7;

pub(crate) fn message(key: &str, id: Uuid) -> Message {
    let arrived = Arrived {
        topic: "payments".to_owned(),
        key: Some(key.as_bytes().to_vec()),
        headers: Vec::new(),
        payload: Some(b"1".to_vec()),
        id: Some(id.to_string()),
        kind: Some("made".to_owned()),
        source: Some("shop".to_owned()),
        time: None,
        content_type: None,
        coordinates: Coordinates { place: "payments".to_owned(), partition: 0, offset: 1 },
    };
    Message::identify(arrived, &IdRule::Envelope, "", true).0
}

fn scope() -> Scope {
    Scope { topics: vec!["payments".to_owned()], places: Vec::new(), kinds: None }
}

pub(crate) fn consumer_spec() -> ConsumerSpec {
    ConsumerSpec { name: "ledger".into(), id_rule: "envelope".into(), accept: false }
}

/// Where nothing is purged there is a partition more every day. Shown by: one plan for all values,
/// in the proof, and in what a batch with a known id reads (each partition is locked).
#[tokio::test]
async fn a_batch_locks_no_partition_of_another_time() {
    with_database("a_batch_locks_no_partition_of_another_time", |database| async move {
        let past = "select oncebox.attach_inbox_range(day, day + interval '1 day')
            from generate_series(date_trunc('day', now() at time zone 'UTC') at time zone 'UTC' - interval '50 days',
                                 date_trunc('day', now() at time zone 'UTC') at time zone 'UTC' - interval '2 days', interval '1 day') day";
        database.run(past).await;
        let locked = "select count(distinct relation) from pg_locks where pid <> pg_backend_pid()
            and database = (select oid from pg_database where datname = current_database())
            and relation in (select relid from pg_partition_tree('oncebox.inbox_timed') where isleaf)";
        let consumer = database.store.register(&consumer_spec()).await.unwrap();
        let entry = || InboxEntry { id: MessageId::new(), hash: [1; 16] };
        let known = entry();
        for run in 0..RUNS {
            let mut tx = database.store.begin(consumer).await.unwrap();
            let stood = tx.admit(&[known, entry()]).await.unwrap();
            assert_eq!(stood, [(run > 0).then_some([1; 16]), None]);
            let admitted: i64 = database.value(locked).await;
            assert_eq!(tx.prove().await.unwrap(), Proof::Same);
            let proven: i64 = database.value(locked).await;
            tx.commit().await.unwrap();
            // That of the ids; at midnight there are ids of two days.
            let few = 1..=2;
            assert!(
                few.contains(&admitted) && few.contains(&proven),
                "{admitted} partitions locked, {proven} after the proof"
            );
        }
    })
    .await;
}

/// A batch with new and known ids, and its proof.
async fn batch(store: &PostgresStore, consumer: ConsumerId) {
    let timed = (0..50).map(|_| Uuid::now_v7());
    let untimed = (0..50_u128)
        .map(|n| uuid::Builder::from_random_bytes((Uuid::now_v7().as_u128() ^ n).to_le_bytes()).into_uuid());
    let ids: Vec<MessageId> = timed.chain(untimed).map(MessageId::from).collect();
    let entries: Vec<InboxEntry> = ids.iter().map(|id| InboxEntry { id: *id, hash: [7; 16] }).collect();
    for known in [false, true] {
        let mut tx = store.begin(consumer).await.unwrap();
        let admitted = tx.admit(&entries).await.unwrap();
        assert!(admitted.iter().all(|one| one.is_some() == known));
        tx.standing(&[[1; 16], [2; 16]]).await.unwrap();
        assert_eq!(tx.prove().await.unwrap(), Proof::Same);
        tx.commit().await.unwrap();
    }
    assert_eq!(store.known(consumer, &ids).await.unwrap().len(), ids.len());
    store.bounds(consumer).await.unwrap();
    store.begin_attempt(consumer, ids[0]).await.unwrap();
    assert_eq!(store.attempts(consumer, &ids).await.unwrap().len(), 1);
    let mut tx = store.begin(consumer).await.unwrap();
    tx.clear_attempts(&ids).await.unwrap();
    tx.commit().await.unwrap();
}

/// Retries of one key, from parking to the last one.
async fn retries(store: &PostgresStore, consumer: ConsumerId, key: &str) {
    let mut tx = store.begin(consumer).await.unwrap();
    let parked = |park_as: ParkAs| {
        let message = message(key, Uuid::now_v7());
        Parked { message, park_as, attempts: 0, error: None }
    };
    tx.park(&[parked(ParkAs::Due(Duration::ZERO)), parked(ParkAs::Behind), parked(ParkAs::Behind)]).await.unwrap();
    tx.commit().await.unwrap();
    store.next_due(consumer, &scope()).await.unwrap().unwrap();
    let lease = RowLease::new(LEASE);
    let head = store.lease_due(consumer, &scope(), &lease).await.unwrap().unwrap();
    let behind = store.lease_behind(consumer, &head, &scope(), 1, &lease).await.unwrap();
    assert!(store.count_try(&head).await.unwrap());
    assert_eq!(store.give_back(consumer, &behind).await.unwrap(), behind.len() as u64);
    let mut tx = store.begin(consumer).await.unwrap();
    let lane = head.message.lane_id().unwrap();
    assert!(tx.bury(&[head], "transaction-ended", "no", true).await.unwrap());
    assert_eq!(tx.prove().await.unwrap(), Proof::Same);
    assert!(tx.finish().await.unwrap());
    tx.wake(&[lane]).await.unwrap();
    tx.commit().await.unwrap();
    let second = store.lease_due(consumer, &scope(), &lease).await.unwrap().unwrap();
    assert!(store.postpone(&second, Duration::ZERO, "no").await.unwrap());
    let second = store.lease_due(consumer, &scope(), &lease).await.unwrap().unwrap();
    assert!(store.bury(&second, "attempts", "no", false).await.unwrap());
    let third = store.lease_due(consumer, &scope(), &lease).await.unwrap().unwrap();
    assert_eq!(store.give_back_all(consumer, &lease).await.unwrap(), 1);
    let last = store.lease_due(consumer, &scope(), &lease).await.unwrap().unwrap();
    assert_eq!(last.sequence, third.sequence);
    let mut tx = store.begin(consumer).await.unwrap();
    assert!(tx.bury(&[last], "transaction-ended", "no", false).await.unwrap());
    assert!(tx.finish().await.unwrap());
    tx.commit().await.unwrap();
    store.has_dead(consumer, 1).await.unwrap();
    store.has_stored(consumer, usize::try_from(ROWS).unwrap()).await.unwrap();
    store.sweep(consumer).await.unwrap();
}

pub(crate) fn key_claim(mode: Mode, number: usize) -> KeyClaim {
    let scope = KeyScope::new("t1", "p1").unwrap();
    let key = Key::parse(format!("a-key-of-many-{number:06}-{mode:?}").as_bytes(), KeyFormat::Opaque).unwrap();
    KeyClaim {
        identity: Identity::new(&scope, "put".parse().unwrap(), key),
        principal: format!("sha256:{}", "0b".repeat(32)).parse().unwrap(),
        fingerprint: format!("1:sha256:{}", "0f".repeat(32)).parse().unwrap(),
        mode,
        operation_id: Uuid::now_v7(),
        owner: Uuid::now_v7(),
        lease: LEASE,
    }
}

/// Operations of three modes, each from its claim to its outcome.
async fn operations(store: &PostgresStore, number: usize) {
    let outcome = RunOutcome::FailedReplayable {
        answer: Answer {
            status: 402,
            schema_version: 1,
            body: AnswerBody::Tombstone(Tombstone::Withheld),
            resource: None,
        },
        error_code: None,
    };
    let kept = Retention::default();
    let edge = key_claim(Mode::Edge, number);
    let Some(owned) = store.claim(&edge, Basis::New).await.unwrap() else { panic!("it is free") };
    assert!(store.claim(&edge, Basis::New).await.unwrap().is_none());
    assert!(store.find(&edge.identity).await.unwrap().record.is_some());
    assert_eq!(store.heartbeat(&owned, LEASE).await.unwrap(), Fenced::Done);
    assert_eq!(store.finish(&owned, &outcome, &kept).await.unwrap(), Fenced::Done);
    let lost = KeyClaim { lease: Duration::from_millis(1), ..key_claim(Mode::Bridged, number) };
    let Some(owned) = store.claim(&lost, Basis::New).await.unwrap() else { panic!("it is free") };
    let found = eventually("its lease is over", Duration::from_secs(60), || async {
        store.stale(lost.identity.operation(), 10).await.unwrap().pop()
    });
    assert_eq!(found.await.identity, lost.identity);
    assert_eq!(store.release(&owned).await.unwrap(), Fenced::Done);

    let whole = key_claim(Mode::Transactional, number);
    let Begun::Claimed(mut tx) = store.begin_operation(&whole, Basis::New, LEASE).await.unwrap() else {
        panic!("it is free")
    };
    assert_eq!(tx.complete(Vec::new(), &outcome, &kept).await.unwrap(), Proof::Same);
    tx.commit().await.unwrap();

    let new = NewOperation {
        claim: key_claim(Mode::Phased, number),
        flow: "put".to_owned(),
        flow_version: 1,
        command: Sealed { bytes: vec![0], kid: None },
    };
    let Begun::Claimed(mut tx) = store.begin_first(&new, Basis::New, LEASE).await.unwrap() else {
        panic!("it is free")
    };
    let driven = tx.driven().clone();
    tx.advance(FIRST_POINT, "SENT", Stage::Outstanding, &[]).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(store.drive_on(&driven, LEASE).await.unwrap(), Fenced::Done);
    assert!(store.operation(new.claim.operation_id).await.unwrap().is_some());
    assert!(store.take_due("put", &[1], 10, LEASE, &[]).await.unwrap().is_empty(), "it is driven");
    let mut tx = store.begin_phase(&driven).await.unwrap();
    tx.finish("SENT", &outcome, &kept).await.unwrap();
    tx.commit().await.unwrap();
}

/// Everything that runs again and again.
async fn once(store: &PostgresStore, consumer: ConsumerId, run: usize) {
    batch(store, consumer).await;
    retries(store, consumer, &format!("key {run}")).await;
    operations(store, run).await;
    store.blank_emails(LEASE, 100).await.unwrap();
    store.forget_emails(LEASE, 100).await.unwrap();
    let status = store.status().await.unwrap();
    store.status_since(&status).await.unwrap();
}

/// Fills the tables with rows of these numbers, while nothing analyses them.
async fn grow(database: &Database, consumer: ConsumerId, numbers: std::ops::RangeInclusive<i64>) {
    let (first, last) = (numbers.start(), numbers.end());
    let rows = format!(
        "insert into oncebox.inbox_timed (consumer_id, message_id, content_hash) \
           select {0}, overlay(gen_random_uuid()::text placing left(oncebox.uuid_bound(now())::text, 13) || '-7' from 1 for 15)::uuid, \
             gen_random_uuid() from generate_series({first}, {last}); \
         insert into oncebox.inbox_untimed (consumer_id, message_id, content_hash) \
           select {0}, gen_random_uuid(), gen_random_uuid() from generate_series({first}, {last}); \
         insert into oncebox.attempt (consumer_id, message_id, attempts) \
           select {0}, gen_random_uuid(), 1 from generate_series({first}, {last}); \
         insert into oncebox.waiting (consumer_id, lane_id, state, holds, reason, dead_at, due_at, message_id, content_hash, id_text, \
             topic, key, kind, payload, source, place, partition_no, offset_no) \
           select {0}, md5((n % 1000)::text)::uuid, case when n % 100 = 1 then 'dead' else 'waiting' end, n % 100 = 1, \
             case when n % 100 = 1 then 'no' end, case when n % 100 = 1 then now() end, \
             case when n % 100 = 2 then now() + interval '1 day' end, gen_random_uuid(), gen_random_uuid(), '', \
             'payments', 'k', 'made', '', 's', 't', 0, n from generate_series({first}, {last}) n; \
         insert into oncebox.outbox_dead (position, bucket, message_id, topic, key, kind, payload, content_type, created_at, state, cause, reason) \
           select n, 0, gen_random_uuid(), 'o', 'k', 'made', '', 't', now(), 'held', 'destination', 'no' from generate_series({first}, {last}) n; \
         insert into oncebox.outbox (bucket, message_id, topic, kind, payload, content_type) \
           select n % 256, gen_random_uuid(), 'o', 'made', '', 't' from generate_series({first}, {last}) n; \
         insert into oncebox.email (unique_key, recipient, subject, body) select n::text, 'a', 'b', 'c' from generate_series({first}, {last}) n; \
         insert into oncebox.idempotency_request (key_digest, tenant, operation, key, principal, fingerprint, mode, state, operation_id, \
             outcome_at, expires_at, answer_status, schema_version, body) \
           select sha256(n::text::bytea), 't', 'put', lpad(n::text, 16, 'k')::bytea, 'sha256:' || encode(sha256('p'), 'hex'), \
             '1:sha256:' || encode(sha256('f'), 'hex'), 'edge', 'COMPLETED', gen_random_uuid(), now(), now() + interval '1 day', 201, 1, \
             'purged' from generate_series({first}, {last}) n; \
         insert into oncebox.operation (operation_id, key_digest, flow, flow_version, point, state, command, due_at) \
           select gen_random_uuid(), sha256(n::text::bytea), 'put', 1, 'SENT', 'OUTSTANDING', '', now() + interval '1 day' \
             from generate_series({first}, {last}) n",
        consumer.0
    );
    database.run(&rows).await;
}

/// Rows that were read in the order of a table, by table.
async fn in_order(database: &Database) -> Vec<String> {
    let text = format!(
        "select coalesce(array_agg(relname || ': ' || seq_tup_read || ' in ' || seq_scan), '{{}}') from pg_stat_all_tables \
          where schemaname = 'oncebox' and seq_tup_read > {IN_ORDER_MAX}"
    );
    database.value(&text).await
}

/// A store with one connection, which keeps its plans, on tables that nobody analyses.
async fn store_that_keeps_plans(database: &Database) -> PostgresStore {
    let url = format!("{}?application_name=turns", database.url);
    let alone = StoreOptions { connections_max: 1, ..StoreOptions::new(url) };
    let store = PostgresStore::connect(&alone).await.unwrap();
    let off = "do $$ declare t record; begin \
        for t in select c.oid::regclass as name from pg_class c where c.relnamespace = 'oncebox'::regnamespace and c.relkind = 'r' loop \
          execute format('alter table %s set (autovacuum_enabled = off)', t.name); end loop; end $$";
    database.run(off).await;
    store
}

/// Closes the store, and waits until the server has counted what its connection read: it counts
/// that when a connection ends.
async fn close(database: &Database, store: PostgresStore) {
    store.close().await;
    eventually("the connections have ended", Duration::from_secs(60), || async {
        let others =
            "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'turns'";
        (database.value::<i64>(others).await == 0).then_some(())
    })
    .await;
}

async fn turns(database: Database, was_analysed: bool) {
    let store = store_that_keeps_plans(&database).await;
    let consumer = store.register(&consumer_spec()).await.unwrap();
    if was_analysed {
        grow(&database, consumer, 1..=MAINTAINED).await;
        database.run("delete from oncebox.waiting; delete from oncebox.attempt; delete from oncebox.outbox_dead; delete from oncebox.email").await;
        database.run("vacuum analyze").await;
    }
    for run in 1..=RUNS {
        once(&store, consumer, run).await;
    }
    grow(&database, consumer, MAINTAINED + 1..=MAINTAINED + ROWS).await;
    once(&store, consumer, RUNS + 1).await;
    let status = store.status().await.unwrap();
    assert_eq!((status.held, status.consumers[0].inbox_rows >= 10_000), (10_000, true));
    let pending = if was_analysed { MAINTAINED + ROWS } else { ROWS };
    assert_eq!(status.pending, pending.unsigned_abs());
    let LeaseAnswer::Taken(mut session) = store
        .open(&LeaseRequest { shard: 0, owner: "relay".into(), length: LEASE, read_bytes: 4 << 20 })
        .await
        .unwrap()
    else {
        panic!("it is free")
    };
    let read = session.read(1_000).await.unwrap();
    assert_eq!(read.rows.len(), 1_000);
    session.checkpoint(Mark { through: Some(read.batch), ..Mark::default() }).await.unwrap();
    session.release().await.unwrap();
    close(&database, store).await;
    let in_order = in_order(&database).await;
    assert!(in_order.is_empty(), "{in_order:#?}");
}

// Shown to fail: by an update of rows by a list of numbers with a plan that is kept (all rows that
// wait were read in order, twice); by `=` between the ids of a record and its operation.
#[tokio::test]
async fn no_plan_of_an_empty_table_scans_it_when_it_is_large() {
    let test = "no_plan_of_an_empty_table_scans_it_when_it_is_large";
    with_database(test, |database| turns(database, false)).await;
}

// Shown to fail: by tables that are analysed when they have 60 rows (six tables were read in
// order).
#[tokio::test]
async fn no_plan_of_a_table_as_small_as_is_ever_analysed_scans_it_when_it_is_large() {
    let test = "no_plan_of_a_table_as_small_as_is_ever_analysed_scans_it_when_it_is_large";
    with_database(test, |database| turns(database, true)).await;
}

/// A batch fails again and again. What became of its transaction is looked up among the rows that
/// it wrote, although many other messages are dead by then. (The batch is large, so that the server
/// takes a plan without the values of the batch for the cheaper one, and keeps it.)
#[tokio::test]
async fn what_became_of_a_transaction_is_looked_up_among_its_own_rows() {
    let test = "what_became_of_a_transaction_is_looked_up_among_its_own_rows";
    with_database(test, |database| async move {
        let store = store_that_keeps_plans(&database).await;
        let consumer = store.register(&consumer_spec()).await.unwrap();
        let dead = format!(
            "insert into oncebox.waiting (consumer_id, state, reason, dead_at, message_id, content_hash, id_text, topic, kind, payload, \
                 source, place, partition_no, offset_no) \
               select {}, 'dead', 'no', now(), gen_random_uuid(), gen_random_uuid(), '', 'payments', 'made', '', 's', 't', 0, n \
                 from generate_series(1, 20000) n",
            consumer.0
        );
        for run in 1..=RUNS {
            if run == RUNS {
                database.run(&dead).await;
            }
            let ids = (0..2_000).map(|_| MessageId::from(Uuid::now_v7()));
            let entries: Vec<InboxEntry> = ids.map(|id| InboxEntry { id, hash: [7; 16] }).collect();
            let mut tx = store.begin(consumer).await.unwrap();
            tx.admit(&entries).await.unwrap();
            assert_eq!(tx.undo().await.unwrap(), Undone::Whole);
        }
        close(&database, store).await;
        let read = "select seq_tup_read + idx_tup_fetch from pg_stat_all_tables where relid = 'oncebox.waiting'::regclass";
        let read: i64 = database.value(read).await;
        assert!(read < 1_000, "{read} dead messages were read");
    })
    .await;
}
