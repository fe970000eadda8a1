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
