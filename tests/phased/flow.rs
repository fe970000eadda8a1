//! A charge: a payment row and an intent, then the payment settled, a message, an answer.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use oncebox::observe::Health;
use oncebox::operation::phased::{
    Effect, First, FirstPhase, Flow, Local, LocalPhase, LocalPoint, Phase, PhasedEngine, Prepare, Provider, Recovery,
    RecoveryOptions, Settled, SettledPhase, SettledPoint, Settlement, Settlements,
};
use oncebox::operation::provider::{KeyWindow, Strategy};
use oncebox::operation::{
    AfterExpiry, Answered, Code, DriveSettings, Endpoint, Engine, EngineOptions, FingerprintWriter, IdempotentCommand,
    Key, KeyFormat, KeyGiven, Keyring, Mode, Registered, Reply, Requirement, Route, Scope, Sealer, Stage, WhileRunning,
};
use oncebox::store::{Base, Phases, StoredOperation};
use oncebox::{HandlerError, NewMessage, async_trait};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::cards::CardCharge;
use crate::scripted::Scripted;
use crate::support::eventually;
use crate::world::{Rows, SOON};

pub(crate) const KEY_AND_QUERY: Strategy = Strategy::KeyAndQuery(WINDOW);
pub(crate) const KEY: Strategy = Strategy::Key(WINDOW);
pub(crate) const WINDOW: KeyWindow =
    KeyWindow { retention: Duration::from_secs(86_400), max_in_flight: Duration::from_secs(60) };

/// The keys of the tests, and how long a request drives its operation.
pub(crate) const ONE: &str = "key-0000000000000001";
pub(crate) const TWO: &str = "key-0000000000000002";
pub(crate) const BUDGET: Duration = Duration::from_secs(20);

/// The code of a problem; none where the operation itself answered.
pub(crate) fn code(answered: &Answered) -> Option<Code> {
    match answered {
        Answered::Problem(problem) => Some(problem.code),
        Answered::Reply { .. } => None,
    }
}

/// The status of an outcome, and whether it was replayed.
pub(crate) fn status(answered: &Answered) -> (u16, bool) {
    match answered {
        Answered::Reply { reply, replayed } => (reply.status, *replayed),
        Answered::Problem(problem) => panic!("{problem:?}"),
    }
}

/// The command.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Charge {
    pub(crate) amount: i64,
}

impl IdempotentCommand for Charge {
    const OPERATION: &'static str = "create_charge";
    const VERSION: u32 = 1;

    fn fingerprint(&self, _: u32, writer: &mut FingerprintWriter) {
        writer.field("amount", &self.amount);
    }
}

/// An adapter that this flow can intend to.
pub(crate) trait Adapter: Provider + Clone {
    fn intent(
        effect: &Effect<Self>,
        phase: &oncebox::operation::phased::Context,
        amount: i64,
        reference: &str,
    ) -> Result<oncebox::operation::phased::Intent, HandlerError>;
}

impl Adapter for Scripted {
    fn intent(
        effect: &Effect<Self>,
        context: &oncebox::operation::phased::Context,
        amount: i64,
        _: &str,
    ) -> Result<oncebox::operation::phased::Intent, HandlerError>
    where
        Self: Prepare<i64>,
    {
        effect.intend(context, &amount)
    }
}

/// The example's adapter, shared.
#[derive(Debug, Clone)]
pub(crate) struct Shared(pub(crate) Arc<crate::cards::Cards>);

#[async_trait]
impl Provider for Shared {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn version(&self) -> u32 {
        self.0.version()
    }

    fn timeout(&self) -> Duration {
        self.0.timeout()
    }

    async fn send(&self, call: &oncebox::operation::phased::Call<'_>) -> oncebox::operation::phased::Sent {
        self.0.send(call).await
    }

    async fn query(&self, call: &oncebox::operation::phased::Call<'_>) -> oncebox::operation::phased::Asked {
        self.0.query(call).await
    }
}

impl Prepare<CardCharge> for Shared {
    fn prepare(&self, request: &CardCharge, key: &str) -> Result<Vec<u8>, HandlerError> {
        self.0.prepare(request, key)
    }
}

