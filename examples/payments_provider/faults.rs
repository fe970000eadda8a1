//! What it is told to do badly.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::Deserialize;

/// One way of doing it badly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fault {
    Late,
    DropBefore,
    DropAfter,
    ErrorBefore,
    ErrorAfter,
    TakeLate,
    Decline,
    InProgress,
    WrongAmount,
    RefuseKeys,
    NoQuery,
    ForgetKeys,
}

/// An order to do it badly.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Order {
    fault: Fault,
    /// How often; -1: until it is taken back.
    #[serde(default = "once")]
    times: i64,
    #[serde(default = "a_second")]
    delay_ms: u64,
}

/// The orders that stand.
#[derive(Debug, Default)]
pub(crate) struct Faults(Mutex<BTreeMap<Fault, (i64, Duration)>>);

fn once() -> i64 {
    1
}

fn a_second() -> u64 {
    1_000
}

impl Faults {
    pub(crate) fn order(&self, order: &Order) {
        self.lock().insert(order.fault, (order.times, Duration::from_millis(order.delay_ms)));
    }

    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    /// The faults of the next request, among those that concern it, each used once.
    pub(crate) fn take(&self, header: Option<&str>, concerns: impl Fn(Fault) -> bool) -> BTreeMap<Fault, Duration> {
        let mut taken = BTreeMap::new();
        if let Some(fault) =
            header.and_then(|name| serde_json::from_value(name.into()).ok()).filter(|fault| concerns(*fault))
        {
            taken.insert(fault, Duration::from_millis(a_second()));
        }
        let mut orders = self.lock();
        for (fault, (times, delay)) in orders.iter_mut().filter(|(fault, (times, _))| *times != 0 && concerns(**fault))
        {
            *times -= i64::from(*times > 0);
            taken.insert(*fault, *delay);
        }
        taken
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Fault, (i64, Duration)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
