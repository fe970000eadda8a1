//! Tests of query plans: what runs for every batch or poll looks up each id or lane, and never
//! scans a table that grows.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sqlx::{AssertSqlSafe, Row, SqliteConnection, query};

use super::SqliteStore;
use super::{inbox, relay};
use crate::operator::{DeadFilter, DeadState};
use crate::store::base::{Base, StoreOptions};
use crate::store::schema::Schema;
use crate::store::sql::inbox::{STORED, purge};
use crate::store::sql::operator::{list, status};
use crate::store::sql::{evidence, mailbox, outbox, phases, records, refused, sql, waiting};
use crate::store::statements::Dialect;

/// The text for SQLite. It gets a value for every name that these texts use.
fn words(text: &'static str) -> &'static str {
    let ones = "consumer lane head most rows lease length lease_max limit lanes after first from below topics places kinds \
                of_kinds timed skipped all kept content reason attempts error holds ids";
    ones.split(' ').fold(sql(text), |text, name| text.bind(name, 1_i64)).in_words_of(Dialect::Sqlite).unwrap().0
}

/// A database of its own, as long as the directory is kept.
async fn empty() -> (tempfile::TempDir, SqliteStore) {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", directory.path().join("plans.db").display());
    let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(url) }).await.unwrap();
    store.migrate().await.unwrap();
    (directory, store)
}

/// What the database would do for a statement, step by step.
async fn plan_of(store: &SqliteStore, text: &str) -> Vec<String> {
    let plan = query(AssertSqlSafe(format!("explain query plan {text}"))).fetch_all(store.pool()).await.unwrap();
    plan.iter().map(|row| row.get("detail")).collect()
}

/// Counts the steps that this connection makes from now on, in thousands.
async fn counted(connection: &mut SqliteConnection) -> Arc<AtomicU64> {
    let steps = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&steps);
    connection.lock_handle().await.unwrap().set_progress_handler(1_000, move || {
        counted.fetch_add(1, Ordering::Relaxed);
        true
    });
    steps
}

/// Shown to fail: without the index `oncebox_waiting_lane` two statements scanned the rows of a
/// consumer (R25); without `oncebox_operation_due`, recovery scanned all operations; without
/// `oncebox_idempotency_request_kept`, the quota scanned all records.
#[tokio::test]
async fn r25_no_poll_and_no_batch_walks_over_a_table() {
    let (_directory, store) = empty().await;
    let kept = sql(records::KEPT_OF_TENANT).bind("tenant", &b"t"[..]);
    let due_operations = phases::due("flow", &[1], 1, &[vec![0]]);
    let of_operation = |text| {
        let nil = uuid::Uuid::nil();
        let bound = sql(text).bind("id", nil).bind("owner", nil).bind("lease", std::time::Duration::ZERO);
        bound.in_words_of(Dialect::Sqlite).unwrap().0
    };
    let statements = [
        ("next due", words(waiting::NEXT_DUE)),
        ("due head", words(waiting::DUE_HEAD)),
        ("behind a head", words(waiting::BEHIND)),
        ("the sizes behind a head", words(waiting::BEHIND_BYTES)),
        ("lease", words(waiting::LEASE)),
        ("bury", words(waiting::BURY)),
        ("remove what was buried", words(waiting::REMOVE_BURIED)),
        ("refused copies", words(refused::DEAD)),
        ("leased too long", words(waiting::LEASED_TOO_LONG)),
        ("lost heads", words(waiting::LOST_HEADS)),
        ("wake next", words(waiting::TO_WAKE)),
        ("make due", words(waiting::MAKE_DUE)),
        ("known", inbox::KNOWN),
        ("admit", inbox::ADMIT),
        ("blocked", inbox::BLOCKED),
        ("read", relay::READ),
        ("delete", relay::DELETE),
        ("dead", words(outbox::HAS_DEAD)),
        ("emails", words(mailbox::DUE)),
        ("old emails", words(mailbox::OLD)),
        ("blank emails", words(mailbox::BLANK)),
        ("forget emails", words(mailbox::FORGET)),
        ("due operations", due_operations.in_words_of(Dialect::Sqlite).unwrap().0),
        ("take", of_operation(phases::TAKE)),
        ("operation", of_operation(phases::OPERATION)),
        ("intents", of_operation(phases::INTENTS)),
        ("evidence", of_operation(evidence::EVIDENCE)),
        ("kept of a tenant", kept.in_words_of(Dialect::Sqlite).unwrap().0),
    ];
    let mut walks = Vec::new();
    for (name, sql) in statements {
        let steps = plan_of(&store, sql).await;
        assert!(!steps.is_empty(), "{name}");
        // A scan of all rows of a consumer counts as a scan too.
        let is_walk = |step: &&String| {
            let whole = ["SCAN oncebox_", "SCAN w", "SCAN o"].iter().any(|walk| step.starts_with(walk));
            whole || step.contains("oncebox_waiting_first")
        };
        walks.extend(steps.iter().filter(is_walk).map(|step| format!("{name}: {step}")));
    }
    assert!(walks.is_empty(), "{walks:#?}");
}

