//! `oncebox dead`: what is dead, held or waiting, in the outbox and at consumers: listed, shown,
//! redriven, buried, discarded. Every act has a reason and leaves an audit row.

mod became;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use clap::{Args, Subcommand};
use uuid::Uuid;

use self::became::{Became, Before, what_became};
use super::act::{Act, of_all, refused};
use super::common::{CommonArgs, Output, failed, hint_of_more, limit, listed, printable, printable_lines};
use super::consumers::{self, is_absent, seen};
use super::progress::{Batches, shown};
use oncebox::app::config::Settings;
use oncebox::app::{AppError, say};
use oncebox::message::identity;
use oncebox::store::{ActContext, DeadFilter, DeadMessage, DeadPlace, DeadState, Duties, OperatorAct, Status, Store};

/// The most messages that one transaction of an act concerns.
const BATCH: usize = 100;
/// How many a list shows, and how many a filter without `--all` acts on.
const LIMIT: usize = 100;

/// What to do with dead messages.
#[derive(Debug, Subcommand)]
pub(crate) enum DeadCommand {
    /// List messages that could not be sent or handled, oldest first: dead, held and waiting ones
    List {
        #[command(flatten)]
        filter: Filter,
        /// Only in this state
        #[arg(long, value_enum)]
        state: Option<State>,
    },
    /// Show one with its headers, payload and error history
    Show {
        /// The number that `dead list` shows: o17 (outbox) or c9 (consumer)
        #[arg(value_parser = number)]
        number: String,
        /// Write the payload to this file, byte for byte, and not to stdout
        #[arg(long, value_name = "FILE")]
        payload_to: Option<PathBuf>,
    },
    /// Send or handle messages again now, under the same id: an inbox still knows its copies
    Redrive {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        act: Act,
        /// At most this many a second, so that whoever handles them keeps up; Ctrl-C ends it, and
        /// what is done is done
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
        rate: u32,
        /// Wait at most this long, and say what became of each message: handled, sent, or dead
        /// again. A message that is tried again is waited for. The exit code is 3 where a message
        /// was neither handled nor sent
        #[arg(long, value_name = "TIME", default_value = "0s", value_parser = oncebox::app::config::parse_duration)]
        wait: Duration,
        /// Under a new id, so that it is a new message (only one at a time)
        #[arg(long)]
        new_id: bool,
        /// With the bytes of this file as payload; implies --new-id
        #[arg(long, value_name = "FILE")]
        payload: Option<PathBuf>,
        /// With a payload of no bytes; implies --new-id
        #[arg(long, conflicts_with = "payload")]
        empty_payload: bool,
    },
    /// No more tries for a message of a consumer that waits: it is dead until you do something else
    /// with it
    Bury {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        act: Act,
    },
    /// Forget messages; what stands behind them goes on
    Discard {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        act: Act,
    },
}

/// Why a message is not sent or not handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum State {
    /// Refused for what it is, or given up after its last try
    Dead,
    /// Stands behind a dead one, or its destination takes nothing
    Held,
    /// Tried again when it is due, or stands behind one that is
    Waiting,
}

impl State {
    fn of(state: DeadState) -> &'static str {
        match state {
            DeadState::Dead => "dead",
            DeadState::Held => "held",
            DeadState::Waiting => "waiting",
        }
    }
}

/// Every state, or the one that was named.
fn states(state: Option<State>) -> Vec<DeadState> {
    match state {
        None => vec![DeadState::Dead, DeadState::Held, DeadState::Waiting],
        Some(State::Dead) => vec![DeadState::Dead],
        Some(State::Held) => vec![DeadState::Held],
        Some(State::Waiting) => vec![DeadState::Waiting],
    }
}

/// Which messages are listed or acted on.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Filter {
    /// Only with this message id: the UUID, or as its producer sent it
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// Whose id that is, where it is no UUID: the `ce_source` of its producer; none by default
    #[arg(long, value_name = "TEXT", requires = "id")]
    source: Option<String>,
    /// Only of this topic
    #[arg(long)]
    topic: Option<String>,
    /// Only of this key
    #[arg(long)]
    key: Option<String>,
    /// Only of this consumer; `outbox` for messages that could not be sent
    #[arg(long)]
    consumer: Option<String>,
    /// Only with this reason
    #[arg(long)]
    reason: Option<String>,
    /// How many at most; default 100, or all for an act on `--all`
    #[arg(long, value_parser = limit::<usize>())]
    limit: Option<usize>,
}

