//! The payment that clients ask the benchmarks of operations for, and how many clients ask.

use super::work::Maker;
use super::yard::{ACCOUNTS, Yard};
use oncebox::error::HandlerError;
use oncebox::operation::{EffectTx, FingerprintWriter, IdempotentCommand, Outcome, Reply};

/// How many clients send requests at the same time.
pub(super) const CLIENTS: usize = 16;

#[derive(Debug, Clone, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Pay {
    pub(super) account: i64,
    pub(super) amount: i64,
    /// Fills the request up to the size that the benchmark says.
    pub(super) note: String,
}

impl IdempotentCommand for Pay {
    const OPERATION: &'static str = "bench_pay";
    const VERSION: u32 = 1;

    fn fingerprint(&self, _: u32, writer: &mut FingerprintWriter) {
        writer.field("account", &self.account).field("amount", &self.amount).field("note", self.note.as_str());
    }
}

impl Pay {
    pub(super) fn any() -> Self {
        Self { account: fastrand::i64(0..ACCOUNTS), amount: 1_000, note: String::new() }
    }
}

/// Pays and announces it, as a transactional operation.
pub(super) async fn paid<S: Yard>(
    mut tx: EffectTx<'_, S>,
    pay: &Pay,
    maker: &Maker,
) -> Result<Outcome<Reply>, HandlerError> {
    let id = tx.operation_id();
    S::pay(tx.connection(), id, pay.account, pay.amount).await?;
    tx.enqueue_last(maker.message())?;
    let paid = serde_json::json!({ "id": id, "status": "settled", "amount": pay.amount });
    let reply = Reply::json(201, &paid);
    reply.map(Outcome::Completed).map_err(|error| HandlerError::terminal(error.to_string()))
}

/// Milliseconds that each of the clients waits for one request.
pub(super) fn milliseconds(rate: f64) -> f64 {
    CLIENTS as f64 * 1e3 / rate
}
