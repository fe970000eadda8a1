//! Logs go to stderr, as text for people or as JSON for machines. `RUST_LOG` overrides the setting,
//! but no setting enables lines that print payloads or passwords.
//!
//! Promise: with the format `json`, every line that a program writes to stderr is one JSON object,
//! including the last error.

use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people, as lines of text.
    #[default]
    Text,
    /// For machines, one object a line.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        <Self as clap::ValueEnum>::from_str(text, true)
    }
}

/// Whether [`say`] writes JSON.
static JSON: AtomicBool = AtomicBool::new(false);

/// Starts logging; a second call changes nothing.
///
/// # Errors
/// A filter that cannot be read.
pub fn start_logging(format: LogFormat, filter: &str) -> Result<(), String> {
    speak(format);
    let from_environment = std::env::var(EnvFilter::DEFAULT_ENV).ok().filter(|filter| !filter.is_empty());
    let (name, filter) = match &from_environment {
        Some(filter) => (EnvFilter::DEFAULT_ENV, filter.as_str()),
        None => ("log.filter", filter),
    };
    let mut filter = EnvFilter::try_new(filter)
        .map_err(|error| format!("{name} = `{filter}`: {error}; write for example `info,oncebox=debug`"))?;
    // The client of RabbitMQ logs every returned message completely, and each end of a channel or
    // connection as an error, even a planned one. The code that meets such an end logs its meaning.
    for silenced in ["returned_messages", "channel", "channels", "io_loop"].map(|module| format!("lapin::{module}=off"))
    {
        if let Ok(directive) = silenced.parse() {
            filter = filter.add_directive(directive);
        }
    }
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A subscriber that is installed already (tests, embedding) stays.
    let _ = match format {
        LogFormat::Text => builder.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
    Ok(())
}

/// Sets the format of [`say`] and of panics from now on.
pub fn speak(format: LogFormat) {
    let json = format == LogFormat::Json;
    if json && !JSON.swap(json, Ordering::Relaxed) {
        std::panic::set_hook(Box::new(|panic| say("ERROR", &panic.to_string())));
    }
}

/// Writes a line to stderr whatever the log filter is; `level` is `ERROR` or `INFO`.
pub fn say(level: &str, text: &str) {
    if JSON.load(Ordering::Relaxed) {
        let timestamp = chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Micros, true);
        let fields = serde_json::json!({ "message": text });
        eprintln!(
            "{}",
            serde_json::json!({ "timestamp": timestamp, "level": level, "fields": fields, "target": "oncebox" })
        );
    } else if level == "ERROR" {
        eprintln!("error: {text}");
    } else {
        eprintln!("{text}");
    }
}
