//! Repairs a sequence of positions that is behind the cursor, and lets the relay read rows again
//! that it has passed unread.

use sqlx::sqlite::SqliteConnection;
use sqlx::{query, query_as};

use crate::error::StoreError;
use crate::operator::ActContext;
use crate::store::sql::audit;
use crate::store::statements::Dialect;

/// Raises the sequence to the highest position that was ever used, and sets the cursor back before
/// the first row: the outbox holds only unproven rows. Returns what was repaired. The caller
/// commits, or rolls back on a dry run.
pub(super) async fn sequence(
    connection: &mut SqliteConnection,
    context: &ActContext,
) -> Result<Vec<String>, StoreError> {
    let (last, scanned_to, used, first): (i64, i64, i64, Option<i64>) = query_as(
        "select coalesce((select seq from sqlite_sequence where name = 'oncebox_outbox'), 0), \
         (select max(scanned_to) from oncebox_shard), max(coalesce((select max(position) from oncebox_outbox), 0), \
         coalesce((select max(position) from oncebox_outbox_dead), 0)), (select min(position) from oncebox_outbox)",
    )
    .fetch_one(&mut *connection)
    .await?;
    let mut mended = Vec::new();
    let highest = scanned_to.max(used);
    if last < highest {
        for raise in [
            "insert into sqlite_sequence (name, seq) select 'oncebox_outbox', 0 \
             where not exists (select 1 from sqlite_sequence where name = 'oncebox_outbox') and ?1 > 0",
            "update sqlite_sequence set seq = ?1 where name = 'oncebox_outbox'",
        ] {
            query(raise).bind(highest).execute(&mut *connection).await?;
        }
        mended.push(format!(
            "positions were given up to {last}, and the relay has passed {scanned_to}: the next is {}",
            highest + 1
        ));
    }
    if let Some(first) = first.filter(|first| *first <= scanned_to) {
        // Fences a running session, which would continue above the old cursor.
        query("update oncebox_shard set scanned_to = ?, epoch = epoch + 1, revision = revision + 1, owner = null, lease_until = 0")
            .bind(first - 1)
            .execute(&mut *connection)
            .await?;
        mended.push(format!(
            "messages stand from position {first} on, and the relay has passed {scanned_to}: it reads from {first} on"
        ));
    }
    if !mended.is_empty() {
        audit::mended(connection, Dialect::Sqlite, &mended.join("; "), context).await?;
    }
    Ok(mended)
}
