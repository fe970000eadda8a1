//! Settings that cannot be used: each is named with its place, the nearest known name and what may
//! be written; nothing of a value that may be a secret is repeated.

use std::fs::File;

use crate::kit::{Done, ONCEBOX, Place, Program, SECRET};

/// Without the environment, which would stand over the file.
fn show(place: &Place, file: &str) -> Done {
    Program::new(ONCEBOX, &["config", "show", "--config", &place.config(file)]).run()
}

/// Shown by leaving `deny_unknown_fields` away from one of the tables: its key passes.
#[test]
fn an_unknown_key_is_refused_at_every_level_with_the_nearest_known_one() {
    let place = Place::new();
    let consumer = "[[consumer]]\nname = 'ledger'\ntopics = ['payments']\n";
    for (file, key, nearest) in [
        ("shutdown_grase = '1s'", "shutdown_grase", "shutdown_grace"),
        ("[databse]\nurl = 'x'", "databse", "database"),
        ("[database]\nulr = 'x'", "database.ulr", "url"),
        ("[broker]\nurll = 'x'", "broker.urll", "url"),
        ("[broker.kafak]", "broker.kafak", "kafka"),
        ("[broker.kafka]\ncreate_topic = true", "broker.kafka.create_topic", "create_topics"),
        ("[broker.rabbitmq]\nexchnge = 'x'", "broker.rabbitmq.exchnge", "exchange"),
        ("[broker.embedded]\npartition = 4", "broker.embedded.partition", "partitions"),
        ("[publisher]\nleese = '1s'", "publisher.leese", "lease"),
        ("[email]\nfrm = 'x'", "email.frm", "from"),
        ("[http]\nlisten_on = 'x'", "http.listen_on", "listen"),
        ("[log]\nfromat = 'json'", "log.fromat", "format"),
        (&format!("{consumer}topic = []"), "consumer.0.topic", "topics"),
        (&format!("{consumer}[consumer.retry]\nattempt_max = 1"), "consumer.0.retry.attempt_max", "attempts_max"),
        (&format!("{consumer}[[consumer.on]]\nhandlr = 'sql'"), "consumer.0.on.0.handlr", "handler"),
    ] {
        show(&place, file)
            .fails(2, &[&format!("unknown setting `{key}`"), &format!("did you mean `{nearest}`?"), "(file "]);
    }
}

#[test]
fn a_variable_with_one_underscore_between_levels_is_told_the_name_with_two() {
    let place = Place::new();
    for (wrong, right) in [
        ("ONCEBOX_DATABASE_URL", "ONCEBOX_DATABASE__URL"),
        ("ONCEBOX_BROKER__KAFKA_CREATE_TOPICS", "ONCEBOX_BROKER__KAFKA__CREATE_TOPICS"),
    ] {
        let words = [wrong, &format!("did you mean {right}, with `__` between two levels?")];
        place.oncebox(&["config", "show"]).env(wrong, "x").run().fails(2, &words);
    }
}

#[test]
fn every_program_refuses_an_unknown_key_before_it_does_anything() {
    let place = Place::migrated();
    let config = place.config("[publisher]\nleese = '1s'");
    for program in [
        place.publisher(&["--config", &config]),
        place.consumer(&["--config", &config]),
        place.oncebox(&["status", "--config", &config]),
        place.oncebox(&["doctor"]).env("ONCEBOX_CONFIG", &config),
    ] {
        program.run().fails(2, &["unknown setting `publisher.leese`", "did you mean `lease`?"]);
    }
    assert!(!place.path().join("broker.db").exists(), "the broker file is not made");
}

