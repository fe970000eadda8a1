//! The plan of the rooms: what may name what, and which files decide without I/O. It is drawn here,
//! in `ARCHITECTURE.md` and in `src/lib.rs`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::{PACKAGES, read, sources_below};

/// Rows from top to bottom. A row has one floor, or several from the highest to the lowest; a room
/// may name only rooms of lower floors, or itself. So no rooms can form a circle. What is a
/// package of its own, cargo sees to.
const ROWS: [&[&[&str]]; 10] = [
    &[&["crates/cli", "crates/testkit"]],
    &[&["app"]],
    &[&["http", "grpc", "client"]],
    &[&["operation"]],
    &[&["outbox", "inbox", "email"]],
    &[ADAPTERS, &["store/sql"], &["store/bounded", "store/headers"]],
    &[&["store", "broker"]],
    &[
        &["operator"],
        &["store/schema", "store/statements"],
        &["store/base"],
        &["outbox/enqueue", "operation/port"],
        &["outbox/hint"],
        &["outbox/port", "email/port"],
        &["inbox/port"],
    ],
    &[&["outbox/rules", "operation/rules"], &["inbox/rules"]],
    &[&["observe", "flock", "time", "text", "message"], &["task", "error"]],
];

/// What talks to one database or one broker. Only `app` names them, and they do not name each
/// other.
const ADAPTERS: &[&str] = &[
    "store/postgres",
    "store/mysql",
    "store/sqlite",
    "store/redis",
    "broker/kafka",
    "broker/rabbitmq",
    "broker/embedded",
];

/// The first words of a file that decides without I/O.
const PURE: &str = "//! Pure: no I/O, no clock.";
/// So many files said so when this was written.
const PURE_MIN: usize = 53;

fn floors() -> Vec<&'static [&'static str]> {
    ROWS.iter().flat_map(|row| row.iter().copied()).collect()
}

/// The room of a path in the library: the longest that its first parts name.
fn room_of(module: &[String]) -> Option<&'static str> {
    let rooms = floors().into_iter().flatten().copied();
    let found = rooms.filter(|room| {
        let parts: Vec<&str> = room.split('/').collect();
        module.len() >= parts.len() && parts.iter().zip(module).all(|(part, name)| part == name)
    });
    found.max_by_key(|room| room.len())
}

/// The room of a file.
pub(crate) fn room(path: &Path) -> Option<&'static str> {
    PACKAGES.into_iter().find(|package| path.starts_with(package)).or_else(|| room_of(&module_of(path)?))
}

/// The folder of the sources of a package, up to and with `src`.
fn root_of(path: &Path) -> Option<&Path> {
    path.ancestors().find(|folder| folder.ends_with("src"))
}

/// The path of the module that this file is in its package.
pub(crate) fn module_of(path: &Path) -> Option<Vec<String>> {
    let inside = path.strip_prefix(root_of(path)?).ok()?.with_extension("");
    let parts = inside.components().map(|part| part.as_os_str().to_str().unwrap().to_owned());
    Some(parts.filter(|part| part != "lib" && part != "mod").collect())
}

/// The paths of one `use`, without its groups.
fn spread(tree: &str) -> Vec<String> {
    let Some((head, rest)) = tree.split_once('{') else { return vec![tree.trim().to_owned()] };
    let (mut depth, mut part, mut found) = (0, String::new(), Vec::new());
    for c in rest.trim_end().trim_end_matches('}').chars().chain([',']) {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if c == ',' && depth == 0 {
            found.extend(spread(part.trim()).iter().map(|path| format!("{}{path}", head.trim_start())));
            part.clear();
        } else {
            part.push(c);
        }
    }
    found.retain(|path| !path.ends_with("::"));
    found
}

/// What a file names of its own package, each with its line: `use` with its groups, and paths in
/// code. Documentation may point anywhere.
pub(crate) fn named(path: &Path, text: &str) -> Vec<(usize, Vec<String>)> {
    let (root, own) = (root_of(path).unwrap(), module_of(path).unwrap());
    let (mut module, mut group, mut found) = (own.clone(), None::<(usize, String)>, Vec::new());
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//")) {
        // Modules within a file stand at its margin, as `rustfmt` leaves them.
        match line.strip_suffix(" {").and_then(|head| head.split_once("mod ")) {
            Some((_, name)) if !line.starts_with(' ') => module.push(name.to_owned()),
            _ if line == "}" => module.clone_from(&own),
            _ => {}
        }
        let before = line.trim_start().split_once("use ").map(|(before, _)| before);
        if before.is_some_and(|before| before.is_empty() || before == "pub " || before.starts_with("pub(")) {
            group = Some((number + 1, String::new()));
        }
        let mut paths = Vec::new();
        if let Some((start, tree)) = &mut group {
            tree.push_str(line);
            if let Some((_, whole)) = tree.trim_end().strip_suffix(';').and_then(|tree| tree.split_once("use ")) {
                paths.extend(spread(whole).into_iter().map(|path| (*start, path)));
                group = None;
            }
        } else {
            let words = line.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
            let words = words.filter(|word| word.starts_with("crate::") || word.starts_with("super::"));
            paths.extend(words.map(|word| (number + 1, word.to_owned())));
        }
        found.extend(paths.into_iter().filter_map(|(line, path)| Some((line, resolved(root, &module, &path)?))));
    }
    found
}

