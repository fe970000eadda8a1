//! The connection to an SMTP server: in plain text, under TLS from its start, or after STARTTLS.
//!
//! Promises: what came before TLS says nothing under it. A byte behind the answer to STARTTLS ends
//! the connection, because anybody on the way can have sent it (RFC 3207, 4.2). An answer is read
//! whatever bytes its text has.
//!
//! STARTTLS and TLS stand here, because the client library keeps what it has read behind the answer
//! to STARTTLS, takes it for answers under TLS, and fails at an answer that is not UTF-8.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use lettre::transport::smtp::client::{AsyncSmtpConnection, AsyncTokioStream};
use lettre::transport::smtp::commands::{Ehlo, Starttls};
use lettre::transport::smtp::extension::{ClientId, Extension, ServerInfo};
use lettre::transport::smtp::response::Response;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, ReadBuf};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// How long an address of a host may take to answer EHLO while another one is left to try. It is
/// longer than the six seconds that some servers wait before they greet.
const ONE_ADDRESS: Duration = Duration::from_secs(7);
/// The longest answer that is read before TLS, with all its lines.
const ANSWER_MAX: u64 = 64 << 10;

/// When a connection speaks TLS, and which servers it trusts.
#[derive(Clone)]
pub(super) enum Tls {
    Never,
    /// After STARTTLS, where the server offers it.
    Opportunistic(Arc<ClientConfig>),
    /// After STARTTLS, or not at all.
    Required(Arc<ClientConfig>),
    /// From the start of the connection.
    Wrapper(Arc<ClientConfig>),
}

/// Trusts the servers whose certificates the roots of Mozilla confirm.
pub(super) fn public_roots() -> Result<Arc<ClientConfig>, rustls::Error> {
    let provider = CryptoProvider::get_default().cloned();
    let provider = provider.unwrap_or_else(|| Arc::new(aws_lc_rs::default_provider()));
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    Ok(Arc::new(config.with_root_certificates(roots).with_no_client_auth()))
}

/// Connects to the first address of the host that serves us, up to the answer to EHLO, with TLS as
/// it is asked for.
pub(super) async fn connect(
    (host, port): (&str, u16),
    tls: &Tls,
    hello_name: &ClientId,
) -> Result<AsyncSmtpConnection, String> {
    let addresses = lookup_host((host, port)).await.map_err(|error| format!("no connection: {error}"))?;
    connect_one(&addresses.collect::<Vec<_>>(), host, tls, hello_name).await
}

/// An address that accepts and is silent costs a few seconds, and the next one is tried. The last
/// one may take all the time of the attempt.
async fn connect_one(
    addresses: &[SocketAddr],
    host: &str,
    tls: &Tls,
    hello_name: &ClientId,
) -> Result<AsyncSmtpConnection, String> {
    let mut errors = Vec::new();
    for (at, address) in addresses.iter().enumerate() {
        let limit = if at + 1 < addresses.len() { ONE_ADDRESS } else { Duration::MAX };
        let error = match timeout(limit, connect_to(*address, host, tls, hello_name)).await {
            Ok(Ok(connection)) => return Ok(connection),
            Ok(Err(error)) => error,
            Err(_) => format!("no answer within {} s", limit.as_secs()),
        };
        errors.push(format!("{address}: {error}"));
    }
    Err(if errors.is_empty() { "the host's name has no address".to_owned() } else { errors.join("; ") })
}

async fn connect_to(
    address: SocketAddr,
    host: &str,
    tls: &Tls,
    hello_name: &ClientId,
) -> Result<AsyncSmtpConnection, String> {
    let mut socket = TcpStream::connect(address).await.map_err(|error| format!("no connection: {error}"))?;
    let (config, greeting) = match tls {
        Tls::Never => (None, NONE),
        Tls::Wrapper(config) => (Some(config), NONE),
        Tls::Opportunistic(config) | Tls::Required(config) => {
            let offered;
            (socket, offered) = starttls(socket, hello_name).await?;
            if !offered && matches!(tls, Tls::Required(_)) {
                return Err("the server does not offer STARTTLS, which `tls=required` asks for".to_owned());
            }
            (offered.then_some(config), GREETING)
        }
    };
    let stream: Box<dyn AsyncTokioStream> = match config {
        None => Box::new(Wire { before: greeting, stream: socket, peer: address }),
        Some(config) => {
            let name = ServerName::try_from(host.to_owned()).map_err(|error| format!("no TLS: {error}"))?;
            let stream = TlsConnector::from(Arc::clone(config)).connect(name, socket).await;
            let stream = stream.map_err(|error| format!("no TLS: {error}"))?;
            Box::new(Wire { before: greeting, stream, peer: address })
        }
    };
    AsyncSmtpConnection::connect_with_transport(stream, hello_name).await.map_err(|error| error.to_string())
}

