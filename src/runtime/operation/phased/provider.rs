//! What an adapter of an outside provider does: make the exact bytes once, send them, ask for them,
//! and say what came back.
//!
//! The adapter does I/O and reads answers; what they prove, and what to do next, is decided by
//! [`policy::operation::provider`](crate::policy::operation::provider).
//!
//! What an adapter must keep to (O5, O7): bytes are sent as they are given, under the key that is
//! given; redirects and retries of a client library are off; [`Answer::NotConnected`] is said only
//! where not a byte of the request can have left; a code is listed as a verdict only if the
//! provider documents that every later send gets it too.
//!
//! Not here: an adapter over HTTP ([`http`](super::http)), and when it is called
//! ([`driver`](super::driver)).

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use super::identity::ProviderKey;
use crate::error::HandlerError;
use crate::policy::operation::provider::{Answer, QueryAnswer};

/// A provider, as the driver sees it.
#[async_trait]
pub trait Provider: fmt::Debug + Send + Sync + 'static {
    /// The name, the same for ever; stands with every intent.
    fn name(&self) -> &'static str;

    /// The version of the bytes that [`Prepare::prepare`] makes now. Bytes of older versions are
    /// still sent.
    fn version(&self) -> u32;

    /// The longest that a call takes. It must be shorter than two thirds of the lease.
    fn timeout(&self) -> Duration;

    /// Sends the bytes, once.
    ///
    /// # Cancel safety
    /// Dropped, the outcome is unknown; the driver drops it only after [`Self::timeout`].
    async fn send(&self, call: &Call<'_>) -> Sent;

    /// Asks whether the effect of this call is there. A provider that cannot be asked answers
    /// [`QueryAnswer::Failed`].
    async fn query(&self, _call: &Call<'_>) -> Asked {
        Asked { answer: QueryAnswer::Failed, status: None, saw: Vec::new() }
    }
}

/// Makes the bytes of a request.
pub trait Prepare<R: ?Sized>: Provider {
    /// The exact bytes, made once and stored before the first send (O5).
    ///
    /// # Errors
    /// The request cannot be written: the phase ends with this error, and nothing was sent.
    fn prepare(&self, request: &R, key: &ProviderKey) -> Result<Vec<u8>, HandlerError>;
}

/// A call that is made.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// The key that the provider sees, the same at every send.
    pub key: &'a ProviderKey,
    /// The bytes, the same at every send.
    pub bytes: &'a [u8],
    /// The version of the adapter that made them.
    pub version: u32,
    /// Which send this is, from 1; 0 for a query.
    pub send: u32,
}

/// What came back of a send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sent {
    /// What the provider answered to the send, in the adapter's words.
    pub answer: Answer,
    /// What is kept as evidence and shown to the next phase, at most about 2 KiB: without secrets,
    /// unless a cipher is set.
    pub saw: Vec<u8>,
}

/// What came back of a query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// What the provider answered to the query, in the adapter's words.
    pub answer: QueryAnswer,
    /// The status of the provider's answer.
    pub status: Option<u16>,
    /// What is kept as evidence and shown to the next phase, as [`Sent::saw`] is.
    pub saw: Vec<u8>,
}

impl fmt::Debug for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Call({}, {} bytes, send {})", self.key, self.bytes.len(), self.send)
    }
}
