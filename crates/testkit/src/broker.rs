//! The executable definition of a broker: cases that run on any adapter.
//!
//! The test file of an adapter has a [`Fixture`] and one line:
//!
//! ```text
//! async fn fixture(case: &str) -> Option<MyFixture> { /* None skips the case */ }
//! oncebox_testkit::broker_conformance!(fixture);
//! ```
//!
//! Every case is a test of its own, with its own topics, and is named after the sentence that it
//! proves. [`Capabilities`] says where brokers differ. A case that a broker cannot meet at all
//! passes without doing anything.
//!
//! Not here: faults of a single broker, which its own test file has, and what the runtime does
//! about refusals.

mod consuming;
mod groups;
mod harness;
mod publishing;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

pub use self::consuming::*;
pub use self::groups::*;
pub use self::publishing::*;
pub use self::wire::*;
use oncebox::broker::{Broker, Subscription};

/// Where a broker differs from others.
#[derive(Debug, Clone)]
pub struct Capabilities {
    /// Receipts have partition and offset; otherwise they are confirms.
    pub offsets: bool,
    /// A topic can be missing, so that its rows are diverted or refused.
    pub missing_topics: bool,
    /// The members of a group share the partitions; otherwise one works and the others stand by.
    pub shares: bool,
    /// A group that subscribes later gets what was published before.
    pub replays: bool,
    /// The beginning of the names of the envelope's headers, as its binding to CloudEvents has it.
    pub envelope: &'static str,
    /// The header `oncebox-hash` is set (R20).
    pub hash_header: bool,
    /// How long anything may take before a case fails. Longer than taking over from a dead member.
    pub patience: Duration,
}

impl Capabilities {
    /// The capabilities of a log with partitions and groups, like Kafka.
    #[must_use]
    pub fn log() -> Self {
        Self {
            offsets: true,
            missing_topics: true,
            shares: true,
            replays: true,
            envelope: "ce_",
            hash_header: false,
            patience: Duration::from_secs(60),
        }
    }

    /// The capabilities of a queue with a single active consumer, like RabbitMQ.
    #[must_use]
    pub fn queue() -> Self {
        Self {
            offsets: false,
            missing_topics: true,
            shares: false,
            replays: false,
            envelope: "cloudEvents_",
            hash_header: true,
            patience: Duration::from_secs(60),
        }
    }
}

/// A broker under test.
#[async_trait]
pub trait Fixture: Send + Sync {
    /// Where this broker differs from others.
    fn capabilities(&self) -> Capabilities;

    /// The broker, configured so that `declare` creates topics.
    async fn broker(&self) -> Arc<dyn Broker>;

    /// The broker with this bound for unacknowledged bytes; `None` where it has no such bound.
    async fn with_bytes(&self, _in_flight_bytes_max: usize) -> Option<Arc<dyn Broker>> {
        None
    }

    /// A name for a topic that does not exist and that no other case uses.
    fn topic(&self, label: &str) -> String {
        format!("oncebox-test.{label}.{}", uuid::Uuid::now_v7().simple())
    }

    /// Prepares a subscription, so that it gets what is published from now on: topics are created,
    /// queues bound. No subscriber stays connected.
    async fn prepare(&self, subscription: &Subscription) {
        harness::prepare(self.broker().await.as_ref(), &self.capabilities(), subscription).await;
    }

    /// Removes what the case created. Not called after a failure.
    async fn finish(&self) {}
}

/// Makes a test of every case of the suite. It runs on the fixture that `fixture(case).await`
/// returns; `None` skips the case.
#[macro_export]
macro_rules! broker_conformance {
    ($fixture:path) => {
        $crate::broker_conformance! { @cases $fixture;
            every_sent_row_settles_exactly_once_with_a_receipt
            settle_may_be_dropped_at_any_point_and_no_outcome_is_lost
            the_order_of_every_key_is_kept_with_many_keys_in_flight
            r15_first_occurrences_of_a_key_are_in_order_when_sessions_are_dropped_in_the_middle
            r19_a_topic_that_is_not_there_holds_only_its_own_rows_and_is_ready_once_it_appears
            a_message_arrives_as_it_was_sent
            the_envelope_stands_under_its_names_on_the_wire
            read_all_gives_everything_that_was_published_since_the_tap
            publisher_and_subscriber_start_in_any_order
            what_was_not_acknowledged_comes_again_to_a_new_subscriber
            what_was_acknowledged_does_not_come_again_and_the_rest_does_in_order
            every_group_gets_everything
            caught_up_says_so_once_what_stood_there_was_delivered
            a_paused_subscriber_gets_nothing_more_until_it_goes_on
            deliveries_that_are_not_acknowledged_stay_below_the_bound
            a_delivery_that_stays_unfinished_takes_only_its_own_room
            deliveries_that_are_not_acknowledged_stay_below_the_bound_of_bytes
            next_may_be_dropped_at_any_point_and_no_event_is_lost
            a_log_begins_at_the_lower_of_what_the_database_and_the_group_know
            a_topic_made_anew_is_consumed_from_its_beginning
            a_refused_source_holds_only_itself
            two_subscribers_share_without_loss_and_keep_the_order_of_every_key
            a_subscriber_that_is_dropped_without_close_is_taken_over_in_order
            a_subscriber_that_is_closed_hands_over_in_order_without_repeating
            g9_a_revoked_subscriber_acknowledges_nothing
        }
    };
    (@cases $fixture:path; $($case:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                let Some(fixture) = $fixture(stringify!($case)).await else { return };
                $crate::broker::$case(&fixture).await;
                $crate::broker::Fixture::finish(&fixture).await;
            }
        )*
    };
}
