//! The three schemas have the same tables and columns, but for what is listed here with its reason.

use std::collections::{BTreeMap, BTreeSet};

use super::files_below;

/// What not every database has, and why.
const OWN: &[(&str, &str)] = &[
    ("audit.new_id audit.place audit.topic", "PostgreSQL keeps the new id in `detail`, and the place in `number`"),
    ("decision", "PostgreSQL keeps rows of its outbox after they were decided"),
    ("idempotency_request.body_*", "SQLite keeps them with the body"),
    ("idempotency_request.body_end idempotency_request.open_since", "MySQL has no partial indexes"),
    ("inbox inbox_timed inbox_untimed", "PostgreSQL partitions those whose id has a time"),
    ("inbox.batch_token", "tells MySQL which rows an INSERT IGNORE inserted"),
    ("migration", "SQLite and PostgreSQL make theirs before the first migration"),
    ("operation_phase", "SQLite has one writer, so a phase that began cannot be beside another"),
    ("outbox.traceparent outbox.tracestate", "SQLite keeps them among the headers"),
    ("outbox.written_by shard.gaps", "positions of PostgreSQL may become visible out of their order"),
    ("outbox_dead.attempts outbox_dead.cause outbox_dead.history", "SQLite shows the last reason only"),
    ("outbox_dead.edited", "the row in the outbox of PostgreSQL stays as it was"),
    ("outbox_dead.lane_id waiting.dead_hash", "MySQL has no partial indexes"),
    ("outbox_dead.requested_by", "SQLite has it in its audit only"),
    ("outbox_dead.traceparent outbox_dead.tracestate", "SQLite keeps them among the headers"),
    ("setting", "PostgreSQL's doors read what a service may change"),
    ("*.lease_seconds *.lease_ms shard.lease_length", "SQLite counts time in whole milliseconds"),
    ("waiting.error", "SQLite has it in the history"),
    ("waiting.headers waiting.header_names waiting.header_values", "PostgreSQL has arrays, and keeps bytes as bytes"),
    ("waiting.holds waiting.blocks", "MySQL has a lane only where the row holds it"),
];

fn is_own(table: &str, column: &str) -> bool {
    let names = |pattern: &str, name: &str| match pattern.split_once('*') {
        Some((before, behind)) => name.starts_with(before) && name.ends_with(behind),
        None => pattern == name,
    };
    let full = format!("{table}.{column}");
    OWN.iter().flat_map(|(patterns, _)| patterns.split(' ')).any(|pattern| names(pattern, &full) || pattern == table)
}

/// What stands between this opening bracket and its closing one, and what follows each comma in it.
fn parts(text: &str) -> Vec<&str> {
    let (mut depth, mut quoted, mut start, mut parts) = (0, false, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '\'' => quoted = !quoted,
            _ if quoted => {}
            '(' => depth += 1,
            ')' if depth == 0 => {
                parts.push(&text[start..at]);
                return parts;
            }
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    panic!("a table does not end: {}", &text[..text.len().min(80)])
}

fn tables(database: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut files = Vec::new();
    files_below(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations").join(database), &mut files);
    files.sort();
    let mut tables = BTreeMap::new();
    for file in files {
        let text = std::fs::read_to_string(file).unwrap();
        let text: String =
            text.lines().map(|line| line.split("--").next().unwrap_or_default().to_owned() + "\n").collect();
        for made in text.split("create table ").skip(1) {
            let (head, rest) = made.split_once('(').unwrap();
            let name = head.trim().trim_start_matches("if not exists ").replace("oncebox.", "").replace("oncebox_", "");
            // A copy that takes the place of the table, or has the form of another one.
            if rest.trim_start().starts_with("like") || name.contains([' ', '\n']) || name.ends_with("_4") {
                continue;
            }
            let first_word =
                |part: &&str| part.split_whitespace().next().unwrap_or_default().trim_matches(['`', '"']).to_owned();
            let constraint = ["constraint", "primary", "unique", "check", "key", "index", "foreign"];
            let columns =
                parts(rest).iter().map(first_word).filter(|word| !constraint.contains(&word.as_str())).collect();
            tables.insert(name, columns);
        }
    }
    tables
}

/// Shown to fail: with `history` called `errors` on SQLite; with an exception that is none any
/// more.
#[test]
fn the_three_schemas_have_the_same_tables_and_columns() {
    let all = ["postgres", "mysql", "sqlite"].map(tables);
    let names: BTreeSet<(&str, &str)> = all
        .iter()
        .flatten()
        .flat_map(|(table, columns)| columns.iter().map(move |column| (table.as_str(), column.as_str())))
        .collect();
    assert!(names.len() > 150, "{}", names.len());
    let differs: Vec<_> = names
        .into_iter()
        .filter(|(table, column)| {
            !all.iter().all(|tables| tables.get(*table).is_some_and(|columns| columns.contains(*column)))
        })
        .collect();
    let unexpected: Vec<_> = differs.iter().filter(|(table, column)| !is_own(table, column)).collect();
    assert!(unexpected.is_empty(), "not in all three schemas: {unexpected:?}");
    for (patterns, _) in OWN {
        for pattern in patterns.split(' ') {
            let (table, column) = pattern.split_once('.').unwrap_or((pattern, "*"));
            let matches =
                |(t, c): &(&str, &str)| (table == "*" || *t == table) && (column.ends_with('*') || *c == column);
            assert!(differs.iter().any(matches), "`{pattern}` is in all three schemas");
        }
    }
}
