//! Pure: no I/O, no clock.
//! The identity of a request (tenant, operation and key), and its principal (O15, O16, O20).
//!
//! Guarantees:
//!
//! * Two requests are the same only if tenant, operation and key are equal byte for byte. Each part
//!   stands after its length, so two different triples never give the same text. Case, accents and
//!   trailing blanks make a difference on every database.
//! * A scope comes from verified authentication and is always required. [`Scope::public`] must be
//!   written explicitly.
//! * The principal is stored as a keyed hash. A hash under an unknown key id compares as
//!   unreadable, not as another principal.
//!
//! Not here: reading a scope out of a request (`http`, `grpc`), and how a difference is answered
//! ([`decide`](super::decide())).

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};

use super::framed::framed;
use super::key::{Key, KeyFormat};
use super::keyring::{Keyring, Kid};
use crate::error::Invalid;
use crate::text::hex::{hex, unhex};

const SCOPE_BYTES_MAX: usize = 255;

/// The caller: the tenant to which keys belong, and the principal inside it. From verified
/// authentication only.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Scope {
    tenant: String,
    principal: String,
}

/// The name of an operation, chosen by its author and never derived from a path: 1 to 128 of
/// `[A-Za-z0-9_./:-]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperationName(String);

/// What a key identifies. Its digest is the primary key in every store.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Identity {
    tenant: String,
    operation: OperationName,
    key: Key,
}

/// The principal of the first request, as it is stored: `kid:hex`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct PrincipalMark {
    kid: Kid,
    hash: [u8; 32],
}

/// Whether the principal of a request is the principal of the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum PrincipalMatch {
    Same,
    /// The principals differ: answered as a mismatch, counted apart, never executed or replayed.
    Other,
    /// The stored principal was hashed under a key id that this process does not have.
    Unreadable,
}

impl Scope {
    /// The scope of an authenticated caller. `principal` is the stable id of the subject, never a
    /// token.
    ///
    /// # Errors
    /// A part is empty or longer than 255 bytes.
    pub fn new(tenant: impl Into<String>, principal: impl Into<String>) -> Result<Self, Invalid> {
        let (tenant, principal) = (tenant.into(), principal.into());
        for (part, text) in [("tenant", &tenant), ("principal", &principal)] {
            if text.is_empty() || text.len() > SCOPE_BYTES_MAX {
                return Err(Invalid::new(format!("a {part} has {} bytes: it needs 1 to 255", text.len())));
            }
        }
        Ok(Self { tenant, principal })
    }

    /// The shared scope of all callers of an operation that is open to everybody. It equals no
    /// tenant's scope, because a tenant's name is not empty.
    #[must_use]
    pub fn public() -> Self {
        Self { tenant: String::new(), principal: String::new() }
    }

    /// The tenant; empty for the public scope.
    #[must_use]
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    /// The principal in its stored form, hashed under the key id with which the ring writes.
    pub(crate) fn mark(&self, keyring: &Keyring) -> PrincipalMark {
        let (kid, hash) = keyring.write(&self.principal_message());
        PrincipalMark { kid, hash }
    }

    pub(crate) fn compare(&self, stored: &PrincipalMark, keyring: &Keyring) -> PrincipalMatch {
        match keyring.hash(&stored.kid, &self.principal_message()) {
            None => PrincipalMatch::Unreadable,
            Some(hash) if hash == stored.hash => PrincipalMatch::Same,
            Some(_) => PrincipalMatch::Other,
        }
    }

    fn principal_message(&self) -> Vec<u8> {
        framed(["oncebox principal", &self.tenant, &self.principal].map(str::as_bytes))
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("tenant", &self.tenant).finish_non_exhaustive()
    }
}

impl FromStr for OperationName {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let good = |byte: u8| byte.is_ascii_alphanumeric() || b"_./:-".contains(&byte);
        if text.is_empty() || text.len() > 128 || !text.bytes().all(good) {
            let why = format!("`{text}` is no name of an operation: use 1 to 128 of A-Z, a-z, 0-9 and _ . / : -");
            return Err(Invalid::new(why));
        }
        Ok(Self(text.to_owned()))
    }
}

