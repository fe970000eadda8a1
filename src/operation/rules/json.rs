//! Pure: no I/O, no clock.
//! One canonical text for each JSON document, for the generic layer when there is no typed command.
//!
//! Guarantees:
//!
//! * An accepted document is written as in RFC 8785: no white space, members sorted by the UTF-16
//!   code units of their names, strings with the shortest escapes. Two different values never give
//!   the same text. Numbers with a fraction or an exponent, and `-0`, are the exception to the RFC:
//!   they stay as they were written. Any total order would do for a hash; this one lets a person
//!   check a fingerprint with an RFC 8785 library of any language.
//! * A document that parsers do not read alike is refused, because this text and the handler might
//!   see two different commands: a member named twice, whole numbers beyond 2^53 - 1 (RFC 8785
//!   itself writes 9007199254740993 and ..992 alike), a lone surrogate. A typed operation takes
//!   such commands ([`canonical`](super::canonical)).
//! * The parser ends on any input, at a depth of at most [`DEPTH_MAX`], and its errors quote
//!   nothing of the document.
//!
//! This is a parser of its own because `serde_json` treats numbers and duplicate names by features
//! that any crate of the build may turn on. A test compares the two. Not here: which bodies are
//! JSON ([`raw`](super::raw)).

use std::fmt::Write as _;

/// The deepest nesting of arrays and objects, the same as in `serde_json`.
pub(crate) const DEPTH_MAX: usize = 127;

const INTEGER_MAX: u64 = (1 << 53) - 1;

/// What is wrong with a document, and where. The answer to the client is `REQUEST_INVALID`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the body is not acceptable JSON: {fault} at byte {at}")]
pub(crate) struct JsonError {
    /// The offset in bytes.
    pub(crate) at: usize,
    pub(crate) fault: &'static str,
}

const NOT_UTF8: &str = "text that is not UTF-8";
const TRUNCATED: &str = "an early end";
const SYNTAX: &str = "a character that does not belong there";
pub(crate) const LONE_SURROGATE: &str = "half of a surrogate pair";
pub(crate) const DUPLICATE_MEMBER: &str = "a member that the object has already";
const INTEGER_TOO_BIG: &str = "a whole number beyond 9007199254740991";
/// A number is beyond what a double can hold: some parsers refuse it, others read infinity.
const NUMBER_TOO_BIG: &str = "a number beyond 1.8e308";
const TOO_DEEP: &str = "nesting deeper than 127";

