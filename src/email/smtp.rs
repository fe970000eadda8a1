//! One dialogue with an SMTP server, on a connection of its own.
//!
//! Promise: a failure says whether every e-mail would fail (the server cannot be reached, or
//! refuses us) or only this one. It also says whether the server may have accepted the e-mail.
//! Nobody waits for the answer to QUIT.
//!
//! The commands stand here, because the client library's transport does not tell which of them
//! failed, waits for the answer to QUIT, and uses a connection again whose dialogue was given up.

use std::error::Error as _;
use std::fmt::{Display, Formatter};
use std::time::Duration;

use lettre::address::{Address, Envelope};
use lettre::transport::smtp::authentication::{Credentials, DEFAULT_MECHANISMS};
use lettre::transport::smtp::client::AsyncSmtpConnection;
use lettre::transport::smtp::commands::{Data, Mail, Rcpt};
use lettre::transport::smtp::extension::{ClientId, Extension, MailBodyParameter, MailParameter};
use lettre::transport::smtp::{Error, SMTP_PORT, SUBMISSION_PORT, SUBMISSIONS_PORT};
use tokio::time::timeout;

use super::wire::{self, Tls, public_roots};
use crate::error::redact;
use crate::task;
use crate::text::percent::percent_decode;
use crate::time::since::Since;

/// How long a server has to answer to QUIT. Then the connection is closed.
const GOODBYE: Duration = Duration::from_secs(2);

/// An attempt to send that failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) error: String,
    pub(crate) means: Means,
}

/// What a failure proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Means {
    /// Every e-mail would fail: there is no server, or it does not serve us. Nothing arrived.
    Away,
    /// Nothing arrived, and a later attempt may succeed.
    NotNow,
    /// Nothing arrived, and later attempts fail too until somebody changes something. It may be
    /// about us and not about the e-mail.
    Barred,
    /// Nothing arrived, and later attempts fail too.
    Refused,
    /// The server may have accepted the e-mail all the same.
    Unknown,
}

/// An SMTP server, by its URL.
#[derive(Clone)]
pub(super) struct SmtpServer {
    host: String,
    port: u16,
    tls: Tls,
    hello_name: ClientId,
    credentials: Option<Credentials>,
}

impl std::fmt::Debug for SmtpServer {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "SmtpServer({}:{})", self.host, self.port)
    }
}

/// The part of a dialogue that is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Up to the credentials.
    Connect,
    /// Our own address, which every e-mail has.
    Sender,
    /// The same, with parameters that some e-mails need.
    Parameters,
    /// The recipients, up to where the text may follow.
    Envelope,
    /// The text of the e-mail, up to the answer that accepts it.
    Text,
}

impl Display for Step {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Connect => "at connecting",
            Self::Sender | Self::Parameters => "at the sender's address",
            Self::Envelope => "at the recipient's address",
            Self::Text => "at the text",
        })
    }
}

impl Step {
    /// What the end of the connection, or of the time, means here.
    fn cut(self) -> Means {
        match self {
            Self::Connect | Self::Sender => Means::Away,
            Self::Parameters | Self::Envelope => Means::NotNow,
            Self::Text => Means::Unknown,
        }
    }

    fn failed(self, error: &Error) -> Failure {
        // Once our credentials are corrected, the same e-mail can be sent (RFC 4954, 6). Many
        // servers wait for a recipient before they refuse us by policy, 5.7 (RFC 3463), and some
        // ask for credentials for some recipients only. So nobody knows whether it is about all.
        let may_be_us = error.status().is_some_and(|code| matches!(u16::from(code), 530 | 534 | 535 | 538))
            || self == Self::Envelope && error.source().is_some_and(|text| text.to_string().starts_with("5.7."));
        let means = match self {
            Self::Envelope | Self::Text if error.is_permanent() && !may_be_us => Means::Refused,
            Self::Parameters | Self::Envelope | Self::Text if error.is_permanent() => Means::Barred,
            Self::Text if error.is_transient() => Means::NotNow,
            step => step.cut(),
        };
        Failure { error: format!("{self}: {error}"), means }
    }
}

/// The time that a whole dialogue may take.
#[derive(Debug, Clone, Copy)]
struct Limit {
    began: Since,
    within: Duration,
}

