//! Files that import each other cannot be read one after the other: there is no such circle. A file
//! and the files in its folder are one subject, and may name each other.

use std::collections::{BTreeMap, BTreeSet};

use super::all_sources;
use super::plan::{module_of, named};

type Module = Vec<String>;

/// The names of each file outside of its tests.
type Named = BTreeMap<Module, Vec<Module>>;

/// The file in which the item of this path is defined. A name that a file has only imported leads
/// on to where it comes from.
fn home(files: &Named, path: &[String]) -> Option<Module> {
    let mut path = path.to_vec();
    for _ in 0..8 {
        let file = (1..=path.len()).rev().map(|parts| &path[..parts]).find(|file| files.contains_key(*file))?;
        let item = path.get(file.len());
        let from = files[file].iter().find(|import| item.is_some() && import.last() == item && **import != path);
        match from {
            Some(import) => path = import.clone(),
            None => return Some(file.to_vec()),
        }
    }
    None
}

/// A way along the arrows that comes back to where it began.
fn circle(arrows: &BTreeMap<Module, BTreeSet<Module>>, begin: &Module) -> Option<Vec<String>> {
    let (mut ways, mut seen) = (vec![vec![begin]], BTreeSet::new());
    while let Some(way) = ways.pop() {
        for next in arrows.get(*way.last().unwrap()).into_iter().flatten() {
            if next == begin {
                return Some(way.iter().chain([&begin]).map(|module| module.join("/")).collect());
            }
            if seen.insert(next) {
                ways.push(way.iter().copied().chain([next]).collect());
            }
        }
    }
    None
}

/// Shown to fail: with `use super::pump::Pump` in `src/outbox/relay/window.rs`.
#[test]
fn no_file_imports_what_imports_it() {
    let (mut wrong, mut seen) = (BTreeSet::new(), 0);
    for package in ["src", "crates/cli/src", "crates/testkit/src"] {
        let mut files = Named::new();
        for (path, text) in all_sources().iter().filter(|(path, _)| path.starts_with(package)) {
            let module = module_of(path).unwrap();
            if module.iter().any(|part| part == "tests") {
                continue;
            }
            let text = text.split("\n#[cfg(test)]\nmod ").next().unwrap();
            files.insert(module, named(path, text).into_iter().map(|(_, name)| name).collect());
        }
        let mut arrows = BTreeMap::<Module, BTreeSet<Module>>::new();
        for (file, names) in &files {
            let homes = names.iter().filter_map(|name| home(&files, name));
            let apart = homes.filter(|other| !other.starts_with(file) && !file.starts_with(other));
            arrows.insert(file.clone(), apart.collect());
        }
        seen += arrows.values().map(BTreeSet::len).sum::<usize>();
        let circles = arrows.keys().filter_map(|file| circle(&arrows, file));
        // Each of its files finds a circle; the first of them tells it.
        let told = circles.filter(|way| way.first() == way.iter().min());
        wrong.extend(told.map(|way| way.join(" -> ")));
    }
    assert!(wrong.is_empty(), "{}", wrong.into_iter().collect::<Vec<_>>().join("\n"));
    assert!(seen > 1_000, "only {seen} names of other files were found");
}
