//! E-mail rows: one per effect by their unique key, claimed by due time.

use async_trait::async_trait;
use sqlx::{PgConnection, Row};

use super::PostgresStore;
use super::text::error_text;
use crate::error::StoreError;
use crate::store::bounded::Ask;
use crate::store::{CLAIM_MAX, Claim, EmailOutcome, EmailToSend, Mailbox, NewEmail};

/// A row of its own kind in the caller's transaction; false where its key is there already.
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

#[async_trait]
impl Mailbox for PostgresStore {
    async fn claim_emails(&self, limit: usize, claim: &Claim) -> Result<Vec<EmailToSend>, StoreError> {
        let rows = sqlx::query(
            // A claim that ends later than any claim can was made before the clock went back (R22).
            "with due as (
               select e.email_id from oncebox.email e
                where e.state = 'pending' and (e.due_at <= statement_timestamp()
                      or e.claim is not null and e.due_at > statement_timestamp() + $4 * interval '1 second')
                order by e.due_at limit $1 for update skip locked)
             update oncebox.email e
                set claim = $3, attempts = e.attempts + 1, due_at = statement_timestamp() + $2 * interval '1 second'
               from due where e.email_id = due.email_id
             returning e.email_id, e.claim, e.unique_key, e.recipient, e.subject, e.body, e.attempts",
        )
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .bind(claim.length.as_secs_f64())
        .bind(claim.token)
        .bind(CLAIM_MAX.as_secs_f64())
        .all(&self.pool)
        .await?;
        let mut emails = rows
            .iter()
            .map(|row| {
                Ok(EmailToSend {
                    email_id: row.try_get(0)?,
                    claim: row.try_get(1)?,
                    unique_key: row.try_get(2)?,
                    recipient: row.try_get(3)?,
                    subject: row.try_get(4)?,
                    body: row.try_get(5)?,
                    attempt: row.try_get::<i32, _>(6)?.unsigned_abs(),
                })
            })
            .collect::<Result<Vec<_>, StoreError>>()?;
        emails.sort_unstable_by_key(|email| email.email_id);
        Ok(emails)
    }

    async fn give_back_emails(&self, claim: &Claim) -> Result<u64, StoreError> {
        let done = sqlx::query(
            "update oncebox.email set claim = null, attempts = greatest(attempts - 1, 0), due_at = statement_timestamp()
              where state = 'pending' and claim = $1",
        )
        .bind(claim.token)
        .run(&self.pool)
        .await?;
        Ok(done.rows_affected())
    }

    async fn settle_email(&self, email: &EmailToSend, outcome: &EmailOutcome) -> Result<bool, StoreError> {
        let (state, after, error) = match outcome {
            EmailOutcome::Sent => ("sent", None, None),
            EmailOutcome::Again { after, error } => ("pending", Some(after.as_secs_f64()), Some(error_text(error))),
            EmailOutcome::Failed(error) => ("failed", None, Some(error_text(error))),
            EmailOutcome::NotTried => ("pending", Some(0.0), None),
        };
        let done = sqlx::query(
            "update oncebox.email
                set state = $3, claim = null, due_at = statement_timestamp() + $4 * interval '1 second', error = coalesce($5, error),
                    settled_at = case when $3 <> 'pending' then clock_timestamp() end,
                    attempts = attempts - $6
              where email_id = $1 and claim = $2",
        )
        .bind(email.email_id)
        .bind(email.claim)
        .bind(state)
        .bind(after)
        .bind(error)
        .bind(i32::from(*outcome == EmailOutcome::NotTried))
        .run(&self.pool)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn emails_pending(&self) -> Result<u64, StoreError> {
        let row = sqlx::query("select count(*) from oncebox.email where state = 'pending'").one(&self.pool).await?;
        Ok(row.try_get::<i64, _>(0)?.unsigned_abs())
    }
}