/// Which messages an act concerns: numbers, in whatever state they are, or a filter.
#[derive(Debug, Clone, Args)]
pub(crate) struct Which {
    /// Numbers that `dead list` shows
    #[arg(value_parser = number)]
    numbers: Vec<String>,
    #[command(flatten)]
    filter: Filter,
    /// Those of a filter that are in this state; dead ones by default, for `bury` waiting ones
    #[arg(long, value_enum, conflicts_with = "numbers")]
    state: Option<State>,
    /// All that match when the command starts, at most a hundred in each transaction; without it a
    /// filter acts on 100, or on as many as --limit says
    #[arg(long)]
    all: bool,
}

fn number(text: &str) -> Result<String, String> {
    let digits = text.strip_prefix(['o', 'c']).and_then(|digits| digits.parse::<i64>().ok());
    match digits {
        Some(1..) => Ok(text.to_owned()),
        _ => Err("no number of a dead message; `oncebox dead list` shows them: o17, c9".to_owned()),
    }
}

pub(super) async fn run(command: &DeadCommand, common: &CommonArgs, output: Output) -> Result<(), AppError> {
    on_store!(common, Store::into_duties, |store, settings| on(&*store, command, &settings, output).await)
}

async fn on(store: &dyn Duties, command: &DeadCommand, settings: &Settings, output: Output) -> Result<(), AppError> {
    match command {
        DeadCommand::List { filter, state } => {
            let filter = DeadFilter { states: states(*state), ..filter.to_store(store).await? };
            list(store, &filter, output).await
        }
        DeadCommand::Show { number, payload_to } => show(store, number, payload_to.as_deref(), output).await,
        DeadCommand::Redrive { which, act, rate, wait, new_id, payload, empty_payload } => {
            let payload = match payload {
                Some(file) => Some(read_payload(file)?),
                None => empty_payload.then(Vec::new),
            };
            let how = match *new_id || payload.is_some() {
                true => OperatorAct::RedriveAs { id: Uuid::now_v7(), payload },
                false => OperatorAct::Redrive,
            };
            act_on(store, which, act, &How { act: &how, rate: Some(*rate), wait: *wait }, settings, output).await
        }
        DeadCommand::Bury { which, act } => {
            act_on(store, which, act, &How::at_once(&OperatorAct::Bury), settings, output).await
        }
        DeadCommand::Discard { which, act } => {
            act_on(store, which, act, &How::at_once(&OperatorAct::Discard), settings, output).await
        }
    }
}

impl Filter {
    async fn to_store(&self, store: &dyn Duties) -> Result<DeadFilter, AppError> {
        let message_id = match &self.id {
            Some(id) => Some(identity_of(store, id, self.source.as_deref()).await?),
            None => None,
        };
        Ok(DeadFilter {
            states: Vec::new(),
            numbers: Vec::new(),
            message_id,
            topic: self.topic.clone(),
            key: self.key.clone(),
            consumer: self.consumer.clone(),
            reason: self.reason.clone(),
            limit: self.limit.unwrap_or(LIMIT),
        })
    }

    fn is_empty(&self) -> bool {
        self.id.is_none()
            && self.topic.is_none()
            && self.key.is_none()
            && self.consumer.is_none()
            && self.reason.is_none()
    }
}

/// The UUID of a message id. Where the id is no UUID, it is made of the source and the text, as a
/// consumer makes it. A consumer takes a UUID in capitals for a text as well. So such an id means
/// the message that was sent with this text, and the UUID only where there is no such message.
async fn identity_of(store: &dyn Duties, id: &str, source: Option<&str>) -> Result<Uuid, AppError> {
    let as_sent = identity(source.unwrap_or_default(), id).uuid();
    let (None, Ok(uuid)) = (source, Uuid::try_parse(id)) else { return Ok(as_sent) };
    if uuid == as_sent {
        return Ok(uuid);
    }
    let sent = DeadFilter { states: states(None), message_id: Some(as_sent), limit: 1, ..DeadFilter::default() };
    Ok(if store.dead(&sent).await?.is_empty() { uuid } else { as_sent })
}

