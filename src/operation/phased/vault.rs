//! Seals commands, requests and evidence for storage, each bound to its operation and its kind
//! (O22).

use uuid::Uuid;

use crate::error::StoreError;
use crate::operation::Sealer;
use crate::operation::port::evidence::Sealed;

#[derive(Debug, Clone)]
pub(super) struct Vault(pub(super) Sealer);

impl Vault {
    /// Seals bytes of an operation; `what` is `command`, `request:EFFECT` or `evidence`. After an
    /// error, store nothing in plain instead.
    pub(super) fn seal(&self, operation_id: Uuid, what: &str, plain: &[u8]) -> Result<Sealed, StoreError> {
        let sealed = self.0.seal(&[operation_id.as_bytes(), what.as_bytes()], plain.to_vec());
        sealed.map_err(|error| StoreError::Refused(format!("the {what} of the operation {operation_id}: {error}")))
    }

    /// Opens bytes of an operation that [`Self::seal`] sealed with the same `what`.
    pub(super) fn open(&self, operation_id: Uuid, what: &str, sealed: &Sealed) -> Result<Vec<u8>, StoreError> {
        let opened = self.0.open(&[operation_id.as_bytes(), what.as_bytes()], sealed);
        opened.map_err(|error| StoreError::Refused(format!("the {what} of the operation {operation_id}: {error}")))
    }
}
