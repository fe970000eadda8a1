//! One call of a provider. Its beginning is committed before it starts. It starts only if it fits
//! into the lease and into the provider's window at that moment. Its answer is stored even if the
//! lease is lost (O5, O6, O8), and after a stop as long as the grace lasts.

use std::panic::{AssertUnwindSafe, resume_unwind};
use std::time::Duration;

use futures_util::FutureExt;

use super::{Asks, Driver, End, Next};
use crate::error::StoreError;
use crate::observe::Noted;
use crate::operation::phased::effect::Declared;
use crate::operation::phased::evidence::{self, By, Observation};
use crate::operation::phased::provider::{Asked, Call, Sent};
use crate::operation::port::Fenced;
use crate::operation::port::evidence::NewEvidence;
use crate::operation::port::phases::{StoredIntent, StoredOperation, unstored};
use crate::operation::rules::flow::Stage;
use crate::operation::rules::provider::{Answer, KeyWindow, QueryAnswer, Settled, Strategy, Verdict};
use crate::text::panic::panic_text;
use crate::time::pace::Pace;

/// Whether a call counts as vain. A refusal does: the next step sees first whether it settles the
/// effect, as it does if it answers the only send. After several sends it settles nothing, and is
/// no reason to send again at once, or without end.
fn is_vain(verdict: Verdict) -> bool {
    matches!(
        verdict,
        Verdict::Indefinite | Verdict::NotSent | Verdict::StoredError | Verdict::Wait(_) | Verdict::Refused
    )
}

/// Whether this verdict may decide the outcome of the effect.
fn proves(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::Succeeded | Verdict::Failed | Verdict::Refused | Verdict::Mismatch)
}

/// The error of a drive that a stop ended before the database took what it had to say.
fn stopped() -> StoreError {
    let why = "this process stops, and the database is away";
    StoreError::Unavailable(sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::NotConnected, why)))
}

impl Driver {
    /// Sends the same bytes again under the same key. `window`: the window in which the send must
    /// start, because an earlier send may have arrived.
    pub(super) async fn send_again(
        &mut self,
        effect: &Declared,
        stored: &StoredOperation,
        intent: &StoredIntent,
        window: Option<KeyWindow>,
    ) -> Result<Next, StoreError> {
        if !self.phased.is_ours().await? || !self.fits(effect).await {
            return self.release_with_backoff(stored.attempts).await;
        }
        match self.phased.store.begin_send(&self.driven, effect.name).await? {
            Some(number) => self.send(effect, stored, intent, number, window).await,
            None => Ok(Next::End(End::Lost)),
        }
    }

