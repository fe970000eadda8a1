//! A store whose calls can be made to fail, one kind at a time: what the network and a full disk
//! do, on command.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use oncebox::adapter::Versions;
use oncebox::operation::{Durability, Identity, OperationName, Record, Retention};
use oncebox::store::{
    AnswerBody, Basis, Fenced, KeptBody, KeyClaim, Keys, Look, NewEvidence, OperationStats, Owned, RunOutcome,
    StoredEvidence,
};
use oncebox::{StoreError, sqlx};

/// Which calls fail.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// How many connections the pool is said to have; 0: nothing is said.
    pub(crate) connections: AtomicU32,
    pub(crate) find: AtomicBool,
    pub(crate) claim: AtomicBool,
    pub(crate) finish: AtomicBool,
    pub(crate) heartbeat: AtomicBool,
    /// The claim is made, and its answer lost.
    pub(crate) claim_answer: AtomicBool,
    /// The next claim's connection is lost, and it arrives behind a release of it.
    pub(crate) claim_late: AtomicBool,
    /// That claim has arrived.
    pub(crate) has_arrived: AtomicBool,
    /// Bodies are refused, for good.
    pub(crate) bodies: AtomicBool,
    /// The server may not be used for outcomes, whatever they are.
    pub(crate) finish_refused: AtomicBool,
    /// A claim waits as long as this is set.
    pub(crate) claim_waits: AtomicBool,
    /// So many claims find a record of another, which is gone before they can read it.
    pub(crate) claims_vanish: AtomicU32,
    /// How often it was tried to claim.
    pub(crate) claims: AtomicU32,
    /// How often it was tried to write an outcome.
    pub(crate) finishes: AtomicU32,
    pub(crate) heartbeats: AtomicU32,
    /// How often a release was answered.
    pub(crate) releases: AtomicU32,
    /// How often it was asked how many records of a tenant are open.
    pub(crate) opens: AtomicU32,
    /// That is answered when this is no longer set.
    pub(crate) opens_wait: AtomicBool,
    /// Purges meet a lock.
    pub(crate) purge_busy: AtomicBool,
    /// How often it was asked what a tenant stores.
    pub(crate) stored: AtomicU32,
    /// That fails.
    pub(crate) stored_away: AtomicBool,
    /// How often a claim was given up as unknown, or evidence was written.
    pub(crate) other_writes: AtomicU32,
}

/// The store.
#[derive(Debug, Clone)]
pub(crate) struct Faulty<S> {
    pub(crate) inner: S,
    pub(crate) faults: Arc<Faults>,
}

impl<S: Keys> Faulty<S> {
    /// Another owner is faster, and has given the key back when this claim is answered.
    async fn vanishes(&self, claim: &KeyClaim, basis: Basis<'_>) -> Result<Option<Owned>, StoreError> {
        let faster = KeyClaim { owner: uuid::Uuid::now_v7(), operation_id: uuid::Uuid::now_v7(), ..claim.clone() };
        let Some(other) = self.inner.claim(&faster, Basis::New).await? else { panic!("the key is not free") };
        assert!(self.inner.claim(claim, basis).await?.is_none());
        assert_eq!(self.inner.release(&other).await?, Fenced::Done);
        Ok(None)
    }
}

fn away(fault: &AtomicBool) -> Result<(), StoreError> {
    if fault.load(Ordering::SeqCst) { Err(StoreError::Unavailable(sqlx::Error::PoolTimedOut)) } else { Ok(()) }
}

#[oncebox::async_trait]
impl<S: Keys + Clone> Keys for Faulty<S> {
    fn durability(&self) -> Durability {
        self.inner.durability()
    }

    fn connections_max(&self) -> Option<u32> {
        Some(self.faults.connections.load(Ordering::SeqCst)).filter(|connections| *connections > 0)
    }

    async fn find(&self, identity: &Identity) -> Result<Look, StoreError> {
        away(&self.faults.find)?;
        self.inner.find(identity).await
    }

    async fn find_settled(&self, identity: &Identity) -> Result<Look, StoreError> {
        away(&self.faults.find)?;
        self.inner.find_settled(identity).await
    }

    async fn sign_of_life(&self) -> Result<(), StoreError> {
        self.inner.sign_of_life().await
    }

    async fn body(&self, record: &Record) -> Result<Option<KeptBody>, StoreError> {
        self.inner.body(record).await
    }

