//! Door B: a request for a phased operation (O15, O22).
//!
//! The first phase runs in the transaction that holds claim, command and operation; then a driver goes on by itself, and the request
//! waits for it as long as its budget lasts. A request that finds an operation without a driver takes it up in the same way.
//!
//! Promises: nobody who waits is needed: a client's disconnect, and the end of the budget, leave the driver at work; the answer of
//! the first request is the one that is stored.
//!
//! Not here: what follows the first phase ([`driver`](super::driver)).

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::driver::{Driver, End, Ended, guarded, new_intent, outcome};
use super::effect::Intent;
use super::ends::First;
use super::flow::{AnyCommand, Flow, FlowError};
use super::hold::Hold;
use super::identity::Identities;
use super::phase::{Context, Phase};
use super::registry::{DriveSettings, Member, Phased};
use crate::error::{HandlerError, StoreError};
use crate::policy::operation::doubt::{Aftermath, Doubt};
use crate::policy::operation::flow::Stage;
use crate::policy::operation::record::Mode;
use crate::policy::operation::{Canonical, Code, Record, Scope};
use crate::runtime::operation::{Answered, Asking, Begin, Engine, Front, KeyGiven, Problem, Registered, Reply, Turn};
use crate::store::{
    Begun, Driven, FIRST_POINT, Fenced, NewIntent, NewOperation, PhaseTx, Phases, Proof, StoredOperation, Taken,
};

/// How often a claim is tried that nobody refused (R27).
const TRIES: u32 = 5;

/// Door B of an engine. Cheap to clone.
#[derive(Debug)]
pub struct Door<S: Phases> {
    phased: Arc<Phased<S>>,
    stop: CancellationToken,
}

/// Puts a door together.
#[derive(Debug)]
pub struct DoorBuilder<S: Phases> {
    phased: Phased<S>,
}

/// Why an operation cannot be registered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DoorError {
    /// Its flow.
    #[error(transparent)]
    Flow(#[from] FlowError),
    /// Flow and endpoint are of different operations.
    #[error("flow `{flow}` is not of the operation `{operation}`: give them one name")]
    Name {
        /// The flow.
        flow: &'static str,
        /// The operation.
        operation: String,
    },
    /// The endpoint is of another mode.
    #[error("the operation `{operation}` is of mode {mode}: door B takes mode phased")]
    Mode {
        /// The operation.
        operation: String,
        /// Its mode.
        mode: Mode,
    },
}

impl<S: Phases> DoorBuilder<S> {
    /// How operations are driven.
    #[must_use]
    pub fn settings(mut self, settings: DriveSettings) -> Self {
        self.phased.settings = settings;
        self
    }

    /// Registers a flow of a protected operation.
    ///
    /// # Errors
    /// [`DoorError`]: what could not be recovered.
    pub fn register(mut self, flow: Flow<S>, endpoint: &Registered) -> Result<Self, DoorError> {
        let operation = endpoint.operation().as_str();
        if flow.name() != operation {
            return Err(DoorError::Name { flow: flow.name(), operation: operation.to_owned() });
        }
        if endpoint.route().mode != Mode::Phased {
            return Err(DoorError::Mode { operation: operation.to_owned(), mode: endpoint.route().mode });
        }
        self.phased.register(flow, endpoint.clone())?;
        Ok(self)
    }

    /// The door.
    #[must_use]
    pub fn build(self) -> Door<S> {
        Door { phased: Arc::new(self.phased), stop: CancellationToken::new() }
    }
}

/// What came of the first phase.
enum Opened {
    /// Another record or claim stands there.
    Refused(Box<Begin>),
    /// It ended here: with an outcome that is stored, or with nothing.
    Replied(Reply),
    /// It was lost sight of, and is there: look.
    Look,
    /// This code.
    Problem(Code),
    /// It goes on.
    Driving(JoinHandle<Result<Ended, StoreError>>),
    Failed(StoreError),
}

impl<S: Phases> Door<S> {
    /// Begins a door of this engine. `deployment` is the id of this deployment, from its configuration: where the database has
    /// another one, nothing is sent (O22).
    #[must_use]
    pub fn builder(engine: &Engine<S>, deployment: Uuid) -> DoorBuilder<S> {
        DoorBuilder { phased: Phased::new(engine.clone(), DriveSettings::default(), deployment) }
    }

    pub(super) fn phased(&self) -> Arc<Phased<S>> {
        Arc::clone(&self.phased)
    }

