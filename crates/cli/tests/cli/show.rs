//! `oncebox config`: the template is the example file, and what is in force is shown with its
//! origin and without passwords.

use serde_json::Value;

use crate::kit::{ONCEBOX, Place, Program, SECRET};

#[test]
fn the_template_is_the_example_file_and_is_accepted_as_it_stands() {
    let place = Place::new();
    let template = place.oncebox(&["config", "template"]).run().ok();
    let example = crate::readme::root().join("config.example.toml");
    assert_eq!(template, std::fs::read_to_string(example).unwrap());
    place.oncebox(&["config", "template", "--output", "json"]).run().fails(2, &["TOML"]);
    let config = place.config(&template);
    let with_file = Program::new(ONCEBOX, &["config", "show", "--config", &config]).within(place.path()).run().ok();
    let without = Program::new(ONCEBOX, &["config", "show"]).within(place.path()).run().ok();
    assert_eq!(with_file, without, "every line of it is a comment");
}

/// Shown by merging the environment before the file.
#[test]
fn flag_stands_over_environment_over_file_over_default_and_each_value_knows_its_origin() {
    let place = Place::new();
    let config = place.config(
        "shutdown_grace = '3s'\n[database]\nurl = 'sqlite://file.db'\n[broker]\nurl = 'embedded://file.db'\n[log]\nfilter = 'warn'\n\
         [broker.kafka.properties]\n'client.rack' = 'a'\n[[consumer]]\nname = 'ledger'\ntopics = ['payments']\n",
    );
    let arguments = ["config", "show", "--output", "json", "--config", &config, "--database", "sqlite://flag.db"];
    let program = Program::new(ONCEBOX, &arguments)
        .env("ONCEBOX_DATABASE__URL", "sqlite://environment.db")
        .env("ONCEBOX_BROKER__URL", "embedded://environment.db")
        .env("ONCEBOX_PUBLISHER__BATCH_ROWS", "7");
    let shown = program.run().json();
    let find = |name: &str| -> (Value, String) {
        let rows = shown["settings"].as_array().unwrap();
        let row = rows.iter().find(|row| row["setting"] == name).unwrap_or_else(|| panic!("{name} in {shown}"));
        (row["value"].clone(), row["origin"].as_str().map(str::to_owned).unwrap())
    };
    let pair = |value: &str, origin: &str| (Value::from(value), origin.to_owned());
    let file = format!("file {config}");
    assert_eq!(find("database.url"), pair("sqlite://flag.db", "flag --database"));
    assert_eq!(find("broker.url"), pair("embedded://environment.db", "environment ONCEBOX_BROKER__URL"));
    assert_eq!(find("publisher.batch_rows"), (Value::from(7), "environment ONCEBOX_PUBLISHER__BATCH_ROWS".to_owned()));
    assert_eq!(find("shutdown_grace"), pair("3s", &file));
    assert_eq!(find("log.filter"), pair("warn", &file));
    assert_eq!(find("broker.kafka.properties.client.rack").1, file);
    assert_eq!(find("consumer.0.name"), pair("ledger", &file));
    assert_eq!(find("consumer.0.unhandled"), pair("acknowledge", "default"));
    assert_eq!(find("publisher.lease"), pair("10s", "default"));
    assert_eq!(find("log.format").1, "default");
    let as_flag = Program::new(ONCEBOX, &["config", "show", "--log-format", "json"]).run().ok();
    assert!(as_flag.lines().any(|line| line.contains("log.format") && line.contains("flag --log-format")), "{as_flag}");
}

/// The kit looks for the word in everything that is printed; here that the rest of each value is
/// still shown.
///
/// Shown by taking `password` out of the names of secrets, and by showing a password as a URL where
/// it looks like one.
#[test]
fn passwords_are_hidden_and_what_is_none_is_shown() {
    let place = Place::new();
    let config = place.config(&format!(
        "[database]\nurl = 'postgres://app:{SECRET}@db.example:5432/app?password={SECRET}'\n[broker]\nurl = 'kafka://app:{SECRET}@a:1,b:2'\n\
         [broker.kafka]\nusername = 'app'\npassword = 'a://{SECRET}'\n[broker.kafka.properties]\n'ssl.key.password' = '{SECRET}'\n\
         [email]\nsmtp_url = 'smtps://app:{SECRET}@mail.example'\n"
    ));
    for format in ["table", "json"] {
        let shown = Program::new(ONCEBOX, &["config", "show", "--output", format, "--config", &config]).run().ok();
        for text in [
            "postgres://app:***@db.example:5432/app?password=***",
            "kafka://app:***@a:1,b:2",
            "smtps://app:***@mail.example",
            "broker.kafka.properties.ssl.key.password",
        ] {
            assert!(shown.contains(text), "{text} in {shown}");
        }
        if format == "json" {
            let shown: Value = serde_json::from_str(&shown).unwrap();
            let rows = shown["settings"].as_array().unwrap();
            assert!(rows.iter().any(|row| row["setting"] == "broker.kafka.password" && row["value"] == "***"));
        }
    }
    let flag = format!("mysql://app:{SECRET}@db.example/app");
    let shown = Program::new(ONCEBOX, &["config", "show", "--database", &flag]).run().ok();
    assert!(shown.contains("mysql://app:***@db.example/app"), "{shown}");
}
