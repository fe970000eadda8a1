//! Selects the rows that a fault applies to: functions for
//! [`Faults::on_publish`](super::Faults::on_publish).

use uuid::Uuid;

use oncebox::message::OutgoingMessage;

/// Only the nth row from now on, counted from 1.
pub fn nth(n: usize) -> impl FnMut(&OutgoingMessage) -> bool + Send + 'static {
    let mut seen = 0;
    move |_| {
        seen += 1;
        seen == n
    }
}

/// Every nth row from now on.
pub fn every(n: usize) -> impl FnMut(&OutgoingMessage) -> bool + Send + 'static {
    let mut seen = 0;
    move |_| {
        seen += 1;
        seen % n.max(1) == 0
    }
}

/// The row with this id, each time it is sent.
pub fn id(id: Uuid) -> impl FnMut(&OutgoingMessage) -> bool + Send + 'static {
    move |message| message.id == id
}

/// Every row of this topic.
pub fn topic(topic: impl Into<String>) -> impl FnMut(&OutgoingMessage) -> bool + Send + 'static {
    let topic = topic.into();
    move |message| message.topic == topic
}

/// The first `times` rows that another matcher accepts.
pub fn times(
    times: usize,
    mut matcher: impl FnMut(&OutgoingMessage) -> bool + Send + 'static,
) -> impl FnMut(&OutgoingMessage) -> bool + Send + 'static {
    let mut left = times;
    move |message| {
        let met = left > 0 && matcher(message);
        left -= usize::from(met);
        met
    }
}
