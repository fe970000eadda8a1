//! What is refused before a request is taken.

use std::time::Duration;

use oncebox::error::Invalid;
use oncebox::operation::phased::{
    Effect, First, FirstPhase, Flow, Phase, PhasedEngine, Settled, SettledPhase, SettledPoint, Settlements,
};
use oncebox::operation::provider::{KeyWindow, Strategy};
use oncebox::operation::{Endpoint, Engine, EngineOptions, Mode, Registered, Reply, Route};
use oncebox::store::sqlite::SqliteStore;
use oncebox::{HandlerError, async_trait};
use uuid::Uuid;

use crate::flow::{Charge, KEY, Plan, WINDOW, flow};
use crate::scripted::Scripted;

struct Nothing;

#[async_trait]
impl FirstPhase<SqliteStore, Charge> for Nothing {
    async fn run(&self, _: &mut Phase<'_, SqliteStore>, _: &Charge) -> Result<First, HandlerError> {
        Ok(First::Response(Reply::new(204)))
    }
}

#[async_trait]
impl SettledPhase<SqliteStore, Charge> for Nothing {
    async fn run(&self, _: &mut Phase<'_, SqliteStore>, _: &Charge, _: &Settlements) -> Result<Settled, HandlerError> {
        Ok(Settled::Response(Reply::new(204)))
    }
}

fn effect(name: &'static str, strategy: Strategy) -> Effect<Scripted> {
    Effect::new(name, Scripted::default(), strategy)
}

fn of(effects: &[Effect<Scripted>]) -> Result<Flow<SqliteStore>, Invalid> {
    let begun = Flow::begin("create_charge", 1, Nothing);
    effects.iter().fold(begun, |flow, effect| flow.effect(effect, Nothing)).build()
}

fn assert_says(refused: &Invalid, what: &str) {
    assert!(refused.to_string().contains(what), "{refused}");
}

async fn engine(directory: &std::path::Path) -> Engine<SqliteStore> {
    Engine::new(crate::world::sqlite(directory).await, EngineOptions::default())
}

// Shown by: leaving `validate` out.
#[test]
fn o6_a_window_in_which_nothing_can_be_repeated_is_refused() {
    let window = KeyWindow { retention: Duration::from_secs(60), max_in_flight: Duration::from_secs(60) };
    for strategy in [Strategy::Key(window), Strategy::KeyAndQuery(window)] {
        let refused = of(&[effect("charge", strategy)]).expect_err("refused");
        let why = "`max_in_flight` (1m) must be shorter than the provider's `retention` of keys (1m)";
        assert_eq!(refused.to_string(), format!("flow `create_charge`, effect `charge`: {why}"));
    }
    of(&[effect("charge", Strategy::Key(WINDOW))]).expect("good");
    let brief = KeyWindow { max_in_flight: Duration::from_millis(900), ..WINDOW };
    let refused = of(&[effect("charge", Strategy::Key(brief))]).expect_err("a call may take a second");
    assert_says(&refused, "flow `create_charge`, effect `charge`: `max_in_flight` of its window");
}

#[test]
fn every_point_and_effect_is_registered_once_and_what_is_undone_is_there() {
    let refused = |effects: &[Effect<Scripted>]| of(effects).expect_err("refused");
    assert_says(&refused(&[effect("charge", KEY), effect("charge", KEY)]), "`charge:sent` is registered twice");
    let shared = effect("refund", KEY).at("charge:sent", SettledPoint("refund:settled"));
    assert_says(&refused(&[effect("charge", KEY), shared]), "`charge:sent` is registered twice");
    let undo = effect("refund", KEY).undoing("nothing");
    let flow = Flow::begin("create_charge", 1, Nothing).effect(&effect("charge", KEY), Nothing).undo(&undo, Nothing);
    assert_says(&flow.build().expect_err("refused"), "effect `refund` undoes `nothing`, which is no effect");
}

// Shown by: leaving `fits` out.
#[tokio::test]
async fn o5_a_call_that_does_not_fit_into_the_lease_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let engine = engine(directory.path()).await;
    let plan = Plan::new(KEY).short_lease();
    let endpoint = engine.protect(Endpoint::typed::<Charge>(plan.route())).unwrap();
    let slow = Scripted::default().timeout(plan.lease * 2 / 3);
    let refused = PhasedEngine::new(&engine, Uuid::nil(), [(flow(&plan, slow), &endpoint)]).expect_err("refused");
    assert_says(&refused, "effect `charge`: its timeout must be longer than zero and shorter than two thirds");
    let never = Scripted::default().timeout(Duration::ZERO);
    let refused = PhasedEngine::new(&engine, Uuid::nil(), [(flow(&plan, never), &endpoint)]).expect_err("refused");
    assert_says(&refused, "its timeout must be longer than zero");
    let quick = Scripted::default().timeout(plan.lease * 2 / 3 - Duration::from_millis(1));
    PhasedEngine::new(&engine, Uuid::nil(), [(flow(&plan, quick), &endpoint)]).expect("good");
}

#[tokio::test]
async fn a_flow_stands_under_the_name_and_mode_of_its_operation_once() {
    let directory = tempfile::tempdir().unwrap();
    let engine = engine(directory.path()).await;
    let plan = Plan::new(KEY);
    let here = engine.protect(Endpoint::typed::<Charge>(plan.route())).unwrap();
    let other = engine.protect(Endpoint::raw("other", plan.route())).unwrap();
    let of = || flow(&plan, Scripted::default());
    let phased = |operation: &Registered| PhasedEngine::new(&engine, Uuid::nil(), [(of(), operation)]);
    assert_says(&phased(&other).expect_err("refused"), "is not of the operation `other`: give them one name");
    assert!(phased(&here).is_ok());
    let twice = PhasedEngine::new(&engine, Uuid::nil(), [(of(), &here), (of(), &here)]);
    assert_says(&twice.expect_err("refused"), "is registered twice with version 1");
    // Another engine's: this one has an operation of that name.
    let other = Engine::new(SqliteStore::clone(engine.store()), EngineOptions::default());
    let edge = other.protect(Endpoint::typed::<Charge>(Route::new(Mode::Edge))).unwrap();
    assert_says(&phased(&edge).expect_err("refused"), "is of mode edge: phases take mode phased");
}