impl OperationName {
    /// The name as text, 1 to 128 ASCII characters.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for OperationName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Identity {
    /// The identity of a request of this caller.
    #[must_use]
    pub fn new(scope: &Scope, operation: OperationName, key: Key) -> Self {
        Self { tenant: scope.tenant.clone(), operation, key }
    }

    /// Builds an identity from the parts that a store keeps beside the digest. The caller compares
    /// it with the request's.
    ///
    /// # Errors
    /// A part is not what this program wrote.
    pub fn from_stored(tenant: &[u8], operation: &[u8], key: &[u8]) -> Result<Self, Invalid> {
        let no_text = |part: &str| Invalid::new(format!("a stored {part} is not text that this program wrote"));
        let tenant = std::str::from_utf8(tenant).map_err(|_| no_text("tenant"))?.to_owned();
        let operation = std::str::from_utf8(operation).map_err(|_| no_text("operation"))?.parse()?;
        let key = Key::parse(key, KeyFormat::Opaque);
        let key = key.map_err(|why| Invalid::new(format!("a stored key is none: {why}")))?;
        Ok(Self { tenant, operation, key })
    }

    /// The tenant; empty for the public scope.
    #[must_use]
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    /// The name of the operation that the request asks for.
    #[must_use]
    pub fn operation(&self) -> &OperationName {
        &self.operation
    }

    /// The idempotency key that the client sent.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The primary key in every store: SHA-256 of tenant, operation and key, each after its length
    /// in bytes as eight big-endian bytes (O16).
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        Sha256::digest(framed([self.tenant.as_bytes(), self.operation.0.as_bytes(), self.key.as_str().as_bytes()]))
            .into()
    }

    /// The hash of the key in spans and logs: the first twelve hexadecimal digits of the digest.
    /// `oncebox keys list` shows the same digits, and the other commands on keys take them.
    pub(crate) fn short_hash(&self) -> String {
        hex(&self.digest()[..6])
    }

    /// The number of the lock that is tried before the claim: the first eight bytes of the digest,
    /// in big-endian order (O15). It is computed only here.
    pub(crate) fn lock_number(&self) -> i64 {
        let [a, b, c, d, e, f, g, h, ..] = self.digest();
        i64::from_be_bytes([a, b, c, d, e, f, g, h])
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({}, {}, {:?})", self.tenant, self.operation, self.key)
    }
}

impl fmt::Display for PrincipalMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kid, hex(&self.hash))
    }
}

impl fmt::Debug for PrincipalMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrincipalMark({}:..)", self.kid)
    }
}

