//! What is kept of an answer, and how it becomes the same answer again (M62 to M68).
//!
//! Promises:
//!
//! * Only allow-listed headers are kept; a name that repeats keeps all its values in their order.
//! * What a pointer redacts, what is a secret, and what is too long never reaches the store: the
//!   last two leave a tombstone, and are never run again to get an answer.
//! * Bytes of one client's content coding are never another's answer: they leave a tombstone too
//!   (pitfall 22).
//! * What was sealed under a key is opened only for the same tenant, operation, key, command,
//!   status, schema version and format; with a key, headers are sealed with the body: a `Location`
//!   may be a signed URL.
//!
//! Not here: streams, which never come here ([`Kept::Stream`]), and the lifetimes (`store`).

mod headers;
mod redact;
mod seal;

use super::endpoint::{Endpoint, EndpointError};
use super::reply::{Keep, Reply};
use crate::policy::operation::record::Tombstone;
use crate::policy::operation::{Fingerprint, Identity};
use crate::store::{Answer, AnswerBody, KeptBody, pack_headers, unpack_headers};

use seal::FRAMED;
pub use seal::{SealError, Sealer};

/// What is kept of the answers of one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Keeping {
    pub(super) headers: Vec<String>,
    pub(super) redact: Vec<String>,
    pub(super) body_max: usize,
}

impl Default for Keeping {
    fn default() -> Self {
        Self { headers: Vec::new(), redact: Vec::new(), body_max: 256 << 10 }
    }
}

impl Keeping {
    pub(super) fn validate(&self) -> Result<(), EndpointError> {
        if let Some(name) = self.headers.iter().find(|name| headers::is_never(name)) {
            return Err(EndpointError::Header(name.clone()));
        }
        match self.redact.iter().find(|pointer| !pointer.starts_with('/')) {
            Some(pointer) => Err(EndpointError::Pointer(pointer.clone())),
            None => Ok(()),
        }
    }
}

/// What there is of an answer when it is to be kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kept {
    /// The answer with headers and body.
    Whole(Reply),
    /// Its status only: it was longer than the limit.
    Oversize(u16),
    /// Its status only: it is a stream.
    Stream(u16),
}

impl Kept {
    /// The status of the answer, which is known in every case.
    #[must_use]
    pub fn status(&self) -> u16 {
        match self {
            Self::Whole(reply) => reply.status,
            Self::Oversize(status) | Self::Stream(status) => *status,
        }
    }
}

/// What belongs to whom: a sealed body is opened only there.
fn context(identity: &Identity, fingerprint: &Fingerprint, (status, schema_version): (u16, u32)) -> [Vec<u8>; 6] {
    [
        identity.tenant().as_bytes().to_vec(),
        identity.operation().as_str().as_bytes().to_vec(),
        identity.key().as_str().as_bytes().to_vec(),
        fingerprint.to_string().into_bytes(),
        status.to_be_bytes().to_vec(),
        schema_version.to_be_bytes().to_vec(),
    ]
}

