//! Queues an e-mail in the caller's transaction.
//!
//! Guarantees: one row per unique key, decided by the key (the plain insert fails with 1062, which
//! undoes only that statement on MySQL); a value that a server without strict mode would shorten is
//! refused before.

use sqlx::MySqlConnection;

use super::inserted;
use crate::error::StoreError;
use crate::outbox::enqueue::NewEmail;

const UNIQUE_KEY_BYTES_MAX: usize = 255;
const TEXT_BYTES_MAX: usize = 65_535;

/// Inserts the e-mail. Returns false where its unique key is there already.
pub(super) async fn queue(connection: &mut MySqlConnection, email: &NewEmail) -> Result<bool, StoreError> {
    // The connection may be the application's, with any SQL mode, so lengths are checked here.
    for (what, value, max) in [
        ("unique key", &email.unique_key, UNIQUE_KEY_BYTES_MAX),
        ("recipient", &email.recipient, TEXT_BYTES_MAX),
        ("subject", &email.subject, TEXT_BYTES_MAX),
    ] {
        if value.len() > max {
            let has = value.len();
            return Err(StoreError::Refused(format!(
                "the {what} of an e-mail has {has} bytes, at most {max} are allowed"
            )));
        }
    }
    let outcome = sqlx::query(
        "insert into oncebox_email (unique_key, recipient, subject, body, state, due_at, lease, attempts, created_at) \
         values (?, ?, ?, ?, 'pending', utc_timestamp(6), null, 0, utc_timestamp(6))",
    )
    .bind(email.unique_key.as_bytes())
    .bind(&email.recipient)
    .bind(&email.subject)
    .bind(&email.body)
    .execute(connection)
    .await;
    Ok(inserted(outcome)?)
}
