//! Effects that are undone: with an identity of their own, and a failure only where nothing that
//! was done stands (O13, M84).

use std::time::Duration;

use oncebox::operation::phased::{
    Effect, First, FirstPhase, Flow, Phase, PhasedEngine, Settled, SettledPhase, Settlement, Settlements, Undo,
};
use oncebox::operation::provider::Answer;
use oncebox::operation::{
    Answered, Code, Endpoint, Engine, EngineOptions, Key, KeyFormat, KeyGiven, Reply, Scope, Stage,
};
use oncebox::store::StoredOperation;
use oncebox::{HandlerError, NewMessage, async_trait};

use crate::flow::{Charge, KEY, Plan, code};
use crate::scripted::{Scripted, declined, done};
use crate::support::eventually;
use crate::world::{Rows, SOON};

/// Stock is reserved, the card is charged, and a reservation without a charge is released.
#[derive(Clone)]
struct Order {
    reserve: Effect<Scripted>,
    charge: Effect<Scripted>,
    release: Undo<Scripted>,
    /// Whether it undoes what stands before it says that it failed.
    careful: bool,
}

struct Reserve(Order);
struct Reserved(Order);
struct Charged(Order);
struct Released;

#[async_trait]
impl<S: Rows> FirstPhase<S, Charge> for Reserve {
    async fn run(&self, phase: &mut Phase<'_, S>, command: &Charge) -> Result<First, HandlerError> {
        Ok(First::Intent(self.0.reserve.intend(phase.context(), &command.amount)?))
    }
}

#[async_trait]
impl<S: Rows> SettledPhase<S, Charge> for Reserved {
    async fn run(&self, phase: &mut Phase<'_, S>, command: &Charge, _: &Settlements) -> Result<Settled, HandlerError> {
        Ok(Settled::Intent(self.0.charge.intend(phase.context(), &command.amount)?))
    }
}

#[async_trait]
impl<S: Rows> SettledPhase<S, Charge> for Charged {
    async fn run(
        &self,
        phase: &mut Phase<'_, S>,
        command: &Charge,
        settled: &Settlements,
    ) -> Result<Settled, HandlerError> {
        assert!(matches!(settled.of("reserve"), Some(Settlement::Succeeded)));
        assert_eq!(settled.saw("reserve"), Some("answer to send 1"));
        Ok(match settled.of("charge") {
            Some(Settlement::Failed(_)) if self.0.careful => {
                Settled::Compensate(self.0.release.intend(phase.context(), &command.amount)?)
            }
            Some(Settlement::Failed(proof)) => {
                Settled::Failure { proof: proof.clone(), reply: Reply::new(402), code: None }
            }
            _ => Settled::Response(Reply::new(201)),
        })
    }
}

#[async_trait]
impl<S: Rows> SettledPhase<S, Charge> for Released {
    async fn run(&self, phase: &mut Phase<'_, S>, _: &Charge, settled: &Settlements) -> Result<Settled, HandlerError> {
        let proof = match settled.of("release") {
            Some(Settlement::Undone(proof)) => proof,
            Some(Settlement::NotUndone) => {
                return Err(HandlerError::terminal("the reservation stands, and nothing can be done about it"));
            }
            other => panic!("{other:?}"),
        };
        phase.enqueue(NewMessage::text("orders", "order.failed", "{}")).await?;
        Ok(Settled::Failure { proof: proof.clone(), reply: Reply::new(402), code: Some("DECLINED".to_owned()) })
    }
}

