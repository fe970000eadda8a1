//! `oncebox keys`: list, show, release, purge, resolve. A key is a secret of its client: only its
//! hash is shown, and the key itself to a person who gave it.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::act::{Act, of_all, refused};
use super::answer::{AnswerArgs, Says};
use super::common::{CommonArgs, Output, hint_of_more, limit, listed, plain, printable};
use super::progress::Batches;
use oncebox::StoreError;
use oncebox::adapter::{DbTime, hex};
use oncebox::app::{AppError, say};
use oncebox::operation::{Identity, OperationName, Record, State, StoredBody};
use oncebox::store::{ActContext, FoundKeys, KeyChange, KeyFilter, KeyOperator, OperationStore, RunOutcome};

/// How many digits of a hash are shown.
const SHOWN: usize = 12;
/// The fewest digits that select a key.
const NAMED_MIN: usize = 8;
/// How many a list shows, and how many a filter without `--all` purges.
const LIMIT: u32 = 100;
/// How many are read at once where all are meant.
const PAGE: u32 = 1_000;

/// What to do with keys.
#[derive(Debug, Subcommand)]
pub(crate) enum KeysCommand {
    /// List keys, oldest first
    List(Filter),
    /// Show one with its whole hash and what is kept of its answer; the key itself only where it
    /// was given
    Show(Which),
    /// Forget one that has its outcome: the next request under it executes
    Release {
        #[command(flatten)]
        which: Which,
        /// Though a run that lost its lease has said that it succeeded
        #[arg(long)]
        against_evidence: bool,
        #[command(flatten)]
        act: Act,
    },
    /// Forget keys that have their outcome, and record how far, so that a late retry of a timed key
    /// is recognised
    ///
    /// A route that judges ages then takes each key of the operation that is older than a purged
    /// one, and has no record, for expired. This is also true of a first request that is still on
    /// its way, so purge no young keys.
    Purge {
        /// Hashes that `keys list` shows
        #[arg(value_name = "HASH", conflicts_with_all = ["tenant", "operation", "state", "older_than", "limit", "all"])]
        hashes: Vec<String>,
        #[command(flatten)]
        filter: Filter,
        /// All that match and had their outcome when the command starts; without it a filter
        /// purges 100, or as many as --limit says
        #[arg(long)]
        all: bool,
        /// Though a run that lost its lease has said that it succeeded
        #[arg(long)]
        against_evidence: bool,
        #[command(flatten)]
        act: Act,
    },
    /// Say how a key ended whose outcome is unknown
    Resolve {
        #[command(flatten)]
        which: Which,
        #[command(flatten)]
        word: Word,
        /// Though a run that lost its lease has said the opposite
        #[arg(long)]
        against_evidence: bool,
        #[command(flatten)]
        answer: AnswerArgs,
        #[command(flatten)]
        act: Act,
    },
}

/// What the operator found out.
#[derive(Debug, Clone, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Word {
    /// It happened: this file is the body of the answer that is replayed from now on
    #[arg(long, value_name = "FILE")]
    completed: Option<PathBuf>,
    /// It did not happen: the same key may run again
    #[arg(long)]
    not_happened: bool,
}

/// Which keys are listed or acted on.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Filter {
    /// Only of this tenant; empty: the public scope
    #[arg(long)]
    tenant: Option<String>,
    /// Only of this operation
    #[arg(long)]
    operation: Option<OperationName>,
    /// Only in this state, as the list prints it: IN_PROGRESS, COMPLETED, FAILED_REPLAYABLE,
    /// FAILED_RETRYABLE, UNKNOWN_REQUIRES_RECOVERY or EXPIRED
    #[arg(long, value_parser = state)]
    state: Option<State>,
    /// Only claimed longer ago than this, such as 90s or 2h
    #[arg(long, value_name = "DURATION", value_parser = oncebox::app::config::parse_duration)]
    older_than: Option<Duration>,
    /// How many at most; default 100, or all where all are purged
    #[arg(long, value_parser = limit::<u32>())]
    limit: Option<u32>,
}

/// The one key that a command shows or acts on.
#[derive(Debug, Clone, Args)]
pub(crate) struct Which {
    /// The hash that `keys list` shows; or the key itself, with --tenant and --operation
    key: String,
    /// The tenant of the key; empty: the public scope
    #[arg(long, requires = "operation")]
    tenant: Option<String>,
    /// The operation of the key
    #[arg(long, requires = "tenant")]
    operation: Option<OperationName>,
}