    pub(super) async fn send(
        &mut self,
        effect: &Declared,
        stored: &StoredOperation,
        intent: &StoredIntent,
        number: u32,
        window: Option<KeyWindow>,
    ) -> Result<Next, StoreError> {
        // Nothing was sent yet.
        let bytes = match self.ready(effect, intent).await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => {
                self.not_started(effect, number, "the lease is too short, or the database belongs to another").await?;
                return self.release_with_backoff(stored.attempts).await;
            }
            Err(error) => {
                self.not_started(effect, number, "its request could not be had").await?;
                return Err(error);
            }
        };
        // The decision may be old: pauses, the database or a stopped process took time. There is no
        // await between this check and the call.
        let now = stored.now.after(self.read_at.elapsed());
        if window.is_some_and(|window| !window.is_open(intent.first_sent_at, now)) {
            self.not_started(effect, number, "the provider may have forgotten the key meanwhile").await?;
            return Ok(Next::Again);
        }
        let call = Call {
            key: &intent.intent.provider_key,
            bytes: &bytes,
            version: intent.intent.adapter_version,
            send: number,
        };
        tracing::debug!(operation = %stored.operation_id, effect = effect.name, send = number, "a provider is called");
        let answered = self.called(effect, effect.provider.send(&call)).await;
        let sent = answered.unwrap_or_else(|| Sent { answer: Answer::NoAnswer, saw: b"no answer in time".to_vec() });
        self.reached |= sent.answer.counts();
        let verdict = match sent.answer.verdict() {
            // Without a key, the refusal of one send says nothing of another.
            Verdict::Failed if effect.strategy == Strategy::Repeatable => Verdict::Refused,
            verdict => verdict,
        };
        if is_vain(verdict) {
            self.vain += 1;
        }
        self.unmade |= sent.answer == Answer::NotMade;
        if verdict != Verdict::NotSent || !self.taken_back(effect, number, &sent.saw).await {
            let (by, status) = match sent.answer {
                Answer::Status { status, .. } => (By::Answer, Some(status)),
                Answer::NotConnected | Answer::NotMade | Answer::NoAnswer => (By::Error, None),
            };
            self.keep(effect, number, (by, verdict, status, &sent.saw)).await?;
        }
        Ok(Next::Again)
    }

    /// Returns the bytes to send, or `None` if the call may not start. Whether the call fits into
    /// the lease is checked last.
    async fn ready(&self, effect: &Declared, intent: &StoredIntent) -> Result<Option<Vec<u8>>, StoreError> {
        let what = format!("request:{}", effect.name);
        let bytes = self.phased.sealer.open(self.driven.operation_id, &what, &intent.intent.request)?;
        let may = self.phased.is_ours().await? && self.fits(effect).await;
        Ok(may.then_some(bytes))
    }

    /// Stores that a send that was begun did not start.
    async fn not_started(&mut self, effect: &Declared, number: u32, why: &str) -> Result<(), StoreError> {
        let saw = format!("not started: {why}").into_bytes();
        if self.taken_back(effect, number, &saw).await {
            return Ok(());
        }
        self.keep(effect, number, (By::Error, Verdict::NotSent, None, &saw)).await
    }

    /// Tries to take the beginning of a send back. Returns true if no evidence is to be stored: the
    /// beginning was taken back; or perhaps it was, and then the number of this send may belong to
    /// another send, so evidence must not name it. In doubt the send counts as made, which is the
    /// careful choice.
    async fn taken_back(&self, effect: &Declared, number: u32, why: &[u8]) -> bool {
        let operation = self.driven.operation_id;
        match self.phased.store.take_back_send(&self.driven, effect.name, number).await {
            Ok(Fenced::Done) => {
                let why = String::from_utf8_lossy(why);
                tracing::info!(%operation, effect = effect.name, send = number, %why, "a send did not leave us");
                true
            }
            Ok(Fenced::LostOwnership) => false,
            Err(error) => {
                tracing::warn!(%operation, effect = effect.name, send = number, %error, "a send did not leave us, and whether its count was taken back is not known: it may count as made");
                true
            }
        }
    }

    /// Queries the provider for the effect. "Not found" before a resend proves nothing and must not
    /// end later queries, so it is stored as indefinite.
    pub(super) async fn query(
        &mut self,
        effect: &Declared,
        stored: &StoredOperation,
        intent: &StoredIntent,
        asks: Asks,
    ) -> Result<Next, StoreError> {
        let Some(bytes) = self.ready(effect, intent).await? else {
            return self.release_with_backoff(stored.attempts).await;
        };
        let call =
            Call { key: &intent.intent.provider_key, bytes: &bytes, version: intent.intent.adapter_version, send: 0 };
        tracing::debug!(operation = %stored.operation_id, effect = effect.name, "a provider is asked");
        let answered = self.called(effect, effect.provider.query(&call)).await;
        let asked = answered.unwrap_or_else(|| Asked {
            answer: QueryAnswer::Failed,
            status: None,
            saw: b"no answer in time".to_vec(),
        });
        // A query that cannot be made will never be answered, so it counts. Before a resend it does
        // not: the resend shows whether the provider is away.
        let never = asks == Asks::Only && asked.answer == QueryAnswer::NotMade;
        self.reached |= asked.status.is_some() || never;
        self.asked = asks == Asks::First;
        let verdict = match asked.answer.verdict() {
            Verdict::NotFound if asks == Asks::First => Verdict::Indefinite,
            verdict => verdict,
        };
        if asks == Asks::Only && is_vain(verdict) {
            self.vain += 1;
        }
        // A provider that is away gives the same answer each time. It proves nothing and is stored
        // once.
        let of_it = stored.evidence.iter().map(|row| &row.evidence).rfind(|row| row.effect == effect.name);
        let is_said = verdict == Verdict::Indefinite
            && of_it
                .is_some_and(|row| row.kind == "query" && row.verdict == verdict.word() && row.status == asked.status);
        if !is_said {
            self.keep(effect, 0, (By::Query, verdict, asked.status, &asked.saw)).await?;
        }
        Ok(Next::Again)
    }

    /// Awaits a call of an adapter. `None`: no answer in time. A panic of the adapter ends the
    /// driver as the end of the process would: the call may have arrived, the lease runs out, and
    /// another driver takes over. The log line says whose adapter it was.
    async fn called<T>(&self, effect: &Declared, call: impl Future<Output = T>) -> Option<T> {
        let answered = tokio::time::timeout(effect.provider.timeout(), AssertUnwindSafe(call).catch_unwind()).await;
        answered.ok().map(|answer| {
            answer.unwrap_or_else(|panic| {
                tracing::error!(operation = %self.driven.operation_id, effect = effect.name, adapter = effect.provider.name(),
                    panic = panic_text(panic.as_ref()), "the adapter of a provider panicked");
                resume_unwind(panic)
            })
        })
    }

    /// Whether the timeout of a call fits into the rest of the lease, so that no call runs on after
    /// another process may have become the owner (O5). Renews the lease first if it does not fit.
    async fn fits(&self, effect: &Declared) -> bool {
        let timeout = effect.provider.timeout();
        if timeout > self.hold.left() {
            self.hold.renew().await;
        }
        timeout <= self.hold.left()
    }

    /// Appends an observation, whether the lease is held or lost, and logs an error if it
    /// contradicts an outcome (O8).
    async fn keep(
        &mut self,
        effect: &Declared,
        send: u32,
        (by, verdict, status, saw): (By, Verdict, Option<u16>, &[u8]),
    ) -> Result<(), StoreError> {
        let (operation_id, epoch) = (self.driven.operation_id, self.driven.epoch);
        let seen = Observation { operation_id, effect: effect.name, epoch, send, by, verdict, status, saw };
        let row = evidence::row(&self.phased.sealer, &seen)?;
        let grace_is_over = self.phased.grace_is_over(&self.stop);
        let kept = tokio::select! {
            biased;
            kept = self.keep_row(effect, send, (verdict, status), &row) => kept?,
            () = grace_is_over => {
                // The send stands as begun, so the next driver takes it for one that may have
                // arrived.
                tracing::error!(operation = %operation_id, effect = effect.name, send, verdict = verdict.name(), status,
                    "this process stops, and the database does not take what a provider said: it is lost");
                return Err(stopped());
            }
        };
        if !kept {
            return Ok(());
        }
        self.proof |= proves(verdict);
        if self.hold.is_lost()
            && let Some(stored) = self.phased.store.operation(operation_id).await?
        {
            self.look_for_conflict(&stored)?;
        }
        Ok(())
    }

    /// Stores an observation, and tries again as long as it can matter. Returns false where it
    /// became the reason of a parked operation.
    async fn keep_row(
        &mut self,
        effect: &Declared,
        send: u32,
        (verdict, status): (Verdict, Option<u16>),
        row: &NewEvidence,
    ) -> Result<bool, StoreError> {
        let mut pace = Pace::new(Duration::from_millis(20), Duration::from_secs(1));
        // The time for which the database was away before its first refusal does not count.
        let mut refused_at = None;
        // The observation exists only here. A row that is written twice counts once.
        while let Err(error) = self.phased.store.observe(row).await {
            tracing::error!(operation = %self.driven.operation_id, effect = effect.name, send, verdict = verdict.name(), status, %error,
                "what a provider said waits to be stored");
            let stops = self.stop.is_cancelled();
            let patient = error.is_transient() || {
                let refused_at = refused_at.get_or_insert_with(tokio::time::Instant::now);
                refused_at.elapsed() < self.phased.settings.refused_max && !stops
            };
            if !proves(verdict) && (!patient || stops) {
                return Err(error);
            }
            // The proof becomes the reason of a parked operation, so an operator sees it. If
            // parking fails too, storing is retried until this process stops.
            if !patient && self.park(&unstored(effect.name, send, verdict, status)).await.ok() == Some(End::Parked) {
                return Ok(false);
            }
            tokio::time::sleep(pace.next_wait()).await;
        }
        Ok(true)
    }

    /// Logs an error if the evidence of providers contradicts what another driver or an operator
    /// decided.
    pub(super) fn look_for_conflict(&self, stored: &StoredOperation) -> Result<(), StoreError> {
        for intent in &stored.intents {
            // An operator who ends the operation leaves its effects without an outcome.
            let decided = match (intent.settled(), stored.stage) {
                (Some(settled), _) => settled,
                (None, Stage::Succeeded) => Settled::Succeeded,
                (None, Stage::Failed) => Settled::Failed,
                (None, _) => continue,
            };
            let effect = intent.intent.effect.as_str();
            if evidence::providers(&self.phased.sealer, &stored.evidence, effect)?.contradicts(decided) {
                tracing::error!(operation = %stored.operation_id, effect, ?decided,
                    "evidence contradicts what was decided: nothing is rewritten, a person must look");
                self.note(Noted::Contradiction);
            }
        }
        Ok(())
    }
}
