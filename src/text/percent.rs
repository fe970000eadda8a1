//! Parts of a URL that are percent-encoded.

/// Decodes a part of a URL; `None` where it is not percent-encoded UTF-8.
pub(crate) fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        if *first != b'%' {
            bytes.push(*first);
            rest = tail;
            continue;
        }
        let digits = std::str::from_utf8(tail.get(..2)?).ok().filter(|digits| !digits.starts_with('+'))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &tail[2..];
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shown by: leaving the number to the standard library alone, which takes `+f`.
    #[test]
    fn only_two_hexadecimal_digits_follow_a_percent_sign() {
        assert_eq!(percent_decode("p%40s%2Fs/%c3%bc").as_deref(), Some("p@s/s/ü"));
        for wrong in ["%", "%4", "%zz", "%+f", "%ff"] {
            assert_eq!(percent_decode(wrong), None, "{wrong}");
        }
    }
}
