//! Takes payments: the business row and its message in one transaction.

use std::time::Duration;

use oncebox::app::AppError;
use oncebox::store::Base;
use oncebox::{NewMessage, StoreError, sqlx};
use uuid::Uuid;

use crate::Database;
use crate::payment::{CREATED, Payment};

/// Takes so many payments of ten accounts, one after the other.
pub(crate) async fn take_many(db: &Database, topic: &str, count: u32) -> Result<(), AppError> {
    for number in 0..count {
        let payment = Payment {
            payment_id: format!("pay_{}", Uuid::now_v7().simple()),
            account_id: format!("acc-{}", number % 10),
            amount_minor: i64::from(number % 100 + 1) * 95,
            currency: "EUR".to_owned(),
        };
        let message = NewMessage::json(topic, CREATED, &payment)
            .map_err(|error| AppError::failed(format!("{}: {error}", payment.payment_id)))?
            .with_key(&payment.account_id);
        take(db, &payment, message).await?;
    }
    println!("{count} payments taken");
    Ok(())
}

/// Takes one payment, whatever happens to the connection meanwhile.
async fn take(db: &Database, payment: &Payment, message: NewMessage) -> Result<(), StoreError> {
    loop {
        match try_to_take(db, payment, message.clone()).await {
            // The database is busy or away, or the connection was lost in the middle of COMMIT, so
            // that nobody knows whether it was committed. Guessing would lose the payment or take
            // it twice; the same again finds out, see below.
            Err(error) if error.is_transient() => {
                tracing::warn!(payment = payment.payment_id, %error, "once more");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            ended => return ended,
        }
    }
}

async fn try_to_take(db: &Database, payment: &Payment, message: NewMessage) -> Result<(), StoreError> {
    let mut tx = db.pool().begin().await?;
    let inserted = sqlx::query(
        "insert into payment (payment_id, account_id, amount_minor, currency) values ($1, $2, $3, $4)
         on conflict (payment_id) do nothing",
    )
    .bind(&payment.payment_id)
    .bind(&payment.account_id)
    .bind(payment.amount_minor)
    .bind(&payment.currency)
    .execute(&mut *tx)
    .await?;
    if inserted.rows_affected() == 0 {
        // An earlier try was committed after all, and its message with it.
        return Ok(());
    }
    oncebox::store::enqueue(&mut *tx, message).await?;
    oncebox::store::commit(tx).await
}