    /// Stops what is driven here for requests, after the calls in flight; what is not done goes to a worker.
    /// [`Engine::drain`] waits for it.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Runs an operation for a request, and waits for its outcome for at most `budget`; then 202 or 409
    /// `IDEMPOTENCY_RECOVERY_PENDING`, and it goes on.
    ///
    /// # Cancel safety
    /// Dropped, the operation goes on; before its first phase has begun, nothing happened.
    pub async fn execute_phased<C>(
        &self,
        endpoint: &Registered,
        scope: Option<Scope>,
        key: KeyGiven,
        command: C,
        budget: Duration,
    ) -> Answered
    where
        C: Canonical + Serialize + Send + Sync + 'static,
    {
        let engine = &self.phased.engine;
        let command = Arc::new(command);
        let asking = Asking { scope, key, command: Arc::clone(&command) as Arc<dyn Canonical + Send + Sync> };
        let mut front = engine.front(endpoint, asking);
        let Some(member) = self.phased.newest(endpoint.operation().as_str()) else {
            tracing::error!(operation = %endpoint.operation(), "no flow is registered for this operation");
            return front.problem(Code::StoreUnavailable);
        };
        let bytes = match serde_json::to_vec(&*command) {
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::error!(operation = %endpoint.operation(), %error, "a command cannot be written");
                return front.problem(Code::RequestInvalid);
            }
        };
        let command: AnyCommand = command;
        let (began, until) = (Instant::now(), tokio::time::Instant::now() + budget);
        loop {
            match front.turn().await {
                Turn::Answer(answered) => return shown(answered),
                Turn::Unkeyed => front = front.under_own_key(),
                Turn::Recover(record) => match self.recover(&record, until).await {
                    Ok(Recovered::Look) => front.look_again(),
                    Ok(Recovered::Pending) => return shown(front.pending(&record)),
                    Ok(Recovered::Unknown) => return front.problem(Code::OutcomeUnknown),
                    Err(error) => return front.store_failed("recover", &error),
                },
                Turn::Begin(begin) => {
                    let (claim, patience) = (begin.claim.clone(), front.patience());
                    let opening = Opening {
                        door: self.clone(),
                        member: Arc::clone(&member),
                        command: Arc::clone(&command),
                        bytes: bytes.clone(),
                        patience,
                    };
                    let opened = match engine.spawn(opening.run(begin)).await {
                        Ok(opened) => opened,
                        Err(error) => {
                            tracing::error!(operation = %endpoint.operation(), %error, "the first phase died");
                            return front.problem(Code::CommitUnknown);
                        }
                    };
                    match opened {
                        Opened::Refused(begin) => front.refused(begin),
                        Opened::Replied(reply) => return front.first(began.elapsed(), reply),
                        Opened::Look => front.look_again(),
                        Opened::Problem(code) => return front.problem(code),
                        Opened::Failed(error) => return front.store_failed("claim", &error),
                        Opened::Driving(driving) => {
                            if let Some(answered) = wait(&front, driving, until, began).await {
                                return answered;
                            }
                            // Not known here: what is stored says what it is.
                            return self.stands(&mut front, &claim.operation_id).await;
                        }
                    }
                }
            }
        }
    }

    /// The answer of an operation that goes on without its first request.
    async fn stands(&self, front: &mut Front<S>, operation_id: &Uuid) -> Answered {
        front.look_again();
        match front.turn().await {
            Turn::Answer(Answered::Problem(problem)) if problem.code == Code::InProgress => {
                let mut pending = Problem::new(Code::RecoveryPending);
                pending.operation_id = Some(*operation_id);
                pending.location = front.endpoint().location_of(*operation_id);
                shown(Answered::Problem(pending))
            }
            Turn::Answer(answered) => shown(answered),
            Turn::Recover(record) => shown(front.pending(&record)),
            Turn::Unkeyed | Turn::Begin(_) => {
                tracing::error!(operation = %operation_id, "an operation is gone that was just there");
                front.problem(Code::StoreUnavailable)
            }
        }
    }

    /// Takes the operation up and waits for it.
    async fn recover(&self, record: &Record, until: tokio::time::Instant) -> Result<Recovered, StoreError> {
        let store = self.phased.engine.store();
        let Some(found) = store.operation(record.operation_id).await? else { return Ok(Recovered::Unknown) };
        let Some(member) = self.phased.member(&found.flow, found.flow_version) else {
            store.nudge(record.operation_id).await?;
            return Ok(Recovered::Pending);
        };
        if !self.phased.is_ours().await? {
            return Ok(Recovered::Pending);
        }
        let asked = Instant::now();
        let (driven, stored) = match store.take_operation(record.operation_id, member.lease()).await? {
            Taken::Driven(driven, stored) => (driven, *stored),
            // Its outcome may have come in between.
            Taken::Not(stored) if matches!(stored.stage, Stage::Succeeded | Stage::Failed) => {
                return Ok(Recovered::Look);
            }
            Taken::Not(stored) if stored.parked.is_some() => return Ok(Recovered::Look),
            Taken::Not(_) => return Ok(Recovered::Pending),
            Taken::Missing => return Ok(Recovered::Unknown),
        };
        tracing::info!(operation = %record.operation_id, stage = stored.stage.as_str(), "a request recovers its operation");
        // One that came before it was due counts as no attempt: a client that asks often must not use them up.
        let due = found.due_at.is_none_or(|due| due <= found.now);
        let work = taken(Arc::clone(&self.phased), driven, stored, asked, due, self.stop.clone());
        let driving = self.phased.engine.spawn(work);
        match tokio::time::timeout_at(until, driving).await {
            Ok(Ok(ended)) => match ended?.end {
                End::Known | End::Parked => Ok(Recovered::Look),
                End::Later | End::Lost => Ok(Recovered::Pending),
            },
            Ok(Err(error)) => {
                tracing::error!(operation = %record.operation_id, %error, "a recovery died: its lease runs out");
                Ok(Recovered::Pending)
            }
            Err(_) => Ok(Recovered::Pending),
        }
    }
}