async fn ordered<S: Rows>(store: &S, told: &Scripted, careful: bool) -> (Answered, StoredOperation) {
    let order = Order {
        reserve: Effect::new("reserve", told.clone(), KEY),
        charge: Effect::new("charge", told.clone(), KEY),
        release: Effect::new("release", told.clone(), KEY).undoing("reserve"),
        careful,
    };
    let flow = Flow::begin("create_charge", 1, Reserve(order.clone()))
        .effect(&order.reserve, Reserved(order.clone()))
        .effect(&order.charge, Charged(order.clone()))
        .undo(&order.release, Released)
        .build()
        .unwrap();
    let engine = Engine::new(store.clone(), EngineOptions::default());
    let endpoint = engine.protect(Endpoint::typed::<Charge>(Plan::new(KEY).route())).unwrap();
    let deployment = store.deployment().await.unwrap();
    let phased = PhasedEngine::new(&engine, deployment, [(flow, &endpoint)]).unwrap();
    let (scope, key) =
        (Scope::new("t1", "p1").unwrap(), Key::parse(b"key-0000000000000001", KeyFormat::Opaque).unwrap());
    let budget = Duration::from_secs(20);
    let command = Charge { amount: 700 };
    let answered = eventually("an answer that the database gave", SOON, || async {
        let (scope, key, command) = (Some(scope.clone()), KeyGiven::Given(key.clone()), command.clone());
        let answered = phased.execute_phased(&endpoint, scope, key, command, None, budget).await;
        (code(&answered) != Some(Code::StoreUnavailable)).then_some(answered)
    })
    .await;
    let ids = store.operation_ids().await;
    (answered, store.operation(ids[0]).await.unwrap().unwrap())
}

// Shown by: one identity for effect and undoing (the provider key is there already).
async fn o13_m84_what_stands_is_undone_under_its_own_identity_before_a_failure<S: Rows>(store: S) {
    let told = Scripted::default().answers(done()).answers(declined()).answers(Answer::status(500)).answers(done());
    let (answered, operation) = ordered(&store, &told, true).await;
    assert!(matches!(answered, Answered::Reply { ref reply, .. } if reply.status == 402), "{answered:?}");
    assert_eq!(operation.stage, Stage::Failed);
    let keys: Vec<String> = told.arrived().into_iter().map(|one| one.key).collect();
    assert_eq!((keys.len(), keys[2] == keys[3]), (4, true), "the release was sent twice, under one key");
    assert!(keys[0] != keys[1] && keys[1] != keys[2] && keys[0] != keys[2]);
    let outcomes: Vec<_> =
        operation.intents.iter().map(|one| (one.intent.effect.as_str(), one.outcome.as_deref())).collect();
    for expected in [("reserve", "succeeded"), ("charge", "failed"), ("release", "succeeded")] {
        assert!(outcomes.contains(&(expected.0, Some(expected.1))), "{outcomes:?}");
    }
    assert_eq!(store.number(&format!("select count(*) from {}", S::table("outbox"))).await, 1);
}

// Shown by: leaving `standing` out: FAILED, and the stock is reserved for ever.
async fn o13_a_failure_with_a_standing_effect_goes_to_a_person<S: Rows>(store: S) {
    let told = Scripted::default().answers(done()).answers(declined());
    let (answered, operation) = ordered(&store, &told, false).await;
    assert_eq!(code(&answered), Some(Code::OutcomeUnknown));
    assert_eq!(operation.parked.as_deref(), Some("failure-with-a-standing-effect"));
}

async fn o13_what_cannot_be_undone_goes_to_a_person<S: Rows>(store: S) {
    let told = Scripted::default().answers(done()).answers(declined()).answers(declined());
    let (_, operation) = ordered(&store, &told, true).await;
    assert_eq!((operation.stage, operation.parked.as_deref()), (Stage::Unknown, Some("phase-failed")));
    let messages = format!("select count(*) from {}", S::table("outbox"));
    assert_eq!((told.arrived().len(), store.number(&messages).await), (3, 0), "the release was sent once, and refused");
}

crate::on_all! {
    o13_m84_what_stands_is_undone_under_its_own_identity_before_a_failure;
    o13_a_failure_with_a_standing_effect_goes_to_a_person;
    o13_what_cannot_be_undone_goes_to_a_person;
}
