//! Pure: no I/O, no clock.
//! What happens to a key after one of its messages is dead. Relay and consumer share it (R17).

use serde::{Deserialize, Serialize};

/// What happens to the later messages of a key when one of its messages is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeadPolicy {
    /// They are held behind it until a person decides: the order is kept.
    #[default]
    Hold,
    /// They are handled without it.
    Skip,
}
