//! Duty: what an operator reads and changes of keys and operations. Each act has one
//! implementation, which command line and library call.
//!
//! Guarantees:
//!
//! * An act is one transaction with its audit row, fenced by the epoch that the operator read. If
//!   the row has changed since, the act is refused, and the operator must read again. A dry run
//!   does everything and rolls back. One act has two transactions: to `resolve` an abandoned claim
//!   in progress, it is first made UNKNOWN. A dry run of that one only checks.
//! * A key that is in progress or UNKNOWN, or whose operation has an intent, is never deleted
//!   (O11). One that is COMPLETED may be: after a `release` the next request executes again.
//! * Only the worker of an operation sends again, by its usual rule
//!   ([`Strategy::next`](crate::operation::rules::provider::Strategy::next)). It goes beyond that
//!   rule only where an operator accepts a duplicate, with name and reason (O6).
//! * What an operator states is evidence of kind `operator` (O8), appended in the same transaction.
//!
//! Not here: printing (`cli`), and dead messages ([`Operator`](super::Operator)).

mod open;
mod words;

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use self::open::{refuse_unforgettable, resolvable};
use self::words::says;
pub(crate) use self::words::{judged, judgement, nothing_known, overruled, still_stands};
use super::ActContext;
use crate::error::StoreError;
use crate::operation::port::evidence::NewEvidence;
use crate::operation::port::phases::{ENDED, FIRST_POINT, Phases, StoredIntent, StoredOperation, end_stage};
use crate::operation::port::{Fenced, Look, RunOutcome};
use crate::operation::rules::flow::Stage;
use crate::operation::rules::provider::{Gap, Settled, Verdict};
use crate::operation::rules::retention::Retention;
use crate::operation::rules::versions::Announced;
use crate::operation::rules::{Identity, OperationName, Record, State};

/// Which idempotency keys an operator asks for; all conditions must be met.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyFilter {
    /// Only those whose digest begins with these bytes.
    pub digest: Vec<u8>,
    /// Only of this tenant; empty: the public scope.
    pub tenant: Option<String>,
    /// Only of this operation.
    pub operation: Option<OperationName>,
    /// Only in this state. [`State::Expired`] is not stored: the clock decides.
    pub state: Option<State>,
    /// Only claimed longer ago than this.
    pub older_than: Option<Duration>,
    /// Only what can be purged: it has an outcome, no intent, and no late success against it.
    pub forgettable: bool,
    /// For pages, in the order of digests: only those above this one. It is empty for the first
    /// page. `None`: no pages, the oldest first.
    pub after: Option<Vec<u8>>,
    /// At most this many.
    pub limit: u32,
}

/// Which phased operations an operator asks for; all conditions must be met.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OperationFilter {
    /// Only the operation with this id; `None`: any.
    pub operation_id: Option<Uuid>,
    /// Only of this flow.
    pub flow: Option<String>,
    /// Only of this tenant.
    pub tenant: Option<String>,
    /// Only at this stage.
    pub stage: Option<Stage>,
    /// Only those that wait for an operator.
    pub parked: bool,
    /// Only those with a conflict that no person has judged: they failed with an effect that was
    /// not undone, or their evidence contradicts their outcome (O8).
    pub conflicts: bool,
    /// Only begun longer ago than this.
    pub older_than: Option<Duration>,
    /// At most this many.
    pub limit: u32,
}

/// The keys that match a `KeyFilter`.
#[derive(Debug, Default)]
pub struct FoundKeys {
    /// The oldest claim first; in pages, the smallest digest first. Each has a record.
    pub keys: Vec<Look>,
    /// The digests of keys whose records cannot be read, for example because a newer version wrote
    /// them, and why. Requests under them are refused, so an operator must see them.
    pub unreadable: Vec<(Vec<u8>, String)>,
}

/// The operations that match an `OperationFilter`.
#[derive(Debug, Default)]
pub struct FoundOperations {
    /// First those that wait for an operator, then others without an outcome, then the rest, each
    /// oldest first.
    pub operations: Vec<StoredOperation>,
    /// The ids of operations whose rows cannot be read, and why. No worker drives them, so an
    /// operator must see them.
    pub unreadable: Vec<(Uuid, String)>,
    /// In a list of conflicts: the ids of operations of which only evidence says that something
    /// happened. The record is gone, or says that it failed.
    pub orphans: Vec<Uuid>,
}

/// What was read under this id. What cannot be read is noted, and hides nothing else.
pub(crate) fn readable<I, T>(
    read: Result<T, StoreError>,
    id: I,
    unreadable: &mut Vec<(I, String)>,
) -> Result<Option<T>, StoreError> {
    match read {
        Err(error @ StoreError::Corrupt(_)) => {
            unreadable.push((id, error.to_string()));
            Ok(None)
        }
        read => read.map(Some),
    }
}

