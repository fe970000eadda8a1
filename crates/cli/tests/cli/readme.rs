//! Every command of the README is run as it stands there, or, where it cannot be run inside a test
//! run, the closest true thing is shown. A command that is not known here fails the test.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::broker::Own;
use crate::database::Database;
use crate::help::{commands, help};
use crate::kit::{CONSUMER, ONCEBOX, PUBLISHER, Place, Program, Running, SOON, eventually};
use crate::support::{service, unique};

/// The folder of the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}

pub(crate) fn read(file: &str) -> String {
    std::fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// The text of every block in this language.
pub(crate) fn blocks(text: &str, language: &str) -> Vec<String> {
    let begins = format!("```{language}\n");
    text.split(&begins).skip(1).map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

/// The commands of the README's shell blocks, without comments, in order.
fn shell_commands() -> Vec<String> {
    let readme = read("README.md");
    let commands: Vec<String> = blocks(&readme, "sh")
        .iter()
        .flat_map(|block| block.lines())
        .map(|line| line.split(" #").next().unwrap().trim().to_owned())
        .filter(|line| !line.is_empty())
        .collect();
    assert!(commands.len() > 10, "the README has shell blocks: {commands:?}");
    commands
}

/// What a command of the README is to this test.
#[derive(Debug, PartialEq, Eq)]
enum Shown {
    /// Settings for those that follow.
    Export(Vec<(String, String)>),
    /// A program of ours with its arguments; `true` where it is left running.
    Run(&'static str, Vec<String>, bool),
    /// Cannot be run inside a test run; another test shows that it means something.
    Elsewhere,
}

fn shown(command: &str) -> Shown {
    let (command, in_background) = match command.strip_suffix(" &") {
        Some(command) => (command, true),
        None => (command, false),
    };
    let words: Vec<String> = command.split_whitespace().map(|word| word.trim_matches('\'').to_owned()).collect();
    let rest = |from: usize| words[from..].to_vec();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["export", ..] => Shown::Export(
            rest(1)
                .iter()
                .map(|pair| pair.split_once('=').unwrap())
                .map(|(name, value)| (name.to_owned(), value.trim_matches('\'').to_owned()))
                .collect(),
        ),
        ["cargo", "run", "--release", "--", ..] => Shown::Run(ONCEBOX, rest(4), in_background),
        ["target/release/oncebox", ..] => Shown::Run(ONCEBOX, rest(1), in_background),
        ["target/release/publisher", ..] => Shown::Run(PUBLISHER, rest(1), in_background),
        ["target/release/consumer", ..] => Shown::Run(CONSUMER, rest(1), in_background),
        ["cargo", "build", "--release"] | ["./scripts/test"] | ["docker", "compose", "up", "--detach", "--wait"] => {
            Shown::Elsewhere
        }
        _ => panic!("a command nobody runs: {command}"),
    }
}

#[test]
fn the_one_command_of_the_readme_shows_every_effect_exactly_once() {
    let demo = shell_commands().into_iter().find(|command| command.starts_with("cargo run")).unwrap();
    let Shown::Run(program, arguments, false) = shown(&demo) else { panic!("{demo}") };
    let place = Place::new();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // Nothing but what the README says: no settings, an empty directory, and files where the system
    // puts them.
    let temporary = place.path().display().to_string();
    let demo = Program::new(program, &arguments).within(place.path()).env("TMPDIR", &temporary).start();
    // It gives up by itself where nothing moves; how fast a busy machine is, is not asked here.
    let said = demo.ends_within(SOON * 5).ok();
    for line in ["payments taken", "ledger entries", "e-mail rows", "lost", "doubled", "out of order"] {
        assert!(said.contains(line), "{line} in {said}");
    }
    assert_eq!(said.lines().last(), Some("every effect exactly once"));
    // The rows of the README's table are those that are printed.
    let promised = blocks(&read("README.md"), "text").remove(0);
    let names = |table: &str| -> Vec<String> {
        let rows = table.lines().skip_while(|line| !line.contains('═')).skip(1);
        rows.filter_map(|row| row.trim().split("  ").next().map(str::to_owned))
            .take_while(|name| !name.contains("deliveries"))
            .filter(|name| !name.contains('─'))
            .collect()
    };
    assert_eq!(names(&promised), names(&said));
}

/// The block "Run it", in order, against the test servers: hosts, ports and names of the test's
/// own, all else as it stands.
///
/// Shown by adding a command to the README: it is a command nobody runs.
#[test]
fn the_commands_of_the_readme_run_in_their_order() {
    let test = "the_commands_of_the_readme_run_in_their_order";
    let known: Vec<(String, Shown)> =
        shell_commands().into_iter().map(|command| (command.clone(), shown(&command))).collect();
    let (Some(postgres), Some(kafka)) = (service(test, "ONCEBOX_TEST_POSTGRES"), service(test, "ONCEBOX_TEST_KAFKA"))
    else {
        return;
    };
    // The compose file makes the ledger's table when it makes the database.
    let database = Database::on(&postgres);
    let place = Place::on(Some(&database.url), Some(&kafka));
    place.sql(&read("deploy/compose/ledger.sql"));
    let name = unique("readme");
    let _own = Own::new(&kafka, &name);
    let own = |text: &str| {
        text.replace("[\"payments\"]", &format!("[\"{name}\"]")).replace("\"ledger\"", &format!("\"{name}\""))
    };
    std::fs::create_dir_all(place.path().join("deploy/compose")).unwrap();
    let config = own(&read("deploy/compose/consumer.toml"));
    assert!(config.contains(&name) && !config.contains("payments\""), "{config}");
    place.file("deploy/compose/consumer.toml", &config);

    let mut environment: Vec<(String, String)> = Vec::new();
    let (mut running, mut ran): (Vec<Running>, usize) = (Vec::new(), 0);
    for (command, shown) in known.into_iter().skip_while(|(command, _)| !command.starts_with("docker compose up")) {
        match shown {
            Shown::Elsewhere => {}
            Shown::Export(pairs) => environment.extend(pairs.into_iter().map(|(name, value)| {
                let value = match name.as_str() {
                    "ONCEBOX_DATABASE__URL" => {
                        moved(&value, "postgres://postgres:secret@127.0.0.1/oncebox", &database.url)
                    }
                    "ONCEBOX_BROKER__URL" => moved(&value, "kafka://127.0.0.1:9092", &kafka),
                    _ => value,
                };
                (name, value)
            })),
            Shown::Run(program, arguments, in_background) => {
                let arguments: Vec<String> =
                    arguments.iter().map(|argument| argument.replace("127.0.0.1:9090", "127.0.0.1:0")).collect();
                let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
                let program = Program::new(program, &arguments).within(place.path());
                let program = environment.iter().fold(program, |program, (name, value)| program.env(name, value));
                ran += 1;
                if in_background {
                    running.push(program.start());
                } else {
                    assert!(!program.run().ok().is_empty(), "{command} prints something");
                }
            }
        }
    }
    assert_eq!((running.len(), ran), (2, 8), "publisher and consumer run beside six commands");
    running[0].until_ready_says(200, &["relay 0: ready"]);
    assert!(running[0].get("/metrics").1.contains("oncebox_published_total"));

    // "From any other language on PostgreSQL", and the payment of the compose file, which has all
    // that the ledger needs.
    let door = blocks(&read("README.md"), "sql").remove(0).replace("'payments'", &format!("'{name}'"));
    place.sql(&door);
    let compose = read("docker-compose.yml");
    let example = compose.split("-c \"").find(|text| text.starts_with("select oncebox.enqueue")).unwrap();
    let example = example.split("::text)\"").next().unwrap().replace("\n#", "").replace("\\\"", "\"");
    place.sql(&format!("{})", example.replace("'payments'", &format!("'{name}'")) + "::text"));
    eventually("both payments are in the ledger", || {
        (place.column("select source_payment_id from ledger_entry order by 1") == ["pay_1", "pay_789"]).then_some(())
    });
    for program in running {
        program.stop().ok();
    }
}

/// The README's address, on another host, port and database.
fn moved(value: &str, expected: &str, to: &str) -> String {
    assert_eq!(value, expected, "the README's address is known here");
    to.to_owned()
}

#[test]
fn what_cannot_be_run_inside_a_test_run_is_there() {
    // `./scripts/test`: it explains itself, with the flag that the README names.
    let help = Command::new(root().join("scripts/test")).arg("--help").output().unwrap();
    let text = String::from_utf8(help.stdout).unwrap();
    assert!(help.status.success() && text.contains("--strict") && text.contains("scripts/test"), "{text}");
    // `cargo build --release`: the programs that are run from `target/release` are what cargo
    // builds.
    let manifest: toml::Table = read("crates/cli/Cargo.toml").parse().unwrap();
    let binaries: BTreeSet<&str> =
        manifest["bin"].as_array().unwrap().iter().map(|bin| bin["name"].as_str().unwrap()).collect();
    for command in shell_commands() {
        if let Some(path) = command.strip_prefix("target/release/") {
            assert!(binaries.contains(path.split(' ').next().unwrap()), "{command}");
        }
    }
    assert_eq!(manifest["package"]["default-run"].as_str(), Some("oncebox"), "`cargo run -- demo`");
    let workspace: toml::Table = read("Cargo.toml").parse().unwrap();
    let members = workspace["workspace"]["default-members"].as_array().unwrap();
    assert!(members.iter().any(|member| member.as_str() == Some("crates/cli")), "`cargo run` in the root");
    // `docker compose up`, and the profile: the services are there, with the names and ports that
    // the README uses.
    let compose = read("docker-compose.yml");
    let services = compose.split("\nservices:\n").nth(1).unwrap().split("\nvolumes:\n").next().unwrap();
    for service in ["postgres", "mariadb", "rabbitmq", "kafka", "migrate", "publisher", "consumer"] {
        assert!(
            services.contains(&format!("\n  {service}:\n")) || services.starts_with(&format!("  {service}:\n")),
            "{service}"
        );
    }
    for text in
        ["profiles: [oncebox]", ":-5432}:5432", ":-9092}:9092", "POSTGRES_PASSWORD: secret", "POSTGRES_DB: oncebox"]
    {
        assert!(compose.contains(text), "{text}");
    }
    assert!(read("README.md").contains("`docker compose --profile oncebox up --detach --build`"));
    // Variables that move ports are not settings: a program started in the same shell refuses what
    // it does not know.
    for name in compose.split("${").skip(1).map(|rest| rest.split(":-").next().unwrap()) {
        assert!(!name.starts_with("ONCEBOX_"), "{name} would be an unknown setting");
    }
}

/// Shown by a link to a folder with another name.
#[test]
fn every_link_of_the_documents_leads_to_a_file() {
    let alone = ["README.md", "ARCHITECTURE.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md"];
    let mut documents: Vec<PathBuf> = alone.map(|name| root().join(name)).to_vec();
    documents.extend(files_below("docs", "md"));
    let mut links = 0;
    for document in &documents {
        let text = std::fs::read_to_string(document).unwrap();
        for target in text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap()) {
            if target.starts_with("http") || target.starts_with('#') {
                continue;
            }
            let file = document.parent().unwrap().join(target.split('#').next().unwrap());
            assert!(file.exists(), "{}: `{target}` leads nowhere", document.display());
            links += 1;
        }
    }
    assert!(links > 3);
    // Folders that are named in the text without a link.
    let readme = read("README.md");
    for path in
        readme.split('`').skip(1).step_by(2).filter(|word| word.starts_with("docs/") || word.starts_with("deploy/"))
    {
        assert!(root().join(path).exists(), "{path}");
    }
}

/// The files below a folder whose names end so.
pub(crate) fn files_below(folder: &str, extension: &str) -> Vec<PathBuf> {
    let (mut open, mut found) = (vec![root().join(folder)], Vec::new());
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { open.push(path) } else { found.push(path) }
        }
    }
    found.retain(|path| path.extension().is_some_and(|found| found == extension));
    found
}

