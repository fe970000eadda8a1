//! Edge operations: a claim of its own around any handler (O10 to O12).
//!
//! Promises:
//!
//! * The claim is committed before the handler is called, by the task that calls it: a client that
//!   goes away meanwhile leaves no claim that nobody drives, and one whose answer was lost is
//!   released (O11). The handler runs in a task of its own, its lease extended while it lives.
//!   Neither a client that goes away, nor the engine's own timeout (409), nor a lost lease ends it.
//! * What cannot be remembered is not said: while the outcome is not written the answer is 503
//!   `IDEMPOTENCY_RESULT_NOT_STORED`, and the write is tried until the lease ends, also after the
//!   answer.
//! * How it ended is judged by what is certain ([`classify`](crate::policy::operation::classify)).
//!
//! This is edge protection: a process that dies between the handler's commit and the outcome leaves
//! UNKNOWN. A handler that ends with [`Guard::commit`] has both in one commit (mode `bridged`, O2).
//!
//! Not here: requests and responses (`http`).

mod guard;
mod heart;
mod outcome;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use futures::FutureExt;
use tokio::sync::oneshot;

use self::heart::Heart;
use super::codec::Kept;
use super::endpoint::Registered;
use super::engine::Engine;
use super::front::{Asking, Begin, Front, Turn};
use super::reply::{Answered, Problem};
use crate::observe::Noted;
use crate::policy::operation::classify::{Run, Settle, Untagged};
use crate::policy::operation::pace::after_attempts;
use crate::policy::operation::{Code, Mode, Outcome, State};
use crate::runtime::handler::panic_text;
use crate::store::{Claimed, Fenced, Keys, Owned};

pub use guard::{Guard, GuardError, Progress};

/// Between two tries to release a claim that was lost sight of.
const RELEASE_AGAIN: Duration = Duration::from_millis(50);
/// The same, after many.
const RELEASE_AGAIN_MAX: Duration = Duration::from_secs(5);

/// How a handler ended, as its transport saw it.
#[derive(Debug)]
pub struct Ended<T> {
    /// What the handler said of it; none: judged by the status.
    pub tag: Option<Outcome<()>>,
    /// What there is to keep.
    pub kept: Kept,
    /// The answer in the transport's own form, for the first request.
    pub answer: T,
}

impl<T> Ended<T> {
    /// Whether the handler says that it did its work.
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
        /// When to come again, where the same key may run again (O29).
        retry_after: Option<u32>,
    },
    /// The engine's answer, or an outcome shown again.
    Answered(Answered),
}

