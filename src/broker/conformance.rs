//! The broker suite.
