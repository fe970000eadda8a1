//! Bytes as they are stored: perhaps smaller (feature `compress`), perhaps unreadable without the
//! key (feature `encrypt`).
//!
//! Promises: what was sealed is opened only in the context it was sealed in (the associated data
//! names every part behind its length, and the format); a key id that is not here is said by name,
//! so that another process can answer; no key is shown.

use std::fmt;

#[cfg(feature = "encrypt")]
use std::collections::BTreeMap;

use crate::policy::operation::Kid;
use crate::store::Sealed;

/// The bytes are zstd.
const COMPRESSED: u16 = 1;
/// The bytes are a nonce of 24 bytes and XChaCha20-Poly1305.
const ENCRYPTED: u16 = 2;
/// Headers stand before the body, sealed with it.
pub(super) const FRAMED: u16 = 4;
/// A shorter body is not worth the work.
#[cfg(feature = "compress")]
const COMPRESS_FROM: usize = 4 << 10;
/// What an opened body may grow to: stored bytes may be another's.
#[cfg(feature = "compress")]
const OPENED_MAX: usize = 64 << 20;

/// Why bytes cannot be sealed or opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// Another process may have the key.
    #[error("it was encrypted under the key id `{0}`, which this process does not have")]
    UnknownKid(String),
    /// The bytes, or what they belong to, are not what was sealed.
    #[error("the stored bytes are not what was stored for this request")]
    Broken,
    /// Nobody sealed it, and what is not sealed is not opened here.
    #[error("the stored bytes are not sealed, and this process opens sealed ones only")]
    Plain,
    /// This program was built without the feature that reads it.
    #[error("the stored bytes need the feature `{0}`")]
    Feature(&'static str),
    /// The key to write with is none of those given, or has not 32 bytes.
    #[error("the encryption key `{0}` is missing, given twice, or has not 32 bytes")]
    Key(String),
}

/// Seals and opens. Cheap to clone.
#[derive(Clone, Default)]
pub struct Sealer {
    write: Option<Kid>,
    /// What lies in plain is not opened.
    sealed_only: bool,
    #[cfg(feature = "encrypt")]
    keys: BTreeMap<String, chacha20poly1305::XChaCha20Poly1305>,
}

/// A body as it is stored, with its format and the id of the key it is encrypted with.
#[derive(Debug)]
pub(super) struct SealedBody {
    pub(super) bytes: Vec<u8>,
    pub(super) format: u16,
    pub(super) kid: Option<String>,
}

impl Sealer {
    /// Leaves bytes as they are.
    #[must_use]
    pub fn plain() -> Self {
        Self::default()
    }

    /// Encrypts under `write`; opens what was encrypted under any of these keys of 32 bytes.
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

    /// Answers with no stored body that lies in plain, and drives no command, sends no request and
    /// believes no provider's answer that does: whoever can write to the database could put one
    /// there, and it would be replayed, or charged, as if the service had said it. Take it when the
    /// last answer from before encryption is gone, after `retention.body`, and the last operation
    /// has ended that was begun before. An answer that an operator gave from a file lies in plain
    /// too, and is then answered as one that is not kept; his words about operations are believed.
    ///
    /// States, statuses, times, the reference of a resource and the reason of a missing body are
    /// columns by which statements decide. They are neither sealed nor authenticated: whoever can
    /// write them can write the rows of the business too, and needs no stored answer for that.
    #[cfg(feature = "encrypt")]
    #[must_use]
    pub fn sealed_only(self) -> Self {
        Self { sealed_only: true, ..self }
    }

    /// Seals bytes that belong to these parts, such as the command of a phased operation and its
    /// id. They are never compressed.
    ///
    /// # Errors
    /// As the cipher; nothing is given in plain instead.
    pub fn seal(&self, context: &[&[u8]], bytes: Vec<u8>) -> Result<Sealed, SealError> {
        let format = if self.write.is_some() { ENCRYPTED } else { 0 };
        let (bytes, kid) = self.encrypt(&associated(context, format), bytes)?;
        Ok(Sealed { bytes, kid })
    }

    /// Opens what [`Self::seal`] has sealed, with the same parts.
    ///
    /// # Errors
    /// [`SealError::UnknownKid`], [`SealError::Broken`], [`SealError::Plain`].
    pub fn open(&self, context: &[&[u8]], sealed: &Sealed) -> Result<Vec<u8>, SealError> {
        match &sealed.kid {
            None if self.sealed_only => Err(SealError::Plain),
            None => Ok(sealed.bytes.clone()),
            Some(kid) => self.decrypt(&associated(context, ENCRYPTED), kid, &sealed.bytes),
        }
    }

    /// Whether it encrypts what it seals.
    pub(super) fn encrypts(&self) -> bool {
        self.write.is_some()
    }

    /// `framed`: [`FRAMED`], or 0.
    pub(super) fn seal_body(&self, context: &[Vec<u8>], bytes: Vec<u8>, framed: u16) -> Result<SealedBody, SealError> {
        let (bytes, compressed) = compress(bytes);
        let mut format = compressed | framed;
        if self.write.is_some() {
            format |= ENCRYPTED;
        }
        let parts: Vec<&[u8]> = context.iter().map(Vec::as_slice).collect();
        let (bytes, kid) = self.encrypt(&associated(&parts, format), bytes)?;
        Ok(SealedBody { bytes, format, kid })
    }

    pub(super) fn open_body(
        &self,
        context: &[Vec<u8>],
        format: u16,
        kid: Option<&str>,
        bytes: &[u8],
    ) -> Result<Vec<u8>, SealError> {
        if format & !(COMPRESSED | ENCRYPTED | FRAMED) != 0 || (format & ENCRYPTED != 0) != kid.is_some() {
            return Err(SealError::Broken);
        }
        let parts: Vec<&[u8]> = context.iter().map(Vec::as_slice).collect();
        let opened = match kid {
            Some(kid) => self.decrypt(&associated(&parts, format), kid, bytes)?,
            None if self.sealed_only => return Err(SealError::Plain),
            None => bytes.to_vec(),
        };
        if format & COMPRESSED == 0 { Ok(opened) } else { decompress(&opened) }
    }

    #[cfg(feature = "encrypt")]
    fn encrypt(&self, associated: &[u8], bytes: Vec<u8>) -> Result<(Vec<u8>, Option<String>), SealError> {
        use chacha20poly1305::XNonce;
        use chacha20poly1305::aead::{Aead, Generate, Payload};
        let Some(kid) = &self.write else { return Ok((bytes, None)) };
        let cipher = self.keys.get(kid.as_str()).ok_or_else(|| SealError::Key(kid.to_string()))?;
        // 24 random bytes: no two are equal in the life of a key.
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

/// The parts, each behind its length, and the format.
fn associated(context: &[&[u8]], format: u16) -> Vec<u8> {
    let mut out = b"oncebox body".to_vec();
    out.extend_from_slice(&format.to_be_bytes());
    for part in context {
        out.extend_from_slice(&(part.len() as u64).to_be_bytes());
        out.extend_from_slice(part);
    }
    out
}

#[cfg(feature = "compress")]
fn compress(bytes: Vec<u8>) -> (Vec<u8>, u16) {
    if bytes.len() <= COMPRESS_FROM {
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
