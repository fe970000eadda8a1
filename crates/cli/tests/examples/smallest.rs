//! The smallest producer and the smallest consumer, one after the other.

use oncebox::store::Base;
use oncebox::store::StoreOptions;
use oncebox::store::sqlite::SqliteStore;
use sqlx::query_scalar;

use crate::stage::{ONCEBOX, PUBLISHER, Stage, finished, repeated};
use crate::support::example;

/// Shown by: an inbox that takes every message for new.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_order_of_the_smallest_producer_is_shipped_once_by_the_smallest_consumer() {
    let stage = Stage::new(None, None);
    let url = stage.settings.database.url.0.clone();
    stage.run(ONCEBOX, &["migrate", "up"]);
    for _ in 0..3 {
        let mut producer = stage.command(&example("producer"), &[], None);
        producer.env("ONCEBOX_DATABASE__URL", &url);
        assert!(finished(producer).contains("was placed"));
    }
    let relay_and_consume = || {
        stage.run(PUBLISHER, &["--until-empty"]);
        stage.run(&example("consumer"), &["--until-idle", "500ms"]);
    };
    relay_and_consume();

    let store = SqliteStore::connect(&StoreOptions::new(url)).await.unwrap();
    let published = stage.published("orders").await;
    assert_eq!(published.len(), 3);
    let mut tx = store.pool().begin().await.unwrap();
    oncebox::store::enqueue_all(&mut *tx, repeated(&published)).await.unwrap();
    oncebox::store::commit(tx).await.unwrap();
    relay_and_consume();

    assert_eq!(stage.published("orders").await.len(), 6, "every message is in the topic twice");
    let shipped = "select count(*) from shipment";
    let shipped: i64 = query_scalar(shipped).fetch_one(store.pool()).await.unwrap();
    let all = "select count(distinct order_id) from customer_order join shipment using (order_id, customer)";
    let all: i64 = query_scalar(all).fetch_one(store.pool()).await.unwrap();
    assert_eq!((shipped, all), (3, 3));
}
