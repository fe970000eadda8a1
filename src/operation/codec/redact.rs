//! Removes values that must not be stored from a JSON body (M67).
//!
//! Promise: where nothing is redacted, the bytes do not change. A body that is not JSON cannot be
//! redacted, so a route with pointers does not keep it.

use serde_json::Value;

/// Returns the body with `"[redacted]"` in every place that a pointer names. `None`: there are
/// pointers, and the body is not JSON.
pub(super) fn redacted(body: &[u8], pointers: &[String]) -> Option<Vec<u8>> {
    if pointers.is_empty() || body.is_empty() {
        return Some(body.to_vec());
    }
    let mut document: Value = serde_json::from_slice(body).ok()?;
    let mut changed = false;
    for pointer in pointers {
        if let Some(place) = document.pointer_mut(pointer) {
            *place = Value::String("[redacted]".to_owned());
            changed = true;
        }
    }
    if changed { serde_json::to_vec(&document).ok() } else { Some(body.to_vec()) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

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
