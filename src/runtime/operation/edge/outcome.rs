//! Writes how an edge run ended, until the lease ends (O12).
//!
//! Promises: what the store refuses whole is written without its body, so that it is not unknown;
//! evidence is never fenced, decisions are (O8). A run that was given up and ends after all says so
//! by evidence, and takes the record over to write its outcome where nobody runs it again: UNKNOWN,
//! free to be retried, or gone.

use std::time::{Duration, Instant};

use super::{Edge, EdgeAnswer};
use crate::error::StoreError;
use crate::observe::Noted;
use crate::policy::operation::classify::Settle;
use crate::policy::operation::record::Tombstone;
use crate::policy::operation::{Code, Mode, Record, State};
use crate::runtime::operation::codec::{Kept, error_code};
use crate::runtime::operation::edge::heart::Heart;
use crate::store::{AnswerBody, Basis, Claimed, Fenced, KeyClaim, Look, NewEvidence, Outcome, Owned, Sealed};

/// Between two tries to write an outcome.
const AGAIN: Duration = Duration::from_millis(100);
/// The same, after many.
const AGAIN_MAX: Duration = Duration::from_secs(2);

impl Edge {
    /// Writes it, and tells the answer as soon as it is known whether it will be remembered.
    pub(super) async fn remember<T>(
        &self,
        settle: Settle,
        kept: Option<&Kept>,
        heart: &Heart,
        answer: EdgeAnswer<T>,
        tell: impl FnOnce(EdgeAnswer<T>),
    ) {
        let budget = self.front.endpoint().route().completion_budget;
        let mut write = self.outcome(settle, kept);
        let reach = self.front.engine().reach();
        let first = tokio::time::timeout(budget, reach.within(self.write(&self.owned, write.as_ref()))).await;
        let until = Instant::now() + self.front.endpoint().route().lease;
        match first {
            Ok(Ok(Fenced::Done)) => {
                self.begin.has_ended();
                return tell(answer);
            }
            Ok(Ok(Fenced::LostOwnership)) if self.late(write.as_ref()).await => {
                self.begin.has_ended();
                return tell(answer);
            }
            Ok(Ok(Fenced::LostOwnership)) => {
                self.begin.has_ended();
                return tell(EdgeAnswer::Answered(self.front.problem(Code::ResultNotStored)));
            }
            Ok(Err(error)) => {
                shorten(&mut write, &error);
                tracing::warn!(operation = %self.front.endpoint().operation(), key = self.front.short_key(), %error, "an outcome could not be written");
            }
            Err(_) => {
                tracing::warn!(operation = %self.front.endpoint().operation(), key = self.front.short_key(), "writing an outcome took too long");
            }
        }
        self.front.note(Noted::StoreError("complete"));
        tell(EdgeAnswer::Answered(self.front.problem(Code::ResultNotStored)));
        let mut pause = AGAIN;
        // The heart beats on: without a bound of its own, what can never be written would be tried
        // for ever.
        while heart.is_ours() && Instant::now() < until {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(AGAIN_MAX);
            match self.write(&self.owned, write.as_ref()).await {
                Ok(Fenced::Done) => return,
                Ok(Fenced::LostOwnership) => {
                    self.late(write.as_ref()).await;
                    return;
                }
                Err(error) => {
                    shorten(&mut write, &error);
                    tracing::debug!(%error, "an outcome could not be written");
                }
            }
        }
        tracing::error!(operation = %self.front.endpoint().operation(), key = self.front.short_key(), ?settle, "the lease ended before the outcome could be written: it becomes unknown");
    }

    /// What is written; none: the record is taken away.
    fn outcome(&self, settle: Settle, kept: Option<&Kept>) -> Option<Outcome> {
        let (engine, endpoint, claim) = (self.front.engine(), self.front.endpoint(), &self.begin.claim);
        let Settle::Finish(state) = settle else { return None };
        let code = match kept {
            Some(Kept::Whole(reply)) => error_code(endpoint.endpoint(), reply),
            _ => None,
        };
        let answer = kept.map(|kept| engine.encode(endpoint, &claim.identity, &claim.fingerprint, kept));
        Some(match (state, answer) {
            (State::FailedRetryable, _) => Outcome::FailedRetryable { error_code: code },
            (State::Completed, Some(Ok(answer))) => Outcome::Completed(answer),
            (State::FailedReplayable, Some(Ok(answer))) => Outcome::FailedReplayable { answer, error_code: code },
            (_, Some(Err(error))) => {
                tracing::error!(operation = %endpoint.operation(), %error, "an answer could not be sealed: its outcome is unknown to those who ask again");
                Outcome::Unknown
            }
            _ => Outcome::Unknown,
        })
    }

