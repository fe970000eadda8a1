//! Pure: no I/O, no clock.
//! The raw request as a command. The generic layer compares it when there is no typed command (M19,
//! M22, pitfall 24).
//!
//! Guarantees:
//!
//! * The path, the query, the content type and the body count, each with a length prefix. What the
//!   path is, the caller says: the layer gives the method, the whole path and its parameters.
//! * A typed operation writes its own command, and [`Target`] adds the path parameters and the
//!   query to it.
//! * Of the headers, only those count that the caller adds: for the layer `Prefer`, `If-Match` and
//!   those that the route lists. The list must not have `Authorization`, cookies or the key,
//!   because a retry may carry a new token.
//! * A JSON body counts by its canonical text, another by its bytes. The two are never equal.
//!
//! Not here: reading the body, its limit, and which headers a route lists (the layer).

use super::canonical::{Bytes, FingerprintValue, FingerprintWriter, ValueWriter};
use super::fingerprint::Canonical;
use super::json::canonical_json;
use crate::error::Invalid;

/// Headers that never belong to a command: their values may differ at the next try.
const NEVER: [&str; 10] = [
    "authorization",
    "proxy-authorization",
    "cookie",
    "idempotency-key",
    "traceparent",
    "tracestate",
    "baggage",
    "x-request-id",
    "x-correlation-id",
    "user-agent",
];

/// A content type without its parameters, in lower case.
pub(crate) fn essence(content_type: &str) -> String {
    content_type.split(';').next().unwrap_or("").trim().to_ascii_lowercase()
}

pub(crate) fn is_json(essence: &str) -> bool {
    essence == "application/json" || essence.ends_with("+json")
}

/// The target of a request: the named parts of its path, and the decoded query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    path: Vec<(String, String)>,
    query: Vec<(String, String)>,
}

impl Target {
    /// The order of query names does not matter; the order of the values of one name does.
    pub(crate) fn new(path: Vec<(String, String)>, mut query: Vec<(String, String)>) -> Self {
        query.sort_by(|a, b| a.0.cmp(&b.0));
        Self { path, query }
    }

    /// The same target with these parts before those of its path.
    pub(crate) fn under(mut self, parts: impl IntoIterator<Item = (String, String)>) -> Self {
        self.path.splice(..0, parts);
        self
    }

    /// Adds the target to a typed command. A target without path parameters and query adds nothing,
    /// so the fingerprint is that of the command alone.
    pub(crate) fn write_beside(&self, writer: &mut FingerprintWriter) {
        for (name, said) in [("@path", &self.path), ("@query", &self.query)] {
            if !said.is_empty() {
                writer.field(name, &pairs(said));
            }
        }
    }
}

/// The parts of a request that its fingerprint covers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RawCommand {
    target: Target,
    content_type: String,
    /// Each with the version of the fingerprint from which on it counts.
    headers: Vec<(u32, (String, Vec<u8>))>,
    body: RawBody,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum RawBody {
    Json(String),
    Bytes(Vec<u8>),
}

impl RawCommand {
    /// A command of this target, without a body.
    pub(crate) fn new(target: Target) -> Self {
        let (content_type, headers, body) = (String::new(), Vec::new(), RawBody::Bytes(Vec::new()));
        Self { target, content_type, headers, body }
    }

    /// Sets the body and its `Content-Type`. JSON (`application/json` and `+json`) is parsed,
    /// unless it is empty, and refused where two parsers may read it differently.
    pub(crate) fn body(mut self, content_type: &str, body: &[u8]) -> Result<Self, Invalid> {
        self.content_type = essence(content_type);
        self.body = if is_json(&self.content_type) && !body.is_empty() {
            RawBody::Json(canonical_json(body).map_err(|why| Invalid::new(why.to_string()))?)
        } else {
            RawBody::Bytes(body.to_vec())
        };
        Ok(self)
    }

    /// Adds a line of a header, which counts from this fingerprint version on.
    pub(crate) fn header(mut self, since: u32, name: &str, value: &[u8]) -> Self {
        self.headers.push((since, (name.to_ascii_lowercase(), value.to_vec())));
        self.headers.sort_by(|a, b| a.1.0.cmp(&b.1.0));
        self
    }

    /// Whether a route may list this header; checked when the route is made.
    pub(crate) fn may_list(name: &str) -> bool {
        !NEVER.contains(&name.to_ascii_lowercase().as_str())
    }
}

