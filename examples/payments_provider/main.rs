//! An outside provider of card charges, as a process of its own: what the payments API calls. It is
//! a stand-in to copy tests from, not a provider: it books charges into a file, once for each key,
//! and does badly what it is told to do badly.
//!
//! ```text
//! POST   /charges            {"amountMinor","currency","reference"}, header Idempotency-Key   201, 402, 409
//! GET    /charges?key=KEY    {"charges":[..]}; 404 under the fault no_query
//! GET    /charges/count      {"count":N,"keys":M}
//! POST   /admin/faults       {"fault","times":N or -1,"delayMs"}
//! DELETE /admin/faults
//! ```
//!
//! | fault | what it does to a charge |
//! |---|---|
//! | `late` | takes it, and answers after `delayMs`; its key is in progress until then |
//! | `drop_before` | drops the connection, and takes nothing |
//! | `drop_after` | takes it, and drops the connection |
//! | `error_before` | answers 500, and takes nothing |
//! | `error_after` | takes it, and answers 500 |
//! | `take_late` | drops the connection at once, and takes it after `delayMs` |
//! | `decline` | answers 402 `card_declined`, now and to every later request with this key |
//! | `in_progress` | answers 409 `in_progress`, and takes nothing |
//! | `wrong_amount` | takes and answers one more than was asked for |
//! | `refuse_keys` | answers 400 `key_refused`, and takes nothing |
//! | `forget_keys` | does not remember the key: takes it again |
//! | `no_query` | answers 404 to a query |
//!
//! The header `Provider-Fault: NAME` does the same for one request. The file survives a kill: every
//! charge is on the disk before it is answered.

mod charges;
mod faults;
mod ledger;
mod routes;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use tokio::net::TcpListener;

/// A provider of card charges, with faults.
#[derive(Debug, Parser)]
#[command(name = "payments_provider")]
struct Args {
    /// Where it listens; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:8090")]
    listen: SocketAddr,
    /// Where charges are kept
    #[arg(long, default_value = "provider.jsonl")]
    data: PathBuf,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> std::io::Result<()> {
    let provider = Arc::new(charges::Provider::open(&args.data)?);
    let listener = TcpListener::bind(args.listen).await?;
    println!("listening on {}", listener.local_addr()?);
    tokio::select! {
        served = axum::serve(listener, routes::routes(provider)) => served,
        stopped = tokio::signal::ctrl_c() => stopped,
    }
}
