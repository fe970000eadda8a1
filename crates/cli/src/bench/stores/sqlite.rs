//! The plain SQL of the benchmarks for SQLite.

use chrono::DateTime;
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row};
use uuid::Uuid;

use super::{json_list, plain_sql};
use crate::bench::keys::OLD;
use crate::bench::yard::{ACCOUNTS, Connection, Effects, Yard};
use oncebox::StoreError;
use oncebox::app::AppError;
use oncebox::message::{NewMessage, OutgoingMessage};
use oncebox::store::Base;
use oncebox::store::sqlite::SqliteStore;

const COLUMNS: &str =
    "position, message_id, topic, key, kind, headers, cast(payload as blob), content_type, created_at";

fn message(row: &SqliteRow) -> Result<(i64, OutgoingMessage), StoreError> {
    let id: &str = row.try_get_unchecked(1)?;
    let message = OutgoingMessage {
        id: id.parse().map_err(|error: uuid::Error| StoreError::Corrupt(error.to_string()))?,
        topic: row.try_get_unchecked(2)?,
        key: row.try_get_unchecked(3)?,
        kind: row.try_get_unchecked(4)?,
        headers: Vec::new(),
        payload: row.try_get_unchecked(6)?,
        content_type: row.try_get_unchecked(7)?,
        trace: None,
        created_at: DateTime::from_timestamp_millis(row.try_get_unchecked(8)?).unwrap_or_default(),
    };
    Ok((row.try_get_unchecked(0)?, message))
}

impl Yard for SqliteStore {
    const WRITERS: usize = 1;

    async fn make_tables(&self) -> Result<(), AppError> {
        let tables = format!(
            "create table bench_account (account integer primary key, balance integer not null);
             with recursive n(n) as (select 0 union all select n + 1 from n where n < {})
             insert into bench_account select n, 0 from n;
             create table bench_payer (tenant varchar(64) not null, account_id varchar(64) not null, balance_minor bigint not null,
               primary key (tenant, account_id));
             create table bench_payment (tenant varchar(64) not null, id varchar(64) not null, account_id varchar(64) not null,
               amount_minor bigint not null, currency char(3) not null, merchant_reference varchar(64) not null, channel varchar(64) not null,
               primary key (tenant, id), unique (tenant, account_id, merchant_reference));
             create table bench_inbox (consumer integer not null, id blob not null, primary key (consumer, id)) without rowid;
             create table bench_message (position integer primary key autoincrement, bucket, message_id, topic, key, kind, headers,
               payload, content_type, created_at default (cast(round((julianday('now') - 2440587.5) * 86400000) as integer)));
             create index bench_message_id on bench_message (message_id);
             create table bench_request (id blob primary key, answer blob) without rowid",
            ACCOUNTS - 1
        );
        sqlx::raw_sql(AssertSqlSafe(tables)).execute(self.pool()).await.map_err(StoreError::from)?;
        Ok(())
    }

    async fn copy_with_status(&self, rows: usize) -> Result<(), StoreError> {
        let copy = format!(
            "drop table if exists bench_outbox;
             create table bench_outbox as select o.*, null as published_at
               from oncebox_outbox o order by position desc limit {rows};
             create unique index bench_outbox_position on bench_outbox (position);
             create index bench_outbox_unmarked on bench_outbox (position) where published_at is null"
        );
        sqlx::raw_sql(AssertSqlSafe(copy)).execute(self.pool()).await?;
        Ok(())
    }

    async fn fill_keys(&self, from: u64, to: u64) -> Result<(), StoreError> {
        let fill = format!(
            "insert into oncebox_idempotency_request (key_digest, tenant, operation, key, principal, fingerprint, mode, state, \
               operation_id, created_at, updated_at, outcome_at, expires_at, answer_status, schema_version, body) \
             with recursive numbers (n) as (select {from} union all select n + 1 from numbers where n < {to} - 1) \
             select randomblob(32), cast('t1' as blob), cast('{OLD}' as blob), cast('old-' || n as blob), \
               'sha256:' || printf('%064d', 0), '1:sha256:' || printf('%064d', 0), 'same_tx', 'COMPLETED', randomblob(16), \
               t, t, t, t + 86400000, 201, 1, 'oversize' \
               from numbers, (select unixepoch() * 1000 - 30 * 86400000 as t)"
        );
        sqlx::raw_sql(AssertSqlSafe(fill)).execute(self.pool()).await?;
        Ok(())
    }

    async fn fill_inbox(&self, consumer: &str, from: u64, to: u64) -> Result<(), StoreError> {
        let fill = format!(
            "insert into oncebox_inbox (consumer_id, message_id, content_hash, received_at) \
             with recursive numbers (n) as (select {from} union all select n + 1 from numbers where n < {to} - 1) \
             select c.consumer_id, unhex(printf('%012x', t - 3600000 + n % 3600000) || '7' || substr(h, 1, 3) || '8' || substr(h, 4, 15)), \
                 randomblob(16), t - 3600000 + n % 3600000 \
               from oncebox_consumer c, (select n, hex(randomblob(9)) as h from numbers), \
                 (select unixepoch() * 1000 as t) where c.name = ?"
        );
        sqlx::query(AssertSqlSafe(fill)).bind(consumer).execute(self.pool()).await?;
        Ok(())
    }

    plain_sql! {
        business: "update bench_account set balance = balance + 1 where account = ?",
        append: "insert into bench_message (bucket, message_id, topic, key, kind, headers, payload, content_type) \
                 values (?, ?, ?, ?, ?, ?, ?, ?)",
        all: "update bench_account set balance = balance + n.times \
              from (select value as account, count(*) as times from json_each(?) group by value) n \
              where bench_account.account = n.account",
        effects: "select sum(balance) from bench_account",
        payment: "insert into bench_payment (tenant, id, account_id, amount_minor, currency, merchant_reference, channel) \
                  values (?, ?, ?, ?, ?, ?, ?) on conflict do nothing",
        standing: "select id from bench_payment where tenant = ? and account_id = ? and merchant_reference = ?",
        open: "insert into bench_payer (tenant, account_id, balance_minor) values (?, ?, ?) on conflict do nothing",
        debit: "update bench_payer set balance_minor = balance_minor - ? \
                where tenant = ? and account_id = ? and balance_minor >= ?",
        inbox: "insert into bench_inbox (consumer, id) values (1, ?) on conflict do nothing",
        ids: "insert into bench_inbox (consumer, id) select 1, unhex(value, '-') from json_each(?) where true on conflict do nothing",
        forget: "delete from bench_inbox",
        claim: "insert into bench_request (id) values (?)",
        answer: "update bench_request set answer = ? where id = ?",
        mark: "update bench_outbox set published_at = 1 where position = ?",
        read: AssertSqlSafe(format!(
            "select {COLUMNS} from oncebox_outbox where position > ? order by position limit 1000"
        )),
        unmarked: AssertSqlSafe(format!(
            "select {COLUMNS} from bench_outbox where published_at is null order by position limit 100"
        )),
        row: message,
        id: |id: Uuid| id.as_bytes().to_vec(),
        list: json_list
    }
}
