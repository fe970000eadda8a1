//! The e-mail sender: durable rows out, to `.eml` files or an SMTP server.
//!
//! Promise: one row is one e-mail with one Message-ID, made from the row's unique key, the same at every try. A row whose
//! sending was interrupted is sent again under that Message-ID: whether the server took the first one is unknown, and SMTP has
//! no way to ask. With files, the second try replaces the file, so there it is exactly once.
//!
//! What became of a row is said in the words of [`Delivery`] (O28), in the metric and before the row's error. A row keeps the
//! number of its tries, not what each met: so a try before this one counts as one that may have arrived, and `possibly sent N
//! times` says how often at most.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lettre::message::{Mailbox as Address, header::ContentType};
use lettre::{AsyncSmtpTransport, AsyncTransport, Message, Tokio1Executor};
use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;

use super::pace::{Pace, sleep_unless};
use crate::error::StoreError;
use crate::observe::{self, Health, PartState};
use crate::policy::operation::delivery::Delivery;
use crate::policy::operation::provider::Settled;
use crate::store::{Claim, EmailOutcome, EmailToSend, Store};

/// Where e-mails go.
#[derive(Debug, Clone)]
pub enum EmailTransport {
    /// One `.eml` file each, named by its Message-ID.
    Files(PathBuf),
    /// An SMTP server.
    Smtp(AsyncSmtpTransport<Tokio1Executor>),
}

impl EmailTransport {
    /// `smtp://` or `smtps://` with user, password and host; TLS as the scheme says (`?tls=required` for STARTTLS).
    ///
    /// # Errors
    /// What is wrong with the URL; never its password.
    pub fn smtp(url: &str) -> Result<Self, String> {
        let builder = AsyncSmtpTransport::<Tokio1Executor>::from_url(url)
            .map_err(|error| format!("the SMTP URL `{}` cannot be used: {error}", crate::error::redact(url)))?;
        Ok(Self::Smtp(builder.timeout(Some(Duration::from_secs(20))).build()))
    }
}

/// Settings of a sender.
#[derive(Debug, Clone)]
pub struct SenderOptions {
    /// The address e-mails come from.
    pub from: String,
    /// Tries of one e-mail; then it is failed.
    pub attempts_max: u32,
    /// End when nothing is left to send.
    pub until_empty: bool,
}

/// Sends e-mail rows.
#[derive(Debug)]
pub struct Sender<S: Store> {
    store: S,
    transport: EmailTransport,
    from: Address,
    options: SenderOptions,
    health: Health,
}

/// Rows claimed at once: two, because a claim must outlive the sending of all of them, or another sender takes the last ones
/// and sends them a second time.
const BATCH: usize = 2;
/// The whole of one sending; the timeout of the SMTP client is one of each command.
const SENDING: Duration = Duration::from_secs(25);
/// A claim outlives the deadlines of all rows that were claimed together; after it, a row of a sender that died is taken again.
const CLAIM: Duration = Duration::from_secs(60);
/// How long a stop waits for claimed rows to be given back.
const GIVE_BACK: Duration = Duration::from_secs(5);
const PART: &str = "e-mail sender";

/// What a sender has claimed and not settled.
#[derive(Debug, Default)]
struct Hand {
    claimed: VecDeque<EmailToSend>,
    claimed_at: Option<Instant>,
    /// A claim whose answer was lost.
    in_doubt: Option<Claim>,
    /// How a sending ended, not yet told to the database.
    outcome: Option<(EmailToSend, EmailOutcome)>,
}

/// What a round came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Worked,
    Idle,
    Empty,
}

impl<S: Store> Sender<S> {
    /// Puts a sender together.
    ///
    /// # Errors
    /// The address cannot be used, or the directory cannot be made.
    pub fn new(store: S, transport: EmailTransport, options: SenderOptions, health: Health) -> Result<Self, String> {
        let from = options.from.parse().map_err(|error| format!("`{}` is no address: {error}", options.from))?;
        if let EmailTransport::Files(directory) = &transport {
            std::fs::create_dir_all(directory)
                .map_err(|error| format!("the directory {} cannot be made: {error}", directory.display()))?;
        }
        Ok(Self { store, transport, from, options, health })
    }

