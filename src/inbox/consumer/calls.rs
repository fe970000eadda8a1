//! Calls of handlers: which messages each gets, in which order, and how a panic or timeout counts.
//!
//! Promise: the messages of a key reach their handlers in the key's order, even if one handler
//! takes single messages and another takes sets. A handler that panics or runs too long has failed
//! like any other.

use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::time::Instant;

use futures_util::FutureExt;

use super::Shared;
use super::handlers::Handler;
use crate::error::HandlerError;
use crate::inbox::port::InboxTx;
use crate::message::Message;
use crate::observe;
use crate::text::panic::panic_text;

/// A new message and the handler that takes its kind.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) item: usize,
    /// The number of the handler in the consumer's list of handlers.
    pub(super) handler: usize,
    pub(super) in_sets: bool,
    /// The lane id of the message; `None` without a key.
    pub(super) lane: Option<[u8; 16]>,
}

/// One call of a handler with at least one item.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) handler: usize,
    pub(super) items: Vec<usize>,
}

/// Plans the calls for a batch that is given in the order of delivery. Sets are as large as the
/// order of keys allows: a set is closed when a message comes for another handler while an older
/// message of its key is in the set.
pub(super) fn plan(wanted: impl IntoIterator<Item = Wanted>) -> Vec<Call> {
    let mut calls = Vec::new();
    let mut sets: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    // The set that contains messages of a key; at most one.
    let mut stands_in: HashMap<[u8; 16], usize> = HashMap::new();
    for Wanted { item, handler, in_sets, lane } in wanted {
        let before = lane.and_then(|lane| stands_in.get(&lane).copied()).filter(|before| *before != handler);
        if let Some(before) = before {
            calls.extend(sets.remove(&before).map(|items| Call { handler: before, items }));
            stands_in.retain(|_, set| *set != before);
        }
        if in_sets {
            sets.entry(handler).or_default().push(item);
            stands_in.extend(lane.map(|lane| (lane, handler)));
        } else {
            calls.push(Call { handler, items: vec![item] });
        }
    }
    calls.extend(sets.into_iter().map(|(handler, items)| Call { handler, items }));
    calls
}

/// The message to which the failure of a handler belongs.
#[derive(Debug)]
pub(super) enum Failure {
    /// The handler of this item failed.
    Of(usize, HandlerError),
    /// The statements of several items failed at this one. Alone it may succeed (a limit of time, a
    /// statement that only a block refuses), so it runs alone before a try is counted.
    InSet(usize, String),
    /// A statement of several items gave up waiting for a lock, on rows of any of them.
    Locked(HandlerError),
    /// A handler failed, and it is not known on which item.
    Unclear(String),
}

impl Failure {
    /// The failure of a call with these items.
    pub(super) fn of_call(items: &[usize], error: HandlerError) -> Self {
        match items {
            [only] => Self::Of(*only, error),
            [first, ..] => match error.message_index().and_then(|index| items.get(index)) {
                Some(its) if error.is_transient() => Self::Of(*its, error),
                Some(its) => Self::InSet(*its, error.message),
                None if error.is_transient() && error.is_late() => Self::Locked(error),
                None if error.is_transient() => Self::Of(*first, error),
                None => Self::Unclear(error.message),
            },
            [] => Self::Unclear(error.message),
        }
    }

    /// A failure of the whole transaction: it belongs to the only handled item; with several items,
    /// each must run alone to find out.
    pub(super) fn of_all(handled: &[usize], why: &str) -> Self {
        match handled {
            [only] => Self::Of(*only, HandlerError::retryable(why)),
            _ => Self::Unclear(why.to_owned()),
        }
    }

    /// The error alone: of one message, whose failure is its own.
    pub(super) fn into_error(self) -> HandlerError {
        match self {
            Self::Of(_, error) | Self::Locked(error) => error,
            Self::InSet(_, why) | Self::Unclear(why) => HandlerError::retryable(why),
        }
    }

