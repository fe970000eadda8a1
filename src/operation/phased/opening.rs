//! The first phase of an operation: claim, command, operation and the writes of the phase commit
//! together (O22).
//!
//! Promises: a first phase that refuses or fails leaves nothing, or only the refusal if it is
//! binding. A handler that ended the transaction itself is detected, and the operation is parked
//! for an operator (O1).

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::context::Context;
use super::driver::{Came, Driver, Ended, FIRST_ENDED, TRIES, before_try, new_intent, outcome, take_back};
use super::effect::{Intent, Settlements};
use super::ends::First;
use super::flow::{AnyCommand, Given};
use super::hold::Hold;
use super::registry::{Member, Phased};
use crate::error::{HandlerError, StoreError};
use crate::inbox::port::Proof;
use crate::observe::Noted;
use crate::operation::guarded::guarded;
use crate::operation::port::phases::{Driven, FIRST_POINT, NewIntent, NewOperation, PhaseTx, Phases};
use crate::operation::port::{Basis, Begun, Fenced, RunOutcome};
use crate::operation::rules::doubt::{Aftermath, Doubt};
use crate::operation::rules::flow::Stage;
use crate::operation::rules::{Code, Fingerprint};
use crate::operation::standing::mark_unknown_later;
use crate::operation::{Begin, BodyPermit, Reply};
use crate::time::since::Since;

pub(super) enum Opened {
    /// Another record or claim exists.
    Refused(Box<Begin>),
    /// The operation ended here, with a stored outcome or with nothing stored.
    Replied(Reply),
    /// The handler ended the transaction, and the record has its outcome: read it.
    Look,
    /// The engine answers with this code.
    Problem(Code),
    /// The first phase is committed, and this task drives the next phases.
    Driving(JoinHandle<Result<Ended, StoreError>>),
}

pub(super) struct Opening {
    pub(super) phased: Arc<Phased>,
    pub(super) stop: CancellationToken,
    pub(super) member: Arc<Member>,
    pub(super) command: AnyCommand,
    pub(super) bytes: Vec<u8>,
    pub(super) patience: Duration,
    /// The memory permit of the command; the driver keeps it.
    pub(super) permit: Arc<Option<BodyPermit>>,
}

