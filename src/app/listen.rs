//! The listener of a process: serves health and metrics over HTTP.

use std::net::SocketAddr;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio_util::sync::CancellationToken;

use super::exit::AppError;
use crate::observe::{self, Health};
use crate::task;

/// Binds the address and serves `/livez`, `/readyz` and `/metrics` in the background, until the
/// stop.
pub(super) async fn listen(
    address: SocketAddr,
    program: &'static str,
    health: Health,
    stop: CancellationToken,
) -> Result<(), AppError> {
    let metrics = recorder(program)?;
    let listener = tokio::net::TcpListener::bind(address).await.map_err(|error| {
        let remedy = match error.kind() {
            std::io::ErrorKind::AddrInUse => "choose another address, or end the program that has it",
            _ => "choose an address of this machine, and a port that this user may open",
        };
        AppError::failed(format!("cannot listen on {address}: {error}; {remedy}"))
    })?;
    let address = listener.local_addr().map_err(|error| AppError::failed(error.to_string()))?;
    tracing::info!(%address, "listening: /livez /readyz /metrics");
    let routes = crate::http::health_routes(health, metrics);
    task::spawn(async move {
        let served = axum::serve(listener, routes).with_graceful_shutdown(stop.cancelled_owned()).await;
        if let Err(error) = served {
            tracing::error!(%error, "the listener ended");
        }
    });
    Ok(())
}

fn recorder(program: &'static str) -> Result<PrometheusHandle, AppError> {
    const SECONDS: [f64; 12] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0];
    let handle = PrometheusBuilder::new()
        .set_buckets(&SECONDS)
        .and_then(PrometheusBuilder::install_recorder)
        .map_err(|error| AppError::failed(format!("metrics cannot be recorded: {error}")))?;
    observe::describe(program);
    let upkeep = handle.clone();
    task::spawn(async move {
        let mut tick = tokio::time::interval(std::time::Duration::from_secs(5));
        loop {
            tick.tick().await;
            upkeep.run_upkeep();
        }
    });
    Ok(handle)
}
