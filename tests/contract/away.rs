//! A database that goes away in the middle of work, whatever the work (G10, R28): connections are
//! cut and refused, or say nothing more, at one request after the other, before the server has seen
//! it and after. It comes back a moment later. Nothing is restarted, no try is counted for it,
//! nothing is lost, doubled or reordered.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncebox::observe::Health;
use oncebox::sender::{EmailTransport, Sender, SenderOptions};
use oncebox::store::{Enqueue as _, NewEmail, StoreOptions};
use oncebox::{ConsumerOptions, StoreError};
use oncebox_testkit::memory::MemoryBroker;
use tokio_util::sync::CancellationToken;

use super::kit::{
    Act, Behind, Does, SOON, Sql, World, behind_a_proxy, behind_two_proxies, consumer_options, fails, relay_options,
};
use super::proxy::{Failure, When};
use super::smtp::smtp;
use super::support::eventually;

/// Moments of failure: after so many requests.
fn moments(failure: Failure) -> impl Iterator<Item = u32> {
    let requests: &[u32] = match failure {
        Failure::Cut => &[0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15],
        // Each costs the answer timeout.
        _ => &[0, 1, 3, 5, 8],
    };
    requests.iter().copied()
}

fn patient() -> StoreOptions {
    StoreOptions { answer_timeout: Some(Duration::from_secs(3)), ..StoreOptions::new("") }
}

/// A wait for all rounds of a test: some end with a pace of seconds.
const LONG: Duration = Duration::from_secs(240);

async fn relay<S: Sql>(behind: Behind<S>, failure: Failure, when: When) {
    let Behind { direct, through, proxy } = behind;
    // First at the end of a checkpoint, wherever that comes: PostgreSQL has it in one statement,
    // whose text comes a request before.
    match S::NAME {
        "postgres" => proxy.fail_at("scanned_to = coalesce", "", 1, when, failure),
        _ => proxy.fail_at("scanned_to = greatest", "COMMIT", 0, when, failure),
    }
    let relay = through.relay(relay_options());
    let mut all = Vec::new();
    for requests in std::iter::once(None).chain(moments(failure).map(Some)) {
        let round = requests.map_or_else(|| "first".to_owned(), |requests| requests.to_string());
        let names: Vec<String> = (0..6).map(|i| format!("{}{round}{when:?}{i}", ["a", "b", "c"][i % 3])).collect();
        if let Some(requests) = requests {
            proxy.fail_after(requests, when, failure);
        }
        direct.enqueue("t", &names.iter().map(String::as_str).collect::<Vec<_>>()).await;
        all.extend(names);
        eventually("it failed and works again", LONG, || async { proxy.has_failed().then_some(()) }).await;
        eventually("all of them are published", LONG, || async {
            (super::kit::first_occurrences(direct.published("t").await).len() == all.len()).then_some(())
        })
        .await;
    }
    assert_eq!(super::kit::first_occurrences(direct.published("t").await), all, "in order, none lost");
    let status = direct.until_status("all of it is marked", |status| status.pending == 0).await;
    assert_eq!((status.held, status.dead), (0, 0));
    assert!(!relay.task.is_finished(), "no restart");
    relay.end().await;
    through.store.close().await;
}

/// A handler that ran too long has failed, and its try counts: on a busy machine one that only
/// waits for its turn must not. Where the network says nothing, nothing but this ends the statement
/// of a handler.
fn unhurried(failure: Failure) -> ConsumerOptions {
    match failure {
        Failure::Cut => consumer_options(),
        _ => ConsumerOptions { handler_timeout: Duration::from_secs(6), ..consumer_options() },
    }
}