fn state(text: &str) -> Result<State, String> {
    if text.eq_ignore_ascii_case("unknown") {
        return Ok(State::UnknownRequiresRecovery);
    }
    let known = State::STORED.into_iter().chain([State::Expired]);
    let mut states = known.filter(|state| state.as_str().eq_ignore_ascii_case(&text.replace('-', "_")));
    states.next().ok_or_else(|| {
        "no state; IN_PROGRESS, COMPLETED, FAILED_REPLAYABLE, FAILED_RETRYABLE, UNKNOWN_REQUIRES_RECOVERY and EXPIRED are".to_owned()
    })
}

pub(super) async fn run(command: &KeysCommand, common: &CommonArgs, output: Output) -> Result<(), AppError> {
    on_store!(common, OperationStore::into_operator, |store, settings| on(&*store, command, output).await)
}

async fn on(store: &dyn KeyOperator, command: &KeysCommand, output: Output) -> Result<(), AppError> {
    match command {
        KeysCommand::List(filter) => list(store, filter, output).await,
        KeysCommand::Show(which) => show(store, &one(store, which).await?, which.is_named(), output).await,
        KeysCommand::Release { which, against_evidence, act } => {
            let change = KeyChange::Release { against_evidence: *against_evidence };
            act_on(store, &Meant::named(one(store, which).await?), &change, act, output).await
        }
        KeysCommand::Purge { hashes, filter, all, against_evidence, act } => {
            let change = KeyChange::Purge { against_evidence: *against_evidence };
            match hashes.is_empty() && *all && filter.limit.is_none() {
                true => purge_all(store, filter, &change, act, output).await,
                false => {
                    let meant = to_purge(store, hashes, filter, *all).await?;
                    act_on(store, &meant, &change, act, output).await
                }
            }
        }
        KeysCommand::Resolve { which, word, against_evidence, answer, act } => {
            let outcome = match &word.completed {
                Some(file) => RunOutcome::Completed(answer.read(file, Says::Happened)?),
                None => RunOutcome::FailedRetryable { error_code: None },
            };
            let (retention, against_evidence) = (answer.retention(), *against_evidence);
            let change = KeyChange::Resolve { outcome: Box::new(outcome), retention, against_evidence };
            act_on(store, &Meant::named(one(store, which).await?), &change, act, output).await
        }
    }
}

impl Filter {
    fn to_store(&self) -> KeyFilter {
        KeyFilter {
            digest: Vec::new(),
            tenant: self.tenant.clone(),
            operation: self.operation.clone(),
            state: self.state,
            older_than: self.older_than,
            forgettable: false,
            after: None,
            limit: self.limit.unwrap_or(LIMIT),
        }
    }

    /// Of the keys that match, those that can be purged.
    fn to_purge(&self) -> KeyFilter {
        KeyFilter { forgettable: true, ..self.to_store() }
    }

    fn is_empty(&self) -> bool {
        self.tenant.is_none() && self.operation.is_none() && self.state.is_none() && self.older_than.is_none()
    }
}

impl Which {
    /// Whether the key itself was given, not its hash.
    fn is_named(&self) -> bool {
        self.tenant.is_some() && self.operation.is_some()
    }

    /// The digest, or the first bytes of it.
    fn digest(&self) -> Result<Vec<u8>, AppError> {
        match (&self.tenant, &self.operation) {
            (Some(tenant), Some(operation)) => {
                let (tenant, operation) = (tenant.as_bytes(), operation.as_str().as_bytes());
                let identity = Identity::from_stored(tenant, operation, self.key.as_bytes());
                Ok(identity.map_err(|error| AppError::usage(error.to_string()))?.digest().to_vec())
            }
            _ => digits(&self.key),
        }
    }
}

fn digits(hash: &str) -> Result<Vec<u8>, AppError> {
    let even = hash.len().is_multiple_of(2) && (NAMED_MIN..=64).contains(&hash.len());
    let bytes: Option<Vec<u8>> = (0..hash.len() / 2)
        .map(|at| hash.get(2 * at..2 * at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok()))
        .collect();
    bytes.filter(|_| even).ok_or_else(|| {
        AppError::usage(format!(
            "`{hash}` is no hash of a key: an even number of {NAMED_MIN} to 64 hexadecimal digits, as `oncebox keys list` shows; \
             a key itself needs --tenant and --operation"
        ))
    })
}

struct ReadRecord {
    now: DbTime,
    record: Record,
}