/// Shown by printing figment's own description of a wrong type: it repeats the value.
#[test]
fn a_value_that_cannot_be_used_is_named_with_what_may_be_written() {
    let place = Place::new();
    for (file, words) in [
        ("shutdown_grace = 'soon'", &["`shutdown_grace`", "`soon` is no duration", "\"30s\""][..]),
        ("shutdown_grace = 20", &["`shutdown_grace`", "text with a unit", "\"30s\""]),
        ("publisher.lease = '10'", &["`publisher.lease`", "`10` is no duration"]),
        ("publisher.lease = '300000000000y'", &["`publisher.lease`", "longer than 100 years"]),
        ("publisher.window_bytes = '8 apples'", &["`publisher.window_bytes`", "\"8MiB\""]),
        ("publisher.batch_rows = -1", &["`publisher.batch_rows`", "a whole number that is not negative"]),
        ("publisher.batch_rows = 'many'", &["`publisher.batch_rows`", "found text"]),
        ("broker.kafka.partitions = 'six'", &["`broker.kafka.partitions`", "a whole number"]),
        ("publisher.dead = 'keep'", &["`publisher.dead`", "`keep` is unknown", "hold, skip"]),
        ("publisher.dead = true", &["`publisher.dead`", "found a boolean, expected one of its words"]),
        ("publisher.dead_topics = { audit = 'keep' }", &["`publisher.dead_topics.audit`", "hold, skip"]),
        ("log.format = 'xml'", &["`log.format`", "`xml` is unknown", "text, json"]),
        ("log.filter = 'a=b=c'", &["log.filter = `a=b=c`", "info,oncebox=debug"]),
        ("http.listen = 'here'", &["`http.listen`", "`here` is no address with a port", "127.0.0.1:9090"]),
        ("consumer = [{ topics = ['t'] }]", &["`consumer.0.name` is missing"]),
        ("consumer = [{ name = 'c' }]", &["`consumer.0.topics` is missing"]),
        ("consumer = [{ name = 'c', topics = ['t'], unhandled = 'drop' }]", &["`drop`", "acknowledge, dead"]),
        ("broker.kafka.password = 5", &["`broker.kafka.password`", "found a number, expected text"]),
        (&format!("broker = 'kafka://app:{SECRET}@h'"), &["`broker`", "found text, expected a table"]),
        (&format!("database.url = ['postgres://app:{SECRET}@h/db']"), &["`database.url`", "found a list"]),
        (&format!("broker.kafka.partitions = '{SECRET}'"), &["`broker.kafka.partitions`", "found text"]),
    ] {
        show(&place, file).fails(2, words);
    }
}

/// What only the program that uses it can judge.
#[test]
fn a_setting_out_of_its_bounds_ends_the_program_that_uses_it() {
    let place = Place::migrated();
    for (file, words) in [
        ("publisher.lease = '10ms'", &["publisher.lease", "at least 1s"][..]),
        ("publisher.batch_rows = 0", &["batch_rows", "more than 0"]),
        ("publisher.batch_rows = 10001", &["batch_rows", "1 to 10000", "not 10001"]),
        ("publisher.dead_rows_max = 0", &["dead_rows_max", "more than 0"]),
        ("publisher.source = 'ä'", &["source", "printable ASCII"]),
        ("publisher.held_rows_max = 0", &["publisher.held_rows_max", "more than 0"]),
        ("publisher.poll_max = '0s'", &["publisher.poll_max", "more than 0s"]),
        ("publisher.publish_stall = '0s'", &["publisher.publish_stall", "more than 0s"]),
        ("publisher.probe = '0s'", &["publisher.probe", "more than 0s"]),
        ("database.connections_max = 0", &["database.connections_max", "at least 1"]),
        ("broker.embedded.partitions = 0", &["partitions", "1 to 1024"]),
        ("broker.embedded.session_timeout = '1ms'", &["session_timeout", "300 ms"]),
    ] {
        place.publisher(&["--until-empty", "--config", &place.config(file)]).run().fails(2, words);
    }
    let on = "on = [{ handler = 'sql', sql = ['select 1'] }]";
    for (file, words) in [
        ("consumer = []".to_owned(), &["no consumer is configured", "[[consumer]]"][..]),
        ("consumer = [{ name = 'c', topics = ['t'] }]".to_owned(), &["`c`", "[[consumer.on]]"]),
        (format!("consumer = [{{ name = '', topics = ['t'], {on} }}]"), &["name", "1 to 128 bytes"]),
        (format!("consumer = [{{ name = 'c', topics = [], {on} }}]"), &["`c`", "at least one topic"]),
        (
            format!("consumer = [{{ name = 'c', topics = ['t'], id = 'uuid', {on} }}]"),
            &["`uuid` is no id rule", "header:NAME"],
        ),
        (
            format!("consumer = [{{ name = 'c', topics = ['t'], retry.attempts_max = 0, {on} }}]"),
            &["`c`", "retry", "`attempts_max`"],
        ),
        (format!("consumer = [{{ name = 'c', topics = ['t', 't'], {on} }}]"), &["`c`", "topics", "`t`", "twice"]),
        (format!("consumer = [{{ name = 'outbox', topics = ['t'], {on} }}]"), &["`outbox`", "choose another one"]),
        (
            format!("consumer = [{{ name = 'c', topics = ['t', 'pay ments'], {on} }}]"),
            &["`c`", "topics", "`pay ments`", "A-Z, a-z, 0-9"],
        ),
        (format!("consumer = [{{ name = 'c', topics = [''], {on} }}]"), &["`c`", "topics", "at least one character"]),
        (
            format!("consumer = [{{ name = 'c', topics = ['t'], queues = {{ t = '' }}, {on} }}]"),
            &["`c`", "queues", "at least one character"],
        ),
        (
            format!("consumer = [{{ name = 'c', topics = ['t'], group = '', {on} }}]"),
            &["`c`", "group", "at least one character"],
        ),
        (
            format!("consumer = [{{ name = 'c', topics = ['t'], queues = {{ tt = 'q' }}, {on} }}]"),
            &["`c`", "queues", "`tt` is none of its topics: t"],
        ),
        (
            format!("consumer = [{{ name = 'c', topics = ['t'], handler_timeout = '0s', {on} }}]"),
            &["`c`", "handler_timeout", "more than 0s"],
        ),
        // Shown by taking the nearest bound without a word.
        (
            format!("consumer = [{{ name = 'c', topics = ['t'], lanes = 65, {on} }}]"),
            &["`c`", "lanes", "1 to 64", "not 65"],
        ),
        (format!("consumer = [{{ name = 'c', topics = ['t'], batch_max = 0, {on} }}]"), &["`c`", "batch_max", "not 0"]),
        (
            format!("consumer = [{{ name = 'c', topics = ['t'], in_flight_max = 0, {on} }}]"),
            &["`c`", "in_flight_max", "1 or more"],
        ),
        (
            format!("consumer = [{{ name = 'c', topics = ['t'], dead_rows_max = 0, {on} }}]"),
            &["`c`", "dead_rows_max", "more than 0"],
        ),
        // Shown by taking both: the second one never runs, and nothing says so.
        (
            "consumer = [{ name = 'c', topics = ['t'], on = [{ kind = 'k', handler = 'sql', sql = ['select 1'] }, \
             { kind = 'k', handler = 'sql', sql = ['select 2'] }] }]"
                .to_owned(),
            &["`c`", "`k` has two handlers", "one `sql`"],
        ),
        (
            "consumer = [{ name = 'a', group = 'g', topics = ['t'], on = [{ handler = 'sql', sql = ['select 1'] }] }, \
             { name = 'b', group = 'g', topics = ['t'], on = [{ handler = 'sql', sql = ['select 1'] }] }]"
                .to_owned(),
            &["`a` and `b`", "topic `t` in the group `g`"],
        ),
        (
            "consumer = [{ name = 'c', topics = ['t'], on = [{ handler = 'lua' }] }]".to_owned(),
            &["`lua`", "known is `sql`"],
        ),
    ] {
        place.consumer(&["--until-idle", "1s", "--config", &place.config(&file)]).run().fails(2, words);
    }
}

