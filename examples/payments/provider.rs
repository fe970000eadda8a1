//! Stands in for the outside provider, as far as one has to know it: it books a notification once
//! for each key, answers a repeated request as it did the first, and loses some answers on the way.
//! It forgets all when it ends.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use tokio::net::TcpListener;

/// A notification that was booked.
#[derive(Debug, Clone)]
pub(crate) struct Booking {
    /// Counted from 1.
    pub(crate) number: usize,
    /// What the first request said.
    pub(crate) body: Bytes,
    /// Requests with this key.
    pub(crate) requests: u32,
}

/// Bookings by key.
pub(crate) type Bookings = Arc<Mutex<BTreeMap<String, Booking>>>;

/// Takes notifications at `/notifications`.
pub(crate) async fn serve(listener: TcpListener, bookings: Bookings) -> std::io::Result<()> {
    axum::serve(listener, Router::new().route("/notifications", post(notify)).with_state(bookings)).await
}

fn book(bookings: &Bookings, key: &str, body: Bytes) -> Booking {
    let mut bookings = bookings.lock().unwrap_or_else(PoisonError::into_inner);
    let number = bookings.len() + 1;
    let booking = bookings.entry(key.to_owned()).or_insert(Booking { number, body, requests: 0 });
    booking.requests += 1;
    booking.clone()
}

async fn notify(State(bookings): State<Bookings>, headers: HeaderMap, body: Bytes) -> (StatusCode, String) {
    let Some(key) = headers.get("idempotency-key").and_then(|key| key.to_str().ok()) else {
        return (StatusCode::BAD_REQUEST, "the header Idempotency-Key is missing".to_owned());
    };
    let booking = book(&bookings, key, body.clone());
    if booking.body != body {
        return (StatusCode::UNPROCESSABLE_ENTITY, format!("{key} was booked with another body"));
    }
    println!("{key}: {}", if booking.requests == 1 { "booked" } else { "known" });
    match booking.number {
        _ if booking.requests > 1 => {}
        // No answer in time,
        number if number % 100 == 50 => std::future::pending().await,
        // one of a gateway in between,
        number if number % 10 == 0 => return (StatusCode::BAD_GATEWAY, "the answer is lost".to_owned()),
        // or a connection that ends without one: the unwinding takes it down, without a word.
        number if number % 5 == 0 => std::panic::resume_unwind(Box::new("the answer is lost")),
        _ => {}
    }
    (StatusCode::OK, format!("reference-{}", booking.number))
}
