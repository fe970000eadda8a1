//! Limits the memory of request bodies, for the whole process and for each tenant
//! (`body_memory_max`, O29).
//!
//! Promise: only bytes that have arrived are counted, so a connection that announces a large body
//! and sends nothing takes nothing from others. One tenant cannot take all of the memory. A permit
//! returns its bytes when it is dropped. Nobody waits for memory, because a queue of requests would
//! hold as much memory again.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

#[derive(Debug, Default)]
struct Held {
    all: usize,
    by_tenant: HashMap<String, usize>,
}

/// The budget of bytes for request bodies, shared by its clones.
#[derive(Debug, Clone)]
pub(super) struct BodyMemory {
    max: usize,
    tenant_max: usize,
    held: Arc<Mutex<Held>>,
}

/// The bytes that one request of a tenant holds. Dropping it returns them.
#[derive(Debug)]
pub struct BodyPermit {
    memory: BodyMemory,
    tenant: String,
    bytes: usize,
}

impl BodyMemory {
    /// `tenant_max`: the share of one tenant; `None` means half.
    pub(super) fn new(max: usize, tenant_max: Option<usize>) -> Self {
        Self { max, tenant_max: tenant_max.unwrap_or(max / 2), held: Arc::default() }
    }

    pub(super) fn of(&self, tenant: &str) -> BodyPermit {
        BodyPermit { memory: self.clone(), tenant: tenant.to_owned(), bytes: 0 }
    }
}

impl BodyPermit {
    /// Adds this many bytes to the permit. Returns false if they do not fit; the caller answers 503
    /// [`Code::BodyMemoryExceeded`](crate::operation::rules::Code::BodyMemoryExceeded).
    #[must_use]
    pub fn grow(&mut self, bytes: usize) -> bool {
        let mut held = self.memory.held.lock();
        let tenants = held.by_tenant.get(&self.tenant).copied().unwrap_or(0).saturating_add(bytes);
        let all = held.all.saturating_add(bytes);
        if bytes == 0 || all > self.memory.max || tenants > self.memory.tenant_max {
            return bytes == 0;
        }
        held.all = all;
        held.by_tenant.insert(self.tenant.clone(), tenants);
        drop(held);
        self.bytes += bytes;
        true
    }
}

impl Drop for BodyPermit {
    fn drop(&mut self) {
        let mut held = self.memory.held.lock();
        held.all -= self.bytes;
        match held.by_tenant.get_mut(&self.tenant) {
            Some(tenants) if *tenants > self.bytes => *tenants -= self.bytes,
            _ => drop(held.by_tenant.remove(&self.tenant)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shown by: giving nothing back at the drop; no share of a tenant.
    #[test]
    fn o29_bodies_in_flight_are_bounded_and_given_back() {
        let memory = BodyMemory::new(100, Some(60));
        let (mut one, mut again, mut other) = (memory.of("t1"), memory.of("t1"), memory.of("t2"));
        assert!(one.grow(50) && again.grow(10) && one.grow(0));
        assert!(!one.grow(1) && !again.grow(1), "the share of one tenant is used up");
        assert!(other.grow(40) && !other.grow(1), "all of it is used up");
        drop(one);
        assert!(again.grow(50) && !other.grow(1));
        drop((again, other));
        let held = memory.held.lock();
        assert!(held.all == 0 && held.by_tenant.is_empty());
    }
}
