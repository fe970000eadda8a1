//! Logs go to stderr, as text for people or as JSON for machines. `RUST_LOG` overrides the setting,
//! but no setting enables lines that print payloads or passwords.
//!
//! Promises: once the format `json` is known, every line that a program writes to stderr is one
//! JSON object, including the last error. With `text`, an event is one line, whatever its texts
//! hold. A log that cannot be written ends no work.

use std::io::{self, Write};
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
    // That of PostgreSQL logs the value of a parameter that it does not know, perhaps a password.
    for silenced in [
        "lapin::returned_messages",
        "lapin::channel",
        "lapin::channels",
        "lapin::io_loop",
        "sqlx_postgres::options::parse",
    ] {
        if let Ok(directive) = format!("{silenced}=off").parse() {
            filter = filter.add_directive(directive);
        }
    }
    // The subscriber would say on stderr too that stderr cannot be written, by a macro that panics:
    // a full disk would end the relay, and use up the tries of messages.
    let builder = tracing_subscriber::fmt().with_env_filter(filter).log_internal_errors(false);
    // A subscriber that is installed already (tests, embedding) stays.
    let _ = match format {
        LogFormat::Text => builder
            .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
            .with_writer(|| OneLine(io::stderr()))
            .try_init(),
        LogFormat::Json => builder.json().with_writer(io::stderr).try_init(),
    };
    Ok(())
}

/// From now on [`say`] and panics write JSON, if this is the format. Text does not replace JSON.
pub fn speak(format: LogFormat) {
    let json = format == LogFormat::Json;
    if json && !JSON.swap(json, Ordering::Relaxed) {
        std::panic::set_hook(Box::new(|panic| say("ERROR", &panic.to_string())));
    }
}

/// Writes a line to stderr whatever the log filter is; `level` is `ERROR` or `INFO`.
pub fn say(level: &str, text: &str) {
    let line = if JSON.load(Ordering::Relaxed) {
        let timestamp = chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Micros, true);
        let fields = serde_json::json!({ "message": text });
        serde_json::json!({ "timestamp": timestamp, "level": level, "fields": fields, "target": "oncebox" }).to_string()
    } else if level == "ERROR" {
        format!("error: {text}")
    } else {
        text.to_owned()
    };
    // Not `eprintln!`, which panics where stderr is a full disk or its reader is gone.
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes each event as one line. A line break in an id or an error would otherwise begin a line
/// that looks like an event of its own.
#[derive(Debug)]
struct OneLine<W>(W);

impl<W: Write> Write for OneLine<W> {
    /// Writes a whole event, as the subscriber hands it over.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = event.strip_suffix(b"\n").unwrap_or(event);
        let mut line = Vec::with_capacity(event.len());
        for byte in text {
            match byte {
                b'\n' => line.extend_from_slice(b"\\n"),
                b'\r' => line.extend_from_slice(b"\\r"),
                byte => line.push(*byte),
            }
        }
        line.extend_from_slice(&event[text.len()..]);
        self.0.write_all(&line)?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_whatever_an_id_or_an_error_holds() -> io::Result<()> {
        for (event, line) in [
            ("INFO ready\n", "INFO ready\n"),
            ("ERROR dead sent_id=a\r\nINFO all is well\n", "ERROR dead sent_id=a\\r\\nINFO all is well\n"),
            ("no end", "no end"),
        ] {
            let mut written = OneLine(Vec::new());
            written.write_all(event.as_bytes())?;
            assert_eq!(String::from_utf8_lossy(&written.0), line);
        }
        Ok(())
    }
}
