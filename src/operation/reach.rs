//! Whether the store answers, known without a query for each request.
//!
//! One task of an engine asks the store for a sign of life, on a connection that no request uses,
//! so an exhausted pool is not mistaken for an outage. While the store is away, requests are
//! refused at once and do not wait for a connection; calls that already wait for the store end with
//! an error.
//!
//! A store without tables of oncebox gives a sign of life all the same. A request that finds them
//! missing says so here ([`Reach::failed`]). The health shows it until the task can read the key of
//! that request, so the end is seen without another request.
//!
//! Promise: an outage is known after at most [`EVERY`] plus [`SIGN_MAX`], and so is its end; while
//! tables are missing, a [`SIGN_MAX`] later.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::error::StoreError;
use crate::observe::{Health, PartState, Trouble};
use crate::operation::port::Keys;
use crate::operation::rules::Identity;
use crate::task;

const EVERY: Duration = Duration::from_millis(250);
/// How long a sign of life may take, counted in turns of this process, so that a pause of the whole
/// machine is not mistaken for a silent store.
const SIGN_MAX: Duration = Duration::from_secs(1);
const TURN: Duration = Duration::from_millis(50);
/// How long the store must be away before a request stops waiting for a task that needs it. A task
/// that has not begun reports the outage itself within this time: it is longer than any pause
/// between two tries of a begin.
const GRACE: Duration = Duration::from_millis(500);
const PART: &str = "operations";
const SCHEMA: &str = "schema";

/// Why the store is away; `None`: it answers.
type Away = Option<String>;

/// The key of a request that found tables of oncebox missing; `None`: they are there.
type Missing = Arc<Mutex<Option<Identity>>>;

#[derive(Debug)]
pub(super) struct Reach {
    away: Arc<watch::Sender<Away>>,
    missing: Missing,
    health: Health,
    asking: Mutex<Option<JoinHandle<()>>>,
}

impl Reach {
    pub(super) fn new(health: Health) -> Self {
        let away = Arc::new(watch::Sender::new(None));
        Self { away, missing: Missing::default(), health, asking: Mutex::new(None) }
    }

    /// Starts the task that asks, if there is a Tokio runtime and the task does not run yet.
    pub(super) fn attend(&self, store: &Arc<dyn Keys>) {
        let mut asking = self.asking.lock();
        if asking.as_ref().is_none_or(JoinHandle::is_finished)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            // The store was connected to a moment ago.
            self.health.set(PART, PartState::Ready);
            *asking = Some(runtime.spawn(task::boxed(ask(
                Arc::clone(store),
                Arc::downgrade(&self.away),
                Arc::clone(&self.missing),
                self.health.clone(),
            ))));
        }
    }

    /// Notes that the record of this key could not be read. Where tables of oncebox are missing,
    /// the health shows it.
    pub(super) fn failed(&self, identity: &Identity, error: &StoreError) {
        if error.is_schema_missing() {
            self.health.trouble(PART, SCHEMA, Some(Trouble::Stops(error.to_string())));
            *self.missing.lock() = Some(identity.clone());
        }
    }

    /// Runs a call as long as the store answers; [`StoreError::Unavailable`] if it does not, or
    /// stops before the call ends. The call may be dropped at any moment.
    pub(super) async fn within<T>(&self, call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        let mut away = self.away.subscribe();
        if let Some(why) = away.borrow().as_deref() {
            return Err(gone(why));
        }
        tokio::select! {
            biased;
            done = call => done,
            why = lost(&mut away) => Err(gone(&why)),
        }
    }

    /// Returns when the store has been away for [`GRACE`] without coming back.
    pub(super) async fn lost(&self) {
        let mut away = self.away.subscribe();
        loop {
            lost(&mut away).await;
            tokio::select! {
                () = tokio::time::sleep(GRACE) => return,
                _ = away.wait_for(Option::is_none) => {}
            }
        }
    }
}

async fn lost(away: &mut watch::Receiver<Away>) -> String {
    let why = away.wait_for(Option::is_some).await.map(|why| why.clone().unwrap_or_default());
    match why {
        Ok(why) => why,
        // The engine is dropped, so no outage will be reported any more.
        Err(_) => std::future::pending().await,
    }
}

fn gone(why: &str) -> StoreError {
    let why = format!("it gives no sign of life: {why}");
    StoreError::Unavailable(sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::NotConnected, why)))
}

async fn ask(store: Arc<dyn Keys>, away: Weak<watch::Sender<Away>>, missing: Missing, health: Health) {
    loop {
        let now = in_time(store.sign_of_life()).await.err();
        let unread = missing.lock().clone();
        if let Some(identity) = unread
            && in_time(store.find(&identity)).await.is_ok()
        {
            *missing.lock() = None;
            health.trouble(PART, SCHEMA, None);
        }
        let Some(away) = away.upgrade() else { return };
        health.set(PART, now.clone().map_or(PartState::Ready, PartState::Waiting));
        away.send_if_modified(|was| {
            let turned = was.is_some() != now.is_some();
            *was = now;
            turned
        });
        drop(away);
        tokio::time::sleep(EVERY).await;
    }
}

/// Runs a call of the store for at most [`SIGN_MAX`].
async fn in_time<T>(call: impl Future<Output = Result<T, StoreError>>) -> Result<T, String> {
    let mut call = std::pin::pin!(call);
    for _ in 0..SIGN_MAX.as_millis() / TURN.as_millis() {
        if let Ok(done) = tokio::time::timeout(TURN, call.as_mut()).await {
            return done.map_err(|error| error.to_string());
        }
    }
    Err(format!("nothing is heard within {}", humantime::format_duration(SIGN_MAX)))
}
