//! Which handler takes which kind.

use std::fmt;
use std::sync::Arc;

use crate::runtime::{BatchMessageHandler, MessageHandler};
use crate::store::Store;

/// A handler, by how it takes messages.
pub(super) enum Handler<S: Store> {
    /// One by one.
    Single(Arc<dyn MessageHandler<S>>),
    /// All new ones of a batch at once.
    Batch(Arc<dyn BatchMessageHandler<S>>),
}

/// The handlers of a consumer, by kind. The first that fits takes the message.
pub struct Handlers<S: Store>(Vec<(Option<String>, Handler<S>)>);

impl<S: Store> Handlers<S> {
    /// No handler yet.
    #[must_use]
    pub fn new() -> Self {
        Self(Vec::new())
    }

    /// One handler for every kind.
    pub fn all(handler: impl MessageHandler<S> + 'static) -> Self {
        Self::new().otherwise(handler)
    }

    /// Adds a handler for one kind.
    #[must_use]
    pub fn on(self, kind: impl Into<String>, handler: impl MessageHandler<S> + 'static) -> Self {
        self.with(Some(kind.into()), Handler::Single(Arc::new(handler)))
    }

    /// Adds a handler for one kind that takes the messages of a batch at once.
    #[must_use]
    pub fn on_batch(self, kind: impl Into<String>, handler: impl BatchMessageHandler<S> + 'static) -> Self {
        self.with(Some(kind.into()), Handler::Batch(Arc::new(handler)))
    }

    /// Adds a handler for what no other takes.
    #[must_use]
    pub fn otherwise(self, handler: impl MessageHandler<S> + 'static) -> Self {
        self.with(None, Handler::Single(Arc::new(handler)))
    }

    /// Adds a handler for what no other takes, that takes the messages of a batch at once.
    #[must_use]
    pub fn otherwise_batch(self, handler: impl BatchMessageHandler<S> + 'static) -> Self {
        self.with(None, Handler::Batch(Arc::new(handler)))
    }

    fn with(mut self, kind: Option<String>, handler: Handler<S>) -> Self {
        self.0.push((kind, handler));
        self
    }

    /// The handler of a kind, and its number.
    pub(super) fn find(&self, kind: &str) -> Option<(usize, &Handler<S>)> {
        let exact = self.0.iter().position(|(of, _)| of.as_deref() == Some(kind));
        let number = exact.or_else(|| self.0.iter().position(|(of, _)| of.is_none()))?;
        Some((number, &self.0[number].1))
    }

    /// The kinds that they take; none where one takes every kind.
    pub(super) fn kinds(&self) -> Option<Vec<String>> {
        self.0.iter().map(|(kind, _)| kind.clone()).collect()
    }

    /// The handler of a number that [`Handlers::find`] gave.
    pub(super) fn get(&self, number: usize) -> &Handler<S> {
        &self.0[number].1
    }
}

impl<S: Store> Default for Handlers<S> {
    fn default() -> Self {
        Self::new()
    }
}

impl<S: Store> fmt::Debug for Handlers<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(kind, _)| kind.as_deref().unwrap_or("*"))).finish()
    }
}
