//! A consumer in this process, and the course of its effects as the database shows them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::bench::bed::Bed;
use crate::bench::consume::Effect;
use crate::bench::relay::rate;
use crate::bench::started::Started;
use crate::bench::watched::Watched;
use crate::bench::work::KIND;
use crate::bench::yard::Yard;
use oncebox::app::AppError;
use oncebox::observe::Health;
use oncebox::{Consumer, ConsumerOptions, Handlers, MessageHandler, RunEnd};

/// How long the broker may keep the messages of a frozen or killed process back.
const DELIVERY_MAX: Duration = Duration::from_secs(180);
/// How long effects are watched at most. Later effects do not count in the rate.
const PATIENCE: Duration = Duration::from_secs(60);
/// The rate at a moment is measured over this time before it.
const WINDOW: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(20);

/// A running consumer, which ends when this is dropped.
pub(super) struct Running {
    watched: Watched,
    consumer: Started<RunEnd>,
}

impl Running {
    pub(super) fn start<S: Yard>(
        bed: &Bed<S>,
        options: ConsumerOptions,
        handler: impl MessageHandler<S> + 'static,
    ) -> Self {
        let watched = Watched::new(Arc::clone(&bed.broker));
        let handlers = Handlers::new().on(KIND, handler);
        let broker = Arc::new(watched.clone());
        let consumer = Consumer::new(bed.store.clone(), broker, handlers, options, Health::default());
        Self { watched, consumer: Started::begin(move |stop| async move { consumer.run(stop).await }) }
    }

    /// Returns an error where the consumer ended by itself.
    pub(super) async fn check(&mut self) -> Result<(), AppError> {
        if !self.consumer.has_ended() {
            return Ok(());
        }
        self.consumer.ended().await?;
        Err(AppError::failed("the consumer ended by itself"))
    }

    /// Waits until the broker delivers the first messages, and returns that moment.
    pub(super) async fn first_delivery(&mut self) -> Result<Instant, AppError> {
        let began = Instant::now();
        loop {
            self.check().await?;
            if let Some(first) = self.watched.look(|notes| notes.first_delivery) {
                return Ok(first.at);
            }
            if began.elapsed() > DELIVERY_MAX {
                let text = format!("the broker delivered nothing within {DELIVERY_MAX:?}");
                return Err(AppError::failed(text));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Follows the number of effects until it is `until`, at most for `PATIENCE`. Times count from
    /// `since`.
    pub(super) async fn course<S: Yard>(
        &mut self,
        store: &S,
        since: Instant,
        until: usize,
    ) -> Result<Course, AppError> {
        let mut looks = Vec::new();
        loop {
            self.check().await?;
            let effects = store.effects().await?;
            looks.push((since.elapsed(), effects));
            if effects >= until || since.elapsed() > PATIENCE {
                return Ok(Course(looks));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    pub(super) async fn stop(self) -> Result<(), AppError> {
        self.consumer.stop().await.map(drop)
    }
}

/// Runs a consumer with the simple handler. Returns the course of the effects from its first
/// delivery until there are `until`.
pub(super) async fn drain<S: Yard>(bed: &Bed<S>, name: &str, topic: &str, until: usize) -> Result<Course, AppError> {
    let mut running = Running::start(bed, ConsumerOptions::new(name, vec![topic.to_owned()]), Effect);
    let since = running.first_delivery().await?;
    let course = running.course(&bed.store, since, until).await?;
    running.stop().await?;
    Ok(course)
}

/// The number of effects at each time. It has at least one entry.
pub(super) struct Course(Vec<(Duration, usize)>);

impl Course {
    /// Effects per second until the last look, with `before` effects at the start.
    pub(super) fn rate(&self, before: usize) -> f64 {
        self.0.last().map_or(f64::NAN, |(time, count)| rate(count - before, *time))
    }

    /// Seconds until the rate was this for the first time, or until the end where it never was.
    pub(super) fn reaches(&self, wanted: f64) -> f64 {
        let fast = |(at, (time, count)): (usize, &(Duration, usize))| {
            let then = time.checked_sub(WINDOW)?;
            let (earlier, before) = self.0[..at].iter().rfind(|(earlier, _)| *earlier <= then)?;
            (rate(count - before, *time - *earlier) >= wanted).then_some(*time)
        };
        let end = self.0.last().map(|(time, _)| *time);
        self.0.iter().enumerate().find_map(fast).or(end).map_or(f64::NAN, |time| time.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_course_tells_its_rate_and_when_it_was_up_to_speed() {
        let course: Vec<_> = [(0, 10), (500, 10), (1_000, 15), (1_500, 515), (2_000, 1_010)]
            .map(|(millis, count)| (Duration::from_millis(millis), count))
            .into();
        let course = Course(course);
        assert!((course.rate(10) - 500.0).abs() < 1e-9);
        assert!((course.reaches(500.0) - 1.5).abs() < 1e-9, "the first half second at that rate");
        assert!((course.reaches(5_000.0) - 2.0).abs() < 1e-9, "never: the end");
    }
}
