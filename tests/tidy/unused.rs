//! Which public items of the sources no production code uses: a test of such an item shows nothing
//! about the product.
//!
//! It reads text, not types. A method counts as used where any production code calls a method of
//! that name, so a name that several types have can hide a dead one; a name that nobody calls
//! cannot hide.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::{all_sources, read, sources_below};

/// Public items that no production code, example or page uses, each with the reason why it stays.
const KEPT: [(&str, &str); 1] = [(
    "src/outbox/rules/diversion.rs: Diversion::load",
    "the diversions of a shard in one step for the models; production calls what it calls, row by row",
)];

/// What only tests use.
const ONLY_TESTS: [&str; 1] = ["crates/testkit"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Has a receiver.
    Method,
    /// A function or constant that is named through its type.
    Associated,
    /// Named through its module.
    Free,
}

#[derive(Debug)]
struct Item {
    file: usize,
    name: String,
    /// The type or trait that it belongs to.
    owner: Option<String>,
    is_in_trait: bool,
    kind: Kind,
    /// Its tokens, from its keyword to its end.
    span: std::ops::Range<usize>,
}

#[derive(Debug)]
struct Token {
    text: String,
    /// The type whose `impl` this stands in.
    within: Option<String>,
    is_in_use: bool,
}

struct File {
    path: PathBuf,
    tokens: Vec<Token>,
    imports: BTreeSet<String>,
    has_glob: bool,
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The words and signs of a source without comments. Of a string, what an attribute or a format may
/// name.
fn words(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    let at = |index: usize| chars.get(index).copied().unwrap_or(' ');
    let (mut found, mut index) = (Vec::new(), 0);
    while index < chars.len() {
        let (c, next) = (at(index), at(index + 1));
        let raw =
            (c == 'r' || c == 'b' && next == 'r') && !found.last().is_some_and(|_| index > 0 && is_word(at(index - 1)));
        let hashes_from = index + if c == 'b' { 2 } else { 1 };
        let hashes = chars[hashes_from.min(chars.len())..].iter().take_while(|&&c| c == '#').count();
        if c == '/' && next == '/' {
            index += chars[index..].iter().take_while(|&&c| c != '\n').count();
        } else if c == '/' && next == '*' {
            let rest: String = chars[index..].iter().collect();
            index += rest.split_once("*/").unwrap().0.chars().count() + 2;
        } else if raw && at(hashes_from + hashes) == '"' {
            let end: String = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
            let start = hashes_from + hashes + 1;
            let rest: String = chars[start..].iter().collect();
            index = start + rest.split_once(&end).unwrap().0.chars().count() + end.len();
        } else if c == '"' {
            let mut end = index + 1;
            while at(end) != '"' {
                end += if at(end) == '\\' { 2 } else { 1 };
            }
            let string: String = chars[index + 1..end].iter().collect();
            let captures = string.split('{').skip(1).map(|rest| rest.split(['}', ':']).next().unwrap());
            let path = (!string.contains(' ')).then_some(string.as_str());
            for name in captures.chain(path).flat_map(|part| part.split("::")) {
                if !name.is_empty() && name.chars().all(is_word) {
                    found.extend(["\"".to_owned(), name.to_owned(), "\"".to_owned()]);
                }
            }
            index = end + 1;
        } else if c == '\'' && (next == '\\' || at(index + 2) == '\'') {
            index += if next == '\\' { 3 } else { 2 };
            index += 1 + chars[index..].iter().take_while(|&&c| c != '\'').count();
        } else if c == '\'' {
            index += 1 + chars[index + 1..].iter().take_while(|&&c| is_word(c)).count();
        } else if is_word(c) {
            let word: String = chars[index..].iter().take_while(|&&c| is_word(c)).collect();
            index += word.chars().count();
            found.push(word);
        } else {
            let pair = matches!((c, next), (':', ':') | ('-', '>') | ('=', '>'));
            index += if pair { 2 } else { 1 };
            if !c.is_whitespace() {
                found.push(if pair { format!("{c}{next}") } else { c.to_string() });
            }
        }
    }
    found
}

/// One past the item that begins here: past its block, or past the semicolon where it has none.
fn end_of(words: &[String], from: usize) -> usize {
    let mut depth = 0_usize;
    for (index, word) in words.iter().enumerate().skip(from) {
        match word.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" => depth = depth.saturating_sub(1),
            "}" if depth <= 1 => return index + 1,
            "}" => depth -= 1,
            ";" | "," if depth == 0 => return index + 1,
            _ => {}
        }
    }
    words.len()
}

