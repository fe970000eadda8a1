//! The store suite: tests of what every store adapter must do.
//!
//! An adapter implements [`Fixture`] for its tests and writes
//! `oncebox_testkit::store_conformance!(MyFixture);`. This makes one test for each case, named
//! after the sentence that it proves, each on its own database. A case whose name begins with a
//! letter and a number proves what stands under it: `g`, a promise, and `r` or `o`, a rule
//! (`docs/reference/rules.md`); `m`, an item of the mission (`docs/reference/mission.md`).
//!
//! `Shown by: ...` and `Shown to fail: ...` name the defects with which the case failed.
//!
//! The limits of messages are a table ([`limit_cases`]), so that every SQL door of an adapter runs
//! the same cases (R34).
//!
//! Not here: what only one database has (plans, settings of a server, fences of a cursor). The
//! adapter's own tests have that.
#![allow(clippy::unwrap_used)]

pub mod door;
pub mod fencing;
pub mod held;
pub mod inbox;
pub mod key_operator;
pub mod keys;
pub mod keys_machine;
pub mod lifetimes;
mod limits;
pub mod lost;
mod machine;
pub mod mailbox;
pub mod operations;
pub mod operator;
pub mod phases;
pub mod phases_leave;
pub mod phases_marks;
pub mod proof;
pub mod purge;
pub mod records;
pub mod redrive;
pub mod relay;
pub mod schema;
pub mod transactional;
mod trial;
pub mod waiting;

use std::future::Future;

use sqlx::{Database, Transaction};

pub use limits::{LimitCase, RawMessage, RawValue, limit_cases};
pub use trial::Trial;

use oncebox::store::{Base, Keys, OperationStore, Schema};

/// The connection of a fixture's database.
pub type Connection<F> = <<<F as Fixture>::Store as Base>::Db as Database>::Connection;

/// A private database of a test, with what only a test needs of it.
pub trait Fixture: Sized + Send + Sync + 'static {
    /// The store under test.
    type Store: OperationStore;

    /// The prefix of the names of oncebox's tables: `oncebox_` or `oncebox.`.
    const PREFIX: &'static str;

    /// Whether two transactions can write at the same time.
    const CONCURRENT_WRITERS: bool;

    /// How the server ends a connection: a query for the number of its own connection, and the
    /// statement that ends number `{}`. None where there is no server, so that no connection can be
    /// lost.
    const KILL: Option<(&'static str, &'static str)>;

    /// Whether the writes of a handler after its own raw ROLLBACK are undone. Where false, the
    /// database commits each such statement by itself, and the proof must answer `Ended`.
    const UNDOES_WHAT_FOLLOWS: bool = true;

    /// The statements by which a handler commits although the store refuses what it can. Cases of
    /// the proof use it: the proof finds out what is not refused.
    const COMMIT: &'static str = "commit";

    /// Makes a private, empty database, without the schema. None where the service that it needs
    /// does not run.
    fn empty() -> impl Future<Output = Option<Self>> + Send;

    /// Makes a private database with the schema. None as for [`Fixture::empty`].
    fn migrated() -> impl Future<Output = Option<Self>> + Send {
        async {
            let fixture = Self::empty().await?;
            let store = fixture.connect().await;
            store.migrate().await.unwrap();
            store.close().await;
            Some(fixture)
        }
    }

    /// Connects another store to the database, as another process would.
    fn connect(&self) -> impl Future<Output = Self::Store> + Send;

    /// Begins a transaction as an application does.
    fn begin(store: &Self::Store) -> impl Future<Output = Transaction<'static, <Self::Store as Base>::Db>> + Send;

    /// Runs SQL unchanged and returns the number of rows that it changed.
    fn run(connection: &mut Connection<Self>, sql: &str) -> impl Future<Output = Result<u64, sqlx::Error>> + Send;

    /// Runs a query that returns one whole number.
    fn number(connection: &mut Connection<Self>, sql: &str) -> impl Future<Output = Result<i64, sqlx::Error>> + Send;

    /// Makes the lease of shard 0 end this many seconds from now, by the database's clock.
    fn set_lease_end(store: &Self::Store, seconds: i64) -> impl Future<Output = ()> + Send;

    /// Drops the database at the end of a case.
    fn remove(self) -> impl Future<Output = ()> + Send;
}

