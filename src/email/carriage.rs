//! Composes an e-mail, writes it to a file or gives it to an SMTP server, and reports what a
//! failure proves.
//!
//! Promises: one unique key has one Message-ID, in every attempt. A file is complete or absent, and
//! a second attempt replaces it. A failure says whether the server may have accepted the e-mail all
//! the same (O28). With files there is one exception: if the last sync of the directory fails, the
//! attempt counts as not sent, although the file may be there.
//!
//! Not here: when an e-mail is sent, which the sender of rows ([`sender`](super::sender)) and the
//! operation ([`phased::email`](crate::operation::phased::email)) decide.

use std::path::{Path, PathBuf};
use std::time::Duration;

use lettre::Message;
use lettre::address::Envelope;
use lettre::message::{Mailbox as Address, header::ContentType};
use sha2::{Digest, Sha256};
use tokio::fs::File;
use tokio::io::AsyncWriteExt;

use super::smtp::{Failure, Means, SmtpServer};
use crate::text::hex::hex;

/// Where e-mails are sent to: files or an SMTP server.
#[derive(Debug, Clone)]
pub struct EmailTransport(Way);

#[derive(Debug, Clone)]
enum Way {
    Files(PathBuf),
    Smtp(Box<SmtpServer>),
}

impl EmailTransport {
    /// One `.eml` file for each e-mail in this directory, named by its Message-ID.
    pub fn files(directory: impl Into<PathBuf>) -> Self {
        Self(Way::Files(directory.into()))
    }

    /// An SMTP server, as `smtp://USER:PASSWORD@HOST:PORT` or `smtps://..`; each e-mail has a
    /// connection of its own. With `smtp`, `?tls=required` asks for STARTTLS, and
    /// `?tls=opportunistic` for STARTTLS where the server has it. The path is the name that EHLO
    /// gives.
    ///
    /// # Errors
    /// What is wrong with the URL, without its password.
    pub fn smtp(url: &str) -> Result<Self, String> {
        Ok(Self(Way::Smtp(Box::new(SmtpServer::from_url(url)?))))
    }

    /// Whether an e-mail that is sent again takes the place of the earlier one.
    pub(super) fn replaces(&self) -> bool {
        matches!(self.0, Way::Files(_))
    }

    /// Makes the directory, if e-mails go to files, and syncs it once. Where a directory cannot be
    /// synced, each attempt would write its file, fail and be repeated.
    pub(crate) fn make(&self) -> Result<(), String> {
        match &self.0 {
            Way::Files(directory) => std::fs::create_dir_all(directory)
                .and_then(|()| std::fs::File::open(directory)?.sync_all())
                .map_err(|error| format!("the directory {} cannot be made or used: {error}", directory.display())),
            Way::Smtp(_) => Ok(()),
        }
    }

    /// Sends the bytes once. `within` limits the whole SMTP dialogue.
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
        match &self.0 {
            Way::Files(directory) => write_whole(directory, message_id, bytes).await.map_err(|error| {
                let error = format!("the file of the e-mail cannot be written: {error}");
                Failure { error, means: Means::NotNow }
            }),
            Way::Smtp(server) => server.send(envelope, bytes, within).await,
        }
    }
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

/// Makes a Message-ID that depends only on the unique key.
pub(crate) fn message_id(unique_key: &str) -> String {
    let digest = Sha256::digest(unique_key.as_bytes());
    format!("{}@oncebox.invalid", hex(&digest[..16]))
}

/// Writes a complete file or none, also where the machine loses its power: writes beside it, syncs,
/// renames, and syncs the directory. The row says *sent* after that.
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
    use super::*;

    /// It fails where the directory is only made. Then each attempt writes the file and fails, and
    /// whoever takes files away sends the e-mail once for each attempt.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_directory_that_cannot_be_synchronised_is_refused_before_any_e_mail() {
        let refused = EmailTransport::files("/proc").make();
        assert!(refused.is_err_and(|why| why.contains("/proc")));
    }

    #[test]
    fn a_message_id_is_a_function_of_the_unique_key() {
        assert_eq!(message_id("receipt_payment_pay_789"), message_id("receipt_payment_pay_789"));
        assert_ne!(message_id("receipt_payment_pay_789"), message_id("receipt_payment_pay_790"));
        assert!(message_id("x\r\nBcc: y").bytes().all(|byte| byte.is_ascii_alphanumeric() || b"@.".contains(&byte)));
    }
}
