//! The duty of idempotency records, on every database. Not here: claim and outcome, which are on
//! the hot path, so each database has its own ([`KeyStore`]); the texts (`records`, `expiry`).

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::{SqlStore, Transaction, expiry, live, phases, records};
use crate::error::StoreError;
use crate::operation::port::evidence::{NewEvidence, StoredEvidence};
use crate::operation::port::{
    Basis, Claimed, Fenced, KeptBody, KeyClaim, Keys, Look, OperationStats, Owned, RecordFence, RunOutcome,
};
use crate::operation::rules::retention::Retention;
use crate::operation::rules::route::Durability;
use crate::operation::rules::versions::Versions;
use crate::operation::rules::{Identity, Mode, OperationName, Record};
use crate::store::base::Base;

/// A transaction of our own that can end a record.
#[async_trait]
pub(in crate::store) trait OutcomeTransaction: Transaction {
    /// Writes an outcome to a record, if the fence holds.
    async fn finish_record(
        &mut self,
        fence: &RecordFence,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError>;
}

/// The part of idempotency records that each database implements itself, under the promises of
/// [`Keys`].
#[async_trait]
pub(in crate::store) trait KeyStore: SqlStore + Base {
    /// Keeps the promises of [`Keys::sign_of_life`].
    async fn ping(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Keeps the promises of [`Keys::find`].
    async fn look(&self, identity: &Identity) -> Result<Look, StoreError>;

    /// Inserts a claim in a transaction of its own; false where the key has a record.
    async fn insert_claim(&self, claim: &KeyClaim, owned: &Owned) -> Result<bool, StoreError>;

    /// A transaction of our own in which an outcome can be written.
    async fn begin_outcome(&self) -> Result<Box<dyn OutcomeTransaction>, StoreError>;

    /// Keeps the promises of [`Keys::finish`].
    async fn end_claim(
        &self,
        owned: &Owned,
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError> {
        let mut transaction = self.begin_outcome().await?;
        let fenced = transaction.finish_record(&owned.into(), outcome, retention).await?;
        transaction.commit().await?;
        Ok(fenced)
    }

    /// Frees large bodies by their partitions, where the database has partitions, and returns how
    /// many it deleted otherwise.
    async fn free_bodies(&self, _limit: u32) -> Result<u64, StoreError> {
        Ok(0)
    }
}

#[async_trait]
impl<S: KeyStore> Keys for S {
    fn durability(&self) -> Durability {
        Durability::Durable
    }

    async fn sign_of_life(&self) -> Result<(), StoreError> {
        self.ping().await
    }

    fn connections_max(&self) -> Option<u32> {
        Some(self.pool().options().get_max_connections())
    }

    async fn find(&self, identity: &Identity) -> Result<Look, StoreError> {
        self.look(identity).await
    }

    async fn find_settled(&self, identity: &Identity) -> Result<Look, StoreError> {
        records::lock(&mut *self.reader().await?, identity).await?;
        self.look(identity).await
    }

    async fn body(&self, record: &Record) -> Result<Option<KeptBody>, StoreError> {
        records::body(self, record).await
    }

    async fn claim(&self, claim: &KeyClaim, basis: Basis<'_>) -> Result<Claimed, StoreError> {
        claim.requires(&[Mode::Bridged, Mode::Edge])?;
        let owned = claim.owned(basis);
        let is_claimed = match records::renewal(claim, basis, &owned) {
            None => self.insert_claim(claim, &owned).await?,
            Some(renewal) => records::renew(self, claim, basis, renewal).await?,
        };
        Ok(if is_claimed { Claimed::Owned(owned) } else { Claimed::Refused })
    }

    async fn heartbeat(&self, owned: &Owned, lease: Duration) -> Result<Fenced, StoreError> {
        records::heartbeat(self, owned, lease).await
    }

    async fn finish(&self, owned: &Owned, outcome: &RunOutcome, retention: &Retention) -> Result<Fenced, StoreError> {
        self.end_claim(owned, outcome, retention).await
    }

    async fn release(&self, owned: &Owned) -> Result<Fenced, StoreError> {
        records::release(self, owned).await
    }

    async fn mark_unknown(&self, seen: &Record) -> Result<Fenced, StoreError> {
        records::mark_unknown(self, seen).await
    }

    async fn stale(&self, operation: &OperationName, limit: u32) -> Result<Vec<Record>, StoreError> {
        records::open(self, operation, None, limit).await
    }

    async fn unknown_due(
        &self,
        operation: &OperationName,
        pauses: (Duration, Duration),
        limit: u32,
    ) -> Result<Vec<Record>, StoreError> {
        records::open(self, operation, Some(pauses), limit).await
    }

    async fn expire_bodies(&self, limit: u32) -> Result<u64, StoreError> {
        Ok(self.free_bodies(limit).await? + expiry::expire_bodies(self, limit).await?)
    }

    async fn purge_keys(
        &self,
        operation: &OperationName,
        retention: &Retention,
        id_skew: Duration,
        limit: u32,
    ) -> Result<u64, StoreError> {
        expiry::purge(self, operation, retention, id_skew, limit).await
    }

    async fn open_of_tenant(&self, tenant: &str) -> Result<u64, StoreError> {
        records::open_of_tenant(self, tenant).await
    }

    async fn stored_of_tenant(&self, tenant: &str) -> Result<u64, StoreError> {
        records::stored_of_tenant(self, tenant).await
    }

    async fn observe_run(&self, evidence: &NewEvidence) -> Result<(), StoreError> {
        phases::observe(self, evidence).await
    }

    async fn runs_of(&self, operation_id: Uuid) -> Result<Vec<StoredEvidence>, StoreError> {
        let mut seen = phases::evidence(&mut *self.reader().await?, operation_id).await?;
        seen.retain(|row| row.evidence.is_of_run());
        Ok(seen)
    }

    async fn announce(&self, process: Uuid, versions: &[Versions]) -> Result<(), StoreError> {
        live::announce(self, process, versions).await
    }

    async fn operation_stats(&self) -> Result<OperationStats, StoreError> {
        records::operation_stats(self).await
    }
}
