//! The plans of what runs for every batch or poll: a lookup for each id or lane, never a walk over
//! a table that grows.
#![allow(clippy::unwrap_used)]

use sqlx::{AssertSqlSafe, Row, query};

use super::connect::SqliteStore;
use super::{inbox, operations, phases, relay, waiting};
use crate::store::sql::{mailbox, sql};
use crate::store::{Base, Dialect, Schema, StoreOptions};

/// Shown to fail: without the index `oncebox_waiting_lane` two of them walked over the rows of a
/// consumer (R25); without `oncebox_operation_due`, recovery over all operations; without
/// `oncebox_idempotency_request_kept`, the quota over all records.
#[tokio::test]
async fn r25_no_poll_and_no_batch_walks_over_a_table() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", directory.path().join("plans.db").display());
    let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(url) }).await.unwrap();
    store.migrate().await.unwrap();
    let emails = sql(mailbox::DUE).bind("claim_max", 1_i64).bind("limit", 1_i64);
    let statements = [
        ("next due", waiting::NEXT_DUE),
        ("due head", waiting::DUE_HEAD),
        ("behind a head", waiting::BEHIND),
        ("claim", waiting::CLAIM),
        ("claimed too long", waiting::CLAIMED_TOO_LONG),
        ("lost heads", waiting::LOST_HEADS),
        ("wake next", waiting::WAKE_NEXT),
        ("known", inbox::KNOWN),
        ("admit", inbox::ADMIT),
        ("blocked", inbox::BLOCKED),
        ("read", relay::READ),
        ("delete", relay::DELETE),
        ("emails", emails.in_words_of(Dialect::Sqlite).unwrap().0),
        ("due operations", phases::DUE),
        ("take", phases::TAKE),
        ("operation", phases::OPERATION),
        ("intents", phases::INTENTS),
        ("evidence", phases::EVIDENCE),
        ("kept of a tenant", operations::KEPT_OF_TENANT),
    ];
    let mut walks = Vec::new();
    for (name, sql) in statements {
        let plan = query(AssertSqlSafe(format!("explain query plan {sql}"))).fetch_all(store.pool()).await.unwrap();
        let steps: Vec<String> = plan.iter().map(|row| row.get("detail")).collect();
        assert!(!steps.is_empty(), "{name}");
        // All rows of a consumer are a table too.
        let is_walk = |step: &&String| {
            let whole = ["SCAN oncebox_", "SCAN w", "SCAN o"].iter().any(|walk| step.starts_with(walk));
            whole || step.contains("oncebox_waiting_first")
        };
        walks.extend(steps.iter().filter(is_walk).map(|step| format!("{name}: {step}")));
    }
    assert!(walks.is_empty(), "{walks:#?}");
}
