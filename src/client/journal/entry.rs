//! One entry of the journal as bytes: a line of JSON, and after it, if bodies are kept, the sealed
//! URL, headers and body.
//!
//! Promise: a sealed entry with one changed byte does not open, because the cipher authenticates
//! the line too. No credential is stored in plain.

use std::time::{Duration, SystemTime};

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Bodies, Pending};
use crate::client::request::{KEY_HEADER, Request, is_credential};
use crate::operation::rules::Key;
use crate::operation::rules::key::KeyFormat;
use crate::text::hex::{hex, unhex};

const VERSION: u32 = 1;
#[cfg(feature = "encrypt")]
const NONCE_BYTES: usize = 24;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    version: u32,
    key: String,
    method: String,
    /// Absent if it is sealed.
    place: Option<Place>,
    first_sent_at_ms: u64,
    /// SHA-256 of the body; absent if the sealed body follows this line.
    body_sha256: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Place {
    url: String,
    headers: Vec<(String, String)>,
}

/// The name of a parameter of the URL that is a credential.
fn credential_in(url: &reqwest::Url) -> Option<String> {
    url.query_pairs().map(|(name, _)| name).find(|name| is_credential(name)).map(std::borrow::Cow::into_owned)
}

#[cfg(feature = "encrypt")]
fn encrypted(secret: &[u8; 32], line: &[u8], body: &[u8]) -> Result<Vec<u8>, String> {
    use chacha20poly1305::aead::{Aead, Generate, Payload};
    use chacha20poly1305::{KeyInit, XChaCha20Poly1305, XNonce};
    // 24 random bytes: two equal nonces under one key are practically impossible.
    let nonce = XNonce::generate();
    let encrypted = XChaCha20Poly1305::new(secret.into()).encrypt(&nonce, Payload { msg: body, aad: line });
    let mut sealed = nonce.to_vec();
    sealed.extend(encrypted.map_err(|_| "the entry cannot be encrypted".to_owned())?);
    Ok(sealed)
}

#[cfg(feature = "encrypt")]
fn decrypted(secret: &[u8; 32], line: &[u8], sealed: &[u8]) -> Result<Vec<u8>, String> {
    use chacha20poly1305::aead::{Aead, Payload};
    use chacha20poly1305::{KeyInit, XChaCha20Poly1305};
    let (nonce, sealed) = sealed.split_first_chunk::<NONCE_BYTES>().ok_or("what is sealed is cut off")?;
    let opened = XChaCha20Poly1305::new(secret.into()).decrypt(&(*nonce).into(), Payload { msg: sealed, aad: line });
    opened.map_err(|_| "it was changed, or encrypted with another secret".to_owned())
}

impl Entry {
    pub(super) fn seal(request: &Request, now: SystemTime, bodies: &Bodies) -> Result<Vec<u8>, String> {
        let mut headers = Vec::new();
        for (name, value) in &request.headers {
            // A caller that resumes gives fresh credentials.
            if is_credential(name.as_str()) || value.is_sensitive() || name == KEY_HEADER {
                continue;
            }
            let value = value.to_str().map_err(|_| format!("the header {name} is no text"))?;
            headers.push((name.as_str().to_owned(), value.to_owned()));
        }
        if let (Bodies::Digest, Some(name)) = (bodies, credential_in(&request.url)) {
            return Err(format!(
                "the URL carries a credential (`{name}`), and a journal without a cipher keeps it in clear: send it as a header, \
                 or keep bodies encrypted"
            ));
        }
        let place = Place { url: request.url.as_str().to_owned(), headers };
        #[cfg(feature = "encrypt")]
        let sealed = serde_json::to_vec(&place).map_err(|error| error.to_string())?;
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let entry = Self {
            version: VERSION,
            key: request.key.as_str().to_owned(),
            method: request.method.as_str().to_owned(),
            place: matches!(bodies, Bodies::Digest).then_some(place),
            first_sent_at_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            body_sha256: matches!(bodies, Bodies::Digest).then(|| hex(&Sha256::digest(&request.body))),
        };
        let line = serde_json::to_vec(&entry).map_err(|error| error.to_string())?;
        let sealed = match bodies {
            Bodies::Digest => Vec::new(),
            #[cfg(feature = "encrypt")]
            Bodies::Encrypted(secret) => encrypted(secret, &line, &[&sealed[..], b"\n", &request.body].concat())?,
        };
        Ok([&line[..], b"\n", &sealed].concat())
    }

