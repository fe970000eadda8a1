//! Effects at providers: declared with a strategy, intended with exact bytes, settled by proof (O5,
//! O6, O13).
//!
//! The types enforce two rules: every effect has a strategy; and a phase can end as failed only
//! with a [`Proven`], which only the driver makes, from evidence that settled an effect.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::context::{Context, SettledPoint};
use super::provider::{Prepare, Provider};
use crate::error::HandlerError;
use crate::operation::rules::provider::{Settled, Strategy};

/// An effect at a provider, declared by the author of a flow.
#[derive(Debug)]
pub struct Effect<P> {
    provider: Arc<P>,
    pub(super) declared: Declared,
}

/// An effect that undoes another effect. It has an identity of its own, like every effect.
#[derive(Debug)]
pub struct Undo<P>(pub(super) Effect<P>);

#[derive(Debug, Clone)]
pub(super) struct Declared {
    pub(super) name: &'static str,
    pub(super) provider: Arc<dyn Provider>,
    pub(super) strategy: Strategy,
    /// The point at which the effect may have been sent.
    pub(super) sent: String,
    /// The point at which the effect is settled and its next phase runs.
    pub(super) settled: String,
    pub(super) undoes: Option<&'static str>,
}

/// A request that will be sent. Its bytes are committed before the first send.
#[derive(Debug)]
pub struct Intent(pub(super) Prepared);

/// A request that will be sent to undo an effect.
#[derive(Debug)]
pub struct Compensation(pub(super) Prepared);

pub(super) struct Prepared {
    pub(super) effect: &'static str,
    pub(super) key: String,
    pub(super) bytes: Vec<u8>,
}

/// Proof that an operation failed: a provider's verdict (O7), or an effect that undid what was
/// done.
#[derive(Debug, Clone)]
pub struct Proven(());

/// The proven outcome of an effect.
#[derive(Debug, Clone)]
pub enum Settlement {
    /// The effect happened once, as requested.
    Succeeded,
    /// The effect did not happen and will not happen.
    Failed(Proven),
    /// The effect undid the effect that it was declared to undo.
    Undone(Proven),
    /// The effect did not undo the other effect, which still stands.
    NotUndone,
}

/// The proven outcomes of an operation's effects.
#[derive(Debug, Clone, Default)]
pub struct Settlements(BTreeMap<String, (Settlement, String)>);

impl<P: Provider> Effect<P> {
    /// An effect with this name. The name must never change, because the provider's key is derived
    /// from it. The points of the effect are `NAME:sent` and `NAME:settled`, unless [`Self::at`]
    /// names them.
    #[must_use]
    pub fn new(name: &'static str, provider: P, strategy: Strategy) -> Self {
        let provider = Arc::new(provider);
        let declared = Declared {
            name,
            provider: Arc::<P>::clone(&provider),
            strategy,
            sent: format!("{name}:sent"),
            settled: format!("{name}:settled"),
            undoes: None,
        };
        Self { provider, declared }
    }

    /// Names the points of the effect: `sent`, where its intent is committed, and `settled`.
    #[must_use]
    pub fn at(mut self, sent: &'static str, settled: SettledPoint) -> Self {
        sent.clone_into(&mut self.declared.sent);
        settled.0.clone_into(&mut self.declared.settled);
        self
    }

    /// Makes this an effect that undoes another effect of the flow.
    #[must_use]
    pub fn undoing(mut self, effect: &'static str) -> Undo<P> {
        self.declared.undoes = Some(effect);
        Undo(self)
    }

    /// Returns the intent to send this request. The bytes are made here; the phase commits them
    /// with the intent (O5).
    ///
    /// # Errors
    /// The request cannot be written.
    pub fn intend<R: ?Sized>(&self, context: &Context, request: &R) -> Result<Intent, HandlerError>
    where
        P: Prepare<R>,
    {
        Ok(Intent(self.prepared(context, request)?))
    }

    fn prepared<R: ?Sized>(&self, context: &Context, request: &R) -> Result<Prepared, HandlerError>
    where
        P: Prepare<R>,
    {
        let key = context.provider_key(self.declared.name);
        let bytes = self.provider.prepare(request, &key)?;
        Ok(Prepared { effect: self.declared.name, key, bytes })
    }
}

impl<P: Provider> Undo<P> {
    /// Returns the intent to undo the other effect by this request.
    ///
    /// # Errors
    /// The request cannot be written.
    pub fn intend<R: ?Sized>(&self, context: &Context, request: &R) -> Result<Compensation, HandlerError>
    where
        P: Prepare<R>,
    {
        Ok(Compensation(self.0.prepared(context, request)?))
    }
}

impl<P> Clone for Effect<P> {
    fn clone(&self) -> Self {
        Self { provider: Arc::clone(&self.provider), declared: self.declared.clone() }
    }
}

impl<P> Clone for Undo<P> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl Declared {
    /// The name of the strategy, as it is stored with an intent.
    pub(super) fn strategy_name(&self) -> &'static str {
        match self.strategy {
            Strategy::Key(_) => "key",
            Strategy::Query => "query",
            Strategy::KeyAndQuery(_) => "key_and_query",
            Strategy::None => "none",
            Strategy::Repeatable => "repeatable",
        }
    }

    pub(super) fn settlement(&self, settled: Settled) -> Settlement {
        match (self.undoes, settled) {
            (None, Settled::Succeeded) => Settlement::Succeeded,
            (None, Settled::Failed) => Settlement::Failed(Proven(())),
            (Some(_), Settled::Succeeded) => Settlement::Undone(Proven(())),
            (Some(_), Settled::Failed) => Settlement::NotUndone,
        }
    }
}

impl Settlements {
    pub(super) fn add(&mut self, effect: &str, settlement: Settlement, saw: String) {
        self.0.insert(effect.to_owned(), (settlement, saw));
    }

    /// The proven outcome of an effect; `None` while nothing is proven.
    #[must_use]
    pub fn of(&self, effect: &str) -> Option<&Settlement> {
        self.0.get(effect).map(|(settlement, _)| settlement)
    }

    /// What the adapter recorded of the answer that settled the effect, or what the operator wrote
    /// who settled it.
    #[must_use]
    pub fn saw(&self, effect: &str) -> Option<&str> {
        self.0.get(effect).map(|(_, saw)| saw.as_str())
    }
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Prepared({}, {}, {} bytes)", self.effect, self.key, self.bytes.len())
    }
}
