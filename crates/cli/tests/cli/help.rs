//! Help, versions and completions of every program and command, found by reading the help itself.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::kit::{CONSUMER, ONCEBOX, PUBLISHER, Program};

/// Wider than this, help is wrapped by the terminal in the middle of words.
const WIDTH: usize = 120;

/// Every command of `oncebox`, as its arguments, the program itself first.
pub(crate) fn commands() -> Vec<Vec<String>> {
    let (mut open, mut found) = (vec![Vec::new()], Vec::new());
    while let Some(path) = open.pop() {
        let help = help(ONCEBOX, &path);
        let listed = help.split("\nCommands:\n").nth(1).and_then(|rest| rest.split("\n\n").next()).unwrap_or_default();
        let names = listed.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
        for name in names.filter(|name| !name.is_empty() && *name != "help") {
            let mut inner: Vec<String> = path.clone();
            inner.push(name.to_owned());
            open.push(inner);
        }
        found.push(path);
    }
    found
}

/// The help of a command.
pub(crate) fn help(program: &str, path: &[String]) -> String {
    let arguments: Vec<&str> = path.iter().map(String::as_str).chain(["--help"]).collect();
    let done = Program::new(program, &arguments).run();
    assert_eq!(done.stderr, "", "help is data");
    done.ok()
}

#[test]
fn every_program_and_command_explains_itself() {
    let commands = commands();
    let names: Vec<String> = commands.iter().map(|path| path.join(" ")).collect();
    let known = "demo, bench relay, bench append, bench consume, bench latency, bench fault, bench http, bench growth, \
        migrate up, migrate status, migrate print, status, doctor, \
        dead list, dead show, dead redrive, dead bury, dead discard, consumers list, consumers forget, audit list, \
        keys list, keys show, keys release, keys purge, keys resolve, \
        operations list, operations show, operations retry, operations resolve, operations judge, \
        queues repartition, config template, config show, completions, sender";
    for name in known.split(", ") {
        assert!(names.iter().any(|known| known == name), "{name} is not in {names:?}");
    }
    let of_oncebox = commands.iter().map(|path| (ONCEBOX, path.clone()));
    for (program, path) in of_oncebox.chain([(PUBLISHER, Vec::new()), (CONSUMER, Vec::new())]) {
        let text = help(program, &path);
        let about = text.lines().next().unwrap();
        assert!(about.len() > 20 && !about.contains("Usage"), "{path:?} does not say what it is for: {text}");
        assert!(text.contains("Usage: ") && text.contains("--help"), "{text}");
        for flag in ["--config <FILE>", "--database <URL>", "--broker <URL>", "--log-format <FORMAT>"] {
            assert!(text.contains(flag), "{path:?} has no {flag}");
        }
        if program == ONCEBOX {
            assert!(text.contains("--output <OUTPUT>"), "{path:?}");
        }
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{path:?}: {line}");
        }
        let undocumented = text.lines().filter(|line| line.trim_start().starts_with("--") || line.starts_with("  -"));
        for line in undocumented {
            // What it is for stands behind it or on the next line, which is indented further than
            // the next flag.
            let flag = line.trim().split([' ', ',']).next().unwrap();
            let (_, after) = text.split_once(line).unwrap();
            let mut words = line.split_once("  ").map_or("", |(_, rest)| rest).split_whitespace();
            let next = after.lines().nth(1).unwrap_or_default();
            assert!(
                words.any(|word| !word.starts_with(['-', '<', '['])) || next.starts_with("          "),
                "{path:?} {flag}"
            );
        }
    }
}

#[test]
fn every_program_and_command_knows_its_version() {
    let version = env!("CARGO_PKG_VERSION");
    for (program, name) in [(PUBLISHER, "publisher"), (CONSUMER, "consumer"), (ONCEBOX, "oncebox")] {
        assert_eq!(Program::new(program, &["--version"]).run().ok(), format!("{name} {version}\n"));
    }
    for path in commands().into_iter().filter(|path| !path.is_empty()) {
        let arguments: Vec<&str> = path.iter().map(String::as_str).chain(["--version"]).collect();
        let shown = Program::new(ONCEBOX, &arguments).run().ok();
        assert_eq!(shown, format!("oncebox-{} {version}\n", path.join("-")));
    }
}

#[test]
fn completions_know_every_command_and_bash_reads_its_own() {
    let commands = commands();
    for shell in ["bash", "zsh", "fish"] {
        let script = Program::new(ONCEBOX, &["completions", shell]).run().ok();
        for name in commands.iter().flatten() {
            assert!(script.contains(name.as_str()), "{shell} does not know {name}");
        }
        assert!(script.contains("--until-empty") || script.contains("until-empty"), "{shell}");
        judge(shell, &script);
        for (of, program, flag) in [(PUBLISHER, "publisher", "until-empty"), (CONSUMER, "consumer", "until-idle")] {
            let script = Program::new(ONCEBOX, &["completions", shell, program]).run().ok();
            assert!(script.contains(program) && script.contains(flag) && !script.contains("redrive"), "{shell}");
            // The script is made beside the program, so each flag of the program is looked for.
            let text = help(of, &[]);
            for flag in text.split_whitespace().filter_map(|word| word.strip_prefix("--")) {
                let flag = flag.trim_end_matches(|letter: char| !letter.is_ascii_alphanumeric());
                assert!(script.contains(flag), "{shell} does not know --{flag} of {program}");
            }
            judge(shell, &script);
        }
    }
}

/// Each shell judges its own script. Only bash must be there.
fn judge(shell: &str, script: &str) {
    let Ok(mut reader) = Command::new(shell).arg("-n").stdin(Stdio::piped()).stderr(Stdio::piped()).spawn() else {
        assert_ne!(shell, "bash", "it cannot be started");
        return;
    };
    reader.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    let judged = reader.wait_with_output().unwrap();
    assert!(judged.status.success() && judged.stderr.is_empty(), "{shell}: {judged:?}");
}