/// Reads a payload. An empty file is more often a mistake than a payload of no bytes.
fn read_payload(file: &Path) -> Result<Vec<u8>, AppError> {
    let payload = std::fs::read(file);
    let payload = payload.map_err(|error| AppError::usage(format!("{} cannot be read: {error}", file.display())))?;
    if payload.is_empty() {
        let why = "is empty; where the message is meant to have no payload, give --empty-payload";
        return Err(AppError::usage(format!("{} {why}", file.display())));
    }
    Ok(payload)
}

fn place(message: &DeadMessage) -> &str {
    match &message.place {
        DeadPlace::Outbox => "outbox",
        DeadPlace::Consumer(name) => name,
    }
}

async fn list(store: &dyn Duties, filter: &DeadFilter, output: Output) -> Result<(), AppError> {
    let dead = store.dead(filter).await?;
    hint_of_more(dead.len(), filter.limit);
    if dead.is_empty() {
        hint_of_unknown(store, filter.consumer.as_deref()).await?;
    }
    let header = [
        "number", "state", "where", "topic", "key", "id", "sent as", "reason", "error", "tries", "next try", "behind",
        "since",
    ];
    let rows = dead.iter().map(|message| {
        // In the outbox the reason is the error too. It is shown once.
        let error = message.error.as_deref().filter(|error| *error != message.reason);
        [
            message.number.clone(),
            State::of(message.state).to_owned(),
            place(message).to_owned(),
            message.topic.clone(),
            message.key.clone().unwrap_or_default(),
            message.message_id.to_string(),
            message.sent_id.clone().unwrap_or_default(),
            match (&message.requested, &message.held_by) {
                (Some(requested), _) => format!("{} ({requested} requested)", message.reason),
                (None, Some(dead)) => format!("{}, {dead}", message.reason),
                (None, None) => message.reason.clone(),
            },
            error.unwrap_or_default().to_owned(),
            message.attempts.to_string(),
            message.next_try.map_or_else(String::new, |at| at.format("%Y-%m-%d %H:%M:%SZ").to_string()),
            message.behind.to_string(),
            message.since.format("%Y-%m-%d %H:%M:%S").to_string(),
        ]
    });
    listed(output, &serde_json::json!({ "dead": dead }), header, rows)
}

async fn show(store: &dyn Duties, number: &str, payload_to: Option<&Path>, output: Output) -> Result<(), AppError> {
    let message = found(store, number).await?.ok_or_else(|| unknown(number))?;
    if let Some(file) = payload_to {
        let written = std::fs::write(file, &message.payload);
        written.map_err(|error| AppError::failed(format!("{} cannot be written: {error}", file.display())))?;
    }
    if output == Output::Json {
        let mut value = serde_json::to_value(&message).map_err(failed)?;
        match (payload_to, std::str::from_utf8(&message.payload)) {
            (Some(_), _) => {}
            (None, Ok(text)) => value["payload"] = text.into(),
            (None, Err(_)) => value["payload_base64"] = BASE64.encode(&message.payload).into(),
        }
        data!("{value}");
        return Ok(());
    }
    data!("number        {}", message.number);
    data!("state         {}", State::of(message.state));
    data!("where         {}", place(&message));
    data!("message id    {}", message.message_id);
    let or_none = |text: Option<&str>| text.map_or_else(|| "-".to_owned(), printable);
    let sent_id = message.sent_id.as_deref().map_or_else(|| message.message_id.to_string(), printable);
    data!("id as sent    {sent_id}");
    data!("topic         {}", printable(&message.topic));
    data!("key           {}", or_none(message.key.as_deref()));
    data!("kind          {}", printable(&message.kind));
    data!("content type  {}", or_none(message.content_type.as_deref()));
    data!("reason        {}", printable(&message.reason));
    data!("held by       {}", message.held_by.as_deref().unwrap_or("-"));
    data!("tries         {}", message.attempts);
    data!("behind it     {}", message.behind);
    data!("since         {}", message.since.to_rfc3339());
    data!("next try      {}", message.next_try.map_or_else(|| "-".to_owned(), |at| at.to_rfc3339()));
    data!("requested     {}", message.requested.as_deref().unwrap_or("-"));
    for (name, value) in &message.headers {
        data!("header        {}: {}", printable(name), printable(value));
    }
    for entry in &message.history {
        data!("try {:<9} {} {}", entry.attempt, entry.at.to_rfc3339(), printable(&entry.error));
    }
    let bytes = message.payload.len();
    match (payload_to, std::str::from_utf8(&message.payload)) {
        (Some(file), _) => data!("payload       {bytes} bytes, in {}", file.display()),
        (None, Ok(text)) => data!("payload       {bytes} bytes\n{}", printable_lines(text)),
        (None, Err(_)) => data!("payload       {bytes} bytes that are no UTF-8; --payload-to FILE writes them"),
    }
    Ok(())
}