/// A recovery that goes on is 202 where there is a place to look at it.
fn shown(mut answered: Answered) -> Answered {
    if let Answered::Problem(problem) = &mut answered
        && problem.code == Code::RecoveryPending
        && problem.location.is_some()
    {
        problem.status = 202;
    }
    answered
}

/// What came of a recovery by a request.
enum Recovered {
    /// Look again.
    Look,
    /// It goes on.
    Pending,
    /// There is a record, and nothing to go on with.
    Unknown,
}

/// Waits for a driver; none where its end says no answer of its own.
async fn wait<S: Phases>(
    front: &Front<S>,
    driving: JoinHandle<Result<Ended, StoreError>>,
    until: tokio::time::Instant,
    began: Instant,
) -> Option<Answered> {
    match tokio::time::timeout_at(until, driving).await {
        Ok(Ok(Ok(Ended { end: End::Known, reply: Some(reply) }))) => Some(front.first(began.elapsed(), reply)),
        Ok(Ok(Ok(_))) | Err(_) => None,
        Ok(Ok(Err(error))) => {
            tracing::warn!(%error, "an operation was broken off: its lease runs out, and it is recovered");
            None
        }
        Ok(Err(error)) => {
            tracing::error!(%error, "the driver of an operation died: its lease runs out, and it is recovered");
            None
        }
    }
}

/// The first phase of an operation.
struct Opening<S: Phases> {
    door: Door<S>,
    member: Arc<Member<S>>,
    command: AnyCommand,
    bytes: Vec<u8>,
    patience: Duration,
}

