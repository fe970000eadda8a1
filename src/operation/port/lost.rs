//! Reads what became of a commit whose reply was lost.
//!
//! Promise: each read is on a new connection, and all of them together take a second (O29), so that
//! dead connections or a full pool do not delay the answer.
//!
//! Not here: what follows from it ([`doubt`](crate::operation::rules::doubt)).

use std::time::Duration;

use tokio::time::Instant;

use super::{Look, Operations};
use crate::operation::rules::{Identity, Record};

/// How long a commit whose reply was lost is looked for.
const LOOK_FOR: Duration = Duration::from_secs(1);
/// The pause between the first two looks. Each look makes a connection, so each pause is twice the
/// previous one.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) enum Changed {
    /// The store did not answer.
    NoAnswer,
    /// There is no record, or the one that the run began from.
    NotSeen,
    /// There is another record.
    To(Box<Record>),
}

/// Reads the record until it is another one than the run began from. `same` says whether a record
/// is still the one that the run began from.
pub(crate) async fn find_changed<S: Operations + ?Sized>(
    store: &S,
    identity: &Identity,
    same: impl Fn(&Record) -> bool + Send,
) -> Changed {
    let deadline = Instant::now() + LOOK_FOR;
    let mut seen = Changed::NoAnswer;
    let mut pause = LOOK_AGAIN;
    loop {
        match tokio::time::timeout_at(deadline, store.find_afresh(identity)).await {
            Ok(Ok(Look { record: Some(record), .. })) if !same(&record) => return Changed::To(Box::new(record)),
            // The commit may still be on its way.
            Ok(Ok(_)) => seen = Changed::NotSeen,
            Ok(Err(error)) => tracing::debug!(%error, "looking for a lost commit"),
            Err(_) => return seen,
        }
        if Instant::now() + pause >= deadline {
            return seen;
        }
        tokio::time::sleep(pause).await;
        pause *= 2;
    }
}
