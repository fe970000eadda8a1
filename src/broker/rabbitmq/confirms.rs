//! The task of a publishing session: it publishes rows, collects confirms and returns, and reports
//! the outcome of each row.
//!
//! Guarantees: a row is proven by an ack **and** no return (G2). Without `pipeline_per_key`, at
//! most one publish of a key is unconfirmed (R20). A return belongs to the row whose id it carries,
//! whichever confirm it came with; after a return, the confirms of that channel are held until all
//! its confirms are in (R21). After a refusal no later row of that topic or key is published until
//! the runtime knows of it. A nack ends the session (R21).
//!
//! Why returns need care: the client library keeps returned messages in one queue and attaches the
//! first of them to whichever confirm completes next. A confirm without a return is safe: the queue
//! was empty, so if its own message was returned, that return came with a confirm that completed
//! earlier, and every confirm that is complete is collected before one is believed. A confirm
//! *with* a return tells nothing about its own row. So the channel publishes nothing new until all
//! its confirms are in; then all returns are in too.
//!
//! Not here: what the runtime does about a refusal (`outbox::rules`), and how long it waits for a
//! missing confirm.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{Channel, Confirmation, Event};
use tokio::sync::mpsc;

use super::config::RabbitConfig;
use super::cuts::Cuts;
use super::error::{ACCESS_REFUSED, NOT_FOUND, classify, is_cut, reply};
use super::lanes::{LaneId, Lanes, Row};
use super::socket::Link;
use super::unsettled::Unsettled;
use super::wire;
use crate::broker::{Receipt, Refusal};
use crate::error::BrokerError;
use crate::message::{OutgoingMessage, lane_id};

/// Reply codes about the message itself if it was alone: too large, precondition, frame, syntax.
const ABOUT_THE_MESSAGE: [u16; 4] = [311, 406, 501, 502];

/// How many rows a careful session publishes one after the other. If the message at which the
/// connections were cut is further behind, a later session comes to it: what is proven before it is
/// not sent again.
const CAREFUL_ROWS: usize = 256;

/// How often the task checks the connection.
const LOOK_EVERY: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Rows {
    pub(super) rows: Vec<(u64, OutgoingMessage)>,
    /// How many times the runtime had been given outcomes when it sent these rows.
    pub(super) known: u64,
}

#[derive(Debug)]
struct InFlight {
    lane: Option<LaneId>,
    channel: usize,
    topic: String,
    id: String,
    weight: usize,
}

/// A row whose confirm came, before its outcome is reported.
#[derive(Debug)]
struct Confirmed {
    tag: u64,
    flight: InFlight,
    acked: bool,
}

#[derive(Debug)]
struct Lane {
    channel: Channel,
    in_flight: usize,
    confirmed: Vec<Confirmed>,
    /// Returned messages by id and topic, with the server's reason.
    returned: HashMap<(String, String), String>,
    failed: Vec<(u64, InFlight)>,
    error: Option<lapin::Error>,
}

pub(super) struct Confirms {
    link: Arc<Link>,
    shared: Arc<Unsettled>,
    exchange: String,
    source: String,
    window: usize,
    close_deadline: Duration,
    channels: Vec<Lane>,
    lanes: Lanes,
    in_flight: HashMap<u64, InFlight>,
    publishing: FuturesUnordered<BoxFuture<'static, (u64, lapin::Result<Confirmation>)>>,
    /// Refused topics with the number of hand-overs of outcomes before the refusal, and the reason.
    /// Rows that the runtime sent before it knew of the refusal are refused too.
    refused: HashMap<String, (u64, String)>,
    /// Keys with a refused message, and the number of hand-overs before it. Later rows of the key
    /// that the runtime sent before it knew of it are not published ([`Refusal::Behind`]).
    refused_keys: HashMap<LaneId, u64>,
    /// Set once the session is ending, with a deadline. Nothing more is published; rows in flight
    /// on channels without an error may still be proven until then.
    ending: Option<(BrokerError, Instant)>,
    /// True where the connection was cut without a word of the server.
    is_cut: bool,
    cuts: Arc<Cuts>,
    /// The number of cuts before this session began.
    cuts_before: u64,
    /// How many rows are still published with nothing else in flight.
    careful: usize,
}

