//! The code of the guide docs/guides/write-a-consumer.md, as it stands there.
#![allow(dead_code, clippy::unwrap_used)]

use std::process::ExitCode;

use oncebox::app::HandlersByConsumer;
use oncebox::store::sqlite::SqliteStore;
use oncebox::{HandlerError, HandlerTx, Handlers, Message, MessageHandler, async_trait, sqlx};

struct Ledger;

#[async_trait]
impl MessageHandler<SqliteStore> for Ledger {
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, SqliteStore>) -> Result<(), HandlerError> {
        let (account, cents): (String, i64) = message.json()?;
        if cents <= 0 {
            return Err(HandlerError::terminal(format!("{cents} cents cannot be booked")));
        }
        let insert = sqlx::query("insert into ledger (account, cents) values (?, ?)");
        insert.bind(account).bind(cents).execute(tx.connection()).await?;
        Ok(())
    }
}

fn handlers() -> Handlers<SqliteStore> {
    Handlers::new().on("payment.created", Ledger)
}

fn main() -> ExitCode {
    oncebox::app::consumer(HandlersByConsumer::new().consumer("ledger", ["payments"], handlers()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use oncebox::broker::Broker;
    use oncebox::broker::embedded::{EmbeddedBroker, EmbeddedConfig};
    use oncebox::message::MessageId;
    use oncebox::observe::Health;
    use oncebox::sqlx::{query_scalar, raw_sql};
    use oncebox::store::sqlite::SqliteStore;
    use oncebox::store::{Base, Operator, Schema, StoreOptions};
    use oncebox::{Consumer, ConsumerOptions, NewMessage, Relay, RelayOptions};
    use tokio_util::sync::CancellationToken;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_payment_is_booked_once_and_a_bad_one_is_dead() -> Result<(), Box<dyn std::error::Error>> {
        let directory = tempfile::tempdir()?;
        let url = format!("sqlite://{}", directory.path().join("test.db").display());
        let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(url) }).await?;
        store.migrate().await?;
        raw_sql("create table ledger (account text not null, cents integer not null)").execute(store.pool()).await?;
        let config = EmbeddedConfig::new(directory.path().join("broker.db"));
        let broker: Arc<dyn Broker> = Arc::new(EmbeddedBroker::open(config).await?);
        broker.declare(&["payments".to_owned()]).await?;

        let payment = |cents: i64| NewMessage::json("payments", "payment.created", &("acc-7", cents));
        let good = payment(100)?.with_key("acc-7").with_id(MessageId::new().uuid());
        let bad = payment(-1)?.with_key("acc-8");
        let mut tx = store.pool().begin_with("BEGIN IMMEDIATE").await?;
        oncebox::enqueue_all(&mut *tx, vec![good.clone(), good, bad]).await?; // the good one comes twice
        oncebox::commit(tx).await?;

        let options = RelayOptions { until_empty: true, ..RelayOptions::new("test") };
        let relay = Relay::new(store.clone(), Arc::clone(&broker), options, Health::default());
        relay.run(CancellationToken::new()).await?;
        let options = ConsumerOptions {
            lanes: 1,
            retriers: 1,
            until_idle: Some(Duration::from_millis(200)),
            ..ConsumerOptions::new("ledger", vec!["payments".to_owned()])
        };
        let consumer = Consumer::new(store.clone(), broker, super::handlers(), options, Health::default());
        consumer.run(CancellationToken::new()).await?;

        let booked: i64 = query_scalar("select count(*) from ledger").fetch_one(store.pool()).await?;
        assert_eq!((booked, store.status().await?.consumers[0].dead), (1, 1));
        Ok(())
    }
}

#[test]
fn the_guide_shows_the_code_that_is_tested_here() {
    let (page, here) = (include_str!("../../docs/guides/write-a-consumer.md"), include_str!("guide.rs"));
    let blocks: Vec<&str> =
        page.split("```rust,no_run\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert_eq!(blocks.len(), 2);
    for block in blocks {
        assert!(here.contains(block), "{block}");
    }
}
