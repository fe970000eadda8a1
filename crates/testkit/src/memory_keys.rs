//! Idempotency records in the memory of one process, for tests of code that uses a store of keys
//! (M59).
//!
//! Promise: does what the suite asks of every store of keys, with a lock around a map. Nothing
//! outlives the process, so it is not for a service.
//!
//! Not here: transactional operations, which need the transaction of a database.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use crate::store::KeysFixture;
use oncebox::adapter::{Columns, DbTime, Lease};
use oncebox::error::StoreError;
use oncebox::operation::{
    Durability, Identity, Mode, OperationName, Record, Retention, State, StoredAnswer, StoredBody, Tombstone,
};
use oncebox::store::{
    Answer, AnswerBody, Basis, Fenced, KeptBody, KeyClaim, Keys, Look, NewEvidence, OperationStats, Owned, RunOutcome,
    StoredEvidence,
};

/// A store of keys in memory. Its clones share the records.
#[derive(Clone, Default)]
pub struct MemoryKeys {
    book: Arc<Mutex<Book>>,
}

#[derive(Default)]
struct Book {
    rows: HashMap<[u8; 32], Row>,
    purged: HashMap<String, DbTime>,
}

struct Row {
    record: Record,
    owner: Option<Uuid>,
    body: Option<(KeptBody, DbTime)>,
}

impl std::fmt::Debug for MemoryKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MemoryKeys({} records)", self.book().rows.len())
    }
}

fn now() -> DbTime {
    DbTime { micros: chrono::Utc::now().timestamp_micros() }
}

impl Row {
    /// The record as it is read now. A body whose lifetime is over is gone, whether it was removed
    /// or not.
    fn read(&self, now: DbTime) -> Record {
        let mut record = self.record.clone();
        if let Some(StoredAnswer { body: body @ StoredBody::Kept, .. }) = &mut record.answer
            && self.body.as_ref().is_none_or(|(_, until)| *until <= now)
        {
            *body = StoredBody::Tombstone(Tombstone::Purged);
        }
        record
    }

    /// Whether a claim with this basis is still possible on the record.
    fn holds(&self, basis: Basis<'_>, now: DbTime) -> bool {
        let record = &self.record;
        let (seen, holds) = match basis {
            Basis::New => return false,
            Basis::TakeOver(seen) | Basis::Reconcile(seen) => {
                let stale = record.state == State::InProgress && record.lease_left(now).is_zero();
                let unknown = record.state == State::UnknownRequiresRecovery && record.mode == Mode::Edge;
                (seen, (stale && matches!(record.mode, Mode::Bridged | Mode::Edge)) || unknown)
            }
            Basis::Reclaim(seen) | Basis::Late(seen) => (seen, record.state_at(now) == State::FailedRetryable),
            Basis::Anew(seen) => (seen, record.state_at(now) == State::Expired),
        };
        holds && record.epoch == seen.epoch
    }
}

impl MemoryKeys {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the record if this owner still has it.
    fn fenced(&self, owned: &Owned, change: impl FnOnce(&mut Book, [u8; 32], DbTime)) -> Fenced {
        let (mut book, digest) = (self.book(), owned.identity.digest());
        let ours = book.rows.get(&digest).is_some_and(|row| {
            row.record.epoch == owned.epoch && row.owner == owned.owner && row.record.state == State::InProgress
        });
        if !ours {
            return Fenced::LostOwnership;
        }
        change(&mut book, digest, now());
        Fenced::Done
    }
}

/// The part of an answer that a record keeps.
fn stored(answer: &Answer, body_until: Option<DbTime>) -> StoredAnswer {
    let body = match &answer.body {
        AnswerBody::Kept(_) => StoredBody::Kept,
        AnswerBody::Tombstone(reason) => StoredBody::Tombstone(*reason),
        AnswerBody::Reference => StoredBody::Reference,
    };
    let (status, schema_version, resource) = (answer.status, answer.schema_version, answer.resource.clone());
    StoredAnswer { status, schema_version, body, body_until, resource }
}

#[async_trait]
impl Keys for MemoryKeys {
    fn durability(&self) -> Durability {
        Durability::Durable
    }

    async fn find(&self, identity: &Identity) -> Result<Look, StoreError> {
        let (book, now) = (self.book(), now());
        let record = book.rows.get(&identity.digest()).map(|row| row.read(now));
        Ok(Look { now, purged_below: book.purged.get(identity.operation().as_str()).copied(), record, body: None })
    }

