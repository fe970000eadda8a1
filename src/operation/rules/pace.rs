//! Pure: no I/O, no clock.
//! The seconds of `Retry-After` (M45, O29).
//!
//! Guarantees: the value is never 0, at most 30 before jitter, and grows for a key that keeps
//! failing. Chance is an argument.
//!
//! Not here: which answers may be retried ([`problem`](super::problem)), and the client's own
//! backoff (`client`).

use std::time::Duration;

const RETRY_AFTER_MAX: u32 = 30;

/// The seconds of `Retry-After` for a wait of about `expected`; `chance` is drawn from 0 to 1. The
/// value is rounded up, kept within 1 and 30, and raised by up to a quarter (at least by up to a
/// second), so that clients do not all come back at once.
pub(crate) fn retry_after(expected: Duration, chance: f64) -> u32 {
    let whole = expected.as_secs().saturating_add(u64::from(expected.subsec_nanos() > 0));
    let base = u32::try_from(whole).unwrap_or(RETRY_AFTER_MAX).clamp(1, RETRY_AFTER_MAX);
    let spread = (base / 4).max(1);
    // The cast saturates, so no value of `chance` leads out of the bounds.
    base + ((f64::from(spread + 1) * chance) as u32).min(spread)
}

/// The wait that a `Retry-After` asks for. The text is a number of seconds, of any length, or a
/// date; a date in the past means no wait. `None` if the text is neither.
#[cfg(feature = "client")]
pub(crate) fn asked_to_wait(text: &str, now: std::time::SystemTime) -> Option<Duration> {
    let text = text.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let at = httpdate::parse_http_date(text).ok()?;
    Some(at.duration_since(now).unwrap_or(Duration::ZERO))
}

/// The time that the first request may still run: the rest of its lease, or the rest of the usual
/// time of a run if that is shorter.
pub(crate) fn while_running(lease_left: Duration, ran: Duration, usual: Duration) -> Duration {
    usual.saturating_sub(ran).min(lease_left)
}

/// The wait after the given number of failed attempts of one key: 1, 2, 4, .. 30 seconds.
pub(crate) fn after_attempts(attempts: u32) -> Duration {
    let doubled = 1_u64.checked_shl(attempts.saturating_sub(1)).unwrap_or(u64::MAX);
    Duration::from_secs(doubled.clamp(1, RETRY_AFTER_MAX.into()))
}

/// How long a run of one operation usually takes: an average in which the last run counts a fifth.
/// `before`: the average without the last run; `None` if that was the first one.
pub(crate) fn usual(before: Option<Duration>, ran: Duration) -> Duration {
    before.map_or(ran, |usual| usual.saturating_mul(4).saturating_add(ran) / 5)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shown by: reading seconds only; returning `None` for a date in the past; a number parser that
    // accepts a sign and refuses a number that is too large.
    #[cfg(feature = "client")]
    #[test]
    fn m110_retry_after_is_read_in_both_forms() {
        let now = httpdate::parse_http_date("Fri, 20 Nov 2026 10:00:00 GMT").expect("a date");
        for (text, seconds) in [
            ("0", Some(0)),
            (" 120 ", Some(120)),
            ("99999999999999999999999", Some(u64::MAX)),
            ("Fri, 20 Nov 2026 10:01:30 GMT", Some(90)),
            ("Friday, 20-Nov-26 10:00:07 GMT", Some(7)),
            ("Fri, 20 Nov 2026 09:00:00 GMT", Some(0)),
            ("", None),
            ("-1", None),
            ("+5", None),
            ("1.5", None),
            ("soon", None),
        ] {
            assert_eq!(asked_to_wait(text, now), seconds.map(Duration::from_secs), "{text}");
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    // Shown by: rounding down; clamping from 0 (pitfall 31).
    #[test]
    fn m45_retry_after_is_never_0_and_at_most_30_before_jitter() {
        for (expected, base) in [(0, 1), (1, 1), (999, 1), (1_000, 1), (1_001, 2), (29_001, 30), (600_000, 30)] {
            let expected = Duration::from_millis(expected);
            assert_eq!(retry_after(expected, 0.0), base);
            let latest = base + (base / 4).max(1);
            assert_eq!(retry_after(expected, 1.0), latest);
            for chance in [f64::NAN, f64::INFINITY, -1.0, 0.3, 0.999] {
                assert!((base..=latest).contains(&retry_after(expected, chance)), "{chance}");
            }
        }
        assert_eq!(retry_after(Duration::MAX, 0.0), 30);
    }

    #[test]
    fn jitter_spreads_those_who_wait_over_all_its_seconds() {
        let mut seen: Vec<u32> = (0..100).map(|step| retry_after(SECOND * 30, f64::from(step) / 100.0)).collect();
        seen.dedup();
        assert_eq!(seen, (30..=37).collect::<Vec<_>>());
    }

    // Shown by: doubling from 2.
    #[test]
    fn o29_a_key_that_keeps_failing_waits_longer_up_to_30_seconds_for_ever() {
        let waits: Vec<u64> =
            (0..8).chain([64, 65, u32::MAX]).map(|attempts| after_attempts(attempts).as_secs()).collect();
        assert_eq!(waits, [1, 1, 2, 4, 8, 16, 30, 30, 30, 30, 30]);
    }

    #[test]
    fn m45_a_wait_follows_the_lease_or_the_usual_time_if_that_is_less() {
        assert_eq!(while_running(SECOND * 20, SECOND, SECOND * 5), SECOND * 4);
        assert_eq!(while_running(SECOND * 2, SECOND, SECOND * 5), SECOND * 2);
        assert_eq!(while_running(SECOND * 20, SECOND * 9, SECOND * 5), Duration::ZERO);
        assert_eq!(usual(None, SECOND * 5), SECOND * 5);
        assert_eq!(usual(Some(SECOND * 5), SECOND * 10), SECOND * 6);
    }
}
