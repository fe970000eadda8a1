//! mysql.
