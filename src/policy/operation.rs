//! What a second request is, and what becomes of it: the decisions of the operation engine (O1 to
//! O29).
//!
//! Under the `Idempotency-Key` of a client, an operation runs once. A second request is one of six
//! (M3): the same command after it was completed; while it runs; after its process died; after an
//! outside provider took it and the answer was lost; another command under the same key; one that
//! comes after the record was purged. This room proves which, from what a store read, and never
//! guesses.
//!
//! Guarantees:
//!
//! * No I/O, no clock, no chance: time is [`DbTime`](super::db_time::DbTime), chance an argument.
//! * What may execute is decided in one table ([`decide()`]), walked by tests over its whole space.
//!
//! | module | decides | rules |
//! |---|---|---|
//! | [`key`] | what is a key | O24 |
//! | [`identity`] | which request it is, and whose | O15, O16, O20 |
//! | [`keyring`] | under which secret a hash was made | O20, O21 |
//! | [`canonical`], [`decimal`], [`json`], [`raw`] | what a command says of itself | M18 to M24 |
//! | [`fingerprint`] | whether two commands are one | O21 |
//! | [`record`], [`machine`] | what is remembered, and how it may change | O2, O3, M31 |
//! | [`flow`] | the stages of a phased operation | O9, O13, M32 |
//! | [`route`] | what an operation's author chose | O4, O19, O23, O25 |
//! | [`mod@decide`] | what becomes of a request | O3, O11, O15, O19, M42 |
//! | [`classify`] | how a run ended, by what is certain | O10, M76 |
//! | [`doubt`] | what follows a transaction of unknown outcome | O1 |
//! | [`provider`] | what an outside provider's answer proves, and the next step | O5 to O8 |
//! | [`delivery`] | the words for what is sent to others | O28 |
//! | [`problem`], [`pace`] | the codes, and when to come again | O29 |
//! | [`resend`] | what a client does after an attempt | O26, O27 |
//! | [`versions`] | which live processes can read what others write | O21 |
//! | [`retention`] | how long what is remembered | O3, O23, M99 |

pub mod canonical;
pub mod classify;
pub mod decide;
pub mod decimal;
pub mod delivery;
pub mod doubt;
pub mod fingerprint;
pub mod flow;
pub mod identity;
pub mod json;
pub mod key;
pub mod keyring;
pub mod machine;
pub mod pace;
pub mod problem;
pub mod provider;
pub mod raw;
pub mod record;
pub mod resend;
pub mod retention;
pub mod route;
pub mod versions;

pub use self::canonical::{FingerprintValue, FingerprintWriter, ValueWriter};
pub use self::classify::Outcome;
pub use self::decide::{Decision, decide};
pub use self::decimal::Decimal;
pub use self::fingerprint::{Canonical, Comparison, Fingerprint, Fingerprinter, IdempotentCommand};
pub use self::identity::{Identity, OperationName, PrincipalMark, Scope};
pub use self::key::{Key, KeyError, KeyFormat};
pub use self::keyring::{Keyring, Kid};
pub use self::problem::Code;
pub use self::record::{Mode, Record, State};
pub use self::route::Route;

/// Parts one after the other, each behind its length in bytes as eight bytes, the highest first.
fn framed<'a>(parts: impl IntoIterator<Item = &'a [u8], IntoIter: Clone>) -> Vec<u8> {
    let parts = parts.into_iter();
    let mut out = Vec::with_capacity(parts.clone().map(|part| part.len() + 8).sum());
    for part in parts {
        out.extend_from_slice(&(part.len() as u64).to_be_bytes());
        out.extend_from_slice(part);
    }
    out
}