impl<S: Keys> Engine<S> {
    /// Runs a handler of mode `edge` or `bridged` once per key. `run` is given a guard where the
    /// request carries a key; without one, on a route that does not require it, the handler runs
    /// unprotected.
    ///
    /// # Cancel safety
    /// Dropped before the claim: nothing happened. Later: the handler goes on in its own task.
    pub async fn execute_edge<T, R, W>(&self, endpoint: &Registered, asking: Asking, run: R) -> EdgeAnswer<T>
    where
        T: Send + 'static,
        R: FnOnce(Option<Guard<S>>) -> W + Send + 'static,
        W: Future<Output = Ended<T>> + Send + 'static,
    {
        let mut front = self.front(endpoint, asking);
        let mut run = run;
        let timeout = endpoint.route().timeout;
        loop {
            let begin = match front.turn().await {
                Turn::Begin(begin) => begin,
                Turn::Unkeyed => return EdgeAnswer::Ran { answer: run(None).await.answer, retry_after: None },
                Turn::Recover(record) => return EdgeAnswer::Answered(front.pending(&record)),
                Turn::Answer(answered) => return EdgeAnswer::Answered(answered),
            };
            let running = front.under_way();
            let (tell, told) = oneshot::channel();
            // In a task of its own from the claim on: a claim that nobody drives would be unknown
            // for ever (O11).
            self.spawn(claim_and_drive(self.clone(), front, begin, run, tell));
            let told = tokio::select! {
                biased;
                told = tokio::time::timeout(timeout, told) => told,
                // What has begun goes on, and its outcome is found by the next request.
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

/// What a run's task tells the request that waits for it.
enum Step<T, R> {
    /// The key is another's: look again.
    Refused(Box<(Front, R)>),
    /// The run has ended, and the request gets this.
    Answer(EdgeAnswer<T>),
}

/// Claims, and drives what is ours then.
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
    // A bridged handler holds a connection, as a transactional one does; of another one nobody knows.
    let place = match front.endpoint().route().mode {
        Mode::Bridged => match front.engine().place(front.endpoint().operation()).await {
            Some(place) => Some(place),
            None => return drop(tell.send(Step::Answer(EdgeAnswer::Answered(front.no_room())))),
        },
        _ => None,
    };
    let engine = front.engine();
    match engine.reach().within(engine.store().claim(&begin.claim, begin.basis())).await {
        Ok(Claimed::Owned(owned)) => {
            front.note(Noted::Acquired);
            let tell = |answer| drop(tell.send(Step::Answer(answer)));
            Edge { front, begin, owned }.drive(guards, run, tell).await;
            drop(place);
        }
        // Judged by what stands there now; what vanished is looked for again, a bounded number of
        // times.
        Ok(Claimed::Existing(_) | Claimed::Vanished) => {
            drop(begin);
            front.look_again();
            drop(tell.send(Step::Refused(Box::new((front, run)))));
        }
        Err(error) => {
            // Whoever asks again is judged by what stands in the store, if that is there again.
            begin.has_ended();
            let _ = tell.send(Step::Answer(EdgeAnswer::Answered(front.store_failed("claim", &error))));
            release_lost(&front, &begin).await;
        }
    }
}

/// Takes away a claim whose answer was lost, wherever it may have arrived: the handler was not
/// called.
///
/// The first answer that it is not there ends nothing: a claim that stands still in the server may
/// come behind it, and would be unknown for ever. So it is tried until one was taken away, or a
/// lease has passed. A retry that is faster than the claim itself is not touched, for the token is
/// another.
async fn release_lost(front: &Front, begin: &Begin) {
    let until = Instant::now() + begin.claim.lease;
    let (mut pause, mut answered) = (RELEASE_AGAIN, false);
    while Instant::now() < until {
        match front.engine().store().take_back(&begin.claim, begin.basis()).await {
            Ok(Fenced::Done) => return,
            Ok(Fenced::LostOwnership) => answered = true,
            Err(error) => tracing::debug!(%error, "a claim that was lost sight of could not be released"),
        }
        if answered && front.engine().is_draining() {
            return;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RELEASE_AGAIN_MAX);
    }
    if !answered {
        tracing::warn!(operation = %front.endpoint().operation(), key = front.short_key(), "a claim that was lost sight of could not be released: it may become unknown");
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
        let (engine, endpoint) = (self.front.engine().clone(), self.front.endpoint().clone());
        let route = endpoint.route();
        let heart = Heart::start(&self.front, self.owned.clone());
        let guard = Guard::new(guards, endpoint.clone(), &self.begin.claim, self.owned.clone());
        let progress = guard.progress().clone();
        // The closure may panic as well as its future.
        let called = AssertUnwindSafe(async move { run(Some(guard)).await }).catch_unwind().await;
        engine.has_run(endpoint.operation(), self.begin.ran());
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
            self.begin.has_ended();
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
            // A bridged run that says it succeeded, and whose guard has committed nothing.
            settle @ Settle::Finish(State::UnknownRequiresRecovery)
                if route.mode == Mode::Bridged && ended.as_ref().is_some_and(Ended::is_success) =>
            {
                tracing::error!(operation = %endpoint.operation(), key = self.front.short_key(),
                    "a handler of mode `bridged` answered a success that its guard did not commit: its outcome is unknown. End it with `Guard::commit`");
                self.front.note(Noted::TransactionEnded);
                let answer = EdgeAnswer::Answered(self.front.problem(Code::TransactionEnded));
                self.remember(settle, None, &heart, answer, tell).await;
            }
            settle @ (Settle::Finish(_) | Settle::Release) => {
                let (kept, answer) = ended.map_or((None, None), |ended| (Some(ended.kept), Some(ended.answer)));
                let answer = answer.map_or_else(
                    || EdgeAnswer::Answered(self.front.problem(panicked(settle))),
                    |answer| EdgeAnswer::Ran { answer, retry_after: self.retry_after(settle) },
                );
                self.remember(settle, kept.as_ref(), &heart, answer, tell).await;
            }
        }
        heart.stop();
    }

    fn retry_after(&self, settle: Settle) -> Option<u32> {
        let again = settle == Settle::Finish(State::FailedRetryable);
        again.then(|| u32::try_from(after_attempts(self.owned.attempts).as_secs()).unwrap_or(1))
    }
}

/// What is answered where the handler panicked.
fn panicked(settle: Settle) -> Code {
    match settle {
        Settle::Finish(State::UnknownRequiresRecovery) => Code::OutcomeUnknown,
        _ => Code::OperationFailed,
    }
}
