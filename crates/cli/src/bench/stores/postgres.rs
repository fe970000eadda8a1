//! The plain SQL of the benchmarks for PostgreSQL.

use std::time::{Duration, Instant};

use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row};
use uuid::Uuid;

use super::plain_sql;
use crate::bench::keys::OLD;
use crate::bench::yard::{ACCOUNTS, Connection, Effects, Yard};
use oncebox::StoreError;
use oncebox::app::AppError;
use oncebox::message::{NewMessage, OutgoingMessage};
use oncebox::store::Base;
use oncebox::store::postgres::PostgresStore;

const COLUMNS: &str = "position, message_id, topic, key, kind, headers::text, payload, content_type, created_at";

fn message(row: &PgRow) -> Result<(i64, OutgoingMessage), StoreError> {
    let message = OutgoingMessage {
        id: row.try_get_unchecked(1)?,
        topic: row.try_get_unchecked(2)?,
        key: row.try_get_unchecked(3)?,
        kind: row.try_get_unchecked(4)?,
        headers: Vec::new(),
        payload: row.try_get_unchecked(6)?,
        content_type: row.try_get_unchecked(7)?,
        trace: None,
        created_at: row.try_get_unchecked(8)?,
    };
    Ok((row.try_get_unchecked(0)?, message))
}

impl Yard for PostgresStore {
    const WRITERS: usize = 16;

    async fn make_tables(&self) -> Result<(), AppError> {
        let tables = format!(
            "create table bench_account (account bigint primary key, balance bigint not null) with (fillfactor = 50);
             insert into bench_account select n, 0 from generate_series(0, {}) n;
             create table bench_payer (tenant varchar(64) not null, account_id varchar(64) not null, balance_minor bigint not null,
               primary key (tenant, account_id));
             create table bench_payment (tenant varchar(64) not null, id varchar(64) not null, account_id varchar(64) not null,
               amount_minor bigint not null, currency char(3) not null, merchant_reference varchar(64) not null, channel varchar(64) not null,
               primary key (tenant, id), unique (tenant, account_id, merchant_reference));
             create table bench_inbox (consumer smallint not null, id uuid not null, primary key (consumer, id));
             create table bench_message (like oncebox.outbox including defaults);
             alter table bench_message alter position drop default, alter position add generated always as identity, add primary key (position);
             create index on bench_message (message_id);
             create table bench_request (id uuid primary key, answer bytea)",
            ACCOUNTS - 1
        );
        sqlx::raw_sql(AssertSqlSafe(tables)).execute(self.pool()).await.map_err(StoreError::from)?;
        Ok(())
    }

    async fn copy_with_status(&self, rows: usize) -> Result<(), StoreError> {
        let copy = format!(
            "drop table if exists bench_outbox;
             create table bench_outbox as select o.*, null::timestamptz as published_at
               from oncebox.outbox o order by position desc limit {rows};
             alter table bench_outbox add primary key (position);
             create index on bench_outbox (position) where published_at is null;
             analyze bench_outbox"
        );
        sqlx::raw_sql(AssertSqlSafe(copy)).execute(self.pool()).await?;
        Ok(())
    }

    async fn fill_keys(&self, from: u64, to: u64) -> Result<(), StoreError> {
        let fill = format!(
            "insert into oncebox.idempotency_request (key_digest, tenant, operation, key, principal, fingerprint, mode, state, \
               operation_id, created_at, updated_at, outcome_at, expires_at, answer_status, schema_version, body) \
             select sha256(('old' || n)::bytea), 't1', '{OLD}', ('old-' || n)::bytea, 'sha256:' || repeat('0', 64), \
               '1:sha256:' || repeat('0', 64), 'same_tx', 'COMPLETED', gen_random_uuid(), now() - interval '30 days', \
               now() - interval '30 days', now() - interval '30 days', now() - interval '29 days', 201, 1, 'oversize' \
               from generate_series({from}, {to} - 1) n"
        );
        sqlx::raw_sql(AssertSqlSafe(fill)).execute(self.pool()).await?;
        Ok(())
    }

    async fn fill_inbox(&self, consumer: &str, from: u64, to: u64) -> Result<(), StoreError> {
        let fill = format!(
            "insert into oncebox.inbox_timed (consumer_id, message_id, content_hash) \
             select c.consumer_id, (lpad(to_hex((extract(epoch from now()) * 1000)::bigint - 3600000 + n % 3600000), 12, '0') \
                 || '7' || left(h, 3) || '8' || substr(h, 4, 15))::uuid, gen_random_uuid() \
               from oncebox.consumer c, generate_series({from}, {to} - 1) n, md5(n::text) h where c.name = $1"
        );
        sqlx::query(AssertSqlSafe(fill)).bind(consumer).execute(self.pool()).await?;
        Ok(())
    }

    async fn log_written(&self) -> Result<Option<f64>, StoreError> {
        let bytes = "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8";
        Ok(Some(sqlx::query_scalar(bytes).fetch_one(self.pool()).await?))
    }

    async fn left_behind(&self) -> Result<Option<f64>, StoreError> {
        // A server process reports its numbers when it ends, at the latest.
        let others = "select count(*) from pg_stat_activity
                       where datname = current_database() and backend_type = 'client backend' and state = 'idle'
                         and pid <> pg_backend_pid()";
        let ours = i64::from(self.pool().size()) - 1;
        let deadline = Instant::now() + Duration::from_secs(5);
        while sqlx::query_scalar::<_, i64>(others).fetch_one(self.pool()).await? > ours && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let versions = "select coalesce(sum(n_tup_upd + n_tup_del), 0)::float8 from pg_stat_user_tables
                         where schemaname = 'oncebox'";
        Ok(Some(sqlx::query_scalar(versions).fetch_one(self.pool()).await?))
    }

    plain_sql! {
        business: "update bench_account set balance = balance + 1 where account = $1",
        append: "insert into bench_message (bucket, message_id, topic, key, kind, headers, payload, content_type) \
                 values ($1, $2, $3, $4, $5, $6::text::json, $7, $8)",
        all: "update bench_account a set balance = a.balance + n.times \
              from (select account, count(*) as times from unnest($1::bigint[]) account group by account) n \
              where a.account = n.account",
        effects: "select sum(balance)::bigint from bench_account",
        payment: "insert into bench_payment (tenant, id, account_id, amount_minor, currency, merchant_reference, channel) \
                  values ($1, $2, $3, $4, $5, $6, $7) on conflict do nothing",
        standing: "select id from bench_payment where tenant = $1 and account_id = $2 and merchant_reference = $3",
        open: "insert into bench_payer (tenant, account_id, balance_minor) values ($1, $2, $3) on conflict do nothing",
        debit: "update bench_payer set balance_minor = balance_minor - $1 \
                where tenant = $2 and account_id = $3 and balance_minor >= $4",
        inbox: "insert into bench_inbox (consumer, id) values (1, $1) on conflict do nothing",
        ids: "insert into bench_inbox (consumer, id) select 1, id from unnest($1::uuid[]) id on conflict do nothing",
        forget: "truncate bench_inbox",
        claim: "insert into bench_request (id) values ($1)",
        answer: "update bench_request set answer = $1 where id = $2",
        mark: "update bench_outbox set published_at = now() where position = $1",
        read: AssertSqlSafe(format!(
            "select {COLUMNS} from oncebox.outbox where position > $1 order by position limit 1000"
        )),
        unmarked: AssertSqlSafe(format!(
            "select {COLUMNS} from bench_outbox where published_at is null order by position limit 100"
        )),
        row: message,
        id: std::convert::identity,
        list: <[_]>::to_vec
    }
}
