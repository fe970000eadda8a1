//! Pure: no I/O, no clock.
//! The batches that were read and are not marked yet, in read order.
//!
//! Guarantee: a batch leaves only at the front, together with all batches before it.
//!
//! Not here: the rows of a batch and their proofs. The runtime keeps them under the batch's number.

use std::collections::VecDeque;

use super::GapSet;

#[derive(Debug)]
pub(super) struct Batch {
    /// Counted from 1 in each session.
    pub(super) number: u64,
    /// The highest position that the session had read after this batch.
    pub(super) read_to: i64,
    /// The batch's rows at gaps. They are no open gaps in memory any more, and not proven yet.
    pub(super) gap_rows: GapSet,
    /// None of its rows is of this shard. The next read of that kind extends this batch.
    pub(super) is_passed: bool,
}

#[derive(Debug, Default)]
pub(super) struct UnmarkedReads {
    batches: VecDeque<Batch>,
    /// The number of the last batch that was dropped.
    marked: u64,
}

impl UnmarkedReads {
    pub(super) fn marked(&self) -> u64 {
        self.marked
    }

    pub(super) fn push(&mut self, read_to: i64, gap_rows: GapSet, is_passed: bool) -> u64 {
        let number = self.batches.back().map_or(self.marked, |batch| batch.number) + 1;
        self.batches.push_back(Batch { number, read_to, gap_rows, is_passed });
        number
    }

    /// Adds a read that returned only rows of other shards. Consecutive reads of this kind form one
    /// batch, because the rows are not this shard's to prove.
    pub(super) fn pass(&mut self, read_to: i64) -> u64 {
        match self.batches.back_mut() {
            Some(last) if last.is_passed => {
                last.read_to = read_to;
                last.number
            }
            _ => self.push(read_to, GapSet::new(), true),
        }
    }

    pub(super) fn oldest(&self) -> Option<&Batch> {
        self.batches.front()
    }

    pub(super) fn get(&self, number: u64) -> Option<&Batch> {
        let index = number.checked_sub(self.batches.front()?.number)?;
        self.batches.get(usize::try_from(index).ok()?)
    }

    /// The rows at gaps of every batch after this one.
    pub(super) fn gap_rows_after(&self, number: u64) -> impl Iterator<Item = super::Range> + '_ {
        self.batches.iter().filter(move |batch| batch.number > number).flat_map(|batch| batch.gap_rows.iter())
    }

    pub(super) fn drop_through(&mut self, number: u64) {
        while self.batches.front().is_some_and(|batch| batch.number <= number) {
            self.batches.pop_front();
        }
        self.marked = self.marked.max(number);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Batch> {
        self.batches.iter()
    }
}
