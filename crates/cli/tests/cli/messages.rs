//! Messages that cannot be handled: each is dead with a reason that names what is missing, nothing
//! else waits for it, and nothing is lost or doubled.

use serde_json::Value;

use crate::database::Database;
use crate::kit::{CONSUMER_OF_PAYMENTS, ONCEBOX, Place, Program, eventually, payment};
use crate::readme::read;
use crate::support::service;

/// The dead messages, as `dead list` shows them.
fn dead(place: &Place) -> Vec<Value> {
    let listed = place.json(&["dead", "list", "--state", "dead"]);
    listed["dead"].as_array().unwrap().clone()
}

fn text<'v>(message: &'v Value, name: &str) -> &'v str {
    message[name].as_str().unwrap_or_default()
}

/// The one dead message of a key, or of a consumer: its reason and its error, which `dead list` and
/// `dead show` say to people too.
fn the_dead_one(place: &Place, of: &str, reason: &str, words: &[&str]) -> String {
    let mut dead = dead(place);
    dead.retain(|message| text(message, "key") == of || text(&message["place"], "consumer") == of);
    assert_eq!(dead.len(), 1, "{dead:?}");
    assert_eq!(text(&dead[0], "reason"), reason, "{dead:?}");
    let number = text(&dead[0], "number").to_owned();
    let table = place.oncebox(&["dead", "list"]).run().ok();
    assert!(table.contains(reason) && table.contains(&number), "{table}");
    let shown = place.oncebox(&["dead", "show", &number]).run().ok();
    for word in words {
        assert!(text(&dead[0], "error").contains(word), "`{word}` in {dead:?}");
        assert!(shown.contains(word), "`{word}` in {shown}");
    }
    number
}

