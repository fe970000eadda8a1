//! What is compared in the end: every ledger as (id, amount), in order.

use std::path::Path;

use oncebox::async_trait;
use oncebox::sqlx::{self, AssertSqlSafe};
use oncebox::store::mysql::MySqlStore;
use oncebox::store::postgres::PostgresStore;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, Phases};
use serde_json::Value;

pub(crate) type Entries = Vec<(String, i64)>;

/// The tables of a lane.
#[async_trait]
pub(crate) trait Tables: Phases {
    /// The payload of a message as text.
    const PAYLOAD: &'static str;
    const PREFIX: &'static str;
    const OPERATION_ID: &'static str;

    async fn pairs(&self, sql: &str) -> Entries;
    async fn texts(&self, sql: &str) -> Vec<String>;

    /// Rows of the business.
    async fn rows(&self, table: &str) -> Entries {
        self.pairs(&format!("select id, amount_minor from {table}")).await
    }

    /// Texts of notes, and how often each stands there.
    async fn notes(&self) -> Entries {
        self.pairs("select text, count(*) from note group by text").await
    }

    /// Payments that were announced.
    async fn announced(&self) -> Entries {
        let sql = format!("select {} from {}outbox where kind = 'payment.created'", Self::PAYLOAD, Self::PREFIX);
        sorted(self.texts(&sql).await.iter().map(|text| {
            let payload: Value = serde_json::from_str(text).unwrap();
            (payload["paymentId"].as_str().unwrap().to_owned(), payload["amountMinor"].as_i64().unwrap())
        }))
    }

    /// How many effects were settled by evidence of this kind, of a send after the first where it
    /// is a send.
    async fn recovered_by(&self, kind: &str) -> usize {
        let send = if kind == "answer" { "and send > 1" } else { "" };
        let sql = format!(
            "select distinct {} from {}operation_evidence where kind = '{kind}' and verdict = 'success' {send}",
            Self::OPERATION_ID,
            Self::PREFIX
        );
        self.texts(&sql).await.len()
    }
}

macro_rules! tables {
    ($store:ty, $payload:literal, $prefix:literal, $operation_id:literal) => {
        #[async_trait]
        impl Tables for $store {
            const PAYLOAD: &'static str = $payload;
            const PREFIX: &'static str = $prefix;
            const OPERATION_ID: &'static str = $operation_id;

            async fn pairs(&self, sql: &str) -> Entries {
                sorted(sqlx::query_as(AssertSqlSafe(sql.to_owned())).fetch_all(self.pool()).await.unwrap())
            }

            async fn texts(&self, sql: &str) -> Vec<String> {
                sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_all(self.pool()).await.unwrap()
            }
        }
    };
}

tables!(SqliteStore, "cast(payload as text)", "oncebox_", "hex(operation_id)");
tables!(MySqlStore, "convert(payload using utf8mb4)", "oncebox_", "hex(operation_id)");
tables!(PostgresStore, "convert_from(payload, 'UTF8')", "oncebox.", "operation_id::text");

pub(crate) fn sorted(entries: impl IntoIterator<Item = (String, i64)>) -> Entries {
    let mut entries: Entries = entries.into_iter().collect();
    entries.sort();
    entries
}

/// The books of the provider: the reference is the id of our payment.
pub(crate) fn provider_books(path: &Path) -> Entries {
    let text = std::fs::read_to_string(path).unwrap();
    sorted(text.lines().map(|line| {
        let entry: Value = serde_json::from_str(line).unwrap();
        let charge = &entry["charge"];
        (charge["reference"].as_str().unwrap().to_owned(), charge["amountMinor"].as_i64().unwrap())
    }))
}
