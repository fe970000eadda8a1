//! The operation that a phase belongs to: its id, its tenant, and the identities derived from it.

use uuid::Uuid;

use super::identity::Identities;
use crate::operation::rules::Identity;

/// The facts about its operation that a phase may use.
#[derive(Debug, Clone)]
pub struct Context {
    identities: Identities,
    identity: Identity,
}

impl Context {
    pub(super) fn new(identities: Identities, identity: Identity) -> Self {
        Self { identities, identity }
    }

    /// The id of the operation that the phase belongs to.
    #[must_use]
    pub fn operation_id(&self) -> Uuid {
        self.identities.operation_id()
    }

    /// Derives the identities of rows, messages and effects.
    #[must_use]
    pub fn identities(&self) -> Identities {
        self.identities
    }

    /// The tenant of the request.
    #[must_use]
    pub fn tenant(&self) -> &str {
        self.identity.tenant()
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }
}