/// Speaks in plain text up to the answer to STARTTLS, or to EHLO where the server does not offer
/// it; the second value says so.
async fn starttls(socket: TcpStream, hello_name: &ClientId) -> Result<(TcpStream, bool), String> {
    let mut plain = BufReader::new(socket);
    answer(&mut plain).await?;
    let offers = command(&mut plain, &Ehlo::new(hello_name.clone()).to_string()).await?;
    let offers = ServerInfo::from_response(&offers).map_err(|error| error.to_string())?;
    let is_offered = offers.supports_feature(Extension::StartTls);
    if is_offered {
        command(&mut plain, &Starttls.to_string()).await?;
    }
    // What comes later is no TLS, and ends the handshake.
    if !plain.buffer().is_empty() {
        let error = "more than the answer came before TLS, which anybody on the way can have sent. \
                     Use smtps:// where the server has it, else look for who changes this connection";
        return Err(format!("STARTTLS: {error}"));
    }
    Ok((plain.into_inner(), is_offered))
}

async fn command(plain: &mut BufReader<TcpStream>, line: &str) -> Result<Response, String> {
    plain.write_all(line.as_bytes()).await.map_err(|error| error.to_string())?;
    answer(plain).await
}

/// Reads one answer, which may have several lines. The error of a refusal is its text.
async fn answer(plain: &mut BufReader<TcpStream>) -> Result<Response, String> {
    let (mut text, mut limited) = (Vec::new(), plain.take(ANSWER_MAX));
    loop {
        let begin = text.len();
        limited.read_until(b'\n', &mut text).await.map_err(|error| error.to_string())?;
        match text.get(begin..) {
            Some([.., b'\n']) if text.get(begin + 3) == Some(&b'-') => {}
            Some([.., b'\n']) => break,
            _ => return Err("the answer broke off or is too long".to_owned()),
        }
    }
    let text = String::from_utf8_lossy(&text);
    match text.parse::<Response>() {
        Ok(answer) if answer.is_positive() => Ok(answer),
        Ok(_) => Err(format!("the server refused: {}", text.trim_end())),
        Err(error) => Err(error.to_string()),
    }
}

const NONE: &[u8] = b"";
/// The client library begins with a greeting, which was read before.
const GREETING: &[u8] = b"220 greeted\r\n";

/// A stream whose answers are ASCII: each other byte is read as `?`, because the client library
/// reads UTF-8 only. Some bytes may stand before what comes.
#[derive(Debug)]
struct Wire<S> {
    before: &'static [u8],
    stream: S,
    peer: SocketAddr,
}

impl<S: AsyncRead + Unpin> AsyncRead for Wire<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if !self.before.is_empty() {
            let (now, later) = self.before.split_at(self.before.len().min(buf.remaining()));
            buf.put_slice(now);
            self.before = later;
            return Poll::Ready(Ok(()));
        }
        let begin = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        for byte in buf.filled_mut().iter_mut().skip(begin).filter(|byte| !byte.is_ascii()) {
            *byte = b'?';
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Wire<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl<S> AsyncTokioStream for Wire<S>
where
    S: AsyncRead + AsyncWrite + Send + Sync + Unpin + std::fmt::Debug,
{
    fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.peer)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::net::TcpListener;

    use super::*;

    /// Shown by: trying the next address only where the connect itself fails. The e-mails of a host
    /// then wait for its first address, which accepts connections and is silent.
    #[tokio::test]
    async fn an_address_that_is_silent_stops_no_e_mail_that_another_one_takes() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let serves = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addresses = [&closed, &silent, &serves].map(|listener| listener.local_addr().unwrap());
        drop(closed);
        tokio::spawn(async move {
            let mut socket = BufReader::new(serves.accept().await.unwrap().0);
            socket.write_all(b"220 test\r\n").await.unwrap();
            socket.read_line(&mut String::new()).await.unwrap();
            socket.write_all(b"250 test\r\n").await.unwrap();
            socket.read_line(&mut String::new()).await
        });
        let hello = ClientId::Domain("shop.example".to_owned());
        connect_one(&addresses, "mail.example", &Tls::Never, &hello).await.map(drop).unwrap();
    }
}
