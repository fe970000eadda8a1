//! Time: instants of the database, leases, and when something is tried again or left alone. Every
//! subject uses these rules.
//!
//! | module | decides | rules |
//! |---|---|---|
//! | [`db_time`] | how instants of the database's clock compare | R22 |
//! | [`bound`] | the longest time that a setting may have | |
//! | [`lease`] | who owns a lease, and whether a session still holds it | R7, R22 |
//! | [`retry`] | when a failed message is tried again, and when it is dead | R25 |
//! | [`breaker`] | when an outside place is left alone for a while | M110 |
//! | [`pace`] | how a loop waits; the only file here that sleeps | |
//! | `since` | how long ago a moment was, by two clocks of the process | |

pub(crate) mod bound;
pub(crate) mod breaker;
pub(crate) mod db_time;
#[cfg(feature = "duties")]
pub(crate) mod lease;
pub mod pace;
pub(crate) mod retry;
#[cfg(feature = "operations")]
pub(crate) mod since;
