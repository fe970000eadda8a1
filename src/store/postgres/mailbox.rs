//! Queues an e-mail in the caller's transaction.

use sqlx::PgConnection;

use crate::email::port::NewEmail;
use crate::error::StoreError;

/// Inserts the e-mail. Returns false where its unique key is there already.
pub(super) async fn queue(connection: &mut PgConnection, email: &NewEmail) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "insert into oncebox.email (unique_key, recipient, subject, body) values ($1, $2, $3, $4)
         on conflict (unique_key) do nothing",
    )
    .bind(&email.unique_key)
    .bind(&email.recipient)
    .bind(&email.subject)
    .bind(&email.body)
    .execute(connection)
    .await?;
    Ok(done.rows_affected() == 1)
}
