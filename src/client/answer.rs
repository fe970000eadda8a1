//! An answer, and its meaning for the table of [`resend`](crate::operation::rules::resend).
//!
//! Guarantees: an answer counts only from the requested URL. A `Location` is followed only on the
//! same origin. The state of the key is read from an `application/problem+json` body or the header
//! `Idempotency-Key-State`, and from no other body.

use std::time::{Duration, SystemTime};

use reqwest::Url;
use reqwest::header::{self, HeaderMap};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::Cause;
use crate::operation::rules::Key;
use crate::operation::rules::pace::asked_to_wait;
use crate::operation::rules::problem::{Code, KeyState};
use crate::operation::rules::raw::essence;
use crate::operation::rules::resend::{Polled, Seen};

/// The answer to an operation.
#[derive(Clone)]
pub struct Answer {
    /// The key of the operation; give it to [`Client::acknowledge`](super::Client::acknowledge).
    pub key: Key,
    /// The HTTP status of the operation's outcome.
    pub status: u16,
    /// The headers; only the content type if the outcome came from the operation's own URL.
    pub headers: HeaderMap,
    /// The bytes of the answer's body.
    pub body: Vec<u8>,
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Answer({}, {:?}, {} headers, {} bytes)", self.status, self.key, self.headers.len(), self.body.len())
    }
}

/// An answer that arrived completely.
#[derive(Debug)]
pub(super) struct Arrived {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
    pub(super) url: Url,
}

/// The members of a problem body that the client reads; all are optional.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ProblemBody {
    code: Option<String>,
    key_state: Option<String>,
    retry_after_seconds: Option<u32>,
}

/// The members of an operation's resource that the client reads.
#[derive(Debug, Deserialize)]
struct OperationBody<'a> {
    status: String,
    #[serde(borrow, default)]
    result: Option<ResultBody<'a>>,
}

#[derive(Debug, Deserialize)]
struct ResultBody<'a> {
    status: u16,
    #[serde(borrow, default)]
    body: Option<&'a RawValue>,
}

impl Arrived {
    fn problem(&self) -> ProblemBody {
        let kind = self.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        if essence(kind) != "application/problem+json" {
            return ProblemBody::default();
        }
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// The state of the key in the header of a replayed answer: a refusal of the application itself
    /// is no problem body of the engine (O26).
    fn replayed_state(&self) -> Option<KeyState> {
        self.headers.get("idempotency-key-state")?.to_str().ok()?.parse().ok()
    }

    pub(super) fn seen(&self, asked: &Url) -> Seen {
        match self.status {
            _ if !same_place(&self.url, asked) => Seen::Elsewhere,
            202 => match self.location() {
                Some(place) if place.origin() == asked.origin() => Seen::Accepted,
                Some(_) => Seen::AcceptedElsewhere,
                None => Seen::Success,
            },
            200..=299 => Seen::Success,
            300..=399 => Seen::Redirected,
            status => {
                let problem = self.problem();
                let code: Option<Code> = problem.code.and_then(|code| code.parse().ok());
                let key_state: Option<KeyState> = problem.key_state.and_then(|state| state.parse().ok());
                let key_state = key_state.or_else(|| self.replayed_state());
                Seen::Answer { status, code, key_state }
            }
        }
    }

    pub(super) fn polled(&self, asked: &Url) -> Polled {
        match (self.seen(asked), self.status) {
            (Seen::Accepted | Seen::AcceptedElsewhere, _) | (Seen::Success, 202) => Polled::Pending,
            (Seen::Success, _) => match self.operation() {
                Some(OperationBody { status, .. }) if status == "pending" || status == "unknown" => Polled::Pending,
                Some(OperationBody { status, result: Some(_) }) if status == "succeeded" || status == "failed" => {
                    Polled::Ended
                }
                _ => Polled::Unclear,
            },
            (seen, _) => Polled::Met(seen),
        }
    }

    fn operation(&self) -> Option<OperationBody<'_>> {
        serde_json::from_slice(&self.body).ok()
    }

    /// The outcome in an operation's resource, with the exact bytes of its body.
    pub(super) fn result(&self) -> Option<(u16, Vec<u8>)> {
        let result = self.operation()?.result?;
        Some((result.status, result.body.map(|body| body.get().as_bytes().to_vec()).unwrap_or_default()))
    }

    pub(super) fn location(&self) -> Option<Url> {
        self.url.join(self.headers.get(header::LOCATION)?.to_str().ok()?).ok()
    }

    pub(super) fn retry_after(&self, now: SystemTime) -> Option<Duration> {
        let asked = self.headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
        asked.and_then(|text| asked_to_wait(text, now)).or_else(|| {
            let seconds = self.problem().retry_after_seconds?;
            Some(Duration::from_secs(seconds.into()))
        })
    }

    pub(super) fn cause(&self) -> Cause {
        Cause::Answer { status: self.status, code: self.problem().code }
    }

    pub(super) fn into_answer(self, key: Key) -> Answer {
        Answer { key, status: self.status, headers: self.headers, body: self.body }
    }
}

