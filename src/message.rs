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
pub mod limits;
mod new;
mod outgoing;
pub mod pointer;
mod trace;
pub mod wire;

pub use arrived::{Arrived, Coordinates, Message, Unusable};
pub use hash::{ContentHash, bucket, content_hash, lane_id};
pub use identity::{IdRule, MessageId, identity};
pub use limits::Limits;
pub use new::NewMessage;
pub use outgoing::OutgoingMessage;
pub use trace::TraceContext;
#[cfg(feature = "otel")]
pub use trace::current_span;

/// Header names and string values, in the order given; names are compared without regard to case.
pub type Headers = Vec<(String, String)>;
