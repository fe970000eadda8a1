//! Sends one e-mail: composes it once, writes it to a file or gives it to an SMTP server, and
//! reports what a failure proves.
//!
//! Promises: one identity has one Message-ID, in every attempt. A file is complete or absent, and a
//! second attempt replaces it. A failure says whether the server may have accepted the e-mail all
//! the same (O28).
//!
//! Not here: when an e-mail is sent, which the sender of rows ([`sender`](super::sender)) and the
//! operation ([`phased::email`](crate::operation::phased::email)) decide.

use std::path::{Path, PathBuf};
use std::time::Duration;

use lettre::address::Envelope;
use lettre::message::{Mailbox as Address, header::ContentType};
use lettre::transport::smtp::{AsyncSmtpTransportBuilder, PoolConfig};
use lettre::{AsyncSmtpTransport, AsyncTransport, Message, Tokio1Executor};
use sha2::{Digest, Sha256};
use tokio::fs::File;
use tokio::io::AsyncWriteExt;
use tokio::runtime;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::text::hex::hex;

/// How long a server has to answer to QUIT. Then the connection is closed.
const GOODBYE: Duration = Duration::from_secs(2);

/// Where e-mails are sent to: files or an SMTP server.
#[derive(Debug, Clone)]
pub enum EmailTransport {
    /// One `.eml` file for each e-mail, named by its Message-ID.
    Files(PathBuf),
    /// An SMTP server, as the library `lettre` describes it. Each e-mail has a connection of its
    /// own; a pool that is set here is not used.
    Smtp(Box<AsyncSmtpTransportBuilder>),
}

impl EmailTransport {
    /// An SMTP server by its URL: `smtp://` or `smtps://` with user, password and host. TLS as the
    /// scheme says (`?tls=required` for STARTTLS).
    ///
    /// # Errors
    /// What is wrong with the URL, without its password.
    pub fn smtp(url: &str) -> Result<Self, String> {
        let builder = AsyncSmtpTransport::<Tokio1Executor>::from_url(url)
            .map_err(|error| format!("the SMTP URL `{}` cannot be used: {error}", crate::error::redact(url)))?;
        Ok(Self::Smtp(Box::new(builder.timeout(Some(Duration::from_secs(20))))))
    }

    /// Makes the directory, if e-mails go to files, and synchronises it once: where that is not
    /// possible each e-mail would count as not sent, although its file is there.
    pub(crate) fn make(&self) -> Result<(), String> {
        match self {
            Self::Files(directory) => std::fs::create_dir_all(directory)
                .and_then(|()| std::fs::File::open(directory)?.sync_all())
                .map_err(|error| format!("the directory {} cannot be made or used: {error}", directory.display())),
            Self::Smtp(_) => Ok(()),
        }
    }

    /// Sends the bytes once. `within` limits the whole SMTP dialogue, because the client library
    /// limits only each connect.
    ///
    /// # Cancel safety
    /// If the future is dropped, it is unknown whether the e-mail was sent.
    pub(crate) async fn carry(
        &self,
        message_id: &str,
        envelope: &Envelope,
        bytes: &[u8],
        within: Duration,
    ) -> Result<(), Failure> {
        match self {
            Self::Files(directory) => write_whole(directory, message_id, bytes)
                .await
                .map_err(|error| Failure::before_sending(error.to_string())),
            Self::Smtp(server) => send_once(server, envelope, bytes, within).await,
        }
    }
}