impl Limit {
    /// The failure of a dialogue whose time ended at this step.
    fn over_at(self, step: Step) -> Failure {
        let error = format!("{step}: the server did not take it within {} s", self.within.as_secs());
        Failure { error, means: step.cut() }
    }
}

impl SmtpServer {
    /// Reads the URL; an error tells what is wrong with it, without its password.
    pub(super) fn from_url(text: &str) -> Result<Self, String> {
        let refused = |why: &str| format!("the SMTP URL `{}` cannot be used: {why}", redact(text));
        let url = url::Url::parse(text).map_err(|error| refused(&error.to_string()))?;
        let host = url.host_str().filter(|host| !host.is_empty()).ok_or_else(|| refused("it names no host"))?;
        // A numeric address of version 6 stands in brackets in a URL only.
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let verified = || public_roots().map_err(|error| refused(&error.to_string()));
        if let Some((name, _)) = url.query_pairs().find(|(name, _)| name != "tls") {
            return Err(refused(&format!("`{name}` behind `?` is not known; `tls` is")));
        }
        if url.password().is_none() && !url.username().is_empty() {
            return Err(refused("it has a user and no password"));
        }
        let asked = url.query_pairs().next().map(|(_, value)| value.into_owned());
        let (usual_port, tls) = match (url.scheme(), asked.as_deref()) {
            ("smtp", None) => (SMTP_PORT, Tls::Never),
            ("smtp", Some("required")) => (SUBMISSION_PORT, Tls::Required(verified()?)),
            ("smtp", Some("opportunistic")) => (SUBMISSION_PORT, Tls::Opportunistic(verified()?)),
            ("smtp", Some(_)) => return Err(refused("`tls` must be `required` or `opportunistic`")),
            ("smtps", _) => (SUBMISSIONS_PORT, Tls::Wrapper(verified()?)),
            _ => return Err(refused("it must begin with smtp:// or smtps://")),
        };
        let plain = |part: &str| percent_decode(part).ok_or_else(|| refused("a part is not percent-encoded UTF-8"));
        let credentials = match url.password() {
            Some(password) => Some(Credentials::new(plain(url.username())?, plain(password)?)),
            None => None,
        };
        let hello_name = match url.path().trim_matches('/') {
            "" => ClientId::default(),
            name => ClientId::Domain(name.to_owned()),
        };
        Ok(Self { port: url.port().unwrap_or(usual_port), host, tls, hello_name, credentials })
    }

    /// Sends the bytes once. `within` limits the whole dialogue.
    ///
    /// # Cancel safety
    /// If the future is dropped, the connection is closed, and the e-mail may have been sent.
    pub(super) async fn send(&self, envelope: &Envelope, bytes: &[u8], within: Duration) -> Result<(), Failure> {
        let (limit, mut step) = (Limit { began: Since::now(), within }, Step::Connect);
        timeout(within, self.talk(envelope, bytes, &mut step, limit)).await.unwrap_or_else(|_| Err(limit.over_at(step)))
    }

    async fn talk(&self, envelope: &Envelope, bytes: &[u8], step: &mut Step, limit: Limit) -> Result<(), Failure> {
        let at_connect = |error: String| Failure { error: format!("{step}: {error}"), means: step.cut() };
        let mut connection =
            wire::connect((&self.host, self.port), &self.tls, &self.hello_name).await.map_err(at_connect)?;
        if let Some(credentials) = &self.credentials {
            connection.auth(DEFAULT_MECHANISMS, credentials).await.map_err(|error| step.failed(&error))?;
        }
        let said = hand_over(&mut connection, envelope, bytes, step, limit).await;
        // A server that accepts an e-mail and then hangs has accepted it.
        drop(task::spawn(timeout(GOODBYE, async move { connection.quit().await })));
        said
    }
}

