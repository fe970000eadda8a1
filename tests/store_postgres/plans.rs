//! What `oncebox keys list` and `show` and a quota read of a large table: the rows that they need,
//! not all of them.

use std::time::Duration;

use oncebox::operation::{Identity, Key, KeyFormat, Mode, Retention, Scope, Stage, State, Tombstone};
use oncebox::store::postgres::PostgresStore;
use oncebox::store::{
    Answer, AnswerBody, Base, Basis, Begun, DeadFilter, DeadState, FIRST_POINT, Inbox, KeyClaim, KeyFilter,
    KeyOperator, Keys, NewOperation, Operator, Phases, RunOutcome, Sealed,
};
use uuid::Uuid;

use crate::postgres::{Database, with_database};
use crate::support::eventually;
use crate::turns::consumer_spec;

const ROWS: i64 = 100_000;
const RECORDS: &str = "oncebox.idempotency_request";
const WAITING: &str = "oncebox.waiting";
const UNTIMED: &str = "oncebox.inbox_untimed";
const UNKNOWN: usize = 7;

/// A hundred thousand keys that are done, and a few whose outcome nobody knows.
async fn fill(database: &Database) {
    let rows = format!(
        "insert into oncebox.idempotency_request (key_digest, tenant, operation, key, principal, fingerprint, mode, state, operation_id, \
           outcome_at, expires_at, answer_status, schema_version, body) \
         select sha256(n::text::bytea), ('t' || n % 50)::bytea, 'put', lpad(n::text, 16, 'k')::bytea, 'sha256:' || encode(sha256('p'), 'hex'), \
           '1:sha256:' || encode(sha256(n::text::bytea), 'hex'), 'edge', \
           case when n <= {UNKNOWN} then 'UNKNOWN_REQUIRES_RECOVERY' else 'COMPLETED' end, gen_random_uuid(), \
           case when n > {UNKNOWN} then now() end, case when n > {UNKNOWN} then now() + interval '1 day' end, \
           case when n > {UNKNOWN} then 201 end, case when n > {UNKNOWN} then 1 end, case when n > {UNKNOWN} then 'purged' end \
         from generate_series(1, {ROWS}) n; analyze oncebox.idempotency_request"
    );
    database.run(&rows).await;
}

/// Scans of the table, and rows that scans of it have read: from end to end, and through indexes.
async fn read_so_far(database: &Database, table: &str) -> [i64; 4] {
    let counters = ["seq_scan", "idx_scan", "seq_tup_read", "idx_tup_fetch"];
    let text = format!(
        "select array[{}] from pg_stat_all_tables where relid = '{table}'::regclass",
        counters.map(|counter| format!("coalesce({counter}, 0)")).join(", ")
    );
    database.value::<Vec<i64>>(&text).await.try_into().unwrap()
}

/// What a store of its own reads of a table by this work: rows in order, and rows by an index.
async fn read_by<W>(database: &Database, table: &str, work: impl FnOnce(PostgresStore) -> W) -> (i64, i64)
where
    W: Future<Output = ()>,
{
    let before = read_so_far(database, table).await;
    let store = database.another_store().await;
    work(store.clone()).await;
    // What a connection has read is counted when it ends.
    store.close().await;
    let after = eventually("the read is counted", Duration::from_secs(60), || async {
        let after = read_so_far(database, table).await;
        (after[0] + after[1] > before[0] + before[1]).then_some(after)
    })
    .await;
    (after[2] - before[2], after[3] - before[3])
}

