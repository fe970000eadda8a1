//! The code of the README as somebody has it who pastes it: in a crate outside of this repository
//! that depends on oncebox alone.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::readme::{blocks, files_below, read, root};

/// The folder that cargo builds into, so that nothing is built twice.
fn target() -> PathBuf {
    let this = std::env::current_exe().unwrap();
    this.ancestors().find(|folder| folder.join(".rustc_info.json").exists()).unwrap().to_owned()
}

/// The crate: the dependency as the README has it, on this repository, and the features of this
/// test run. Its tests have the dependencies of ours, so that what they have in common with them is
/// built already; its library has none of them.
fn manifest() -> String {
    let ours: toml::Table = read("Cargo.toml").parse().unwrap();
    let shown: toml::Table = blocks(&read("README.md"), "toml").remove(0).parse().unwrap();
    let dependencies = shown["dependencies"].as_table().unwrap();
    assert_eq!(dependencies.keys().collect::<Vec<_>>(), ["oncebox"], "nothing but oncebox");
    let mut dependencies = dependencies.clone();
    let oncebox = dependencies["oncebox"].as_table_mut().unwrap();
    assert_eq!(oncebox["path"].as_str(), Some("../oncebox"));
    oncebox.insert("path".into(), root().display().to_string().into());
    let features: Vec<toml::Value> =
        ours["features"].as_table().unwrap().keys().map(|name| name.clone().into()).collect();
    oncebox.insert("features".into(), features.into());
    let package = "[package]\nname = 'outside'\nversion = '0.1.0'\nedition = '2024'\n[workspace]\n";
    let mut crate_of_others: toml::Table = package.parse().unwrap();
    crate_of_others.insert("dependencies".into(), dependencies.into());
    let mut for_tests = ours["dev-dependencies"].as_table().unwrap().clone();
    // It lies in this repository.
    for_tests.remove("oncebox-testkit").unwrap();
    crate_of_others.insert("dev-dependencies".into(), for_tests.into());
    crate_of_others.insert("profile".into(), ours["profile"].clone());
    toml::to_string(&crate_of_others).unwrap()
}

/// Shown by `sqlx::query` in a block that does not import it from oncebox.
#[test]
fn the_code_of_the_readme_compiles_as_pasted_in_a_crate_that_depends_on_oncebox_alone() {
    let mut code = String::new();
    let readme = read("README.md");
    let pasted: Vec<&str> = readme.split("```rust").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(pasted.len() >= 3, "enqueue, handle, send: {}", pasted.len());
    for (number, block) in pasted.iter().enumerate() {
        let block = block.split_once('\n').unwrap().1;
        assert!(!block.lines().any(|line| line.starts_with("# ")), "a line that only rustdoc hides:\n{block}");
        code += &format!("#[allow(dead_code)]\nmod block_{number} {{\n{block}}}\n");
    }
    let outside = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| std::fs::write(outside.path().join(name), text).unwrap();
    std::fs::create_dir(outside.path().join("src")).unwrap();
    file("src/lib.rs", &code);
    file("Cargo.toml", &manifest());
    file("Cargo.lock", &read("Cargo.lock"));
    let cargo = check(outside.path());
    assert!(cargo.status.success(), "{}", String::from_utf8_lossy(&cargo.stderr));
}

/// What a page shows as ```` ```rs ```` is a part of an example, word for word; cargo builds that.
///
/// Shown to fail: by another name of a variable in such a block of the README.
#[test]
fn what_a_page_shows_as_part_of_an_example_stands_in_one() {
    let text = |path: &PathBuf| std::fs::read_to_string(path).unwrap();
    let examples: String = files_below("examples", "rs").iter().map(text).collect();
    let pages = [files_below("docs", "md"), files_below("examples", "md"), vec![root().join("README.md")]].concat();
    let mut shown = 0;
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        for block in blocks(&text, "rs") {
            assert!(examples.contains(&block), "{}: in no example:\n{block}", page.display());
            shown += 1;
        }
        // On GitHub they are shown.
        let hidden = text.split("```rust").skip(1).find(|block| block.split("```").next().unwrap().contains("\n# "));
        assert_eq!(hidden, None, "{}: a line that only rustdoc hides", page.display());
    }
    assert!(shown >= 3, "{shown}");
}

fn check(directory: &Path) -> std::process::Output {
    Command::new(env!("CARGO"))
        .args(["check", "--offline", "--lib", "--tests"])
        .current_dir(directory)
        .env("CARGO_TARGET_DIR", target())
        .output()
        .unwrap()
}