    async fn write(&self, owned: &Owned, outcome: Option<&Outcome>) -> Result<Fenced, StoreError> {
        let store = self.front.engine().store();
        match outcome {
            Some(outcome) => store.finish(owned, outcome, &self.front.endpoint().route().retention).await,
            None => store.release(owned).await,
        }
    }

    /// What became of this run, for an operator: a fact, whoever owns the record (O8).
    async fn observe(&self, outcome: Option<&Outcome>) {
        let (verdict, status) = match outcome {
            Some(Outcome::Completed(answer)) => ("success", Some(answer.status)),
            Some(Outcome::FailedReplayable { answer, .. }) => ("failure", Some(answer.status)),
            Some(Outcome::FailedRetryable { .. }) | None => ("not-sent", None),
            Some(Outcome::Unknown) => ("indefinite", None),
        };
        let evidence = NewEvidence {
            operation_id: self.owned.operation_id,
            effect: String::new(),
            epoch: self.owned.epoch,
            send: 0,
            kind: "run".to_owned(),
            verdict: verdict.to_owned(),
            status,
            bytes: Sealed::default(),
        };
        if let Err(error) = self.front.engine().store().observe_run(&evidence).await {
            tracing::warn!(operation = %self.front.endpoint().operation(), key = self.front.short_key(), verdict, status, %error, "the outcome of a run that lost its lease could not be kept as evidence");
        }
    }

    /// The record is not ours any more: whether the outcome stands in it all the same.
    ///
    /// The evidence is written before the look, which waits for whoever changes the record: who
    /// frees the key locks its record before he reads the evidence, so he sees it, or is seen here.
    /// What nobody runs by now is taken over to write the outcome, by a claim that is fenced as any
    /// other. Who dies before that leaves the evidence, by which a retry is answered.
    async fn late(&self, outcome: Option<&Outcome>) -> bool {
        let store = self.front.engine().store();
        let look = store.find(&self.owned.identity).await;
        // An earlier try that was not answered has hit.
        let ours = |record: &Record| record.operation_id == self.owned.operation_id;
        if let Ok(Look { record: Some(record), .. }) = &look
            && ours(record)
            && record.epoch == self.owned.epoch
            && record.state != State::InProgress
        {
            return true;
        }
        self.observe(outcome).await;
        let record = match self.settled().await {
            Ok(look) => look.record,
            Err(error) => {
                tracing::warn!(%error, "a lost claim could not be looked at");
                return false;
            }
        };
        let ended = matches!(outcome, Some(Outcome::Completed(_) | Outcome::FailedReplayable { .. }));
        let basis = match &record {
            None if !ended => return outcome.is_none(),
            None => Basis::New,
            Some(record) if !ours(record) || record.mode != Mode::Edge => return self.anothers(record),
            Some(record) if record.state == State::UnknownRequiresRecovery => Basis::TakeOver(record),
            Some(record) if record.state == State::FailedRetryable && ended => Basis::Late(record),
            Some(record) => return self.anothers(record),
        };
        let claim = KeyClaim {
            operation_id: self.owned.operation_id,
            owner: KeyClaim::new_owner(),
            ..self.begin.claim.clone()
        };
        match store.claim(&claim, basis).await {
            Ok(Claimed::Owned(owned)) => matches!(self.write(&owned, outcome).await, Ok(Fenced::Done)),
            _ => false,
        }
    }

    /// The record after whoever changes it; who holds it for long is asked again a few times.
    async fn settled(&self) -> Result<Look, StoreError> {
        let mut pause = AGAIN;
        loop {
            match self.front.engine().store().find_settled(&self.owned.identity).await {
                Err(error) if error.is_transient() && pause < AGAIN_MAX => {
                    tokio::time::sleep(pause).await;
                    pause *= 2;
                }
                looked => return looked,
            }
        }
    }

    /// Says that the outcome stands in evidence only.
    fn anothers(&self, record: &Record) -> bool {
        tracing::warn!(operation = %self.front.endpoint().operation(), key = self.front.short_key(), state = %record.state, "a run ended whose key is another's by now: its outcome is evidence, and is not replayed");
        false
    }
}

/// What the store refuses, and not for a while: that it ended is remembered all the same, without
/// what may be to blame.
fn shorten(write: &mut Option<Outcome>, error: &StoreError) {
    if error.is_transient() {
        return;
    }
    match write {
        Some(Outcome::Completed(answer)) => answer.body = AnswerBody::Tombstone(Tombstone::Withheld),
        Some(Outcome::FailedReplayable { answer, error_code }) => {
            answer.body = AnswerBody::Tombstone(Tombstone::Withheld);
            *error_code = None;
        }
        Some(Outcome::FailedRetryable { error_code }) => *error_code = None,
        Some(Outcome::Unknown) | None => {}
    }
}
