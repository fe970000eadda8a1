//! The phases that an author writes: code that runs in one transaction and returns how it ends
//! (M53).
//!
//! A phase may run more than once, but only one run commits. It calls no provider and waits for
//! nothing outside, so no transaction stays open across a call (M52).

use std::fmt;

use async_trait::async_trait;
use uuid::Uuid;

use super::context::Context;
use super::effect::Settlements;
use super::ends::{First, Local, Settled};
use crate::error::{HandlerError, StoreError};
use crate::message::NewMessage;
use crate::operation::port::phases::PhaseTx;
use crate::outbox::enqueue::enqueue;
use crate::store::base::Base;

/// The transaction of a phase: a connection, without a way to end the transaction.
pub struct Phase<'a, S: Base> {
    connection: &'a mut <S::Db as sqlx::Database>::Connection,
    context: &'a Context,
}

/// The first phase. Every check that may refuse the request belongs here, uniqueness included
/// (O13).
#[async_trait]
pub trait FirstPhase<S: Base, C>: Send + Sync + 'static {
    /// Runs the phase. An error rolls back: nothing happened.
    async fn run(&self, phase: &mut Phase<'_, S>, command: &C) -> Result<First, HandlerError>;
}

/// A later phase before the first intent.
#[async_trait]
pub trait LocalPhase<S: Base, C>: Send + Sync + 'static {
    /// Runs the phase. An error rolls this phase back, and it runs again. The operation is parked
    /// after a terminal error, or when its attempts are used up.
    async fn run(&self, phase: &mut Phase<'_, S>, command: &C) -> Result<Local, HandlerError>;
}

/// A phase after an effect is settled.
#[async_trait]
pub trait SettledPhase<S: Base, C>: Send + Sync + 'static {
    /// Runs the phase. An error rolls this phase back; the operation is UNKNOWN until the phase
    /// succeeds. It is parked as after an error of a [`LocalPhase`].
    async fn run(&self, phase: &mut Phase<'_, S>, command: &C, settled: &Settlements) -> Result<Settled, HandlerError>;
}

impl<S: Base> fmt::Debug for Phase<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Phase").field("context", &self.context).finish_non_exhaustive()
    }
}

impl<'a, S: Base> Phase<'a, S> {
    /// Wraps a transaction of the store `S`; an error if another kind of store began it.
    pub(super) fn new(tx: &'a mut dyn PhaseTx, context: &'a Context) -> Result<Self, StoreError> {
        Ok(Self { connection: tx.connection()?, context })
    }

    /// The connection, inside the transaction of the phase.
    pub fn connection(&mut self) -> &mut <<S as Base>::Db as sqlx::Database>::Connection {
        self.connection
    }

    /// The context of the operation.
    #[must_use]
    pub fn context(&self) -> &'a Context {
        self.context
    }

    /// Enqueues a message in this transaction: the message exists exactly if the phase commits.
    ///
    /// # Errors
    /// As [`enqueue`].
    ///
    /// # Cancel safety
    /// As [`enqueue`].
    pub async fn enqueue(&mut self, message: NewMessage) -> Result<Uuid, StoreError> {
        enqueue(self.connection(), message).await
    }
}
