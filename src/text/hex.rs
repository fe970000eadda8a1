//! Pure: no I/O, no clock.
//! Bytes as hexadecimal digits: the text form of hashes, ids and tokens.
//!
//! Promise: there is one form, in lower case. No other text is read back, so two different texts
//! never mean the same bytes.
//!
//! Not here: which values are written this way.

/// The bytes as lower-case hexadecimal digits, two for each byte.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

/// The bytes of lower-case hexadecimal digits; none where the text is anything else.
#[must_use]
pub(crate) fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).filter(|_| !byte.is_ascii_uppercase());
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let bytes = pairs.iter().map(|&[high, low]| u8::try_from(digit(high)? << 4 | digit(low)?).ok());
    if rest.is_empty() { bytes.collect() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shown by: reading upper case too; leaving an odd digit out.
    #[test]
    fn bytes_come_back_from_their_digits_and_from_nothing_else() {
        let all: Vec<u8> = (0..=255).collect();
        assert!(hex(&all).starts_with("000102") && hex(&all).ends_with("fdfeff"));
        assert_eq!((unhex(&hex(&all)), unhex("")), (Some(all), Some(Vec::new())));
        for text in ["0", "0a1", "0A", "0g", "+1", " 1", "0x"] {
            assert_eq!(unhex(text), None, "{text}");
        }
    }
}
