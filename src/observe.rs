//! Every metric name, once.
