//! Duty: what an operator sees and does of keys and operations. One implementation of each act;
//! command line and library call it.
//!
//! Guarantees:
//!
//! * An act is one transaction with its audit row, fenced by the epoch of what was seen: who was
//!   quicker has won, and the operator is told to look again. A dry run does all of it and takes it
//!   back.
//! * What may have had an effect is never forgotten: a key that runs, one whose outcome is unknown,
//!   and any operation with an intent stay (O11).
//! * An operation is sent again by its worker, under the same rule as ever
//!   ([`Strategy::next`](crate::policy::operation::provider::Strategy::next)); beyond it only where
//!   a duplicate is accepted, by name and with a reason (O6).
//! * A word of an operator is evidence of kind `operator` (O8), appended in the same transaction.
//!
//! Not here: how these are printed (`cli`), and dead messages ([`Operator`](super::Operator)).

use std::future::Future;
use std::time::Duration;

use uuid::Uuid;

use super::operations::{Fenced, Look, Outcome, late_runs};
use super::phases::{ENDED, FIRST_POINT, NewEvidence, Sealed, StoredIntent, StoredOperation, end_stage};
use super::{ActContext, Phases};
use crate::error::StoreError;
use crate::policy::operation::flow::Stage;
use crate::policy::operation::retention::Retention;
use crate::policy::operation::versions::Announced;
use crate::policy::operation::{Identity, Mode, OperationName, Record, State};

/// Which idempotency keys an operator asks for; the conditions hold together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyFilter {
    /// Only those whose digest begins with these bytes.
    pub digest: Vec<u8>,
    /// Only of this tenant; empty: the public scope.
    pub tenant: Option<String>,
    /// Only of this operation.
    pub operation: Option<OperationName>,
    /// Only in this state; [`State::Expired`] is asked of the clock.
    pub state: Option<State>,
    /// Only claimed longer ago than this.
    pub older_than: Option<Duration>,
    /// Only those that can be purged: an outcome, no intent, and no late run that says otherwise.
    pub forgettable: bool,
    /// At most this many.
    pub limit: u32,
}

/// Which phased operations an operator asks for; the conditions hold together.
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
    /// Only those that failed with an effect that stands, or whose evidence contradicts their
    /// outcome, and that no person has judged (O8).
    pub conflicts: bool,
    /// Only begun longer ago than this.
    pub older_than: Option<Duration>,
    /// At most this many.
    pub limit: u32,
}

/// Operations that were asked for.
#[derive(Debug, Default)]
pub struct FoundOperations {
    /// Those that wait for an operator first, then what has no outcome, each oldest first.
    pub operations: Vec<StoredOperation>,
    /// Whose rows are not what was written, and why: nobody drives them, so an operator must see
    /// them.
    pub unreadable: Vec<(Uuid, String)>,
    /// With conflicts: the ids of operations of which nothing is left but evidence that something
    /// happened.
    pub orphans: Vec<Uuid>,
}

impl FoundOperations {
    /// Adds what was read under this id. One that cannot be read does not hide the others.
    pub(super) fn add(
        &mut self,
        id: Uuid,
        read: Result<Option<StoredOperation>, StoreError>,
    ) -> Result<(), StoreError> {
        match read {
            Ok(found) => self.operations.extend(found),
            Err(error @ StoreError::Corrupt(_)) => self.unreadable.push((id, error.to_string())),
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// What is done with a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyChange {
    /// Forgotten: the next request under it executes.
    Release {
        /// Whether a failure is forgotten though a run that lost its lease says that it succeeded.
        against_evidence: bool,
    },
    /// Forgotten, and recorded up to the time inside the key, so that a late retry of it is
    /// recognised (O23). A key without a time is of an operation that does not judge ages.
    Purge {
        /// The same as in [`Self::Release`].
        against_evidence: bool,
    },
    /// An UNKNOWN gets its outcome.
    Resolve {
        /// What the operator found out.
        outcome: Outcome,
        /// How long answer, body and metadata are kept, counted from now.
        retention: Retention,
        /// Whether a run that lost its lease may have said the opposite.
        against_evidence: bool,
    },
}

/// What is done with an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OperationChange {
    /// Due at once, its attempts counted anew; the operator's words, if any, are evidence.
    GoOn {
        /// The rows that are appended to the evidence of the operation.
        evidence: Vec<NewEvidence>,
        /// The stage that it goes on at, where that is another one.
        stage: Option<Stage>,
        /// Whether a live lease is taken away.
        take_over: bool,
    },
    /// It gets its outcome, and so does its record.
    End {
        /// What the operator found out.
        outcome: Box<Outcome>,
        /// How long answer, body and metadata are kept, counted from now.
        retention: Retention,
        /// What the operator said, appended to the evidence of the operation.
        evidence: Box<NewEvidence>,
        /// Whether a live lease is taken away.
        take_over: bool,
    },
}

/// What an operator says of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolution {
    /// How it ended: its outcome is written as given, and no phase runs any more.
    Ended(Outcome, Retention),
    /// What became of one effect: the worker goes on with the flow from there.
    Effect {
        /// The name of the effect within its operation.
        effect: String,
        /// True where the effect happened, false where it did not.
        happened: bool,
    },
}

