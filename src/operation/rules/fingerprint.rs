//! Pure: no I/O, no clock.
//! Whether a second request is the same command as the first (M18 to M28, O21).
//!
//! Guarantees:
//!
//! * A fingerprint holds the version and key id under which it was made, and is compared under
//!   them. So raising either changes no verdict on what is stored.
//! * A fingerprint that this process cannot compute is never called different. A newer version or
//!   an unknown key id is *unreadable* (503, because another process may be able to). A version
//!   older than it knows is *too old* (the result is not retained). In both cases nothing is
//!   executed.
//! * `write_version` is a setting of its own, separate from the versions that can be read. Raise it
//!   when every process reads the new version.
//!
//! Not here: the canonical form itself ([`canonical`](super::canonical)), and the answer
//! ([`decide`](super::decide())).

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use super::canonical::FingerprintWriter;
use super::framed::framed;
use super::identity::OperationName;
use super::keyring::{Keyring, Kid};
use super::versions::Versions;
use crate::error::Invalid;
use crate::text::hex::{hex, unhex};

/// A command whose repetition is recognised. Fingerprint it after validation and defaults (M20).
pub trait IdempotentCommand {
    /// The operation's name. It must never change.
    const OPERATION: &'static str;
    /// The newest version of [`fingerprint`](Self::fingerprint) that this program can write.
    const VERSION: u32;
    /// The oldest version that this program can still write, to compare it with what is stored.
    /// Keep an old version until all its records have expired.
    const OLDEST: u32 = Self::VERSION;

    /// Writes the fields of this command as they belong to that version.
    fn fingerprint(&self, version: u32, writer: &mut FingerprintWriter);
}

/// What a fingerprint is made of: any [`IdempotentCommand`], or the raw request of the generic
/// layer.
pub trait Canonical {
    /// Writes the fields as they belong to that version.
    fn write_canonical(&self, version: u32, writer: &mut FingerprintWriter);
}

impl<C: IdempotentCommand> Canonical for C {
    fn write_canonical(&self, version: u32, writer: &mut FingerprintWriter) {
        self.fingerprint(version, writer);
    }
}

/// A fingerprint as it is stored: `version:kid:hex`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    version: u32,
    kid: Kid,
    hash: [u8; 32],
}

/// How a stored fingerprint compares with a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Comparison {
    Equal,
    Different,
    /// A newer program wrote the fingerprint, or it was written under a key id that this process
    /// does not have: another process can compare it.
    Unreadable,
    /// Its version is older than the oldest that this program can write, so it cannot be compared
    /// any more.
    TooOld,
}

/// The fingerprints of one operation: which versions are read, and which one is written.
#[derive(Debug, Clone)]
pub(crate) struct Fingerprinter {
    operation: OperationName,
    readable: RangeInclusive<u32>,
    write_version: u32,
    keyring: Keyring,
}

impl Fingerprinter {
    /// For an operation whose command can be written in these versions, of which `write_version`
    /// must be one. Its default is the oldest one, which every process that runs beside this one
    /// can read (O21).
    pub(crate) fn new(
        operation: OperationName,
        readable: RangeInclusive<u32>,
        write_version: Option<u32>,
        keyring: Keyring,
    ) -> Result<Self, Invalid> {
        let write_version = write_version.unwrap_or(*readable.start());
        if !readable.contains(&write_version) {
            let (oldest, newest) = readable.into_inner();
            return Err(Invalid::new(format!(
                "`write_version` of {operation} is {write_version}: this program writes versions {oldest} to {newest}"
            )));
        }
        Ok(Self { operation, readable, write_version, keyring })
    }

    /// The fingerprint for a new record of this command.
    pub(crate) fn write(&self, command: &(impl Canonical + ?Sized)) -> Fingerprint {
        let (kid, hash) = self.keyring.write(&self.message(self.write_version, command));
        Fingerprint { version: self.write_version, kid, hash }
    }

    /// Compares a stored fingerprint with a command, under the stored version and key id.
    pub(crate) fn compare(&self, stored: &Fingerprint, command: &(impl Canonical + ?Sized)) -> Comparison {
        if stored.version > *self.readable.end() {
            return Comparison::Unreadable;
        }
        if stored.version < *self.readable.start() {
            return Comparison::TooOld;
        }
        match self.keyring.hash(&stored.kid, &self.message(stored.version, command)) {
            None => Comparison::Unreadable,
            Some(hash) if hash == stored.hash => Comparison::Equal,
            Some(_) => Comparison::Different,
        }
    }

    pub(crate) fn operation(&self) -> &OperationName {
        &self.operation
    }

    /// The secrets. Principals are hashed with them too.
    pub(crate) fn keyring(&self) -> &Keyring {
        &self.keyring
    }

    /// What this process reads and writes of the operation, for `oncebox doctor`.
    pub(crate) fn versions(&self) -> Versions {
        Versions {
            operation: self.operation.clone(),
            readable: self.readable.clone(),
            write_version: self.write_version,
            kids: self.keyring.readable().collect(),
            write_kid: self.keyring.write_kid().clone(),
        }
    }

