//! For authors of adapters: what a store and a broker must do, as suites of tests that run on any,
//! and both in memory for tests of what stands above them.
//!
//! | for | see |
//! |---|---|
//! | an adapter of a database | [`store::Fixture`], [`store_conformance!`] |
//! | a store of keys alone | [`store::KeysFixture`], [`keys_conformance!`] |
//! | an adapter of a broker | [`broker::Fixture`], [`broker_conformance!`] |
//! | tests above a broker, with its faults as switches | [`memory::MemoryBroker`] |
//! | tests above a store of keys | [`MemoryKeys`] |
//!
//! A suite becomes tests by one line in the adapter's test file, which needs `tokio` with its
//! macros.

pub mod broker;
pub mod memory;
mod memory_keys;
pub mod store;

pub use memory_keys::MemoryKeys;