/// Sends the bytes over a connection that nothing uses before or after, and that ends soon after.
///
/// The client library keeps a connection in its pool also where the dialogue was given up in the
/// middle. The next e-mail would then take the late answers to that one for answers to itself. Any
/// crate of a program can turn the pool on, by the feature `pool`, so each e-mail has a pool of its
/// own here, which keeps nothing.
///
/// The feature is on in our manifest too: with it the library says QUIT in a task of its own.
/// Without it, `send_raw` waits for the answer to QUIT. A server that accepts the e-mail and then
/// hangs would look like one that never answered, and the e-mail would be sent again.
///
/// That task has no limit of time. So each dialogue has a runtime of its own, which ends with it
/// and closes what a server that hangs would keep open for ever.
async fn send_once(
    server: &AsyncSmtpTransportBuilder,
    envelope: &Envelope,
    bytes: &[u8],
    within: Duration,
) -> Result<(), Failure> {
    let server = server.clone().pool_config(PoolConfig::new().max_size(0));
    let (envelope, bytes) = (envelope.clone(), bytes.to_vec());
    let dropped = CancellationToken::new();
    let _guard = dropped.clone().drop_guard();
    let (tell, told) = oneshot::channel();
    tokio::task::spawn_blocking(move || {
        let runtime = match runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return drop(tell.send(Err(Failure::before_sending(error.to_string())))),
        };
        runtime.block_on(async {
            let sends = async { server.build::<Tokio1Executor>().send_raw(&envelope, &bytes).await };
            let sent = tokio::select! {
                () = dropped.cancelled() => return,
                sent = tokio::time::timeout(within, sends) => sent,
            };
            // Nobody hears it where the sender was dropped just now.
            let _nobody = tell.send(match sent {
                Ok(sent) => sent.map(drop).map_err(|error| Failure::of(&error)),
                Err(_) => Err(Failure {
                    error: format!("the server did not take it within {} s", within.as_secs()),
                    permanent: false,
                    arrived: true,
                }),
            });
            let tasks = runtime::Handle::current().metrics();
            let ends = async {
                while tasks.num_alive_tasks() > 0 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            let _in_time = tokio::time::timeout(GOODBYE, ends).await;
        });
        runtime.shutdown_background();
    });
    told.await.unwrap_or_else(|_| {
        let error = "the dialogue with the server ended without an outcome".to_owned();
        Err(Failure { error, permanent: false, arrived: true })
    })
}

/// Parses an e-mail address of the sender or recipient.
pub(crate) fn address(text: &str) -> Result<Address, String> {
    text.parse().map_err(|error| format!("`{text}` is no address: {error}"))
}

pub(crate) fn compose(
    from: &Address,
    message_id: &str,
    recipient: &str,
    subject: &str,
    body: &str,
) -> Result<Message, String> {
    Message::builder()
        .message_id(Some(format!("<{message_id}>")))
        .from(from.clone())
        .to(address(recipient)?)
        .subject(subject)
        .header(ContentType::TEXT_PLAIN)
        .body(body.to_owned())
        .map_err(|error| format!("the e-mail cannot be composed: {error}"))
}

/// An attempt to send that failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) error: String,
    /// Whether later attempts fail too.
    pub(crate) permanent: bool,
    /// Whether the server may have accepted the e-mail all the same.
    pub(crate) arrived: bool,
}

impl Failure {
    fn before_sending(error: String) -> Self {
        Self { error, permanent: false, arrived: false }
    }

    fn of(error: &lettre::transport::smtp::Error) -> Self {
        Self {
            permanent: error.is_permanent() && !is_of_us(error),
            arrived: may_have_arrived(error),
            error: error.to_string(),
        }
    }
}

/// Whether the server refuses our credentials, not this e-mail: once they are corrected, the same
/// e-mail can be sent (RFC 4954, 6).
fn is_of_us(error: &lettre::transport::smtp::Error) -> bool {
    error.status().is_some_and(|code| matches!(u16::from(code), 530 | 534 | 535 | 538))
}

/// Whether the server may have accepted the e-mail despite this error. Not if it said no, and not
/// if nothing reached it.
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

/// Makes a Message-ID that depends only on the unique key.
pub(crate) fn message_id(unique_key: &str) -> String {
    let digest = Sha256::digest(unique_key.as_bytes());
    format!("{}@oncebox.invalid", hex(&digest[..16]))
}

