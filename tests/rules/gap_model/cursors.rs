//! The cursor that a simulated relay uses: the real one, with the reference beside it that must say
//! the same, or the reference alone with a rule taken out.

use crate::outbox::rules::gaps::{CheckpointTicket, GapCursor, GapSet, Mark, ReadPlan};

use super::mutant::Mutant;
use super::postgres::{Shard, Snapshot};
use super::reference::Reference;

#[derive(Debug)]
pub(crate) struct Cursor {
    /// Absent when a rule of the cursor is taken out.
    real: Option<GapCursor>,
    reference: Reference,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Ticket {
    real: Option<CheckpointTicket>,
    reads: u64,
}

/// What a read changed, for the statistics.
pub(crate) struct Outcome {
    pub(crate) batch: Option<u64>,
    pub(crate) closed: GapSet,
}

impl Cursor {
    pub(crate) fn start(shard: &Shard, fence: u64, ranges_max: usize, mutant: Option<Mutant>) -> Self {
        let (scanned_to, gaps) = (shard.scanned_to, &shard.gaps);
        let reference = Reference::start(scanned_to, gaps, fence, ranges_max, mutant);
        let real = GapCursor::start(scanned_to, gaps, fence, ranges_max);
        Self { real: mutant.is_none_or(is_of_the_user).then_some(real), reference }
    }

    pub(crate) fn begin_read(&mut self) -> ReadPlan {
        let plan = self.reference.begin_read();
        if let Some(real) = &mut self.real {
            assert_eq!(real.begin_read(), plan);
        }
        plan
    }

    pub(crate) fn row_limit(&self, rows: usize) -> usize {
        let limit = rows.min(self.reference.room()).max(1);
        if let Some(real) = &self.real {
            assert_eq!(real.row_limit(rows), limit);
        }
        limit
    }

    pub(crate) fn on_read(&mut self, seen: Snapshot, positions: &[i64], limit_reached: bool, passes: bool) -> Outcome {
        let (batch, closed) = self.reference.on_read(seen, positions, limit_reached, passes);
        if let Some(real) = &mut self.real {
            let outcome = real.on_read(seen.xmin, positions, limit_reached, passes).expect("a true answer is taken");
            assert_eq!(outcome.batch, batch);
            assert_eq!(outcome.closed.into_iter().collect::<GapSet>(), closed);
        }
        self.agree();
        Outcome { batch, closed }
    }

    pub(crate) fn begin_checkpoint(&self) -> Ticket {
        Ticket { real: self.real.as_ref().map(GapCursor::begin_checkpoint), reads: self.reference.reads() }
    }

    pub(crate) fn on_checkpoint(&mut self, ticket: Ticket, xid: u64, now: u64) {
        self.reference.on_checkpoint(ticket.reads, xid, now);
        if let (Some(real), Some(ticket)) = (&mut self.real, ticket.real) {
            real.on_checkpoint(ticket, xid, now).expect("ids ascend");
        }
        self.agree();
    }

    pub(crate) fn needs_checkpoint(&self) -> bool {
        self.reference.needs_checkpoint()
    }

    pub(crate) fn may_send(&self, batch: u64) -> bool {
        let may = self.reference.may_send(batch);
        if let Some(real) = &self.real {
            assert!(may || real.needs_checkpoint(), "production sends while no checkpoint is due");
        }
        may
    }

    pub(crate) fn mark_through(&self, batch: u64) -> Option<Mark> {
        let mark = self.reference.mark_through(batch);
        if let Some(real) = &self.real {
            assert_eq!(real.mark_through(batch), mark);
        }
        mark
    }

    pub(crate) fn mark_idle(&self) -> Option<Mark> {
        let mark = self.reference.mark_idle();
        if let Some(real) = &self.real {
            assert_eq!(real.mark_idle(), mark);
        }
        mark
    }

    pub(crate) fn on_marked(&mut self, mark: &Mark) {
        self.reference.on_marked(mark);
        if let Some(real) = &mut self.real {
            real.on_marked(mark.clone());
        }
        self.agree();
    }

    pub(crate) fn begin_lock_watch(&mut self, now: u64, age: u64) -> usize {
        let ranges = self.reference.begin_lock_watch(now, age);
        if let Some(real) = &mut self.real {
            let covered = real.begin_lock_watch(now, age);
            assert_eq!(covered > 0, ranges > 0);
        }
        ranges
    }

    pub(crate) fn on_lock_holders(&mut self, holders: Vec<u64>) {
        if let Some(real) = &mut self.real {
            real.on_lock_holders(holders.clone());
        }
        self.reference.on_lock_holders(holders);
    }

    pub(crate) fn lock_watch(&self) -> Option<Vec<u64>> {
        let watched = self.reference.lock_watch();
        if let Some(real) = &self.real {
            assert_eq!(real.lock_watch(), watched.as_deref());
        }
        watched
    }

    pub(crate) fn on_still_holding(&mut self, still: &[u64]) {
        self.reference.on_still_holding(still);
        if let Some(real) = &mut self.real {
            real.on_still_holding(still);
        }
    }

    /// What memory has open now.
    pub(crate) fn open(&self) -> GapSet {
        self.reference.open()
    }

    fn agree(&self) {
        if let Some(real) = &self.real {
            assert_eq!(real.check(), Ok(()));
            assert_eq!(real.needs_checkpoint(), self.reference.needs_checkpoint());
        }
    }
}

/// Whether the cursor is whole and only used wrongly.
fn is_of_the_user(mutant: Mutant) -> bool {
    matches!(
        mutant,
        Mutant::PositionBeforeId
            | Mutant::PersistMemoryAtCheckpoint
            | Mutant::MarkAnyProven
            | Mutant::RecheckApart
            | Mutant::SendBeforeCheckpoint
            | Mutant::HoldersByBackend
            | Mutant::SkipAndGoOn
            | Mutant::DivertByTableOnly
            | Mutant::JoinByIntersection
    )
}