/// The keys that were found: those that were read, and the digests of the others with the reasons.
fn split(found: FoundKeys) -> (Vec<ReadRecord>, Vec<(Vec<u8>, String)>) {
    let read = found.keys.into_iter();
    let read = read.filter_map(|look| look.record.map(|record| ReadRecord { now: look.now, record }));
    (read.collect(), found.unreadable)
}

/// Says how many keys a purge leaves because they cannot be read.
fn left_out(unreadable: usize) {
    if unreadable > 0 {
        say("ERROR", &format!("keys that cannot be read, and stay: {unreadable}; `oncebox keys list` says why"));
    }
}

/// Says how many keys that a filter had found were gone, or not the same, when their turn came.
fn left_alone(changed: usize) {
    if changed > 0 {
        say("INFO", &format!("keys that changed or went meanwhile, and are left alone: {changed}"));
    }
}

async fn one(store: &dyn KeyOperator, which: &Which) -> Result<ReadRecord, AppError> {
    by_digest(store, which.digest()?, &which.key).await
}

async fn by_digest(store: &dyn KeyOperator, digest: Vec<u8>, named: &str) -> Result<ReadRecord, AppError> {
    let (mut found, unreadable) = split(store.keys(&KeyFilter { digest, limit: 2, ..KeyFilter::default() }).await?);
    match (found.pop(), found.pop(), unreadable.as_slice()) {
        (Some(one), None, []) => Ok(one),
        (None, _, [(_, why)]) => Err(AppError::failed(format!("the key `{named}` cannot be read: {why}"))),
        (None, _, []) => Err(AppError::failed(format!("there is no key `{named}`; `oncebox keys list` shows them"))),
        _ => Err(AppError::usage(format!("`{named}` begins more than one hash; give more digits"))),
    }
}

/// All digits of the hash.
fn hash(record: &Record) -> String {
    hex(&record.identity.digest())
}

/// A moment for people and machines.
pub(super) fn moment(at: DbTime) -> String {
    let at = chrono::DateTime::from_timestamp_micros(at.micros).unwrap_or_default();
    at.to_rfc3339_opts(chrono::SecondsFormat::Micros, true)
}

fn fields(found: &ReadRecord, whole: bool) -> Value {
    let ReadRecord { now, record } = found;
    let mut fields = json!({
        "hash": if whole { hash(record) } else { hash(record)[..SHOWN].to_owned() },
        "tenant": record.identity.tenant(),
        "operation": record.identity.operation().as_str(),
        "mode": record.mode.as_str(),
        "state": record.state_at(*now).as_str(),
        "operation_id": record.operation_id,
        "attempts": record.attempts,
        "generation": record.generation,
        "parked": record.parked,
        "lease_seconds_left": record.lease_left(*now).as_secs_f64(),
        "created_at": moment(record.created_at),
        "outcome_at": record.outcome_at.map(moment),
        "expires_at": record.expires_at.map(moment),
        "status": record.answer.as_ref().map(|answer| answer.status),
        "body": record.answer.as_ref().map(|answer| match &answer.body {
            StoredBody::Kept => "kept",
            StoredBody::Tombstone(reason) => reason.as_str(),
            StoredBody::Reference => "reference",
        }),
    });
    if whole {
        let answer = record.answer.as_ref();
        let resource = answer.and_then(|answer| answer.resource.as_ref());
        let resource = resource.map(|made| json!({ "kind": made.kind, "id": made.id, "location": made.location }));
        fields["epoch"] = record.epoch.into();
        fields["body_expires_at"] = answer.and_then(|answer| answer.body_until).map(moment).into();
        fields["resource"] = resource.into();
        fields["error_code"] = record.error_code.clone().into();
    }
    fields
}

