//! The house rules, read from the sources: rooms import only downwards, files stay small and say
//! what they are for.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

#[path = "tidy/circles.rs"]
mod circles;
#[path = "tidy/plan.rs"]
mod plan;
#[path = "tidy/schemas.rs"]
mod schemas;
#[path = "tidy/unused.rs"]
mod unused;

const LINES_MAX: usize = 650;

fn files_below(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files_below(&path, found) } else { found.push(path) }
    }
}

/// The packages beside the library.
const PACKAGES: [&str; 2] = ["crates/cli", "crates/testkit"];

fn all_sources() -> Vec<(PathBuf, String)> {
    of_all_packages("src")
}

/// The sources in this folder of the library and of each package beside it.
fn of_all_packages(folder: &str) -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let others = PACKAGES.iter().map(|package| format!("{package}/{folder}"));
    let folders = std::iter::once(folder.to_owned()).chain(others);
    folders.filter(|folder| root.join(folder).is_dir()).flat_map(|folder| sources_below(&folder)).collect()
}

fn sources_below(directory: &str) -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    files_below(&root.join(directory), &mut found);
    found
        .into_iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .map(|path| {
            let text = std::fs::read_to_string(&path).unwrap();
            (path.strip_prefix(root).unwrap().to_owned(), text)
        })
        .collect()
}

#[test]
fn only_app_and_cli_read_the_environment() {
    for (path, text) in all_sources() {
        if matches!(plan::room(&path), Some("app" | "crates/cli")) {
            continue;
        }
        // Tests inside a file may: they start themselves anew with it.
        let code = text.split("#[cfg(test)]").next().unwrap();
        assert!(
            !code.contains("env::var(") && !code.contains("env::var_os("),
            "{} reads the environment",
            path.display()
        );
    }
}

#[test]
fn every_file_says_what_it_is_for_and_stays_small() {
    let mut lines = Vec::new();
    for (path, text) in all_sources().into_iter().chain(sources_below("examples")) {
        assert!(text.starts_with("//!"), "{} does not say what it is for", path.display());
        let count = text.lines().count();
        assert!(count <= LINES_MAX, "{} has {count} lines, at most {LINES_MAX}", path.display());
        lines.push(count);
    }
    lines.sort_unstable();
    let median = lines[lines.len() / 2];
    assert!(median <= 200, "the median file has {median} lines");
}

#[test]
fn there_is_no_room_for_everything() {
    for (path, _) in all_sources() {
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(!["utils", "util", "common_utils", "helpers", "misc", "types"].contains(&name), "{}", path.display());
    }
}

/// Names of tests in a text: in backticks, of the form `something_long_with_underscores`.
fn named_tests(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2).filter(|name| {
        name.matches('_').count() >= 3
            && name.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_')
    })
}

/// Shown by naming a test that is not there.
#[test]
fn every_item_of_the_mission_says_where_it_is_shown_and_the_test_is_there() {
    let code: String = all_sources()
        .into_iter()
        .chain(of_all_packages("tests"))
        .chain(sources_below("examples"))
        .map(|(_, text)| text)
        .collect();
    let mission = read("docs/reference/mission.md");
    for item in 1..=122 {
        let rows = mission.lines().filter(|line| line.starts_with(&format!("| M{item} |"))).count();
        assert_eq!(rows, 1, "docs/reference/mission.md has {rows} rows for M{item}");
    }
    let patterns = read("docs/concepts/anti-patterns.md");
    for pitfall in 1..=40 {
        let rows = patterns.lines().filter(|line| line.starts_with(&format!("| {pitfall} |"))).count();
        assert_eq!(rows, 1, "docs/concepts/anti-patterns.md has {rows} rows for pitfall {pitfall}");
    }
    let missing: Vec<&str> = named_tests(&mission)
        .chain(named_tests(&patterns))
        // A macro of the suites makes the function; its name stands there as a word.
        .filter(|name| {
            !code.contains(&format!("fn {name}"))
                && !code.contains(&format!("{name},"))
                && !code.contains(&format!("\"{name}"))
        })
        .collect();
    assert!(missing.is_empty(), "no such test: {}", missing.join(", "));
}

fn read(file: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap()
}

