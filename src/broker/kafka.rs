//! kafka.