impl KeyFilter {
    /// The least and the greatest digest that is meant.
    pub(super) fn digests(&self) -> (Vec<u8>, Vec<u8>) {
        let filled = |with: u8| {
            let mut digest = self.digest.clone();
            digest.resize(32, with);
            digest
        };
        (filled(0), filled(0xff))
    }

    /// Whether only records without outcome are meant, of which there are few.
    pub(super) fn is_of_open_state(&self) -> bool {
        matches!(self.state, Some(State::InProgress | State::UnknownRequiresRecovery))
    }

    /// The state as it is stored, and whether its time must be over.
    pub(super) fn stored_state(&self) -> (Option<&'static str>, bool) {
        match self.state {
            Some(State::Expired) => (None, true),
            state => (state.map(State::as_str), false),
        }
    }
}

impl OperationFilter {
    /// Whether conflicts are meant, of whatever operation.
    pub(super) fn is_of_all_conflicts(&self) -> bool {
        self.conflicts
            && self.operation_id.is_none()
            && self.flow.is_none()
            && self.tenant.is_none()
            && self.stage.is_none()
    }
}

/// What the audit row of an act says.
#[derive(Debug)]
pub(super) struct Audit<'a> {
    /// The word for it.
    pub(super) act: &'static str,
    /// The name of the operation.
    pub(super) place: &'a str,
    /// The digest of the key, where its record is there.
    pub(super) digest: Option<[u8; 32]>,
    /// The id of the run that the act was on.
    pub(super) operation_id: Uuid,
    /// What it was before.
    pub(super) detail: String,
}

impl KeyChange {
    /// The audit row of this change.
    pub(super) fn audit<'a>(&self, seen: &'a Record) -> Audit<'a> {
        Audit {
            act: self.act(),
            place: seen.identity.operation().as_str(),
            digest: Some(seen.identity.digest()),
            operation_id: seen.operation_id,
            detail: self.detail(seen),
        }
    }

    fn act(&self) -> &'static str {
        match self {
            Self::Release { .. } => "release",
            Self::Purge { .. } => "purge",
            Self::Resolve { .. } => "resolve",
        }
    }

    fn detail(&self, seen: &Record) -> String {
        match self {
            Self::Release { .. } | Self::Purge { .. } => format!("{} of mode {}", seen.state, seen.mode),
            Self::Resolve { outcome, .. } => {
                format!("{} of mode {}, resolved as {}", seen.state, seen.mode, word(outcome))
            }
        }
    }
}

impl OperationChange {
    /// The audit row of this change.
    pub(super) fn audit<'a>(&self, seen: &'a StoredOperation) -> Audit<'a> {
        Audit {
            act: self.act(),
            place: &seen.flow,
            digest: seen.identity.as_ref().map(Identity::digest),
            operation_id: seen.operation_id,
            detail: self.detail(seen),
        }
    }

    /// The stage that it leads to; none where that stays.
    pub(super) fn stage(&self) -> Result<Option<Stage>, StoreError> {
        match self {
            Self::GoOn { stage, .. } => Ok(*stage),
            Self::End { outcome, .. } => end_stage(outcome).map(Some),
        }
    }

    /// Whether the operation gets its outcome.
    pub(super) fn ends(&self) -> bool {
        matches!(self, Self::End { .. })
    }

    fn act(&self) -> &'static str {
        match self {
            Self::GoOn { evidence, .. } if evidence.iter().all(|row| row.verdict == WAIVED) => "retry",
            Self::GoOn { .. } | Self::End { .. } => "resolve",
        }
    }

    fn detail(&self, seen: &StoredOperation) -> String {
        let from = format!("{} at {}", seen.stage.as_str(), seen.point);
        match self {
            Self::GoOn { evidence, .. } => {
                let words = evidence.iter().map(|row| format!(", {} {}: {}", row.effect, row.send, row.verdict));
                from + &words.collect::<String>()
            }
            Self::End { outcome, .. } => format!("{from}, resolved as {}", word(outcome)),
        }
    }

    /// Whether a live lease is taken away.
    pub(super) fn takes_over(&self) -> bool {
        match self {
            Self::GoOn { take_over, .. } | Self::End { take_over, .. } => *take_over,
        }
    }
}

