//! Trials of blocked topics, beside the session: does a topic exist, is its first row taken.
//!
//! Promises: a trial costs the session only the read of one row for each topic that is tried. It
//! has its own publisher and deadline, so that nothing else waits for a topic that neither takes
//! nor refuses. Topics that were silent are tried apart from the others, and ever more rarely. The
//! row of a trial is the first of its topic, and no later one is sent before it is proven, so that
//! the order holds.
//!
//! A trial that is dropped leaves the outcome of its row unknown, like a session does with its rows
//! in flight: the row is sent again, in the same place.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::options::RelayOptions;
use crate::broker::{Broker, Publisher, Refusal, Settled, TopicState};
use crate::error::BrokerError;
use crate::message::OutgoingMessage;
use crate::outbox::rules::isolate::ENDS_ALONE_BEFORE_DEAD;
use crate::task;
use crate::time::retry::pause;

/// The longest pause between two trials of a topic that was silent, unless `probe` is longer.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// How long each of the two steps of a trial may take: to ask for the topic, and to send its row.
/// It is long enough for a broker that is slow for all topics.
const TRIAL_MAX: Duration = Duration::from_secs(10);
/// After so many failed trials of every topic, while none takes messages, the relay is not ready.
const TRIES_SHOWN: u32 = 2;
/// How many topics a session creates itself. If more are missing, their rows are held and the
/// trials create the topics: a Kafka broker that has just created hundreds takes messages late, and
/// everything would wait.
const MADE_AT_ONCE: usize = 8;
/// How long a session waits for topics to be created; all other topics wait too. After it the rows
/// are held, and the trials find out.
const MADE_MAX: Duration = Duration::from_secs(2);
/// A publisher for trials that was not used for so long is closed.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// A relay that ends when its outbox is empty waits for a blocked topic until a trial had an
/// answer, or so many trials of it were lost.
const LOST_MAX: u32 = 3;

/// When each blocked topic is tried next. It outlives a session, in memory only.
#[derive(Debug, Clone, Default)]
pub(super) struct Pauses(HashMap<String, Pause>);

#[derive(Debug, Clone)]
struct Pause {
    next: Instant,
    /// Trials in a row that did not open the topic.
    tries: u32,
    /// Trials in a row that got no answer.
    silent: u32,
    /// Trials whose session was lost while a row of this topic was alone in it.
    lost: u32,
    reason: String,
}

impl Pauses {
    fn of(&mut self, topic: &str) -> &mut Pause {
        let none = || Pause { next: Instant::now(), tries: 0, silent: 0, lost: 0, reason: String::new() };
        self.0.entry(topic.to_owned()).or_insert_with(none)
    }

    fn failed(&mut self, topic: &str, reason: &str, was_silent: bool, every: Duration) {
        let known = self.of(topic);
        known.lost = 0;
        // Without a reason the topic existed and had no row to try: that is no failure.
        if !reason.is_empty() {
            reason.clone_into(&mut known.reason);
            known.tries = known.tries.saturating_add(1);
        }
        known.silent = if was_silent { known.silent.saturating_add(1) } else { 0 };
        let grows = known.silent > 1;
        let wait = if grows { pause(every, PAUSE_MAX.max(every), known.silent, fastrand::f64()) } else { every };
        known.next = Instant::now() + wait;
    }

    /// Notes a trial that told nothing about the topic, because its session was lost. Returns true
    /// where the row must be the cause.
    fn lost(&mut self, topic: &str, reason: &str, was_alone: bool, every: Duration) -> bool {
        let known = self.of(topic);
        reason.clone_into(&mut known.reason);
        known.next = Instant::now() + every;
        known.tries = known.tries.saturating_add(1);
        known.lost += u32::from(was_alone);
        known.lost >= ENDS_ALONE_BEFORE_DEAD
    }

    /// Forgets topics that are not blocked any more.
    pub(super) fn keep(&mut self, blocked: &HashSet<&str>) {
        self.0.retain(|topic, _| blocked.contains(topic.as_str()));
    }

    /// If every blocked topic has failed often enough, returns why the first of them is blocked.
    pub(super) fn all_in_vain(&self, blocked: &HashSet<&str>) -> Option<String> {
        let in_vain = |topic: &&str| self.0.get(*topic).is_some_and(|pause| pause.tries >= TRIES_SHOWN);
        let first = blocked.iter().min()?;
        let reason = &self.0.get(*first)?.reason;
        blocked.iter().all(in_vain).then(|| format!("`{first}`: {reason}"))
    }

    fn is_due(&self, topic: &str, now: Instant) -> bool {
        self.0.get(topic).is_none_or(|pause| pause.next <= now)
    }

