//! Reads which e-mails, operations and keys wait for a person, or for a process that does not come.
//!
//! Promise: each number is counted among so many rows at most, whatever the tables hold.

use super::status::seconds;
use crate::error::StoreError;
use crate::operator::{COUNTED_MAX, Unattended};
use crate::store::sql::{Session, sql};

/// An e-mail that is due later and was never tried waits for its time, and for nobody.
const OLDEST_EMAIL: &str = "\
select {age min(e.created_at)} from ( \
   select created_at, due_at, attempts from oncebox.email {my: force index (email_due)} \
    where state = 'pending' and due_at is not null order by due_at limit :max) e \
 where e.due_at <= {now} or e.attempts > 0";

/// Counted among those that were settled first and those that were settled last. What was sent is
/// blanked after a time, and what failed is not: so later it stands among the first.
const FAILED_EMAILS: &str = "\
select count(*) from ( \
   select * from (select email_id, state from oncebox.email {my: force index (email_settled)} \
     where state <> 'pending' and has_content = true and settled_at is not null order by settled_at limit :max) a \
   union \
   select * from (select email_id, state from oncebox.email {my: force index (email_settled)} \
     where state <> 'pending' and has_content = true and settled_at is not null order by settled_at desc limit :max) b) e \
 where e.state = 'failed'";

/// Read from the records without an outcome, which are few: an operation in phases has one. A lease
/// that ends later than any lease can was written before the clock went back, and is over (R22).
const OPERATIONS: &str = "\
{pg: /* planned anew */ }select count(w.parked_at), {age min(w.parked_at)}, count(w.undriven_since), {age min(w.undriven_since)}, \
       count(w.unknown_since), {age min(w.unknown_since)} \
  from (select case when o.parked is not null then o.updated_at end as parked_at, \
               case when o.due_at <= {now} \
                     and (o.owner is null or o.lease_until <= {now} or o.lease_until > {now} + {lease of o}) \
                    then {greatest}(o.due_at, coalesce(o.lease_until, o.due_at)) end as undriven_since, \
               case when r.mode <> 'phased' and r.state = 'UNKNOWN_REQUIRES_RECOVERY' \
                    then r.{my: open_since}{pg lite: created_at} end as unknown_since \
          from (select r.mode, r.state, r.operation_id, r.{my: open_since}{pg lite: created_at} \
                  from {piece requests} where {piece open} limit :max) as r \
          left join oncebox.operation as o on r.mode = 'phased' and o.operation_id = r.operation_id) as w";

pub(super) async fn read(session: &mut dyn Session) -> Result<Unattended, StoreError> {
    let age = |micros: Option<i64>| seconds(micros.unwrap_or(0));
    let email = session.only(sql(OLDEST_EMAIL).bind("max", COUNTED_MAX)).await?;
    let failed = session.only(sql(FAILED_EMAILS).bind("max", COUNTED_MAX)).await?;
    let row = session.only(sql(OPERATIONS).bind("max", COUNTED_MAX)).await?;
    Ok(Unattended {
        oldest_email_age_seconds: age(email.get_opt(0)?),
        emails_failed: failed.get(0)?,
        operations_parked: row.get(0)?,
        oldest_parked_age_seconds: age(row.get_opt(1)?),
        operations_undriven: row.get(2)?,
        oldest_undriven_age_seconds: age(row.get_opt(3)?),
        keys_unknown: row.get(4)?,
        oldest_unknown_age_seconds: age(row.get_opt(5)?),
    })
}