    pub(super) fn open(bytes: &[u8], bodies: &Bodies) -> Result<Pending, String> {
        let end = bytes.iter().position(|&byte| byte == b'\n').ok_or("it has no first line")?;
        let (line, sealed) = (&bytes[..end], &bytes[end + 1..]);
        let entry: Self = serde_json::from_slice(line).map_err(|error| error.to_string())?;
        if entry.version != VERSION {
            return Err(format!("version {} is not known here", entry.version));
        }
        let (place, body, digest): (Place, _, [u8; 32]) = match (entry.place, &entry.body_sha256, bodies) {
            (Some(place), Some(digest), _) => {
                let digest =
                    unhex(digest).and_then(|bytes| bytes.try_into().ok()).ok_or("its digest is not 32 bytes in hex")?;
                (place, None, digest)
            }
            #[cfg(feature = "encrypt")]
            (None, None, Bodies::Encrypted(secret)) => {
                let opened = decrypted(secret, line, sealed)?;
                let end = opened.iter().position(|&byte| byte == b'\n').ok_or("what is sealed has no first line")?;
                let place = serde_json::from_slice(&opened[..end]).map_err(|error| error.to_string())?;
                let body = &opened[end + 1..];
                (place, Some(body.to_vec()), Sha256::digest(body).into())
            }
            (None, None, Bodies::Digest) => {
                return Err(format!("{} sealed bytes, and no secret is given", sealed.len()));
            }
            _ => return Err("it has only one of URL and digest, or both and sealed bytes too".to_owned()),
        };
        let mut headers = HeaderMap::new();
        for (name, value) in &place.headers {
            let name = HeaderName::from_bytes(name.as_bytes()).map_err(|error| error.to_string())?;
            headers.append(name, HeaderValue::from_str(value).map_err(|error| error.to_string())?);
        }
        Ok(Pending {
            key: Key::parse(entry.key.as_bytes(), KeyFormat::Opaque).map_err(|error| error.to_string())?,
            method: entry.method,
            url: place.url,
            headers,
            body,
            digest,
            first_sent_at: SystemTime::UNIX_EPOCH + Duration::from_millis(entry.first_sent_at_ms),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn request() -> Request {
        Request::new("POST", "https://api.example.com/payments", *b"{\"secret\":\"7\"}\0\xff")
            .unwrap()
            .with_header("content-type", "application/json")
            .unwrap()
            .with_header("authorization", "Bearer t1:user-7")
            .unwrap()
            .with_header("x-auth-token", "Bearer t1:user-7")
            .unwrap()
    }

    // Shown by: keeping every header, credentials included.
    #[test]
    fn o27_an_entry_holds_no_credentials_and_a_digest_that_must_match() {
        let request = request();
        let bytes = Entry::seal(&request, SystemTime::now(), &Bodies::Digest).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        assert!(!text.contains("Bearer") && !text.contains("secret"), "{text}");
        let pending = Entry::open(&bytes, &Bodies::Digest).unwrap();
        assert_eq!((&pending.key, pending.method.as_str()), (&request.key, "POST"));
        assert_eq!(pending.headers.len(), 1);
        let none = HeaderMap::new();
        assert!(pending.request(None, &none).is_err());
        assert!(pending.request(Some(b"other".to_vec()), &none).is_err());
        assert_eq!(pending.request(Some(request.body.clone()), &none).unwrap().body, request.body);
    }

    // Shown by: storing every URL.
    #[test]
    fn o27_a_url_that_carries_a_credential_is_not_written_down_in_clear() {
        let request = Request::new("POST", "https://api.example.com/x?access_token=abc", *b"{}").unwrap();
        let refused = Entry::seal(&request, SystemTime::now(), &Bodies::Digest).unwrap_err();
        assert!(refused.contains("credential") && !refused.contains("abc"), "{refused}");
    }

    // Shown by: checking the URL as that of a new request. An operation that an earlier version had
    // sent could then never be continued.
    #[test]
    fn o27_an_entry_of_an_earlier_version_with_a_user_in_its_url_can_be_continued() {
        let request = Request { url: "https://user@api.example.com/payments".parse().unwrap(), ..request() };
        let bytes = Entry::seal(&request, SystemTime::now(), &Bodies::Digest).unwrap();
        let pending = Entry::open(&bytes, &Bodies::Digest).unwrap();
        let continued = pending.request(Some(request.body.clone()), &HeaderMap::new()).unwrap();
        assert_eq!((continued.url, continued.key), (request.url, request.key));
    }

    // Shown by: leaving the associated data out; the URL in the line.
    #[cfg(feature = "encrypt")]
    #[test]
    fn o27_a_kept_body_is_unreadable_and_nothing_of_its_entry_can_be_changed() {
        let bodies = Bodies::Encrypted([7; 32]);
        let request = Request { url: "https://api.example.com/x?sig=secret".parse().unwrap(), ..request() };
        let bytes = Entry::seal(&request, SystemTime::now(), &bodies).unwrap();
        for part in ["secret", "example", "content-type"] {
            assert!(!String::from_utf8_lossy(&bytes).contains(part), "{part}");
        }
        let pending = Entry::open(&bytes, &bodies).unwrap();
        assert_eq!(pending.body, Some(request.body.clone()));
        assert_eq!((pending.url.as_str(), pending.headers.len()), (request.url.as_str(), 1));
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert!(Entry::open(&changed, &bodies).is_err(), "byte {at}");
        }
        let other = Bodies::Encrypted([8; 32]);
        assert!(Entry::open(&bytes, &other).is_err());
        assert!(Entry::open(&bytes, &Bodies::Digest).is_err());
    }
}
