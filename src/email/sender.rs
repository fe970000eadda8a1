//! The e-mail sender: sends durable rows to `.eml` files or an SMTP server.
//!
//! Promise: one row is one e-mail with one Message-ID, made from the unique key of the row and the
//! same in every attempt. A row whose sending was interrupted is sent again under that Message-ID,
//! because it is unknown whether the server accepted the first one, and SMTP has no query. With
//! files the second attempt replaces the file, so the e-mail exists exactly once.
//!
//! Several e-mails are sent at once, each in a dialogue of its own. An e-mail whose attempt took
//! long waits long for its next one. So a recipient for whom the server gives no answer delays the
//! e-mails to others only while every dialogue has such a recipient.
//!
//! The state of a row is named with the words of [`Delivery`] (O28), in the metric and in the row's
//! error. A row stores how many of its attempts may have arrived: those whose answer was lost, and
//! those whose sender died.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
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

/// How many e-mails are sent at once. A server that allows fewer connections is asked for fewer.
const DIALOGUES: usize = 8;
/// How long a sender keeps to the number of dialogues that the server allowed.
const NARROW: Duration = Duration::from_secs(60);
const SENDING: Duration = Duration::from_secs(25);
/// After an attempt, the e-mail waits at least this many times as long as the attempt took. So it
/// uses at most a sixteenth of the time of one dialogue.
const REST: u32 = 15;
/// A lease lasts longer than a dialogue. After it, the rows of a sender that died can be
/// leased again.
const LEASE: Duration = Duration::from_secs(60);
/// How long a stop waits to release leased rows.
const GIVE_BACK: Duration = Duration::from_secs(5);
/// Rows that are blanked or deleted at once.
const PAGE: usize = 1_000;
const BETWEEN_PAGES: Duration = Duration::from_millis(50);
/// The pause between two rounds that blank and delete.
const FORGET_EVERY: Duration = Duration::from_secs(60);
const PART: &str = "e-mail sender";

/// An e-mail whose dialogue ended. An error says why no e-mail can be sent now.
type Ended = (Arc<EmailToSend>, Result<EmailOutcome, String>);

/// The rows that a sender has leased and not settled, and what it knows of its server.
#[derive(Default)]
struct Hand<'s> {
    dialogues: FuturesUnordered<BoxFuture<'s, Ended>>,
    /// The results that are not written to the database yet.
    outcomes: VecDeque<(Arc<EmailToSend>, EmailOutcome)>,
    /// A lease of which the answer was lost.
    in_doubt: Option<RowLease>,
    /// The server refused a dialogue beside this many others, and when.
    narrowed: Option<(usize, Since)>,
    /// The server refused its only dialogue. Until it takes one again, one e-mail at a time
    /// is tried.
    is_away: bool,
    /// Why it refused its only dialogue, until that is shown.
    refusal: Option<String>,
}