/// Shown to fail: by a page without the name of the index, and by a join whose order is free (all
/// records are read); by one condition on all states or modes (all open records are read). Shown
/// by: an index without the last change (what it finds is sorted before the limit).
#[tokio::test]
async fn o11_claims_that_nobody_drives_are_found_among_the_open_records() {
    let (_directory, store) = empty().await;
    // Abandoned claims, and what is unknown and due to be asked for.
    for pauses in [None, Some((Duration::from_secs(30), Duration::from_secs(3_600)))] {
        let page = records::open_of(&"put".parse().unwrap(), pauses, 100);
        let steps = plan_of(&store, page.in_words_of(Dialect::Sqlite).unwrap().0).await;
        let reads = |step: &&String| step.contains("oncebox_idempotency_request") || step.starts_with("SCAN r");
        let by_state = "INDEX oncebox_idempotency_request_open (operation=? AND state=? AND mode=?)";
        let reads: Vec<&String> = steps.iter().filter(reads).collect();
        assert!(!reads.is_empty() && reads.iter().all(|step| step.ends_with(by_state)), "{steps:#?}");
        let sorts = |next: &[String]| next[0].ends_with(by_state) && next[1].starts_with("USE TEMP B-TREE");
        assert!(!steps.windows(2).any(sorts), "{steps:#?}");
        assert!(steps.iter().any(|step| step.starts_with("SEARCH r USING PRIMARY KEY")), "{steps:#?}");
    }
}

/// Shown to fail: by one condition on both states, which no index has (the rows of all consumers
/// were read).
#[tokio::test]
async fn g11_stored_messages_are_counted_by_entries_of_indexes() {
    let (_directory, store) = empty().await;
    let steps = plan_of(&store, words(STORED)).await;
    let reads: Vec<&String> = steps.iter().filter(|step| step.contains("oncebox_waiting")).collect();
    assert_eq!(reads.len(), 2, "{steps:#?}");
    let counts = |step: &&String| step.starts_with("SEARCH") && step.contains("COVERING INDEX");
    assert!(reads.iter().all(counts), "{steps:#?}");
}

/// Shown to fail: without the index, or with an index whose condition is written in other words,
/// the page scans the ids of a consumer by the key.
#[tokio::test]
async fn a_purge_of_ids_without_a_time_reads_what_was_received_first() {
    let (_directory, store) = empty().await;
    for (sql, page) in [
        (purge::PAGE_TIMED, "PRIMARY KEY (consumer_id=? AND message_id>? AND message_id<?)"),
        (purge::PAGE_RECEIVED, "INDEX oncebox_inbox_untimed (consumer_id=? AND "),
    ] {
        let steps = plan_of(&store, words(sql)).await;
        assert!(steps[0].contains(page), "{steps:#?}");
        assert!(steps.iter().all(|step| !step.contains("B-TREE")), "{steps:#?}");
    }
}