    fn message(&self, version: u32, command: &(impl Canonical + ?Sized)) -> Vec<u8> {
        let mut writer = FingerprintWriter::default();
        command.write_canonical(version, &mut writer);
        let (domain, operation) = (b"oncebox fingerprint".as_slice(), self.operation.as_str().as_bytes());
        framed([domain, operation, &version.to_be_bytes(), &writer.finish()])
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.version, self.kid, hex(&self.hash))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({}:{}:{}..)", self.version, self.kid, hex(&self.hash[..4]))
    }
}

impl FromStr for Fingerprint {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let wrong = || Invalid::new("a stored fingerprint is not `version:kid:hex` with 64 hexadecimal digits");
        let mut parts = text.splitn(3, ':');
        let mut part = || parts.next().ok_or_else(wrong);
        let (version, kid, hash) = (part()?, part()?, part()?);
        let digits = version.bytes().all(|byte| byte.is_ascii_digit());
        Ok(Self {
            version: version.parse().ok().filter(|_| digits).ok_or_else(wrong)?,
            kid: kid.parse().map_err(|_| wrong())?,
            hash: unhex(hash).and_then(|hash| hash.try_into().ok()).ok_or_else(wrong)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Payment {
        amount: i64,
        channel: &'static str,
    }

    impl IdempotentCommand for Payment {
        const OPERATION: &'static str = "create_payment";
        const VERSION: u32 = 2;
        const OLDEST: u32 = 1;

        fn fingerprint(&self, version: u32, writer: &mut FingerprintWriter) {
            writer.field("amountMinor", &self.amount);
            if version >= 2 {
                writer.field("channel", self.channel);
            }
        }
    }

    const PAYMENT: Payment = Payment { amount: 1_000, channel: "web" };
    const SECRET: [u8; 32] = [7; 32];

    fn fingerprinter(readable: RangeInclusive<u32>, write: Option<u32>, keyring: Keyring) -> Fingerprinter {
        let operation = Payment::OPERATION.parse().expect("a name");
        Fingerprinter::new(operation, readable, write, keyring).expect("settings")
    }

    fn plain(write: u32) -> Fingerprinter {
        fingerprinter(1..=2, Some(write), Keyring::plain())
    }

    fn ring(write: &str) -> Keyring {
        Keyring::new(write.parse().expect("a key id"), [("k1".parse().expect("a key id"), SECRET.as_slice())])
            .expect("a ring")
    }

    // The hash was computed by Python's hashlib from the documented bytes. Shown by: leaving the
    // operation out.
    #[test]
    fn m25_o21_a_fingerprint_is_version_kid_and_a_hash_that_any_language_can_check() {
        let text = plain(1).write(&PAYMENT).to_string();
        assert_eq!(text, "1:sha256:6f7c1e5a3cda8d99450a5004829f843aea214fc07cace8ea6bbffef93e2282bd");
        assert_eq!(text.parse::<Fingerprint>().expect("its own text").to_string(), text);
        let signed = format!("+{text}");
        for bad in ["", "1", "1:sha256", &signed, "x:sha256:00", &text[..text.len() - 1], &text.to_uppercase()] {
            assert!(bad.parse::<Fingerprint>().is_err_and(|why| why.to_string().contains("version:kid:hex")), "{bad}");
        }
    }

    // Shown by: comparing under the version to write; and under the key id to write.
    #[test]
    fn o21_m24_a_stored_fingerprint_is_compared_under_its_own_version_and_key_id() {
        for stored in [plain(1).write(&PAYMENT), plain(2).write(&PAYMENT)] {
            for reader in [plain(1), plain(2), fingerprinter(1..=2, None, ring("k1"))] {
                assert_eq!(reader.compare(&stored, &PAYMENT), Comparison::Equal);
                let other = Payment { amount: 10_000, ..PAYMENT };
                assert_eq!(reader.compare(&stored, &other), Comparison::Different);
            }
        }
        let app = Payment { channel: "app", ..PAYMENT };
        assert_eq!(plain(2).compare(&plain(1).write(&PAYMENT), &app), Comparison::Equal, "version 1 had no channel");
        assert_eq!(plain(1).compare(&plain(2).write(&PAYMENT), &app), Comparison::Different);
    }

    // Shown by: writing with the newest version, always or where none is set; with the first secret
    // of the ring always.
    #[test]
    fn o21_what_is_written_is_a_setting_apart_from_what_is_read() {
        let version = |fingerprinter: &Fingerprinter| fingerprinter.write(&PAYMENT).to_string();
        assert!(version(&plain(1)).starts_with("1:sha256:"));
        assert!(version(&fingerprinter(1..=2, None, ring("sha256"))).starts_with("1:sha256:"));
        assert!(version(&fingerprinter(1..=2, None, ring("k1"))).starts_with("1:k1:"));
        for asked in [0, 3] {
            let operation = Payment::OPERATION.parse().expect("a name");
            let error = Fingerprinter::new(operation, 1..=2, Some(asked), Keyring::plain()).expect_err("not writable");
            let expected = format!("`write_version` of create_payment is {asked}: this program writes versions 1 to 2");
            assert_eq!(error.to_string(), expected);
        }
    }

    #[test]
    fn m13_the_same_command_of_another_operation_has_another_fingerprint() {
        let other = Fingerprinter::new("refund".parse().expect("a name"), 1..=2, Some(1), Keyring::plain());
        assert_ne!(other.expect("settings").write(&PAYMENT), plain(1).write(&PAYMENT));
    }
}
