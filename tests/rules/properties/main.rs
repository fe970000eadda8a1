//! The pure rules against models: each rule as a property of many random histories.
//!
//! A rule is only tested if its absence shows: each property says with which change of the rule it
//! was seen to fail.
#![allow(clippy::unwrap_used)]

mod diversion;
mod horizon;
mod isolate;
mod lease;
pub(crate) mod operation_commands;
mod operation_keys;
mod retry;
mod split;
mod suspicion;
mod watermark;

/// So many cases, and no file left behind: a case that failed is shown as it is.
fn cases(count: u32) -> proptest::test_runner::Config {
    proptest::test_runner::Config { failure_persistence: None, ..proptest::test_runner::Config::with_cases(count) }
}
