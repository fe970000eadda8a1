//! The state of each part of a process, which `/readyz` shows and a supervisor reads.
//!
//! Promise: of a part that waits, the reason is shown and for how long it has waited, also where
//! the reason has changed since. A loop that has stopped is noticed ([`Health::stuck`]). Several
//! troubles of one part are kept side by side, each under its name and the task or partition that
//! has it: none hides or ends another. Not here: the HTTP endpoints (`http`).

use std::collections::BTreeMap;
use std::fmt::Display;
use std::mem::discriminant;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The state of one part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PartState {
    /// The part starts and will soon report another state.
    Starting,
    /// The part does its work.
    Ready,
    /// The part waits, for this reason, and continues by itself.
    Waiting(String),
    /// Another process does the work. This one takes over when that process stops.
    Standby(String),
}

/// A trouble of a part, kept under a name of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// The work stops until the trouble is over.
    Stops(String),
    /// The work continues, and a person should know.
    Shown(String),
}

#[derive(Debug, Clone)]
struct Part {
    state: PartState,
    since: Instant,
    beat: Instant,
    /// By name, and by task or partition if several can have the same trouble.
    troubles: BTreeMap<(&'static str, String), (Trouble, Instant)>,
}

impl Part {
    fn is_ready(&self) -> bool {
        let stops = |(trouble, _): &(Trouble, Instant)| matches!(trouble, Trouble::Stops(_));
        matches!(self.state, PartState::Ready | PartState::Standby(_)) && !self.troubles.values().any(stops)
    }
}

/// The state of all parts of a process. Cheap to clone; all clones share it.
#[derive(Debug, Clone, Default)]
pub struct Health(Arc<Mutex<BTreeMap<String, Part>>>);

impl Health {
    /// Sets the state of a part. This also counts as a beat.
    pub(crate) fn set(&self, part: &str, state: PartState) {
        let now = Instant::now();
        let mut parts = self.0.lock();
        if let Some(known) = parts.get_mut(part) {
            known.beat = now;
            if known.state == state {
                return;
            }
        }
        match &state {
            PartState::Starting => tracing::debug!(part, "starting"),
            PartState::Ready => tracing::info!(part, "ready"),
            PartState::Waiting(why) => tracing::warn!(part, %why, "waiting"),
            PartState::Standby(why) => tracing::info!(part, %why, "standing by"),
        }
        let (since, troubles) = match parts.remove(part) {
            // It waits for another reason now, but it has waited since the first one.
            Some(known) if discriminant(&known.state) == discriminant(&state) => (known.since, known.troubles),
            known => (now, known.map(|known| known.troubles).unwrap_or_default()),
        };
        parts.insert(part.to_owned(), Part { state, since, beat: now, troubles });
    }

    /// Sets the trouble of a part under this name, or clears it with `None`. A part without a state
    /// gets none. A part whose work continues must clear the trouble that stopped it.
    pub(crate) fn trouble(&self, part: &str, name: &'static str, trouble: Option<Trouble>) {
        self.trouble_of(part, name, "", trouble);
    }

    /// Does the same for one of several tasks or partitions that can have this trouble.
    pub(crate) fn trouble_of(&self, part: &str, name: &'static str, whose: impl Display, trouble: Option<Trouble>) {
        let key = (name, whose.to_string());
        let mut parts = self.0.lock();
        let Some(known) = parts.get_mut(part) else { return };
        match trouble {
            Some(trouble) if known.troubles.get(&key).is_some_and(|(stands, _)| *stands == trouble) => {}
            Some(trouble) => {
                if let Trouble::Stops(why) = &trouble {
                    tracing::warn!(part, name, whose = %key.1, %why, "waiting");
                }
                // What stops the work has stopped it since its first reason. What is shown is new.
                let since = match (known.troubles.get(&key), &trouble) {
                    (Some((Trouble::Stops(_), since)), Trouble::Stops(_)) => *since,
                    _ => Instant::now(),
                };
                known.troubles.insert(key, (trouble, since));
            }
            None => {
                if let Some((Trouble::Stops(_), _)) = known.troubles.remove(&key) {
                    tracing::info!(part, name, whose = %key.1, "is over");
                }
            }
        }
    }

    /// Clears the trouble of this name for all tasks or partitions, because they are gone.
    pub(crate) fn clear_troubles(&self, part: &str, name: &'static str) {
        let mut parts = self.0.lock();
        if let Some(known) = parts.get_mut(part) {
            known.troubles.retain(|(of, _), _| *of != name);
        }
    }

    /// Removes a part that has done its work and has no loop that could stop.
    pub(crate) fn done(&self, part: &str) {
        if self.0.lock().remove(part).is_some() {
            tracing::debug!(part, "done");
        }
    }

    /// Records that the loop of a part has turned.
    pub(crate) fn beat(&self, part: &str) {
        if let Some(known) = self.0.lock().get_mut(part) {
            known.beat = Instant::now();
        }
    }

    /// Whether there are parts, each is ready or on standby, and no trouble stops one.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let parts = self.0.lock();
        !parts.is_empty() && parts.values().all(Part::is_ready)
    }