/// The attribute that begins at this `#`, without blanks, and one past it.
fn attribute(words: &[String], from: usize) -> Option<(String, usize)> {
    let opening = from + usize::from(words.get(from + 1)? == "!") + 1;
    if words[from] != "#" || words.get(opening)? != "[" {
        return None;
    }
    let end = end_of_bracket(words, opening);
    Some((words[from..end].iter().filter(|word| *word != "\"").map(String::as_str).collect(), end))
}

fn end_of_bracket(words: &[String], opening: usize) -> usize {
    let mut depth = 0_usize;
    for (index, word) in words.iter().enumerate().skip(opening) {
        match word.as_str() {
            "[" => depth += 1,
            "]" if depth == 1 => return index + 1,
            "]" => depth -= 1,
            _ => {}
        }
    }
    words.len()
}

fn is_for_tests(attribute: &str) -> bool {
    let only = ["#[cfg(test)", "#[cfg(all(test", "#[cfg(doctest", "#[cfg(all(doctest", "#[test]", "#[tokio::test"];
    only.iter().any(|start| attribute.starts_with(start))
}

/// Production's words of a source, and the modules in files of their own that only tests have.
fn production(words: &[String]) -> (Vec<String>, Vec<String>) {
    let (mut kept, mut modules, mut index) = (Vec::new(), Vec::new(), 0);
    while index < words.len() {
        let Some((text, mut after)) = attribute(words, index) else {
            kept.push(words[index].clone());
            index += 1;
            continue;
        };
        if !is_for_tests(&text) {
            kept.extend_from_slice(&words[index..after]);
            index = after;
            continue;
        }
        while let Some((_, next)) = attribute(words, after) {
            after = next;
        }
        index = end_of(words, after);
        let item = &words[after..index];
        if let Some(at) = item.iter().position(|word| word == "mod").filter(|_| item.last().unwrap() == ";") {
            modules.push(item[at + 1].clone());
        }
    }
    (kept, modules)
}

/// The name of the type in the head of an `impl`, and whether it implements a trait.
fn head_of_impl(words: &[String]) -> (Option<String>, bool) {
    let (mut depth, mut name, mut is_of_trait) = (0_usize, None, false);
    for word in words.iter().skip(1) {
        match word.as_str() {
            "{" | "where" => break,
            "<" => depth += 1,
            ">" => depth = depth.saturating_sub(1),
            "for" if depth == 0 => is_of_trait = true,
            word if depth == 0 && word.chars().all(is_word) && word != "dyn" => name = Some(word.to_owned()),
            _ => {}
        }
    }
    (name, is_of_trait)
}

/// What a source of production says, and the public items that it defines.
fn parse(path: PathBuf, words: &[String], file: usize) -> (File, Vec<Item>) {
    let mut found = File { path, tokens: Vec::new(), imports: BTreeSet::new(), has_glob: false };
    let mut items = Vec::new();
    // The blocks that are open: the type or trait, and whether it is an `impl` of a trait, or a
    // trait.
    let mut open: Vec<(Option<String>, bool, bool)> = Vec::new();
    let (mut is_public, mut is_in_use, mut next) = (false, false, None);
    for (index, word) in words.iter().enumerate() {
        let before = index.checked_sub(1).map_or("", |before| words[before].as_str());
        let after = words.get(index + 1).map_or("", String::as_str);
        let begins = matches!(before, "" | "}" | "{" | ";" | "]" | "unsafe");
        let (owner, is_impl_of_trait, is_trait) = open.last().cloned().unwrap_or_default();
        let mut name = None;
        match word.as_str() {
            "impl" if begins => {
                let (owner, is_of_trait) = head_of_impl(&words[index..]);
                next = Some((owner, is_of_trait, false));
            }
            "pub" => is_public = true,
            "use" if begins || before == "pub" || before == ")" => is_in_use = true,
            "trait" if after.chars().all(is_word) => {
                next = Some((Some(after.to_owned()), false, true));
                name = Some(Kind::Free);
            }
            "fn" if !is_impl_of_trait && after.chars().all(is_word) => {
                let signature = words[index..].iter().skip_while(|word| *word != "(").skip(1);
                let has_self =
                    signature.take_while(|word| !matches!(word.as_str(), "," | ")" | ":")).any(|word| word == "self");
                name = Some(if has_self {
                    Kind::Method
                } else if owner.is_some() {
                    Kind::Associated
                } else {
                    Kind::Free
                });
            }
            "const" | "static" if !is_impl_of_trait && !matches!(after, "fn" | "unsafe" | "async" | "{") => {
                name = Some(if owner.is_some() { Kind::Associated } else { Kind::Free });
            }
            "struct" | "enum" | "type" if owner.is_none() => name = Some(Kind::Free),
            "{" => {
                open.push(next.take().unwrap_or((owner.clone().filter(|_| false), false, false)));
            }
            "}" => {
                open.pop();
            }
            _ => {}
        }
        // A function's own block forgets the owner; what stands in it still is within its type.
        if let Some(kind) = name.filter(|_| is_public || is_trait) {
            let mut span = index..end_of(words, index);
            span.end = span.end.min(words.len());
            let is_in_trait = is_trait && word != "trait";
            items.push(Item { file, name: after.to_owned(), owner: owner.clone(), is_in_trait, kind, span });
        }
        if matches!(word.as_str(), ";" | "{" | "}" | "," | "fn" | "struct" | "enum" | "trait" | "type")
            && !(is_in_use && word != ";")
        {
            is_public = false;
        }
        if is_in_use && after != "as" {
            found.has_glob |= word == "*";
            found.imports.insert(word.clone());
        }
        let within = open.iter().rev().find_map(|(owner, ..)| owner.clone());
        found.tokens.push(Token { text: word.clone(), within, is_in_use });
        is_in_use &= word != ";";
    }
    (found, items)
}

