//! The example service by HTTP. Two processes on one database: the tests that the sources demand
//! (M71, M112 to M114, M117, O14). One process: what it answers when a statement fails, and on
//! which databases it charges (M36, O22).

use std::collections::HashSet;

use oncebox::operation::{Code, Retention, Tombstone};
use oncebox::sqlx;
use oncebox::sqlx::Connection;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{ActContext, Answer, AnswerBody, Base, KeyOperator, Phases, Resolution, RunOutcome, StoreOptions};

use super::control::{ROUNDS, race};
use super::kit::*;
use super::service::{Service, count, messages, payment};

/// Runs a test with two processes that are started at once on an empty database: each makes the
/// tables, safely.
macro_rules! two_services {
    ($($name:ident),* $(,)?) => {
        mod sqlite {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    let directory = tempfile::tempdir().unwrap();
                    let url = format!("sqlite://{}", directory.path().join("payments.db").display());
                    super::$name(super::Two::on(url).await).await;
                }
            )*
        }
        crate::kit::on_empty_servers!(crate::services::Two::on; $($name),*);
    };
}

pub(crate) use two_services;

two_services! {
    m112_the_second_request_gets_the_same_payment_and_no_second_message,
    m113_a_different_body_is_a_stable_and_counted_conflict,
    m114_two_at_once_on_two_processes_pay_once,
    m117_a_retry_after_expiry_and_under_another_key_of_one_order,
    m71_insufficient_funds_is_replayed_after_the_balance_rose,
    o14_one_order_is_paid_once_whatever_its_key,
    the_service_says_what_it_protects_and_scopes_what_it_shows,
    a_text_with_nul_is_not_found_and_no_outage,
}

/// Two processes on one database.
pub(crate) struct Two {
    pub(crate) url: String,
    pub(crate) services: [Service; 2],
}

impl Two {
    pub(crate) async fn on(url: String) -> Self {
        Self::with(url, &[]).await
    }

    pub(crate) async fn with(url: String, flags: &[&str]) -> Self {
        let begun = [Service::begin(&url, flags), Service::begin(&url, flags)];
        let [one, two] = begun.map(Service::ready);
        Self { services: [one.await, two.await], url }
    }

    async fn payments(&self) -> i64 {
        count(&self.url, "select count(*) from payment").await
    }

    async fn messages(&self) -> i64 {
        messages(&self.url, "payment.created").await
    }
}

