//! Tells the outside provider of payments, the first half: a row. `provider_sender.rs` is the
//! second.
//!
//! A call to the provider from the handler could not be rolled back and would be made again with
//! each redelivery. The row is an effect like any other: exactly one, committed with the inbox row.

use oncebox::{HandlerError, HandlerTx, Message, MessageHandler, async_trait, sqlx};

use crate::Database;
use crate::payment::Payment;

/// A notification row for each payment.
#[derive(Debug)]
pub(crate) struct Notifications;

#[async_trait]
impl MessageHandler<Database> for Notifications {
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, Database>) -> Result<(), HandlerError> {
        let payment: Payment = message.json()?;
        // Key and body are fixed here, once and for all tries: a provider recognises a request by
        // its key, and refuses the key with another body. So the key says what is told, never which
        // try it is.
        let key = format!("payment-created-{}", payment.payment_id);
        let body = serde_json::to_string(&payment)?;
        sqlx::query("insert into provider_notification (provider_key, body) values ($1, $2)")
            .bind(key)
            .bind(body)
            .execute(tx.connection())
            .await?;
        Ok(())
    }
}
