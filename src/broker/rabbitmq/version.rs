//! Asks for the version of the server, which decides whether queues are declared without a delivery
//! limit (R30).
//!
//! The client library receives the version in `connection.start` and does not keep it. So we ask on
//! a socket of our own, which is closed after that first frame.

use futures_util::io::{AsyncReadExt, AsyncWriteExt};
use lapin::AsyncTcpStream;
use lapin::types::{AMQPValue, parsing};

use super::config::{Known, RabbitConfig, Server};
use super::socket::{connector, resolve, untrusted};
use crate::error::BrokerError;

const FRAME_MAX: usize = 128 * 1024;
/// Class and method of `connection.start`; two bytes with the protocol version follow.
const START: [u8; 4] = [0, 10, 0, 10];

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ServerVersion {
    pub(super) product: String,
    pub(super) version: String,
}

impl ServerVersion {
    /// The major and minor number; 0 for a part that is no number.
    pub(super) fn numbers(&self) -> (u32, u32) {
        let mut parts = self.version.split('.').map(|part| part.parse().unwrap_or(0));
        (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
    }

    /// True from 4.0 on: a quorum queue then has a delivery limit of 20 unless its declaration says
    /// otherwise, and -1 means no limit (R30).
    pub(super) fn limits_deliveries(&self) -> bool {
        self.numbers() >= (4, 0)
    }
}

/// Asks the server for its version. If a node is unreachable, the next one is asked.
pub(super) async fn ask(config: &Known) -> Result<ServerVersion, BrokerError> {
    config.ask_in_turn("greet", |server| async move { greet(config, &server).await }).await
}

async fn greet(config: &RabbitConfig, server: &Server) -> Result<ServerVersion, BrokerError> {
    let unavailable = |error: std::io::Error| BrokerError::Unavailable(format!("RabbitMQ at {server}: {error}"));
    let runtime = lapin::runtime::default_runtime().map_err(|error| BrokerError::Session(error.to_string()))?;
    let mut stream = AsyncTcpStream::connect(&runtime, resolve(server).await?).await.map_err(unavailable)?;
    if server.tls() {
        let connector = connector(config.ca_file.as_deref())?;
        stream = stream.into_rustls(&connector, server.host()).await.map_err(|error| untrusted(&error, server))?;
    }
    stream.write_all(b"AMQP\0\0\x09\x01").await.map_err(unavailable)?;
    stream.flush().await.map_err(unavailable)?;
    let mut header = [0; 7];
    stream.read_exact(&mut header).await.map_err(unavailable)?;
    let size = u32::from_be_bytes([header[3], header[4], header[5], header[6]]) as usize;
    let mut payload = vec![0; size.min(FRAME_MAX)];
    stream.read_exact(&mut payload).await.map_err(unavailable)?;
    start(&payload).ok_or_else(|| BrokerError::Unavailable(format!("{server} does not speak AMQP 0.9.1")))
}

fn start(payload: &[u8]) -> Option<ServerVersion> {
    let table = payload.strip_prefix(&START)?.get(2..)?;
    let (_, table) = parsing::parse_field_table(table).ok()?;
    let text = |name: &str| match table.inner().get(name) {
        Some(AMQPValue::LongString(text)) => String::from_utf8_lossy(text.as_bytes()).into_owned(),
        _ => String::new(),
    };
    Some(ServerVersion { product: text("product"), version: text("version") })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_from_the_first_frame() {
        let mut payload = vec![0, 10, 0, 10, 0, 9];
        let table = b"\x07versionS\x00\x00\x00\x054.0.5\x07productS\x00\x00\x00\x08RabbitMQ";
        payload.extend(u32::try_from(table.len()).unwrap().to_be_bytes());
        payload.extend(table);
        let found = start(&payload).unwrap();
        assert_eq!((found.product.as_str(), found.numbers()), ("RabbitMQ", (4, 0)));
        assert!(found.limits_deliveries());
        assert_eq!(start(b"HTTP/1.1 400 Bad Request"), None);
    }

    #[test]
    fn r30_only_servers_from_4_0_limit_deliveries() {
        let version = |text: &str| ServerVersion { product: "RabbitMQ".into(), version: text.into() };
        assert!(!version("3.13.7").limits_deliveries() && !version("").limits_deliveries());
        assert!(version("4.1.0-rc.1").limits_deliveries() && version("10.0").limits_deliveries());
    }
}
