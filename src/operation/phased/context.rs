//! The operation that a phase belongs to, with the ids of its effects and rows (M78, M79, pitfall
//! 40), and the points at which it continues after a commit.
//!
//! Each id is derived from the deployment, the operation and a name, and from nothing that a client
//! sent. So a crash, a resend and a recovery by another process give the same ids, and a clone of
//! the database under another deployment gives others.
//!
//! Not here: the operation's own id, which the claim makes.

use sha2::{Digest, Sha256};
use uuid::{Builder, Uuid};

use crate::operation::rules::Identity;
use crate::operation::rules::framed::framed;
use crate::text::hex::hex;

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
    deployment: Uuid,
    operation_id: Uuid,
    identity: Identity,
}

impl Context {
    pub(super) fn new(deployment: Uuid, operation_id: Uuid, identity: Identity) -> Self {
        Self { deployment, operation_id, identity }
    }

    /// The id of the operation that the phase belongs to.
    #[must_use]
    pub fn operation_id(&self) -> Uuid {
        self.operation_id
    }

    /// The id of a row that the operation makes, the same in each of its phases: a UUID v7 with the
    /// time of the operation's own id. A message needs none: the transaction that enqueues it
    /// commits once.
    #[must_use]
    pub fn row(&self, name: &str) -> Uuid {
        let mut time = [0; 8];
        time[2..].copy_from_slice(&self.operation_id.as_bytes()[..6]);
        let mut rest = [0; 10];
        rest.copy_from_slice(&self.digest("row", name)[..10]);
        Builder::from_unix_timestamp_millis(u64::from_be_bytes(time), &rest).into_uuid()
    }

    /// The key of an effect at its provider: `op_` and 40 hexadecimal digits. It is the same in
    /// each send of the effect (O7).
    pub(super) fn provider_key(&self, effect: &str) -> String {
        format!("op_{}", hex(&self.digest("provider", effect)[..20]))
    }

    fn digest(&self, kind: &str, name: &str) -> [u8; 32] {
        let hash = Sha256::new().chain_update(framed(["oncebox identity", kind, name].map(str::as_bytes)));
        hash.chain_update(self.deployment).chain_update(self.operation_id).finalize().into()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn of(deployment: Uuid, operation_id: Uuid) -> Context {
        let identity = Identity::from_stored(b"t1", b"pay", b"key-0000000000000001").expect("an identity");
        Context::new(deployment, operation_id, identity)
    }

    // Shown by: leaving the deployment, the kind or the name out of the digest.
    #[test]
    fn m78_m79_an_effect_has_one_identity_and_no_two_share_one() {
        let (here, there, one, two) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
        assert_eq!(of(here, one).provider_key("charge"), of(here, one).provider_key("charge"));
        let keys = [
            of(here, one).provider_key("charge"),
            of(here, one).provider_key("refund"),
            of(here, two).provider_key("charge"),
            of(there, one).provider_key("charge"),
        ];
        for (at, key) in keys.iter().enumerate() {
            assert_eq!(key.len(), 43);
            assert!(!keys[..at].contains(key) && !key.contains(&one.simple().to_string()));
        }
        assert_eq!(of(here, one).row("payment"), of(here, one).row("payment"));
        assert_ne!(of(here, one).row("payment"), of(here, one).row("refund"));
        let id = of(here, one).row("payment");
        assert_eq!((id.get_version_num(), &id.as_bytes()[..6]), (7, &one.as_bytes()[..6]));
    }

    // The ids were computed by Python's hashlib. A later phase derives the ids that an earlier one
    // wrote, perhaps in another version of this program. Shown by: leaving the length prefixes out;
    // the operation before the deployment.
    #[test]
    fn m78_m79_the_identities_of_an_operation_never_change() {
        let id = |text: &str| text.parse::<Uuid>().expect("a UUID");
        let (deployment, operation) =
            (id("0192d3a4-0000-7000-8000-000000000001"), id("0192d3a4-b5c6-7000-8000-000000000002"));
        let of = of(deployment, operation);
        assert_eq!(of.provider_key("charge"), "op_2f23583217921544267f04360df24f33cfe03d58");
        assert_eq!(of.row("payment"), id("0192d3a4-b5c6-709d-b045-135c76692f7d"));
    }
}