/// The word for a send that may have arrived and is repeated all the same.
const WAIVED: &str = "waived";

fn word(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Completed(_) => "completed",
        Outcome::FailedReplayable { .. } => "failed",
        Outcome::FailedRetryable { .. } => "not happened",
        Outcome::Unknown => "unknown",
    }
}

fn refused<T>(why: impl Into<String>) -> Result<T, StoreError> {
    Err(StoreError::Refused(why.into()))
}

/// Refuses the act where the record or operation has changed since the operator saw it.
fn changed(fenced: Fenced) -> Result<(), StoreError> {
    match fenced {
        Fenced::Done => Ok(()),
        Fenced::LostOwnership => refused("it has changed meanwhile: look again"),
    }
}

/// Duty: operating keys and operations.
pub trait KeyOperator: Phases {
    /// Records, oldest claim first, none of them without. Quick where a digest, or a state without
    /// outcome, or none but few records are meant; else it reads the table.
    fn keys(&self, filter: &KeyFilter) -> impl Future<Output = Result<Vec<Look>, StoreError>> + Send;

    /// Operations with intents and evidence: first those that wait for an operator, then what has
    /// no outcome, each oldest first.
    fn operations(&self, filter: &OperationFilter) -> impl Future<Output = Result<FoundOperations, StoreError>> + Send;

    /// What processes have said of the fingerprints that they read and write, those that said it in
    /// the last [`LIVE_FOR`](crate::policy::operation::versions::LIVE_FOR) by database time; by
    /// operation and process (O21).
    fn live_versions(&self) -> impl Future<Output = Result<Vec<Announced>, StoreError>> + Send;

    /// Says that a person has looked at a conflict: it is listed no more, and goes with its record;
    /// what has no record any more goes at once. With its audit row.
    ///
    /// # Errors
    /// [`StoreError::Refused`]: it has no outcome yet, or nothing is known of it.
    fn judge(&self, operation_id: Uuid, context: &ActContext) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// One change of a record with its audit row, fenced by epoch and state as seen. What it may
    /// not be used for is refused by [`Self::act_on_key`]; here the statement hits or does not.
    fn change_key(
        &self,
        seen: &Record,
        change: &KeyChange,
        context: &ActContext,
    ) -> impl Future<Output = Result<Fenced, StoreError>> + Send;

    /// One change of an operation with its audit row, fenced by its epoch, by its lease unless that
    /// is taken over, and by the number of its evidence rows: what came since was not judged (O8).
    fn change_operation(
        &self,
        seen: &StoredOperation,
        change: &OperationChange,
        context: &ActContext,
    ) -> impl Future<Output = Result<Fenced, StoreError>> + Send;

