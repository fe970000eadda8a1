//! A process without the service that is built with its flows: it recovers what a dead service
//! left, and carries its message (O22).

use std::process::Command;

use oncebox::sqlx::sqlite::SqliteConnectOptions;
use oncebox::sqlx::{self, ConnectOptions};
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, StoreOptions};
use serde_json::Value;

use crate::api::{Api, Plan, SOON, body};
use crate::kills::kill_at;
use crate::ledgers::{Entries, Tables, provider_books, sorted};
use crate::process::Process;
use crate::provider::ProviderProcess;
use crate::support::{eventually, example, unique};

/// What a service left that was killed in the middle of a charge.
struct Left {
    directory: tempfile::TempDir,
    store: SqliteStore,
    provider: ProviderProcess,
    plan: Plan,
    key: String,
    /// The file of the broker, which is not there yet.
    broker: String,
}

async fn left_at(point: &'static str) -> Left {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name).display().to_string();
    let (database, broker) = (format!("sqlite://{}", file("payments.db")), file("broker.db"));
    let store = SqliteStore::connect(&StoreOptions { create: true, ..StoreOptions::new(&database) }).await.unwrap();
    let provider = ProviderProcess::start();
    let url = Some(provider.url.clone());
    let plan = Plan { database, provider: url, lease: 3.0, budget: 2.0, recovery: false, pause_at: None };
    let key = unique("worker-key-of-a-request");
    kill_at(&plan, point, &key, 1_000, "order-1").await;
    Left { directory, store, provider, plan, key, broker }
}

impl Left {
    /// Starts a process that recovers and relays, and does not serve.
    fn worker(&self, lease: f64) -> Process {
        let mut command = Command::new(example("payments_api"));
        let broker = format!("embedded://{}", self.broker);
        command.args(["--recovery", "only", "--database", &self.plan.database, "--broker", &broker]);
        command.args(self.plan.provider.iter().flat_map(|url| ["--provider", url, "--deployment", "database"]));
        command.args(["--lease", &lease.to_string()]);
        Process::start(command, &self.directory.path().join("worker.log"))
    }
}

/// The charges that were announced to the broker, once there is one.
async fn carried(broker: &str) -> Option<Entries> {
    // Neither the file nor its tables are there at once.
    let mut file = SqliteConnectOptions::new().filename(broker).connect().await.ok()?;
    let rows: Vec<Vec<u8>> = sqlx::query_scalar("select payload from record").fetch_all(&mut file).await.ok()?;
    let entries = sorted(rows.iter().map(|payload| {
        let payload: Value = serde_json::from_slice(payload).unwrap();
        (payload["paymentId"].as_str().unwrap().to_owned(), payload["amountMinor"].as_i64().unwrap())
    }));
    (!entries.is_empty()).then_some(entries)
}

// Shown by: a publisher that starts no recovery; one that starts no relay; a recovery that enqueues
// the message of its outcome a second time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m83_a_process_of_its_own_recovers_what_a_dead_service_left_and_carries_its_message() {
    // Charged, and the answer is lost with the process.
    let left = left_at("charge.answered").await;
    let Left { store, provider, plan, key, broker, .. } = &left;
    assert_eq!((store.rows("charge").await.len(), store.announced().await.len()), (1, 0));
    let worker = left.worker(plan.lease);
    let first = eventually("recovered and carried", SOON, || async { carried(broker).await }).await;
    let charges = store.rows("charge").await;
    assert_eq!((provider_books(&provider.books), &first), (charges.clone(), &charges));
    // It sends what it has in hand before it ends: a message that was written twice would be there.
    worker.stop(SOON);
    assert_eq!(carried(broker).await, Some(charges.clone()));
    let api = Api::start(plan).await;
    let answer = api.post("/charges", key, &body(1_000, "order-1")).await;
    assert_eq!((answer.status, answer.replayed), (201, true), "{answer:?}");
    assert_eq!(sorted([(answer.json()["id"].as_str().unwrap().to_owned(), 1_000)].into_iter()), charges);
}

// Shown by: closing the store before the recovery has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o22_o8_a_stop_lets_the_call_in_flight_end_and_stores_what_the_provider_says() {
    let left = left_at("charge.intended").await;
    let Left { store, provider, .. } = &left;
    // The charge is booked at once, and the answer takes its time.
    provider.fault("late", -1, 3_000).await;
    let worker = left.worker(20.0);
    eventually("the provider was called", SOON, || async { (provider.count().await.0 == 1).then_some(()) }).await;
    assert!(store.texts("select kind from oncebox_operation_evidence where kind = 'answer'").await.is_empty());
    worker.stop(SOON);
    let said = store.texts("select verdict from oncebox_operation_evidence where kind = 'answer'").await;
    assert_eq!(said, ["success"]);
}
