//! An e-mail on its way: composed once, carried to a file or an SMTP server, and what a failure
//! proves.
//!
//! Promises: one identity is one Message-ID, at every try; a file is whole or not there, and a
//! second try replaces it; a failure says whether the server may have taken the e-mail all the same
//! (O28).
//!
//! Not here: who sends when, which is the sender of rows ([`sender`](super::sender)) and the operation
//! ([`phased::email`](super::operation::phased::email)).

use std::path::{Path, PathBuf};
use std::time::Duration;

use lettre::address::Envelope;
use lettre::message::{Mailbox as Address, header::ContentType};
use lettre::{AsyncSmtpTransport, AsyncTransport, Message, Tokio1Executor};
use sha2::{Digest, Sha256};

use crate::policy::hex::hex;

/// Where e-mails are carried to: files or an SMTP server.
#[derive(Debug, Clone)]
pub enum EmailTransport {
    /// One `.eml` file each, named by its Message-ID.
    Files(PathBuf),
    /// An SMTP server, over this transport of the library `lettre`.
    Smtp(AsyncSmtpTransport<Tokio1Executor>),
}

impl EmailTransport {
    /// `smtp://` or `smtps://` with user, password and host; TLS as the scheme says
    /// (`?tls=required` for STARTTLS).
    ///
    /// # Errors
    /// What is wrong with the URL; never its password.
    pub fn smtp(url: &str) -> Result<Self, String> {
        let builder = AsyncSmtpTransport::<Tokio1Executor>::from_url(url)
            .map_err(|error| format!("the SMTP URL `{}` cannot be used: {error}", crate::error::redact(url)))?;
        Ok(Self::Smtp(builder.timeout(Some(Duration::from_secs(20))).build()))
    }

    /// Makes the directory of files.
    ///
    /// # Errors
    /// It cannot be made.
    pub(super) fn make(&self) -> Result<(), String> {
        match self {
            Self::Files(directory) => std::fs::create_dir_all(directory)
                .map_err(|error| format!("the directory {} cannot be made: {error}", directory.display())),
            Self::Smtp(_) => Ok(()),
        }
    }

    /// Sends the bytes, once; by SMTP within this time as a whole, for the client bounds nothing
    /// but each connect.
    ///
    /// # Cancel safety
    /// Dropped, whether it was sent is unknown.
    pub(super) async fn carry(
        &self,
        message_id: &str,
        envelope: &Envelope,
        bytes: &[u8],
        within: Duration,
    ) -> Result<(), Failure> {
        match self {
            Self::Files(directory) => write_whole(directory, message_id, bytes).await.map_err(|error| Failure {
                error: error.to_string(),
                permanent: false,
                arrived: false,
            }),
            Self::Smtp(server) => match tokio::time::timeout(within, server.send_raw(envelope, bytes)).await {
                Ok(Ok(_)) => Ok(()),
                Ok(Err(error)) => Err(Failure {
                    permanent: error.is_permanent() && !is_of_us(&error),
                    arrived: may_have_arrived(&error),
                    error: error.to_string(),
                }),
                Err(_) => Err(Failure {
                    error: format!("the server did not take it within {} s", within.as_secs()),
                    permanent: false,
                    arrived: true,
                }),
            },
        }
    }
}

/// The address that e-mails come from.
pub(super) fn address(text: &str) -> Result<Address, String> {
    text.parse().map_err(|error| format!("`{text}` is no address: {error}"))
}

/// A plain text e-mail.
pub(super) fn compose(
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

/// A try that failed.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: String,
    /// No later try can do better.
    pub(super) permanent: bool,
    /// The server may have taken it all the same.
    pub(super) arrived: bool,
}

/// Whether it is us that a server does not take, whatever the e-mail: who mends the credentials
/// needs no other e-mail (RFC 4954, 6).
fn is_of_us(error: &lettre::transport::smtp::Error) -> bool {
    error.status().is_some_and(|code| matches!(u16::from(code), 530 | 534 | 535 | 538))
}

/// Whether a server may have taken an e-mail although this error came: not where it said no, and
/// not where nothing reached it.
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
pub(super) fn message_id(unique_key: &str) -> String {
    let digest = Sha256::digest(unique_key.as_bytes());
    format!("{}@oncebox.invalid", hex(&digest[..16]))
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
    fn a_message_id_is_a_function_of_the_unique_key() {
        assert_eq!(message_id("receipt_payment_pay_789"), message_id("receipt_payment_pay_789"));
        assert_ne!(message_id("receipt_payment_pay_789"), message_id("receipt_payment_pay_790"));
        assert!(message_id("x\r\nBcc: y").bytes().all(|byte| byte.is_ascii_alphanumeric() || b"@.".contains(&byte)));
    }
}