/// Shown to fail: by asking for each waiting row whether a dead one is before it, and by counting
/// all rows behind one (some millions of steps each).
#[tokio::test]
async fn a_list_costs_no_more_the_more_is_held() {
    let (_directory, store) = empty().await;
    let row = |from: &str, lane: &str, state: &str, due: &str| {
        let dead = if state == "dead" { "'terminal', 0" } else { "null, null" };
        format!(
            "insert into oncebox_waiting (consumer_id, message_id, content_hash, lane_id, state, blocks, due_at, attempts, stored_at, \
               id_text, topic, key, kind, headers, payload, tombstone, source, place, partition_no, offset_no, reason, dead_at) \
             select 1, randomblob(16), zeroblob(16), {lane}, '{state}', 1, {due}, 0, 0, '', 't', x'6b', '', '[]', x'', 0, '', '', 0, 0, {dead} {from}"
        )
    };
    let many =
        "from (with recursive n(i) as (select 1 union all select i + 1 from n where i < 200000) select i from n)";
    let mut connection = store.pool().acquire().await.unwrap();
    for sql in [
        "insert into oncebox_consumer (consumer_id, name, id_rule, registered_at, seen_at) values (1, 'ledger', '', 0, 0)".to_owned(),
        row("", "zeroblob(16)", "dead", "null"),
        row(many, "zeroblob(16)", "waiting", "null"),
        row("", "x'00000000000000000000000000000001'", "waiting", "1"),
        row("", "x'00000000000000000000000000000001'", "waiting", "null"),
    ] {
        query(AssertSqlSafe(sql)).execute(&mut *connection).await.unwrap();
    }
    let steps = counted(&mut connection).await;
    for (state, found, behind) in [(DeadState::Dead, 1, 10_000), (DeadState::Waiting, 2, 1)] {
        let filter = DeadFilter { states: vec![state], ..DeadFilter::default() };
        let listed = list::find(&mut *connection, &filter).await.unwrap();
        assert_eq!((listed.len(), listed.iter().map(|one| one.message.behind).max()), (found, Some(behind)));
    }
    let steps = steps.load(Ordering::Relaxed);
    assert!(steps < 500, "{steps} thousand steps");
}

/// Shown by: counting dead rows without an index, behind those that are held; an estimate of the
/// pending rows with `min` and `max` in one statement (all rows are read).
#[tokio::test]
async fn g11_the_gauges_cost_no_more_the_more_there_is() {
    let (_directory, store) = empty().await;
    let many = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 200000)";
    let mut connection = store.pool().acquire().await.unwrap();
    for sql in [
        format!("insert into oncebox_outbox (topic, kind, payload) {many} select 't', 'k', '' from n"),
        format!(
            "insert into oncebox_outbox_dead (position, bucket, message_id, topic, kind, headers, payload, content_type, created_at, state, holds, \
               reason, diverted_at) {many} select i, 0, '', 't', 'k', '{{}}', x'', 't', 0, \
               case when i > 199990 then 'dead' else 'held-destination' end, 0, 'no', 0 from n"
        ),
        format!(
            "insert into oncebox_consumer (name, id_rule, registered_at, seen_at) {many} select i, '', 0, 0 from n limit 1000"
        ),
        format!(
            "insert into oncebox_waiting (consumer_id, message_id, content_hash, lane_id, state, blocks, due_at, attempts, stored_at, \
               id_text, topic, key, kind, headers, payload, tombstone, source, place, partition_no, offset_no, reason, dead_at) \
             {many} select 7, randomblob(16), zeroblob(16), zeroblob(16), case when i = 1 then 'dead' else 'waiting' end, 1, null, 0, 0, \
               '', 't', x'6b', '', '[]', x'', 0, '', '', 0, 0, case when i = 1 then 'terminal' end, case when i = 1 then 0 end from n"
        ),
    ] {
        query(AssertSqlSafe(sql)).execute(&mut *connection).await.unwrap();
    }
    let steps = counted(&mut connection).await;
    let seen = status::read(&mut *connection, Dialect::Sqlite, None).await.unwrap();
    assert_eq!((seen.pending, seen.held, seen.dead), (200_000, 10_000, 10));
    let waiting = seen.consumers.iter().find(|consumer| consumer.held > 0).unwrap();
    assert_eq!((waiting.held, waiting.dead), (10_000, 1));
    let steps = steps.load(Ordering::Relaxed);
    assert!(steps < 1_000, "{steps} thousand steps");
}
