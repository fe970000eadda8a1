//! How a phase may end; the types allow nothing else (O13).
//!
//! A phase before the first intent may refuse or ask for a retry; the first phase may also leave no
//! trace. After the first intent is committed a phase may not, because its answer does not undo
//! what a provider has done. An error or a panic there makes the operation UNKNOWN, and recovery
//! continues it.
//!
//! ```compile_fail,E0599
//! use oncebox::operation::Reply;
//! use oncebox::operation::phased::Settled;
//! fn end(reply: Reply) -> Settled {
//!     Settled::Rejected { reply, code: None, binding: true }
//! }
//! ```
//!
//! ```compile_fail,E0599
//! use oncebox::operation::Reply;
//! use oncebox::operation::phased::Settled;
//! fn end(reply: Reply) -> Settled {
//!     Settled::Retryable(reply)
//! }
//! ```
//!
//! ```compile_fail,E0599
//! use oncebox::operation::Reply;
//! use oncebox::operation::phased::Settled;
//! fn end(reply: Reply) -> Settled {
//!     Settled::DontStore(reply)
//! }
//! ```
//!
//! A failure needs a proof, which only the driver can make:
//!
//! ```compile_fail,E0423
//! use oncebox::operation::Reply;
//! use oncebox::operation::phased::{Proven, Settled};
//! fn end(reply: Reply) -> Settled {
//!     Settled::Failure { proof: Proven(()), reply, code: None }
//! }
//! ```
//!
//! A phase without an effect to undo cannot compensate, and a phase cannot continue at a point of
//! the other kind:
//!
//! ```compile_fail,E0308
//! use oncebox::operation::phased::{Local, SettledPoint};
//! fn end() -> Local {
//!     Local::RecoveryPoint(SettledPoint("PROVIDER_CONFIRMED"))
//! }
//! ```
//!
//! This compiles:
//!
//! ```
//! use oncebox::operation::Reply;
//! use oncebox::operation::phased::{Settled, Settlement, Settlements};
//! fn end(settlements: &Settlements, reply: Reply) -> Option<Settled> {
//!     match settlements.of("charge")? {
//!         Settlement::Succeeded => Some(Settled::Response(reply)),
//!         Settlement::Failed(proof) => Some(Settled::Failure { proof: proof.clone(), reply, code: None }),
//!         Settlement::Undone(_) | Settlement::NotUndone => None,
//!     }
//! }
//! ```

use super::context::{LocalPoint, SettledPoint};
use super::effect::{Compensation, Intent, Proven};
use crate::operation::Reply;

/// How the first phase ends. Before it commits, nothing of the operation is stored.
#[derive(Debug)]
pub enum First {
    /// Commit, and continue at this point.
    RecoveryPoint(LocalPoint),
    /// Commit the intent, then send it.
    Intent(Intent),
    /// The operation succeeded without a provider.
    Response(Reply),
    /// A business rule refused the request. The writes of the phase are taken back.
    Rejected {
        /// The answer, which says why the request was refused.
        reply: Reply,
        /// The code of the refusal. It is stored only if `binding` is true.
        code: Option<String>,
        /// Whether the refusal is stored for this key; otherwise the key becomes free.
        binding: bool,
    },
    /// Nothing happened; the same key may run again.
    Retryable(Reply),
    /// Nothing happened, and nothing is stored.
    DontStore(Reply),
}

/// How a later phase before the first intent ends.
#[derive(Debug)]
pub enum Local {
    /// Commit, and continue at this point.
    RecoveryPoint(LocalPoint),
    /// Commit the intent, then send it.
    Intent(Intent),
    /// The operation succeeded without a provider.
    Response(Reply),
    /// A business rule refused the request. The writes of this phase are kept, so that it can close
    /// what earlier phases committed.
    Rejected {
        /// The answer, which says why the request was refused.
        reply: Reply,
        /// The code of the refusal, stored with the outcome.
        code: Option<String>,
    },
    /// Nothing happened in this phase; it runs again later, as after an error.
    Retryable,
}

/// How a phase ends after an effect is settled.
#[derive(Debug)]
pub enum Settled {
    /// Commit, and continue at this point.
    RecoveryPoint(SettledPoint),
    /// Commit the intent of another effect, then send it.
    Intent(Intent),
    /// Commit the intent to undo an effect, then send it.
    Compensate(Compensation),
    /// The operation succeeded; this is its answer.
    Response(Reply),
    /// The operation failed, and none of its effects stands but those declared repeatable.
    Failure {
        /// The proof of that: a failed effect, or an effect that was undone.
        proof: Proven,
        /// The answer, which is replayed.
        reply: Reply,
        /// The code of the failure, stored with the outcome.
        code: Option<String>,
    },
}
