//! What `oncebox keys list` and `show` and a quota read of a large table: the rows that they need,
//! not all of them.

use std::time::Duration;

use oncebox::adapter::DbTime;
use oncebox::operation::State;
use oncebox::store::mysql::MySqlStore;
use oncebox::store::{
    Base, DeadFilter, DeadState, Inbox, KeyFilter, KeyOperator, Keys, Operator, Proof, RowLease, Scope, StoreOptions,
    Waiting,
};
use sqlx::AssertSqlSafe;

use crate::fixture::{Db, execute};

const ROWS: i64 = 100_000;
const UNKNOWN: usize = 7;

/// A hundred thousand keys that are done, and a few whose outcome nobody knows.
async fn fill(db: &Db) {
    let rows = format!(
        "insert into oncebox_idempotency_request (key_digest, tenant, operation, `key`, principal, fingerprint, mode, state, epoch, \
           generation, operation_id, attempts, created_at, updated_at, outcome_at, expires_at, answer_status, schema_version, body) \
         with recursive digits (d) as (select 0 union all select d + 1 from digits where d < 9), \
           numbers (n) as (select 1 + a.d + 10 * b.d + 100 * c.d + 1000 * e.d + 10000 * f.d \
                             from digits a, digits b, digits c, digits e, digits f) \
         select unhex(sha2(n, 256)), concat('t', n % 50), 'put', lpad(n, 16, 'k'), concat('sha256:', sha2('p', 256)), concat('1:sha256:', sha2(n, 256)), 'edge', \
           if(n <= {UNKNOWN}, 'UNKNOWN_REQUIRES_RECOVERY', 'COMPLETED'), 1, 1, unhex(md5(n)), 1, utc_timestamp(6), utc_timestamp(6), \
           if(n > {UNKNOWN}, utc_timestamp(6), null), if(n > {UNKNOWN}, utc_timestamp(6) + interval 1 day, null), \
           if(n > {UNKNOWN}, 201, null), if(n > {UNKNOWN}, 1, null), if(n > {UNKNOWN}, 'purged', null) from numbers"
    );
    let mut app = db.app().await;
    execute(&mut app, &rows).await;
    execute(&mut app, "analyze table oncebox_idempotency_request").await;
    assert_eq!(db.count("oncebox_idempotency_request").await, ROWS);
}

/// A store of one connection.
async fn alone(db: &Db) -> MySqlStore {
    let options = StoreOptions { connections_max: 1, ..StoreOptions::new(db.url.as_str()) };
    MySqlStore::connect(&options).await.unwrap()
}

/// Rows that the only connection of a store has asked its engine for.
async fn read_so_far(store: &MySqlStore) -> u64 {
    let status: Vec<(String, String)> =
        sqlx::query_as(AssertSqlSafe("show session status like 'Handler_read%'".to_owned()))
            .fetch_all(store.pool())
            .await
            .unwrap();
    status.iter().map(|(_, count)| count.parse::<u64>().unwrap()).sum()
}

// Shown by: a statement that does not name the column of the index (all rows were read for an open
// state).
#[tokio::test]
async fn m105_keys_are_listed_by_hash_and_by_open_state_without_reading_the_table() {
    let test = "m105_keys_are_listed_by_hash_and_by_open_state_without_reading_the_table";
    let Some(db) = Db::new(test).await else { return };
    fill(&db).await;
    let store = alone(&db).await;
    let one: Vec<u8> = sqlx::query_scalar("select unhex(sha2(77, 256))").fetch_one(db.store.pool()).await.unwrap();
    let open = |state| KeyFilter { state: Some(state), limit: 50, ..KeyFilter::default() };
    for (filter, found) in [
        (KeyFilter { digest: one[..6].to_vec(), limit: 2, ..KeyFilter::default() }, 1),
        (open(State::UnknownRequiresRecovery), UNKNOWN),
        (open(State::InProgress), 0),
    ] {
        let before = read_so_far(&store).await;
        assert_eq!(store.keys(&filter).await.unwrap().keys.len(), found, "{filter:?}");
        let read = read_so_far(&store).await - before;
        assert!(read < 500, "{filter:?}: {read} rows were read");
    }
    store.close().await;
}

