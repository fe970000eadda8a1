//! What is read and not yet marked: batches in read order, rows in the order they were sent.
//!
//! Promise: a mark covers only the oldest batches, each wholly proven or diverted (R2.7); tags ascend by one.

use std::collections::VecDeque;

use crate::store::{Diversion, Mark};

/// Rows that were read together.
#[derive(Debug)]
struct Batch {
    /// The store's number of it; none for rows on their way back from the dead and held table.
    through: Option<u64>,
    /// Rows neither proven nor diverted.
    left: usize,
    /// It had rows, or decides something: worth a write of its own.
    matters: bool,
    diverted: Vec<(i64, Diversion)>,
    released: Vec<i64>,
    changed: Vec<(i64, Diversion)>,
    discarded: Vec<i64>,
}

/// A row that was sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    pub(super) position: i64,
    pub(super) batch: u64,
    /// A hash of topic and key, 0 without a key: for order incidents only.
    pub(super) key_hash: u64,
    pub(super) weight: usize,
    /// It came from the dead and held table.
    pub(super) is_release: bool,
    pub(super) settled: bool,
}

/// The window of one session.
#[derive(Debug, Default)]
pub(super) struct Window {
    batches: VecDeque<Batch>,
    first_batch: u64,
    sent: VecDeque<Sent>,
    first_tag: u64,
    in_flight: usize,
    rows: usize,
    bytes: usize,
}

impl Window {
    /// Opens a batch of so many rows; gives its number in this window.
    pub(super) fn open(&mut self, through: Option<u64>, rows: usize) -> u64 {
        // Reads that found nothing follow each other for as long as a broker is blocked: one batch stands for them all (G11).
        if rows == 0
            && through.is_some()
            && let Some(last) = self.batches.back_mut()
            && !last.matters
            && last.through.is_some()
        {
            last.through = through;
            return self.first_batch + self.batches.len() as u64 - 1;
        }
        let number = self.first_batch + self.batches.len() as u64;
        let (diverted, released, changed, discarded) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        self.batches.push_back(Batch {
            through,
            left: rows,
            matters: rows > 0,
            diverted,
            released,
            changed,
            discarded,
        });
        self.rows += rows;
        number
    }

    fn batch(&mut self, number: u64) -> Option<&mut Batch> {
        let index = usize::try_from(number.checked_sub(self.first_batch)?).ok()?;
        self.batches.get_mut(index)
    }

    /// A row is sent now; gives its tag.
    pub(super) fn send(&mut self, sent: Sent) -> u64 {
        let tag = self.first_tag + self.sent.len() as u64;
        self.in_flight += 1;
        self.bytes += sent.weight;
        self.sent.push_back(sent);
        tag
    }

    /// The row of a tag, while it is in the window.
    pub(super) fn get(&self, tag: u64) -> Option<Sent> {
        let index = usize::try_from(tag.checked_sub(self.first_tag)?).ok()?;
        self.sent.get(index).copied().filter(|sent| !sent.settled)
    }

    /// The broker has proven it.
    pub(super) fn prove(&mut self, tag: u64) {
        let Some(sent) = self.settle(tag) else { return };
        self.row_done(sent.batch);
        if sent.is_release
            && let Some(batch) = self.batch(sent.batch)
        {
            batch.released.push(sent.position);
        }
    }

    /// The broker refused it, and that is taken as final; what becomes of the row is said by `divert`, `change` or `leave`.
    pub(super) fn settle(&mut self, tag: u64) -> Option<Sent> {
        let index = usize::try_from(tag.checked_sub(self.first_tag)?).ok()?;
        let sent = self.sent.get_mut(index).filter(|sent| !sent.settled)?;
        sent.settled = true;
        let sent = *sent;
        self.in_flight -= 1;
        self.bytes -= sent.weight;
        while self.sent.front().is_some_and(|sent| sent.settled) {
            self.sent.pop_front();
            self.first_tag += 1;
        }
        Some(sent)
    }

    fn row_done(&mut self, number: u64) {
        if let Some(batch) = self.batch(number) {
            batch.left = batch.left.saturating_sub(1);
        }
        self.rows = self.rows.saturating_sub(1);
    }

    /// A row of this batch goes to the dead and held table.
    pub(super) fn divert(&mut self, number: u64, position: i64, diversion: Diversion) {
        self.row_done(number);
        if let Some(batch) = self.batch(number) {
            batch.diverted.push((position, diversion));
        }
    }

    /// A row of the dead and held table stays there, with another reason.
    pub(super) fn change(&mut self, number: u64, position: i64, diversion: Diversion) {
        self.row_done(number);
        if let Some(batch) = self.batch(number) {
            batch.changed.push((position, diversion));
        }
    }

