//! What all programs take, and how each of them starts and ends.

use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use comfy_table::{ContentArrangement, Table, presets};

use crate::app::config::{Layers, Loaded, load};
use crate::app::{AppError, Exit, LogFormat, say, speak, start_logging};

/// Flags of every program.
#[derive(Debug, Clone, Default, Args)]
pub struct CommonArgs {
    /// Configuration file (TOML); `oncebox config template` prints one
    #[arg(long, value_name = "FILE", env = "ONCEBOX_CONFIG", global = true)]
    pub config: Option<PathBuf>,
    /// Database: postgres://, mysql:// (also MariaDB) or sqlite://FILE [env: ONCEBOX_DATABASE__URL]
    #[arg(long, value_name = "URL", global = true)]
    pub database: Option<String>,
    /// Broker: kafka://, kafkas://, amqp://, amqps:// or embedded://FILE [env: ONCEBOX_BROKER__URL]
    #[arg(long, value_name = "URL", global = true)]
    pub broker: Option<String>,
    /// How log lines look [env: ONCEBOX_LOG__FORMAT]
    #[arg(long, value_name = "FORMAT", global = true)]
    pub log_format: Option<LogFormat>,
}

impl CommonArgs {
    /// Reads all layers and starts logging.
    ///
    /// # Errors
    /// Settings that cannot be used: exit code 2.
    pub fn load(&self, listen: Option<SocketAddr>) -> Result<Loaded, AppError> {
        // What is wrong with the settings is said in the format that was asked for where it is read first.
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
        let loaded = load(&Layers { file: self.config.clone(), flags }).map_err(AppError::usage)?;
        let log = &loaded.settings.log;
        start_logging(log.format, &log.filter).map_err(AppError::usage)?;
        Ok(loaded)
    }
}

/// Prints a line of data to stdout; where it cannot be written (a full disk, a reader that went away), that is an error.
macro_rules! data {
    ($($argument:tt)*) => {{
        use std::io::Write as _;
        writeln!(std::io::stdout(), $($argument)*)
            .map_err(|error| $crate::app::AppError::failed(format!("stdout cannot be written: {error}")))?
    }};
}

/// How data is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(super) enum Output {
    /// For people.
    #[default]
    Table,
    /// For machines.
    Json,
}

/// A table for people: on a terminal long cells are wrapped, in a pipe every row is one line.
pub(super) fn table<const COLUMNS: usize>(header: [&str; COLUMNS]) -> Table {
    const WIDTH: u16 = 120;
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(header);
    if std::io::IsTerminal::is_terminal(&std::io::stdout()) {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH);
    }
    table
}

/// Runs a program to its end and turns what happened into an exit code.
pub(super) fn run<F: Future<Output = Result<(), AppError>>>(main: F) -> ExitCode {
    #[cfg(feature = "tls")]
    {
        // Two providers in one graph would panic at run time; one is chosen before anything asks (a second call is harmless).
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return end(&AppError::failed(format!("the runtime cannot start: {error}"))),
    };
    let outcome = runtime.block_on(main);
    // Threads of clients that hang in their teardown must not keep the process.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    match outcome {
        Ok(()) => Exit::Done.into(),
        Err(error) => end(&error),
    }
}

fn end(error: &AppError) -> ExitCode {
    say(if error.exit == Exit::Done { "INFO" } else { "ERROR" }, &error.message);
    error.exit.into()
}