    fn was_silent(&self, topic: &str) -> bool {
        self.0.get(topic).is_some_and(|pause| pause.silent > 0)
    }
}

#[derive(Debug)]
pub(super) enum TrialResult {
    /// These topics exist. [`Trials::give`] must be called with their first rows.
    There(Vec<String>),
    /// The row was taken, so the topic is open.
    Taken { topic: String, position: i64 },
    /// The broker refused the row itself, or the row ends sessions. The topic is open, and the row
    /// must be sent alone.
    Message { topic: String, position: i64 },
    /// The topic stays blocked.
    Blocked { topic: String, reason: String },
}

#[derive(Debug)]
pub(super) struct Trials {
    /// The lane for topics that answer, and the lane for topics that were silent last time.
    lanes: [Lane; 2],
    broker: Arc<dyn Broker>,
    declare: bool,
    every: Duration,
    answers: Answers,
    found: mpsc::UnboundedReceiver<(usize, Answer)>,
    /// Received and not yet handled.
    heard: VecDeque<(usize, Answer)>,
    /// For each blocked topic, how many of its trials in this session were lost; [`LOST_MAX`] once
    /// a trial has told something.
    tried: HashMap<String, u32>,
}

#[derive(Debug)]
struct Lane {
    orders: mpsc::UnboundedSender<Order>,
    /// Topics of the current round.
    under_way: HashSet<String>,
    /// Rows that were given to the current round.
    rows: HashSet<i64>,
    /// Most topics of a round. It is halved after a round that was lost, so that the row that ends
    /// sessions, or the topic that the broker does not answer for, is found.
    width: usize,
    /// Whether the session of this round was lost, or was silent before a row was sent.
    was_lost: bool,
    task: JoinHandle<()>,
}

impl Lane {
    fn start(lane: usize, broker: &Arc<dyn Broker>, declare: bool, answers: &Answers) -> Self {
        let (orders, received) = mpsc::unbounded_channel();
        let (broker, answers) = (Arc::clone(broker), answers.clone());
        let trier = Trier { broker, declare, publisher: None, next_tag: 0, lane, answers };
        let task = task::spawn(trier.run(received));
        let (under_way, rows) = (HashSet::new(), HashSet::new());
        Self { orders, under_way, rows, width: usize::MAX, was_lost: false, task }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Debug)]
enum Order {
    Ask(Vec<String>),
    Send(Vec<(i64, OutgoingMessage)>),
}

/// What the task of a lane tells. `Over` ends its round: a topic of the round without an answer had
/// no row in it.
#[derive(Debug)]
enum Answer {
    There(Vec<String>),
    Said { topic: String, position: Option<i64>, said: Said },
    Over,
}

#[derive(Debug, Clone)]
enum Said {
    /// The broker took the row at this position, or refused it for what it is.
    Taken(i64),
    Message(i64),
    Blocked(String),
    Silent(String),
    /// The session was lost. `alone`: no other row was in it.
    Lost {
        alone: bool,
        why: String,
    },
}

impl Said {
    /// No answer in time. A broker that says that it takes nothing at all makes no topic silent.
    fn nothing(blocked: Option<String>, silent: String) -> Self {
        blocked.map_or(Self::Silent(silent), |why| Self::Blocked(format!("the broker is blocked: {why}")))
    }
}

impl Trials {
    pub(super) fn new(broker: &Arc<dyn Broker>, options: &RelayOptions) -> Self {
        let (declare, every) = (options.declare_topics, options.probe);
        let (answers, found) = mpsc::unbounded_channel();
        let lanes = [0, 1].map(|number| Lane::start(number, broker, declare, &answers));
        let (heard, tried) = (VecDeque::new(), HashMap::new());
        Self { lanes, broker: Arc::clone(broker), declare, every, answers, found, heard, tried }
    }

    /// Restarts a lane whose task has ended, which means a panic. That tells nothing about its
    /// topics: they are tried again.
    fn mend(&mut self, number: usize, pauses: &mut Pauses) {
        // Answers that the task gave before it ended are handled first.
        if !self.lanes[number].task.is_finished() || !self.heard.is_empty() || !self.found.is_empty() {
            return;
        }
        let topics = std::mem::take(&mut self.lanes[number].under_way);
        let why = "the trials of blocked topics panicked; restarting";
        tracing::error!(topics = topics.len(), "{why}");
        topics.iter().for_each(|topic| _ = pauses.lost(topic, why, false, self.every));
        self.lanes[number] = Lane::start(number, &self.broker, self.declare, &self.answers);
        self.lanes[number].width = (topics.len() / 2).max(1);
        topics.into_iter().for_each(|topic| self.was_lost(topic));
    }

