//! The store of keys in memory.
#![cfg(feature = "testing")]

oncebox::keys_conformance!(oncebox::store::memory::MemoryKeys);