/// Shown by: a guide that named a page which was never written.
#[test]
fn every_file_that_a_guide_names_is_there() {
    let mut named = 0;
    for document in files_below("docs", "md") {
        let text = std::fs::read_to_string(&document).unwrap();
        let is_part = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
        for word in text.split(|c| !is_part(c)).map(|word| word.trim_end_matches('.')) {
            let folders = ["docs/", "tests/", "examples/", "scripts/", "src/", "crates/", "migrations/", "deploy/"];
            if folders.iter().any(|folder| word.starts_with(folder)) {
                assert!(root().join(word).exists(), "{}: {word} is not there", document.display());
                named += 1;
            }
        }
    }
    assert!(named > 10, "{named}");
}

/// Shown by: a flag of another command; a command that has another name.
#[test]
fn every_command_that_a_guide_names_is_one_with_these_flags() {
    let known = commands();
    let mut named = 0;
    for document in files_below("docs", "md") {
        let text = std::fs::read_to_string(&document).unwrap();
        let codes = text.split('`').skip(1).step_by(2).filter_map(|code| code.strip_prefix("oncebox "));
        for code in codes {
            // `bench relay|append`: each of them.
            let first = code.split(" -").next().unwrap();
            let words: Vec<&str> = first
                .split(' ')
                .filter(|word| word.chars().all(|c| c.is_ascii_lowercase() || "-|".contains(c)))
                .collect();
            let (last, group) = words.split_last().unwrap();
            for name in last.split('|') {
                let path: Vec<String> = group.iter().copied().chain([name]).map(str::to_owned).collect();
                assert!(known.contains(&path), "{}: `oncebox {code}` is no command", document.display());
                let has = flags(&help(ONCEBOX, &path));
                let lacks: Vec<_> = flags(code).into_iter().filter(|flag| !has.contains(flag)).collect();
                assert!(lacks.is_empty(), "{}: `oncebox {code}` has no {lacks:?}", document.display());
                named += 1;
            }
        }
    }
    assert!(named > 8, "{named}");
}

