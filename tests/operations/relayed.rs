//! What a process of the example leaves to others: its messages, which it relays itself
//! (`--broker`), to a consumer that is killed half way; and a note in the middle of which it is
//! killed, to another process (M50, M112, M115, M116, O11).
//!
//! The consumer is this test executable again, running only `the_consumer`.

use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use oncebox::broker::Broker;
use oncebox::broker::embedded::{EmbeddedBroker, EmbeddedConfig};
use oncebox::message::Arrived;
use oncebox::observe::Health;
use oncebox::operation::Code;
use oncebox::store::StoreOptions;
use oncebox::store::mysql::MySqlStore;
use oncebox::store::postgres::PostgresStore;
use oncebox::store::sqlite::SqliteStore;
use oncebox::{Consumer, ConsumerOptions, HandlerError, HandlerTx, Handlers, Message, MessageHandler, NewMessage};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::kit::*;
use super::service::{Service, count, payment};
use super::services::{Two, two_services};

two_services! {
    m116_m50_what_the_service_relays_is_handled_once_by_a_consumer_that_was_killed_half_way,
    m115_o11_a_note_whose_process_was_killed_is_unknown_to_another_and_never_written_again,
}

/// Books a payment in two entries.
struct Ledger {
    /// Stands still after the first entry, to be killed there.
    stops_half_way: bool,
}

#[async_trait]
impl<S: Sql> MessageHandler<S> for Ledger {
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError> {
        let told: Value = message.json()?;
        let (id, amount) = (told["paymentId"].as_str().unwrap_or(""), &told["amountMinor"]);
        S::run(tx.connection(), &format!("insert into ledger values ('{id}', {amount})")).await?;
        if self.stops_half_way {
            println!("half way");
            // The thread: no timeout around it goes on.
            loop {
                std::thread::park();
            }
        }
        S::run(tx.connection(), &format!("insert into ledger values ('{id}', -{amount})")).await?;
        Ok(())
    }
}

/// The other process; as a test of its own it does nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_consumer() {
    let Ok(act) = std::env::var("ONCEBOX_TEST_CONSUMER") else { return };
    println!();
    let [act, database, broker] = act.split('\n').collect::<Vec<_>>()[..] else { panic!("{act}") };
    match database.split(':').next() {
        Some("sqlite") => consume::<SqliteStore>(act, database, broker).await,
        Some("mysql") => consume::<MySqlStore>(act, database, broker).await,
        _ => consume::<PostgresStore>(act, database, broker).await,
    }
}

async fn consume<S: Sql>(act: &str, database: &str, broker: &str) {
    let store = S::connect(&StoreOptions::new(database)).await.unwrap();
    let handlers = Handlers::new().on("payment.created", Ledger { stops_half_way: act == "half" });
    let options = ConsumerOptions { lanes: 1, ..ConsumerOptions::new("ledger", vec!["payments".to_owned()]) };
    let consumer =
        Consumer::new(store, Arc::new(embedded(Path::new(broker)).await), handlers, options, Health::default());
    consumer.run(CancellationToken::new()).await.unwrap();
}

async fn embedded(file: &Path) -> EmbeddedBroker {
    EmbeddedBroker::open(EmbeddedConfig::new(file)).await.unwrap()
}

/// A consumer, killed when dropped, and what it said.
struct Other {
    child: Child,
    said: Arc<Mutex<String>>,
}