/// The first two tries of every second message fail, so that it runs in a batch, alone, and out of
/// the waiting table.
async fn consumer<S: Sql>(behind: Behind<S>, failure: Failure, when: When) {
    let Behind { direct, through, proxy } = behind;
    let tries: Arc<Mutex<BTreeMap<String, BTreeSet<u32>>>> = Arc::default();
    let seen = Arc::clone(&tries);
    let handler = move |name: &str, message: &oncebox::Message| {
        seen.lock().unwrap().entry(name.to_owned()).or_default().insert(message.attempt);
        if name.starts_with('a') && message.attempt < 3 { fails() } else { Act::Done }
    };
    let consumer = through.consumer(unhurried(failure), Does(handler));
    let mut all: BTreeMap<char, Vec<String>> = BTreeMap::new();
    for requests in moments(failure) {
        let names: Vec<String> = (0..4).map(|i| format!("{}{requests}{when:?}{i}", ["a", "b"][i % 2])).collect();
        proxy.fail_after(requests, when, failure);
        direct.deliver_all(&names.iter().map(String::as_str).collect::<Vec<_>>());
        for name in names {
            all.entry(name.chars().next().unwrap()).or_default().push(name);
        }
        let count: usize = all.values().map(Vec::len).sum();
        eventually("it failed and works again", LONG, || async { proxy.has_failed().then_some(()) }).await;
        eventually("all effects are there", LONG, || async { (direct.effects().await.len() >= count).then_some(()) })
            .await;
    }
    let mut effects: BTreeMap<char, Vec<String>> = BTreeMap::new();
    for effect in direct.effects().await {
        effects.entry(effect.chars().next().unwrap()).or_default().push(effect);
    }
    assert_eq!(effects, all, "once, in the order of their keys");
    for (name, tries) in tries.lock().unwrap().iter() {
        let wanted = if name.starts_with('a') { BTreeSet::from([1, 2, 3]) } else { BTreeSet::from([1]) };
        assert_eq!(*tries, wanted, "the tries of {name}: one was counted for the database");
    }
    direct.until_consumer("nothing waits", |ledger| ledger.waiting == 0).await;
    assert!(direct.dead().await.is_empty());
    assert!(!consumer.task.is_finished(), "no restart");
    consumer.end().await;
    through.store.close().await;
}

async fn sender<S: Sql>(behind: Behind<S>, failure: Failure, when: When) {
    let Behind { direct, through, proxy } = behind;
    let (url, taken) = smtp(&[]).await;
    let options = SenderOptions { attempts_max: 5, until_empty: false, ..SenderOptions::new("shop@example.com") };
    let transport = EmailTransport::smtp(&url).unwrap();
    let sender = Sender::new(through.store.clone(), transport, options, through.health.clone()).unwrap();
    let stop = CancellationToken::new();
    let token = stop.clone();
    let running = tokio::spawn(async move { sender.run(token).await });
    let mut sent = 0;
    for requests in moments(failure) {
        let mut tx = direct.store.pool().begin().await.unwrap();
        for part in 0..2 {
            let email = NewEmail {
                unique_key: format!("{requests}{when:?}{part}"),
                recipient: "someone@example.com".into(),
                subject: "Receipt".into(),
                body: "Thank you.".into(),
            };
            assert!(tx.queue_email(&email).await.unwrap());
        }
        proxy.fail_after(requests, when, failure);
        tx.commit().await.unwrap();
        sent += 2;
        eventually("it failed and works again", LONG, || async { proxy.has_failed().then_some(()) }).await;
        eventually("all are sent", LONG, || async {
            (direct.store.emails_pending().await.unwrap() == 0).then_some(())
        })
        .await;
        assert_eq!(taken.lock().unwrap().len(), sent, "each went out once");
    }
    let table = if S::NAME == "postgres" { "oncebox.email" } else { "oncebox_email" };
    let tries = format!("select cast(sum(attempts) as char(9)) from {table} where state = 'sent'");
    assert_eq!(direct.store.texts(&tries).await[0].trim(), sent.to_string(), "a try was counted for the database");
    assert!(!running.is_finished(), "no restart");
    stop.cancel();
    running.await.unwrap().unwrap();
    through.store.close().await;
}