impl Adapter for Shared {
    fn intent(
        effect: &Effect<Self>,
        context: &oncebox::operation::phased::Context,
        amount: i64,
        reference: &str,
    ) -> Result<oncebox::operation::phased::Intent, HandlerError> {
        let request = CardCharge { amount_minor: amount, currency: "EUR".to_owned(), reference: reference.to_owned() };
        effect.intend(context, &request)
    }
}

/// How the phases misbehave, so many times.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trouble {
    /// The first phase ends its transaction, and writes on.
    pub(crate) first_rolls_back: Arc<AtomicU32>,
    /// The first phase commits by itself, and says that all is well.
    pub(crate) first_commits: Arc<AtomicU32>,
    /// A phase of ours fails with a transient error.
    pub(crate) local_busy: Arc<AtomicU32>,
    /// Two operations take what the other wants.
    pub(crate) clash: Option<Arc<Clash>>,
    pub(crate) local_fails: Arc<AtomicU32>,
    pub(crate) settled_panics: Arc<AtomicU32>,
    /// A statement fails, and the phase says that all is well.
    pub(crate) local_swallows: Arc<AtomicU32>,
    pub(crate) settled_swallows: Arc<AtomicU32>,
    /// A phase of ours commits by itself, and says that all is well.
    pub(crate) local_commits: Arc<AtomicU32>,
    /// So does the phase behind the effect.
    pub(crate) settled_commits: Arc<AtomicU32>,
    /// By which statement; by COMMIT where nothing is said.
    pub(crate) commits_by: Option<&'static str>,
}

impl Trouble {
    fn commit(&self) -> String {
        self.commits_by.unwrap_or("commit").to_owned()
    }
}

/// A deadlock of the operations over 700 and 701, each of which comes here once before it has both
/// rows.
#[derive(Debug)]
pub(crate) struct Clash {
    pub(crate) first_phase: bool,
    /// Whether the handler hides what the database said in an error of its own.
    pub(crate) hidden: bool,
    /// Whether it goes on as if nothing had been.
    pub(crate) swallowed: bool,
    pub(crate) meet: tokio::sync::Barrier,
    pub(crate) runs: [AtomicU32; 2],
}

impl Clash {
    pub(crate) fn new(first_phase: bool) -> Self {
        let runs = [AtomicU32::new(0), AtomicU32::new(0)];
        Self { first_phase, hidden: false, swallowed: false, meet: tokio::sync::Barrier::new(2), runs }
    }

    /// How often both ran that phase.
    pub(crate) fn runs(&self) -> u32 {
        self.runs.iter().map(|runs| runs.load(Ordering::SeqCst)).sum()
    }

    async fn run<S: Rows>(&self, first_phase: bool, phase: &mut Phase<'_, S>, amount: i64) -> Result<(), HandlerError> {
        if first_phase != self.first_phase {
            return Ok(());
        }
        let (one, two, runs) = if amount == 700 { ("x", "y", &self.runs[0]) } else { ("y", "x", &self.runs[1]) };
        let update = |name| format!("update place set n = n + 1 where name = '{name}'");
        S::run(phase.connection(), update(one)).await?;
        if runs.fetch_add(1, Ordering::SeqCst) == 0 {
            self.meet.wait().await;
        }
        match S::run(phase.connection(), update(two)).await {
            Err(_) if self.swallowed => {
                let _ = S::run(phase.connection(), "insert into step (name) values ('after')".to_owned()).await;
                Ok(())
            }
            Err(error) if self.hidden => Err(HandlerError::retryable(format!("the place: {error}"))),
            other => Ok(other?),
        }
    }
}

/// It takes the phase and its mark back, and commits something else.
pub(crate) const COMMITS_BESIDE: &str = "rollback; insert into step (name) values ('after'); commit";

/// It fails everywhere, and aborts the transaction on PostgreSQL.
const SWALLOWED: &str = "insert into no_such_table (a) values (1)";

