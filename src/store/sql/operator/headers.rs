//! Headers of messages that arrived, as tables keep them: any bytes, in order, with repeated names.
//!
//! PostgreSQL (where the statements write its arrays as JSON) and SQLite keep pairs of name and
//! hexadecimal digits; MySQL pairs of name and text, with a third member where the value is digits.

use super::Texts;
use crate::error::StoreError;
use crate::store::statements::Dialect;
use crate::text::hex::{hex, unhex};

/// Reads headers from JSON; an absent text is an empty list.
pub(super) fn read(texts: Texts, json: Option<&str>) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
    let corrupt = || StoreError::Corrupt("the headers of a waiting row are no list of pairs".to_owned());
    let Some(json) = json else { return Ok(Vec::new()) };
    let pairs: Vec<Vec<String>> = serde_json::from_str(json).map_err(|_| corrupt())?;
    let header = |pair: Vec<String>| match &pair[..] {
        [name, text] if texts.dialect == Dialect::MySql => Ok((name.clone(), text.clone().into_bytes())),
        [name, digits] | [name, digits, _] => Ok(((texts.restored)(name.clone()), unhex(digits).ok_or_else(corrupt)?)),
        _ => Err(corrupt()),
    };
    pairs.into_iter().map(header).collect()
}

/// The inverse of [`read`].
pub(super) fn write(texts: Texts, headers: &[(String, Vec<u8>)]) -> String {
    let pair = |(name, value): &(String, Vec<u8>)| match (texts.dialect, std::str::from_utf8(value)) {
        (Dialect::MySql, Ok(text)) => serde_json::json!([name, text]),
        (Dialect::MySql, Err(_)) => serde_json::json!([name, hex(value), "hex"]),
        _ => serde_json::json!([(texts.stored)(name), hex(value)]),
    };
    serde_json::Value::Array(headers.iter().map(pair).collect()).to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn headers_keep_any_bytes_their_order_and_names_given_twice() {
        let headers =
            vec![("z".to_owned(), vec![0xff, 0x00]), ("a".to_owned(), "ä\"".into()), ("a".to_owned(), Vec::new())];
        for dialect in [Dialect::Postgres, Dialect::MySql, Dialect::Sqlite] {
            let texts = Texts::any(dialect);
            assert_eq!(read(texts, Some(&write(texts, &headers))).unwrap(), headers, "{dialect:?}");
            assert!(read(texts, Some("{}")).is_err() && read(texts, Some(r#"[["a"]]"#)).is_err(), "{dialect:?}");
        }
        assert_eq!(read(Texts::any(Dialect::Postgres), None).unwrap(), []);
    }
}
