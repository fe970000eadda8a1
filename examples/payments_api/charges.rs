//! `POST /charges`: a charge at an outside provider, in phases. The charge row and the intent
//! commit together, then the provider is called, then charge, message and answer commit together; a
//! crash in between is recovered, by a worker or by the client's retry.

use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use oncebox::error::Invalid;
use oncebox::http::idempotency::{IdempotencyScope, JsonCommand, TypedOperation, respond};
use oncebox::operation::phased::{
    Effect, First, FirstPhase, Flow, Phase, PhasedEngine, Settled, SettledPhase, SettledPoint, Settlement, Settlements,
};
use oncebox::operation::provider::{KeyWindow, Strategy};
use oncebox::operation::{FingerprintWriter, IdempotentCommand, Reply, SealError, Stage};
use oncebox::store::StoredOperation;
use oncebox::{HandlerError, StoreError, async_trait};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::books::{Books, Payment};
use crate::cards::{CardCharge, Cards};
use crate::charge_rows::Charge;
use crate::payments::{NewPayment, created, problem};
use crate::points::reach;
use crate::service::{App, unread};
use crate::watched::Watched;

/// For how long the provider keeps keys, and the longest that a request may be on its way.
const WINDOW: KeyWindow = KeyWindow { retention: Duration::from_secs(86_400), max_in_flight: Duration::from_secs(300) };

/// The command: the body of a payment, as an operation of its own. It is stored with the operation.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct NewCharge(NewPayment);

impl IdempotentCommand for NewCharge {
    const OPERATION: &'static str = "create_charge";
    const VERSION: u32 = 1;

    fn fingerprint(&self, version: u32, writer: &mut FingerprintWriter) {
        self.0.fingerprint(version, writer);
    }
}

impl JsonCommand for NewCharge {
    fn check(&self) -> Result<(), String> {
        self.0.check()
    }
}

/// What `/charges` needs besides the store.
#[derive(Debug)]
pub(crate) struct Charges<S: Books> {
    pub(crate) typed: TypedOperation<S, NewCharge>,
    /// None without `--provider`.
    pub(crate) phased: Option<PhasedEngine>,
    pub(crate) budget: Duration,
}

/// The phases.
pub(crate) fn flow<S: Books>(store: S, cards: Cards) -> Result<Flow<S>, Invalid> {
    let effect = Effect::new("charge", Watched::new(cards), Strategy::KeyAndQuery(WINDOW))
        .at("PROVIDER_REQUEST_SENT", SettledPoint("PROVIDER_CONFIRMED"));
    Flow::begin("create_charge", 1, Begin(effect.clone(), store)).effect(&effect, Settle).build()
}

/// The charge row and the intent. All that may refuse stands here.
struct Begin<S>(Effect<Watched>, S);

/// The charge settled or failed, the message, the answer.
struct Settle;

/// The same each time that a phase runs, and not derived from what the client sent.
fn charge_id<S: Books>(phase: &Phase<'_, S>) -> String {
    format!("pay_{}", phase.context().row("payment").simple())
}

fn payment(id: String, status: &'static str, new: &NewPayment) -> Payment {
    Payment {
        id,
        status,
        account_id: new.account_id.clone(),
        amount_minor: new.amount_minor,
        currency: new.currency.clone(),
        merchant_reference: new.merchant_reference.clone(),
        channel: new.channel.clone(),
    }
}

#[async_trait]
impl<S: Books> FirstPhase<S, NewCharge> for Begin<S> {
    async fn run(&self, phase: &mut Phase<'_, S>, NewCharge(new): &NewCharge) -> Result<First, HandlerError> {
        reach("charge.claimed").await;
        let context = phase.context();
        let payment = payment(charge_id(phase), "pending", new);
        let charge = Charge { payment, operation_id: context.operation_id().to_string() };
        let tenant = context.tenant().to_owned();
        let gone = || HandlerError::transient("another charge of this reference just failed");
        let mut standing = S::add_charge(phase.connection(), &tenant, &charge).await?.ok_or_else(gone)?;
        if standing.payment.id != charge.payment.id {
            standing = ended_by_operator(&self.1, phase, standing).await?;
            if standing.payment.status == "failed" {
                standing = S::add_charge(phase.connection(), &tenant, &charge).await?.ok_or_else(gone)?;
            }
        }
        if standing.payment.id != charge.payment.id {
            return same_reference(new, standing);
        }
        reach("charge.written").await;
        let request = CardCharge {
            amount_minor: new.amount_minor,
            currency: new.currency.clone(),
            reference: charge.payment.id.clone(),
        };
        Ok(First::Intent(self.0.intend(context, &request)?))
    }
}

/// A charge that is pending, and whose operation has ended all the same: an operator ended it, and
/// no phase ran that would have said so to the charge. It takes the end of its operation here; one
/// that failed frees its reference.
async fn ended_by_operator<S: Books>(
    store: &S,
    phase: &mut Phase<'_, S>,
    mut standing: Charge,
) -> Result<Charge, HandlerError> {
    let Ok(operation) = standing.operation_id.parse::<Uuid>() else { return Ok(standing) };
    if standing.payment.status != "pending" {
        return Ok(standing);
    }
    let (tenant, id) = (phase.context().tenant().to_owned(), standing.payment.id.clone());
    standing.payment.status = match store.operation(operation).await?.map(|operation| operation.stage) {
        Some(Stage::Succeeded) => {
            S::settle_charge(phase.connection(), &tenant, &id).await?;
            "settled"
        }
        Some(Stage::Failed) => {
            S::fail_charge(phase.connection(), &tenant, &id).await?;
            "failed"
        }
        _ => "pending",
    };
    Ok(standing)
}

