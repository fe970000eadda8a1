//! How the headers of consumed messages are stored: as JSON.

use crate::error::StoreError;
use crate::text::hex::{hex, unhex};

/// Received headers may have any bytes, and the same name twice. They are stored as pairs, with a
/// third member where the value is not text.
pub(super) fn arrived_to_json(headers: &[(String, Vec<u8>)]) -> String {
    let pair = |(name, value): &(String, Vec<u8>)| match std::str::from_utf8(value) {
        Ok(value) => serde_json::json!([name, value]),
        Err(_) => serde_json::json!([name, hex(value), "hex"]),
    };
    serde_json::Value::Array(headers.iter().map(pair).collect()).to_string()
}

pub(super) fn arrived_from_json(json: &str) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
    let corrupt = || StoreError::Corrupt("the headers of a waiting row are no list of pairs".to_owned());
    let pairs: Vec<Vec<String>> = serde_json::from_str(json).map_err(|_| corrupt())?;
    let header = |pair: Vec<String>| match <[String; 2]>::try_from(pair) {
        Ok([name, value]) => Ok((name, value.into_bytes())),
        Err(pair) => match <[String; 3]>::try_from(pair) {
            Ok([name, digits, _]) => Ok((name, unhex(&digits).ok_or_else(corrupt)?)),
            Err(_) => Err(corrupt()),
        },
    };
    pairs.into_iter().map(header).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn headers_keep_any_bytes_their_order_and_names_given_twice() {
        let headers =
            vec![("z".to_owned(), vec![0xff, 0x00]), ("a".to_owned(), "ä\"".into()), ("a".to_owned(), Vec::new())];
        assert_eq!(arrived_from_json(&arrived_to_json(&headers)).unwrap(), headers);
        assert!(arrived_from_json("{}").is_err());
        assert!(arrived_from_json(r#"[["a"]]"#).is_err());
    }
}
