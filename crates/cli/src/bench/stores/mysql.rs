//! The plain SQL of the benchmarks for MySQL and MariaDB.

use chrono::NaiveDateTime;
use sqlx::mysql::MySqlRow;
use sqlx::pool::PoolConnection;
use sqlx::{AssertSqlSafe, MySql, Row};
use uuid::Uuid;

use super::{json_list, plain_sql};
use crate::bench::keys::OLD;
use crate::bench::yard::{ACCOUNTS, Connection, Effects, Yard};
use oncebox::StoreError;
use oncebox::app::AppError;
use oncebox::message::{NewMessage, OutgoingMessage};
use oncebox::store::Base;
use oncebox::store::mysql::MySqlStore;

const COLUMNS: &str = "position, message_id, topic, `key`, kind, headers, payload, content_type, created_at";

fn message(row: &MySqlRow) -> Result<(i64, OutgoingMessage), StoreError> {
    let bytes = |at: usize| row.try_get_unchecked::<Vec<u8>, _>(at);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).map_err(|error| StoreError::Corrupt(error.to_string()));
    let key: Option<Vec<u8>> = row.try_get_unchecked(3)?;
    let message = OutgoingMessage {
        id: Uuid::from_slice(&bytes(1)?).map_err(|error| StoreError::Corrupt(error.to_string()))?,
        topic: text(bytes(2)?)?,
        key: key.map(text).transpose()?,
        kind: text(bytes(4)?)?,
        headers: Vec::new(),
        payload: bytes(6)?,
        content_type: text(bytes(7)?)?,
        trace: None,
        created_at: row.try_get_unchecked::<NaiveDateTime, _>(8)?.and_utc(),
    };
    Ok((row.try_get_unchecked(0)?, message))
}

/// A text column that is compared byte for byte.
const TEXT: &str = "varchar(64) character set utf8mb4 collate utf8mb4_nopad_bin";

/// A connection that allows a long recursion.
async fn deep(store: &MySqlStore) -> Result<PoolConnection<MySql>, StoreError> {
    let mut connection = store.pool().acquire().await?;
    // MariaDB stops a recursion after 1,000 rounds unless this setting allows more. MySQL has
    // another name for the setting.
    for deep in ["set max_recursive_iterations = 4294967295", "set cte_max_recursion_depth = 4294967295"] {
        let _one_of_the_two_is_known = sqlx::raw_sql(deep).execute(&mut *connection).await;
    }
    Ok(connection)
}

impl Yard for MySqlStore {
    const WRITERS: usize = 16;

    async fn make_tables(&self) -> Result<(), AppError> {
        let accounts: Vec<String> = (0..ACCOUNTS).map(|account| format!("({account}, 0)")).collect();
        let tables = format!(
            "create table bench_account (account bigint primary key, balance bigint not null) engine = InnoDB;
             insert into bench_account values {};
             create table bench_inbox (consumer smallint not null, id binary(16) not null, primary key (consumer, id))
               engine = InnoDB;
             create table bench_payer (tenant {TEXT} not null, account_id {TEXT} not null, balance_minor bigint not null,
               primary key (tenant, account_id)) engine = InnoDB;
             create table bench_payment (tenant {TEXT} not null, id {TEXT} not null, account_id {TEXT} not null,
               amount_minor bigint not null, currency char(3) not null, merchant_reference {TEXT} not null, channel {TEXT} not null,
               primary key (tenant, id), unique (tenant, account_id, merchant_reference)) engine = InnoDB;
             create table bench_message like oncebox_outbox;
             create table bench_request (id binary(16) primary key, answer blob) engine = InnoDB",
            accounts.join(", ")
        );
        sqlx::raw_sql(AssertSqlSafe(tables)).execute(self.pool()).await.map_err(StoreError::from)?;
        Ok(())
    }