async fn list(store: &dyn KeyOperator, filter: &Filter, output: Output) -> Result<(), AppError> {
    let (found, unreadable) = split(store.keys(&filter.to_store()).await?);
    hint_of_more(found.len() + unreadable.len(), filter.limit.unwrap_or(LIMIT) as usize);
    let keys: Vec<Value> = found.iter().map(|one| fields(one, false)).collect();
    let mut unread: Vec<Value> = Vec::new();
    for (digest, why) in &unreadable {
        let hash = &hex(digest)[..SHOWN];
        if output == Output::Table {
            say("ERROR", &format!("key {hash} cannot be read: {}", printable(why)));
        }
        unread.push(json!({ "hash": hash, "error": why }));
    }
    let header = ["hash", "tenant", "operation", "mode", "state", "tries", "lease left", "since", "outcome"];
    let rows = found.iter().map(|ReadRecord { now, record }| {
        let left = record.lease_left(*now);
        let state = record.state_at(*now).to_string();
        [
            hash(record)[..SHOWN].to_owned(),
            record.identity.tenant().to_owned(),
            record.identity.operation().to_string(),
            record.mode.to_string(),
            if record.parked { format!("{state} (parked)") } else { state },
            record.attempts.to_string(),
            if left.is_zero() { String::new() } else { format!("{} s", left.as_secs()) },
            moment(record.created_at),
            record.outcome_at.map(moment).unwrap_or_default(),
        ]
    });
    listed(output, &json!({ "keys": keys, "unreadable": unread }), header, rows)
}

async fn show(store: &dyn KeyOperator, found: &ReadRecord, named: bool, output: Output) -> Result<(), AppError> {
    let mut fields = fields(found, true);
    let mut runs = store.runs_of(found.record.operation_id).await?;
    runs.retain(|run| run.evidence.kind == "run");
    if named {
        fields["key"] = found.record.identity.key().as_str().into();
    }
    if output == Output::Json {
        let runs = runs.iter().map(|run| {
            let seen = &run.evidence;
            json!({ "ended": seen.verdict, "status": seen.status, "epoch": seen.epoch, "at": moment(run.at) })
        });
        fields["late_runs"] = runs.collect();
        data!("{fields}");
        return Ok(());
    }
    for (name, value) in fields.as_object().into_iter().flatten() {
        data!("{:<19} {}", name.replace('_', " "), plain(value));
    }
    for run in runs {
        let status = run.evidence.status.map(|status| format!(" with status {status}")).unwrap_or_default();
        let (verdict, at) = (run.evidence.verdict, moment(run.at));
        data!("{:<19} {verdict}{status} at {at}, after it had lost its lease", "a run ended");
    }
    Ok(())
}

/// All keys that match and that can be purged, in pages.
struct Pages<'a> {
    store: &'a dyn KeyOperator,
    filter: KeyFilter,
    is_last: bool,
    /// How many keys of the pages until now cannot be read.
    unreadable: usize,
}

impl<'a> Pages<'a> {
    fn new(store: &'a dyn KeyOperator, filter: &Filter) -> Self {
        let filter = KeyFilter { after: Some(Vec::new()), limit: PAGE, ..filter.to_purge() };
        Self { store, filter, is_last: false, unreadable: 0 }
    }

    /// The next page; none after the last.
    async fn next(&mut self) -> Result<Option<Vec<ReadRecord>>, AppError> {
        if self.is_last {
            return Ok(None);
        }
        let (page, unreadable) = split(self.store.keys(&self.filter).await?);
        self.is_last = page.len() + unreadable.len() < PAGE as usize;
        self.unreadable += unreadable.len();
        let last_read = page.last().map(|last| last.record.identity.digest().to_vec());
        self.filter.after = last_read.max(unreadable.last().map(|(digest, _)| digest.clone()));
        Ok(Some(page))
    }
}

/// Counts the keys to purge, and returns the moment of the count too: a key that gets its outcome
/// later is not purged.
async fn count(store: &dyn KeyOperator, filter: &Filter) -> Result<(usize, Option<DbTime>), AppError> {
    let (mut pages, mut count, mut until) = (Pages::new(store, filter), 0, None);
    while let Some(page) = pages.next().await? {
        until = until.or(page.first().map(|first| first.now));
        count += page.iter().filter(|one| one.record.outcome_at <= until).count();
    }
    left_out(pages.unreadable);
    Ok((count, until))
}

/// The keys that an act is on.
struct Meant {
    keys: Vec<ReadRecord>,
    /// How many more match, and stay.
    remaining: usize,
    /// The filter that found them; none where each was named.
    found_by: Option<KeyFilter>,
}

impl Meant {
    fn named(key: ReadRecord) -> Self {
        Self { keys: vec![key], remaining: 0, found_by: None }
    }
}

