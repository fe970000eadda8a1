//! Transactional operations: claim, effects, messages and the stored answer in one commit (O1, O15,
//! O29, M50).
//!
//! Promises:
//!
//! * The handler runs in its own task: when a client disconnects, its request is dropped, not the
//!   transaction (pitfall 2).
//! * Whatever the handler returns, nothing follows from it until it is proven that the transaction
//!   is still the one that holds the claim. If it is not, "nothing happened" is answered only where
//!   that is proven (O1).
//! * An error, a panic and a timeout roll back and leave no row. After a transient error, such as a
//!   deadlock, the handler runs again (R27).
//! * The answer is encoded before COMMIT: an answer that cannot be stored is not committed.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use sqlx::Database;
use uuid::Uuid;

use super::codec::{Kept, error_code};
use super::endpoint::Registered;
use super::engine::Engine;
use super::front::{Asking, Begin, Front, KeyGiven};
use super::guarded::guarded;
use super::reply::{Answered, Reply};
use super::standing::mark_unknown_later;
use crate::error::{HandlerError, StoreError};
use crate::inbox::port::Proof;
use crate::message::NewMessage;
use crate::observe::Noted;
use crate::operation::port;
use crate::operation::port::{Basis, Begun, OperationTx, Operations};
use crate::operation::rules::classify::{Reached, Run, Settle};
use crate::operation::rules::doubt::{Aftermath, Doubt, Look};
use crate::operation::rules::{Canonical, Code, Outcome, Scope, State};
use crate::store::base::Base;

const TRIES_MAX: u32 = 10;

/// The transaction of one operation. Everything that is written through it commits together with
/// the operation's outcome.
///
/// It has no commit and no rollback: the value that the handler returns decides. A handler that
/// ends the transaction with its own statement is detected.
pub struct EffectTx<'t, S: Base> {
    connection: &'t mut <S::Db as Database>::Connection,
    operation_id: Uuid,
    sent: &'t mut Sent,
}

#[derive(Default)]
struct Sent {
    enqueued: bool,
    /// The messages that are written together with the outcome.
    last: Vec<NewMessage>,
}

impl<'t, S: Base> EffectTx<'t, S> {
    /// Wraps a transaction of the store `S`; an error if another kind of store began it.
    fn new(tx: &'t mut dyn OperationTx, sent: &'t mut Sent) -> Result<Self, StoreError> {
        Ok(Self { operation_id: tx.owned().operation_id, connection: tx.connection()?, sent })
    }

    /// The sqlx connection, inside the transaction.
    pub fn connection(&mut self) -> &mut <S::Db as Database>::Connection {
        self.connection
    }

    /// Enqueues a message in the same transaction.
    ///
    /// # Errors
    /// As [`crate::outbox::enqueue::enqueue`].
    pub async fn enqueue(&mut self, message: NewMessage) -> Result<Uuid, StoreError> {
        self.sent.enqueued = true;
        crate::outbox::enqueue::enqueue(self.connection, message).await
    }

    /// Enqueues a message in the same transaction, when the outcome is written: on PostgreSQL in
    /// the same statement, which saves a round trip. These messages come after all that `enqueue`
    /// and the connection write, also later, in the order of the calls. They are committed with
    /// every outcome that commits the effects. A rejection drops them, as it takes all effects
    /// back; a savepoint to which the handler itself rolls back does not.
    ///
    /// # Errors
    /// [`StoreError::Limit`] if a trace header is malformed or given twice. Other errors in the
    /// message are found when the outcome is written: then nothing is committed, and the request
    /// gets the answer for an error of the handler.
    pub fn enqueue_last(&mut self, mut message: NewMessage) -> Result<(), StoreError> {
        // Taken now, because the current span is the handler's.
        message.settle_trace()?;
        self.sent.enqueued = true;
        self.sent.last.push(message);
        Ok(())
    }

    /// The id of this run, the same in every attempt. Derive downstream ids from it, never from the
    /// client's key (M78, M79).
    #[must_use]
    pub fn operation_id(&self) -> Uuid {
        self.operation_id
    }
}

impl<S: Base> fmt::Debug for EffectTx<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EffectTx").finish_non_exhaustive()
    }
}