impl Hand<'_> {
    /// How many dialogues there may be now.
    fn room(&self) -> usize {
        match self.narrowed {
            _ if self.is_away => 1,
            Some((room, at)) if at.elapsed() < NARROW => room,
            _ => DIALOGUES,
        }
    }

    /// Notes how a dialogue ended. Where no e-mail can be sent, the row goes back without a count.
    fn ended(&mut self, (email, tried): Ended) {
        let outcome = match tried {
            Ok(outcome) => {
                if std::mem::take(&mut self.is_away) {
                    self.narrowed = None;
                }
                outcome
            }
            Err(why) => {
                // Beside others it may be that the server allows no more connections.
                match self.dialogues.len() {
                    0 => (self.is_away, self.refusal) = (true, Some(why)),
                    others => self.narrowed = Some((others, Since::now())),
                }
                EmailOutcome::NotTried
            }
        };
        if let EmailOutcome::Again { error, .. } | EmailOutcome::Failed { error, .. } = &outcome {
            tracing::warn!(email = email.email_id, attempt = email.attempt, %error, "an attempt to send an e-mail failed");
        }
        self.outcomes.push_back((email, outcome));
    }

    /// Waits for this while the dialogues go on.
    async fn beside<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done,
                Some(ended) = self.dialogues.next() => self.ended(ended),
            }
        }
    }

    /// Waits for this, or until a dialogue has ended.
    async fn or_an_end<T>(&mut self, work: impl Future<Output = T>) {
        tokio::select! {
            _ = work => {}
            Some(ended) = self.dialogues.next() => self.ended(ended),
        }
    }
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
        for state in Delivery::EACH {
            observe::emails(state.word(), 0);
        }
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
        let mut hand = Hand::default();
        let mut end = Ok(());
        while !stop.is_cancelled() && end.is_ok() {
            let step = self.step(&mut hand, stop).await;
            match &step {
                Ok(Step::Idle) if hand.is_away => {
                    // The rows that were given back may be with another sender.
                    hand.is_away = !self.store.emails_pending().await.is_ok_and(|pending| pending == 0);
                    self.health.beat(PART);
                }
                Ok(Step::Worked | Step::Idle | Step::Empty) if !hand.is_away => {
                    self.health.set(PART, PartState::Ready);
                    away_pace.worked();
                }
                _ => {}
            }
            match step {
                Ok(Step::Worked) => pace.worked(),
                Ok(Step::Away(why)) => {
                    self.health.set(PART, PartState::Waiting(format!("e-mails: {why}")));
                    away_pace.wait(stop).await;
                }
                Ok(Step::Idle) => {
                    let pause = Duration::from_millis(if hand.is_away { 1_000 } else { 100 });
                    hand.or_an_end(sleep_unless(stop, pause)).await;
                }
                Ok(Step::Empty) => break,
                Err(error) if error.is_transient() => {
                    self.health.set(PART, PartState::Waiting(format!("database: {error}")));
                    hand.beside(pace.wait(stop)).await;
                }
                Err(error) => end = Err(error),
            }
        }
        self.release(hand).await;
        end
    }

    /// Lets the dialogues end, and settles their e-mails. If that does not work within
    /// [`GIVE_BACK`] after the last of them, the leases expire.
    async fn release(&self, mut hand: Hand<'_>) {
        while let Some(ended) = hand.dialogues.next().await {
            hand.ended(ended);
            if let Err(error) = self.settle(&mut hand).await {
                tracing::debug!(%error, "leased e-mails are not given back yet");
            }
        }
        let mut pace = Pace::new(Duration::from_millis(50), Duration::from_millis(500));
        let released = async {
            while let Err(error) = self.settle(&mut hand).await {
                tracing::debug!(%error, "leased e-mails are not given back yet");
                tokio::time::sleep(pace.next_wait()).await;
            }
        };
        if tokio::time::timeout(GIVE_BACK, released).await.is_ok() {
            return;
        }
        tracing::warn!("leased e-mails were not given back: their leases run out");
        for (email, _) in hand.outcomes.iter().filter(|(_, outcome)| *outcome == EmailOutcome::Sent) {
            tracing::error!(
                email = email.email_id,
                "that an e-mail was sent could not be stored before the stop: it may be sent again"
            );
        }
    }

    async fn step<'s>(&'s self, hand: &mut Hand<'s>, stop: &CancellationToken) -> Result<Step, StoreError> {
        self.settle(hand).await?;
        if let Some(why) = hand.refusal.take() {
            return Ok(Step::Away(why));
        }
        let free = hand.room().saturating_sub(hand.dialogues.len());
        if free == 0 {
            hand.or_an_end(std::future::pending::<()>()).await;
            return Ok(Step::Worked);
        }
        // Taken before the lease begins by the database's clock.
        let leased_at = Since::now();
        let lease = RowLease::new(LEASE);
        hand.in_doubt = Some(lease);
        let leased = hand.beside(self.store.lease_emails(free, &lease)).await?;
        hand.in_doubt = None;
        if leased.is_empty() {
            let empty = self.options.until_empty && hand.beside(self.store.emails_pending()).await? == 0;
            return Ok(if empty { Step::Empty } else { Step::Idle });
        }
        // A lease that may expire during the sending is not used, because another sender would send
        // the e-mail too.
        let stands = leased_at.elapsed() + SENDING < LEASE && !stop.is_cancelled();
        for email in leased.into_iter().map(Arc::new) {
            if stands {
                hand.dialogues.push(Box::pin(async move {
                    let tried = self.send(&email).await;
                    (email, tried)
                }));
            } else {
                hand.outcomes.push_back((email, EmailOutcome::NotTried));
            }
        }
        Ok(Step::Worked)
    }

    /// Writes what became of e-mails, and ends a lease of which the answer was lost. If the
    /// database goes away meanwhile, the result is kept and written later, so the e-mail is not
    /// sent a second time (G10).
    async fn settle(&self, hand: &mut Hand<'_>) -> Result<(), StoreError> {
        while let Some((email, outcome)) = hand.outcomes.front().cloned() {
            if !hand.beside(self.store.settle_email(&email, &outcome)).await? {
                tracing::warn!(
                    email = email.email_id,
                    "an e-mail was settled before, or another sender took it in the meantime"
                );
            }
            hand.outcomes.pop_front();
        }
        if let Some(lease) = hand.in_doubt {
            hand.beside(self.store.give_back_emails(&lease)).await?;
            hand.in_doubt = None;
        }
        Ok(())
    }

    /// Sends one e-mail once. An error says why none can be sent now.
    async fn send(&self, email: &EmailToSend) -> Result<EmailOutcome, String> {
        let (message_id, began) = (message_id(&email.unique_key), Since::now());
        let tried = match compose(&self.from, &message_id, &email.recipient, &email.subject, &email.body) {
            Ok(message) => self.transport.carry(&message_id, message.envelope(), &message.formatted(), SENDING).await,
            Err(error) => Err(Failure { error, means: Means::Refused }),
        };
        // A file is replaced, so it exists once or not at all.
        let before = if self.transport.replaces() { 0 } else { email.possibly_sent };
        let (state, failure) = match tried {
            Ok(()) => (Delivery::Sent, None),
            Err(Failure { error, means: Means::Away }) => return Err(error),
            Err(failure) => (failure.state(before, email.attempt >= self.options.attempts_max), Some(failure)),
        };
        observe::emails(state.word(), 1);
        let Some(Failure { error, .. }) = failure else { return Ok(EmailOutcome::Sent) };
        let (error, possibly_sent) = (format!("{state}: {error}"), state.doubtful());
        if matches!(state, Delivery::Refused | Delivery::Dead(_)) {
            return Ok(EmailOutcome::Failed { error, possibly_sent });
        }
        Ok(EmailOutcome::Again { after: rest(email.attempt, began.elapsed()), error, possibly_sent })
    }
}

/// How long an e-mail waits for its next attempt, after this attempt that took so long.
fn rest(attempt: u32, took: Duration) -> Duration {
    let backoff = Duration::from_secs(1 << attempt.min(10)).mul_f64(0.5 + fastrand::f64() / 2.0);
    backoff.max(took * REST)
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
    fn an_e_mail_waits_longer_the_longer_its_attempt_took() {
        for attempt in 1..=20 {
            assert!(rest(attempt, Duration::ZERO) <= Duration::from_secs(1_024));
            assert!(rest(attempt, SENDING) >= SENDING * 15);
        }
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
