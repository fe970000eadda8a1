//! Converts stored replies to gRPC responses and back, and tells a client whether to call again.
//!
//! [`Reply::status`] is the code of the gRPC status. If it is 0, the body is the response message;
//! otherwise it is the text and the details of the status.

use std::collections::HashMap;
use std::error::Error;
use std::time::Duration;

use prost::Message;
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue, MetadataMap};
use tonic::{Response, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::operation::rules::Code;
use crate::operation::rules::problem::KeyState;
use crate::operation::rules::resend::Seen;
use crate::operation::{Problem, Reply};

/// Metadata of a response that repeats the response of an earlier call; its value is `true`.
const REPLAYED_METADATA: &str = "idempotent-replayed";
/// Metadata of a refusal that is replayed: the state of the key, `spent`. A refusal of the service
/// itself has no `ErrorInfo` of the engine, and a client in doubt must still learn that this is the
/// outcome (O26).
const KEY_STATE_METADATA: &str = "idempotency-key-state";
const DOMAIN: &str = "oncebox";

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct Refused {
    #[prost(string, tag = "1")]
    message: String,
    #[prost(bytes = "vec", tag = "2")]
    details: Vec<u8>,
}

/// A successful reply of a handler, with this response message.
#[must_use]
pub fn reply(message: &impl Message) -> Reply {
    Reply { body: message.encode_to_vec(), ..Reply::new(0) }
}

/// An error reply of a handler, with this status and its details. Metadata that is text is kept if
/// the endpoint keeps headers of these names. The status `OK` is no error, and is replied as
/// `UNKNOWN`.
#[must_use]
pub fn refusal(status: &Status) -> Reply {
    let refused = Refused { message: status.message().to_owned(), details: status.details().to_vec() };
    let code = if status.code() == tonic::Code::Ok { tonic::Code::Unknown } else { status.code() };
    let mut reply = Reply { body: refused.encode_to_vec(), ..Reply::new(code as u16) };
    for entry in status.metadata().iter() {
        if let tonic::metadata::KeyAndValueRef::Ascii(name, value) = entry {
            reply = reply.header(name.as_str(), value.as_bytes());
        }
    }
    reply
}

pub(super) fn of_reply<R: Message + Default>(reply: &Reply, replayed: bool) -> Result<Response<R>, Status> {
    let mut metadata = MetadataMap::new();
    for (name, value) in &reply.headers {
        let pair = (AsciiMetadataKey::from_bytes(name.as_bytes()), AsciiMetadataValue::try_from(value.as_slice()));
        if let (Ok(name), Ok(value)) = pair {
            metadata.append(name, value);
        }
    }
    if replayed {
        metadata.insert(REPLAYED_METADATA, AsciiMetadataValue::from_static("true"));
    }
    // Not with a message: a client that cannot read it makes an error with this metadata.
    if replayed && reply.status != 0 {
        metadata.insert(KEY_STATE_METADATA, AsciiMetadataValue::from_static(KeyState::Spent.as_str()));
    }
    match reply.status {
        0 => match R::decode(reply.body.as_slice()) {
            Ok(message) => {
                let mut response = Response::new(message);
                *response.metadata_mut() = metadata;
                Ok(response)
            }
            // Not an `R`: another program wrote it. The call was done, but its response cannot be
            // shown.
            Err(_) => Err(not_retained(metadata)),
        },
        number @ 1..=16 => {
            let refused = Refused::decode(reply.body.as_slice()).unwrap_or_default();
            let code = tonic::Code::from_i32(number.into());
            Err(Status::with_details_and_metadata(code, refused.message, refused.details.into(), metadata))
        }
        // Not a gRPC code: the reply is a reference to the resource, or was stored by another
        // transport, for example HTTP.
        _ => Err(not_retained(metadata)),
    }
}

/// The error of a call that was done and has no message to show. A `location` of the reply stays in
/// the metadata.
fn not_retained(metadata: MetadataMap) -> Status {
    let mut status = of_problem(&Problem::new(Code::ResultNotRetained));
    *status.metadata_mut() = metadata;
    status
}

/// The gRPC error for a problem: its reason as `ErrorInfo`, how long to wait as `RetryInfo`, and
/// what was made as `ResourceInfo`.
pub(super) fn of_problem(problem: &Problem) -> Status {
    let mut facts = HashMap::from([
        ("key_state".to_owned(), problem.key_state.to_string()),
        ("retryable".to_owned(), problem.code.retryable().to_string()),
    ]);
    facts.extend(problem.operation_id.map(|id| ("operation_id".to_owned(), id.to_string())));
    facts.extend(problem.home_region.clone().map(|home| ("home_region".to_owned(), home)));
    let mut details = ErrorDetails::new();
    details.set_error_info(problem.code.as_str(), DOMAIN, facts);
    if let Some(seconds) = problem.retry_after {
        details.set_retry_info(Some(Duration::from_secs(seconds.into())));
    }
    if let Some(resource) = &problem.resource {
        details.set_resource_info(&resource.kind, &resource.id, "", "");
    }
    let message = problem.detail.clone().unwrap_or_else(|| problem.code.to_string());
    Status::with_error_details(tonic::Code::from_i32(problem.code.grpc()), message, details)
}

/// What a client saw of a unary call, for
/// [`after_attempt`](crate::operation::resend::after_attempt). `DEADLINE_EXCEEDED`, `CANCELLED` and
/// a status that the client itself made count as no answer: the server may have done the work or
/// not (O27).
pub fn seen<T>(result: &Result<Response<T>, Status>) -> Seen {
    let Err(status) = result else { return Seen::Success };
    if is_of_the_client(status) {
        return Seen::NoAnswer;
    }
    let info = status.get_details_error_info().filter(|info| info.domain == DOMAIN);
    let reason: Option<Code> = info.as_ref().and_then(|info| info.reason.parse().ok());
    let key_state: Option<KeyState> =
        info.as_ref().and_then(|info| info.metadata.get("key_state")).and_then(|state| state.parse().ok());
    Seen::of_grpc(status.code().into(), reason, key_state.or_else(|| replayed_state(status)))
}

/// Whether tonic's client made this status and no server sent it: from an error of the connection,
/// whatever code that has, or because it cannot read the coding of what came.
fn is_of_the_client(status: &Status) -> bool {
    let is_unreadable =
        status.code() == tonic::Code::Unimplemented && status.metadata().contains_key("grpc-accept-encoding");
    status.source().is_some() || is_unreadable
}

fn replayed_state(status: &Status) -> Option<KeyState> {
    status.metadata().get(KEY_STATE_METADATA)?.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::rules::record::Resource;

    // Shown by: leaving the resource out of the details; an error without the metadata.
    #[test]
    fn m63_m109_a_call_whose_answer_is_not_kept_learns_what_it_made() {
        let resource = Resource { kind: "payment".to_owned(), id: "7".to_owned(), location: None };
        let problem = Problem { resource: Some(resource), ..Problem::new(Code::ResultNotRetained) };
        let made = of_problem(&problem).get_details_resource_info().expect("what was made");
        assert_eq!((made.resource_type.as_str(), made.resource_name.as_str()), ("payment", "7"));
        let reference = Reply::new(303).header("location", "payments/7");
        let answered = of_reply::<()>(&reference, true).expect_err("no message");
        assert_eq!(answered.metadata().get("location").map(AsciiMetadataValue::as_bytes), Some(&b"payments/7"[..]));
        assert_eq!(seen::<()>(&Err(answered)), seen::<()>(&Err(of_problem(&Problem::new(Code::ResultNotRetained)))));
    }

    // Shown by: keeping the code of the status: the client decodes the refusal as a response.
    #[test]
    fn m109_a_refusal_with_the_status_ok_is_no_success() {
        let reply = refusal(&Status::ok("done"));
        for replayed in [false, true] {
            let answered = of_reply::<()>(&reply, replayed).expect_err("a refusal");
            assert_eq!((answered.code(), answered.message()), (tonic::Code::Unknown, "done"));
        }
    }

    // Shown by: leaving the details out; another domain's reason; hearing the client itself.
    #[test]
    fn m109_every_problem_is_a_status_with_its_reason_and_its_wait() {
        for code in Code::all() {
            let status = of_problem(&Problem::new(code));
            assert_eq!(i32::from(status.code()), code.grpc(), "{code}");
            let details = status.get_error_details();
            assert_eq!(details.error_info().map(|info| info.reason.as_str()), Some(code.as_str()));
            let wait = details.retry_info().and_then(|info| info.retry_delay).map(|wait| wait.as_secs());
            assert_eq!(wait, code.pause().map(u64::from), "{code}");
            let seen = seen::<()>(&Err(status));
            let expected = Seen::of_grpc(code.grpc(), Some(code), Some(code.key_state()));
            assert_eq!(seen, expected);
        }
        assert_eq!(seen::<()>(&Err(Status::deadline_exceeded("Timeout expired"))), Seen::NoAnswer);
        assert_eq!(seen::<()>(&Err(Status::cancelled(""))), Seen::NoAnswer);
        // Of the client, from an error of its connection, or because it cannot read the answer.
        let mut broken = Status::permission_denied("h2 protocol error");
        assert_ne!(seen::<()>(&Err(broken.clone())), Seen::NoAnswer);
        broken.set_source(std::sync::Arc::new(std::fmt::Error));
        assert_eq!(seen::<()>(&Err(broken)), Seen::NoAnswer);
        let mut coded = Status::unimplemented("Content is compressed with `zstd` which isn't supported");
        coded.metadata_mut().insert("grpc-accept-encoding", AsciiMetadataValue::from_static("identity"));
        assert_eq!(seen::<()>(&Err(coded)), Seen::NoAnswer);
        let mut details = ErrorDetails::new();
        details.set_error_info(Code::ResultNotRetained.as_str(), "another.example", HashMap::new());
        let foreign = Status::with_error_details(tonic::Code::FailedPrecondition, "", details);
        assert_eq!(seen::<()>(&Err(foreign)), Seen::Answer { status: 422, code: None, key_state: None });
    }
}
