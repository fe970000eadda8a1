//! JSON pointers (RFC 6901) into a payload. Promise: numbers keep their digits, because they are
//! never read as floats. Not here: which pointer a consumer uses ([`IdRule`](super::IdRule)).

use std::collections::HashMap;

use serde_json::value::RawValue;

use crate::error::Invalid;

/// The value at a pointer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Pointed {
    /// An explicit JSON `null`.
    Null,
    /// A JSON `true` or `false`.
    Bool(bool),
    /// A number, with the digits as written.
    Number(String),
    /// A JSON string, with its escapes resolved.
    Text(String),
    /// An object or array, as its JSON text.
    Json(String),
}

/// The text of the error where the payload has nothing at the pointer.
pub(crate) const MISSING: &str = "nothing stands there";

pub(crate) fn find(payload: &[u8], pointer: &str) -> Result<Pointed, Invalid> {
    let not_json = |error: serde_json::Error| Invalid::new(format!("not JSON: {error}"));
    let missing = || Invalid::new(MISSING);
    let mut at: &RawValue = serde_json::from_slice(payload).map_err(not_json)?;
    for token in pointer.split('/').skip(1) {
        let token = token.replace("~1", "/").replace("~0", "~");
        at = match at.get().as_bytes().first() {
            Some(b'{') => {
                let members: HashMap<String, &RawValue> = serde_json::from_str(at.get()).map_err(not_json)?;
                members.get(&token).copied().ok_or_else(missing)?
            }
            Some(b'[') => {
                let items: Vec<&RawValue> = serde_json::from_str(at.get()).map_err(not_json)?;
                let index: usize = token.parse().map_err(|_| missing())?;
                items.get(index).copied().ok_or_else(missing)?
            }
            _ => return Err(missing()),
        };
    }
    let text = at.get();
    Ok(match text.as_bytes().first() {
        Some(b'n') => Pointed::Null,
        Some(b't') => Pointed::Bool(true),
        Some(b'f') => Pointed::Bool(false),
        Some(b'"') => Pointed::Text(serde_json::from_str(text).map_err(not_json)?),
        Some(b'{' | b'[') => Pointed::Json(text.to_owned()),
        _ => Pointed::Number(text.to_owned()),
    })
}

/// Finds a string or a number and returns it as text, for use as an id. Null, booleans, objects and
/// arrays are no ids.
pub(crate) fn text_at(payload: &[u8], pointer: &str) -> Result<String, Invalid> {
    match find(payload, pointer)? {
        Pointed::Text(text) | Pointed::Number(text) => Ok(text),
        _ => Err(Invalid::new(MISSING)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_digits_and_pointers_their_escapes() {
        let payload = br#"{"a":{"b/c":[1,12345678901234567890.10]},"n":null,"s":"\u00e4","o":{"x":1}}"#;
        assert_eq!(find(payload, "/a/b~1c/1"), Ok(Pointed::Number("12345678901234567890.10".into())));
        assert_eq!(find(payload, "/n"), Ok(Pointed::Null));
        assert_eq!(find(payload, "/s"), Ok(Pointed::Text("ä".into())));
        assert_eq!(find(payload, "/o"), Ok(Pointed::Json(r#"{"x":1}"#.into())));
        assert_eq!(find(payload, "/a/x"), Err(Invalid::new(MISSING)));
        assert_eq!(find(payload, "/s/0"), Err(Invalid::new(MISSING)));
        assert!(find(b"{", "/a").is_err_and(|why| why.to_string().starts_with("not JSON")));
    }
}