    /// How many parts stand by.
    pub(crate) fn standbys(&self) -> usize {
        let parts = self.0.lock();
        parts.values().filter(|part| matches!(part.state, PartState::Standby(_))).count()
    }

    /// The parts whose loop has not turned for longer than this.
    #[must_use]
    pub fn stuck(&self, longer_than: Duration) -> Vec<String> {
        let parts = self.0.lock();
        let late = |part: &Part| part.beat.elapsed() > longer_than;
        parts.iter().filter(|(_, part)| late(part)).map(|(name, _)| name.clone()).collect()
    }

    /// One line for each part (name, state, for how long) and one for each of its troubles.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let parts = self.0.lock();
        let mut lines = Vec::new();
        for (name, part) in parts.iter() {
            let seconds = part.since.elapsed().as_secs();
            lines.push(match &part.state {
                PartState::Starting => format!("{name}: starting for {seconds} s"),
                PartState::Ready => format!("{name}: ready for {seconds} s"),
                PartState::Waiting(why) => format!("{name}: waiting for {seconds} s: {why}"),
                PartState::Standby(why) => format!("{name}: standing by for {seconds} s: {why}"),
            });
            for ((trouble, whose), (what, since)) in &part.troubles {
                let seconds = since.elapsed().as_secs();
                let trouble = if whose.is_empty() { (*trouble).to_owned() } else { format!("{trouble} ({whose})") };
                lines.push(match what {
                    Trouble::Stops(why) => format!("{name}, {trouble}: waiting for {seconds} s: {why}"),
                    Trouble::Shown(why) => format!("{name}, {trouble}: {seconds} s ago: {why}"),
                });
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_ready_when_no_part_waits() {
        let health = Health::default();
        assert!(!health.is_ready(), "nothing has said anything yet");
        health.set("relay", PartState::Waiting("no broker".into()));
        assert!(!health.is_ready());
        assert!(health.lines()[0].contains("no broker"));
        health.set("relay", PartState::Standby("host-2 has the lease".into()));
        assert!(health.is_ready());
        assert!(health.stuck(Duration::from_secs(60)).is_empty());
    }

    #[test]
    fn a_trouble_stands_beside_the_state_until_it_is_over() {
        let health = Health::default();
        health.set("consumer", PartState::Ready);
        health.trouble("consumer", "lost records", Some(Trouble::Shown("payments/0".into())));
        assert!(health.is_ready());
        health.trouble("consumer", "broker", Some(Trouble::Stops("away".into())));
        health.set("consumer", PartState::Waiting("database".into()));
        health.set("consumer", PartState::Ready);
        assert!(!health.is_ready(), "the database is back, the broker is not");
        assert_eq!(health.lines().len(), 3);
        health.trouble("consumer", "broker", None);
        assert!(health.is_ready());
        assert!(health.lines()[1].contains("lost records") && health.lines()[1].contains("payments/0"));
    }

    /// Shown by: the time of the last reason.
    #[test]
    fn another_reason_does_not_begin_the_wait_anew() {
        let health = Health::default();
        let since = || {
            let parts = health.0.lock();
            parts
                .values()
                .flat_map(|part| part.troubles.values().map(|(_, since)| *since).chain([part.since]))
                .collect::<Vec<_>>()
        };
        health.set("consumer", PartState::Waiting("refused".into()));
        health.trouble("consumer", "database", Some(Trouble::Stops("refused".into())));
        let first = since();
        health.set("consumer", PartState::Waiting("timed out".into()));
        health.trouble("consumer", "database", Some(Trouble::Stops("timed out".into())));
        assert_eq!(since(), first);
        assert!(health.lines()[1].contains("timed out"), "{:?}", health.lines());
        health.set("consumer", PartState::Ready);
        health.trouble("consumer", "database", Some(Trouble::Shown("slow".into())));
        assert!(since().iter().zip(first).all(|(now, was)| *now > was));
    }

    // Shown by: one trouble for all owners, which the last report sets or clears.
    #[test]
    fn a_trouble_of_one_of_several_neither_hides_nor_ends_that_of_another() {
        let health = Health::default();
        health.set("consumer", PartState::Ready);
        for lane in ["lane 1", "lane 2"] {
            health.trouble_of("consumer", "database", lane, Some(Trouble::Stops(format!("away from {lane}"))));
        }
        assert_eq!(health.lines().len(), 3);
        health.trouble_of("consumer", "database", "lane 1", None);
        assert!(!health.is_ready(), "the other still waits");
        assert!(health.lines()[1].contains("database (lane 2)") && health.lines()[1].contains("away from lane 2"));
        health.clear_troubles("consumer", "database");
        assert!(health.is_ready());
    }

    #[test]
    fn a_part_that_is_done_is_neither_waited_for_nor_stuck() {
        let health = Health::default();
        health.set("database", PartState::Waiting("no server".into()));
        assert_eq!(health.stuck(Duration::ZERO), ["database"]);
        health.done("database");
        assert!(health.stuck(Duration::ZERO).is_empty() && health.lines().is_empty());
    }
}
