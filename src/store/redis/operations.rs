//! Idempotency records in Redis.
//!
//! A record is a hash; its body is another hash with a time to live of its own. Two sorted sets
//! list the keys in progress and the unknown ones. Redis removes expired keys itself, so the calls
//! of a sweep find nothing to do. Up to which time keys may have been forgotten follows from the
//! first outcome of an operation and its shortest retention; a longer one counts once the last
//! record with the shorter one is gone (O23).
//!
//! Guarantees: those of `redis`. The parts of an identity are stored beside its digest, and the
//! engine compares them (O16).

use std::collections::HashMap;
use std::time::Duration;

use super::RedisKeys;
use super::scripts;
use crate::error::StoreError;
use crate::operation::port::evidence::{NewEvidence, StoredEvidence};
use crate::operation::port::stored::{Columns, body_of, pack, unpack};
use crate::operation::port::{Basis, Fenced, KeptBody, KeyClaim, Keys, Look, OperationStats, Owned, RunOutcome};
use crate::operation::rules::record::{Resource, StoredAnswer};
use crate::operation::rules::retention::Retention;
use crate::operation::rules::route::Durability;
use crate::operation::rules::{Identity, Mode, OperationName, Record, State};
use crate::text::hex::hex;
use crate::time::db_time::DbTime;
use crate::time::lease::Lease;
use async_trait::async_trait;

/// How far the clock of the host that made a key may be ahead: the default of
/// [`Route::id_skew`](crate::operation::rules::Route::id_skew). A purge stores a larger value
/// where the route allows more.
const ID_SKEW: Duration = Duration::from_secs(60);

/// The fields of a Redis hash.
struct Fields(HashMap<String, Vec<u8>>);

fn corrupt(error: impl std::fmt::Display) -> StoreError {
    StoreError::Corrupt(format!("an idempotency record in Redis: {error}"))
}

impl Fields {
    fn bytes(&self, name: &str) -> Result<&[u8], StoreError> {
        self.0.get(name).map(Vec::as_slice).ok_or_else(|| corrupt(format!("it has no field `{name}`")))
    }

    fn text(&self, name: &str) -> Result<&str, StoreError> {
        std::str::from_utf8(self.bytes(name)?).map_err(corrupt)
    }

    fn read<T: std::str::FromStr<Err: std::fmt::Display>>(&self, name: &str) -> Result<T, StoreError> {
        self.text(name)?.parse().map_err(corrupt)
    }

    fn maybe<T: std::str::FromStr<Err: std::fmt::Display>>(&self, name: &str) -> Result<Option<T>, StoreError> {
        if self.0.contains_key(name) { self.read(name).map(Some) } else { Ok(None) }
    }

    fn time(&self, name: &str) -> Result<Option<DbTime>, StoreError> {
        Ok(self.maybe(name)?.map(|micros| DbTime { micros }))
    }

    fn record(&self, now: DbTime) -> Result<Record, StoreError> {
        let identity = Identity::from_stored(self.bytes("tenant")?, self.bytes("operation")?, self.bytes("key")?);
        let lease = match (self.time("lease_until")?, self.maybe("lease_length")?) {
            (Some(until), Some(micros)) => Some(Lease { until, length: Duration::from_micros(micros) }),
            _ => None,
        };
        let answer = match self.maybe("status")? {
            None => None,
            Some(status) => Some(StoredAnswer {
                status,
                schema_version: self.read("schema_version")?,
                body_until: self.time("body_until")?,
                resource: match self.maybe("resource_kind")? {
                    Some(kind) => Some(Resource {
                        kind,
                        id: self.read("resource_id")?,
                        location: self.maybe("resource_location")?,
                    }),
                    None => None,
                },
                body: body_of(self.text("body")?, self.time("body_until")?, now)?,
            }),
        };
        Ok(Record {
            identity: identity.map_err(corrupt)?,
            principal: self.read("principal")?,
            fingerprint: self.read("fingerprint")?,
            mode: self.read("mode")?,
            state: self.read("state")?,
            epoch: self.read("epoch")?,
            lease,
            generation: self.read("generation")?,
            operation_id: self.read("operation_id")?,
            attempts: self.read("attempts")?,
            parked: false,
            created_at: DbTime { micros: self.read("created")? },
            outcome_at: self.time("outcome")?,
            expires_at: self.time("expires")?,
            answer,
            error_code: self.maybe("error_code")?,
        })
    }
}