    /// Runs until it is told to stop, or nothing is left where `until_empty` is set.
    ///
    /// # Errors
    /// What a person must mend.
    ///
    /// # Cancel safety
    /// Dropped, a row that is just being sent is sent again later under the same Message-ID.
    pub async fn run(&self, stop: CancellationToken) -> Result<(), StoreError> {
        let mut pace = Pace::new(Duration::from_millis(200), Duration::from_secs(5));
        let mut hand = Hand::default();
        while !stop.is_cancelled() {
            let step = self.step(&mut hand, &stop).await;
            if step.is_ok() {
                self.health.set(PART, PartState::Ready);
            }
            match step {
                Ok(Step::Worked) => pace.worked(),
                Ok(Step::Idle) => {
                    sleep_unless(&stop, Duration::from_millis(100)).await;
                }
                Ok(Step::Empty) => break,
                Err(error) if error.is_nobodys() => {
                    self.health.set(PART, PartState::Waiting(format!("database: {error}")));
                    pace.wait(&stop).await;
                }
                Err(error) => return Err(error),
            }
        }
        // What is in the hand goes back; where that is not to be had, the claims run out.
        if tokio::time::timeout(GIVE_BACK, self.empty(&mut hand, &stop)).await.is_err() {
            tracing::debug!("claimed e-mails were not given back");
        }
        Ok(())
    }

    async fn step(&self, hand: &mut Hand, stop: &CancellationToken) -> Result<Step, StoreError> {
        self.empty(hand, stop).await?;
        if stop.is_cancelled() {
            return Ok(Step::Worked);
        }
        if let Some(claim) = &hand.in_doubt {
            self.store.give_back_emails(claim).await?;
            hand.in_doubt = None;
        }
        // Before the claim begins by the database's clock.
        hand.claimed_at = Some(Instant::now());
        let claim = Claim::new(CLAIM);
        hand.in_doubt = Some(claim);
        hand.claimed = self.store.claim_emails(BATCH, &claim).await?.into();
        hand.in_doubt = None;
        if !hand.claimed.is_empty() {
            self.empty(hand, stop).await?;
            return Ok(Step::Worked);
        }
        let empty = self.options.until_empty && self.store.emails_pending().await? == 0;
        Ok(if empty { Step::Empty } else { Step::Idle })
    }

    /// Sends what is in the hand, one after the other, each settled before the next. A database that goes away in between leaves
    /// the outcome in the hand: told later, it is not sent a second time (G10).
    async fn empty(&self, hand: &mut Hand, stop: &CancellationToken) -> Result<(), StoreError> {
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
            let Some(email) = hand.claimed.pop_front() else { return Ok(()) };
            // A claim that may end while its e-mail is sent is not used: another sender would send it too.
            let stands = hand.claimed_at.is_some_and(|at| at.elapsed() + SENDING < CLAIM) && !stop.is_cancelled();
            let outcome = if stands { self.send(&email).await } else { EmailOutcome::NotTried };
            if let EmailOutcome::Again { error, .. } | EmailOutcome::Failed(error) = &outcome {
                tracing::warn!(email = email.email_id, attempt = email.attempt, %error, "an e-mail was not sent");
            }
            hand.outcome = Some((email, outcome));
        }
    }

    async fn send(&self, email: &EmailToSend) -> EmailOutcome {
        let message_id = message_id(&email.unique_key);
        let tried = match self.compose(email, &message_id) {
            Ok(message) => self.carry(&message_id, message).await,
            Err(error) => Err(Failure { error, permanent: true, arrived: false }),
        };
        let before = match &self.transport {
            // A file is replaced: it is there once, or not at all.
            EmailTransport::Files(_) => 0,
            EmailTransport::Smtp(_) => email.attempt.saturating_sub(1),
        };
        let (state, failure) = match tried {
            Ok(()) => (Delivery::Sent, None),
            Err(failure) => (failure.state(before, email.attempt >= self.options.attempts_max), Some(failure)),
        };
        observe::email(state.word());
        let Some(Failure { error, .. }) = failure else { return EmailOutcome::Sent };
        let error = format!("{state}: {error}");
        if matches!(state, Delivery::Refused | Delivery::Dead(_)) {
            return EmailOutcome::Failed(error);
        }
        let after = Duration::from_secs(1 << email.attempt.min(10)).mul_f64(0.5 + fastrand::f64() / 2.0);
        EmailOutcome::Again { after, error }
    }

    async fn carry(&self, message_id: &str, message: Message) -> Result<(), Failure> {
        match &self.transport {
            EmailTransport::Files(directory) => write_whole(directory, message_id, &message.formatted())
                .await
                .map_err(|error| Failure { error: error.to_string(), permanent: false, arrived: false }),
            EmailTransport::Smtp(server) => match tokio::time::timeout(SENDING, server.send(message)).await {
                Ok(Ok(_)) => Ok(()),
                Ok(Err(error)) => Err(Failure {
                    permanent: error.is_permanent(),
                    arrived: may_have_arrived(&error),
                    error: error.to_string(),
                }),
                Err(_) => Err(Failure {
                    error: format!("the server did not take it within {} s", SENDING.as_secs()),
                    permanent: false,
                    arrived: true,
                }),
            },
        }
    }

    fn compose(&self, email: &EmailToSend, message_id: &str) -> Result<Message, String> {
        let to: Address =
            email.recipient.parse().map_err(|error| format!("`{}` is no address: {error}", email.recipient))?;
        Message::builder()
            .message_id(Some(format!("<{message_id}>")))
            .from(self.from.clone())
            .to(to)
            .subject(&email.subject)
            .header(ContentType::TEXT_PLAIN)
            .body(email.body.clone())
            .map_err(|error| format!("the e-mail cannot be composed: {error}"))
    }
}

