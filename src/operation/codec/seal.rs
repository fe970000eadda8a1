//! The stored form of bytes: compressed if that helps (feature `compress`), and encrypted if there
//! is a key (feature `encrypt`).
//!
//! Promises: sealed bytes open only in the context in which they were sealed (the associated data
//! holds every part with its length, and the format). An unknown key id is reported by name, so
//! that a process that has the key can answer. No key is ever printed.

use std::fmt;

#[cfg(feature = "encrypt")]
use std::collections::BTreeMap;

use uuid::Uuid;

use crate::error::StoreError;
use crate::operation::port::KeptBody;
use crate::operation::port::evidence::Sealed;
use crate::operation::port::stored::{pack, unpack};
use crate::operation::rules::Kid;
use crate::operation::rules::framed::framed;

/// The bytes are zstd.
const COMPRESSED: u16 = 1;
/// The bytes are a nonce of 24 bytes and XChaCha20-Poly1305.
const ENCRYPTED: u16 = 2;
/// The headers are stored before the body and sealed with it.
const FRAMED: u16 = 4;
#[cfg(feature = "compress")]
const COMPRESS_FROM: usize = 4 << 10;
/// The largest size of a decompressed body: someone else may have written the stored bytes.
#[cfg(feature = "compress")]
const OPENED_MAX: usize = 64 << 20;

/// Why bytes cannot be sealed or opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// This process does not have the key; another process may.
    #[error("it was encrypted under the key id `{0}`, which this process does not have")]
    UnknownKid(String),
    /// The bytes, or the values that they belong to, are not what was sealed.
    #[error("the stored bytes are not what was stored for this request")]
    Broken,
    /// The bytes are not sealed, and this process opens sealed bytes only.
    #[error("the stored bytes are not sealed, and this process opens sealed ones only")]
    Plain,
    /// This program was built without the feature that is needed to read the bytes.
    #[error("the stored bytes need the feature `{0}`")]
    Feature(&'static str),
    /// The key to write with is not among the given keys; or a key is given twice, or has not 32
    /// bytes.
    #[error("the encryption key `{0}` is missing, given twice, or has not 32 bytes")]
    Key(String),
}

/// Seals and opens stored bytes. The default leaves them in plain. Cheap to clone.
#[derive(Clone, Default)]
pub struct Sealer {
    write: Option<Kid>,
    /// Bytes that are stored in plain are refused.
    sealed_only: bool,
    #[cfg(feature = "encrypt")]
    keys: BTreeMap<String, chacha20poly1305::XChaCha20Poly1305>,
}

type Headers = Vec<(String, Vec<u8>)>;

