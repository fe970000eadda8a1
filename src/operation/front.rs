//! The front of every operation: what happens with a request before and after it executes (O15).
//!
//! An operation makes a [`Front`] for a request whose body is read and validated, and takes turns
//! until it has an answer. After [`Turn::Begin`] it makes a claim in the store. If the store
//! refuses the claim, it calls [`Front::refused`] or [`Front::look_again`] and takes the next turn.
//! If the claim is made, it runs, stores the outcome, and answers by [`Front::first`].
//!
//! Promises: [`decide`] alone decides, and nothing executes without its decision. A front holds no
//! connection between two reads, so waiting duplicates do not starve others. Every loop has a
//! bound. Every claim, replay and refusal is counted in metrics.
//!
//! Cancel safety: dropped at any point, it owns nothing. Dropping [`Begin`] removes its entry from
//! the map of runs.

mod answer;
mod begin;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use uuid::Uuid;

pub(crate) use self::begin::Begin;
use self::begin::Ground;
use super::admission::Place;
use super::endpoint::Registered;
use super::engine::Core;
use super::reply::Answered;
use super::running::{NotEntered, Run, Waiting};
use crate::error::{Invalid, StoreError};
use crate::inbox::rules::horizon::Bounds;
use crate::observe::{self, Noted};
use crate::operation::port::{Fenced, KeptBody, KeyClaim};
use crate::operation::rules::decide::{KeyFound, Lost, NoKey, Request};
use crate::operation::rules::route::{AfterExpiry, Requirement, WhileRunning};
use crate::operation::rules::{
    Canonical, Code, Decision, FingerprintWriter, Identity, Key, KeyFormat, Mode, Record, Route, Scope, decide,
};
use crate::time::db_time::DbTime;

/// How many turns a request may take without waiting, until it is answered that the key is in use.
const ROUNDS_MAX: u32 = 8;
const LOOK_EVERY: Duration = Duration::from_millis(50);
const LOOK_EVERY_MAX: Duration = Duration::from_millis(500);

/// The key of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyGiven {
    /// The request has no key.
    Missing,
    /// The request has a key that is not valid.
    Malformed(Invalid),
    /// The request was sent with this key.
    Given(Key),
}

impl KeyGiven {
    /// The key under which an operation that claims every request takes this one: where the client
    /// sent none and the route requires none, the server makes one (M17).
    pub(super) fn or_own(self, route: &Route) -> Self {
        if self != Self::Missing || route.requirement != Requirement::Optional {
            return self;
        }
        let key = Key::parse(Uuid::now_v7().to_string().as_bytes(), KeyFormat::Opaque);
        key.map_or_else(Self::Malformed, Self::Given)
    }
}

/// A request as the engine sees it.
#[derive(Clone)]
pub struct Asking {
    /// The tenant and principal, from verified authentication; never from a header that a client
    /// may set.
    pub scope: Option<Scope>,
    /// The key that came with the request, or what was wrong with it.
    pub key: KeyGiven,
    /// The command, which the caller has read and validated.
    pub command: Arc<dyn Canonical + Send + Sync>,
}

/// Stands for a command that was not read, or about which nothing more is decided.
pub(crate) struct NoCommand;

impl Canonical for NoCommand {
    fn write_canonical(&self, _: u32, _: &mut FingerprintWriter) {}
}

#[derive(Debug)]
pub(crate) enum Turn {
    /// Run without protection: the request has no key, and the route requires none.
    Unkeyed,
    /// Claim on this basis, then execute.
    Begin(Box<Begin>),
    /// The driver of a phased operation is gone: take the operation over by `record.operation_id`.
    Recover(Box<Record>),
    /// Give the request this answer.
    Answer(Answered),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Neither the map nor the store was asked yet.
    Fresh,
    /// Look in the map of runs, then in the store.
    Look,
    /// A lock or an insert was refused. A record that the next read finds is judged; no record
    /// means that somebody holds the key (O15 step 4).
    Refused,
}

enum Seen {
    Nobody,
    Run(Arc<Run>),
    Record(Box<Record>, DbTime),
}

pub(crate) struct Front {
    pub(super) engine: Core,
    pub(super) endpoint: Registered,
    asking: Asking,
    identity: Option<Identity>,
    home: Option<String>,
    stage: Stage,
    rounds: u32,
    waits_until: Option<Instant>,
    /// The place among the duplicates that wait for this key.
    waiting: Option<Waiting>,
    look_every: Duration,
    over_bytes: bool,
    /// The body of the record that was read last, if the store returned it.
    body: Option<KeptBody>,
}

