//! Edge operations: a claim of its own around any handler (O10 to O12).
//!
//! Promises:
//!
//! * The task that calls the handler commits the claim first. So a client that disconnects
//!   meanwhile leaves no claim without a task that drives it, and a claim whose answer was lost is
//!   released (O11). The handler runs in its own task, and its lease is extended while it runs. The
//!   handler is not stopped when the client disconnects, when the engine's timeout answers 409, or
//!   when the lease is lost.
//! * The answer is given only after the outcome is stored. If that fails, or the store goes away
//!   while the handler runs, the request gets 503 `IDEMPOTENCY_RESULT_NOT_STORED`. The outcome is
//!   written later, with retries for one lease after its first try.
//! * How the run ended is judged only by what is certain
//!   ([`classify`](crate::operation::rules::classify)).
//!
//! This mode protects the edge only: if the process dies between the handler's commit and the
//! outcome, the record becomes UNKNOWN. A handler that ends with [`Guard::commit`] has both in one
//! commit (mode `bridged`, O2).
//!
//! Not here: requests and responses (`http`).

mod guard;
mod heart;
mod outcome;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::codec::Kept;
use super::endpoint::Registered;
use super::engine::Engine;
use super::front::{Asking, Begin, Front, Turn};
use super::reply::{Answered, Problem};
use crate::error::{StoreError, classify};
use crate::observe::Noted;
use crate::operation::port::{Fenced, Keys, Owned};
use crate::operation::rules::classify::{Run, Settle, Untagged};
use crate::operation::rules::pace::after_attempts;
use crate::operation::rules::{Code, Mode, Outcome, State};
use crate::text::panic::panic_text;
use crate::time::pace::Pace;

#[cfg(feature = "http")]
pub(crate) use guard::Progress;
pub use guard::{Guard, GuardError};

/// How a handler ended, as its transport saw it.
#[derive(Debug)]
pub struct Ended<T> {
    /// What the handler said about its outcome; `None`: the status decides.
    pub tag: Option<Outcome<()>>,
    /// The part of the answer that can be stored.
    pub kept: Kept,
    /// The answer in the form of the transport, for the first request.
    pub answer: T,
}

impl<T> Ended<T> {
    fn is_success(&self) -> bool {
        match &self.tag {
            Some(tag) => matches!(tag, Outcome::Completed(())),
            None => matches!(self.kept.status(), 200..=399),
        }
    }
}

/// What a request gets.
#[derive(Debug)]
pub enum EdgeAnswer<T> {
    /// The handler ran for this request.
    Ran {
        /// The answer that the handler gave.
        answer: T,
        /// After how many seconds to retry a failure after which the same key may run again (O29).
        retry_after: Option<u32>,
    },
    /// An answer of the engine, or a replayed outcome.
    Answered(Answered),
}

impl<S: Keys> Engine<S> {
    /// Runs a handler of mode `edge` or `bridged` once per key. `run` gets a [`Guard`] if the
    /// request has a key. A request without a key, on a route that does not require one, runs
    /// unprotected.
    ///
    /// # Cancel safety
    /// Dropped before the claim: nothing happened. Dropped later: the handler continues in its own
    /// task.
    pub async fn execute_edge<T, R, W>(&self, endpoint: &Registered, asking: Asking, mut run: R) -> EdgeAnswer<T>
    where
        T: Send + 'static,
        R: FnOnce(Option<Guard<S>>) -> W + Send + 'static,
        W: Future<Output = Ended<T>> + Send + 'static,
    {
        let mut front = self.front(endpoint, asking);
        let timeout = endpoint.route().timeout;
        loop {
            let begin = match front.turn().await {
                Turn::Begin(begin) => begin,
                Turn::Unkeyed => return EdgeAnswer::Ran { answer: run(None).await.answer, retry_after: None },
                Turn::Recover(record) => return EdgeAnswer::Answered(front.pending(record.operation_id)),
                Turn::Answer(answered) => return EdgeAnswer::Answered(answered),
            };
            let running = front.under_way();
            let (tell, told) = oneshot::channel();
            // The task begins before the claim: a claim that no task drives would become unknown
            // (O11).
            self.spawn(claim_and_drive(self.clone(), front, begin, run, tell));
            let told = tokio::select! {
                biased;
                told = tokio::time::timeout(timeout, told) => told,
                // The run continues. The next request with this key finds its outcome.
                () = self.reach().lost() => {
                    running.note(Noted::StoreError("complete"));
                    return EdgeAnswer::Answered(running.problem(Code::ResultNotStored));
                }
            };
            match told {
                Ok(Ok(Step::Answer(answer))) => return answer,
                Ok(Ok(Step::Refused(refused))) => (front, run) = *refused,
                Ok(Err(_)) => return EdgeAnswer::Answered(Answered::Problem(Problem::new(Code::ResultNotStored))),
                Err(_) => return EdgeAnswer::Answered(running.still_running(timeout)),
            }
        }
    }
}

