//! `POST /charges` and `GET /operations/ID` of the example, over HTTP, on three databases.

use serde_json::json;

use crate::api::{Api, Plan, SOON, body};
use crate::mysql::Db;
use crate::postgres::with_database;
use crate::provider::ProviderProcess;
use crate::support::eventually;

fn plan(database: &str, provider: &ProviderProcess) -> Plan {
    Plan {
        database: database.to_owned(),
        provider: Some(provider.url.clone()),
        lease: 20.0,
        budget: 10.0,
        recovery: true,
        pause_at: None,
    }
}

const ONE: &str = "key-0000000000000001";
const TWO: &str = "key-0000000000000002";
const THREE: &str = "key-0000000000000003";
const FOUR: &str = "key-0000000000000004";

async fn a_charge_from_its_first_request_to_its_last(database: &str) {
    let provider = ProviderProcess::start();
    let plan = plan(database, &provider);
    let api = Api::start(&plan).await;
    // 201, then the same again; another body is 422.
    let first = api.post("/charges", ONE, &body(700, "order-1")).await;
    assert_eq!((first.status, first.replayed), (201, false), "{first:?}");
    let id = first.json()["id"].as_str().unwrap().to_owned();
    let expected = json!({ "id": id, "status": "settled", "accountId": "acc-7", "amountMinor": 700, "currency": "EUR",
        "merchantReference": "order-1", "channel": "web" });
    assert_eq!((first.json(), first.location), (expected.clone(), Some(format!("/payments/{id}"))));
    let again = api.post("/charges", ONE, &body(700, "order-1")).await;
    assert_eq!((again.status, again.replayed, &again.bytes), (201, true, &first.bytes));
    assert_eq!(api.post("/charges", ONE, &body(701, "order-1")).await.status, 422);
    assert_eq!(api.get(&format!("/payments/{id}"), "t1").await.json(), expected);
    assert_eq!(api.get(&format!("/payments/{id}"), "t2").await.status, 404);
    // The same order under another key, and another amount under the same reference (O14).
    let duplicate = api.post("/charges", TWO, &body(700, "order-1")).await;
    assert_eq!((duplicate.status, duplicate.json()["duplicate_of"].as_str()), (200, Some(id.as_str())));
    let reused = api.post("/charges", THREE, &body(999, "order-1")).await;
    assert_eq!((reused.status, reused.code().as_str()), (409, "MERCHANT_REFERENCE_REUSED"));
    assert!(api.post("/charges", THREE, &body(999, "order-1")).await.replayed);
    assert_eq!(provider.count().await, (1, 1));
    declined(&api, &provider).await;
}

async fn declined(api: &Api, provider: &ProviderProcess) {
    provider.fault("decline", 1, 0).await;
    let declined = api.post("/charges", FOUR, &body(800, "order-2")).await;
    assert_eq!((declined.status, declined.code().as_str(), declined.replayed), (402, "PROVIDER_DECLINED", false));
    let again = api.post("/charges", FOUR, &body(800, "order-2")).await;
    assert_eq!((again.status, again.replayed, again.bytes), (402, true, declined.bytes));
    // A failed charge takes no reference.
    let other = api.post("/charges", "key-0000000000000005", &body(800, "order-2")).await;
    assert_eq!(other.status, 201);
    assert_eq!(provider.count().await, (2, 2));
}

async fn beyond_its_budget(database: &str) {
    let provider = ProviderProcess::start();
    let api = Api::start(&Plan { budget: 0.3, ..plan(database, &provider) }).await;
    // Until it is told otherwise: what is looked at meanwhile is pending, however long that takes.
    provider.fault("in_progress", -1, 0).await;
    let pending = api.post("/charges", ONE, &body(700, "order-9")).await;
    let operation = pending.location.clone().unwrap_or_default();
    assert_eq!((pending.status, operation.starts_with("/operations/")), (202, true), "{pending:?}");
    let shown = api.get(&operation, "t1").await.json();
    assert_eq!((shown["status"].as_str(), &shown["result"]), (Some("pending"), &json!(null)));
    assert_eq!(api.get(&operation, "t2").await.status, 404);
    // Another key for the same order: 202, and the first operation.
    let other = api.post("/charges", TWO, &body(700, "order-9")).await;
    assert_eq!((other.status, other.location.as_deref()), (202, Some(operation.as_str())));
    provider.no_faults().await;
    let shown = eventually("an outcome", SOON, || async {
        let shown = api.get(&operation, "t1").await.json();
        (shown["status"] == "succeeded").then_some(shown)
    })
    .await;
    let last = api.post_until_known("/charges", ONE, &body(700, "order-9")).await;
    assert_eq!((last.status, last.replayed), (201, true));
    assert_eq!(shown["result"], json!({ "status": 201, "body": last.json() }));
    assert_eq!(api.post("/charges", TWO, &body(700, "order-9")).await.status, 200);
    assert_eq!(provider.count().await, (1, 1));
}

async fn without_a_provider(database: &str) {
    let provider = ProviderProcess::start();
    let api = Api::start(&Plan { provider: None, ..plan(database, &provider) }).await;
    let refused = api.post("/charges", "key-0000000000000009", &body(700, "order-20")).await;
    assert_eq!((refused.status, refused.code().as_str()), (503, "PROVIDER_NOT_CONFIGURED"));
    api.kill();
    // Nothing was stored: another body is no mismatch.
    let api = Api::start(&plan(database, &provider)).await;
    assert_eq!(api.post("/charges", "key-0000000000000009", &body(701, "order-20")).await.status, 201);
    let published = api.get("/.well-known/idempotency", "t1").await.json();
    let charges = published["operations"].as_array().unwrap().iter().find(|one| one["path"] == "/charges").unwrap();
    assert_eq!((charges["mode"].as_str(), charges["operation"].as_str()), (Some("phased"), Some("create_charge")));
}

// Shown by: storing what is not configured; the lease of a charge that nobody can see.
async fn all(database: &str) {
    a_charge_from_its_first_request_to_its_last(database).await;
    without_a_provider(database).await;
}

fn sqlite(directory: &tempfile::TempDir) -> String {
    format!("sqlite://{}", directory.path().join("charges.db").display())
}

#[tokio::test]
async fn m111_charges_on_sqlite() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    all(&sqlite(&one)).await;
    beyond_its_budget(&sqlite(&two)).await;
}

#[tokio::test]
async fn m111_charges_on_postgres() {
    with_database("m111_charges_on_postgres", |database| async move { all(&database.url).await }).await;
    with_database("m111_charges_on_postgres", |database| async move { beyond_its_budget(&database.url).await }).await;
}

#[tokio::test]
async fn m111_charges_on_mariadb() {
    let Some(database) = Db::empty("m111_charges_on_mariadb").await else { return };
    all(&database.url).await;
    let Some(database) = Db::empty("m111_charges_on_mariadb").await else { return };
    beyond_its_budget(&database.url).await;
}