/// A private store of keys, with what only a test needs of it. Every [`Fixture`] has one: its
/// [`Trial`].
pub trait KeysFixture: Sized + Send + Sync + 'static {
    /// The store under test.
    type Store: Keys;

    /// Makes a private, empty store. None, with a line `SKIPPED: case (why)` on stderr, where the
    /// service that it needs does not run.
    fn start(case: &str) -> impl Future<Output = Option<Self>> + Send;

    /// The store that the cases run on.
    fn store(&self) -> &Self::Store;

    /// Whether the store itself removes records and bodies at their time, without a cleaner.
    fn forgets_by_itself(&self) -> bool {
        false
    }

    /// Whether a cleaner removes bodies in batches.
    fn bodies_go_in_batches(&self) -> bool {
        !self.forgets_by_itself()
    }

    /// Sets the length of every stored lease to a second and keeps its end, as if the clock had
    /// gone back.
    fn shorten_leases(&self) -> impl Future<Output = ()> + Send;

    /// How many records are stored.
    fn records(&self) -> impl Future<Output = i64> + Send;

    /// How many bodies are stored.
    fn bodies(&self) -> impl Future<Output = i64> + Send;

    /// Removes the store. Not called when a case fails.
    fn end(self) -> impl Future<Output = ()> + Send;
}

/// Makes one test for each case of a store of keys, on a fixture:
/// `oncebox_testkit::keys_conformance!(MyFixture);`. A whole store has them in
/// [`store_conformance!`](crate::store_conformance) already.
#[macro_export]
macro_rules! keys_conformance {
    ($fixture:ty) => {
        $crate::keys_conformance! { $fixture;
            keys: [
                m39_of_twenty_claims_at_once_one_owns,
                m42_what_refuses_a_claim_stands_whole,
                o16_keys_and_tenants_that_differ_in_one_byte_are_different,
                o3_an_answer_comes_back_as_it_was,
                o2_a_claim_is_taken_over_only_when_its_lease_is_over,
                r22_a_claim_whose_lease_is_longer_than_its_length_is_stale,
                o2_an_owner_that_was_taken_over_changes_nothing,
                o11_a_release_frees_the_key_only_while_it_runs,
                o11_a_claim_whose_answer_was_lost_can_be_taken_back,
                o11_a_repeat_that_is_taken_back_is_unknown_again,
                o11_a_stale_edge_claim_becomes_unknown_once,
                o29_what_failed_with_nothing_outstanding_runs_again,
                o4_a_key_is_used_anew_only_after_its_time,
                m99_bodies_go_and_their_records_stay,
                m34_m99_a_resource_outlives_the_body_and_not_its_run,
                o4_a_body_of_any_size_is_that_of_the_last_run,
                m100_a_purge_takes_only_what_has_its_outcome,
                m103_what_is_open_is_counted,
                m120_what_a_tenant_has_stored_is_counted,
                o2_a_claim_of_another_door_is_refused,
            ];
            keys_machine: [
                m31_every_call_changes_a_record_as_the_machine_is_drawn,
                o23_a_key_from_beyond_the_usual_skew_is_too_old_once_its_record_is_gone,
            ];
        }
    };
    ($fixture:ty; $($module:ident: [$($case:ident),* $(,)?];)*) => {
        $($(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                use $crate::store::KeysFixture;
                let Some(fixture) = <$fixture as KeysFixture>::start(stringify!($case)).await else {
                    return;
                };
                $crate::store::$module::$case(&fixture).await;
                fixture.end().await;
            }
        )*)*
    };
}

