//! Values as people write them, such as `30s` and `8MiB`, and secrets that are never printed.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::time::bound::LONGEST;

/// A duration: `250ms`, `30s`, `5m`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

impl Span {
    /// A duration of this many whole seconds.
    #[must_use]
    pub const fn seconds(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_duration(self.0).fmt(f)
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer).map_err(|_| {
            serde::de::Error::custom("a duration is text with a unit, for example \"30s\" or \"250ms\"")
        })?;
        parse_duration(&text)
            .map(Self)
            .map_err(|error| serde::de::Error::custom(format!("{error}; write for example \"30s\" or \"250ms\"")))
    }
}

/// Reads a duration as people write it, such as `30s`, of at most 100 years: no instant lies so far
/// ahead that a longer one could be waited for.
///
/// # Errors
/// What is wrong, in words.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(duration) if duration > LONGEST => Err(format!("`{text}` is longer than 100 years")),
        Ok(duration) => Ok(duration),
        Err(error) => Err(format!("`{text}` is no duration ({error})")),
    }
}

/// A duration, or `never`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SpanOrNever {
    /// The value `never`: the time does not end.
    #[default]
    Never,
    /// The value is this duration.
    For(Span),
}

impl SpanOrNever {
    /// The duration; `None` for `never`.
    #[must_use]
    pub fn duration(self) -> Option<Duration> {
        match self {
            Self::Never => None,
            Self::For(span) => Some(span.0),
        }
    }
}

impl Serialize for SpanOrNever {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Never => serializer.serialize_str("never"),
            Self::For(span) => span.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for SpanOrNever {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)
            .map_err(|_| serde::de::Error::custom("`never`, or a duration as text with a unit, for example \"30d\""))?;
        if text == "never" {
            return Ok(Self::Never);
        }
        parse_duration(&text)
            .map(|span| Self::For(Span(span)))
            .map_err(|error| serde::de::Error::custom(format!("{error}; write for example \"30d\", or \"never\"")))
    }
}

/// A size: `900000`, `64KiB`, `8MiB`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub usize);

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, size) in [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)] {
            if self.0 >= size && self.0.is_multiple_of(size) {
                return write!(f, "{}{unit}", self.0 / size);
            }
        }
        write!(f, "{}B", self.0)
    }
}

impl fmt::Debug for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
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
        bytes.and_then(|bytes| usize::try_from(bytes).ok()).map(Self).ok_or_else(|| {
            serde::de::Error::custom(
                "a size is a number of bytes or text with a unit, for example \"64KiB\" or \"8MiB\"",
            )
        })
    }
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
        } else if self.0.contains("://") {
            crate::error::redact(&self.0)
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
        assert_eq!(ByteSize(8 << 20).to_string(), "8MiB");
        let span: Span = serde_json::from_str("\"1m 30s\"").unwrap();
        assert_eq!(span.0, Duration::from_secs(90));
        assert!(serde_json::from_str::<Span>("30").unwrap_err().to_string().contains("unit"));
        // `Instant::now()` plus this panics.
        let forever = "\"300000000000y\"";
        assert!(serde_json::from_str::<Span>(forever).unwrap_err().to_string().contains("longer than 100 years"));
        assert!(serde_json::from_str::<SpanOrNever>(forever).is_err());
        let horizon = |text: &str| serde_json::from_str::<SpanOrNever>(text);
        assert_eq!(horizon("\"never\"").unwrap(), SpanOrNever::Never);
        let month = SpanOrNever::For(Span::seconds(30 * 86_400));
        assert_eq!(horizon("\"30d\"").unwrap(), month);
        assert_eq!(horizon(&serde_json::to_string(&month).unwrap()).unwrap(), month);
        for wrong in ["\"always\"", "30"] {
            assert!(horizon(wrong).unwrap_err().to_string().contains("never"));
        }
    }

    #[test]
    fn a_secret_never_shows() {
        assert_eq!(format!("{:?}", Secret("hunter2".into())), "***");
        assert!(!format!("{:?}", Secret("amqp://a:hunter2@h/v".into())).contains("hunter2"));
    }
}
