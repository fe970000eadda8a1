//! Ends a transaction that did not answer, or that its handler ended, and finds out whether it was
//! committed.
//!
//! Promise: the answer is `Committed` only where the rows that the transaction wrote are there. The
//! status of a transaction id alone is no proof: after a crash the server gives ids that were not
//! on disk yet to other transactions.

use sqlx::Postgres;

use super::{Ids, server_start};
use crate::error::StoreError;
use crate::inbox::port::{ConsumerId, LOOKS, Undone};
use crate::store::bounded::{Ask, Bounded};
use crate::store::postgres::code;

/// Whether the writes of an ended transaction are there: an inbox row that it inserted, or a row
/// that it made dead (`xmin` of a row is the lower half of its transaction's id). It is planned for
/// each run: a plan that is kept from when few messages were dead reads all dead ones.
const STANDS: &str = "
select exists (select 1 from oncebox.inbox_timed where consumer_id = $2 and message_id = any($3)
                  and xmin = split_part($1, ' ', 1)::xid8::xid)
    or exists (select 1 from oncebox.inbox_untimed where consumer_id = $2 and message_id = any($4)
                  and xmin = split_part($1, ' ', 1)::xid8::xid)
    or exists (select 1 from oncebox.waiting where sequence = any($5) and state = 'dead'
                  and xmin = split_part($1, ' ', 1)::xid8::xid)";

/// Runs on another connection. Reads whether the transaction is still in progress, and whether its
/// backend executes a statement and does not wait for its client; then terminates that backend. The
/// backend may live on after the transaction: a handler may have committed and run another
/// statement. A server that was restarted has no backend of ours.
const END: &str = concat!(
    "select pg_xact_status(split_part($1, ' ', 1)::xid8) is not distinct from 'in progress',
       coalesce(bool_or(a.works), false), count(pg_terminate_backend(a.pid))
  from (select pid, state = 'active' and wait_event_type is distinct from 'Client' as works
          from pg_stat_activity where pid = split_part($1, ' ', 2)::int and backend_type = 'client backend'
           and pid <> pg_backend_pid()
           and split_part($1, ' ', 3)::bigint = ",
    server_start!(),
    ") a"
);

/// Identifies what a transaction wrote, to find out later whether it was committed.
pub(super) struct Written {
    pub(super) witness: String,
    pub(super) consumer: ConsumerId,
    pub(super) ours: Ids,
    pub(super) buried: Vec<i64>,
}

impl Written {
    /// Whether the writes are there. Call this only after the transaction has ended.
    pub(super) async fn stands(&self, connection: &mut Bounded<Postgres>) -> Result<bool, sqlx::Error> {
        sqlx::query_scalar(STANDS)
            .persistent(false)
            .bind(&self.witness)
            .bind(self.consumer.0)
            .bind(&self.ours.timed)
            .bind(&self.ours.untimed)
            .bind(&self.buried)
            .one(connection)
            .await
    }

    /// Ends the transaction from another connection, and waits until it has ended. Sets `works`
    /// where the server is seen executing a statement of it.
    pub(super) async fn end_from(&self, other: &mut Bounded<Postgres>, works: &mut bool) -> Result<Undone, StoreError> {
        let (looks, pause) = LOOKS;
        for _ in 0..looks {
            let asked = sqlx::query_as(END).bind(&self.witness).one(&mut *other).await;
            let (in_progress, at_work, backends): (bool, bool, i64) = match asked {
                Err(error) if is_in_the_future(&error) => return Ok(Undone::Lost),
                asked => asked?,
            };
            *works |= at_work;
            if in_progress || backends > 0 {
                tokio::time::sleep(pause).await;
                continue;
            }
            // This statement begins after that transaction ended, so it sees what was committed.
            return Ok(match self.stands(other).await? {
                true => Undone::Committed,
                false if *works => Undone::Whole,
                false => Undone::Lost,
            });
        }
        let why = format!("the transaction {} was told to end and has not ended yet", self.witness);
        Err(StoreError::Busy(sqlx::Error::Protocol(why)))
    }
}

/// The server has not assigned an id that high yet: a crash took the id and its writes back.
fn is_in_the_future(error: &sqlx::Error) -> bool {
    code(error).as_deref() == Some("22023")
}