enum Move {
    Advance(String, Stage, Option<(&'static str, NewIntent)>),
    Finish(Reply, RunOutcome),
    /// Nothing of the phase is stored; this is the answer.
    Forget(Reply),
}

enum Tried {
    /// Another record or claim exists.
    Refused,
    Ended(Opened),
    /// The phase is committed; the driver continues, with the effect that was intended.
    Begun(Driven, Context, Option<&'static str>),
    /// A transient error: nothing is stored, and the phase runs again (R27). Holds the result after
    /// the last attempt.
    Again(Opened),
}

impl Opening {
    pub(super) async fn run(self, begin: Box<Begin>) -> Result<Opened, StoreError> {
        if !self.phased.engine.reach().within(self.phased.is_ours()).await? {
            return Ok(Opened::Problem(Code::StoreUnavailable));
        }
        let flow = &self.member.flow;
        let command = self.phased.sealer.seal(begin.claim.operation_id, "command", &self.bytes)?;
        let (claim, name) = (begin.claim.clone(), flow.name.to_owned());
        let new = NewOperation { claim, flow: name, flow_version: flow.version, command };
        let mut tries = 0;
        let (driven, context, fresh, asked) = loop {
            let asked = Since::now();
            match self.try_once(&new, &begin).await {
                Ok(Tried::Begun(driven, context, fresh)) => break (driven, context, fresh, asked),
                Ok(Tried::Ended(opened)) => return Ok(opened),
                Ok(Tried::Refused) => return Ok(Opened::Refused(begin)),
                Ok(Tried::Again(_)) | Err(StoreError::Busy(_)) if tries < TRIES => tries += 1,
                Ok(Tried::Again(opened)) => return Ok(opened),
                Err(error) => return Err(error),
            }
            tokio::time::sleep(before_try(tries)).await;
        };
        let phased = Arc::clone(&self.phased);
        let hold = Hold::new(Arc::clone(&phased.store), driven.clone(), self.member.route().lease, asked);
        let fingerprint = begin.claim.fingerprint.clone();
        let ready = (self.member, context, self.command, fingerprint);
        let driver = Driver::new(self.phased, ready, hold, Came::First, fresh, self.stop);
        // From here on duplicates read the record of the operation.
        drop(begin);
        let permit = self.permit;
        Ok(Opened::Driving(phased.engine.spawn(async move {
            let ended = driver.drive().await;
            drop(permit);
            ended
        })))
    }

    async fn try_once(&self, new: &NewOperation, begin: &Begin) -> Result<Tried, StoreError> {
        let (phased, flow) = (&self.phased, &self.member.flow);
        let store = &phased.store;
        let begun = phased.engine.reach().within(store.begin_first(new, begin.basis(), self.patience)).await?;
        let mut tx = match begun {
            Begun::Claimed(tx) => tx,
            Begun::Existing(_) | Begun::Locked => return Ok(Tried::Refused),
        };
        begin.noted().for_each(|noted| self.note(begin, noted));
        let driven = tx.driven().clone();
        let context = Context::new(phased.deployment, driven.operation_id, begin.claim.identity.clone());
        let settled = Settlements::default();
        let given = Given { tx: tx.as_mut(), context: &context, command: &self.command, settled: &settled };
        let ended = guarded("the phase", self.member.route().timeout, flow.first.run(given)).await;
        let first = match ended {
            Ok(first) => first,
            Err(error) => {
                let tried = if error.is_transient() { Tried::Again } else { Tried::Ended };
                return self.undone(tx, (new, begin, &driven), tried(failed(&error))).await;
            }
        };
        let judged = match self.judge(&context, &begin.claim.fingerprint, first) {
            Ok(judged) => judged,
            // A mistake of its author, which no retry mends.
            Err(error) => {
                tracing::error!(flow = flow.name, %error, "a first phase ended impossibly: nothing happened");
                let failed = Tried::Ended(Opened::Problem(Code::OperationFailed));
                return self.undone(tx, (new, begin, &driven), failed).await;
            }
        };
        let (moved, then) = match judged {
            Move::Forget(reply) => {
                return self.undone(tx, (new, begin, &driven), Tried::Ended(Opened::Replied(reply))).await;
            }
            Move::Advance(to, stage, intent) => {
                let (fresh, intent) = intent.unzip();
                let moved = tx.advance(FIRST_POINT, &to, stage, intent.as_slice()).await?;
                (moved, Tried::Begun(driven.clone(), context, fresh))
            }
            Move::Finish(reply, outcome) => {
                // A rejection takes back the writes of the phase before it (pitfall 18).
                let is_rejected = matches!(outcome, RunOutcome::FailedReplayable { .. });
                let proof = if is_rejected { tx.undo_effects().await? } else { Proof::Same };
                let moved = if proof == Proof::Same {
                    tx.finish(FIRST_POINT, &outcome, &self.member.route().retention).await?
                } else {
                    (proof, Fenced::Done)
                };
                (moved, Tried::Ended(Opened::Replied(reply)))
            }
        };
        if moved != (Proof::Same, Fenced::Done) {
            let _ = tx.rollback().await;
            return self.ended_by_itself(new, begin, &driven, moved.0).await;
        }
        match tx.commit().await {
            Ok(()) => crate::outbox::hint::hint(),
            Err(StoreError::CommitUnknown(error)) => {
                tracing::warn!(operation = %driven.operation_id, %error, "connection lost during the COMMIT of a first phase; looking for the outcome");
                match Doubt::CommitLost.after(store.find_after_lost_commit(&begin.claim, begin.basis()).await) {
                    // The operation is stored, with an outcome or to be driven further.
                    Aftermath::Stored | Aftermath::MarkUnknown | Aftermath::Ended => {}
                    Aftermath::CommitUnknown | Aftermath::InsertUnknown => {
                        self.note(begin, Noted::CommitUnknown);
                        return Ok(Tried::Ended(Opened::Problem(Code::CommitUnknown)));
                    }
                }
            }
            Err(error) => return Err(error),
        }
        Ok(then)
    }

    /// Rolls back the phase, and returns `then` if its transaction was still the one that began.
    async fn undone(
        &self,
        tx: Box<dyn PhaseTx>,
        (new, begin, driven): (&NewOperation, &Begin, &Driven),
        then: Tried,
    ) -> Result<Tried, StoreError> {
        match take_back(tx).await? {
            Proof::Same => Ok(then),
            proof => self.ended_by_itself(new, begin, driven, proof).await,
        }
    }

    /// What follows this end. An error: the flow does not allow it, or its answer cannot be kept.
    fn judge(&self, context: &Context, fingerprint: &Fingerprint, first: First) -> Result<Move, StoreError> {
        let flow = &self.member.flow;
        let finish = |reply: Reply, failure| {
            let outcome = outcome(&self.member, &self.phased, context, fingerprint, &reply, failure)?;
            Ok::<_, StoreError>(Move::Finish(reply, outcome))
        };
        let unknown = |what: &str| {
            StoreError::Refused(format!(
                "the first phase of `{}` goes on at `{what}`, which its flow does not have",
                flow.name
            ))
        };
        Ok(match first {
            First::RecoveryPoint(point) if flow.local(point.0).is_some() => {
                Move::Advance(point.0.to_owned(), Stage::Local, None)
            }
            First::RecoveryPoint(point) => return Err(unknown(point.0)),
            First::Intent(Intent(prepared)) => {
                let effect = flow.effect(prepared.effect).ok_or_else(|| unknown(prepared.effect))?;
                let intent = new_intent(&self.phased, context, effect, &prepared)?;
                Move::Advance(effect.sent.clone(), Stage::Outstanding, Some((effect.name, intent)))
            }
            First::Response(reply) => finish(reply, None)?,
            First::Rejected { reply, code, binding: true } => finish(reply, Some(code))?,
            First::Rejected { reply, .. } | First::Retryable(reply) | First::DontStore(reply) => Move::Forget(reply),
        })
    }

    /// Handles a handler that ended the transaction of the first phase itself: its effects may be
    /// committed (O1).
    async fn ended_by_itself(
        &self,
        new: &NewOperation,
        begin: &Begin,
        driven: &Driven,
        proof: Proof,
    ) -> Result<Tried, StoreError> {
        let store = &self.phased.store;
        let nothing_ran_after = proof == Proof::Aborted;
        let aftermath = Doubt::TokenGone { nothing_ran_after }
            .after(store.find_after_lost_commit(&begin.claim, begin.basis()).await);
        tracing::error!(operation = %driven.operation_id, ?aftermath, "a first phase ended its transaction by itself");
        if matches!(aftermath, Aftermath::InsertUnknown | Aftermath::MarkUnknown | Aftermath::Ended) {
            self.note(begin, Noted::TransactionEnded);
        }
        match aftermath {
            Aftermath::Stored => return Ok(Tried::Ended(Opened::Look)),
            Aftermath::CommitUnknown => {
                self.note(begin, Noted::CommitUnknown);
                return Ok(Tried::Ended(Opened::Problem(Code::CommitUnknown)));
            }
            Aftermath::InsertUnknown => {
                if let Err(error) = stand(store.as_ref(), new, begin.basis(), self.patience).await {
                    tracing::error!(operation = %driven.operation_id, %error, "an operation that ended its transaction could not be made to stand");
                    let (store, new, ground) = (Arc::clone(store), new.clone(), begin.ground.clone());
                    let patience = self.patience;
                    mark_unknown_later(&self.phased.engine, begin, move || {
                        let (store, new, ground) = (Arc::clone(&store), new.clone(), ground.clone());
                        async move { stand(store.as_ref(), &new, ground.basis(), patience).await }
                    });
                }
            }
            Aftermath::MarkUnknown => {
                if let Err(error) = store.park(driven, FIRST_ENDED).await {
                    // Whoever takes it over after its lease parks it: it has no point to go on at.
                    tracing::error!(operation = %driven.operation_id, %error, "an operation that ended its transaction could not be parked yet");
                }
            }
            Aftermath::Ended => {}
        }
        Ok(Tried::Ended(Opened::Problem(Code::TransactionEnded)))
    }

    fn note(&self, begin: &Begin, what: Noted) {
        self.member.note(&begin.claim.identity, what);
    }
}

/// Stores an operation whose run left no row of its own (O1): parked, under its key, also if the
/// key was used before. If another run has claimed the key since, nothing changes.
async fn stand(store: &dyn Phases, new: &NewOperation, basis: Basis<'_>, patience: Duration) -> Result<(), StoreError> {
    let begun = store.begin_first(new, basis, patience).await?;
    let Some(mut tx) = begun.unless_overtaken(basis)? else { return Ok(()) };
    tx.park(FIRST_ENDED).await?;
    tx.commit().await
}

/// Logs that the first phase failed and nothing of it is stored, and returns the code to answer.
fn failed(error: &HandlerError) -> Opened {
    tracing::warn!(%error, "a first phase failed: nothing happened");
    Opened::Problem(if error.is_transient() { Code::StoreUnavailable } else { Code::OperationFailed })
}