/// An act of an operator on a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyChange {
    /// The record is deleted: the next request with this key executes.
    Release {
        /// Whether a failure is forgotten although a run that lost its lease succeeded.
        against_evidence: bool,
    },
    /// The record is deleted, and the bound of the purge is raised above the time inside the key,
    /// so that a late retry is recognised as expired (O23). Without a time in the key no bound is
    /// recorded: its operation does not judge ages.
    Purge {
        /// The same as in [`Self::Release`].
        against_evidence: bool,
    },
    /// An UNKNOWN gets its outcome.
    Resolve {
        /// What the operator found out.
        outcome: Box<RunOutcome>,
        /// How long answer, body and metadata are kept, counted from now.
        retention: Retention,
        /// Whether the outcome is written although a run that lost its lease ended with the
        /// opposite.
        against_evidence: bool,
    },
}

/// An act of an operator on an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OperationChange {
    /// It is due at once, with no attempts counted. What the operator states, if anything, is
    /// evidence.
    GoOn {
        /// The rows that are appended to the evidence of the operation.
        evidence: Vec<NewEvidence>,
        /// The stage at which it goes on, where that changes.
        stage: Option<Stage>,
        /// Whether a live lease is taken away.
        take_over: bool,
    },
    /// It gets its outcome, and so does its record.
    End {
        /// What the operator found out.
        outcome: Box<RunOutcome>,
        /// How long answer, body and metadata are kept, counted from now.
        retention: Retention,
        /// What the operator said, appended to the evidence of the operation.
        evidence: Box<NewEvidence>,
        /// Whether a live lease is taken away.
        take_over: bool,
    },
}

/// What an operator found out about an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolution {
    /// How the operation ended: this outcome is written, and no phase runs any more.
    Ended(Box<RunOutcome>, Retention),
    /// Whether one effect happened: the worker goes on with the flow from there.
    Effect {
        /// The name of the effect within its operation.
        effect: String,
        /// True where the effect happened, false where it did not.
        happened: bool,
    },
}

impl KeyFilter {
    /// The smallest and the greatest digest that begin with the given bytes.
    pub(crate) fn digests(&self) -> (Vec<u8>, Vec<u8>) {
        let filled = |with: u8| {
            let mut digest = self.digest.clone();
            digest.resize(32, with);
            digest
        };
        (filled(0), filled(0xff))
    }

    /// Whether only records without an outcome match, of which there are few.
    pub(crate) fn is_of_open_state(&self) -> bool {
        matches!(self.state, Some(State::InProgress | State::UnknownRequiresRecovery))
    }

    /// The state as it is stored, and whether its time must be over.
    pub(crate) fn stored_state(&self) -> (Option<&'static str>, bool) {
        match self.state {
            Some(State::Expired) => (None, true),
            state => (state.map(State::as_str), false),
        }
    }
}

impl OperationFilter {
    /// Whether the filter asks for conflicts and for nothing that is known of an operation's row.
    pub(crate) fn is_of_all_conflicts(&self) -> bool {
        self.conflicts
            && self.operation_id.is_none()
            && self.flow.is_none()
            && self.tenant.is_none()
            && self.stage.is_none()
            && !self.parked
            && self.older_than.is_none()
    }
}

/// The values of an act's audit row.
#[derive(Debug)]
pub(crate) struct Audit<'a> {
    pub(crate) act: &'static str,
    /// The name of the operation; of a phased one, its flow.
    pub(crate) place: &'a str,
    /// The digest of the key, where its record is there.
    pub(crate) digest: Option<[u8; 32]>,
    /// The id of the run that the act was on.
    pub(crate) operation_id: Uuid,
    /// The state before the act, and what the operator decided.
    pub(crate) detail: String,
}

impl KeyChange {
    /// The audit row of this change.
    pub(crate) fn audit<'a>(&self, seen: &'a Record) -> Audit<'a> {
        let from = format!("{} of mode {}", seen.state, seen.mode);
        let (act, detail) = match self {
            Self::Release { .. } => ("release", from),
            Self::Purge { .. } => ("purge", from),
            Self::Resolve { outcome, .. } => ("resolve", format!("{from}, resolved as {}", word(outcome))),
        };
        let (place, digest) = (seen.identity.operation().as_str(), Some(seen.identity.digest()));
        Audit { act, place, digest, operation_id: seen.operation_id, detail }
    }
}