    /// A trial whose session was lost tells nothing about its topic.
    fn was_lost(&mut self, topic: String) {
        *self.tried.entry(topic).or_default() += 1;
    }

    /// Whether a trial of this session has told something about this topic, or several were lost.
    pub(super) fn was_tried(&self, topic: &str) -> bool {
        self.tried.get(topic).is_some_and(|lost| *lost >= LOST_MAX)
    }

    /// Starts a round with the topics that are due, in each lane that has none running.
    pub(super) fn begin(&mut self, blocked: &HashSet<&str>, is_open: impl Fn(&str) -> bool, pauses: &mut Pauses) {
        for number in 0..self.lanes.len() {
            self.mend(number, pauses);
        }
        self.tried.retain(|topic, _| blocked.contains(topic.as_str()));
        let now = Instant::now();
        for number in 0..self.lanes.len() {
            if !self.lanes[number].under_way.is_empty() {
                continue;
            }
            let due = |topic: &&str| {
                !is_open(topic)
                    && pauses.is_due(topic, now)
                    && usize::from(pauses.was_silent(topic)) == number
                    && !self.lanes.iter().any(|lane| lane.under_way.contains(*topic))
            };
            let due = blocked.iter().copied().filter(due).take(self.lanes[number].width);
            let topics: Vec<String> = due.map(str::to_owned).collect();
            if topics.is_empty() {
                continue;
            }
            let lane = &mut self.lanes[number];
            lane.under_way.extend(topics.iter().cloned());
            // Sending fails only if the task has ended: `mend` then tries the topics again.
            let _ = lane.orders.send(Order::Ask(topics));
        }
    }

    /// Gives a lane the first rows of topics that exist; one without a row is tried another time.
    pub(super) fn give(&mut self, lane: usize, rows: Vec<(i64, OutgoingMessage)>) {
        self.lanes[lane].rows.extend(rows.iter().map(|(position, _)| *position));
        let _ = self.lanes[lane].orders.send(Order::Send(rows));
    }

    /// Whether a trial that is not over has this row: the broker may take it yet.
    pub(super) fn has(&self, position: i64) -> bool {
        self.lanes.iter().any(|lane| lane.rows.contains(&position))
    }

    /// Waits until a trial has an answer.
    ///
    /// # Cancel safety
    /// Safe: an answer that was received is kept.
    pub(super) async fn answered(&mut self) {
        match self.found.recv().await {
            Some(answer) => self.heard.push_back(answer),
            // The lanes' tasks have ended; they do so with the session.
            None => std::future::pending().await,
        }
    }

    /// Takes the next result without waiting, with the number of its lane.
    pub(super) fn found(&mut self, pauses: &mut Pauses) -> Option<(usize, TrialResult)> {
        let every = self.every;
        while let Some((lane, answer)) = self.heard.pop_front().or_else(|| self.found.try_recv().ok()) {
            let (topic, position, said) = match answer {
                Answer::There(topics) => return Some((lane, TrialResult::There(topics))),
                Answer::Over => {
                    let round = &mut self.lanes[lane];
                    let had_rows = !round.rows.is_empty();
                    round.rows.clear();
                    let topics = round.under_way.len();
                    let was_lost = std::mem::take(&mut round.was_lost);
                    round.width = if was_lost { (topics / 2).max(1) } else { round.width.saturating_mul(2) };
                    for topic in self.lanes[lane].under_way.drain() {
                        // Nothing was said of it. The rows of the round may have left no room for
                        // its own: it is due at once, before those topics are due again. In a round
                        // without rows it had none to try.
                        if !had_rows && pauses.is_due(&topic, Instant::now()) {
                            pauses.failed(&topic, "", false, every);
                        }
                    }
                    continue;
                }
                Answer::Said { topic, position, said } => (topic, position, said),
            };
            match &said {
                Said::Lost { .. } => self.was_lost(topic.clone()),
                _ => _ = self.tried.insert(topic.clone(), LOST_MAX),
            }
            let found = match said {
                Said::Taken(position) => TrialResult::Taken { topic, position },
                Said::Message(position) => TrialResult::Message { topic, position },
                Said::Lost { alone, why } => {
                    self.lanes[lane].was_lost = true;
                    let reason = format!("its trial got no answer: {why}");
                    let by_the_row = pauses.lost(&topic, &reason, alone, every);
                    match position.filter(|_| by_the_row) {
                        Some(position) => TrialResult::Message { topic, position },
                        None => TrialResult::Blocked { topic, reason },
                    }
                }
                Said::Blocked(reason) => {
                    pauses.failed(&topic, &reason, false, every);
                    TrialResult::Blocked { topic, reason }
                }
                Said::Silent(reason) => {
                    // Before a row was sent, the silence may be that of any topic of the round.
                    self.lanes[lane].was_lost |= position.is_none();
                    pauses.failed(&topic, &reason, true, every);
                    TrialResult::Blocked { topic, reason }
                }
            };
            return Some((lane, found));
        }
        None
    }
}

