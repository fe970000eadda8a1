//! The programs on the real servers: the same commands, the same exit codes, every effect once.
//! Databases, topics, exchanges and queues are the test's own.

use serde_json::Value;

use crate::broker::{Own, foreign};
use crate::database::Database;
use crate::kit::{Place, Program, payment};
use crate::logs::objects;
use crate::support::{service, unique};

/// A database with the tables and a broker, on servers.
pub(crate) struct World {
    pub(crate) place: Place,
    pub(crate) config: String,
    pub(crate) name: String,
    pub(crate) broker: String,
    // Dropped after everything that uses them.
    _own: Own,
    _database: Database,
}

impl World {
    pub(crate) fn on(test: &str, database: &str, broker: &str) -> Option<Self> {
        let (database, broker) = (service(test, database)?, service(test, broker)?);
        let database = Database::on(&database);
        let place = Place::on(Some(&database.url), Some(&broker));
        let migrated = place.oncebox(&["migrate", "up"]).run();
        assert!(
            !migrated.stderr.contains("already exists"),
            "a server's notice of what is as it should be: {migrated:?}"
        );
        migrated.ok();
        assert_eq!(place.oncebox(&["migrate", "up"]).run().ok(), "no migration to apply\n");
        let name = unique("cli");
        let own = std::fs::read_to_string(place.ledger()).unwrap();
        let own = own.replace("\"payments\"", &format!("\"{name}\"")).replace("\"ledger\"", &format!("\"{name}\""));
        let config = place.config(&format!(
            "broker.rabbitmq.exchange = '{name}'\nbroker.kafka = {{ create_topics = true, partitions = 2, session_timeout = '6s' }}\n{own}"
        ));
        let own = Own::new(&broker, &name);
        Some(Self { place, config, name, broker, _own: own, _database: database })
    }

    pub(crate) fn enqueue(&self, key: &str, payload: &str) {
        self.place.enqueue_to(&self.name, key, payload);
    }

    pub(crate) fn with_config(&self, program: Program) -> Program {
        program.env("ONCEBOX_CONFIG", &self.config)
    }

    pub(crate) fn publish(&self) {
        assert_eq!(self.with_config(self.place.publisher(&["--until-empty"])).run().ok(), "");
    }

    pub(crate) fn consume(&self) {
        assert_eq!(self.with_config(self.place.consumer(&["--until-idle", "1s"])).run().ok(), "");
    }

    pub(crate) fn oncebox(&self, arguments: &[&str]) -> Program {
        self.with_config(self.place.oncebox(arguments))
    }

    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        self.oncebox(&[arguments, &["--output", "json"]].concat()).run().json()
    }
}