    async fn body(&self, record: &Record) -> Result<Option<KeptBody>, StoreError> {
        let (book, now) = (self.book(), now());
        let row = book.rows.get(&record.identity.digest()).filter(|row| row.record.epoch == record.epoch);
        Ok(row.and_then(|row| row.body.as_ref()).filter(|(_, until)| *until > now).map(|(body, _)| body.clone()))
    }

    async fn claim(&self, claim: &KeyClaim, basis: Basis<'_>) -> Result<Option<Owned>, StoreError> {
        claim.requires(&[Mode::Bridged, Mode::Edge])?;
        let (mut book, now, digest) = (self.book(), now(), claim.identity.digest());
        let created_at = match (book.rows.get(&digest), basis) {
            (None, Basis::New) => now,
            (Some(row), basis) if row.holds(basis, now) && row.record.outcome_at.is_some() => now,
            (Some(row), basis) if row.holds(basis, now) => row.record.created_at,
            _ => return Ok(None),
        };
        let owned = claim.owned(basis);
        let record = Record {
            identity: claim.identity.clone(),
            principal: claim.principal.clone(),
            fingerprint: claim.fingerprint.clone(),
            mode: claim.mode,
            state: State::InProgress,
            epoch: owned.epoch,
            lease: Some(Lease { until: now.after(claim.lease), length: claim.lease }),
            generation: owned.generation,
            operation_id: owned.operation_id,
            attempts: owned.attempts,
            parked: false,
            created_at,
            outcome_at: None,
            expires_at: None,
            answer: None,
            error_code: None,
        };
        book.rows.insert(digest, Row { record, owner: owned.owner, body: None });
        Ok(Some(owned))
    }

    async fn heartbeat(&self, owned: &Owned, lease: Duration) -> Result<Fenced, StoreError> {
        Ok(self.fenced(owned, |book, digest, now| {
            if let Some(row) = book.rows.get_mut(&digest) {
                row.record.lease = Some(Lease { until: now.after(lease), length: lease });
            }
        }))
    }

    async fn finish(&self, owned: &Owned, outcome: &RunOutcome, retention: &Retention) -> Result<Fenced, StoreError> {
        let columns = Columns::of(outcome, retention);
        let (answer, error_code) = match outcome {
            RunOutcome::Completed(answer) => (Some(answer), None),
            RunOutcome::FailedReplayable { answer, error_code } => (Some(answer), error_code.clone()),
            RunOutcome::FailedRetryable { error_code } => (None, error_code.clone()),
            RunOutcome::Unknown => (None, None),
        };
        Ok(self.fenced(owned, |book, digest, now| {
            let Some(row) = book.rows.get_mut(&digest) else { return };
            row.record.state = columns.state;
            row.record.lease = None;
            row.record.outcome_at = columns.ttl.map(|_| now);
            row.record.expires_at = columns.ttl.map(|ttl| now.after(ttl));
            let body_until = columns.body_ttl.map(|ttl| now.after(ttl));
            row.record.answer = answer.map(|answer| stored(answer, body_until));
            row.record.error_code = error_code;
            row.owner = None;
            row.body = columns.kept.cloned().zip(body_until);
        }))
    }

    async fn release(&self, owned: &Owned) -> Result<Fenced, StoreError> {
        Ok(self.fenced(owned, |book, digest, _| {
            book.rows.remove(&digest);
        }))
    }

    async fn mark_unknown(&self, seen: &Record) -> Result<Fenced, StoreError> {
        let (mut book, now) = (self.book(), now());
        let Some(row) = book.rows.get_mut(&seen.identity.digest()) else { return Ok(Fenced::LostOwnership) };
        let stale = row.record.mode == Mode::Edge && row.record.lease_left(now).is_zero();
        if row.record.epoch != seen.epoch || row.record.state != State::InProgress || !stale {
            return Ok(Fenced::LostOwnership);
        }
        row.record.state = State::UnknownRequiresRecovery;
        row.record.epoch += 1;
        row.record.lease = None;
        row.owner = None;
        Ok(Fenced::Done)
    }