type Done = (u64, lapin::Result<Confirmation>);

impl Confirms {
    pub(super) async fn open(
        config: &RabbitConfig,
        link: Arc<Link>,
        shared: Arc<Unsettled>,
        cuts: Arc<Cuts>,
    ) -> Result<Self, BrokerError> {
        let mut channels = Vec::with_capacity(config.channels);
        for _ in 0..config.channels {
            let channel = link.channel().await?;
            let select = channel.confirm_select(ConfirmSelectOptions::default());
            link.ask("confirm.select", select).await?;
            let (confirmed, failed, returned) = (Vec::new(), Vec::new(), HashMap::new());
            channels.push(Lane { channel, in_flight: 0, confirmed, returned, failed, error: None });
        }
        let (cuts_before, one_by_one) = cuts.begin();
        Ok(Self {
            link,
            shared,
            exchange: config.exchange.clone(),
            source: config.source.clone(),
            window: config.publish_window,
            close_deadline: config.close_deadline,
            lanes: Lanes::new(channels.len(), config.pipeline_per_key),
            channels,
            in_flight: HashMap::new(),
            publishing: FuturesUnordered::new(),
            refused: HashMap::new(),
            refused_keys: HashMap::new(),
            ending: None,
            is_cut: false,
            careful: if one_by_one { CAREFUL_ROWS } else { 0 },
            cuts,
            cuts_before,
        })
    }

    /// Works until the session ends, or the publisher is dropped.
    pub(super) async fn run(mut self, mut rows: mpsc::UnboundedReceiver<Rows>) {
        // Ends the session also after a panic, so that the publisher does not wait for ever.
        let ended = EndOnDrop(Arc::clone(&self.shared));
        let mut events = self.link.connection().events_listener().boxed();
        let mut tick = tokio::time::interval(LOOK_EVERY);
        loop {
            self.publish();
            if self.finished() {
                break;
            }
            // Cancel safety: each branch is a channel, a stream or a timer, which loses nothing
            // when another branch wins.
            tokio::select! {
                more = rows.recv() => match more {
                    Some(more) => self.take(more),
                    None => break,
                },
                Some(done) = self.publishing.next() => {
                    let mut all = vec![done];
                    all.extend(take_ready(&mut self.publishing));
                    self.collect(all);
                }
                Some(event) = events.next() => self.heard(event),
                _ = tick.tick() => self.look_at_the_connection(),
            }
        }
        if let Some((error, _)) = self.ending.take() {
            self.shared.end(self.cause(error));
        }
        drop(ended);
    }

    fn finished(&self) -> bool {
        self.ending.as_ref().is_some_and(|(_, until)| self.publishing.is_empty() || Instant::now() >= *until)
    }

    /// Ends the session for this reason. Rows in flight on channels without an error may be proven
    /// until the close deadline.
    fn end(&mut self, error: BrokerError) {
        let until = Instant::now() + self.close_deadline;
        self.ending.get_or_insert((error, until));
    }

    /// Why the session ended. A connection that is cut again and again at the same message, and
    /// works in between, is not that of a server that is away: the runtime is to look for the
    /// message.
    fn cause(&self, error: BrokerError) -> BrokerError {
        let BrokerError::Unavailable(why) = error else { return error };
        if !self.is_cut {
            self.cuts.forget();
            return BrokerError::Unavailable(why);
        }
        let failed = self.channels.iter().flat_map(|lane| lane.failed.iter().map(|(_, flight)| flight));
        let unconfirmed = self.in_flight.values().chain(failed).map(|flight| flight.id.clone()).collect();
        match self.cuts.count(unconfirmed) {
            None => BrokerError::Unavailable(why),
            Some(times) => BrokerError::Session(format!(
                "{times} connections in a row were cut while the same message waited for its confirm: {why}"
            )),
        }
    }

