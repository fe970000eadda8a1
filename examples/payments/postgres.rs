//! The payments service, on PostgreSQL: `main.rs` with another database, and nothing else.

mod emails;
mod ledger;
mod notifications;
mod payment;
mod program;
mod provider;
mod provider_sender;
mod writer;

/// The database of the service.
type Database = oncebox::store::postgres::PostgresStore;

fn main() -> std::process::ExitCode {
    program::main()
}