/// Enqueue, relay, consume, look, redrive, discard: as a person does it by hand.
fn a_day(world: &World) {
    if world.broker.starts_with("amqp") {
        // The queue of a new consumer receives what comes after it was bound; nobody else has to
        // run before it.
        world.consume();
    }
    for number in 0..20 {
        world.enqueue(&format!("acc-{}", number % 3), &payment(&format!("p{number:02}")));
    }
    world.enqueue("acc-bad", r#"{"paymentId":"bad"}"#);
    world.enqueue("acc-worse", "not JSON");
    assert_eq!(world.json(&["status"])["pending"], 22);
    world.publish();
    assert_eq!(world.json(&["status"])["pending"], 0);
    world.consume();
    let all: Vec<String> = (0..20).map(|number| format!("p{number:02}")).collect();
    assert_eq!(world.place.entries(), all);

    let status = world.json(&["status"]);
    let consumer = &status["consumers"][0];
    assert_eq!((&consumer["inbox_rows"], &consumer["dead"]), (&22.into(), &2.into()), "{status}");
    let doctor = world.oncebox(&["doctor"]).run();
    assert!(doctor.stdout.contains("2 dead and 0 held messages"), "{}", doctor.stdout);
    doctor.ok();

    let dead = world.json(&["dead", "list", "--consumer", &world.name]);
    let number = |key: &str| {
        let dead = dead["dead"].as_array().unwrap().iter().find(|message| message["key"] == key).unwrap();
        assert_eq!(dead["reason"], "terminal");
        dead["number"].as_str().unwrap().to_owned()
    };
    let (bad, worse) = (number("acc-bad"), number("acc-worse"));
    assert!(world.oncebox(&["dead", "show", &bad]).run().ok().contains("the parameter `account` has no value"));
    world.oncebox(&["dead", "discard", "--all", "--why", "x"]).run().fails(4, &["2 messages would be discarded"]);
    world.oncebox(&["dead", "discard", &worse, "--why", "nobody wants it"]).run().ok();
    let mended = world.place.file("mended.json", &payment("mended")).display().to_string();
    world.oncebox(&["dead", "redrive", &bad, "--payload", &mended, "--why", "mended"]).run().ok();
    world.consume();
    assert_eq!(world.place.entries(), [vec!["mended".to_owned()], all].concat());
    assert_eq!(world.json(&["dead", "list"])["dead"], serde_json::json!([]));
    // Again: there is nothing more to do, but for a message of somebody else, which has no id.
    foreign(&world.broker, &world.name, &payment("foreign"));
    world.publish();
    world.consume();
    assert_eq!(world.place.entries().len(), 21);
    let listed = world.oncebox(&["dead", "list"]).run().ok();
    assert!(listed.contains("no-usable-id") && listed.contains("the message has no id"), "{listed}");
}

/// The publisher comes first here, and makes the topic. Shown by not declaring it: all is held, and
/// the ledger stays empty.
#[test]
fn a_day_on_postgres_and_kafka() {
    let test = "a_day_on_postgres_and_kafka";
    let Some(world) = World::on(test, "ONCEBOX_TEST_POSTGRES", "ONCEBOX_TEST_KAFKA") else { return };
    a_day(&world);
    // What the broker refuses for what it is: its key is held, and the act is carried out by the
    // publisher.
    world.place.sql("update oncebox.limits set value = 3000000 where name = 'message_bytes_max'");
    world.enqueue("acc-large", &format!(r#"{{"paymentId":"large","filler":"{}"}}"#, "x".repeat(2_000_000)));
    world.enqueue("acc-large", &payment("behind"));
    world.publish();
    let dead = world.json(&["dead", "list", "--consumer", "outbox", "--state", "dead"]);
    let dead = &dead["dead"][0];
    assert!(dead["reason"].as_str().unwrap().contains("`max.message.bytes`"), "{dead}");
    assert_eq!(dead["behind"], 1);
    let number = dead["number"].as_str().unwrap();
    world.oncebox(&["dead", "discard", number, "--why", "too large"]).run().ok();
    world.publish();
    world.consume();
    assert_eq!(world.place.entries().len(), 22, "what stood behind it went on");
}

#[test]
fn a_day_on_mariadb_and_rabbitmq() {
    let test = "a_day_on_mariadb_and_rabbitmq";
    let Some(world) = World::on(test, "ONCEBOX_TEST_MARIADB", "ONCEBOX_TEST_RABBITMQ") else { return };
    a_day(&world);
}

/// A topic that is not there holds its messages and nothing else; `doctor` prints what is missing
/// and how to make it.
#[test]
fn a_kafka_topic_that_is_missing_is_shown_with_the_command_that_makes_it() {
    let test = "a_kafka_topic_that_is_missing_is_shown_with_the_command_that_makes_it";
    let Some(broker) = service(test, "ONCEBOX_TEST_KAFKA") else { return };
    let place = Place::migrated();
    let arguments = ["--broker", &broker, "--config", &place.ledger()];
    let name = unique("cli");
    place.enqueue_to(&name, "acc-7", "{}");
    place.publisher(&[&["--until-empty"], &arguments[..]].concat()).run().ok_saying(&["held=1", "oncebox dead list"]);
    let status = place.json(&["status"]);
    assert_eq!((&status["held"], &status["dead"]), (&1.into(), &0.into()), "{status}");
    let config = place.config(&format!("[[consumer]]\nname = '{name}'\ntopics = ['{name}']"));
    // Also where no consumer is configured here: the outbox holds a message for it.
    for named in [&["--config", &config][..], &[]] {
        let json = [&["doctor", "--broker", &broker, "--output", "json"], named].concat();
        let shown = place.oncebox(&json).run().json();
        let of_it = |one: &&serde_json::Value| one["name"] == format!("kafka topic {name}").as_str();
        let rows = shown["findings"].as_array().unwrap().clone();
        let found: Vec<_> = rows.iter().filter(of_it).collect();
        assert_eq!(found.len(), 1, "{shown}");
        let says = |name: &str, word: &str| found[0][name].as_str().is_some_and(|text| text.contains(word));
        assert!(says("detail", "the topic does not exist") && says("remedy", "kafka-topics.sh"), "{found:?}");
        assert!(
            says("remedy", &format!("--topic {name} ")) && !shown.to_string().contains("oncebox-doctor"),
            "{shown}"
        );
    }
}

/// The same on RabbitMQ, where no queue is bound. Shown by: looking at the topics of configured
/// consumers alone.
#[test]
fn a_topic_without_a_queue_on_rabbitmq_is_shown_with_what_to_do() {
    let test = "a_topic_without_a_queue_on_rabbitmq_is_shown_with_what_to_do";
    let Some(broker) = service(test, "ONCEBOX_TEST_RABBITMQ") else { return };
    let (place, name) = (Place::migrated(), unique("cli"));
    let _own = Own::new(&broker, &name);
    let on_it = |program: Program| program.env("ONCEBOX_BROKER__RABBITMQ__EXCHANGE", &name);
    place.enqueue_to(&name, "acc-7", "{}");
    on_it(place.publisher(&["--until-empty", "--broker", &broker])).run().ok_saying(&["held=1"]);
    let shown = on_it(place.oncebox(&["doctor", "--broker", &broker, "--output", "json"])).run().json();
    let rows = shown["findings"].as_array().unwrap();
    let row = rows.iter().find(|row| row["name"] == format!("outbox: topic {name}").as_str());
    let row = row.unwrap_or_else(|| panic!("{shown}"));
    let says = |field: &str, word: &str| row[field].as_str().is_some_and(|text| text.contains(word));
    assert!(says("severity", "warning") && says("detail", "no queue is bound"), "{row}");
    assert!(says("remedy", &format!("routing key `{name}`")), "{row}");
}

/// A backlog in one queue; `partitions = 2` is refused until the command has gone over to two, and
/// no message is missed.
#[test]
fn the_number_of_queues_is_changed_by_a_command_that_says_what_to_do() {
    let test = "the_number_of_queues_is_changed_by_a_command_that_says_what_to_do";
    let Some(world) = World::on(test, "ONCEBOX_TEST_POSTGRES", "ONCEBOX_TEST_RABBITMQ") else { return };
    let two = |program: Program| program.env("ONCEBOX_BROKER__RABBITMQ__PARTITIONS", "2");
    let repartition = || two(world.oncebox(&["queues", "repartition", "--wait", "0s"]));
    world.consume();
    for number in 0..10 {
        world.enqueue("acc-1", &payment(&format!("p{number:02}")));
    }
    world.publish();
    let refused = two(world.with_config(world.place.consumer(&["--until-idle", "1s"]))).run();
    refused.fails(3, &["10 ready messages", "partitions = 2", "oncebox queues repartition"]);
    let refused = repartition().run();
    refused.fails(3, &["10 messages left and nobody reads them: start consumers with partitions = 1"]);
    world.consume();
    assert_eq!(world.place.entries().len(), 10);
    // What a consumer has is not ready, and AMQP does not tell it: that is not called empty.
    let consumer = world.with_config(world.place.consumer(&[])).start();
    crate::kit::eventually("the consumer reads its queue", || {
        world.oncebox(&["doctor"]).run().stdout.contains("0 ready, 1 consumers").then_some(())
    });
    repartition().run().fails(3, &["nothing is ready in the old queues: stop the consumers with partitions = 1"]);
    consumer.stop().ok();
    let repartition = ["queues", "repartition", "--wait", "60s", "--output", "json", "--log-format", "json"];
    let done = two(world.oncebox(&repartition)).run();
    objects(&done);
    assert_eq!(done.json()["partitions"], 2);
    world.enqueue("acc-1", &payment("p10"));
    world.publish();
    two(world.with_config(world.place.consumer(&["--until-idle", "1s"]))).run().ok();
    assert_eq!(world.place.entries().len(), 11);
    two(world.oncebox(&["queues", "repartition", "--consumer", "nobody"]))
        .run()
        .fails(2, &["no [[consumer]] named `nobody`"]);
}

/// What an operator does with one message and with a consumer that is gone, on both kinds of
/// server. `dead.rs` has the rest, on SQLite.
///
/// Shown by: a statement of one database that finds no row.
#[test]
fn an_operator_acts_the_same_on_every_server() {
    let test = "an_operator_acts_the_same_on_every_server";
    for (database, broker, an_hour_ago) in [
        (
            "ONCEBOX_TEST_POSTGRES",
            "ONCEBOX_TEST_KAFKA",
            "update oncebox.consumer set seen_at = seen_at - interval '1 hour'",
        ),
        (
            "ONCEBOX_TEST_MARIADB",
            "ONCEBOX_TEST_RABBITMQ",
            "update oncebox_consumer set seen_at = seen_at - interval 1 hour",
        ),
    ] {
        let Some(world) = World::on(test, database, broker) else { continue };
        let config = std::fs::read_to_string(&world.config).unwrap();
        let config = config.replace("attempts_max = 2", "attempts_max = 1000").replace("\"20ms\"", "\"1h\"");
        std::fs::write(&world.config, config.replace("\"50ms\"", "\"1h\"")).unwrap();
        if world.broker.starts_with("amqp") {
            world.consume();
        }
        world.enqueue("acc-7", &payment("p1").replace("100", r#""many""#));
        world.enqueue("acc-7", &payment("p2"));
        world.publish();
        world.consume();
        let listed = |state: &str| world.json(&["dead", "list", "--state", state])["dead"].as_array().unwrap().clone();
        let waiting = listed("waiting");
        let head = waiting.iter().find(|message| message["behind"] == 1).unwrap_or_else(|| panic!("{waiting:?}"));
        let number = head["number"].as_str().unwrap();
        world.oncebox(&["dead", "bury", number, "--why", "no hope"]).run().ok();
        assert_eq!(listed("dead")[0]["behind"], 1);
        let id = head["message_id"].as_str().unwrap();
        assert_eq!(world.json(&["dead", "list", "--id", id])["dead"].as_array().unwrap().len(), 1);
        let dry_run = ["dead", "redrive", number, "--dry-run", "--why", "x"];
        assert_eq!(world.oncebox(&dry_run).run().ok(), format!("would redrive 1: {number}\n"));
        let consumer = world.with_config(world.place.consumer(&[])).start();
        let mended = world.place.file("mended.json", &payment("p1")).display().to_string();
        let redrive = ["dead", "redrive", number, "--payload", &mended, "--wait", "60s", "--why", "mended"];
        assert_eq!(world.oncebox(&redrive).run().ok(), format!("redrive 1: {number}\n{number}: handled\n"));
        crate::kit::eventually("what stood behind it", || (world.place.entries() == ["p1", "p2"]).then_some(()));
        consumer.stop().ok();
        let forget = ["consumers", "forget", &world.name, "--yes", "--why", "replaced"];
        world.oncebox(&forget).run().fails(4, &["stop its processes", "was seen"]);
        world.place.sql(an_hour_ago);
        let status = world.oncebox(&["status"]).run().ok();
        let gone = format!("stuck: consumer {}: no process of it runs", world.name);
        assert!(status.contains(&gone), "{status}");
        assert!(world.oncebox(&forget).run().ok().starts_with(&format!("forgot {}", world.name)));
        assert_eq!(world.json(&["consumers", "list"])["consumers"], serde_json::json!([]));
        let audit = world.json(&["audit", "list"]);
        let acts: Vec<&str> =
            audit["audit"].as_array().unwrap().iter().map(|act| act["act"].as_str().unwrap()).collect();
        assert_eq!(acts, ["forget", "redrive-as", "bury"], "{audit}");
    }
}