/// Another key for an order that was charged, or is being charged (O14).
fn same_reference(new: &NewPayment, standing: Charge) -> Result<First, HandlerError> {
    if !new.is(&standing.payment) {
        let reply = problem(409, "MERCHANT_REFERENCE_REUSED")?;
        return Ok(First::Rejected { reply, code: Some("MERCHANT_REFERENCE_REUSED".to_owned()), binding: true });
    }
    if standing.payment.status == "pending" {
        let body = json!({ "operation": standing.operation_id, "status": "pending" });
        let location = format!("/operations/{}", standing.operation_id);
        return Ok(First::DontStore(Reply::json(202, &body)?.header("location", location)));
    }
    let (id, location) = (standing.payment.id.clone(), format!("/payments/{}", standing.payment.id));
    let mut body = serde_json::to_value(standing.payment)?;
    body["duplicate_of"] = json!(id);
    Ok(First::Response(Reply::json(200, &body)?.made("payment", &id, &location)))
}

#[async_trait]
impl<S: Books> SettledPhase<S, NewCharge> for Settle {
    async fn run(
        &self,
        phase: &mut Phase<'_, S>,
        NewCharge(new): &NewCharge,
        settled: &Settlements,
    ) -> Result<Settled, HandlerError> {
        reach("charge.settled").await;
        let (tenant, id) = (phase.context().tenant(), charge_id(phase));
        if let Some(Settlement::Failed(proof)) = settled.of("charge") {
            S::fail_charge(phase.connection(), tenant, &id).await?;
            let payment = payment(id, "failed", new);
            phase.enqueue(created("payment.failed", tenant, &payment)?).await?;
            return Ok(Settled::Failure {
                proof: proof.clone(),
                reply: problem(402, "PROVIDER_DECLINED")?,
                code: Some("PROVIDER_DECLINED".to_owned()),
            });
        }
        S::settle_charge(phase.connection(), tenant, &id).await?;
        reach("charge.booked").await;
        let payment = payment(id, "settled", new);
        // Its id is made by the outbox: this transaction commits once.
        phase.enqueue(created("payment.created", tenant, &payment)?).await?;
        reach("charge.enqueued").await;
        let location = format!("/payments/{}", payment.id);
        Ok(Settled::Response(Reply::json(201, &payment)?.made("payment", &payment.id, &location)))
    }
}

pub(crate) async fn create<S: Books>(State(app): State<App<S>>, request: Request) -> Response {
    let charges = &app.charges;
    let taken = match charges.typed.read(request).await {
        Ok(taken) => taken,
        Err(response) => return *response,
    };
    let Some(phased) = &charges.phased else { return not_configured() };
    reach("charge.received").await;
    let (endpoint, scope) = (charges.typed.endpoint(), Some(taken.scoped.scope));
    let answered = phased
        .execute_phased(endpoint, scope, taken.key, taken.scoped.command, Some(taken.permit), charges.budget)
        .await;
    reach("charge.committed").await;
    respond(answered)
}

fn not_configured() -> Response {
    let body = json!({
        "type": "urn:payments:problem:provider-not-configured",
        "title": "no provider is configured",
        "status": 503,
        "code": "PROVIDER_NOT_CONFIGURED",
        "retryable": true,
        "key_state": "unknown",
    });
    let content_type = [(header::CONTENT_TYPE, "application/problem+json")];
    (StatusCode::SERVICE_UNAVAILABLE, content_type, body.to_string()).into_response()
}

#[derive(Debug, Serialize)]
struct Shown {
    id: Uuid,
    status: &'static str,
    result: Option<Value>,
}

/// `GET /operations/ID`: where an operation stands, for its tenant.
pub(crate) async fn show<S: Books>(
    State(app): State<App<S>>,
    Extension(IdempotencyScope(scope)): Extension<IdempotencyScope>,
    Path(id): Path<String>,
) -> Response {
    let Ok(id) = id.parse::<Uuid>() else { return StatusCode::NOT_FOUND.into_response() };
    let found = match app.engine.while_there(app.store.operation(id)).await {
        Ok(Some(found)) => found,
        Ok(None) => return StatusCode::NOT_FOUND.into_response(),
        Err(error) => return unread(&error),
    };
    // Another tenant's is not there.
    if found.identity.as_ref().is_none_or(|identity| identity.tenant() != scope.tenant()) {
        return StatusCode::NOT_FOUND.into_response();
    }
    match app.engine.while_there(result(&app, &found)).await {
        Ok(result) => Json(Shown { id, status: found.stage.public(), result }).into_response(),
        Err(error) => unread(&error),
    }
}

async fn result<S: Books>(app: &App<S>, found: &StoredOperation) -> Result<Option<Value>, StoreError> {
    let (Stage::Succeeded | Stage::Failed, Some(identity)) = (found.stage, &found.identity) else { return Ok(None) };
    let Some(record) = app.store.find(identity).await?.record else { return Ok(None) };
    let status = record.answer.as_ref().map(|answer| answer.status);
    let body = match app.store.body(&record).await? {
        Some(body) => {
            let unreadable = |error: SealError| StoreError::Corrupt(error.to_string());
            let reply = app.engine.decode(app.charges.typed.endpoint(), &record, &body).map_err(unreadable)?;
            serde_json::from_slice(&reply.body).unwrap_or(Value::Null)
        }
        None => Value::Null,
    };
    Ok(Some(json!({ "status": status, "body": body })))
}
