//! Pure: no I/O, no clock.
//! The decisions of the operation engine: whether a request is new or repeated, and how it is
//! answered (O1 to O29).
//!
//! Under one `Idempotency-Key` of a client, an operation runs once. A second request under the key
//! is one of six cases (M3): the same command after it completed; while it runs; after its process
//! died; after an outside provider took it and the answer was lost; another command; a request that
//! comes after the record was purged. This module decides between them from what a store read, and
//! never guesses.
//!
//! Guarantees:
//!
//! * No random numbers: time is a [`DbTime`](crate::time::db_time::DbTime) argument, chance is an
//!   argument.
//! * One table decides what may execute ([`decide()`]). Tests run it over all cases. Not here:
//!   reading and writing records (`store`), and running operations (`operation`).
//!
//! | module | decides | rules |
//! |---|---|---|
//! | [`key`] | which texts are a key | O24 |
//! | [`identity`] | which key of which tenant and operation, and which principal | O15, O16, O20 |
//! | [`keyring`] | the secrets under which hashes are made | O20, O21 |
//! | [`canonical`], [`decimal`], [`json`], [`raw`] | the canonical bytes of a command | M18 to M24 |
//! | [`fingerprint`] | whether two commands are the same | O21 |
//! | [`record`] | what is stored for a key | O2, O3, M31 |
//! | [`flow`] | the stages of a phased operation | O9, O13, M32 |
//! | [`route`] | the settings of one operation | O4, O19, O23, O25 |
//! | [`mod@decide`] | how a request is answered | O3, O11, O15, O19, M42 |
//! | [`classify`] | how a run ended, as far as that is certain | O10, M76 |
//! | [`doubt`] | what follows a transaction of unknown outcome | O1 |
//! | [`provider`] | what an outside provider's answer proves, and the next step | O5 to O8 |
//! | [`delivery`] | the states of an e-mail or webhook | O28 |
//! | [`problem`], [`pace`] | the codes, and the seconds of `Retry-After` | O29 |
//! | [`resend`] | what a client does after an attempt | O26, O27 |
//! | [`versions`] | which live processes can read the fingerprints of others | O21 |
//! | [`retention`] | how long records and bodies are kept | O3, O23, M99 |

pub(crate) mod canonical;
pub(crate) mod classify;
pub(crate) mod decide;
pub(crate) mod decimal;
pub(crate) mod delivery;
pub(crate) mod doubt;
pub(crate) mod fingerprint;
pub(crate) mod flow;
pub(super) mod framed;
pub(crate) mod identity;
pub(crate) mod json;
pub(crate) mod key;
pub(crate) mod keyring;
pub(crate) mod pace;
pub(crate) mod problem;
pub mod provider;
pub(crate) mod raw;
pub(crate) mod record;
pub mod resend;
pub(crate) mod retention;
pub(crate) mod route;
pub(crate) mod versions;

pub use self::{
    canonical::{FingerprintValue, FingerprintWriter, ValueWriter},
    classify::Outcome,
    decimal::Decimal,
    fingerprint::{Canonical, Fingerprint, IdempotentCommand},
    identity::{Identity, OperationName, PrincipalMark, Scope},
    key::{Key, KeyFormat},
    keyring::{Keyring, Kid},
    problem::Code,
    record::{Mode, Record, State},
    route::Route,
};
pub(crate) use self::{
    decide::{Decision, decide},
    fingerprint::Fingerprinter,
};
