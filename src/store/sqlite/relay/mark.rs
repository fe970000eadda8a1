//! What a checkpoint and a mark write, in one fenced transaction.

use serde_json::json;
use sqlx::query;
use sqlx::sqlite::SqliteConnection;

use super::{Batch, SqliteSession};
use crate::error::StoreError;
use crate::operator::kept_error;
use crate::outbox::port::{Diversion, Mark};
use crate::store::sql::outbox::{self, SentNotDiscarded};
use crate::store::sqlite::write::Write;
use crate::store::sqlite::{millis, now_ms};

/// Deletes by exact positions, so never a row that was not read.
pub(in crate::store::sqlite) const DELETE: &str =
    "delete from oncebox_outbox where position in (select value from json_each(?))";

impl SqliteSession {
    /// Raises the revision, renews the lease, writes the mark, commits.
    pub(super) async fn write_mark(&mut self, mark: &Mark) -> Result<(), StoreError> {
        let marked = self.marked(mark)?;
        let mut write = self.store.write().await?;
        let checkpoint = concat!(
            "update oncebox_shard set revision = revision + 1, lease_until = ",
            now_ms!(),
            " + ? where shard_id = ? and epoch = ? and revision = ?"
        );
        let made = query(checkpoint).bind(millis(self.length)).bind(self.shard);
        let made = made.bind(self.fence.epoch).bind(self.fence.revision);
        if made.execute(write.connection()).await?.rows_affected() != 1 {
            write.rollback().await?;
            return Err(self.fenced("checkpoint"));
        }
        let sent = self.apply(&mut write, mark, marked).await?;
        write.commit().await?;
        sent.warn();
        self.fence.revision += 1;
        self.window.drain(..marked);
        Ok(())
    }

    /// Returns how many batches of the window the mark covers. An impossible mark is refused before
    /// anything is written.
    fn marked(&self, mark: &Mark) -> Result<usize, StoreError> {
        let through = mark.through.unwrap_or(0);
        if through > self.batches {
            return Err(StoreError::Corrupt(format!(
                "a mark through batch {through}, of {} that were read",
                self.batches
            )));
        }
        let marked = self.window.iter().take_while(|batch| batch.number <= through).count();
        let covered = |position: i64| {
            let mut positions = self.window.iter().take(marked).flat_map(|batch| &batch.positions);
            positions.any(|covered| *covered == position)
        };
        match mark.diverted.iter().find(|(position, _)| !covered(*position)) {
            Some((position, _)) => Err(StoreError::Corrupt(format!("position {position} is diverted but not marked"))),
            None => Ok(marked),
        }
    }

    async fn apply(&self, write: &mut Write, mark: &Mark, marked: usize) -> Result<SentNotDiscarded, StoreError> {
        let batches = || self.window.iter().take(marked);
        if let Some(scanned_to) = batches().next_back().and_then(|batch| batch.positions.last()) {
            // The cursor moves before the rows are deleted: a trigger refuses to delete rows above
            // it.
            let cursor =
                concat!("update oncebox_shard set scanned_to = ?, updated_at = ", now_ms!(), " where shard_id = ?");
            query(cursor).bind(scanned_to).bind(self.shard).execute(write.connection()).await?;
        }
        if !mark.diverted.is_empty() {
            divert(write.connection(), &mark.diverted).await?;
        }
        for Batch { positions, .. } in batches() {
            let delete = query(DELETE);
            delete.bind(positions_json(positions)).execute(write.connection()).await?;
        }
        if !mark.changed.is_empty() {
            change(write.connection(), &mark.changed).await?;
        }
        let sent = if mark.released.is_empty() {
            SentNotDiscarded::default()
        } else {
            outbox::sent_not_discarded(write, &mark.released).await?
        };
        for gone in [&mark.released, &mark.discarded] {
            if !gone.is_empty() {
                let delete =
                    query("delete from oncebox_outbox_dead where position in (select value from json_each(?))");
                delete.bind(positions_json(gone)).execute(write.connection()).await?;
            }
        }
        Ok(sent)
    }
}

/// Copies rows whole. Where one of them is missing the mark fails: that row was never proven and
/// would be lost.
async fn divert(connection: &mut SqliteConnection, diverted: &[(i64, Diversion)]) -> Result<(), StoreError> {
    let copy = query(concat!(
        "insert into oncebox_outbox_dead (position, bucket, message_id, topic, key, kind, headers, payload, content_type, ",
        "created_at, state, holds, reason, diverted_at) ",
        "select o.position, o.bucket, o.message_id, o.topic, o.key, o.kind, o.headers, cast(o.payload as blob), ",
        "o.content_type, o.created_at, d.value ->> 'state', d.value ->> 'holds', d.value ->> 'reason', ",
        now_ms!(),
        " from json_each(?) as d join oncebox_outbox as o on o.position = d.value ->> 'position'"
    ));
    let copied = copy.bind(diversions_json(diverted)).execute(connection).await?.rows_affected();
    outbox::check_all(copied, diverted)
}

/// Changes the state of dead and held rows. An operator's request to send such a row is done, so it
/// is cleared; one to discard it stands, because a change does not carry it out.
async fn change(connection: &mut SqliteConnection, changed: &[(i64, Diversion)]) -> Result<(), StoreError> {
    let change = query(concat!(
        "update oncebox_outbox_dead set state = d.value ->> 'state', holds = d.value ->> 'holds', ",
        "reason = d.value ->> 'reason', requested = case when requested = 'discard' then requested end, ",
        "requested_at = case when requested = 'discard' then requested_at end, diverted_at = ",
        now_ms!(),
        " from json_each(?) as d where oncebox_outbox_dead.position = d.value ->> 'position'"
    ));
    let done = change.bind(diversions_json(changed)).execute(connection).await?.rows_affected();
    outbox::check_all(done, changed)
}

pub(super) fn positions_json(positions: &[i64]) -> String {
    json!(positions).to_string()
}

fn diversions_json(diversions: &[(i64, Diversion)]) -> String {
    let rows = diversions.iter().map(|(position, diversion)| {
        let (state, cause, reason, holds) = outbox::columns(diversion);
        // The column has both: `dead`, `held-behind`, `held-destination`.
        let state = if state == "dead" { state.to_owned() } else { format!("{state}-{cause}") };
        json!({ "position": position, "state": state, "holds": i64::from(holds), "reason": reason.map(kept_error) })
    });
    serde_json::Value::Array(rows.collect()).to_string()
}