impl Other {
    fn start(act: &str, database: &str, broker: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "relayed::the_consumer", "--nocapture", "--test-threads=1"])
            .env("ONCEBOX_TEST_CONSUMER", format!("{act}\n{database}\n{}", broker.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = Arc::new(Mutex::new(String::new()));
        let (out, lines) = (BufReader::new(child.stdout.take().unwrap()), said.clone());
        std::thread::spawn(move || {
            out.lines().map_while(Result::ok).for_each(|line| lines.lock().unwrap().push_str(&line));
        });
        Self { child, said }
    }

    async fn says(&self, words: &str) {
        until(words, || async { self.said.lock().unwrap().contains(words) }).await;
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn m116_m50_what_the_service_relays_is_handled_once_by_a_consumer_that_was_killed_half_way(two: Two) {
    let url = two.url.clone();
    drop(two);
    match url.split(':').next() {
        Some("sqlite") => relays::<SqliteStore>(url).await,
        Some("mysql") => relays::<MySqlStore>(url).await,
        _ => relays::<PostgresStore>(url).await,
    }
}

/// The contract of `payment.created`: its key, the header `tenant`, and the members of its payload.
fn contract(arrived: &Arrived) -> Value {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let tenants = arrived.headers.iter().filter(|(name, _)| name == "tenant").map(|(_, value)| text(value));
    json!({
        "kind": arrived.kind,
        "key": arrived.key.as_deref().map(text),
        "tenants": tenants.collect::<Vec<_>>(),
        "payload": serde_json::from_slice::<Value>(arrived.payload.as_deref().unwrap()).unwrap(),
    })
}

// Shown by: a key, a header or a member that is another; a handler that writes beside its
// transaction (half of the work stands behind the kill); an inbox that forgets (the repeated
// messages are booked again).
async fn relays<S: Sql>(url: String) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("broker.db");
    let broker_url = format!("embedded://{}", file.display());
    let two = Two::with(url.clone(), &["--broker", &broker_url]).await;
    let store = S::connect(&StoreOptions::new(url.clone())).await.unwrap();
    store.exec("create table ledger (payment_id varchar(64) not null, amount bigint not null)").await;
    let mut told = Vec::new();
    for number in 0..3 {
        told.push(paid(&two, number).await);
    }
    let broker = embedded(&file).await;
    let arrived = crate::support::eventually("three messages", SOON, || async {
        let (mut arrived, mut ids) = (broker.read_all("payments").await.unwrap_or_default(), HashSet::new());
        // A relay that lost sight of what it sent sends it again.
        arrived.retain(|one| ids.insert(one.id.clone()));
        (arrived.len() >= 3).then_some(arrived)
    })
    .await;
    assert_eq!(arrived.iter().map(contract).collect::<Vec<_>>(), told);

    let half = Other::start("half", &url, &file);
    half.says("half way").await;
    drop(half);
    assert_eq!(count(&url, "select count(*) from ledger").await, 0, "half of the work");
    let whole = Other::start("whole", &url, &file);
    until("all are booked", || async { count(&url, "select count(*) from ledger").await >= 6 }).await;

    // The same messages again, then one more of their account: once that is booked, the others were
    // handled before it.
    let mut tx = store.pool().begin().await.unwrap();
    oncebox::store::enqueue_all(&mut *tx, arrived.iter().map(repeated).collect()).await.unwrap();
    oncebox::store::commit(tx).await.unwrap();
    until("they came again", || async { broker.read_all("payments").await.unwrap().len() >= 6 }).await;
    let last = paid(&two, 3).await;
    let id = last["payload"]["paymentId"].as_str().unwrap();
    until("the last is booked", || async {
        count(&url, &format!("select count(*) from ledger where payment_id = '{id}'")).await == 2
    })
    .await;
    assert_eq!(count(&url, "select count(*) from ledger").await, 8, "each payment in two entries");
    assert_eq!(count(&url, "select count(distinct payment_id) from ledger").await, 4);
    let dead = format!("select count(*) from {}waiting where state = 'dead'", S::PREFIX);
    assert_eq!(store.number(&dead).await, 0, "they were duplicates, and no other content under their ids");
    drop(whole);
}

/// Pays at one process, and again at the other; gives what the world is told of it.
async fn paid(two: &Two, number: usize) -> Value {
    let (key, body) = (format!("{K1}-{number}"), payment(100 + number as i64, &format!("order-{number}")));
    let one = two.services[number % 2].post("/payments", &key, &body).await;
    assert_eq!((one.status, one.is_replayed()), (201, false), "{one:?}");
    let again = two.services[(number + 1) % 2].post("/payments", &key, &body).await;
    assert!(again.is_replayed() && again.body == one.body, "{again:?}");
    json!({
        "kind": "payment.created",
        "key": "acc-7",
        "tenants": ["t1"],
        "payload": {
            "paymentId": one.json()["id"],
            "accountId": "acc-7",
            "amountMinor": 100 + number,
            "currency": "EUR",
            "merchantReference": format!("order-{number}"),
        },
    })
}

/// The same message: the same id, the same content. Without its header it would be another content
/// under the id, which is an alarm and no duplicate (G7).
fn repeated(arrived: &Arrived) -> NewMessage {
    let payload = String::from_utf8(arrived.payload.clone().unwrap()).unwrap();
    let message = NewMessage::text(&arrived.topic, arrived.kind.clone().unwrap(), payload);
    let key = String::from_utf8(arrived.key.clone().unwrap()).unwrap();
    message.with_key(key).with_header("tenant", "t1").with_id(arrived.id.as_deref().unwrap().parse().unwrap())
}

// Shown by: a route that says of its effects that they may be repeated (the note is written by the
// process that is asked).
async fn m115_o11_a_note_whose_process_was_killed_is_unknown_to_another_and_never_written_again(two: Two) {
    let directory = tempfile::tempdir().unwrap();
    for (point, written) in [("note.claimed", 0), ("note.written", 1)] {
        let log = directory.path().join(point);
        let flags = ["--lease", "2", "--pause-at", point];
        let doomed = Service::ready(Service::begin_logged(&two.url, &flags, &log)).await;
        let (key, body) = (format!("{K1}-{point}"), json!({ "text": point }).to_string());
        let in_flight = tokio::spawn(doomed.ask("/notes", &key, &body).send());
        let paused = format!("paused at {point}");
        until(&paused, || async { std::fs::read_to_string(&log).unwrap().contains(&paused) }).await;
        doomed.kill();
        // On a busy machine the engine's own timeout may have come before the kill: in progress.
        if let Ok(answer) = in_flight.await.unwrap() {
            Http::of(answer).await.is(Code::InProgress);
        }
        until("its lease is over", || async {
            let again = two.services[0].post("/notes", &key, &body).await;
            let waits = again.code() == Code::InProgress.as_str();
            if !waits {
                again.is(Code::OutcomeUnknown);
            }
            !waits
        })
        .await;
        for service in &two.services {
            service.post("/notes", &key, &body).await.is(Code::OutcomeUnknown);
        }
        let notes = format!("select count(*) from note where text = '{point}'");
        assert_eq!(count(&two.url, &notes).await, written, "{point}");
    }
}
