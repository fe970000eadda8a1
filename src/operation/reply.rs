//! The answer of an operation, before HTTP or gRPC gives it a form.

use uuid::Uuid;

use crate::operation::rules::Code;
use crate::operation::rules::problem::KeyState;
use crate::operation::rules::record::Resource;

/// The answer of an operation: what is stored and replayed.
#[derive(Clone, PartialEq, Eq)]
pub struct Reply {
    /// The HTTP status, or the code of gRPC.
    pub status: u16,
    /// Lower-case names and their values, in order; a name may repeat.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The bytes of the body.
    pub body: Vec<u8>,
    /// The version of the schema of the body (M66); 0 means the current version of the endpoint.
    pub schema_version: u32,
    /// The resource that the operation made (M34). It is kept in plain beside the body, and
    /// outlives it.
    pub resource: Option<Resource>,
    /// Which parts of the answer are kept.
    pub keep: Keep,
}

/// What is kept of an answer (M67, M68).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Keep {
    /// Status, allow-listed headers, body and resource.
    #[default]
    Exact,
    /// The reference to the resource.
    Reference,
    /// The status only: the body is a secret that is shown once.
    Nothing,
}

/// What an operation answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answered {
    /// The operation's own answer, first or replayed.
    Reply {
        /// The answer of the operation.
        reply: Reply,
        /// Whether it is the outcome of an earlier request: `Idempotent-Replayed: true`.
        replayed: bool,
    },
    /// A problem that the engine answers with.
    Problem(Problem),
}

/// A problem that the engine answers with (RFC 9457).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The code that says what is wrong.
    pub code: Code,
    /// The status, which a route may choose for some codes.
    pub status: u16,
    /// What is known about the key.
    pub key_state: KeyState,
    /// After how many seconds to retry.
    pub retry_after: Option<u32>,
    /// The id of the operation, if it may be shown.
    pub operation_id: Option<Uuid>,
    /// The URL of the operation or the resource.
    pub location: Option<String>,
    /// The resource, if the result is not kept.
    pub resource: Option<Resource>,
    /// The region that keeps the key, if it is another one.
    pub home_region: Option<String>,
    /// A sentence beside the title; it never holds a value of the first request.
    pub detail: Option<String>,
}

impl Reply {
    /// An answer with this status, without headers and body, kept whole.
    #[must_use]
    pub fn new(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Vec::new(), schema_version: 0, resource: None, keep: Keep::Exact }
    }

    /// An answer in JSON.
    ///
    /// # Errors
    /// The value has no JSON form, such as a map with keys that are no strings.
    pub fn json(status: u16, value: &impl serde::Serialize) -> Result<Self, serde_json::Error> {
        let body = serde_json::to_vec(value)?;
        Ok(Self { body, ..Self::new(status) }.header("content-type", "application/json"))
    }

    /// Adds a header; the same name may be added again.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl Into<Vec<u8>>) -> Self {
        self.headers.push((name.to_ascii_lowercase(), value.into()));
        self
    }

    /// Sets the resource that the operation made, and its `Location`.
    #[must_use]
    pub fn made(mut self, kind: &str, id: &str, location: &str) -> Self {
        self.resource =
            Some(Resource { kind: kind.to_owned(), id: id.to_owned(), location: Some(location.to_owned()) });
        self.header("location", location)
    }
}

impl Problem {
    /// A problem with the values that its code has.
    #[must_use]
    pub fn new(code: Code) -> Self {
        Self {
            code,
            status: code.status(),
            key_state: code.key_state(),
            retry_after: code.pause(),
            operation_id: None,
            location: None,
            resource: None,
            home_region: None,
            detail: None,
        }
    }
}

impl std::fmt::Debug for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Reply({}, {} headers, {} bytes)", self.status, self.headers.len(), self.body.len())
    }
}