/// Whether both URLs are the same apart from the fragment, which is not sent.
fn same_place(one: &Url, other: &Url) -> bool {
    let bare = |url: &Url| {
        let mut url = url.clone();
        url.set_fragment(None);
        url
    };
    bare(one) == bare(other)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn arrived(status: u16, headers: &[(&'static str, &str)], body: &str) -> Arrived {
        let headers =
            headers.iter().map(|(name, value)| (header::HeaderName::from_static(name), value.parse().unwrap()));
        let url = "https://api.example.com/payments".parse().unwrap();
        Arrived { status, headers: headers.collect(), body: body.as_bytes().to_vec(), url }
    }

    fn asked() -> Url {
        "https://api.example.com/payments#here".parse().unwrap()
    }

    // Shown by: reading the member of the problem before the header.
    #[test]
    fn m110_retry_after_is_a_header_else_a_member_of_the_problem() {
        let now = SystemTime::now();
        let body = r#"{"retry_after_seconds":3}"#;
        let problem = [("content-type", "application/problem+json")];
        assert_eq!(arrived(409, &problem, body).retry_after(now), Some(Duration::from_secs(3)));
        let both = [("content-type", "application/problem+json"), ("retry-after", "9")];
        assert_eq!(arrived(409, &both, body).retry_after(now), Some(Duration::from_secs(9)));
    }

    // Shown by: reading any JSON body.
    #[test]
    fn o26_only_a_problem_body_speaks_of_the_key() {
        let body = r#"{"code":"IDEMPOTENT_RESULT_NOT_RETAINED","key_state":"spent"}"#;
        let code = Some(Code::ResultNotRetained);
        let spent = Seen::Answer { status: 409, code, key_state: Some(KeyState::Spent) };
        for kind in ["application/problem+json", "Application/Problem+JSON; charset=utf-8"] {
            assert_eq!(arrived(409, &[("content-type", kind)], body).seen(&asked()), spent, "{kind}");
        }
        let silent = Seen::Answer { status: 409, code: None, key_state: None };
        // A replayed refusal of the application is marked by a header: a stored 402 is the outcome,
        // also after an unknown attempt. The mark of replays is for people (M65).
        let (replayed, state) = (("idempotent-replayed", "true"), ("idempotency-key-state", "spent"));
        let refused = |key_state| Seen::Answer { status: 402, code: None, key_state };
        for headers in [vec![replayed, state], vec![state]] {
            assert_eq!(arrived(402, &headers, "{}").seen(&asked()), refused(Some(KeyState::Spent)), "{headers:?}");
        }
        for headers in [vec![replayed], vec![("idempotency-key-state", "gone")]] {
            assert_eq!(arrived(402, &headers, "{}").seen(&asked()), refused(None), "{headers:?}");
        }
        assert_eq!(arrived(409, &[("content-type", "application/json")], body).seen(&asked()), silent);
        assert_eq!(arrived(409, &[("content-type", "application/problem+json")], "{").seen(&asked()), silent);
    }

    // Shown by: comparing origins only; following any Location.
    #[test]
    fn o26_an_answer_counts_from_the_url_that_was_asked_and_is_followed_on_its_origin() {
        let elsewhere: Url = "https://api.example.com/login".parse().unwrap();
        assert_eq!(arrived(200, &[], "").seen(&asked()), Seen::Success);
        assert_eq!(arrived(200, &[], "").seen(&elsewhere), Seen::Elsewhere);
        for (location, seen) in [
            ("/operations/7", Seen::Accepted),
            ("https://api.example.com:443/operations/7", Seen::Accepted),
            ("http://api.example.com/operations/7", Seen::AcceptedElsewhere),
            ("https://api.example.com:8443/operations/7", Seen::AcceptedElsewhere),
            ("//other.example.com/operations/7", Seen::AcceptedElsewhere),
        ] {
            assert_eq!(arrived(202, &[("location", location)], "").seen(&asked()), seen, "{location}");
        }
        assert_eq!(arrived(202, &[], "").seen(&asked()), Seen::Success);
        assert_eq!(arrived(307, &[("location", "/x")], "").seen(&asked()), Seen::Redirected);
    }

    #[test]
    fn an_operations_resource_is_read_with_the_bytes_of_its_result() {
        let ended =
            arrived(200, &[], r#"{"id":"7","status":"failed","result":{"status":402,"body":{"a": 9007199254740993}}}"#);
        assert_eq!(ended.polled(&asked()), Polled::Ended);
        assert_eq!(ended.result(), Some((402, br#"{"a": 9007199254740993}"#.to_vec())));
        for (body, polled) in [
            (r#"{"id":"7","status":"pending","result":null}"#, Polled::Pending),
            (r#"{"id":"7","status":"unknown","result":null}"#, Polled::Pending),
            (r#"{"id":"7","status":"succeeded","result":null}"#, Polled::Unclear),
            (r#"{"id":"7","status":"settled"}"#, Polled::Unclear),
            ("", Polled::Unclear),
        ] {
            assert_eq!(arrived(200, &[], body).polled(&asked()), polled, "{body}");
        }
        assert_eq!(arrived(202, &[], "").polled(&asked()), Polled::Pending);
        let missing = Seen::Answer { status: 404, code: None, key_state: None };
        assert_eq!(arrived(404, &[], "").polled(&asked()), Polled::Met(missing));
    }
}