impl OperationChange {
    /// The audit row of this change.
    pub(crate) fn audit<'a>(&self, seen: &'a StoredOperation) -> Audit<'a> {
        // The act deletes the reason of the parking.
        let parked = seen.parked.as_ref().map(|reason| format!(", parked: {reason}")).unwrap_or_default();
        let from = format!("{} at {}{parked}", seen.stage.as_str(), seen.point);
        let (act, detail) = match self {
            Self::GoOn { evidence, .. } => {
                let is_retry = evidence.iter().all(|row| row.verdict == WAIVED);
                let words = evidence.iter().map(|row| format!(", {} {}: {}", row.effect, row.send, row.verdict));
                (if is_retry { "retry" } else { "resolve" }, from + &words.collect::<String>())
            }
            Self::End { outcome, .. } => ("resolve", format!("{from}, resolved as {}", word(outcome))),
        };
        let digest = seen.identity.as_ref().map(Identity::digest);
        Audit { act, place: &seen.flow, digest, operation_id: seen.operation_id, detail }
    }

    /// The new stage; none where the stage stays.
    pub(crate) fn stage(&self) -> Result<Option<Stage>, StoreError> {
        match self {
            Self::GoOn { stage, .. } => Ok(*stage),
            Self::End { outcome, .. } => end_stage(outcome).map(Some),
        }
    }

    /// Whether the operation gets its outcome.
    pub(crate) fn ends(&self) -> bool {
        matches!(self, Self::End { .. })
    }

    /// Whether a live lease is taken away.
    pub(crate) fn takes_over(&self) -> bool {
        match self {
            Self::GoOn { take_over, .. } | Self::End { take_over, .. } => *take_over,
        }
    }
}

/// The verdict for a send that may have arrived and is repeated all the same.
const WAIVED: &str = "waived";

fn word(outcome: &RunOutcome) -> &'static str {
    match outcome {
        RunOutcome::Completed(_) => "completed",
        RunOutcome::FailedReplayable { .. } => "failed",
        RunOutcome::FailedRetryable { .. } => "not happened",
        RunOutcome::Unknown => "unknown",
    }
}

fn refused<T>(why: impl Into<String>) -> Result<T, StoreError> {
    Err(StoreError::Refused(why.into()))
}

/// Why an act is refused on what is not as the operator saw it.
const CHANGED: &str = "it has changed meanwhile: look again";

/// Refuses the act where the record or operation has changed since the operator saw it.
fn changed(fenced: Fenced) -> Result<(), StoreError> {
    match fenced {
        Fenced::Done => Ok(()),
        Fenced::LostOwnership => refused(CHANGED),
    }
}

/// Duty: operating keys and operations.
#[async_trait]
pub trait KeyOperator: Phases {
    /// The records that match. It is quick with a digest, a state without an outcome, or pages;
    /// with any other filter it reads the whole.
    async fn keys(&self, filter: &KeyFilter) -> Result<FoundKeys, StoreError>;

    /// The operations that match, with intents and evidence: first those that wait for an operator,
    /// then others without an outcome, then the rest, each oldest first.
    async fn operations(&self, filter: &OperationFilter) -> Result<FoundOperations, StoreError>;

    /// Which fingerprints live processes read and write, by operation and process (O21). A process
    /// is live if it announced them within the last two minutes of database time (`LIVE_FOR`).
    async fn live_versions(&self) -> Result<Vec<Announced>, StoreError>;

    /// Records that a person has judged a conflict, with an audit row. The operation is listed no
    /// more, and is deleted with its record; if the record is gone, the operation is deleted at
    /// once.
    ///
    /// # Errors
    /// [`StoreError::Refused`]: the operation has no outcome yet; nothing is known of this id; or
    /// its record still says that it failed, and only this evidence prevents another run.
    async fn judge(&self, operation_id: Uuid, context: &ActContext) -> Result<(), StoreError>;

    /// Changes a record and writes the audit row, fenced by the epoch that was read.
    /// [`Self::act_on_key`] refuses changes that are not allowed; this method only runs the
    /// statement and returns whether the fence held.
    async fn change_key(&self, seen: &Record, change: &KeyChange, context: &ActContext) -> Result<Fenced, StoreError>;

    /// Changes an operation and writes the audit row. It is fenced by the epoch, by the lease
    /// unless that is taken over, and by the reason of its parking and the number of evidence rows,
    /// because the operator has not judged newer evidence (O8).
    async fn change_operation(
        &self,
        seen: &StoredOperation,
        change: &OperationChange,
        context: &ActContext,
    ) -> Result<Fenced, StoreError>;

