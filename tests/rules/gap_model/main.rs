//! The PostgreSQL cursor against a model of PostgreSQL: thousands of random histories, and mutants
//! of its rules.
//!
//! Of production code the histories run the cursor (`gaps`) and the diversion. The server, the
//! broker, the relay and the split of a shard are models: no change of the real ones fails here.
//!
//! A history has writers that commit in any order, roll back, use savepoints and stay open; a
//! server that crashes and forgets what was not flushed; relays that crash between any two steps,
//! are fenced out and take over; connections whose messages land or vanish long after they were
//! given up; rows that are dead and held, and find back; shards that split and join. Each is a pure
//! function of its seed. One that breaks the contract prints its seed and its events. One in which
//! the cursor differs from the reference prints the difference and its seed.
//!
//! A rule is only tested if its absence shows. So every mutant, a reasonable version with one rule
//! taken out, must break the contract in the way that its rule prevents. The reference stands for
//! the cursor there: in histories without a mutant the two must say the same.

mod broker;
mod checks;
mod cursors;
mod history;
mod mutant;
mod postgres;
mod reference;
mod relay;
mod world;
mod writers;

use self::mutant::Mutant;
use self::world::Stats;

type Count = (&'static str, fn(&Stats) -> u64);

const HISTORIES: u64 = 5_000;
/// A mutant must be caught so often, within so many histories.
const CATCHES: u64 = 1;
const MUTANT_HISTORIES: u64 = 5_000;

#[test]
fn r2_a_committed_position_at_or_below_scanned_to_is_never_forgotten() {
    let mut all = Vec::new();
    for seed in 0..HISTORIES {
        match history::run(seed, None, None) {
            Ok(stats) => all.push(stats),
            Err(violation) => panic!("{violation}\n{}", history::trace(seed, None, None)),
        }
    }
    let total = |count: fn(&Stats) -> u64| all.iter().map(count).sum::<u64>();
    let counts: [Count; 22] = [
        ("messages", |stats| stats.messages),
        ("landed", |stats| stats.landed),
        ("duplicates", |stats| stats.duplicates),
        ("ghosts landed", |stats| stats.ghosts_landed),
        ("rolled back", |stats| stats.rolled_back),
        ("server crashes", |stats| stats.server_crashes),
        ("undone by a crash", |stats| stats.undone_by_crash),
        ("sessions", |stats| stats.sessions),
        ("sessions ended", |stats| stats.sessions_ended),
        ("fenced out", |stats| stats.fenced_out),
        ("rows at gaps", |stats| stats.gap_rows),
        ("positions closed", |stats| stats.closed),
        ("lock watches ended", |stats| stats.closed_by_locks),
        ("reads at the cap", |stats| stats.reads_at_cap),
        ("marks", |stats| stats.marks),
        ("marks of several batches", |stats| stats.marks_of_several),
        ("idle marks", |stats| stats.idle_marks),
        ("dead", |stats| stats.dead),
        ("held", |stats| stats.held),
        ("released", |stats| stats.released),
        ("splits", |stats| stats.splits),
        ("joins", |stats| stats.joins),
    ];
    for (name, count) in counts {
        let count = total(count);
        println!("{count:9} {name}");
        assert!(count >= 100, "{HISTORIES} histories met {count} {name}: they prove nothing about it");
    }
}

/// Runs histories of a mutant until the model has seen what it breaks often enough, each time in a
/// history that is clean with the rule in place.
fn breaks(mutant: Mutant) {
    let mut seen = std::collections::BTreeMap::new();
    let mut histories = 0;
    while histories < MUTANT_HISTORIES && seen.get(&mutant.breaks()).copied().unwrap_or(0) < CATCHES {
        if let Err(violation) = history::run(histories, Some(mutant), Some(mutant)) {
            *seen.entry(violation.kind).or_insert(0_u64) += 1;
            if let Err(violation) = history::run(histories, Some(mutant), None) {
                panic!("{violation}\n{}", history::trace(histories, Some(mutant), None));
            }
        }
        histories += 1;
    }
    println!("{mutant:?} in {histories} histories: {seen:?}");
    let caught = seen.get(&mutant.breaks()).copied().unwrap_or(0);
    assert!(caught >= CATCHES, "{mutant:?} must break {:?}: {seen:?} in {histories}", mutant.breaks());
}

macro_rules! broken {
    ($(fn $name:ident: $mutant:ident,)*) => {
        $(#[test]
        fn $name() {
            breaks(Mutant::$mutant);
        })*
    };
}

broken! {
    fn r1_a_position_drawn_before_the_id_loses_messages: PositionBeforeId,
    fn r2_a_session_that_starts_without_a_fence_loses_messages: StartWithoutFence,
    fn r2_a_read_that_forgets_what_is_missing_before_its_first_row_loses_messages: NothingBeforeTheFirst,
    fn r2_closing_gaps_beyond_a_limit_that_was_reached_loses_messages: LimitIgnored,
    fn r2_a_fence_taken_before_the_read_loses_messages: FenceBeforeRead,
    fn r2_a_checkpoint_that_fences_nothing_closes_no_gap_ever: NoFence,
    fn r2_persisting_the_gaps_that_memory_has_at_the_mark_loses_messages: PersistMemoryAtMark,
    fn r2_persisting_the_gaps_that_memory_has_at_the_checkpoint_loses_messages: PersistMemoryAtCheckpoint,
    fn r2_marking_a_proven_batch_that_is_not_the_oldest_loses_messages: MarkAnyProven,
    fn r2_a_cursor_that_reads_beyond_the_highest_seen_position_loses_messages: HighestSeen,
    fn r3_the_xmax_of_a_snapshot_as_the_fence_loses_messages: XmaxIsTheFence,
    fn r4_reading_gaps_again_less_often_breaks_the_order_of_a_key: RecheckSeldom,
    fn r4_reading_gaps_again_in_a_statement_of_their_own_breaks_the_order_of_a_key: RecheckApart,
    fn r5_sending_before_the_checkpoint_returned_publishes_what_never_existed: SendBeforeCheckpoint,
    fn r5_a_checkpoint_that_began_before_the_read_publishes_what_never_existed: CheckpointBeforeRead,
    fn r6_lock_holders_remembered_by_backend_lose_messages: HoldersByBackend,
    fn r6_lock_holders_that_speak_for_gaps_found_later_lose_messages: HoldersForLaterGaps,
    fn r6_holders_that_end_while_a_read_is_under_way_must_not_close_gaps_at_it: HoldersGoneDuringRead,
    fn r15_skipping_a_refused_row_and_going_on_with_its_key_breaks_its_order: SkipAndGoOn,
    fn r17_diverting_by_the_table_without_the_window_breaks_the_order_of_a_key: DivertByTableOnly,
    fn r18_joining_shards_with_the_gaps_that_both_have_loses_messages: JoinByIntersection,
}