// Shown by: a filter that no index serves (`--state completed` reads all rows, as its documentation
// says).
#[tokio::test]
async fn m105_keys_are_listed_by_hash_and_by_open_state_without_reading_the_table() {
    let test = "m105_keys_are_listed_by_hash_and_by_open_state_without_reading_the_table";
    with_database(test, |database| async move {
        fill(&database).await;
        let one: Vec<u8> = database.value("select sha256('77'::bytea)").await;
        let open = |state| KeyFilter { state: Some(state), limit: 50, ..KeyFilter::default() };
        for (filter, found, rows_max) in [
            (KeyFilter { digest: one[..6].to_vec(), limit: 2, ..KeyFilter::default() }, 1, 10),
            (open(State::UnknownRequiresRecovery), UNKNOWN, 100),
            (open(State::InProgress), 0, 100),
        ] {
            let asked = filter.clone();
            let (whole, indexed) = read_by(&database, RECORDS, |store| async move {
                assert_eq!(store.keys(&asked).await.unwrap().keys.len(), found, "{asked:?}");
            })
            .await;
            assert!(whole == 0 && indexed <= rows_max, "{filter:?}: {whole} rows in order, {indexed} by an index");
        }
    })
    .await;
}

/// An operation in phases, and its record by the digest that it has: nothing is read from end to
/// end.
//
// Shown by: looking a record up by the id of its operation.
#[tokio::test]
async fn o9_a_phase_moves_its_record_on_without_reading_the_table() {
    let test = "o9_a_phase_moves_its_record_on_without_reading_the_table";
    with_database(test, |database| async move {
        fill(&database).await;
        let before = read_so_far(&database, RECORDS).await;
        let store = database.another_store().await;
        let scope = Scope::new("t1", "p1").unwrap();
        let key = Key::parse(b"a-key-of-many-0001", KeyFormat::Opaque).unwrap();
        let new = NewOperation {
            claim: KeyClaim {
                identity: Identity::new(&scope, "put".parse().unwrap(), key),
                principal: format!("sha256:{}", "0b".repeat(32)).parse().unwrap(),
                fingerprint: format!("1:sha256:{}", "0f".repeat(32)).parse().unwrap(),
                mode: Mode::Phased,
                operation_id: Uuid::now_v7(),
                owner: Uuid::now_v7(),
                lease: Duration::from_secs(600),
            },
            flow: "put".to_owned(),
            flow_version: 1,
            command: Sealed { bytes: vec![0], kid: None },
        };
        let Begun::Claimed(mut tx) = store.begin_first(&new, Basis::New, Duration::from_secs(20)).await.unwrap() else {
            panic!("it is free")
        };
        let driven = tx.driven().clone();
        tx.advance(FIRST_POINT, "SENT", Stage::Outstanding, &[]).await.unwrap();
        tx.commit().await.unwrap();
        let mut tx = store.begin_phase(&driven).await.unwrap();
        tx.advance("SENT", "BACK", Stage::Local, &[]).await.unwrap();
        tx.commit().await.unwrap();
        let mut tx = store.begin_phase(&driven).await.unwrap();
        let done = RunOutcome::FailedReplayable {
            answer: Answer {
                status: 402,
                schema_version: 1,
                body: AnswerBody::Tombstone(Tombstone::Withheld),
                resource: None,
            },
            error_code: None,
        };
        tx.finish("BACK", &done, &Retention::default()).await.unwrap();
        tx.commit().await.unwrap();
        store.close().await;
        let after = eventually("the writes are counted", Duration::from_secs(60), || async {
            let after = read_so_far(&database, RECORDS).await;
            (after[1] > before[1] + 2).then_some(after)
        })
        .await;
        assert_eq!(after[2] - before[2], 0, "rows in order");
    })
    .await;
}

