//! Writes the outcome of an edge run, with retries for one lease (O12).
//!
//! Promises: if the store refuses an outcome because of its content, the outcome is written without
//! its body, so that it does not become unknown. Evidence is never fenced; decisions are (O8). A
//! run that lost its lease and ends later writes evidence. It also takes the record over to write
//! its outcome, if nobody runs the record again: the record is UNKNOWN, free to be retried, or
//! gone.

use std::time::{Duration, Instant};

use tokio_util::sync::DropGuard;

use super::{Edge, EdgeAnswer};
use crate::error::StoreError;
use crate::observe::Noted;
use crate::operation::codec::{Kept, error_code};
use crate::operation::port::evidence::{NewEvidence, Sealed};
use crate::operation::port::{AnswerBody, Basis, Fenced, KeyClaim, Look, Owned, RunOutcome};
use crate::operation::reconcile::patiently;
use crate::operation::rules::classify::Settle;
use crate::operation::rules::record::Tombstone;
use crate::operation::rules::{Code, Mode, Record, State};

const AGAIN: Duration = Duration::from_millis(100);
const AGAIN_MAX: Duration = Duration::from_secs(2);

struct End {
    /// Whether it had no effect. Its outcome can be UNKNOWN all the same, if it repeats a run of
    /// unknown outcome.
    did_nothing: bool,
    /// The outcome to write; `None`: the record is deleted.
    outcome: Option<RunOutcome>,
}

impl End {
    fn is_success(&self) -> bool {
        matches!(self.outcome, Some(RunOutcome::Completed(_)))
    }
}

impl Edge {
    /// Writes the outcome, and gives the answer. If the first try fails, or takes longer than the
    /// completion budget, the caller is told RESULT_NOT_STORED, and the write is tried for one
    /// lease more. The lease is renewed until the end of these tries.
    pub(super) async fn remember<T>(
        &self,
        settle: Settle,
        kept: Option<&Kept>,
        heart: DropGuard,
        answer: EdgeAnswer<T>,
        tell: impl FnOnce(EdgeAnswer<T>),
    ) {
        let budget = self.front.endpoint.route().completion_budget;
        let mut end = self.end(settle, kept);
        let reach = self.front.engine.reach();
        let first = tokio::time::timeout(budget, reach.within(self.write(&self.owned, &end))).await;
        let until = Instant::now() + self.front.endpoint.route().lease;
        match first {
            Ok(Ok(Fenced::Done)) => {
                drop(heart);
                self.begin.entry.leave();
                return tell(answer);
            }
            Ok(Ok(Fenced::LostOwnership)) => {
                let is_stored = self.late(&end).await;
                self.begin.entry.leave();
                let unstored = EdgeAnswer::Answered(self.front.problem(Code::ResultNotStored));
                return tell(if is_stored { answer } else { unstored });
            }
            Ok(Err(error)) => {
                shorten(&mut end.outcome, &error);
                tracing::warn!(operation = %self.front.endpoint.operation(), key = self.front.short_key(), %error, "an outcome could not be written");
            }
            Err(_) => {
                tracing::warn!(operation = %self.front.endpoint.operation(), key = self.front.short_key(), "writing an outcome took too long");
            }
        }
        self.front.note(Noted::StoreError("complete"));
        tell(EdgeAnswer::Answered(self.front.problem(Code::ResultNotStored)));
        let mut pause = AGAIN;
        // The lease is still being renewed. Without a limit, this loop would retry a write that can
        // never succeed for ever.
        while Instant::now() < until {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(AGAIN_MAX);
            match self.write(&self.owned, &end).await {
                Ok(Fenced::Done) => return,
                Ok(Fenced::LostOwnership) => {
                    self.late(&end).await;
                    return;
                }
                Err(error) => {
                    shorten(&mut end.outcome, &error);
                    tracing::debug!(%error, "an outcome could not be written");
                }
            }
        }
        tracing::error!(operation = %self.front.endpoint.operation(), key = self.front.short_key(), ?settle, "the outcome could not be written within a lease: in mode `edge` it becomes unknown, in mode `bridged` the key runs again");
    }

    fn end(&self, settle: Settle, kept: Option<&Kept>) -> End {
        let did_nothing = matches!(settle, Settle::Release | Settle::Finish(State::FailedRetryable));
        let outcome = match settle {
            // The run after this one must have the same operation id.
            _ if did_nothing && self.begin.basis().repeats() => Some(RunOutcome::Unknown),
            Settle::Finish(state) => Some(self.outcome(state, kept)),
            _ => None,
        };
        End { did_nothing, outcome }
    }

    fn outcome(&self, state: State, kept: Option<&Kept>) -> RunOutcome {
        let (engine, endpoint, claim) = (&self.front.engine, &self.front.endpoint, &self.begin.claim);
        let code = match kept {
            Some(Kept::Whole(reply)) => error_code(endpoint.endpoint(), reply),
            _ => None,
        };
        let answer = kept.map(|kept| engine.encode(endpoint, &claim.identity, &claim.fingerprint, kept));
        match (state, answer) {
            (State::FailedRetryable, _) => RunOutcome::FailedRetryable { error_code: code },
            (State::Completed, Some(Ok(answer))) => RunOutcome::Completed(answer),
            (State::FailedReplayable, Some(Ok(answer))) => RunOutcome::FailedReplayable { answer, error_code: code },
            (_, Some(Err(error))) => {
                tracing::error!(operation = %endpoint.operation(), %error, "an answer could not be sealed: its outcome is unknown to those who ask again");
                RunOutcome::Unknown
            }
            _ => RunOutcome::Unknown,
        }
    }

