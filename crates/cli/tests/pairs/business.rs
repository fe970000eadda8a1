//! The business side of a pair: payments written with their messages, and tables read back, on
//! three databases.

use oncebox::broker::Broker;
use oncebox::message::NewMessage;
use oncebox::store::{Base, Store, StoreOptions};

use crate::checker::Entry;

/// Tables of payments and ledger in a database of their own.
pub(crate) trait Business: Store {
    const ENTRY_ID: &'static str;

    async fn run(&self, sql: &str);
    async fn entries(&self, sql: &str) -> Vec<Entry>;
    async fn number(&self, sql: &str) -> i64;
    /// Payments and their messages in one transaction.
    async fn pay(&self, entries: &[Entry], topic: &str) -> Result<(), oncebox::StoreError>;

    async fn set_up(url: &str) -> Self {
        let options = StoreOptions { create: true, ..StoreOptions::new(url) };
        let store = Self::connect(&options).await.unwrap();
        store.migrate().await.unwrap();
        let columns = "payment varchar(64) not null, account varchar(64) not null, number bigint not null, amount bigint not null";
        store.run(&format!("create table payment ({columns}, primary key (payment))")).await;
        // No unique key: nothing but the inbox keeps a second entry out.
        store.run(&format!("create table ledger ({}, {columns})", Self::ENTRY_ID)).await;
        store
    }

    async fn payments(&self) -> Vec<Entry> {
        self.entries("select payment, account, number, amount from payment").await
    }

    async fn ledger(&self) -> Vec<Entry> {
        self.entries("select payment, account, number, amount from ledger order by entry_id").await
    }

    async fn ledger_count(&self) -> i64 {
        self.number("select count(*) from ledger").await
    }
}

macro_rules! business {
    ($store:path, $entry_id:literal, $insert:literal) => {
        impl Business for $store {
            const ENTRY_ID: &'static str = $entry_id;

            async fn run(&self, sql: &str) {
                sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned())).execute(self.pool()).await.unwrap();
            }

            async fn entries(&self, sql: &str) -> Vec<Entry> {
                let sql = sqlx::AssertSqlSafe(sql.to_owned());
                let rows: Vec<(String, String, i64, i64)> = sqlx::query_as(sql).fetch_all(self.pool()).await.unwrap();
                let entry = |(payment, account, number, amount)| Entry { payment, account, number, amount };
                rows.into_iter().map(entry).collect()
            }

            async fn number(&self, sql: &str) -> i64 {
                sqlx::query_scalar(sqlx::AssertSqlSafe(sql.to_owned())).fetch_one(self.pool()).await.unwrap()
            }

            async fn pay(&self, entries: &[Entry], topic: &str) -> Result<(), oncebox::StoreError> {
                let mut tx = self.pool().begin().await?;
                let mut messages = Vec::new();
                for entry in entries {
                    sqlx::query($insert)
                        .bind(&entry.payment)
                        .bind(&entry.account)
                        .bind(entry.number)
                        .bind(entry.amount)
                        .execute(&mut *tx)
                        .await?;
                    let payload = serde_json::json!({
                        "payment": entry.payment, "account": entry.account, "number": entry.number, "amount": entry.amount
                    });
                    let message = NewMessage::json(topic, "payment.created", &payload).unwrap();
                    messages.push(message.with_key(entry.account.clone()));
                }
                oncebox::store::enqueue_all(&mut *tx, messages).await?;
                oncebox::store::commit(tx).await
            }
        }
    };
}

business!(
    oncebox::store::postgres::PostgresStore,
    "entry_id bigint generated always as identity primary key",
    "insert into payment (payment, account, number, amount) values ($1, $2, $3, $4)"
);
business!(
    oncebox::store::mysql::MySqlStore,
    "entry_id bigint auto_increment primary key",
    "insert into payment (payment, account, number, amount) values (?, ?, ?, ?)"
);
business!(
    oncebox::store::sqlite::SqliteStore,
    "entry_id integer primary key autoincrement",
    "insert into payment (payment, account, number, amount) values (?, ?, ?, ?)"
);

/// The topic as it stands, read without a group.
pub(crate) async fn topic(broker: &dyn Broker, topic: &str) -> Vec<Entry> {
    #[derive(serde::Deserialize)]
    struct Payload {
        payment: String,
        account: String,
        number: i64,
        amount: i64,
    }
    let records = broker.read_all(topic).await.unwrap();
    let entry = |record: oncebox::message::Arrived| {
        let payload: Payload = serde_json::from_slice(&record.payload.unwrap()).unwrap();
        assert_eq!(record.key.as_deref(), Some(payload.account.as_bytes()), "the key is the account");
        Entry { payment: payload.payment, account: payload.account, number: payload.number, amount: payload.amount }
    };
    records.into_iter().map(entry).collect()
}