// Shown by: the page without its index (all records of the operation are read).
#[tokio::test]
async fn o11_claims_that_nobody_drives_are_found_among_the_open_records() {
    let test = "o11_claims_that_nobody_drives_are_found_among_the_open_records";
    let Some(db) = Db::new(test).await else { return };
    fill(&db).await;
    let left = "update oncebox_idempotency_request set state = 'IN_PROGRESS', owner = operation_id, lease_seconds = 30, \
           lease_until = utc_timestamp(6) - interval 1 day where outcome_at is null limit 3; \
         analyze table oncebox_idempotency_request";
    execute(&mut db.app().await, left).await;
    let store = alone(&db).await;
    let before = read_so_far(&store).await;
    assert_eq!(store.stale(&"put".parse().unwrap(), 100).await.unwrap().len(), 3);
    let pauses = (Duration::ZERO, Duration::from_secs(3_600));
    let due = store.unknown_due(&"put".parse().unwrap(), pauses, 100).await.unwrap();
    assert_eq!(due.len(), UNKNOWN - 3);
    let read = read_so_far(&store).await - before;
    assert!(read < 500, "{read} rows were read");
    store.close().await;
}

// Half of the records are unknown, and half wait in their phases. Shown by: an index without state
// and mode, or one condition on all of them (all open records are read).
#[tokio::test]
async fn o11_a_sweep_reads_no_more_where_many_records_are_open() {
    let test = "o11_a_sweep_reads_no_more_where_many_records_are_open";
    let Some(db) = Db::new(test).await else { return };
    fill(&db).await;
    let open = "update oncebox_idempotency_request set outcome_at = null, expires_at = null, answer_status = null, \
           schema_version = null, body = null, \
           state = if(ord(key_digest) % 2 = 0, 'UNKNOWN_REQUIRES_RECOVERY', 'IN_PROGRESS'), \
           mode = if(ord(key_digest) % 2 = 0, 'edge', 'phased')";
    let mut app = db.app().await;
    execute(&mut app, open).await;
    execute(&mut app, "analyze table oncebox_idempotency_request").await;
    let store = alone(&db).await;
    let before = read_so_far(&store).await;
    let (put, pauses) = ("put".parse().unwrap(), (Duration::ZERO, Duration::from_secs(3_600)));
    assert_eq!(store.stale(&put, 100).await.unwrap().len(), 0);
    assert_eq!(store.unknown_due(&put, pauses, 100).await.unwrap().len(), 100);
    let read = read_so_far(&store).await - before;
    assert!(read < 2_000, "{read} rows were read");
    store.close().await;
}

// Shown by: an index that ends with the tenant (the entries of all its records are read, also of
// those without a body).
#[tokio::test]
async fn m107_what_a_tenant_has_stored_is_summed_from_its_own_entries() {
    let test = "m107_what_a_tenant_has_stored_is_summed_from_its_own_entries";
    let Some(db) = Db::new(test).await else { return };
    fill(&db).await;
    let mut app = db.app().await;
    // One in two of them, and of these one in two is over.
    let kept = "update oncebox_idempotency_request set body = 'kept', kept_bytes = 10, \
           body_expires_at = outcome_at + interval if(ord(key_digest) % 4 = 0, 1, 0) day \
         where outcome_at is not null and ord(key_digest) % 2 = 0";
    execute(&mut app, kept).await;
    execute(&mut app, "analyze table oncebox_idempotency_request").await;
    let store = alone(&db).await;
    let live =
        "select count(*) from oncebox_idempotency_request where tenant = 't7' and body_expires_at > utc_timestamp(6)";
    let live: i64 = sqlx::query_scalar(live).fetch_one(db.store.pool()).await.unwrap();
    assert!((250..750).contains(&live), "{live}");
    let before = read_so_far(&store).await;
    assert_eq!(store.stored_of_tenant("t7").await.unwrap(), 10 * live.unsigned_abs());
    let read = read_so_far(&store).await - before;
    assert!(read <= live.unsigned_abs() + 50, "{read} rows were read for {live}");
    store.close().await;
}

