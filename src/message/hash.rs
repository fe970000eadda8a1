//! Hashes that every process and language must compute alike: content hash (G7), bucket (shards),
//! lane id (order of a key).
//!
//! Promise: parts that are hashed together are kept apart by length prefixes, so different parts
//! never give the same input. Not here: comparing hashes (`store`).

use sha2::{Digest, Sha256};

/// The first 16 bytes of SHA-256 over the content of a message.
pub type ContentHash = [u8; 16];

/// The hash of topic, key, kind, content type, payload and the application's headers, but not of
/// time, source or trace (R32).
///
/// `headers` may come in any order, because brokers do not keep it.
pub fn content_hash<'a>(
    topic: &str,
    key: Option<&[u8]>,
    kind: &str,
    content_type: Option<&str>,
    payload: &[u8],
    headers: impl Iterator<Item = (&'a str, &'a [u8])>,
) -> ContentHash {
    let mut hash = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_be_bytes());
        hash.update(bytes);
    };
    part(topic.as_bytes());
    part(&[u8::from(key.is_some())]);
    part(key.unwrap_or_default());
    part(kind.as_bytes());
    part(content_type.unwrap_or_default().as_bytes());
    part(payload);
    let mut headers: Vec<_> = headers.collect();
    headers.sort_unstable();
    for (name, value) in headers {
        part(name.as_bytes());
        part(value);
    }
    first_16(&hash.finalize())
}

/// The bucket of a row: the first byte of SHA-256 of the key's UTF-8 bytes, or of the 16 bytes of
/// the id if there is no key.
#[must_use]
pub fn bucket(key: Option<&str>, id: uuid::Uuid) -> u8 {
    match key {
        Some(key) => Sha256::digest(key.as_bytes())[0],
        None => Sha256::digest(id.as_bytes())[0],
    }
}

/// The 16 bytes that stand for topic and key in lanes and in rows of waiting messages.
pub(crate) fn lane_id(topic: &str, key: &[u8]) -> [u8; 16] {
    let mut hash = Sha256::new();
    hash.update((topic.len() as u64).to_be_bytes());
    hash.update(topic.as_bytes());
    hash.update(key);
    first_16(&hash.finalize())
}

pub(super) fn first_16(digest: &[u8]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_of_the_content_changes_the_hash_and_order_of_headers_does_not() {
        let headers = [("a", b"1".as_slice()), ("b", b"2".as_slice())];
        let hash = |topic: &str, key: Option<&[u8]>, payload: &[u8]| {
            content_hash(topic, key, "k", None, payload, headers.into_iter())
        };
        let base = hash("t", Some(b"x"), b"p");
        assert_ne!(base, hash("u", Some(b"x"), b"p"));
        assert_ne!(base, hash("t", Some(b"xp"), b""));
        assert_ne!(hash("t", None, b"p"), hash("t", Some(b""), b"p"));
        let turned = content_hash("t", Some(b"x"), "k", None, b"p", headers.into_iter().rev());
        assert_eq!(base, turned);
    }

    #[test]
    fn the_bucket_is_what_any_language_computes() {
        // Computed in another language, so that a change of the rule makes this test fail.
        let id = uuid::Uuid::from_u128(7);
        assert_eq!(bucket(Some("acc-7"), id), 85);
        assert_eq!(bucket(None, id), 107);
    }
}
