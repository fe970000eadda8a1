//! The silence of topics, or of the whole broker: rows that are neither taken nor refused.
//!
//! Promise: time in which this loop did not run, or the broker was blocked, is no silence.

use std::time::Duration;

use tokio::time::Instant;

use super::Pump;
use crate::observe::PartState;
use crate::outbox::relay::ending::Doubt;

/// One turn of the loop counts for at most so much time on the clock.
const TURN_MAX: Duration = Duration::from_millis(250);
/// How long a topic may keep other rows waiting while it neither takes nor refuses, if rows that
/// were sent later are settled, or if its row is in flight alone.
const KEPT_WAITING_MAX: Duration = Duration::from_secs(1);
/// The same limit in the other cases: no later row was settled, so the whole broker may be slow.
const SILENT_MAX: Duration = Duration::from_secs(5);
/// How long the broker may be blocked before it is shown while nothing is in flight. A broker
/// closes connections that rest. Kafka's client takes that for an outage until it has another one:
/// it begins to open it within a second.
const IDLE_BLOCKED_SHOWN: Duration = Duration::from_secs(5);
/// How often the session checks for silence.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(200);

impl Pump<'_> {
    pub(super) fn turn(&mut self) {
        let now = Instant::now();
        let turn = now.saturating_duration_since(std::mem::replace(&mut self.turned_at, now));
        if self.publisher.blocked().is_none() {
            self.clock += turn.min(TURN_MAX);
        }
    }

    /// Checks whether topics, or the broker, stay silent while messages are in flight.
    pub(super) fn silence(&mut self) -> Result<(), Doubt> {
        if let Some(why) = self.publisher.blocked() {
            // No failure: the broker says that it takes nothing for now.
            let since = *self.blocked_since.get_or_insert_with(Instant::now);
            if self.window.in_flight() > 0 || since.elapsed() >= IDLE_BLOCKED_SHOWN {
                self.shown_waiting = true;
                let why = format!("the broker is blocked: {why}");
                self.relay.health.set(&self.relay.part, PartState::Waiting(why));
            }
            return Ok(());
        }
        self.blocked_since = None;
        let is_time = self.clock >= self.looked_at + LOOK_EVERY;
        if !is_time || self.window.oldest(self.clock).is_none_or(|oldest| oldest < KEPT_WAITING_MAX) {
            return Ok(());
        }
        self.looked_at = self.clock;
        let silent = self.silent_topics();
        let Some(longest) = silent.iter().map(|(_, silence)| *silence).max() else { return Ok(()) };
        let overtaken = self.window.is_overtaken();
        // If two topics are silent, one may wait for the other in the broker's client.
        let keeps_others = !self.has_room() || silent.len() > 1;
        let limit = match (keeps_others, overtaken || self.alone.is_some()) {
            (false, _) => self.relay.options.publish_stall,
            (true, true) => KEPT_WAITING_MAX.min(self.relay.options.publish_stall),
            (true, false) => SILENT_MAX.min(self.relay.options.publish_stall),
        };
        if longest < limit {
            return Ok(());
        }
        // Topics silent for less than half of the longest time began to wait for others.
        let began = |silence: Duration| silence >= limit.max(longest / 2);
        let topics: Vec<String> = silent.into_iter().filter(|one| began(one.1)).map(|one| one.0).collect();
        let limit = humantime::format_duration(limit);
        let said = |of: String| format!("the broker has neither taken nor refused messages of {of} for {limit}");
        let why = said(named(&topics));
        let with_reason = |topic: String| {
            let why = said(named(std::slice::from_ref(&topic)));
            (topic, why)
        };
        let topics = topics.into_iter().map(with_reason).collect();
        Err(Doubt::Silent { topics, overtaken, why })
    }

    /// Topics whose oldest row in flight has waited for `KEPT_WAITING_MAX`, with that time.
    fn silent_topics(&self) -> Vec<(String, Duration)> {
        let mut silent = self.window.silence(self.clock, self.goes_in_turn());
        silent.retain(|(_, silence)| *silence >= KEPT_WAITING_MAX);
        silent
    }

    /// Topics that may be the reason why the broker's client takes no rows. Where none was silent
    /// before, it may be each one with a row in flight, and their trials tell them apart: with no
    /// topic held, the next session would fill its client in the same way.
    pub(super) fn may_fill_the_client(&self) -> Vec<(String, Duration)> {
        let silent = self.silent_topics();
        if silent.is_empty() && self.publisher.blocked().is_none() {
            return self.window.silence(self.clock, false);
        }
        silent
    }
}

fn named(topics: &[String]) -> String {
    match topics {
        [] => "any topic".to_owned(),
        [topic] => format!("topic `{topic}`"),
        [topic, ..] => format!("topic `{topic}` and {} more", topics.len() - 1),
    }
}