    fn take(&mut self, Rows { rows, known }: Rows) {
        self.refused.retain(|_, (handovers, _)| known <= *handovers);
        self.refused_keys.retain(|_, handovers| known <= *handovers);
        for (tag, message) in rows {
            if let Some((_, why)) = self.refused.get(&message.topic) {
                let why = Refusal::Destination(why.clone());
                self.say(tag, message.weight(), Err(why));
            } else if self.stands_behind(&message) {
                self.say(tag, message.weight(), Err(behind()));
            } else {
                self.lanes.add(tag, message);
            }
        }
        self.shared.notify();
    }

    fn stands_behind(&self, message: &OutgoingMessage) -> bool {
        let lane = |key: &str| lane_id(&message.topic, key.as_bytes());
        !self.refused_keys.is_empty()
            && message.key.as_deref().is_some_and(|key| self.refused_keys.contains_key(&lane(key)))
    }

    fn publish(&mut self) {
        if self.ending.is_some() || self.shared.lock().blocked.is_some() {
            return;
        }
        // One row at a time: all before it are proven by then, so if the connection is cut, it is
        // at this message.
        while self.careful > 0 && self.in_flight.is_empty() {
            let Some(row) = self.lanes.next_in_order() else { return };
            self.careful -= 1;
            self.publish_row(row);
        }
        if self.careful > 0 {
            return;
        }
        let mut idle = 0;
        let mut at = 0;
        // Takes one row of each channel in turn, so that each gets its share, until no channel has
        // a row or the window is full.
        while idle < self.channels.len() && self.in_flight.len() < self.window && self.ending.is_none() {
            let open = self.channels[at].returned.is_empty() && self.channels[at].error.is_none();
            match open.then(|| self.lanes.next(at)).flatten() {
                Some(row) => {
                    idle = 0;
                    self.publish_row(row);
                }
                None => idle += 1,
            }
            at = (at + 1) % self.channels.len();
        }
    }

    fn publish_row(&mut self, row: Row) {
        let Row { tag, lane, channel: at, message } = row;
        let weight = message.weight();
        let ready = wire::properties(&message, &self.source)
            .and_then(|properties| Ok((properties, wire::short("the topic", &message.topic)?)));
        let (properties, routing_key) = match ready {
            Ok(ready) => ready,
            Err(why) => {
                self.refuse_message(tag, weight, lane, why);
                self.shared.notify();
                return;
            }
        };
        let (channel, exchange) = (self.channels[at].channel.clone(), self.exchange.as_str().into());
        let OutgoingMessage { id, topic, payload, .. } = message;
        let flight = InFlight { lane, channel: at, topic, id: id.to_string(), weight };
        self.in_flight.insert(tag, flight);
        self.channels[at].in_flight += 1;
        self.publishing.push(
            async move {
                let mandatory = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
                let sent = channel.basic_publish(exchange, routing_key, mandatory, &payload, properties).await;
                drop(payload);
                match sent {
                    Ok(confirm) => (tag, confirm.await),
                    Err(error) => (tag, Err(error)),
                }
            }
            .boxed(),
        );
    }

    /// Refuses a message before it is sent, and with it the later rows of its key.
    fn refuse_message(&mut self, tag: u64, weight: usize, lane: Option<LaneId>, why: String) {
        let taken = lane.map(|lane| self.lanes.take_key(lane)).unwrap_or_default();
        // One lock for all of them, as in `refuse`.
        let mut state = self.shared.lock();
        state.settle(tag, weight, Err(Refusal::Message(why)));
        for row in taken {
            state.settle(row.tag, row.message.weight(), Err(behind()));
        }
        if let Some(lane) = lane {
            self.refused_keys.insert(lane, state.handovers);
        }
    }

