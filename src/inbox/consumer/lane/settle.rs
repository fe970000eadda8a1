//! Stores a message that is not handled now: to be tried at its due time, behind an older message
//! of the same key, or dead. Its inbox row is inserted in the same transaction (R24), so that a
//! redelivery is seen as a duplicate. (Where a handler committed the inbox row by itself, it is
//! there already; a message that is too old or from the future gets none.)

use std::sync::Arc;

use super::Lane;
use crate::error::{HandlerError, StoreError};
use crate::inbox::consumer::Shared;
use crate::inbox::consumer::admission::{Fate, admit};
use crate::inbox::consumer::blame::{Blame, Fault};
use crate::inbox::consumer::item::{End, Item};
use crate::inbox::consumer::transaction::roll_back;
use crate::inbox::consumer::verdict::{self, dead, id_reused, out_of_time};
use crate::inbox::port::{ConsumerId, ParkAs, Parked};
use crate::message::Message;
use crate::observe::{self, DeliveryOutcome};

/// How many bytes of id, kind and source are kept of a message that cannot be stored whole.
const SHORT_MAX: usize = 1_000;

/// Stores the message, then reports it as committed. Tries until that works, the consumer stops or
/// the partition is taken away; the broker delivers it again then. A message that the database
/// cannot take is stored as dead without its content: its partition goes on, and its coordinates
/// show where the content is. `unspent`: the last counted try was not made.
pub(super) async fn park(
    lane: &mut Lane,
    item: Item,
    park_as: ParkAs,
    (counted, unspent): (u32, bool),
    error: &HandlerError,
) {
    let (message, error) = (item.message.clone(), Some(error.message.clone()));
    let parked = Parked { message, park_as, attempts: counted - u32::from(unspent), error };
    let (mut blame, mut unstorable) = (Blame::default(), None);
    loop {
        match store(lane, &item, &parked, unstorable.as_deref()).await {
            Ok(stored) => {
                lane.went_well();
                let outcome = say(lane, stored.as_ref());
                observe::delivered(&lane.shared.options.name, outcome, 1);
                lane.wake_parked(std::slice::from_ref(&item), &[outcome]).await;
                lane.shared.parked.notify_one();
                return lane.report(&item, End::Committed);
            }
            Err(error) => {
                let may_be_its_own = error.may_be_its_own() && unstorable.is_none();
                let fault = match may_be_its_own {
                    true => blame.of(&lane.shared, lane.consumer, true).await,
                    false => Fault::Transient,
                };
                if fault == Fault::Its && blame.lasts() {
                    unstorable = Some(error.to_string());
                } else if may_be_its_own && blame.is_open() {
                    lane.pause(&blame).await;
                } else {
                    lane.wait_out(&error).await;
                }
                if lane.is_left(&item) {
                    return lane.leave(&[item], unspent).await;
                }
            }
        }
    }
}

/// Logs how the message was stored, and returns its outcome. `None` is a message whose inbox row
/// was there already: another process finished it meanwhile, or an earlier try of this one, whose
/// commit was not answered.
fn say(lane: &Lane, stored: Option<&Parked>) -> DeliveryOutcome {
    let consumer = &lane.shared.options.name;
    let Some(parked) = stored else { return DeliveryOutcome::Duplicate };
    let Parked { message, attempts: tries, error, .. } = parked;
    if verdict::say_dead(consumer, parked) {
        return DeliveryOutcome::Dead;
    }
    let (id, sent_id, topic) = (message.id, &message.id_text, &message.topic);
    let error = error.as_deref().unwrap_or_default();
    tracing::warn!(%consumer, %id, %sent_id, topic, tries, error, "a message waits for a retry");
    DeliveryOutcome::Retried
}