/// What follows these words in the lines of one block of a source, from its first line to the brace
/// that closes it.
fn names_in(file: &str, block: &str, before: &[&str]) -> Vec<String> {
    let text = read(file);
    let (_, rest) = text.split_once(block).unwrap_or_else(|| panic!("{file} has no `{block}`"));
    let lines = rest.split("\n}\n").next().unwrap().lines().map(str::trim_start);
    let names = lines.filter_map(|line| before.iter().find_map(|before| line.strip_prefix(before)));
    let names = names.map(|rest| rest.chars().take_while(|c| c.is_ascii_alphanumeric() || "_-".contains(*c)).collect());
    let names: Vec<String> = names.filter(|name: &String| !name.is_empty()).collect();
    assert!(!names.is_empty(), "{file}: `{block}` has no {before:?}");
    names
}

/// Shown by: a setter or a field with another name; taking `open_per_tenant_max`, `BadRequest` and
/// `otel` off the page.
#[test]
fn m4_every_setting_of_a_route_and_of_an_engine_stands_on_its_page() {
    let page = read("docs/reference/settings.md");
    // What stands in backticks outside of the blocks of code, in words.
    let prose: String = page.split("```").step_by(2).collect();
    let named: std::collections::BTreeSet<&str> = prose
        .split('`')
        .skip(1)
        .step_by(2)
        .flat_map(|code| code.split(|c: char| !(c.is_ascii_alphanumeric() || "_-".contains(c))))
        .collect();
    let route = "src/operation/rules/route.rs";
    let mut settings = names_in(route, "pub struct Route {", &["pub "]);
    for kind in ["Requirement", "WhileRunning", "AfterExpiry", "Replay", "Effects", "MismatchStatus"] {
        let variants = names_in(route, &format!("pub enum {kind} {{"), &[""]);
        settings.extend(variants.into_iter().filter(|name| name.starts_with(|c: char| c.is_ascii_uppercase())));
    }
    let endpoint = "src/operation/endpoint.rs";
    settings.extend(names_in(endpoint, "\nimpl Endpoint {", &["pub fn "]));
    settings.extend(names_in("src/operation/engine.rs", "pub struct EngineOptions {", &["pub "]));
    settings.extend(names_in("src/operation/rules/retention.rs", "pub struct Retention {", &["pub "]));
    settings.extend(names_in("src/operation/engine.rs", "pub struct DriveSettings {", &["pub "]));
    let manifest = read("Cargo.toml");
    let features = manifest.split("[features]\n").nth(1).unwrap().split("\n[").next().unwrap();
    let features = features.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()));
    settings.extend(features.filter_map(|line| line.split_once(" = ")).map(|(name, _)| name.to_owned()));
    let missing: Vec<&String> =
        settings.iter().filter(|name| name != &"default" && !named.contains(name.as_str())).collect();
    assert!(settings.len() > 50 && missing.is_empty(), "docs/reference/settings.md does not name {missing:?}");
}

/// Shown by: taking a row away; a row with a page in place of a test.
#[test]
fn m119_every_named_pitfall_has_a_row_with_what_shows_it() {
    let page = read("docs/concepts/anti-patterns.md");
    let (_, rest) = page.split_once("## The others").unwrap();
    let rows: Vec<&str> = rest.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    assert_eq!(rows.len(), 12, "{rows:?}");
    for row in page.lines().filter(|line| line.starts_with("| ")) {
        let shown = row.trim_end_matches('|').rsplit(" | ").next().unwrap().trim();
        let is_head = shown == "shown by";
        assert!(is_head || named_tests(shown).next().is_some(), "no test is named: {row}");
    }
}

/// Shown by: naming the section "Spans" of a page that has none.
#[test]
fn every_section_that_a_page_names_is_there() {
    let mut named = 0;
    for page in ["docs/reference/mission.md", "docs/concepts/anti-patterns.md", "docs/reference/settings.md"] {
        let text = read(page);
        for (before, rest) in text.match_indices(".md, \"").map(|(at, found)| (&text[..at], &text[at + found.len()..]))
        {
            let start = before.rfind(|c: char| c.is_whitespace() || c == '(').map_or(0, |at| at + 1);
            let (file, section) = (format!("{}.md", &before[start..]), rest.split('"').next().unwrap());
            let is_heading =
                |line: &str| line.starts_with('#') && line.trim_start_matches('#').trim().starts_with(section);
            assert!(read(&file).lines().any(is_heading), "{page}: {file} has no section \"{section}\"");
            named += 1;
        }
    }
    assert!(named > 3, "{named}");
}

