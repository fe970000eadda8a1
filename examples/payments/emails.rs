//! Writes receipts: an e-mail row, committed with the inbox row. `oncebox sender` sends it.

use oncebox::store::NewEmail;
use oncebox::{HandlerError, HandlerTx, Message, MessageHandler, async_trait};

use crate::Database;
use crate::payment::Payment;

/// A receipt for each payment.
#[derive(Debug)]
pub(crate) struct Receipts;

#[async_trait]
impl MessageHandler<Database> for Receipts {
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, Database>) -> Result<(), HandlerError> {
        let payment: Payment = message.json()?;
        // Sending here would send again with every rollback and redelivery. A row can be rolled
        // back, an e-mail cannot.
        let email = NewEmail {
            // Of the payment, not of the message: the same receipt for another message is not
            // written again. The Message-ID is made from it, so a second sending after a crash can
            // be told by the mail server.
            unique_key: format!("receipt_{}", payment.payment_id),
            recipient: format!("{}@example.com", payment.account_id),
            subject: format!("Your payment {}", payment.payment_id),
            body: format!("We received {} minor units of {}.\n", payment.amount_minor, payment.currency),
        };
        tx.queue_email(&email).await?;
        Ok(())
    }
}