impl Core {
    pub(crate) fn front(&self, endpoint: &Registered, asking: Asking) -> Front {
        let identity = match (&asking.scope, &asking.key) {
            (Some(scope), KeyGiven::Given(key)) => {
                Some(Identity::new(scope, endpoint.operation().clone(), key.clone()))
            }
            _ => None,
        };
        let home = asking.scope.as_ref().and_then(|scope| self.home_elsewhere(scope));
        Front {
            engine: self.clone(),
            endpoint: endpoint.clone(),
            asking,
            identity,
            home,
            stage: Stage::Fresh,
            rounds: 0,
            waits_until: None,
            waiting: None,
            look_every: LOOK_EVERY,
            over_bytes: false,
            body: None,
        }
    }
}

impl Front {
    /// How long a claim may wait for its turn in a store with one writer at a time (O18): the
    /// `patience` of the store's calls.
    pub(crate) fn patience(&self) -> Duration {
        self.endpoint.route().wait_max
    }

    /// The hash of the key for logs; empty if there is no key.
    pub(crate) fn short_key(&self) -> String {
        self.identity.as_ref().map(|identity| identity.short_hash()).unwrap_or_default()
    }

    /// The answer to a request that is refused before the store is asked and the body is read: no
    /// valid key, no scope, another region. `None`: continue.
    pub(crate) fn early(&self) -> Option<Answered> {
        let decision = self.decide(KeyFound::NotAsked);
        let goes_on = matches!(decision, Decision::Look | Decision::PassThrough);
        (!goes_on).then(|| self.refusal(decision, None))
    }

    /// Whether the request has no key and the route requires none.
    pub(crate) fn is_unkeyed(&self) -> bool {
        self.decide(KeyFound::NotAsked) == Decision::PassThrough
    }

    pub(crate) async fn turn(&mut self) -> Turn {
        loop {
            let (decision, seen) = self.ask().await;
            let decision = self.within_quota(decision).await;
            tracing::trace!(?decision, stage = ?self.stage, "decided");
            if let Some(turn) = self.follow(decision, seen).await {
                return turn;
            }
        }
    }

    /// As [`Self::turn`], for an operation that claims every request and needs no recovery: a claim
    /// to make, or the answer.
    pub(super) async fn claim_or_answer(&mut self) -> Result<Box<Begin>, Box<Answered>> {
        Err(Box::new(match self.turn().await {
            Turn::Begin(begin) => return Ok(begin),
            Turn::Unkeyed => self.no_use_of_keys(),
            Turn::Recover(record) => self.pending(record.operation_id),
            Turn::Answer(answered) => answered,
        }))
    }

    /// Returns a claim to insert without a read before it, when this is probably a first request
    /// because the last request of this operation was one. Returns `None` (the caller uses
    /// [`Self::turn`]) if the key already runs in this process, if the route judges the age of keys
    /// (O23), or if tenants have limits, which are checked before a claim. Until the result of the
    /// claim is known, other requests for this key wait for it without a connection.
    pub(super) fn claim_unseen(&self) -> Option<Box<Begin>> {
        let digest = self.identity.as_ref()?.digest();
        let judges_age = self.endpoint.route().after_expiry == AfterExpiry::Reject;
        let probable =
            self.stage == Stage::Fresh && self.endpoint.last_was_new() && !judges_age && !self.engine.has_quota();
        let looks = probable && self.decide(KeyFound::NotAsked) == Decision::Look;
        if !looks || self.engine.inner.running.get(&digest).is_some() {
            return None;
        }
        self.enter(self.claim(&Ground::New)?, Ground::New, true, None).ok()
    }

    /// A transaction holds the claim of [`Self::claim_unseen`]. Returns whether it may execute;
    /// if not, the caller rolls back, drops `begin` and takes a turn.
    pub(super) fn claimed_unseen(&mut self, begin: &Begin) -> bool {
        let runs = self.decide(KeyFound::Nothing(None)) == Decision::Claim;
        if runs {
            self.rounds += 1;
            begin.entry.runs();
        }
        runs
    }

