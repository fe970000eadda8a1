//! The payments service, on SQLite. `postgres.rs` is the same service on PostgreSQL.

mod emails;
mod ledger;
mod notifications;
mod payment;
mod program;
mod provider;
mod provider_sender;
mod writer;

/// The database of the service. All else is written against this name, and `$1` is understood by
/// both databases.
type Database = oncebox::store::sqlite::SqliteStore;

fn main() -> std::process::ExitCode {
    program::main()
}
