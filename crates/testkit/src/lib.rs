//! For authors of adapters: suites of tests that every store and every broker must pass, and both
//! in memory for tests of code that uses them.
//!
//! | for | see |
//! |---|---|
//! | an adapter of a database | [`store::Fixture`], [`store_conformance!`] |
//! | a store of keys alone | [`store::KeysFixture`], [`keys_conformance!`] |
//! | an adapter of a broker | [`broker::Fixture`], [`broker_conformance!`] |
//! | tests above a broker, with its faults as switches | [`memory::MemoryBroker`] |
//! | tests above a store of keys | [`MemoryKeys`] |
//!
//! One line in the test file of an adapter makes the tests of a suite. The file needs `tokio` with
//! its macros.

pub mod broker;
pub mod memory;
mod memory_keys;
pub mod store;

pub use memory_keys::MemoryKeys;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    /// Shown by: a case that is left out of its list.
    #[test]
    fn every_case_is_in_the_list() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut cases = 0;
        for suite in ["store", "broker"] {
            let list = fs::read_to_string(sources.join(suite).with_extension("rs")).unwrap();
            let listed: BTreeSet<&str> = list.lines().map(|line| line.trim().trim_end_matches(',')).collect();
            for file in fs::read_dir(sources.join(suite)).unwrap() {
                let text = fs::read_to_string(file.unwrap().path()).unwrap();
                for line in text.lines().filter_map(|line| line.strip_prefix("pub async fn ")) {
                    let name = line.split(['<', '(']).next().unwrap();
                    assert!(listed.contains(name), "{name} is not in the list of the suite `{suite}`");
                    cases += 1;
                }
            }
        }
        assert!(cases > 200, "only {cases} cases were found");
    }
}