enum Tried {
    /// The handler's own answer, given for the first time.
    Done(Reply),
    /// Another record exists, or somebody holds the key.
    Refused,
    /// The store failed at this stage, and nothing was committed.
    Again(&'static str, StoreError),
    /// The outcome is stored: answer from the record.
    Stored,
    Answer(Answered),
}

impl<S: Operations + Base> Engine<S> {
    /// Runs a transactional operation once per key, and answers repeated requests (M1).
    ///
    /// After a deadlock the handler is called again; nothing of the first call remains.
    /// [`Outcome::Completed`] commits. A binding [`Outcome::Rejected`] takes the effects back and
    /// stores the refusal. [`Outcome::Unknown`] commits and needs an operator. Every other outcome
    /// rolls everything back and frees the key; so does an error of the handler, which answers 500
    /// `OPERATION_FAILED`.
    ///
    /// # Cancel safety
    /// Dropped before the operation has begun: nothing happened. Dropped later: it continues in its
    /// own task, and a retry with the same key finds its outcome.
    pub async fn execute_transactional<C, F>(
        &self,
        endpoint: &Registered,
        scope: Option<Scope>,
        key: KeyGiven,
        command: C,
        handler: F,
    ) -> Answered
    where
        C: Canonical + Send + Sync + 'static,
        F: for<'t> Fn(&'t C, EffectTx<'t, S>) -> BoxFuture<'t, Result<Outcome<Reply>, HandlerError>>
            + Send
            + Sync
            + 'static,
    {
        let command = Arc::new(command);
        let key = key.or_own(endpoint.route());
        let asking = Asking { scope, key, command: Arc::clone(&command) as Arc<dyn Canonical + Send + Sync> };
        let mut front = self.front(endpoint, asking);
        // A request that executes nothing needs no task.
        let (begin, unseen) = match self.store().claims_unseen().then(|| front.claim_unseen()).flatten() {
            Some(begin) => (begin, true),
            None => match front.claim_or_answer().await {
                Ok(begin) => (begin, false),
                Err(answered) => return *answered,
            },
        };
        let handler = Box::new(Typed { command, handler, of: PhantomData });
        let execution = Execution { store: Arc::clone(self.store()) as Arc<dyn Operations>, front, handler };
        Box::new(execution).answered(begin, unseen).await
    }
}

/// A handler together with its command, for any database.
trait Handle: Send + Sync {
    fn handle<'t>(
        &'t self,
        tx: &'t mut dyn OperationTx,
        sent: &'t mut Sent,
    ) -> BoxFuture<'t, Result<Outcome<Reply>, HandlerError>>;
}

struct Typed<S, C, F> {
    command: Arc<C>,
    handler: F,
    of: PhantomData<fn(S)>,
}

impl<S, C, F> Handle for Typed<S, C, F>
where
    S: Base,
    C: Send + Sync,
    F: for<'t> Fn(&'t C, EffectTx<'t, S>) -> BoxFuture<'t, Result<Outcome<Reply>, HandlerError>> + Send + Sync,
{
    fn handle<'t>(
        &'t self,
        tx: &'t mut dyn OperationTx,
        sent: &'t mut Sent,
    ) -> BoxFuture<'t, Result<Outcome<Reply>, HandlerError>> {
        match EffectTx::new(tx, sent) {
            Ok(tx) => (self.handler)(&self.command, tx),
            Err(error) => Box::pin(std::future::ready(Err(error.into()))),
        }
    }
}

struct Execution {
    store: Arc<dyn Operations>,
    front: Front,
    handler: Box<dyn Handle>,
}

/// The result of a task that was started to execute.
enum Ran {
    Answer(Answered),
    /// Nothing was begun here: the record says what follows.
    Turn(Box<Execution>),
    /// The outcome of this run is stored: the record has the answer.
    Stored(Box<Execution>),
}