    /// Releases, purges or resolves a key.
    ///
    /// # Errors
    /// [`StoreError::Refused`]: it runs; its outcome is unknown (only `resolve` ends that); it has
    /// an intent; what is resolved has its outcome, or is an operation in phases; a run of it that
    /// lost its lease has said the opposite, and `against_evidence` is not given; it has changed
    /// meanwhile.
    fn act_on_key(
        &self,
        seen: &Record,
        change: &KeyChange,
        context: &ActContext,
    ) -> impl Future<Output = Result<(), StoreError>> + Send {
        async move {
            match (change, seen.state) {
                (KeyChange::Resolve { .. }, _) if seen.mode == Mode::Phased => {
                    return refused(format!(
                        "it is an operation in phases: `oncebox operations resolve {}`",
                        seen.operation_id
                    ));
                }
                (KeyChange::Resolve { outcome: Outcome::Unknown, .. }, _) => {
                    return refused("an unknown outcome resolves nothing");
                }
                (KeyChange::Resolve { outcome, against_evidence, .. }, State::UnknownRequiresRecovery) => {
                    let opposite = if matches!(outcome, Outcome::Completed(_)) { "failure" } else { "success" };
                    let said = self.runs_of(seen.operation_id).await?;
                    if !against_evidence && late_runs(&said).any(|run| run.verdict == opposite) {
                        return refused(ended_late(opposite));
                    }
                }
                (KeyChange::Resolve { .. }, state) => {
                    return refused(format!("it is {state}: only an unknown outcome is resolved"));
                }
                (_, State::InProgress) => return refused("it is IN_PROGRESS: what it does may happen yet (O11)"),
                (_, State::UnknownRequiresRecovery) => {
                    return refused(
                        "its outcome is unknown: it may have happened, so it is resolved, not forgotten (O11)",
                    );
                }
                (KeyChange::Release { against_evidence } | KeyChange::Purge { against_evidence }, state) => {
                    let operation = self.operation(seen.operation_id).await?;
                    if operation.is_some_and(|operation| !operation.intents.is_empty()) {
                        return refused("a provider was asked for it: it stays until its time is over (O11)");
                    }
                    let said = self.runs_of(seen.operation_id).await?;
                    let succeeded = state != State::Completed && late_runs(&said).any(|run| run.verdict == "success");
                    if succeeded && !against_evidence {
                        return refused(ended_late("success"));
                    }
                }
            }
            changed(self.change_key(seen, change, context).await?)
        }
    }

    /// Gives an operation to its worker again, at once and with its attempts counted anew. What may
    /// be sent, the worker decides as ever. `accept_duplicate`: the sends that may have arrived are
    /// waived, so that it is sent again beyond that rule, perhaps a second time. That is no proof
    /// that they did not arrive.
    ///
    /// # Errors
    /// [`StoreError::Refused`]: it has its outcome; somebody drives it and `take_over` is not
    /// given; every effect that is open can be neither repeated nor asked for, and no duplicate is
    /// accepted; it has changed meanwhile.
    fn retry(
        &self,
        seen: &StoredOperation,
        accept_duplicate: bool,
        take_over: bool,
        context: &ActContext,
    ) -> impl Future<Output = Result<(), StoreError>> + Send {
        async move {
            may_change(seen, take_over)?;
            if seen.point == FIRST_POINT {
                return refused(
                    "its first phase was never committed as a whole: what it did may be done, so resolve it",
                );
            }
            // What its handler committed by itself is there, and its point was not moved (O1).
            let ended = seen.parked.as_deref().is_some_and(|reason| reason.ends_with(ENDED));
            if ended && !accept_duplicate {
                return refused(
                    "a phase ended its transaction by itself: what it did may be done twice. Resolve it, or accept a duplicate",
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
                    return refused("nothing of it is open: there is no duplicate to accept");
                }
            } else if let Some(intent) = open().find(|intent| intent.intent.strategy == "none") {
                return refused(format!(
                    "`{}` has no means to find out whether it happened (strategy `none`): resolve it, or accept a duplicate",
                    intent.intent.effect
                ));
            }
            // UNKNOWN without an intent is a phase of ours that was given up.
            let stage = (seen.intents.is_empty() && seen.stage == Stage::Unknown).then_some(Stage::Local);
            let change = OperationChange::GoOn { evidence, stage, take_over };
            changed(self.change_operation(seen, &change, context).await?)
        }
    }

