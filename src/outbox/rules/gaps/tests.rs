//! Pure: no I/O, no clock.
//! The rules of the cursor, one test for each. Tests with random histories are in
//! `tests/rules/gap_model`.

use super::*;

fn set(ranges: &[(i64, i64)]) -> GapSet {
    ranges.iter().map(|&(from, to)| Range { from, to }).collect()
}

/// The open gaps of the next read.
fn ranges(cursor: &mut GapCursor) -> Vec<(i64, i64)> {
    cursor.begin_read().ranges.iter().map(|range| (range.from, range.to)).collect()
}

/// A complete read that did not reach its LIMIT.
fn read(cursor: &mut GapCursor, xmin: u64, positions: &[i64]) -> ReadOutcome {
    cursor.begin_read();
    cursor.on_read(xmin, positions, false, false).expect("a clean read")
}

fn checkpoint(cursor: &mut GapCursor, xid: u64, now: u64) {
    let ticket = cursor.begin_checkpoint();
    cursor.on_checkpoint(ticket, xid, now).expect("a clean checkpoint");
}

fn mark(cursor: &mut GapCursor, batch: u64) -> Mark {
    let mark = cursor.mark_through(batch).expect("a batch to mark");
    cursor.on_marked(mark.clone());
    mark
}

fn started() -> GapCursor {
    GapCursor::start(0, &GapSet::new(), 10, RANGES_MAX)
}

#[test]
fn r2_missing_positions_between_and_before_the_rows_become_gaps() {
    let mut cursor = GapCursor::start(4, &GapSet::new(), 10, RANGES_MAX);
    let outcome = read(&mut cursor, 10, &[7, 8, 11]);
    assert_eq!(outcome.batch, Some(1));
    assert_eq!(ranges(&mut cursor), [(5, 7), (9, 11)]);
    assert_eq!(cursor.read_to(), 11);
}

#[test]
fn r2_a_row_at_a_gap_belongs_to_the_batch_and_read_to_never_goes_back() {
    let mut cursor = started();
    read(&mut cursor, 10, &[5]);
    let outcome = read(&mut cursor, 10, &[2]);
    assert_eq!(outcome.batch, Some(2));
    assert_eq!(ranges(&mut cursor), [(1, 2), (3, 5)]);
    assert_eq!(cursor.read_to(), 5);
    assert_eq!(mark(&mut cursor, 1).gaps.to_string(), "{[1,5)}", "row 2 is not proven with batch 1");
}

#[test]
fn r2_a_gap_closes_when_every_transaction_older_than_its_fence_has_ended() {
    let mut cursor = started();
    read(&mut cursor, 10, &[2]);
    checkpoint(&mut cursor, 15, 0);
    assert_eq!(read(&mut cursor, 14, &[]).closed, []);
    assert_eq!(read(&mut cursor, 15, &[]).closed, [Range { from: 1, to: 2 }]);
    assert_eq!(ranges(&mut cursor), []);
}

#[test]
fn r2_a_gap_without_a_fence_never_closes() {
    let mut cursor = started();
    read(&mut cursor, 10, &[2]);
    assert!(cursor.needs_checkpoint());
    assert_eq!(read(&mut cursor, u64::MAX, &[]).closed, []);
}

#[test]
fn r2_a_checkpoint_that_began_before_the_read_is_no_fence_for_its_gaps() {
    let mut cursor = started();
    let early = cursor.begin_checkpoint();
    read(&mut cursor, 10, &[2]);
    cursor.on_checkpoint(early, 15, 0).expect("an ascending id");
    assert!(cursor.needs_checkpoint());
    assert_eq!(read(&mut cursor, 99, &[]).closed, []);
    checkpoint(&mut cursor, 100, 0);
    assert!(!cursor.needs_checkpoint());
}

#[test]
fn r2_with_the_limit_reached_a_gap_closes_only_below_the_last_row() {
    let mut cursor = GapCursor::start(9, &set(&[(1, 4), (5, 9)]), 10, RANGES_MAX);
    cursor.begin_read();
    let outcome = cursor.on_read(10, &[6], true, false).expect("a clean read");
    assert_eq!(outcome.closed, [Range { from: 1, to: 4 }, Range { from: 5, to: 6 }]);
    assert_eq!(ranges(&mut cursor), [(7, 9)]);
}

#[test]
fn r2_a_session_starts_with_every_gap_fenced_by_the_transaction_that_took_the_lease() {
    let mut cursor = GapCursor::start(9, &set(&[(3, 5)]), 10, RANGES_MAX);
    assert!(!cursor.needs_checkpoint());
    assert_eq!(read(&mut cursor, 9, &[]).closed, []);
    assert_eq!(read(&mut cursor, 10, &[]).closed, [Range { from: 3, to: 5 }]);
}

