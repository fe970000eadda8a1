//! Phased operations: operations in phases, with calls of outside providers between them (O5 to O9, O13, O22;
//! M52, M53, M78 to M83).
//!
//! An author writes phases and an adapter of each provider. A phase is a transaction that ends at a
//! recovery point or with the intent to call; the engine commits what it will send, sends it, keeps
//! every answer as evidence, decides from it, and goes on with the next phase. A crash at any point
//! leaves an operation that a worker, or the repeating request, takes up where it is.
//!
//! | file | holds |
//! |---|---|
//! | `flow`, `phase`, `ends` | what an author writes, and how a phase may end |
//! | `effect`, `provider`, `http` | effects, adapters, an adapter over HTTP |
//! | `sending`, `webhook`, `email` | an operation that is one thing sent to others: a signed webhook, an e-mail |
//! | `identity` | identities derived from the operation |
//! | `engine`, `opening` | a request, and the first phase |
//! | `taken` | an operation that was taken up |
//! | `driver`, `call`, `hold`, `leaving` | from a recovery point to the next: phases, calls, the lease, and letting go |
//! | `evidence`, `vault` | how what was seen is stored |
//! | `registry`, `recovery` | what is registered, and the worker |
//!
//! The worker is built with the service's flows, so it runs in the service's process:
//! `Recovery::new(&phased, ..).run(stop)` beside the server, as `examples/payments_api` does, or in a
//! binary of the same crate with nothing else in it. The stock `publisher` has no flows and
//! recovers nothing.
//!
//! Not here: what an answer proves and what is next
//! ([`policy::operation::provider`](crate::policy::operation::provider)), which stage follows which
//! ([`policy::operation::flow`](crate::policy::operation::flow)), and the rows (`store`).

mod call;
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
mod identity;
mod leaving;
mod opening;
mod phase;
mod provider;
mod recovery;
mod registry;
mod rerun;
#[cfg(any(feature = "client", feature = "email"))]
mod sending;
mod taken;
mod vault;
#[cfg(feature = "client")]
pub mod webhook;

pub use effect::{Compensation, Effect, Intent, Proven, Settlement, Settlements, Undo};
pub use ends::{First, Local, LocalPoint, Settled, SettledPoint};
pub use engine::{PhasedEngine, PhasedEngineBuilder, PhasedEngineError};
pub use flow::{Flow, FlowBuilder, FlowError};
pub use identity::{Identities, ProviderKey};
pub use phase::{Context, FirstPhase, LocalPhase, Phase, SettledPhase};
pub use provider::{Asked, Call, Prepare, Provider, Sent};
pub use recovery::{Recovery, RecoveryOptions};
pub use registry::DriveSettings;
