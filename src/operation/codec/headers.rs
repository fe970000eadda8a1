//! Which headers of an answer are kept: an allow-list, because no deny-list is ever complete
//! (pitfalls 20, 21).

const ALLOWED: [&str; 9] = [
    "content-type",
    "content-language",
    "content-location",
    "location",
    "etag",
    "last-modified",
    "link",
    "retry-after",
    "preference-applied",
];

/// Headers that are never kept, even where a route asks for them: they belong to one answer, one
/// connection or one caller.
const NEVER: [&str; 16] = [
    "set-cookie",
    "set-cookie2",
    "authorization",
    "www-authenticate",
    "date",
    "server",
    "content-length",
    "content-encoding",
    "transfer-encoding",
    "connection",
    "keep-alive",
    "trailer",
    "te",
    "upgrade",
    "x-request-id",
    "traceparent",
];

const NEVER_PREFIX: [&str; 5] = ["proxy-", "ratelimit", "x-ratelimit", "access-control-", "idempotent-"];

pub(in crate::operation) fn is_never(name: &str) -> bool {
    NEVER.contains(&name) || NEVER_PREFIX.iter().any(|prefix| name.starts_with(prefix))
}

pub(super) fn is_coded(headers: &[(String, Vec<u8>)]) -> bool {
    let coded = |value: &[u8]| !value.is_empty() && !value.eq_ignore_ascii_case(b"identity");
    headers.iter().any(|(name, value)| name.eq_ignore_ascii_case("content-encoding") && coded(value.trim_ascii()))
}

/// Returns the headers to keep, in their order; `more` are the names that the route adds.
pub(super) fn kept(headers: &[(String, Vec<u8>)], more: &[String]) -> Vec<(String, Vec<u8>)> {
    // A header that `Connection` names belongs to the connection.
    let mut hop = Vec::new();
    for (_, value) in headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case("connection")) {
        let names = String::from_utf8_lossy(value).to_ascii_lowercase();
        hop.extend(names.split(',').map(|name| name.trim().to_owned()));
    }
    let keeps = |name: &String| {
        (ALLOWED.contains(&name.as_str()) || more.contains(name)) && !is_never(name) && !hop.contains(name)
    };
    let lower = headers.iter().map(|(name, value)| (name.to_ascii_lowercase(), value.clone()));
    lower.filter(|(name, _)| keeps(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(name: &str, value: &[u8]) -> (String, Vec<u8>) {
        (name.to_owned(), value.to_vec())
    }

    // Shown by: a deny-list in place of the allow-list; collecting into a map.
    #[test]
    fn m62_allowed_headers_are_kept_in_order_with_all_their_values() {
        let headers = [
            header("Link", b"</a>; rel=\"next\""),
            header("set-cookie", b"session=1"),
            header("x-unheard-of", b"1"),
            header("link", b"\xff</b>"),
            header("location", b"/payments/1"),
            header("etag", b"\"1\""),
            header("connection", b"close, ETag"),
            header("x-version", b"7"),
        ];
        let kept = kept(&headers, &["x-version".to_owned()]);
        let names: Vec<&str> = kept.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["link", "link", "location", "x-version"]);
        assert_eq!(kept[1].1, b"\xff</b>");
    }

    // Shown to fail: with the prefix `ratelimit-`, which is not that of `RateLimit` itself.
    #[test]
    fn m67_what_belongs_to_one_caller_is_never_kept() {
        let callers = ["set-cookie", "www-authenticate", "proxy-authenticate", "date", "access-control-allow-origin"];
        for name in callers.into_iter().chain(["ratelimit", "ratelimit-policy", "x-ratelimit-remaining"]) {
            assert!(is_never(name), "{name}");
            assert!(kept(&[header(name, b"1")], &[name.to_owned()]).is_empty());
        }
        assert!(!ALLOWED.iter().any(|name| is_never(name)));
    }

    #[test]
    fn pitfall_22_a_body_is_coded_where_a_header_says_so() {
        let coded =
            |value: &[u8]| is_coded(&[header("content-type", b"text/plain"), header("Content-Encoding", value)]);
        assert!(coded(b"gzip") && coded(b" zstd ") && coded(b"gzip, br"));
        assert!(!coded(b"identity") && !coded(b" Identity ") && !coded(b"") && !is_coded(&[]));
    }
}
