//! Converts answers between their stored form and gRPC, and tells a client what a result means.
//!
//! A stored answer has the number of its gRPC status. Its body is the message, or for a refusal the
//! message and the details of the status.

use std::collections::HashMap;
use std::time::Duration;

use prost::Message;
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue, MetadataMap};
use tonic::{Response, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::operation::rules::Code;
use crate::operation::rules::problem::KeyState;
use crate::operation::rules::resend::Seen;
use crate::operation::{Problem, Reply};

/// Marks an answer as the answer of an earlier call.
pub const REPLAYED_METADATA: &str = "idempotent-replayed";
/// The domain of the reasons that the engine sends.
const DOMAIN: &str = "oncebox";

/// The body of a stored refusal.
#[derive(Clone, PartialEq, Eq, prost::Message)]
struct Refused {
    #[prost(string, tag = "1")]
    message: String,
    #[prost(bytes = "vec", tag = "2")]
    details: Vec<u8>,
}

/// An answer of a handler with this message.
pub fn reply(message: &impl Message) -> Reply {
    Reply { body: message.encode_to_vec(), ..Reply::new(0) }
}

/// A refusal of a handler with this status and its details. Metadata is kept if the endpoint keeps
/// headers of these names.
#[must_use]
pub fn refusal(status: &Status) -> Reply {
    let refused = Refused { message: status.message().to_owned(), details: status.details().to_vec() };
    let number = u16::try_from(i32::from(status.code())).unwrap_or_default();
    let mut reply = Reply { body: refused.encode_to_vec(), ..Reply::new(number) };
    for entry in status.metadata().iter() {
        if let tonic::metadata::KeyAndValueRef::Ascii(name, value) = entry {
            reply = reply.header(name.as_str(), value.as_bytes());
        }
    }
    reply
}

/// Converts a stored or first answer to a response.
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
    match reply.status {
        0 => {
            let message = R::decode(reply.body.as_slice());
            // Another program wrote it: the outcome is known, but the answer cannot be shown.
            let message = message.map_err(|_| of_problem(&Problem::new(Code::ResultNotRetained)))?;
            let mut response = Response::new(message);
            *response.metadata_mut() = metadata;
            Ok(response)
        }
        number @ 1..=16 => {
            let refused = Refused::decode(reply.body.as_slice()).unwrap_or_default();
            let code = tonic::Code::from_i32(number.into());
            Err(Status::with_details_and_metadata(code, refused.message, refused.details.into(), metadata))
        }
        // The answer of another transport, such as a reference to a resource.
        _ => Err(of_problem(&Problem::new(Code::ResultNotRetained))),
    }
}

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
    let message = problem.detail.clone().unwrap_or_else(|| problem.code.to_string());
    Status::with_error_details(tonic::Code::from_i32(problem.code.grpc()), message, details)
}

/// The result of a unary call, for
/// [`after_attempt`](crate::operation::resend::after_attempt). A deadline and a cancellation say
/// nothing about the server (O27).
pub fn seen<T>(result: &Result<Response<T>, Status>) -> Seen {
    let Err(status) = result else { return Seen::Success };
    let info = status.get_details_error_info().filter(|info| info.domain == DOMAIN);
    let reason: Option<Code> = info.as_ref().and_then(|info| info.reason.parse().ok());
    let key_state: Option<KeyState> =
        info.as_ref().and_then(|info| info.metadata.get("key_state")).and_then(|state| state.parse().ok());
    Seen::of_grpc(status.code().into(), reason, key_state)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shown by: leaving the details out; another domain's reason.
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
        let mut details = ErrorDetails::new();
        details.set_error_info(Code::ResultNotRetained.as_str(), "another.example", HashMap::new());
        let foreign = Status::with_error_details(tonic::Code::FailedPrecondition, "", details);
        assert_eq!(seen::<()>(&Err(foreign)), Seen::Answer { status: 422, code: None, key_state: None });
    }
}
