//! The payments service: all its processes, two of them killed in the middle, and the counts of
//! what is left behind.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;

use oncebox::app::config::ConsumerSettings;
use oncebox::store::postgres::PostgresStore;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Store, StoreOptions};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::error::KafkaError;
use sqlx::AssertSqlSafe;
use tokio::net::TcpListener;

use crate::postgres::with_database;
use crate::process::Process;
use crate::provider::{Booking, Bookings, serve};
use crate::stage::{ONCEBOX, PUBLISHER, SOON, Stage, finished, repeated, until};
use crate::support::{example, service};

const PAYMENTS: usize = 300;
/// Messages that are put into the broker a second time.
const REPEATED: usize = 100;
const CONSUMERS: [&str; 3] = ["ledger", "emails", "notifications"];

/// Rows of a text and a number.
trait Rows: Store {
    const EMAILS: &'static str;

    async fn rows(&self, sql: &str) -> Vec<(String, i64)>;

    async fn count(&self, table: &str) -> usize {
        let rows = self.rows(&format!("select 'rows', count(*) from {table}")).await;
        usize::try_from(rows[0].1).unwrap()
    }
}

macro_rules! rows {
    ($store:ty, $emails:literal) => {
        impl Rows for $store {
            const EMAILS: &'static str = $emails;

            async fn rows(&self, sql: &str) -> Vec<(String, i64)> {
                let pool = oncebox::store::Base::pool(self);
                sqlx::query_as(AssertSqlSafe(sql.to_owned())).fetch_all(pool).await.unwrap()
            }
        }
    };
}
rows!(SqliteStore, "oncebox_email");
rows!(PostgresStore, "oncebox.email");

/// Shown by: an inbox that takes every message for new; a key of its own for each try; a lost
/// answer that counts as one; two entries of the same sign; tries that are not counted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_payments_service_does_all_exactly_once_on_sqlite_and_the_embedded_broker() {
    play::<SqliteStore>(Stage::new(None, None), "payments").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_payments_service_does_all_exactly_once_on_postgres_and_kafka() {
    let name = "the_payments_service_does_all_exactly_once_on_postgres_and_kafka";
    let Some(kafka) = service(name, "ONCEBOX_TEST_KAFKA") else { return };
    with_database(name, |database| async move {
        let stage = Stage::new(Some(&database.url), Some(&kafka));
        let (topic, groups) = (stage.tag.clone(), CONSUMERS.map(|consumer| group(&stage, consumer)));
        let outcome = tokio::spawn(play::<PostgresStore>(stage, "payments_postgres")).await;
        let forgotten = forget(&kafka, &topic, &groups).await;
        outcome.unwrap();
        forgotten.unwrap();
    })
    .await;
}

/// Takes topic and groups off the shared broker.
async fn forget(kafka: &str, topic: &str, groups: &[String]) -> Result<(), KafkaError> {
    let admin: AdminClient<DefaultClientContext> =
        ClientConfig::new().set("bootstrap.servers", kafka.trim_start_matches("kafka://")).create()?;
    let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
    admin.delete_groups(&groups, &AdminOptions::new()).await?;
    admin.delete_topics(&[topic], &AdminOptions::new()).await?;
    Ok(())
}

fn group(stage: &Stage, consumer: &str) -> String {
    format!("{}-{consumer}", stage.tag)
}

/// Everything that runs, and how it was started.
struct Service<'a> {
    stage: &'a Stage,
    binary: String,
    topic: String,
}

impl Service<'_> {
    fn command(&self, args: &[&str]) -> std::process::Command {
        let consumer = CONSUMERS.contains(&args[0]).then(|| {
            let mut settings = ConsumerSettings::new(args[0], vec![self.topic.clone()]);
            settings.group = Some(group(self.stage, args[0]));
            // Small transactions, so that a kill finds many still to come, also where the machine
            // is in no hurry to kill.
            settings.batch_max = Some(2);
            settings
        });
        let mut all = vec!["--topic", &self.topic];
        all.extend(args);
        self.stage.command(&self.binary, &all, consumer)
    }

    fn start(&self, args: &[&str]) -> Process {
        self.stage.start(self.command(args), args[0])
    }
}

