//! Checks what the promises need of a SQLite file: its settings, the triggers, positions ahead of
//! the cursor, and a turn to write that comes.

use std::io::ErrorKind;
use std::time::Duration;

use sqlx::{query_as, query_scalar};

use super::SqliteStore;
use crate::error::StoreError;
use crate::observe::Finding;
use crate::store::base::Base;
use crate::store::schema::Schema;

/// The triggers of the outbox: they apply the limits, and refuse changes of its rows and deletes of
/// unproven ones.
const TRIGGERS: [&str; 4] =
    ["oncebox_outbox_limits", "oncebox_outbox_complete", "oncebox_outbox_immutable", "oncebox_outbox_keep"];
/// A longer wait for the turn is reported: handlers have 2 s by default.
const TURN_LONG: Duration = Duration::from_secs(5);

pub(super) async fn check(store: &SqliteStore) -> Result<Vec<Finding>, StoreError> {
    if let Err(error) = store.schema().await?.require() {
        return Ok(vec![Finding::refused("schema", error.to_string(), "run `oncebox migrate up`")]);
    }
    Ok(vec![
        library(store).await?,
        encoding(store).await?,
        journal(store).await?,
        triggers(store).await?,
        sequence(store).await?,
        below_cursor(store).await?,
        turn(store).await,
    ])
}

async fn library(store: &SqliteStore) -> Result<Finding, StoreError> {
    let version: String = query_scalar("select sqlite_version()").fetch_one(store.pool()).await?;
    Ok(Finding::ok("library", format!("SQLite {version} in this program; other programs need 3.38 or later")))
}

async fn encoding(store: &SqliteStore) -> Result<Finding, StoreError> {
    let encoding: String = query_scalar("pragma encoding").fetch_one(store.pool()).await?;
    let detail = format!("text is stored as {encoding}");
    Ok(if encoding == "UTF-8" {
        Finding::ok("encoding", detail)
    } else {
        Finding::refused("encoding", detail, "payloads would not stay byte for byte: use a database with UTF-8")
    })
}

async fn journal(store: &SqliteStore) -> Result<Finding, StoreError> {
    let mode: String = query_scalar("pragma journal_mode").fetch_one(store.pool()).await?;
    let synchronous: i64 = query_scalar("pragma synchronous").fetch_one(store.pool()).await?;
    let detail = format!("journal_mode {mode}, synchronous {synchronous}");
    Ok(if mode == "wal" && synchronous >= 2 {
        Finding::ok("durability", detail)
    } else {
        let remedy = "WAL and FULL are needed; a network drive, for one, knows no WAL: put the file on a local disk";
        Finding::refused("durability", detail, remedy)
    })
}

async fn triggers(store: &SqliteStore) -> Result<Finding, StoreError> {
    let made: Vec<(String, String)> =
        query_as("select name, sql from sqlite_schema where type = 'trigger' and tbl_name = 'oncebox_outbox'")
            .fetch_all(store.pool())
            .await?;
    let known = SqliteStore::script();
    // SQLite keeps the text of a trigger, except for the words CREATE TRIGGER, which it writes
    // itself.
    let as_made = |sql: &str| sql.get("CREATE TRIGGER ".len()..).is_some_and(|sql| known.contains(sql));
    let stands = |name: &&&str| made.iter().any(|(made, sql)| made == **name && as_made(sql));
    let missing: Vec<&str> = TRIGGERS.iter().filter(|name| !stands(name)).copied().collect();
    Ok(if missing.is_empty() {
        Finding::ok("limits", "all triggers of the outbox stand as they were made")
    } else {
        let detail = format!("missing or changed: {}", missing.join(", "));
        Finding::refused("limits", detail, "put back the triggers of oncebox_outbox that `oncebox migrate print` shows")
    })
}

async fn sequence(store: &SqliteStore) -> Result<Finding, StoreError> {
    let (last, scanned_to): (i64, i64) = query_as(
        "select coalesce((select seq from sqlite_sequence where name = 'oncebox_outbox'), 0), \
         (select max(scanned_to) from oncebox_shard)",
    )
    .fetch_one(store.pool())
    .await?;
    let detail = format!("positions were given up to {last}, the relay has passed {scanned_to}");
    Ok(if last >= scanned_to {
        Finding::ok("sequence", detail)
    } else {
        Finding::refused(
            "sequence behind cursor",
            detail,
            "somebody set `sqlite_sequence` back, or restored one table without the other: run `oncebox doctor --fix`",
        )
    })
}

async fn below_cursor(store: &SqliteStore) -> Result<Finding, StoreError> {
    let rows: i64 = query_scalar(
        "select count(*) from oncebox_outbox where position <= (select max(scanned_to) from oncebox_shard)",
    )
    .fetch_one(store.pool())
    .await?;
    Ok(if rows == 0 {
        Finding::ok("rows below the cursor", "none")
    } else {
        let detail = format!("{rows} rows stand at positions that the relay has passed, and are never read");
        Finding::warning("rows below the cursor", detail, "run `oncebox doctor --fix`: the relay reads them then")
    })
}

/// Checks the turn. A frozen process keeps the write lock, and nothing in SQLite can end its
/// transaction (R28).
async fn turn(store: &SqliteStore) -> Finding {
    match store.take_turn(TURN_LONG).await.map_err(|error| (error.kind(), error.to_string())) {
        Ok(_) => Finding::ok("turn", "the write turn is free, or comes soon"),
        Err((ErrorKind::TimedOut, detail)) => Finding::warning(
            "turn",
            detail,
            "nobody can write while it is held: look whether that process is stopped, and continue or end it",
        ),
        Err((ErrorKind::ReadOnlyFilesystem | ErrorKind::StorageFull, detail)) => Finding::waits(
            "turn",
            detail,
            "nothing can be written: make the disk of the file writable, with room on it",
        ),
        Err((_, detail)) => Finding::refused(
            "turn",
            detail,
            "nobody can write without it: look at the owner and the rights of the files beside the database whose names \
             end in `.oncebox-lock` and `.oncebox-lock-next`",
        ),
    }
}
