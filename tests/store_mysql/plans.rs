//! What `oncebox keys list` and `show` and a quota read of a large table: the rows that they need,
//! not all of them.

use oncebox::policy::operation::State;
use oncebox::store::mysql::MySqlStore;
use oncebox::store::{Base, KeyFilter, KeyOperator, Keys, StoreOptions};
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
    let store =
        MySqlStore::connect(&StoreOptions { connections_max: 1, ..StoreOptions::new(db.url.as_str()) }).await.unwrap();
    let one: Vec<u8> = sqlx::query_scalar("select unhex(sha2(77, 256))").fetch_one(db.store.pool()).await.unwrap();
    let open = |state| KeyFilter { state: Some(state), limit: 50, ..KeyFilter::default() };
    for (filter, found) in [
        (KeyFilter { digest: one[..6].to_vec(), limit: 2, ..KeyFilter::default() }, 1),
        (open(State::UnknownRequiresRecovery), UNKNOWN),
        (open(State::InProgress), 0),
    ] {
        let before = read_so_far(&store).await;
        assert_eq!(store.keys(&filter).await.unwrap().len(), found, "{filter:?}");
        let read = read_so_far(&store).await - before;
        assert!(read < 500, "{filter:?}: {read} rows were read");
    }
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
    let store =
        MySqlStore::connect(&StoreOptions { connections_max: 1, ..StoreOptions::new(db.url.as_str()) }).await.unwrap();
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
