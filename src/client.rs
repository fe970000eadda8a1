//! Requests that can be sent again: one key for one operation, the same bytes each time (O26, O27, M110).
//!
//! Not here: the server's side ([`runtime::operation`](crate::runtime::operation)).
