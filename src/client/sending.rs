//! The attempts of one operation: send, read the answer, wait, until the table ends the operation.
//!
//! Guarantees: the journal is written before the first attempt. A pause is the longer one of the
//! backoff and the time that the server asks for. An attempt that was sent and gets no answer ends
//! by its own timeout, and its outcome is then unknown.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use reqwest::Url;
use reqwest::header::CONTENT_TYPE;

use super::answer::{Answer, Arrived};
use super::request::Request;
use super::{Cause, ClientError, ClientOptions, KeyJournal};
use crate::operation::phased::http::{body_of, causes, was_not_sent};
use crate::operation::rules::Key;
use crate::operation::rules::problem::KeyState;
use crate::operation::rules::resend::{AfterPoll, Next, Polled, Seen, SendWindow, after_attempt, after_poll, pause};
use crate::time::breaker::Breaker;
use crate::time::since::Since;

/// How far the clock may have been set back since a key was stored in the journal. Beyond it the
/// age of the key is unknown and counts as too old.
const CLOCK_SKEW: Duration = Duration::from_secs(60);
/// The largest number of origins that are remembered because they failed.
const ORIGINS_MAX: usize = 4_096;

/// Carries out one attempt.
pub(super) trait Transport: Send {
    fn call(
        &mut self,
        request: reqwest::Request,
    ) -> impl Future<Output = Result<reqwest::Response, reqwest_middleware::Error>> + Send;
}

pub(super) struct Direct<'a>(pub(super) &'a reqwest::Client);

impl Transport for Direct<'_> {
    async fn call(&mut self, request: reqwest::Request) -> Result<reqwest::Response, reqwest_middleware::Error> {
        Ok(self.0.execute(request).await?)
    }
}

#[derive(Debug)]
pub(super) struct ClientState {
    pub(super) options: ClientOptions,
    pub(super) journal: Option<KeyJournal>,
    breakers: Mutex<HashMap<String, Breaker>>,
    began: Instant,
}

enum Met {
    Arrived(Arrived),
    Nothing { seen: Seen, why: String },
}

/// How long one operation has been tried, and how old its key is.
struct Course {
    window: SendWindow,
    began: Instant,
    age: Duration,
    /// The same begin, for the age: a key grows older also while this machine is suspended.
    since: Since,
    failed: u32,
    /// True where the journal had the operation: another process may have sent it.
    was_noted: bool,
}

impl Course {
    /// Whether an attempt may have executed the operation, also one of another call that uses this
    /// request at the same time.
    fn in_doubt(&self, request: &Request) -> bool {
        self.was_noted || request.in_doubt_for().is_some()
    }

    /// Why no attempt may begin after this pause; `None`: it may.
    fn over(&self, pause: Duration, last: &str) -> Option<Cause> {
        let lasted = self.began.elapsed();
        let age = self.age.saturating_add(self.since.elapsed());
        if self.window.allows(pause, lasted, age) {
            return None;
        }
        let forgotten = !SendWindow { total: Duration::MAX, ..self.window }.allows(pause, lasted, age);
        let last = last.to_owned();
        Some(if forgotten { Cause::KeyForgotten { last } } else { Cause::OutOfTime { last } })
    }
}

impl ClientState {
    pub(super) fn new(options: ClientOptions, journal: Option<KeyJournal>) -> Self {
        Self { options, journal, breakers: Mutex::default(), began: Instant::now() }
    }

