//! The rows of the business, in three dialects.

use std::future::Future;

use oncebox::sqlx::{self, AssertSqlSafe, ColumnIndex, Database, Decode, Row, Type};
use oncebox::store::Base;
use oncebox::store::mysql::MySqlStore;
use oncebox::store::postgres::PostgresStore;
use oncebox::store::sqlite::SqliteStore;
use serde::Serialize;

use crate::charge_rows::ChargeRows;

pub(crate) type Connection<S> = <<S as Base>::Db as Database>::Connection;

/// What an account has that was never put.
pub(crate) const BALANCE: i64 = 1_000_000_000;

/// A payment as it stands in its table, and as it is shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Payment {
    pub(crate) id: String,
    pub(crate) status: &'static str,
    pub(crate) account_id: String,
    pub(crate) amount_minor: i64,
    pub(crate) currency: String,
    pub(crate) merchant_reference: String,
    pub(crate) channel: String,
}

impl Payment {
    /// From a row that begins with id, account, amount, currency, reference and channel.
    pub(crate) fn of<R: Row>(row: &R, status: &'static str) -> Result<Self, sqlx::Error>
    where
        usize: ColumnIndex<R>,
        String: for<'r> Decode<'r, R::Database> + Type<R::Database>,
        i64: for<'r> Decode<'r, R::Database> + Type<R::Database>,
    {
        Ok(Self {
            id: row.try_get(0)?,
            status,
            account_id: row.try_get(1)?,
            amount_minor: row.try_get(2)?,
            currency: row.try_get(3)?,
            merchant_reference: row.try_get(4)?,
            channel: row.try_get(5)?,
        })
    }
}

/// The statements of the business.
pub(crate) trait Books: ChargeRows {
    /// Makes the tables that are not there.
    fn make_tables(&self) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Inserts first, then reads what stands under (tenant, account, reference): this payment, or
    /// an earlier one.
    fn add_payment(
        connection: &mut Connection<Self>,
        tenant: &str,
        payment: &Payment,
    ) -> impl Future<Output = Result<Payment, sqlx::Error>> + Send;

    /// Takes from an account; false where there is too little.
    fn debit(
        connection: &mut Connection<Self>,
        tenant: &str,
        account: &str,
        amount: i64,
    ) -> impl Future<Output = Result<bool, sqlx::Error>> + Send;

    /// A payment of this tenant.
    fn payment(&self, tenant: &str, id: &str) -> impl Future<Output = Result<Option<Payment>, sqlx::Error>> + Send;

