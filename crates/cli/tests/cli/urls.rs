//! URLs and broker settings that cannot be used are refused before any connection, by name and
//! without their passwords.

use std::path::Path;

use crate::kit::{Done, Place, SECRET};

/// Shown by: leaving a text that is no URL as it is.
#[test]
fn a_database_url_that_cannot_be_used_says_how_one_is_written() {
    let place = Place::new();
    let directory = format!("sqlite://{}", place.path().display());
    for (url, words) in [
        ("redis://app:hunter2-secret@h/0", &["redis://app:***@h/0", "postgres://, mysql:// or sqlite://FILE"][..]),
        ("nonsense", &["database URL `***`", "no scheme that is known"]),
        ("host=h user=app password=hunter2-secret", &["database URL `***`", "no scheme that is known"]),
        ("app:x@hunter2-secret", &["database URL `***`", "no scheme that is known"]),
        ("", &["no scheme that is known"]),
        ("postgres:app:hunter2-secret@h/db", &["postgres://USER:PASSWORD@HOST:PORT/DATABASE"]),
        ("postgres://app:hunter2-secret@h:port/db", &["postgres://app:***@h:port/db", "invalid port number"]),
        ("postgres://app:hunter2-secret@h/db?sslmode=no", &["ssl_mode"]),
        ("postgres://app:hunter2/hunter2-secret@h/db", &["invalid port number"]),
        (
            "postgres://app:hunter2-secret@h:1,,g:2/db",
            &["postgres://app:***@h:1,,g:2/db", "a host between commas is empty"],
        ),
        ("postgres://app:hunter2-secret@h:1,g:port/db", &["invalid port number"]),
        ("postgres://app:hunter2-secret@h,g/db?target_session_attrs=standby", &["only a server that takes writes"]),
        ("mysql://app:hunter2-secret@h,/db", &["a host between commas is empty"]),
        ("mysql://app:hunter2-secret@h", &["names no database", "mysql://USER@HOST/DATABASE"]),
        ("mysql://app:hunter2-secret@h:port/db", &["invalid port number"]),
        ("mysql://app:hunter2-secret@h/db?ssl-mode=no", &["an option that is not understood"]),
        ("sqlite://", &["sqlite://FILE"]),
        (&directory, &["names no file"]),
        ("sqlite:///no/such/place/app.db", &["there is no directory /no/such/place"]),
        ("sqlite::memory:", &["in memory", "name a file"]),
        ("sqlite://app.db?mode=ro", &["has to write"]),
        ("sqlite://app.db?cache=shared", &["shared cache"]),
    ] {
        for program in [
            place.oncebox(&["status", "--database", url]),
            place.oncebox(&["migrate", "up", "--database", url]),
            place.publisher(&["--database", url]),
        ] {
            program.run().fails(2, words);
        }
    }
}

fn publisher(place: &Place, url: &str, config: &str) -> Done {
    place.publisher(&["--until-empty", "--broker", url, "--config", &place.config(config)]).run()
}

#[test]
fn a_broker_url_that_cannot_be_used_says_how_one_is_written() {
    let place = Place::migrated();
    for (url, words) in [
        (
            "redis://app:hunter2-secret@h/0",
            &["redis://app:***@h/0", "kafka://HOST:PORT", "amqp://", "embedded://FILE"][..],
        ),
        ("nonsense", &["broker URL `***`", "no scheme that is known"]),
        ("username=app password=hunter2-secret", &["broker URL `***`", "no scheme that is known"]),
        ("kafka:app:hunter2-secret@h", &["`kafka://HOST:PORT` is expected"]),
        ("kafka://app:hunter2-secret@h:port", &["kafka://app:***@h:port", "no port (1 to 65535)"]),
        ("kafka://:hunter2-secret@h:1", &["user name before `@` is empty"]),
        ("kafka://h:1?acks=0", &["no parameters", "[broker.kafka]"]),
        ("kafka://h:1,,g:2", &["no HOST:PORT"]),
        ("amqp://app:hunter2-secret@h:port", &["amqp://app:***@h:port", "invalid port number"]),
        ("amqp://app:hunter2-secret@h?heartbeat=5", &["`heartbeat` is not known here", "[broker.rabbitmq]"]),
        ("amqp://app:hunter2-secret@h:1,,g:2", &["a host between commas is empty"]),
        ("amqp://", &["host"]),
        ("embedded://", &["write `embedded://FILE`"]),
    ] {
        publisher(&place, url, "").fails(2, words);
        let doctor = place.oncebox(&["doctor", "--broker", url]).run();
        doctor.ends_with(3, &["broken"]);
        assert!(doctor.stdout.contains("mend the broker's settings"), "{}", doctor.stdout);
    }
}

