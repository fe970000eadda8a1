//! Effects at outside providers: declared with a strategy, intended with exact bytes, settled by
//! proof (O5, O6, O13).
//!
//! By types: an effect has a strategy, or it is none; a failure of the operation can be said only
//! with a [`Proven`], which only the driver makes, from evidence that settled.
//!
//! Not here: what settles an effect
//! ([`policy::operation::provider`](crate::policy::operation::provider)).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::ends::SettledPoint;
use super::identity::ProviderKey;
use super::phase::Context;
use super::provider::{Prepare, Provider};
use crate::error::HandlerError;
use crate::policy::operation::provider::{Settled, Strategy};

/// An effect at a provider.
#[derive(Debug)]
pub struct Effect<P> {
    provider: Arc<P>,
    declared: Declared,
}

/// An effect that undoes another one: with an identity of its own, as every effect.
#[derive(Debug)]
pub struct Undo<P>(Effect<P>);

/// What is registered of an effect.
#[derive(Debug, Clone)]
pub(super) struct Declared {
    pub(super) name: &'static str,
    pub(super) provider: Arc<dyn Provider>,
    pub(super) strategy: Strategy,
    /// The point at which it may have been sent.
    pub(super) sent: String,
    /// The point at which it is settled, where its next phase runs.
    pub(super) settled: String,
    pub(super) undoes: Option<&'static str>,
}

/// What is to be sent: committed, with these bytes, before it is.
#[derive(Debug)]
pub struct Intent(pub(super) Prepared);

/// What is to be sent to undo an effect.
#[derive(Debug)]
pub struct Compensation(pub(super) Prepared);

pub(super) struct Prepared {
    pub(super) effect: &'static str,
    pub(super) key: ProviderKey,
    pub(super) bytes: Vec<u8>,
}

/// Proof that an operation failed: a provider's verdict of O7, or the undoing of what was done.
#[derive(Debug, Clone)]
pub struct Proven(());

/// What is proven of an effect.
#[derive(Debug, Clone)]
pub enum Settlement {
    /// It happened, once, as we asked.
    Succeeded,
    /// It did not happen, and will not.
    Failed(Proven),
    /// It undid what it was to undo.
    Undone(Proven),
    /// It did not undo it: that stands.
    NotUndone,
}

/// What is proven of an operation's effects.
#[derive(Debug, Clone, Default)]
pub struct Settlements(BTreeMap<String, (Settlement, String)>);

impl<P: Provider> Effect<P> {
    /// An effect. Its name is the same for ever: the provider's key is derived from it. Its points
    /// are `NAME:sent` and `NAME:settled`, unless they are named.
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

    /// Gives its points other names: where it is committed and sent, and where it is settled.
    #[must_use]
    pub fn at(mut self, sent: &'static str, settled: SettledPoint) -> Self {
        sent.clone_into(&mut self.declared.sent);
        settled.0.clone_into(&mut self.declared.settled);
        self
    }

    /// Makes it one that undoes another effect of the flow.
    #[must_use]
    pub fn undoing(mut self, effect: &'static str) -> Undo<P> {
        self.declared.undoes = Some(effect);
        Undo(self)
    }

    /// Intends to send this request. The bytes are made here, once (O5).
    ///
    /// # Errors
    /// The request cannot be written.
    pub fn intend<R: ?Sized>(&self, context: &Context, request: &R) -> Result<Intent, HandlerError>
    where
        P: Prepare<R>,
    {
        Ok(Intent(self.prepared(context, request)?))
    }

    pub(super) fn declared(&self) -> Declared {
        self.declared.clone()
    }

    fn prepared<R: ?Sized>(&self, context: &Context, request: &R) -> Result<Prepared, HandlerError>
    where
        P: Prepare<R>,
    {
        let key = context.identities().provider_key(self.declared.name);
        let bytes = self.provider.prepare(request, &key)?;
        Ok(Prepared { effect: self.declared.name, key, bytes })
    }
}

impl<P: Provider> Undo<P> {
    /// Intends to undo it by this request.
    ///
    /// # Errors
    /// The request cannot be written.
    pub fn intend<R: ?Sized>(&self, context: &Context, request: &R) -> Result<Compensation, HandlerError>
    where
        P: Prepare<R>,
    {
        Ok(Compensation(self.0.prepared(context, request)?))
    }

    pub(super) fn declared(&self) -> Declared {
        self.0.declared()
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
    /// The strategy's name, as an intent has it.
    pub(super) fn strategy_name(&self) -> &'static str {
        match self.strategy {
            Strategy::Key(_) => "key",
            Strategy::Query => "query",
            Strategy::KeyAndQuery(_) => "key_and_query",
            Strategy::None => "none",
            Strategy::Repeatable => "repeatable",
        }
    }

    /// What it means that this effect settled so.
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

    /// What is proven of an effect; none while nothing is.
    #[must_use]
    pub fn of(&self, effect: &str) -> Option<&Settlement> {
        self.0.get(effect).map(|(settlement, _)| settlement)
    }

    /// What the adapter kept of the answer that settled it.
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
