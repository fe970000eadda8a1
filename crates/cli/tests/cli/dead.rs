//! `oncebox dead`: what it lists and shows, what it does by number and by filter, and what it
//! refuses for safety (exit code 4).

use serde_json::{Value, json};

use crate::kit::{ONCEBOX, Place, Program, payment};

/// Some payments that no ledger takes, each with a key of its own, dead at the consumer.
fn with_dead_payments(count: usize) -> (Place, String) {
    let place = Place::migrated();
    let config = place.ledger();
    let rows: Vec<String> = (1..=count)
        .map(|number| format!("('payments', 'acc-{number}', 'payment.created', '{{\"paymentId\":\"p{number}\"}}')"))
        .collect();
    place.sql(&format!("insert into oncebox_outbox (topic, key, kind, payload) values {}", rows.join(", ")));
    place.publish();
    place.consume(&config).ok();
    (place, config)
}

/// A message that the broker refused, as the relay leaves it.
fn dead_in_the_outbox(place: &Place, number: usize, age: &str) {
    place.sql(&format!(
        "insert into oncebox_outbox_dead (position, bucket, message_id, topic, key, kind, headers, payload, content_type, created_at,
           state, holds, reason, diverted_at)
         values ({number}, 0, '0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a{number:02}', 'payments', 'acc-{number}', 'payment.created', '{{}}',
           cast('{}' as blob), 'application/json', unixepoch('now', '{age}') * 1000, 'dead', 1, 'too large', unixepoch() * 1000);
         update oncebox_shard set scanned_to = max(scanned_to, {number});
         update sqlite_sequence set seq = max(seq, {number}) where name = 'oncebox_outbox';
         insert into sqlite_sequence (name, seq) select 'oncebox_outbox', {number}
           where not exists (select 1 from sqlite_sequence where name = 'oncebox_outbox')",
        payment(&format!("o{number}"))
    ));
}

fn listed(place: &Place, filter: &[&str]) -> Vec<Value> {
    place.json(&[&["dead", "list"], filter].concat())["dead"].as_array().unwrap().clone()
}

