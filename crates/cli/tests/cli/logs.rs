//! Where things are said: data to stdout, the rest to stderr; with `--log-format json` every line
//! of stderr is an object.

use std::fs::File;

use serde_json::Value;

use crate::kit::{Done, Place, closed, payment};
use crate::servers::World;

/// Every line of stderr, as JSON.
pub(crate) fn objects(done: &Done) -> Vec<Value> {
    let read = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    let objects: Vec<Value> = done.stderr.lines().map(read).collect();
    for object in &objects {
        assert!(object["level"].is_string() && object["timestamp"].is_string(), "{object}");
        // Clients may say what they say in fields of their own.
        let ours = object["target"].as_str().unwrap().starts_with("oncebox");
        assert!(!ours || object["fields"]["message"].is_string(), "{object}");
    }
    objects
}

#[test]
fn with_json_logs_every_line_of_stderr_is_an_object_and_stdout_is_data() {
    let place = Place::migrated();
    let config = place.ledger();
    place.enqueue("acc-7", &payment("p1"));
    place.enqueue("acc-8", "{}");
    let done = place.publisher(&["--until-empty", "--log-format", "json"]).env("RUST_LOG", "debug").run();
    assert!(objects(&done).len() > 3, "{done:?}");
    assert_eq!(done.ok(), "");
    let arguments = ["--until-idle", "300ms", "--config", &config];
    let done = place.consumer(&arguments).env("ONCEBOX_LOG__FORMAT", "json").env("RUST_LOG", "debug").run();
    let said = objects(&done);
    let dead = said.iter().find(|line| line["fields"]["message"] == "a message is dead").unwrap();
    assert_eq!((&dead["level"], &dead["fields"]["consumer"]), (&"ERROR".into(), &"ledger".into()));
    assert_eq!(done.ok(), "");

    let done = place.oncebox(&["dead", "list", "--limit", "1", "--log-format", "json", "--output", "json"]).run();
    assert!(objects(&done)[0]["fields"]["message"].as_str().unwrap().contains("--limit"), "a hint is no data");
    assert_eq!(done.json()["dead"].as_array().unwrap().len(), 1);
}

/// Shown by printing the last error with `eprintln!`: it is no JSON.
#[test]
fn an_error_is_an_object_too_also_where_the_settings_cannot_be_read() {
    let place = Place::new();
    let broken = place.config("[databse]");
    let in_file = place.config("[log]\nformat = 'json'");
    for (done, code, words) in [
        (place.oncebox(&["status", "--log-format", "json"]).run(), 3, "oncebox migrate up"),
        // Who prints JSON says its errors as JSON too.
        (place.oncebox(&["status", "--output", "json"]).run(), 3, "oncebox migrate up"),
        (place.publisher(&["--log-format", "json"]).env("RUST_LOG", "off").run(), 3, "oncebox migrate up"),
        (place.consumer(&["--config", &in_file]).run(), 2, "no consumer is configured"),
        (place.oncebox(&["status", "--log-format", "json", "--config", &broken]).run(), 2, "unknown setting `databse`"),
        (place.publisher(&["--config", &broken]).env("ONCEBOX_LOG__FORMAT", "json").run(), 2, "unknown setting"),
        (place.oncebox(&["dead", "show", "99", "--output", "json"]).run(), 2, "invalid value '99'"),
        (place.oncebox(&["--output=json", "no-command"]).run(), 2, "unrecognized subcommand"),
    ] {
        let said = objects(&done);
        let last = said.last().unwrap();
        assert_eq!(last["level"], "ERROR");
        assert!(last["fields"]["message"].as_str().unwrap().contains(words), "{last}");
        assert_eq!((done.code(), done.stdout.as_str()), (Some(code), ""));
    }
}

#[test]
fn the_log_filter_decides_what_is_said_and_rust_log_stands_over_it() {
    let place = Place::migrated();
    let quiet = place.config("[log]\nfilter = 'off'");
    let run = |variable: &str| place.publisher(&["--until-empty", "--config", &quiet]).env("RUST_LOG", variable).run();
    assert_eq!(run("").stderr, "", "an empty one is none");
    assert!(run("oncebox=debug").stderr.contains("ready"));
    let chatty = place.config("[log]\nfilter = 'oncebox=debug'");
    assert!(place.publisher(&["--until-empty", "--config", &chatty]).run().stderr.contains("DEBUG oncebox"));
}

/// `oncebox migrate print | head`. Shown by an error for every line that cannot be written; and by
/// ending with 0 at the first of them.
#[test]
fn a_reader_that_goes_away_is_no_error_and_changes_no_verdict() {
    let place = Place::migrated();
    let unread = |arguments: &[&str]| place.oncebox(arguments).stdout(closed());
    let done = unread(&["migrate", "print"]);
    assert_eq!((done.code(), done.stderr.as_str()), (Some(0), ""), "{done:?}");
    let config = place.ledger();
    place.enqueue("acc-7", "{}");
    place.publish();
    place.consume(&config).ok();
    unread(&["dead", "redrive", "c1", "--wait", "10ms", "--why", "x"]).ends_with(3, &["not every message"]);
    place.sql("drop trigger oncebox_outbox_limits");
    unread(&["doctor"]).ends_with(3, &["broken"]);
    place.sql("delete from oncebox_migration where version = (select max(version) from oncebox_migration)");
    unread(&["migrate", "status"]).ends_with(3, &["oncebox migrate up"]);
}