    /// A row of the dead and held table stays there as it is.
    pub(super) fn leave(&mut self, number: u64) {
        self.row_done(number);
    }

    /// A dead row is discarded with this batch's mark.
    pub(super) fn discard(&mut self, number: u64, position: i64) {
        if let Some(batch) = self.batch(number) {
            batch.discarded.push(position);
            batch.matters = true;
        }
    }

    /// Takes the oldest batches that are done, as one mark; empty where the oldest is not.
    pub(super) fn take_done(&mut self) -> Mark {
        let mut mark = Mark::default();
        while self.batches.front().is_some_and(|batch| batch.left == 0) {
            let Some(batch) = self.batches.pop_front() else { break };
            self.first_batch += 1;
            mark.through = batch.through.or(mark.through);
            mark.diverted.extend(batch.diverted);
            mark.released.extend(batch.released);
            mark.changed.extend(batch.changed);
            mark.discarded.extend(batch.discarded);
        }
        mark
    }

    /// Rows sent and not settled.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Rows read and neither proven nor diverted.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes sent and not settled.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// True where nothing that matters waits for a mark.
    pub(super) fn is_empty(&self) -> bool {
        !self.batches.iter().any(|batch| batch.matters)
    }

    /// True where the oldest batches are done and a mark of them would say something.
    pub(super) fn has_something_done(&self) -> bool {
        self.batches.iter().take_while(|batch| batch.left == 0).any(|batch| batch.matters)
    }

    /// The first row that was sent and not settled.
    pub(super) fn first_unproven(&self) -> Option<i64> {
        self.sent.iter().find(|sent| !sent.settled).map(|sent| sent.position)
    }

    /// Positions of rows of the same key that were sent after this one and are proven: an order incident.
    pub(super) fn proven_after(&self, tag: u64) -> Vec<i64> {
        let Some(row) = self.get(tag).filter(|row| row.key_hash != 0) else { return Vec::new() };
        let after = usize::try_from(tag + 1 - self.first_tag).unwrap_or(usize::MAX);
        let later = self.sent.iter().skip(after);
        later.filter(|sent| sent.settled && sent.key_hash == row.key_hash).map(|sent| sent.position).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(position: i64, batch: u64) -> Sent {
        Sent { position, batch, key_hash: 7, weight: 10, is_release: false, settled: false }
    }

    #[test]
    fn a_mark_covers_only_the_oldest_batches_that_are_done() {
        let mut window = Window::default();
        let first = window.open(Some(1), 2);
        let second = window.open(Some(2), 1);
        let tags = [window.send(sent(1, first)), window.send(sent(2, first)), window.send(sent(3, second))];
        window.prove(tags[2]);
        assert!(window.take_done().is_empty(), "the oldest batch is not proven");
        window.prove(tags[0]);
        window.divert(first, 2, Diversion::HeldBehind);
        window.settle(tags[1]);
        let mark = window.take_done();
        assert_eq!(mark.through, Some(2));
        assert_eq!(mark.diverted, vec![(2, Diversion::HeldBehind)]);
        assert!(window.is_empty() && window.in_flight() == 0 && window.bytes() == 0);
    }

    #[test]
    fn a_refusal_after_a_later_row_of_the_key_was_taken_is_seen() {
        let mut window = Window::default();
        let batch = window.open(Some(1), 2);
        let (a, b) = (window.send(sent(1, batch)), window.send(sent(2, batch)));
        assert!(window.proven_after(a).is_empty());
        window.prove(b);
        assert_eq!(window.proven_after(a), vec![2]);
        assert_eq!(window.first_unproven(), Some(1));
    }

    #[test]
    fn g11_reads_that_find_nothing_take_no_room_however_many() {
        let mut window = Window::default();
        let first = window.open(Some(1), 1);
        let tag = window.send(sent(1, first));
        for read in 2..1_000 {
            window.open(Some(read), 0);
        }
        assert_eq!(window.batches.len(), 2);
        let last = window.open(Some(1_000), 1);
        window.prove(tag);
        assert_eq!(window.take_done().through, Some(999));
        let tag = window.send(sent(2, last));
        window.prove(tag);
        assert_eq!(window.take_done().through, Some(1_000));
    }

    #[test]
    fn a_batch_of_rows_on_their_way_back_moves_no_cursor() {
        let mut window = Window::default();
        let batch = window.open(None, 1);
        let tag = window.send(Sent { is_release: true, ..sent(9, batch) });
        window.prove(tag);
        let mark = window.take_done();
        assert_eq!((mark.through, mark.released), (None, vec![9]));
    }
}
