//! What a relay asks of the outbox, where the databases differ in words only.
//!
//! Not here: the read, the checkpoint and the mark, which are each database's own.

use super::{Session, sql};
use crate::error::StoreError;

/// A dead message after `:skipped` others, if there are so many. It reads entries of an index; on
/// PostgreSQL the order makes any other plan a sort of all of them.
pub(in crate::store) const HAS_DEAD: &str = "\
select 1 from oncebox.outbox_dead {my: force index (outbox_dead_state)} \
 where {pg: state between 'dead' and 'dead' order by state, cause, position}{my lite: state = 'dead'} \
 limit 1 offset :skipped";

/// Whether at least so many messages of the outbox are dead.
pub(in crate::store) async fn has_dead(session: &mut dyn Session, rows: usize) -> Result<bool, StoreError> {
    Ok(!session.rows(sql(HAS_DEAD).bind("skipped", skipped(rows))).await?.is_empty())
}

/// How many rows to skip, so that the next one shows that there are at least so many.
pub(super) fn skipped(rows: usize) -> i64 {
    i64::try_from(rows.saturating_sub(1)).unwrap_or(i64::MAX).min(i64::MAX - 1)
}
