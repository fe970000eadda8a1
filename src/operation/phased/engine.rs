//! The engine of phased operations: handles a request for one (O15, O22).
//!
//! The first phase runs in the transaction that holds claim, command and operation. Then a driver
//! continues in its own task, and the request waits for it as long as its budget lasts. A request
//! that finds an operation without a driver takes it over in the same way.
//!
//! Promises: the driver needs no waiting request: it continues when the client disconnects or the
//! budget ends. The answer of the first request is the stored answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::driver::{Came, End, Ended};
use super::flow::{AnyCommand, Flow};
use super::opening::{Opened, Opening};
use super::registry::Phased;
use super::taken::taken;
use crate::error::{Invalid, StoreError};
use crate::observe::Noted;
use crate::operation::port::phases::{Phases, Taken};
use crate::operation::rules::flow::Stage;
use crate::operation::rules::record::Mode;
use crate::operation::rules::{Canonical, Code, Record, Scope};
use crate::operation::{Answered, Asking, BodyPermit, Engine, Front, KeyGiven, Registered, Turn};
use crate::store::base::Base;
use crate::time::bound::LONGEST;
use crate::time::since::Since;

/// Runs the phased operations of an engine. Cheap to clone.
#[derive(Debug, Clone)]
pub struct PhasedEngine {
    pub(super) phased: Arc<Phased>,
    stop: CancellationToken,
}

impl PhasedEngine {
    /// The phased operations of an engine: each flow with its protected operation. `deployment` is
    /// the id of this deployment, from its configuration. If the database has another id, nothing
    /// is sent (O22). How they are driven is a setting of the engine:
    /// [`EngineOptions::driving`](crate::operation::EngineOptions::driving).
    ///
    /// # Errors
    /// A flow has another name than its operation, is registered twice, or does not fit into the
    /// lease; or the mode of the operation is not phased.
    pub fn new<'e, S: Phases + Base>(
        engine: &Engine<S>,
        deployment: Uuid,
        flows: impl IntoIterator<Item = (Flow<S>, &'e Registered)>,
    ) -> Result<Self, Invalid> {
        let store = Arc::clone(engine.store()) as Arc<dyn Phases>;
        let mut phased = Phased::new(engine.core.clone(), store, deployment);
        for (flow, endpoint) in flows {
            let (flow, operation, mode) = (flow.0, endpoint.operation().as_str(), endpoint.route().mode);
            if flow.name != operation {
                let flow = flow.name;
                return Err(Invalid::new(format!(
                    "flow `{flow}` is not of the operation `{operation}`: give them one name"
                )));
            }
            if mode != Mode::Phased {
                return Err(Invalid::new(format!(
                    "the operation `{operation}` is of mode {mode}: phases take mode phased"
                )));
            }
            phased.register(flow, endpoint.clone())?;
        }
        Ok(Self { phased: Arc::new(phased), stop: CancellationToken::new() })
    }

    /// Stops the drivers that requests started here, after the calls in flight. A worker continues
    /// their operations. [`Engine::drain`](crate::operation::Core::drain) waits for them.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Runs an operation for a request, and waits for its outcome until `budget` is over. The first
    /// phase is waited for to its end, however long it takes. After that it answers 202 or 409
    /// `IDEMPOTENCY_RECOVERY_PENDING`, and the operation continues. `permit` is that of the
    /// command's body in the engine's memory budget (`body_memory_max`), if it has one: it is
    /// returned when neither this request nor its driver needs the command.
    ///
    /// # Cancel safety
    /// Dropped before the first phase has begun: nothing happened. Dropped later: the operation
    /// continues.
    pub async fn execute_phased<C>(
        &self,
        endpoint: &Registered,
        scope: Option<Scope>,
        key: KeyGiven,
        command: C,
        permit: Option<BodyPermit>,
        budget: Duration,
    ) -> Answered
    where
        C: Canonical + Serialize + Send + Sync + 'static,
    {
        let engine = &self.phased.engine;
        let permit = Arc::new(permit);
        let command = Arc::new(command);
        let key = key.or_own(endpoint.route());
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
        let (began, until) = (Instant::now(), tokio::time::Instant::now() + budget.min(LONGEST));
        // The operation that this request found, and may have driven.
        let mut driven = None;
        loop {
            match front.turn().await {
                Turn::Answer(answered) => {
                    return match driven {
                        Some(operation_id) => front.of_stored(operation_id, answered),
                        None => answered,
                    };
                }
                Turn::Unkeyed => return front.no_use_of_keys(),
                Turn::Recover(record) => match engine.reach().within(self.recover(&record, until)).await {
                    Ok(Recovered::Look) => {
                        driven = Some(record.operation_id);
                        front.look_again();
                    }
                    Ok(Recovered::Pending) => return front.pending(record.operation_id),
                    Ok(Recovered::Unknown) => return front.problem(Code::OutcomeUnknown),
                    // The operation exists; an outage of the store does not undo what it did.
                    Err(error) => {
                        drop(front.store_failed("recover", &error));
                        return front.pending(record.operation_id);
                    }
                },
                Turn::Begin(begin) => {
                    let operation_id = begin.claim.operation_id;
                    let opening = Opening {
                        phased: Arc::clone(&self.phased),
                        stop: self.stop.clone(),
                        member: Arc::clone(&member),
                        command: Arc::clone(&command),
                        bytes: bytes.clone(),
                        patience: front.patience(),
                        permit: Arc::clone(&permit),
                    };
                    let place = match front.place().await {
                        Ok(place) => place,
                        Err(answered) => return *answered,
                    };
                    // The task holds the place, because it goes on if this request is dropped.
                    let opening = engine.spawn(async move {
                        let opened = opening.run(begin).await;
                        // From here on the operation holds a connection only for short moments.
                        drop(place);
                        opened
                    });
                    let opened = match engine.attended(opening).await {
                        Some(Ok(Ok(opened))) => opened,
                        Some(Ok(Err(error))) => return front.store_failed("claim", &error),
                        ended => {
                            if let Some(Err(error)) = ended {
                                tracing::error!(operation = %endpoint.operation(), %error, "the first phase died");
                            }
                            front.note(Noted::CommitUnknown);
                            return front.problem(Code::CommitUnknown);
                        }
                    };
                    match opened {
                        Opened::Refused(begin) => front.refused(begin),
                        Opened::Replied(reply) => return front.first(began.elapsed(), reply),
                        Opened::Look => return self.stands(&mut front, operation_id).await,
                        Opened::Problem(code) => return front.problem(code),
                        Opened::Driving(driving) => {
                            if let Some(answered) = wait(&front, driving, until, began).await {
                                return answered;
                            }
                            // This task does not know the answer: read what is stored.
                            return self.stands(&mut front, operation_id).await;
                        }
                    }
                }
            }
        }
    }