    fn collect(&mut self, done: Vec<Done>) {
        for (tag, result) in done {
            let Some(flight) = self.in_flight.remove(&tag) else { continue };
            let lane = &mut self.channels[flight.channel];
            lane.in_flight -= 1;
            let (acked, returned) = match result {
                Ok(Confirmation::Ack(returned)) => (true, returned),
                Ok(Confirmation::Nack(returned)) => (false, returned),
                Ok(Confirmation::NotRequested) => (false, None),
                Err(error) => {
                    // A reply of the server tells more than "the channel is closed".
                    if lane.error.as_ref().is_none_or(|known| reply(known).is_none()) {
                        lane.error = Some(error);
                    }
                    lane.failed.push((tag, flight));
                    continue;
                }
            };
            if let Some(message) = returned {
                let id = message.properties.message_id().as_ref().map(ToString::to_string).unwrap_or_default();
                let why = format!("{} {}", message.reply_code, message.reply_text);
                lane.returned.insert((id, message.routing_key.to_string()), why);
            }
            lane.confirmed.push(Confirmed { tag, flight, acked });
        }
        for at in 0..self.channels.len() {
            let lane = &self.channels[at];
            if lane.error.is_some() {
                self.fail(at);
            } else if lane.returned.is_empty() || lane.in_flight == 0 {
                self.believe(at);
            }
        }
        self.shared.notify();
    }

    /// Reports the outcomes of the confirmed rows of a channel, once all its returns are known.
    fn believe(&mut self, at: usize) {
        let returned = std::mem::take(&mut self.channels[at].returned);
        for Confirmed { tag, flight, acked } in std::mem::take(&mut self.channels[at].confirmed) {
            let InFlight { lane, topic, id, weight, .. } = flight;
            if acked {
                self.cuts.confirmed(&id, self.cuts_before);
            }
            let place = (id, topic);
            if let Some(why) = returned.get(&place) {
                let why = format!(
                    "no queue is bound to the exchange `{}` for topic `{}` ({why}); start its consumer (one that runs binds its \
                     queue again within two minutes), or bind a queue",
                    self.exchange, place.1
                );
                self.refuse(tag, weight, &place.1, &why);
                self.lanes.settled(lane);
            } else if acked {
                self.say(tag, weight, Ok(Receipt::Confirm));
                self.shared.lock().has_a_route(&place.1);
                self.lanes.settled(lane);
            } else {
                let why =
                    format!("the server answered basic.nack to a message of topic `{}`; is its queue full?", place.1);
                self.say(tag, weight, Err(Refusal::Session(why.clone())));
                self.end(BrokerError::Session(why));
            }
        }
    }

    /// Handles a closed channel: ends the session, and reports what the reply says about its rows.
    fn fail(&mut self, at: usize) {
        let Some(error) = &self.channels[at].error else { return };
        let (cause, reply) = (classify(error), reply(error));
        self.is_cut |= is_cut(error);
        self.end(cause);
        if self.channels[at].in_flight > 0 {
            return;
        }
        let Some((code, text)) = reply else { return };
        let failed = std::mem::take(&mut self.channels[at].failed);
        // The server may close the whole connection because of one message on any channel.
        let others = self.channels.iter().any(|lane| !lane.failed.is_empty() || !lane.confirmed.is_empty());
        let alone = failed.len() == 1 && self.in_flight.is_empty() && !others;
        for (tag, InFlight { topic, weight, .. }) in failed {
            match code {
                NOT_FOUND => self.refuse(tag, weight, &topic, &text),
                // Access to the exchange is denied, or to one topic, which the text then names.
                ACCESS_REFUSED
                    if alone || !text.contains(" topic '") || text.contains(&format!(" topic '{topic}'")) =>
                {
                    self.refuse(tag, weight, &topic, &text);
                }
                _ if alone && ABOUT_THE_MESSAGE.contains(&code) => {
                    self.say(tag, weight, Err(Refusal::Message(text.clone())));
                }
                _ => {}
            }
        }
    }