    /// Waits for the place of an operation that holds a connection. The answer says that nothing
    /// was begun: there is no room, or the store is away.
    pub(super) async fn place(&self) -> Result<Place, Box<Answered>> {
        let place = self.engine.inner.admission.place(self.endpoint.operation());
        Err(Box::new(match self.engine.reach().within(place.map(Ok)).await {
            Ok(Some(place)) => return Ok(place),
            Ok(None) => self.no_room(),
            Err(error) => self.store_failed("admit", &error),
        }))
    }

    /// Notes that the claim was refused: another record exists, or somebody holds the key. The next
    /// turn reads the record.
    pub(crate) fn refused(&mut self, begin: Box<Begin>) {
        drop(begin);
        self.stage = Stage::Refused;
    }

    /// A front of the same request without its command, to make an answer while another task holds
    /// this one.
    pub(super) fn under_way(&self) -> Self {
        self.engine.front(&self.endpoint, Asking { command: Arc::new(NoCommand), ..self.asking.clone() })
    }

    /// Drops the command, which may be a copy of the whole body that no memory permit counts. The
    /// caller has made its claim and takes no more turns, but may hold this front for long.
    pub(super) fn forget_command(&mut self) {
        self.asking.command = Arc::new(NoCommand);
    }

    /// Reads the record again in the next turn: after a recovery, or when the answer of a commit
    /// was lost.
    pub(crate) fn look_again(&mut self) {
        self.stage = Stage::Look;
        self.rounds += 1;
    }

    /// Counts an event in metrics and notes it in the span.
    pub(crate) fn note(&self, noted: Noted) {
        observe::noted(self.endpoint.operation().as_str(), &self.short_key(), noted);
    }

    /// The answer after the store failed at this stage: 503. Nothing was executed, or everything
    /// was rolled back.
    pub(crate) fn store_failed(&self, stage: &'static str, error: &StoreError) -> Answered {
        tracing::warn!(operation = %self.endpoint.operation(), key = self.short_key(), stage, %error, "the store failed");
        self.note(Noted::StoreError(stage));
        self.problem(Code::StoreUnavailable)
    }

    async fn ask(&mut self) -> (Decision, Seen) {
        if self.stage == Stage::Fresh {
            let decision = self.decide(KeyFound::NotAsked);
            if decision != Decision::Look {
                return (decision, Seen::Nobody);
            }
            self.stage = Stage::Look;
        }
        let Some(identity) = self.identity.clone() else { return (Decision::ScopeRequired, Seen::Nobody) };
        if self.rounds > ROUNDS_MAX {
            return (Decision::InProgress(WhileRunning::Conflict), Seen::Nobody);
        }
        let run = self.engine.inner.running.get(&identity.digest());
        if let Some(run) = &run {
            run.known().await;
        }
        if let Some(run) = run.filter(|run| !run.ended.is_cancelled()) {
            let found = KeyFound::Running { principal: &run.principal, fingerprint: &run.fingerprint };
            return (self.decide(found), Seen::Run(run));
        }
        let refused = self.stage == Stage::Refused;
        self.stage = Stage::Look;
        let look = match self.find(&identity).await {
            Ok(look) => look,
            Err(error) => {
                self.engine.reach().failed(&identity, &error);
                tracing::warn!(operation = %self.endpoint.operation(), %error, "the record of a key could not be read");
                self.note(Noted::StoreError("find"));
                return (self.decide(KeyFound::Unreachable), Seen::Nobody);
            }
        };
        self.body = look.body;
        if !refused {
            self.endpoint.saw(look.record.is_none());
        }
        match look.record {
            Some(record) => {
                let decision = self.decide(KeyFound::Record(&record, look.now));
                (decision, Seen::Record(Box::new(record), look.now))
            }
            // Only once: whoever held the key may have rolled back; after a wait the key is then
            // free.
            None if refused => (self.decide(KeyFound::Busy), Seen::Nobody),
            None => {
                let id_skew = self.endpoint.route().id_skew;
                let bounds = Bounds { purged_below: look.purged_below, now: look.now, id_skew };
                (self.decide(KeyFound::Nothing(Some(bounds))), Seen::Nobody)
            }
        }
    }

