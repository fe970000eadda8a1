//! Finds out how an edge run ended whose end was not seen, where its route can (O11).
//!
//! Promises: of twenty requests that wake it, one asks: it takes the record over by the fenced claim, so a slow answer that
//! comes after another's changes nothing. What cannot be said leaves the record UNKNOWN.

use std::time::Duration;

use uuid::Uuid;

use super::codec::{Kept, error_code};
use super::endpoint::{Reconciled, Reconciling, Registered};
use super::engine::Engine;
use crate::policy::operation::Record;
use crate::store::{Basis, Claimed, KeyClaim, Keys, Outcome};

/// Asks in a task of its own.
pub(super) fn wake<S: Keys>(engine: &Engine<S>, endpoint: &Registered, record: &Record) {
    let Some(ask) = endpoint.endpoint().reconcile.clone() else { return };
    let (engine_of_task, endpoint, record) = (engine.clone(), endpoint.clone(), record.clone());
    engine.spawn(async move {
        let engine = engine_of_task;
        let claim = KeyClaim {
            identity: record.identity.clone(),
            principal: record.principal.clone(),
            fingerprint: record.fingerprint.clone(),
            mode: record.mode,
            operation_id: Uuid::now_v7(),
            owner: KeyClaim::new_owner(),
            lease: endpoint.route().lease,
        };
        let owned = match engine.store().claim(&claim, Basis::TakeOver(&record)).await {
            Ok(Claimed::Owned(owned)) => owned,
            // Another one asks, or it is known by now.
            Ok(Claimed::Existing(_) | Claimed::Vanished) => return,
            Err(error) => return tracing::debug!(%error, "a record could not be taken over for reconciliation"),
        };
        let asked = Reconciling {
            tenant: record.identity.tenant().to_owned(),
            command: record.fingerprint.clone(),
            operation_id: record.operation_id,
        };
        let limit = endpoint.route().lease.saturating_sub(endpoint.route().completion_budget);
        let found = match tokio::time::timeout(limit.max(Duration::from_millis(1)), ask(asked)).await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => {
                tracing::warn!(operation = %endpoint.operation(), %error, "reconciliation failed");
                Reconciled::Unknown
            }
            Err(_) => Reconciled::Unknown,
        };
        let encode = |reply| engine.encode(&endpoint, &record.identity, &record.fingerprint, &Kept::Whole(reply));
        let outcome = match found {
            Reconciled::NotHappened => {
                if let Err(error) = engine.store().release(&owned).await {
                    tracing::warn!(operation = %endpoint.operation(), %error, "what was found out could not be written");
                }
                return;
            }
            Reconciled::Unknown => Ok(Outcome::Unknown),
            Reconciled::Completed(reply) => encode(reply).map(Outcome::Completed),
            Reconciled::Failed(reply) => {
                let error_code = error_code(endpoint.endpoint(), &reply);
                encode(reply).map(|answer| Outcome::FailedReplayable { answer, error_code })
            }
        };
        let outcome = outcome.unwrap_or_else(|error| {
            tracing::error!(operation = %endpoint.operation(), %error, "what was found out could not be sealed");
            Outcome::Unknown
        });
        if let Err(error) = engine.store().finish(&owned, &outcome, &endpoint.route().retention).await {
            tracing::warn!(operation = %endpoint.operation(), %error, "what was found out could not be written");
        }
    });
}
