//! The settings of the embedded broker.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::BrokerError;
use crate::time::bound;

/// Settings of the embedded broker; [`EmbeddedConfig::new`] takes a path and sets the defaults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbeddedConfig {
    /// The file. `-wal`, `-shm`, `.lock` and `.lock-next` are beside it.
    pub path: PathBuf,
    /// The header `ce_source` of every published message.
    pub source: String,
    /// Partitions of topics that are created from now on; existing topics keep their number.
    pub partitions: u32,
    /// How long a member of a group may miss heartbeats before its partitions go to other members.
    pub session_timeout: Duration,
    /// How long acknowledgements are collected before they are committed together. If a crash loses
    /// some, their messages are delivered again.
    pub acknowledge_interval: Duration,
    /// How long a transaction waits for its turn, and then for the file.
    pub busy_timeout: Duration,
    /// Rows that are older than this and that every group has handled are deleted. `None` keeps
    /// everything; a topic that no group has joined yet keeps everything too.
    pub retention: Option<Duration>,
    /// A message with more bytes than this in key, headers and payload is refused.
    pub message_bytes_max: usize,
    /// Most bytes of a member's unacknowledged deliveries; at this number nothing more is read. One
    /// delivery is always allowed.
    pub in_flight_bytes_max: usize,
}

impl EmbeddedConfig {
    /// The default settings for a file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            source: "oncebox".to_owned(),
            partitions: 4,
            session_timeout: Duration::from_secs(6),
            acknowledge_interval: Duration::from_millis(50),
            busy_timeout: Duration::from_secs(30),
            retention: None,
            message_bytes_max: 64 * 1024 * 1024,
            in_flight_bytes_max: 64 * 1024 * 1024,
        }
    }

    /// Reads a URL `embedded://FILE`, and refuses any other one.
    pub(crate) fn from_url(url: &str) -> Result<Self, BrokerError> {
        match url.strip_prefix("embedded://") {
            Some(path) if !path.is_empty() => Ok(Self::new(path)),
            _ => Err(BrokerError::Refused(format!(
                "`{}` is no address of the embedded broker; write `embedded://FILE`",
                crate::error::redact(url)
            ))),
        }
    }

    /// The time between two heartbeats: several may be late before the membership is lost.
    pub(super) fn heartbeat(&self) -> Duration {
        self.session_timeout / 6
    }

    /// Checks what can be checked without the file. The error names the setting.
    pub(crate) fn validate(&self) -> Result<(), BrokerError> {
        let refused = |what: &str| Err(BrokerError::Refused(format!("broker `{}`: {what}", self.path.display())));
        if !(1..=1_024).contains(&self.partitions) {
            return refused("`partitions` must be 1 to 1024");
        }
        if self.session_timeout < Duration::from_millis(300) {
            return refused("`session_timeout` must be at least 300 ms");
        }
        if self.source.is_empty() {
            return refused("`source` must not be empty");
        }
        if !(1..=900_000_000).contains(&self.message_bytes_max) {
            return refused("`message_bytes_max` must be 1 to 900000000, what SQLite can store");
        }
        if self.in_flight_bytes_max == 0 {
            return refused("`in_flight_bytes_max` must be at least 1");
        }
        bound::check([
            ("session_timeout", self.session_timeout),
            ("acknowledge_interval", self.acknowledge_interval),
            ("busy_timeout", self.busy_timeout),
            ("retention", self.retention.unwrap_or_default()),
        ])
        .or_else(|error| refused(&error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_path_of_the_url_is_taken_as_it_stands() {
        assert_eq!(
            EmbeddedConfig::from_url("embedded:///tmp/a b%20.db").unwrap().path,
            PathBuf::from("/tmp/a b%20.db")
        );
        assert_eq!(EmbeddedConfig::from_url("embedded://broker.db").unwrap().path, PathBuf::from("broker.db"));
        for wrong in ["embedded://", "sqlite://broker.db", "broker.db"] {
            let error = EmbeddedConfig::from_url(wrong).unwrap_err();
            assert!(error.to_string().contains("embedded://FILE"), "{error}");
        }
    }

    #[test]
    fn settings_that_make_no_sense_are_refused_by_name() {
        let good = EmbeddedConfig::new("broker.db");
        good.validate().unwrap();
        let named = |config: EmbeddedConfig, name: &str| {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        };
        named(EmbeddedConfig { partitions: 0, ..good.clone() }, "partitions");
        named(EmbeddedConfig { session_timeout: Duration::ZERO, ..good.clone() }, "session_timeout");
        named(EmbeddedConfig { session_timeout: Duration::MAX, ..good.clone() }, "session_timeout");
        named(EmbeddedConfig { acknowledge_interval: Duration::MAX, ..good.clone() }, "acknowledge_interval");
        named(EmbeddedConfig { source: String::new(), ..good.clone() }, "source");
        named(EmbeddedConfig { in_flight_bytes_max: 0, ..good.clone() }, "in_flight_bytes_max");
        named(EmbeddedConfig { message_bytes_max: usize::MAX, ..good }, "message_bytes_max");
    }
}
