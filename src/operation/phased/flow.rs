//! A phased operation as it is registered: its name, version, command, phases and effects (O22).
//!
//! `build` checks that no two points or effects have one name, that something can be repeated
//! within each window (O6), and that an effect to be undone exists. Registration checks that calls
//! fit into the lease (O5). An operation that could not be recovered is never started.

use std::any::Any;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::context::{Context, LocalPoint, SettledPoint};
use super::effect::{Declared, Effect, Settlements, Undo};
use super::ends::{First, Local, Settled};
use super::phase::{FirstPhase, LocalPhase, Phase, SettledPhase};
use super::provider::Provider;
use crate::error::{HandlerError, Invalid, StoreError};
use crate::operation::port::phases::{FIRST_POINT, PhaseTx};
use crate::operation::rules::provider::Strategy;
use crate::store::base::Base;

pub(super) type AnyCommand = Arc<dyn Any + Send + Sync>;

/// A registered operation. A worker drives only the flows and versions that it has.
#[derive(Debug)]
pub struct Flow<S>(pub(super) AnyFlow, PhantomData<fn(S)>);

/// A flow without the type of its database, as drivers use it.
pub(super) struct AnyFlow {
    pub(super) name: &'static str,
    pub(super) version: u32,
    decode: fn(&[u8]) -> Result<AnyCommand, serde_json::Error>,
    pub(super) first: Box<dyn Erased<First>>,
    local: BTreeMap<&'static str, Box<dyn Erased<Local>>>,
    settled: BTreeMap<String, Box<dyn Erased<Settled>>>,
    effects: Vec<Declared>,
}

/// Builds a flow from its phases and effects.
#[derive(Debug)]
pub struct FlowBuilder<S, C> {
    flow: AnyFlow,
    /// The points in the order of registration, to find duplicates.
    points: Vec<String>,
    of: PhantomData<fn(S, C)>,
}

impl<S: Base> Flow<S> {
    /// Begins a flow with its first phase. Name and version are stored with every operation. Raise
    /// the version when the phases or the command change, and keep the old flow until its last
    /// operation has an outcome.
    #[must_use]
    pub fn begin<C>(name: &'static str, version: u32, first: impl FirstPhase<S, C>) -> FlowBuilder<S, C>
    where
        C: Serialize + DeserializeOwned + Send + Sync + 'static,
    {
        let flow = AnyFlow {
            name,
            version,
            decode: |bytes| Ok(Arc::new(serde_json::from_slice::<C>(bytes)?)),
            first: Box::new(Typed::<S, _, C>::new(first)),
            local: BTreeMap::new(),
            settled: BTreeMap::new(),
            effects: Vec::new(),
        };
        FlowBuilder { flow, points: vec![FIRST_POINT.to_owned()], of: PhantomData }
    }
}

impl AnyFlow {
    pub(super) fn decode(&self, bytes: &[u8]) -> Result<AnyCommand, StoreError> {
        (self.decode)(bytes).map_err(|error| {
            StoreError::Corrupt(format!("a command of `{}` version {}: {error}", self.name, self.version))
        })
    }

    pub(super) fn local(&self, point: &str) -> Option<&dyn Erased<Local>> {
        self.local.get(point).map(AsRef::as_ref)
    }

    pub(super) fn settled(&self, point: &str) -> Option<&dyn Erased<Settled>> {
        self.settled.get(point).map(AsRef::as_ref)
    }

    pub(super) fn effect(&self, name: &str) -> Option<&Declared> {
        self.effects.iter().find(|effect| effect.name == name)
    }

    pub(super) fn effect_at(&self, point: &str) -> Option<&Declared> {
        self.effects.iter().find(|effect| effect.sent == point || effect.settled == point)
    }

    /// Returns an effect that is proven to stand and is not declared repeatable. A failed operation
    /// must not have such an effect.
    pub(super) fn standing(&self, settled: &Settlements) -> Option<&'static str> {
        use super::effect::Settlement::{Succeeded, Undone};
        let undone = |name| {
            self.effects
                .iter()
                .any(|undo| undo.undoes == Some(name) && matches!(settled.of(undo.name), Some(Undone(_))))
        };
        let stands = |effect: &&Declared| {
            effect.strategy != Strategy::Repeatable
                && matches!(settled.of(effect.name), Some(Succeeded))
                && !undone(effect.name)
        };
        self.effects.iter().find(stands).map(|effect| effect.name)
    }

    /// Checks that every call fits into the time that a renewed lease leaves.
    pub(super) fn fits(&self, lease: Duration) -> Result<(), Invalid> {
        // A lease is renewed after a third of it.
        let longest = lease * 2 / 3;
        let fits = |effect: &&Declared| !effect.provider.timeout().is_zero() && effect.provider.timeout() < longest;
        match self.effects.iter().find(|effect| !fits(effect)) {
            Some(effect) => Err(Invalid::new(format!(
                "flow `{}`, effect `{}`: its timeout must be longer than zero and shorter than two thirds of the lease ({})",
                self.name,
                effect.name,
                humantime::format_duration(lease)
            ))),
            None => Ok(()),
        }
    }
}

