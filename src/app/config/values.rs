//! Values as people write them, such as `30s` and `8MiB`, and secrets that are never printed.
//!
//! A module here is a way to write a value, for `#[serde(with = "..")]`.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use crate::error::{redact, split_scheme};
use crate::time::bound::LONGEST;

/// Reads a duration as people write it, such as `30s`, of at most 100 years: no instant lies so far
/// ahead that a longer one could be waited for.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(duration) if duration > LONGEST => Err(format!("`{text}` is longer than 100 years")),
        Ok(duration) => Ok(duration),
        Err(error) => Err(format!("`{text}` is no duration ({error})")),
    }
}

/// Reads an address to listen on, such as `127.0.0.1:9090`. Names are not looked up: a name may
/// have several addresses.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| format!("`{text}` is no address with a port, such as 127.0.0.1:9090 or [::1]:9090"))
}

/// An address to listen on, or none.
pub(super) mod address_if_set {
    use super::*;

    pub(in crate::app) fn serialize<S: Serializer>(
        address: &Option<SocketAddr>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        address.serialize(serializer)
    }

    pub(in crate::app) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<SocketAddr>, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?;
        text.map(|text| parse_address(&text)).transpose().map_err(D::Error::custom)
    }
}

/// A duration: `250ms`, `30s`, `5m`.
pub(super) mod span {
    use super::*;

    pub(in crate::app) fn serialize<S: Serializer>(span: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&humantime::format_duration(*span))
    }

    pub(in crate::app) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let text = String::deserialize(deserializer)
            .map_err(|_| D::Error::custom("a duration is text with a unit, for example \"30s\" or \"250ms\""))?;
        parse_duration(&text)
            .map_err(|error| D::Error::custom(format!("{error}; write for example \"30s\" or \"250ms\"")))
    }
}

/// A duration, or nothing at all.
pub(super) mod span_if_set {
    use super::*;

    #[derive(Deserialize)]
    #[serde(transparent)]
    struct Set(#[serde(with = "super::span")] Duration);

    pub(in crate::app) fn serialize<S: Serializer>(span: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        match span {
            None => serializer.serialize_none(),
            Some(span) => super::span::serialize(span, serializer),
        }
    }

    pub(in crate::app) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<Set>::deserialize(deserializer)?.map(|set| set.0))
    }
}

/// A duration, or `never` for a time that does not end.
pub(super) mod span_or_never {
    use super::*;

    pub(in crate::app) fn serialize<S: Serializer>(span: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        match span {
            None => serializer.serialize_str("never"),
            Some(span) => super::span::serialize(span, serializer),
        }
    }

    pub(in crate::app) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Duration>, D::Error> {
        let text = String::deserialize(deserializer)
            .map_err(|_| D::Error::custom("`never`, or a duration as text with a unit, for example \"30d\""))?;
        if text == "never" {
            return Ok(None);
        }
        parse_duration(&text)
            .map(Some)
            .map_err(|error| D::Error::custom(format!("{error}; write for example \"30d\", or \"never\"")))
    }
}

/// A number of bytes: `900000`, `64KiB`, `8MiB`.
pub(super) mod byte_size {
    use super::*;

    pub(in crate::app) fn serialize<S: Serializer>(bytes: &usize, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&shown_size(*bytes))
    }

    pub(in crate::app) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Raw {
            Number(u64),
            Text(String),
        }
        let bytes = match Raw::deserialize(deserializer)? {
            Raw::Number(bytes) => Some(bytes),
            Raw::Text(text) => parse_size(&text),
        };
        bytes.and_then(|bytes| usize::try_from(bytes).ok()).ok_or_else(|| {
            D::Error::custom("a size is a number of bytes or text with a unit, for example \"64KiB\" or \"8MiB\"")
        })
    }
}

fn shown_size(bytes: usize) -> String {
    for (unit, size) in [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)] {
        if bytes >= size && bytes.is_multiple_of(size) {
            return format!("{}{unit}", bytes / size);
        }
    }
    format!("{bytes}B")
}

fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().ok()?;
    let unit: u64 = match text[digits..].trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        _ => return None,
    };
    number.checked_mul(unit)
}

/// A value that is never printed: a URL with its password, a password.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl Secret {
    /// The text that may be printed: a URL without its password, anything else replaced as a whole.
    #[must_use]
    pub(crate) fn redacted(&self) -> String {
        if self.0.is_empty() {
            String::new()
        } else if split_scheme(&self.0).is_some() {
            redact(&self.0)
        } else {
            "***".to_owned()
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.redacted())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn sizes_and_durations_are_read_as_people_write_them() {
        assert_eq!(parse_size("8MiB"), Some(8 << 20));
        assert_eq!(parse_size("900000"), Some(900_000));
        assert_eq!(parse_size("8 apples"), None);
        assert_eq!(shown_size(8 << 20), "8MiB");
        let span = |text: &str| span::deserialize(&mut serde_json::Deserializer::from_str(text));
        assert_eq!(span("\"1m 30s\"").unwrap(), Duration::from_secs(90));
        assert!(span("30").unwrap_err().to_string().contains("unit"));
        // `Instant::now()` plus this panics.
        let forever = "\"300000000000y\"";
        assert!(span(forever).unwrap_err().to_string().contains("longer than 100 years"));
        let horizon = |text: &str| span_or_never::deserialize(&mut serde_json::Deserializer::from_str(text));
        assert!(horizon(forever).is_err());
        assert_eq!(horizon("\"never\"").unwrap(), None);
        let month = Some(Duration::from_secs(30 * 86_400));
        assert_eq!(horizon("\"30d\"").unwrap(), month);
        let written = span_or_never::serialize(&month, serde_json::value::Serializer).unwrap();
        assert_eq!(horizon(&written.to_string()).unwrap(), month);
        for wrong in ["\"always\"", "30"] {
            assert!(horizon(wrong).unwrap_err().to_string().contains("never"));
        }
    }

    #[test]
    fn a_secret_never_shows() {
        assert_eq!(format!("{:?}", Secret("hunter2".into())), "***");
        assert!(!format!("{:?}", Secret("amqp://a:hunter2@h/v".into())).contains("hunter2"));
        assert_eq!(format!("{:?}", Secret("host=db password=x://hunter2".into())), "***");
    }
}