/// Shown by asking the broker at once: a queue would be deleted with the messages of the topic that
/// is not moved, or queues would be made that no consumer reads.
#[test]
fn queues_that_no_consumer_may_read_are_refused_before_they_are_changed() {
    let place = Place::new();
    for (consumer, words) in [
        (
            "topics = ['t', 'u'], queues = { t = 'q', u = 'q' }",
            &["`c`", "two topics", "queue `q`", "another `queues`"][..],
        ),
        ("topics = ['t'], queues = { tt = 'q' }", &["`c`", "queues", "`tt` is none of its topics: t"]),
    ] {
        let config = place.config(&format!("consumer = [{{ name = 'c', {consumer} }}]"));
        let repartition =
            ["queues", "repartition", "--config", &config, "--broker", "amqp://127.0.0.1:1", "--wait", "0s"];
        place.oncebox(&repartition).run().fails(2, words);
    }
}

#[test]
fn a_configuration_file_that_is_missing_or_no_toml_is_named_with_the_line() {
    let place = Place::new();
    let missing = place.path().join("missing.toml").display().to_string();
    place.oncebox(&["status", "--config", &missing]).run().fails(2, &[&missing, "No such file", "config template"]);
    place.oncebox(&["status"]).env("ONCEBOX_CONFIG", &missing).run().fails(2, &[&missing]);
    let directory = place.path().display().to_string();
    place.publisher(&["--config", &directory]).run().fails(2, &[&directory, "cannot be read"]);
    for (text, words) in [
        (format!("[database]\nurl = \"postgres://app:{SECRET}@h/db\n"), "line 2, column"),
        (format!("shutdown_grace = \"1s\"\n\n{SECRET} = = 5\n"), "line 3, column"),
        (format!("[database]\nurl = 'a'\nurl = '{SECRET}'\n"), "line 3, column 1"),
        ("[database\n".to_owned(), "line 1, column"),
    ] {
        show(&place, &text).fails(2, &["is no TOML at", words]);
    }
}