/// Everything that production is made of: sources, examples, and the code and names that the pages
/// show.
fn everything() -> (Vec<File>, Vec<Item>) {
    let read: Vec<_> = all_sources().into_iter().map(|(path, text)| (path, production(&words(&text)))).collect();
    let mut only_tests: BTreeSet<PathBuf> = ONLY_TESTS.iter().map(PathBuf::from).collect();
    for (path, (_, modules)) in &read {
        let is_root = matches!(path.file_stem().unwrap().to_str(), Some("mod" | "lib" | "main"));
        let folder = if is_root { path.parent().unwrap().to_owned() } else { path.with_extension("") };
        only_tests.extend(modules.iter().map(|module| folder.join(module)));
    }
    let is_tested_with = |path: &Path| path.with_extension("").ancestors().any(|folder| only_tests.contains(folder));
    let (mut files, mut items) = (Vec::new(), Vec::new());
    for (path, (words, _)) in read.into_iter().filter(|(path, _)| !is_tested_with(path)) {
        let (file, defined) = parse(path, &words, files.len());
        files.push(file);
        items.extend(defined);
    }
    for (path, text) in sources_below("examples") {
        files.push(parse(path, &words(&text), usize::MAX).0);
    }
    (files, items)
}

/// Of the pages that users read: the blocks of code as sources, and the names that stand in
/// backticks by themselves.
fn shown() -> (Vec<File>, BTreeSet<String>) {
    let mut pages = vec!["README.md".to_owned()];
    for folder in ["docs/concepts", "docs/guides", "docs/reference"] {
        let entries = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap();
        pages.extend(entries.map(|entry| format!("{folder}/{}", entry.unwrap().file_name().to_str().unwrap())));
    }
    let (mut blocks, mut names) = (Vec::new(), BTreeSet::new());
    for page in pages {
        let text = read(&page);
        let parts: Vec<&str> = text.split("```").collect();
        let rust = parts.iter().skip(1).step_by(2).filter_map(|block| block.strip_prefix("rust"));
        blocks.extend(rust.map(|block| {
            let block = block.split_once('\n').unwrap().1.replace("\n# ", "\n");
            parse(PathBuf::from(&page), &words(&block), usize::MAX).0
        }));
        let code: Vec<String> = parts.iter().step_by(2).map(|prose| (*prose).to_owned()).collect();
        let inline: Vec<&str> = code.iter().flat_map(|prose| prose.split('`').skip(1).step_by(2)).collect();
        names.extend(inline.iter().map(|code| code.split('(').next().unwrap().to_owned()));
        let called = inline.iter().filter(|code| code.contains('(') && !code.contains(['"', '\'']));
        blocks.extend(called.map(|code| parse(PathBuf::from(&page), &words(code), usize::MAX).0));
    }
    (blocks, names)
}

