//! Taking charges: once for each key, with the faults that were ordered.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

use crate::faults::{Fault, Faults};
use crate::ledger::{Ledger, Request};

/// The provider.
#[derive(Debug)]
pub(crate) struct Provider {
    pub(crate) faults: Faults,
    ledger: Mutex<Ledger>,
    in_progress: Mutex<BTreeSet<String>>,
}

/// How a request ends.
#[derive(Debug)]
pub(crate) enum End {
    Answer(u16, Value),
    /// The connection ends without a word.
    Drop,
}

/// A key whose request runs.
struct Turn<'a>(&'a Provider, &'a str);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.running().remove(self.1);
    }
}

fn refused(status: u16, code: &str) -> End {
    End::Answer(status, json!({ "code": code }))
}

impl Provider {
    pub(crate) fn open(data: &Path) -> std::io::Result<Self> {
        Ok(Self { faults: Faults::default(), ledger: Mutex::new(Ledger::open(data)?), in_progress: Mutex::default() })
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.in_progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A charge, with these faults.
    pub(crate) async fn charge(
        self: Arc<Self>,
        key: String,
        request: Request,
        faults: BTreeMap<Fault, Duration>,
    ) -> End {
        let has = |fault| faults.contains_key(&fault);
        if let Some(delay) = faults.get(&Fault::TakeLate).copied() {
            tokio::spawn(async move {
                tokio::time::sleep(delay).await;
                let _ = self.book(&key, request, &faults);
            });
            return End::Drop;
        }
        if has(Fault::DropBefore) {
            return End::Drop;
        }
        if has(Fault::ErrorBefore) {
            return refused(500, "internal");
        }
        if has(Fault::RefuseKeys) {
            return refused(400, "key_refused");
        }
        if has(Fault::InProgress) || !self.running().insert(key.clone()) {
            return refused(409, "in_progress");
        }
        let turn = Turn(&self, &key);
        let end = self.book(&key, request, &faults);
        if let Some(delay) = faults.get(&Fault::Late) {
            tokio::time::sleep(*delay).await;
        }
        drop(turn);
        match end {
            _ if has(Fault::DropAfter) => End::Drop,
            _ if has(Fault::ErrorAfter) => refused(500, "internal"),
            Ok(end) => end,
            Err(error) => End::Answer(500, json!({ "code": "internal", "detail": error.to_string() })),
        }
    }

    /// Takes it, unless the key is known: then what came of it the first time.
    fn book(&self, key: &str, request: Request, faults: &BTreeMap<Fault, Duration>) -> std::io::Result<End> {
        let mut ledger = self.ledger();
        if let Some(entry) = ledger.first(key).filter(|_| !faults.contains_key(&Fault::ForgetKeys)) {
            return Ok(match &entry.charge {
                _ if entry.request != request => refused(409, "key_reused"),
                Some(charge) => End::Answer(201, json!(charge)),
                None => refused(402, "card_declined"),
            });
        }
        if faults.contains_key(&Fault::Decline) {
            ledger.declines(key, request)?;
            return Ok(refused(402, "card_declined"));
        }
        let more = i64::from(faults.contains_key(&Fault::WrongAmount));
        Ok(End::Answer(201, json!(ledger.takes(key, request, more)?)))
    }
}