/// Shown by: citing a rule that has no row; a row that nothing cites.
#[test]
fn every_rule_that_is_cited_has_its_sentence_and_the_other_way_round() {
    let is_rule = |word: &str| {
        let number = word.strip_prefix(['G', 'R', 'O']).unwrap_or_default();
        (1..=2).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_digit())
    };
    let words = |text: &str| -> BTreeSet<String> {
        text.split(|c: char| !c.is_alphanumeric()).filter(|word| is_rule(word)).map(str::to_owned).collect()
    };
    let page = read("docs/reference/rules.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
    let defined: BTreeSet<String> = rows.map(|(rule, _)| rule.to_owned()).filter(|rule| is_rule(rule)).collect();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for directory in ["src", "crates", "tests", "examples", "migrations", "docs", "scripts"] {
        files_below(&root.join(directory), &mut files);
    }
    let mut cited = BTreeSet::new();
    for file in files.iter().filter(|file| !file.ends_with("docs/reference/rules.md")) {
        let Ok(text) = std::fs::read_to_string(file) else { continue };
        let here = words(&text);
        let unknown: Vec<_> = here.difference(&defined).collect();
        assert!(unknown.is_empty(), "{}: no row of docs/reference/rules.md has {unknown:?}", file.display());
        cited.extend(here);
        // Names of tests: `r23_o1_..` stands for R23 and O1.
        let names = text.split("fn ").skip(1).map(|rest| rest.split('(').next().unwrap_or_default());
        cited.extend(names.flat_map(|name| name.split('_')).map(str::to_uppercase).filter(|word| is_rule(word)));
    }
    let unused: Vec<_> = defined.difference(&cited).collect();
    assert!(unused.is_empty(), "nothing cites {unused:?}");
}

/// Such a comment repeats the name below it. Shown to fail: with `/// Its name.` on a field.
#[test]
fn no_doc_comment_is_shorter_than_four_words() {
    let mut short = Vec::new();
    for (path, text) in all_sources() {
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        let comment = |at: usize| lines.get(at).and_then(|line| line.strip_prefix("///"));
        for (at, line) in lines.iter().enumerate() {
            let is_alone = comment(at + 1).is_none() && (at == 0 || comment(at - 1).is_none());
            if is_alone && comment(at).is_some_and(|words| words.split_whitespace().count() < 4) {
                short.push(format!("{}:{}: {line}", path.display(), at + 1));
            }
        }
    }
    assert!(short.is_empty(), "{short:#?}");
}

/// Tables, examples and drawings may be wider. Shown by: a longer line.
#[test]
fn comments_are_no_wider_than_a_hundred_columns() {
    let mut too_wide = Vec::new();
    for (path, text) in ["src", "tests", "examples"].into_iter().flat_map(of_all_packages) {
        let mut is_example = false;
        for (number, line) in text.lines().enumerate() {
            let Some(comment) = line.trim_start().strip_prefix("//") else { continue };
            let comment = comment.trim_start_matches(['/', '!']).trim_start();
            is_example ^= comment.starts_with("```");
            let may_be_wider = is_example || comment.starts_with('|');
            if !may_be_wider && line.chars().count() > 100 {
                too_wide.push(format!("{}:{}", path.display(), number + 1));
            }
        }
    }
    assert!(too_wide.is_empty(), "{too_wide:#?}");
}

/// Shown to fail: with a row for a word that nothing uses; without the row of `held-destination`.
#[test]
fn every_word_of_the_glossary_is_used_and_every_state_of_a_table_stands_in_it() {
    let page = read("docs/reference/glossary.md");
    let cells = page.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | ")).map(|(cell, _)| cell);
    let words = cells.flat_map(|cell| cell.split(" (").next().unwrap().split(", ")).map(|word| word.trim_matches('`'));
    let words: BTreeSet<&str> = words.filter(|word| !["word", "value"].contains(word)).collect();
    let mut files = Vec::new();
    files_below(&Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations"), &mut files);
    let migrations: String = files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
    let code: String = all_sources().into_iter().map(|(_, text)| text).collect();
    // A name in code, a line break in a comment: a word may be written with both.
    let plain = |text: &str| text.to_lowercase().replace(['_', '-', '\n'], " ").replace("//", "");
    let used: String = plain(&format!("{code}{migrations}")).split_whitespace().collect::<Vec<_>>().join(" ");
    let unused: Vec<_> = words.iter().filter(|word| !used.contains(&plain(word))).collect();
    assert!(words.len() > 60 && unused.is_empty(), "nothing uses {unused:?}");
    let states = migrations.split("state in (").skip(1).flat_map(|rest| rest.split(')').next().unwrap().split(", "));
    let states: BTreeSet<&str> = states.map(|state| state.trim_matches('\'')).collect();
    let unknown: Vec<_> = states.difference(&words).collect();
    assert!(states.len() > 15 && unknown.is_empty(), "the glossary does not explain {unknown:?}");
}