async fn hand_over(
    connection: &mut AsyncSmtpConnection,
    envelope: &Envelope,
    bytes: &[u8],
    step: &mut Step,
    limit: Limit,
) -> Result<(), Failure> {
    let is_ascii = |address: &Address| AsRef::<str>::as_ref(address).is_ascii();
    let is_own_plain = envelope.from().is_none_or(is_ascii);
    let mut parameters = Vec::new();
    for (is_needed, extension, parameter) in [
        (!is_own_plain || !envelope.to().iter().all(is_ascii), Extension::SmtpUtfEight, MailParameter::SmtpUtfEight),
        (!bytes.is_ascii(), Extension::EightBitMime, MailParameter::Body(MailBodyParameter::EightBitMime)),
    ] {
        if is_needed && !connection.server_info().supports_feature(extension) {
            let error = format!("the server does not offer {extension}, which this e-mail needs");
            return Err(Failure { error, means: if is_own_plain { Means::Barred } else { Means::Away } });
        }
        parameters.extend(is_needed.then_some(parameter));
    }
    let failed = |step: Step| move |error| step.failed(&error);
    // With parameters it may be about them. Without, it is about our own address.
    *step = if parameters.is_empty() || !is_own_plain { Step::Sender } else { Step::Parameters };
    connection.command(Mail::new(envelope.from().cloned(), parameters)).await.map_err(failed(*step))?;
    *step = Step::Envelope;
    for recipient in envelope.to() {
        connection.command(Rcpt::new(recipient.clone(), Vec::new())).await.map_err(failed(*step))?;
    }
    connection.command(Data).await.map_err(failed(*step))?;
    // A process that was frozen finds the answer there when it wakes, and the time limit is asked
    // only after that. Another sender may have taken the e-mail meanwhile.
    if limit.began.elapsed() >= limit.within {
        return Err(limit.over_at(*step));
    }
    *step = Step::Text;
    connection.message(bytes).await.map_err(failed(*step))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;

    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use rustls::{ClientConfig, RootCertStore, ServerConfig};
    use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncWrite, AsyncWriteExt, BufReader};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::Notify;
    use tokio_rustls::TlsAcceptor;

    use super::*;

    fn envelope() -> Envelope {
        Envelope::new(Some("a@example.com".parse().unwrap()), vec!["b@example.com".parse().unwrap()]).unwrap()
    }

    fn server(listener: &TcpListener) -> SmtpServer {
        SmtpServer::from_url(&format!("smtp://{}", listener.local_addr().unwrap())).unwrap()
    }

    #[test]
    fn a_url_says_how_the_server_is_reached() {
        let of = |url: &str| {
            let SmtpServer { host, port, tls, hello_name, credentials } = SmtpServer::from_url(url).unwrap();
            let tls = match tls {
                Tls::Never => "none",
                Tls::Opportunistic(_) => "opportunistic",
                Tls::Required(_) => "required",
                Tls::Wrapper(_) => "wrapper",
            };
            let name = matches!(&hello_name, ClientId::Domain(name) if name == "shop.example");
            (host, port, tls, name, credentials == Some(Credentials::new("a@b".into(), "p/w".into())))
        };
        let expected =
            |host: &str, port, tls, name, has_credentials| (host.to_owned(), port, tls, name, has_credentials);
        assert_eq!(of("smtp://mail.example"), expected("mail.example", 25, "none", false, false));
        assert_eq!(of("smtp://[::1]:2525"), expected("::1", 2525, "none", false, false));
        assert_eq!(
            of("smtp://a%40b:p%2Fw@mail.example/shop.example?tls=required"),
            expected("mail.example", 587, "required", true, true)
        );
        assert_eq!(
            of("smtp://mail.example?tls=opportunistic"),
            expected("mail.example", 587, "opportunistic", false, false)
        );
        assert_eq!(of("smtps://a%40b:p%2Fw@mail.example"), expected("mail.example", 465, "wrapper", false, true));
        for (url, why) in [
            ("http://a:s3cret@mail.example", "smtp://"),
            ("smtp://a:s3cret@mail.example?tls=yes", "`required` or `opportunistic`"),
            ("smtp://a:s3cret@mail.example?starttls=required", "`starttls` behind `?` is not known"),
            ("smtp://a@mail.example", "a user and no password"),
            ("smtp://a:s3cret%ff@mail.example", "percent-encoded"),
            ("smtp:///x", "no host"),
        ] {
            let error = SmtpServer::from_url(url).unwrap_err();
            assert!(error.contains(why) && !error.contains("s3cret"), "{error}");
        }
    }

    /// Shown by: going on in plain text. The credentials would be readable on the way.
    #[tokio::test]
    async fn a_server_without_starttls_gets_nothing_where_it_is_required() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("smtp://{}?tls=required", listener.local_addr().unwrap());
        let server = SmtpServer::from_url(&url).unwrap();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(answer(BufReader::new(socket), None));
            }
        });
        let failure = server.send(&envelope(), b"Thanks.", Duration::from_secs(30)).await.unwrap_err();
        assert_eq!(failure.means, Means::Away);
        assert!(failure.error.contains("STARTTLS"), "{}", failure.error);
    }

    /// Shown by: one connection for all e-mails, as the client library's pool keeps it. The second
    /// e-mail then gets the answers of the first, which are still to come.
    #[tokio::test]
    async fn an_e_mail_that_was_given_up_closes_its_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = server(&listener);
        let hangs = Arc::new((Notify::new(), Notify::new()));
        let is_hanging = Arc::clone(&hangs);
        tokio::spawn(async move {
            let mut silent = Some(is_hanging);
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(answer(BufReader::new(socket), silent.take()));
            }
        });
        let envelope = envelope();
        let send = || server.send(&envelope, b"Thanks.", Duration::from_secs(30));
        let was_answered = tokio::select! {
            _ = send() => true,
            () = hangs.0.notified() => false,
        };
        assert!(!was_answered);
        timeout(Duration::from_secs(20), hangs.1.notified()).await.expect("its connection is closed");
        assert!(send().await.is_ok());
    }

    /// Shown by: leaving the limit to the timer. It asks the dialogue first, which finds the answer
    /// and sends the text; by then another sender may have sent the same e-mail.
    #[tokio::test]
    async fn a_process_that_was_frozen_past_the_limit_does_not_send_the_text() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (server, within) = (server(&listener), Duration::from_secs(1));
        let serving = tokio::spawn(async move {
            let mut socket = BufReader::new(listener.accept().await.unwrap().0);
            socket.write_all(b"220 test\r\n").await.unwrap();
            let (mut line, mut text) = (String::new(), None::<String>);
            while socket.read_line(&mut line).await.unwrap_or(0) > 0 {
                if let Some(text) = &mut text {
                    text.push_str(&line);
                } else if line.starts_with("DATA") {
                    text = Some(String::new());
                    socket.write_all(b"354 go on\r\n").await.unwrap();
                    // The only thread of this program stands, as all of them do in a process that
                    // is stopped.
                    std::thread::sleep(within);
                } else {
                    socket.write_all(b"250 ok\r\n").await.unwrap();
                }
                line.clear();
            }
            text
        });
        let failure = server.send(&envelope(), b"Thanks.", within).await.unwrap_err();
        assert_eq!(failure.means, Means::NotNow, "{}", failure.error);
        let text = serving.await.unwrap().expect("it was asked for the text");
        assert!(!text.contains("Thanks"), "{text}");
    }

    /// A key of this test alone, which protects nothing, and its certificate for `localhost`.
    const KEY: &str = "-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIHTbglAp1Reg2bRte+8ntzmuG7DbkHydorHnAbuzq6vC
