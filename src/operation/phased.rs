//! Phased operations: phases in transactions of their own, with calls of providers between them (O5
//! to O9, O13, O22; M52, M53, M78 to M83).
//!
//! A phase is a transaction that ends at a recovery point, with the intent to call a provider, or
//! with the outcome. The engine commits the bytes that it will send, sends them, stores what the
//! answers prove as evidence, decides from the evidence, and runs the next phase. After a crash at
//! any point, a worker or the repeated request continues the operation from its last commit.
//!
//! | file | holds |
//! |---|---|
//! | `flow`, `phase`, `ends` | what an author writes, and how a phase may end |
//! | `context` | the operation of a phase, the ids derived from it, and where it continues |
//! | `effect`, `provider`, `http` | effects, adapters, an adapter over HTTP |
//! | `sending`, `webhook`, `email` | an operation with one effect: a signed webhook, an e-mail |
//! | `engine`, `opening` | a request for an operation, and the first phase |
//! | `taken` | prepares the driver of an operation that was taken over |
//! | `driver` with its folder, `hold` | from a recovery point to the next: phases, calls, the lease, and its release |
//! | `evidence` | how observations are stored |
//! | `registry`, `recovery` | the registered flows, and the worker |
//!
//! The worker is built with the service's flows, so it runs in the service's process, as in
//! `examples/payments_api`, or in a binary of the same crate. The stock `publisher` has no flows
//! and recovers nothing.

mod context;
mod driver;
mod effect;
#[cfg(feature = "email")]
pub mod email;
mod ends;
mod engine;
mod evidence;
mod flow;
mod hold;
#[cfg(feature = "client")]
pub mod http;
mod opening;
mod phase;
mod provider;
mod recovery;
mod registry;
#[cfg(any(feature = "client", feature = "email"))]
mod sending;
mod taken;
#[cfg(feature = "client")]
pub mod webhook;

pub use self::{
    context::{Context, LocalPoint, SettledPoint},
    effect::{Compensation, Effect, Intent, Proven, Settlement, Settlements, Undo},
    ends::{First, Local, Settled},
    engine::PhasedEngine,
    flow::{Flow, FlowBuilder},
    phase::{FirstPhase, LocalPhase, Phase, SettledPhase},
    provider::{Asked, Call, Prepare, Provider, Sent},
    recovery::{Recovery, RecoveryOptions},
};
