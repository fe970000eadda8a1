//! The e-mail rows, on every database.
//!
//! Guarantees: a row has one lease at a time; a row whose lease ends later than any lease can was
//! leased before the clock went back, and is free (R22). What is blanked or deleted is read in
//! bounded pages by an index, and changed by exact rows (R11).

use std::time::Duration;

use async_trait::async_trait;

use super::message::error_text;
use super::pieces::exact_rows;
use super::{SqlStore, Statement, sql};
use crate::email::port::{EmailOutcome, EmailToSend, Mailbox};
use crate::error::StoreError;
use crate::inbox::port::waiting::{LEASE_END_MAX, RowLease};
use crate::operator::COUNTED_MAX;
use crate::time::bound::LONGEST;

/// E-mails that may be leased; with `locks`, of those that no other transaction has locked. On
/// SQLite each of the two conditions is a query of its own, which
/// reads only a part of the index; with `or` all pending rows would be read.
pub(in crate::store) const DUE: &str = "\
    select e.email_id, e.unique_key, e.recipient, e.subject, e.body, e.attempts, e.possibly_sent \
      from oncebox.email e {my: force index (email_due)} where \
      {pg: e.state = 'pending' and (e.due_at <= {now} or e.lease is not null and e.due_at > {now} + {span :lease_max})}\
      {my: e.due_at <= {now} or e.lease is not null and e.due_at > {now} + {span :lease_max}}\
      {lite: e.email_id in (select email_id from oncebox.email where state = 'pending' and due_at <= {now} \
         union all select email_id from oncebox.email \
           where state = 'pending' and lease is not null and due_at > {now} + {span :lease_max})} \
     order by e.due_at, e.email_id limit :limit {if locks: {lock free}}";

/// A sender that dies leaves the try counted as one that may have arrived.
const LEASE: &str = "update oncebox.email set lease = :lease, attempts = attempts + 1, \
    possibly_sent = possibly_sent + 1, due_at = {now} + {span :length} where email_id = :email";

const GIVE_BACK: &str = "update oncebox.email {my: force index (email_due)} set lease = null, due_at = {now}, \
    attempts = case when attempts > 0 then attempts - 1 else 0 end, \
    possibly_sent = case when possibly_sent > 0 then possibly_sent - 1 else 0 end \
    where state = 'pending' and due_at is not null and lease = :lease";

const SETTLE: &str = "update oncebox.email set state = :state, lease = null, due_at = {now} + {span :after}, \
    error = case when :is_sent then null else coalesce(:error, error) end, attempts = attempts - :untried, \
    possibly_sent = :possibly_sent, settled_at = case when :is_settled then {now} end \
    where email_id = :email and lease = :lease";

const PENDING: &str = "select count(*) from (select 1 from oncebox.email where state = 'pending' and due_at is not null \
    {pg: order by due_at} limit :max) e";

/// Rows that were settled longest ago: with `:content` those to blank, which were sent, and without
/// it those to delete, which are blank already.
pub(in crate::store) const OLD: &str = "{pg: /* planned anew */ }select email_id from oncebox.email {my: force index (email_settled)} \
    where {pg lite: state <> 'pending' and} has_content = :content and settled_at <= {now} - {span :kept} \
      and (not :content or state = 'sent') \
    order by settled_at limit :most";

pub(in crate::store) const BLANK: &str = concat!(
    "{pg: /* planned anew */ }update ",
    exact_rows!("email", "e", "email_id"),
    " set recipient = '', subject = '', body = '', error = null, has_content = false \
      where {pg lite: e.email_id {in ints :rows} and} e.state <> 'pending' and e.has_content = true"
);

pub(in crate::store) const FORGET: &str = "{pg: /* planned anew */ }delete {my: e} from \
    {each email e ints email_id :rows primary} and e.state <> 'pending' and e.has_content = false";