/// An act, and how fast it is done.
struct How<'a> {
    act: &'a OperatorAct,
    /// At most this many messages a second.
    rate: Option<u32>,
    /// How long to wait for what becomes of the messages.
    wait: Duration,
}

impl<'a> How<'a> {
    fn at_once(act: &'a OperatorAct) -> Self {
        Self { act, rate: None, wait: Duration::ZERO }
    }
}

/// The messages that an act is on.
struct Meant {
    /// Which messages an act by number may still change.
    filter: DeadFilter,
    numbers: Vec<String>,
    /// How many more match that the act leaves.
    remaining: usize,
}

async fn meant(store: &dyn Duties, which: &Which, how: &OperatorAct) -> Result<Meant, AppError> {
    let all = which.filter.to_store(store).await?;
    if which.numbers.is_empty() {
        let usual = if matches!(how, OperatorAct::Bury) { State::Waiting } else { State::Dead };
        let mut filter = DeadFilter { states: states(Some(which.state.unwrap_or(usual))), ..all };
        let mut numbers = store.dead_numbers(&filter).await?;
        let most = match which.filter.limit {
            None if which.all => usize::MAX,
            None => LIMIT,
            Some(limit) => limit,
        };
        let remaining = numbers.len().saturating_sub(most);
        numbers.truncate(most);
        if matches!(how, OperatorAct::Bury) && !filter.states.contains(&DeadState::Held) {
            // What stands behind a message that an earlier batch buried is held since then.
            filter.states.push(DeadState::Held);
        }
        return Ok(Meant { filter, numbers, remaining });
    }
    // A number selects a message in any state.
    let filter = DeadFilter { states: states(None), ..all };
    let mut numbers: Vec<String> = Vec::new();
    for number in &which.numbers {
        let one = DeadFilter { numbers: vec![number.clone()], limit: 1, ..filter.clone() };
        let found = store.dead(&one).await?.into_iter().next().ok_or_else(|| unknown(number))?;
        if !numbers.contains(&found.number) {
            numbers.push(found.number);
        }
    }
    Ok(Meant { filter, numbers, remaining: 0 })
}

fn unknown(number: &str) -> AppError {
    AppError::failed(format!(
        "there is no message `{number}` that is dead, held or waiting; `oncebox dead list` shows them"
    ))
}

