//! The e-mail rows, on every database.
//!
//! Guarantees: a row has one claim at a time; a row whose claim ends later than any claim can was
//! claimed before the clock went back, and is free (R22).

use async_trait::async_trait;

use super::{SqlStore, Statement, sql};
use crate::error::StoreError;
use crate::store::operator::{COUNTED_MAX, kept_error};
use crate::store::{CLAIM_MAX, Claim, EmailOutcome, EmailToSend, Mailbox};

/// E-mails that may be claimed. On SQLite each half is a query of its own, which reads only a part
/// of the index; with `or` all pending rows would be read.
pub(in crate::store) const DUE: &str = "\
    select e.email_id, e.unique_key, e.recipient, e.subject, e.body, e.attempts \
      from oncebox.email e {my: force index (email_due)} where \
      {pg: e.state = 'pending' and (e.due_at <= {now} or e.claim is not null and e.due_at > {now} + {span :claim_max})}\
      {my: e.due_at <= {now} or e.claim is not null and e.due_at > {now} + {span :claim_max}}\
      {lite: e.email_id in (select email_id from oncebox.email where state = 'pending' and due_at <= {now} \
         union all select email_id from oncebox.email \
           where state = 'pending' and claim is not null and due_at > {now} + {span :claim_max})} \
     order by e.due_at, e.email_id limit :limit {lock free}";

const CLAIM: &str = "update oncebox.email set claim = :claim, attempts = attempts + 1, due_at = {now} + {span :length} \
    where email_id = :email";

const GIVE_BACK: &str = "update oncebox.email {my: force index (email_due)} set claim = null, due_at = {now}, \
    attempts = case when attempts > 0 then attempts - 1 else 0 end \
    where state = 'pending' and due_at is not null and claim = :claim";

const SETTLE: &str = "update oncebox.email set state = :state, claim = null, due_at = {now} + {span :after}, \
    error = coalesce(:error, error), attempts = attempts - :untried, settled_at = case when :is_settled then {now} end \
    where email_id = :email and claim = :claim";

const PENDING: &str = "select count(*) from (select 1 from oncebox.email where state = 'pending' and due_at is not null \
    {pg: order by due_at} limit :max) e";

fn due(limit: usize) -> Statement {
    sql(DUE).bind("claim_max", CLAIM_MAX).bind("limit", i64::try_from(limit).unwrap_or(i64::MAX))
}

async fn claim(store: &dyn SqlStore, limit: usize, claim: &Claim) -> Result<Vec<EmailToSend>, StoreError> {
    let mut transaction = store.begin_sql().await?;
    let session = transaction.session();
    let mut emails = Vec::new();
    for row in session.rows(due(limit)).await? {
        let attempt: u32 = row.get(5)?;
        emails.push(EmailToSend {
            email_id: row.get(0)?,
            claim: claim.token,
            unique_key: row.get(1)?,
            recipient: row.get(2)?,
            subject: row.get(3)?,
            body: row.get(4)?,
            attempt: attempt + 1,
        });
    }
    for email in &emails {
        let claimed = sql(CLAIM).bind("claim", claim.token).bind("length", claim.length).bind("email", email.email_id);
        session.run(claimed).await?;
    }
    transaction.commit().await?;
    Ok(emails)
}

fn settled(email: &EmailToSend, outcome: &EmailOutcome) -> Statement {
    let (state, after, error) = match outcome {
        EmailOutcome::Sent => ("sent", None, None),
        EmailOutcome::Again { after, error } => ("pending", Some(*after), Some(error)),
        EmailOutcome::Failed(error) => ("failed", None, Some(error)),
        EmailOutcome::NotTried => ("pending", Some(std::time::Duration::ZERO), None),
    };
    // PostgreSQL cannot store a NUL in text.
    let error = error.map(|error| kept_error(error).replace('\0', "\u{fffd}"));
    sql(SETTLE)
        .bind("state", state)
        .bind("after", after)
        .bind("error", error)
        .bind("untried", i64::from(*outcome == EmailOutcome::NotTried))
        .bind("is_settled", after.is_none())
        .bind("email", email.email_id)
        .bind("claim", email.claim)
}

#[async_trait]
impl<S: SqlStore + std::fmt::Debug> Mailbox for S {
    async fn claim_emails(&self, limit: usize, token: &Claim) -> Result<Vec<EmailToSend>, StoreError> {
        // Most polls find nothing, and a plain read is enough for them.
        if self.reader().await?.rows(due(1)).await?.is_empty() {
            return Ok(Vec::new());
        }
        claim(self, limit, token).await
    }

    async fn give_back_emails(&self, claim: &Claim) -> Result<u64, StoreError> {
        self.run_alone(sql(GIVE_BACK).bind("claim", claim.token)).await
    }

    async fn settle_email(&self, email: &EmailToSend, outcome: &EmailOutcome) -> Result<bool, StoreError> {
        Ok(self.run_alone(settled(email, outcome)).await? == 1)
    }

    async fn emails_pending(&self) -> Result<u64, StoreError> {
        let pending: i64 = self.reader().await?.one(sql(PENDING).bind("max", COUNTED_MAX)).await?;
        Ok(pending.unsigned_abs())
    }
}
