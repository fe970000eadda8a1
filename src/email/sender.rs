//! The e-mail sender: sends durable rows to `.eml` files or an SMTP server.
//!
//! Promise: one row is one e-mail with one Message-ID, made from the unique key of the row and the
//! same in every attempt. A row whose sending was interrupted is sent again under that Message-ID,
//! because it is unknown whether the server accepted the first one, and SMTP has no query. With
//! files the second attempt replaces the file, so the e-mail exists exactly once.
//!
//! The state of a row is named with the words of [`Delivery`] (O28), in the metric and in the row's
//! error. A row stores the number of its attempts, not their results. So each earlier attempt
//! counts as one that may have arrived, and `possibly sent N times` is an upper bound.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use lettre::message::Mailbox as Address;
use tokio_util::sync::CancellationToken;

pub use super::carriage::EmailTransport;

use super::carriage::{address, compose, message_id};
use super::smtp::{Failure, Means};
use crate::email::port::{EmailOutcome, EmailToSend, Mailbox};
use crate::error::StoreError;
use crate::inbox::port::waiting::RowLease;
use crate::observe::{self, Health, PartState};
use crate::operation::rules::delivery::Delivery;
use crate::operation::rules::provider::Settled;
use crate::time::pace::{Pace, in_pages, sleep_unless};
use crate::time::since::Since;

/// Settings of an e-mail sender.
#[derive(Debug, Clone)]
pub struct SenderOptions {
    /// The address that e-mails come from.
    pub from: String,
    /// How many attempts one e-mail gets before it is failed.
    pub attempts_max: u32,
    /// Whether to end when nothing is left to send.
    pub until_empty: bool,
    /// How long recipient, subject, body and error of an e-mail are kept after it was sent; then
    /// they are blanked. One that failed stays whole, because it may have to be sent yet. Default 7
    /// days.
    pub content_kept: Duration,
    /// How long the rest of the row is kept, counted from the same moment: the unique key, which
    /// allows one e-mail for an effect. It must exceed the time after which the effect can come
    /// again. Default: for ever, as an inbox without a horizon remembers its ids.
    pub keys_kept: Option<Duration>,
}

impl SenderOptions {
    /// The default settings for e-mails that come from this address.
    pub fn new(from: impl Into<String>) -> Self {
        Self {
            from: from.into(),
            attempts_max: 20,
            until_empty: false,
            content_kept: Duration::from_secs(7 * 86_400),
            keys_kept: None,
        }
    }
}

/// Sends the e-mails that are stored as rows in the database.
#[derive(Debug)]
pub struct Sender {
    store: Arc<dyn Mailbox>,
    transport: EmailTransport,
    from: Address,
    options: SenderOptions,
    health: Health,
}

/// Rows that are leased together: two, because the lease must last longer than sending all of
/// them. Otherwise another sender would lease the last ones and send them a second time.
const BATCH: usize = 2;
const SENDING: Duration = Duration::from_secs(25);
/// A lease lasts longer than sending all rows that were leased together. After it, the rows of a
/// sender that died can be leased again.
const LEASE: Duration = Duration::from_secs(60);
/// How long a stop waits to release leased rows.
const GIVE_BACK: Duration = Duration::from_secs(5);
/// Rows that are blanked or deleted at once.
const PAGE: usize = 1_000;
const BETWEEN_PAGES: Duration = Duration::from_millis(50);
/// The pause between two rounds that blank and delete.
const FORGET_EVERY: Duration = Duration::from_secs(60);
const PART: &str = "e-mail sender";

/// The rows that a sender has leased and not settled.
#[derive(Debug, Default)]
struct Hand {
    leased: VecDeque<EmailToSend>,
    leased_at: Option<Since>,
    /// A lease of which the answer was lost.
    in_doubt: Option<RowLease>,
    /// The result of a sending that is not written to the database yet.
    outcome: Option<(EmailToSend, EmailOutcome)>,
}

enum Step {
    Worked,
    Idle,
    Empty,
    /// No e-mail can be sent now, for this reason.
    Away(String),
}

impl Sender {
    /// Makes a sender with this transport.
    ///
    /// # Errors
    /// The address is not valid, or the directory cannot be made or used.
    pub fn new(
        store: impl Mailbox + 'static,
        transport: EmailTransport,
        options: SenderOptions,
        health: Health,
    ) -> Result<Self, String> {
        let from = address(&options.from)?;
        transport.make()?;
        Ok(Self { store: Arc::new(store), transport, from, options, health })
    }