/// Stores the message in one transaction and returns its stored form; `None` where its inbox row
/// was there already.
async fn store(
    lane: &Lane,
    item: &Item,
    parked: &Parked,
    unstorable: Option<&str>,
) -> Result<Option<Parked>, StoreError> {
    let mut tx = lane.shared.store.begin(lane.consumer).await?;
    let body = async {
        let mut parked = parked.clone();
        match admit(tx.as_mut(), std::slice::from_ref(item)).await?.first() {
            None | Some(Fate::Duplicate) => return Ok(None),
            Some(Fate::New) => {}
            // An older message of its key waits by now, so this one is stored behind it. A dead
            // one stays dead.
            Some(Fate::Behind) => {
                if matches!(parked.park_as, ParkAs::Due(_)) {
                    parked.park_as = ParkAs::Behind;
                }
            }
            Some(Fate::Mismatch) => parked = id_reused(item),
            Some(Fate::OutOfTime(reason)) => parked = out_of_time(item, reason),
        }
        if let Some(why) = unstorable {
            parked = without_content(parked, why, lane.shared.options.holds());
        }
        tx.park(std::slice::from_ref(&parked)).await?;
        tx.clear_attempts(&[item.message.id]).await?;
        Ok(Some(parked))
    }
    .await;
    match body {
        Ok(Some(parked)) => {
            let committed = tx.commit().await;
            // The next try would find it done, and count a duplicate.
            let name = &lane.shared.options.name;
            if matches!(committed, Err(StoreError::CommitUnknown(_))) && verdict::say_dead(name, &parked) {
                observe::delivered(name, DeliveryOutcome::Dead, 1);
            }
            committed.map(|()| Some(parked))
        }
        nothing_stored => {
            roll_back(tx).await;
            nothing_stored
        }
    }
}

/// Keeps only identity, key, and coordinates in the broker, the texts of the identity shortened.
fn without_content(parked: Parked, why: &str, holds: bool) -> Parked {
    let Parked { mut message, attempts, error, .. } = parked;
    for text in [&mut message.id_text, &mut message.kind, &mut message.source] {
        text.truncate(text.floor_char_boundary(SHORT_MAX));
    }
    (message.payload, message.headers) = (Vec::new(), Vec::new());
    // Another producer may have given a time that is out of the range of the database.
    (message.content_type, message.trace, message.time) = (None, None, None);
    let place = &message.coordinates;
    let said = error.map(|error| format!("; before that: {error}")).unwrap_or_default();
    let error = format!("the database does not take it: {why}; its content is only in the broker, at {place}{said}");
    let park_as = ParkAs::Dead { reason: "unstorable".to_owned(), holds };
    Parked { message, park_as, attempts, error: Some(error) }
}

/// Stores as dead a message whose handler committed its transaction, and with it the inbox row;
/// tries until that works or the grace of a stop is over (R23). If the grace ends first, the log
/// line of [`Unstored`] is all that is left: a redelivery is a duplicate.
pub(super) async fn transaction_ended(lane: &mut Lane, item: Item) {
    let shared = Arc::clone(&lane.shared);
    let why = "its task was ended before the database answered".to_owned();
    let mut unstored = Unstored { consumer: &shared.options.name, message: &item.message, why: Some(why) };
    loop {
        match store_ended(&shared, lane.consumer, &item).await {
            Ok(()) => {
                unstored.why = None;
                lane.went_well();
                return lane.report(&item, End::Committed);
            }
            Err(error) => {
                unstored.why = Some(error.to_string());
                if !lane.wait_out_a_stop(&error).await {
                    return lane.report(&item, End::Left);
                }
            }
        }
    }
}

/// Tells of a message that was not stored as dead when it is dropped, also by an abort of its task.
/// This line is then the only trace of the message: a redelivery is a duplicate.
struct Unstored<'a> {
    consumer: &'a str,
    message: &'a Message,
    /// None where the message is stored.
    why: Option<String>,
}

impl Drop for Unstored<'_> {
    fn drop(&mut self) {
        let (consumer, message, Some(why)) = (self.consumer, self.message, self.why.as_deref()) else { return };
        tracing::error!(consumer, id = %message.id, sent_id = %message.id_text, topic = %message.topic, place = %message.coordinates, why, "a handler ended the transaction of this message, and the message could not be stored as dead before its lane ended: nothing else will tell of it");
    }
}

/// Stores as dead a message whose handler committed its transaction. The caller tries again after
/// an error, because the message is stored nowhere else.
async fn store_ended(shared: &Shared, consumer: ConsumerId, item: &Item) -> Result<(), StoreError> {
    let holds = shared.options.holds();
    let parked = Parked { attempts: 1, ..dead(item, verdict::ENDED, verdict::WHY_ENDED, holds) };
    let mut tx = shared.store.begin(consumer).await?;
    if let Err(error) = tx.park(&[parked]).await {
        roll_back(tx).await;
        return Err(error);
    }
    tx.commit().await?;
    verdict::ended(&shared.options.name, &item.message, holds, 1);
    Ok(())
}