async fn act_on(
    store: &dyn Duties,
    which: &Which,
    act: &Act,
    &How { act: how, rate, wait }: &How<'_>,
    settings: &Settings,
    output: Output,
) -> Result<(), AppError> {
    if which.numbers.is_empty() && which.filter.is_empty() && !which.all {
        return Err(AppError::usage("name numbers (`oncebox dead list` shows them), a filter, or --all"));
    }
    let meant = meant(store, which, how).await?;
    let (found, remaining) = (meant.numbers.len(), meant.remaining);
    if matches!(how, OperatorAct::RedriveAs { .. }) && found > 1 {
        return Err(AppError::usage(format!("{found} messages match; only one at a time gets a new id")));
    }
    let what = of_all(found, remaining, if found + remaining == 1 { "message" } else { "messages" });
    let (verb, done) = match how {
        OperatorAct::Discard => ("discard", "discarded"),
        OperatorAct::Bury => ("bury", "buried"),
        OperatorAct::Redrive | OperatorAct::RedriveAs { .. } => ("redrive", "redriven"),
    };
    match how {
        OperatorAct::Discard => act.confirm_loss(found, &what, done)?,
        _ => act.confirm(found, &what, done)?,
    }
    let dry_run = ActContext { redrive_age_max: Some(settings.publisher.redrive_age_max), ..act.context(true) };
    // Runs everything as a dry run first: if one number is refused, the others stay as they are.
    let (mut numbers, mut already_handled) = carry_out(store, &meant, how, &dry_run, None).await?;
    let mut before: HashMap<String, Before> = HashMap::new();
    if !act.dry_run {
        if !wait.is_zero() {
            for some in meant.numbers.chunks(BATCH) {
                for message in store.dead(&meant.only(some)).await? {
                    before.insert(message.number.clone(), Before::of(&message, how));
                }
            }
        }
        let context = ActContext { dry_run: false, ..dry_run };
        let rate = rate.and_then(|rate| usize::try_from(rate).ok()).filter(|rate| found > *rate);
        (numbers, already_handled) = carry_out(store, &meant, how, &context, rate).await?;
    }
    let became = match verb {
        "redrive" if !act.dry_run => {
            let handled: HashSet<&String> = already_handled.iter().collect();
            let released = numbers.iter().filter(|number| !handled.contains(number));
            let released = released.map(|number| (number.clone(), before.remove(number).unwrap_or_default()));
            what_became(store, released.collect(), wait).await?
        }
        _ => HashMap::new(),
    };
    let left = left_alone(store, if which.numbers.is_empty() { &[] } else { &meant.numbers }, &numbers).await?;
    // In the order of the numbers, as the line above them.
    let in_order = || numbers.iter().filter_map(|number| Some((number, became.get(number)?)));
    let is_done = wait.is_zero() || left.is_empty() && became.values().all(Became::is_well);
    let done = || match is_done {
        true => Ok(()),
        false if became.values().any(Became::is_open) => {
            Err(AppError::not_ready(format!("not every message was handled or sent within {wait:?}")))
        }
        false if !became.values().any(Became::has_failed) => {
            Err(AppError::not_ready("not every message was handled or sent: see above"))
        }
        false => Err(AppError::not_ready("not every message was handled or sent: mend what the errors name")),
    };
    if output == Output::Json {
        let mut value = serde_json::json!({ "act": verb, "dry_run": act.dry_run, "numbers": numbers,
            "already_handled": already_handled });
        if remaining > 0 {
            value["remaining"] = remaining.into();
        }
        for (number, why) in &left {
            value["left"][number] = why.as_str().into();
        }
        for (number, became) in in_order() {
            value["became"][number] = became.to_string().into();
        }
        data!("{value}");
        return done();
    }
    let would = act.would();
    data!("{would}{verb} {}:{}", numbers.len(), shown(&numbers));
    for number in &already_handled {
        data!("{would}discard {number}: another copy of it was handled since");
    }
    for (number, why) in &left {
        data!("{number} is left as it is: {why}");
    }
    for (number, became) in in_order().filter(|_| !wait.is_zero()) {
        data!("{number}: {}", printable(&became.to_string()));
    }
    let open = in_order().filter(|(number, became)| matches!(became, Became::Open) && number.starts_with('c'));
    hint_of_consumers(store, open.map(|(number, _)| number.clone()).collect(), wait).await?;
    if found == 0 {
        hint_of_unknown(store, which.filter.consumer.as_deref()).await?;
    }
    if verb == "redrive" && found == 0 {
        hint_of_held(store, which).await?;
    }
    if !wait.is_zero() {
        return done();
    }
    if !act.dry_run && numbers.iter().any(|number| number.starts_with('o')) {
        data!("the publisher carries out what concerns the outbox");
    }
    Ok(())
}

/// The named messages on which the act was not done, in their order, each with the reason.
async fn left_alone(store: &dyn Duties, named: &[String], done: &[String]) -> Result<Vec<(String, String)>, AppError> {
    let mut left = Vec::new();
    for number in named.iter().filter(|number| !done.contains(number)) {
        let why = match found(store, number).await? {
            Some(DeadMessage { requested: Some(earlier), .. }) => {
                format!("the publisher has not carried out the earlier `{earlier}` yet")
            }
            Some(message) => format!("it is {} now", State::of(message.state)),
            None => "it is gone".to_owned(),
        };
        left.push((number.clone(), why));
    }
    Ok(left)
}