    /// Changes a decision to execute into a refusal if the tenant is at a limit: operations without
    /// an outcome, in all processes (O11), or stored bytes.
    async fn within_quota(&mut self, decision: Decision) -> Decision {
        let starts = matches!(decision, Decision::Claim | Decision::Reclaim | Decision::ExecuteAsNew);
        let Some(scope) = self.asking.scope.as_ref().filter(|_| starts) else { return decision };
        let reach = self.engine.reach();
        let over = match reach.within(self.engine.is_over_open_quota(scope.tenant())).await {
            Ok(false) => {
                let over = reach.within(self.engine.is_over_bytes(scope.tenant())).await;
                self.over_bytes = matches!(over, Ok(true));
                over
            }
            over => over,
        };
        match over {
            Ok(false) => decision,
            Ok(true) => Decision::QuotaExceeded,
            Err(error) => {
                tracing::warn!(operation = %self.endpoint.operation(), %error, "what a tenant has open or stored could not be counted");
                self.note(Noted::StoreError("find"));
                Decision::StoreUnavailable
            }
        }
    }

    /// Reads the record. A transient error is retried a few times.
    async fn find(&self, identity: &Identity) -> Result<crate::operation::port::Look, StoreError> {
        let mut tries = 0;
        loop {
            match self.engine.reach().within(self.engine.store().find(identity)).await {
                Err(StoreError::Busy(_)) if tries < 5 => tries += 1,
                found => return found,
            }
            tokio::time::sleep(Duration::from_millis(10 << tries)).await;
        }
    }

    fn decide(&self, found: KeyFound<'_>) -> Decision {
        let route = self.endpoint.route();
        let request;
        let asked = match (&self.asking.key, &self.asking.scope, &self.identity) {
            (KeyGiven::Missing, _, _) => Err(NoKey::Missing),
            (KeyGiven::Malformed(_), _, _) => Err(NoKey::Malformed),
            (KeyGiven::Given(_), Some(scope), Some(identity)) if self.home.is_none() => {
                request = Request {
                    scope,
                    identity,
                    command: &*self.asking.command,
                    fingerprinter: self.endpoint.fingerprinter(),
                    over_quota: self.engine.is_over_quota(scope.tenant()),
                };
                Ok(&request)
            }
            (KeyGiven::Given(_), Some(_), _) => Err(NoKey::Elsewhere),
            (KeyGiven::Given(_), None, _) => Err(NoKey::Unscoped),
        };
        decide(route, asked, found)
    }

    /// Does what the decision says. `None`: decide again.
    async fn follow(&mut self, decision: Decision, seen: Seen) -> Option<Turn> {
        let record = match seen {
            Seen::Record(record, now) => Some((record, now)),
            Seen::Run(run) => {
                if decision == Decision::InProgress(WhileRunning::Wait) && self.may_wait() {
                    let until = self.waits_until.map_or(self.look_every, |until| until.duration_since(Instant::now()));
                    // The run wakes its waiters when it ends.
                    let _ = tokio::time::timeout(until, run.ended.cancelled()).await;
                    return None;
                }
                self.note_lock(decision, false);
                return Some(Turn::Answer(match decision {
                    Decision::InProgress(_) => self.still_running(run.since.elapsed()),
                    decision => self.refusal(decision, None),
                }));
            }
            Seen::Nobody => None,
        };
        match (decision, record) {
            (Decision::PassThrough, _) => Some(Turn::Unkeyed),
            (Decision::Claim, _) => self.begin(Ground::New),
            (Decision::TakeOver(kind), Some((record, _))) => self.begin(Ground::TakeOver(kind, record)),
            (Decision::Reclaim, Some((record, _))) => {
                match self.end_of_late_run(&record).await {
                    Ok(false) => {}
                    Ok(true) => {
                        self.look_again();
                        return None;
                    }
                    Err(error) => return Some(Turn::Answer(self.store_failed("claim", &error))),
                }
                self.begin(Ground::Reclaim(record))
            }
            (Decision::ExecuteAsNew, Some((record, _))) => self.begin(Ground::Anew(record)),
            (Decision::InProgress(WhileRunning::Wait), _) if self.may_wait() => {
                tokio::time::sleep(self.look_every).await;
                self.look_every = (self.look_every * 3 / 2).min(LOOK_EVERY_MAX);
                None
            }
            (Decision::MarkUnknown(lost), Some((record, _))) => self.mark_unknown(lost, &record).await,
            (Decision::Recover, Some((record, _))) => {
                self.note(Noted::Recovering);
                Some(Turn::Recover(record))
            }
            (Decision::Reconcile, Some((record, now))) => {
                super::reconcile::wake(&self.engine, &self.endpoint, &record);
                Some(Turn::Answer(self.answer(Decision::Reconcile, Some((&record, now))).await))
            }
            (decision, record) => {
                self.note_lock(decision, record.is_none());
                let record = record.as_ref().map(|(record, now)| (&**record, *now));
                Some(Turn::Answer(self.answer(decision, record).await))
            }
        }
    }

