//! Points at which a test kills the service: it says that it is there, and stays there
//! (`--pause-at NAME`).
//!
//! A kill between two statements is found by chance once in a thousand tries; here it is found
//! every time.

use std::sync::OnceLock;

static PAUSE_AT: OnceLock<String> = OnceLock::new();

/// All names.
#[allow(dead_code)] // read by the test of the sweep
pub(crate) const POINTS: [&str; 17] = [
    "payment.received",
    "payment.claimed",
    "payment.written",
    "payment.enqueued",
    "payment.committed",
    "charge.received",
    "charge.claimed",
    "charge.written",
    "charge.intended",
    "charge.sending",
    "charge.answered",
    "charge.settled",
    "charge.booked",
    "charge.enqueued",
    "charge.committed",
    "note.claimed",
    "note.written",
];

/// Chooses the point.
pub(crate) fn pause_at(name: &str) {
    let _ = PAUSE_AT.set(name.to_owned());
}

/// Whether the service is to stop at this point.
pub(crate) fn pauses_at(name: &str) -> bool {
    PAUSE_AT.get().is_some_and(|chosen| chosen == name)
}

/// Goes on, except at the chosen point.
pub(crate) async fn reach(name: &str) {
    if pauses_at(name) {
        eprintln!("paused at {name}");
        // The thread, and not only the task: no timeout around it goes on beside the pause.
        loop {
            std::thread::park();
        }
    }
}
