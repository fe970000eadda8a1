//! The answers of the front: problems with `Retry-After`, and replayed outcomes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use uuid::Uuid;

use super::{Front, KeyGiven};
use crate::observe::Noted;
use crate::operation::codec::SealError;
use crate::operation::guarded::guarded;
use crate::operation::reply::{Answered, Problem, Reply};
use crate::operation::rules::pace::{retry_after, while_running};
use crate::operation::rules::record::Resource;
use crate::operation::rules::route::WhileRunning;
use crate::operation::rules::{Code, Decision, Record, State};
use crate::text::panic::panic_text;
use crate::time::db_time::DbTime;

/// `Retry-After` for a tenant that has too many bytes stored: space becomes free only as answers
/// expire.
const FULL: Duration = Duration::from_secs(30);

impl Front {
    pub(crate) fn problem(&self, code: Code) -> Answered {
        Answered::Problem(Problem::new(code))
    }

    /// The answer to a request whose operation is not finished yet, `IDEMPOTENCY_RECOVERY_PENDING`.
    /// It has the location of the operation if the endpoint has an `operation_path`. Its status is
    /// 202 if a client can ask for the operation there, otherwise 409.
    pub(crate) fn pending(&self, operation_id: Uuid) -> Answered {
        let mut problem = Problem::new(Code::RecoveryPending);
        problem.operation_id = Some(operation_id);
        problem.location = self.endpoint.location_of(operation_id);
        if self.endpoint.can_be_asked_for() {
            problem.status = 202;
        }
        Answered::Problem(problem)
    }

    /// The answer to a request that stored its operation, or drove it. If the store does not answer
    /// now, or another process has the operation, what it did still stands.
    pub(in crate::operation) fn of_stored(&self, operation_id: Uuid, answered: Answered) -> Answered {
        match answered {
            Answered::Problem(Problem { code: Code::InProgress | Code::StoreUnavailable, .. }) => {
                self.pending(operation_id)
            }
            answered => answered,
        }
    }

    /// The answer of a run that has ended in this process, for its own request.
    pub(crate) fn first(&self, begin_ran: Duration, reply: Reply) -> Answered {
        self.engine.has_run(self.endpoint.operation(), begin_ran);
        Answered::Reply { reply, replayed: false }
    }

    /// The answer to a duplicate while the first request runs in this process, and to a request
    /// whose own timeout has passed (O10).
    pub(crate) fn still_running(&self, ran: Duration) -> Answered {
        self.note(Noted::InProgress);
        let mut problem = Problem::new(Code::InProgress);
        problem.retry_after = Some(self.comes_again(self.endpoint.route().lease, ran));
        Answered::Problem(problem)
    }

    /// The answer when every place for this operation is taken (`admission`). Nothing was begun.
    pub(super) fn no_room(&self) -> Answered {
        tracing::warn!(operation = %self.endpoint.operation(), key = self.short_key(), "no room: every place for this operation is taken");
        self.note(Noted::StoreError("admit"));
        let detail = "every place for this operation is taken: nothing was done";
        Answered::Problem(Problem { detail: Some(detail.to_owned()), ..Problem::new(Code::StoreUnavailable) })
    }

    /// The answer where the route has keys off, although the operation claims every request.
    /// Registration refuses such a route; this is the second check.
    pub(in crate::operation) fn no_use_of_keys(&self) -> Answered {
        tracing::error!(operation = %self.endpoint.operation(), mode = %self.endpoint.route().mode,
            "the operation claims every request, and its route has `requirement = off`: register it with `optional`");
        self.problem(Code::StoreUnavailable)
    }

    pub(super) async fn answer(&self, decision: Decision, seen: Option<(&Record, DbTime)>) -> Answered {
        match (decision, seen) {
            (Decision::Replay, Some((record, _))) => self.replay(record).await,
            (Decision::ReplayReference, Some((record, _))) => self.reference(record),
            (Decision::Reconstruct, Some((record, _))) => self.rebuild(record).await,
            (Decision::NotRetained, Some((record, _))) => self.not_retained(record),
            (decision, seen) => self.refusal(decision, seen),
        }
    }

    async fn replay(&self, record: &Record) -> Answered {
        let found = match &self.body {
            Some(body) => Ok(Some(body.clone())),
            None => self.engine.reach().within(self.engine.store().body(record)).await,
        };
        let body = match found {
            Ok(Some(body)) => body,
            // The lifetime of the body ended between the two reads.
            Ok(None) => return self.not_retained(record),
            Err(error) => return self.store_failed("replay", &error),
        };
        // A step to a newer version of the answer is code of the application, and may panic.
        match catch_unwind(AssertUnwindSafe(|| self.engine.decode(&self.endpoint, record, &body))) {
            Err(panic) => {
                tracing::error!(operation = %self.endpoint.operation(), key = self.short_key(), panic = panic_text(panic.as_ref()), "a stored answer could not be brought to its newest version");
                self.note(Noted::StoreError("replay"));
                self.problem(Code::StoreUnavailable)
            }
            Ok(Ok(reply)) => {
                self.note(Noted::Replayed(if record.state == State::Completed { "completed" } else { "failure" }));
                Answered::Reply { reply, replayed: true }
            }
            Ok(Err(error)) => {
                tracing::error!(operation = %self.endpoint.operation(), key = self.short_key(), %error, "a stored answer cannot be read");
                self.note(Noted::StoreError("replay"));
                // Another process may have the secret or the feature. Broken bytes stay broken.
                let elsewhere = matches!(error, SealError::UnknownKid(_) | SealError::Feature(_));
                if elsewhere { self.problem(Code::FingerprintVersionUnknown) } else { self.not_retained(record) }
            }
        }
    }