    /// Runs until the stop, or until nothing is left if `until_empty` is set.
    ///
    /// # Errors
    /// An error that a person must repair: what is transient is waited for.
    ///
    /// # Cancel safety
    /// If the future is dropped, a row that is being sent is sent again later under the same
    /// Message-ID.
    pub async fn run(&self, stop: CancellationToken) -> Result<(), StoreError> {
        self.health.set(PART, PartState::Starting);
        let ends = stop.child_token();
        let sending = async {
            let end = self.send_all(&stop).await;
            ends.cancel();
            end
        };
        let overdue = async {
            ends.cancelled().await;
            tokio::time::sleep(GIVE_BACK).await;
        };
        let forgetting = async {
            tokio::select! {
                () = self.forget_old(&ends) => {}
                () = overdue => tracing::debug!("old e-mails were not forgotten before the end"),
            }
        };
        tokio::join!(sending, forgetting).0
    }

    /// Blanks and deletes what was sent long enough ago, beside the sending. It keeps nothing from
    /// being sent.
    async fn forget_old(&self, stop: &CancellationToken) {
        let mut pace = Pace::new(Duration::from_millis(200), FORGET_EVERY);
        while !stop.is_cancelled() {
            let next = match self.forget_round(stop).await {
                Ok(()) => {
                    pace.worked();
                    FORGET_EVERY
                }
                Err(error) if error.is_transient() => {
                    tracing::debug!(%error, "old e-mails are forgotten later");
                    pace.next_wait()
                }
                Err(error) => {
                    tracing::error!(%error, "old e-mails are not forgotten");
                    FORGET_EVERY
                }
            };
            sleep_unless(stop, next).await;
        }
    }

    async fn forget_round(&self, stop: &CancellationToken) -> Result<(), StoreError> {
        let goes_on = || sleep_unless(stop, BETWEEN_PAGES);
        in_pages(PAGE as u64, || self.store.blank_emails(self.options.content_kept, PAGE), goes_on).await?;
        if let Some(keys_kept) = self.options.keys_kept.filter(|_| !stop.is_cancelled()) {
            in_pages(PAGE as u64, || self.store.forget_emails(keys_kept, PAGE), goes_on).await?;
        }
        Ok(())
    }

    async fn send_all(&self, stop: &CancellationToken) -> Result<(), StoreError> {
        let mut pace = Pace::new(Duration::from_millis(200), Duration::from_secs(5));
        // Each try may be a login that a server counts as failed.
        let mut away_pace = Pace::new(Duration::from_millis(500), Duration::from_secs(60));
        let mut is_away = false;
        let mut hand = Hand::default();
        while !stop.is_cancelled() {
            match self.step(&mut hand, stop).await {
                Ok(Step::Worked) => {
                    is_away = false;
                    self.health.set(PART, PartState::Ready);
                    pace.worked();
                    away_pace.worked();
                }
                Ok(Step::Away(why)) => {
                    is_away = true;
                    self.health.set(PART, PartState::Waiting(format!("e-mails: {why}")));
                    away_pace.wait(stop).await;
                }
                Ok(Step::Idle) => {
                    // The rows that were given back may be with another sender.
                    is_away = is_away && !self.store.emails_pending().await.is_ok_and(|pending| pending == 0);
                    let pause = if is_away {
                        self.health.beat(PART);
                        Duration::from_secs(1)
                    } else {
                        self.health.set(PART, PartState::Ready);
                        Duration::from_millis(100)
                    };
                    sleep_unless(stop, pause).await;
                }
                Ok(Step::Empty) => {
                    self.health.set(PART, PartState::Ready);
                    break;
                }
                Err(error) if error.is_transient() => {
                    self.health.set(PART, PartState::Waiting(format!("database: {error}")));
                    pace.wait(stop).await;
                }
                Err(error) => return Err(error),
            }
        }
        self.release(hand, stop).await;
        Ok(())
    }

    /// Settles the e-mail in hand and releases the leased ones. If that does not work within
    /// [`GIVE_BACK`], the leases expire.
    async fn release(&self, mut hand: Hand, stop: &CancellationToken) {
        let mut pace = Pace::new(Duration::from_millis(50), Duration::from_millis(500));
        let released = async {
            while let Err(error) = self.empty(&mut hand, stop).await {
                tracing::debug!(%error, "leased e-mails are not given back yet");
                tokio::time::sleep(pace.next_wait()).await;
            }
        };
        if tokio::time::timeout(GIVE_BACK, released).await.is_ok() {
            return;
        }
        match &hand.outcome {
            Some((email, EmailOutcome::Sent)) => tracing::error!(
                email = email.email_id,
                "that an e-mail was sent could not be stored before the stop: it may be sent again"
            ),
            _ => tracing::warn!("leased e-mails were not given back: their leases run out"),
        }
    }

    async fn step(&self, hand: &mut Hand, stop: &CancellationToken) -> Result<Step, StoreError> {
        if let Some(why) = self.empty(hand, stop).await? {
            return Ok(Step::Away(why));
        }
        if stop.is_cancelled() {
            return Ok(Step::Worked);
        }
        if let Some(lease) = &hand.in_doubt {
            self.store.give_back_emails(lease).await?;
            hand.in_doubt = None;
        }
        // Taken before the lease begins by the database's clock.
        hand.leased_at = Some(Since::now());
        let lease = RowLease::new(LEASE);
        hand.in_doubt = Some(lease);
        hand.leased = self.store.lease_emails(BATCH, &lease).await?.into();
        hand.in_doubt = None;
        if !hand.leased.is_empty() {
            return Ok(self.empty(hand, stop).await?.map_or(Step::Worked, Step::Away));
        }
        let empty = self.options.until_empty && self.store.emails_pending().await? == 0;
        Ok(if empty { Step::Empty } else { Step::Idle })
    }