/// Writes a complete file or none, also where the machine loses its power: writes beside it,
/// synchronises, renames, and synchronises the directory. The row says *sent* after that.
async fn write_whole(directory: &Path, message_id: &str, bytes: &[u8]) -> std::io::Result<()> {
    let name = message_id.split('@').next().unwrap_or(message_id);
    let (beside, file) = (directory.join(format!(".{name}.part")), directory.join(format!("{name}.eml")));
    let mut part = File::create(&beside).await?;
    part.write_all(bytes).await?;
    // Without it tokio would keep the error of a write to itself: `sync_all` does not return it.
    part.flush().await?;
    part.sync_all().await?;
    // Opened before the file has its name: after a failure here nobody has seen the e-mail.
    let names = File::open(directory).await?;
    tokio::fs::rename(&beside, &file).await?;
    names.sync_all().await
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;

    use tokio::io::{AsyncBufReadExt, BufReader};
    use tokio::sync::Notify;

    use super::*;

    /// It fails where the directory is only made. Then each attempt writes the file and fails, and
    /// whoever takes files away sends the e-mail once for each attempt.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_directory_that_cannot_be_synchronised_is_refused_before_any_e_mail() {
        let refused = EmailTransport::Files("/proc".into()).make();
        assert!(refused.is_err_and(|why| why.contains("/proc")));
    }

    /// Shown by: one transport with a pool for all e-mails. The second one then takes over the
    /// connection of the first, whose answers are still to come.
    #[tokio::test]
    async fn an_e_mail_that_was_given_up_leaves_its_connection_to_no_other() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let transport = EmailTransport::smtp(&format!("smtp://{}", listener.local_addr().unwrap())).unwrap();
        let hangs = Arc::new((Notify::new(), Notify::new()));
        let is_hanging = Arc::clone(&hangs);
        tokio::spawn(async move {
            let mut silent = Some(is_hanging);
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(answer(BufReader::new(socket), silent.take()));
            }
        });
        let email = compose(&address("a@example.com").unwrap(), "m", "b@example.com", "Receipt", "Thanks.").unwrap();
        let carry = || transport.carry("m", email.envelope(), b"Thanks.", Duration::from_secs(30));
        let was_answered = tokio::select! {
            _ = carry() => true,
            () = hangs.0.notified() => false,
        };
        assert!(!was_answered);
        // It fails where the client library's own task for it goes on.
        tokio::time::timeout(Duration::from_secs(20), hangs.1.notified()).await.expect("its connection is closed");
        assert!(carry().await.is_ok());
    }

    /// Answers every command with yes. With `silent` it leaves the first MAIL without an answer,
    /// and every command after it.
    async fn answer(mut socket: BufReader<tokio::net::TcpStream>, silent: Option<Arc<(Notify, Notify)>>) -> Option<()> {
        socket.write_all(b"220 test\r\n").await.ok()?;
        let (mut line, mut is_content) = (String::new(), false);
        while socket.read_line(&mut line).await.unwrap_or(0) > 0 {
            if let Some(silent) = silent.as_ref().filter(|_| !line.starts_with("EHLO")) {
                silent.0.notify_one();
            } else if line.starts_with("DATA") {
                is_content = true;
                socket.write_all(b"354 go on\r\n").await.ok()?;
            } else if !is_content || line == ".\r\n" {
                is_content = false;
                socket.write_all(b"250 ok\r\n").await.ok()?;
            }
            line.clear();
        }
        silent.map(|silent| silent.1.notify_one())
    }

    #[test]
    fn a_message_id_is_a_function_of_the_unique_key() {
        assert_eq!(message_id("receipt_payment_pay_789"), message_id("receipt_payment_pay_789"));
        assert_ne!(message_id("receipt_payment_pay_789"), message_id("receipt_payment_pay_790"));
        assert!(message_id("x\r\nBcc: y").bytes().all(|byte| byte.is_ascii_alphanumeric() || b"@.".contains(&byte)));
    }
}