    /// `sent_at`: when another process, or an earlier request of this one, may have sent it first.
    pub(super) async fn send(
        &self,
        transport: &mut impl Transport,
        request: &Request,
        mut sent_at: Option<SystemTime>,
    ) -> Result<Answer, ClientError> {
        let mut course = Course {
            window: SendWindow {
                total: self.options.total,
                lifetime: self.options.lifetime,
                attempt: self.options.attempt_timeout,
            },
            began: Instant::now(),
            age: request.in_doubt_for().unwrap_or_default(),
            since: Since::now(),
            failed: 0,
            was_noted: false,
        };
        if let Some(journal) = &self.journal {
            let noted = journal.note(request, sent_at).await?;
            sent_at = [noted, sent_at].into_iter().flatten().min();
        }
        if let Some(first_sent_at) = sent_at {
            // It may have been sent, even if the process died before that.
            course.was_noted = true;
            course.age = course.age.max(age(first_sent_at, SystemTime::now()));
        }
        let ended = self.run(transport, request, &mut course).await;
        ended.map_err(|cause| {
            let (key, doubt) = (request.key().clone(), course.in_doubt(request));
            tracing::warn!(key = key.short_hash(), doubt, %cause, "an operation was given up; `doubt` says whether it may have happened");
            if doubt { ClientError::OutcomeUnknown { key, cause } } else { ClientError::NotSent { key, cause } }
        })
    }

    async fn run(
        &self,
        transport: &mut impl Transport,
        request: &Request,
        course: &mut Course,
    ) -> Result<Answer, Cause> {
        // The URL of the outcome, once the server has given it.
        let mut place: Option<Url> = None;
        let mut last = "nothing was tried".to_owned();
        let mut wait = Duration::ZERO;
        loop {
            if let Some(cause) = course.over(wait, &last) {
                return Err(cause);
            }
            tokio::time::sleep(wait).await;
            // The pause may have been longer: the machine was suspended, or this process frozen.
            if let Some(cause) = course.over(Duration::ZERO, &last) {
                return Err(cause);
            }
            if let Err(left) = self.admit(&request.url) {
                "the origin is left alone after failures in a row".clone_into(&mut last);
                wait = left;
                continue;
            }
            let asked = place.clone().unwrap_or_else(|| request.url.clone());
            let prepared = match &place {
                Some(place) => Ok(request.question(place.clone())),
                None => request.attempt(),
            };
            if place.is_none() {
                request.attempt_begins();
            }
            let met = match prepared {
                Ok(prepared) => self.attempt(transport, prepared).await,
                Err(error) => Met::Nothing { seen: Seen::NotSent, why: error.to_string() },
            };
            let asks_for = match &met {
                Met::Arrived(arrived) => {
                    last = format!("the answer {}", arrived.status);
                    arrived.retry_after(SystemTime::now())
                }
                Met::Nothing { why, .. } => {
                    last.clone_from(why);
                    None
                }
            };
            self.tell(&request.url, matches!(&met, Met::Arrived(arrived) if arrived.status < 500));
            course.failed = course.failed.saturating_add(1);
            let then = match place {
                Some(_) => asked_for_the_outcome(met, asked, &request.key)?,
                None => sent(met, &asked, course, request)?,
            };
            match then {
                Then::Ended(answer) => return Ok(answer),
                Then::Ask(at) => place = Some(at),
                Then::Send => place = None,
            }
            let backoff = pause(course.failed, self.options.backoff, self.options.backoff_max, fastrand::f64());
            wait = asks_for.map_or(backoff, |asked| asked.max(backoff));
            tracing::debug!(key = request.key.short_hash(), ?wait, last, "an operation is not at its end");
        }
    }

    /// Makes one attempt within its timeout, which includes the body of the answer.
    async fn attempt(&self, transport: &mut impl Transport, request: reqwest::Request) -> Met {
        let whole = async {
            let mut response = match transport.call(request).await {
                Ok(response) => response,
                Err(error) => return failed(&error),
            };
            match body_of(&mut response, self.options.answer_bytes_max).await {
                Ok(body) => {
                    let (status, url) = (response.status().as_u16(), response.url().clone());
                    Met::Arrived(Arrived { status, headers: response.headers().clone(), body, url })
                }
                Err(why) => Met::Nothing { seen: Seen::NoAnswer, why },
            }
        };
        match tokio::time::timeout(self.options.attempt_timeout, whole).await {
            Ok(met) => met,
            Err(_) => Met::Nothing {
                seen: Seen::NoAnswer,
                why: format!("no whole answer within {:?}", self.options.attempt_timeout),
            },
        }
    }