/// Changes a page of the rows that were settled at least this long ago; returns how many.
async fn change_old(
    store: &dyn SqlStore,
    (content, change): (bool, &'static str),
    settled_for: Duration,
    rows_max: usize,
) -> Result<u64, StoreError> {
    let old = sql(OLD).bind("content", content).bind("kept", settled_for.min(LONGEST)).bind("most", rows_max);
    let rows: Vec<i64> = store.reader().await?.column(old).await?;
    if rows.is_empty() {
        return Ok(0);
    }
    store.run_alone(sql(change).bind("rows", rows)).await
}

fn due(limit: usize) -> Statement {
    sql(DUE).bind("lease_max", LEASE_END_MAX).bind("limit", limit)
}

async fn lease(store: &dyn SqlStore, limit: usize, lease: &RowLease) -> Result<Vec<EmailToSend>, StoreError> {
    let mut transaction = store.begin_sql().await?;
    let session = transaction.session();
    let mut emails = Vec::new();
    for row in session.rows(due(limit).bind("locks", true)).await? {
        let attempt: u32 = row.get(5)?;
        emails.push(EmailToSend {
            email_id: row.get(0)?,
            lease: lease.token,
            unique_key: row.get(1)?,
            recipient: row.get(2)?,
            subject: row.get(3)?,
            body: row.get(4)?,
            attempt: attempt + 1,
            possibly_sent: row.get(6)?,
        });
    }
    for email in &emails {
        let leased = sql(LEASE).bind("lease", lease.token).bind("length", lease.length).bind("email", email.email_id);
        session.run(leased).await?;
    }
    transaction.commit().await?;
    Ok(emails)
}

fn settled(email: &EmailToSend, outcome: &EmailOutcome) -> Statement {
    let before = email.possibly_sent;
    let (state, after, error, possibly_sent) = match outcome {
        EmailOutcome::Sent => ("sent", None, None, before),
        EmailOutcome::Again { after, error, possibly_sent } => ("pending", Some(*after), Some(error), *possibly_sent),
        EmailOutcome::Failed { error, possibly_sent } => ("failed", None, Some(error), *possibly_sent),
        EmailOutcome::NotTried => ("pending", Some(Duration::ZERO), None, before),
    };
    sql(SETTLE)
        .bind("state", state)
        .bind("after", after)
        .bind("error", error.map(|error| error_text(error)))
        .bind("is_sent", *outcome == EmailOutcome::Sent)
        .bind("possibly_sent", i64::from(possibly_sent))
        .bind("untried", i64::from(*outcome == EmailOutcome::NotTried))
        .bind("is_settled", after.is_none())
        .bind("email", email.email_id)
        .bind("lease", email.lease)
}

#[async_trait]
impl<S: SqlStore + std::fmt::Debug> Mailbox for S {
    async fn lease_emails(&self, limit: usize, token: &RowLease) -> Result<Vec<EmailToSend>, StoreError> {
        // Most polls find nothing, and one statement without a transaction is enough for them.
        if self.reader().await?.rows(due(1)).await?.is_empty() {
            return Ok(Vec::new());
        }
        lease(self, limit, token).await
    }

    async fn give_back_emails(&self, lease: &RowLease) -> Result<u64, StoreError> {
        self.run_alone(sql(GIVE_BACK).bind("lease", lease.token)).await
    }

    async fn settle_email(&self, email: &EmailToSend, outcome: &EmailOutcome) -> Result<bool, StoreError> {
        Ok(self.run_alone(settled(email, outcome)).await? == 1)
    }

    async fn blank_emails(&self, settled_for: Duration, rows_max: usize) -> Result<u64, StoreError> {
        change_old(self, (true, BLANK), settled_for, rows_max).await
    }

    async fn forget_emails(&self, settled_for: Duration, rows_max: usize) -> Result<u64, StoreError> {
        change_old(self, (false, FORGET), settled_for, rows_max).await
    }

    async fn emails_pending(&self) -> Result<u64, StoreError> {
        let pending: i64 = self.reader().await?.one(sql(PENDING).bind("max", COUNTED_MAX)).await?;
        Ok(pending.unsigned_abs())
    }
}