    /// The same failure, where the connection was lost, whatever error the handler made of it.
    /// `first` is the item that it belongs to where that is not known.
    pub(super) fn lost(self, first: usize) -> Self {
        match self {
            Self::Of(item, error) => Self::Of(item, HandlerError::lost_connection(error)),
            Self::Locked(error) => Self::Of(first, HandlerError::lost_connection(error)),
            Self::InSet(item, why) => Self::Of(item, HandlerError::lost_connection(why)),
            Self::Unclear(why) => Self::Of(first, HandlerError::lost_connection(why)),
        }
    }
}

/// Runs a handler. A panic and a timeout count as failures. `attempt` is the number of the try if
/// it was counted.
pub(super) async fn call(
    shared: &Shared,
    handler: &dyn Handler,
    messages: &[&Message],
    attempt: Option<u32>,
    tx: &mut dyn InboxTx,
    enqueued: &mut bool,
) -> Result<(), HandlerError> {
    let numbered: Vec<Message> = match attempt {
        Some(attempt) => messages.iter().map(|message| Message { attempt, ..(*message).clone() }).collect(),
        None => Vec::new(),
    };
    let numbered: Vec<&Message> = numbered.iter().collect();
    let messages = if attempt.is_some() { &numbered } else { messages };
    let limit = shared.options.handler_timeout;
    let began = Instant::now();
    let handling = handler.handle(messages, tx, enqueued);
    // The timeout is inside, because values that the handler holds may panic when they are dropped
    // at the timeout.
    let run = AssertUnwindSafe(async { tokio::time::timeout(limit, handling).await });
    let result = match run.catch_unwind().await {
        Ok(Ok(result)) => result,
        Ok(Err(_)) => Err(HandlerError::late(format!("the handler ran longer than {limit:?}"))),
        Err(panic) => Err(HandlerError::retryable(format!("the handler panicked: {}", panic_text(panic.as_ref())))),
    };
    observe::handled(&shared.options.name, began.elapsed());
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::StoreError;

    /// `a` to `z` are keys, `_` means no key; digits are handlers, and those below 5 take sets.
    fn planned(messages: &[&str]) -> Vec<String> {
        let wanted = messages.iter().enumerate().map(|(item, message)| {
            let (key, handler) = (message.as_bytes()[0], usize::from(message.as_bytes()[1] - b'0'));
            Wanted { item, handler, in_sets: handler < 5, lane: (key != b'_').then_some([key; 16]) }
        });
        let shown = |call: &Call| call.items.iter().map(|item| messages[*item]).collect::<Vec<_>>().join(" ");
        plan(wanted).iter().map(shown).collect()
    }

    #[test]
    fn sets_are_as_large_as_they_can_be() {
        assert_eq!(planned(&["a1", "b1", "a1", "_1", "b1"]), ["a1 b1 a1 _1 b1"]);
        assert_eq!(planned(&["a1", "b2", "c1", "d2", "_1"]), ["a1 c1 _1", "b2 d2"], "other keys may pass each other");
        assert_eq!(planned(&["a1", "_9", "b1", "c9"]), ["_9", "c9", "a1 b1"]);
        assert!(planned(&[]).is_empty());
    }

    #[test]
    fn g6_no_message_of_a_key_is_called_before_an_older_one() {
        assert_eq!(planned(&["a1", "b1", "a9", "a1"]), ["a1 b1", "a9", "a1"]);
        assert_eq!(planned(&["a1", "b2", "a2", "b1"]), ["a1", "b2 a2", "b1"]);
        assert_eq!(planned(&["a1", "b1", "b2", "a2", "a1"]), ["a1 b1", "b2 a2", "a1"]);
    }

    /// Every mixture of two keys and three handlers, up to six messages long. Shown by: a set that
    /// was not closed.
    #[test]
    fn g6_the_order_of_every_key_survives_every_mixture() {
        let all = ["a1", "a2", "a9", "b1", "b2", "b9", "_1"];
        for number in 0..7_usize.pow(6) {
            let messages: Vec<&str> = (0..6).map(|place| all[number / 7_usize.pow(place) % 7]).collect();
            let calls: Vec<String> = planned(&messages);
            let called: Vec<&str> = calls.iter().flat_map(|call| call.split(' ')).collect();
            for key in ["a", "b"] {
                let of_key = |message: &&&str| message.starts_with(key);
                assert!(called.iter().filter(of_key).eq(messages.iter().filter(of_key)), "{messages:?}: {calls:?}");
            }
            assert_eq!(called.len(), messages.len());
        }
    }

    /// What a database says of a statement that gave up waiting for a lock.
    #[derive(Debug)]
    struct Locked;

    impl std::fmt::Display for Locked {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("lock timeout")
        }
    }

    impl std::error::Error for Locked {}

    impl sqlx::error::DatabaseError for Locked {
        fn message(&self) -> &str {
            "lock timeout"
        }

        fn code(&self) -> Option<std::borrow::Cow<'_, str>> {
            Some("55P03".into())
        }

        fn as_error(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
            self
        }

        fn as_error_mut(&mut self) -> &mut (dyn std::error::Error + Send + Sync + 'static) {
            self
        }

        fn into_error(self: Box<Self>) -> Box<dyn std::error::Error + Send + Sync + 'static> {
            self
        }

        fn kind(&self) -> sqlx::error::ErrorKind {
            sqlx::error::ErrorKind::Other
        }
    }

    /// An error type of a service, as `thiserror` makes it.
    #[derive(Debug, thiserror::Error)]
    enum OfService {
        #[error("the balance could not be read")]
        Balance(#[from] sqlx::Error),
        #[error(transparent)]
        Any(#[from] OfLedger),
    }

    #[derive(Debug, thiserror::Error)]
    enum OfLedger {
        #[error(transparent)]
        Sql(sqlx::Error),
        #[error("the entry could not be written")]
        Store(#[source] StoreError),
    }

    /// Shown by: looking at the outermost error only.
    #[test]
    fn r27_an_error_of_the_service_is_as_transient_as_that_of_the_database_which_it_wraps() {
        let locked = || sqlx::Error::Database(Box::new(Locked));
        let wrapped = HandlerError::from(OfService::from(locked()));
        assert!(wrapped.is_transient() && wrapped.is_late());
        assert_eq!(wrapped.message, "the balance could not be read: lock timeout (SQLSTATE 55P03)");
        let twice = HandlerError::from(OfService::from(OfLedger::Store(StoreError::Busy(locked()))));
        assert!(twice.is_transient() && twice.is_late());
        let transparent = HandlerError::from(OfService::from(OfLedger::Sql(locked())));
        assert!(transparent.is_transient() && transparent.is_late());
        // What the error of the store says goes before what its own source says.
        let lost = || sqlx::Error::Protocol("the end of the stream".into());
        let committed = HandlerError::from(OfService::from(OfLedger::Store(StoreError::CommitUnknown(lost()))));
        assert!(committed.is_transient() && !committed.may_be_its_own());
        assert!(HandlerError::from(OfService::from(lost())).may_be_its_own());
        assert!(!HandlerError::from(OfService::from(sqlx::Error::RowNotFound)).is_transient());
    }

    /// Shown by: with the first of a set to blame, it was stored as waiting without a try.
    #[test]
    fn a_set_that_waited_for_a_lock_blames_a_message_only_where_it_is_known() {
        let locked = || HandlerError::from(sqlx::Error::Database(Box::new(Locked)));
        assert!(locked().is_transient() && locked().is_late());
        assert!(matches!(Failure::of_call(&[3, 5], locked()), Failure::Locked(_)));
        assert!(matches!(Failure::of_call(&[3, 5], locked().of_message(1)), Failure::Of(5, _)));
        assert!(matches!(Failure::of_call(&[3], locked()), Failure::Of(3, _)));
        let deadlock = HandlerError::transient("deadlock");
        assert!(matches!(Failure::of_call(&[3, 5], deadlock), Failure::Of(3, _)), "the set runs again as it is");
    }
}
