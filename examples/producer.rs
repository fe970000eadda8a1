//! The smallest producer: a business row and a message, in one transaction of your own sqlx pool.
//!
//! Either both are there after it, or neither is: that is all an outbox needs. Nothing here knows
//! of a broker.

use oncebox::NewMessage;
use oncebox::sqlx::{SqlitePool, query, raw_sql};
use uuid::Uuid;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("ONCEBOX_DATABASE__URL").unwrap_or_else(|_| "sqlite://oncebox.db".to_owned());
    let pool = SqlitePool::connect(&url).await?;
    // Your migrations do this; `shipment` is what `consumer.rs` writes to.
    let tables = "create table if not exists customer_order (order_id text primary key, customer text not null);
                  create table if not exists shipment (order_id text not null, customer text not null)";
    raw_sql(tables).execute(&pool).await?;

    let (order, customer) = (format!("order-{}", Uuid::now_v7()), "acc-7");
    // The key keeps the order: messages of one customer are handled one after the other, as they
    // were committed.
    let message = NewMessage::json("orders", "order.placed", &(&order, customer))?.with_key(customer);

    let mut tx = pool.begin().await?;
    query("insert into customer_order (order_id, customer) values ($1, $2)")
        .bind(&order)
        .bind(customer)
        .execute(&mut *tx)
        .await?;
    let id = oncebox::store::enqueue(&mut *tx, message).await?;
    // As `tx.commit()`, but a lost connection is told apart: then nobody knows whether it was
    // committed.
    oncebox::store::commit(tx).await?;

    println!("{order} was placed, message {id}");
    Ok(())
}