// Shown by: no index of the ends of bodies, or of outcomes; comparing with the clock itself (all
// entries are read, once fewer are due than a batch may take).
#[tokio::test]
async fn m101_what_is_due_goes_without_a_look_at_what_is_not() {
    let test = "m101_what_is_due_goes_without_a_look_at_what_is_not";
    with_database(test, |database| async move {
        fill(&database).await;
        let kept = "update oncebox.idempotency_request set body = 'kept', kept_bytes = 10, body_headers = '', body_bytes = '', body_format = 0, \
               body_expires_at = outcome_at + case when convert_from(key, 'UTF8') like '%000' then interval '0' else interval '1 day' end \
             where outcome_at is not null";
        database.run(kept).await;
        let old = "update oncebox.idempotency_request set outcome_at = now() - interval '31 days', expires_at = now() - interval '1 day' \
             where convert_from(key, 'UTF8') like '%001'";
        database.run(old).await;
        database.run("vacuum analyze oncebox.idempotency_request").await;
        let before = read_so_far(&database, RECORDS).await;
        let store = database.another_store().await;
        assert_eq!(store.expire_bodies(60).await.unwrap(), 60, "a batch is bounded");
        assert_eq!(store.expire_bodies(1_000).await.unwrap(), 40);
        let put = "put".parse().unwrap();
        let month = Retention { metadata: Duration::from_secs(30 * 86_400), ..Retention::default() };
        assert_eq!(store.purge_keys(&put, &month, Duration::ZERO, 1_000).await.unwrap(), 99);
        store.close().await;
        let [_, _, whole, indexed] = eventually("the reads are counted", Duration::from_secs(60), || async {
            let after = read_so_far(&database, RECORDS).await;
            let read: [i64; 4] = std::array::from_fn(|at| after[at] - before[at]);
            // Found and changed, 100 bodies and 99 records.
            (read[3] >= 2 * 199 || read[2] > 0).then_some(read)
        })
        .await;
        assert!(whole == 0 && indexed < 1_000, "{whole} rows in order, {indexed} by an index");
    })
    .await;
}

// Shown by: a page that its index does not serve (all records of the operation are read).
#[tokio::test]
async fn o11_what_a_sweep_asks_for_is_found_among_the_open_records() {
    let test = "o11_what_a_sweep_asks_for_is_found_among_the_open_records";
    with_database(test, |database| async move {
        fill(&database).await;
        let (whole, indexed) = read_by(&database, RECORDS, |store| async move {
            let (put, pauses) = ("put".parse().unwrap(), (Duration::ZERO, Duration::from_secs(3_600)));
            assert_eq!(store.unknown_due(&put, pauses, 100).await.unwrap().len(), UNKNOWN);
            assert_eq!(store.stale(&put, 100).await.unwrap().len(), 0);
        })
        .await;
        assert!(whole == 0 && indexed < 1_000, "{whole} rows in order, {indexed} by an index");
    })
    .await;
}

// Half of the records are unknown, and half wait in their phases. Shown by: an index without state
// and mode, or a page that does not read its entries in their order (all open records are read).
#[tokio::test]
async fn o11_a_sweep_reads_no_more_where_many_records_are_open() {
    let test = "o11_a_sweep_reads_no_more_where_many_records_are_open";
    with_database(test, |database| async move {
        fill(&database).await;
        let open = "update oncebox.idempotency_request set outcome_at = null, expires_at = null, answer_status = null, \
               schema_version = null, body = null, \
               state = case get_byte(key_digest, 0) % 2 when 0 then 'UNKNOWN_REQUIRES_RECOVERY' else 'IN_PROGRESS' end, \
               mode = case get_byte(key_digest, 0) % 2 when 0 then 'edge' else 'phased' end";
        database.run(open).await;
        database.run("vacuum analyze oncebox.idempotency_request").await;
        let (whole, indexed) = read_by(&database, RECORDS, |store| async move {
            let (put, pauses) = ("put".parse().unwrap(), (Duration::ZERO, Duration::from_secs(3_600)));
            assert_eq!(store.stale(&put, 100).await.unwrap().len(), 0);
            assert_eq!(store.unknown_due(&put, pauses, 100).await.unwrap().len(), 100);
        })
        .await;
        assert!(whole == 0 && indexed < 1_000, "{whole} rows in order, {indexed} by an index");
    })
    .await;
}

/// Entries that were read of the index of what is kept.
async fn entries_so_far(database: &Database) -> i64 {
    let text =
        "select coalesce(idx_tup_read, 0) from pg_stat_all_indexes where indexrelname = 'idempotency_request_kept'";
    database.value(text).await
}

