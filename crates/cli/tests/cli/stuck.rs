//! Why is it stuck? `doctor` says it and ends with 3, until it is mended: one set-up each on the
//! real servers, with publisher and consumer as processes.

use oncebox::sqlx::{self, Connection, MySqlConnection, PgConnection};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;

use crate::dead::with_a_waiting_payment;
use crate::kit::{Place, Running, block_on, eventually, payment};
use crate::proxy::{Failure, Proxy};
use crate::servers::World;

/// A database and a broker of each kind.
const SERVERS: [(&str, &str); 2] =
    [("ONCEBOX_TEST_POSTGRES", "ONCEBOX_TEST_KAFKA"), ("ONCEBOX_TEST_MARIADB", "ONCEBOX_TEST_RABBITMQ")];

/// A world on each of them, one after the other.
fn worlds(test: &str) -> impl Iterator<Item = World> {
    SERVERS.into_iter().filter_map(move |(database, broker)| world(test, database, broker))
}

/// A world whose messages are tried every second, and for long.
fn world(test: &str, database: &str, broker: &str) -> Option<World> {
    let world = World::on(test, database, broker)?;
    edit(&world, &[("attempts_max = 2", "attempts_max = 1000"), ("\"20ms\"", "\"1s\""), ("\"50ms\"", "\"1s\"")]);
    Some(world)
}

fn edit(world: &World, replacements: &[(&str, &str)]) {
    let mut text = std::fs::read_to_string(&world.config).unwrap();
    for (from, to) in replacements {
        assert!(text.contains(from), "{from} in {text}");
        text = text.replace(from, to);
    }
    std::fs::write(&world.config, text).unwrap();
}

fn publisher(world: &World) -> Running {
    world.with_config(world.place.publisher(&["--listen", "127.0.0.1:0"])).start()
}

/// A consumer that runs; its queue on RabbitMQ is bound, so that what is published arrives there.
fn consumer(world: &World) -> Running {
    let consumer = world.with_config(world.place.consumer(&["--listen", "127.0.0.1:0"])).start();
    if world.broker.starts_with("amqp") {
        eventually("the queue is there", || {
            let doctor = world.oncebox(&["doctor"]).run().stdout;
            (doctor.contains("1 consumers") && !doctor.contains("not there yet")).then_some(())
        });
    }
    consumer
}

const DOCTOR: &[&str] = &["doctor", "--older-than", "1s", "--output", "json"];

/// The doctor ends with 3, and one of its rows has this name, these words, and something to do.
fn says(world: &World, row: &str, words: &[&str]) {
    says_by(DOCTOR, world, row, words);
}

fn says_by(doctor: &[&str], world: &World, row: &str, words: &[&str]) {
    let mut last = String::new();
    let what = format!("doctor says `{row}`, {words:?}");
    eventually(&what, || {
        let done = world.oncebox(doctor).run();
        last.clone_from(&done.stdout);
        let found: serde_json::Value = serde_json::from_str(&done.stdout).ok()?;
        let rows = found["findings"].as_array()?.clone();
        let fits = |one: &&serde_json::Value| {
            let text = |name: &str| one[name].as_str().unwrap_or_default().to_owned();
            let is_bad = ["stuck", "refused"].contains(&text("severity").as_str());
            is_bad && text("name").contains(row) && words.iter().all(|word| text("detail").contains(word))
        };
        let one = rows.iter().find(fits)?;
        assert!(one["remedy"].as_str().is_some_and(|remedy| !remedy.is_empty()), "{one}");
        done.ends_with(3, &[]);
        Some(())
    });
}

/// The doctor ends with 0 again.
fn is_well(world: &World) {
    let mut last = String::new();
    eventually("doctor finds nothing stuck", || {
        let done = world.oncebox(DOCTOR).run();
        last = format!("{}\n{}", done.stdout, done.stderr);
        (done.code() == Some(0)).then_some(())
    });
}

fn entries(world: &World, expected: &[&str]) {
    eventually("the ledger has every payment", || (world.place.entries() == expected).then_some(()));
}

