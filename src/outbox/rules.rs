//! Pure: no I/O, no clock. The rules of the relay. A version without one of them lost, doubled or
//! reordered a message.
//!
//! | module | decides | rules |
//! |---|---|---|
//! | [`gaps`] | which outbox positions may still appear, and what a relay persists | R2 to R6, R9, R18 |
//! | [`isolate`] | whether one message makes a relay's sessions end | R16 |
//! | [`diversion`] | which rows go to the held table instead of the broker | R17 |
//! | [`policy`] | whether the later messages of a dead one wait | R17 |

#[cfg(feature = "relay")]
pub(crate) mod diversion;
#[cfg(feature = "postgres")]
pub(crate) mod gaps;
#[cfg(feature = "relay")]
pub(crate) mod isolate;
pub(crate) mod policy;

#[cfg(all(test, feature = "postgres", feature = "relay"))]
#[path = "../../tests/rules/gap_model/main.rs"]
mod gap_model;
