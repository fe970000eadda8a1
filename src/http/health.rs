//! Serves liveness, readiness and metrics.

use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use metrics_exporter_prometheus::PrometheusHandle;

use crate::observe::Health;

/// A loop without a turn for this long is stuck. Longer than any usual time limit inside a loop.
const STUCK: Duration = Duration::from_secs(120);

/// `/livez`: 200 while all loops turn. `/readyz`: 200 when every part works or stands by, else 503
/// with the reasons. `/metrics`: Prometheus text.
pub(crate) fn health_routes(health: Health, metrics: PrometheusHandle) -> Router {
    Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .with_state(health)
        .route(
            "/metrics",
            get(move || async move {
                ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], metrics.render())
            }),
        )
}

async fn livez(State(health): State<Health>) -> impl IntoResponse {
    let stuck = health.stuck(STUCK);
    if stuck.is_empty() {
        (StatusCode::OK, "ok\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, format!("stuck: {}\n", stuck.join(", ")))
    }
}

async fn readyz(State(health): State<Health>) -> impl IntoResponse {
    let status = if health.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, format!("{}\n", health.lines().join("\n")))
}
