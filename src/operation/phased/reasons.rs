//! The reasons for which an operation is parked, as an operator reads them.

use crate::operation::rules::provider::Gap;

/// The reason to park an operation whose first phase may not be committed as a whole.
pub(super) const FIRST_ENDED: &str = "first-phase-ended-its-transaction";

/// The reason as an operator reads it.
pub(super) fn gap_name(gap: Gap) -> &'static str {
    match gap {
        Gap::NoMeans => "provider-without-key-or-query",
        Gap::WindowOver => "provider-may-have-forgotten-the-key",
        Gap::NotFound => "provider-did-not-find-it",
        Gap::StoredError => "provider-replays-an-error",
        Gap::Mismatch => "provider-mismatch",
        Gap::DuplicateRefused => "accepted-duplicate-was-refused",
        Gap::Attempts => "attempts-used-up",
    }
}
