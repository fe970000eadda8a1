//! The pure room against models: each rule as a property of thousands of random histories.
//!
//! A property is only a test if its absence shows: each says by which mutant of the policy it was
//! seen to fail.
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