/// How the first phase's transaction is to end.
enum Move {
    Advance(String, Stage, Option<(&'static str, NewIntent)>),
    Finish(Reply, Option<Option<String>>),
    /// Nothing stays.
    Forget(Reply),
}

impl<S: Phases> Opening<S> {
    async fn run(self, begin: Box<Begin>) -> Opened {
        match self.open(begin).await {
            Ok(opened) => opened,
            Err(error) => Opened::Failed(error),
        }
    }

    async fn open(self, begin: Box<Begin>) -> Result<Opened, StoreError> {
        let phased = Arc::clone(&self.door.phased);
        if !phased.is_ours().await? {
            return Ok(Opened::Problem(Code::StoreUnavailable));
        }
        let store = phased.engine.store();
        let flow = self.member.flow();
        let command = phased.vault.seal(begin.claim.operation_id, "command", &self.bytes)?;
        let (name, flow_version) = (flow.name().to_owned(), flow.version());
        let new = NewOperation { claim: begin.claim.clone(), flow: name, flow_version, command };
        let mut tries = 0;
        let (mut tx, asked) = loop {
            let asked = Instant::now();
            match store.begin_first(&new, begin.basis(), self.patience).await {
                Ok(Begun::Claimed(tx)) => break (tx, asked),
                Ok(Begun::Existing(_) | Begun::Locked) => return Ok(Opened::Refused(begin)),
                Err(StoreError::Busy(_)) if tries < TRIES => tries += 1,
                Err(error) => return Err(error),
            }
            tokio::time::sleep(Duration::from_millis(5 << tries)).await;
        };
        let driven = tx.driven().clone();
        let identities = Identities::new(phased.deployment, driven.operation_id);
        let context = Context::new(identities, begin.claim.identity.clone());
        let ended =
            guarded(self.member.timeout(), flow.first().run(&mut Phase::new(&mut tx, &context), &self.command)).await;
        let first = match ended {
            Ok(first) => first,
            Err(error) => {
                let proof = tx.undo_effects().await?;
                let _ = tx.rollback().await;
                if proof != Proof::Same {
                    return self.ended_by_itself(&phased, &begin, &driven, proof).await;
                }
                return Ok(failed(&error));
            }
        };
        let rejected = matches!(first, First::Rejected { binding: true, .. });
        let (how, fresh) = match self.judge(&phased, &context, first)? {
            Move::Forget(reply) => {
                let proof = tx.undo_effects().await?;
                let _ = tx.rollback().await;
                if proof != Proof::Same {
                    return self.ended_by_itself(&phased, &begin, &driven, proof).await;
                }
                return Ok(Opened::Replied(reply));
            }
            Move::Advance(to, stage, intent) => {
                let (fresh, intents): (Vec<_>, Vec<_>) = intent.into_iter().unzip();
                (tx.advance(FIRST_POINT, &to, stage, &intents).await?, Ok(fresh.first().copied()))
            }
            Move::Finish(reply, failure) => {
                // A rejection takes back what was written before it (pitfall 18).
                let proof = if rejected { tx.undo_effects().await? } else { Proof::Same };
                if proof == Proof::Same {
                    let outcome = outcome(&self.member, &phased, &context, &begin.claim.fingerprint, &reply, failure)?;
                    (tx.finish(FIRST_POINT, &outcome, &self.member.retention()).await?, Err(reply))
                } else {
                    ((proof, Fenced::Done), Err(reply))
                }
            }
        };
        if how != (Proof::Same, Fenced::Done) {
            let _ = tx.rollback().await;
            return self.ended_by_itself(&phased, &begin, &driven, how.0).await;
        }
        match tx.commit().await {
            Ok(()) => crate::store::hint(),
            Err(StoreError::CommitUnknown(error)) => {
                tracing::warn!(operation = %driven.operation_id, %error, "a first phase was lost sight of");
                match Doubt::CommitLost.after(store.look_after(&begin.claim).await) {
                    // Whether with an outcome or to be driven on: it is there.
                    Aftermath::Stored | Aftermath::MarkUnknown | Aftermath::Ended => {}
                    Aftermath::CommitUnknown | Aftermath::InsertUnknown => {
                        return Ok(Opened::Problem(Code::CommitUnknown));
                    }
                }
            }
            Err(error) => return Err(error),
        }
        let fresh = match fresh {
            Err(reply) => return Ok(Opened::Replied(reply)),
            Ok(fresh) => fresh,
        };
        let hold = Hold::new(store.clone(), driven.clone(), self.member.lease(), asked);
        let driver = Driver {
            phased: Arc::clone(&phased),
            member: self.member,
            context,
            command: self.command,
            driven,
            hold,
            fingerprint: begin.claim.fingerprint.clone(),
            stop: self.door.stop.clone(),
            fresh,
            attempt: false,
            reached: false,
            vain: 0,
            asked: false,
            reply: None,
        };
        // From here on duplicates read the operation itself.
        drop(begin);
        Ok(Opened::Driving(phased.engine.spawn(driver.drive())))
    }

    fn judge(&self, phased: &Phased<S>, context: &Context, first: First) -> Result<Move, StoreError> {
        let (flow, end) = (self.member.flow(), first.end());
        let unknown = |what: &str| {
            StoreError::Refused(format!(
                "the first phase of `{}` goes on at `{what}`, which its flow does not have",
                flow.name()
            ))
        };
        let stage = Stage::Received.after(end).ok_or_else(|| unknown("no stage"))?;
        Ok(match first {
            First::RecoveryPoint(point) if flow.local(point.0).is_some() => {
                Move::Advance(point.0.to_owned(), stage, None)
            }
            First::RecoveryPoint(point) => return Err(unknown(point.0)),
            First::Intent(Intent(prepared)) => {
                let effect = flow.effect(prepared.effect).ok_or_else(|| unknown(prepared.effect))?;
                let intent = new_intent(phased, context, effect, &prepared)?;
                Move::Advance(effect.sent.clone(), stage, Some((effect.name, intent)))
            }
            First::Response(reply) => Move::Finish(reply, None),
            First::Rejected { reply, code, binding: true } => Move::Finish(reply, Some(code)),
            First::Rejected { reply, .. } | First::Retryable(reply) | First::DontStore(reply) => Move::Forget(reply),
        })
    }

    /// A handler ended the transaction of the first phase: what it did may be done (O1).
    async fn ended_by_itself(
        self,
        phased: &Phased<S>,
        begin: &Begin,
        driven: &Driven,
        proof: Proof,
    ) -> Result<Opened, StoreError> {
        let store = phased.engine.store();
        let nothing_ran_after = proof == Proof::Aborted;
        let aftermath = Doubt::TokenGone { nothing_ran_after }.after(store.look_after(&begin.claim).await);
        tracing::error!(operation = %driven.operation_id, ?aftermath, "a first phase ended its transaction by itself");
        match aftermath {
            Aftermath::Stored => return Ok(Opened::Look),
            Aftermath::CommitUnknown => return Ok(Opened::Problem(Code::CommitUnknown)),
            Aftermath::InsertUnknown => {
                store.insert_unknown(&begin.claim).await?;
            }
            Aftermath::MarkUnknown => {
                store.park(driven, "first-phase-ended-its-transaction").await?;
            }
            Aftermath::Ended => {}
        }
        Ok(Opened::Problem(Code::TransactionEnded))
    }
}

/// The first phase failed, and nothing of it stayed.
fn failed(error: &HandlerError) -> Opened {
    tracing::warn!(%error, "a first phase failed: nothing happened");
    Opened::Problem(if error.is_nobodys() { Code::StoreUnavailable } else { Code::OperationFailed })
}

/// Drives an operation that was taken up.
pub(super) async fn taken<S: Phases>(
    phased: Arc<Phased<S>>,
    driven: Driven,
    stored: StoredOperation,
    asked: Instant,
    attempt: bool,
    stop: CancellationToken,
) -> Result<Ended, StoreError> {
    let store = phased.engine.store();
    let reason = match prepared(&phased, &stored).await {
        Ok(Prepared::Ready(member, context, command, fingerprint)) => {
            let hold = Hold::new(store.clone(), driven.clone(), member.lease(), asked);
            let driver = Driver {
                phased: Arc::clone(&phased),
                member,
                context,
                command,
                driven,
                hold,
                fingerprint,
                stop,
                fresh: None,
                attempt,
                reached: false,
                vain: 0,
                asked: false,
                reply: None,
            };
            return driver.drive().await;
        }
        Ok(Prepared::Gone(reason)) => reason,
        Err(error) => {
            // Another process may have the key or the version.
            tracing::error!(operation = %stored.operation_id, %error, "an operation cannot be read here");
            let due = crate::store::Due { after: phased.settings.backoff_max, attempt: false };
            store.hand_back(&driven, due).await?;
            return Ok(Ended { end: End::Later, reply: None });
        }
    };
    tracing::error!(operation = %stored.operation_id, reason, "an operation cannot be driven");
    store.park(&driven, reason).await?;
    Ok(Ended { end: End::Parked, reply: None })
}

enum Prepared<S: Phases> {
    Ready(Arc<Member<S>>, Context, AnyCommand, crate::policy::operation::Fingerprint),
    Gone(&'static str),
}

async fn prepared<S: Phases>(phased: &Phased<S>, stored: &StoredOperation) -> Result<Prepared<S>, StoreError> {
    let unknown = || StoreError::Refused(format!("no flow `{}` of version {}", stored.flow, stored.flow_version));
    let member = phased.member(&stored.flow, stored.flow_version).ok_or_else(unknown)?;
    let Some(identity) = stored.identity.clone() else { return Ok(Prepared::Gone("record-gone")) };
    let Some(record) = phased.engine.store().find(&identity).await?.record else {
        return Ok(Prepared::Gone("record-gone"));
    };
    let bytes = phased.vault.open(stored.operation_id, "command", &stored.command)?;
    let command = member.flow().decode(&bytes)?;
    let context = Context::new(Identities::new(phased.deployment, stored.operation_id), identity);
    Ok(Prepared::Ready(member, context, command, record.fingerprint))
}

impl<S: Phases> Clone for Door<S> {
    fn clone(&self) -> Self {
        Self { phased: Arc::clone(&self.phased), stop: self.stop.clone() }
    }
}
