//! `oncebox doctor`: 0 where all is well, 3 where something breaks a promise; each finding says
//! what to do.

use serde_json::Value;

use crate::database;
use crate::kit::{Done, Place, eventually, payment};

/// The findings by name: how much they matter and what to do.
fn findings(done: &Done) -> Vec<(String, String, String)> {
    let value: Value = serde_json::from_str(&done.stdout).unwrap();
    let text = |finding: &Value, name: &str| finding[name].as_str().unwrap_or_default().to_owned();
    let rows = value["findings"].as_array().unwrap();
    rows.iter().map(|one| (text(one, "name"), text(one, "severity"), text(one, "remedy"))).collect()
}

fn doctor(place: &Place, arguments: &[&str]) -> Done {
    place.oncebox(&[&["doctor", "--output", "json"], arguments].concat()).run()
}

/// A finding that is not all right says what to do; one that is says nothing of the kind.
fn each_has_a_remedy(done: &Done) {
    for (name, severity, remedy) in findings(done) {
        assert_eq!(severity == "ok", remedy.is_empty(), "{name}: {severity} {remedy}");
    }
}

#[test]
fn all_well_is_0() {
    let place = Place::migrated();
    let config = place.ledger();
    place.consume(&config).ok();
    let publisher = place.publisher(&["--listen", "127.0.0.1:0"]).start();
    eventually("it owns the shard", || place.json(&["status"])["shards"][0]["owner"].is_string().then_some(()));
    let done = doctor(&place, &["--config", &config]);
    each_has_a_remedy(&done);
    assert!(findings(&done).iter().all(|(_, severity, _)| severity == "ok"), "{}", done.stdout);
    assert!(findings(&done).iter().any(|(name, ..)| name == "group ledger"), "{}", done.stdout);
    assert!(!done.stderr.contains("error"), "{}", done.stderr);
    done.ok();
    let table = place.oncebox(&["doctor"]).run().ok();
    assert!(table.contains("schema") && table.contains("journal"), "{table}");
    publisher.stop().ok();
}

/// Shown by ending with 0 whatever was found.
#[test]
fn what_breaks_a_promise_is_3_with_the_remedy() {
    let place = Place::migrated();
    place.sql("drop trigger oncebox_outbox_limits");
    let done = doctor(&place, &[]);
    done.ends_with(3, &["broken"]);
    each_has_a_remedy(&done);
    let refused: Vec<_> = findings(&done).into_iter().filter(|(_, severity, _)| severity == "refused").collect();
    assert!(refused.len() == 1 && refused[0].0 == "limits", "{refused:?}");
    // What the doctor refuses, no program starts with.
    place.publisher(&["--until-empty"]).run().fails(3, &["limits", place.database()]);
}

/// Shown by giving up all findings with the one that could not be asked for.
#[test]
fn what_was_found_in_the_database_is_said_also_where_the_rest_of_it_cannot_be_read() {
    let place = Place::migrated();
    place.sql("drop trigger oncebox_outbox_limits; drop table oncebox_email");
    let done = doctor(&place, &[]);
    done.ends_with(3, &["broken"]);
    each_has_a_remedy(&done);
    let mut names: Vec<_> = findings(&done).into_iter().filter(|one| one.1 == "refused").map(|one| one.0).collect();
    names.dedup();
    assert_eq!(names, ["limits", "database"]);
    assert!(done.stdout.contains("the rest of the database was not looked at"), "{}", done.stdout);
}

/// Shown by looking at the statements of handlers alone, and at each consumer alone.
#[test]
fn settings_with_which_a_program_does_not_start_are_refused() {
    let place = Place::migrated();
    for (settings, name, why) in [
        (
            "consumer = [{ name = 'c', topics = ['t'], queues = { tt = 'q' } }]",
            "consumer c: settings",
            "`tt` is none of its topics",
        ),
        (
            "consumer = [{ name = 'a', group = 'g', topics = ['t'] }, { name = 'b', group = 'g', topics = ['t'] }]",
            "consumers: settings",
            "topic `t` in the group `g`",
        ),
        (
            "consumer = [{ name = 'a', topics = ['t'] }, { name = 'a', topics = ['u'] }]",
            "consumers: settings",
            "have the name `a`",
        ),
        ("consumer = [{ name = 'outbox', topics = ['t'] }]", "consumer outbox: settings", "choose another one"),
        ("consumer = [{ name = 'c', topics = ['pay ments'] }]", "consumers: settings", "`pay ments`"),
        ("publisher.held_rows_max = 0", "publisher: settings", "publisher.held_rows_max"),
    ] {
        let done = doctor(&place, &["--config", &place.config(settings)]);
        done.ends_with(3, &["broken"]);
        let refused: Vec<_> = findings(&done).into_iter().filter(|(_, severity, _)| severity == "refused").collect();
        assert!(refused.len() == 1 && refused[0].0 == name, "{refused:?}");
        assert!(done.stdout.contains(why), "{}", done.stdout);
    }
}

