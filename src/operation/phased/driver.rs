//! Drives one operation from its current point to its outcome, or until it cannot continue now
//! (M53, M80, O5 to O9).
//!
//! The driver reads the state of the operation, does one step, and reads again. Between steps it
//! remembers only facts of its own drive: the send that it has just begun, and its calls in vain.
//! So a driver that takes over an operation does the same as the driver before it.
//!
//! Promises:
//!
//! * No transaction is open across a call (M52). Every send is recorded and committed before it
//!   starts (O5).
//! * The transaction that settles an effect decides from the evidence that it reads itself (O8).
//! * A lost lease ends the drive after the call in flight, whose answer is stored as evidence.
//! * After an intent, an error or a panic of a phase makes the operation UNKNOWN and due again. A
//!   panic of an adapter ends the driver, as the death of its process would. An outcome that cannot
//!   be found out goes to an operator with a reason. Nothing unknown becomes a failure (O9, O13).
//!
//! Its folder has the calls ([`call`]), what follows a phase that did not advance its operation
//! ([`rerun`]), and the release of an operation ([`leaving`]).

mod call;
mod leaving;
mod rerun;

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::context::Context;
use super::effect::{Compensation, Declared, Intent, Prepared, Settlements};
use super::ends::{Local, Settled};
use super::evidence;
use super::flow::{AnyCommand, AnyFlow, Erased, Given};
use super::hold::Hold;
use super::registry::{Member, Phased};
use crate::error::{HandlerError, StoreError};
use crate::inbox::port::Proof;
use crate::observe::Noted;
use crate::operation::guarded::guarded;
use crate::operation::port::phases::{Driven, NewIntent, PhaseTx, StoredOperation};
use crate::operation::port::{Fenced, RunOutcome};
use crate::operation::rules::Fingerprint;
use crate::operation::rules::flow::Stage;
use crate::operation::rules::provider::{self, Gap, Sends, Step, Strategy, Verdict};
use crate::operation::{Kept, Reply};
use crate::time::pace::sleep_unless;
use crate::time::retry;
use crate::time::since::Since;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asks {
    /// The strategy of the effect allows nothing else.
    Only,
    /// To find the effect before it is sent again.
    First,
}

/// The reason to park an operation whose handler ended the transaction of the first phase.
pub(super) const FIRST_ENDED: &str = "first-phase-ended-its-transaction";

/// How often a phase, or another step, runs again after transient errors of the database (R27).
pub(super) const TRIES: u32 = 5;

pub(super) fn before_try(number: u32) -> Duration {
    Duration::from_millis(fastrand::u64(1..=10) << number.min(TRIES))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The outcome is known and stored.
    Known,
    Later,
    /// An operator must decide what follows.
    Parked,
    /// Another process drives it.
    Lost,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Came {
    /// It has just committed the first phase.
    First,
    /// The operation was due: a drive in vain counts as an attempt.
    Due,
    /// A request took the operation over before it was due. This drive counts no attempt and does
    /// not change the due time, so clients that ask often neither use up the attempts nor delay the
    /// operation.
    Early,
}

/// The end of a drive, and the answer if this driver wrote the outcome.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) end: End,
    pub(super) reply: Option<Reply>,
}

#[derive(Debug)]
pub(super) struct Driver {
    phased: Arc<Phased>,
    member: Arc<Member>,
    context: Context,
    command: AnyCommand,
    driven: Driven,
    hold: Hold,
    fingerprint: Fingerprint,
    stop: CancellationToken,
    /// The effect whose first send this driver committed with its intent and has not made yet.
    fresh: Option<&'static str>,
    came: Came,
    /// Whether a provider answered, may have taken a send, or can never answer. Otherwise it is
    /// away, and the drive counts no attempt (G10: an outage uses up no attempts).
    reached: bool,
    vain: u32,
    /// Whether a call could not even be made, for a reason on our side.
    unmade: bool,
    /// How often work ran again after transient errors since the last commit.
    again: u32,
    proof: bool,
    /// Taken before the last read, so it is never later than the database time of that read.
    read_at: Since,
    /// Whether the provider was just queried before a resend.
    asked: bool,
    reply: Option<Reply>,
}

/// What a driver needs of its operation. The fingerprint is part of the associated data of the
/// sealed answer.
pub(super) type Ready = (Arc<Member>, Context, AnyCommand, Fingerprint);

enum Next {
    Again,
    End(End),
}

/// A phase that ran: its transaction and how it ended, or what follows if it did not end.
type Ran<E> = Result<(Box<dyn PhaseTx>, E), Next>;