fn micros(duration: Duration) -> Vec<u8> {
    // At most 2^53 (285 years), because a script's numbers are exact only up to there.
    duration.as_micros().min(1 << 53).to_string().into_bytes()
}

fn name(identity: &Identity) -> String {
    hex(&identity.digest())
}

fn text(text: impl std::fmt::Display) -> Vec<u8> {
    text.to_string().into_bytes()
}

impl RedisKeys {
    fn key(&self, kind: &str, name: &str) -> String {
        format!("{}:{kind}:{name}", self.options.prefix)
    }

    fn records_of(&self, identity: &Identity) -> [String; 2] {
        let name = name(identity);
        [self.key("record", &name), self.key("body", &name)]
    }

    /// The keys of the sets in progress and unknown, and of the counter of epochs.
    fn shared(&self) -> [String; 3] {
        [self.key("all", "running"), self.key("all", "unknown"), self.key("all", "epoch")]
    }

    async fn fenced(&self, script: &redis::Script, keys: &[String], args: &[Vec<u8>]) -> Result<Fenced, StoreError> {
        Ok(Fenced::rows(self.call::<u64>(script, keys, args).await?))
    }

    /// Writes the outcome of a claim that this fence names.
    async fn end(
        &self,
        identity: &Identity,
        fence: [Vec<u8>; 2],
        outcome: &RunOutcome,
        retention: &Retention,
    ) -> Result<Fenced, StoreError> {
        let columns = Columns::of(outcome, retention);
        let ([record, body], [running, unknown, _]) = (self.records_of(identity), self.shared());
        let forgotten = self.key("forgotten", identity.operation().as_str());
        let mut parts = Vec::new();
        let mut part = |field: &str, value: Option<Vec<u8>>| parts.extend(value.map(|value| [text(field), value]));
        part("status", columns.status.map(text));
        part("schema_version", columns.schema_version.map(text));
        part("body", columns.body.map(text));
        part("error_code", columns.error_code.map(text));
        part("resource_kind", columns.resource.map(|resource| text(&resource.kind)));
        part("resource_id", columns.resource.map(|resource| text(&resource.id)));
        part("resource_location", columns.resource.and_then(|resource| resource.location.as_ref()).map(text));
        let parts: Vec<Vec<u8>> = parts.into_iter().flatten().collect();
        let [epoch, owner] = fence;
        let life = |life: Option<Duration>| life.map(micros).unwrap_or_default();
        let metadata = retention.metadata.max(retention.ttl);
        let mut args = vec![epoch, owner, text(name(identity)), text(columns.state), life(columns.ttl)];
        args.extend([micros(metadata), life(columns.body_ttl), text(parts.len())]);
        args.extend(parts);
        if let Some(kept) = columns.kept {
            args.extend([text("headers"), pack(&kept.headers), text("bytes"), kept.bytes.clone()]);
            args.extend([text("format"), text(kept.format)]);
            args.extend(kept.kid.iter().flat_map(|kid| [text("kid"), text(kid)]));
        }
        self.fenced(&scripts::FINISH, &[record, body, running, unknown, forgotten], &args).await
    }

    /// Deletes a claim that this fence names.
    async fn free(&self, identity: &Identity, [epoch, owner]: [Vec<u8>; 2]) -> Result<Fenced, StoreError> {
        let ([record, body], [running, _, _]) = (self.records_of(identity), self.shared());
        self.fenced(&scripts::RELEASE, &[record, body, running], &[epoch, owner, text(name(identity))]).await
    }
}

