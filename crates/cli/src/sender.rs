//! `oncebox sender`: the e-mail sender as a process.

use std::net::SocketAddr;

use clap::Args;

use super::common::CommonArgs;
use oncebox::app::config::Settings;
use oncebox::app::{AppError, close, ready, start};
use oncebox::observe::Health;
use oncebox::sender::{EmailTransport, Sender, SenderOptions};
use oncebox::store::Store;

/// Sends the e-mails that handlers have queued: to `.eml` files, or by SMTP where
/// `[email] smtp_url` is set.
#[derive(Debug, Clone, Args)]
pub(super) struct SenderArgs {
    /// Serve /livez, /readyz and /metrics on this address
    #[arg(long, value_name = "ADDR", value_parser = oncebox::app::config::parse_address)]
    listen: Option<SocketAddr>,
    /// End with 0 when nothing is left to send
    #[arg(long)]
    until_empty: bool,
}

pub(super) async fn run(args: &SenderArgs, common: &CommonArgs) -> Result<(), AppError> {
    let (settings, health, stop) = start("sender", args.listen, common).await?;
    let waits = Some((&stop, &health));
    oncebox::with_store!(&settings, waits, |store| send(store, &settings, args.until_empty, health.clone(), &stop)
        .await)
}

async fn send<S: Store>(
    store: S,
    settings: &Settings,
    until_empty: bool,
    health: Health,
    stop: &tokio_util::sync::CancellationToken,
) -> Result<(), AppError> {
    ready(&store, settings, Some((stop, &health))).await?;
    let email = &settings.email;
    let transport = match &email.smtp_url {
        Some(url) => EmailTransport::smtp(&url.0).map_err(AppError::usage)?,
        None => EmailTransport::files(&email.directory),
    };
    let options = SenderOptions {
        attempts_max: email.attempts_max,
        until_empty,
        content_kept: email.content_kept,
        keys_kept: email.keys_kept,
        ..SenderOptions::new(email.from.clone())
    };
    let sender = Sender::new(store.clone(), transport, options, health).map_err(AppError::usage)?;
    let sent = sender.run(stop.clone()).await;
    close(&store).await;
    Ok(sent?)
}
