//! How messages are stored: headers as JSON, ids as text or bytes.
//!
//! Outbox headers are one JSON object of strings that includes the trace context, so that every
//! writer stores the same form; reading separates the trace context again. Received headers may
//! have any bytes: they are stored as pairs of name and hexadecimal digits.

use uuid::Uuid;

use crate::error::StoreError;
use crate::message::{Headers, TraceContext, wire};
use crate::store::headers::{headers_json, parse_headers};
use crate::text::hex::{hex, unhex};

/// Headers as one JSON object. A repeated name is written twice, so that the trigger sees it.
pub(super) fn headers_to_json(headers: &Headers, trace: Option<&TraceContext>) -> String {
    let mut all = headers.clone();
    if let Some(trace) = trace {
        all.push((wire::TRACEPARENT.to_owned(), trace.traceparent.clone()));
        all.extend(trace.tracestate.clone().map(|state| (wire::TRACESTATE.to_owned(), state)));
    }
    headers_json(&all).unwrap_or_else(|| "{}".to_owned())
}

/// Reads headers from JSON, in their order, and separates the trace context.
pub(super) fn headers_from_json(json: &[u8]) -> Result<(Headers, Option<TraceContext>), StoreError> {
    // The trigger refuses half surrogates and NUL. Other bytes that are not UTF-8 become the
    // replacement character; otherwise the row could never be read.
    let mut headers = parse_headers(&String::from_utf8_lossy(json))?;
    let mut take = |wanted: &str| {
        let at = headers.iter().position(|(name, _)| name.eq_ignore_ascii_case(wanted))?;
        Some(headers.remove(at).1)
    };
    let (parent, state) = (take(wire::TRACEPARENT), take(wire::TRACESTATE));
    let trace = parent.and_then(|parent| TraceContext::parse(&parent, state.as_deref()));
    Ok((headers, trace))
}

/// Received headers with any bytes: `[["name","68657820"], ...]`.
pub(super) fn arrived_to_json(headers: &[(String, Vec<u8>)]) -> String {
    let pairs: Vec<(&str, String)> = headers.iter().map(|(name, value)| (name.as_str(), hex(value))).collect();
    serde_json::json!(pairs).to_string()
}

pub(super) fn arrived_from_json(json: &str) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
    let corrupt = || StoreError::Corrupt("headers of a waiting row are not as they were written".to_owned());
    let pairs: Vec<(String, String)> = serde_json::from_str(json).map_err(|_| corrupt())?;
    pairs.into_iter().map(|(name, digits)| Ok((name, unhex(&digits).ok_or_else(corrupt)?))).collect()
}

pub(super) fn uuid_from_text(text: &str) -> Result<Uuid, StoreError> {
    Uuid::try_parse(text).map_err(|_| StoreError::Corrupt(format!("`{text}` is no message id")))
}

pub(super) fn sixteen(bytes: &[u8]) -> Result<[u8; 16], StoreError> {
    bytes.try_into().map_err(|_| StoreError::Corrupt(format!("{} bytes stand where 16 belong", bytes.len())))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn headers_come_back_in_their_order_with_the_trace_apart() {
        let trace = TraceContext::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", Some("a=b"));
        let headers: Headers = vec![("z".into(), "1\"\\\u{1}".into()), ("a".into(), "ä😀".into())];
        let json = headers_to_json(&headers, trace.as_ref());
        assert_eq!(headers_from_json(json.as_bytes()).unwrap(), (headers, trace));
        assert_eq!(headers_from_json(b"{}").unwrap(), (Headers::new(), None));
    }

    #[test]
    fn arrived_headers_keep_any_bytes() {
        let headers = vec![("a".to_owned(), vec![0, 255, 16]), ("a".to_owned(), Vec::new())];
        assert_eq!(arrived_from_json(&arrived_to_json(&headers)).unwrap(), headers);
        assert!(arrived_from_json(r#"[["a","0"]]"#).is_err());
        assert!(arrived_from_json(r#"[["a","zz"]]"#).is_err());
    }
}