/// The epoch and the owner in the form that the scripts compare.
fn fence(owned: &Owned) -> [Vec<u8>; 2] {
    [text(owned.epoch), owned.owner.map(text).unwrap_or_default()]
}

#[async_trait]
impl Keys for RedisKeys {
    fn durability(&self) -> Durability {
        Durability::Guard
    }

    /// On the connection of all calls: there is no pool in which none could be free.
    async fn sign_of_life(&self) -> Result<(), StoreError> {
        self.ping().await
    }

    async fn find(&self, identity: &Identity) -> Result<Look, StoreError> {
        let [record, _] = self.records_of(identity);
        let forgotten = self.key("forgotten", identity.operation().as_str());
        type Found = (i64, Option<i64>, Option<u64>, Option<i64>, Option<u64>, HashMap<String, Vec<u8>>);
        let found: Found = self.call(&scripts::FIND, &[record, forgotten], &[]).await?;
        let (now, first, shortest, below, skew, fields) = found;
        let time = |micros| DbTime { micros };
        let now = time(now);
        let ended = first.zip(shortest).and_then(|(first, shortest)| {
            let shortest = Duration::from_micros(shortest);
            (time(first).after(shortest) <= now).then(|| now.before(shortest))
        });
        let skew = skew.map_or(ID_SKEW, |skew| Duration::from_micros(skew).max(ID_SKEW));
        let purged_below = ended.max(below.map(time)).map(|bound| bound.after(skew));
        let record = if fields.is_empty() { None } else { Some(Fields(fields).record(now)?) };
        Ok(Look { now, purged_below, record, body: None })
    }

    async fn body(&self, record: &Record) -> Result<Option<KeptBody>, StoreError> {
        let keys = self.records_of(&record.identity);
        let fields: HashMap<String, Vec<u8>> = self.call(&scripts::BODY, &keys, &[text(record.epoch)]).await?;
        if fields.is_empty() {
            return Ok(None);
        }
        let fields = Fields(fields);
        Ok(Some(KeptBody {
            headers: unpack(fields.bytes("headers")?)?,
            bytes: fields.bytes("bytes")?.to_vec(),
            format: fields.read("format")?,
            kid: fields.maybe("kid")?,
        }))
    }

    async fn claim(&self, claim: &KeyClaim, basis: Basis<'_>) -> Result<Option<Owned>, StoreError> {
        claim.requires(&[Mode::Bridged, Mode::Edge])?;
        let planned = claim.owned(basis);
        let (basis, seen) = match basis {
            Basis::New => ("new", 0),
            Basis::TakeOver(seen) | Basis::Reconcile(seen) => ("take_over", seen.epoch),
            // A guard keeps no evidence, so both cases are the same.
            Basis::Reclaim(seen) | Basis::Late(seen) => ("reclaim", seen.epoch),
            Basis::Anew(seen) => ("anew", seen.epoch),
        };
        let identity = &claim.identity;
        let mut args = vec![text(basis), text(seen), text(name(identity)), micros(claim.lease)];
        for (field, value) in [
            ("tenant", text(identity.tenant())),
            ("operation", text(identity.operation().as_str())),
            ("key", text(identity.key().as_str())),
            ("principal", text(&claim.principal)),
            ("fingerprint", text(&claim.fingerprint)),
            ("mode", text(claim.mode)),
            ("state", text(State::InProgress)),
            ("owner", text(claim.owner)),
            ("generation", text(planned.generation)),
            ("operation_id", text(planned.operation_id)),
            ("attempts", text(planned.attempts)),
        ] {
            args.extend([text(field), value]);
        }
        let [record, body] = self.records_of(identity);
        let [running, unknown, epochs] = self.shared();
        let keys = [record, body, running, unknown, epochs];
        let epoch: Option<i64> = self.call(&scripts::CLAIM, &keys, &args).await?;
        Ok(epoch.map(|epoch| Owned { epoch, ..planned }))
    }