    async fn write(&self, owned: &Owned, end: &End) -> Result<Fenced, StoreError> {
        let store = self.front.engine.store();
        match &end.outcome {
            Some(outcome) => store.finish(owned, outcome, &self.front.endpoint.route().retention).await,
            None => store.release(owned).await,
        }
    }

    /// Stores how this run ended as evidence for an operator, whoever owns the record (O8).
    async fn observe(&self, end: &End) {
        let (verdict, status) = match &end.outcome {
            _ if end.did_nothing => ("not-sent", None),
            Some(RunOutcome::Completed(answer)) => ("success", Some(answer.status)),
            Some(RunOutcome::FailedReplayable { answer, .. }) => ("failure", Some(answer.status)),
            Some(RunOutcome::FailedRetryable { .. } | RunOutcome::Unknown) | None => ("indefinite", None),
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
        if let Err(error) = self.front.engine.store().observe_run(&evidence).await {
            tracing::warn!(operation = %self.front.endpoint.operation(), key = self.front.short_key(), verdict, status, %error, "the outcome of a run that lost its lease could not be kept as evidence");
        }
    }

    /// The lease was lost. Returns whether the record holds this run's outcome in the end.
    ///
    /// The evidence is written before the decisive read of the record, which waits for a process
    /// that changes the record. A process that frees the key locks the record before it reads the
    /// evidence. So either that process sees the evidence, or this run sees the freed record. If
    /// nobody runs the record, this run takes it over with a fenced claim and writes the outcome.
    /// If this process dies before that, a retry under a record that is free to be retried is
    /// answered from the evidence.
    async fn late(&self, end: &End) -> bool {
        let store = self.front.engine.store();
        let look = store.find(&self.owned.identity).await;
        // An earlier write whose answer was lost has succeeded.
        let ours = |record: &Record| record.operation_id == self.owned.operation_id;
        if let Ok(Look { record: Some(record), .. }) = &look
            && ours(record)
            && record.epoch == self.owned.epoch
            && record.state != State::InProgress
        {
            return true;
        }
        // An earlier release whose answer was lost has succeeded. Nothing would delete the evidence
        // of an operation without a record.
        if end.did_nothing && end.outcome.is_none() && matches!(look, Ok(Look { record: None, .. })) {
            return true;
        }
        self.observe(end).await;
        // Once no transaction is changing it.
        let record = match patiently(|| store.find_settled(&self.owned.identity)).await {
            Ok(look) => look.record,
            Err(error) => {
                tracing::warn!(%error, "a lost claim could not be looked at");
                return false;
            }
        };
        let basis = match &record {
            None if end.did_nothing => return end.outcome.is_none(),
            None => Basis::New,
            Some(record) if !ours(record) || record.mode != Mode::Edge => return self.anothers(record),
            Some(record) if record.state == State::UnknownRequiresRecovery => {
                // A later run left it so. That this one failed or did nothing says nothing of that.
                if record.attempts != self.owned.attempts && !end.is_success() {
                    return self.anothers(record);
                }
                Basis::Reconcile(record)
            }
            Some(record) if record.state == State::FailedRetryable && !end.did_nothing => Basis::Late(record),
            Some(record) => return self.anothers(record),
        };
        let claim = KeyClaim {
            operation_id: self.owned.operation_id,
            owner: KeyClaim::new_owner(),
            ..self.begin.claim.clone()
        };
        match store.claim(&claim, basis).await {
            // Nobody else ends this claim: without the write it would become unknown.
            Ok(Some(owned)) => matches!(patiently(|| self.write(&owned, end)).await, Ok(Fenced::Done)),
            _ => false,
        }
    }

    /// Logs that the outcome is not in the record: it is evidence, if that could be stored.
    fn anothers(&self, record: &Record) -> bool {
        tracing::warn!(operation = %self.front.endpoint.operation(), key = self.front.short_key(), state = %record.state, "a run lost its lease, and its outcome is not written into the record: it is kept as evidence, and is not replayed");
        false
    }
}

/// After an error that may be about the content, removes the parts of the outcome that the store
/// may have refused. The fact that the run ended is then still stored. [`StoreError::Refused`] is
/// about the server, such as a Redis that became a replica: the next try may reach another one.
fn shorten(write: &mut Option<RunOutcome>, error: &StoreError) {
    if error.is_transient() || matches!(error, StoreError::Refused(_)) {
        return;
    }
    match write {
        Some(RunOutcome::Completed(answer)) => answer.body = AnswerBody::Tombstone(Tombstone::Withheld),
        Some(RunOutcome::FailedReplayable { answer, error_code }) => {
            answer.body = AnswerBody::Tombstone(Tombstone::Withheld);
            *error_code = None;
        }
        Some(RunOutcome::FailedRetryable { error_code }) => *error_code = None,
        Some(RunOutcome::Unknown) | None => {}
    }
}
