//! Work beside the lanes that is repeated and fails now and then. Its trouble is shown from the
//! second failure in a row on: the first may be a deadlock.

use std::sync::Arc;

use super::Shared;
use crate::observe::Trouble;

/// The failures in a row of one such work.
pub(super) struct Failing {
    shared: Arc<Shared>,
    name: &'static str,
    whose: String,
    failed: u32,
}

impl Failing {
    /// `whose` is empty where only one task of the consumer does this work.
    pub(super) fn new(shared: &Arc<Shared>, name: &'static str, whose: String) -> Self {
        Self { shared: Arc::clone(shared), name, whose, failed: 0 }
    }

    /// It worked, or nobody does it any more: there is no trouble.
    pub(super) fn is_well(&mut self) {
        if std::mem::take(&mut self.failed) > 0 {
            self.show(None);
        }
    }

    pub(super) fn fails(&mut self, trouble: Trouble) {
        self.failed += 1;
        if self.failed >= 2 {
            self.show(Some(trouble));
        }
    }

    fn show(&self, trouble: Option<Trouble>) {
        self.shared.health.trouble_of(&self.shared.part, self.name, &self.whose, trouble);
    }
}

/// Work that is broken off, by an abort or a panic, leaves no trouble that nobody would clear: what
/// does the work next counts its own failures.
impl Drop for Failing {
    fn drop(&mut self) {
        self.is_well();
    }
}

#[cfg(all(test, feature = "sqlite", feature = "embedded"))]
mod tests {
    use super::*;
    use crate::inbox::consumer::Handlers;
    use crate::inbox::consumer::fixture::{options, parts};
    use crate::observe::PartState;

    /// Shown by: without the drop, the trouble stood for ever.
    #[tokio::test]
    async fn the_trouble_of_work_that_is_broken_off_is_over() {
        let parts = parts(options(), Handlers::new()).await;
        let shared = &parts.shared;
        shared.health.set(&shared.part, PartState::Ready);
        let mut failing = Failing::new(shared, "positions", String::new());
        for _ in 0..2 {
            failing.fails(Trouble::Stops("away".into()));
        }
        assert!(!shared.health.is_ready());
        drop(failing);
        assert!(shared.health.is_ready(), "{:?}", shared.health.lines());
    }
}
