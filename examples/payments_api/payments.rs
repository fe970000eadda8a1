//! `POST /payments`: the typed operation. Payment, message and answer stand in one commit.

use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use oncebox::http::idempotency::{IdempotencyScope, JsonCommand, Scoped};
use oncebox::operation::{EffectTx, FingerprintWriter, IdempotentCommand, Outcome, Reply};
use oncebox::{HandlerError, NewMessage};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::books::{Books, Payment};
use crate::points::reach;
use crate::service::App;

/// The body of a payment, and of a charge.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct NewPayment {
    pub(crate) account_id: String,
    pub(crate) amount_minor: i64,
    pub(crate) currency: String,
    pub(crate) merchant_reference: String,
    // The default is filled in before the fingerprint is made: a missing channel and `web` are one
    // command.
    #[serde(default = "web")]
    pub(crate) channel: String,
}

fn web() -> String {
    "web".to_owned()
}

impl IdempotentCommand for NewPayment {
    const OPERATION: &'static str = "create_payment";
    const VERSION: u32 = 1;

    fn fingerprint(&self, _: u32, writer: &mut FingerprintWriter) {
        writer.field("accountId", &self.account_id).field("amountMinor", &self.amount_minor);
        writer.field("currency", &self.currency).field("merchantReference", &self.merchant_reference);
        writer.field("channel", &self.channel);
    }
}

impl JsonCommand for NewPayment {
    fn check(&self) -> Result<(), String> {
        let text = |name: &str, text: &str| {
            let good = (1..=64).contains(&text.chars().count()) && !text.contains('\0');
            good.then_some(()).ok_or_else(|| format!("{name} needs 1 to 64 characters"))
        };
        text("accountId", &self.account_id)?;
        text("merchantReference", &self.merchant_reference)?;
        text("channel", &self.channel)?;
        if self.amount_minor < 1 {
            return Err("amountMinor is a whole number of at least 1".to_owned());
        }
        if self.currency.len() != 3 || !self.currency.bytes().all(|byte| byte.is_ascii_uppercase()) {
            return Err("currency is three letters, A to Z".to_owned());
        }
        Ok(())
    }
}

impl NewPayment {
    pub(crate) fn is(&self, payment: &Payment) -> bool {
        (self.amount_minor, &self.currency, &self.channel)
            == (payment.amount_minor, &payment.currency, &payment.channel)
    }
}

pub(crate) async fn create<S: Books>(State(app): State<App<S>>, request: Request) -> Response {
    reach("payment.received").await;
    let response = app.payments.serve(request, |asked, tx| Box::pin(pay(asked, tx))).await;
    reach("payment.committed").await;
    response
}

async fn pay<S: Books>(asked: &Scoped<NewPayment>, mut tx: EffectTx<'_, S>) -> Result<Outcome<Reply>, HandlerError> {
    reach("payment.claimed").await;
    let (tenant, new) = (asked.scope.tenant(), &asked.command);
    // Made from the operation's own id: the same however often this runs.
    let id = format!("pay_{}", tx.operation_id().simple());
    let payment = Payment {
        id,
        status: "settled",
        account_id: new.account_id.clone(),
        amount_minor: new.amount_minor,
        currency: new.currency.clone(),
        merchant_reference: new.merchant_reference.clone(),
        channel: new.channel.clone(),
    };
    let standing = S::add_payment(tx.connection(), tenant, &payment).await?;
    if standing.id != payment.id {
        return if new.is(&standing) { duplicate_of(standing) } else { refused(409, "MERCHANT_REFERENCE_REUSED") };
    }
    if !S::debit(tx.connection(), tenant, &new.account_id, new.amount_minor).await? {
        return refused(402, "INSUFFICIENT_FUNDS");
    }
    reach("payment.written").await;
    tx.enqueue_last(created("payment.created", tenant, &payment)?)?;
    reach("payment.enqueued").await;
    let reply = Reply::json(201, &payment)?.made("payment", &payment.id, &format!("/payments/{}", payment.id));
    Ok(Outcome::Completed(reply))
}

/// What the world is told of a payment.
pub(crate) fn created(kind: &str, tenant: &str, payment: &Payment) -> Result<NewMessage, serde_json::Error> {
    let payload = json!({
        "paymentId": payment.id,
        "accountId": payment.account_id,
        "amountMinor": payment.amount_minor,
        "currency": payment.currency,
        "merchantReference": payment.merchant_reference,
    });
    let message = NewMessage::json("payments", kind, &payload)?;
    Ok(message.with_key(&payment.account_id).with_header("tenant", tenant))
}

/// The same order under another key: the first payment is its answer.
fn duplicate_of(standing: Payment) -> Result<Outcome<Reply>, HandlerError> {
    let (id, location) = (standing.id.clone(), format!("/payments/{}", standing.id));
    let mut body = serde_json::to_value(standing)?;
    body["duplicate_of"] = json!(id);
    Ok(Outcome::Completed(Reply::json(200, &body)?.made("payment", &id, &location)))
}

/// A refusal that holds for this key for ever.
pub(crate) fn refused(status: u16, code: &str) -> Result<Outcome<Reply>, HandlerError> {
    Ok(Outcome::Rejected { answer: problem(status, code)?, binding: true })
}

/// The body of a refusal (RFC 9457).
pub(crate) fn problem(status: u16, code: &str) -> Result<Reply, serde_json::Error> {
    let body = json!({
        "type": format!("urn:payments:problem:{}", code.to_lowercase().replace('_', "-")),
        "title": code.replace('_', " ").to_lowercase(),
        "status": status,
        "code": code,
        "retryable": false,
        "key_state": "spent",
    });
    let reply = Reply { body: serde_json::to_vec(&body)?, ..Reply::new(status) };
    Ok(reply.header("content-type", "application/problem+json"))
}

pub(crate) async fn show<S: Books>(
    State(app): State<App<S>>,
    axum::Extension(IdempotencyScope(scope)): axum::Extension<IdempotencyScope>,
    Path(id): Path<String>,
) -> Response {
    let found = async {
        match app.store.payment(scope.tenant(), &id).await {
            Ok(None) => app.store.charge(scope.tenant(), &id).await,
            found => found,
        }
    };
    match app.engine.while_there(found).await {
        Ok(Some(payment)) => axum::Json(payment).into_response(),
        // Another tenant's is not there.
        Ok(None) => StatusCode::NOT_FOUND.into_response(),
        Err(error) => crate::service::unread(&error),
    }
}