impl Execution {
    /// Executes in a task of its own, which goes on if the request is dropped. The turns are taken
    /// here: a request that waits for another run has begun nothing, and may be dropped.
    ///
    /// `unseen`: the key is probably new, and its record was not read.
    async fn answered(mut self: Box<Self>, mut begin: Box<Begin>, mut unseen: bool) -> Answered {
        loop {
            let (engine, operation_id) = (self.front.engine.clone(), begin.claim.operation_id);
            // Made before the future is boxed: a large future would be moved at each step of its
            // start.
            let under_way = self.front.under_way();
            let is_stored;
            (self, is_stored) = match engine.attended(engine.spawn(self.run(begin, unseen))).await {
                Some(Ok(Ran::Answer(answered))) => return answered,
                Some(Ok(Ran::Turn(execution))) => (execution, false),
                Some(Ok(Ran::Stored(execution))) => (execution, true),
                // The operation continues; the next request with this key finds its outcome.
                None => {
                    under_way.note(Noted::CommitUnknown);
                    return under_way.problem(Code::CommitUnknown);
                }
                Some(Err(error)) => {
                    tracing::error!(operation = %under_way.endpoint.operation(), %error, "a transactional operation failed");
                    return under_way.problem(Code::CommitUnknown);
                }
            };
            (begin, unseen) = match self.front.claim_or_answer().await {
                Ok(begin) => (begin, false),
                Err(answered) if is_stored => return self.front.of_stored(operation_id, *answered),
                Err(answered) => return *answered,
            };
        }
    }

    async fn run(mut self: Box<Self>, begin: Box<Begin>, unseen: bool) -> Ran {
        let place = self.front.engine.inner.admission.at_once(self.front.endpoint.operation());
        let mut claimed = None;
        if unseen {
            // Without a place, the record is read instead: a stored answer needs no place.
            if place.is_some() {
                claimed = match self.claim_unseen(&begin).await {
                    Ok(claimed) => claimed,
                    Err(error) => return Ran::Answer(self.front.store_failed("claim", &error)),
                };
            }
            if claimed.is_none() {
                return Ran::Turn(self);
            }
        }
        // Returned at the end: a request that waits for another run must hold no place.
        let _place = match place {
            Some(place) => place,
            None => match self.front.place().await {
                Ok(place) => place,
                Err(answered) => return Ran::Answer(*answered),
            },
        };
        match self.tries(&begin, claimed).await {
            Tried::Done(reply) => Ran::Answer(self.front.first(begin.entry.ran(), reply)),
            Tried::Answer(answered) => Ran::Answer(answered),
            Tried::Again(stage, error) => Ran::Answer(self.front.store_failed(stage, &error)),
            Tried::Refused => {
                self.front.refused(begin);
                Ran::Turn(self)
            }
            Tried::Stored => {
                self.front.look_again();
                Ran::Stored(self)
            }
        }
    }

    /// Makes a claim without a read. Returns `None` if the claim does not execute: drop `begin` and
    /// take a turn, which reads the record.
    async fn claim_unseen(&mut self, begin: &Begin) -> Result<Option<Box<dyn OperationTx>>, StoreError> {
        let engine = &self.front.engine;
        let tx = match engine.reach().within(self.store.begin_unseen(&begin.claim)).await {
            Ok(Some(tx)) => tx,
            Ok(None) | Err(StoreError::Busy(_)) => return Ok(None),
            // A server that answers but takes no writes can still return stored answers.
            Err(StoreError::Unavailable(sqlx::Error::Database(_))) => return Ok(None),
            Err(error) => return Err(error),
        };
        if !self.front.claimed_unseen(begin) {
            rolled_back(tx).await;
            return Ok(None);
        }
        Ok(Some(tx))
    }

    /// Repeats the attempt while the database returns transient errors (R27), up to [`TRIES_MAX`]
    /// times and within the route's timeout.
    async fn tries(&self, begin: &Begin, mut claimed: Option<Box<dyn OperationTx>>) -> Tried {
        let until = Instant::now() + self.front.endpoint.route().timeout;
        let mut tried = 0;
        loop {
            let end = self.try_once(begin, claimed.take()).await;
            tried += 1;
            match &end {
                Tried::Again(_, error @ StoreError::Busy(_)) if tried < TRIES_MAX && Instant::now() < until => {
                    tracing::debug!(%error, tried, "the database asks to try again");
                }
                _ => return end,
            }
            tokio::time::sleep(Duration::from_millis(fastrand::u64(1..=10) * u64::from(tried))).await;
        }
    }