async fn play<S: Rows>(stage: Stage, name: &str) {
    let service = Service { stage: &stage, binary: example(name), topic: stage.tag.clone() };
    stage.run(ONCEBOX, &["migrate", "up"]);
    finished(service.command(&["tables"]));
    let bookings = Bookings::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let provider = format!("http://{}/notifications", listener.local_addr().unwrap());
    tokio::spawn(serve(listener, Bookings::clone(&bookings)));
    let store = S::connect(&StoreOptions::new(stage.settings.database.url.0.clone())).await.unwrap();

    // In no particular order: nobody waits for anybody but for what was committed.
    let to_provider = |patience| ["provider-sender", "--provider", &provider, "--timeout", patience];
    // Until it is killed it waits longer for an answer than the kill may take.
    let mut sender = service.start(&to_provider("60s"));
    let mut others = vec![
        service.start(&["emails"]),
        service.start(&["notifications"]),
        stage.start(stage.command(PUBLISHER, &[], None), "publisher"),
        stage.start(stage.command(ONCEBOX, &["sender"], None), "sender"),
    ];
    let writer = finished(service.command(&["writer", "--count", &PAYMENTS.to_string()]));
    assert_eq!(writer.trim(), format!("{PAYMENTS} payments taken"));

    // Killed while it books what has piled up until now.
    let mut ledger = service.start(&["ledger"]);
    until("the ledger is at work", || async { store.count("ledger_entry").await >= 20 }).await;
    ledger.kill();
    let booked = store.count("ledger_entry").await;
    assert!(booked < 2 * PAYMENTS, "the kill came after the work was done: {booked} entries");
    ledger.restart();

    // Killed while it waits for an answer that does not come: the fiftieth booking has been made,
    // and nobody knows of it.
    let fiftieth = || booked_at(&bookings).into_values().find(|booking| booking.number == 50);
    until("the fiftieth booking", || async { fiftieth().is_some() }).await;
    sender.kill();
    assert_eq!(fiftieth().unwrap().requests, 1, "the kill came after the answer was given up");
    let sender = service.start(&to_provider("5s"));

    let published = stage.published(&service.topic).await;
    assert!(published.len() >= PAYMENTS);
    let mut tx = store.pool().begin().await.unwrap();
    oncebox::store::enqueue_all(&mut *tx, repeated(&published[..REPEATED])).await.unwrap();
    oncebox::store::commit(tx).await.unwrap();

    others.push(ledger);
    others.push(sender);
    until("all effects", || {
        others.iter_mut().for_each(Process::check);
        async {
            store.count("ledger_entry").await >= 2 * PAYMENTS
                && store.count(&format!("{} where state = 'sent'", S::EMAILS)).await >= PAYMENTS
                && store.count("provider_notification where state = 'delivered'").await >= PAYMENTS
        }
    })
    .await;
    for process in others {
        process.stop(SOON);
    }
    // What was repeated is consumed to its end, so that a second effect would stand there by now.
    stage.run(PUBLISHER, &["--until-empty"]);
    assert!(stage.published(&service.topic).await.len() >= PAYMENTS + REPEATED);
    for consumer in CONSUMERS {
        finished(service.command(&[consumer, "--until-idle", "500ms"]));
    }
    stage.run(ONCEBOX, &["sender", "--until-empty"]);

    assert_each_once(&stage, &store, &booked_at(&bookings)).await;
    let counts = finished(service.command(&["counts"]));
    assert!(counts.contains(&format!("notifications delivered  {PAYMENTS:>5}")), "{counts}");
}

fn booked_at(bookings: &Bookings) -> BTreeMap<String, Booking> {
    bookings.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Counted from the tables, the files and the provider's own book.
async fn assert_each_once<S: Rows>(stage: &Stage, store: &S, bookings: &BTreeMap<String, Booking>) {
    let payments: BTreeMap<String, i64> =
        store.rows("select payment_id, amount_minor from payment").await.into_iter().collect();
    assert_eq!(payments.len(), PAYMENTS);

    let pairs = store.rows("select payment_id, count(*) from ledger_entry group by payment_id").await;
    assert_eq!(pairs.len(), PAYMENTS, "each payment is in the ledger");
    assert!(pairs.iter().all(|(_, entries)| *entries == 2), "two entries each: {pairs:?}");
    let booked = store.rows("select payment_id, amount_minor from ledger_entry where account_id = 'revenue'").await;
    assert_eq!(booked.into_iter().collect::<BTreeMap<_, _>>(), payments);
    let sum = "select 'sum', cast(sum(amount_minor) as bigint) from ledger_entry";
    assert_eq!(store.rows(sum).await[0].1, 0, "the entries add up to nothing");

    let receipts: Vec<String> = payments.keys().map(|payment| format!("receipt_{payment}")).collect();
    let emails =
        store.rows(&format!("select unique_key, cast(1 as bigint) from {} where state = 'sent'", S::EMAILS)).await;
    assert_eq!(emails.into_iter().map(|(key, _)| key).collect::<BTreeSet<_>>(), receipts.into_iter().collect());
    assert_eq!(store.count(S::EMAILS).await, PAYMENTS);
    let files = std::fs::read_dir(stage.path("emails")).unwrap();
    assert_eq!(files.filter(|file| is_email(&file.as_ref().unwrap().path())).count(), PAYMENTS);

    assert_eq!(store.count("provider_notification").await, PAYMENTS);
    let told = "select provider_key || ' ' || reference, attempts from provider_notification where state = 'delivered'";
    let told: BTreeMap<String, i64> = store.rows(told).await.into_iter().collect();
    assert_eq!(told.len(), PAYMENTS, "every notification was delivered");
    assert_eq!(bookings.len(), PAYMENTS, "the provider booked each once, under one key");
    let mut known = BTreeSet::new();
    for (key, booking) in bookings {
        let body: serde_json::Value = serde_json::from_slice(&booking.body).unwrap();
        known.insert(body["paymentId"].as_str().unwrap().to_owned());
        let attempts = told.get(&format!("{key} reference-{}", booking.number));
        assert_eq!(
            attempts,
            Some(&i64::from(booking.requests)),
            "{key}: the provider's reference and each try are noted"
        );
        assert!(booking.requests > 1 || booking.number % 5 != 0, "{key}: an answer was lost and nobody asked again");
    }
    assert_eq!(known, payments.into_keys().collect());
}

fn is_email(path: &std::path::Path) -> bool {
    path.extension().is_some_and(|extension| extension == "eml")
}
