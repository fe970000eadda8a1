//! The key header, whatever bytes come (O24): held against a second reading of the rule, written as
//! plainly as it is put.

use crate::operation::rules::key::{KEY_BYTES_MAX, KEY_BYTES_MIN};
use crate::operation::rules::{Key, KeyFormat};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::string::string_regex;

const FORMATS: [KeyFormat; 3] = [KeyFormat::Opaque, KeyFormat::Uuid, KeyFormat::UuidV7];

/// O24: after optional white space, a quoted string that ends at its closing quote, or the whole
/// value.
fn content(line: &[u8]) -> Option<&[u8]> {
    let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let start = line.iter().position(|byte| !is_blank(byte)).unwrap_or(line.len());
    let end = line.iter().rposition(|byte| !is_blank(byte)).map_or(start, |at| at + 1);
    match &line[start..end] {
        [b'"', inner @ .., b'"'] => (!inner.contains(&b'"') && !inner.contains(&b'\\')).then_some(inner),
        [b'"', ..] => None,
        bare => Some(bare),
    }
}

fn expected(line: &[u8], format: KeyFormat) -> Option<String> {
    let text = std::str::from_utf8(content(line)?).ok()?;
    if !text.chars().all(|c| c.is_ascii_alphanumeric() || "_.:~-".contains(c)) {
        return None;
    }
    if format == KeyFormat::Opaque {
        return (KEY_BYTES_MIN..=KEY_BYTES_MAX).contains(&text.len()).then(|| text.to_owned());
    }
    let groups: Vec<&str> = text.split('-').collect();
    let is_uuid = groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12])
        && groups.iter().all(|group| group.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let is_v7 = || groups[2].starts_with('7') && groups[3].starts_with(['8', '9', 'a', 'b', 'A', 'B']);
    (is_uuid && (format == KeyFormat::Uuid || is_v7())).then(|| text.to_ascii_lowercase())
}

/// Lines that are keys, nearly keys, and anything.
fn line() -> impl Strategy<Value = Vec<u8>> {
    let hex = |length: usize| format!("[0-9a-fA-F]{{{length}}}");
    let uuid = format!("{}-{}-[1-8]{}-[89abAB01]{}-{}", hex(8), hex(4), hex(3), hex(3), hex(12));
    let part = prop_oneof![
        6 => "[A-Za-z0-9_.:~-]{1,40}".prop_map(String::into_bytes),
        2 => string_regex(&uuid).unwrap().prop_map(String::into_bytes),
        1 => "[a-z]{200,256}".prop_map(String::into_bytes),
        2 => select(vec!["\n", "\r", "\u{c}","\"", " ", "\t", "\\", "\\\"", ",", ";a=1", "\u{a0}", "\u{130}", "\u{212a}"]).prop_map(|text| text.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..4),
    ];
    let joined = prop::collection::vec(part, 0..4).prop_map(|parts| parts.concat());
    prop_oneof![
        3 => joined.clone(),
        2 => joined.prop_map(|inner| [b"\"".as_slice(), &inner, b"\""].concat()),
        1 => prop::collection::vec(any::<u8>(), 0..300),
    ]
}

proptest! {
    #![proptest_config(super::cases(6_000))]

    /// Shown by: trimming line ends too.
    #[test]
    fn o24_any_bytes_are_the_key_that_the_rule_says_or_none(line in line(), format in select(FORMATS.to_vec())) {
        let key = Key::from_header(&[&line], format);
        let found = key.as_ref().ok().map(|key| key.as_ref().unwrap().as_str().to_owned());
        prop_assert_eq!(&found, &expected(&line, format), "{:?}", String::from_utf8_lossy(&line));
        match key {
            Ok(key) => {
                let key = key.unwrap();
                // What is stored is a key again, and the same, in quotes too.
                prop_assert_eq!(&Key::parse(key.as_str().as_bytes(), format), &Ok(key.clone()));
                let quoted = format!("\t\"{}\" ", key.as_str());
                prop_assert_eq!(Key::from_header(&[quoted.as_bytes()], format), Ok(Some(key.clone())));
                let shown = format!("{key:?}");
                prop_assert!(!shown.contains(key.as_str()));
                prop_assert_eq!(key.time().is_some(), expected(&line, KeyFormat::UuidV7).is_some());
            }
            // A wrong key may be a right one elsewhere: it is not shown.
            Err(error) => {
                let said = error.to_string();
                // A UUID is one word.
                let ends = |byte: &u8| !byte.is_ascii_alphanumeric() && *byte != b'-';
                let long = line.split(ends).filter(|word| word.len() > 14);
                for word in long {
                    prop_assert!(!said.contains(std::str::from_utf8(word).unwrap()), "{said}");
                }
            }
        }
    }

    /// Shown by: taking the first line.
    #[test]
    fn o24_several_lines_are_no_key_whatever_they_hold(lines in prop::collection::vec(line(), 2..5)) {
        let lines: Vec<&[u8]> = lines.iter().map(Vec::as_slice).collect();
        for format in FORMATS {
            prop_assert!(Key::from_header(&lines, format).is_err());
        }
    }
}