    /// Releases, purges or resolves a key. Before `resolve`, an abandoned claim in progress is
    /// made UNKNOWN, in a transaction of its own; a dry run leaves it as it is.
    ///
    /// # Errors
    /// [`StoreError::Refused`], always where the record has changed since it was read, or where a
    /// run that lost its lease ended with the opposite and `against_evidence` is not given.
    ///
    /// * `release` and `purge`: the key is in progress or unknown, or it has an intent.
    /// * `resolve`: the key is in progress, and its lease is not over or its mode is `bridged`; it
    ///   has its outcome; it is an operation in phases; the outcome that is given is UNKNOWN.
    async fn act_on_key(&self, seen: &Record, change: &KeyChange, context: &ActContext) -> Result<(), StoreError> {
        let resolved;
        let record = match change {
            KeyChange::Resolve { outcome, against_evidence, .. } => {
                resolved = resolvable(self, seen, outcome, *against_evidence, context.dry_run).await?;
                // There is nothing to try: the claim was not made unknown.
                if seen.state == State::InProgress && context.dry_run {
                    return Ok(());
                }
                &resolved
            }
            KeyChange::Release { against_evidence } | KeyChange::Purge { against_evidence } => {
                refuse_unforgettable(self, seen, *against_evidence).await?;
                seen
            }
        };
        changed(self.change_key(record, change, context).await?)
    }

    /// Makes an operation due for its worker at once, with no attempts counted. The worker decides
    /// by its usual rule what may be sent. With `accept_duplicate` the sends that may have arrived
    /// are waived: the worker sends again beyond that rule, so the effect may happen twice. The
    /// waiver is no proof that those sends did not arrive.
    ///
    /// # Errors
    /// [`StoreError::Refused`]: it has its outcome; a process drives it and `take_over` is not
    /// given; its first phase was never committed as a whole; only the reason of its parking has
    /// what a provider said; a handler ended the transaction of a phase, and no duplicate is
    /// accepted; an open effect has the strategy `none`, and no duplicate is accepted; a duplicate
    /// is accepted and no open effect was sent, or the provider did something else; it has changed
    /// since it was read.
    async fn retry(
        &self,
        seen: &StoredOperation,
        accept_duplicate: bool,
        take_over: bool,
        context: &ActContext,
    ) -> Result<(), StoreError> {
        may_change(seen, take_over)?;
        if seen.point == FIRST_POINT {
            return refused("its first phase was never committed as a whole: what it did may be done, so resolve it");
        }
        if let Some((effect, verdict)) = seen.unstored() {
            return refused(unkept(effect, verdict));
        }
        // The handler committed its writes by itself, but the point was not moved (O1).
        let ended = seen.parked.as_deref().is_some_and(|reason| reason.ends_with(ENDED));
        if ended && !accept_duplicate {
            return refused(
                "a phase ended its transaction by itself: what it did may be done twice. Resolve it, or accept a duplicate",
            );
        }
        if accept_duplicate && seen.parked.as_deref() == Some(Gap::Mismatch.reason()) {
            return refused(
                "the provider did something else than what was asked, and one more send does not change that: resolve it",
            );
        }
        let open = || seen.intents.iter().filter(|intent| intent.outcome.is_none());
        let mut evidence = Vec::new();
        if accept_duplicate {
            for intent in open() {
                let waived = |send| says(seen, &intent.intent.effect, send, WAIVED, context);
                evidence.extend((1..=intent.sends).map(waived));
            }
            if evidence.is_empty() && !ended {
                return refused("no open effect of it was ever sent: there is no duplicate to accept");
            }
        } else if let Some(intent) = open().find(|intent| intent.intent.strategy == "none") {
            return refused(format!(
                "`{}` has no means to find out whether it happened (strategy `none`): resolve it, or accept a duplicate",
                intent.intent.effect
            ));
        }
        // UNKNOWN without an intent: a phase before any call of a provider was given up.
        let stage = (seen.intents.is_empty() && seen.stage == Stage::Unknown).then_some(Stage::Local);
        let change = OperationChange::GoOn { evidence, stage, take_over };
        changed(self.change_operation(seen, &change, context).await?)
    }

