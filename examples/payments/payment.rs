//! A payment as its message carries it: what writer and handlers agree on, and all they share.

use serde::{Deserialize, Serialize};

/// The kind of the message that tells of a payment.
pub(crate) const CREATED: &str = "payment.created";

/// A payment.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Payment {
    /// Given by who takes the payment, so that taking it a second time can be recognised.
    pub(crate) payment_id: String,
    /// Who pays; the key of the message, so the order of an account is kept.
    pub(crate) account_id: String,
    /// Minor units: cents are never a float.
    pub(crate) amount_minor: i64,
    /// ISO 4217.
    pub(crate) currency: String,
}