impl Sealer {
    /// Encrypts with the key `write`. Opens bytes that were encrypted with any of `keys`. Each key
    /// has 32 bytes.
    ///
    /// # Errors
    /// [`SealError::Key`].
    #[cfg(feature = "encrypt")]
    pub fn encrypting<'a>(write: &Kid, keys: impl IntoIterator<Item = (Kid, &'a [u8])>) -> Result<Self, SealError> {
        use chacha20poly1305::{KeyInit, XChaCha20Poly1305};
        let mut by_kid = BTreeMap::new();
        for (kid, key) in keys {
            let wrong = || SealError::Key(kid.to_string());
            let cipher = XChaCha20Poly1305::new_from_slice(key).map_err(|_| wrong())?;
            if by_kid.insert(kid.to_string(), cipher).is_some() {
                return Err(wrong());
            }
        }
        if !by_kid.contains_key(write.as_str()) {
            return Err(SealError::Key(write.to_string()));
        }
        Ok(Self { write: Some(write.clone()), sealed_only: false, keys: by_kid })
    }

    /// Refuses stored bytes that are in plain: such an answer is not replayed, such a command is
    /// not driven, such a request is not sent, and such evidence of a provider is not used.
    /// Otherwise, someone who can write to the database could store a false answer or command in
    /// plain, and this service would replay it or charge for it. Set this after the last answer
    /// from before encryption has expired (`retention.body`) and the last operation from before it
    /// has ended. An answer that an operator gave from a file is in plain too; a request for it is
    /// then answered as for a body that is not kept. An operator's decisions about operations are
    /// still used. Columns, such as states, times and the reference of a resource, are neither
    /// sealed nor authenticated: somebody who can write them can write the business rows as well.
    #[cfg(feature = "encrypt")]
    #[must_use]
    pub fn sealed_only(self) -> Self {
        Self { sealed_only: true, ..self }
    }

    /// Seals bytes of an operation; `what` is `command`, `request:EFFECT` or `evidence`. They open
    /// as the same part of the same operation only, and are never compressed. After an error, store
    /// nothing in plain instead.
    pub(crate) fn seal(&self, operation_id: Uuid, what: &str, plain: &[u8]) -> Result<Sealed, StoreError> {
        let format = if self.encrypts() { ENCRYPTED } else { 0 };
        let sealed = self.encrypt(&associated(&part(operation_id, what), format), plain.to_vec());
        let (bytes, kid) = sealed.map_err(|error| unusable(operation_id, what, &error))?;
        Ok(Sealed { bytes, kid })
    }

    /// Opens bytes of an operation that [`Self::seal`] sealed with the same `what`.
    pub(crate) fn open(&self, operation_id: Uuid, what: &str, sealed: &Sealed) -> Result<Vec<u8>, StoreError> {
        let opened = match &sealed.kid {
            None if self.sealed_only => Err(SealError::Plain),
            None => Ok(sealed.bytes.clone()),
            Some(kid) => self.decrypt(&associated(&part(operation_id, what), ENCRYPTED), kid, &sealed.bytes),
        };
        opened.map_err(|error| unusable(operation_id, what, &error))
    }

    pub(super) fn encrypts(&self) -> bool {
        self.write.is_some()
    }

    /// Seals a body. Where there is a key, its headers are sealed with it.
    pub(super) fn seal_body(&self, context: &[u8], headers: Headers, bytes: Vec<u8>) -> Result<KeptBody, SealError> {
        let (headers, bytes, format) = if self.encrypts() {
            (Vec::new(), joined(&headers, &bytes), ENCRYPTED | FRAMED)
        } else {
            (headers, bytes, 0)
        };
        let (bytes, compressed) = compress(bytes);
        let format = format | compressed;
        let (bytes, kid) = self.encrypt(&associated(context, format), bytes)?;
        Ok(KeptBody { headers, bytes, format, kid })
    }

    /// Opens what [`Self::seal_body`] has sealed: the headers and the bytes of the body.
    pub(super) fn open_body(&self, context: &[u8], body: &KeptBody) -> Result<(Headers, Vec<u8>), SealError> {
        let KeptBody { headers, bytes, format, kid } = body;
        if format & !(COMPRESSED | ENCRYPTED | FRAMED) != 0 || (format & ENCRYPTED != 0) != kid.is_some() {
            return Err(SealError::Broken);
        }
        let opened = match kid {
            Some(kid) => self.decrypt(&associated(context, *format), kid, bytes)?,
            None if self.sealed_only => return Err(SealError::Plain),
            None => bytes.clone(),
        };
        let bytes = if format & COMPRESSED == 0 { opened } else { decompress(&opened)? };
        if format & FRAMED == 0 { Ok((headers.clone(), bytes)) } else { split(&bytes).ok_or(SealError::Broken) }
    }

    #[cfg(feature = "encrypt")]
    fn encrypt(&self, associated: &[u8], bytes: Vec<u8>) -> Result<(Vec<u8>, Option<String>), SealError> {
        use chacha20poly1305::XNonce;
        use chacha20poly1305::aead::{Aead, Generate, Payload};
        let Some(kid) = &self.write else { return Ok((bytes, None)) };
        let cipher = self.keys.get(kid.as_str()).ok_or_else(|| SealError::Key(kid.to_string()))?;
        // 24 random bytes: two equal nonces under one key are practically impossible.
        let nonce = XNonce::generate();
        let payload = Payload { msg: &bytes, aad: associated };
        let mut sealed = nonce.to_vec();
        sealed.extend(cipher.encrypt(&nonce, payload).map_err(|_| SealError::Broken)?);
        Ok((sealed, Some(kid.to_string())))
    }

    #[cfg(not(feature = "encrypt"))]
    #[allow(clippy::unused_self)]
    fn encrypt(&self, _: &[u8], bytes: Vec<u8>) -> Result<(Vec<u8>, Option<String>), SealError> {
        Ok((bytes, None))
    }

    #[cfg(feature = "encrypt")]
    fn decrypt(&self, associated: &[u8], kid: &str, sealed: &[u8]) -> Result<Vec<u8>, SealError> {
        use chacha20poly1305::XNonce;
        use chacha20poly1305::aead::{Aead, Payload};
        let cipher = self.keys.get(kid).ok_or_else(|| SealError::UnknownKid(kid.to_owned()))?;
        let (nonce, msg) = sealed.split_at_checked(24).ok_or(SealError::Broken)?;
        let nonce = XNonce::try_from(nonce).map_err(|_| SealError::Broken)?;
        cipher.decrypt(&nonce, Payload { msg, aad: associated }).map_err(|_| SealError::Broken)
    }

    #[cfg(not(feature = "encrypt"))]
    #[allow(clippy::unused_self)]
    fn decrypt(&self, _: &[u8], _: &str, _: &[u8]) -> Result<Vec<u8>, SealError> {
        Err(SealError::Feature("encrypt"))
    }
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealer")
            .field("write", &self.write)
            .field("sealed_only", &self.sealed_only)
            .finish_non_exhaustive()
    }
}