/// Shown by looking at the settings alone: the row of the horizon was `ok`, and of the id rule
/// there was none.
#[test]
fn a_consumer_that_database_and_broker_do_not_let_start_is_refused_in_the_words_of_its_start() {
    let place = Place::migrated();
    let config = place.ledger();
    place.consume(&config).ok();
    let file = std::fs::read_to_string(&config).unwrap();
    let with = |setting: &str| file.replace("topics =", &format!("{setting}\ntopics ="));
    for (settings, consumer, code, words) in [
        (with("horizon = \"1d\""), "ledger", 4, "the inbox horizon of 1day is too short"),
        (
            with("horizon = \"1d\"").replace("\"ledger\"", "\"books\""),
            "books",
            4,
            "the inbox horizon of 1day is too short",
        ),
        (with("id = \"payload:/paymentId\""), "ledger", 3, "started with the id rule `envelope`"),
    ] {
        let config = place.config(&settings);
        let done = doctor(&place, &["--config", &config]);
        done.ends_with(3, &["broken"]);
        each_has_a_remedy(&done);
        let refused: Vec<_> = findings(&done).into_iter().filter(|(_, severity, _)| severity == "refused").collect();
        assert!(refused.len() == 1 && refused[0].0 == format!("consumer {consumer}: start"), "{refused:?}");
        assert!(done.stdout.contains(words), "{}", done.stdout);
        assert!(!done.stdout.contains(": horizon"), "{}", done.stdout);
        place.consume(&config).fails(code, &[words]);
    }
    let started = place.json(&["status"])["consumers"].as_array().unwrap().len();
    assert_eq!(started, 2, "`books` by its start, and not by the doctor");
}

#[test]
fn both_sides_are_looked_at_where_one_is_broken() {
    let place = Place::new();
    let done = doctor(&place, &["--broker", "kafka://127.0.0.1:port"]);
    done.ends_with(3, &["broken"]);
    each_has_a_remedy(&done);
    let names: Vec<String> = findings(&done).into_iter().map(|(name, ..)| name).collect();
    assert_eq!(names, ["schema", "broker", "consumers"]);
}

/// Shown to fail: where the settings come from the environment, the broker's groups and queues were
/// not looked at, and nothing said so.
#[test]
fn doctor_says_where_no_consumer_is_configured_that_it_looked_at_none() {
    let place = Place::migrated();
    let config = place.ledger();
    let rows = |arguments: &[&str]| {
        let done = doctor(&place, arguments);
        each_has_a_remedy(&done);
        findings(&done).into_iter().filter(|(name, ..)| name == "consumers").collect::<Vec<_>>()
    };
    let without = rows(&[]);
    assert!(without.len() == 1 && without[0].1 == "warning" && without[0].2.contains("--config FILE"), "{without:?}");
    assert!(rows(&["--config", &config]).is_empty());
}

/// Nobody reads the messages of a bucket without a shard, and two relays send those of one
/// with two.
#[test]
fn buckets_that_do_not_belong_to_exactly_one_shard_are_named() {
    let place = Place::migrated();
    let of_buckets = |done: &Done| findings(done).into_iter().find(|(name, ..)| name == "outbox: buckets").unwrap().1;
    assert_eq!(of_buckets(&doctor(&place, &[])), "ok");
    for (change, words) in [
        ("bucket_from = 3, bucket_to = 9", "no shard has buckets 0-2, 10-255: nobody sends their messages"),
        ("bucket_from = 0, bucket_to = 254", "no shard has buckets 255-255: nobody sends their messages"),
    ] {
        place.sql(&format!("update oncebox_shard set {change}"));
        let done = doctor(&place, &[]);
        done.ends_with(3, &["broken"]);
        each_has_a_remedy(&done);
        assert!(of_buckets(&done) == "refused" && done.stdout.contains(words), "{}", done.stdout);
    }
    let test = "buckets_that_do_not_belong_to_exactly_one_shard_are_named";
    let Some(place) = Place::on_server(test, "ONCEBOX_TEST_POSTGRES") else { return };
    place.sql("insert into oncebox.shard (shard_id, bucket_from, bucket_to) values (1, 200, 255)");
    let done = doctor(&place, &[]);
    let words = "several shards have buckets 200-255: their messages are sent twice";
    assert!(of_buckets(&done) == "refused" && done.stdout.contains(words), "{}", done.stdout);
}

#[test]
fn dead_messages_are_a_warning_that_points_at_their_list() {
    let place = Place::migrated();
    let config = place.ledger();
    place.enqueue("acc-7", "{}");
    place.publish();
    place.consume(&config).ok();
    let done = doctor(&place, &[]);
    each_has_a_remedy(&done);
    let warning = ("consumer ledger".to_owned(), "warning".to_owned(), "see `oncebox dead list`".to_owned());
    assert!(findings(&done).contains(&warning), "{}", done.stdout);
    done.ok();
}

