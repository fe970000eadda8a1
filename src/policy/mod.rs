//! What to decide: pure.
pub mod diversion;
pub mod isolate;
pub mod retry;
pub mod split;
pub mod suspicion;
pub mod watermark;
