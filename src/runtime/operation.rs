//! The operation engine: one decision, three doors (O1 to O29).
//!
//! Not here: the decisions ([`policy::operation`](crate::policy::operation)), the statements ([`store`](crate::store)), and HTTP or
//! gRPC, which only translate what comes in and out.

mod reply;

pub use reply::{Answered, Keep, Problem, Reply};