type Answers = mpsc::UnboundedSender<(usize, Answer)>;

struct Trier {
    broker: Arc<dyn Broker>,
    declare: bool,
    publisher: Option<Box<dyn Publisher>>,
    next_tag: u64,
    lane: usize,
    answers: Answers,
}

impl Trier {
    fn give(&self, answer: Answer) {
        let _ = self.answers.send((self.lane, answer));
    }

    fn say(&self, topic: &str, position: Option<i64>, said: Said) {
        self.give(Answer::Said { topic: topic.to_owned(), position, said });
    }

    async fn run(mut self, mut orders: mpsc::UnboundedReceiver<Order>) {
        loop {
            match tokio::time::timeout(IDLE_MAX, orders.recv()).await {
                Ok(Some(Order::Ask(topics))) => self.round(&topics, &mut orders).await,
                Ok(Some(Order::Send(_))) => {}
                Ok(None) => return,
                Err(_) => self.close().await,
            }
        }
    }

    async fn close(&mut self) {
        if let Some(publisher) = self.publisher.take() {
            publisher.close().await;
        }
    }

    async fn round(&mut self, topics: &[String], orders: &mut mpsc::UnboundedReceiver<Order>) {
        let deadline = Instant::now() + TRIAL_MAX;
        let failed = match tokio::time::timeout_at(deadline, self.ask(topics)).await {
            Ok(Ok(ready)) => {
                if !ready.is_empty() {
                    self.give(Answer::There(ready));
                    if let Some(Order::Send(rows)) = orders.recv().await {
                        self.send(rows).await;
                    }
                }
                return self.give(Answer::Over);
            }
            Ok(Err(error)) => Said::Lost { alone: false, why: error.to_string() },
            Err(_) => {
                let blocked = self.publisher.as_ref().and_then(|publisher| publisher.blocked());
                Said::nothing(blocked, "the broker does not say whether it is there".to_owned())
            }
        };
        self.publisher = None;
        topics.iter().for_each(|topic| self.say(topic, None, failed.clone()));
        self.give(Answer::Over);
    }

    /// Asks which of these topics exist and returns them; answers for the others.
    async fn ask(&mut self, topics: &[String]) -> Result<Vec<String>, BrokerError> {
        let publisher = match &mut self.publisher {
            Some(publisher) => publisher,
            none => none.insert(self.broker.publisher().await?),
        };
        let states = if self.declare {
            make_each(self.broker.as_ref(), publisher.as_mut(), topics).await?
        } else {
            publisher.topics(topics).await?
        };
        let mut ready = Vec::new();
        for (topic, state) in topics.iter().zip(states) {
            match state {
                TopicState::Ready => ready.push(topic.clone()),
                TopicState::NotReady(why) => self.say(topic, None, Said::Blocked(why)),
            }
        }
        Ok(ready)
    }

    /// Sends one row for each topic and answers with the outcomes.
    async fn send(&mut self, rows: Vec<(i64, OutgoingMessage)>) {
        let Some(mut publisher) = self.publisher.take() else { return };
        let alone = rows.len() == 1;
        let mut left: HashMap<u64, (i64, String)> = HashMap::new();
        let mut out = Vec::with_capacity(rows.len());
        for (position, message) in rows {
            left.insert(self.next_tag, (position, message.topic.clone()));
            out.push((self.next_tag, message));
            self.next_tag += 1;
        }
        let deadline = Instant::now() + TRIAL_MAX;
        let done = tokio::time::timeout_at(deadline, self.settle(publisher.as_mut(), out, &mut left)).await;
        let said = match done {
            Ok(Ok(())) => {
                self.publisher = Some(publisher);
                return;
            }
            Ok(Err(error)) => Said::Lost { alone, why: error.to_string() },
            Err(_) => {
                let limit = humantime::format_duration(TRIAL_MAX);
                let silent = format!("it has neither taken nor refused a message within {limit}");
                Said::nothing(publisher.blocked(), silent)
            }
        };
        for (position, topic) in left.into_values() {
            self.say(&topic, Some(position), said.clone());
        }
        // Rows that this session still holds must not arrive later, so it is dropped.
        drop(publisher);
    }

