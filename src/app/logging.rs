//! Logs go to stderr, as text for people or JSON for machines. `RUST_LOG` decides over the setting, except that no setting
//! brings back lines that print payloads.

use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// For machines, one object a line.
    Json,
}

/// Starts logging; a second call changes nothing.
pub fn start_logging(format: LogFormat, filter: &str) {
    let mut filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(filter));
    // The client of RabbitMQ logs every returned message whole, and each planned end of a connection as an error.
    for silenced in ["lapin::returned_messages=off", "lapin::channels=off"] {
        if let Ok(directive) = silenced.parse() {
            filter = filter.add_directive(directive);
        }
    }
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // Where a recorder is installed already (tests, embedding), that one stays.
    let _ = match format {
        LogFormat::Text => builder.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}