fn takes_one(count: &AtomicU32) -> bool {
    count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

/// With a recovery point before the intent where there is one to be.
pub(crate) struct Begin<P> {
    effect: Effect<P>,
    local: bool,
    trouble: Trouble,
}

struct Intend<P> {
    effect: Effect<P>,
    trouble: Trouble,
}

struct Settle {
    trouble: Trouble,
}

pub(crate) const CREATED: LocalPoint = LocalPoint("LOCAL_PAYMENT_CREATED");

fn payment<S: Base>(phase: &Phase<'_, S>) -> Uuid {
    phase.context().row("payment")
}

#[async_trait]
impl<S: Rows, P: Adapter> FirstPhase<S, Charge> for Begin<P> {
    async fn run(&self, phase: &mut Phase<'_, S>, command: &Charge) -> Result<First, HandlerError> {
        let id = payment(phase);
        let amount = command.amount;
        let sql =
            format!("insert into payment (id, reference, amount, state) values ('{id}', 'r', {amount}, 'pending')");
        S::run(phase.connection(), sql).await?;
        if let Some(clash) = &self.trouble.clash {
            clash.run(true, phase, amount).await?;
        }
        if takes_one(&self.trouble.first_rolls_back) {
            S::run(phase.connection(), "rollback".to_owned()).await?;
            S::run(phase.connection(), "insert into step (name) values ('after')".to_owned()).await?;
        }
        if takes_one(&self.trouble.first_commits) {
            S::run(phase.connection(), self.trouble.commit()).await?;
        }
        match amount {
            1 => {
                let reply = Reply::json(402, &json!({ "code": "INSUFFICIENT_FUNDS" }))?;
                return Ok(First::Rejected { reply, code: Some("INSUFFICIENT_FUNDS".to_owned()), binding: true });
            }
            2 => return Ok(First::Rejected { reply: Reply::new(404), code: None, binding: false }),
            3 => return Ok(First::DontStore(Reply::new(409))),
            4 => return Ok(First::Retryable(Reply::new(503))),
            5 => return Err(HandlerError::retryable("the first phase fails")),
            6 => panic!("the first phase panics"),
            7 => return Ok(First::Response(Reply::json(201, &json!({ "id": id }))?)),
            _ => {}
        }
        if self.local {
            return Ok(First::RecoveryPoint(CREATED));
        }
        Ok(First::Intent(P::intent(&self.effect, phase.context(), amount, &id.to_string())?))
    }
}

#[async_trait]
impl<S: Rows, P: Adapter> LocalPhase<S, Charge> for Intend<P> {
    async fn run(&self, phase: &mut Phase<'_, S>, command: &Charge) -> Result<Local, HandlerError> {
        S::run(phase.connection(), "insert into step (name) values ('intend')".to_owned()).await?;
        if let Some(clash) = &self.trouble.clash {
            clash.run(false, phase, command.amount).await?;
        }
        if takes_one(&self.trouble.local_swallows) {
            let _ = S::run(phase.connection(), SWALLOWED.to_owned()).await;
        }
        if takes_one(&self.trouble.local_commits) {
            S::run(phase.connection(), self.trouble.commit()).await?;
        }
        if takes_one(&self.trouble.local_busy) {
            return Err(HandlerError::transient("the database asks to try again"));
        }
        if takes_one(&self.trouble.local_fails) {
            return Err(HandlerError::retryable("the local phase fails"));
        }
        let id = payment(phase).to_string();
        Ok(Local::Intent(P::intent(&self.effect, phase.context(), command.amount, &id)?))
    }
}

#[async_trait]
impl<S: Rows> SettledPhase<S, Charge> for Settle {
    async fn run(
        &self,
        phase: &mut Phase<'_, S>,
        command: &Charge,
        settled: &Settlements,
    ) -> Result<Settled, HandlerError> {
        let id = payment(phase);
        let state = match settled.of("charge") {
            Some(Settlement::Succeeded) => "settled",
            _ => "failed",
        };
        S::run(phase.connection(), format!("update payment set state = '{state}' where id = '{id}'")).await?;
        let message = NewMessage::text("payments", format!("payment.{state}"), json!({ "paymentId": id }).to_string());
        phase.enqueue(message).await?;
        assert!(!takes_one(&self.trouble.settled_panics), "the settled phase panics");
        if takes_one(&self.trouble.settled_swallows) {
            let _ = S::run(phase.connection(), SWALLOWED.to_owned()).await;
        }
        if takes_one(&self.trouble.settled_commits) {
            S::run(phase.connection(), self.trouble.commit()).await?;
        }
        Ok(match settled.of("charge") {
            Some(Settlement::Failed(proof)) => Settled::Failure {
                proof: proof.clone(),
                reply: Reply::json(402, &json!({ "code": "PROVIDER_DECLINED" }))?,
                code: Some("PROVIDER_DECLINED".to_owned()),
            },
            _ => Settled::Response(Reply::json(201, &json!({ "id": id, "amount": command.amount }))?.made(
                "payment",
                &id.to_string(),
                &format!("/payments/{id}"),
            )),
        })
    }
}

/// How a service is put together.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) strategy: Strategy,
    pub(crate) lease: Duration,
    pub(crate) settings: DriveSettings,
    pub(crate) local: bool,
    pub(crate) trouble: Trouble,
    pub(crate) version: u32,
    pub(crate) deployment: Option<Uuid>,
    pub(crate) sealer: Sealer,
    pub(crate) keyring: Keyring,
    pub(crate) while_running: WhileRunning,
    pub(crate) requirement: Requirement,
    /// How many bytes a tenant may have stored.
    pub(crate) stored_max: Option<u64>,
}