    async fn heartbeat(&self, owned: &Owned, lease: Duration) -> Result<Fenced, StoreError> {
        let ([record, _], [epoch, owner]) = (self.records_of(&owned.identity), fence(owned));
        self.fenced(&scripts::HEARTBEAT, &[record], &[epoch, owner, micros(lease)]).await
    }

    async fn finish(&self, owned: &Owned, outcome: &RunOutcome, retention: &Retention) -> Result<Fenced, StoreError> {
        self.end(&owned.identity, fence(owned), outcome, retention).await
    }

    async fn release(&self, owned: &Owned) -> Result<Fenced, StoreError> {
        self.free(&owned.identity, fence(owned)).await
    }

    async fn take_back(&self, claim: &KeyClaim, basis: Basis<'_>) -> Result<Fenced, StoreError> {
        // The answer that would have told the epoch was lost, so none is given.
        let fence = [Vec::new(), text(claim.owner)];
        if basis.repeats() {
            return self.end(&claim.identity, fence, &RunOutcome::Unknown, &Retention::default()).await;
        }
        self.free(&claim.identity, fence).await
    }

    async fn mark_unknown(&self, seen: &Record) -> Result<Fenced, StoreError> {
        let ([record, _], [running, unknown, epochs]) = (self.records_of(&seen.identity), self.shared());
        let args = [text(seen.epoch), text(name(&seen.identity))];
        self.fenced(&scripts::MARK_UNKNOWN, &[record, running, unknown, epochs], &args).await
    }

    /// None: every route of a guard is declared repeatable, and nobody could resolve a claim that
    /// became unknown here. The next request under its key runs.
    async fn stale(&self, _: &OperationName, _: u32) -> Result<Vec<Record>, StoreError> {
        Ok(Vec::new())
    }

    /// Does nothing: Redis removes bodies when their time is over.
    async fn expire_bodies(&self, _limit: u32) -> Result<u64, StoreError> {
        Ok(0)
    }

    /// Deletes nothing, because Redis removes expired records. Stores only how far clocks may be
    /// ahead.
    async fn purge_keys(
        &self,
        operation: &OperationName,
        _retention: &Retention,
        id_skew: Duration,
        _limit: u32,
    ) -> Result<u64, StoreError> {
        if id_skew > ID_SKEW {
            let forgotten = self.key("forgotten", operation.as_str());
            let _: i64 = self.call(&scripts::SKEW, &[forgotten], &[micros(id_skew)]).await?;
        }
        Ok(0)
    }

    async fn open_of_tenant(&self, _: &str) -> Result<u64, StoreError> {
        Ok(0)
    }

    async fn stored_of_tenant(&self, _: &str) -> Result<u64, StoreError> {
        Err(StoreError::Refused("a guard does not count what it keeps for a tenant".to_owned()))
    }

    async fn observe_run(&self, _: &NewEvidence) -> Result<(), StoreError> {
        Err(StoreError::Refused("a guard keeps no evidence".to_owned()))
    }

    async fn runs_of(&self, _: uuid::Uuid) -> Result<Vec<StoredEvidence>, StoreError> {
        Ok(Vec::new())
    }

    async fn operation_stats(&self) -> Result<OperationStats, StoreError> {
        let [running, unknown, _] = self.shared();
        let found: (u64, Option<f64>, u64, i64) = self.call(&scripts::STATS, &[running, unknown], &[]).await?;
        let (in_progress, oldest, unknown, now) = found;
        // A score is a time in microseconds, which a double holds whole.
        let age = |since: f64| DbTime { micros: since as i64 }.until(DbTime { micros: now });
        Ok(OperationStats { in_progress, oldest_in_progress: oldest.map(age), unknown })
    }
}
