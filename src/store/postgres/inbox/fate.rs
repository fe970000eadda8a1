//! What became of a transaction that did not answer, or that its handler ended: it is ended, and
//! found out whether it was committed.
//!
//! Promise: it is called committed only where what it wrote stands. A server that crashed takes
//! back ids of transactions that were not on disk yet and gives them to others, so what it says of
//! an id alone is no proof.

use sqlx::Postgres;

use super::{Ids, server_start};
use crate::error::StoreError;
use crate::store::bounded::{Ask, Bounded};
use crate::store::inbox::LOOKS;
use crate::store::{ConsumerId, Undone};

/// Whether what a transaction that has ended wrote stands: an inbox row of ours that it inserted
/// (the header of a row has the lower half of the id of its transaction), or no row of the message
/// that it finished. What `pg_xact_status` says is no proof alone: a crash takes ids back that were
/// not on disk yet, and the server gives them to others.
const STANDS: &str = "
select case when $5::bigint is null
         then exists (select 1 from oncebox.inbox_timed where consumer_id = $2 and message_id = any($3)
                         and xmin = split_part($1, ' ', 1)::xid8::xid)
           or exists (select 1 from oncebox.inbox_untimed where consumer_id = $2 and message_id = any($4)
                         and xmin = split_part($1, ' ', 1)::xid8::xid)
         else not exists (select 1 from oncebox.waiting where sequence = $5)
          and pg_xact_status(split_part($1, ' ', 1)::xid8) is not distinct from 'committed' end";

/// Asked on another connection: whether a transaction is still in progress, whether its backend is
/// there still, and works and waits neither for us to ask nor to listen; and the end of that
/// backend, which may be at a statement behind a commit of the handler's own. A server that began
/// anew has no backend of ours.
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

/// What a transaction wrote, by which it is found out whether it was committed.
pub(super) struct Written {
    pub(super) witness: String,
    pub(super) consumer: ConsumerId,
    pub(super) ours: Ids,
    pub(super) finished: Option<i64>,
}

impl Written {
    /// Whether it stands, now that its transaction has ended.
    pub(super) async fn stands(&self, connection: &mut Bounded<Postgres>) -> Result<bool, sqlx::Error> {
        sqlx::query_scalar(STANDS)
            .bind(&self.witness)
            .bind(self.consumer.0)
            .bind(&self.ours.timed)
            .bind(&self.ours.untimed)
            .bind(self.finished)
            .one(connection)
            .await
    }

    /// Ends the transaction from another connection, and waits until it has ended. `works` becomes
    /// true where the server is seen at work for it.
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
            // A statement behind its end: it sees what was committed.
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

/// The server does not know an id that high (yet): a crash took it back, with all that had it.
fn is_in_the_future(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Database(error) if error.code().as_deref() == Some("22023"))
}
