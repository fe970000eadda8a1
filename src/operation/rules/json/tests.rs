//! Pure: no I/O, no clock.
//! Compares the canonical text with the examples of RFC 8785 and with `serde_json`.

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::properties::operation_commands::{Scribe, document};

fn canonical(text: &str) -> String {
    canonical_json(text.as_bytes()).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn fault(text: &str) -> &'static str {
    canonical_json(text.as_bytes()).expect_err(text).fault
}

// Shown by: sorting by bytes (U+FB33 then stands before U+1F600).
#[test]
fn m19_members_are_sorted_as_rfc_8785_section_3_2_3_has_it() {
    let text = r#"{"\u20ac":"Euro Sign","\r":"Carriage Return","\ufb33":"Hebrew Letter Dalet With Dagesh","1":"One",
        "\ud83d\ude00":"Emoji: Grinning Face","\u0080":"Control","\u00f6":"Latin Small Letter O With Diaeresis"}"#;
    let names = ["\\r", "1", "\u{80}", "\u{f6}", "\u{20ac}", "\u{1f600}", "\u{fb33}"];
    let canonical = canonical(text);
    let places: Vec<usize> = names.map(|name| canonical.find(&format!("\"{name}\":")).expect(name)).into();
    assert!(places.is_sorted(), "{canonical}");
}

