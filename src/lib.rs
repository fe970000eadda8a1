//! Exactly-once effects over at-least-once brokers.

pub mod policy;