    /// Makes one attempt. `claimed`: the transaction that already holds the claim.
    async fn try_once(&self, begin: &Begin, claimed: Option<Box<dyn OperationTx>>) -> Tried {
        let front = &self.front;
        let route = front.endpoint.route();
        let mut tx = match claimed {
            Some(tx) => tx,
            None => {
                let (reach, store) = (front.engine.reach(), &self.store);
                match reach.within(store.begin_operation(&begin.claim, begin.basis(), front.patience())).await {
                    Ok(Begun::Claimed(tx)) => tx,
                    Ok(Begun::Existing(_) | Begun::Locked) => return Tried::Refused,
                    Err(error) => return Tried::Again("claim", error),
                }
            }
        };
        begin.noted().for_each(|noted| front.note(noted));
        let mut sent = Sent::default();
        // The closure itself may panic, not only its future.
        let (handler, connection, messages) = (&self.handler, tx.as_mut(), &mut sent);
        let call = async move { handler.handle(connection, messages).await };
        let failed = match guarded("the handler", route.timeout, call).await {
            Ok(outcome) => return self.settle(begin, tx, outcome, sent).await,
            Err(error) => error,
        };
        match self.roll_back(begin, tx, failed.is_transient()).await {
            Some(end) => {
                tracing::warn!(operation = %front.endpoint.operation(), key = front.short_key(), error = %failed, "the operation failed, and its rollback was not confirmed");
                end
            }
            None if failed.is_transient() => {
                Tried::Again("execute", StoreError::Busy(sqlx::Error::Protocol(failed.message.clone())))
            }
            None => {
                tracing::warn!(operation = %front.endpoint.operation(), key = front.short_key(), error = %failed, "the operation failed and was rolled back");
                Tried::Answer(front.problem(Code::OperationFailed))
            }
        }
    }

    async fn settle(
        &self,
        begin: &Begin,
        mut tx: Box<dyn OperationTx>,
        outcome: Outcome<Reply>,
        mut sent: Sent,
    ) -> Tried {
        let front = &self.front;
        let (endpoint, claim) = (&front.endpoint, &begin.claim);
        let settle = outcome.settle(Run::of(endpoint.route(), Reached::Started));
        let reply = outcome.into_answer();
        let Settle::Finish(state) = settle else {
            return self.roll_back(begin, tx, false).await.unwrap_or(Tried::Done(reply));
        };
        let kept = Kept::Whole(reply.clone());
        let answer = match front.engine.encode(endpoint, &claim.identity, &claim.fingerprint, &kept) {
            Ok(answer) => answer,
            Err(error) => {
                tracing::error!(operation = %endpoint.operation(), %error, "an answer could not be sealed: nothing is committed");
                let failed = Tried::Answer(front.problem(Code::OperationFailed));
                return self.roll_back(begin, tx, false).await.unwrap_or(failed);
            }
        };
        let outcome = match state {
            State::Completed => port::RunOutcome::Completed(answer),
            State::FailedReplayable => {
                port::RunOutcome::FailedReplayable { answer, error_code: error_code(endpoint.endpoint(), &reply) }
            }
            _ => port::RunOutcome::Unknown,
        };
        if state == State::FailedReplayable {
            sent = Sent::default();
            match tx.undo_effects().await {
                Ok(Proof::Same) => {}
                Ok(proof) => return self.doubt(begin, tx, proof).await,
                Err(error) => return Tried::Again("complete", error),
            }
        }
        match tx.complete(sent.last, &outcome, &endpoint.route().retention).await {
            Ok(Proof::Same) => {}
            Ok(proof) => return self.doubt(begin, tx, proof).await,
            Err(error) => {
                rolled_back(tx).await;
                return self.failed_to_end("complete", error);
            }
        }
        match tx.commit().await {
            Ok(()) => {
                if sent.enqueued {
                    crate::outbox::hint::hint();
                }
                Tried::Done(reply)
            }
            Err(StoreError::CommitUnknown(error)) => {
                tracing::warn!(operation = %endpoint.operation(), key = front.short_key(), %error, "connection lost during COMMIT; looking for the outcome");
                self.after(begin, Doubt::CommitLost, Some((state, reply))).await
            }
            Err(error) => self.failed_to_end("commit", error),
        }
    }