impl Canonical for RawCommand {
    fn write_canonical(&self, version: u32, writer: &mut FingerprintWriter) {
        let headers = self.headers.iter().filter(|(since, _)| *since <= version).map(|(_, line)| line);
        writer.field("path", &pairs(&self.target.path)).field("query", &pairs(&self.target.query));
        writer.field("contentType", &self.content_type).field("headers", &pairs(headers));
        match &self.body {
            RawBody::Json(text) => writer.field("json", text),
            RawBody::Bytes(bytes) => writer.field("bytes", &Bytes(bytes)),
        };
    }
}

/// A name with its value.
struct Pair<'a>(&'a str, &'a [u8]);

impl FingerprintValue for Pair<'_> {
    fn write(&self, out: ValueWriter<'_>) {
        [Bytes(self.0.as_bytes()), Bytes(self.1)].as_slice().write(out);
    }
}

fn pairs<'a, V: AsRef<[u8]> + 'a>(lines: impl IntoIterator<Item = &'a (String, V)>) -> Vec<Pair<'a>> {
    lines.into_iter().map(|(name, value)| Pair(name, value.as_ref())).collect()
}

#[cfg(test)]
mod tests {
    use super::super::fingerprint::{Comparison, Fingerprinter};
    use super::super::keyring::Keyring;
    use super::*;

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn request(path: &[(&str, &str)], query: &[(&str, &str)], content_type: &str, body: &str) -> RawCommand {
        let target = Target::new(pairs(path), pairs(query));
        RawCommand::new(target).body(content_type, body.as_bytes()).expect("a readable body")
    }

    fn same(a: &RawCommand, b: &RawCommand) -> bool {
        let operation = "notes".parse().expect("a name");
        let fingerprinter = Fingerprinter::new(operation, 1..=1, None, Keyring::plain()).expect("settings");
        fingerprinter.compare(&fingerprinter.write(a), b) == Comparison::Equal
    }

    // Shown by: comparing JSON by its bytes; not sorting the query.
    #[test]
    fn m19_order_of_members_white_space_and_order_of_query_names_do_not_matter() {
        let json = "application/json";
        let first = request(&[], &[("a", "1"), ("b", "2")], json, r#"{"x":1,"y":"z"}"#);
        let second =
            request(&[], &[("b", "2"), ("a", "1")], "Application/JSON; charset=utf-8", r#" {"y":"z" , "x":1}"#);
        assert!(same(&first, &second));
        let problem = |body| request(&[], &[], "application/merge-patch+json", body);
        assert!(same(&problem(r#"{"x": 1}"#), &problem(r#"{"x":1}"#)));
    }

    // Shown by: leaving out each of path, query, content type, headers and body.
    #[test]
    fn m23_everything_that_the_handler_sees_of_the_command_counts() {
        let base = || request(&[("id", "7")], &[("dry", "1")], "text/plain", "a");
        assert!(same(&base(), &base()));
        let others = [
            request(&[("id", "8")], &[("dry", "1")], "text/plain", "a"),
            request(&[("id", "7")], &[("dry", "2")], "text/plain", "a"),
            request(&[("id", "7")], &[], "text/plain", "a"),
            request(&[("id", "7")], &[("dry", "1")], "text/html", "a"),
            request(&[("id", "7")], &[("dry", "1")], "text/plain", "b"),
            base().header(1, "Prefer", b"return=minimal"),
        ];
        for other in others {
            assert!(!same(&base(), &other), "{other:?}");
        }
        let listed = request(&[], &[("a", "1"), ("a", "2")], "", "");
        assert!(!same(&listed, &request(&[], &[("a", "2"), ("a", "1")], "", "")), "the order of one name's values");
        assert!(!same(&base().header(1, "x-a", b"bc"), &base().header(1, "x-ab", b"c")));
    }

    // Shown by: taking `authorization` out of the list. Shown to fail: without each of the four
    // names of a trace or of one try.
    #[test]
    fn m22_credentials_and_the_key_never_belong_to_a_command() {
        for name in ["Authorization", "cookie", "Idempotency-Key", "TraceParent"] {
            assert!(!RawCommand::may_list(name), "{name}");
        }
        for name in ["tracestate", "Baggage", "X-Request-Id", "X-Correlation-Id"] {
            assert!(!RawCommand::may_list(name), "{name}");
        }
        assert!(RawCommand::may_list("Prefer") && RawCommand::may_list("If-Match"));
    }

    #[test]
    fn a_json_body_and_the_same_bytes_as_another_type_differ_and_an_empty_body_is_no_json() {
        assert!(!same(&request(&[], &[], "application/json", "1"), &request(&[], &[], "text/plain", "1")));
        let json = |body: &[u8]| RawCommand::new(Target::new(vec![], vec![])).body("application/json", body);
        assert!(json(b"").is_ok());
        assert!(json(b" ").is_err());
        assert!(json(br#"{"a":1,"a":2}"#).is_err());
    }
}