/// Shown by leaving the processes out; by saying nothing of who cannot read whom.
#[test]
fn o21_the_fingerprints_of_live_processes_are_shown_and_a_version_raised_too_early_is_a_warning() {
    let place = Place::migrated();
    let says = |process: u8, newest: u8, age: u32| {
        place.sql(&format!(
            "insert into oncebox_operation_process values (x'{process:032x}', cast('pay' as blob), 1, {newest}, {newest}, 'sha256,k1', 'k1', \
               unixepoch() * 1000 - {age})"
        ));
    };
    says(1, 1, 0);
    says(3, 3, 3_600_000);
    let shown = |expected: &[&str]| {
        let done = doctor(&place, &[]);
        each_has_a_remedy(&done);
        let name = "operation pay: fingerprints";
        let severities = findings(&done).into_iter().filter(|one| one.0 == name).map(|one| one.1).collect::<Vec<_>>();
        assert_eq!(severities, expected, "{}", done.stdout);
        done.ok()
    };
    let one = shown(&["ok"]);
    assert!(one.contains("reads versions 1 to 1 with key ids sha256, k1, and writes 1 with k1"), "{one}");
    assert!(!one.contains("writes 3"), "who said nothing for an hour is gone: {one}");
    says(2, 2, 0);
    let two = shown(&["ok", "warning"]);
    assert!(two.contains("writes version 2, which process 00000000-0000-0000-0000-000000000001 cannot read"), "{two}");
}

/// After a restore that kept the cursor and not the sequence. While nothing is mended the publisher
/// is not ready, and says why; the command that it names mends it under the running publisher.
#[test]
fn a_sequence_behind_the_cursor_is_mended_by_the_command_that_is_named_and_nothing_stays_unread() {
    let test = "a_sequence_behind_the_cursor_is_mended_by_the_command_that_is_named_and_nothing_stays_unread";
    let Some(place) = Place::on_server(test, "ONCEBOX_TEST_POSTGRES") else { return };
    let config = place.ledger();
    for id in ["p1", "p2", "p3", "p4", "p5", "p6"] {
        place.enqueue("acc-7", &payment(id));
    }
    let mut publisher = place.publisher(&["--listen", "127.0.0.1:0"]).start();
    let proven = "select scanned_to::text from oncebox.shard where scanned_to >= 6 and isempty(gaps)";
    crate::kit::eventually("six are proven", || place.column(proven).pop());
    place.sql("delete from oncebox.outbox; select setval('oncebox.outbox_position_seq', 1)");
    publisher.until_ready_says(503, &["sequence behind cursor", "oncebox doctor --fix"]);
    let enqueue = database::enqueue(place.database(), "payments", "acc-7", "{}");
    let refused = database::run(place.database(), &enqueue).unwrap_err().to_string();
    assert!(refused.contains("sequence behind cursor") && refused.contains("oncebox doctor --fix"), "{refused}");
    // What came past the door: by the owner of the table.
    for id in ["p7", "p8"] {
        place.sql(&format!(
            "insert into oncebox.outbox (bucket, message_id, topic, key, kind, payload, content_type)
             values (oncebox.bucket_of('acc-7', null), oncebox.uuid_v7(), 'payments', 'acc-7', 'payment.created',
                     convert_to('{}', 'UTF8'), 'application/json')",
            payment(id)
        ));
    }
    let below = "select position::text from oncebox.outbox order by position";
    assert!(place.column(below).iter().all(|position| position.parse::<i64>().unwrap() <= 6));
    let looked = doctor(&place, &[]);
    looked.ends_with(3, &["broken"]);
    place.oncebox(&["doctor", "--fix"]).run().fails(4, &["2 messages", "--yes"]);
    assert!(place.column("select act from oncebox.audit").is_empty(), "without --yes nothing is done");
    let fix = ["doctor", "--fix", "--yes", "--why", "restored", "--by", "ann"];
    place.oncebox(&fix).run().ok();
    publisher.until_ready_says(200, &[]);
    place.enqueue("acc-7", &payment("p9"));
    crate::kit::eventually("the outbox is proven", || {
        place.column("select 'x' from oncebox.shard where scanned_to >= (select max(position) from oncebox.outbox) and isempty(gaps)").pop()
    });
    publisher.stop().ok();
    place.consume(&config).ok();
    assert_eq!(place.entries(), ["p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8", "p9"]);
    let audit = "select act || ' ' || actor || ' ' || reason from oncebox.audit";
    assert_eq!(place.column(audit), ["mend-sequence ann restored"]);
    place.oncebox(&["doctor", "--fix"]).run().ok_saying(&["nothing to mend"]);
}

#[test]
fn a_file_whose_sequence_stands_behind_the_cursor_is_mended() {
    let place = Place::migrated();
    let config = place.ledger();
    place.enqueue("acc-7", &payment("p1"));
    place.enqueue("acc-7", &payment("p2"));
    place.publish();
    place.sql("update sqlite_sequence set seq = 0 where name = 'oncebox_outbox'");
    place.publisher(&["--until-empty"]).run().fails(3, &["sequence behind cursor", "oncebox doctor --fix"]);
    place.oncebox(&["doctor", "--fix", "--yes"]).run().ok();
    place.enqueue("acc-7", &payment("p3"));
    place.publish();
    place.consume(&config).ok();
    assert_eq!(place.entries(), ["p1", "p2", "p3"]);
}
