//! Messages in a transaction of ours, within the answer timeout.

use super::{Bounded, Remote};
use crate::error::StoreError;
use crate::message::NewMessage;
use crate::outbox::enqueue::{Enqueue, enqueue_all};

impl<Db: Remote> Bounded<Db> {
    /// Enqueues messages on this connection, in the transaction that is open.
    pub(in crate::store) async fn enqueue(&mut self, messages: Vec<NewMessage>) -> Result<(), StoreError>
    where
        Db::Connection: Enqueue,
    {
        let written = self.within(|connection| {
            Box::pin(async move {
                match enqueue_all(connection, messages).await {
                    // Passed on as an sqlx error, so that `settle` gives the connection up as after
                    // any statement.
                    Err(StoreError::Unavailable(error)) => Err(error),
                    written => Ok(written.map(drop)),
                }
            })
        });
        written.await?
    }
}