    /// The answer to the first request of an operation: what is stored of it by now.
    async fn stands(&self, front: &mut Front, operation_id: Uuid) -> Answered {
        front.look_again();
        match front.turn().await {
            Turn::Answer(answered) => front.of_stored(operation_id, answered),
            Turn::Recover(record) => front.pending(record.operation_id),
            Turn::Unkeyed | Turn::Begin(_) => {
                tracing::error!(operation = %operation_id, "an operation is gone that was just there");
                front.pending(operation_id)
            }
        }
    }

    async fn recover(&self, record: &Record, until: tokio::time::Instant) -> Result<Recovered, StoreError> {
        let store = &self.phased.store;
        let found = match store.operation(record.operation_id).await {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(Recovered::Unknown),
            Err(error @ StoreError::Corrupt(_)) => {
                tracing::error!(operation = %record.operation_id, %error, "an operation cannot be read");
                return Ok(Recovered::Unknown);
            }
            Err(error) => return Err(error),
        };
        let Some(member) = self.phased.member(&found.flow, found.flow_version) else {
            // A process that has the flow drives the operation when it is due. Clients that ask
            // here must neither use up its attempts nor shorten its pauses.
            return Ok(Recovered::Pending);
        };
        if !self.phased.is_ours().await? {
            return Ok(Recovered::Pending);
        }
        let asked = Since::now();
        let (driven, stored) = match store.take_operation(record.operation_id, member.route().lease).await? {
            Taken::Driven(driven, stored) => (driven, *stored),
            // The outcome may have been stored in between.
            Taken::Not(stored) if matches!(stored.stage, Stage::Succeeded | Stage::Failed) => {
                return Ok(Recovered::Look);
            }
            Taken::Not(stored) if stored.parked.is_some() => return Ok(Recovered::Look),
            Taken::Not(_) => return Ok(Recovered::Pending),
            Taken::Missing => return Ok(Recovered::Unknown),
        };
        tracing::info!(operation = %record.operation_id, stage = stored.stage.as_str(), "a request recovers its operation");
        let is_due = stored.due_at.is_none_or(|due| due <= stored.now);
        let came = if is_due { Came::Due } else { Came::Early };
        let work =
            taken(Arc::clone(&self.phased), driven, stored, (asked, member.route().lease), came, self.stop.clone());
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

enum Recovered {
    /// The record has changed, or may have changed: read it again.
    Look,
    /// The operation has no outcome yet. It continues later or in another process.
    Pending,
    /// The record exists, but its operation does not or cannot be read.
    Unknown,
}

/// Waits for a driver. `None`: the driver ended without an answer, or the time is over.
async fn wait(
    front: &Front,
    driving: JoinHandle<Result<Ended, StoreError>>,
    until: tokio::time::Instant,
    began: Instant,
) -> Option<Answered> {
    match tokio::time::timeout_at(until, driving).await {
        Ok(Ok(Ok(Ended { end: End::Known, reply: Some(reply) }))) => Some(front.first(began.elapsed(), reply)),
        Ok(Ok(Ok(_))) | Err(_) => None,
        Ok(Ok(Err(error))) => {
            tracing::warn!(%error, "an operation was broken off: it is taken up again");
            None
        }
        Ok(Err(error)) => {
            tracing::error!(%error, "the driver of an operation died: its lease runs out, and it is recovered");
            None
        }
    }
}
