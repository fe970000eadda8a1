//! The verdict on a message that failed or cannot be handled: what follows a failed try, and how a
//! dead message is stored and told. Lanes and retriers judge alike.

use super::item::Item;
use crate::error::HandlerError;
use crate::inbox::port::{ParkAs, Parked};
use crate::message::Message;
use crate::observe::{self, DeliveryOutcome};
use crate::time::retry::{Asked, Decision, RetryPolicy};

/// The reason of a message whose id stands in the inbox with different content.
const ID_REUSED: &str = "id-reused";
/// The reason of a message whose handler ended the transaction that it was given.
pub(super) const ENDED: &str = "transaction-ended";
/// The error text for such a message.
pub(super) const WHY_ENDED: &str =
    "the handler ended the transaction it was given; whether its effects are complete is not known";

/// The error text for a message each of whose tries ended with the process.
pub(super) const KILLS: &str = "every try ended with the process: the handler kills it";

/// Decides what follows a failed try; `counted` is the number of tries.
pub(super) fn decide(retry: &RetryPolicy, error: &HandlerError, counted: u32) -> Decision {
    let asked = match error.retry_after {
        _ if error.terminal => Asked::NoRetry,
        Some(after) => Asked::After(after),
        None if error.is_late() => Asked::NotInPlace,
        None => Asked::Nothing,
    };
    retry.next(counted, asked, fastrand::f64())
}

/// The stored form of a message that is dead before any try. `reason` is a code such as
/// `unhandled`, `error` a sentence for people.
pub(super) fn dead(item: &Item, reason: &str, error: &str, holds: bool) -> Parked {
    let park_as = ParkAs::Dead { reason: reason.to_owned(), holds };
    Parked { message: item.message.clone(), park_as, attempts: 0, error: Some(error.to_owned()) }
}

/// The stored form of a message that has the id of another one. Later messages of its key do not
/// wait for it.
pub(super) fn id_reused(item: &Item) -> Parked {
    dead(item, ID_REUSED, "the same id stands in the inbox with different content", false)
}

/// The stored form of a message that is too old or from the future (R31). Later messages of its key
/// do not wait for it.
pub(super) fn out_of_time(item: &Item, reason: &str) -> Parked {
    let why = "its inbox row is deleted, or will be soon, so a second copy could not be told apart; redrive it if it was not handled";
    dead(item, reason, why, false)
}

/// Logs a message that is stored as dead, and nothing of one that waits. It is called after the
/// commit: a transaction that was rolled back runs again, and says it then. A message that comes
/// again, and whose reason leaves no inbox row, is said again. Returns whether it is dead.
pub(super) fn say_dead(consumer: &str, parked: &Parked) -> bool {
    let Parked { message, park_as: ParkAs::Dead { reason, holds }, attempts, error } = parked else { return false };
    is_dead(consumer, message, reason, *holds, *attempts, error.as_deref().unwrap_or_default());
    true
}

/// Logs a message that is dead.
pub(super) fn is_dead(consumer: &str, message: &Message, reason: &str, holds: bool, tries: u32, error: &str) {
    // Two contents under one id are a mistake of a producer. It has a line of its own, so that
    // operators can watch for it (G7: an id that comes again with other content is an alarm).
    let what = if reason == ID_REUSED { "the same message id with different content" } else { "a message is dead" };
    tracing::error!(consumer, id = %message.id, sent_id = %message.id_text, topic = %message.topic, place = %message.coordinates, tries, reason, holds, error, "{what}");
}

/// Logs a failed try of a message; never its payload.
pub(super) fn failed(consumer: &str, message: &Message, attempt: u32, error: &HandlerError) {
    tracing::warn!(consumer, id = %message.id, sent_id = %message.id_text, topic = %message.topic, kind = %message.kind, key = message.key_text(), attempt, %error, "a handler failed");
}

/// Reports a message that is dead because its handler ended the transaction.
pub(super) fn ended(consumer: &str, message: &Message, holds: bool, tries: u32) {
    is_dead(consumer, message, ENDED, holds, tries, WHY_ENDED);
    observe::delivered(consumer, DeliveryOutcome::Dead, 1);
}