impl Plan {
    pub(crate) fn new(strategy: Strategy) -> Self {
        let settings = DriveSettings {
            backoff_first: Duration::from_millis(50),
            backoff_max: Duration::from_millis(400),
            ..DriveSettings::default()
        };
        Self {
            strategy,
            lease: Duration::from_secs(30),
            settings,
            local: false,
            trouble: Trouble::default(),
            version: 1,
            deployment: None,
            sealer: Sealer::default(),
            keyring: Keyring::plain(),
            while_running: WhileRunning::Conflict,
            requirement: Requirement::Required,
            stored_max: None,
        }
    }

    /// A lease that is over soon, for a driver that dies; a call of a second fits into it on a
    /// machine that stands still for some.
    pub(crate) fn short_lease(self) -> Self {
        Self { lease: Duration::from_secs(6), ..self }
    }

    /// A lease that nobody sees the end of, nor a renewal of: a test ends it by hand.
    pub(crate) fn long_lease(self) -> Self {
        Self { lease: Duration::from_secs(600), ..self }
    }

    /// Each drive ends after one call.
    pub(crate) fn one_call(mut self) -> Self {
        self.settings.calls_per_drive = 1;
        self
    }

    pub(crate) fn route(&self) -> Route {
        Route {
            key_format: KeyFormat::Opaque,
            after_expiry: AfterExpiry::ExecuteAsNew,
            while_running: self.while_running,
            requirement: self.requirement,
            operation_path: Some("/operations/".to_owned()),
            lease: self.lease,
            timeout: self.lease / 3,
            completion_budget: self.lease / 6,
            ..Route::new(Mode::Phased)
        }
    }
}

/// A process of the service, as far as a phased operation goes.
#[derive(Debug)]
pub(crate) struct Service<S: Phases> {
    pub(crate) store: S,
    pub(crate) engine: Engine<S>,
    pub(crate) endpoint: Registered,
    pub(crate) phased: PhasedEngine,
}

pub(crate) fn flow<S: Rows, P: Adapter + Debug>(plan: &Plan, provider: P) -> Flow<S> {
    let effect =
        Effect::new("charge", provider, plan.strategy).at("PROVIDER_REQUEST_SENT", SettledPoint("PROVIDER_CONFIRMED"));
    let first = Begin { effect: effect.clone(), local: plan.local, trouble: plan.trouble.clone() };
    Flow::begin("create_charge", plan.version, first)
        .local(CREATED, Intend { effect: effect.clone(), trouble: plan.trouble.clone() })
        .effect(&effect, Settle { trouble: plan.trouble.clone() })
        .build()
        .unwrap()
}

impl<S: Rows> Service<S> {
    pub(crate) async fn start<P: Adapter + Debug>(store: &S, plan: &Plan, provider: P) -> Self {
        let options = EngineOptions {
            sealer: plan.sealer.clone(),
            keyring: plan.keyring.clone(),
            stored_bytes_per_tenant_max: plan.stored_max,
            driving: plan.settings,
            ..EngineOptions::default()
        };
        let engine = Engine::new(store.clone(), options);
        let endpoint = Endpoint::typed::<Charge>(plan.route());
        let endpoint = engine.protect(endpoint).unwrap();
        let deployment = match plan.deployment {
            Some(deployment) => deployment,
            None => store.deployment().await.unwrap(),
        };
        let phased = PhasedEngine::new(&engine, deployment, [(flow(plan, provider), &endpoint)]).unwrap();
        Self { store: store.clone(), engine, endpoint, phased }
    }

