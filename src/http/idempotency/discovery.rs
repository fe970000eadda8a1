//! What a service publishes about its protected operations: `GET /.well-known/idempotency` (M4,
//! M97).

use std::collections::BTreeMap;

use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::operation::Core;
use crate::operation::rules::route::Requirement;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Published {
    operation: String,
    path: Option<String>,
    method: Option<String>,
    required: bool,
    ttl: String,
    mode: &'static str,
    mismatch_status: u16,
}

/// Returns the document as a response, for the handler of that route.
#[must_use]
pub fn well_known(engine: &Core) -> Response {
    let published = engine.protected().into_iter().map(|endpoint| {
        let (place, route) = (endpoint.place(), endpoint.route());
        Published {
            operation: endpoint.operation().to_string(),
            path: place.map(|(_, path)| path.to_owned()),
            method: place.map(|(method, _)| method.to_owned()),
            required: route.requirement == Requirement::Required,
            ttl: iso_8601(route.retention.ttl),
            mode: route.mode.as_str(),
            mismatch_status: route.mismatch.status(),
        }
    });
    axum::Json(BTreeMap::from([("operations", published.collect::<Vec<_>>())])).into_response()
}

/// A duration in ISO 8601: in whole hours if possible, else in whole minutes, else in seconds, with
/// a fraction if there is one.
pub(super) fn iso_8601(duration: std::time::Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        _ if duration.subsec_nanos() > 0 => {
            let fraction = format!("{:09}", duration.subsec_nanos());
            format!("PT{seconds}.{}S", fraction.trim_end_matches('0'))
        }
        0 => "PT0S".to_owned(),
        _ if seconds.is_multiple_of(3_600) => format!("PT{}H", seconds / 3_600),
        _ if seconds.is_multiple_of(60) => format!("PT{}M", seconds / 60),
        _ => format!("PT{seconds}S"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shown by: whole seconds only ("PT0H", a lifetime of zero, and "PT90S").
    #[test]
    fn m97_a_lifetime_is_published_as_iso_8601() {
        let millis = |millis| iso_8601(std::time::Duration::from_millis(millis));
        assert_eq!([86_400_000, 300_000, 90_000, 0].map(millis), ["PT24H", "PT5M", "PT90S", "PT0S"]);
        assert_eq!([500, 50, 90_250, 3_600_001].map(millis), ["PT0.5S", "PT0.05S", "PT90.25S", "PT3600.001S"]);
    }
}
