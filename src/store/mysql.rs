//! The store on MySQL 8.0.19 or later and MariaDB 10.6 or later: tables with the prefix `oncebox_`
//! in the user's own database.
//!
//! Guarantees:
//! * The outbox holds only unproven rows. Every read takes the rows that are there in position
//!   order, so a row that commits late is never passed over (R10). Rows are deleted by exact
//!   position, never by a range (R11).
//! * The unique key of the inbox, over fixed binary values, decides what is new; a random token
//!   tells which rows this batch inserted (R24).
//! * A handler runs with `autocommit = 0`, and a savepoint proves that it did not end the
//!   transaction (R23).
//!
//! Not here: shards (there is one), triggers (a migrator without SUPER cannot make them, R12),
//! Galera and other multi-primary set-ups, which `check` refuses.

mod check;
mod connect;
mod door;
#[cfg(feature = "duties")]
mod inbox;
#[cfg(feature = "duties")]
mod mend;
#[cfg(feature = "duties")]
mod message;
#[cfg(feature = "operations")]
mod operations;
#[cfg(feature = "duties")]
mod operator;
#[cfg(feature = "operations")]
mod phases;
#[cfg(feature = "duties")]
mod relay;
mod schema;
#[cfg(feature = "duties")]
mod sql;
#[cfg(feature = "duties")]
mod statements;

#[cfg(feature = "duties")]
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::mysql::{MySqlDatabaseError, MySqlQueryResult};
use sqlx::{MySql, MySqlPool};

use super::bounded::BoundedPool;
use crate::error::StoreError;
use crate::store::base::{Base, StoreOptions};
#[cfg(feature = "duties")]
use crate::store::{Duties, Store};
#[cfg(feature = "operations")]
use crate::store::{KeyOperator, OperationStore};
use crate::text::hex::hex;

/// The store on MySQL and MariaDB: outbox, inbox and operations. Cheap to clone.
#[derive(Debug, Clone)]
pub struct MySqlStore {
    pool: BoundedPool<MySql>,
    /// The longest lock wait of a statement in a consumer's handler.
    lock_wait: Duration,
    /// The longest run of a statement in a consumer's handler, where the server can end it.
    statement_max: Duration,
}

#[async_trait]
impl Base for MySqlStore {
    type Db = MySql;

    const NAME: &'static str = "mysql";

    async fn connect(options: &StoreOptions) -> Result<Self, StoreError> {
        connect::connect(options).await
    }

    fn pool(&self) -> &MySqlPool {
        self.pool.plain()
    }

    async fn close(&self) {
        self.pool.close().await;
    }
}

#[cfg(feature = "duties")]
impl Store for MySqlStore {
    fn into_duties(self) -> Arc<dyn Duties> {
        Arc::new(self)
    }
}

#[cfg(feature = "operations")]
impl OperationStore for MySqlStore {
    fn into_operator(self) -> Arc<dyn KeyOperator> {
        Arc::new(self)
    }
}

/// The number of an error of the server.
fn number(error: &sqlx::Error) -> Option<u16> {
    Some(error.as_database_error()?.try_downcast_ref::<MySqlDatabaseError>()?.number())
}

/// Whether the key of a row that was to be inserted is there already.
fn is_duplicate(error: &sqlx::Error) -> bool {
    number(error) == Some(1062)
}

/// Whether a row was inserted; false where its key is there already.
fn inserted(outcome: sqlx::Result<MySqlQueryResult>) -> sqlx::Result<bool> {
    match outcome {
        Err(error) if is_duplicate(&error) => Ok(false),
        outcome => outcome.map(|_| true),
    }
}

/// Whether another transaction has a lock. A statement that was not to wait for it gets 1205 on
/// MariaDB and 3572 on MySQL; one that waited as long as it may gets 1205 on both.
fn is_locked(error: &sqlx::Error) -> bool {
    matches!(number(error), Some(1205 | 3572))
}

/// Begins a transaction of our own. `autocommit` stays as it is.
const START: &str = "start transaction";

/// A condition on `information_schema.tables`: tables whose engine cannot roll back.
macro_rules! without_transactions {
    () => {
        "table_type = 'BASE TABLE' \
         and engine in (select engine from information_schema.engines where transactions = 'NO')"
    };
}
use without_transactions;

/// A condition on a row `o` of the outbox: a dead or held row with a higher position was there ten
/// seconds before it was written. Then the counter of positions was set back. A row that only
/// commits late was written before the higher position was drawn. The seconds are for the clocks of
/// servers that take over from each other; whoever sets the counter back needs longer.
macro_rules! set_back {
    () => {
        "(o.position < (select max(position) from oncebox_outbox_dead) \
         and o.created_at > (select diverted_at + interval 10 second from oncebox_outbox_dead order by position desc limit 1))"
    };
}
use set_back;

/// A JSON list of hexadecimal strings, for `json_table`.
fn hex_list(items: impl IntoIterator<Item = [u8; 16]>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| format!("\"{}\"", hex(&item))).collect();
    format!("[{}]", items.join(","))
}

/// A JSON list of positions or sequences, for `json_table`.
fn number_list(numbers: impl IntoIterator<Item = i64>) -> String {
    let numbers: Vec<String> = numbers.into_iter().map(|number| number.to_string()).collect();
    format!("[{}]", numbers.join(","))
}

/// The text of a column that is read as bytes.
fn text(column: &str, bytes: Vec<u8>) -> Result<String, StoreError> {
    String::from_utf8(bytes).map_err(|_| StoreError::Corrupt(format!("the column `{column}` holds what is not UTF-8")))
}

/// The bytes of a column with a hash or a token; an error if they are not 16.
fn sixteen(column: &str, bytes: &[u8]) -> Result<[u8; 16], StoreError> {
    bytes.try_into().map_err(|_| {
        StoreError::Corrupt(format!("the column `{column}` holds {} bytes, 16 were expected", bytes.len()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stand_in_lists_as_digits() {
        let (one, other) = ("00".repeat(16), "1a".repeat(16));
        assert_eq!(hex_list([[0x00; 16], [0x1a; 16]]), format!(r#"["{one}","{other}"]"#));
        assert_eq!(number_list([3, -1]), "[3,-1]");
    }
}