    /// A statement or COMMIT has certainly failed: nothing was committed.
    fn failed_to_end(&self, stage: &'static str, error: StoreError) -> Tried {
        if error.is_transient() {
            return Tried::Again(stage, error);
        }
        tracing::warn!(operation = %self.front.endpoint.operation(), stage, %error, "the operation could not be committed");
        Tried::Answer(self.front.problem(Code::OperationFailed))
    }

    /// Rolls back a transaction that is proven to hold the claim. Returns `None`: nothing happened.
    ///
    /// `transient`: the handler failed with a transient error, such as a deadlock, by which the
    /// database itself may have ended the transaction (R27). If the store proves that nothing was
    /// committed, the key stays free.
    async fn roll_back(&self, begin: &Begin, mut tx: Box<dyn OperationTx>, transient: bool) -> Option<Tried> {
        let budget = self.front.endpoint.route().completion_budget;
        match tokio::time::timeout(budget, tx.undo_effects()).await {
            Ok(Ok(Proof::Same)) => {
                rolled_back(tx).await;
                None
            }
            Ok(Ok(proof)) => {
                if transient && self.is_undone(tx.as_mut()).await {
                    rolled_back(tx).await;
                    return None;
                }
                Some(self.doubt(begin, tx, proof).await)
            }
            // Dropping the transaction closes its connection, and the server rolls back.
            Ok(Err(error)) => Some(Tried::Again("execute", error)),
            Err(_) => {
                drop(tx);
                Some(self.after(begin, Doubt::CommitLost, None).await)
            }
        }
    }

    async fn is_undone(&self, tx: &mut dyn OperationTx) -> bool {
        tx.nothing_committed().await.unwrap_or_else(|error| {
            tracing::debug!(%error, "what a connection has committed could not be asked");
            false
        })
    }

    async fn doubt(&self, begin: &Begin, tx: Box<dyn OperationTx>, proof: Proof) -> Tried {
        rolled_back(tx).await;
        self.after(begin, Doubt::TokenGone { nothing_ran_after: proof == Proof::Aborted }, None).await
    }

    /// Reads the record on a new connection to learn what became of a transaction, and acts on it.
    async fn after(&self, begin: &Begin, doubt: Doubt, answer: Option<(State, Reply)>) -> Tried {
        let (front, store, claim) = (&self.front, &self.store, &begin.claim);
        let look = store.find_after_lost_commit(claim, begin.basis()).await;
        let aftermath = doubt.after(look);
        let Some(code) = aftermath.code() else {
            return match answer {
                // The id of a new run proves that the record is from this commit.
                Some((state, reply))
                    if look == Look::Ours(state) && matches!(begin.basis(), Basis::New | Basis::Anew(_)) =>
                {
                    Tried::Done(reply)
                }
                _ => Tried::Stored,
            };
        };
        front.note(if aftermath.is_alarm() { Noted::TransactionEnded } else { Noted::CommitUnknown });
        let written = match aftermath {
            Aftermath::InsertUnknown => store.stand_unknown(claim, begin.basis(), front.patience()).await,
            Aftermath::MarkUnknown => match store.find(&claim.identity).await {
                Ok(found) => match found.record {
                    Some(record) => store.mark_unknown(&record).await.map(drop),
                    None => Ok(()),
                },
                Err(error) => Err(error),
            },
            _ => Ok(()),
        };
        if let Err(error) = written {
            tracing::error!(operation = %front.endpoint.operation(), key = front.short_key(), %error, "an operation that ended its transaction could not be marked as unknown");
            if aftermath == Aftermath::InsertUnknown {
                let (store, claim, ground) = (Arc::clone(store), claim.clone(), begin.ground.clone());
                let patience = front.patience();
                mark_unknown_later(&front.engine, begin, move || {
                    let (store, claim, ground) = (Arc::clone(&store), claim.clone(), ground.clone());
                    async move { store.stand_unknown(&claim, ground.basis(), patience).await }
                });
            }
        }
        Tried::Answer(front.problem(code))
    }
}

/// Rolls back. If the server does not answer, the connection is closed, and the server rolls back.
async fn rolled_back(tx: Box<dyn OperationTx>) {
    if let Err(error) = tx.rollback().await {
        tracing::debug!(%error, "a rollback was not answered");
    }
}