/// The path from the root of the package, where it begins there, at a parent or at a child.
fn resolved(root: &Path, module: &[String], path: &str) -> Option<Vec<String>> {
    let mut from = module.to_vec();
    let mut parts = path.split("::").peekable();
    let first = *parts.peek()?;
    let folder = root.join(module.iter().collect::<PathBuf>());
    let is_child = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder).join(format!("{first}.rs")).is_file();
    match first {
        "crate" => from.clear(),
        "self" | "super" => {}
        _ if is_child => {}
        _ => return None,
    }
    for part in parts {
        match part {
            "crate" | "self" | "" | "*" => {}
            "super" => drop(from.pop()),
            part => from.push(part.split(' ').next().unwrap().to_owned()),
        }
    }
    Some(from)
}

/// Shown to fail: with `use crate::store::sqlite::SqliteStore` in `src/outbox/relay.rs`; with
/// `super::super::relay::Relay` in `src/outbox/rules/isolate.rs`; with a group of imports in
/// `src/operator.rs` that names `store::sql`.
#[test]
fn rooms_import_only_downwards() {
    let floors = floors();
    let floor = |room: &str| floors.iter().position(|floor| floor.contains(&room)).unwrap();
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for (path, text) in sources_below("src") {
        if path == Path::new("src/lib.rs") {
            continue;
        }
        let from = room(&path).unwrap_or_else(|| panic!("{} is in no room of the plan", path.display()));
        // Tests inside a file may take an adapter to run on.
        let tests_from =
            text.lines().position(|line| line.starts_with("#[cfg(test)]") || line.starts_with("#[cfg(all(test,"));
        let tests_from = tests_from.unwrap_or(usize::MAX);
        for (line, name) in named(&path, &text) {
            let Some(to) = room_of(&name).filter(|to| *to != from) else { continue };
            seen += 1;
            let is_adapter = ADAPTERS.contains(&to) && from != "app" && line <= tests_from;
            if floor(to) <= floor(from) || is_adapter {
                wrong.push(format!("{}:{line}: `{from}` names `{to}`", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 1_000, "only {seen} names of other rooms were found");
}

/// Shown to fail: with two rooms exchanged in one of the tables.
#[test]
fn the_plan_is_the_same_on_the_page_in_the_library_and_here() {
    let table = |text: &str| -> Vec<String> {
        let lines = text.lines().map(|line| line.trim_start_matches("//!").trim());
        let lines = lines.skip_while(|line| *line != "| rooms | for |").skip(2);
        lines.take_while(|line| line.starts_with('|')).map(str::to_owned).collect()
    };
    let page = table(&read("ARCHITECTURE.md"));
    assert_eq!(page, table(&read("src/lib.rs")));
    let rooms = |row: &String| -> Vec<Vec<String>> {
        let (names, _) = row.trim_start_matches("| ").split_once(" | ").unwrap();
        let floors = names.split(" → ");
        floors.map(|floor| floor.split(", ").map(|name| name.trim_matches('`').to_owned()).collect()).collect()
    };
    assert_eq!(page.iter().map(rooms).collect::<Vec<_>>(), ROWS);
}

/// Shown to fail: with `Instant::now()` in a file that says it is pure; with a first line that does
/// not say so in `src/inbox/rules`; with a pure file that names `crate::time::pace`.
#[test]
fn what_says_that_it_is_pure_does_no_input_or_output_and_every_rule_says_so() {
    let forbidden = [
        "tokio::",
        "std::fs",
        "std::net",
        "std::env",
        "std::thread",
        "SystemTime::now",
        "Instant::now",
        "Utc::now",
        "fastrand::bool",
        "fastrand::f",
        "fastrand::i",
        "fastrand::u",
        "async fn",
        ".await",
        "sqlx::",
    ];
    let sources = sources_below("src");
    let is_pure = |text: &str| text.starts_with(PURE);
    let pure: BTreeSet<Vec<String>> =
        sources.iter().filter(|(_, text)| is_pure(text)).filter_map(|(path, _)| module_of(path)).collect();
    let mut wrong = Vec::new();
    for (path, text) in &sources {
        let in_room = room(path).unwrap_or_default();
        if in_room.ends_with("/rules") && !is_pure(text) {
            wrong.push(format!("{} does not begin with `{PURE}`", path.display()));
        }
        if !is_pure(text) && in_room != "message" {
            continue;
        }
        // What travels is not a rule: it has its own words for time and text.
        let forbidden = if is_pure(text) { &forbidden[..] } else { &forbidden[..8] };
        for word in forbidden {
            if text.lines().any(|line| !line.trim_start().starts_with("//") && line.contains(word)) {
                wrong.push(format!("{}: {word}", path.display()));
            }
        }
        for (line, name) in named(path, text).into_iter().filter(|_| is_pure(text)) {
            let is_below = matches!(room_of(&name), None | Some("message" | "error"));
            if !is_below && !(0..=name.len()).any(|parts| pure.contains(&name[..parts])) {
                wrong.push(format!("{}:{line}: {} is not pure", path.display(), name.join("::")));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(pure.len() >= PURE_MIN, "only {} files say that they are pure", pure.len());
}
