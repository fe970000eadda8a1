//! The tasks of an adapter for a provider: make the exact bytes once, send them, query for the
//! effect, and report the answer.
//!
//! Rules for an adapter (O5, O7): it sends the bytes as they are given, under the given key.
//! Redirects and retries of a client library are off. It returns [`Answer::NotConnected`] only if
//! the provider cannot act on the request: over HTTP, if not one byte of it can have left. It lists
//! a code as a verdict only if the provider documents that every later send gets the same code.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::HandlerError;
use crate::operation::rules::provider::{Answer, QueryAnswer};

/// A provider, as the driver uses it.
#[async_trait]
pub trait Provider: fmt::Debug + Send + Sync + 'static {
    /// The name, which must never change: it is stored with every intent.
    fn name(&self) -> &'static str;

    /// The version of the bytes that [`Prepare::prepare`] makes. Bytes of older versions are still
    /// sent.
    fn version(&self) -> u32;

    /// The longest time that a call takes; it must be shorter than two thirds of the lease.
    fn timeout(&self) -> Duration;

    /// Sends the bytes once, without a retry.
    ///
    /// # Cancel safety
    /// If the future is dropped, the outcome is unknown. The driver drops it only after
    /// [`Self::timeout`], or where the driver itself is dropped.
    async fn send(&self, call: &Call<'_>) -> Sent;

    /// Queries whether the effect of this call exists. A provider without a query answers
    /// [`QueryAnswer::NotMade`].
    async fn query(&self, _call: &Call<'_>) -> Asked {
        Asked { answer: QueryAnswer::NotMade, status: None, saw: Vec::new() }
    }
}

/// Makes the exact bytes of a request.
pub trait Prepare<R: ?Sized>: Provider {
    /// Returns the bytes to send. It is called in each run of the phase that intends the effect;
    /// every send has the bytes of the run that committed (O5). `key` is that of [`Call::key`].
    ///
    /// # Errors
    /// The request cannot be written: the phase ends with this error, and nothing is sent.
    fn prepare(&self, request: &R, key: &str) -> Result<Vec<u8>, HandlerError>;
}

/// The arguments of a call.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// The key that the provider sees: `op_` and 40 hexadecimal digits, derived from the operation
    /// and the name of the effect. It is the same at every send (O7).
    pub key: &'a str,
    /// The bytes to send, the same at every send.
    pub bytes: &'a [u8],
    /// The version of the adapter that made the bytes.
    pub version: u32,
    /// The number of this send, from 1; 0 for a query.
    pub send: u32,
}

/// The result of a send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sent {
    /// What the provider answered to the send, in the adapter's words.
    pub answer: Answer,
    /// What is stored as evidence and given to the next phase, at most about 2 KiB. It must hold no
    /// secrets, unless a cipher is set.
    pub saw: Vec<u8>,
}

/// The result of a query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// What the provider answered to the query, in the adapter's words.
    pub answer: QueryAnswer,
    /// The status of the provider's answer; `None` if none came. Without a status the query counts
    /// no attempt, unless it is [`QueryAnswer::NotMade`].
    pub status: Option<u16>,
    /// What is stored as evidence and given to the next phase; see [`Sent::saw`].
    pub saw: Vec<u8>,
}

impl fmt::Debug for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Call({}, {} bytes, send {})", self.key, self.bytes.len(), self.send)
    }
}
