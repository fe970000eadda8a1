//! Pure: no I/O, no clock.
//! The key that a client sends, by which a second request is recognised (O24).
//!
//! Guarantees:
//!
//! * One header line gives one key, whether the value is quoted or bare. So a client has one
//!   identity through two HTTP stacks. The value is not parsed as a structured field, because a
//!   bare UUID that starts with a digit is not valid there.
//! * Keys are compared byte for byte; with a UUID format the key is lower-cased first.
//! * A key is never shown as it is: `Debug` and [`short_hash`](Key::short_hash) give twelve
//!   characters of its SHA-256, and no error contains it. A service shows the hash of its record
//!   instead (`Identity::short_hash`), by which an operator finds it.
//!
//! Not here: whether a route needs a key ([`route`](super::route)), and what the store knows of a
//! key ([`decide`](super::decide())).

use std::fmt;

use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::error::Invalid;
use crate::text::hex::hex;
use crate::time::db_time::DbTime;

pub(crate) const KEY_BYTES_MIN: usize = 16;
pub(crate) const KEY_BYTES_MAX: usize = 255;

/// The form of key that a route accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeyFormat {
    /// Any 16 to 255 bytes of `[A-Za-z0-9_.:~-]`.
    #[default]
    Opaque,
    /// A UUID of any version in its 36-character form.
    Uuid,
    /// A UUID v7 in its 36-character form. When there is no record, its time tells a late retry
    /// from a new key (O23).
    UuidV7,
}

/// A key in the form in which it is compared and stored.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(String);

impl Key {
    /// Reads the key from the lines of the `Idempotency-Key` header (or of gRPC metadata). Returns
    /// `None` if there is no line. The caller answers an error with `IDEMPOTENCY_KEY_INVALID`.
    pub(crate) fn from_header(lines: &[&[u8]], format: KeyFormat) -> Result<Option<Self>, Invalid> {
        match lines {
            [] => Ok(None),
            [line] => Self::parse(unquoted(trimmed(line))?, format).map(Some),
            // It is not certain which one is meant.
            _ => Err(Invalid::new(format!("the key is given in {} header lines: send one", lines.len()))),
        }
    }

    /// Reads a key without quotes and white space, from a message or from a person's input.
    ///
    /// # Errors
    /// The key is not valid in this format.
    pub fn parse(content: &[u8], format: KeyFormat) -> Result<Self, Invalid> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.:~-".contains(&byte);
        let length = content.len();
        if length == 0 {
            return Err(Invalid::new("the key is empty: send 16 to 255 characters, or no header at all"));
        }
        if let Some(at) = content.iter().position(|&byte| !allowed(byte)) {
            // A comma or a space means that two values were joined.
            return Err(Invalid::new(format!(
                "the key has the byte 0x{:02x} at offset {at}: only A-Z, a-z, 0-9 and _ . : ~ - are allowed",
                content[at]
            )));
        }
        if length > KEY_BYTES_MAX {
            return Err(Invalid::new(format!("the key has {length} characters: it may have at most 255")));
        }
        let text: String = content.iter().copied().map(char::from).collect();
        match format {
            KeyFormat::Opaque if length < KEY_BYTES_MIN => Err(Invalid::new(format!(
                "the key has {length} characters: it needs at least 16, and a random UUID has 36"
            ))),
            KeyFormat::Opaque => Ok(Self(text)),
            KeyFormat::Uuid | KeyFormat::UuidV7 => {
                let why = "the key is not a UUID in its 36-character form, which this operation asks for";
                let uuid = hyphenated(&text).ok_or_else(|| Invalid::new(why))?;
                if format == KeyFormat::UuidV7 && !is_v7(uuid) {
                    return Err(Invalid::new(format!(
                        "the key is a UUID of version {}; this operation asks for version 7, whose time tells late retries",
                        uuid.get_version_num()
                    )));
                }
                Ok(Self(text.to_ascii_lowercase()))
            }
        }
    }

    /// The key as it is stored and hashed.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The text for the log of a client: the first twelve hexadecimal digits of the SHA-256 of the
    /// key alone. It is not the hash that `oncebox keys` lists, which covers tenant and operation
    /// too: a client does not know these.
    #[must_use]
    pub fn short_hash(&self) -> String {
        hex(&Sha256::digest(self.0.as_bytes())[..6])
    }

    /// The time inside the key; `None` if the key is not a UUID v7.
    #[must_use]
    pub fn time(&self) -> Option<DbTime> {
        let uuid = hyphenated(&self.0).filter(|&uuid| is_v7(uuid))?;
        let (millis, _) = uuid.as_u64_pair();
        i64::try_from(millis >> 16).ok().map(DbTime::from_millis)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key(#{})", self.short_hash())
    }
}