impl Driver {
    pub(super) fn new(
        phased: Arc<Phased>,
        (member, context, command, fingerprint): Ready,
        hold: Hold,
        came: Came,
        fresh: Option<&'static str>,
        stop: CancellationToken,
    ) -> Self {
        Self {
            phased,
            member,
            context,
            command,
            driven: hold.driven().clone(),
            read_at: Since::now(),
            hold,
            fingerprint,
            stop,
            fresh,
            came,
            reached: false,
            vain: 0,
            unmade: false,
            again: 0,
            proof: false,
            asked: false,
            reply: None,
        }
    }

    /// Drives until the operation ends, waits or is lost. An error of the database ends the drive:
    /// committed steps stay, and the operation is released if the database allows it.
    pub(super) async fn drive(mut self) -> Result<Ended, StoreError> {
        let end = match self.drive_on().await {
            Err(error) => self.broken_off(error).await,
            end => end,
        };
        if self.proof && matches!(end, Ok(End::Lost) | Err(_)) {
            self.speak_up().await;
        }
        let end = end?;
        let reply = self.reply.take().filter(|_| end == End::Known);
        Ok(Ended { end, reply })
    }

    async fn drive_on(&mut self) -> Result<End, StoreError> {
        loop {
            match self.turn().await {
                Ok(Next::Again) => {}
                Ok(Next::End(end)) => return Ok(end),
                // The transaction was rolled back: the same step runs again (R27).
                Err(StoreError::Busy(error)) if self.once_more().await => {
                    tracing::debug!(operation = %self.driven.operation_id, %error, "the database asks to try again");
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Counts a transient failure and waits a moment. Returns whether the step runs again in this
    /// drive.
    async fn once_more(&mut self) -> bool {
        self.again += 1;
        if self.again <= TRIES {
            tokio::time::sleep(before_try(self.again)).await;
        }
        self.again <= TRIES
    }

    async fn turn(&mut self) -> Result<Next, StoreError> {
        if self.hold.is_lost() {
            return Ok(Next::End(End::Lost));
        }
        self.read_at = Since::now();
        let Some(stored) = self.phased.store.operation(self.driven.operation_id).await? else {
            return Ok(Next::End(End::Lost));
        };
        let taken_over = stored.epoch != self.driven.epoch;
        if taken_over {
            self.look_for_conflict(&stored)?;
            // The stored answer is not the one that this driver wrote.
            self.reply = None;
        }
        if matches!(stored.stage, Stage::Succeeded | Stage::Failed) {
            return Ok(Next::End(End::Known));
        }
        if taken_over {
            return Ok(Next::End(End::Lost));
        }
        if stored.parked.is_some() {
            return Ok(Next::End(End::Parked));
        }
        if self.stop.is_cancelled() && self.fresh.is_none() {
            return Ok(Next::End(self.release(Duration::ZERO, false).await?));
        }
        self.step(&stored).await
    }

    async fn step(&mut self, stored: &StoredOperation) -> Result<Next, StoreError> {
        let member = Arc::clone(&self.member);
        let flow = &member.flow;
        match stored.stage {
            // A handler ended the transaction of the first phase itself: its effects may be
            // committed.
            Stage::Received => {
                let next = self.park_for_operator(FIRST_ENDED).await?;
                self.note(Noted::TransactionEnded);
                Ok(next)
            }
            Stage::Local => self.local(flow, stored).await,
            Stage::Settled => self.settled(flow, stored).await,
            Stage::Outstanding | Stage::Unknown => match flow.effect_at(&stored.point) {
                Some(effect) => self.effect(effect, stored).await,
                // UNKNOWN at a point after the phase of its effect: all effects are settled, and
                // the phase runs.
                None if stored.intents.iter().all(|intent| intent.outcome.is_some()) => {
                    match flow.local(&stored.point) {
                        // No effect was intended: the operation was parked at a local phase.
                        Some(_) if stored.intents.is_empty() => self.local(flow, stored).await,
                        _ => self.settled(flow, stored).await,
                    }
                }
                None => self.park_for_operator("no-such-effect").await,
            },
            Stage::Succeeded | Stage::Failed => Ok(Next::End(End::Known)),
        }
    }

    /// Runs the code of a later phase in a transaction of its own.
    async fn run<E>(
        &mut self,
        code: &dyn Erased<E>,
        stored: &StoredOperation,
        settled: &Settlements,
    ) -> Result<Ran<E>, StoreError> {
        let mut tx = match self.begin(stored).await? {
            Ok(tx) => tx,
            Err(next) => return Ok(Err(next)),
        };
        let given = Given { tx: tx.as_mut(), context: &self.context, command: &self.command, settled };
        let ended = guarded("the phase", self.member.route().timeout, code.run(given)).await;
        Ok(match ended {
            Ok(end) => Ok((tx, end)),
            Err(error) => Err(self.failed(tx, stored, &error).await?),
        })
    }

    async fn local(&mut self, flow: &AnyFlow, stored: &StoredOperation) -> Result<Next, StoreError> {
        let Some(code) = flow.local(&stored.point) else { return self.park_for_operator("no-such-point").await };
        let (tx, end) = match self.run(code, stored, &Settlements::default()).await? {
            Ok(ended) => ended,
            Err(next) => return Ok(next),
        };
        match end {
            Local::RecoveryPoint(point) if flow.local(point.0).is_some() => {
                self.advance(tx, &stored.point, point.0, Stage::Local).await
            }
            Local::RecoveryPoint(point) => self.impossible(tx, point.0).await,
            Local::Intent(Intent(prepared)) => self.intend(tx, flow, &stored.point, prepared).await,
            Local::Response(reply) => self.finish(tx, &stored.point, &reply, None).await,
            Local::Rejected { reply, code } => self.finish(tx, &stored.point, &reply, Some(code)).await,
            Local::Retryable => self.failed(tx, stored, &HandlerError::retryable("the phase asked to run again")).await,
        }
    }

    async fn settled(&mut self, flow: &AnyFlow, stored: &StoredOperation) -> Result<Next, StoreError> {
        let Some(code) = flow.settled(&stored.point) else { return self.park_for_operator("no-such-point").await };
        if let Some(unknown) = stored.intents.iter().find(|one| flow.effect(&one.intent.effect).is_none()) {
            tracing::error!(flow = flow.name, effect = %unknown.intent.effect, "an operation has an effect that its flow does not have");
            return self.park_for_operator("no-such-effect").await;
        }
        let settlements = self.settlements(flow, stored)?;
        let (tx, end) = match self.run(code, stored, &settlements).await? {
            Ok(ended) => ended,
            Err(next) => return Ok(next),
        };
        match end {
            Settled::RecoveryPoint(point) if flow.settled(point.0).is_some() => {
                self.advance(tx, &stored.point, point.0, Stage::Settled).await
            }
            Settled::RecoveryPoint(point) => self.impossible(tx, point.0).await,
            Settled::Intent(Intent(prepared)) | Settled::Compensate(Compensation(prepared)) => {
                self.intend(tx, flow, &stored.point, prepared).await
            }
            Settled::Response(reply) => self.finish(tx, &stored.point, &reply, None).await,
            Settled::Failure { proof: _, reply, code } => match flow.standing(&settlements) {
                None => self.finish(tx, &stored.point, &reply, Some(code)).await,
                Some(effect) => {
                    tx.rollback().await?;
                    tracing::error!(
                        flow = flow.name,
                        effect,
                        "a phase says that an operation failed whose effect stands"
                    );
                    self.park_for_operator("failure-with-a-standing-effect").await
                }
            },
        }
    }

    async fn effect(&mut self, effect: &Declared, stored: &StoredOperation) -> Result<Next, StoreError> {
        let Some(intent) = stored.intents.iter().find(|intent| intent.intent.effect == effect.name) else {
            return self.park_for_operator("no-such-intent").await;
        };
        if intent.intent.adapter != effect.provider.name() || intent.intent.adapter_version > effect.provider.version()
        {
            tracing::warn!(effect = effect.name, adapter = %intent.intent.adapter, "an intent of an adapter that is not here");
            return self.release_with_backoff(stored.attempts).await;
        }
        let sends = Sends { first_sent_at: Some(intent.first_sent_at), begun: intent.sends };
        if self.fresh.take().is_some_and(|name| name == effect.name) && intent.sends == 1 {
            return self.send(effect, stored, intent, 1, None).await;
        }
        let seen = evidence::evidence(&self.phased.sealer, &stored.evidence, effect.name)?;
        let step =
            effect.strategy.next(sends, &seen, stored.now).within(stored.attempts, self.phased.settings.attempts_max);
        match step {
            Step::Settle(_) => self.settle(effect, sends, &stored.point).await,
            // The means to find out the outcome were fixed with the intent (O6). With another
            // strategy, only proof settles the effect.
            _ if intent.intent.strategy != effect.strategy_name() => {
                tracing::error!(operation = %self.driven.operation_id, effect = effect.name, intended = %intent.intent.strategy,
                    declared = effect.strategy_name(), "an effect was intended with another strategy");
                self.park_unless_proven(effect, intent, "another-strategy").await
            }
            // The call cannot be made in this process, and waiting does not change that: the
            // attempt counts, and after the last one the operation is parked.
            Step::Send if self.is_spent() && self.unmade => {
                if self.came == Came::Due && stored.attempts.saturating_add(1) >= self.phased.settings.attempts_max {
                    return self.park_unless_proven(effect, intent, "cannot-be-sent").await;
                }
                Ok(Next::End(self.release(self.pause(stored.attempts), true).await?))
            }
            // Nothing was sent, so nothing is unknown and no attempt counts (G10). The longer the
            // effect has waited, the longer is the pause.
            Step::Send if self.is_spent() => {
                let first = self.phased.settings.backoff_first.as_millis().max(1);
                let doubled = (intent.first_sent_at.until(stored.now).as_millis() / first).max(1).ilog2();
                self.release_with_backoff(stored.attempts.max(doubled)).await
            }
            // The evidence proves nothing.
            Step::Resend | Step::Query if self.is_spent() => {
                Ok(Next::End(self.release_unknown_outcome(self.pause(stored.attempts), self.reached).await?))
            }
            Step::Send | Step::Resend | Step::Query if !self.catch_breath().await => Ok(Next::Again),
            Step::Send => self.send_again(effect, stored, intent, None).await,
            Step::Resend => {
                // An effect that the query finds needs no second send. Also, a provider may have
                // forgotten a key before its time.
                if matches!(effect.strategy, Strategy::KeyAndQuery(_)) && !self.asked {
                    return self.query(effect, stored, intent, Asks::First).await;
                }
                self.asked = false;
                self.send_again(effect, stored, intent, effect.strategy.window()).await
            }
            Step::Query => self.query(effect, stored, intent, Asks::Only).await,
            Step::Wait { until } => self.wait(stored, stored.now.until(until)).await,
            Step::Operator(gap) => {
                tracing::error!(operation = %self.driven.operation_id, effect = effect.name, ?gap, "an operation needs an operator");
                if gap == Gap::Mismatch {
                    self.note(Noted::Contradiction);
                }
                self.park_unless_proven(effect, intent, gap.reason()).await
            }
        }
    }

    /// Whether this drive has made as many calls in vain as it may.
    fn is_spent(&self) -> bool {
        self.vain >= self.phased.settings.calls_per_drive
    }

    /// Settles an effect in the transaction that reads its evidence.
    async fn settle(&mut self, effect: &Declared, sends: Sends, point: &str) -> Result<Next, StoreError> {
        let mut tx = self.phased.store.begin_phase(&self.driven).await?;
        let seen = evidence::evidence(&self.phased.sealer, &tx.evidence().await?, effect.name)?;
        let Some(settled) = seen.settled(sends) else {
            // New evidence has arrived: decide again.
            tx.rollback().await?;
            return Ok(Next::Again);
        };
        tx.settle(effect.name, settled);
        self.advance(tx, point, &effect.settled, Stage::Settled).await
    }

    fn settlements(&self, flow: &AnyFlow, stored: &StoredOperation) -> Result<Settlements, StoreError> {
        let mut settlements = Settlements::default();
        for intent in &stored.intents {
            let (Some(effect), Some(settled)) = (flow.effect(&intent.intent.effect), intent.settled()) else {
                continue;
            };
            let rows = evidence::rows(&self.phased.sealer, &stored.evidence, effect.name)?;
            let saw = rows.into_iter().rev().find(|row| settles(row.proof.verdict, settled)).map(|row| row.saw);
            settlements.add(effect.name, effect.settlement(settled), saw.unwrap_or_default());
        }
        Ok(settlements)
    }

    async fn intend(
        &mut self,
        mut tx: Box<dyn PhaseTx>,
        flow: &AnyFlow,
        from: &str,
        prepared: Prepared,
    ) -> Result<Next, StoreError> {
        let Some(effect) = flow.effect(prepared.effect) else { return self.impossible(tx, prepared.effect).await };
        let intent = new_intent(&self.phased, &self.context, effect, &prepared)?;
        self.fresh = Some(effect.name);
        let moved = tx.advance(from, &effect.sent, Stage::Outstanding, &[intent]).await?;
        self.commit(tx, moved).await
    }

    async fn advance(
        &mut self,
        mut tx: Box<dyn PhaseTx>,
        from: &str,
        to: &str,
        stage: Stage,
    ) -> Result<Next, StoreError> {
        let moved = tx.advance(from, to, stage, &[]).await?;
        self.commit(tx, moved).await
    }

    async fn finish(
        &mut self,
        mut tx: Box<dyn PhaseTx>,
        from: &str,
        reply: &Reply,
        failure: Option<Option<String>>,
    ) -> Result<Next, StoreError> {
        let outcome = outcome(&self.member, &self.phased, &self.context, &self.fingerprint, reply, failure)?;
        let moved = tx.finish(from, &outcome, &self.member.route().retention).await?;
        let next = self.commit(tx, moved).await?;
        // Shown only if the next read finds the outcome.
        self.reply = Some(reply.clone());
        Ok(next)
    }

    async fn commit(&mut self, tx: Box<dyn PhaseTx>, moved: (Proof, Fenced)) -> Result<Next, StoreError> {
        match moved {
            (Proof::Same, Fenced::Done) => {}
            (Proof::Same, Fenced::LostOwnership) => {
                tx.rollback().await?;
                return Ok(Next::End(End::Lost));
            }
            (proof, _) => return self.gone(tx, proof).await,
        }
        match tx.commit().await {
            Ok(()) => {
                self.again = 0;
                crate::outbox::hint::hint();
            }
            // The next read shows whether the commit took effect.
            Err(error @ StoreError::CommitUnknown(_)) => {
                tracing::warn!(operation = %self.driven.operation_id, %error, "connection lost during the COMMIT of a phase; looking for the outcome");
                self.note(Noted::CommitUnknown);
            }
            Err(error) => return Err(error),
        }
        Ok(Next::Again)
    }

    async fn wait(&mut self, stored: &StoredOperation, time: Duration) -> Result<Next, StoreError> {
        if time <= self.phased.settings.wait_max {
            sleep_unless(&self.stop, time).await;
            return Ok(Next::Again);
        }
        tracing::debug!(operation = %stored.operation_id, ?time, "a provider asked for a pause");
        Ok(Next::End(self.release(time, false).await?))
    }

    /// Pauses before a further call of this drive: not before the first call, then longer each
    /// time. Returns false if the stop came meanwhile: no further call begins.
    async fn catch_breath(&self) -> bool {
        if self.vain == 0 {
            return true;
        }
        let time = retry::pause(Duration::from_millis(50), Duration::from_secs(1), self.vain, fastrand::f64());
        sleep_unless(&self.stop, time).await
    }

    fn note(&self, what: Noted) {
        self.member.note(self.context.identity(), what);
    }
}

fn settles(verdict: Verdict, settled: provider::Settled) -> bool {
    match settled {
        provider::Settled::Succeeded => verdict == Verdict::Succeeded,
        provider::Settled::Failed => matches!(verdict, Verdict::Failed | Verdict::Refused),
    }
}

/// Rolls back all writes of a phase. Returns whether its transaction was still the one that began.
pub(super) async fn take_back(mut tx: Box<dyn PhaseTx>) -> Result<Proof, StoreError> {
    let proof = tx.undo_effects().await;
    // If the connection does not answer, it is closed, and the server rolls back.
    let _ = tx.rollback().await;
    proof
}

pub(super) fn new_intent(
    phased: &Phased,
    context: &Context,
    effect: &Declared,
    prepared: &Prepared,
) -> Result<NewIntent, StoreError> {
    let what = format!("request:{}", effect.name);
    Ok(NewIntent {
        effect: effect.name.to_owned(),
        strategy: effect.strategy_name().to_owned(),
        provider_key: prepared.key.clone(),
        request: phased.sealer.seal(context.operation_id(), &what, &prepared.bytes)?,
        adapter: effect.provider.name().to_owned(),
        adapter_version: effect.provider.version(),
        undoes: effect.undoes.map(str::to_owned),
    })
}

/// Builds the outcome to store; `failure` holds the error code of a failure.
pub(super) fn outcome(
    member: &Member,
    phased: &Phased,
    context: &Context,
    fingerprint: &Fingerprint,
    reply: &Reply,
    failure: Option<Option<String>>,
) -> Result<RunOutcome, StoreError> {
    let kept = Kept::Whole(reply.clone());
    let answer = phased.engine.encode(&member.endpoint, context.identity(), fingerprint, &kept);
    let answer = answer.map_err(|error| StoreError::Refused(format!("an answer cannot be kept: {error}")))?;
    Ok(match failure {
        None => RunOutcome::Completed(answer),
        Some(error_code) => RunOutcome::FailedReplayable { answer, error_code },
    })
}
