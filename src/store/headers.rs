//! Headers of an outbox row as a JSON object of strings. Guarantee: their order stays. Not here:
//! headers of waiting messages, which may have any bytes.

use crate::error::StoreError;
use crate::message::Headers;

/// Writes headers as a JSON object, in the order given; none for no headers.
pub(in crate::store) fn headers_json(headers: &Headers) -> Option<String> {
    use std::fmt::Write as _;

    if headers.is_empty() {
        return None;
    }
    let mut json = String::with_capacity(headers.iter().map(|(name, value)| name.len() + value.len() + 6).sum());
    for (index, (name, value)) in headers.iter().enumerate() {
        json.push(if index == 0 { '{' } else { ',' });
        // Display of a JSON string is the string, quoted and escaped; writing into a String cannot
        // fail.
        let _ = write!(json, "{}:{}", serde_json::Value::from(name.as_str()), serde_json::Value::from(value.as_str()));
    }
    json.push('}');
    Some(json)
}

/// The inverse of [`headers_json`]; it also reads JSON that other programs wrote.
pub(in crate::store) fn parse_headers(json: &str) -> Result<Headers, StoreError> {
    struct Pairs;

    impl<'de> serde::de::Visitor<'de> for Pairs {
        type Value = Headers;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object of strings")
        }

        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Headers, A::Error> {
            let mut headers = Headers::new();
            while let Some(pair) = map.next_entry()? {
                headers.push(pair);
            }
            Ok(headers)
        }
    }

    let mut json = serde_json::Deserializer::from_str(json);
    serde::Deserializer::deserialize_map(&mut json, Pairs)
        .map_err(|error| StoreError::Corrupt(format!("headers are not an object of strings: {error}")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn headers_keep_their_order_and_every_character() {
        let headers: Headers = [("z", "1"), ("a\"\\", "tab\t\"\\\u{1}\n ü \u{2028}"), ("m", "")]
            .map(|(a, b)| (a.to_owned(), b.to_owned()))
            .into();
        assert_eq!(parse_headers(&headers_json(&headers).unwrap()).unwrap(), headers);
        assert_eq!(headers_json(&Vec::new()), None);
        assert_eq!(parse_headers("{ \"b\" : \"1\", \"a\":\"2\" }").unwrap().len(), 2);
        assert!(parse_headers("{\"a\":1}").is_err());
    }
}