    async fn stale(&self, operation: &OperationName, limit: u32) -> Result<Vec<Record>, StoreError> {
        let (book, now) = (self.book(), now());
        let records = book.rows.values().map(|row| &row.record);
        // Who lost its lease less than half a lease ago may be back to renew it.
        let is_over = |lease: Lease| lease.until <= now && lease.until.until(now) >= lease.length / 2;
        let is_stale = |record: &&Record| {
            record.identity.operation() == operation
                && record.state == State::InProgress
                && record.lease.is_none_or(is_over)
        };
        let mut stale: Vec<Record> = records.filter(is_stale).cloned().collect();
        stale.sort_by_key(|record| record.lease.map_or(record.created_at, |lease| lease.until));
        stale.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
        Ok(stale)
    }

    async fn expire_bodies(&self, limit: u32) -> Result<u64, StoreError> {
        let (mut book, now) = (self.book(), now());
        let mut gone = 0;
        for row in book.rows.values_mut() {
            if gone < u64::from(limit) && row.body.as_ref().is_some_and(|(_, until)| *until < now) {
                row.body = None;
                gone += 1;
            }
        }
        Ok(gone)
    }

    async fn purge_keys(
        &self,
        operation: &OperationName,
        retention: &Retention,
        id_skew: Duration,
        limit: u32,
    ) -> Result<u64, StoreError> {
        let (mut book, now) = (self.book(), now());
        let before = now.before(retention.metadata);
        let old = |row: &Row| {
            row.record.identity.operation() == operation
                && row.record.outcome_at.is_some_and(|at| at < before)
                && row.record.state_at(now) == State::Expired
        };
        let gone: Vec<[u8; 32]> = book.rows.iter().filter(|(_, row)| old(row)).map(|(digest, _)| *digest).collect();
        let gone = &gone[..gone.len().min(usize::try_from(limit).unwrap_or(usize::MAX))];
        for digest in gone {
            book.rows.remove(digest);
        }
        if !gone.is_empty() {
            let recorded = book.purged.get(operation.as_str()).copied();
            let bound = before.after(id_skew);
            book.purged.insert(operation.as_str().to_owned(), recorded.map_or(bound, |recorded| recorded.max(bound)));
        }
        Ok(u64::try_from(gone.len()).unwrap_or(u64::MAX))
    }

    async fn open_of_tenant(&self, tenant: &str) -> Result<u64, StoreError> {
        let is_open = |row: &&Row| row.record.identity.tenant() == tenant && !row.record.state.is_terminal();
        Ok(self.book().rows.values().filter(is_open).count() as u64)
    }

    async fn stored_of_tenant(&self, tenant: &str) -> Result<u64, StoreError> {
        let (book, now) = (self.book(), now());
        let of_tenant = book.rows.values().filter(|row| row.record.identity.tenant() == tenant);
        let bodies = of_tenant.filter_map(|row| row.body.as_ref()).filter(|(_, until)| *until > now);
        Ok(bodies.map(|(body, _)| body.stands_in()).sum())
    }

    async fn observe_run(&self, _: &NewEvidence) -> Result<(), StoreError> {
        Err(StoreError::Refused("memory keeps no evidence".to_owned()))
    }

    async fn runs_of(&self, _: Uuid) -> Result<Vec<StoredEvidence>, StoreError> {
        Ok(Vec::new())
    }

    async fn operation_stats(&self) -> Result<OperationStats, StoreError> {
        let (book, now) = (self.book(), now());
        let mut stats = OperationStats::default();
        for row in book.rows.values() {
            match row.record.state {
                State::InProgress => {
                    stats.in_progress += 1;
                    let age = row.record.created_at.until(now);
                    stats.oldest_in_progress = Some(stats.oldest_in_progress.map_or(age, |oldest| oldest.max(age)));
                }
                State::UnknownRequiresRecovery => stats.unknown += 1,
                _ => {}
            }
        }
        Ok(stats)
    }
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

impl KeysFixture for MemoryKeys {
    type Store = Self;

    async fn start(_case: &str) -> Option<Self> {
        Some(Self::default())
    }

    fn store(&self) -> &Self {
        self
    }

    async fn shorten_leases(&self) {
        for row in self.book().rows.values_mut() {
            if let Some(lease) = &mut row.record.lease {
                lease.length = Duration::from_secs(1);
            }
        }
    }

    async fn records(&self) -> i64 {
        count(self.book().rows.len())
    }

    async fn bodies(&self) -> i64 {
        count(self.book().rows.values().filter(|row| row.body.is_some()).count())
    }

    async fn end(self) {}
}
