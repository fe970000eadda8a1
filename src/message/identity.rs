//! The identity of a message: 16 bytes, the same in every process and language (R31, R32).
//!
//! Promise: a canonical UUID (but the nil UUID) is its own identity. For any other id the identity
//! is the first 16 bytes of SHA-256 of source and id, each with its length, with six bits set to
//! the form of a UUID version 8. So ids that differ only in case, accents or trailing space stay
//! different, and never seem to carry a time. Not here: finding the id in a message
//! (`Message::identify`).

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::hash::first_16;

/// The identity by which a message is deduplicated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageId(Uuid);

impl MessageId {
    /// A new time-ordered id (UUID v7).
    #[must_use]
    pub fn new() -> Self {
        Self(Uuid::now_v7())
    }

    /// The id as a UUID value.
    #[must_use]
    pub fn uuid(self) -> Uuid {
        self.0
    }

    /// The 16 bytes as they are stored in the inbox.
    pub(crate) fn bytes(self) -> [u8; 16] {
        self.0.into_bytes()
    }

    /// The time in the id, in milliseconds since 1970; `None` unless it is a v7 UUID.
    pub(crate) fn unix_millis(self) -> Option<u64> {
        if self.0.get_version_num() != 7 || self.0.get_variant() != uuid::Variant::RFC4122 {
            return None;
        }
        let bytes = self.0.as_bytes();
        Some(u64::from_be_bytes([0, 0, bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5]]))
    }
}

/// The UUID stays as it is.
impl From<Uuid> for MessageId {
    fn from(id: Uuid) -> Self {
        Self(id)
    }
}

impl Default for MessageId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MessageId({})", self.0)
    }
}

/// The identity for the text of an id and its source (R32).
#[must_use]
pub fn identity(source: &str, id: &str) -> MessageId {
    if let Some(uuid) = canonical(id) {
        return MessageId(uuid);
    }
    let mut hash = Sha256::new();
    for part in [source, id] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    }
    MessageId(uuid::Builder::from_custom_bytes(first_16(&hash.finalize())).into_uuid())
}

/// Reads a UUID of 36 characters in lower case with hyphens. Any other spelling, and the nil UUID,
/// is a text id.
fn canonical(id: &str) -> Option<Uuid> {
    let uuid = Uuid::try_parse(id).ok()?;
    let mut buffer = Uuid::encode_buffer();
    (uuid.hyphenated().encode_lower(&mut buffer) == id && !uuid.is_nil()).then_some(uuid)
}

/// Where the id of an incoming message is found (`id = …` of a consumer).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum IdRule {
    /// `ce_id` on Kafka and the embedded broker; on RabbitMQ the property `message_id`, or the
    /// header `cloudEvents_id` where that is missing.
    #[default]
    Envelope,
    /// `header:NAME`: the text of the header with this name.
    Header(String),
    /// `payload:/POINTER`, a JSON pointer (RFC 6901).
    Payload(String),
    /// `coordinates`: topic, partition, offset and a configured epoch. Not for RabbitMQ.
    Coordinates,
}

impl FromStr for IdRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            Some(("header", name)) if !name.is_empty() => Ok(Self::Header(name.to_owned())),
            Some(("payload", pointer)) if pointer.starts_with('/') => Ok(Self::Payload(pointer.to_owned())),
            None if text == "envelope" => Ok(Self::Envelope),
            None if text == "coordinates" => Ok(Self::Coordinates),
            _ => Err(format!(
                "`{text}` is no id rule: use `envelope`, `header:NAME`, `payload:/POINTER` or `coordinates`"
            )),
        }
    }
}

impl fmt::Display for IdRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Envelope => f.write_str("envelope"),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Payload(pointer) => write!(f, "payload:{pointer}"),
            Self::Coordinates => f.write_str("coordinates"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r32_only_the_canonical_spelling_of_a_uuid_is_itself() {
        let text = "0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b";
        assert_eq!(identity("s", text).to_string(), text);
        let others = [text.to_uppercase(), text.replace('-', ""), format!("{text} "), format!("{{{text}}}")];
        for other in others {
            let id = identity("s", &other);
            assert_ne!(id.to_string(), text);
            assert_eq!(id.uuid().get_version_num(), 8);
            assert_eq!(id.unix_millis(), None);
        }
    }

    #[test]
    fn r32_ids_that_differ_in_case_accents_space_or_source_differ() {
        let ids = ["Abc", "abc", "abc ", "ábc", ""].map(|id| identity("s", id));
        for (i, a) in ids.iter().enumerate() {
            assert!(ids[i + 1..].iter().all(|b| a != b));
        }
        assert_ne!(identity("ab", "c"), identity("a", "bc"), "length prefixes keep parts apart");
    }

    #[test]
    fn only_v7_carries_its_time() {
        let id = identity("s", "0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b");
        assert_eq!(id.unix_millis(), Some(0x0197_a1b2_c3d4));
        assert_eq!(MessageId::from(Uuid::from_u128(1)).unix_millis(), None);
    }
}
