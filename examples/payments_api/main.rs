//! A payments API, complete and small, on PostgreSQL, MariaDB or SQLite: every POST may be sent
//! twice.
//!
//! ```sh
//! cargo run --release --example payments_api -- --database sqlite://payments.db --listen 127.0.0.1:8080
//! curl -i localhost:8080/payments -H 'Authorization: Bearer t1:p1' -H "Idempotency-Key: $(uuidgen)" \
//!      -H 'Content-Type: application/json' \
//!      -d '{"accountId":"acc-7","amountMinor":1000,"currency":"EUR","merchantReference":"order-1"}'
//! ```
//!
//! `Authorization: Bearer TENANT:PRINCIPAL` stands for verified authentication: a real service
//! checks a token here.

mod accounts;
mod args;
mod books;
mod cards;
mod charge_rows;
mod charges;
mod deployment;
mod notes;
#[cfg(feature = "openapi")]
mod openapi;
mod payments;
mod points;
mod service;
mod watched;

use std::process::ExitCode;

use clap::Parser;
use oncebox::app::{AppError, store_kind};
use oncebox::store::mysql::MySqlStore;
use oncebox::store::postgres::PostgresStore;
use oncebox::store::sqlite::SqliteStore;

fn main() -> ExitCode {
    oncebox::app::run(run(args::Args::parse()))
}

async fn run(args: args::Args) -> Result<(), AppError> {
    match store_kind(&args.database)? {
        "postgres" => service::run::<PostgresStore>(args).await,
        "mysql" => service::run::<MySqlStore>(args).await,
        _ => service::run::<SqliteStore>(args).await,
    }
}