// Shown by: escaping the slash; writing control characters with upper-case digits.
#[test]
fn m19_strings_have_the_escapes_of_rfc_8785_section_3_2_2_2() {
    let text = r#""\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/""#;
    assert_eq!(canonical(text), "\"\u{20ac}$\\u000f\\nA'B\\\"\\\\\\\\\\\"/\"");
    assert_eq!(canonical(r#""\b\f\n\r\t\u0008\u001f\u007f""#), "\"\\b\\f\\n\\r\\t\\b\\u001f\u{7f}\"");
}

#[test]
fn m19_white_space_goes_and_everything_else_stays() {
    let text = " { \"b\" : [ 1 , -2 , 0 , true , false , null , \"\" ] ,\r\n\t\"a\" : { } , \"c\":[ ] } ";
    assert_eq!(canonical(text), r#"{"a":{},"b":[1,-2,0,true,false,null,""],"c":[]}"#);
}

// Pitfall 1. Shown by: writing numbers through f64; taking any u64; not looking for doubles.
#[test]
fn codes_what_two_readers_may_read_differently_is_refused() {
    for number in ["9007199254740992", "9007199254740993", "-9007199254740992", "18446744073709551615"] {
        assert_eq!(fault(number), INTEGER_TOO_BIG, "{number}");
    }
    assert_eq!(fault(&"9".repeat(400)), INTEGER_TOO_BIG);
    assert_eq!(canonical("9007199254740991"), "9007199254740991");
    assert_eq!(canonical("-9007199254740991"), "-9007199254740991");
    // Coordinates and prices are equal only if they are written in the same way.
    for number in ["1.0", "10.00", "1e2", "1E2", "-0", "-0.0", "0.1", "52.520008", "-1.5e-7", "9007199254740993.0"] {
        assert_eq!(canonical(number), number);
    }
    for number in ["1e309", "-1e0000309", "17976931348623159e292"] {
        assert_eq!(fault(number), NUMBER_TOO_BIG, "{number}");
    }
    for number in ["1.", "1.e2", "1e+", ".5", "1.5.5", "-.5", "1e40x", "0.1e"] {
        assert!(matches!(fault(number), SYNTAX | TRUNCATED), "{number}");
    }
    for text in [r#"{"a":1,"a":2}"#, r#"{"a":1,"b":0,"\u0061":1}"#, r#"[{"x":{"":1,"":1}}]"#] {
        assert_eq!(fault(text), DUPLICATE_MEMBER, "{text}");
    }
    let error = canonical_json(br#"{"secret":1,"x":2,"secret":3}"#).expect_err("a duplicate");
    assert_eq!(error.at, 18);
    assert!(!error.to_string().contains("secret"));
    for text in [r#""\ud800""#, r#""\ud800\u0041""#, r#""\udc00""#, r#""\udc00\ud800""#, r#""\ud800x""#] {
        assert_eq!(fault(text), LONE_SURROGATE, "{text}");
    }
}

#[test]
fn codes_every_beginning_of_a_document_is_truncated() {
    let text = r#"{"a":[1,-2,"\u0041\ud83d\ude00x",true,false,null,{"b":""}]}"#;
    for end in 0..text.len() {
        let fault = fault(&text[..end]);
        assert_eq!(fault, TRUNCATED, "{}", &text[..end]);
    }
    assert!(canonical_json(text.as_bytes()).is_ok());
}

// Shown by: taking a comma before the end; a raw U+001F; a leading zero.
#[test]
fn codes_what_is_no_json_is_refused_as_serde_json_refuses_it() {
    let controls = (0..0x20).map(|byte: u8| format!("\"a{}\"", char::from(byte)));
    let texts = [
        "",
        " ",
        "[1,]",
        "{\"a\":1,}",
        "[,1]",
        "{,}",
        "[1 2]",
        "{\"a\" 1}",
        "{a:1}",
        "{1:1}",
        "01",
        "-",
        "- 1",
        "+1",
        "nul",
        "True",
        "[1]]",
        "1 1",
        "'a'",
        "\"\\x\"",
        "\"\\u00g0\"",
        "\u{feff}1",
        "/**/1",
        "NaN",
    ];
    for text in texts.into_iter().map(str::to_owned).chain(controls) {
        assert!(matches!(fault(&text), SYNTAX | TRUNCATED), "{text:?}");
        assert!(serde_json::from_str::<Value>(&text).is_err(), "{text:?}");
    }
    assert_eq!(canonical_json(b"\"\xff\"").map_err(|error| (error.at, error.fault)), Err((1, NOT_UTF8)));
}

// Shown by: a depth of 128 (serde_json refuses it).
#[test]
fn a_document_is_as_deep_as_serde_json_reads_and_no_deeper() {
    for (depth, good) in [(DEPTH_MAX, true), (DEPTH_MAX + 1, false)] {
        for (open, close) in [("[", "]"), ("{\"a\":[", "]}")] {
            let levels = depth / open.matches(['[', '{']).count();
            let text = format!("{}{}", open.repeat(levels), close.repeat(levels));
            assert_eq!(canonical_json(text.as_bytes()).is_ok(), serde_json::from_str::<Value>(&text).is_ok());
            assert!(open != "[" || canonical_json(text.as_bytes()).is_ok() == good);
        }
    }
    assert_eq!(fault(&"[".repeat(1_000_000)), TOO_DEEP);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    // Shown by: not sorting; dropping the sign; calling leading surrogates from D900 on lone.
    #[test]
    fn m19_every_spelling_of_a_document_has_one_text_and_it_is_that_document(value in document(), seed in any::<u64>()) {
        let text = canonical(&value.to_string());
        prop_assert_eq!(&canonical(&Scribe::of(seed).value(&value)), &text);
        prop_assert_eq!(&serde_json::from_str::<Value>(&text).expect("JSON"), &value);
        prop_assert_eq!(&canonical(&text), &text);
    }

    // The handler parses with serde_json. If only serde_json accepts a body, this parser causes a
    // wrong 400. If only this parser accepts it, a fingerprint is made of a body that the handler
    // refuses. Shown by: allowing a leading zero.
    #[test]
    fn both_readers_agree_on_what_is_json(value in document(), seed in any::<u64>(), at in any::<prop::sample::Index>(),
        byte in prop::sample::select(b"{}[]\",:\\u0123456789-+.eEtfn aD8\x00\x1f\x7f\x80\xc3\xff".to_vec()),
        act in 0_u8..3,
    ) {
        let mut text = Scribe::of(seed).value(&value).into_bytes();
        let at = at.index(text.len());
        match act {
            0 => text[at] = byte,
            1 => text.insert(at, byte),
            _ => _ = text.remove(at),
        }
        let theirs = serde_json::from_slice::<Value>(&text);
        match canonical_json(&text) {
            Ok(canonical) => {
                prop_assert_eq!(serde_json::from_str::<Value>(&canonical).expect("JSON"), theirs.expect("JSON"));
            }
            Err(JsonError { fault: DUPLICATE_MEMBER | INTEGER_TOO_BIG, .. }) => {}
            Err(_) => prop_assert!(theirs.is_err(), "{}", String::from_utf8_lossy(&text)),
        }
    }

    #[test]
    fn any_bytes_end_in_a_text_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        if let Err(error) = canonical_json(&bytes) {
            prop_assert!(error.at <= bytes.len());
        }
    }
}
