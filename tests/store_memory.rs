//! The store of keys in memory.

oncebox_testkit::keys_conformance!(oncebox_testkit::MemoryKeys);