// Shown to fail: with `tenant || ''` in the sum (100,000 rows in order). Shown by: no such index
// (the same); comparing with the clock itself (the entries of all bodies of the tenant are read,
// also of those whose time is over).
#[tokio::test]
async fn m107_what_a_tenant_has_stored_is_summed_from_its_own_entries() {
    let test = "m107_what_a_tenant_has_stored_is_summed_from_its_own_entries";
    with_database(test, |database| async move {
        fill(&database).await;
        let kept = "update oncebox.idempotency_request set body = 'kept', kept_bytes = 10, \
               body_expires_at = outcome_at + case when get_byte(key_digest, 0) % 2 = 0 then interval '1 day' else interval '0' end \
             where outcome_at is not null";
        database.run(kept).await;
        database.run("analyze oncebox.idempotency_request").await;
        let live = "select count(*) from oncebox.idempotency_request where tenant = 't7' and body_expires_at > now()";
        let live: i64 = database.value(live).await;
        assert!((500..1_500).contains(&live), "{live}");
        let (before, entries) = (read_so_far(&database, RECORDS).await, entries_so_far(&database).await);
        let store = database.another_store().await;
        assert_eq!(store.stored_of_tenant("t7").await.unwrap(), 10 * live.unsigned_abs());
        store.close().await;
        let read = eventually("the read is counted", Duration::from_secs(20), || async {
            let after = read_so_far(&database, RECORDS).await;
            let whole = after[2] - before[2];
            let read = entries_so_far(&database).await - entries;
            (read > 0 || whole > 0).then_some((whole, read))
        })
        .await;
        assert_eq!(read, (0, live), "rows in order, and entries of the index");
    })
    .await;
}

/// Two hundred thousand rows behind a dead one. Shown by asking which lanes of the rows are
/// blocked, and by counting all of them.
#[tokio::test]
async fn g11_what_is_held_costs_a_batch_nothing_and_the_status_no_more_than_its_bound() {
    let test = "g11_what_is_held_costs_a_batch_nothing_and_the_status_no_more_than_its_bound";
    with_database(test, |database| async move {
        let lane = Uuid::now_v7();
        database
            .run(&format!(
                "insert into oncebox.consumer (name, id_rule) values ('ledger', 'envelope');
                 insert into oncebox.waiting (consumer_id, lane_id, state, holds, reason, dead_at, message_id, content_hash, id_text,
                   topic, key, kind, payload, source, place, partition_no, offset_no)
                 select consumer_id, '{lane}', case when n = 0 then 'dead' else 'waiting' end, n = 0, case when n = 0 then 'no' end,
                   case when n = 0 then now() end, gen_random_uuid(), gen_random_uuid(), '', 't', 'k', 'made', '', 's', 't', 0, n
                   from oncebox.consumer, generate_series(0, 200000) n;
                 analyze oncebox.waiting"
            ))
            .await;
        for (looks, rows_max) in [(true, 10), (false, 40_000)] {
            let (whole, indexed) = read_by(&database, WAITING, |store| async move {
                if looks {
                    let consumer = store.register(&consumer_spec()).await.unwrap();
                    let mut tx = store.begin(consumer).await.unwrap();
                    let standing = tx.standing(&[lane.into_bytes(), [1; 16]]).await.unwrap();
                    assert_eq!(standing.blocked.len(), 1);
                    tx.commit().await.unwrap();
                } else {
                    let ledger = store.status().await.unwrap().consumers.remove(0);
                    assert_eq!((ledger.held, ledger.waiting, ledger.dead), (10_000, 0, 1));
                }
            })
            .await;
            assert!(whole + indexed <= rows_max, "{whole} rows in order, {indexed} by an index");
        }
    })
    .await;
}