/// Shown by reading every value as TOML: text that looks like a number is none any more.
#[test]
fn the_environment_is_checked_like_the_file_and_names_the_variable() {
    let place = Place::new();
    for (name, value, words) in [
        ("ONCEBOX_DATABSE__URL", "x", &["unknown setting `databse`", "ONCEBOX_DATABSE__URL", "`database`"][..]),
        ("ONCEBOX_BROKER__KAFKA__PASSWRD", SECRET, &["`broker.kafka.passwrd`", "`password`"]),
        (
            "ONCEBOX_BROKER__KAFKA__PARTITIONS",
            SECRET,
            &["`broker.kafka.partitions`", "ONCEBOX_BROKER__KAFKA__PARTITIONS"],
        ),
        ("ONCEBOX_BROKER__KAFKA__CREATE_TOPICS", "yes", &["`broker.kafka.create_topics`", "a boolean"]),
        ("ONCEBOX_SHUTDOWN_GRACE", "20", &["`shutdown_grace`", "ONCEBOX_SHUTDOWN_GRACE", "no duration"]),
        ("ONCEBOX_DATABASE", &format!("postgres://app:{SECRET}@h/db"), &["`database`", "ONCEBOX_DATABASE", "a table"]),
        ("ONCEBOX_DATABASE__", "x", &["ONCEBOX_DATABASE__", "names no setting"]),
        ("RUST_LOG", "a=b=c", &["RUST_LOG = `a=b=c`"]),
    ] {
        place.oncebox(&["config", "show"]).env(name, value).run().fails(2, words);
    }
    // A password may look like a number, a truth or a list.
    for password in ["00123", "1e5", "true", "[5]", "{}", "\"quoted\""] {
        let shown =
            place.oncebox(&["config", "show", "--output", "json"]).env("ONCEBOX_BROKER__KAFKA__PASSWORD", password);
        assert!(shown.run().ok().contains("\"***\""), "{password}");
    }
    let listed = place
        .oncebox(&["config", "show"])
        .env("ONCEBOX_CONSUMER", "[{ name = 'ledger', topics = ['payments'] }]")
        .env("ONCEBOX_PUBLISHER__DEAD_TOPICS", "{ audit = 'skip' }");
    let listed = listed.run().ok();
    assert!(
        listed.contains("environment ONCEBOX_CONSUMER") && listed.contains("publisher.dead_topics.audit"),
        "{listed}"
    );
}

/// A wrong flag is a usage error of clap, in its own words.
#[test]
fn unknown_flags_commands_and_values_are_usage_errors() {
    let place = Place::new();
    for (program, words) in [
        (place.publisher(&["--until-emty"]), &["--until-emty", "--until-empty"][..]),
        (place.publisher(&["--listen", "here"]), &["--listen", "here"]),
        (place.publisher(&["now"]), &["unexpected argument 'now'"]),
        (place.consumer(&["--until-idle", "soon"]), &["--until-idle", "soon"]),
        (place.consumer(&["--log-format", "xml"]), &["--log-format", "text, json"]),
        (place.oncebox(&["statsu"]), &["statsu", "status"]),
        (place.oncebox(&["status", "--output", "xml"]), &["--output", "table, json"]),
        (place.oncebox(&["dead", "show", "17"]), &["'17'", "no number of a dead message", "o17, c9"]),
        (place.oncebox(&["dead", "redrive", "o0", "--why", "x"]), &["'o0'", "no number of a dead message"]),
        (place.oncebox(&["dead", "discard", "o1"]), &["--why <TEXT>"]),
        (place.oncebox(&["dead", "discard", "o1", "--why", " "]), &["--why <TEXT>", "audit row, and is empty"]),
        (place.oncebox(&["keys", "purge", "--all", "--why", "x", "--by", ""]), &["--by <NAME>", "is empty"]),
        (place.oncebox(&["dead", "list", "--source", "shop"]), &["--id <ID>"]),
        (place.oncebox(&["completions", "tcsh"]), &["tcsh", "bash"]),
        (place.oncebox(&["demo", "--messages", "0"]), &["--messages"]),
    ] {
        program.run().fails(2, words);
    }
    place.oncebox(&[]).run().code().filter(|code| *code == 2).expect("a command is needed");
}

/// Shown by printing with `println!`: it panics, exit code 101.
#[test]
fn data_that_cannot_be_written_is_an_error_and_no_panic() {
    let place = Place::migrated();
    for arguments in [&["config", "template"][..], &["config", "show"], &["completions", "bash"], &["migrate", "print"]]
    {
        let full = File::options().write(true).open("/dev/full").unwrap();
        place.oncebox(arguments).stdout(full).fails(1, &["stdout cannot be written"]);
    }
}

/// Where nothing is given, the programs use files beside them, and say so.
#[test]
fn without_settings_the_defaults_hold() {
    let place = Place::new();
    let bare = |arguments: &[&str]| Program::new(ONCEBOX, arguments).within(place.path()).run();
    bare(&["status"]).fails(3, &["sqlite://oncebox.db", "oncebox migrate up"]);
    let shown = bare(&["config", "show"]).ok();
    let origins: Vec<&str> = shown.lines().skip(1).map(|line| line.trim_end().rsplit("  ").next().unwrap()).collect();
    assert!(origins.len() > 20 && origins.iter().all(|origin| origin.trim() == "default"), "{shown}");
}