impl<S: Base, C: Send + Sync + 'static> FlowBuilder<S, C> {
    /// Adds a phase before the first intent, at this point.
    #[must_use]
    pub fn local(mut self, point: LocalPoint, phase: impl LocalPhase<S, C>) -> Self {
        self.points.push(point.0.to_owned());
        self.flow.local.insert(point.0, Box::new(Typed::<S, _, C>::new(phase)));
        self
    }

    /// Adds an effect, and the phase that runs when it is settled.
    #[must_use]
    pub fn effect<P: Provider>(self, effect: &Effect<P>, then: impl SettledPhase<S, C>) -> Self {
        self.declare(effect.declared.clone(), Box::new(Typed::<S, _, C>::new(then)))
    }

    /// Adds an effect that undoes another, and the phase that runs when it is settled.
    #[must_use]
    pub fn undo<P: Provider>(self, undo: &Undo<P>, then: impl SettledPhase<S, C>) -> Self {
        self.declare(undo.0.declared.clone(), Box::new(Typed::<S, _, C>::new(then)))
    }

    /// Adds another phase after an effect is settled, at this point.
    #[must_use]
    pub fn settled(mut self, point: SettledPoint, phase: impl SettledPhase<S, C>) -> Self {
        self.points.push(point.0.to_owned());
        self.flow.settled.insert(point.0.to_owned(), Box::new(Typed::<S, _, C>::new(phase)));
        self
    }

    fn declare(mut self, declared: Declared, then: Box<dyn Erased<Settled>>) -> Self {
        self.points.extend([declared.sent.clone(), declared.settled.clone()]);
        self.flow.settled.insert(declared.settled.clone(), then);
        self.flow.effects.push(declared);
        self
    }

    /// Checks the flow and returns it.
    ///
    /// # Errors
    /// Two points or effects have one name; in a window nothing can be sent again, or the window's
    /// `max_in_flight` is shorter than the timeout; an effect undoes one that is not in the flow.
    pub fn build(self) -> Result<Flow<S>, Invalid> {
        let Self { flow, mut points, .. } = self;
        let name = flow.name;
        let mut names: Vec<String> = flow.effects.iter().map(|effect| effect.name.to_owned()).collect();
        for list in [&mut points, &mut names] {
            list.sort_unstable();
            if let Some(pair) = list.windows(2).find(|pair| pair[0] == pair[1]) {
                let twice = &pair[0];
                let why = "is registered twice, or is the name of the first point";
                return Err(Invalid::new(format!("flow `{name}`: `{twice}` {why}")));
            }
        }
        for effect in &flow.effects {
            let refused = |why: &str| Invalid::new(format!("flow `{name}`, effect `{}`{why}", effect.name));
            if let Strategy::Key(window) | Strategy::KeyAndQuery(window) = effect.strategy {
                window.validate().map_err(|error| refused(&format!(": {error}")))?;
                if window.max_in_flight < effect.provider.timeout() {
                    let why = ": `max_in_flight` of its window must not be shorter than its provider's timeout";
                    return Err(refused(why));
                }
            }
            if let Some(undoes) = effect.undoes
                && !flow.effects.iter().any(|other| other.name == undoes && other.undoes.is_none())
            {
                return Err(refused(&format!(" undoes `{undoes}`, which is no effect of the flow")));
            }
        }
        Ok(Flow(flow, PhantomData))
    }
}

/// The code of a phase, for any database and any command; `E` is how it ends.
#[async_trait]
pub(super) trait Erased<E>: Send + Sync {
    async fn run(&self, given: Given<'_>) -> Result<E, HandlerError>;
}

/// The code of a phase for one database and one command.
struct Typed<S, P, C> {
    phase: P,
    of: PhantomData<fn(S, C)>,
}

impl<S, P, C> Typed<S, P, C> {
    fn new(phase: P) -> Self {
        Self { phase, of: PhantomData }
    }
}

fn typed<C: 'static>(command: &AnyCommand) -> Result<&C, HandlerError> {
    command.downcast_ref().ok_or_else(|| HandlerError::terminal("the command is of another type than the flow's"))
}

/// The arguments of a phase. `settled` is empty before the first intent.
pub(super) struct Given<'a> {
    pub(super) tx: &'a mut dyn PhaseTx,
    pub(super) context: &'a Context,
    pub(super) command: &'a AnyCommand,
    pub(super) settled: &'a Settlements,
}

#[async_trait]
impl<S: Base, C: Send + Sync + 'static, P: FirstPhase<S, C>> Erased<First> for Typed<S, P, C> {
    async fn run(&self, given: Given<'_>) -> Result<First, HandlerError> {
        self.phase.run(&mut Phase::new(given.tx, given.context)?, typed::<C>(given.command)?).await
    }
}

#[async_trait]
impl<S: Base, C: Send + Sync + 'static, P: LocalPhase<S, C>> Erased<Local> for Typed<S, P, C> {
    async fn run(&self, given: Given<'_>) -> Result<Local, HandlerError> {
        self.phase.run(&mut Phase::new(given.tx, given.context)?, typed::<C>(given.command)?).await
    }
}

#[async_trait]
impl<S: Base, C: Send + Sync + 'static, P: SettledPhase<S, C>> Erased<Settled> for Typed<S, P, C> {
    async fn run(&self, given: Given<'_>) -> Result<Settled, HandlerError> {
        self.phase.run(&mut Phase::new(given.tx, given.context)?, typed::<C>(given.command)?, given.settled).await
    }
}

impl std::fmt::Debug for AnyFlow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AnyFlow").field("name", &self.name).field("version", &self.version).finish_non_exhaustive()
    }
}
