//! Reads the key of a call from its metadata or from a field of its message.
//!
//! Promise: two different keys are refused, because choosing one would be a guess.

use tonic::metadata::MetadataMap;

use crate::operation::rules::{Code, Key, KeyFormat};
use crate::operation::{KeyGiven, Problem};

const KEY_METADATA: &str = "idempotency-key";

/// A message that may carry a key: AIP-155's `request_id`, or a field `idempotency_key`.
pub trait KeyField {
    /// The value of the field; empty if there is none.
    fn key_field(&self) -> &str {
        ""
    }
}

/// Returns the key of a call. A key that cannot be used is [`KeyGiven::Malformed`], and the route
/// decides what follows. The only error is that of two different keys.
pub(super) fn given(metadata: &MetadataMap, field: &str, format: KeyFormat) -> Result<KeyGiven, Box<Problem>> {
    let lines: Vec<&[u8]> = metadata.get_all(KEY_METADATA).iter().map(|value| value.as_bytes()).collect();
    let in_metadata = Key::from_header(&lines, format);
    let in_field = (!field.is_empty()).then(|| Key::parse(field.as_bytes(), format)).transpose();
    match (in_metadata, in_field) {
        (Err(error), _) | (_, Err(error)) => Ok(KeyGiven::Malformed(error)),
        (Ok(Some(one)), Ok(Some(other))) if one != other => Err(Box::new(Problem {
            detail: Some("the metadata and the message carry different keys: send one".to_owned()),
            ..Problem::new(Code::KeyInvalid)
        })),
        (Ok(Some(key)), _) | (Ok(None), Ok(Some(key))) => Ok(KeyGiven::Given(key)),
        (Ok(None), Ok(None)) => Ok(KeyGiven::Missing),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const ONE: &str = "9b2f0c64-1b5e-4f0e-8a3c-6f1d2e3a4b5c";
    const OTHER: &str = "0197a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b";

    fn metadata(keys: &[&str]) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        for key in keys {
            metadata.append(KEY_METADATA, key.parse().unwrap());
        }
        metadata
    }

    // Shown by: using the metadata first.
    #[test]
    fn m109_a_key_comes_from_metadata_or_field_and_two_that_differ_are_refused() {
        let key = Key::parse(ONE.as_bytes(), KeyFormat::Uuid).unwrap();
        let given = |keys: &[&str], field: &str| given(&metadata(keys), field, KeyFormat::Uuid);
        let upper = ONE.to_uppercase();
        for (keys, field) in [(vec![ONE], ""), (vec![], ONE), (vec![ONE], ONE), (vec![upper.as_str()], ONE)] {
            assert_eq!(given(&keys, field).unwrap(), KeyGiven::Given(key.clone()), "{keys:?} {field}");
        }
        assert_eq!(given(&[], "").unwrap(), KeyGiven::Missing);
        assert_eq!(given(&[ONE], OTHER).unwrap_err().code, Code::KeyInvalid);
        for (keys, field) in [(vec![ONE, ONE], ""), (vec!["x"], ONE), (vec![ONE], "x")] {
            assert!(matches!(given(&keys, field).unwrap(), KeyGiven::Malformed(_)), "{keys:?} {field}");
        }
    }
}
