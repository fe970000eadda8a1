//! Whose failure it is that looks like the database's: a statement that needs more than the server gives it, or that ends its
//! connection, fails with the same codes as a server in distress.
//!
//! Promise: a database that is down burns no attempt (G10), and a message that the database cannot take stops its lane no longer
//! than it takes to find that out.

use std::time::Duration;

use super::Shared;
use super::batch::roll_back;
use crate::error::StoreError;
use crate::message::MessageId;
use crate::store::{ConsumerId, InboxEntry, InboxTx, Store};

/// So often a message fails, and the database works for others right after it.
const TIMES: u32 = 3;
/// How long that work may take.
const WORKS_MAX: Duration = Duration::from_secs(5);

/// Failures in a row of one message that runs alone.
#[derive(Debug, Default)]
pub(super) struct Blame(u32);

impl Blame {
    /// After a failure of the message that may be its own: true where it is.
    pub(super) async fn falls<S: Store>(
        &mut self,
        shared: &Shared<S>,
        consumer: ConsumerId,
        may_be_its_own: bool,
    ) -> bool {
        let works = may_be_its_own && works(shared, consumer).await;
        self.0 = if works { self.0 + 1 } else { 0 };
        self.0 >= TIMES
    }
}

/// Whether the database does for others what it is there for: a row goes into the inbox, and is taken back.
async fn works<S: Store>(shared: &Shared<S>, consumer: ConsumerId) -> bool {
    let work = async {
        let mut tx = shared.store.begin(consumer).await?;
        let inserted = tx.admit(&[InboxEntry { id: MessageId::new(), hash: [0; 16] }]).await;
        roll_back(tx).await;
        inserted.map(drop)
    };
    let worked: Result<Result<(), StoreError>, _> = tokio::time::timeout(WORKS_MAX, work).await;
    matches!(worked, Ok(Ok(())))
}