/// Returns the canonical text of a document, or its first fault.
pub(crate) fn canonical_json(body: &[u8]) -> Result<String, JsonError> {
    let text = std::str::from_utf8(body).map_err(|error| JsonError { at: error.valid_up_to(), fault: NOT_UTF8 })?;
    let mut reader = Reader { text, at: 0 };
    let canonical = reader.value(DEPTH_MAX)?;
    reader.blanks();
    if reader.at < text.len() { Err(reader.fault(SYNTAX)) } else { Ok(canonical) }
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn fault(&self, fault: &'static str) -> JsonError {
        JsonError { at: self.at, fault }
    }

    fn peek(&self) -> Result<u8, JsonError> {
        self.text.as_bytes().get(self.at).copied().ok_or(self.fault(TRUNCATED))
    }

    /// Takes the next byte if it is this one. Returns whether it was.
    fn take(&mut self, byte: u8) -> Result<bool, JsonError> {
        let there = self.peek()? == byte;
        self.at += usize::from(there);
        Ok(there)
    }

    fn blanks(&mut self) {
        while matches!(self.peek(), Ok(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn expect(&mut self, byte: u8) -> Result<(), JsonError> {
        if self.take(byte)? { Ok(()) } else { Err(self.fault(SYNTAX)) }
    }

    /// Reads the next value, with this many levels of nesting left.
    fn value(&mut self, depth: usize) -> Result<String, JsonError> {
        self.blanks();
        match self.peek()? {
            b'{' => self.object(depth),
            b'[' => self.array(depth),
            b'"' => Ok(quoted(&self.string()?)),
            b'-' | b'0'..=b'9' => self.number(),
            b't' => self.word("true"),
            b'f' => self.word("false"),
            b'n' => self.word("null"),
            _ => Err(self.fault(SYNTAX)),
        }
    }

    fn word(&mut self, word: &str) -> Result<String, JsonError> {
        word.bytes().try_for_each(|byte| self.expect(byte))?;
        Ok(word.to_owned())
    }

    fn number(&mut self) -> Result<String, JsonError> {
        let start = self.at;
        let negative = self.take(b'-')?;
        let digits = self.at;
        self.digits()?;
        let digits = &self.text[digits..self.at];
        let refused = |at, fault| Err(JsonError { at, fault });
        if digits.len() > 1 && digits.starts_with('0') {
            refused(start, SYNTAX)
        } else if matches!(self.peek(), Ok(b'.' | b'e' | b'E')) || (negative && digits == "0") {
            self.tail()?;
            let text = &self.text[start..self.at];
            if !text.parse::<f64>().is_ok_and(f64::is_finite) {
                return refused(start, NUMBER_TOO_BIG);
            }
            // The number stays as it was written. To give equal numbers one text, this code would
            // have to know the precision of the handler's numbers.
            Ok(text.to_owned())
        } else if digits.parse::<u64>().is_ok_and(|number| number <= INTEGER_MAX) {
            Ok(self.text[start..self.at].to_owned())
        } else {
            refused(start, INTEGER_TOO_BIG)
        }
    }

    fn tail(&mut self) -> Result<(), JsonError> {
        if matches!(self.peek(), Ok(b'.')) {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Ok(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Ok(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    /// At least one digit.
    fn digits(&mut self) -> Result<(), JsonError> {
        let start = self.at;
        while matches!(self.peek(), Ok(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at > start {
            return Ok(());
        }
        // The document ends here, or the next character is not a digit.
        self.peek()?;
        Err(self.fault(SYNTAX))
    }

    fn array(&mut self, depth: usize) -> Result<String, JsonError> {
        let inner = depth.checked_sub(1).ok_or(self.fault(TOO_DEEP))?;
        self.expect(b'[')?;
        let mut out = String::from("[");
        self.blanks();
        if !self.take(b']')? {
            loop {
                out.push_str(&self.value(inner)?);
                self.blanks();
                if self.take(b']')? {
                    break;
                }
                self.expect(b',')?;
                out.push(',');
            }
        }
        out.push(']');
        Ok(out)
    }

    fn object(&mut self, depth: usize) -> Result<String, JsonError> {
        let inner = depth.checked_sub(1).ok_or(self.fault(TOO_DEEP))?;
        self.expect(b'{')?;
        let mut members: Vec<(Vec<u16>, usize, String)> = Vec::new();
        self.blanks();
        if !self.take(b'}')? {
            loop {
                self.blanks();
                let at = self.at;
                let name = self.string()?;
                self.blanks();
                self.expect(b':')?;
                let value = self.value(inner)?;
                members.push((name.encode_utf16().collect(), at, format!("{}:{value}", quoted(&name))));
                self.blanks();
                if self.take(b'}')? {
                    break;
                }
                self.expect(b',')?;
            }
        }
        members.sort_unstable();
        if let Some(pair) = members.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(JsonError { at: pair[1].1, fault: DUPLICATE_MEMBER });
        }
        let members: Vec<String> = members.into_iter().map(|(_, _, member)| member).collect();
        Ok(format!("{{{}}}", members.join(",")))
    }

    fn string(&mut self) -> Result<String, JsonError> {
        self.expect(b'"')?;
        let mut out = String::new();
        loop {
            let start = self.at;
            while !matches!(self.peek()?, b'"' | b'\\' | 0..0x20) {
                self.at += 1;
            }
            out.push_str(&self.text[start..self.at]);
            match self.peek()? {
                b'"' => {
                    self.at += 1;
                    return Ok(out);
                }
                b'\\' => out.push(self.escape()?),
                _ => return Err(self.fault(SYNTAX)),
            }
        }
    }

    fn escape(&mut self) -> Result<char, JsonError> {
        let start = self.at;
        self.expect(b'\\')?;
        let letter = self.peek()?;
        let plain = match letter {
            b'"' | b'\\' | b'/' => char::from(letter),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let lone = JsonError { at: start, fault: LONE_SURROGATE };
                let unit = self.unit()?;
                if !(0xd800..0xe000).contains(&unit) {
                    return char::from_u32(unit.into()).ok_or(lone);
                }
                // The next character decides between a pair and a lone half. If the document ends
                // here, the fault is `TRUNCATED`.
                if unit >= 0xdc00 || !self.take(b'\\')? || self.peek()? != b'u' {
                    return Err(lone);
                }
                let pair = [unit, self.unit()?];
                return char::decode_utf16(pair).next().and_then(Result::ok).ok_or(lone);
            }
            _ => return Err(self.fault(SYNTAX)),
        };
        self.at += 1;
        Ok(plain)
    }

    /// Reads `uXXXX` of an escape: one UTF-16 code unit in four hexadecimal digits.
    fn unit(&mut self) -> Result<u16, JsonError> {
        self.expect(b'u')?;
        let mut unit = 0_u16;
        for _ in 0..4 {
            let digit = char::from(self.peek()?).to_digit(16).ok_or(self.fault(SYNTAX))?;
            unit = unit << 4 | u16::try_from(digit).unwrap_or(0);
            self.at += 1;
        }
        Ok(unit)
    }
}

/// A string with quotes and the shortest escapes.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            // Writing to a string cannot fail.
            '\0'..='\u{1f}' => _ = write!(out, "\\u{:04x}", u32::from(character)),
            _ => out.push(character),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests;