    /// Says how an operation ended, or what became of one of its effects.
    ///
    /// # Errors
    /// [`StoreError::Refused`]: it has its outcome; somebody drives it and `take_over` is not
    /// given; there is no such effect, or it is settled; the evidence says the opposite, or it is
    /// to fail while an effect stands, and `against_evidence` is not given; it has changed
    /// meanwhile.
    fn resolve(
        &self,
        seen: &StoredOperation,
        resolution: &Resolution,
        take_over: bool,
        against_evidence: bool,
        context: &ActContext,
    ) -> impl Future<Output = Result<(), StoreError>> + Send {
        async move {
            may_change(seen, take_over)?;
            let change = match resolution {
                Resolution::Ended(outcome, retention) => {
                    let verdict = match outcome {
                        Outcome::Completed(_) => "success",
                        Outcome::FailedReplayable { .. } => "failure",
                        _ => return refused("an operation in phases ends with what it did, or with a failure"),
                    };
                    not_against(seen, None, verdict, against_evidence)?;
                    if verdict == "failure" && !against_evidence {
                        nothing_stands(seen)?;
                    }
                    let evidence = Box::new(says(seen, "", 0, verdict, context));
                    let (outcome, retention) = (Box::new(outcome.clone()), *retention);
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
                    let verdict = if *happened { "success" } else { "failure" };
                    not_against(seen, Some(effect), verdict, against_evidence)?;
                    let evidence = vec![says(seen, effect, 0, verdict, context)];
                    OperationChange::GoOn { evidence, stage: None, take_over }
                }
            };
            changed(self.change_operation(seen, &change, context).await?)
        }
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

/// Evidence decides, unless it is said that it does not (O8).
fn not_against(seen: &StoredOperation, effect: Option<&str>, verdict: &str, forced: bool) -> Result<(), StoreError> {
    let opposite = if verdict == "success" { "failure" } else { "success" };
    let contradicts = seen.evidence.iter().map(|row| &row.evidence).find(|row| {
        // What the flow has settled already, it has decided by that evidence.
        let settled = seen.intents.iter().any(|intent| intent.intent.effect == row.effect && intent.outcome.is_some());
        row.kind != "run" && row.verdict == opposite && !settled && effect.is_none_or(|effect| effect == row.effect)
    });
    match contradicts {
        Some(row) if !forced => refused(format!(
            "the evidence of `{}` says the opposite: {}; `operations show` has it",
            row.effect, row.verdict
        )),
        _ => Ok(()),
    }
}

/// An operation does not fail while an effect of it stands, as its own phases may not say either
/// (O13).
///
/// # Errors
/// Refused, with the effect that stands.
pub fn nothing_stands(seen: &StoredOperation) -> Result<(), StoreError> {
    let happened = |intent: &&StoredIntent| intent.outcome.as_deref() == Some("succeeded");
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

/// The word of an operator who has looked at a conflict.
pub(super) fn judgement(seen: &StoredOperation, context: &ActContext) -> Result<NewEvidence, StoreError> {
    if seen.outcome_at.is_none() {
        return refused(format!("it is {}: there is no outcome to judge; resolve it", seen.stage.as_str()));
    }
    Ok(says(seen, "", 0, "indefinite", context))
}

/// The audit row of a judgement.
pub(super) fn judged(operation_id: Uuid, seen: Option<&StoredOperation>) -> Audit<'_> {
    Audit {
        act: "judge",
        place: seen.map_or("", |seen| &seen.flow),
        digest: seen.and_then(|seen| seen.identity.as_ref()).map(Identity::digest),
        operation_id,
        detail: seen.map_or_else(|| "evidence alone".to_owned(), |seen| seen.stage.as_str().to_owned()),
    }
}

/// There is neither an operation of this id nor evidence that is all that is left of one.
pub(super) fn nothing_known(operation_id: Uuid) -> StoreError {
    StoreError::Refused(format!(
        "there is nothing to judge of {operation_id}: `oncebox operations list --conflicts` shows what is"
    ))
}

/// A run that lost its lease says otherwise.
fn ended_late(verdict: &str) -> String {
    format!("a run of it that lost its lease ended with {verdict}; `oncebox keys show` has it")
}

/// The word of an operator who resolves a key against what late runs have said: they keep it no
/// longer from being run again.
pub(super) fn overruled(seen: &Record, outcome: &Outcome, context: &ActContext) -> NewEvidence {
    let verdict = match outcome {
        Outcome::Completed(_) => "success",
        Outcome::FailedReplayable { .. } => "failure",
        Outcome::FailedRetryable { .. } => "not-sent",
        Outcome::Unknown => "indefinite",
    };
    word_of(seen.operation_id, seen.epoch, ("", 0), verdict, context)
}

/// A word of the operator, with who and why.
fn says(seen: &StoredOperation, effect: &str, send: u32, verdict: &str, context: &ActContext) -> NewEvidence {
    word_of(seen.operation_id, seen.epoch, (effect, send), verdict, context)
}

fn word_of(
    operation_id: Uuid,
    epoch: i64,
    (effect, send): (&str, u32),
    verdict: &str,
    context: &ActContext,
) -> NewEvidence {
    let bytes = serde_json::json!({ "actor": context.actor, "reason": context.reason }).to_string().into_bytes();
    NewEvidence {
        operation_id,
        effect: effect.to_owned(),
        epoch,
        send,
        kind: "operator".to_owned(),
        verdict: verdict.to_owned(),
        status: None,
        bytes: Sealed { bytes, kid: None },
    }
}
