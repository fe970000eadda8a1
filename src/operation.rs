//! Operations: requests, calls and jobs that run once for each `Idempotency-Key`.
//!
//! Declare an operation with a [`Route`] and an [`Endpoint`], register it with the [`Engine`] of
//! the process, and run it in one of the modes of [`Mode`]: in one transaction
//! ([`Engine::execute_transactional`]), in phases with calls of an outside provider between them
//! ([`phased`]), or with a layer around a handler ([`Engine::execute_edge`]; modes `edge` and
//! `bridged`).
//!
//! Promise: only names for users are exported here; the implementation is private.
//!
//! | module | for |
//! |---|---|
//! | `rules` | pure: what a second request is, and what becomes of it |
//! | `port` | what the engine needs of a database; `port::phases`: of phased operations |
//! | `engine` | [`Engine`]: what a process shares, and its limits |
//! | `endpoint` | [`Endpoint`]: an operation as its author declares it |
//! | `front` | what every operation does with a request before it executes |
//! | `transactional` | [`Engine::execute_transactional`]: claim, effects, messages and answer in one commit |
//! | [`phased`] | phased operations: phases, and calls of providers between them |
//! | `edge` | [`Engine::execute_edge`]: a claim around any handler |
//! | `codec` | what is kept of answers, and replayed |
//! | `reconcile` | finds out the outcome of an edge run whose end was not recorded |
//! | `sweep` | deletes expired data, and ends abandoned claims |
//! | `standing` | marks a run as unknown in the background, after its request was answered |
//! | `running`, `memory` | the runs of this process; how much memory request bodies may take |
//! | `reach`, `admission` | whether the store answers; how many operations its connections carry |
//! | `quota`, `live` | how many bytes a tenant has stored; which fingerprints this process reads |
//!
//! Not here: the statements ([`store`](crate::store)), and HTTP or gRPC, which only translate
//! requests and answers.

mod admission;
mod codec;
mod edge;
mod endpoint;
mod engine;
mod front;
mod guarded;
mod live;
mod memory;
pub mod phased;
pub(crate) mod port;
mod quota;
mod reach;
mod reconcile;
mod reply;
pub(crate) mod rules;
mod running;
mod standing;
mod sweep;
mod transactional;

pub(crate) use self::front::{Begin, Front, Turn};
pub use self::{
    codec::{Kept, SealError, Sealer},
    edge::{EdgeAnswer, Ended, Guard, GuardError},
    endpoint::{Endpoint, Reconciled, Registered},
    engine::{Core, DriveSettings, Engine, EngineOptions},
    front::{Asking, KeyGiven},
    memory::BodyPermit,
    reply::{Answered, Keep, Problem, Reply},
    rules::delivery::Delivery,
    rules::flow::Stage,
    rules::problem::KeyState,
    rules::record::{Resource, StoredAnswer, StoredBody, Tombstone},
    rules::retention::Retention,
    rules::route::{AfterExpiry, Durability, Effects, MismatchStatus, Replay, Requirement, WhileRunning},
    rules::{
        Canonical, Code, Decimal, Fingerprint, FingerprintValue, FingerprintWriter, IdempotentCommand, Identity, Key,
        KeyFormat, Keyring, Kid, Mode, OperationName, Outcome, PrincipalMark, Record, Route, Scope, State, ValueWriter,
        provider, resend,
    },
    transactional::EffectTx,
};
#[cfg(feature = "http")]
pub(crate) use self::{edge::Progress, front::NoCommand};
