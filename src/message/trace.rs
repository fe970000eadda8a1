//! W3C trace context. Promise: it is parsed strictly and carried with the message. Not here:
//! exporting spans.
//!
//! Source: W3C Trace Context, level 1, sections 3.2 and 3.3.

/// A `traceparent`, and the state that vendors add to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceContext {
    /// `00-<32 hex>-<16 hex>-<2 hex>`.
    pub traceparent: String,
    /// The state of vendors, as it came.
    pub tracestate: Option<String>,
}

impl TraceContext {
    /// Reads a `traceparent` in W3C form; `None` for any other text. A `tracestate` that is not
    /// valid is dropped.
    #[must_use]
    pub fn parse(traceparent: &str, tracestate: Option<&str>) -> Option<Self> {
        let bytes = traceparent.as_bytes();
        let hex = |range: std::ops::Range<usize>| {
            bytes[range].iter().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte))
        };
        let shape = bytes.len() == 55
            && bytes[2] == b'-'
            && bytes[35] == b'-'
            && bytes[52] == b'-'
            && hex(0..2)
            && hex(3..35)
            && hex(36..52)
            && hex(53..55);
        if !shape || traceparent.starts_with("ff") {
            return None;
        }
        let zero = |range: std::ops::Range<usize>| bytes[range].iter().all(|byte| *byte == b'0');
        if zero(3..35) || zero(36..52) {
            return None;
        }
        let printable = |state: &&str| state.bytes().all(|byte| matches!(byte, b'\t' | b' '..=b'~'));
        let state = tracestate.filter(|state| !state.is_empty() && state.len() <= 512).filter(printable);
        Some(Self { traceparent: traceparent.to_owned(), tracestate: state.map(str::to_owned) })
    }
}

/// The trace context of the current `tracing` span; `None` if no OpenTelemetry layer has one.
#[cfg(feature = "otel")]
pub(crate) fn current_span() -> Option<TraceContext> {
    use opentelemetry::trace::TraceContextExt;
    use tracing_opentelemetry::OpenTelemetrySpanExt;

    let context = tracing::Span::current().context();
    let span = context.span();
    let span = span.span_context();
    span.is_valid().then(|| TraceContext {
        traceparent: format!("00-{}-{}-{:02x}", span.trace_id(), span.span_id(), span.trace_flags().to_u8()),
        tracestate: Some(span.trace_state().header()).filter(|state| !state.is_empty()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_w3c_form_is_taken() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert!(TraceContext::parse(good, None).is_some());
        for bad in [
            "",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-",
        ] {
            assert_eq!(TraceContext::parse(bad, None), None, "{bad}");
        }
        for (state, stays) in [("a=1,\tb=2", true), ("", false), ("a\0b", false), ("a=\u{7f}", false), ("ä=1", false)]
        {
            let taken = TraceContext::parse(good, Some(state)).and_then(|trace| trace.tracestate);
            assert_eq!(taken.is_some(), stays, "{state:?}");
        }
    }
}
