//! The command line of the service: one command for each process.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use oncebox::app::{AppError, CommonArgs, ConsumerArgs, HandlersByConsumer, open_store, stop_on_signals};
use oncebox::store::{Base, Mailbox, Schema};
use oncebox::{Handlers, MessageHandler, StoreError, sqlx};
use reqwest::Url;
use tokio::net::TcpListener;

use crate::Database;
use crate::emails::Receipts;
use crate::ledger::Ledger;
use crate::notifications::Notifications;
use crate::payment::CREATED;
use crate::provider::{Bookings, serve};
use crate::provider_sender::ProviderSender;

/// A payments service whose ledger, e-mails and provider notifications happen exactly once.
#[derive(Debug, Parser)]
#[command(name = "payments")]
struct Args {
    /// --config, --database, --broker and the environment, as all programs of oncebox have them
    #[command(flatten)]
    common: CommonArgs,
    /// Where payments travel
    #[arg(long, default_value = "payments", global = true)]
    topic: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make the tables of the service; those of oncebox are made by `oncebox migrate up`
    Tables,
    /// Take payments: business row and message in one transaction
    Writer {
        #[arg(long, default_value_t = 20)]
        count: u32,
    },
    /// Keep the ledger: two entries for each payment
    Ledger(ConsumerArgs),
    /// Write receipts as e-mail rows; `oncebox sender` sends them
    Emails(ConsumerArgs),
    /// Write what the provider is to be told as rows; `provider-sender` sends them
    Notifications(ConsumerArgs),
    /// Send notifications to the provider
    ProviderSender {
        #[arg(long, default_value = "http://127.0.0.1:8089/notifications")]
        provider: Url,
        /// An answer that takes longer is lost
        #[arg(long, default_value = "10s", value_parser = humantime::parse_duration)]
        timeout: Duration,
    },
    /// Stand in for the provider, which loses every fifth answer
    Provider {
        #[arg(long, default_value = "127.0.0.1:8089")]
        listen: SocketAddr,
    },
    /// Count what has happened
    Counts,
}

/// What `main` returns.
pub(crate) fn main() -> ExitCode {
    oncebox::app::run(run(Args::parse()))
}

async fn run(Args { common, topic, command }: Args) -> Result<(), AppError> {
    match command {
        Command::Tables => {
            let db = open(&common).await?;
            sqlx::raw_sql(include_str!("tables.sql")).execute(db.pool()).await.map_err(StoreError::from)?;
        }
        Command::Writer { count } => crate::writer::take_many(&open(&common).await?, &topic, count).await?,
        // The name of a consumer is its inbox: three names, so each of the three sees every payment
        // once.
        Command::Ledger(args) => consume(args, &common, "ledger", &topic, Ledger).await?,
        Command::Emails(args) => consume(args, &common, "emails", &topic, Receipts).await?,
        Command::Notifications(args) => consume(args, &common, "notifications", &topic, Notifications).await?,
        Command::ProviderSender { provider, timeout } => {
            let sender = ProviderSender::new(provider, timeout).map_err(|error| AppError::failed(error.to_string()))?;
            sender.run(&open(&common).await?, &stop_on_signals()?).await?;
        }
        Command::Provider { listen } => {
            let failed = |error| AppError::failed(format!("{listen}: {error}"));
            let (stop, listener) = (stop_on_signals()?, TcpListener::bind(listen).await.map_err(failed)?);
            tokio::select! {
                served = serve(listener, Bookings::default()) => served.map_err(failed)?,
                () = stop.cancelled() => {}
            }
        }
        Command::Counts => show_counts(&open(&common).await?).await?,
    }
    Ok(())
}

async fn consume(
    args: ConsumerArgs,
    common: &CommonArgs,
    name: &str,
    topic: &str,
    handler: impl MessageHandler<Database> + 'static,
) -> Result<(), AppError> {
    let handlers = Handlers::new().on(CREATED, handler);
    args.run_with(common, HandlersByConsumer::new().consumer(name, [topic], handlers)).await
}

/// The database, if it has the tables of oncebox; a program never makes them by itself.
async fn open(common: &CommonArgs) -> Result<Database, AppError> {
    let db: Database = open_store(&common.load(None)?.settings, None).await?;
    db.schema().await?.require()?;
    Ok(db)
}

async fn show_counts(db: &Database) -> Result<(), StoreError> {
    let number = |sql: &'static str| sqlx::query_scalar::<_, i64>(sql).fetch_one(db.pool());
    println!("payments                 {:>5}", number("select count(*) from payment").await?);
    println!("ledger entries           {:>5}", number("select count(*) from ledger_entry").await?);
    let sum = "select cast(coalesce(sum(amount_minor), 0) as bigint) from ledger_entry";
    println!("sum of the ledger        {:>5}", number(sum).await?);
    println!("e-mails not yet sent     {:>5}", db.emails_pending().await?);
    let told = "select count(*) from provider_notification where state = 'delivered'";
    println!("notifications delivered  {:>5}", number(told).await?);
    let tries = "select cast(coalesce(sum(attempts), 0) as bigint) from provider_notification";
    println!("tries it took            {:>5}", number(tries).await?);
    Ok(())
}
