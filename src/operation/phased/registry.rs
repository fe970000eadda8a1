//! The phased operations of a process: flows with their endpoints, the cipher of their bytes, and
//! the deployment that they belong to (O22).
//!
//! Promises: a flow is registered once by name and version; a worker drives only registered flows.
//! Nothing is sent if the deployment in the database is not the configured one, because a clone of
//! a database must not charge anybody.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::flow::AnyFlow;
use crate::error::{Invalid, StoreError};
use crate::observe::{Noted, noted};
use crate::operation::port::phases::Phases;
use crate::operation::rules::{Identity, Route};
use crate::operation::{Core, DriveSettings, Registered, Sealer};

#[derive(Debug)]
pub(super) struct Member {
    pub(super) flow: AnyFlow,
    pub(super) endpoint: Registered,
}

#[derive(Debug)]
pub(super) struct Phased {
    pub(super) engine: Core,
    pub(super) store: Arc<dyn Phases>,
    pub(super) sealer: Sealer,
    pub(super) settings: DriveSettings,
    pub(super) deployment: Uuid,
    pub(super) wake: Notify,
    members: BTreeMap<(&'static str, u32), Arc<Member>>,
}

impl Member {
    /// Counts an event of an operation and notes it in the span.
    pub(super) fn note(&self, identity: &Identity, what: Noted) {
        noted(self.flow.name, &identity.short_hash(), what);
    }

    pub(super) fn route(&self) -> &Route {
        self.endpoint.route()
    }
}

impl Phased {
    pub(super) fn new(engine: Core, store: Arc<dyn Phases>, deployment: Uuid) -> Self {
        let (sealer, settings) = (engine.inner.sealer.clone(), engine.inner.driving);
        Self { engine, store, sealer, settings, deployment, wake: Notify::new(), members: BTreeMap::new() }
    }

    pub(super) fn register(&mut self, flow: AnyFlow, endpoint: Registered) -> Result<(), Invalid> {
        flow.fits(endpoint.route().lease)?;
        let at = (flow.name, flow.version);
        if self.members.contains_key(&at) {
            return Err(Invalid::new(format!("flow `{}` is registered twice with version {}", at.0, at.1)));
        }
        self.members.insert(at, Arc::new(Member { flow, endpoint }));
        Ok(())
    }

    pub(super) fn member(&self, flow: &str, version: u32) -> Option<Arc<Member>> {
        self.members.get(&(flow, version)).cloned()
    }

    pub(super) fn newest(&self, flow: &str) -> Option<Arc<Member>> {
        self.members.iter().rev().find(|((name, _), _)| *name == flow).map(|(_, member)| Arc::clone(member))
    }

    /// Flows with their versions, and the lease of the newest version.
    pub(super) fn flows(&self) -> Vec<(&'static str, Vec<u32>, Duration)> {
        let mut flows: Vec<(&'static str, Vec<u32>, Duration)> = Vec::new();
        for ((name, version), member) in &self.members {
            match flows.last_mut() {
                Some((last, versions, lease)) if last == name => {
                    versions.push(*version);
                    *lease = member.route().lease;
                }
                _ => flows.push((name, vec![*version], member.route().lease)),
            }
        }
        flows
    }

    /// Returns when the stop has fired and the grace for what must still be stored is over.
    pub(super) fn grace_is_over(&self, stop: &CancellationToken) -> impl Future<Output = ()> + use<> {
        let (stop, grace) = (stop.clone(), self.settings.shutdown_grace);
        async move {
            stop.cancelled().await;
            tokio::time::sleep(grace).await;
        }
    }

    /// Whether the database belongs to the configured deployment. If not, an error is logged, and
    /// nothing may be sent.
    pub(super) async fn is_ours(&self) -> Result<bool, StoreError> {
        let found = self.store.deployment().await?;
        if found != self.deployment {
            tracing::error!(configured = %self.deployment, %found,
                "this database belongs to another deployment: nothing is sent to providers");
        }
        Ok(found == self.deployment)
    }
}