/// The keys that a purge is on, by their hashes or by a filter.
async fn to_purge(store: &dyn KeyOperator, hashes: &[String], filter: &Filter, all: bool) -> Result<Meant, AppError> {
    if hashes.is_empty() && filter.is_empty() && !all {
        return Err(AppError::usage("name hashes (`oncebox keys list` shows them), a filter, or --all"));
    }
    if hashes.is_empty() {
        let found_by = filter.to_purge();
        let (keys, unreadable) = split(store.keys(&found_by).await?);
        let mut remaining = 0;
        if keys.len() + unreadable.len() >= found_by.limit as usize {
            remaining = count(store, filter).await?.0.saturating_sub(keys.len());
        } else {
            left_out(unreadable.len());
        }
        return Ok(Meant { keys, remaining, found_by: Some(found_by) });
    }
    let mut keys: Vec<ReadRecord> = Vec::new();
    for named in hashes {
        let key = by_digest(store, digits(named)?, named).await?;
        // Named twice, perhaps by fewer digits, it would be gone when its second turn comes.
        if keys.iter().all(|other| other.record.identity != key.record.identity) {
            keys.push(key);
        }
    }
    Ok(Meant { keys, remaining: 0, found_by: None })
}

/// Purges all keys that match and have their outcome now, page by page.
async fn purge_all(
    store: &dyn KeyOperator,
    filter: &Filter,
    change: &KeyChange,
    act: &Act,
    output: Output,
) -> Result<(), AppError> {
    let (of, until) = count(store, filter).await?;
    act.confirm(of, "keys", "purged")?;
    let (mut hashes, mut changed, found_by) = (Vec::new(), 0, filter.to_purge());
    for dry_run in act.runs() {
        let mut batches = Batches::new(if *dry_run { "looked at" } else { "done" }, of, PAGE as usize);
        let mut pages = Pages::new(store, filter);
        hashes.clear();
        changed = 0;
        while let Some(page) = pages.next().await? {
            let before = hashes.len();
            for one in page.iter().filter(|one| one.record.outcome_at <= until) {
                let shown = hash(&one.record)[..SHOWN].to_owned();
                let done = change_found(store, one, Some(&found_by), change, &act.context(*dry_run)).await;
                let is_done = done.map_err(|error| match (hashes.len(), dry_run) {
                    (done @ 1.., false) => refused(error).on(&format!("after {done} of {of}, {shown}")),
                    (_, _) => refused(error).on(&shown),
                })?;
                if is_done { hashes.push(shown) } else { changed += 1 }
            }
            batches.next(hashes.len() - before);
        }
    }
    left_alone(changed);
    act.told("purge", "hashes", &hashes, 0, output)
}

/// Changes a key. Returns false where a filter had found it and does not find it any more as it
/// was: a sweep took it, a client used it anew, or a late run of it spoke.
async fn change_found(
    store: &dyn KeyOperator,
    one: &ReadRecord,
    found_by: Option<&KeyFilter>,
    change: &KeyChange,
    context: &ActContext,
) -> Result<bool, StoreError> {
    let seen = &one.record;
    match (store.act_on_key(seen, change, context).await, found_by) {
        (Err(error @ StoreError::Refused(_)), Some(filter)) => {
            let digest = seen.identity.digest().to_vec();
            let again = store.keys(&KeyFilter { digest, after: None, limit: 1, ..filter.clone() }).await?;
            let mut records = again.keys.iter().filter_map(|look| look.record.as_ref());
            let is_same = records.any(|now| (now.operation_id, now.epoch) == (seen.operation_id, seen.epoch));
            if is_same { Err(error) } else { Ok(false) }
        }
        (done, _) => done.map(|()| true),
    }
}

async fn act_on(
    store: &dyn KeyOperator,
    meant: &Meant,
    change: &KeyChange,
    act: &Act,
    output: Output,
) -> Result<(), AppError> {
    let (verb, done) = match change {
        KeyChange::Release { .. } => ("release", "released"),
        KeyChange::Purge { .. } => ("purge", "purged"),
        KeyChange::Resolve { .. } => ("resolve", "resolved"),
    };
    let Meant { keys, remaining, found_by } = meant;
    act.confirm(keys.len(), &of_all(keys.len(), *remaining, "keys"), done)?;
    let mut hashes = Vec::new();
    for dry_run in act.runs() {
        hashes.clear();
        for one in keys {
            let shown = hash(&one.record)[..SHOWN].to_owned();
            let done = change_found(store, one, found_by.as_ref(), change, &act.context(*dry_run)).await;
            if done.map_err(|error| refused(error).on(&shown))? {
                hashes.push(shown);
            }
        }
    }
    left_alone(keys.len() - hashes.len());
    act.told(verb, "hashes", &hashes, *remaining, output)
}
