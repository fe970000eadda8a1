//! What a server publishes about its keys at `/.well-known/idempotency`: how long it keeps them.

use std::time::Duration;

use serde::Deserialize;

use super::ClientError;
use crate::operation::phased::http::body_of;

const PATH: &str = "/.well-known/idempotency";
const BYTES_MAX: usize = 1 << 20;

/// The document that a server publishes; other members are not read.
#[derive(Deserialize)]
struct Advertised {
    operations: Vec<AdvertisedOperation>,
}

#[derive(Deserialize)]
struct AdvertisedOperation {
    /// How long an answer is replayed, counted from the outcome.
    #[serde(deserialize_with = "duration")]
    ttl: Duration,
}

fn duration<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    iso_8601(&text).ok_or_else(|| serde::de::Error::custom(format!("`{text}` is no duration of days to seconds")))
}

/// Parses a duration such as `PT24H`, `P1DT30M` or `PT0.5S`: whole weeks, days, hours and minutes,
/// and seconds with up to nine digits of a fraction. Months and years are refused, because they
/// have no fixed length.
fn iso_8601(text: &str) -> Option<Duration> {
    let rest = text.strip_prefix('P')?;
    let (days, times) = rest.split_once('T').map_or((rest, None), |(days, times)| (days, Some(times)));
    if times.is_some_and(str::is_empty) || (days.is_empty() && times.is_none()) {
        return None;
    }
    let parts = |mut text: &str, units: &[(char, u64)]| -> Option<u64> {
        let mut seconds = 0_u64;
        for &(unit, length) in units {
            if let Some((number, behind)) = text.split_once(unit) {
                if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
                    return None;
                }
                seconds = seconds.checked_add(number.parse::<u64>().ok()?.checked_mul(length)?)?;
                text = behind;
            }
        }
        text.is_empty().then_some(seconds)
    };
    let (times, nanos) = match times.unwrap_or_default().split_once('.') {
        None => (times.unwrap_or_default().to_owned(), 0),
        Some((whole, fraction)) => (format!("{whole}S"), nanos(fraction.strip_suffix('S')?)?),
    };
    let days = parts(days, &[('W', 604_800), ('D', 86_400)])?;
    let times = parts(&times, &[('H', 3_600), ('M', 60), ('S', 1)])?;
    Some(Duration::new(days.checked_add(times)?, nanos))
}

fn nanos(digits: &str) -> Option<u32> {
    let good = (1..=9).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
    good.then(|| format!("{digits:0<9}").parse().ok()).flatten()
}

/// Reads the document of the server at `url`, on the origin of that URL, within `timeout`. Returns
/// the shortest lifetime of its operations, if it has any.
pub(super) async fn ask(http: &reqwest::Client, url: &str, timeout: Duration) -> Result<Option<Duration>, ClientError> {
    let place = reqwest::Url::parse(url).and_then(|url| url.join(PATH)).map_err(ClientError::unusable)?;
    let whole = async {
        let mut answer = http.get(place).send().await.map_err(|error| ClientError::unusable(error.without_url()))?;
        if answer.status().as_u16() != 200 {
            return Err(ClientError::Request(format!("{PATH} is answered with {}", answer.status())));
        }
        let body = body_of(&mut answer, BYTES_MAX).await.map_err(ClientError::Request)?;
        shortest(&body).map_err(ClientError::unusable)
    };
    tokio::time::timeout(timeout, whole).await.map_err(|_| ClientError::Request(format!("{PATH} does not answer")))?
}

fn shortest(document: &[u8]) -> serde_json::Result<Option<Duration>> {
    let advertised: Advertised = serde_json::from_slice(document)?;
    Ok(advertised.operations.iter().map(|operation| operation.ttl).min())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn m110_the_shortest_lifetime_of_all_operations_counts() {
        let of = |lifetimes: &str| shortest(format!(r#"{{"operations":[{lifetimes}]}}"#).as_bytes()).unwrap();
        let (day, three) =
            (r#"{"operation":"create_payment","ttl":"PT24H"}"#, r#"{"operation":"create_note","ttl":"PT3S"}"#);
        assert_eq!(of(&format!("{day},{three}")), Some(Duration::from_secs(3)));
        assert_eq!(of(day), Some(Duration::from_secs(86_400)));
        assert_eq!(of(""), None);
    }

    // Shown by: a path that must be present, because then the document is not read.
    #[test]
    fn m97_an_operation_whose_place_is_not_published_is_read() {
        let document = br#"{"operations": [{"operation": "pay", "path": null, "method": null, "ttl": "PT1H"}]}"#;
        assert_eq!(shortest(document).unwrap(), Some(Duration::from_secs(3_600)));
    }

    // Shown by: reading M as months everywhere; allowing an empty T.
    #[test]
    fn lifetimes_are_read_as_they_are_published() {
        for (text, seconds) in [
            ("PT24H", Some(86_400)),
            ("P1D", Some(86_400)),
            ("P2W", Some(1_209_600)),
            ("P1DT1H30M5S", Some(91_805)),
            ("PT90M", Some(5_400)),
            ("PT0S", Some(0)),
            ("P1M", None),
            ("P1Y", None),
            ("PT", None),
            ("P", None),
            ("P1DT", None),
            ("PT1.5H", None),
            ("PT-1H", None),
            ("PT5M1H", None),
            ("24h", None),
            ("PT99999999999999999999H", None),
        ] {
            assert_eq!(iso_8601(text), seconds.map(Duration::from_secs), "{text}");
        }
    }

    // Shown by: whole seconds only, because then the document is not read.
    #[test]
    fn m97_a_lifetime_below_a_second_is_read() {
        for (text, millis) in [
            ("PT0.5S", Some(500)),
            ("PT0.05S", Some(50)),
            ("PT90.250S", Some(90_250)),
            ("P1DT1M0.001S", Some(86_460_001)),
            ("PT.5S", None),
            ("PT1.S", None),
            ("PT1.5", None),
            ("PT1.+5S", None),
            ("PT1.0000000001S", None),
        ] {
            assert_eq!(iso_8601(text), millis.map(Duration::from_millis), "{text}");
        }
    }
}
