//! How a consumer is known in a database: its number, and what it was registered with.

use crate::error::StoreError;

/// A consumer's number in this database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConsumerId(pub i32);

/// How a consumer is registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerSpec {
    /// The name of the consumer, unique in the database.
    pub name: String,
    /// Its id rule as text, stored at the first start; another one is refused unless `accept` is
    /// set (R31).
    pub id_rule: String,
    /// The operator accepts a changed id rule.
    pub accept: bool,
}

impl ConsumerSpec {
    /// Whether the stored id rule is to be replaced by this one. It is refused unless `accept` is
    /// set.
    pub(crate) fn changes(&self, stored: &str) -> Result<bool, StoreError> {
        if stored == self.id_rule || self.accept {
            return Ok(stored != self.id_rule);
        }
        Err(StoreError::Refused(format!(
            "consumer `{}` started with the id rule `{stored}`, now it is `{}`: the inbox would not know old messages again, \
             and what comes again would run again; put the rule back, or start once with `consumer --accept`",
            self.name, self.id_rule
        )))
    }
}