/// Makes one test for each case of the suite, on a fixture:
/// `oncebox_testkit::store_conformance!(MyFixture);`.
#[macro_export]
macro_rules! store_conformance {
    ($fixture:ty) => {
        $crate::keys_conformance!($crate::store::Trial<$fixture>);
        $crate::store_conformance! { $fixture;
            schema: [
                a_new_database_has_no_schema,
                a_new_database_has_no_schema_and_a_call_names_the_remedy,
                migrating_twice_changes_nothing,
                migrators_at_once_do_not_disturb_each_other,
                a_schema_that_is_older_or_newer_is_told_apart,
                a_program_that_a_newer_schema_still_serves_starts,
                a_sound_database_passes_its_check,
            ];
            door: [
                g1_what_is_rolled_back_never_existed,
                g1_what_is_committed_is_there_with_the_rows_beside_it,
                many_messages_keep_their_order_and_every_part,
                an_id_is_made_unless_given_and_may_be_given_twice,
                r34_every_limit_holds_at_the_rust_door,
                one_bad_message_refuses_the_whole_call,
                limits_are_rows_that_can_be_raised_and_lowered,
                trace_context_given_as_headers_becomes_the_trace,
            ];
            relay: [
                rows_come_in_position_order_and_never_twice_in_a_session,
                everything_that_is_not_marked_comes_again_after_a_reopen,
                a_mark_covers_the_batches_up_to_it_and_no_more,
                holes_of_rolled_back_transactions_never_stall,
                a_lower_position_that_commits_late_is_not_lost,
                many_writers_at_once_lose_nothing_and_keep_each_their_order,
                r7_a_position_that_the_relay_has_passed_is_refused_or_read,
                a_read_is_bounded_and_says_whether_there_is_more,
                g11_a_read_gives_no_more_bytes_than_were_asked_for,
                tidying_never_takes_what_is_not_proven,
            ];
            fencing: [
                a_shard_has_one_owner_and_the_same_owner_takes_it_again,
                a_lease_that_is_given_back_is_free_at_once,
                a_lease_ends_by_the_clock_of_the_database,
                r22_a_lease_longer_than_its_length_counts_as_expired,
                checkpoints_renew_the_lease,
                g9_a_session_that_lost_its_lease_changes_nothing,
                r7_a_shard_that_is_not_as_the_session_left_it_ends_the_session,
                an_unknown_shard_is_told_apart,
            ];
            held: [
                r17_a_dead_row_is_copied_whole_in_the_mark,
                dead_and_held_rows_come_back_in_position_order,
                a_row_without_a_key_is_held_behind_and_comes_back,
                a_released_row_leaves_and_a_changed_one_stays,
                a_message_that_was_sent_before_its_discard_is_audited_as_sent,
                a_discard_that_meets_the_mark_of_its_message_is_audited_as_sent,
                a_discarded_row_is_gone_for_good,
                g11_dead_rows_of_every_policy_are_counted_up_to_a_bound,
                a_mark_that_cannot_be_whole_changes_nothing,
                g11_a_reason_is_kept_up_to_its_bound,
                g11_rows_on_their_way_back_come_within_the_bytes_of_a_read,
            ];
            inbox: [
                a_consumer_keeps_its_number_and_its_id_rule,
                r24_the_unique_key_decides_what_is_new,
                r24_a_concurrent_duplicate_waits_and_is_known_after_the_commit,
                r24_a_concurrent_duplicate_is_new_after_the_rollback,
                r24_batches_that_overlap_do_not_deadlock,
                an_id_that_another_open_transaction_inserted_is_contested,
                consumers_do_not_share_their_inboxes,
                g7_another_content_under_the_same_id_is_seen,
                r32_ids_that_differ_only_in_spelling_are_different,
                a_parked_message_blocks_its_key_and_no_other,
                what_is_parked_goes_with_its_inbox_row,
                r31_a_forgotten_id_is_new_again,
                r26_tries_are_counted_outside_the_handlers_transaction,
                r26_the_first_tries_of_a_batch_are_counted_together_and_once,
                r26_a_try_that_was_not_made_is_taken_back,
                r26_tries_are_taken_back_without_those_that_the_next_owner_counted,
                an_assignment_found_open_was_not_closed,
                an_owner_that_lost_a_partition_changes_nothing_of_the_next_ones_row,
                a_row_that_was_taken_is_taken_back_unless_it_is_further,
                a_position_is_remembered_until_a_later_one_is_told,
                a_position_knows_under_which_id_rule_it_was_kept,
                a_transaction_that_is_dropped_leaves_nothing,
                effects_of_an_enqueue_go_with_the_transaction,
            ];
            proof: [
                r23_an_error_that_was_swallowed_never_commits_half,
                r23_a_commit_of_the_handler_is_found_out,
                r23_a_commit_with_a_new_begin_is_found_out,
                r23_a_commit_with_a_new_begin_that_fails_is_found_out,
                r23_a_rollback_of_the_handler_is_found_out,
                r23_a_rollback_with_a_new_begin_is_found_out,
                r23_a_second_begin_never_splits_the_transaction,
                r23_a_table_made_by_the_handler_never_splits_the_transaction,
                r23_savepoints_of_the_handler_are_its_own,
                what_a_handler_committed_is_told_although_its_connection_is_lost,
                what_a_handler_committed_is_told_while_a_statement_of_it_runs,
                a_head_that_a_handler_committed_is_told,
                a_head_that_its_handler_changed_is_not_finished,
                a_head_that_another_process_finished_is_not_told_as_committed,
            ];
            purge: [
                r31_a_purge_takes_what_is_past_and_nothing_else,
                a_purge_goes_on_where_its_last_step_ended,
                r31_messages_that_wait_or_are_dead_keep_their_rows,
                r31_the_bound_is_recorded_with_the_first_row_and_never_lowered,
                r31_no_row_is_gone_before_the_bound_is_recorded,
                g8_what_was_purged_is_new_to_the_insert_and_too_old_to_the_verdict,
                r31_ages_are_judged_by_the_time_of_receipt,
                g11_tries_of_what_was_handled_since_are_forgotten,
            ];
            lost: [
                r27_a_lost_connection_in_any_statement_of_the_inbox_transaction_is_a_transient_failure,
                g12_a_commit_on_a_lost_connection_is_unknown_and_not_an_error,
            ];
            waiting: [
                r25_only_the_head_of_a_key_is_leased,
                r25_a_head_is_leased_once_by_many_at_once,
                r25_finishing_makes_the_next_of_the_key_due,
                r23_what_is_committed_before_the_proof_is_dead_at_its_place,
                a_message_with_a_dead_copy_is_dead_once,
                a_message_comes_back_from_waiting_as_it_was,
                a_message_is_not_due_before_its_time,
                a_message_is_stored_whatever_its_time_is,
                a_waiting_message_is_left_to_a_process_that_takes_its_kind_and_reads_its_topic,
                r25_only_a_head_is_due_next,
                r25_what_was_never_tried_of_a_key_is_leased_with_its_head,
                g11_what_is_leased_behind_a_head_is_bounded_in_bytes,
                r25_a_key_is_woken_when_its_head_went_while_one_came_to_stand_behind_it,
                r22_a_lease_that_ends_later_than_any_lease_can_is_over,
                a_lease_that_ended_is_taken_over_and_the_old_one_finishes_nothing,
                a_postponed_message_keeps_its_tries_and_a_returned_one_does_not,
                g10_a_lease_whose_answer_was_lost_is_given_back_uncounted,
                a_buried_message_holds_its_key_or_lets_it_go,
                r25_a_head_that_a_race_left_behind_is_swept_up,
                messages_without_a_key_wait_for_nobody,
                dead_deliveries_are_stored_once,
                g11_dead_and_waiting_messages_are_counted_up_to_a_bound,
            ];
            operator: [
                the_status_counts_what_is_there,
                what_is_held_and_what_waits_is_listed_with_its_reason_and_its_next_try,
                g11_the_status_counts_no_further_than_its_bound,
                a_waiting_message_is_tried_now_buried_or_discarded_unless_a_process_runs_it,
                a_held_message_is_discarded_by_request_and_by_nothing_else,
                a_consumer_that_is_gone_is_forgotten_and_one_that_is_there_is_not,
                what_operators_did_is_read_newest_first,
                dead_messages_are_listed_with_their_history,
                g11_of_a_message_the_last_fifty_errors_are_kept_each_up_to_its_bound,
                a_redriven_consumer_message_runs_again_and_is_audited,
                a_discarded_consumer_message_lets_its_key_go_on,
                a_redrive_under_a_new_id_is_another_message,
                a_dry_run_writes_nothing,
                r17_acts_on_outbox_rows_are_requests_to_the_owner,
                r31_an_old_outbox_row_needs_a_new_id,
                r31_redriving_what_left_no_inbox_row_inserts_it,
                r31_what_another_copy_did_since_is_discarded_by_its_redrive,
            ];
            redrive: [
                r22_a_message_whose_lease_ends_later_than_any_lease_can_is_buried,
                r31_a_message_with_a_new_id_is_redriven_again_under_that_id,
                what_stands_behind_a_dead_message_counts_no_dead_ones,
                a_message_before_a_dead_one_of_its_key_waits_and_is_not_held,
                r25_after_a_redrive_only_the_first_of_its_key_is_due,
                r31_what_was_refused_and_failed_since_is_dead_by_its_failure,
            ];
            operations: [
                o2_a_bridged_outcome_goes_with_the_handlers_transaction,
                a_claim_is_not_released_where_a_run_of_it_said_that_it_ended,
                a_failed_run_is_not_reclaimed_where_a_late_one_succeeded,
                a_late_run_is_an_orphan_of_a_key_used_anew_only_where_its_record_said_otherwise,
                m100_a_purge_takes_the_bodies_of_its_records,
            ];
            transactional: [
                m50_claim_effects_messages_and_answer_commit_together,
                m50_messages_given_with_the_outcome_commit_with_it,
                o29_a_dropped_operation_leaves_nothing,
                o15_a_duplicate_of_an_open_operation_is_locked_and_does_not_wait,
                o15_a_key_that_is_claimed_unseen_is_looked_for_all_the_same,
                m41_of_many_at_once_one_has_its_effect,
                o1_a_rejection_is_remembered_without_its_effects,
                o1_a_handler_that_ends_its_transaction_never_completes,
                o1_what_was_committed_behind_an_aborted_transaction_is_never_called_undone,
                o1_an_error_that_was_swallowed_never_commits_half,
                o1_a_table_made_by_the_handler_never_splits_the_transaction,
                o4_door_a_runs_again_what_it_may,
                o2_an_operation_of_another_mode_is_refused_at_door_a,
            ];
            phases: [
                o22_claim_command_operation_and_first_phase_commit_together,
                o9_of_twenty_that_take_an_operation_up_one_drives_it,
                r22_a_lease_of_an_operation_longer_than_its_length_is_over,
                o22_twenty_workers_take_different_due_operations_of_their_versions,
                a_tenant_that_has_its_share_is_left_out,
                o9_a_driver_of_an_older_epoch_changes_nothing_and_its_evidence_is_kept,
                o9_a_phase_moves_on_only_from_the_point_it_knew,
                o5_an_effect_its_key_and_its_bytes_are_committed_once,
                o5_sends_are_counted_under_races_and_after_a_crash,
                a_send_that_did_not_leave_is_taken_back_by_its_driver_alone,
                m32_the_record_is_in_the_state_of_the_stage_after_each_step,
                o13_a_phase_does_not_move_on_to_what_it_is_not,
                o13_a_rejection_of_the_first_phase_is_remembered_without_its_effects,
                o1_a_handler_that_ends_the_transaction_of_a_phase_is_found_out,
            ];
            phases_leave: [
                o22_an_operation_that_cannot_be_read_is_parked_and_the_others_are_taken,
                o8_who_brings_proof_is_seen_by_a_parking_or_finds_it,
                o9_what_is_left_as_it_was_due_is_due_when_it_was,
            ];
            phases_marks: [
                o1_a_phase_that_somebody_else_committed_is_not_begun_again,
                o9_a_phase_of_which_nothing_was_committed_is_begun_again,
                o9_a_phase_is_not_begun_beside_a_run_that_has_not_ended,
                o9_a_driver_that_was_overtaken_begins_no_run,
            ];
            lifetimes: [
                o9_a_parked_operation_waits_for_an_operator,
                o3_what_is_recovered_late_is_remembered_from_its_outcome,
                o4_a_key_used_anew_gets_a_new_operation,
                o4_nothing_is_left_of_an_operation_whose_key_is_used_anew,
                o8_what_arrives_while_a_conflict_is_judged_is_not_judged_with_it,
                a_conflict_outlives_its_record_until_it_is_judged,
                o22_the_deployment_is_the_databases,
                the_status_counts_operations_and_keys_that_nobody_carries_on,
            ];
            key_operator: [
                keys_are_found_by_every_filter,
                an_act_on_a_key_changes_no_later_run_of_it,
                o11_a_key_is_released_and_purged_only_where_nothing_may_have_happened,
                o11_an_unknown_key_is_resolved_once,
                o8_operations_are_found_by_every_filter_and_conflicts_are_seen,
                o8_every_verdict_has_its_word_and_a_mismatch_is_a_conflict_until_it_is_judged,
                the_list_of_conflicts_is_what_the_evidence_says,
                r22_an_operator_may_change_what_a_clock_that_went_back_left_owned,
                what_waits_for_a_person_is_listed_first_then_what_is_open,
                o6_a_retry_is_the_workers_and_a_duplicate_is_accepted_by_name,
                o9_a_resolved_operation_and_its_record_have_one_outcome,
                an_operation_does_not_fail_while_an_effect_of_it_stands,
                a_key_that_was_purged_by_hand_is_too_old_however_far_its_clock_was_ahead,
                o8_an_effect_is_resolved_and_its_flow_goes_on,
                o21_what_live_processes_say_of_their_fingerprints_is_shown,
            ];
            records: [
                o11_what_nobody_drives_any_more_is_found_by_operation_and_in_pages,
                m31_every_statement_changes_a_record_as_the_machine_is_drawn,
                o3_every_lifetime_counts_from_the_outcome,
                m98_a_time_that_was_promised_holds_when_the_settings_are_shortened,
                m100_only_a_terminal_record_is_ever_cleaned_whatever_its_age,
                o23_a_key_whose_record_was_purged_is_too_old_for_ever,
            ];
            mailbox: [
                an_email_is_one_row_for_its_unique_key,
                an_email_goes_with_its_transaction,
                emails_are_leased_once_and_settled,
                an_interrupted_email_is_leased_again_under_the_same_key,
                o28_a_row_says_how_many_tries_may_have_arrived,
                r22_a_lease_of_an_email_that_ends_later_than_any_lease_can_is_over,
                g11_an_email_that_was_settled_is_blanked_and_then_its_key_forgotten,
                the_status_counts_emails_that_are_late_and_those_that_failed,
            ];
        }
    };
    ($fixture:ty; $($module:ident: [$($case:ident),* $(,)?];)*) => {
        $($(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                let Some(trial) = $crate::store::Trial::<$fixture>::start(stringify!($case)).await else {
                    return;
                };
                $crate::store::$module::$case(&trial).await;
                trial.end().await;
            }
        )*)*
    };
}