/// A retry beside many messages that wait or are dead: it reads its own row, and looks up whether a
/// copy of it is dead.
#[tokio::test]
async fn r25_a_retry_reads_its_own_row_and_no_other() {
    let Some(db) = Db::new("r25_a_retry_reads_its_own_row_and_no_other").await else { return };
    let consumer = db.consumer("ledger").await;
    let rows = format!(
        "insert into oncebox_waiting (consumer_id, state, lane_id, due_at, message_id, id_text, content_hash, dead_hash, topic, `key`, kind, \
           headers, payload, tombstone, source, place, partition_no, offset_no, attempts, reason, history, stored_at, dead_at) \
         with recursive numbers (n) as (select 1 union all select n + 1 from numbers where n < 1000) \
         select {}, if(b.n > 1, 'dead', 'waiting'), unhex(md5(concat('lane', a.n, '/', b.n))), \
           if(b.n > 1, null, utc_timestamp(6) + interval if(a.n = 1, 0, 1) day), unhex(md5(concat(a.n, '/', b.n))), '', unhex(md5('')), \
           if(b.n > 1, unhex(md5('')), null), 't', 'k', '', '[]', '', 0, '', 't', 0, a.n, 0, if(b.n > 1, 'no', null), '[]', \
           utc_timestamp(6), if(b.n > 1, utc_timestamp(6), null) from numbers a join numbers b on b.n <= 20; \
         analyze table oncebox_waiting",
        consumer.0
    );
    execute(&mut db.app().await, &rows).await;
    let store = alone(&db).await;
    let before = read_so_far(&store).await;
    let scope = Scope { topics: vec!["t".to_owned()], places: Vec::new(), kinds: None };
    let lease = RowLease::new(Duration::from_secs(600));
    let head = store.lease_due(consumer, &scope, &lease).await.unwrap().unwrap();
    let mut tx = store.begin(consumer).await.unwrap();
    assert!(tx.bury(std::slice::from_ref(&head), "transaction-ended", "no", true).await.unwrap());
    assert_eq!(tx.prove().await.unwrap(), Proof::Same);
    assert!(tx.finish().await.unwrap());
    tx.wake(head.message.lane_id().as_slice()).await.unwrap();
    tx.commit().await.unwrap();
    let read = read_so_far(&store).await - before;
    assert!(read < 500, "{read} rows were read");
    assert_eq!(db.count("oncebox_waiting").await, 19_999);
    store.close().await;
}

/// Of which a few may go: those are read, and what stands before them because it waits.
// Shown to fail: by a page in the order of the ids.
#[tokio::test]
async fn a_purge_reads_what_may_go_and_not_the_table() {
    let Some(db) = Db::new("a_purge_reads_what_may_go_and_not_the_table").await else { return };
    let consumer = db.consumer("ledger").await;
    let rows = |name: &str, count: u32, age: &str| {
        format!(
            "insert into oncebox_inbox (consumer_id, message_id, content_hash, batch_token, received_at) \
             with recursive numbers (n) as (select 1 union all select n + 1 from numbers where n < 1000) \
             select {}, unhex(insert(md5(concat('{name}', a.n, '/', b.n)), 13, 1, '8')), unhex(md5('')), unhex(md5('')), \
               utc_timestamp(6) - interval {age} - interval a.n second \
               from numbers a join numbers b on a.n * 1000 + b.n <= 1000 + {count};",
            consumer.0
        )
    };
    let waiting = "insert into oncebox_waiting (consumer_id, state, message_id, id_text, content_hash, topic, kind, headers, payload, \
           tombstone, source, place, partition_no, offset_no, attempts, history, stored_at, due_at) \
         select consumer_id, 'waiting', message_id, '', content_hash, 't', '', '[]', '', 0, '', '', 0, 0, 0, '[]', utc_timestamp(6), \
           utc_timestamp(6) from oncebox_inbox;";
    let (kept, past, present) = (rows("k", 70, "30 day"), rows("p", 300, "9 day"), rows("n", 50_000, "1 minute"));
    execute(&mut db.app().await, &format!("{kept}{waiting}{past}{present}analyze table oncebox_inbox")).await;
    let store = alone(&db).await;
    let now: DbTime = store.bounds(consumer).await.unwrap().now;
    let below = DbTime::from_millis(now.before(Duration::from_secs(5 * 86_400)).millis());
    let before = read_so_far(&store).await;
    let (mut gone, mut after) = (0, None);
    loop {
        let purged = store.purge(consumer, below, after, 50).await.unwrap();
        (gone, after) = (gone + purged.rows, purged.next);
        if after.is_none() {
            break;
        }
    }
    assert_eq!(gone, 300);
    let read = read_so_far(&store).await - before;
    assert!(read < 10_000, "{read} rows were read");
    store.close().await;
}

