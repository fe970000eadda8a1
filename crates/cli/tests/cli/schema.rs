//! `oncebox migrate`, and what every program does with a database whose tables are not the ones it
//! was built with: exit code 3, before anything else.

use crate::database::Database;
use crate::kit::{ONCEBOX, PUBLISHER, Place, Program};
use crate::support::service;

/// Programs and commands that need the tables; each says nothing but the error.
fn programs(place: &Place) -> Vec<Program> {
    let config =
        place.config("[[consumer]]\nname = 'c'\ntopics = ['t']\n[[consumer.on]]\nhandler = 'sql'\nsql = ['select 1']");
    vec![
        place.oncebox(&["status"]),
        place.oncebox(&["status", "--output", "json"]),
        place.oncebox(&["dead", "list"]),
        place.oncebox(&["dead", "show", "o1"]),
        place.oncebox(&["dead", "redrive", "--all", "--why", "x"]),
        place.oncebox(&["consumers", "list"]),
        place.oncebox(&["audit", "list"]),
        place.oncebox(&["keys", "list"]),
        place.oncebox(&["operations", "list"]),
        place.oncebox(&["sender", "--until-empty"]),
        place.publisher(&["--until-empty"]),
        place.publisher(&[]),
        place.consumer(&["--until-idle", "1s", "--config", &config]),
    ]
}

fn all_end_with_3(place: &Place, words: &[&str]) {
    for program in programs(place) {
        program.run().fails(3, words);
    }
    // Their data is what shows it.
    place.oncebox(&["migrate", "status"]).run().ends_with(3, words);
    let doctor = place.oncebox(&["doctor"]).run();
    doctor.ends_with(3, &["broken"]);
    assert!(words.iter().all(|word| doctor.stdout.contains(word)), "{}", doctor.stdout);
}

/// Shown by making the file when it is opened.
#[test]
fn a_sqlite_file_that_is_missing_ends_every_program_with_3_and_is_not_made() {
    let place = Place::new();
    all_end_with_3(&place, &[place.database(), "the schema of oncebox is missing", "run `oncebox migrate up`"]);
    assert!(!place.path().join("app.db").exists());
}

#[test]
fn a_database_without_the_schema_ends_every_program_with_3_and_is_left_as_it_is() {
    let place = Place::migrated();
    let mut databases = vec![format!("sqlite://{}", place.path().join("empty.db").display())];
    crate::database::run(&format!("{}?mode=rwc", databases[0]), "create table own (n int)").unwrap();
    let test = "a_database_without_the_schema_ends_every_program_with_3_and_is_left_as_it_is";
    let servers = ["ONCEBOX_TEST_POSTGRES", "ONCEBOX_TEST_MARIADB"].map(|name| service(test, name));
    let servers: Vec<Database> = servers.iter().flatten().map(|server| Database::on(server)).collect();
    databases.extend(servers.iter().map(|server| server.url.clone()));
    for url in databases {
        let place = Place::on(Some(&url), None);
        all_end_with_3(&place, &["the schema of oncebox is missing", "run `oncebox migrate up`"]);
        assert_eq!(place.json(&["migrate", "up"])["applied"][0], 1);
        place.oncebox(&["status"]).run().ok();
    }
}

/// In another directory the default names another file. Shown by the text of a database without
/// tables: whoever obeys it gets an empty one.
#[test]
fn a_database_file_that_is_not_there_is_named_with_its_path_and_where_its_name_comes_from() {
    let place = Place::new();
    let path = std::fs::canonicalize(place.path()).unwrap().join("oncebox.db").display().to_string();
    for command in [&["dead", "list"][..], &["status"], &["audit", "list"]] {
        let done = Program::new(ONCEBOX, command).within(place.path()).run();
        done.fails(3, &[&format!("the file {path} is not there"), "ONCEBOX_DATABASE__URL"]);
    }
    let done = Program::new(PUBLISHER, &["--until-empty"]).within(place.path()).run();
    done.fails(3, &[&format!("the file {path} is not there")]);
    assert!(!std::path::Path::new(&path).exists());
}

