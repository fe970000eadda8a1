//! The meaning of the client's errors and of the server's reply codes.
//!
//! Promise: an unknown error puts the session in doubt and is never counted against a message.
//! Source: AMQP 0.9.1, section 1.2 (reply codes), and the reply texts of RabbitMQ.

use std::future::Future;
use std::time::Duration;

use lapin::ErrorKind;

use super::config::Server;
use crate::error::BrokerError;

/// No permission, or user name and password were not accepted.
pub(super) const ACCESS_REFUSED: u16 = 403;
/// The exchange, queue or vhost does not exist.
pub(super) const NOT_FOUND: u16 = 404;
/// The object exists with other properties, or a message is larger than the server takes.
pub(super) const PRECONDITION_FAILED: u16 = 406;
/// An operator or a shutdown of the server closed the connection.
const CONNECTION_FORCED: u16 = 320;
/// The queue is exclusive to another connection.
const RESOURCE_LOCKED: u16 = 405;
/// The exchange type is unknown: its plugin is not enabled.
pub(super) const COMMAND_INVALID: u16 = 503;
/// The vhost does not exist, or the user may not use it.
const NOT_ALLOWED: u16 = 530;

/// Why a request to the server failed.
#[derive(Debug)]
pub(super) enum Fault {
    /// The client's error, which may carry the server's reply.
    Client(lapin::Error),
    /// No answer came within the deadline; the client library itself waits for ever.
    Silent(&'static str, Duration),
}

impl Fault {
    /// The reply code, where the server closed the channel or the connection.
    pub(super) fn code(&self) -> Option<u16> {
        match self {
            Self::Client(error) => reply(error).map(|(code, _)| code),
            Self::Silent(..) => None,
        }
    }

    /// The reply text, or what else is known about the error.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Client(error) => reply(error).map_or_else(|| error.to_string(), |(_, text)| text),
            Self::Silent(what, after) => format!("no answer to {what} within {after:?}"),
        }
    }
}

impl From<Fault> for BrokerError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Client(error) => classify(&error),
            Fault::Silent(..) => Self::Unavailable(fault.text()),
        }
    }
}

/// Waits for an answer of the server, up to a deadline.
pub(super) async fn within<T>(
    deadline: Duration,
    what: &'static str,
    question: impl Future<Output = lapin::Result<T>>,
) -> Result<T, Fault> {
    match tokio::time::timeout(deadline, question).await {
        Ok(answer) => answer.map_err(Fault::Client),
        Err(_) => Err(Fault::Silent(what, deadline)),
    }
}

/// The reply code and text, where the server closed a channel or the connection.
pub(super) fn reply(error: &lapin::Error) -> Option<(u16, String)> {
    match error.kind() {
        ErrorKind::ProtocolError(error) => Some((error.get_id(), error.get_message().to_string())),
        _ => None,
    }
}

/// Classifies an error on an open connection.
pub(super) fn classify(error: &lapin::Error) -> BrokerError {
    if let Some((code, text)) = reply(error) {
        return match code {
            ACCESS_REFUSED | NOT_FOUND | RESOURCE_LOCKED => BrokerError::Destination(text),
            PRECONDITION_FAILED | COMMAND_INVALID => BrokerError::Refused(text),
            CONNECTION_FORCED => BrokerError::Unavailable(text),
            _ => BrokerError::Session(format!("the server closed with {code}: {text}")),
        };
    }
    match error.kind() {
        ErrorKind::IOError(_)
        | ErrorKind::RuntimeShutdownError(_)
        | ErrorKind::MissingHeartbeatError
        | ErrorKind::InvalidChannel(_)
        | ErrorKind::InvalidChannelState(..)
        | ErrorKind::InvalidConnectionState(_) => BrokerError::Unavailable(error.to_string()),
        ErrorKind::ParsingError(_) => BrokerError::Session(format!(
            "the client library cannot read what the server sent ({error}); a header or property that is not UTF-8 does this"
        )),
        _ => BrokerError::Session(error.to_string()),
    }
}

/// Whether the connection ended without a word of the server, and not for its silence.
pub(super) fn is_cut(error: &lapin::Error) -> bool {
    matches!(error.kind(), ErrorKind::IOError(_))
}

/// Classifies what ended a stream of deliveries. It is never [`BrokerError::Refused`], which ends a
/// consumer: with the same code as for a wrong declaration the server closes a channel whose
/// deliveries stay unacknowledged for longer than its `consumer_timeout`, and a new one works.
pub(super) fn streaming(error: &lapin::Error) -> BrokerError {
    match classify(error) {
        BrokerError::Refused(text) => BrokerError::Session(text),
        other => other,
    }
}

/// Classifies an error of opening a connection.
pub(super) fn connecting(error: &lapin::Error, server: &Server) -> BrokerError {
    match reply(error) {
        Some((ACCESS_REFUSED, _)) => BrokerError::Unauthorised(format!(
            "RabbitMQ at {server} did not accept the name and password of user `{}`",
            server.0.authority.userinfo.username
        )),
        Some((NOT_ALLOWED, text)) if text.contains("limit") => {
            BrokerError::Unavailable(format!("RabbitMQ at {server}: {text}"))
        }
        Some((NOT_ALLOWED, text)) => BrokerError::Unauthorised(format!("RabbitMQ at {server}: {text}")),
        Some((code, text)) => BrokerError::Unavailable(format!("RabbitMQ at {server} answered {code}: {text}")),
        None => BrokerError::Unavailable(format!("RabbitMQ at {server}: {error}")),
    }
}

/// The argument that a reply 406 names: `inequivalent arg 'x-delivery-limit' for queue ..`.
pub(super) fn inequivalent(text: &str) -> Option<&str> {
    let rest = &text[text.find("inequivalent arg '")? + "inequivalent arg '".len()..];
    rest.split_once('\'').map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_argument_is_read_from_the_text_of_a_406() {
        let text =
            "PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue 'q' in vhost '/': received 'quorum'";
        assert_eq!(inequivalent(text), Some("x-queue-type"));
        assert_eq!(inequivalent("PRECONDITION_FAILED - unknown delivery tag 4"), None);
    }
}