    /// Sets a balance.
    fn put_account(
        &self,
        tenant: &str,
        account: &str,
        balance: i64,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Writes a note.
    fn add_note(&self, tenant: &str, id: &str, text: &str) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// A note of this tenant.
    fn note(&self, tenant: &str, id: &str) -> impl Future<Output = Result<Option<String>, sqlx::Error>> + Send;
}

macro_rules! tables {
    ($text:literal) => {
        [
            concat!(
                "create table if not exists account (tenant ",
                $text,
                " not null, account_id ",
                $text,
                " not null, balance_minor bigint not null, primary key (tenant, account_id))"
            ),
            // A business constraint beside the key: a client that makes a new key for the same
            // order pays once.
            concat!(
                "create table if not exists payment (tenant ",
                $text,
                " not null, id ",
                $text,
                " not null, account_id ",
                $text,
                " not null, amount_minor bigint not null, currency char(3) not null, merchant_reference ",
                $text,
                " not null, channel ",
                $text,
                " not null, primary key (tenant, id), unique (tenant, account_id, merchant_reference))"
            ),
            concat!(
                "create table if not exists note (tenant ",
                $text,
                " not null, id ",
                $text,
                " not null, text text not null, primary key (tenant, id))"
            ),
        ]
    };
}

macro_rules! payment_columns {
    () => {
        "select id, account_id, amount_minor, currency, merchant_reference, channel from payment "
    };
}

macro_rules! books {
    ($store:ty, $tables:expr, $first:literal, $add_payment:literal, $standing:expr, $debit:literal, $payment:expr, $put:literal, $add_note:literal, $note:literal) => {
        impl Books for $store {
            async fn make_tables(&self) -> Result<(), sqlx::Error> {
                for table in $tables {
                    sqlx::query(AssertSqlSafe(table)).execute(self.pool()).await?;
                }
                Ok(())
            }

            async fn add_payment(
                connection: &mut Connection<Self>,
                tenant: &str,
                payment: &Payment,
            ) -> Result<Payment, sqlx::Error> {
                sqlx::query($add_payment)
                    .bind(tenant)
                    .bind(&payment.id)
                    .bind(&payment.account_id)
                    .bind(payment.amount_minor)
                    .bind(&payment.currency)
                    .bind(&payment.merchant_reference)
                    .bind(&payment.channel)
                    .execute(&mut *connection)
                    .await?;
                let standing = sqlx::query($standing)
                    .bind(tenant)
                    .bind(&payment.account_id)
                    .bind(&payment.merchant_reference)
                    .fetch_one(connection)
                    .await?;
                Payment::of(&standing, "settled")
            }

            async fn debit(
                connection: &mut Connection<Self>,
                tenant: &str,
                account: &str,
                amount: i64,
            ) -> Result<bool, sqlx::Error> {
                sqlx::query($first).bind(tenant).bind(account).bind(BALANCE).execute(&mut *connection).await?;
                let debited = sqlx::query($debit)
                    .bind(amount)
                    .bind(tenant)
                    .bind(account)
                    .bind(amount)
                    .execute(connection)
                    .await?;
                Ok(debited.rows_affected() == 1)
            }

            async fn payment(&self, tenant: &str, id: &str) -> Result<Option<Payment>, sqlx::Error> {
                let row = sqlx::query($payment).bind(tenant).bind(id).fetch_optional(self.pool()).await?;
                row.map(|row| Payment::of(&row, "settled")).transpose()
            }

            async fn put_account(&self, tenant: &str, account: &str, balance: i64) -> Result<(), sqlx::Error> {
                let put = sqlx::query($put).bind(tenant).bind(account).bind(balance);
                put.execute(self.pool()).await.map(drop)
            }

            async fn add_note(&self, tenant: &str, id: &str, text: &str) -> Result<(), sqlx::Error> {
                sqlx::query($add_note).bind(tenant).bind(id).bind(text).execute(self.pool()).await.map(drop)
            }

            async fn note(&self, tenant: &str, id: &str) -> Result<Option<String>, sqlx::Error> {
                sqlx::query_scalar($note).bind(tenant).bind(id).fetch_optional(self.pool()).await
            }
        }
    };
}

macro_rules! with_dollars {
    ($store:ty) => {
        books!(
            $store,
            tables!("varchar(64)"),
            "insert into account (tenant, account_id, balance_minor) values ($1, $2, $3) on conflict do nothing",
            "insert into payment (tenant, id, account_id, amount_minor, currency, merchant_reference, channel) \
             values ($1, $2, $3, $4, $5, $6, $7) on conflict do nothing",
            concat!(payment_columns!(), "where tenant = $1 and account_id = $2 and merchant_reference = $3"),
            "update account set balance_minor = balance_minor - $1 \
             where tenant = $2 and account_id = $3 and balance_minor >= $4",
            concat!(payment_columns!(), "where tenant = $1 and id = $2"),
            "insert into account (tenant, account_id, balance_minor) values ($1, $2, $3) \
             on conflict (tenant, account_id) do update set balance_minor = excluded.balance_minor",
            "insert into note (tenant, id, text) values ($1, $2, $3)",
            "select text from note where tenant = $1 and id = $2"
        );
    };
}

with_dollars!(PostgresStore);
with_dollars!(SqliteStore);
books!(
    MySqlStore,
    // Compared byte for byte, trailing blanks too.
    tables!("varchar(64) character set utf8mb4 collate utf8mb4_nopad_bin"),
    "insert into account (tenant, account_id, balance_minor) values (?, ?, ?) on duplicate key update tenant = tenant",
    "insert into payment (tenant, id, account_id, amount_minor, currency, merchant_reference, channel) \
     values (?, ?, ?, ?, ?, ?, ?) on duplicate key update id = id",
    concat!(payment_columns!(), "where tenant = ? and account_id = ? and merchant_reference = ?"),
    "update account set balance_minor = balance_minor - ? where tenant = ? and account_id = ? and balance_minor >= ?",
    concat!(payment_columns!(), "where tenant = ? and id = ?"),
    "insert into account (tenant, account_id, balance_minor) values (?, ?, ?) \
     on duplicate key update balance_minor = values(balance_minor)",
    "insert into note (tenant, id, text) values (?, ?, ?)",
    "select text from note where tenant = ? and id = ?"
);