/// What the task of a run sends to the request that waits for it.
enum Step<T, R> {
    /// Another run has the key: the request looks at the record again.
    Refused(Box<(Front, R)>),
    /// The run has ended, and the request gets this.
    Answer(EdgeAnswer<T>),
}

async fn claim_and_drive<S, T, R, W>(
    guards: Engine<S>,
    mut front: Front,
    begin: Box<Begin>,
    run: R,
    tell: oneshot::Sender<Step<T, R>>,
) where
    S: Keys,
    R: FnOnce(Option<Guard<S>>) -> W,
    W: Future<Output = Ended<T>>,
{
    // A bridged handler holds a connection, as a transactional one does, so it needs a place.
    // Whether a handler of mode `edge` holds one is not known.
    let place = match front.endpoint.route().mode {
        Mode::Bridged => match front.place().await {
            Ok(place) => Some(place),
            Err(answered) => return drop(tell.send(Step::Answer(EdgeAnswer::Answered(*answered)))),
        },
        _ => None,
    };
    let engine = &front.engine;
    match engine.reach().within(engine.store().claim(&begin.claim, begin.basis())).await {
        Ok(Some(owned)) => {
            front.forget_command();
            begin.noted().for_each(|noted| front.note(noted));
            let tell = |answer| drop(tell.send(Step::Answer(answer)));
            Edge { front, begin, owned }.drive(guards, run, tell).await;
            drop(place);
        }
        // The next turn judges the record that exists now; `Front` limits the number of turns.
        Ok(None) => {
            drop(begin);
            front.look_again();
            drop(tell.send(Step::Refused(Box::new((front, run)))));
        }
        Err(error) => {
            // A retry is judged by the record in the store, once the store answers again.
            begin.entry.leave();
            let _ = tell.send(Step::Answer(EdgeAnswer::Answered(front.store_failed("claim", &error))));
            // The statement was taken back, or the database takes no writes: the claim was
            // certainly not made.
            let is_unmade = match &error {
                StoreError::Busy(_) => true,
                StoreError::Unavailable(error) => classify::is_read_only(error),
                _ => false,
            };
            if is_unmade {
                return;
            }
            // The search below may last a lease. It needs neither a place nor the request's body.
            drop((place, run));
            front.forget_command();
            release_lost(&front, &begin).await;
        }
    }
}

/// Releases a claim whose answer was lost. The handler was not called, so the claim has no effect.
/// A claim that repeats a run of unknown outcome is not deleted: the record becomes UNKNOWN again.
///
/// "There is no such claim" does not end the search: the claim may still be queued in the server,
/// commit later, and then become unknown. So the release is tried until it has removed a claim or a
/// lease has passed, and while the engine drains only until the store has answered. A retry of the
/// client that claims the key meanwhile is not affected, because its claim has another token.
async fn release_lost(front: &Front, begin: &Begin) {
    let until = Instant::now() + begin.claim.lease;
    let mut pace = Pace::new(Duration::from_millis(50), Duration::from_secs(5));
    let mut answered = false;
    while Instant::now() < until {
        match front.engine.store().take_back(&begin.claim, begin.basis()).await {
            Ok(Fenced::Done) => return,
            Ok(Fenced::LostOwnership) => answered = true,
            Err(error) => tracing::debug!(%error, "a claim whose answer was lost could not be released"),
        }
        if answered && front.engine.is_draining() {
            return;
        }
        tokio::time::sleep(pace.next_wait()).await;
    }
    if !answered {
        tracing::warn!(operation = %front.endpoint.operation(), key = front.short_key(), "a claim whose answer was lost could not be released: it may stand until its lease is over, and in mode `edge` become unknown");
    }
}