/// Says that nothing was found because no consumer has this name.
async fn hint_of_unknown(store: &dyn Duties, consumer: Option<&str>) -> Result<(), AppError> {
    if let Some(name) = consumer.filter(|name| *name != "outbox")
        && let Some(why) = consumers::unknown(store, name).await?
    {
        say("INFO", &format!("hint: {why}"));
    }
    Ok(())
}

/// Says how many held messages match a filter that found no dead one to redrive, and that they go
/// by themselves.
async fn hint_of_held(store: &dyn Duties, which: &Which) -> Result<(), AppError> {
    if which.state.is_some() || !which.numbers.is_empty() {
        return Ok(());
    }
    let filter = DeadFilter { states: states(Some(State::Held)), ..which.filter.to_store(store).await? };
    let held = store.dead_numbers(&filter).await?.len();
    if held > 0 {
        let why = "they go by themselves once what holds them is mended; `oncebox dead list --state held` shows it";
        say("INFO", &format!("hint: none that is dead matches; held ones do, {held}: {why}"));
    }
    Ok(())
}

/// Says who handles these messages, which were redriven and not tried yet: their consumers, or
/// nobody where no process of a consumer runs.
///
/// It looks at the first messages alone: there may be very many.
async fn hint_of_consumers(store: &dyn Duties, mut numbers: Vec<String>, wait: Duration) -> Result<(), AppError> {
    if numbers.is_empty() {
        return Ok(());
    }
    numbers.truncate(BATCH);
    let filter = DeadFilter { states: states(None), limit: numbers.len(), numbers, ..DeadFilter::default() };
    let open = store.dead(&filter).await?;
    let consumers = store.status_since(&Status::default()).await?.consumers;
    let absent = consumers.iter().filter(|one| is_absent(one) && open.iter().any(|message| place(message) == one.name));
    let absent: Vec<_> = absent.collect();
    for one in &absent {
        say("INFO", &format!("hint: no process of `{}` runs, the last was there {}: start it", one.name, seen(one)));
    }
    if absent.is_empty() && wait.is_zero() {
        say("INFO", "hint: its consumer handles it now; `--wait 10s` says what becomes of it");
    }
    Ok(())
}

/// The message with this number, in any state.
pub(super) async fn found(store: &dyn Duties, number: &str) -> Result<Option<DeadMessage>, AppError> {
    let one = DeadFilter { states: states(None), numbers: vec![number.to_owned()], limit: 1, ..DeadFilter::default() };
    Ok(store.dead(&one).await?.into_iter().next())
}

impl Meant {
    fn only(&self, numbers: &[String]) -> DeadFilter {
        DeadFilter { numbers: numbers.to_vec(), limit: numbers.len(), ..self.filter.clone() }
    }
}

/// Acts on the messages, at most [`BATCH`] in each transaction and `rate` a second. Returns the
/// numbers of those that it acted on, and which of them a redrive discarded because another copy
/// was handled since.
async fn carry_out(
    store: &dyn Duties,
    meant: &Meant,
    how: &OperatorAct,
    context: &ActContext,
    rate: Option<usize>,
) -> Result<(Vec<String>, Vec<String>), AppError> {
    let size = rate.unwrap_or(BATCH).min(BATCH);
    let pause = rate.map(|rate| Duration::from_secs(1).mul_f64(size as f64 / rate as f64));
    let mut turns = pause.map(tokio::time::interval);
    if let Some(turns) = &mut turns {
        turns.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    }
    let of = meant.numbers.len();
    let mut batches = Batches::new(if context.dry_run { "looked at" } else { "done" }, of, size);
    let (mut numbers, mut already_handled) = (Vec::new(), Vec::new());
    for some in meant.numbers.chunks(size) {
        if let Some(turns) = &mut turns {
            turns.tick().await;
        }
        let acted = store.act(&meant.only(some), how, context).await.map_err(refused);
        let outcome = acted.map_err(|error| match numbers.len() {
            done if done > 0 && !context.dry_run => error.on(&format!("after {done} of {of}")),
            _ => error,
        })?;
        numbers.extend(outcome.numbers);
        already_handled.extend(outcome.already_handled);
        batches.next(some.len());
    }
    Ok((numbers, already_handled))
}
