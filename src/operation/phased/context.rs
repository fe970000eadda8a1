//! The operation that a phase belongs to, and the points at which it continues after a commit.

use uuid::Uuid;

use super::identity::Identities;
use crate::operation::rules::Identity;

/// A recovery point before the first intent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalPoint(pub &'static str);

/// A recovery point after an effect is settled. It is another type, because a phase before the
/// first intent may end in ways that a later one may not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SettledPoint(pub &'static str);

/// The facts about its operation that a phase may use.
#[derive(Debug, Clone)]
pub struct Context {
    identities: Identities,
    identity: Identity,
}

impl Context {
    pub(super) fn new(deployment: Uuid, operation_id: Uuid, identity: Identity) -> Self {
        Self { identities: Identities::new(deployment, operation_id), identity }
    }

    /// The id of the operation that the phase belongs to.
    #[must_use]
    pub fn operation_id(&self) -> Uuid {
        self.identities.operation_id()
    }

    /// The id of a row that the operation makes, the same in each of its phases: a UUID v7 with the
    /// time of the operation's own id. A message needs none: the transaction that enqueues it
    /// commits once.
    #[must_use]
    pub fn row(&self, name: &str) -> Uuid {
        self.identities.row(name)
    }

    pub(super) fn provider_key(&self, effect: &str) -> String {
        self.identities.provider_key(effect)
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