/// Ids without a time, of which a few may go: those are read, and what stands before them because
/// it waits.
//
// Shown to fail: by walking in the order of the ids.
#[tokio::test]
async fn a_purge_of_ids_without_a_time_reads_what_may_go_and_not_the_table() {
    let test = "a_purge_of_ids_without_a_time_reads_what_may_go_and_not_the_table";
    with_database(test, |database| async move {
        let consumer = database.store.register(&consumer_spec()).await.unwrap();
        let rows = |count: i64, age: &str| {
            format!(
                "insert into oncebox.inbox_untimed (consumer_id, message_id, content_hash, received_at) \
                 select {}, gen_random_uuid(), gen_random_uuid(), now() - interval '{age}' - n * interval '1 second' \
                 from generate_series(1, {count}) n;",
                consumer.0
            )
        };
        let waiting = "insert into oncebox.waiting (consumer_id, message_id, content_hash, id_text, state, reason, dead_at, \
                         topic, kind, payload, source, place, partition_no, offset_no) \
                       select consumer_id, message_id, content_hash, 'x', 'dead', 'terminal', now(), \
                         't', 'k', '', 's', 'p', 0, 0 from oncebox.inbox_untimed;";
        let (kept, past, present) = (rows(70, "30 days"), rows(300, "9 days"), rows(ROWS, "1 minute"));
        database.run(&format!("{kept}{waiting}{past}{present}analyze oncebox.inbox_untimed")).await;
        let (whole, indexed) = read_by(&database, UNTIMED, |store| async move {
            let below = store.bounds(consumer).await.unwrap().now.before(Duration::from_secs(5 * 86_400));
            let (mut gone, mut after) = (0, None);
            loop {
                let purged = store.purge(consumer, below, after, 50).await.unwrap();
                (gone, after) = (gone + purged.rows, purged.next);
                if after.is_none() {
                    break;
                }
            }
            assert_eq!(gone, 300);
        })
        .await;
        assert!(whole == 0 && indexed <= 2_000, "{whole} rows in order, {indexed} by an index");
    })
    .await;
}

/// What waits is found by what is tried next, and no more is counted than is shown.
//
// Shown by: asking each row that waits whether a dead one is before it (all are read).
#[tokio::test]
async fn a_list_costs_no_more_the_more_is_held() {
    with_database("a_list_costs_no_more_the_more_is_held", |database| async move {
        let consumer = database.store.register(&consumer_spec()).await.unwrap().0;
        let row = |count: i64, lane: &str, state: &str, due: &str| {
            let is_dead = state == "dead";
            let dead = if is_dead { "'terminal', now()" } else { "null, null" };
            format!(
                "insert into oncebox.waiting (consumer_id, message_id, content_hash, id_text, state, lane_id, holds, due_at, topic, key, \
                   kind, payload, source, place, partition_no, offset_no, reason, dead_at) \
                 select {consumer}, gen_random_uuid(), gen_random_uuid(), 'x', '{state}', md5('{lane}')::uuid, {is_dead}, {due}, 't', 'k', \
                   'k', '', 's', 'p', 0, 0, {dead} from generate_series(1, {count});"
            )
        };
        let rows = [
            row(1, "dead", "dead", "null"),
            row(200_000, "dead", "waiting", "null"),
            row(1, "live", "waiting", "now()"),
            row(1, "live", "waiting", "null"),
        ];
        database.run(&format!("{}analyze oncebox.waiting", rows.concat())).await;
        let (whole, indexed) = read_by(&database, WAITING, |store| async move {
            for (state, found, behind) in [(DeadState::Dead, 1, 10_000), (DeadState::Held, 100, 0), (DeadState::Waiting, 2, 1)] {
                let filter = DeadFilter { states: vec![state], ..DeadFilter::default() };
                let listed = store.dead(&filter).await.unwrap();
                let seen = (listed.len(), listed.iter().map(|one| one.behind).max());
                assert_eq!(seen, (found, Some(behind)), "{state:?}");
            }
        })
        .await;
        assert!(whole + indexed <= 12_000, "{whole} rows in order, {indexed} by an index");
    })
    .await;
}