/// Stderr is a file on a full disk, or a pipe without a reader.
///
/// Shown by leaving `log_internal_errors(false)` away (the subscriber panics, and with it the relay
/// and the consumer), and by `eprintln!` for the last error (exit code 101).
#[test]
fn a_log_that_cannot_be_written_ends_no_work() {
    let place = Place::migrated();
    let config = place.ledger();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let closed = closed();
    let mut payments = Vec::new();
    for format in ["text", "json"] {
        for (stderr, name) in [(&full, "full"), (&closed, "closed")] {
            let stderr = || stderr.try_clone().unwrap();
            let id = format!("{format}-{name}");
            place.enqueue(&id, &payment(&id));
            payments.push(id);
            let publisher = place.publisher(&["--until-empty", "--log-format", format]).env("RUST_LOG", "debug");
            assert_eq!(publisher.stderr(stderr()), Some(0), "{format}, {name}");
            let arguments = ["--until-idle", "300ms", "--config", &config, "--log-format", format];
            let consumer = place.consumer(&arguments).env("RUST_LOG", "debug");
            assert_eq!(consumer.stderr(stderr()), Some(0), "{format}, {name}");
            let failing = place.oncebox(&["dead", "show", "c9", "--log-format", format]);
            assert_eq!(failing.stderr(stderr()), Some(1), "{format}, {name}");
        }
    }
    payments.sort();
    assert_eq!(place.entries(), payments);
}

/// The id of a message, which its producer chose. Shown by a writer that takes an event as it is.
#[test]
fn a_line_break_in_an_id_makes_no_line_of_the_log() {
    let place = Place::migrated();
    let config = place.ledger();
    place.consume(&config).ok();
    let headers = [("ce_id", "evt\nERROR all is lost"), ("ce_source", "shop"), ("ce_type", "payment.created")];
    place.append(Some("acc-7"), &headers, "{}");
    let done = place.consume(&config);
    let whole = |line: &str| line.contains("a message is dead") && line.contains("all is lost");
    assert!(done.stderr.lines().any(whole), "{done:?}");
    assert!(!done.stderr.lines().any(|line| line.starts_with("ERROR all")), "{done:?}");
    done.ok();
}

/// The list, the message whole, the log and the filter. Shown by naming the UUID alone that we make
/// of it: nobody else knows that one; and by the id as sent alone: no other table has that one.
#[test]
fn an_id_that_is_no_uuid_is_shown_as_its_producer_sent_it() {
    let place = Place::migrated();
    let config = place.ledger();
    // The topic is there from then on.
    place.consume(&config).ok();
    let headers = [("ce_id", "evt-17"), ("ce_source", "shop"), ("ce_type", "payment.created")];
    place.append(Some("acc-7"), &headers, "{}");
    place.consume(&config).ok_saying(&["a message is dead", "sent_id=evt-17"]);
    let all = place.json(&["dead", "list"]);
    let id = all["dead"][0]["message_id"].as_str().unwrap().to_owned();
    for filter in [&[][..], &["--id", "evt-17", "--source", "shop"], &["--id", id.as_str()]] {
        let listed = place.oncebox(&[&["dead", "list"], filter].concat()).run().ok();
        assert!(listed.contains("evt-17") && listed.contains(&*id), "{filter:?}: {listed}");
    }
    for filter in [&["--id", "evt-17"][..], &["--id", "evt-18", "--source", "shop"]] {
        let listed = place.oncebox(&[&["dead", "list"], filter].concat()).run().ok();
        assert!(!listed.contains("evt-17"), "{filter:?}: {listed}");
    }
    let shown = place.oncebox(&["dead", "show", "c1"]).run().ok();
    assert!(shown.contains("id as sent    evt-17") && shown.contains("message id    "), "{shown}");
}

/// The same payment twice: the log and the list. Shown to fail: by saying an error as sqlx says it
/// ("at line 671" is one of the server's own source).
#[test]
fn what_a_database_refuses_is_said_in_its_own_words_with_its_code() {
    let test = "what_a_database_refuses_is_said_in_its_own_words_with_its_code";
    for (database, begin, code) in [
        ("ONCEBOX_TEST_POSTGRES", "duplicate key value", "(SQLSTATE 23505)"),
        ("ONCEBOX_TEST_MARIADB", "Duplicate entry", "(error 1062)"),
    ] {
        let Some(world) = World::on(test, database, "ONCEBOX_TEST_KAFKA") else { continue };
        world.enqueue("acc-7", &payment("p1"));
        world.enqueue("acc-8", &payment("p1"));
        world.publish();
        let done = world.with_config(world.place.consumer(&["--until-idle", "1s"])).run();
        for words in ["a message is dead", code] {
            assert!(done.stderr.contains(words), "{words}: {}", done.stderr);
        }
        for words in ["returned from database", "at line", "no transaction", "(code:"] {
            assert!(!done.stderr.contains(words), "{words}: {}", done.stderr);
        }
        let error = world.json(&["dead", "list"])["dead"][0]["error"].as_str().unwrap().to_owned();
        assert!(error.starts_with(begin) && error.ends_with(code), "{error}");
        done.ok();
    }
}