    /// Refuses an attempt while the breaker of its origin is open.
    fn admit(&self, url: &Url) -> Result<(), Duration> {
        let mut breakers = self.breakers.lock();
        let breaker = breakers.get_mut(&url.origin().ascii_serialization());
        breaker.map_or(Ok(()), |breaker| breaker.admit(self.began.elapsed()))
    }

    /// Tells the breaker of an origin how an attempt ended. Only origins that failed have one: a
    /// breaker after a success is as a new one.
    fn tell(&self, url: &Url, well: bool) {
        let Some(options) = self.options.breaker else { return };
        let mut breakers = self.breakers.lock();
        let (origin, now) = (url.origin().ascii_serialization(), self.began.elapsed());
        if well {
            breakers.remove(&origin);
            return;
        }
        if breakers.len() >= ORIGINS_MAX && !breakers.contains_key(&origin) {
            breakers.retain(|_, breaker| breaker.is_open(now));
            // So many are left alone now: this one is asked on, as without a breaker.
            if breakers.len() >= ORIGINS_MAX {
                return;
            }
        }
        breakers.entry(origin).or_insert_with(|| Breaker::new(options)).ended(false, now);
    }
}

enum Then {
    Ended(Answer),
    Send,
    /// Ask this URL for the outcome.
    Ask(Url),
}

fn sent(met: Met, asked: &Url, course: &Course, request: &Request) -> Result<Then, Cause> {
    let (seen, arrived) = match met {
        Met::Arrived(arrived) => (arrived.seen(asked), Some(arrived)),
        Met::Nothing { seen, .. } => (seen, None),
    };
    if ran_nothing(seen) {
        request.attempt_ran_nothing();
    }
    // Asked now, not at the start of the call: another call may have begun an attempt since.
    match (after_attempt(seen, course.in_doubt(request)), arrived) {
        (Next::Done, Some(arrived)) => Ok(Then::Ended(arrived.into_answer(request.key.clone()))),
        (Next::Follow, Some(arrived)) => Ok(arrived.location().map_or(Then::Send, Then::Ask)),
        (Next::Unknown, Some(arrived)) => Err(arrived.cause()),
        // The table does not end or follow without an answer; if it did, the outcome is unknown.
        (Next::Again { .. }, _) | (Next::Done | Next::Follow | Next::Unknown, None) => Ok(Then::Send),
    }
}

/// Whether an attempt that met this certainly executed nothing. That says nothing of other attempts
/// under its key.
fn ran_nothing(seen: Seen) -> bool {
    match (after_attempt(seen, false), seen) {
        (Next::Again { doubt }, _) => !doubt,
        // A refusal. A spent key shows that the operation has an outcome.
        (Next::Done, Seen::Answer { key_state, .. }) => !key_state.is_some_and(KeyState::ends_the_operation),
        _ => false,
    }
}

fn asked_for_the_outcome(met: Met, asked: Url, key: &Key) -> Result<Then, Cause> {
    let (polled, arrived) = match met {
        Met::Arrived(arrived) => (arrived.polled(&asked), Some(arrived)),
        Met::Nothing { seen, .. } => (Polled::Met(seen), None),
    };
    match (after_poll(polled), arrived) {
        (AfterPoll::Done, Some(arrived)) => {
            let Some((status, body)) = arrived.result() else { return Ok(Then::Send) };
            let mut headers = arrived.headers;
            // The other headers belong to the answer to the query.
            let kind = headers.remove(CONTENT_TYPE);
            let headers = kind.into_iter().map(|kind| (CONTENT_TYPE, kind)).collect();
            Ok(Then::Ended(Answer { key: key.clone(), status, headers, body }))
        }
        (AfterPoll::Ask, _) => Ok(Then::Ask(asked)),
        (AfterPoll::Unknown, Some(arrived)) if matches!(arrived.status, 404 | 410) => Err(Cause::OperationNotFound),
        (AfterPoll::Unknown, Some(arrived)) => Err(arrived.cause()),
        (AfterPoll::Resend | AfterPoll::Done | AfterPoll::Unknown, _) => Ok(Then::Send),
    }
}