/// One property of each kind of rule; the unit test of the table goes through all of them.
///
/// Shown by leaving out the check when a broker is made.
#[test]
fn a_kafka_property_that_breaks_a_promise_is_refused_by_name() {
    let place = Place::migrated();
    for (name, value, why) in [
        ("acks", "1", "no proof"),
        ("request.required.acks", "0", "no proof"),
        ("enable.idempotence", "false", "reorders"),
        ("message.timeout.ms", "30000", "overtaken"),
        ("delivery.timeout.ms", "30000", "overtaken"),
        ("retries", "3", "overtaken"),
        ("max.in.flight", "6", "order"),
        ("partitioner", "random", "another partition"),
        ("transactional.id", "x", "not used"),
        ("enable.auto.commit", "true", "after the database commit"),
        ("auto.offset.reset", "latest", "skips messages"),
        ("isolation.level", "read_uncommitted", "aborted"),
        ("group.id", "x", "the consumer's name"),
        ("bootstrap.servers", "h:1", "`[broker] url`"),
        ("security.protocol", "plaintext", "`kafkas://`"),
        ("allow.auto.create.topics", "true", "create_topics"),
        ("no.such.property", "x", "No such configuration property"),
    ] {
        let config = format!("[broker.kafka.properties]\n\"{name}\" = \"{value}\"");
        publisher(&place, "kafka://127.0.0.1:1", &config).fails(2, &["[broker.kafka.properties]", name, value, why]);
    }
    for name in ["sasl.password", "ssl.key.password"] {
        let config = format!("[broker.kafka.properties]\n\"{name}\" = \"{SECRET}\"\nacks = \"0\"");
        publisher(&place, "kafka://127.0.0.1:1", &config).fails(2, &["[broker.kafka.properties]", "acks"]);
        let config = format!("[broker.kafka.properties]\n\"{name}\" = \"{SECRET}\"\n\"zzz\" = \"0\"");
        publisher(&place, "kafka://127.0.0.1:1", &config).fails(2, &["[broker.kafka.properties]"]);
    }
}

#[test]
fn other_broker_settings_that_cannot_hold_are_refused_by_name() {
    let place = Place::migrated();
    let with_password = &format!("kafka://app:{SECRET}@kafka.example:1");
    for (url, config, words) in [
        (with_password.as_str(), "broker.kafka.sasl_mechanism = 'PLAIN'", &["readable", "kafkas://"][..]),
        (with_password, "broker.kafka.sasl_mechanism = 'MD5'", &["`MD5`", "SCRAM-SHA-512"]),
        ("kafka://h:1", "broker.kafka.partitions = 0", &["`partitions`"]),
        ("kafka://h:1", "broker.kafka.replication = 0", &["`replication`"]),
        ("kafkas://h:1", "broker.ca_file = 'missing.pem'", &["broker.ca_file", "`missing.pem`"]),
        ("amqp://h", "broker.ca_file = 'Cargo.toml'", &["broker.ca_file", "there is no file"]),
        ("amqps://h", "broker.ca_file = 'missing.pem'", &["broker.ca_file", "`missing.pem`"]),
        ("amqp://h", "broker.rabbitmq.exchange = 'amq.topic'", &["exchange", "amq."]),
        ("amqp://h", "broker.rabbitmq.partitions = 0", &["partitions", "1 to 256"]),
    ] {
        publisher(&place, url, config).fails(2, words);
    }
    let mail = place.config(&format!("email.smtp_url = 'http://app:{SECRET}@mail.example'"));
    place.oncebox(&["sender", "--config", &mail]).run().fails(2, &["SMTP URL", "http://app:***@mail.example"]);
    let database = "postgres://app@db.example/app";
    let ca = place.config("database.ca_file = 'missing.pem'");
    place.publisher(&["--database", database, "--config", &ca]).run().fails(2, &["database.ca_file", "`missing.pem`"]);
}

/// A file that is there and is something else is left as it is.
#[test]
fn a_broker_file_that_cannot_be_one_is_refused_and_left_alone() {
    let place = Place::migrated();
    let text = place.file("text.db", "this is no database, and it is longer than the header of one would be\n");
    let broker = |file: &Path| format!("embedded://{}", file.display());
    publisher(&place, &broker(&text), "").fails(3, &["text.db", "no SQLite file", "a file of its own"]);
    assert!(std::fs::read_to_string(&text).unwrap().starts_with("this is no database"));
    let application = place.path().join("app.db");
    publisher(&place, &broker(&application), "").fails(3, &["app.db", "something else"]);
    let nowhere = place.path().join("nowhere/broker.db");
    publisher(&place, &broker(&nowhere), "").fails(3, &["nowhere", "does not exist", "make it"]);
    let doctor = place.oncebox(&["doctor"]).run();
    assert!(doctor.ok().contains("not there yet"), "looking does not make the file");
    assert!(!place.path().join("broker.db").exists());
}
