//! A connection whose socket we own.
//!
//! Why: dropping a consumer, channel or connection of the client library *sends* `basic.cancel`,
//! `channel.close` or `connection.close`. If deliveries are unacknowledged, the standby consumer
//! then gets later messages first (R29). So we open the socket, keep its descriptor (below TLS),
//! and shut it down before any handle of the library is dropped: the server sees a lost connection
//! and requeues everything in order.
//!
//! Guarantees: whatever ends a [`Link`] (drop, panic, abort of a task), `shutdown(2)` comes first.
//! One deadline covers name, socket, TLS and handshake of a connection. TLS is always verified.
//!
//! Not here: the channels and their work; recovery, which is never automatic (R29).

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use lapin::tcp::{RustlsConnector, RustlsConnectorConfig};
use lapin::{AsyncTcpStream, Channel, Connection, ConnectionProperties};
use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::config::{Known, RabbitConfig, Server};
use super::error::{Fault, connecting, within};
use crate::error::BrokerError;

/// The socket below a connection; dropping it shuts it down.
#[derive(Debug)]
struct Socket(std::net::TcpStream);

impl Socket {
    fn shut_down(&self) {
        // An error means that the socket is not connected any more, which is the goal.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.shut_down();
    }
}

pub(super) struct Link {
    // The first field, so that the socket is shut down before the handle below is dropped.
    socket: Socket,
    connection: Connection,
    pub(super) connect_deadline: Duration,
    close_deadline: Duration,
}

impl Link {
    /// Connects to the first server that answers. An error contains no password.
    pub(super) async fn open(config: &Known, name: &str) -> Result<Self, BrokerError> {
        let connect = |server: Server| async move { Self::connect(config, &server, name).await };
        config.ask_in_turn("finish the handshake", connect).await
    }

    async fn connect(config: &RabbitConfig, server: &Server, name: &str) -> Result<Self, BrokerError> {
        let unavailable = |error: io::Error| BrokerError::Unavailable(format!("RabbitMQ at {server}: {error}"));
        let client = |error: lapin::Error| connecting(&error, server);
        let runtime = lapin::runtime::default_runtime().map_err(client)?;
        let mut stream = AsyncTcpStream::connect(&runtime, resolve(server).await?).await.map_err(unavailable)?;
        let socket = match &stream {
            AsyncTcpStream::Plain(plain) => {
                Socket(plain.get_ref().as_fd().try_clone_to_owned().map_err(unavailable)?.into())
            }
            _ => return Err(BrokerError::Session("a fresh socket is not plain".to_owned())),
        };
        if server.tls() {
            let connector = connector(config.ca_file.as_deref())?;
            stream = stream.into_rustls(&connector, server.host()).await.map_err(|error| untrusted(&error, server))?;
        }
        // The library gets the stream from a function that it could call again. There is only one
        // stream, so a second call fails.
        let once = Mutex::new(Some(stream));
        let connection = Connection::connector(
            server.0.clone(),
            runtime,
            async move |_, _| {
                let taken = once.lock().take();
                taken.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected).into())
            },
            ConnectionProperties::default().with_connection_name(name.into()),
        )
        .await
        .map_err(client)?;
        let (connect_deadline, close_deadline) = (config.connect_deadline, config.close_deadline);
        Ok(Self { socket, connection, connect_deadline, close_deadline })
    }

    pub(super) async fn channel(&self) -> Result<Channel, Fault> {
        self.ask("channel.open", self.connection.create_channel()).await
    }

    /// Waits for an answer on a channel of this connection, within the connect deadline.
    pub(super) async fn ask<T>(
        &self,
        what: &'static str,
        question: impl Future<Output = lapin::Result<T>>,
    ) -> Result<T, Fault> {
        within(self.connect_deadline, what, question).await
    }

    pub(super) fn is_connected(&self) -> bool {
        self.connection.status().connected()
    }

    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Cuts the connection: the server requeues unacknowledged deliveries in order.
    pub(super) fn cut(&self) {
        self.socket.shut_down();
    }

    /// Closes the connection in order, when no delivery is unacknowledged. The library can hang in
    /// this call, so it has a deadline.
    pub(super) async fn close(&self) {
        let _ = within(self.close_deadline, "connection.close", self.connection.close(200, "OK".into())).await;
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("status", self.connection.status()).finish_non_exhaustive()
    }
}

pub(super) async fn resolve(server: &Server) -> Result<Vec<SocketAddr>, BrokerError> {
    match tokio::net::lookup_host((server.host(), server.0.authority.port)).await {
        Ok(addresses) => Ok(addresses.collect()),
        Err(error) => Err(BrokerError::Unavailable(format!("the host of RabbitMQ at {server}: {error}"))),
    }
}

/// The TLS settings: they trust the built-in public authorities, or only those of `ca_file`.
pub(super) fn connector(ca_file: Option<&Path>) -> Result<RustlsConnector, BrokerError> {
    let roots = match ca_file {
        None => RustlsConnectorConfig::new_with_webpki_root_certs(),
        Some(file) => {
            let refused = |why: String| BrokerError::Refused(format!("ca_file {}: {why}", file.display()));
            let certificates: Vec<_> = CertificateDer::pem_file_iter(file)
                .and_then(Iterator::collect)
                .map_err(|error| refused(error.to_string()))?;
            if certificates.is_empty() {
                return Err(refused("holds no certificate".to_owned()));
            }
            RustlsConnectorConfig::default().with_parsable_certificates(certificates)
        }
    };
    roots.connector_with_no_client_auth().map_err(|error| BrokerError::Refused(format!("TLS: {error}")))
}

/// Classifies a failed handshake: no trust, no TLS, or a server that is away.
pub(super) fn untrusted(error: &io::Error, server: &Server) -> BrokerError {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match inner {
        Some(rustls::Error::InvalidCertificate(why)) => BrokerError::Untrusted(format!(
            "the certificate of RabbitMQ at {server} is not trusted ({why:?}); set `ca_file` to its authority, and use the \
             host name that stands in it"
        )),
        // The bytes are not TLS. A server that closes at once may be starting: below.
        Some(rustls::Error::InvalidMessage(why)) => {
            BrokerError::Untrusted(format!("RabbitMQ at {server} does not speak TLS there ({why:?})"))
        }
        _ => BrokerError::Unavailable(format!("TLS with RabbitMQ at {server}: {error}")),
    }
}
