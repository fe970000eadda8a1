//! Queues an e-mail in the caller's transaction.

use sqlx::query;
use sqlx::sqlite::SqliteConnection;

use super::now_ms;
use crate::email::port::NewEmail;
use crate::error::StoreError;

/// Inserts the e-mail. Returns false where its unique key is there already.
pub(super) async fn queue(connection: &mut SqliteConnection, email: &NewEmail) -> Result<bool, StoreError> {
    let insert = query(concat!(
        "insert into oncebox_email (unique_key, recipient, subject, body, due_at, created_at) values (?, ?, ?, ?, ",
        now_ms!(),
        ", ",
        now_ms!(),
        ") on conflict (unique_key) do nothing"
    ));
    let NewEmail { unique_key, recipient, subject, body } = email;
    let insert = insert.bind(unique_key).bind(recipient).bind(subject).bind(body);
    Ok(insert.execute(connection).await?.rows_affected() == 1)
}