fn trimmed(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] = value {
        value = rest;
    }
    while let [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

/// The content of a quoted value, or the bare value as it is.
fn unquoted(value: &[u8]) -> Result<&[u8], Invalid> {
    let [b'"', rest @ ..] = value else { return Ok(value) };
    let refused = |why: &'static str| Err(Invalid::new(why));
    match rest.iter().position(|&byte| byte == b'"' || byte == b'\\') {
        None => refused("the key begins with a quote and has no closing one"),
        Some(end) if rest[end] == b'\\' => refused("the quoted key holds a backslash: escapes are not allowed"),
        Some(end) if end + 1 < rest.len() => {
            refused("something follows the closing quote of the key: parameters are not allowed")
        }
        Some(end) => Ok(&rest[..end]),
    }
}

/// Reads a UUID in its 36-character form, in any case. Other spellings are refused.
fn hyphenated(text: &str) -> Option<Uuid> {
    if text.len() == 36 { Uuid::try_parse(text).ok() } else { None }
}

fn is_v7(uuid: Uuid) -> bool {
    uuid.get_version_num() == 7 && uuid.get_variant() == uuid::Variant::RFC4122
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: &str = "9b2f0c64-1b5e-4f0e-8a3c-6f1d2e3a4b5c";
    const V7: &str = "0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b";

    fn opaque(line: &str) -> Result<Option<Key>, Invalid> {
        Key::from_header(&[line.as_bytes()], KeyFormat::Opaque)
    }

    fn refused(line: &str) -> String {
        opaque(line).expect_err(line).to_string()
    }

    // Shown by: parsing the quoted form only; and by keeping the quotes.
    #[test]
    fn o24_quoted_and_bare_are_one_key_also_one_that_starts_with_a_digit() {
        let bare = opaque(V4).expect("a bare UUID").expect("a key");
        for line in [format!("\"{V4}\""), format!("  \"{V4}\"\t"), format!("\t{V4} ")] {
            assert_eq!(opaque(&line), Ok(Some(bare.clone())), "{line:?}");
        }
        assert_eq!(bare.as_str(), V4);
        assert_eq!(Key::from_header(&[], KeyFormat::Opaque), Ok(None));
    }

    // Shown by: taking the first of several lines; trimming inside the quotes; allowing the comma.
    #[test]
    fn o24_empty_comma_space_and_two_lines_are_refused_by_name() {
        let twice = Key::from_header(&[V4.as_bytes(), V4.as_bytes()], KeyFormat::Opaque).expect_err("two lines");
        assert_eq!(twice.to_string(), "the key is given in 2 header lines: send one");
        for empty in ["", "   ", "\"\""] {
            assert!(refused(empty).starts_with("the key is empty"), "{empty:?}");
        }
        for (line, byte, at) in [
            (format!("{V4},{V4}"), "0x2c", 36),
            (format!("{V4} {V4}"), "0x20", 36),
            (format!("\" {V4}\""), "0x20", 0),
            ("0123456789abcde\u{e9}".to_owned(), "0xc3", 15),
            ("0123456789abcdef\0".to_owned(), "0x00", 16),
            ("'0123456789abcdef'".to_owned(), "0x27", 0),
        ] {
            let why = format!("the key has the byte {byte} at offset {at}: ");
            assert!(refused(&line).starts_with(&why), "{line:?}");
        }
    }

    // Shown by: taking what stands before the first quote or backslash as the key.
    #[test]
    fn o24_a_quoted_key_has_no_escapes_no_parameters_and_one_end() {
        assert!(refused(&format!("\"{V4}")).contains("has no closing one"));
        assert!(refused("\"0123456789\\\"abcdef\"").contains("holds a backslash"));
        assert!(refused(&format!("\"{V4}\";v=1")).contains("follows the closing quote"));
        assert!(refused(&format!("\"{V4}\" \"{V4}\"")).contains("follows the closing quote"));
        assert!(refused(&format!("{V4}\"")).contains("0x22 at offset 36"));
    }

    // Shown by: moving either bound by one.
    #[test]
    fn o24_a_key_has_16_to_255_bytes() {
        let key = |length: usize| opaque(&"k".repeat(length));
        assert!(refused(&"k".repeat(15)).contains("has 15 characters: it needs at least 16"));
        assert!(key(16).is_ok() && key(255).is_ok());
        assert!(refused(&"k".repeat(256)).contains("has 256 characters: it may have at most 255"));
        assert!(opaque("AZaz09_.:~-AZaz09_.:~-").is_ok());
    }

    // Shown by: leaving the case as it came; taking every spelling that the uuid crate reads.
    #[test]
    fn o24_a_uuid_key_is_the_36_character_form_lower_cased() {
        let uuid = |text: &str| Key::parse(text.as_bytes(), KeyFormat::Uuid);
        assert_eq!(uuid(&V4.to_uppercase()).expect("upper case").as_str(), V4);
        for other in [&V4.replace('-', ""), &format!("urn:uuid:{V4}"), &V4[..35], &V4.replace('b', "g")] {
            assert!(uuid(other).is_err_and(|why| why.to_string().contains("not a UUID")), "{other}");
        }
        assert!(uuid("{9b2f0c64-1b5e-4f0e-8a3c-6f1d2e3a4b}").is_err());
        assert_ne!(opaque(&V4.to_uppercase()), opaque(V4), "an opaque key is compared byte for byte");
    }

    // Shown by: reading the time of every UUID.
    #[test]
    fn o23_only_a_v7_key_carries_its_time() {
        let v7 = Key::parse(V7.as_bytes(), KeyFormat::UuidV7).expect("a v7 key");
        assert_eq!(v7.time(), Some(DbTime::from_millis(0x0197_a1b2_c3d4)));
        let refused = |text: &str| Key::parse(text.as_bytes(), KeyFormat::UuidV7).expect_err(text).to_string();
        assert!(refused(V4).contains("a UUID of version 4"));
        assert_eq!(Key::parse(V4.as_bytes(), KeyFormat::Uuid).expect("a v4 key").time(), None);
        assert!(refused(&V7.replace("-8a9b", "-0a9b")).contains("a UUID of version 7"), "of another variant");
    }

    // Shown by: deriving Debug.
    #[test]
    fn o24_a_key_is_shown_as_a_short_hash_only() {
        let key = Key::parse(V7.as_bytes(), KeyFormat::Uuid).expect("a key");
        assert_eq!(key.short_hash().len(), 12);
        assert_eq!(format!("{key:?}"), format!("Key(#{})", key.short_hash()));
        for error in [refused("0123456789,secret"), refused("\"0123456789secret"), refused("s3cr3t")] {
            assert!(!error.contains("s3cr3t") && !error.contains("secret"), "{error}");
        }
    }
}