/// On Kafka a topic that nobody made, on RabbitMQ one that no queue is bound to.
///
/// Shown by leaving out the line of the log with which a destination is found open again.
#[test]
fn a_topic_that_is_not_there_is_said_until_it_is_made() {
    for world in worlds("a_topic_that_is_not_there_is_said_until_it_is_made") {
        edit(&world, &[("create_topics = true", "create_topics = false")]);
        let mut publisher = publisher(&world);
        let kafka = world.broker.strip_prefix("kafka://");
        let first = kafka.map(|_| consumer(&world));
        world.enqueue("acc-7", &payment("p1"));
        says(&world, "outbox: held", &["1 message held", &world.name]);
        let held = world.json(&["dead", "list", "--state", "held"]);
        let why = if kafka.is_some() { "exist" } else { "no queue is bound" };
        assert!(held["dead"][0]["reason"].as_str().is_some_and(|reason| reason.contains(why)), "{held}");
        let status = world.oncebox(&["status", "--older-than", "1s"]).run().ok();
        assert!(status.contains("1 held (oldest ") && status.contains("stuck: 1 message held for "), "{status}");
        let consumer = first.unwrap_or_else(|| consumer(&world));
        if let Some(servers) = kafka {
            block_on(async {
                let admin: AdminClient<DefaultClientContext> =
                    ClientConfig::new().set("bootstrap.servers", servers).create().unwrap();
                let topic = NewTopic::new(&world.name, 2, TopicReplication::Fixed(1));
                admin.create_topics([&topic], &AdminOptions::new()).await.unwrap();
            });
        }
        entries(&world, &["p1"]);
        publisher.says(&["takes messages again", &world.name]);
        is_well(&world);
        publisher.stop().ok();
        consumer.stop().ok();
    }
}