#[test]
fn migrations_newer_than_the_program_knows_end_it_with_3() {
    let place = Place::migrated();
    place.sql("insert into oncebox_migration values (99, 'later', x'00', 0, 99)");
    let words = ["version 99", "this program knows up to 4", "update the program"];
    all_end_with_3(&place, &words);
    place.oncebox(&["migrate", "up"]).run().fails(3, &words);
    let listed = place.oncebox(&["migrate", "status"]).run().stdout;
    assert!(listed.contains("99  applied  of a newer program"), "{listed}");
    let test = "migrations_newer_than_the_program_knows_end_it_with_3";
    let Some(place) = Place::on_server(test, "ONCEBOX_TEST_MARIADB") else { return };
    place.sql("insert into oncebox_migration values (99, 'later', 99, utc_timestamp(6))");
    all_end_with_3(&place, &words);
    place.oncebox(&["migrate", "up"]).run().fails(3, &words);
}

#[test]
fn migrations_older_than_the_program_needs_end_it_with_3_and_name_the_remedy() {
    let place = Place::migrated();
    place.sql("delete from oncebox_migration where version = 4");
    all_end_with_3(&place, &["version 3", "needs 4", "run `oncebox migrate up`"]);
    let listed = place.oncebox(&["migrate", "status"]).run().stdout;
    assert!(listed.contains("3  applied") && listed.contains("4  missing"), "{listed}");
}

/// Shown by comparing checksums in `migrate up` only: the publisher runs.
#[test]
fn a_migration_that_was_applied_with_another_text_ends_every_program_with_3() {
    let place = Place::migrated();
    place.sql("update oncebox_migration set checksum = x'00' where version = 2");
    let words = ["migration 2 was applied with another text"];
    all_end_with_3(&place, &words);
    place.oncebox(&["migrate", "up"]).run().fails(3, &words);
    let test = "a_migration_that_was_applied_with_another_text_ends_every_program_with_3";
    let Some(place) = Place::on_server(test, "ONCEBOX_TEST_POSTGRES") else { return };
    place.sql(r"update oncebox.migration set checksum = '\x00' where version = 2");
    all_end_with_3(&place, &words);
    place.oncebox(&["migrate", "up"]).run().fails(3, &words);
    place.sql(r"update oncebox.migration set version = 99, serves_from = 99 where version = 4");
    all_end_with_3(&place, &["version 99", "update the program"]);
    place.oncebox(&["migrate", "up"]).run().fails(3, &["version 99"]);
}

#[test]
fn migrating_twice_applies_nothing_the_second_time_and_status_shows_it() {
    let place = Place::new();
    let listed = place.oncebox(&["migrate", "status"]).run().stdout;
    assert_eq!(listed.matches("missing").count(), 4, "{listed}");
    assert_eq!(place.oncebox(&["migrate", "up"]).run().ok(), "applied 1\napplied 2\napplied 3\napplied 4\n");
    assert_eq!(place.oncebox(&["migrate", "up"]).run().ok(), "no migration to apply\n");
    assert_eq!(place.json(&["migrate", "up"])["applied"], serde_json::json!([]));
    let listed = place.json(&["migrate", "status"]);
    let rows = listed["migrations"].as_array().unwrap();
    assert!(rows.len() == 4 && rows.iter().all(|row| row["applied"] == true), "{listed}");
}

/// Shown by printing the texts of the migrations alone: the programs do not know that they were
/// applied.
#[test]
fn what_migrate_print_prints_can_be_applied_by_hand() {
    let test = "what_migrate_print_prints_can_be_applied_by_hand";
    let place = Place::migrated();
    let empty = format!("sqlite://{}", place.path().join("by-hand.db").display());
    crate::database::run(&format!("{empty}?mode=rwc"), "select 1").unwrap();
    let server = service(test, "ONCEBOX_TEST_POSTGRES").map(|server| Database::on(&server));
    for url in [Some(empty), server.as_ref().map(|server| server.url.clone())].into_iter().flatten() {
        let place = Place::on(Some(&url), None);
        let script = place.oncebox(&["migrate", "print"]).run().ok();
        crate::database::run(&url, &script).unwrap();
        place.oncebox(&["status"]).run().ok();
        place.oncebox(&["doctor"]).run().ok();
        assert_eq!(place.oncebox(&["migrate", "up"]).run().ok(), "no migration to apply\n");
    }
}

/// The files of MySQL are what the `mysql` client reads: they change its delimiter and note
/// themselves.
#[test]
fn what_migrate_print_prints_for_mysql_notes_every_migration() {
    let place = Place::on(Some("mysql://app@127.0.0.1:1/app"), None);
    let script = place.oncebox(&["migrate", "print"]).run().ok();
    for version in 1..=4 {
        assert!(script.contains(&format!("\n-- {version} ")) || script.starts_with("-- 1 "), "{version}");
        assert!(script.contains(&format!("values ({version}, ")), "{version}");
    }
    assert!(script.contains("delimiter "));
}
