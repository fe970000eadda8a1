//! Drives an operation that was taken over: reads what the driver needs and runs it. An operation
//! that cannot be read here is given back, and one whose record is gone is parked.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::context::Context;
use super::driver::{Came, Driver, End, Ended, Ready};
use super::hold::Hold;
use super::registry::Phased;
use crate::error::StoreError;
use crate::observe::{Noted, noted};
use crate::operation::port::phases::{Driven, Due, StoredOperation};
use crate::time::since::Since;

/// Drives an operation. The statement that took it over was sent at `asked` and granted `lease`.
pub(super) async fn taken(
    phased: Arc<Phased>,
    driven: Driven,
    stored: StoredOperation,
    (asked, lease): (Since, Duration),
    came: Came,
    stop: CancellationToken,
) -> Result<Ended, StoreError> {
    let key = stored.identity.as_ref().map(|identity| identity.short_hash()).unwrap_or_default();
    noted(&stored.flow, &key, Noted::TakenUp);
    let store = &phased.store;
    match prepared(&phased, &stored).await {
        Ok(Some(ready)) => {
            let hold = Hold::new(Arc::clone(store), driven, lease, asked);
            Driver::new(phased, ready, hold, came, None, stop).drive().await
        }
        Ok(None) => {
            let reason = "record-gone";
            tracing::error!(operation = %stored.operation_id, reason, "an operation cannot be driven");
            store.park(&driven, reason).await?;
            Ok(Ended { end: End::Parked, reply: None })
        }
        Err(error) => {
            let settings = &phased.settings;
            let after = if error.is_transient() {
                tracing::warn!(operation = %stored.operation_id, %error, "an operation could not be read now");
                settings.backoff_first
            } else {
                // Another process may have the encryption key or the flow version.
                tracing::error!(operation = %stored.operation_id, %error, "an operation cannot be read here");
                settings.backoff_max
            };
            let after = (came != Came::Early).then_some(after);
            store.hand_back(&driven, Due { after, attempt: false }).await?;
            Ok(Ended { end: End::Later, reply: None })
        }
    }
}

/// What the driver of an operation needs. `None`: the record of the operation is gone.
async fn prepared(phased: &Phased, stored: &StoredOperation) -> Result<Option<Ready>, StoreError> {
    let unknown = || StoreError::Refused(format!("no flow `{}` of version {}", stored.flow, stored.flow_version));
    let member = phased.member(&stored.flow, stored.flow_version).ok_or_else(unknown)?;
    let Some(identity) = stored.identity.clone() else { return Ok(None) };
    let Some(record) = phased.store.find(&identity).await?.record else { return Ok(None) };
    let bytes = phased.sealer.open(stored.operation_id, "command", &stored.command)?;
    let command = member.flow.decode(&bytes)?;
    let context = Context::new(phased.deployment, stored.operation_id, identity);
    Ok(Some((member, context, command, record.fingerprint)))
}
