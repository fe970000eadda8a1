//! Removes values that must not be stored from a JSON body (M67).
//!
//! Promise: only the named values change. All other bytes stay as they are, because a parser may
//! change what it reads and writes again, such as the digits of a number. A body that is not JSON
//! cannot be redacted, so a route with pointers does not keep it.

use std::fmt;
use std::ops::Range;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Returns the body with `"[redacted]"` in every place that a pointer names. `None`: there are
/// pointers, and the body is not JSON.
pub(super) fn redacted(body: &[u8], pointers: &[String]) -> Option<Vec<u8>> {
    if pointers.is_empty() || body.is_empty() {
        return Some(body.to_vec());
    }
    let mut text = std::str::from_utf8(body).ok()?.to_owned();
    for pointer in pointers {
        let mut kept = String::with_capacity(text.len());
        let mut done = 0;
        for place in places(&text, pointer).ok()? {
            kept.push_str(&text[done..place.start]);
            kept.push_str("\"[redacted]\"");
            done = place.end;
        }
        kept.push_str(&text[done..]);
        text = kept;
    }
    Some(text.into_bytes())
}

/// Where the values stand that a pointer names, in their order. A member that is given twice stands
/// in two places: a parser may read either.
fn places(text: &str, pointer: &str) -> Result<Vec<Range<usize>>, serde_json::Error> {
    let mut found: Vec<&RawValue> = vec![serde_json::from_str(text)?];
    for token in pointer.split('/').skip(1) {
        let token = token.replace("~1", "/").replace("~0", "~");
        let mut inside: Vec<&RawValue> = Vec::new();
        for value in found {
            match value.get().as_bytes().first() {
                Some(b'{') => {
                    let Members(members) = serde_json::from_str(value.get())?;
                    inside.extend(members.into_iter().filter(|(name, _)| *name == token).map(|(_, member)| member));
                }
                Some(b'[') => {
                    let items: Vec<&RawValue> = serde_json::from_str(value.get())?;
                    inside.extend(token.parse::<usize>().ok().and_then(|at| items.get(at).copied()));
                }
                _ => {}
            }
        }
        found = inside;
    }
    let begin = text.as_ptr().addr();
    let place = |value: &RawValue| {
        let at = value.get().as_ptr().addr() - begin;
        at..at + value.get().len()
    };
    Ok(found.into_iter().map(place).collect())
}

/// All members of an object, also those of one name.
struct Members<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ReadsMembers)
    }
}

struct ReadsMembers;

impl<'de> Visitor<'de> for ReadsMembers {
    type Value = Members<'de>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(Members(members))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::Value;

    use super::*;

    // Shown by: reading the document and writing it again (the digits change, and the first of two
    // members is lost).
    #[test]
    fn m62_m67_nothing_but_the_named_values_changes() {
        let pointers = ["/card/number", "/cards/1/a~1b", "/amount"].map(str::to_owned);
        let with = |[one, two, three, four]: [&str; 4]| {
            format!(
                "{{ \"z\":12345678901234567.890, \"id\":123456789012345678901234567890,\"amount\": {one},\n\
                 \"card\":{{\"number\":{two},\"kind\":\"\\u0041\",\"number\":{three}}},\"cards\":[1,{{\"a/b\":{four}}}]}}\n"
            )
        };
        let given = with(["100.00", "\"4111\"", "[\"4112\", {}]", "\"4113\""]);
        let kept = redacted(given.as_bytes(), &pointers).unwrap();
        assert_eq!(String::from_utf8(kept).unwrap(), with(["\"[redacted]\""; 4]));
        assert_eq!(redacted(b"{\"amount\":1} x", &pointers), None, "a body ends behind its value");
        assert_eq!(redacted(b"\xff", &pointers), None);
    }

    // Shown by: returning the body where it is no JSON.
    #[test]
    fn m67_pointers_are_redacted_and_a_body_that_cannot_be_read_is_not_kept() {
        let pointers = ["/card/number".to_owned(), "/absent".to_owned()];
        let body = br#"{"id":1,"card":{"number":"4111"}}"#;
        let kept: Value = serde_json::from_slice(&redacted(body, &pointers).unwrap()).unwrap();
        assert_eq!(kept, serde_json::json!({"id": 1, "card": {"number": "[redacted]"}}));
        assert_eq!(
            redacted(b"{ \"id\": 1 }", &pointers).unwrap(),
            b"{ \"id\": 1 }",
            "bytes stay where nothing is there"
        );
        assert_eq!(redacted(b"number=4111", &pointers), None);
        assert_eq!(redacted(b"number=4111", &[]).unwrap(), b"number=4111");
    }
}