/// What an operator's command asks of a server that says nothing ends, and so does the next one,
/// until the server is back; also where a connection goes back to the pool at that moment, which
/// has only this one.
async fn commands<S: Sql>(behind: Behind<S>) {
    let Behind { through, proxy, .. } = behind;
    through.store.status().await.unwrap();
    let mut failed = 0;
    for requests in 0..12 {
        proxy.fail_after(requests, When::BeforeRequest, Failure::Silence);
        let began = Instant::now();
        while !proxy.has_failed() {
            assert!(began.elapsed() < SOON, "a connection that fell silent kept its place of the pool");
            match tokio::time::timeout(SOON / 2, through.store.status()).await.expect("within the bound") {
                Ok(_) => {}
                Err(StoreError::Unavailable(_)) => failed += 1,
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert!(failed > 0, "no request was hit");
    proxy.fails(Failure::Silence);
    let status = tokio::time::timeout(SOON / 2, through.store.status()).await.expect("within the bound");
    assert!(matches!(status, Err(StoreError::Unavailable(_))), "{status:?}");
    tokio::time::timeout(SOON / 2, through.store.close()).await.expect("closing is bounded");
}

/// A lease of waiting messages that the database has made and nobody has heard of.
async fn lease<S: Sql>(behind: Behind<S>) {
    let Behind { direct, through, proxy } = behind;
    let tries: Arc<Mutex<BTreeSet<u32>>> = Arc::default();
    let seen = Arc::clone(&tries);
    let handler = move |_: &str, message: &oncebox::Message| {
        seen.lock().unwrap().insert(message.attempt);
        if message.attempt < 3 { fails() } else { Act::Done }
    };
    proxy.fail_at("skip locked", "COMMIT", 0, When::BeforeAnswer, Failure::Cut);
    // A lease lasts longer than a handler may run. Without a return, this one ends after the wait.
    let options = ConsumerOptions { handler_timeout: SOON * 2, ..consumer_options() };
    let consumer = through.consumer(options, Does(handler));
    direct.deliver_all(&["a1"]);
    direct.until_effects(&["a1"]).await;
    assert!(proxy.has_failed());
    assert_eq!(*tries.lock().unwrap(), BTreeSet::from([1, 2, 3]), "a try was counted for the database");
    consumer.end().await;
    through.store.close().await;
}

/// A process that alone has lost its way to the database leaves its partitions to one that has not,
/// and takes part again when the database answers it. Shown by: staying in the group; the messages
/// of its partitions stood.
async fn one_cut_off<S: Sql>(behind: Behind<S>, failure: Failure) {
    let Behind { direct, through, proxy } = behind;
    let broker = MemoryBroker::with_partitions(4);
    let (direct, mut through) = (direct.with_broker(broker.clone()), through.with_broker(broker));
    through.health = Health::default();
    let handled: Arc<Mutex<Vec<String>>> = Arc::default();
    let start = |world: &World<S>, who: &'static str| {
        let handled = Arc::clone(&handled);
        let options = ConsumerOptions { handler_timeout: Duration::from_secs(6), ..consumer_options() };
        let handler = move |name: &str, _: &oncebox::Message| {
            handled.lock().unwrap().push(format!("{name} by {who}"));
            Act::Done
        };
        world.consumer(options, Does(handler))
    };
    let ready = |world: &World<S>| {
        let health = world.health.clone();
        async move { eventually("it takes part", SOON, || async { health.is_ready().then_some(()) }).await }
    };
    let deliver = async |round: char| {
        let names: Vec<String> = ('a'..'k').map(|key| format!("{key}{round}")).collect();
        direct.deliver_all(&names.iter().map(String::as_str).collect::<Vec<_>>());
        eventually("all of the round are handled", SOON, || async {
            let effects = direct.effects().await;
            names.iter().all(|name| effects.contains(name)).then_some(())
        })
        .await;
    };
    let cut_off = start(&through, "one");
    deliver('1').await;
    let other = start(&direct, "other");
    ready(&direct).await;
    eventually("both take part", SOON, || async {
        deliver('2').await;
        let handled = handled.lock().unwrap().join(" ");
        (handled.contains("2 by one") && handled.contains("2 by other")).then_some(())
    })
    .await;
    proxy.fails(failure);
    deliver('3').await;
    assert!(through.says("no sign of life"), "{:?}", through.health.lines());
    proxy.works();
    ready(&through).await;
    other.end().await;
    deliver('4').await;
    let handled = handled.lock().unwrap().clone();
    assert!(handled.iter().all(|one| !one.contains("4 by") || one.ends_with("4 by one")), "{handled:?}");
    assert!(direct.dead().await.is_empty());
    assert!(!cut_off.task.is_finished(), "no restart");
    cut_off.end().await;
    through.store.close().await;
}

/// The network fails in the middle of a try, again and again, for so long that the consumer leaves
/// the broker. What it has in hand comes again as suspect, and its try is counted before it runs.
/// Shown by: leaving the counts; the third try was the second one.
async fn outages<S: Sql>(behind: Behind<S>, failure: Failure) {
    let Behind { direct, through, proxy } = behind;
    let proxy = Arc::new(proxy);
    let tries: Arc<Mutex<Vec<u32>>> = Arc::default();
    let (seen, fails) = (Arc::clone(&tries), Arc::clone(&proxy));
    let handler = move |_: &str, message: &oncebox::Message| {
        let mut seen = seen.lock().unwrap();
        seen.push(message.attempt);
        if seen.len() <= 2 {
            fails.fails(failure);
        }
        Act::Done
    };
    let options = ConsumerOptions { handler_timeout: Duration::from_secs(6), ..consumer_options() };
    let consumer = through.consumer(options, Does(handler));
    direct.deliver_all(&["a1"]);
    for outage in 1..=2 {
        eventually("it tries", LONG, || async { (tries.lock().unwrap().len() == outage).then_some(()) }).await;
        eventually("it has left", LONG, || async { through.says("left to other processes").then_some(()) }).await;
        proxy.works();
    }
    direct.until_effects(&["a1"]).await;
    assert_eq!(*tries.lock().unwrap(), [1; 3], "an outage was counted");
    assert!(direct.dead().await.is_empty());
    consumer.end().await;
    through.store.close().await;
}

behind_two_proxies! {
    g10_a_relay_whose_database_goes_away_in_the_middle_goes_on_when_it_is_back:
        |behind, when| relay(behind, Failure::Cut, when), StoreOptions::new("");
    g10_a_consumer_whose_database_goes_away_in_the_middle_goes_on_when_it_is_back:
        |behind, when| consumer(behind, Failure::Cut, when), StoreOptions::new("");
    g10_a_sender_whose_database_goes_away_in_the_middle_goes_on_when_it_is_back:
        |behind, when| sender(behind, Failure::Cut, when), StoreOptions::new("");
    r28_a_relay_whose_database_falls_silent_goes_on_with_a_fresh_connection:
        |behind, when| relay(behind, Failure::Silence, when), patient();
    r28_a_consumer_whose_database_falls_silent_goes_on_with_a_fresh_connection:
        |behind, when| consumer(behind, Failure::Silence, when), patient();
    r28_a_sender_whose_database_falls_silent_goes_on_with_a_fresh_connection:
        |behind, when| sender(behind, Failure::Silence, when), patient();
}

behind_a_proxy! {
    r28_what_is_asked_of_a_silent_server_ends: commands, StoreOptions { connections_max: 1, ..patient() };
    g10_a_lease_whose_answer_was_lost_is_given_back: lease, StoreOptions::new("");
    a_consumer_that_alone_is_cut_off_from_the_database_leaves_its_partitions:
        |behind| one_cut_off(behind, Failure::Cut), StoreOptions::new("");
    g10_outages_in_the_middle_of_tries_do_not_add_up:
        |behind| outages(behind, Failure::Cut), StoreOptions::new("");
    g10_silence_in_the_middle_of_tries_does_not_add_up: |behind| outages(behind, Failure::Silence), patient();
    a_consumer_to_which_alone_the_database_is_silent_leaves_its_partitions:
        |behind| one_cut_off(behind, Failure::Silence), patient();
}