/// A text where the ledger has a bigint, and twenty good payments of the same key behind it.
#[test]
fn a_value_that_the_ledger_refuses_is_said_with_what_stands_behind_it() {
    for world in worlds("a_value_that_the_ledger_refuses_is_said_with_what_stands_behind_it") {
        let (consumer, publisher) = (consumer(&world), publisher(&world));
        let is_postgres = world.place.database().starts_with("postgres");
        world.enqueue("acc-7", &payment("p01").replace("100", r#""many""#));
        for number in 2..22 {
            world.enqueue("acc-7", &payment(&format!("p{number:02}")));
        }
        let row = format!("consumer {}: waiting", world.name);
        says(&world, &row, &[if is_postgres { "22P02" } else { "1366" }, "many"]);
        let bad = eventually("all that stands behind it is counted", || {
            let listed = world.json(&["dead", "list"]);
            let head = listed["dead"].as_array().unwrap().iter().find(|one| one["behind"] == 20)?;
            Some(head["number"].as_str().unwrap().to_owned())
        });
        assert_eq!(world.place.entries(), Vec::<String>::new(), "nothing of the key overtakes it");
        let mended = world.place.file("mended.json", &payment("p01")).display().to_string();
        // Refused while it is tried at this very moment.
        eventually("no more tries", || {
            let bury = ["dead", "bury", &bad, "--why", "no number"];
            (world.oncebox(&bury).run().code() == Some(0)).then_some(())
        });
        world.oncebox(&["dead", "redrive", &bad, "--payload", &mended, "--why", "a number"]).run().ok();
        let all: Vec<String> = (1..22).map(|number| format!("p{number:02}")).collect();
        entries(&world, &all.iter().map(String::as_str).collect::<Vec<_>>());
        is_well(&world);
        publisher.stop().ok();
        consumer.stop().ok();
    }
}

#[test]
fn a_table_that_is_gone_is_said_with_the_handler_that_needs_it() {
    for world in worlds("a_table_that_is_gone_is_said_with_the_handler_that_needs_it") {
        let (consumer, publisher) = (consumer(&world), publisher(&world));
        world.enqueue("acc-7", &payment("p1"));
        entries(&world, &["p1"]);
        world.place.sql("alter table ledger_entry rename to gone");
        let handler = format!("consumer {}: handler of payment.created", world.name);
        says(&world, &handler, &["ledger_entry", "exist"]);
        world.enqueue("acc-7", &payment("p2"));
        says(&world, &format!("consumer {}: waiting", world.name), &["ledger_entry"]);
        world.place.sql("alter table gone rename to ledger_entry");
        world.oncebox(&["dead", "redrive", "--all", "--yes", "--why", "the table is back"]).run().ok();
        entries(&world, &["p1", "p2"]);
        is_well(&world);
        publisher.stop().ok();
        consumer.stop().ok();
    }
}

/// A lock on the ledger, held until it is released.
enum Lock {
    Postgres(tokio::runtime::Runtime, PgConnection),
    MySql(tokio::runtime::Runtime, MySqlConnection),
}

impl Lock {
    fn on_the_table(url: &str) -> Self {
        Self::by(
            url,
            match url.starts_with("mysql") {
                true => "lock tables ledger_entry write",
                false => "begin; lock table ledger_entry in access exclusive mode",
            },
        )
    }

    fn by(url: &str, sql: &'static str) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        if url.starts_with("mysql") {
            let connection = runtime.block_on(async {
                let mut connection = MySqlConnection::connect(url).await.unwrap();
                sqlx::raw_sql(sql).execute(&mut connection).await.unwrap();
                connection
            });
            return Self::MySql(runtime, connection);
        }
        let connection = runtime.block_on(async {
            let mut connection = PgConnection::connect(url).await.unwrap();
            sqlx::raw_sql(sql).execute(&mut connection).await.unwrap();
            connection
        });
        Self::Postgres(runtime, connection)
    }

    fn release(self) {
        match self {
            Self::Postgres(runtime, connection) => runtime.block_on(connection.close()).unwrap(),
            Self::MySql(runtime, connection) => runtime.block_on(connection.close()).unwrap(),
        }
    }
}

/// On MySQL nobody is asked who holds it, and that is said.
#[test]
fn a_handler_that_hangs_in_a_lock_is_said_with_who_holds_it() {
    let test = "a_handler_that_hangs_in_a_lock_is_said_with_who_holds_it";
    for world in worlds(test) {
        let (consumer, publisher) = (consumer(&world), publisher(&world));
        world.enqueue("acc-7", &payment("p1"));
        entries(&world, &["p1"]);
        let lock = Lock::on_the_table(world.place.database());
        world.enqueue("acc-7", &payment("p2"));
        let is_postgres = world.place.database().starts_with("postgres");
        let holder = if is_postgres { "idle in transaction" } else { "nobody that is shown" };
        says(&world, "lock: connection", &["waits for", "ledger_entry", holder]);
        if is_postgres {
            says(&world, "handler of payment.created", &["is locked, by connection", holder]);
        }
        lock.release();
        entries(&world, &["p1", "p2"]);
        is_well(&world);
        publisher.stop().ok();
        consumer.stop().ok();
    }
}

/// A handler gives up its wait after 5 s and begins a new one, which is never as old as what counts
/// as stuck. What it waits for is.
///
/// Shown to fail: by judging the age of the wait alone.
#[test]
fn a_wait_that_begins_anew_is_judged_by_the_transaction_that_holds_the_lock() {
    let test = "a_wait_that_begins_anew_is_judged_by_the_transaction_that_holds_the_lock";
    for world in worlds(test) {
        let (consumer, publisher) = (consumer(&world), publisher(&world));
        let same_row = "begin; insert into ledger_entry (payment_id, account_id) values ('p1', 'by hand')";
        let lock = Lock::by(world.place.database(), same_row);
        world.enqueue("acc-7", &payment("p1"));
        let is_postgres = world.place.database().starts_with("postgres");
        let holder = if is_postgres { "idle in transaction, for" } else { "of oncebox, sleep, for" };
        let doctor = ["doctor", "--older-than", "8s", "--output", "json"];
        says_by(&doctor, &world, "lock: connection", &["waits for", "ledger_entry", holder]);
        lock.release();
        entries(&world, &["p1"]);
        publisher.stop().ok();
        consumer.stop().ok();
    }
}

#[test]
fn an_outbox_that_no_publisher_reads_is_said() {
    for world in worlds("an_outbox_that_no_publisher_reads_is_said") {
        let consumer = consumer(&world);
        world.enqueue("acc-7", &payment("p1"));
        says(&world, "outbox: publisher", &["no publisher owns it", "1 message pending"]);
        let status = world.oncebox(&["status", "--older-than", "1s"]).run().ok();
        assert!(status.contains("nobody") && status.contains("stuck: 1 message pending for "), "{status}");
        assert!(status.contains("no publisher owns shard 0"), "{status}");
        let publisher = publisher(&world);
        entries(&world, &["p1"]);
        is_well(&world);
        publisher.stop().ok();
        consumer.stop().ok();
    }
}

/// On Kafka a group, on RabbitMQ a queue, in the embedded broker a group.
#[test]
fn messages_that_no_consumer_reads_are_said() {
    let test = "messages_that_no_consumer_reads_are_said";
    for (database, broker, row) in [
        ("ONCEBOX_TEST_POSTGRES", "ONCEBOX_TEST_KAFKA", "kafka group"),
        ("ONCEBOX_TEST_MARIADB", "ONCEBOX_TEST_RABBITMQ", "queue"),
    ] {
        let Some(world) = world(test, database, broker) else { continue };
        if broker.ends_with("RABBITMQ") {
            // A queue receives what comes after it was bound.
            world.publish();
            world.consume();
        }
        world.enqueue("acc-7", &payment("p1"));
        world.publish();
        says(&world, row, &["nobody"]);
        let consumer = consumer(&world);
        entries(&world, &["p1"]);
        is_well(&world);
        consumer.stop().ok();
    }
    let place = Place::migrated();
    let config = place.ledger();
    place.enqueue("acc-7", &payment("p1"));
    place.publish();
    let doctor = || place.oncebox(&["doctor", "--config", &config]).run();
    doctor().ends_with(3, &["stuck"]);
    place.consume(&config).ok();
    doctor().ok();
}

/// Cut off while publisher and consumer work with it: both say that they are not ready, and go on
/// by themselves.
///
/// Shown by: a subscriber of Kafka that says nothing of brokers that are away (its consumer
/// answers 200).
#[test]
fn a_broker_that_is_away_is_said() {
    let test = "a_broker_that_is_away_is_said";
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let _entered = runtime.enter();
    for mut world in worlds(test) {
        let proxy = Proxy::before_broker(&world.broker);
        world.place.move_broker(&proxy.url);
        let (mut consumer, mut publisher) = (consumer(&world), publisher(&world));
        world.enqueue("acc-7", &payment("p1"));
        entries(&world, &["p1"]);
        for program in [&mut consumer, &mut publisher] {
            program.until_ready_says(200, &["ready"]);
        }
        is_well(&world);
        proxy.fails(Failure::Cut);
        world.enqueue("acc-7", &payment("p2"));
        let address = proxy.url.rsplit('@').next().unwrap().trim_start_matches("kafka://").split('/').next().unwrap();
        says(&world, "broker", &[address]);
        for program in [&mut consumer, &mut publisher] {
            program.until_ready_says(503, &[]);
        }
        proxy.works();
        entries(&world, &["p1", "p2"]);
        for program in [&mut consumer, &mut publisher] {
            program.until_ready_says(200, &["ready"]);
        }
        is_well(&world);
        publisher.stop().ok();
        consumer.stop().ok();
    }
}

/// Shown to fail on the code before: the shards were read once, when the publisher began.
#[test]
fn a_shard_that_is_made_later_is_served_by_the_publisher_that_runs() {
    let test = "a_shard_that_is_made_later_is_served_by_the_publisher_that_runs";
    let Some(world) = world(test, "ONCEBOX_TEST_POSTGRES", "ONCEBOX_TEST_KAFKA") else { return };
    // The first half of the buckets has nobody to serve it.
    world.place.sql("update oncebox.shard set bucket_from = 128");
    let (publisher, consumer) = (publisher(&world), consumer(&world));
    let names: Vec<String> = (0..40).map(|number| format!("p{number}")).collect();
    for name in &names {
        world.enqueue(&format!("acc-{name}"), &payment(name));
    }
    eventually("half of them", || (10..40).contains(&world.place.entries().len()).then_some(()));
    world.place.sql("insert into oncebox.shard (shard_id, bucket_from, bucket_to) values (1, 0, 127)");
    let mut expected = names;
    expected.sort();
    eventually("all of them", || {
        let mut entries = world.place.entries();
        entries.sort();
        (entries == expected).then_some(())
    });
    publisher.stop().ok();
    consumer.stop().ok();
}

/// What doctor advises where no publisher owns a shard.
const START: &str = "start `publisher`; if one runs, its /readyz says what it waits for: another session may have \
                     locked the row of its lease in the table of shards";

// Shown by: a doctor that has findings of its own: it said `ok` of the first, and nothing of a
// consumer that is gone; that advised to mend the error of a held message, which has none; and that
// called the message that is due first the oldest.
#[test]
fn doctor_has_a_remedy_for_all_that_status_calls_stuck() {
    let new = Place::migrated();
    let status = new.oncebox(&["status"]).run().ok();
    assert!(status.contains("stuck: no publisher owns shard 0"), "{status}");
    let finding = |place: &Place, arguments: &[&str], name: &str| {
        let shown = place.oncebox(&[&["doctor", "--output", "json"], arguments].concat()).run().stdout;
        let found: serde_json::Value = serde_json::from_str(&shown).unwrap();
        let rows = found["findings"].as_array().unwrap().clone();
        rows.into_iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("{name} in {shown}"))
    };
    let publisher = finding(&new, &[], "outbox: publisher");
    assert_eq!((&publisher["severity"], &publisher["remedy"]), (&"warning".into(), &START.into()));
    new.oncebox(&["doctor"]).run().ok();
    let (place, config) = with_a_waiting_payment();
    place.sql("update oncebox_consumer set seen_at = seen_at - 3600000");
    let status = place.oncebox(&["status"]).run().ok();
    assert!(status.contains("stuck: consumer ledger: no process of it runs"), "{status}");
    let process = finding(&place, &[], "consumer ledger: process");
    assert_eq!(process["severity"], "stuck");
    assert!(process["remedy"].as_str().is_some_and(|remedy| remedy.starts_with("start it")), "{process}");
    let waiting = finding(&place, &["--older-than", "0s"], "consumer ledger: waiting");
    assert!(waiting["remedy"].as_str().is_some_and(|remedy| remedy.starts_with("start a process")), "{waiting}");
    place.oncebox(&["doctor"]).run().ends_with(3, &["stuck"]);
    // One that is due first is not the oldest.
    place.enqueue("acc-8", &payment("p2"));
    place.publish();
    place.consume(&config).ok();
    place.sql(
        "update oncebox_waiting set stored_at = stored_at - 3600000, due_at = due_at + 3600000 where sequence = 1",
    );
    let waiting = finding(&place, &[], "consumer ledger: waiting");
    let detail = waiting["detail"].as_str().unwrap();
    assert!(detail.starts_with("2 messages waiting, the oldest for 36"), "{detail}");
    assert!(detail.contains(" s; due first: c2 of topic payments after "), "{detail}");
    // What is held has no error. The dead message of its key has one.
    let place = Place::migrated();
    let config = place.ledger();
    place.sql(&format!(
        "insert into oncebox_outbox (topic, key, kind, payload) values
           ('payments', 'acc-7', 'payment.created', '{{\"paymentId\":\"p1\"}}'),
           ('payments', 'acc-7', 'payment.created', '{}')",
        payment("p2")
    ));
    place.publish();
    place.consume(&config).ok();
    place.sql("update oncebox_waiting set stored_at = stored_at - 3600000");
    let held = finding(&place, &[], "consumer ledger: held");
    let says = |name: &str, words: &str| assert!(held[name].as_str().unwrap().contains(words), "{words}: {held}");
    says("detail", "1 message held, the oldest, c2 of topic payments");
    says("detail", "behind a dead message of its key, c1: the parameter `account`");
    says("remedy", "redrive or discard c1; `oncebox dead show c1`");
    assert!(place.oncebox(&["dead", "show", "c2"]).run().ok().contains("held by       c1\n"));
    let listed = place.oncebox(&["dead", "list", "--state", "held"]).run().ok();
    assert!(listed.contains("behind a dead message of its key, c1"), "{listed}");
    place.oncebox(&["dead", "redrive", "c2", "--why", "x"]).run().fails(4, &["c2: it waits", "c1, which is dead"]);
    // What waits for another reason has a row of its own.
    place.enqueue("acc-9", &payment("p3"));
    place.publish();
    let long = [("attempts_max = 2", "attempts_max = 9"), ("\"20ms\"", "\"1h\""), ("\"50ms\"", "\"1h\"")];
    let late = std::fs::read_to_string(&config).unwrap();
    let late = long.iter().fold(late, |text, (from, to)| text.replace(from, to));
    place.sql(
        "create trigger closed before insert on ledger_entry begin select raise(abort, 'the ledger is closed'); end",
    );
    place.consume(&place.config(&late)).ok();
    let held = finding(&place, &[], "consumer ledger: held");
    let waiting = finding(&place, &[], "consumer ledger: waiting");
    for (row, words, error) in [
        (&held, "1 message held, of waiting and held the oldest for 36", "the parameter `account`"),
        (&waiting, "1 message waiting, of waiting and held the oldest for 36", "the ledger is closed"),
    ] {
        let detail = row["detail"].as_str().unwrap();
        assert!(detail.starts_with(words) && detail.contains(error), "{detail}");
    }
}