// Shown by: a union of both states in a derived table (all rows of the consumer are read).
#[tokio::test]
async fn g11_stored_messages_are_counted_by_as_many_entries_of_an_index() {
    let Some(db) = Db::new("g11_stored_messages_are_counted_by_as_many_entries_of_an_index").await else { return };
    let (consumer, other) = (db.consumer("ledger").await, db.consumer("other").await);
    let rows = |consumer: i32, state: &str, dead: &str| {
        format!(
            "insert into oncebox_waiting (consumer_id, state, lane_id, message_id, id_text, content_hash, topic, `key`, kind, headers, payload, \
               tombstone, source, place, partition_no, offset_no, attempts, history, stored_at, reason, dead_at, dead_hash) \
             with recursive n (i) as (select 1 union all select i + 1 from n where i < 1000) \
             select {consumer}, '{state}', unhex(md5('k')), unhex(md5(concat('{state}', a.i, '/', b.i))), '', unhex(md5('')), \
               't', 'k', '', '[]', '', 0, '', '', 0, 0, 0, '[]', utc_timestamp(6), {dead} from n a join n b on a.i <= 10;"
        )
    };
    let dead = "'terminal', utc_timestamp(6), unhex(md5(''))";
    let fill = [
        rows(consumer.0, "waiting", "null, null, null"),
        rows(consumer.0, "dead", dead),
        rows(other.0, "waiting", "null, null, null"),
        "analyze table oncebox_waiting".to_owned(),
    ];
    execute(&mut db.app().await, &fill.concat()).await;
    let store = alone(&db).await;
    for (rows, has) in [(20_000, true), (20_001, false), (15_000, true), (10, true)] {
        let before = read_so_far(&store).await;
        assert_eq!(store.has_stored(consumer, rows).await.unwrap(), has, "{rows}");
        let read = read_so_far(&store).await - before;
        assert!(read < rows as u64 + 100, "{rows}: {read} rows were read");
    }
    store.close().await;
}

// Shown by: asking each row that waits whether a dead one is before it, and counting all that
// stands behind (all rows are read, for each row that is listed).
#[tokio::test]
async fn a_list_costs_no_more_the_more_is_held() {
    let Some(db) = Db::new("a_list_costs_no_more_the_more_is_held").await else { return };
    let consumer = db.consumer("ledger").await.0;
    let row = |count: u32, lane: &str, state: &str, due: &str| {
        let dead = if state == "dead" { "'terminal', utc_timestamp(6), unhex(md5(''))" } else { "null, null, null" };
        format!(
            "insert into oncebox_waiting (consumer_id, state, lane_id, message_id, id_text, content_hash, topic, `key`, kind, headers, payload, \
               tombstone, source, place, partition_no, offset_no, attempts, history, stored_at, due_at, reason, dead_at, dead_hash) \
             with recursive n (i) as (select 1 union all select i + 1 from n where i < 1000) \
             select {consumer}, '{state}', unhex(md5('{lane}')), unhex(md5(concat('{state}{lane}{due}', a.i, '/', b.i))), '', unhex(md5('')), \
               't', 'k', '', '[]', '', 0, '', '', 0, 0, 0, '[]', utc_timestamp(6), {due}, {dead} \
               from n a join n b on (a.i - 1) * 1000 + b.i <= {count};"
        )
    };
    let held = "insert into oncebox_outbox_dead (position, bucket, message_id, topic, kind, payload, content_type, created_at, state, cause, \
           reason, holds, attempts, history, diverted_at) \
         with recursive n (i) as (select 1 union all select i + 1 from n where i < 1000) \
         select (a.i - 1) * 1000 + b.i, 0, unhex(md5(a.i * 1000 + b.i)), 't', 'k', '', 'text/plain', utc_timestamp(6), 'held', \
           'destination', 'not there', 0, 1, '[]', utc_timestamp(6) from n a join n b on a.i <= 100;";
    let rows = [
        row(1, "dead", "dead", "null"),
        row(200_000, "dead", "waiting", "null"),
        row(1, "live", "waiting", "utc_timestamp(6)"),
        row(1, "live", "waiting", "null"),
    ];
    let fill = format!("{}{held}analyze table oncebox_waiting, oncebox_outbox_dead", rows.concat());
    execute(&mut db.app().await, &fill).await;
    let store = alone(&db).await;
    for (state, place, found, behind) in [
        (DeadState::Dead, "ledger", 1, 10_000),
        (DeadState::Waiting, "ledger", 2, 1),
        (DeadState::Held, "outbox", 100, 10_000),
    ] {
        let before = read_so_far(&store).await;
        let filter = DeadFilter { states: vec![state], consumer: Some(place.into()), ..DeadFilter::default() };
        let listed = store.dead(&filter).await.unwrap();
        assert_eq!((listed.len(), listed.iter().map(|one| one.behind).max()), (found, Some(behind)), "{state:?}");
        let read = read_so_far(&store).await - before;
        assert!(read < 25_000, "{state:?}: {read} rows were read");
    }
    store.close().await;
}
