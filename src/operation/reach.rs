//! Whether the store answers, known without a query for each request.
//!
//! One task of an engine asks the store for a sign of life, on a connection that no request uses,
//! so an exhausted pool is not mistaken for an outage. While the store is away, requests are
//! refused at once and do not wait for a connection; calls that already wait for the store end with
//! an error.
//!
//! Promise: an outage is known after at most [`EVERY`] plus [`SIGN_MAX`], and so is its end.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::error::StoreError;
use crate::observe::{Health, PartState};
use crate::operation::port::Keys;
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

/// Why the store is away; `None`: it answers.
type Away = Option<String>;

#[derive(Debug)]
pub(super) struct Reach {
    away: Arc<watch::Sender<Away>>,
    health: Health,
    asking: Mutex<Option<JoinHandle<()>>>,
}

impl Reach {
    pub(super) fn new(health: Health) -> Self {
        Self { away: Arc::new(watch::Sender::new(None)), health, asking: Mutex::new(None) }
    }

    /// Starts the task that asks, if there is a Tokio runtime and the task does not run yet.
    pub(super) fn attend(&self, store: &Arc<dyn Keys>) {
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        if asking.as_ref().is_none_or(JoinHandle::is_finished)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            // The store was connected to a moment ago.
            self.health.set(PART, PartState::Ready);
            *asking = Some(runtime.spawn(task::boxed(ask(
                Arc::clone(store),
                Arc::downgrade(&self.away),
                self.health.clone(),
            ))));
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

async fn ask(store: Arc<dyn Keys>, away: Weak<watch::Sender<Away>>, health: Health) {
    loop {
        let now = sign_of_life(store.as_ref()).await.err();
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

async fn sign_of_life(store: &dyn Keys) -> Result<(), String> {
    let mut sign = std::pin::pin!(store.sign_of_life());
    for _ in 0..SIGN_MAX.as_millis() / TURN.as_millis() {
        if let Ok(sign) = tokio::time::timeout(TURN, sign.as_mut()).await {
            return sign.map_err(|error| error.to_string());
        }
    }
    Err(format!("nothing is heard within {}", humantime::format_duration(SIGN_MAX)))
}