// PostgreSQL refuses the statement. Shown to fail: without the look at the path, 503 "the memory of
// operations is not available".
async fn a_text_with_nul_is_not_found_and_no_outage(two: Two) {
    let service = &two.services[0];
    for path in ["/payments/%00", "/payments/a%00b", "/notes/%00", "/operations/%00"] {
        assert_eq!(service.get(path).await.status, 404, "{path}");
        let head = client().head(format!("{}{path}", service.url)).header("authorization", "Bearer t1:p1");
        assert_eq!(send(head).await.status, 404, "HEAD {path}");
    }
    let put = client().put(format!("{}/accounts/%00", service.url)).header("content-type", "application/json");
    let put = put.header("authorization", "Bearer t1:p1").body(r#"{"balanceMinor":1}"#);
    assert_eq!(send(put).await.status, 404, "PUT /accounts/%00");
    for (path, body) in
        [("/payments", payment(1_000, "order\\u00001")), ("/notes", r#"{"text":"a\u0000b"}"#.to_owned())]
    {
        let refused = service.post(path, K1, &body).await;
        assert!(!refused.is(Code::RequestInvalid).is_replayed(), "{path}: {refused:?}");
    }
    assert_eq!((two.payments().await, two.messages().await), (0, 0));
}

// Shown to fail: without `Idempotent-Replayed` on a replay; with it on a first answer. Shown by: a
// door that forgets its answer; a message that is enqueued outside of the transaction.
async fn m112_the_second_request_gets_the_same_payment_and_no_second_message(two: Two) {
    let body = payment(1_000, "order-1");
    let one = two.services[0].post("/payments", K1, &body).await;
    assert_eq!((one.status, one.is_replayed()), (201, false), "{one:?}");
    let shown = one.json();
    assert_eq!((shown["status"].as_str(), shown["channel"].as_str()), (Some("settled"), Some("web")));
    let location = one.header("location").unwrap().to_owned();
    assert_eq!(location, format!("/payments/{}", shown["id"].as_str().unwrap()));
    for service in &two.services {
        for same in [body.clone(), body.replace('}', r#","channel":"web"}"#), body.replace(',', " , ")] {
            let again = service.post("/payments", K1, &same).await;
            assert_eq!((again.status, again.is_replayed(), &again.body), (201, true, &one.body));
            assert_eq!(
                (again.header("location"), again.header("content-type")),
                (Some(location.as_str()), one.header("content-type"))
            );
        }
        assert_eq!(service.get(&location).await.json(), shown);
        assert_eq!(service.metric("oncebox_idempotency_replay_count").await, 3.0);
    }
    assert_eq!((two.payments().await, two.messages().await), (1, 1));
}

// Shown to fail: without the count of a mismatch. Shown by: replaying whatever comes under the key;
// overwriting the first record.
async fn m113_a_different_body_is_a_stable_and_counted_conflict(two: Two) {
    let one = two.services[0].post("/payments", K1, &payment(1_000, "order-1")).await;
    let id = one.json()["id"].as_str().unwrap().to_owned();
    for service in &two.services {
        for _ in 0..2 {
            let other = service.post("/payments", K1, &payment(10_000, "order-1")).await;
            other.is(Code::KeyReused);
            assert_eq!((other.status, other.json()["retryable"].as_bool()), (422, Some(false)));
            let shown = String::from_utf8_lossy(&other.body);
            let is_silent = [":1000", "acc-7", "order-1", &id].iter().all(|part| !shown.contains(*part));
            assert!(is_silent, "nothing of the first request is shown: {shown}");
        }
        assert_eq!(service.metric("oncebox_idempotency_conflict_different_request_count").await, 2.0);
    }
    let again = two.services[1].post("/payments", K1, &payment(1_000, "order-1")).await;
    assert!(again.is_replayed() && again.body == one.body, "the first record stands");
    assert_eq!((two.payments().await, two.messages().await), (1, 1));
}

// Shown by: `m114_m118_a_store_that_looks_first_pays_twice_in_the_same_race`; without the primary
// key of the records.
async fn m114_two_at_once_on_two_processes_pay_once(two: Two) {
    for round in 0..ROUNDS {
        let (key, body) = (format!("{K1}-{round}"), payment(1, &format!("order-{round}")));
        let (mut firsts, mut bodies) = (0, HashSet::new());
        for answer in race([0, 1, 0, 1].map(|number: usize| two.services[number].ask("/payments", &key, &body))).await {
            if answer.status == 201 {
                firsts += u32::from(!answer.is_replayed());
                bodies.insert(answer.body);
            } else {
                answer.is(Code::InProgress);
            }
        }
        assert_eq!((firsts, bodies.len()), (1, 1), "round {round}");
        assert_eq!((two.payments().await, two.messages().await), (round as i64 + 1, round as i64 + 1));
    }
}

// Shown by: an expired key that replays; a new key that pays the same order again.
async fn m117_a_retry_after_expiry_and_under_another_key_of_one_order(two: Two) {
    let url = two.url.clone();
    drop(two);
    let two = Two::with(url, &["--key-ttl", "0.5"]).await;
    let body = payment(1_000, "order-1");
    let one = two.services[0].post("/payments", K1, &body).await;
    assert_eq!(one.status, 201, "{one:?}");
    until("its time is over", || async {
        let again = two.services[1].post("/payments", K1, &body).await;
        // A new operation of the same order: the business constraint knows it.
        again.status == 200 && again.json()["duplicate_of"] == one.json()["id"]
    })
    .await;
    let expired = two.services[1].metric("oncebox_idempotency_expired_retry_count").await;
    assert!(expired >= 1.0, "{expired}");
    let other = two.services[0].post("/payments", K2, &body).await;
    assert_eq!((other.status, &other.json()["duplicate_of"]), (200, &one.json()["id"]));
    assert_eq!((two.payments().await, two.messages().await), (1, 1));
}

// Shown by: rolling the refusal back with its transaction.
async fn m71_insufficient_funds_is_replayed_after_the_balance_rose(two: Two) {
    let put = |balance: i64| {
        let request = client().put(format!("{}/accounts/acc-7", two.services[1].url));
        let request = request.header("authorization", "Bearer t1:p1").header("content-type", "application/json");
        send(request.body(format!(r#"{{"balanceMinor":{balance}}}"#)))
    };
    assert_eq!(put(10).await.status, 200);
    let one = two.services[0].post("/payments", K1, &payment(11, "order-1")).await;
    assert_eq!((one.status, one.code().as_str(), one.is_replayed()), (402, "INSUFFICIENT_FUNDS", false));
    assert_eq!(put(1_000).await.status, 200);
    for service in &two.services {
        let again = service.post("/payments", K1, &payment(11, "order-1")).await;
        assert_eq!((again.status, again.is_replayed(), &again.body), (402, true, &one.body));
    }
    assert_eq!((two.payments().await, two.messages().await), (0, 0));
    assert_eq!(two.services[0].post("/payments", K2, &payment(11, "order-1")).await.status, 201);
}

// Shown by: catching the error of the unique constraint (a 500 on PostgreSQL); comparing the
// reference alone.
async fn o14_one_order_is_paid_once_whatever_its_key(two: Two) {
    let one = two.services[0].post("/payments", K1, &payment(5, "order-1")).await;
    let same = two.services[1].post("/payments", K2, &payment(5, "order-1")).await;
    assert_eq!((same.status, &same.json()["duplicate_of"]), (200, &one.json()["id"]));
    let other = format!("{K2}-other");
    let reused = two.services[1].post("/payments", &other, &payment(6, "order-1")).await;
    assert_eq!((reused.status, reused.code().as_str()), (409, "MERCHANT_REFERENCE_REUSED"));
    assert!(two.services[0].post("/payments", &other, &payment(6, "order-1")).await.is_replayed(), "it is binding");
    // A reference is of one account of one tenant: another's is another order.
    for (who, account) in [("t2:p1", "acc-7"), ("t1:p1", "acc-8")] {
        let body = payment(6, "order-1").replace("acc-7", account);
        let own = send(two.services[0].ask_as(who, "/payments", &format!("{K2}-{account}"), &body)).await;
        assert_eq!((own.status, own.is_replayed()), (201, false), "{who}, {account}: {own:?}");
    }
    // So many that each has its turn within its patience where one writes at a time and the disk
    // takes a second for each.
    let race = race([0, 1, 2, 3].map(|number: usize| {
        two.services[number % 2].ask("/payments", &format!("{K1}-race-{number}"), &payment(7, "order-2"))
    }));
    let statuses: Vec<_> = race.await.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses.iter().filter(|status| **status == 201).count(), 1, "{statuses:?}");
    assert!(statuses.iter().all(|status| [200, 201].contains(status)), "{statuses:?}");
    assert_eq!((two.payments().await, two.messages().await), (4, 4));
}

async fn the_service_says_what_it_protects_and_scopes_what_it_shows(two: Two) {
    let service = &two.services[0];
    let known = send(client().get(format!("{}/.well-known/idempotency", service.url))).await.json();
    let paid = serde_json::json!({
        "operation": "create_payment", "path": "/payments", "method": "POST", "required": true, "ttl": "PT24H",
        "mode": "same_tx", "mismatchStatus": 422,
    });
    assert!(known["operations"].as_array().unwrap().contains(&paid), "{known}");
    for path in ["/livez", "/readyz"] {
        assert_eq!(send(client().get(format!("{}{path}", service.url))).await.status, 200);
    }
    let one = service.post("/payments", K1, &payment(5, "order-1")).await;
    let location = format!("{}{}", service.url, one.header("location").unwrap());
    let seen = |token: &'static str| send(client().get(&location).header("authorization", token));
    assert_eq!(seen("Bearer t1:p9").await.status, 200);
    assert_eq!(seen("Bearer t2:p1").await.status, 404, "another tenant's is not there");
    for token in ["Bearer t1", "Bearer :p1", "Bearer t1:", "Basic t1:p1", "Bearer t 1:p1"] {
        seen(token).await.is(Code::Unauthenticated);
    }
    let note = service.post("/notes", K1, r#"{"text":"a"}"#).await;
    assert_eq!((note.status, note.json()["text"].as_str()), (201, Some("a")), "keys of two operations do not meet");
    assert!(two.services[1].post("/notes", K1, r#"{"text":"a"}"#).await.is_replayed());
    service.post("/notes", K2, r#"{"txt":"a"}"#).await.is(Code::RequestInvalid);
    assert_eq!(service.post("/notes", K2, r#"{"text":"b"}"#).await.status, 201, "the corrected body, the same key");
    for name in ["in_progress_age_max", "unknown_state_count", "expired_retry_count"] {
        assert_eq!(service.metric(&format!("oncebox_idempotency_{name}")).await, 0.0);
    }
}

/// A table that is gone, for each handler without a key and for the one behind the layer.
///
/// Shown by: an empty 503.
#[cfg(feature = "openapi")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m36_a_statement_that_fails_is_a_problem_that_the_document_declares() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", directory.path().join("payments.db").display());
    let service = Service::ready(Service::begin(&url, &[])).await;
    let document = service.get("/openapi.json").await.json();
    let is_declared = |path: &str, method: &str, code: Code, answer: &Http| {
        println!("{method} {path}");
        let declared = &document["paths"][path][method]["responses"]["503"]["content"]["application/problem+json"];
        let required = declared["schema"]["required"].as_array().unwrap();
        let shown = answer.is(code).json();
        assert!(required.iter().all(|name| shown.get(name.as_str().unwrap()).is_some()), "{shown}");
    };
    let mut connection = sqlx::SqliteConnection::connect(&url).await.unwrap();
    sqlx::raw_sql("drop table payment; drop table note; drop table account").execute(&mut connection).await.unwrap();
    is_declared("/payments/{id}", "get", Code::StoreUnavailable, &service.get("/payments/pay_1").await);
    is_declared("/notes/{id}", "get", Code::StoreUnavailable, &service.get("/notes/note_1").await);
    let put = client().put(format!("{}/accounts/acc-7", service.url)).header("content-type", "application/json");
    let put = put.header("authorization", "Bearer t1:p1").body(r#"{"balanceMinor":1}"#);
    // Whether a write has happened is not known for certain.
    is_declared("/accounts/{id}", "put", Code::CommitUnknown, &send(put).await);
    let note = || service.post("/notes", K1, r#"{"text":"a"}"#);
    is_declared("/notes", "post", Code::CommitUnknown, &note().await);
    note().await.is(Code::OutcomeUnknown);
    sqlx::raw_sql("drop table oncebox_operation").execute(&mut connection).await.unwrap();
    let operation = format!("/operations/{}", uuid::Uuid::now_v7());
    is_declared("/operations/{id}", "get", Code::StoreUnavailable, &service.get(&operation).await);
}

/// A provider at which nobody listens.
const NOBODY: &str = "http://127.0.0.1:9";

fn file(directory: &tempfile::TempDir) -> String {
    format!("sqlite://{}", directory.path().join("payments.db").display())
}

// A clone of the database must not charge (O22), and the documented command line has no deployment.
// Shown by: taking the deployment of the database where none is named; remembering whatever is
// there; looking for the file before the operations.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_example_charges_only_where_its_machine_knows_the_database() {
    let directory = tempfile::tempdir().unwrap();
    let machine = |name: &str| {
        let machine = directory.path().join(name);
        std::fs::create_dir_all(&machine).unwrap();
        machine
    };
    let (here, elsewhere, url) = (machine("here"), machine("elsewhere"), file(&directory));
    let flags = ["--provider", NOBODY, "--recovery", "off", "--charge-budget", "0.1"];
    let refused = async |machine: &std::path::Path, url: &str, words: &[&str]| {
        let (mut child, mut ended) = (Service::begin_on(machine, url, &flags), None);
        until("it is refused", || {
            ended = child.0.try_wait().unwrap();
            std::future::ready(ended.is_some())
        })
        .await;
        let status = ended.unwrap();
        let said = std::fs::read_to_string(machine.join("log")).unwrap();
        assert!(status.code() == Some(4) && words.iter().all(|word| said.contains(word)), "{status}: {said}");
    };
    // Two at once on a database that is not there yet; then one that is there again.
    let begun = [Service::begin_on(&here, &url, &flags), Service::begin_on(&here, &url, &flags)];
    let [one, two] = begun.map(Service::ready);
    let (one, two) = (one.await, two.await);
    let begun = one.post("/charges", K1, &payment(5, "order-1")).await;
    assert!(begun.status == 202 || begun.status == 409, "{begun:?}");
    let third = Service::ready(Service::begin_on(&here, &url, &flags)).await;
    let begun = third.post("/charges", K2, &payment(5, "order-2")).await;
    assert!(begun.status == 202 || begun.status == 409, "{begun:?}");
    drop((one, two, third));
    let files: Vec<_> =
        std::fs::read_dir(here.join("payments_api")).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");

    let store = SqliteStore::connect(&StoreOptions::new(url.clone())).await.unwrap();
    let id = store.deployment().await.unwrap().to_string();
    store.close().await;
    let words = [id.as_str(), "--deployment", "is not there"];
    refused(&elsewhere, &url, &words).await;
    let clone = url.replace("payments.db", "clone.db");
    let mut connection = sqlx::SqliteConnection::connect(&url).await.unwrap();
    let path = clone.trim_start_matches("sqlite://").to_owned();
    sqlx::query("vacuum into ?").bind(path).execute(&mut connection).await.unwrap();
    refused(&here, &clone, &words).await;
    for named in [&id, "database"] {
        let flags = [&flags[..], &["--deployment", named]].concat();
        Service::ready(Service::begin_on(&elsewhere, &clone, &flags)).await.kill();
    }
    // Another one was restored under the URL.
    sqlx::query("update oncebox_deployment set deployment_id = randomblob(16)").execute(&mut connection).await.unwrap();
    refused(&here, &url, &["--deployment", &format!("says {id}")]).await;
    // A database that is made anew has no operation that a clone could send again.
    connection.close().await.unwrap();
    std::fs::remove_file(url.trim_start_matches("sqlite://")).unwrap();
    Service::ready(Service::begin_on(&here, &url, &flags)).await.kill();
}

// No phase runs where an operator ends an operation, so no phase says it to the charge. Shown by: a
// charge that stays pending: its reference is blocked for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_charge_whose_operation_an_operator_ended_blocks_its_reference_no_longer() {
    let directory = tempfile::tempdir().unwrap();
    let url = file(&directory);
    let flags = ["--provider", NOBODY, "--deployment", "database", "--recovery", "off", "--charge-budget", "0.1"];
    let service = Service::ready(Service::begin(&url, &flags)).await;
    let store = SqliteStore::connect(&StoreOptions::new(url.clone())).await.unwrap();
    let act =
        ActContext { actor: "ada".to_owned(), reason: "as agreed".to_owned(), dry_run: false, redrive_age_max: None };
    for (reference, succeeds) in [("order-1", true), ("order-2", false)] {
        let key = |number: u32| format!("{reference}-key-00000000000{number}");
        let begun = service.post("/charges", &key(1), &payment(5, reference)).await;
        assert!(begun.status == 202 || begun.status == 409, "{begun:?}");
        let pending = service.post("/charges", &key(2), &payment(5, reference)).await;
        assert_eq!((pending.status, pending.json()["status"].as_str()), (202, Some("pending")));
        let id = pending.json()["operation"].as_str().unwrap().parse().unwrap();
        let body = AnswerBody::Tombstone(Tombstone::Withheld);
        let answer = Answer { status: 201, schema_version: 1, body, resource: None };
        let outcome = match succeeds {
            true => RunOutcome::Completed(answer),
            false => RunOutcome::FailedReplayable { answer, error_code: None },
        };
        let ended = Resolution::Ended(Box::new(outcome), Retention::default());
        let seen = store.operation(id).await.unwrap().unwrap();
        store.resolve(&seen, &ended, true, false, &act).await.unwrap();
        let again = service.post("/charges", &key(3), &payment(5, reference)).await;
        let is = |status: &'static str| {
            let of = format!("merchant_reference = '{reference}' and status = '{status}'");
            let url = url.clone();
            async move { count(&url, &format!("select count(*) from charge where {of}")).await }
        };
        if succeeds {
            assert_eq!((again.status, again.json()["status"].as_str()), (200, Some("settled")));
            assert_eq!((is("settled").await, is("pending").await), (1, 0));
        } else {
            assert!(again.status == 202 || again.status == 409, "{again:?}");
            assert_eq!((is("failed").await, is("pending").await), (1, 1), "it is charged anew");
        }
    }
}