    async fn claim(&self, claim: &KeyClaim, basis: Basis<'_>) -> Result<Option<Owned>, StoreError> {
        self.faults.claims.fetch_add(1, Ordering::SeqCst);
        away(&self.faults.claim)?;
        if self
            .faults
            .claims_vanish
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1))
            .is_ok()
        {
            return self.vanishes(claim, basis).await;
        }
        if away(&self.faults.claim_late).is_err() {
            self.faults.claim_late.store(false, Ordering::SeqCst);
            let (late, claim) = (self.clone(), claim.clone());
            tokio::spawn(async move {
                while late.faults.releases.load(Ordering::SeqCst) == 0 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                assert!(matches!(late.inner.claim(&claim, Basis::New).await, Ok(Some(_))));
                late.faults.has_arrived.store(true, Ordering::SeqCst);
            });
            return Err(StoreError::Unavailable(sqlx::Error::PoolTimedOut));
        }
        let claimed = self.inner.claim(claim, basis).await;
        while self.faults.claim_waits.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        away(&self.faults.claim_answer)?;
        claimed
    }

    async fn heartbeat(&self, owned: &Owned, lease: Duration) -> Result<Fenced, StoreError> {
        self.faults.heartbeats.fetch_add(1, Ordering::SeqCst);
        away(&self.faults.heartbeat)?;
        self.inner.heartbeat(owned, lease).await
    }

    async fn finish(&self, owned: &Owned, outcome: &RunOutcome, retention: &Retention) -> Result<Fenced, StoreError> {
        self.faults.finishes.fetch_add(1, Ordering::SeqCst);
        away(&self.faults.finish)?;
        if self.faults.finish_refused.load(Ordering::SeqCst) {
            return Err(StoreError::Refused("the server is a replica".to_owned()));
        }
        if let RunOutcome::Completed(answer) = outcome
            && matches!(answer.body, AnswerBody::Kept(_))
            && self.faults.bodies.load(Ordering::SeqCst)
        {
            return Err(StoreError::Other(sqlx::Error::Protocol("no bodies".to_owned())));
        }
        self.inner.finish(owned, outcome, retention).await
    }

    async fn release(&self, owned: &Owned) -> Result<Fenced, StoreError> {
        away(&self.faults.finish)?;
        let released = self.inner.release(owned).await;
        self.faults.releases.fetch_add(1, Ordering::SeqCst);
        released
    }

    async fn take_back(&self, claim: &KeyClaim, basis: Basis<'_>) -> Result<Fenced, StoreError> {
        away(&self.faults.finish)?;
        let taken = self.inner.take_back(claim, basis).await;
        self.faults.releases.fetch_add(1, Ordering::SeqCst);
        taken
    }

    async fn mark_unknown(&self, seen: &Record) -> Result<Fenced, StoreError> {
        self.faults.other_writes.fetch_add(1, Ordering::SeqCst);
        self.inner.mark_unknown(seen).await
    }

    async fn stale(&self, operation: &OperationName, limit: u32) -> Result<Vec<Record>, StoreError> {
        self.inner.stale(operation, limit).await
    }

    async fn unknown_due(
        &self,
        operation: &OperationName,
        pauses: (Duration, Duration),
        limit: u32,
    ) -> Result<Vec<Record>, StoreError> {
        self.inner.unknown_due(operation, pauses, limit).await
    }

    async fn expire_bodies(&self, limit: u32) -> Result<u64, StoreError> {
        self.inner.expire_bodies(limit).await
    }

    async fn purge_keys(
        &self,
        operation: &OperationName,
        retention: &Retention,
        id_skew: Duration,
        limit: u32,
    ) -> Result<u64, StoreError> {
        if self.faults.purge_busy.load(Ordering::SeqCst) {
            return Err(StoreError::Busy(sqlx::Error::Protocol("a lock, on purpose".to_owned())));
        }
        self.inner.purge_keys(operation, retention, id_skew, limit).await
    }

    async fn open_of_tenant(&self, tenant: &str) -> Result<u64, StoreError> {
        let open = self.inner.open_of_tenant(tenant).await;
        self.faults.opens.fetch_add(1, Ordering::SeqCst);
        while self.faults.opens_wait.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        open
    }

    async fn stored_of_tenant(&self, tenant: &str) -> Result<u64, StoreError> {
        self.faults.stored.fetch_add(1, Ordering::SeqCst);
        away(&self.faults.stored_away)?;
        self.inner.stored_of_tenant(tenant).await
    }

    async fn observe_run(&self, evidence: &NewEvidence) -> Result<(), StoreError> {
        self.faults.other_writes.fetch_add(1, Ordering::SeqCst);
        self.inner.observe_run(evidence).await
    }

    async fn runs_of(&self, operation_id: uuid::Uuid) -> Result<Vec<StoredEvidence>, StoreError> {
        self.inner.runs_of(operation_id).await
    }

    async fn announce(&self, process: uuid::Uuid, versions: &[Versions]) -> Result<(), StoreError> {
        self.inner.announce(process, versions).await
    }

    async fn operation_stats(&self) -> Result<OperationStats, StoreError> {
        self.inner.operation_stats().await
    }
}
