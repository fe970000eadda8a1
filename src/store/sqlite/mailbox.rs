//! E-mail rows of SQLite.

use async_trait::async_trait;
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{Row, query, query_scalar};
use uuid::Uuid;

use super::connect::SqliteStore;
use super::message::sixteen;
use super::{millis, now_ms};
use crate::error::StoreError;
use crate::store::operator::kept_error;
use crate::store::{Base, CLAIM_MAX, Claim, EmailOutcome, EmailToSend, Mailbox, NewEmail};

/// Due, or claimed for longer than any claim can be: that claim was made before the clock went
/// back. Two ranges of the index, each for itself: with `or` all that is pending is read.
macro_rules! due {
    ($claim_max:literal) => {
        concat!(
            "(select email_id, due_at from oncebox_email where state = 'pending' and due_at <= ",
            now_ms!(),
            " union all select email_id, due_at from oncebox_email \
               where state = 'pending' and claim is not null and due_at > ",
            now_ms!(),
            " + ",
            $claim_max,
            ")"
        )
    };
}

/// Rows come by due time; `returning` gives them in no order.
pub(super) const CLAIM: &str = concat!(
    "update oncebox_email set claim = ?3, attempts = attempts + 1, due_at = ?2 + ",
    now_ms!(),
    " where email_id in (select email_id from ",
    due!("?4"),
    " order by due_at, email_id limit ?1) ",
    "returning email_id, claim, unique_key, recipient, subject, body, attempts"
);

/// A row of its own kind in the caller's transaction; false where its key is there already.
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

#[async_trait]
impl Mailbox for SqliteStore {
    async fn claim_emails(&self, limit: usize, claim: &Claim) -> Result<Vec<EmailToSend>, StoreError> {
        // Most questions find nothing: they need no turn.
        let due = concat!("select exists (select 1 from ", due!("?"), ")");
        if !query_scalar::<_, bool>(due).bind(millis(CLAIM_MAX)).fetch_one(self.pool()).await? {
            return Ok(Vec::new());
        }
        let mut write = self.write().await?;
        let due = query(CLAIM).bind(i64::try_from(limit).unwrap_or(i64::MAX)).bind(millis(claim.length));
        let due = due.bind(claim.token.as_bytes().to_vec()).bind(millis(CLAIM_MAX));
        let rows = due.fetch_all(write.connection()).await?;
        let mut emails = rows.iter().map(email_to_send).collect::<Result<Vec<_>, _>>()?;
        write.commit().await?;
        emails.sort_unstable_by_key(|email| email.email_id);
        Ok(emails)
    }

    async fn give_back_emails(&self, claim: &Claim) -> Result<u64, StoreError> {
        let mut write = self.write().await?;
        let give_back = query(concat!(
            "update oncebox_email set claim = null, attempts = max(attempts - 1, 0), due_at = ",
            now_ms!(),
            " where state = 'pending' and claim = ?"
        ));
        let give_back = give_back.bind(claim.token.as_bytes().to_vec());
        let given_back = give_back.execute(write.connection()).await?.rows_affected();
        write.commit().await?;
        Ok(given_back)
    }

    async fn settle_email(&self, email: &EmailToSend, outcome: &EmailOutcome) -> Result<bool, StoreError> {
        let (state, after, error) = match outcome {
            EmailOutcome::Sent => ("sent", None, None),
            EmailOutcome::Again { after, error } => ("pending", Some(millis(*after)), Some(kept_error(error))),
            EmailOutcome::Failed(error) => ("failed", None, Some(kept_error(error))),
            EmailOutcome::NotTried => ("pending", Some(0), None),
        };
        let mut write = self.write().await?;
        let settle = query(concat!(
            "update oncebox_email set state = ?3, claim = null, due_at = ?4 + ",
            now_ms!(),
            ", error = coalesce(?5, error), attempts = attempts - ?6, settled_at = case when ?3 <> 'pending' then ",
            now_ms!(),
            " end where email_id = ?1 and claim = ?2"
        ));
        let settle = settle.bind(email.email_id).bind(email.claim.as_bytes().to_vec());
        let settle = settle.bind(state).bind(after).bind(error).bind(*outcome == EmailOutcome::NotTried);
        let done = settle.execute(write.connection()).await?.rows_affected();
        write.commit().await?;
        Ok(done == 1)
    }

    async fn emails_pending(&self) -> Result<u64, StoreError> {
        let pending = query_scalar::<_, i64>("select count(*) from oncebox_email where state = 'pending'");
        Ok(pending.fetch_one(self.pool()).await?.unsigned_abs())
    }
}

fn email_to_send(row: &SqliteRow) -> Result<EmailToSend, StoreError> {
    Ok(EmailToSend {
        email_id: row.try_get("email_id")?,
        claim: Uuid::from_bytes(sixteen(&row.try_get::<Vec<u8>, _>("claim")?)?),
        unique_key: row.try_get("unique_key")?,
        recipient: row.try_get("recipient")?,
        subject: row.try_get("subject")?,
        body: row.try_get("body")?,
        attempt: row.try_get("attempts")?,
    })
}
