//! Encodes an answer for storage, and decodes it to the same answer (M62 to M68).
//!
//! Promises:
//!
//! * Only allow-listed headers are kept. A repeated header keeps all its values in their order.
//! * Values that a redaction pointer names, bodies that are secret, and bodies that are too long
//!   never reach the store. A secret or too long body leaves a tombstone; the operation is never
//!   run again to get the answer.
//! * The resource that an answer names is kept beside the body, and outlives it.
//! * A body in a content coding (such as gzip) that one client asked for is never replayed to
//!   another client: it leaves a tombstone too (pitfall 22).
//! * Sealed bytes can be opened only for the same tenant, operation, key, command, status, schema
//!   version and format. With an encryption key, headers are sealed together with the body, because
//!   a `Location` may be a signed URL.
//!
//! Not here: the bodies of streams, and the lifetimes (`store`).

pub(super) mod headers;
mod redact;
mod resource;
mod seal;

use super::endpoint::Endpoint;
use super::reply::{Keep, Reply};
use crate::operation::port::{Answer, AnswerBody, KeptBody};
use crate::operation::rules::framed::framed;
use crate::operation::rules::record::Tombstone;
use crate::operation::rules::{Fingerprint, Identity};

pub use seal::{SealError, Sealer};

/// An answer, or the part of it that is known, to be kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kept {
    /// The answer with headers and body.
    Whole(Reply),
    /// The answer without its body, which was longer than the limit.
    Oversize(Reply),
    /// The answer without its body, which is a stream.
    Stream(Reply),
}

impl Kept {
    pub(crate) fn status(&self) -> u16 {
        match self {
            Self::Whole(reply) | Self::Oversize(reply) | Self::Stream(reply) => reply.status,
        }
    }
}

/// The context of a sealed body: it can be opened only with the same values.
fn context(identity: &Identity, fingerprint: &Fingerprint, (status, schema_version): (u16, u32)) -> Vec<u8> {
    let fingerprint = fingerprint.to_string();
    framed([
        identity.tenant().as_bytes(),
        identity.operation().as_str().as_bytes(),
        identity.key().as_str().as_bytes(),
        fingerprint.as_bytes(),
        &status.to_be_bytes(),
        &schema_version.to_be_bytes(),
    ])
}

/// Encodes an answer for storage. An answer that cannot be sealed is not stored in plain instead.
pub(super) fn encode(
    endpoint: &Endpoint,
    sealer: &Sealer,
    identity: &Identity,
    fingerprint: &Fingerprint,
    kept: &Kept,
) -> Result<Answer, SealError> {
    let (reply, missing) = match kept {
        Kept::Whole(reply) => (reply, None),
        Kept::Oversize(reply) => (reply, Some(Tombstone::Oversize)),
        Kept::Stream(reply) => (reply, Some(Tombstone::Stream)),
    };
    let schema_version = if reply.schema_version == 0 { endpoint.route.schema_version } else { reply.schema_version };
    let resource = resource::kept(reply, sealer);
    if let Some(reason) = missing {
        return Ok(Answer { status: reply.status, schema_version, body: AnswerBody::Tombstone(reason), resource });
    }
    let body = match (reply.keep, &resource) {
        (Keep::Reference, Some(_)) => AnswerBody::Reference,
        (Keep::Reference, None) | (Keep::Nothing, _) => AnswerBody::Tombstone(Tombstone::Withheld),
        (Keep::Exact, _) if headers::is_coded(&reply.headers) => {
            tracing::warn!(
                operation = %identity.operation(),
                "an answer is not kept, for it came compressed: compression belongs outside of the idempotency layer"
            );
            AnswerBody::Tombstone(Tombstone::Withheld)
        }
        (Keep::Exact, _) if reply.body.len() > endpoint.route.kept_body_max => {
            AnswerBody::Tombstone(Tombstone::Oversize)
        }
        (Keep::Exact, _) => match redact::redacted(&reply.body, &endpoint.route.redacts) {
            // The body cannot be parsed, so nobody can prove that it holds no secret.
            None => AnswerBody::Tombstone(Tombstone::Withheld),
            Some(bytes) => {
                let headers = headers::kept(&reply.headers, &endpoint.route.keeps_headers);
                let context = context(identity, fingerprint, (reply.status, schema_version));
                AnswerBody::Kept(sealer.seal_body(&context, headers, bytes)?)
            }
        },
    };
    Ok(Answer { status: reply.status, schema_version, body, resource })
}

/// Decodes a stored answer. It fails where this process does not have the key, or where the bytes
/// are not those that were stored for this request.
pub(super) fn decode(
    endpoint: &Endpoint,
    sealer: &Sealer,
    (identity, fingerprint): (&Identity, &Fingerprint),
    (status, schema_version): (u16, u32),
    body: &KeptBody,
) -> Result<Reply, SealError> {
    let (headers, bytes) = sealer.open_body(&context(identity, fingerprint, (status, schema_version)), body)?;
    let mut reply = Reply { status, headers, body: bytes, schema_version, resource: None, keep: Keep::Exact };
    // One version after the other. Where a step is missing, the answer stays as it is (M66).
    while let Some(change) =
        endpoint.upcasts.get(&reply.schema_version).filter(|_| reply.schema_version < endpoint.route.schema_version)
    {
        let next = reply.schema_version + 1;
        reply = Reply { schema_version: next, ..change(reply) };
    }
    Ok(reply)
}

const ERROR_CODE_MAX: usize = 128;

/// Reads the error code of a failure: the member `code` of a JSON body. The code is stored in
/// plain. So it is read only where the answer is [`Keep::Exact`], after redaction, and only if it
/// looks like a code (M67).
pub(super) fn error_code(endpoint: &Endpoint, reply: &Reply) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Coded {
        code: String,
    }
    if reply.keep != Keep::Exact {
        return None;
    }
    // A redacted code reads `[redacted]`, which is not a valid code.
    let body = redact::redacted(&reply.body, &endpoint.route.redacts)?;
    let code = serde_json::from_slice::<Coded>(&body).ok()?.code;
    let is_code = |byte: u8| byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte);
    (!code.is_empty() && code.len() <= ERROR_CODE_MAX && code.bytes().all(is_code)).then_some(code)
}

#[cfg(test)]
mod tests;