/// The answer as it is stored.
///
/// # Errors
/// The sealer's; nothing is stored in plain instead.
pub(super) fn encode(
    endpoint: &Endpoint,
    sealer: &Sealer,
    identity: &Identity,
    fingerprint: &Fingerprint,
    kept: &Kept,
) -> Result<Answer, SealError> {
    let schema_version = endpoint.schema_version;
    let tombstone = |status, reason| Answer { status, schema_version, body: AnswerBody::Tombstone(reason) };
    let reply = match kept {
        Kept::Oversize(status) => return Ok(tombstone(*status, Tombstone::Oversize)),
        Kept::Stream(status) => return Ok(tombstone(*status, Tombstone::Stream)),
        Kept::Whole(reply) => reply,
    };
    let schema_version = if reply.schema_version == 0 { schema_version } else { reply.schema_version };
    let body = match (reply.keep, &reply.resource) {
        (Keep::Reference, Some(resource)) => AnswerBody::Reference(resource.clone()),
        (Keep::Reference, None) | (Keep::Nothing, _) => AnswerBody::Tombstone(Tombstone::Withheld),
        (Keep::Exact, _) if headers::is_coded(&reply.headers) => {
            tracing::warn!(
                operation = %identity.operation(),
                "an answer is not kept, for it came compressed: compression belongs outside of the idempotency layer"
            );
            AnswerBody::Tombstone(Tombstone::Withheld)
        }
        (Keep::Exact, _) if reply.body.len() > endpoint.keeping.body_max => AnswerBody::Tombstone(Tombstone::Oversize),
        (Keep::Exact, _) => match redact::redacted(&reply.body, &endpoint.keeping.redact) {
            // It cannot be shown that nothing secret is in it.
            None => AnswerBody::Tombstone(Tombstone::Withheld),
            Some(bytes) => {
                let headers = headers::kept(&reply.headers, &endpoint.keeping.headers);
                let context = context(identity, fingerprint, (reply.status, schema_version));
                let (headers, sealed) = if sealer.encrypts() {
                    (Vec::new(), sealer.seal_body(&context, framed(&headers, &bytes), FRAMED)?)
                } else {
                    (headers, sealer.seal_body(&context, bytes, 0)?)
                };
                AnswerBody::Kept(KeptBody { headers, bytes: sealed.bytes, format: sealed.format, kid: sealed.kid })
            }
        },
    };
    Ok(Answer { status: reply.status, schema_version, body })
}

/// The answer as it was.
///
/// # Errors
/// The sealer's: the key is not here, or the bytes are not what was stored for this request.
pub(super) fn decode(
    endpoint: &Endpoint,
    sealer: &Sealer,
    (identity, fingerprint): (&Identity, &Fingerprint),
    (status, schema_version): (u16, u32),
    body: &KeptBody,
) -> Result<Reply, SealError> {
    let context = context(identity, fingerprint, (status, schema_version));
    let bytes = sealer.open_body(&context, body.format, body.kid.as_deref(), &body.bytes)?;
    let (headers, bytes) = if body.format & FRAMED == 0 {
        (body.headers.clone(), bytes)
    } else {
        unframed(&bytes).ok_or(SealError::Broken)?
    };
    let mut reply = Reply { status, headers, body: bytes, schema_version, resource: None, keep: Keep::Exact };
    // Step by step; where a step is missing the stored answer stands (M66).
    while let Some(change) =
        endpoint.upcasts.get(&reply.schema_version).filter(|_| reply.schema_version < endpoint.schema_version)
    {
        let next = reply.schema_version + 1;
        reply = Reply { schema_version: next, ..change(reply) };
    }
    Ok(reply)
}

/// Headers as names and values, in their order.
type Headers = Vec<(String, Vec<u8>)>;

/// Headers, behind their length in four bytes, and the body.
fn framed(headers: &[(String, Vec<u8>)], body: &[u8]) -> Vec<u8> {
    let headers = pack_headers(headers);
    let length = u32::try_from(headers.len()).unwrap_or(u32::MAX);
    [&length.to_be_bytes()[..], &headers, body].concat()
}

/// What [`framed`] put together.
fn unframed(bytes: &[u8]) -> Option<(Headers, Vec<u8>)> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (headers, body) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
    Some((unpack_headers(headers).ok()?, body.to_vec()))
}

/// Longer codes are not kept.
const ERROR_CODE_MAX: usize = 128;

/// The code of a failure: the member `code` of a JSON body, stored in plain. So only of a body that
/// is kept as it is, not where it is redacted, and only what looks like a code (M67).
pub(super) fn error_code(endpoint: &Endpoint, reply: &Reply) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Coded {
        code: String,
    }
    if reply.keep != Keep::Exact {
        return None;
    }
    // What is redacted reads `[redacted]` then, which is no code.
    let body = redact::redacted(&reply.body, &endpoint.keeping.redact)?;
    let code = serde_json::from_slice::<Coded>(&body).ok()?.code;
    let is_code = |byte: u8| byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte);
    (!code.is_empty() && code.len() <= ERROR_CODE_MAX && code.bytes().all(is_code)).then_some(code)
}

#[cfg(test)]
mod tests;
