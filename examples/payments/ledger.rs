//! Keeps the ledger: two entries for each payment, which add up to nothing.

use oncebox::{HandlerError, HandlerTx, Message, MessageHandler, async_trait, sqlx};

use crate::Database;
use crate::payment::Payment;

/// Double-entry bookkeeping of payments.
#[derive(Debug)]
pub(crate) struct Ledger;

#[async_trait]
impl MessageHandler<Database> for Ledger {
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, Database>) -> Result<(), HandlerError> {
        // What is no payment today will be none tomorrow: this error is terminal, the message is
        // dead at once and visible.
        let payment: Payment = message.json()?;
        let entries = [(payment.account_id.as_str(), -payment.amount_minor), ("revenue", payment.amount_minor)];
        for (account, amount) in entries {
            // Through the given transaction, which also holds the inbox row. A pool of your own
            // would be another transaction, and a delivery that comes twice would be booked twice.
            sqlx::query("insert into ledger_entry (payment_id, account_id, amount_minor) values ($1, $2, $3)")
                .bind(&payment.payment_id)
                .bind(account)
                .bind(amount)
                .execute(tx.connection())
                .await?;
        }
        Ok(())
    }
}
