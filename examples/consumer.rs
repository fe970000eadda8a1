//! The smallest consumer: a handler, and the `consumer` program with it as its `main`.
//!
//! What the handler writes through `tx` is committed together with the note that this message was
//! handled. So it may be delivered ten times, to two processes at once, or to one that is killed in
//! the middle: there is one shipment.

use std::process::ExitCode;

use oncebox::app::HandlersByConsumer;
use oncebox::store::sqlite::SqliteStore;
use oncebox::{HandlerError, HandlerTx, Handlers, Message, MessageHandler, async_trait, sqlx};

struct Shipping;

#[async_trait]
impl MessageHandler<SqliteStore> for Shipping {
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, SqliteStore>) -> Result<(), HandlerError> {
        let (order, customer): (String, String) = message.json()?;
        sqlx::query("insert into shipment (order_id, customer) values ($1, $2)")
            .bind(order)
            .bind(customer)
            .execute(tx.connection())
            .await?;
        // No commit: `Ok` commits, together with the inbox row. Any error rolls back, and the
        // message is tried again.
        Ok(())
    }
}

fn main() -> ExitCode {
    let handlers = Handlers::new().on("order.placed", Shipping);
    oncebox::app::consumer(HandlersByConsumer::new().consumer("shipping", ["orders"], handlers))
}
