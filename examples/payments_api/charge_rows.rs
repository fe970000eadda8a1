//! The rows of charges, in three dialects.
//!
//! A reference is taken by a charge that is not failed: `live_reference` is null for a failed one,
//! and nulls are no duplicates.

use std::future::Future;

use oncebox::sqlx::{self, AssertSqlSafe, ColumnIndex, Database, Decode, Row, Type};
use oncebox::store::mysql::MySqlStore;
use oncebox::store::postgres::PostgresStore;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, OperationStore};

use crate::books::Payment;

type Connection<S> = <<S as Base>::Db as Database>::Connection;

/// A charge and the operation that made it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Charge {
    pub(crate) payment: Payment,
    pub(crate) operation_id: String,
}

impl Charge {
    /// From a row of the columns that are selected here.
    fn of<R: Row>(row: &R) -> Result<Self, sqlx::Error>
    where
        usize: ColumnIndex<R>,
        String: for<'r> Decode<'r, R::Database> + Type<R::Database>,
        i64: for<'r> Decode<'r, R::Database> + Type<R::Database>,
    {
        let status: String = row.try_get(6)?;
        let status = ["settled", "failed"].into_iter().find(|known| *known == status).unwrap_or("pending");
        Ok(Self { payment: Payment::of(row, status)?, operation_id: row.try_get(7)? })
    }
}

/// The statements of charges.
pub(crate) trait ChargeRows: OperationStore {
    /// Makes the table if it is not there.
    fn make_charges(&self) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Inserts first, then reads what stands under (tenant, account, reference): this charge, or an
    /// earlier one that did not fail. None: an earlier one failed just now.
    fn add_charge(
        connection: &mut Connection<Self>,
        tenant: &str,
        charge: &Charge,
    ) -> impl Future<Output = Result<Option<Charge>, sqlx::Error>> + Send;

    /// It succeeded.
    fn settle_charge(
        connection: &mut Connection<Self>,
        tenant: &str,
        id: &str,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// It failed: its reference is free.
    fn fail_charge(
        connection: &mut Connection<Self>,
        tenant: &str,
        id: &str,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// A charge of this tenant.
    fn charge(&self, tenant: &str, id: &str) -> impl Future<Output = Result<Option<Payment>, sqlx::Error>> + Send;
}

macro_rules! table {
    ($text:literal) => {
        concat!(
            "create table if not exists charge (tenant ",
            $text,
            " not null, id ",
            $text,
            " not null, operation_id char(36) not null, account_id ",
            $text,
            " not null, amount_minor bigint not null, currency char(3) not null, merchant_reference ",
            $text,
            " not null, live_reference ",
            $text,
            ", channel ",
            $text,
            " not null, status varchar(16) not null, primary key (tenant, id), \
             unique (tenant, account_id, live_reference))"
        )
    };
}

macro_rules! columns {
    () => {
        "select id, account_id, amount_minor, currency, merchant_reference, channel, status, operation_id from charge "
    };
}

macro_rules! charge_rows {
    ($store:ty, $table:expr, $add:literal, $standing:expr, $settle:literal, $fail:literal, $one:expr) => {
        impl ChargeRows for $store {
            async fn make_charges(&self) -> Result<(), sqlx::Error> {
                sqlx::query(AssertSqlSafe($table)).execute(self.pool()).await.map(drop)
            }

            async fn add_charge(
                connection: &mut Connection<Self>,
                tenant: &str,
                charge: &Charge,
            ) -> Result<Option<Charge>, sqlx::Error> {
                let payment = &charge.payment;
                sqlx::query($add)
                    .bind(tenant)
                    .bind(&payment.id)
                    .bind(&charge.operation_id)
                    .bind(&payment.account_id)
                    .bind(payment.amount_minor)
                    .bind(&payment.currency)
                    .bind(&payment.merchant_reference)
                    .bind(&payment.merchant_reference)
                    .bind(&payment.channel)
                    .bind(payment.status)
                    .execute(&mut *connection)
                    .await?;
                let standing = sqlx::query($standing)
                    .bind(tenant)
                    .bind(&payment.account_id)
                    .bind(&payment.merchant_reference)
                    .fetch_optional(connection)
                    .await?;
                standing.map(|row| Charge::of(&row)).transpose()
            }

            async fn settle_charge(
                connection: &mut Connection<Self>,
                tenant: &str,
                id: &str,
            ) -> Result<(), sqlx::Error> {
                sqlx::query($settle).bind(tenant).bind(id).execute(connection).await.map(drop)
            }

            async fn fail_charge(connection: &mut Connection<Self>, tenant: &str, id: &str) -> Result<(), sqlx::Error> {
                sqlx::query($fail).bind(tenant).bind(id).execute(connection).await.map(drop)
            }

            async fn charge(&self, tenant: &str, id: &str) -> Result<Option<Payment>, sqlx::Error> {
                let row = sqlx::query($one).bind(tenant).bind(id).fetch_optional(self.pool()).await?;
                row.map(|row| Ok(Charge::of(&row)?.payment)).transpose()
            }
        }
    };
}

macro_rules! with_dollars {
    ($store:ty) => {
        charge_rows!(
            $store,
            table!("varchar(64)"),
            "insert into charge (tenant, id, operation_id, account_id, amount_minor, currency, merchant_reference, \
             live_reference, channel, status) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) on conflict do nothing",
            concat!(columns!(), "where tenant = $1 and account_id = $2 and live_reference = $3"),
            "update charge set status = 'settled' where tenant = $1 and id = $2",
            "update charge set status = 'failed', live_reference = null where tenant = $1 and id = $2",
            concat!(columns!(), "where tenant = $1 and id = $2")
        );
    };
}

with_dollars!(PostgresStore);
with_dollars!(SqliteStore);
charge_rows!(
    MySqlStore,
    table!("varchar(64) character set utf8mb4 collate utf8mb4_nopad_bin"),
    "insert into charge (tenant, id, operation_id, account_id, amount_minor, currency, merchant_reference, \
     live_reference, channel, status) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) on duplicate key update id = id",
    concat!(columns!(), "where tenant = ? and account_id = ? and live_reference = ?"),
    "update charge set status = 'settled' where tenant = ? and id = ?",
    "update charge set status = 'failed', live_reference = null where tenant = ? and id = ?",
    concat!(columns!(), "where tenant = ? and id = ?")
);