    /// A request. Where a busy machine gives it no sign of life of the database in time, nothing
    /// was begun, and it is asked again, as a client does.
    pub(crate) async fn ask(&self, key: &str, amount: i64, budget: Duration) -> Answered {
        eventually("an answer that the database gave", SOON, || async {
            let answered = self.ask_once(key, amount, budget).await;
            (code(&answered) != Some(Code::StoreUnavailable)).then_some(answered)
        })
        .await
    }

    /// A request that may be refused because the database is not there.
    pub(crate) async fn ask_once(&self, key: &str, amount: i64, budget: Duration) -> Answered {
        let scope = Scope::new("t1", "p1").unwrap();
        let key = KeyGiven::Given(Key::parse(key.as_bytes(), KeyFormat::Opaque).unwrap());
        self.phased.execute_phased(&self.endpoint, Some(scope), key, Charge { amount }, None, budget).await
    }

    /// The request again and again, as a client does, until an outcome is answered.
    pub(crate) async fn ask_until_known(&self, key: &str, amount: i64) -> (Reply, bool) {
        eventually("an outcome", SOON, || async {
            match self.ask(key, amount, Duration::from_secs(2)).await {
                Answered::Reply { reply, replayed } => Some((reply, replayed)),
                Answered::Problem(problem) => {
                    assert!(problem.code.retryable() || problem.status == 500, "{problem:?}");
                    None
                }
            }
        })
        .await
    }

    /// A recovery worker.
    pub(crate) fn recover(&self) -> Worker {
        self.recover_with(Health::default())
    }

    /// One that says there how it is.
    pub(crate) fn recover_with(&self, health: Health) -> Worker {
        let stop = CancellationToken::new();
        let options = RecoveryOptions { every: Duration::from_millis(50), ..RecoveryOptions::default() };
        let recovery = Recovery::new(&self.phased, options, health);
        Worker { running: tokio::spawn(recovery.run(stop.clone())), stop }
    }

    /// The only operation.
    pub(crate) async fn operation(&self) -> StoredOperation {
        let ids = self.store.operation_ids().await;
        assert_eq!(ids.len(), 1, "one operation");
        self.store.operation(ids[0]).await.unwrap().unwrap()
    }

    /// Waits until the operation has succeeded.
    pub(crate) async fn succeeds(&self) -> StoredOperation {
        eventually("it succeeds", SOON, || async {
            Some(self.operation().await).filter(|operation| operation.stage == Stage::Succeeded)
        })
        .await
    }

    /// Waits until the operation is left to an operator, and gives the reason.
    pub(crate) async fn is_parked(&self) -> String {
        eventually("it is parked", SOON, || async { self.operation().await.parked }).await
    }

    /// Asks once, and lets a worker recover until the three attempts of the plan are used up. Then
    /// it is left to an operator, as unknown.
    pub(crate) async fn uses_up_three_attempts(&self) {
        assert_eq!(code(&self.ask(ONE, 700, BUDGET).await), Some(Code::RecoveryPending));
        let worker = self.recover();
        let parked = self.is_parked().await;
        worker.stop().await;
        let operation = self.operation().await;
        assert_eq!((parked.as_str(), operation.stage, operation.attempts), ("attempts-used-up", Stage::Unknown, 3));
    }

    pub(crate) async fn payments(&self, state: &str) -> i64 {
        self.store.number(&format!("select count(*) from payment where state = '{state}'")).await
    }

    pub(crate) async fn messages(&self) -> i64 {
        self.store.number(&format!("select count(*) from {}", S::table("outbox"))).await
    }

    /// There is one payment, in this state, and one message.
    pub(crate) async fn ended_once(&self, state: &str) {
        assert_eq!(self.store.number("select count(*) from payment").await, 1);
        assert_eq!((self.payments(state).await, self.messages().await), (1, 1));
    }
}

/// A worker that runs.
pub(crate) struct Worker {
    stop: CancellationToken,
    running: JoinHandle<Result<(), oncebox::StoreError>>,
}

impl Worker {
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.running.await.unwrap().unwrap();
    }
}