/// Whether this token, in this file, may be a use of the item.
fn is_use(item: &Item, at: (usize, usize), files: &[File], types: &BTreeSet<&str>) -> bool {
    let (number, index) = at;
    let (file, token) = (&files[number], &files[number].tokens[index]);
    let text = |index: Option<usize>| index.and_then(|index| file.tokens.get(index)).map_or("", |token| &token.text);
    let (before, after) = (text(index.checked_sub(1)), text(Some(index + 1)));
    if token.is_in_use {
        return after == "as";
    }
    if matches!(before, "fn" | "struct" | "enum" | "trait" | "type" | "const" | "static" | "mod") {
        return false;
    }
    let through = text(index.checked_sub(2));
    let through = if through == "Self" { token.within.as_deref().unwrap_or("") } else { through };
    let is_other_type = types.contains(through) && !item.is_in_trait && item.owner.as_deref() != Some(through);
    match item.kind {
        Kind::Method if before == "." => matches!(after, "(" | "::"),
        Kind::Method | Kind::Associated => before == "::" && !is_other_type,
        Kind::Free if before == "." || after == ":" => false,
        Kind::Free if before == "::" => !types.contains(through),
        Kind::Free if number == item.file || before == "\"" || file.imports.contains(&item.name) => true,
        Kind::Free => file.has_glob && (after == "(" || item.name.starts_with(|c: char| c.is_ascii_uppercase())),
    }
}

/// Shown to fail: with `pub fn nobody_calls(&self)` in a type of `src`, and with it called by a
/// second such method.
#[test]
fn every_public_item_is_used_by_production_code() {
    let (mut files, items) = everything();
    let (blocks, names) = shown();
    files.extend(blocks);
    let is_shown = |item: &Item| {
        let owned = item.owner.as_ref().map(|owner| format!("{owner}::{}", item.name));
        names.contains(&item.name) || owned.is_some_and(|owned| names.contains(&owned))
    };
    let types: BTreeSet<&str> = items
        .iter()
        .filter(|item| item.kind == Kind::Free && item.name.starts_with(|c: char| c.is_ascii_uppercase()))
        .filter(|item| matches!(files[item.file].tokens[item.span.start].text.as_str(), "struct" | "enum"))
        .map(|item| item.name.as_str())
        .collect();
    let mut places: BTreeMap<&str, Vec<(usize, usize)>> = BTreeMap::new();
    for (number, file) in files.iter().enumerate() {
        for (index, token) in file.tokens.iter().enumerate() {
            places.entry(&token.text).or_default().push((number, index));
        }
    }
    let uses: Vec<Vec<(usize, usize)>> = items
        .iter()
        .map(|item| {
            let places = places.get(item.name.as_str()).into_iter().flatten().copied();
            places.filter(|&at| is_use(item, at, &files, &types)).collect()
        })
        .collect();
    let name = |item: &Item| {
        let owner = item.owner.as_ref().map_or(String::new(), |owner| format!("{owner}::"));
        format!("{}: {owner}{}", files[item.file].path.display(), item.name)
    };
    let is_kept = |item: &Item| KEPT.iter().any(|(kept, _)| *kept == name(item));
    // What only a dead item uses is dead too.
    let mut dead: BTreeSet<usize> = BTreeSet::new();
    loop {
        let is_dead = |number: usize, (file, index): (usize, usize)| {
            let inside = |item: &Item| item.file == file && item.span.contains(&index);
            inside(&items[number]) || dead.iter().any(|&dead| inside(&items[dead]))
        };
        let found: Vec<usize> = (0..items.len())
            .filter(|number| !dead.contains(number) && !is_shown(&items[*number]) && !is_kept(&items[*number]))
            .filter(|&number| uses[number].iter().all(|&at| is_dead(number, at)))
            .collect();
        if found.is_empty() {
            break;
        }
        dead.extend(found);
    }
    let names: Vec<String> = dead.iter().map(|&number| name(&items[number])).collect();
    assert!(items.len() > 1_000, "{} items are too few to be all", items.len());
    assert!(names.is_empty(), "only tests use these:\n{}", names.join("\n"));
    let stale: Vec<&str> =
        KEPT.iter().map(|(kept, _)| *kept).filter(|kept| !items.iter().any(|item| name(item) == *kept)).collect();
    assert!(stale.is_empty(), "kept, and not there: {stale:?}");
}