    /// Records how an operation ended, or whether one of its effects happened.
    ///
    /// # Errors
    /// [`StoreError::Refused`]: it has its outcome; a process drives it and `take_over` is not
    /// given; there is no such effect, or it is settled; only the reason of its parking has what a
    /// provider said of another effect; the evidence says the opposite, or a failure is recorded
    /// while an effect was not undone, and `against_evidence` is not given; it was changed after
    /// `seen` was read.
    async fn resolve(
        &self,
        seen: &StoredOperation,
        resolution: &Resolution,
        take_over: bool,
        against_evidence: bool,
        context: &ActContext,
    ) -> Result<(), StoreError> {
        may_change(seen, take_over)?;
        let change = match resolution {
            Resolution::Ended(outcome, retention) => {
                let verdict = match &**outcome {
                    RunOutcome::Completed(_) => "success",
                    RunOutcome::FailedReplayable { .. } => "failure",
                    _ => return refused("an operation in phases ends with what it did, or with a failure"),
                };
                not_against(seen, None, verdict, against_evidence)?;
                if verdict == "failure" && !against_evidence {
                    nothing_stands(seen)?;
                }
                let evidence = Box::new(says(seen, "", 0, verdict, context));
                let (outcome, retention) = (outcome.clone(), *retention);
                OperationChange::End { outcome, retention, evidence, take_over }
            }
            Resolution::Effect { effect, happened } => {
                match seen.intents.iter().find(|intent| intent.intent.effect == *effect) {
                    None => return refused(format!("it has no effect `{effect}`")),
                    Some(intent) => {
                        if let Some(outcome) = &intent.outcome {
                            return refused(format!("`{effect}` is settled: {outcome}"));
                        }
                    }
                }
                if let Some((of, said)) = seen.unstored().filter(|(of, _)| of != effect) {
                    return refused(unkept(of, said));
                }
                let verdict = if *happened { "success" } else { "failure" };
                not_against(seen, Some(effect), verdict, against_evidence)?;
                let evidence = vec![says(seen, effect, 0, verdict, context)];
                OperationChange::GoOn { evidence, stage: None, take_over }
            }
        };
        changed(self.change_operation(seen, &change, context).await?)
    }
}

fn may_change(seen: &StoredOperation, take_over: bool) -> Result<(), StoreError> {
    if seen.outcome_at.is_some() {
        return refused(format!("it has its outcome: {}; no outcome is rewritten", seen.stage.as_str()));
    }
    if seen.lease_until.is_some() && !take_over {
        return refused("somebody drives it: wait until its lease is over, or take it over");
    }
    Ok(())
}

/// Refuses a verdict that evidence contradicts, unless the operator forces it (O8).
fn not_against(seen: &StoredOperation, effect: Option<&str>, verdict: &str, forced: bool) -> Result<(), StoreError> {
    let opposite = if verdict == "success" { "failure" } else { "success" };
    let contradicts = seen.evidence.iter().map(|row| &row.evidence).find(|row| {
        // For a settled effect the flow has already decided from this evidence.
        let settled = seen.intents.iter().any(|intent| intent.intent.effect == row.effect && intent.outcome.is_some());
        row.kind != "run" && row.verdict == opposite && !settled && effect.is_none_or(|effect| effect == row.effect)
    });
    // What the database refused to keep is evidence too.
    let unstored = seen
        .unstored()
        .map(|(of, verdict)| (of, verdict.word()))
        .filter(|(of, word)| *word == opposite && effect.is_none_or(|effect| effect == *of));
    match contradicts.map(|row| (row.effect.as_str(), row.verdict.as_str())).or(unstored) {
        Some((of, word)) if !forced => {
            refused(format!("the evidence of `{of}` says the opposite: {word}; `operations show` has it"))
        }
        _ => Ok(()),
    }
}

/// Refuses a failure while an effect of the operation has succeeded and was not undone. The phases
/// of the operation have the same rule (O13).
fn nothing_stands(seen: &StoredOperation) -> Result<(), StoreError> {
    let happened = |intent: &&StoredIntent| intent.settled() == Some(Settled::Succeeded);
    let undone = |effect: &str| {
        seen.intents.iter().filter(happened).any(|intent| intent.intent.undoes.as_deref() == Some(effect))
    };
    let stands = seen
        .intents
        .iter()
        .filter(happened)
        .map(|intent| &intent.intent)
        .find(|intent| intent.undoes.is_none() && intent.strategy != "repeatable" && !undone(&intent.effect));
    match stands {
        Some(intent) => refused(format!("`{}` has succeeded, and nothing has undone it: it stands", intent.effect)),
        None => Ok(()),
    }
}

/// Why an act is refused that would delete the only copy of what a provider said.
fn unkept(effect: &str, verdict: Verdict) -> String {
    format!(
        "only the reason of its parking has what the provider said of `{effect}`: {}. Resolve `{effect}` by that",
        verdict.word()
    )
}

/// Why an act is refused: a run that lost its lease ended with this verdict.
fn ended_late(verdict: &str) -> String {
    format!("a run of it that lost its lease ended with {verdict}; `oncebox keys show` has it")
}