#[test]
fn r2_a_mark_keeps_the_rows_at_gaps_of_later_batches_as_gaps() {
    let mut cursor = started();
    read(&mut cursor, 10, &[3, 5]); // batch 1: gaps 1, 2 and 4
    read(&mut cursor, 10, &[2, 8]); // batch 2: row 2 came late; gaps 6 and 7
    let first = mark(&mut cursor, 1);
    assert_eq!((first.scanned_to, first.gaps.to_string()), (5, "{[1,3),[4,5)}".to_owned()));
    let second = mark(&mut cursor, 2);
    assert_eq!((second.scanned_to, second.gaps.to_string()), (8, "{[1,2),[4,5),[6,8)}".to_owned()));
    assert_eq!(cursor.mark_through(3), None);
}

#[test]
fn r2_a_mark_through_several_batches_is_the_mark_of_the_last() {
    let mut cursor = started();
    read(&mut cursor, 10, &[3]);
    read(&mut cursor, 10, &[1]);
    read(&mut cursor, 10, &[2, 6]);
    let through_two = cursor.mark_through(2).expect("in the window");
    assert_eq!((through_two.scanned_to, through_two.gaps.to_string()), (3, "{[2,3)}".to_owned()));
    cursor.on_marked(through_two);
    assert_eq!(cursor.mark_through(2), None, "it has left the window");
    assert!(cursor.mark_through(3).is_some(), "it waits for its own mark");
    assert_eq!(cursor.mark_through(4), None, "it was never read");
}

#[test]
fn r2_a_mark_made_before_a_later_read_is_still_right_after_it() {
    let mut cursor = started();
    read(&mut cursor, 10, &[3]);
    let made = cursor.mark_through(1).expect("a batch");
    read(&mut cursor, 10, &[1, 4]);
    cursor.on_marked(made.clone());
    assert!(made.gaps.iter().any(|gap| gap.from == 1), "row 1 is in the window, and in the gaps on disk");
    assert_eq!((cursor.mark_through(2).is_some(), cursor.check()), (true, Ok(())));
}

#[test]
fn gaps_that_close_while_nothing_is_in_the_window_can_be_persisted() {
    let mut cursor = started();
    read(&mut cursor, 10, &[3]);
    checkpoint(&mut cursor, 11, 0);
    mark(&mut cursor, 1);
    assert_eq!(cursor.mark_idle(), None, "nothing has changed");
    read(&mut cursor, 11, &[]);
    let idle = cursor.mark_idle().expect("a gap has closed");
    assert_eq!((idle.batch, idle.scanned_to, idle.gaps.last()), (1, 3, None));
    read(&mut cursor, 11, &[4]);
    assert_eq!(cursor.mark_idle(), None, "a batch is in the window");
    cursor.on_marked(idle);
    assert_eq!(mark(&mut cursor, 2).scanned_to, 4, "it waits for its own mark");
}

#[test]
fn r6_a_gap_closes_at_the_read_that_begins_after_its_lock_holders_have_ended() {
    let mut cursor = started();
    read(&mut cursor, 10, &[2]);
    checkpoint(&mut cursor, 15, 100);
    assert_eq!(cursor.begin_lock_watch(104, 5), 0);
    assert_eq!(cursor.begin_lock_watch(105, 5), 1);
    cursor.on_lock_holders(vec![12, 14]);
    assert_eq!(cursor.lock_watch(), Some(&[12, 14][..]));
    cursor.on_still_holding(&[14]);
    assert_eq!(cursor.lock_watch(), Some(&[14][..]));
    cursor.begin_read();
    cursor.on_still_holding(&[]);
    assert_eq!(cursor.on_read(11, &[], false, false).expect("clean").closed, [], "this read had begun before");
    assert_eq!(read(&mut cursor, 11, &[]).closed, [Range { from: 1, to: 2 }]);
}

#[test]
fn r6_without_any_holder_the_next_read_closes_and_a_row_that_came_is_taken() {
    let mut cursor = started();
    read(&mut cursor, 10, &[3]);
    checkpoint(&mut cursor, 15, 0);
    cursor.begin_lock_watch(9, 9);
    cursor.on_lock_holders(vec![]);
    let outcome = read(&mut cursor, 11, &[2]);
    assert_eq!(outcome.closed, [Range { from: 1, to: 2 }]);
    assert_eq!(ranges(&mut cursor), []);
}

#[test]
fn r6_a_gap_found_after_the_holders_were_listed_is_not_covered_by_them() {
    let mut cursor = started();
    read(&mut cursor, 10, &[2]);
    assert_eq!(cursor.begin_lock_watch(u64::MAX, 0), 0, "without a fence it is never stale");
    checkpoint(&mut cursor, 15, 0);
    cursor.begin_lock_watch(0, 0);
    read(&mut cursor, 10, &[4]);
    checkpoint(&mut cursor, 16, 0);
    cursor.on_lock_holders(vec![12]);
    assert_eq!(cursor.begin_lock_watch(9, 0), 0, "one watch at a time");
    cursor.on_still_holding(&[]);
    assert_eq!(read(&mut cursor, 10, &[]).closed, [Range { from: 1, to: 2 }]);
    assert_eq!(cursor.begin_lock_watch(9, 0), 1, "the next watch takes the rest");
}