    async fn settle(
        &mut self,
        publisher: &mut dyn Publisher,
        rows: Vec<(u64, OutgoingMessage)>,
        left: &mut HashMap<u64, (i64, String)>,
    ) -> Result<(), BrokerError> {
        publisher.send(rows).await?;
        let mut settled: Vec<Settled> = Vec::new();
        let mut doubt = None;
        while !left.is_empty() {
            publisher.settle(&mut settled).await?;
            for Settled { tag, outcome } in settled.drain(..) {
                let Some((position, topic)) = left.remove(&tag) else { continue };
                let said = match outcome {
                    Ok(_) => Said::Taken(position),
                    Err(Refusal::Message(_)) => Said::Message(position),
                    Err(Refusal::Destination(why) | Refusal::Behind(why)) => Said::Blocked(why),
                    Err(Refusal::Session(why)) => {
                        doubt = Some(why.clone());
                        Said::Blocked(why)
                    }
                };
                self.say(&topic, Some(position), said);
            }
        }
        doubt.map_or(Ok(()), |why| Err(BrokerError::Session(why)))
    }
}

/// The state of these topics. With `declare`, missing ones are created first, all in one call,
/// unless they are too many. A failure to create them makes these topics not ready and does not end
/// the session; their trials find out which topic is at fault.
pub(super) async fn see(
    broker: &dyn Broker,
    publisher: &mut dyn Publisher,
    topics: &[String],
    declare: bool,
) -> Result<Vec<TopicState>, BrokerError> {
    let mut states = publisher.topics(topics).await?;
    let missing = missing(topics, &states);
    if !declare || missing.is_empty() {
        return Ok(states);
    }
    let why = if missing.len() > MADE_AT_ONCE {
        format!("it is not ready, as are {} others; those that do not exist will be created", missing.len() - 1)
    } else {
        match tokio::time::timeout(MADE_MAX, broker.declare(&missing)).await {
            Ok(Ok(())) => return publisher.topics(topics).await,
            Ok(Err(error)) => {
                // Whatever the error is, it may be that of one topic. Where the broker is away, the
                // session's own publisher says so.
                states = publisher.topics(topics).await?;
                not_made(error)
            }
            Err(_) => format!("it was not made within {}", humantime::format_duration(MADE_MAX)),
        }
    };
    let with_reason = |state| if state == TopicState::Ready { state } else { TopicState::NotReady(why.clone()) };
    Ok(states.into_iter().map(with_reason).collect())
}

fn not_made(error: BrokerError) -> String {
    match error {
        BrokerError::Refused(why) | BrokerError::Destination(why) => why,
        error => error.to_string(),
    }
}

/// Like [`see`] without limits. Topics that cannot be created together are created one by one.
async fn make_each(
    broker: &dyn Broker,
    publisher: &mut dyn Publisher,
    topics: &[String],
) -> Result<Vec<TopicState>, BrokerError> {
    let states = publisher.topics(topics).await?;
    let missing_now = missing(topics, &states);
    if missing_now.is_empty() {
        return Ok(states);
    }
    let mut refused = HashMap::new();
    if broker.declare(&missing_now).await.is_err() {
        // Some of them may have been created.
        let states = publisher.topics(&missing_now).await?;
        for topic in missing(&missing_now, &states) {
            if let Err(error) = broker.declare(std::slice::from_ref(&topic)).await {
                refused.insert(topic, not_made(error));
            }
        }
    }
    let states = topics.iter().zip(publisher.topics(topics).await?);
    let with_reason = |(topic, state): (&String, TopicState)| match refused.remove(topic) {
        Some(why) if state != TopicState::Ready => TopicState::NotReady(why),
        _ => state,
    };
    Ok(states.map(with_reason).collect())
}

fn missing(topics: &[String], states: &[TopicState]) -> Vec<String> {
    let all = topics.iter().zip(states);
    all.filter(|(_, state)| **state != TopicState::Ready).map(|(topic, _)| topic.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Shown by: the empty reason of a round without a row in place of the last one.
    #[test]
    fn a_round_that_had_no_row_to_try_keeps_why_the_topic_is_blocked() {
        let (mut pauses, blocked) = (Pauses::default(), HashSet::from(["orders"]));
        for reason in ["no such topic", ""].repeat(TRIES_SHOWN as usize) {
            pauses.failed("orders", reason, false, Duration::ZERO);
        }
        assert_eq!(pauses.all_in_vain(&blocked).as_deref(), Some("`orders`: no such topic"));
    }
}
