//! Pure: no I/O, no clock. The rules of the consumer.
//!
//! | module | decides | rules |
//! |---|---|---|
//! | [`watermark`] | up to where a consumer may commit offsets or acknowledge | R29 |
//! | [`position`] | the offset at which a consumer begins to read a partition | |
//! | [`suspicion`] | which deliveries run with the attempt written first, and which of them alone | R26 |
//! | [`split`] | how a failed batch is run again | R27 |
//! | [`horizon`] | what is too old or from the future, and how long the inbox must remember | R31 |

pub(crate) mod horizon;
pub(crate) mod position;
#[cfg(feature = "consumer")]
pub(crate) mod split;
#[cfg(feature = "consumer")]
pub(crate) mod suspicion;
#[cfg(feature = "consumer")]
pub(crate) mod watermark;
