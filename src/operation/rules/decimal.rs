//! Pure: no I/O, no clock.
//! Exact amounts: a whole number, and how many of its digits are after the point.
//!
//! Promise: all texts of one amount (`10`, `10.0`, `010.00`) give the same value with the same
//! text, and no digit is lost. An amount with too many digits is refused, never rounded. Not here:
//! currencies.

use std::fmt;
use std::str::FromStr;

use crate::error::Invalid;

/// An exact decimal of at most 38 digits, in its shortest form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Decimal {
    unscaled: i128,
    scale: u32,
}

const NO_DECIMAL: &str = "not a decimal: write digits, an optional minus and an optional point, such as -12.50";
const TOO_LONG: &str = "more than 38 digits";

impl Decimal {
    /// `unscaled` divided by ten to the power of `scale`: 1250 and 2 are 12.5.
    pub(crate) fn new(mut unscaled: i128, mut scale: u32) -> Self {
        if unscaled == 0 {
            scale = 0;
        }
        while scale > 0 && unscaled % 10 == 0 {
            unscaled /= 10;
            scale -= 1;
        }
        Self { unscaled, scale }
    }
}

impl FromStr for Decimal {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let (negative, number) = text.strip_prefix('-').map_or((false, text), |number| (true, number));
        let (whole, fraction) = number.split_once('.').map_or((number, None), |(whole, part)| (whole, Some(part)));
        let digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(whole) || fraction.is_some_and(|part| !digits(part)) {
            return Err(Invalid::new(NO_DECIMAL));
        }
        let (whole, fraction) = (whole.trim_start_matches('0'), fraction.unwrap_or("").trim_end_matches('0'));
        if whole.len() + fraction.len() > 38 {
            return Err(Invalid::new(TOO_LONG));
        }
        let digits = whole.bytes().chain(fraction.bytes());
        let unscaled = digits.fold(0_i128, |number, digit| number * 10 + i128::from(digit - b'0'));
        let scale = u32::try_from(fraction.len()).map_err(|_| Invalid::new(TOO_LONG))?;
        Ok(Self::new(if negative { -unscaled } else { unscaled }, scale))
    }
}

impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scale = self.scale as usize;
        // `format!` panics at a wider text. No text that is read gives such a scale.
        if scale >= usize::from(u16::MAX) {
            return write!(f, "{}e-{scale}", self.unscaled);
        }
        let digits = format!("{:0>width$}", self.unscaled.unsigned_abs(), width = scale + 1);
        let (whole, fraction) = digits.split_at(digits.len() - scale);
        let (sign, point) = (if self.unscaled < 0 { "-" } else { "" }, if scale == 0 { "" } else { "." });
        write!(f, "{sign}{whole}{point}{fraction}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shown by: keeping the zeros behind the point; dropping the sign of a number between -1 and 0;
    // writing as many zeros as a client asks for.
    #[test]
    fn m24_texts_of_one_amount_are_one_value() {
        for (texts, shortest) in [
            (["10", "10.0", "010.00", "10.000"], "10"),
            (["-0.5", "-0.50", "-00.5", "-0.500"], "-0.5"),
            (["0", "-0", "0.00", "000"], "0"),
            (["0.001", "0.0010", "00.001", "0.00100"], "0.001"),
        ] {
            for text in texts {
                let decimal: Decimal = text.parse().expect(text);
                assert_eq!(decimal.to_string(), shortest, "{text}");
                assert_eq!(decimal, shortest.parse().expect("the shortest"));
            }
        }
        assert_eq!(Decimal::new(1_250, 2), "12.5".parse().expect("a decimal"));
        assert_eq!(Decimal::new(0, u32::MAX), Decimal::new(0, 0));
        assert_eq!(Decimal::new(i128::MIN, 1).to_string(), "-17014118346046923173168730371588410572.8");
        assert_eq!(Decimal::new(-15, u32::MAX).to_string(), "-15e-4294967295");
        assert_eq!(Decimal::new(15, 65_534).to_string().len(), 65_536);
    }

    // Shown by: allowing an empty side of the point; a limit of 40 digits (panics on overflow).
    #[test]
    fn m24_what_is_not_exact_is_refused() {
        for text in ["", "-", ".", "1.", ".5", "+1", "1e3", "1,5", " 1", "0x1", "NaN", "1.-5", "--1", "\u{661}"] {
            assert_eq!(text.parse::<Decimal>(), Err(Invalid::new(NO_DECIMAL)), "{text:?}");
        }
        assert_eq!(format!("1.5{}", "0".repeat(60)).parse(), Ok(Decimal::new(15, 1)), "zeros are no digits");
        assert!("9".repeat(38).parse::<Decimal>().is_ok());
        assert_eq!("9".repeat(39).parse::<Decimal>(), Err(Invalid::new(TOO_LONG)));
        assert_eq!(format!("0.{}1", "0".repeat(40)).parse::<Decimal>(), Err(Invalid::new(TOO_LONG)));
    }
}
