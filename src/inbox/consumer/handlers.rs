//! Chooses the handler for each kind of message.
//!
//! Promise: a handler is written for the connection of one database (PostgreSQL, for example). The
//! consumer that calls it is the same for all. Where a handler does not fit the store, its messages
//! fail with an error.

use std::fmt;
use std::marker::PhantomData;

use async_trait::async_trait;

use crate::error::HandlerError;
use crate::inbox::handler::{BatchMessageHandler, HandlerTx, MessageHandler};
use crate::inbox::port::InboxTx;
use crate::message::Message;
use crate::store::Store;

/// A handler as the consumer calls it, for any database.
#[async_trait]
pub(super) trait Handler: Send + Sync {
    /// Whether it takes several messages in one call.
    fn takes_sets(&self) -> bool;

    /// Calls the handler with these messages, in order, in a transaction. Sets `enqueued` if the
    /// handler enqueued a message.
    async fn handle(
        &self,
        messages: &[&Message],
        tx: &mut dyn InboxTx,
        enqueued: &mut bool,
    ) -> Result<(), HandlerError>;
}

/// Takes messages one by one.
struct Single<S, H>(H, PhantomData<fn(S)>);

#[async_trait]
impl<S: Store, H: MessageHandler<S>> Handler for Single<S, H> {
    fn takes_sets(&self) -> bool {
        false
    }

    async fn handle(
        &self,
        messages: &[&Message],
        tx: &mut dyn InboxTx,
        enqueued: &mut bool,
    ) -> Result<(), HandlerError> {
        let mut tx = HandlerTx::<S>::new(tx, enqueued)?;
        for message in messages {
            self.0.handle(message, &mut tx).await?;
        }
        Ok(())
    }
}

/// Takes several new messages of a batch in one call, as far as the order of keys allows.
struct Set<S, H>(H, PhantomData<fn(S)>);

#[async_trait]
impl<S: Store, H: BatchMessageHandler<S>> Handler for Set<S, H> {
    fn takes_sets(&self) -> bool {
        true
    }

    async fn handle(
        &self,
        messages: &[&Message],
        tx: &mut dyn InboxTx,
        enqueued: &mut bool,
    ) -> Result<(), HandlerError> {
        self.0.handle_batch(messages, &mut HandlerTx::<S>::new(tx, enqueued)?).await
    }
}

/// The handlers of a consumer by kind. Of several handlers for one kind, the first is called.
pub struct Handlers<S: Store>(ByKind, PhantomData<fn(S)>);

impl<S: Store> Handlers<S> {
    /// An empty set: no kind has a handler yet.
    #[must_use]
    pub fn new() -> Self {
        Self(ByKind::default(), PhantomData)
    }

    /// One handler for every kind.
    pub fn all(handler: impl MessageHandler<S> + 'static) -> Self {
        Self::new().otherwise(handler)
    }

    /// Adds a handler for one kind.
    #[must_use]
    pub fn on(self, kind: impl Into<String>, handler: impl MessageHandler<S> + 'static) -> Self {
        self.with(Some(kind.into()), Single(handler, PhantomData))
    }

    /// Adds a handler for one kind that takes several messages of a batch in one call.
    #[must_use]
    pub fn on_batch(self, kind: impl Into<String>, handler: impl BatchMessageHandler<S> + 'static) -> Self {
        self.with(Some(kind.into()), Set(handler, PhantomData))
    }

    /// Adds a handler for the kinds that have no handler of their own.
    #[must_use]
    pub fn otherwise(self, handler: impl MessageHandler<S> + 'static) -> Self {
        self.with(None, Single(handler, PhantomData))
    }

    /// The same, with a handler that takes several messages of a batch in one call.
    #[must_use]
    pub fn otherwise_batch(self, handler: impl BatchMessageHandler<S> + 'static) -> Self {
        self.with(None, Set(handler, PhantomData))
    }

    fn with(mut self, kind: Option<String>, handler: impl Handler + 'static) -> Self {
        self.0.0.push((kind, Box::new(handler)));
        self
    }

    pub(super) fn by_kind(self) -> ByKind {
        self.0
    }
}

impl<S: Store> Default for Handlers<S> {
    fn default() -> Self {
        Self::new()
    }
}

impl<S: Store> fmt::Debug for Handlers<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The handlers without the type of their store.
#[derive(Default)]
pub(super) struct ByKind(Vec<(Option<String>, Box<dyn Handler>)>);

impl ByKind {
    /// The handler of a kind, and its number.
    pub(super) fn find(&self, kind: &str) -> Option<(usize, &dyn Handler)> {
        let exact = self.0.iter().position(|(of, _)| of.as_deref() == Some(kind));
        let number = exact.or_else(|| self.0.iter().position(|(of, _)| of.is_none()))?;
        Some((number, self.get(number)))
    }

    /// The kinds that have handlers; `None` if every kind has one.
    pub(super) fn kinds(&self) -> Option<Vec<String>> {
        self.0.iter().map(|(kind, _)| kind.clone()).collect()
    }

    /// The handler with a number that [`ByKind::find`] returned.
    pub(super) fn get(&self, number: usize) -> &dyn Handler {
        self.0[number].1.as_ref()
    }
}

impl fmt::Debug for ByKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(kind, _)| kind.as_deref().unwrap_or("*"))).finish()
    }
}
