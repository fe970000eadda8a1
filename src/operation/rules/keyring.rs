//! Pure: no I/O, no clock.
//! The server's secrets for hashes that must not be guessed offline, because an amount and an
//! account have few possible values (O20, O21).
//!
//! Guarantees:
//!
//! * A hash that was written under a key id is read under that id while the ring holds it. So
//!   changing `write_kid` changes no stored hash.
//! * No secret is kept as bytes or shown: the ring holds hash states, and `Debug` prints ids only.
//! * The id `sha256` means "no secret" and can always be read, so a ring can be introduced later.
//!
//! Not here: where the secrets come from (the service gives the ring in
//! [`EngineOptions`](crate::operation::EngineOptions)), and encryption of bodies.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::error::Invalid;

const SECRET_BYTES_MIN: usize = 32;

/// The id of a secret: 1 to 32 of `[A-Za-z0-9_.-]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kid(String);

/// The secrets for reading, and the one for writing.
#[derive(Clone)]
pub struct Keyring {
    write: Kid,
    /// `None` writes without a secret.
    writer: Option<Hmac<Sha256>>,
    secrets: BTreeMap<Kid, Hmac<Sha256>>,
}

impl Kid {
    /// The id of hashes without a secret.
    fn plain() -> Self {
        Self("sha256".to_owned())
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Kid {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let good = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        if text.is_empty() || text.len() > 32 || !text.bytes().all(good) {
            return Err(Invalid::new(format!("`{text}` is no key id: use 1 to 32 of A-Z, a-z, 0-9 and _ . -")));
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for Kid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Keyring {
    /// A ring without a secret: fingerprints are plain SHA-256, which whoever reads the table can
    /// guess for commands of few possible values.
    #[must_use]
    pub fn plain() -> Self {
        Self { write: Kid::plain(), writer: None, secrets: BTreeMap::new() }
    }

    /// A ring of secrets that writes with one of them. `write` may be `sha256`, which means without
    /// a secret, while other processes do not have the secrets yet (O21).
    ///
    /// # Errors
    /// An id or a secret cannot be used.
    pub fn new<'a>(write: Kid, secrets: impl IntoIterator<Item = (Kid, &'a [u8])>) -> Result<Self, Invalid> {
        let mut ring = Self::plain();
        for (kid, secret) in secrets {
            if kid == Kid::plain() {
                let why = "the key id `sha256` stands for hashes without a secret: choose another name";
                return Err(Invalid::new(why));
            }
            let keyed = match Hmac::new_from_slice(secret) {
                Ok(keyed) if secret.len() >= SECRET_BYTES_MIN => keyed,
                _ => {
                    let bytes = secret.len();
                    let why = format!("the secret of key id `{kid}` has {bytes} bytes: it needs at least 32");
                    return Err(Invalid::new(why));
                }
            };
            if ring.secrets.insert(kid.clone(), keyed).is_some() {
                return Err(Invalid::new(format!("the key id `{kid}` is given twice")));
            }
        }
        if write != Kid::plain() {
            let Some(writer) = ring.secrets.get(&write) else {
                return Err(Invalid::new(format!("`write_kid` is `{write}`, and there is no secret with this id")));
            };
            ring.writer = Some(writer.clone());
            ring.write = write;
        }
        Ok(ring)
    }

    pub(crate) fn write_kid(&self) -> &Kid {
        &self.write
    }

    pub(crate) fn readable(&self) -> impl Iterator<Item = Kid> {
        std::iter::once(Kid::plain()).chain(self.secrets.keys().cloned())
    }

    /// The hash of a message under an id; `None` if the ring does not hold the id.
    pub(super) fn hash(&self, kid: &Kid, message: &[u8]) -> Option<[u8; 32]> {
        let keyed = if *kid == Kid::plain() { None } else { Some(self.secrets.get(kid)?) };
        Some(hash(keyed, message))
    }

    pub(super) fn write(&self, message: &[u8]) -> (Kid, [u8; 32]) {
        (self.write.clone(), hash(self.writer.as_ref(), message))
    }
}

fn hash(keyed: Option<&Hmac<Sha256>>, message: &[u8]) -> [u8; 32] {
    match keyed {
        None => Sha256::digest(message).into(),
        Some(keyed) => keyed.clone().chain_update(message).finalize().into_bytes().into(),
    }
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keyring").field("write", &self.write.0).field("kids", &self.secrets.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::hex::hex;

    fn kid(text: &str) -> Kid {
        text.parse().expect("a key id")
    }

    // The vector was computed by Python's hmac module. Shown by: hashing the secret in front of the
    // message.
    #[test]
    fn o21_the_hash_is_hmac_sha256_that_any_language_can_check() {
        let ring = Keyring::new(kid("k1"), [(kid("k1"), [0x0b; 32].as_slice())]).expect("a ring");
        let hash = ring.hash(&kid("k1"), b"Hi There").expect("a known id");
        assert_eq!(hex(&hash), "198a607eb44bfbc69903a0f1cf2bbdc5ba0aa3f3d9ae3c1c7a3b1696a0b68cf7");
        let plain = ring.hash(&Kid::plain(), b"abc").expect("always readable");
        assert_eq!(hex(&plain), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(ring.hash(&kid("k2"), b"Hi There"), None);
    }

    // Shown by: leaving each check of `new` out in turn.
    #[test]
    fn o21_a_ring_that_cannot_keep_the_promise_is_refused() {
        let secret = [7_u8; 32];
        let ring = |write: &str, kids: &[(&str, &[u8])]| {
            Keyring::new(kid(write), kids.iter().map(|(id, secret)| (kid(id), *secret)))
        };
        assert!(ring("sha256", &[("k1", &secret)]).is_ok(), "readable before it is written");
        let refused = |write: &str, kids: &[(&str, &[u8])]| ring(write, kids).expect_err("refused").to_string();
        let unknown = "`write_kid` is `k2`, and there is no secret with this id";
        assert_eq!(refused("k2", &[("k1", &secret)]), unknown);
        let short = "the secret of key id `k1` has 31 bytes: it needs at least 32";
        assert_eq!(refused("k1", &[("k1", &secret[..31])]), short);
        assert_eq!(refused("k1", &[("k1", &secret), ("k1", &secret)]), "the key id `k1` is given twice");
        assert!(refused("sha256", &[("sha256", &secret)]).contains("choose another name"));
        for bad in ["", "a:b", "a b", &"k".repeat(33)] {
            let why = bad.parse::<Kid>().expect_err(bad).to_string();
            assert!(why.starts_with(&format!("`{bad}` is no key id: ")), "{why}");
        }
    }

    #[test]
    fn a_ring_shows_ids_and_no_secret() {
        let ring =
            Keyring::new(kid("k1"), [(kid("k1"), b"0123456789abcdef0123456789abcdef".as_slice())]).expect("a ring");
        let shown = format!("{ring:?}");
        assert!(shown.contains("k1") && !shown.contains("0123") && !shown.contains("48"), "{shown}");
        assert_eq!(ring.readable().collect::<Vec<_>>(), [Kid::plain(), kid("k1")]);
    }
}
