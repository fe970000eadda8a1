//! Pure: no I/O, no clock.
//! Which fingerprints the live processes of a service read and write, and which process cannot read
//! those of another (O21).
//!
//! Guarantee: if one process writes fingerprints that another would answer with 503 or 409, the
//! pair is named, in whatever order the rows were read.
//!
//! Not here: where processes announce this (`Engine::measure`, `Engine::sweep`) and where it is
//! stored (`store`), and the verdict on one fingerprint (`fingerprint`).

use std::ops::RangeInclusive;
use std::time::Duration;

use uuid::Uuid;

use super::identity::OperationName;
use super::keyring::Kid;

/// How often a process announces what it reads and writes.
pub(crate) const SAID_EVERY: Duration = Duration::from_secs(30);
/// How long an announcement counts: a process that missed three is gone.
pub(crate) const LIVE_FOR: Duration = Duration::from_secs(120);
/// The age after which the announcement of a silent process is deleted.
pub(crate) const FORGOTTEN_AFTER: Duration = Duration::from_secs(86_400);

/// What a process reads and writes of one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versions {
    /// The operation that the versions are of.
    pub operation: OperationName,
    /// The versions of fingerprints that the process can compute.
    pub readable: RangeInclusive<u32>,
    /// The version that the process writes.
    pub write_version: u32,
    /// The key ids that the process has, `sha256` among them.
    pub kids: Vec<Kid>,
    /// The key id with which the process writes.
    pub write_kid: Kid,
}

/// An announcement: the versions, and the process that sent them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announced {
    /// An id that the process drew when it started.
    pub process: Uuid,
    /// What this process reads and writes of one operation.
    pub versions: Versions,
}

impl Versions {
    /// What this process writes and `reader` cannot read.
    fn unread_by(&self, reader: &Self) -> impl Iterator<Item = String> {
        let (version, kid) = (self.write_version, &self.write_kid);
        let version = (!reader.readable.contains(&version)).then(|| format!("version {version}"));
        let kid = (!reader.kids.contains(kid)).then(|| format!("key id {kid}"));
        version.into_iter().chain(kid)
    }
}

/// Each case in which a process cannot read what another one writes now: the operation, and a
/// sentence for a person.
#[must_use]
pub fn unreadable(live: &[Announced]) -> Vec<(&OperationName, String)> {
    let mut found = Vec::new();
    for writer in live {
        let operation = &writer.versions.operation;
        for reader in live.iter().filter(|reader| reader.versions.operation == *operation) {
            found.extend(writer.versions.unread_by(&reader.versions).map(|what| {
                let why =
                    format!("process {} writes {what}, which process {} cannot read", writer.process, reader.process);
                (operation, why)
            }));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn said(process: u128, operation: &str, readable: RangeInclusive<u32>, write: u32, kids: &[&str]) -> Announced {
        let kids: Vec<Kid> = kids.iter().map(|kid| kid.parse().unwrap()).collect();
        let versions = Versions {
            operation: operation.parse().unwrap(),
            readable,
            write_version: write,
            write_kid: kids.last().unwrap().clone(),
            kids,
        };
        Announced { process: Uuid::from_u128(process), versions }
    }

    // Shown by: comparing without the operation; leaving out the key ids; `contains` turned round.
    #[test]
    fn o21_a_process_that_cannot_read_what_another_writes_is_named() {
        let fine = [
            said(1, "pay", 1..=2, 1, &["sha256"]),
            said(2, "pay", 1..=1, 1, &["sha256"]),
            said(2, "note", 3..=3, 3, &["sha256", "k1"]),
        ];
        assert!(unreadable(&fine).is_empty());
        let raised_too_early = [said(1, "pay", 1..=2, 2, &["sha256", "k1"]), said(2, "pay", 1..=1, 1, &["sha256"])];
        let (writer, reader) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let pay: OperationName = "pay".parse().unwrap();
        let both = ["version 2", "key id k1"]
            .map(|what| (&pay, format!("process {writer} writes {what}, which process {reader} cannot read")));
        assert_eq!(unreadable(&raised_too_early), both);
        // A version older than the oldest readable one is answered with 409, so it is named too.
        let forgotten_too_early = [said(1, "pay", 1..=2, 1, &["sha256"]), said(2, "pay", 2..=3, 2, &["sha256"])];
        let why: Vec<String> = unreadable(&forgotten_too_early).into_iter().map(|(_, why)| why).collect();
        assert_eq!(why, [format!("process {writer} writes version 1, which process {reader} cannot read")]);
    }
}
