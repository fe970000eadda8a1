//! A process without the service that is built with its flows: it recovers what a dead service
//! left, and carries its message (O22).

use std::process::{Child, Command, Stdio};

use oncebox::sqlx::sqlite::SqliteConnectOptions;
use oncebox::sqlx::{self, ConnectOptions};
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, StoreOptions};
use serde_json::Value;

use crate::api::{Api, Plan, SOON, body};
use crate::kills::kill_at;
use crate::ledgers::{Entries, Tables, provider_books, sorted};
use crate::provider::ProviderProcess;
use crate::support::{eventually, example, unique};

/// The process; killed when dropped.
struct Worker(Child);

impl Worker {
    fn start(plan: &Plan, broker: &str) -> Self {
        let mut command = Command::new(example("payments_api"));
        command.args(["--recovery", "only", "--database", &plan.database, "--broker", broker]);
        command.args(plan.provider.iter().flat_map(|url| ["--provider", url, "--deployment", "database"]));
        command.args(["--lease", &plan.lease.to_string()]).stdin(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a service left that was killed in the middle of a charge.
struct Left {
    _directory: tempfile::TempDir,
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
    Left { _directory: directory, store, provider, plan, key, broker }
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

// Shown by: a publisher that starts no recovery; one that starts no relay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o22_m83_a_process_of_its_own_recovers_what_a_dead_service_left_and_carries_its_message() {
    // Charged, and the answer is lost with the process.
    let Left { store, provider, plan, key, broker, .. } = &left_at("charge.answered").await;
    assert_eq!((store.rows("charge").await.len(), store.announced().await.len()), (1, 0));
    let worker = Worker::start(plan, &format!("embedded://{broker}"));
    let carried = eventually("recovered and carried", SOON, || async { carried(broker).await }).await;
    let charges = store.rows("charge").await;
    assert_eq!((provider_books(&provider.books), &carried), (charges.clone(), &charges));
    drop(worker);
    let api = Api::start(plan).await;
    let answer = api.post("/charges", key, &body(1_000, "order-1")).await;
    assert_eq!((answer.status, answer.replayed), (201, true), "{answer:?}");
    assert_eq!(sorted([(answer.json()["id"].as_str().unwrap().to_owned(), 1_000)].into_iter()), charges);
}

/// Whether it has ended, and how.
fn ended(worker: &mut Worker) -> Option<std::process::ExitStatus> {
    worker.0.try_wait().unwrap()
}

// Shown by: closing the store before the recovery has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o22_o8_a_stop_lets_the_call_in_flight_end_and_stores_what_the_provider_says() {
    let Left { store, provider, plan, broker, .. } = &left_at("charge.intended").await;
    // The charge is booked at once, and the answer takes its time.
    provider.fault("late", -1, 3_000).await;
    let patient = Plan { lease: 20.0, ..plan.clone() };
    let mut worker = Worker::start(&patient, &format!("embedded://{broker}"));
    eventually("the provider was called", SOON, || async { (provider.count().await.0 == 1).then_some(()) }).await;
    assert!(store.texts("select kind from oncebox_operation_evidence where kind = 'answer'").await.is_empty());
    let pid = worker.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let mut end = None;
    let start = std::time::Instant::now();
    while end.is_none() && start.elapsed() < SOON {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        end = ended(&mut worker);
    }
    assert!(end.is_some_and(|end| end.success()), "{end:?}");
    let said = store.texts("select verdict from oncebox_operation_evidence where kind = 'answer'").await;
    assert_eq!(said, ["success"]);
}