impl FromStr for PrincipalMark {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let wrong = || Invalid::new("a stored principal is not `kid:hex` with 64 hexadecimal digits");
        let (kid, hash) = text.split_once(':').ok_or_else(wrong)?;
        Ok(Self { kid: kid.parse()?, hash: unhex(hash).and_then(|hash| hash.try_into().ok()).ok_or_else(wrong)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "9b2f0c64-1b5e-4f0e-8a3c-6f1d2e3a4b5c";

    fn identity(tenant: &str, operation: &str, key: &str) -> Identity {
        Identity::from_stored(tenant.as_bytes(), operation.as_bytes(), key.as_bytes()).expect("good parts")
    }

    fn ring(write: &str, kids: &[&str]) -> Keyring {
        let secrets: Vec<_> = kids.iter().map(|id| (id.parse().expect("a key id"), format!("{id:-<40}"))).collect();
        let secrets = secrets.iter().map(|(id, secret): &(Kid, String)| (id.clone(), secret.as_bytes()));
        Keyring::new(write.parse().expect("a key id"), secrets).expect("a ring")
    }

    // The digest was computed by Python's hashlib. Shown by: leaving the length prefixes out;
    // little-endian lengths.
    #[test]
    fn o16_the_digest_is_sha256_of_length_prefixed_parts() {
        let digest = identity("acme", "create_payment", KEY).digest();
        assert_eq!(hex(&digest), "39d6218aebe0767525d9e55c0e3c61c0e64b94ee3479e3dd4ce5c89170fd1cf1");
        assert_eq!(identity("acme", "create_payment", KEY).short_hash(), "39d6218aebe0");
        let base = identity("acme", "create_payment", KEY);
        let others = [
            identity("ACME", "create_payment", KEY),
            identity("acme ", "create_payment", KEY),
            identity("acm\u{e9}", "create_payment", KEY),
            identity("acm", "ecreate_payment", KEY),
            identity("", "acmecreate_payment", KEY),
            identity("acme", "create_payment", &KEY.to_uppercase()),
            identity("acme", "create_paymen", &format!("t{KEY}")),
        ];
        for other in others {
            assert_ne!(other.digest(), base.digest(), "{other:?}");
            assert_ne!(other, base);
        }
    }

    // Shown by: taking the last eight bytes; the other byte order.
    #[test]
    fn o15_the_lock_number_is_the_first_eight_bytes_of_the_digest() {
        let identity = identity("acme", "create_payment", KEY);
        assert_eq!(format!("{:016x}", identity.lock_number()), hex(&identity.digest())[..16]);
    }

    #[test]
    fn m13_m14_a_scope_has_both_parts_and_the_public_one_is_no_tenant() {
        let long = "t".repeat(256);
        for (tenant, principal, why) in [
            ("", "p", "a tenant has 0 bytes: it needs 1 to 255"),
            ("t", "", "a principal has 0 bytes: it needs 1 to 255"),
            (long.as_str(), "p", "a tenant has 256 bytes: it needs 1 to 255"),
        ] {
            assert_eq!(Scope::new(tenant, principal), Err(Invalid::new(why)));
        }
        let key = Key::parse(KEY.as_bytes(), KeyFormat::Uuid).expect("a key");
        let name: OperationName = "create_payment".parse().expect("a name");
        let public = Identity::new(&Scope::public(), name.clone(), key.clone());
        for tenant in ["public", "anonymous", " "] {
            let scope = Scope::new(tenant, "p").expect("a scope");
            assert_ne!(Identity::new(&scope, name.clone(), key.clone()).digest(), public.digest());
        }
        for bad in ["", "a b", "a\u{e9}", &"o".repeat(129)] {
            let why = bad.parse::<OperationName>().expect_err(bad).to_string();
            assert!(why.starts_with(&format!("`{bad}` is no name of an operation: ")), "{why}");
        }
    }

    // Shown by: hashing the principal without its tenant; comparing under the write id instead of
    // the stored one.
    #[test]
    fn o20_a_principal_is_compared_under_the_key_id_that_it_was_written_with() {
        let alice = Scope::new("acme", "alice").expect("a scope");
        let old = ring("k1", &["k1"]);
        let mark = alice.mark(&old);
        let rotated = ring("k2", &["k1", "k2"]);
        assert_eq!(alice.compare(&mark, &rotated), PrincipalMatch::Same);
        assert_ne!(alice.mark(&rotated), mark);
        assert_eq!(alice.compare(&mark, &ring("k2", &["k2"])), PrincipalMatch::Unreadable);
        for (tenant, principal) in [("acme", "bob"), ("other", "alice"), ("acmea", "lice")] {
            let other = Scope::new(tenant, principal).expect("a scope");
            assert_eq!(other.compare(&mark, &rotated), PrincipalMatch::Other);
        }
        assert_eq!(mark.to_string().parse(), Ok(mark.clone()));
        assert!(!mark.to_string().contains("alice") && !format!("{alice:?} {mark:?}").contains("alice"));
    }

    #[test]
    fn o16_stored_parts_that_this_program_did_not_write_are_refused() {
        let refused = |tenant: &[u8], operation: &[u8], key: &[u8]| {
            Identity::from_stored(tenant, operation, key).expect_err("refused").to_string()
        };
        assert_eq!(refused(b"\xff", b"o", KEY.as_bytes()), "a stored tenant is not text that this program wrote");
        assert_eq!(refused(b"t", b"\xff", KEY.as_bytes()), "a stored operation is not text that this program wrote");
        assert!(refused(b"t", b"o", b"short").starts_with("a stored key is none: the key has 5 characters"));
        for bad in ["", "k1", "k1:00", &format!("k1:{}", "g".repeat(64)), &format!("k1:{}", "A".repeat(64))] {
            let why = bad.parse::<PrincipalMark>().expect_err(bad).to_string();
            assert_eq!(why, "a stored principal is not `kid:hex` with 64 hexadecimal digits", "{bad}");
        }
    }
}