/// Shown by: an error that said "use `[broker.kafka] linger`", which was never a setting.
#[test]
fn every_setting_that_a_page_or_a_message_names_is_one() {
    let template = Command::new(ONCEBOX).args(["config", "template"]).output().unwrap();
    let (mut section, mut known) = (String::new(), BTreeSet::new());
    for line in String::from_utf8(template.stdout).unwrap().lines() {
        let line = line.trim_start_matches("# ");
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            name.0.clone_into(&mut section);
        } else if let Some((name, _)) = line.split_once(" = ") {
            known.insert(format!("[{section}] {name}"));
        }
    }
    let mut files = files_below("docs", "md");
    files.extend(files_below("src", "rs"));
    let mut named = 0;
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for (_, rest) in text.match_indices("`[").map(|(at, _)| text.split_at(at + 1)) {
            let Some((setting, _)) = rest.split_once('`') else { continue };
            let Some((section, name)) = setting.split_once("] ") else { continue };
            let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
            if section.contains("consumer") || !name.chars().all(is_name) {
                continue;
            }
            assert!(known.contains(setting), "{}: {setting} is no setting", file.display());
            named += 1;
        }
    }
    assert!(named > 10, "{named}");
}

/// Words that begin with two dashes.
fn flags(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_lowercase() || c == '-';
    text.split(|c| !is_part(c)).filter(|word| word.starts_with("--") && word.len() > 3).map(str::to_owned).collect()
}

#[test]
fn every_flag_that_the_readme_names_is_one_of_the_programs_or_of_a_tool_that_it_names() {
    let readme = read("README.md");
    let mut known: BTreeSet<String> = commands().iter().flat_map(|path| flags(&help(ONCEBOX, path))).collect();
    known.extend(flags(&help(PUBLISHER, &[])));
    known.extend(flags(&help(CONSUMER, &[])));
    let of_tools = ["--release", "--detach", "--wait", "--build", "--profile", "--strict"].map(str::to_owned);
    let unknown: Vec<String> =
        flags(&readme).into_iter().filter(|flag| !known.contains(flag) && !of_tools.contains(flag)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    // Commands that stand in the text.
    let known: BTreeSet<String> = commands().into_iter().map(|path| path.join(" ")).collect();
    let named = readme.split('`').skip(1).step_by(2).filter_map(|code| code.strip_prefix("oncebox "));
    for command in named {
        let words: Vec<&str> = command.split(' ').take_while(|word| !word.starts_with('-')).collect();
        assert!(known.contains(&words.join(" ")), "`oncebox {command}` is no command");
    }
}