    fn reference(&self, record: &Record) -> Answered {
        match resource_of(record) {
            Some(Resource { location: Some(location), .. }) => {
                self.note(Noted::Replayed("reference"));
                Answered::Reply { reply: Reply::new(303).header("location", location.as_str()), replayed: true }
            }
            _ => self.not_retained(record),
        }
    }

    async fn rebuild(&self, record: &Record) -> Answered {
        let Some(rebuild) = self.endpoint.endpoint().rebuild.clone() else { return self.not_retained(record) };
        // The function must have no effect, so it may end with its request. The closure itself may
        // panic, not only its future.
        let work = async move { rebuild(record.clone()).await };
        match guarded("the function", self.endpoint.route().timeout, work).await {
            Ok(reply) => {
                self.note(Noted::Replayed("reconstructed"));
                Answered::Reply { reply, replayed: true }
            }
            Err(error) => {
                tracing::error!(operation = %self.endpoint.operation(), key = self.short_key(), %error, "an answer could not be built anew");
                self.problem(Code::StoreUnavailable)
            }
        }
    }

    fn not_retained(&self, record: &Record) -> Answered {
        self.note(Noted::Replayed("tombstone"));
        let mut problem = Problem::new(Code::ResultNotRetained);
        let how = if record.state == State::Completed { "succeeded" } else { "failed, and is not run again" };
        problem.detail = Some(format!("the operation {how}"));
        problem.operation_id = Some(record.operation_id);
        problem.resource = resource_of(record).cloned();
        problem.location = problem.resource.as_ref().and_then(|resource| resource.location.clone());
        Answered::Problem(problem)
    }

    pub(super) fn refusal(&self, decision: Decision, seen: Option<(&Record, DbTime)>) -> Answered {
        let Some((code, key_state)) = decision.problem() else {
            // This decision has no answer here: fail closed (M60).
            return self.problem(Code::StoreUnavailable);
        };
        self.note_refusal(decision, code);
        let is_over = seen.is_some_and(|(record, now)| record.state_at(now) == State::Expired);
        if is_over && matches!(decision, Decision::Mismatch | Decision::PrincipalMismatch) {
            self.note(Noted::Expired("rejected"));
        }
        let mut problem = Problem { key_state, ..Problem::new(code) };
        let route = self.endpoint.route();
        match decision {
            Decision::Mismatch | Decision::PrincipalMismatch => problem.status = route.mismatch.status(),
            Decision::KeyInvalid => problem.detail = self.what_is_wrong(),
            Decision::FingerprintTooOld => {
                problem.detail =
                    Some("the record is too old to be compared with this request: its outcome is not said".to_owned());
            }
            Decision::KeyFromTheFuture => {
                problem.detail =
                    Some("the time in the key is ahead of the server's: check the clock of the client".to_owned());
            }
            Decision::QuotaExceeded if self.over_bytes => {
                problem.detail = Some(
                    "the quota of stored bytes is used up: each answer is deleted when its lifetime ends".to_owned(),
                );
                problem.retry_after = Some(retry_after(FULL, fastrand::f64()));
            }
            Decision::WrongRegion => problem.home_region = self.home.clone(),
            Decision::InProgress(how) => {
                let ran = seen.map_or(Duration::ZERO, |(record, now)| record.created_at.until(now));
                let left = seen.map_or(Duration::from_secs(1), |(record, now)| record.lease_left(now));
                problem.retry_after = Some(self.comes_again(left, ran));
                if let (WhileRunning::Accepted, Some((record, _))) = (how, seen) {
                    problem.status = 202;
                    problem.operation_id = Some(record.operation_id);
                    problem.location = self.endpoint.location_of(record.operation_id);
                }
            }
            Decision::RecoveryPending | Decision::Reconcile | Decision::Recover => {
                if let Some((record, _)) = seen {
                    return self.pending(record.operation_id);
                }
            }
            Decision::UnknownOutcome => {
                problem.operation_id = seen.map(|(record, _)| record.operation_id);
                problem.location = problem.operation_id.and_then(|id| self.endpoint.location_of(id));
            }
            _ => {}
        }
        Answered::Problem(problem)
    }

    fn note_refusal(&self, decision: Decision, code: Code) {
        self.note(match decision {
            Decision::Mismatch => Noted::Mismatch,
            Decision::PrincipalMismatch => Noted::PrincipalMismatch,
            Decision::InProgress(_) => Noted::InProgress,
            Decision::Expired => Noted::Expired("rejected"),
            Decision::RecoveryPending | Decision::Reconcile | Decision::Recover | Decision::UnknownOutcome => {
                Noted::Recovering
            }
            _ => Noted::Rejected(code.as_str()),
        });
        if decision == Decision::WrongRecord {
            tracing::error!(operation = %self.endpoint.operation(), key = self.short_key(), "the record of this hash belongs to another key: nothing was changed");
        }
    }

    /// Says what is wrong with the key. The text never repeats the key.
    fn what_is_wrong(&self) -> Option<String> {
        match &self.asking.key {
            KeyGiven::Malformed(error) => Some(error.to_string()),
            KeyGiven::Given(_) => Some("this operation needs a key with a time in it".to_owned()),
            KeyGiven::Missing => None,
        }
    }

    fn comes_again(&self, left: Duration, ran: Duration) -> u32 {
        let usual = self.engine.usual(self.endpoint.operation()).unwrap_or(ran + Duration::from_secs(1));
        retry_after(while_running(left, ran, usual), fastrand::f64())
    }
}

fn resource_of(record: &Record) -> Option<&Resource> {
    record.answer.as_ref()?.resource.as_ref()
}
