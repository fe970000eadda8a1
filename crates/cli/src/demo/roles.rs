//! The roles of the demo: one takes payments, one keeps the ledger, one writes receipts. Each runs
//! in a process of its own.

use std::collections::BTreeMap;

use async_trait::async_trait;
use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::stage::Names;
use crate::common::{CommonArgs, failed};
use oncebox::app::config::Settings;
use oncebox::app::{AppError, HandlersByConsumer, run_consumers_with, stop_on_signals};
use oncebox::error::HandlerError;
use oncebox::message::{Message, NewMessage};
use oncebox::observe::Health;
use oncebox::store::{NewEmail, SqlValue, Store};
use oncebox::{HandlerTx, Handlers, MessageHandler, SqlHandler, SqlSpec};

/// A process of the demo.
#[derive(Debug, Clone, Args)]
pub(crate) struct RoleArgs {
    /// The tag in all names that this demo uses
    #[arg(long)]
    tag: String,
    #[command(subcommand)]
    role: Role,
}

#[derive(Debug, Clone, Subcommand)]
enum Role {
    /// Takes payments: writes the payment and its message in one transaction
    Till {
        /// How many payments to take
        #[arg(long)]
        messages: u64,
    },
    /// Keeps the ledger: writes an entry for each payment
    Ledger,
    /// Writes receipts as e-mail rows
    Receipts,
}

/// A payment as the message carries it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Payment {
    pub(super) payment_id: String,
    pub(super) account_id: String,
    /// The number of the payment in its account, by which the order is checked.
    pub(super) number: i64,
    pub(super) amount_minor: i64,
    pub(super) currency: String,
}

const KIND: &str = "payment.created";

impl Payment {
    pub(super) fn message(&self, names: &Names, id: Uuid) -> Result<NewMessage, AppError> {
        let message = NewMessage::json(names.topic(), KIND, self).map_err(failed)?;
        Ok(message.with_key(self.account_id.clone()).with_id(id))
    }
}

pub(crate) async fn run_role(args: RoleArgs, common: &CommonArgs) -> Result<(), AppError> {
    let settings = common.load(None)?.settings;
    oncebox::with_store_type!(&settings.database.url.0, |S| play::<S>(args, settings).await)
}

async fn play<S: Store>(RoleArgs { tag, role }: RoleArgs, mut settings: Settings) -> Result<(), AppError> {
    let stop = stop_on_signals()?;
    let names = Names { tag };
    let store: S = oncebox::app::open_store(&settings, Some((&stop, &Health::default()))).await?;
    let (consumer, handlers) = match role {
        Role::Till { messages } => return take_payments(&store, &names, messages).await,
        Role::Ledger => ("ledger", Handlers::new().on(KIND, ledger(&store, &names).await?)),
        Role::Receipts => ("receipts", Handlers::new().on(KIND, Receipts { names: names.clone() })),
    };
    // Only the consumers of the demo run.
    settings.consumer.clear();
    let handlers = HandlersByConsumer::new().consumer(&names.consumer(consumer), [names.topic()], handlers);
    run_consumers_with::<S>(&settings, handlers, Health::default(), stop).await
}

/// Takes payments one by one: business row and message in one transaction, over many accounts.
async fn take_payments<S: Store>(store: &S, names: &Names, messages: u64) -> Result<(), AppError> {
    let insert = format!(
        "insert into {} (payment_id, message_id, account_id, number, amount_minor) values (:payment, :message, :account, :number, :amount)",
        names.payments()
    );
    let insert = store.prepare(&insert).await?;
    let accounts = (messages / 20).clamp(1, 100);
    let mut numbers = vec![0_i64; usize::try_from(accounts).unwrap_or(1)];
    for index in 0..messages {
        // The accounts are chosen at random: with keys in turn, order might be kept by accident.
        let account = fastrand::usize(..numbers.len());
        numbers[account] += 1;
        let payment = Payment {
            payment_id: format!("pay_{index}"),
            account_id: format!("acc-{account}"),
            number: numbers[account],
            amount_minor: fastrand::i64(1..=100_000),
            currency: "EUR".to_owned(),
        };
        let id = Uuid::now_v7();
        let values = BTreeMap::from([
            ("payment".to_owned(), SqlValue::Text(payment.payment_id.clone())),
            ("message".to_owned(), SqlValue::Text(id.to_string())),
            ("account".to_owned(), SqlValue::Text(payment.account_id.clone())),
            ("number".to_owned(), SqlValue::Number(payment.number.to_string())),
            ("amount".to_owned(), SqlValue::Number(payment.amount_minor.to_string())),
        ]);
        let message = payment.message(names, id)?;
        loop {
            match take(store, &insert, &values, message.clone()).await {
                Ok(()) => break,
                // A transient error: nothing was committed, so the same payment is tried again.
                Err(error @ (oncebox::StoreError::Busy(_) | oncebox::StoreError::Unavailable(_))) => {
                    tracing::debug!(%error, "a payment is tried again");
                    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

async fn take<S: Store>(
    store: &S,
    insert: &S::Statement,
    values: &BTreeMap<String, SqlValue>,
    message: NewMessage,
) -> Result<(), oncebox::StoreError> {
    let mut tx = store.pool().begin().await?;
    S::execute(&mut tx, insert, values).await?;
    oncebox::store::enqueue(&mut *tx, message).await?;
    oncebox::store::commit(tx).await
}

/// The ledger is the plain sql handler, as any team can configure it. Its table has no unique key
/// on purpose: only the inbox prevents a second entry after a second delivery.
async fn ledger<S: Store>(store: &S, names: &Names) -> Result<SqlHandler<S>, AppError> {
    let spec = SqlSpec {
        statements: vec![format!(
            "insert into {} (payment_id, account_id, number, amount_minor) values (:payment, :account, :number, :amount)",
            names.ledger()
        )],
        params: [
            ("payment", "/paymentId"),
            ("account", "/accountId"),
            ("number", "/number"),
            ("amount", "/amountMinor"),
        ]
        .map(|(name, source)| (name.to_owned(), source.to_owned()))
        .into(),
        optional: Vec::new(),
    };
    SqlHandler::prepare(store, spec).await.map_err(failed)
}

struct Receipts {
    names: Names,
}

#[async_trait]
impl<S: Store> MessageHandler<S> for Receipts {
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError> {
        let payment: Payment = message.json()?;
        let email = NewEmail {
            unique_key: self.names.receipt(&payment.payment_id),
            recipient: format!("{}@example.com", payment.account_id),
            subject: format!("Receipt {}", self.names.receipt(&payment.payment_id)),
            body: format!("We received {} {} minor units.\n", payment.currency, payment.amount_minor),
        };
        tx.queue_email(&email).await?;
        Ok(())
    }
}
