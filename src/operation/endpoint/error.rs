//! Why an operation cannot be registered: each reason with the setting that causes it.

use crate::error::Invalid;
use crate::operation::rules::{Mode, OperationName};

/// Why an operation cannot be registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// The name or the `write_version` cannot be used, or settings of the route contradict each
    /// other.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// A header that is never replayed.
    #[error("the header `{0}` is never stored: it belongs to one answer, one connection or one caller")]
    Header(String),
    /// A header that is no part of a command.
    #[error("the header `{0}` is no part of a command: it changes from one try to the next")]
    Counted(String),
    /// Not a JSON pointer.
    #[error("`{0}` is no JSON pointer: it begins with `/`")]
    Pointer(String),
    /// A typed operation claims every request; for a request without a key it makes one.
    #[error("`requirement = off` is for the layer: a typed operation takes `optional`")]
    Off,
    /// The mode of the operation is for another way of serving it.
    #[error("the operation `{operation}` is of mode {mode}, and {door} takes mode {takes}")]
    Door {
        /// The name of the operation.
        operation: OperationName,
        /// The mode of its route.
        mode: Mode,
        /// What was to serve it.
        door: &'static str,
        /// The modes that it can serve.
        takes: String,
    },
    /// The route builds answers again, and no function for it was given; or the other way round.
    #[error("`replay = reconstruct` needs `rebuilt_by`, and only it")]
    Rebuild,
    /// The route reconciles, and no function for it was given; or the other way round.
    #[error("`reconciles` needs `reconciled_by`, and only it")]
    Reconcile,
    /// The route answers duplicates with a link to the operation, and no path was given for it.
    #[error("`while_running = accepted` needs `operation_path`")]
    OperationPath,
    /// The store does not count the bytes that it stores for a tenant.
    #[error("`stored_bytes_per_tenant_max` needs a store that counts the bytes of a tenant: a guard does not")]
    StoredBytes,
    /// Another operation of the engine has the name.
    #[error(
        "`{0}` is protected already, and otherwise: operations with one name share their keys, so each needs a name of its own; \
         one that is served at two places is registered once, or twice alike"
    )]
    Twice(OperationName),
}
