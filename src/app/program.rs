//! The flags of all programs, and how each program starts and ends. Your own program can use them
//! too.

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::config::{Loaded, load};
use super::exit::{AppError, Exit};
use super::logging::{LogFormat, say, speak, start_logging};

/// The heading in a help under which the flags stand that every command takes.
pub const COMMON_OPTIONS: &str = "Common options";

/// Flags of every program; a command line of one's own takes them by `#[command(flatten)]`.
#[derive(Debug, Clone, Default, Args)]
pub struct CommonArgs {
    /// Configuration file (TOML); `oncebox config template` prints one
    #[arg(long, value_name = "FILE", env = "ONCEBOX_CONFIG", global = true, help_heading = COMMON_OPTIONS)]
    pub config: Option<PathBuf>,
    /// Database: postgres://, mysql:// (also MariaDB) or sqlite://FILE [env: ONCEBOX_DATABASE__URL]
    #[arg(long, value_name = "URL", global = true, help_heading = COMMON_OPTIONS)]
    pub database: Option<String>,
    /// Broker: kafka://, kafkas://, amqp://, amqps:// or embedded://FILE [env: ONCEBOX_BROKER__URL]
    #[arg(long, value_name = "URL", global = true, help_heading = COMMON_OPTIONS)]
    pub broker: Option<String>,
    /// How log lines look [env: ONCEBOX_LOG__FORMAT]
    #[arg(long, value_name = "FORMAT", global = true, help_heading = COMMON_OPTIONS)]
    pub log_format: Option<LogFormat>,
}

impl CommonArgs {
    /// Reads all layers of settings and starts logging.
    pub fn load(&self, listen: Option<SocketAddr>) -> Result<Loaded, AppError> {
        // Errors in the settings are written in the requested format, so that is read first.
        let from_environment = || std::env::var("ONCEBOX_LOG__FORMAT").ok().and_then(|format| format.parse().ok());
        if let Some(format) = self.log_format.or_else(from_environment) {
            speak(format);
        }
        let mut flags = Vec::new();
        let mut flag = |flag: &'static str, path: &'static str, value: Option<String>| {
            flags.extend(value.map(|value| (flag, path, value)));
        };
        flag("--database", "database.url", self.database.clone());
        flag("--broker", "broker.url", self.broker.clone());
        flag("--log-format", "log.format", self.log_format.map(|format| format!("{format:?}").to_lowercase()));
        flag("--listen", "http.listen", listen.map(|listen| listen.to_string()));
        let environment: Vec<_> = std::env::vars_os().collect();
        let mut loaded = load(self.config.as_deref(), &environment, &flags).map_err(AppError::usage)?;
        loaded.forget_default_broker();
        start_logging(loaded.settings.log.format, &loaded.settings.log.filter).map_err(AppError::usage)?;
        Ok(loaded)
    }
}

/// Runs a program to its end and returns its exit code for `main`. Makes the runtime and chooses
/// the TLS provider.
pub fn run<F: Future<Output = Result<(), AppError>>>(main: F) -> ExitCode {
    #[cfg(feature = "tls")]
    {
        // Two TLS providers in one program would panic, so one is chosen first (a second call is
        // harmless).
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return end(&AppError::failed(format!("the runtime cannot start: {error}"))),
    };
    let outcome = runtime.block_on(main);
    // Threads of clients that hang during their teardown must not keep the process alive.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    match outcome {
        Ok(()) => Exit::Done.into(),
        Err(error) => end(&error),
    }
}

fn end(error: &AppError) -> ExitCode {
    if !error.message.is_empty() {
        say(if error.exit == Exit::Done { "INFO" } else { "ERROR" }, &error.message);
    }
    error.exit.into()
}
