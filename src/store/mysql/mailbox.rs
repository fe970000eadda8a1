//! The e-mail rows.
//!
//! Guarantees: one row per unique key, decided by the key (the plain insert fails with 1062, which
//! undoes that statement and nothing else on MySQL); a value that a server without strict mode
//! would shorten is refused before.

use async_trait::async_trait;
use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row};
use uuid::Uuid;

use super::schema::number;
use super::{MySqlStore, START, micros, number_list, text};
use crate::error::StoreError;
use crate::store::bounded::Ask;
use crate::store::operator::kept_error;
use crate::store::{CLAIM_MAX, Claim, EmailOutcome, EmailToSend, Mailbox, NewEmail};

const UNIQUE_KEY_BYTES_MAX: usize = 255;
const TEXT_BYTES_MAX: usize = 65_535;

/// A row of its own kind in the caller's transaction; false where its key is there already.
pub(super) async fn queue(connection: &mut MySqlConnection, email: &NewEmail) -> Result<bool, StoreError> {
    // The connection may be the application's own, in any SQL mode.
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
    let inserted = sqlx::query(
        "insert into oncebox_email (unique_key, recipient, subject, body, state, due_at, claim, attempts, created_at) \
         values (?, ?, ?, ?, 'pending', utc_timestamp(6), null, 0, utc_timestamp(6))",
    )
    .bind(email.unique_key.as_bytes())
    .bind(&email.recipient)
    .bind(&email.subject)
    .bind(&email.body)
    .execute(connection)
    .await;
    match inserted {
        Ok(_) => Ok(true),
        Err(error) if number(&error) == Some(1062) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[async_trait]
impl Mailbox for MySqlStore {
    async fn claim_emails(&self, limit: usize, claim: &Claim) -> Result<Vec<EmailToSend>, StoreError> {
        let mut transaction = self.pool.begin(START).await?;
        let due: Vec<i64> = sqlx::query_scalar(
            // A claim that ends later than any claim can was made before the clock went back (R22).
            "select email_id from oncebox_email force index (email_due) where due_at <= utc_timestamp(6) \
               or claim is not null and due_at > utc_timestamp(6) + interval ? microsecond order by due_at, email_id limit ? for update skip locked",
        )
        .bind(micros(CLAIM_MAX))
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .all(&mut transaction)
        .await?;
        if due.is_empty() {
            transaction.rollback().await?;
            return Ok(Vec::new());
        }
        let list = number_list(due);
        sqlx::query(
            "update json_table(?, '$[*]' columns (email_id bigint path '$')) j \
             straight_join oncebox_email e force index (primary) on e.email_id = j.email_id \
             set e.claim = ?, e.attempts = e.attempts + 1, e.due_at = utc_timestamp(6) + interval ? microsecond",
        )
        .bind(&list)
        .bind(claim.token)
        .bind(micros(claim.length))
        .run(&mut transaction)
        .await?;
        let rows = sqlx::query(
            "select e.email_id, e.unique_key, e.recipient, e.subject, e.body, e.attempts \
             from json_table(?, '$[*]' columns (o for ordinality, email_id bigint path '$')) j \
             straight_join oncebox_email e force index (primary) on e.email_id = j.email_id order by j.o",
        )
        .bind(&list)
        .all(&mut transaction)
        .await?;
        let emails = rows.iter().map(|row| email_to_send(row, claim.token)).collect::<Result<Vec<_>, _>>()?;
        transaction.commit().await?;
        Ok(emails)
    }

    async fn give_back_emails(&self, claim: &Claim) -> Result<u64, StoreError> {
        let claimed: Vec<i64> = sqlx::query_scalar(
            "select email_id from oncebox_email force index (email_due) where due_at is not null and claim = ?",
        )
        .bind(claim.token)
        .all(&self.pool)
        .await?;
        let given_back = sqlx::query(
            "update json_table(?, '$[*]' columns (email_id bigint path '$')) j \
             straight_join oncebox_email e force index (primary) on e.email_id = j.email_id \
             set e.due_at = utc_timestamp(6), e.claim = null, e.attempts = if(e.attempts > 0, e.attempts - 1, 0) where e.claim = ?",
        )
        .bind(number_list(claimed))
        .bind(claim.token)
        .run(&self.pool)
        .await?;
        Ok(given_back.rows_affected())
    }

    async fn settle_email(&self, email: &EmailToSend, outcome: &EmailOutcome) -> Result<bool, StoreError> {
        let (state, after, error) = match outcome {
            EmailOutcome::Sent => ("sent", None, None),
            EmailOutcome::Again { after, error } => ("pending", Some(micros(*after)), Some(error.as_str())),
            EmailOutcome::Failed(error) => ("failed", None, Some(error.as_str())),
            EmailOutcome::NotTried => ("pending", Some(0), None),
        };
        let written = sqlx::query(
            "update oncebox_email set state = ?, due_at = utc_timestamp(6) + interval ? microsecond, claim = null, error = coalesce(?, error), \
               settled_at = if(?, utc_timestamp(6), null), attempts = attempts - ? \
             where email_id = ? and claim = ?",
        )
        .bind(state)
        .bind(after)
        .bind(error.map(kept_error))
        .bind(after.is_none())
        .bind(u32::from(*outcome == EmailOutcome::NotTried))
        .bind(email.email_id)
        .bind(email.claim)
        .run(&self.pool)
        .await?;
        Ok(written.rows_affected() == 1)
    }

    async fn emails_pending(&self) -> Result<u64, StoreError> {
        let pending: i64 =
            sqlx::query_scalar("select count(*) from oncebox_email where due_at is not null").one(&self.pool).await?;
        Ok(u64::try_from(pending).unwrap_or(0))
    }
}

fn email_to_send(row: &MySqlRow, claim: Uuid) -> Result<EmailToSend, StoreError> {
    Ok(EmailToSend {
        email_id: row.try_get("email_id")?,
        claim,
        unique_key: text("unique_key", row.try_get("unique_key")?)?,
        recipient: row.try_get("recipient")?,
        subject: row.try_get("subject")?,
        body: row.try_get("body")?,
        attempt: row.try_get("attempts")?,
    })
}