/// The age of a key by the wall clock. A time in the future was stored before the clock was set
/// back, so the age is unknown.
fn age(first_sent_at: SystemTime, now: SystemTime) -> Duration {
    now.duration_since(first_sent_at)
        .unwrap_or_else(|ahead| if ahead.duration() <= CLOCK_SKEW { Duration::ZERO } else { Duration::MAX })
}

/// What an error proves about the attempt. An error of another middleware proves nothing.
fn failed(error: &reqwest_middleware::Error) -> Met {
    let (not_sent, why) = match error {
        reqwest_middleware::Error::Reqwest(error) => (was_not_sent(error), causes(error)),
        reqwest_middleware::Error::Middleware(error) => (false, error.to_string()),
    };
    Met::Nothing { seen: if not_sent { Seen::NotSent } else { Seen::NoAnswer }, why }
}

#[cfg(test)]
mod tests {
    use reqwest::ResponseBuilderExt;
    use tokio::sync::Notify;

    use super::*;
    use crate::time::breaker::BreakerOptions;

    /// Answers each attempt with 503 and a pause of one second. It counts the attempts, and
    /// notifies a waiting task of each.
    struct Busy<'a>(usize, &'a Notify);

    impl Transport for Busy<'_> {
        async fn call(&mut self, request: reqwest::Request) -> Result<reqwest::Response, reqwest_middleware::Error> {
            self.0 += 1;
            self.1.notify_one();
            let answer = http::Response::builder().url(request.url().clone()).status(503).header("retry-after", "1");
            Ok(answer.body("").expect("an answer").into())
        }
    }

    // Shown by: asking for the age before the pause only (the second attempt was made).
    #[tokio::test]
    async fn m110_a_process_that_was_frozen_in_a_pause_does_not_send_what_the_server_has_forgotten() {
        let (attempt_timeout, lifetime) = (Duration::from_millis(500), Duration::from_secs(2));
        let options = ClientOptions { attempt_timeout, lifetime, ..ClientOptions::default() };
        let state = ClientState::new(options, None);
        let request = Request::new("POST", "https://pay.example/payments", "{}").expect("a request");
        let answers = Notify::new();
        let mut transport = Busy(0, &answers);
        let frozen = async {
            answers.notified().await;
            // The call is in its pause. The only thread of this program stands, as all of them do
            // in a process that is stopped.
            std::thread::sleep(lifetime);
        };
        let (ended, ()) = tokio::join!(state.send(&mut transport, &request, None), frozen);
        let error = ended.expect_err("no outcome");
        assert!(matches!(error, ClientError::OutcomeUnknown { cause: Cause::KeyForgotten { .. }, .. }), "{error}");
        assert_eq!(transport.0, 1);
    }

    // Shown by: a map that only grows, in a service whose tenants give the URLs.
    #[test]
    fn m110_origins_that_are_remembered_because_they_failed_are_bounded() {
        let url = |number: usize| Url::parse(&format!("https://{number}.example")).expect("a URL");
        for failures in [1, 2] {
            let breaker = Some(BreakerOptions { failures, open: Duration::from_secs(3_600) });
            let state = ClientState::new(ClientOptions { breaker, ..ClientOptions::default() }, None);
            for number in 0..=ORIGINS_MAX {
                state.tell(&url(number), false);
            }
            assert!(state.breakers.lock().len() <= ORIGINS_MAX);
            // Those that are left alone are not forgotten for others.
            assert_eq!(state.admit(&url(0)).is_err(), failures == 1);
        }
    }

    // Shown by: treating a first send in the future as one at this moment.
    #[test]
    fn o27_a_key_from_before_the_clock_was_set_back_is_too_old_to_be_sent() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let hour = Duration::from_secs(3_600);
        assert_eq!(age(now - hour, now), hour);
        assert_eq!(age(now + CLOCK_SKEW, now), Duration::ZERO);
        assert_eq!(age(now + hour, now), Duration::MAX);
    }
}