/// A try that failed.
#[derive(Debug)]
struct Failure {
    error: String,
    /// No later try can do better.
    permanent: bool,
    /// The server may have taken it all the same.
    arrived: bool,
}

impl Failure {
    /// What the e-mail is now, where so many tries before this one may have arrived.
    fn state(&self, before: u32, last: bool) -> Delivery {
        let doubtful = before.saturating_add(self.arrived.into());
        let settled = (self.permanent && doubtful == 0).then_some(Settled::Failed);
        Delivery::of(settled, self.permanent || last, doubtful)
    }
}

/// Whether a server may have taken an e-mail although this error came: not where it said no, and not where nothing reached it.
fn may_have_arrived(error: &lettre::transport::smtp::Error) -> bool {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let refused = cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused);
        if refused {
            return false;
        }
        source = cause.source();
    }
    !(error.is_permanent() || error.is_transient() || error.is_client() || error.is_tls())
}

/// Stable: a function of the unique key alone.
fn message_id(unique_key: &str) -> String {
    let digest = Sha256::digest(unique_key.as_bytes());
    let hex: String = digest[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{hex}@oncebox.invalid")
}

/// Whole or not at all: written beside, then renamed.
async fn write_whole(directory: &Path, message_id: &str, bytes: &[u8]) -> std::io::Result<()> {
    let name = message_id.split('@').next().unwrap_or(message_id);
    let (beside, file) = (directory.join(format!(".{name}.part")), directory.join(format!("{name}.eml")));
    tokio::fs::write(&beside, bytes).await?;
    tokio::fs::rename(&beside, &file).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e_mails_that_were_claimed_together_are_sent_before_their_claim_runs_out() {
        // With more of them another sender would send the last ones too.
        assert!(SENDING * u32::try_from(BATCH).unwrap_or(u32::MAX) < CLAIM);
    }

    // Shown by: calling the second try's refusal refused; a try that was refused one that may have arrived.
    #[test]
    fn o28_an_e_mails_state_is_said_in_the_words_of_deliveries() {
        let failure = |permanent, arrived| Failure { error: String::new(), permanent, arrived };
        for (permanent, arrived, before, last, word) in [
            (false, false, 0, false, "waiting"),
            (false, true, 0, false, "possibly sent once"),
            (false, true, 2, false, "possibly sent 3 times"),
            (true, false, 0, false, "refused"),
            (true, false, 1, false, "dead, possibly sent once"),
            (false, false, 0, true, "dead"),
            (false, true, 4, true, "dead, possibly sent 5 times"),
        ] {
            assert_eq!(failure(permanent, arrived).state(before, last).to_string(), word);
        }
    }

    #[test]
    fn a_message_id_is_a_function_of_the_unique_key() {
        assert_eq!(message_id("receipt_payment_pay_789"), message_id("receipt_payment_pay_789"));
        assert_ne!(message_id("receipt_payment_pay_789"), message_id("receipt_payment_pay_790"));
        assert!(message_id("x\r\nBcc: y").bytes().all(|byte| byte.is_ascii_alphanumeric() || b"@.".contains(&byte)));
    }
}