fn numbers(place: &Place, filter: &[&str]) -> Vec<String> {
    listed(place, filter).iter().map(|message| message["number"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn list_and_show_say_everything_of_a_dead_message_to_people_and_machines() {
    let (place, _) = with_dead_payments(2);
    dead_in_the_outbox(&place, 9, "-1 hour");
    let all = listed(&place, &[]);
    assert_eq!(all.len(), 3);
    let of_outbox = all.iter().find(|message| message["number"] == "o9").unwrap();
    for (name, value) in [
        ("place", json!("outbox")),
        ("topic", json!("payments")),
        ("key", json!("acc-9")),
        ("kind", json!("payment.created")),
        ("reason", json!("too large")),
        ("message_id", json!("0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a09")),
        ("requested", Value::Null),
    ] {
        assert_eq!(of_outbox[name], value, "{name} of {of_outbox}");
    }
    assert!(of_outbox["since"].is_string(), "{of_outbox}");
    let of_consumer = all.iter().find(|message| message["key"] == "acc-1").unwrap();
    assert_eq!((&of_consumer["place"], &of_consumer["reason"]), (&json!({ "consumer": "ledger" }), &json!("terminal")));
    let id = of_consumer["message_id"].as_str().unwrap();
    for (filter, count) in [
        (&["--topic", "payments"][..], 3),
        (&["--topic", "audit"], 0),
        (&["--key", "acc-1"], 1),
        (&["--consumer", "ledger"], 2),
        (&["--consumer", "outbox"], 1),
        (&["--consumer", "nobody"], 0),
        (&["--reason", "too large"], 1),
        (&["--id", id], 1),
        (&["--key", "acc-1", "--reason", "too large"], 0),
    ] {
        assert_eq!(listed(&place, filter).len(), count, "{filter:?}");
    }
    // Nothing is found of a consumer that never was: the name may be mistyped.
    for command in [&["list"][..], &["discard", "--yes", "--why", "x"]] {
        let done = place.oncebox(&[&["dead"], command, &["--consumer", "nobody"]].concat()).run();
        assert!(done.stderr.contains("hint: there is no consumer `nobody`"), "{command:?}: {}", done.stderr);
        done.ok();
    }
    let number = of_consumer["number"].as_str().unwrap();
    let shown = place.oncebox(&["dead", "show", number]).run().ok();
    for text in [number, id, "acc-1", "payment.created", "terminal", "the parameter `account`", r#"{"paymentId":"p1"}"#]
    {
        assert!(shown.contains(text), "{text} in {shown}");
    }
    let shown = place.json(&["dead", "show", "o9"]);
    assert_eq!(shown["payload"], payment("o9"));
    for command in [&["dead", "show", "c4711"][..], &["dead", "discard", "c4711", "--why", "x"]] {
        place.oncebox(command).run().fails(1, &["no message `c4711`", "oncebox dead list"]);
    }
}

/// A consumer takes a UUID in capitals for a text. Shown by: reading it as the UUID alone; reading
/// it as a text alone.
#[test]
fn an_id_in_capitals_is_the_text_that_was_sent_or_else_the_uuid() {
    let place = Place::migrated();
    let config = place.ledger();
    // The topic is there from then on.
    place.consume(&config).ok();
    let sent = "0197A1B2-C3D4-7E5F-8A9B-0C1D2E3F4A09";
    place.append(Some("acc-7"), &[("ce_id", sent), ("ce_type", "payment.created")], "{}");
    dead_in_the_outbox(&place, 9, "-1 hour");
    assert_eq!(numbers(&place, &["--id", sent]), ["o9"], "the other one is not consumed yet");
    place.consume(&config).ok();
    assert_eq!(numbers(&place, &["--id", sent]), ["c1"]);
    assert_eq!(numbers(&place, &["--id", sent, "--source", ""]), ["c1"]);
    assert_eq!(numbers(&place, &["--id", &sent.to_lowercase()]), ["o9"]);
    let discard = ["dead", "discard", "--id", sent, "--why", "x", "--yes", "--output", "json"];
    assert_eq!(place.oncebox(&discard).run().json()["numbers"], json!(["c1"]));
    assert_eq!(numbers(&place, &["--id", sent]), ["o9"]);
}

/// Shown by another default: the list is as long as it.
#[test]
fn a_list_shows_100_at_most_unless_told_otherwise_and_says_that_there_may_be_more() {
    let (place, _) = with_dead_payments(101);
    let hint = "there may be more; see `--limit`";
    let done = place.oncebox(&["dead", "list", "--output", "json"]).run();
    assert!(done.stderr.contains(hint), "{}", done.stderr);
    assert_eq!(done.json()["dead"].as_array().unwrap().len(), 100);
    assert_eq!(numbers(&place, &["--limit", "7"]).len(), 7);
    let done = place.oncebox(&["dead", "list", "--limit", "200"]).run();
    assert!(!done.stderr.contains(hint), "{}", done.stderr);
    assert_eq!(done.ok().lines().filter(|line| line.contains("terminal")).count(), 101);
}

/// Shown by: the limit of the list for acts too: the rest stays, and the command ends with 0.
#[test]
fn an_act_on_all_goes_on_to_the_last_and_one_with_a_limit_says_what_it_leaves() {
    let (place, _) = with_dead_payments(250);
    let discard = |more: &[&str]| place.oncebox(&[&["dead", "discard", "--why", "x"], more].concat()).run();
    discard(&["--all"]).fails(4, &["250 messages would be discarded", "--yes"]);
    discard(&["--all", "--limit", "30"]).fails(4, &["30 of 250 messages would be discarded", "220 more match"]);
    let dry_run = discard(&["--all", "--dry-run"]);
    assert!(dry_run.stderr.contains("looked at 250 of 250"), "{}", dry_run.stderr);
    let said = dry_run.ok();
    assert!(said.starts_with("would discard 250: c1 c2 ") && said.ends_with(" c100 and 150 more\n"), "{said}");
    // A filter without --all has the limit of the list.
    let dry_run = discard(&["--topic", "payments", "--dry-run"]);
    assert!(dry_run.stderr.contains("150 more match") && dry_run.stderr.contains("--all"), "{}", dry_run.stderr);
    assert!(dry_run.ok().starts_with("would discard 100: c1 "));
    assert_eq!((numbers(&place, &["--limit", "1000"]).len(), place.audit().len()), (250, 0));

    let done = discard(&["--all", "--limit", "30", "--yes", "--output", "json"]).json();
    assert_eq!((done["numbers"].as_array().unwrap().len(), &done["remaining"]), (30, &json!(220)));
    assert_eq!(numbers(&place, &["--limit", "1000"]).len(), 220);
    let done = discard(&["--all", "--yes"]);
    assert!(done.stderr.contains("done 220 of 220") && !done.stderr.contains("more match"), "{}", done.stderr);
    assert!(done.ok().starts_with("discard 220: c31 "));
    assert_eq!((numbers(&place, &[]).len(), place.audit().len()), (0, 250));
}

/// Shown by: a hint that says `its consumer handles it now` whoever is there.
#[test]
fn a_redrive_says_whether_a_process_of_the_consumer_is_there_to_handle_it() {
    let (place, _) = with_dead_payments(2);
    let redrive = |number: &str| place.oncebox(&["dead", "redrive", number, "--why", "mended"]).run();
    redrive("c1").ok_saying(&["hint: its consumer handles it now"]);
    place.sql("update oncebox_consumer set seen_at = seen_at - 3600000");
    let gone = redrive("c2");
    assert!(!gone.stderr.contains("handles it now"), "{}", gone.stderr);
    gone.ok_saying(&["hint: no process of `ledger` runs, the last was there 1h", "ago: start it"]);
    let waited = place.oncebox(&["dead", "redrive", "c2", "--why", "mended", "--wait", "100ms"]).run();
    waited.ends_with(3, &["hint: no process of `ledger` runs", "not every message was handled or sent within 100ms"]);
    let list = place.oncebox(&["dead", "list", "--consumer", "legder"]).run();
    list.ok_saying(&["hint: there is no consumer `legder`; `oncebox consumers list` shows them"]);
}

/// What the runbook says to do with a topic that nobody wants any more. A request stands until the
/// publisher has carried it out, so the same rows would be found again and again.
#[test]
fn all_that_a_topic_holds_is_discarded_by_one_command() {
    let place = Place::migrated();
    place.sql(
        "insert into oncebox_outbox_dead (position, bucket, message_id, topic, kind, headers, payload, content_type, created_at,
           state, holds, reason, diverted_at)
         with recursive n (i) as (select 1 union all select i + 1 from n where i < 230)
         select i, 0, printf('0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f%04d', i), 'orders', 'order.created', '{}', x'', 'text/plain',
           unixepoch() * 1000, 'held-destination', 0, 'it does not exist', unixepoch() * 1000 from n",
    );
    let table = place.oncebox(&["dead", "list", "--topic", "orders", "--limit", "3"]).run().ok();
    assert_eq!(table.matches("it does not exist").count(), 3, "a reason is not said twice: {table}");
    let redrive = place.oncebox(&["dead", "redrive", "--topic", "orders", "--all", "--why", "x"]).run();
    assert_eq!(redrive.ok_saying(&["hint: ", "held ones do, 230", "go by themselves"]), "redrive 0:\n");
    let discard = ["dead", "discard", "--topic", "orders", "--state", "held", "--all", "--why", "not wanted", "--yes"];
    assert!(place.oncebox(&discard).run().ok().starts_with("discard 230: o1 o2 "));
    let requests = "select count(*) || '' from oncebox_outbox_dead where requested = 'discard'";
    assert_eq!((place.column(requests), place.audit().len()), (vec!["230".to_owned()], 230));
    assert!(place.oncebox(&discard).run().ok().starts_with("discard 0:"), "each has its request");
    let again = ["dead", "discard", "o2", "--why", "not wanted", "--yes"];
    let left = "o2 is left as it is: the publisher has not carried out the earlier `discard` yet\n";
    assert!(place.oncebox(&again).run().ok().starts_with(&format!("discard 0:\n{left}")));
    let json = place.oncebox(&[&again[..], &["--output", "json"]].concat()).run().json();
    assert!(json["left"]["o2"].as_str().is_some_and(|why| why.contains("`discard`")), "{json}");
    // A held message cannot be redriven, a dead one can.
    place.sql("update oncebox_outbox_dead set state = 'dead' where position = 2");
    let waited = place.oncebox(&["dead", "redrive", "o2", "--why", "wanted after all", "--wait", "60s"]).run();
    assert_eq!(waited.stdout, format!("redrive 0:\n{left}"));
    waited.ends_with(3, &["not every message was handled or sent: see above"]);
}

/// The first batch buries the message that holds the key: those behind it are held from then on.
///
/// Shown by: acting on waiting ones alone in the second batch.
#[test]
fn all_that_waits_is_buried_also_behind_what_was_buried_a_batch_before() {
    let (place, config) = with_a_waiting_payment();
    for number in 2..=120 {
        place.enqueue("acc-7", &payment(&format!("p{number}")));
    }
    place.publish();
    place.consume(&config).ok();
    let done = place.oncebox(&["dead", "bury", "--all", "--yes", "--why", "x"]).run().ok();
    assert!(done.starts_with("bury 120: "), "{done}");
    assert_eq!(numbers(&place, &["--state", "dead", "--limit", "1000"]).len(), 120);
}

#[test]
fn a_dry_run_says_what_would_be_done_and_does_nothing() {
    let (place, _) = with_dead_payments(2);
    let before = listed(&place, &[]);
    for act in ["redrive", "discard"] {
        let done = place.oncebox(&["dead", act, "--consumer", "ledger", "--why", "x", "--dry-run"]).run();
        assert_eq!(done.ok(), format!("would {act} 2: c1 c2\n"));
        let done = place.json(&["dead", act, "c1", "--why", "x", "--dry-run"]);
        assert_eq!(done, json!({ "act": act, "dry_run": true, "numbers": ["c1"], "already_handled": [] }));
    }
    assert_eq!((listed(&place, &[]), place.audit()), (before, Vec::new()));
}

/// A redriven message is handled once its cause is gone, a discarded one never; each act leaves an
/// audit row with its reason.
#[test]
fn redrive_and_discard_by_number_and_by_filter_do_what_they_say_once() {
    let (place, config) = with_dead_payments(4);
    let mended = place.config(
        &std::fs::read_to_string(&config)
            .unwrap()
            .replace("[[consumer.on]]", "[[consumer.on]]\noptional = ['account', 'amount']"),
    );
    place.sql("alter table ledger_entry rename to old; create table ledger_entry (payment_id text, account_id text, amount_minor int)");
    let act = |arguments: &[&str]| place.oncebox(&[&["dead"], arguments].concat()).run().ok();
    let of = |key: &str| numbers(&place, &["--key", key]).remove(0);
    let [one, two, three, four] = ["acc-1", "acc-2", "acc-3", "acc-4"].map(of);
    assert_eq!(act(&["redrive", &one, "--why", "mended"]), format!("redrive 1: {one}\n"));
    assert_eq!(act(&["discard", &two, "--why", "a test"]), format!("discard 1: {two}\n"));
    assert_eq!(act(&["redrive", "--key", "acc-3", "--why", "mended"]), format!("redrive 1: {three}\n"));
    let filter = ["discard", "--key", "acc-4", "--topic", "payments", "--why", "a test"];
    assert_eq!(act(&filter), format!("discard 1: {four}\n"));
    assert_eq!(act(&filter), "discard 0:\n");
    place.consume(&mended).ok();
    place.consume(&mended).ok();
    assert_eq!(place.entries(), ["p1", "p3"]);
    assert_eq!(place.audit(), ["discard a test", "discard a test", "redrive mended", "redrive mended"]);
    place.oncebox(&["audit", "list", "--limit", "3"]).run().ok_saying(&["there may be more", "--limit"]);
    assert!(numbers(&place, &[]).is_empty());
}

/// The relay carries out what concerns the outbox; until then the request is shown.
#[test]
fn an_act_on_the_outbox_is_a_request_that_the_publisher_carries_out() {
    let place = Place::migrated();
    let config = place.ledger();
    for number in [1, 2, 3] {
        dead_in_the_outbox(&place, number, "-1 hour");
    }
    let redriven = place.oncebox(&["dead", "redrive", "o1", "--why", "the broker takes more now"]).run().ok();
    assert!(redriven.contains("redrive 1: o1\n") && redriven.contains("the publisher carries out"), "{redriven}");
    place.oncebox(&["dead", "discard", "o2", "--why", "not needed"]).run().ok();
    let smaller = place.file("smaller.json", &payment("smaller")).display().to_string();
    place.oncebox(&["dead", "redrive", "o3", "--payload", &smaller, "--why", "smaller"]).run().ok();
    let table = place.oncebox(&["dead", "list"]).run().ok();
    assert!(table.contains("(redrive requested)") && table.contains("(discard requested)"), "{table}");
    place.publish();
    place.consume(&config).ok();
    assert_eq!(place.entries(), ["o1", "smaller"]);
    assert!(numbers(&place, &[]).is_empty());
}

/// Shown by acting on the numbers one after another without asking first: `c1` is gone although
/// `c1 o7` was refused.
#[test]
fn what_is_not_safe_is_refused_with_4_and_nothing_is_done() {
    let (place, _) = with_dead_payments(2);
    dead_in_the_outbox(&place, 7, "-30 days");
    let before = listed(&place, &[]);
    for (arguments, words) in [
        // More than one without a person who types their number.
        (&["redrive", "--consumer", "ledger"][..], &["2 messages would be redriven", "--dry-run", "--yes"][..]),
        (&["discard", "--all"], &["3 messages would be discarded", "--yes"]),
        (&["discard", "c1", "c2"], &["2 messages would be discarded"]),
        // Older than what consumers may still know.
        (&["redrive", "o7"], &["o7", "redrive_age_max", "--new-id"]),
        (&["redrive", "c1", "o7", "--yes"], &["o7", "redrive_age_max"]),
        (&["redrive", "--all", "--yes"], &["o7", "redrive_age_max"]),
    ] {
        let arguments = [&["dead"], arguments, &["--why", "x"]].concat();
        place.oncebox(&arguments).run().fails(4, words);
    }
    for (arguments, words) in [
        (&["redrive"][..], "name numbers"),
        (&["discard"], "--all"),
        (&["redrive", "c1", "c2", "--new-id", "--yes"], "only one at a time gets a new id"),
        (&["redrive", "c1", "--payload", "missing.json"], "missing.json"),
    ] {
        let arguments = [&["dead"], arguments, &["--why", "x"]].concat();
        place.oncebox(&arguments).run().fails(2, &[words]);
    }
    assert_eq!((listed(&place, &[]), place.audit()), (before, Vec::new()));
    place.oncebox(&["dead", "redrive", "o7", "--new-id", "--why", "known to nobody"]).run().ok();
    let age = place.config("publisher.redrive_age_max = '60days'");
    dead_in_the_outbox(&place, 8, "-30 days");
    place.oncebox(&["dead", "redrive", "o8", "--why", "x", "--config", &age]).run().ok();
}

/// The inbox has this id from another message: run under it, one of the two would be lost.
#[test]
fn a_message_with_a_reused_id_is_redriven_only_under_a_new_one() {
    let place = Place::migrated();
    let config = place.ledger();
    place.consume(&config).ok();
    let headers = [("ce_id", "m-1"), ("ce_type", "payment.created")];
    place.append(None, &headers, &payment("p1"));
    place.append(None, &headers, &payment("p2"));
    place.consume(&config).ok();
    assert_eq!(place.entries(), ["p1"]);
    place
        .oncebox(&["dead", "redrive", "c1", "--why", "x"])
        .run()
        .fails(4, &["c1", "has this message id already", "--new-id"]);
    place.oncebox(&["dead", "redrive", "c1", "--new-id", "--why", "it is another payment"]).run().ok();
    place.consume(&config).ok();
    assert_eq!(place.entries(), ["p1", "p2"]);
}

/// A payment that waits for an hour, because the ledger is closed.
pub(crate) fn with_a_waiting_payment() -> (Place, String) {
    let place = Place::migrated();
    let config = std::fs::read_to_string(place.ledger()).unwrap();
    let long = [("attempts_max = 2", "attempts_max = 9"), ("\"20ms\"", "\"1h\""), ("\"50ms\"", "\"1h\"")];
    let config = place.config(&long.iter().fold(config, |text, (from, to)| text.replace(from, to)));
    place.sql(
        "create trigger closed before insert on ledger_entry begin select raise(abort, 'the ledger is closed'); end",
    );
    place.enqueue("acc-7", &payment("p1"));
    place.publish();
    place.consume(&config).ok();
    (place, config)
}

/// Shown by verbs that know dead messages alone: a person waits for the hour, or writes SQL.
#[test]
fn a_waiting_message_is_listed_with_its_error_and_tried_now_by_its_number() {
    let (place, config) = with_a_waiting_payment();
    let all = listed(&place, &["--state", "waiting"]);
    assert_eq!(all.len(), 1, "{all:?}");
    assert_eq!((&all[0]["state"], &all[0]["reason"]), (&json!("waiting"), &json!("retry")));
    assert!(
        all[0]["error"].as_str().unwrap().contains("the ledger is closed") && all[0]["next_try"].is_string(),
        "{all:?}"
    );
    assert!(listed(&place, &["--state", "dead"]).is_empty());
    let number = all[0]["number"].as_str().unwrap();
    let table = place.oncebox(&["dead", "list"]).run().ok();
    assert!(table.contains("waiting") && table.contains("the ledger is"), "{table}");
    assert!(place.oncebox(&["dead", "show", number]).run().ok().contains("next try"));
    place.sql("drop trigger closed");
    let redrive = ["dead", "redrive", number, "--why", "the ledger is open", "--by", "ann"];
    assert_eq!(place.oncebox(&redrive).run().ok(), format!("redrive 1: {number}\n"));
    place.consume(&config).ok();
    assert_eq!(place.entries(), ["p1"]);
    assert!(listed(&place, &[]).is_empty());
    let acts = place.json(&["audit", "list"]);
    let act = &acts["audit"][0];
    assert_eq!(
        (&act["actor"], &act["act"], &act["reason"]),
        (&json!("ann"), &json!("redrive"), &json!("the ledger is open"))
    );
    assert!(place.oncebox(&["audit", "list"]).run().ok().contains("the ledger is open"));
}

#[test]
fn a_waiting_message_is_given_up_by_its_number_or_by_a_filter() {
    let (place, config) = with_a_waiting_payment();
    let number = numbers(&place, &[]).remove(0);
    assert_eq!(place.oncebox(&["dead", "bury", &number, "--why", "x"]).run().ok(), format!("bury 1: {number}\n"));
    assert_eq!(listed(&place, &[])[0]["state"], "dead");
    place.oncebox(&["dead", "bury", &number, "--why", "x"]).run().fails(4, &["dead already"]);
    place.oncebox(&["dead", "discard", "--topic", "payments", "--why", "x"]).run().ok();
    place.enqueue("acc-8", &payment("p2"));
    place.publish();
    place.consume(&config).ok();
    let discard = ["dead", "discard", "--topic", "payments", "--why", "x"];
    assert_eq!(place.oncebox(&discard).run().ok(), "discard 0:\n", "dead ones, unless told otherwise");
    let number = numbers(&place, &[]).remove(0);
    let waiting = [&discard[..], &["--state", "waiting"]].concat();
    assert_eq!(place.oncebox(&waiting).run().ok(), format!("discard 1: {number}\n"));
    assert_eq!(place.audit(), ["bury x", "discard x", "discard x"]);
}

/// Shown by: taking 0 for no limit (`discard --all --limit 0 --yes` discarded all of them).
#[test]
fn a_limit_of_0_is_refused_and_the_greatest_number_is_no_limit() {
    let (place, _) = with_dead_payments(2);
    let discard = &["dead", "discard", "--all", "--yes", "--why", "x"][..];
    let with_limit = |command: &[&str], limit: &str| place.oncebox(&[command, &["--limit", limit]].concat()).run();
    let (most, most_keys) = (u64::MAX.to_string(), u32::MAX.to_string());
    for (command, most) in [
        (&["dead", "list"][..], &most),
        (&["audit", "list"], &most),
        (&["consumers", "list"], &most),
        (&["status"], &most),
        (&["keys", "list"], &most_keys),
        (&["operations", "list"], &most_keys),
    ] {
        with_limit(command, "0").fails(2, &["--limit", "at least 1"]);
        with_limit(command, most).ok();
    }
    with_limit(&["keys", "purge", "--all", "--why", "x"], "0").fails(2, &["at least 1"]);
    with_limit(discard, "0").fails(2, &["at least 1"]);
    assert_eq!(numbers(&place, &["--limit", &most]).len(), 2);
    assert_eq!(with_limit(discard, &most).ok(), "discard 2: c1 c2\n");
}

/// On a terminal, which `script` of util-linux makes. Shown by asking from two messages on alone.
#[test]
fn a_message_is_not_discarded_on_a_terminal_without_a_question() {
    let (place, _) = with_dead_payments(1);
    let answered = |answer: &str| {
        let command = format!("{ONCEBOX} dead discard c1 --why x");
        let mut script =
            Program::new("script", &["-qec", &command, "/dev/null"]).env("ONCEBOX_DATABASE__URL", place.database());
        script = script.within(place.path()).saying(answer);
        script.run()
    };
    let refused = answered("no\n");
    assert!(refused.stdout.contains("1 message will be discarded") && refused.code() == Some(4), "{refused:?}");
    assert_eq!(listed(&place, &[]).len(), 1);
    let done = answered("1\n");
    assert!(done.stdout.contains("discard 1: c1") && done.code() == Some(0), "{done:?}");
    assert!(listed(&place, &[]).is_empty());
}

/// Shown by: a list without a limit; counting what is stuck of what is shown alone.
#[test]
fn consumers_and_status_show_as_many_as_the_limit_and_say_that_there_are_more() {
    let place = Place::migrated();
    place.sql(
        "insert into oncebox_consumer (name, id_rule, registered_at, seen_at)
         with recursive n (i) as (select 1 union all select i + 1 from n where i < 103)
         select printf('consumer-%03d', i), 'envelope', 0, 0 from n",
    );
    for (command, hints) in [
        (&["consumers", "list"][..], &["3 more consumers; see `--limit`"][..]),
        (&["status"], &["3 more consumers", "4 more things are stuck", "--limit"]),
    ] {
        let json = [command, &["--output", "json"]].concat();
        let shown = place.oncebox(&json).run();
        assert!(hints.iter().all(|hint| shown.stderr.contains(hint)), "{hints:?} in {}", shown.stderr);
        assert_eq!(shown.json()["consumers"].as_array().unwrap().len(), 100, "{command:?}");
        let people = place.oncebox(&[command, &["--limit", "200"]].concat()).run();
        assert!(!people.stderr.contains("more") && people.ok().contains("consumer-103"), "{command:?}");
        assert!(!place.oncebox(&[command, &["--limit", "2"]].concat()).run().ok().contains("consumer-003"));
    }
}

/// Shown by: replacing the bytes that are no text; taking an empty file for a payload.
#[test]
fn a_payload_that_is_no_text_is_shown_whole_written_to_a_file_and_given_back() {
    let place = Place::migrated();
    dead_in_the_outbox(&place, 1, "-1 hour");
    place.sql("update oncebox_outbox_dead set payload = x'00ff10'");
    let show = |more: &[&str]| place.oncebox(&[&["dead", "show", "o1"], more].concat()).run();
    let shown = show(&["--output", "json"]).json();
    assert_eq!((&shown["payload_base64"], &shown["payload"]), (&json!("AP8Q"), &Value::Null));
    assert!(show(&[]).ok().contains("3 bytes that are no UTF-8; --payload-to FILE writes them"));
    let file = place.path().join("payload").display().to_string();
    assert!(show(&["--payload-to", &file]).ok().contains(&file));
    assert_eq!(std::fs::read(&file).unwrap(), [0, 0xff, 0x10]);
    let redrive = |more: &[&str]| place.oncebox(&[&["dead", "redrive", "o1", "--why", "x"], more].concat()).run();
    let empty = place.file("empty", "").display().to_string();
    redrive(&["--payload", &empty]).fails(2, &["empty; where the message is meant", "--empty-payload"]);
    redrive(&["--payload", &file]).ok();
    assert_eq!(place.column("select hex(payload) from oncebox_outbox_dead"), ["00FF10"]);
    dead_in_the_outbox(&place, 2, "-1 hour");
    place.oncebox(&["dead", "redrive", "o2", "--empty-payload", "--why", "x"]).run().ok();
    assert_eq!(place.column("select hex(payload) from oncebox_outbox_dead where position = 2"), [""]);
}

/// Shown by forgetting whoever is named: a consumer that runs would handle everything again; and by
/// asking about its messages alone.
#[test]
fn a_consumer_that_is_gone_is_forgotten_by_its_name_and_one_that_was_just_there_is_not() {
    let (place, _) = with_dead_payments(1);
    let list = || place.oncebox(&["consumers", "list"]).run().ok();
    assert!(list().contains("ledger") && list().contains("there"), "{}", list());
    let forget = ["consumers", "forget", "ledger", "--why", "replaced by `books`"];
    place.oncebox(&forget).run().fails(4, &["consumer `ledger` was seen"]);
    place.sql("update oncebox_consumer set seen_at = seen_at - 3600000");
    assert!(list().contains("1h ago") || list().contains("1h "), "{}", list());
    let dry_run = place.oncebox(&[&forget[..], &["--dry-run"]].concat()).run().ok();
    assert_eq!(dry_run, "would forget ledger: 1 messages, 1 inbox rows\n");
    // The message, and what the inbox remembers.
    place.oncebox(&forget).run().fails(4, &["2 messages and inbox rows would be lost with it", "--yes"]);
    let sure = [&forget[..], &["--yes"]].concat();
    assert_eq!(place.oncebox(&sure).run().ok(), "forgot ledger: 1 messages, 1 inbox rows\n");
    assert!(!list().contains("ledger"), "{}", list());
    assert!(listed(&place, &[]).is_empty());
    assert_eq!(place.audit(), ["forget replaced by `books`"]);
    // As for every name and number that is not there.
    place.oncebox(&forget).run().fails(1, &["no consumer `ledger`", "oncebox consumers list"]);
}

/// Shown by printing the number alone: whether it helped is not said. And by taking the first error
/// of a redriven message for its end: it waits for its second try then.
#[test]
fn a_redrive_says_what_became_of_each_message() {
    let (place, config) = with_dead_payments(2);
    let run = |more: &[&str]| {
        let done = place.oncebox(&[&["dead", "redrive", "--why", "x", "--output", "json"], more].concat()).run();
        let said: Value = serde_json::from_str(&done.stdout).unwrap();
        (said["became"].clone(), done)
    };
    let redrive = |more: &[&str]| {
        let (became, done) = run(more);
        (done.code(), became)
    };
    assert_eq!(redrive(&["c1"]), (Some(0), json!({ "c1": "released, and not tried yet" })));
    assert_eq!(redrive(&["c2", "--wait", "200ms"]), (Some(3), json!({ "c2": "released, and not tried yet" })));
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("in_place_delay = \"5ms\"", "in_place_delay = \"1s\"")).unwrap();
    let consumer = place.consumer(&["--config", &config]).start();
    crate::kit::eventually("both are dead again", || (numbers(&place, &["--state", "dead"]).len() == 2).then_some(()));
    let (code, became) = redrive(&["c1", "--wait", "60s"]);
    assert!(became["c1"].as_str().unwrap().starts_with("dead again: the parameter `account`"), "{became}");
    assert_eq!(code, Some(3));
    let mended = place.file("mended.json", &payment("p1")).display().to_string();
    let people = place.oncebox(&["dead", "redrive", "c1", "--payload", &mended, "--wait", "60s", "--why", "x"]).run();
    assert_eq!(people.ok(), "redrive 1: c1\nc1: handled\n");
    assert_eq!(place.entries(), ["p1"]);
    // A failure that may pass: a second try follows, and then the message is dead.
    place.sql("alter table ledger_entry rename to gone");
    let (became, done) = run(&["c2", "--payload", &mended, "--wait", "60s"]);
    assert!(became["c2"].as_str().unwrap().starts_with("dead again: "), "{became}");
    assert!(!done.stderr.contains("within"), "{}", done.stderr);
    done.ends_with(3, &["not every message was handled or sent"]);
    consumer.stop().ok();
}

/// Shown by: whatever is gone counts as handled or sent; outcomes in the order of their numbers
/// as text.
#[test]
fn a_redrive_beside_a_discard_says_that_nothing_was_handled() {
    let (place, _) = with_dead_payments(11);
    // No consumer runs: the messages wait until they are discarded.
    let mut redrive = place.oncebox(&["dead", "redrive", "--all", "--yes", "--wait", "60s", "--why", "x"]).start();
    crate::kit::eventually("released", || (numbers(&place, &["--state", "waiting"]).len() == 11).then_some(()));
    let discard = ["dead", "discard", "--all", "--state", "waiting", "--yes", "--why", "y", "--by", "somebody"];
    place.oncebox(&discard).run().ok();
    assert!(!redrive.has_ended() || numbers(&place, &[]).is_empty());
    let done = redrive.ends();
    let outcomes: Vec<&str> = done.stdout.lines().filter(|line| line.contains(": discarded")).collect();
    let expected: Vec<String> = (1..=11).map(|number| format!("c{number}: discarded meanwhile by somebody")).collect();
    assert_eq!(outcomes, expected, "{}", done.stdout);
    done.ends_with(3, &["not every message was handled or sent: see above"]);
}

/// Shown by looking for an entry in the history, which SQLite does not keep of the outbox: after a
/// minute it was `released, and not tried yet`.
#[test]
fn a_redrive_of_the_outbox_says_that_the_broker_refused_the_message_again_or_took_it() {
    let place = Place::migrated();
    dead_in_the_outbox(&place, 1, "-1 minute");
    // As long as a record may be, without its key.
    place.sql("update oncebox_outbox_dead set payload = zeroblob(64 * 1024 * 1024)");
    let publisher = place.publisher(&[]).start();
    let redrive = || place.oncebox(&["dead", "redrive", "o1", "--wait", "60s", "--why", "x"]).run();
    let again = redrive();
    let said = "redrive 1: o1\no1: dead again: the message has ";
    assert!(again.stdout.starts_with(said), "{}", again.stdout);
    assert!(!again.stderr.contains("within"), "{}", again.stderr);
    again.ends_with(3, &["not every message was handled or sent"]);
    place.sql("update oncebox_outbox_dead set payload = cast('{}' as blob)");
    assert_eq!(redrive().ok(), "redrive 1: o1\no1: sent\n");
    publisher.stop().ok();
}

/// Shown by: `unknown` where no variable names the user, as in a container.
#[test]
fn who_acts_is_the_number_of_the_user_where_no_variable_has_a_name() {
    let (place, _) = with_dead_payments(1);
    let discard = place.oncebox(&["dead", "discard", "c1", "--why", "x"]).env("USER", "").env("LOGNAME", "");
    discard.run().ok();
    let mine = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(place.path()).unwrap());
    assert_eq!(place.column("select actor from oncebox_audit"), [format!("uid {mine}")]);
}

/// A hundred thousand at once would be a hundred thousand that nothing behind them can get past.
/// Shown to fail: with all at once.
#[test]
fn a_redrive_of_many_goes_at_the_rate_that_was_said() {
    let (place, _) = with_dead_payments(5);
    let redrive = |more: &[&str]| place.oncebox(&[&["dead", "redrive", "--why", "x", "--rate"], more].concat()).run();
    redrive(&["0", "--all", "--yes"]).fails(2, &["--rate"]);
    let began = std::time::Instant::now();
    let done = redrive(&["2", "--all", "--yes"]);
    assert!(began.elapsed() >= std::time::Duration::from_secs(2), "{:?}", began.elapsed());
    for line in ["2 of 5", "4 of 5", "5 of 5"] {
        assert!(done.stderr.contains(line), "{line}: {}", done.stderr);
    }
    assert!(done.ok().contains("redrive 5: c"));
    assert_eq!(listed(&place, &["--state", "waiting"]).len(), 5);
    assert_eq!(place.audit(), vec!["redrive x"; 5]);
}

/// The id and the payload of a producer that is not ours: one clears the screen, a line break hides
/// what follows.
///
/// Shown by printing texts as they are: the row is two lines, and the terminal obeys.
#[test]
fn what_a_producer_wrote_neither_steers_the_terminal_nor_breaks_a_row() {
    let place = Place::migrated();
    let config = place.ledger();
    // The topic is there from then on.
    place.consume(&config).ok();
    let id = "evt\u{1b}[2J\n17";
    let headers = [("ce_id", id), ("ce_source", "shop"), ("ce_type", "payment.created")];
    place.append(Some("acc-7"), &headers, "{\u{1b}[2J\n}");
    place.consume(&config).ok();
    let escaped = r"evt\u{1b}[2J\n17";
    let listed = place.oncebox(&["dead", "list"]).run().ok();
    assert!(!listed.contains("next try"), "a column without a value: {listed}");
    let row = listed.lines().find(|line| line.contains(escaped)).unwrap_or_else(|| panic!("{listed}"));
    assert!(row.contains("c1") && row.contains("acc-7"), "{row}");
    let shown = place.oncebox(&["dead", "show", "c1"]).run().ok();
    for line in [format!("id as sent    {escaped}"), r"{\u{1b}[2J".to_owned(), "}".to_owned()] {
        assert!(shown.lines().any(|shown| shown == line), "{line} in {shown}");
    }
    assert!(!listed.contains('\u{1b}') && !shown.contains('\u{1b}'), "{listed}{shown}");
    assert_eq!(place.json(&["dead", "list"])["dead"][0]["sent_id"], id, "JSON escapes by itself");
}
