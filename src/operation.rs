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
//! Not here: the decisions (room `policy`) and the work (room `runtime`).

pub use crate::policy::operation::delivery::Delivery;
pub use crate::policy::operation::flow::Stage;
pub use crate::policy::operation::key::{KEY_BYTES_MAX, KEY_BYTES_MIN};
pub use crate::policy::operation::raw::RawCommand;
pub use crate::policy::operation::record::{Resource, StoredAnswer, StoredBody, Tombstone};
pub use crate::policy::operation::retention::{KeyAge, Retention, RetentionError};
pub use crate::policy::operation::route::{
    AfterExpiry, Durability, Effects, MismatchStatus, Replay, Requirement, RouteError, WhileRunning,
};
pub use crate::policy::operation::{
    Canonical, Code, Comparison, Decimal, Fingerprint, FingerprintValue, FingerprintWriter, Fingerprinter,
    IdempotentCommand, Identity, Key, KeyError, KeyFormat, Keyring, Kid, Mode, OperationName, Outcome, PrincipalMark,
    Record, Route, Scope, State, ValueWriter, provider,
};
pub use crate::runtime::operation::{
    Answered, Asking, Begin, BodyPermit, Core, EdgeAnswer, EffectTx, Ended, Endpoint, EndpointError, Engine,
    EngineBuilder, Front, Guard, GuardError, Keep, Kept, KeyGiven, Problem, Progress, Reconciled, Reconciling,
    Registered, Reply, SealError, Sealer, Turn, phased,
};