/// The context of what belongs to an operation.
fn part(operation_id: Uuid, what: &str) -> Vec<u8> {
    framed([operation_id.as_bytes(), what.as_bytes()])
}

fn unusable(operation_id: Uuid, what: &str, error: &SealError) -> StoreError {
    StoreError::Refused(format!("the {what} of the operation {operation_id}: {error}"))
}

/// The associated data of the cipher: the format, and the context, whose parts stand after their
/// lengths.
fn associated(context: &[u8], format: u16) -> Vec<u8> {
    [b"oncebox body".as_slice(), &format.to_be_bytes(), context].concat()
}

/// Joins headers and body: the length of the headers in four bytes, the headers, the body.
fn joined(headers: &[(String, Vec<u8>)], body: &[u8]) -> Vec<u8> {
    let headers = pack(headers);
    let length = u32::try_from(headers.len()).unwrap_or(u32::MAX);
    [&length.to_be_bytes()[..], &headers, body].concat()
}

fn split(bytes: &[u8]) -> Option<(Headers, Vec<u8>)> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (headers, body) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
    Some((unpack(headers).ok()?, body.to_vec()))
}

#[cfg(feature = "compress")]
fn compress(bytes: Vec<u8>) -> (Vec<u8>, u16) {
    if bytes.len() <= COMPRESS_FROM || bytes.len() > OPENED_MAX {
        return (bytes, 0);
    }
    match zstd::bulk::compress(&bytes, 3) {
        Ok(smaller) if smaller.len() < bytes.len() => (smaller, COMPRESSED),
        _ => (bytes, 0),
    }
}

#[cfg(not(feature = "compress"))]
fn compress(bytes: Vec<u8>) -> (Vec<u8>, u16) {
    (bytes, 0)
}

#[cfg(feature = "compress")]
fn decompress(bytes: &[u8]) -> Result<Vec<u8>, SealError> {
    let length = zstd::zstd_safe::get_frame_content_size(bytes).ok().flatten();
    let length = length.and_then(|length| usize::try_from(length).ok()).filter(|length| *length <= OPENED_MAX);
    zstd::bulk::decompress(bytes, length.ok_or(SealError::Broken)?).map_err(|_| SealError::Broken)
}

#[cfg(not(feature = "compress"))]
fn decompress(_: &[u8]) -> Result<Vec<u8>, SealError> {
    Err(SealError::Feature("compress"))
}

#[cfg(all(test, feature = "compress"))]
mod tests {
    use super::*;

    // Shown by: compressing a body of any length.
    #[test]
    fn a_body_that_is_too_long_to_be_opened_again_is_not_compressed() {
        assert_eq!(compress(vec![b'a'; OPENED_MAX + 1]).1, 0);
    }
}