-----END PRIVATE KEY-----";
    const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----
MIIBHTCB0KADAgECAgEBMAUGAytlcDAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwIBcN
MjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMMCWxvY2Fs
aG9zdDAqMAUGAytlcAMhAAbhSFO4mJjj95ETw+fUnbu4+yQcUK3G2zkfk5T4SWqW
o0UwQzAUBgNVHREEDTALgglsb2NhbGhvc3QwDAYDVR0TAQH/BAIwADAdBgNVHQ4E
FgQUUEKJVsfdbdmq6JhgulGHYwL5ErYwBQYDK2VwA0EAi8VByYidk/qBvTcVejGP
G192xguSEFsfuvkf1s7oDsM4id38yhhOVx3gjvNZbPBnxpi0L/9dhVmuSOaacY0i
DQ==
-----END CERTIFICATE-----";

    /// A server under STARTTLS, and a listener for it. Its TLS is trusted.
    async fn tls_server() -> (SmtpServer, TcpListener, TlsAcceptor) {
        let certificate = CertificateDer::from_pem_slice(CERTIFICATE.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(KEY.as_bytes()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(certificate.clone()).unwrap();
        let client = ClientConfig::builder_with_provider(Arc::clone(&provider));
        let client = client.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
        let serving = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let serving = serving.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("smtp://localhost:{}", listener.local_addr().unwrap().port());
        let tls = Tls::Required(Arc::new(client.with_no_client_auth()));
        (SmtpServer { tls, ..SmtpServer::from_url(&url).unwrap() }, listener, TlsAcceptor::from(Arc::new(serving)))
    }

    /// Takes one connection up to STARTTLS, which it answers with this.
    async fn before_tls(listener: &TcpListener, answer: &str) -> TcpStream {
        let mut socket = BufReader::new(listener.accept().await.unwrap().0);
        socket.write_all(b"220 test\r\n").await.unwrap();
        for (command, answer) in [("EHLO", "250-test\r\n250-8BITMIME\r\n250 STARTTLS\r\n"), ("STARTTLS", answer)] {
            let mut line = String::new();
            socket.read_line(&mut line).await.unwrap();
            assert!(line.starts_with(command), "{line}");
            socket.write_all(answer.as_bytes()).await.unwrap();
        }
        socket.into_inner()
    }

    #[tokio::test]
    async fn an_e_mail_goes_under_tls_after_starttls_or_from_the_start_and_else_in_plain_text() {
        let (mut server, listener, acceptor) = tls_server().await;
        let Tls::Required(config) = &server.tls else { unreachable!() };
        let [offers, wrapper] = [Tls::Opportunistic(Arc::clone(config)), Tls::Wrapper(Arc::clone(config))];
        let serving = tokio::spawn(async move {
            let under_tls = |socket| async { BufReader::new(acceptor.accept(socket).await.unwrap()) };
            let socket = before_tls(&listener, "220 go on\r\n").await;
            dialogue(under_tls(socket).await, None).await;
            answer(under_tls(listener.accept().await.unwrap().0).await, None).await;
            // No STARTTLS is offered.
            answer(BufReader::new(listener.accept().await.unwrap().0), None).await;
        });
        for tls in [server.tls.clone(), wrapper, offers] {
            server.tls = tls;
            server.send(&envelope(), b"Thanks.", Duration::from_secs(30)).await.unwrap();
        }
        serving.abort();
    }

    /// Anybody on the way can send them. Shown by: keeping what was read behind the answer (the
    /// e-mail was sent, and the server had not seen it).
    #[tokio::test]
    async fn answers_that_came_before_tls_are_none_under_it() {
        let (server, listener, acceptor) = tls_server().await;
        let serving = tokio::spawn(async move {
            let yes = "250 ok\r\n".repeat(3);
            let socket = before_tls(&listener, &format!("220 go on\r\n{yes}354 go on\r\n250 ok\r\n")).await;
            // It ends with the connection.
            if let Ok(mut socket) = acceptor.accept(socket).await {
                let _ = tokio::io::copy(&mut socket, &mut tokio::io::sink()).await;
            }
        });
        let failure = server.send(&envelope(), b"Thanks.", Duration::from_secs(30)).await.unwrap_err();
        assert_eq!(failure.means, Means::Away);
        assert!(failure.error.contains("before TLS"), "{}", failure.error);
        serving.await.unwrap();
    }

    async fn answer(
        mut socket: impl AsyncBufRead + AsyncWrite + Unpin,
        silent: Option<Arc<(Notify, Notify)>>,
    ) -> Option<()> {
        socket.write_all(b"220 test\r\n").await.ok()?;
        socket.flush().await.ok()?;
        dialogue(socket, silent).await
    }

    /// Answers every command with yes, in Latin-1. With `silent` it leaves the first MAIL without
    /// an answer, and every command after it.
    async fn dialogue(
        mut socket: impl AsyncBufRead + AsyncWrite + Unpin,
        silent: Option<Arc<(Notify, Notify)>>,
    ) -> Option<()> {
        let (mut line, mut is_content) = (String::new(), false);
        while socket.read_line(&mut line).await.unwrap_or(0) > 0 {
            if let Some(silent) = silent.as_ref().filter(|_| !line.starts_with("EHLO")) {
                silent.0.notify_one();
            } else if line.starts_with("DATA") {
                is_content = true;
                socket.write_all(b"354 go on\r\n").await.ok()?;
            } else if !is_content || line == ".\r\n" {
                is_content = false;
                socket.write_all(b"250 re\xe7u\r\n").await.ok()?;
            }
            socket.flush().await.ok()?;
            line.clear();
        }
        silent.map(|silent| silent.1.notify_one())
    }
}
