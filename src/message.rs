//! The forms of a message: before it is enqueued, on its way to the broker, as it arrived, and as a
//! handler sees it.
//!
//! Guarantees: payload bytes are never changed. A content hash and a bucket depend on the message
//! alone, an identity on its id and source, so every language and every process computes the same.
//!
//! Not here: limits as stored in a database (`store`), and the mapping to Kafka and AMQP
//! (`broker`).

mod arrived;
mod hash;
mod identity;
pub(crate) mod limits;
mod new;
mod outgoing;
pub(crate) mod pointer;
mod trace;
pub(crate) mod wire;

#[cfg(any(feature = "duties", feature = "rabbitmq"))]
pub(crate) use self::hash::lane_id;
pub use self::{
    arrived::{Arrived, Coordinates, Message},
    hash::{ContentHash, bucket, content_hash},
    identity::{IdRule, MessageId, identity},
    limits::Limits,
    new::NewMessage,
    outgoing::OutgoingMessage,
    trace::TraceContext,
};
#[cfg(feature = "otel")]
pub(crate) use trace::current_span;

/// Header names and string values, in the order given; names are compared without regard to case.
pub(crate) type Headers = Vec<(String, String)>;