    async fn copy_with_status(&self, rows: usize) -> Result<(), StoreError> {
        let copy = format!(
            "drop table if exists bench_outbox;
             create table bench_outbox engine = InnoDB as select o.* from oncebox_outbox o order by position desc limit {rows};
             alter table bench_outbox add column published_at datetime(6) null, add primary key (position),
               add key (published_at, position)"
        );
        sqlx::raw_sql(AssertSqlSafe(copy)).execute(self.pool()).await?;
        Ok(())
    }

    async fn fill_keys(&self, from: u64, to: u64) -> Result<(), StoreError> {
        let fill = format!(
            "insert into oncebox_idempotency_request (key_digest, tenant, operation, `key`, principal, fingerprint, mode, state, \
               epoch, generation, operation_id, attempts, created_at, updated_at, outcome_at, expires_at, answer_status, \
               schema_version, body) \
             with recursive numbers as (select {from} as n union all select n + 1 from numbers where n < {to} - 1) \
             select unhex(sha2(concat('old', n), 256)), 't1', '{OLD}', concat('old-', n), \
               concat('sha256:', repeat('0', 64)), concat('1:sha256:', repeat('0', 64)), 'same_tx', 'COMPLETED', 1, 1, \
               unhex(left(sha2(concat('run', n), 256), 32)), 1, t, t, t, t + interval 1 day, 201, 1, 'oversize' \
               from numbers, (select utc_timestamp(6) - interval 30 day as t) long_ago"
        );
        let mut connection = deep(self).await?;
        sqlx::raw_sql(AssertSqlSafe(fill)).execute(&mut *connection).await?;
        Ok(())
    }

    async fn fill_inbox(&self, consumer: &str, from: u64, to: u64) -> Result<(), StoreError> {
        let fill = format!(
            "insert into oncebox_inbox (consumer_id, message_id, content_hash, batch_token, received_at) \
             with recursive numbers as (select {from} as n union all select n + 1 from numbers where n < {to} - 1) \
             select c.consumer_id, unhex(concat(lpad(hex(t - 3600000 + n % 3600000), 12, '0'), '7', left(h, 3), '8', substr(h, 4, 15))), \
                 unhex(h), unhex(h), utc_timestamp(6) \
               from (select n, md5(n) as h from numbers) numbered, (select floor(unix_timestamp() * 1000) as t) clock, \
                 oncebox_consumer c where c.name = ?"
        );
        let mut connection = deep(self).await?;
        sqlx::query(AssertSqlSafe(fill)).bind(consumer).execute(&mut *connection).await?;
        Ok(())
    }

    plain_sql! {
        business: "update bench_account set balance = balance + 1 where account = ?",
        append: "insert into bench_message (bucket, message_id, topic, `key`, kind, headers, payload, content_type, created_at) \
                 values (?, ?, ?, ?, ?, ?, ?, ?, utc_timestamp(6))",
        all: "update bench_account a join (select account, count(*) as times \
              from json_table(?, '$[*]' columns (account bigint path '$')) j group by account) n on a.account = n.account \
              set a.balance = a.balance + n.times",
        effects: "select cast(sum(balance) as signed) from bench_account",
        payment: "insert into bench_payment (tenant, id, account_id, amount_minor, currency, merchant_reference, channel) \
                  values (?, ?, ?, ?, ?, ?, ?) on duplicate key update id = id",
        standing: "select id from bench_payment where tenant = ? and account_id = ? and merchant_reference = ?",
        open: "insert into bench_payer (tenant, account_id, balance_minor) values (?, ?, ?) on duplicate key update tenant = tenant",
        debit: "update bench_payer set balance_minor = balance_minor - ? \
                where tenant = ? and account_id = ? and balance_minor >= ?",
        inbox: "insert ignore into bench_inbox (consumer, id) values (1, ?)",
        ids: "insert ignore into bench_inbox (consumer, id) select 1, unhex(replace(id, '-', '')) \
              from json_table(?, '$[*]' columns (id char(36) path '$')) j",
        forget: "truncate table bench_inbox",
        claim: "insert into bench_request (id) values (?)",
        answer: "update bench_request set answer = ? where id = ?",
        mark: "update bench_outbox set published_at = now(6) where position = ?",
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
