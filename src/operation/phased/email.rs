//! E-mails as phased operations: durable, sent again under the same Message-ID, with no guessed
//! outcome (O28).
//!
//! SMTP has no idempotency key and no query, so the strategy is [`Strategy::Repeatable`]: at least
//! once, with the same bytes, so that readers see one Message-ID:
//!
//! * The e-mail is composed once, with its Date and a Message-ID that is derived from the key of
//!   the effect. It is committed before the first send.
//! * A 5xx about the e-mail is a refusal if it answers the only attempt that can have arrived. If
//!   another attempt can have arrived, it proves nothing.
//! * A 4xx, a 5xx about us (at the greeting, the credentials or our address), and a connection that
//!   ends before the text of the e-mail prove that this attempt did not arrive. It is not counted,
//!   and the e-mail is tried again after a pause.
//! * A 5xx to the recipient that may be about us, and an extension that the e-mail needs and the
//!   server does not offer, do not pass by waiting: such an attempt did not arrive either, but it
//!   counts.
//! * A lost answer counts: from then on the state is `possibly sent N times`.
//! * When the attempts are used up, the e-mail is dead, which an operator sees as parked.
//! * The transport that writes files sends exactly once: a second attempt replaces the file of the
//!   first.
//!
//! [`Emails::flow`] is an operation of its own. In another flow, `Effect::new("receipt", emails,
//! Strategy::Repeatable)` sends an e-mail beside other effects.
//!
//! Not here: e-mails that a handler queues in its transaction; those are rows
//! ([`Mailbox`](crate::email::port::Mailbox)).

use std::time::Duration;

use async_trait::async_trait;
use lettre::address::Envelope;
use lettre::message::Mailbox as Address;
use serde::{Deserialize, Serialize};

use super::flow::Flow;
use super::provider::{Call, Prepare, Provider, Sent};
use super::sending;
use crate::email::carriage::{EmailTransport, address, compose, message_id};
use crate::email::smtp::{Failure, Means};
use crate::error::{HandlerError, Invalid};
use crate::operation::Endpoint;
use crate::operation::rules::provider::{Answer, Strategy};
use crate::operation::rules::{FingerprintWriter, IdempotentCommand, Mode, Route};
use crate::store::base::Base;

/// The time limit of one sending. With the time around it, it fits into two thirds of the usual
/// lease.
const SENDING: Duration = Duration::from_secs(15);

/// The command to send one e-mail.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendEmail {
    /// The address of the recipient.
    pub recipient: String,
    /// The subject; line ends in the text add no header.
    pub subject: String,
    /// The body, in plain text.
    pub body: String,
}

impl std::fmt::Debug for SendEmail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SendEmail({} bytes)", self.body.len())
    }
}

impl IdempotentCommand for SendEmail {
    const OPERATION: &'static str = "send_email";
    const VERSION: u32 = 1;

    fn fingerprint(&self, _version: u32, writer: &mut FingerprintWriter) {
        writer.field("recipient", self.recipient.as_str());
        writer.field("subject", self.subject.as_str());
        writer.field("body", self.body.as_str());
    }
}

/// Sends e-mails: a provider of phased operations.
#[derive(Debug, Clone)]
pub struct Emails {
    transport: EmailTransport,
    from: Address,
}

/// Sender and recipients; they are stored before the e-mail in the same bytes.
#[derive(Serialize, Deserialize)]
struct Parties {
    from: String,
    to: Vec<String>,
}

impl Emails {
    /// A sender of e-mails with this sender address.
    ///
    /// # Errors
    /// The address is not valid, or the directory of a file transport cannot be made.
    pub fn new(transport: EmailTransport, from: &str) -> Result<Self, String> {
        transport.make()?;
        Ok(Self { transport, from: address(from)? })
    }

    /// The operation that sends one e-mail.
    ///
    /// # Errors
    /// As [`FlowBuilder::build`](super::FlowBuilder::build).
    pub fn flow<S: Base>(self) -> Result<Flow<S>, Invalid> {
        sending::flow::<S, SendEmail, _>("email", self, Strategy::Repeatable, "EMAIL_REFUSED")
    }

    /// The endpoint of that operation.
    #[must_use]
    pub fn endpoint() -> Endpoint {
        Endpoint::typed::<SendEmail>(Route::new(Mode::Phased))
    }
}

fn opened(bytes: &[u8]) -> Result<(Envelope, &[u8]), HandlerError> {
    let (parties, email) = sending::opened::<Parties>(bytes)?;
    let address = |text: &String| text.parse().map_err(HandlerError::terminal);
    let to = parties.to.iter().map(address).collect::<Result<_, _>>()?;
    let envelope = Envelope::new(Some(address(&parties.from)?), to).map_err(HandlerError::terminal)?;
    Ok((envelope, email))
}

#[async_trait]
impl Provider for Emails {
    fn name(&self) -> &'static str {
        "email"
    }

    fn version(&self) -> u32 {
        1
    }

    fn timeout(&self) -> Duration {
        // Longer than the limit inside `send`, whose error says more about what happened.
        SENDING + Duration::from_secs(1)
    }

    async fn send(&self, call: &Call<'_>) -> Sent {
        let (envelope, email) = match opened(call.bytes) {
            Ok(parts) => parts,
            Err(error) => return Sent { answer: Answer::NotMade, saw: error.message.into_bytes() },
        };
        match self.transport.carry(&message_id(call.key), &envelope, email, SENDING).await {
            Ok(()) => Sent { answer: sending::uncompared(Answer::status(200)), saw: Vec::new() },
            Err(Failure { error, means }) => {
                let answer = match means {
                    Means::Refused => Answer::status(422),
                    Means::Unknown => Answer::NoAnswer,
                    Means::Barred => Answer::NotMade,
                    // Even if bytes were sent, the server did not accept the e-mail.
                    Means::NotNow | Means::Away => Answer::NotConnected,
                };
                Sent { answer, saw: error.into_bytes() }
            }
        }
    }
}

impl Prepare<SendEmail> for Emails {
    fn prepare(&self, request: &SendEmail, key: &str) -> Result<Vec<u8>, HandlerError> {
        let id = message_id(key);
        let email = compose(&self.from, &id, &request.recipient, &request.subject, &request.body);
        let email = email.map_err(HandlerError::terminal)?;
        let to = email.envelope().to().iter().map(ToString::to_string).collect();
        let parties = Parties { from: self.from.email.to_string(), to };
        sending::packed(&parties, &email.formatted())
    }
}
