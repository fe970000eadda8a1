//! Which handler takes which kind.

use std::fmt;
use std::sync::Arc;

use crate::runtime::MessageHandler;
use crate::store::Store;

/// The handlers of a consumer, by kind. The first that fits takes the message.
pub struct Handlers<S: Store>(Vec<(Option<String>, Arc<dyn MessageHandler<S>>)>);

impl<S: Store> Handlers<S> {
    /// No handler yet.
    #[must_use]
    pub fn new() -> Self {
        Self(Vec::new())
    }

    /// One handler for every kind.
    pub fn all(handler: impl MessageHandler<S> + 'static) -> Self {
        Self(vec![(None, Arc::new(handler))])
    }

    /// Adds a handler for one kind.
    #[must_use]
    pub fn on(mut self, kind: impl Into<String>, handler: impl MessageHandler<S> + 'static) -> Self {
        self.0.push((Some(kind.into()), Arc::new(handler)));
        self
    }

    /// Adds a handler for what no other takes.
    #[must_use]
    pub fn otherwise(mut self, handler: impl MessageHandler<S> + 'static) -> Self {
        self.0.push((None, Arc::new(handler)));
        self
    }

    /// The handler of a kind.
    #[must_use]
    pub fn find(&self, kind: &str) -> Option<&Arc<dyn MessageHandler<S>>> {
        let exact = self.0.iter().find(|(of, _)| of.as_deref() == Some(kind));
        exact.or_else(|| self.0.iter().find(|(of, _)| of.is_none())).map(|(_, handler)| handler)
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