/// Shown by treating a missing source as null: the statement is tried again and again, and no
/// parameter is named.
#[test]
fn a_payload_without_what_the_handler_needs_is_dead_with_the_parameter_named() {
    let cases = [
        ("acc-1", "not JSON", &["parameter", "not JSON"][..]),
        ("acc-2", "", &["not JSON"]),
        ("acc-3", r#"{"accountId":"acc-7","amountMinor":1}"#, &["the parameter `payment` has no value", "/paymentId"]),
        ("acc-4", r#"{"paymentId":"p1","amountMinor":1}"#, &["the parameter `account` has no value", "/accountId"]),
        ("acc-5", "[]", &["the parameter"]),
    ];
    let place = Place::migrated();
    let config = place.ledger();
    for (key, payload, _) in cases {
        place.enqueue(key, payload);
    }
    place.enqueue("acc-other", &payment("other"));
    place.publish();
    place.consume(&config).ok_saying(&["a message is dead", "the parameter"]);
    for (key, _, words) in cases {
        the_dead_one(&place, key, "terminal", words);
    }
    assert_eq!(place.entries(), ["other"], "nothing else waits for them");
}

#[test]
fn a_header_key_or_kind_that_is_missing_is_named_and_an_optional_one_is_null() {
    let sources = [
        ("of-header", "@header:tenant", "the message has no header `tenant`"),
        ("of-key", "@key", "the message has no key"),
        ("of-kind", "@kind", "the message has no kind"),
    ];
    let consumers = |optional: &str| -> String {
        let consumer = |(name, source, _): (&str, &str, &str)| {
            format!(
                "{}[[consumer.on]]\nhandler = 'sql'\n\
                 sql = [\"insert into ledger_entry (payment_id, account_id, amount_minor) values ('{name}', :id, :what)\"]\n\
                 params = {{ id = '@id', what = '{source}' }}\noptional = [{optional}]\n",
                CONSUMER_OF_PAYMENTS.replace("\"ledger\"", &format!("\"{name}\""))
            )
        };
        sources.map(consumer).concat()
    };
    let place = Place::migrated();
    place.ledger();
    let (strict, lenient) = (place.config(&consumers("")), place.config(&consumers("'what'")));
    place.consume(&strict).ok();
    place.append(None, &[("ce_id", "m-1")], "{}");
    place.consume(&strict).ok_saying(&["a message is dead"]);
    for (name, _, why) in sources {
        the_dead_one(&place, name, "terminal", &["the parameter `what` has no value", why]);
    }
    assert_eq!(place.entries(), [""; 0]);

    place.append(None, &[("ce_id", "m-2")], "{}");
    place.consume(&lenient).ok();
    let rows =
        place.column("select account_id || ' ' || payment_id from ledger_entry where amount_minor is null order by 1");
    assert_eq!(rows, ["m-2 of-header", "m-2 of-key", "m-2 of-kind"]);
}

/// The ledger that is there to be copied: the table and the handler of the compose file on
/// PostgreSQL, those of the template elsewhere, with the words that it names for MariaDB (M92).
///
/// Shown to fail: without the unique key two entries; without the words for it the second message
/// is tried again and again.
#[test]
fn one_payment_under_two_message_ids_is_booked_once_by_the_ledger_to_copy() {
    let test = "one_payment_under_two_message_ids_is_booked_once_by_the_ledger_to_copy";
    let body = payment("pay_1");
    let template = read("config.example.toml");
    let sql = template.lines().find_map(|line| line.strip_prefix("# sql     = ")).unwrap();
    let params = template.lines().find_map(|line| line.strip_prefix("# params  = ")).unwrap();
    let table = "create table ledger_entry (entry_type varchar(16) not null, source_payment_id varchar(64) not null,
        account_id varchar(64) not null, amount_minor bigint not null, unique (entry_type, source_payment_id))";
    let handler = |sql: &str| {
        let on = "[[consumer.on]]\nkind = 'payment.created'\nhandler = 'sql'";
        format!("{CONSUMER_OF_PAYMENTS}{on}\nsql = {sql}\nparams = {params}\n")
    };
    let (nothing, of_mariadb) = ("on conflict do nothing", "on duplicate key update entry_type = entry_type");
    assert!(sql.contains(nothing) && template.contains(of_mariadb), "{sql}");
    let databases = ["ONCEBOX_TEST_POSTGRES", "ONCEBOX_TEST_MARIADB"].map(|name| service(test, name));
    let [postgres, mariadb] = databases.map(|server| server.map(|server| Database::on(&server)));
    let on_postgres = postgres.as_ref().map(|database| {
        let (table, config) = (read("deploy/compose/ledger.sql"), read("deploy/compose/consumer.toml"));
        (Some(database.url.as_str()), table, config)
    });
    let on_mariadb = mariadb
        .as_ref()
        .map(|database| (Some(database.url.as_str()), table.to_owned(), handler(&sql.replace(nothing, of_mariadb))));
    let on_sqlite = (None, table.to_owned(), handler(sql));
    for (url, table, config) in [Some(on_sqlite), on_postgres, on_mariadb].into_iter().flatten() {
        let place = Place::on(url, None);
        place.oncebox(&["migrate", "up"]).run().ok();
        place.sql(&table);
        let config = place.config(&config);
        for _ in 0..2 {
            place.enqueue("acc-7", &body);
        }
        place.publish();
        place.consume(&config).ok();
        assert_eq!(place.column("select source_payment_id from ledger_entry"), ["pay_1"], "{config}");
        let left = place.json(&["dead", "list"]);
        assert_eq!(left["dead"], serde_json::json!([]), "both are handled");
    }
}

/// An error of the statement may pass, so it is tried again first; at last the database's own words
/// are what is shown.
#[test]
fn a_statement_that_fails_is_tried_again_and_then_dead_with_the_words_of_the_database() {
    let place = Place::migrated();
    let config = place.ledger();
    place.sql(r#"insert into ledger_entry values ('p1', 'somebody else', 1)"#);
    place.enqueue("acc-7", &payment("p1"));
    place.enqueue("acc-7", &payment("p2"));
    place.publish();
    let mut consumer = place.consumer(&["--config", &config]).start();
    consumer.says(&["a handler failed", "topic=payments", "kind=payment.created", "key=\"acc-7\"", "attempt=1"]);
    consumer.says(&["a message is dead"]);
    eventually("the next one of its key is held behind it", || (dead(&place)[0]["behind"] == 1).then_some(()));
    consumer.stop().ok();
    let words = "UNIQUE constraint failed: ledger_entry.payment_id (SQLite code 2067)";
    assert_eq!(dead(&place)[0]["error"], words);
    let number = the_dead_one(&place, "acc-7", "attempts", &[words]);
    let shown = place.json(&["dead", "show", &number]);
    assert_eq!(shown["history"].as_array().unwrap().len(), 2, "each try is kept: {shown}");
    assert_eq!(place.entries(), ["p1"]);

    place.sql("delete from ledger_entry");
    place.oncebox(&["dead", "redrive", &number, "--why", "the row is gone"]).run().ok();
    place.consume(&config).ok();
    assert_eq!((place.entries(), dead(&place)), (vec!["p1".into(), "p2".into()], Vec::new()));
}

#[test]
fn a_mistake_in_the_handler_is_found_when_the_consumer_starts() {
    let place = Place::migrated();
    place.ledger();
    for (sql, params, words) in [
        ("insert into nowhere values (:a)", "a = '/a'", &["insert into nowhere", "no such table: nowhere"][..]),
        ("insert into ledger_entry (nothing) values (:a)", "a = '/a'", &["nothing"]),
        ("insert into", "", &["insert into", "cannot be prepared"]),
        ("select :a", "", &["`select :a` uses :a", "`params` does not name"]),
        ("select 1", "a = '/a'", &["`a` is declared and no statement uses it"]),
        ("select :a", "a = 'amount'", &["`a` reads from `amount`", "@header:NAME"]),
    ] {
        let on = format!("[[consumer.on]]\nhandler = 'sql'\nsql = [\"{sql}\"]\nparams = {{ {params} }}\n");
        let config = place.config(&format!("{CONSUMER_OF_PAYMENTS}{on}"));
        place.consume(&config).fails(2, &[&["consumer `ledger`"], words].concat());
    }
    let config = place.config(&format!("{CONSUMER_OF_PAYMENTS}[[consumer.on]]\nhandler = 'sql'\n"));
    place.consume(&config).fails(2, &["consumer `ledger`", "no statement"]);
}

/// Messages of others: `dead list` says what is wrong with their ids.
#[test]
fn a_foreign_message_without_a_usable_id_is_dead_and_says_why() {
    let with_rule = |rule: &str| {
        let consumer = CONSUMER_OF_PAYMENTS.replace("topics =", &format!("id = '{rule}'\ntopics ="));
        format!("{consumer}{}", crate::kit::LEDGER)
    };
    let too_long = "x".repeat(1_025);
    let no_headers = &[][..];
    for (rule, cases) in [
        (
            "envelope",
            &[
                (no_headers, "{}", "the message has no id"),
                (&[("ce_id", "")], "{}", "the message id is empty"),
                (&[("ce_id", too_long.as_str())], "{}", "has 1025 bytes, at most 1024"),
            ][..],
        ),
        ("header:event-id", &[(&[("ce_id", "1")], "{}", "the header `event-id`")]),
        ("payload:/eventId", &[(&[("ce_id", "1")], "{}", "no id at `/eventId`"), (no_headers, "not JSON", "not JSON")]),
    ] {
        let place = Place::migrated();
        place.ledger();
        let config = place.config(&with_rule(rule));
        place.consume(&config).ok();
        for (headers, payload, error) in cases {
            place.append(Some(error), headers, payload);
            place.append(Some(error), headers, payload);
        }
        place.consume(&config).ok_saying(&["a message is dead", "reason=\"no-usable-id\""]);
        let dead = dead(&place);
        assert_eq!(dead.len(), 2 * cases.len(), "each of them stands for itself: {dead:?}");
        for message in &dead {
            assert_eq!(text(message, "reason"), "no-usable-id", "{dead:?}");
            let key = text(message, "key");
            assert!(!key.is_empty() && text(message, "error").contains(key), "{dead:?}");
        }
        assert_eq!(place.entries(), [""; 0]);
    }
}

/// Shown by comparing ids alone: the second one is taken for a duplicate and vanishes.
#[test]
fn the_same_id_with_other_content_is_dead_and_the_first_one_stays() {
    let place = Place::migrated();
    let config = place.ledger();
    place.consume(&config).ok();
    let headers = [("ce_id", "m-1"), ("ce_type", "payment.created")];
    for id in ["p1", "p1", "p2"] {
        place.append(Some("acc-7"), &headers, &payment(id));
    }
    place.consume(&config).ok_saying(&["the same message id with different content"]);
    assert_eq!(place.entries(), ["p1"]);
    the_dead_one(&place, "acc-7", "id-reused", &["the same id stands in the inbox with different content"]);
}

#[test]
fn a_kind_that_no_handler_takes_is_acknowledged_or_dead_as_it_is_set() {
    let place = Place::migrated();
    let config = place.ledger();
    let dead_config = CONSUMER_OF_PAYMENTS.replace("topics =", "unhandled = 'dead'\ntopics =");
    let dead_config = place.config(&format!("{dead_config}{}", crate::kit::LEDGER));
    place.consume(&config).ok();
    place.append(None, &[("ce_id", "m-1"), ("ce_type", "payment.refunded")], "{}");
    place.consume(&config).ok();
    assert!(dead(&place).is_empty());
    place.append(None, &[("ce_id", "m-2"), ("ce_type", "payment.refunded")], "{}");
    place.consume(&dead_config).ok_saying(&["a message is dead", "reason=\"unhandled\""]);
    the_dead_one(&place, "ledger", "unhandled", &["payment.refunded"]);
}

/// On a terminal, which `script` of util-linux makes. Shown by a width of 120 columns on each, and
/// by an error that is cut off after sixty characters.
#[test]
fn a_table_is_as_wide_as_its_terminal_and_breaks_neither_an_id_nor_an_error() {
    let place = Place::migrated();
    let config = place.ledger();
    place.enqueue("acc-7", r#"{"paymentId":"p1","accountId":"acc-7"}"#);
    place.publish();
    place.consume(&config).ok();
    let dead = dead(&place).remove(0);
    let (id, error) = (dead["message_id"].as_str().unwrap(), dead["error"].as_str().unwrap());
    assert!(error.len() > 60 && error.contains("`/amountMinor`"), "{error}");
    for (columns, is_table) in [(60, false), (90, false), (120, false), (220, true), (400, true)] {
        let command = format!("stty cols {columns} rows 40; {ONCEBOX} dead list");
        let script =
            Program::new("script", &["-qec", &command, "/dev/null"]).env("ONCEBOX_DATABASE__URL", place.database());
        let shown = script.within(place.path()).saying("\n").run().ok().replace('\r', "");
        assert!(shown.contains(id), "{columns}: {shown}");
        assert!(error.split(' ').all(|word| shown.contains(word)), "{columns}: {shown}");
        assert_eq!(shown.contains('═'), is_table, "{columns}: {shown}");
        let widest = shown.lines().map(|line| line.chars().count()).max();
        assert!(!is_table || widest <= Some(columns), "{columns}: {shown}");
        assert!(!shown.contains("sent as") && !shown.contains("next try"), "they are empty: {shown}");
    }
    let piped = place.oncebox(&["dead", "list"]).run().ok();
    assert!(piped.lines().any(|line| line.contains(id) && line.contains(error)), "{piped}");
}