#[test]
fn r9_at_the_cap_only_gaps_are_read_until_some_close() {
    let mut cursor = GapCursor::start(9, &set(&[(1, 2), (3, 4)]), 10, 3);
    assert_eq!((cursor.room(), cursor.row_limit(500)), (1, 1));
    read(&mut cursor, 9, &[11]);
    assert_eq!(cursor.room(), 0);
    assert_eq!(cursor.row_limit(500), 1, "a row inside a range splits it");
    let plan = cursor.begin_read();
    assert_eq!((plan.ranges.len(), plan.tail_from), (3, None));
    assert_eq!(
        cursor.on_read(9, &[12], false, false),
        Err("position 12 is neither an open gap nor beyond what was read".to_owned())
    );
    assert_eq!(read(&mut cursor, 10, &[]).closed.len(), 2);
    assert_eq!(cursor.begin_read().tail_from, Some(12));
}

#[test]
fn a_read_that_cannot_be_true_ends_the_session_and_changes_nothing() {
    let mut cursor = started();
    assert_eq!(cursor.on_read(10, &[], false, false), Err("a read was reported that had not begun".to_owned()));
    read(&mut cursor, 10, &[2, 4]);
    for (xmin, positions, error) in [
        (10, vec![5, 5], "positions do not ascend: 5 came after 5".to_owned()),
        (10, vec![5, 3], "positions do not ascend: 3 came after 5".to_owned()),
        (10, vec![4, 5], "position 4 is neither an open gap nor beyond what was read".to_owned()),
        (10, vec![i64::MAX], format!("position {} is neither an open gap nor beyond what was read", i64::MAX)),
        (9, vec![], "the oldest running transaction went back from 10 to 9".to_owned()),
    ] {
        cursor.begin_read();
        assert_eq!(cursor.on_read(xmin, &positions, false, false), Err(error));
    }
    let ticket = cursor.begin_checkpoint();
    assert_eq!(
        cursor.on_checkpoint(ticket, 10, 0),
        Err("the transaction id of a checkpoint went back from 10 to 10".to_owned())
    );
    assert_eq!((ranges(&mut cursor), cursor.check()), (vec![(1, 2), (3, 4)], Ok(())));
    assert!(cursor.mark_through(1).is_some() && cursor.mark_through(2).is_none());
}

#[test]
fn r7_a_sequence_behind_what_was_read_is_seen() {
    let mut cursor = started();
    assert!(!cursor.is_ahead_of(0));
    read(&mut cursor, 10, &[7]);
    assert!(cursor.is_ahead_of(6) && !cursor.is_ahead_of(7));
}

#[test]
fn a_persisted_gap_above_scanned_to_is_read_as_part_of_the_tail() {
    let mut cursor = GapCursor::start(4, &set(&[(2, 3), (6, 8)]), 10, RANGES_MAX);
    assert_eq!((ranges(&mut cursor), cursor.check()), (vec![(2, 3)], Ok(())));
    read(&mut cursor, 9, &[9]);
    assert_eq!(ranges(&mut cursor), [(2, 3), (5, 9)]);
}

#[test]
fn the_text_of_a_set_is_that_of_a_multirange() {
    for text in ["{}", "{[1,2)}", "{[-5,-1),[3,9223372036854775807)}"] {
        assert_eq!(text.parse::<GapSet>().expect("a multirange").to_string(), text);
    }
    for text in ["", "{", "{[1,2]}", "{(1,2)}", "{[1,2),}", "{[2,1)}", "{[1,x)}", "{[1,2),[3,4}", "{[,5)}"] {
        assert!(text.parse::<GapSet>().is_err(), "{text}");
    }
}

#[test]
fn ranges_in_any_order_and_overlapping_are_one_set() {
    assert_eq!(set(&[(5, 6), (1, 3), (2, 5)]), set(&[(1, 6)]));
    assert_eq!(set(&[(3, 4), (5, 6)]).to_string(), "{[3,4),[5,6)}", "a position between them is in neither");
}

/// Shown to fail when each read makes a batch of its own: there are 1,000 of them then.
#[test]
fn g11_reads_of_other_shards_rows_are_one_batch() {
    let mut cursor = started();
    assert_eq!(read(&mut cursor, 10, &[1]).batch, Some(1));
    checkpoint(&mut cursor, 11, 0);
    let pass = |cursor: &mut GapCursor, positions: &[i64]| {
        cursor.begin_read();
        let outcome = cursor.on_read(11, positions, false, true).expect("a clean read");
        assert!(cursor.needs_checkpoint(), "a gap that was found is fenced");
        outcome.batch
    };
    for position in 2..1_000 {
        assert_eq!(pass(&mut cursor, &[position * 2]), Some(2));
        // This row commits late, and this shard does not have to prove it.
        assert_eq!(pass(&mut cursor, &[position * 2 - 1]), Some(2));
    }
    checkpoint(&mut cursor, 12, 0);
    assert_eq!(read(&mut cursor, 11, &[2_000]).batch, Some(3), "what is ours stands for itself");
    assert_eq!(pass(&mut cursor, &[2_001]), Some(4));
    let marked = mark(&mut cursor, 2);
    assert_eq!((marked.scanned_to, marked.gaps), (1_998, set(&[(2, 3)])));
    assert_eq!(mark(&mut cursor, 4).scanned_to, 2_001);
}