    /// Sends the leased rows one after the other, and settles each before the next. If the
    /// database goes away meanwhile, the result is kept and written later, so the e-mail is not
    /// sent a second time (G10). Where no e-mail can be sent, the rows go back without a count, and
    /// the reason is returned.
    async fn empty(&self, hand: &mut Hand, stop: &CancellationToken) -> Result<Option<String>, StoreError> {
        let mut away = None;
        loop {
            if let Some((email, outcome)) = &hand.outcome {
                if !self.store.settle_email(email, outcome).await? {
                    tracing::warn!(
                        email = email.email_id,
                        "an e-mail was settled before, or another sender took it in the meantime"
                    );
                }
                hand.outcome = None;
            }
            let Some(email) = hand.leased.pop_front() else { return Ok(away) };
            // A lease that may expire during the sending is not used, because another sender would
            // send the e-mail too.
            let stands = hand.leased_at.is_some_and(|at| at.elapsed() + SENDING < LEASE);
            let outcome = if stands && away.is_none() && !stop.is_cancelled() {
                self.send(&email).await.unwrap_or_else(|why| {
                    away = Some(why);
                    EmailOutcome::NotTried
                })
            } else {
                EmailOutcome::NotTried
            };
            if let EmailOutcome::Again { error, .. } | EmailOutcome::Failed(error) = &outcome {
                tracing::warn!(email = email.email_id, attempt = email.attempt, %error, "an attempt to send an e-mail failed");
            }
            hand.outcome = Some((email, outcome));
        }
    }

    /// Sends one e-mail once. An error says why none can be sent now.
    async fn send(&self, email: &EmailToSend) -> Result<EmailOutcome, String> {
        let message_id = message_id(&email.unique_key);
        let tried = match compose(&self.from, &message_id, &email.recipient, &email.subject, &email.body) {
            Ok(message) => self.transport.carry(&message_id, message.envelope(), &message.formatted(), SENDING).await,
            Err(error) => Err(Failure { error, means: Means::Refused }),
        };
        // A file is replaced, so it exists once or not at all.
        let before = if self.transport.replaces() { 0 } else { email.attempt.saturating_sub(1) };
        let (state, failure) = match tried {
            Ok(()) => (Delivery::Sent, None),
            Err(Failure { error, means: Means::Away }) => return Err(error),
            Err(failure) => (failure.state(before, email.attempt >= self.options.attempts_max), Some(failure)),
        };
        observe::email(state.word());
        let Some(Failure { error, .. }) = failure else { return Ok(EmailOutcome::Sent) };
        let error = format!("{state}: {error}");
        if matches!(state, Delivery::Refused | Delivery::Dead(_)) {
            return Ok(EmailOutcome::Failed(error));
        }
        let after = Duration::from_secs(1 << email.attempt.min(10)).mul_f64(0.5 + fastrand::f64() / 2.0);
        Ok(EmailOutcome::Again { after, error })
    }
}

impl Failure {
    /// The state of the e-mail after this failure, if `before` earlier attempts may have arrived.
    fn state(&self, before: u32, last: bool) -> Delivery {
        let doubtful = before.saturating_add((self.means == Means::Unknown).into());
        let is_refused = self.means == Means::Refused;
        let settled = (is_refused && doubtful == 0).then_some(Settled::Failed);
        Delivery::of(settled, is_refused || last, doubtful)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e_mails_that_were_leased_together_are_sent_before_their_lease_runs_out() {
        // With a larger batch another sender would send the last ones too.
        assert!(SENDING * u32::try_from(BATCH).unwrap_or(u32::MAX) < LEASE);
    }

    // Shown by: calling a refusal of the second attempt refused; counting a refused attempt as one
    // that may have arrived.
    #[test]
    fn o28_an_e_mails_state_is_said_in_the_words_of_deliveries() {
        for (means, before, last, word) in [
            (Means::NotNow, 0, false, "waiting"),
            (Means::Unknown, 0, false, "possibly sent once"),
            (Means::Unknown, 2, false, "possibly sent 3 times"),
            (Means::Refused, 0, false, "refused"),
            (Means::Refused, 1, false, "dead, possibly sent once"),
            (Means::NotNow, 0, true, "dead"),
            (Means::Barred, 0, false, "waiting"),
            (Means::Barred, 0, true, "dead"),
            (Means::Unknown, 4, true, "dead, possibly sent 5 times"),
        ] {
            assert_eq!(Failure { error: String::new(), means }.state(before, last).to_string(), word);
        }
    }
}