    fn begin(&mut self, ground: Ground) -> Option<Turn> {
        let claim = self.claim(&ground)?;
        // A request that waits is bounded by its time, not by its turns.
        if self.waiting.is_none() {
            self.rounds += 1;
        }
        // A claim that is taken over counts already.
        let starts = !matches!(ground, Ground::TakeOver(..));
        match self.enter(claim, ground, false, self.engine.inner.open_per_tenant_max.filter(|_| starts)) {
            Ok(begin) => {
                self.waiting = None;
                Some(Turn::Begin(begin))
            }
            // Another request of this process was faster. The next turn finds it in the map.
            Err(NotEntered::Runs) => None,
            Err(NotEntered::Full) => Some(Turn::Answer(self.refusal(Decision::QuotaExceeded, None))),
        }
    }

    fn enter(
        &self,
        claim: KeyClaim,
        ground: Ground,
        tries: bool,
        at_most: Option<u32>,
    ) -> Result<Box<Begin>, NotEntered> {
        let entry = Arc::new(self.engine.inner.running.enter(&claim, tries, at_most)?);
        Ok(Box::new(Begin { claim, ground, entry, claimed: AtomicBool::new(false) }))
    }

    fn claim(&self, ground: &Ground) -> Option<KeyClaim> {
        let (Some(identity), Some(scope)) = (self.identity.clone(), &self.asking.scope) else { return None };
        let principal = scope.mark(&self.engine.inner.keyring);
        let fingerprint = self.endpoint.fingerprinter().write(&*self.asking.command);
        let operation_id = match ground {
            Ground::New | Ground::Anew(_) => Uuid::now_v7(),
            Ground::TakeOver(_, seen) | Ground::Reclaim(seen) => seen.operation_id,
        };
        let route = self.endpoint.route();
        let owner = KeyClaim::new_owner();
        let (mode, lease) = (route.mode, route.lease);
        Some(KeyClaim { identity, principal, fingerprint, mode, operation_id, owner, lease })
    }

    /// Whether an earlier run of this failed record has ended after all. If so, its outcome is
    /// written now. Only runs of these modes can lose their lease and still have an effect.
    async fn end_of_late_run(&self, seen: &Record) -> Result<bool, StoreError> {
        if !matches!(seen.mode, Mode::Edge | Mode::Bridged) {
            return Ok(false);
        }
        let ended = super::reconcile::end_of_late_run(&self.engine, &self.endpoint, seen);
        self.engine.reach().within(ended).await
    }

    async fn mark_unknown(&mut self, lost: Lost, record: &Record) -> Option<Turn> {
        self.rounds += 1;
        match self.engine.reach().within(self.engine.store().mark_unknown(record)).await {
            Ok(Fenced::Done) => {
                if lost == Lost::CommittedClaim {
                    self.note(Noted::TransactionEnded);
                }
                None
            }
            Ok(Fenced::LostOwnership) => None,
            Err(error) => Some(Turn::Answer(self.store_failed("claim", &error))),
        }
    }

    /// Counts a request that is refused because the key is in use, if the holder has no visible
    /// record (`unseen`) or the request has waited (M104).
    fn note_lock(&self, decision: Decision, unseen: bool) {
        if matches!(decision, Decision::InProgress(_)) && (unseen || self.waiting.is_some()) {
            self.note(Noted::LockTimeout);
        }
    }

    /// Whether a duplicate may wait on. The first call starts its time and takes a place.
    fn may_wait(&mut self) -> bool {
        let route = self.endpoint.route();
        let until = *self.waits_until.get_or_insert_with(|| Instant::now() + route.wait_max);
        if self.waiting.is_none()
            && let Some(identity) = &self.identity
        {
            self.waiting = self.engine.inner.running.wait(identity.digest(), route.waiters_max);
        }
        self.waiting.is_some() && Instant::now() < until
    }
}

impl fmt::Debug for Asking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Asking").field("scope", &self.scope).field("key", &self.key).finish_non_exhaustive()
    }
}