struct Edge {
    front: Front,
    begin: Box<Begin>,
    owned: Owned,
}

impl Edge {
    async fn drive<S, T, R, W>(self, guards: Engine<S>, run: R, tell: impl FnOnce(EdgeAnswer<T>))
    where
        S: Keys,
        R: FnOnce(Option<Guard<S>>) -> W,
        W: Future<Output = Ended<T>>,
    {
        let (engine, endpoint) = (self.front.engine.clone(), self.front.endpoint.clone());
        let route = endpoint.route();
        let stop = CancellationToken::new();
        let heart = heart::renew(&self.front, self.owned.clone(), stop.clone());
        let guard = Guard::new(guards, endpoint.clone(), &self.begin.claim, self.owned.clone(), stop);
        let progress = guard.progress().clone();
        // The closure itself may panic, not only its future.
        let called = AssertUnwindSafe(async move { run(Some(guard)).await }).catch_unwind().await;
        engine.has_run(endpoint.operation(), self.begin.entry.ran());
        let reached = Run::of(route, progress.reached());
        let (settle, ended) = match called {
            Ok(ended) => {
                let settle = match &ended.tag {
                    Some(tag) => tag.settle(reached),
                    None => reached.settle(Untagged::Status(ended.kept.status())),
                };
                (settle, Some(ended))
            }
            Err(panic) => {
                tracing::error!(operation = %endpoint.operation(), key = self.front.short_key(), panic = panic_text(panic.as_ref()), "a handler panicked");
                (reached.settle(Untagged::Failed), None)
            }
        };
        if matches!(settle, Settle::Stored | Settle::Leave) {
            self.begin.entry.leave();
        }
        match settle {
            Settle::Stored => tell(EdgeAnswer::Answered(match progress.stored() {
                Some(reply) => Answered::Reply { reply, replayed: false },
                None => self.front.problem(Code::CommitUnknown),
            })),
            Settle::Leave => {
                self.front.note(Noted::CommitUnknown);
                tell(EdgeAnswer::Answered(self.front.problem(Code::CommitUnknown)));
            }
            // A bridged run that reports a success, but whose guard has committed nothing.
            settle @ Settle::Finish(State::UnknownRequiresRecovery)
                if route.mode == Mode::Bridged && ended.as_ref().is_some_and(Ended::is_success) =>
            {
                tracing::error!(operation = %endpoint.operation(), key = self.front.short_key(),
                    "a handler of mode `bridged` answered a success that its guard did not commit: its outcome is unknown. End it with `Guard::commit`");
                self.front.note(Noted::TransactionEnded);
                let answer = EdgeAnswer::Answered(self.front.problem(Code::TransactionEnded));
                self.remember(settle, None, heart, answer, tell).await;
            }
            settle @ (Settle::Finish(_) | Settle::Release) => {
                let (kept, answer) = ended.map_or((None, None), |ended| (Some(ended.kept), Some(ended.answer)));
                let answer = answer.map_or_else(
                    || EdgeAnswer::Answered(self.front.problem(panicked(settle))),
                    |answer| EdgeAnswer::Ran { answer, retry_after: self.retry_after(settle) },
                );
                self.remember(settle, kept.as_ref(), heart, answer, tell).await;
            }
        }
    }

    fn retry_after(&self, settle: Settle) -> Option<u32> {
        let again = settle == Settle::Finish(State::FailedRetryable);
        again.then(|| u32::try_from(after_attempts(self.owned.attempts).as_secs()).unwrap_or(1))
    }
}

fn panicked(settle: Settle) -> Code {
    match settle {
        Settle::Finish(State::UnknownRequiresRecovery) => Code::OutcomeUnknown,
        _ => Code::OperationFailed,
    }
}
