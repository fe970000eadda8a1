//! The pure rules that an adapter of a database or broker of your own needs: what it reads and
//! writes is judged by them. They do no I/O and read no clock.
//!
//! Not here: names for applications, which are in the root of this crate and in
//! [`operation`](crate::operation).

pub use crate::policy::{db_time, diversion, gaps, horizon, lease, position};

/// The rules of operations that an adapter needs.
pub mod operation {
    pub use crate::policy::operation::{doubt, machine, versions};
}