    /// Refuses a row and all unpublished rows of its topic: the topic cannot be reached.
    fn refuse(&mut self, tag: u64, weight: usize, topic: &str, why: &str) {
        let behind = self.lanes.take_topic(topic).into_iter().map(|row| (row.tag, row.message.weight()));
        // One lock for all of them: after a hand-over in between, the runtime would seem to know.
        let mut state = self.shared.lock();
        for (tag, weight) in std::iter::once((tag, weight)).chain(behind) {
            state.settle(tag, weight, Err(Refusal::Destination(why.to_owned())));
        }
        state.has_no_route(topic, why);
        self.refused.insert(topic.to_owned(), (state.handovers, why.to_owned()));
    }

    fn say(&self, tag: u64, weight: usize, outcome: Result<Receipt, Refusal>) {
        self.shared.lock().settle(tag, weight, outcome);
    }

    fn heard(&mut self, event: Event) {
        match event {
            Event::ConnectionBlocked(why) => {
                tracing::warn!(%why, "rabbitmq takes no messages for now");
                self.shared.lock().blocked = Some(why);
            }
            Event::ConnectionUnblocked => {
                tracing::info!("rabbitmq takes messages again");
                self.shared.lock().blocked = None;
            }
            // An error of a channel is handled with its confirms, which tell the affected rows, or
            // it is the answer to a question about the exchange.
            Event::Error(error) if !error.is_amqp_soft_error() => {
                self.is_cut |= is_cut(&error);
                self.end(classify(&error));
            }
            _ => {}
        }
        self.shared.notify();
    }

    /// Ends the session with its connection, where nothing else reports the end: while no confirm
    /// is due, and while the server is blocked. While it is blocked the client library writes
    /// nothing: it cannot answer a close of the server, and without that answer it reports no end.
    fn look_at_the_connection(&mut self) {
        let is_blocked = self.shared.lock().blocked.is_some();
        if self.ending.is_none()
            && (is_blocked || self.publishing.is_empty())
            && !self.link.connection().status().connected()
        {
            self.end(BrokerError::Unavailable("the connection to RabbitMQ has ended".to_owned()));
        }
    }
}

fn behind() -> Refusal {
    Refusal::Behind("an earlier message of its key was refused".to_owned())
}

/// Takes the results of all futures that are ready. The set returns `Pending` although some are
/// ready where others were woken while it polled them, so that other tasks get a turn; it then
/// wakes its own task. So it is polled again until it returns `Pending` without that. This ends,
/// because a confirm wakes the set only when the client library has news of it.
fn take_ready<F: Future>(set: &mut FuturesUnordered<F>) -> Vec<F::Output> {
    let woken = Arc::new(Woken(AtomicBool::new(false)));
    let waker = Waker::from(Arc::clone(&woken));
    let mut ready = Vec::new();
    loop {
        match set.poll_next_unpin(&mut Context::from_waker(&waker)) {
            Poll::Ready(Some(result)) => ready.push(result),
            Poll::Pending if woken.0.swap(false, Ordering::SeqCst) => {}
            Poll::Ready(None) | Poll::Pending => return ready,
        }
    }
}

/// Remembers that a task was woken.
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

struct EndOnDrop(Arc<Unsettled>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end(BrokerError::Session("the publishing session has ended".to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A future that is ready when it is polled for the second time, and wakes itself before.
    fn woken_while_polled(result: u32) -> BoxFuture<'static, u32> {
        let mut polled = false;
        std::future::poll_fn(move |context| {
            if std::mem::replace(&mut polled, true) {
                return Poll::Ready(result);
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .boxed()
    }

    /// It fails where collecting ends when the set says `Pending` for the first time: the first
    /// confirm is then believed, and its own return, which came with the last one, is not seen.
    #[test]
    fn g2_r21_every_confirm_that_is_complete_is_collected_also_where_the_set_yields() {
        let ready = |result: u32| std::future::ready(result).boxed();
        let mut set: FuturesUnordered<_> =
            [ready(0), woken_while_polled(1), woken_while_polled(2), ready(3)].into_iter().collect();
        set.push(std::future::pending::<u32>().boxed());
        let mut taken = take_ready(&mut set);
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2, 3]);
        assert_eq!(set.len(), 1);
    }
}
