//! W3C trace context. Promise: it is parsed strictly and carried with the message. Not here:
//! exporting spans.
//!
//! Source: W3C Trace Context, level 1, sections 3.2 and 3.3.

/// A `traceparent`, and the state that vendors add to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceContext {
    /// Version, trace id, span id and flags: `00-<32 hex>-<16 hex>-<2 hex>`.
    pub traceparent: String,
    /// The state of vendors, as it came.
    pub tracestate: Option<String>,
}

impl TraceContext {
    /// Reads a `traceparent` in W3C form; `None` for any other text. A `tracestate` that is not
    /// valid is dropped.
    pub(crate) fn parse(traceparent: &str, tracestate: Option<&str>) -> Option<Self> {
        let parts: Vec<&str> = traceparent.split('-').collect();
        let [version, trace, span, flags] = parts[..] else { return None };
        let is_hex = |(part, length): (&str, usize)| {
            part.len() == length && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        let is_zero = |part: &str| part.bytes().all(|byte| byte == b'0');
        let shape = [(version, 2), (trace, 32), (span, 16), (flags, 2)].into_iter().all(is_hex);
        if !shape || version == "ff" || is_zero(trace) || is_zero(span) {
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
