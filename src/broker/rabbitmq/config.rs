//! The settings of RabbitMQ, and where the server is.
//!
//! Promise: no password is printed, and a URL that is invalid is refused with the reason.

use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lapin::uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo};
use parking_lot::Mutex;
use url::Url;

use crate::error::{BrokerError, redact};
use crate::text::hosts::each;
use crate::text::percent::percent_decode;
use crate::time::bound;

/// Settings of the adapter. [`RabbitConfig::new`] takes a URL and sets the defaults.
#[derive(Clone)]
pub struct RabbitConfig {
    /// `amqp://USER:PASSWORD@HOST:PORT/VHOST` or `amqps://`. Without a vhost it is `/`; a `/` in a
    /// vhost is written `%2f`.
    pub url: String,
    /// A PEM file of certificate authorities to trust instead of the built-in public ones.
    pub ca_file: Option<PathBuf>,
    /// CloudEvents source and property `app_id` of every published message.
    pub source: String,
    /// The name of the durable topic exchange; topics are its routing keys.
    pub exchange: String,
    /// The exchange that gets what `exchange` cannot route. Such a message counts as published.
    pub alternate_exchange: Option<String>,
    /// Allows a key to have many unconfirmed publishes, against R20: a nack in the middle of them
    /// then reorders the key.
    pub pipeline_per_key: bool,
    /// Queues per consumer and topic. 1 is a plain quorum queue; several are bound to a
    /// consistent-hash exchange (R30).
    pub partitions: u32,
    /// Channels of one publishing session. More than one, because the server handles each channel
    /// in a process of its own. A key always uses the same channel.
    pub channels: usize,
    /// Most publishes without a confirm, over all channels of a session.
    pub publish_window: usize,
    /// Most bytes of rows that a session holds before `send` waits. Rows that wait for an earlier
    /// row of their key (R20) count here, not in `publish_window`.
    pub held_bytes_max: usize,
    /// Most deliveries in flight on one queue, even if the subscription allows more.
    pub prefetch: u16,
    /// The heartbeat that is asked for, in whole seconds, at least 1; the server may ask for a
    /// shorter one.
    pub heartbeat: Duration,
    /// The time limit for resolving, connecting, TLS and the handshake with one server together,
    /// and for each answer of it.
    pub connect_deadline: Duration,
    /// The time limit for every close, for sending an acknowledgement, and for the last confirms of
    /// a session that ends.
    pub close_deadline: Duration,
    /// How long the relay waits before it tries a row of a topic without a route again.
    pub route_retry: Duration,
    /// After how long without a delivery a consumer asks the server whether it is still known.
    /// After four times this time, but at least every two minutes, it declares an exchange that is
    /// missing and binds its queues again.
    pub quiet_check: Duration,
    /// Most bytes of deliveries that are not yet acknowledged (one delivery of each queue is
    /// always allowed).
    pub in_flight_bytes_max: usize,
}

impl RabbitConfig {
    /// The default settings with a URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            ca_file: None,
            source: "oncebox".to_owned(),
            exchange: "oncebox".to_owned(),
            alternate_exchange: None,
            pipeline_per_key: false,
            partitions: 1,
            channels: 4,
            publish_window: 1_000,
            held_bytes_max: 64 << 20,
            prefetch: 10_000,
            heartbeat: Duration::from_secs(10),
            connect_deadline: Duration::from_secs(10),
            close_deadline: Duration::from_secs(5),
            route_retry: Duration::from_secs(1),
            quiet_check: Duration::from_secs(30),
            in_flight_bytes_max: 64 << 20,
        }
    }

    /// Checks what can be checked without a server. The error names the setting.
    pub(crate) fn validate(&self) -> Result<(), BrokerError> {
        let servers = self.servers()?;
        let refused = |what: &str| Err(BrokerError::Refused(format!("[broker.rabbitmq] {what}")));
        if self.ca_file.is_some() && !servers.iter().all(Server::tls) {
            return Err(BrokerError::Refused("`ca_file` is for TLS: use `amqps://` in the broker URL".to_owned()));
        }
        let short = |text: &str| (1..=127).contains(&text.len());
        if !short(&self.exchange) || self.exchange.starts_with("amq.") {
            return refused("exchange: 1 to 127 bytes, not starting with `amq.`");
        }
        if self.alternate_exchange.as_deref().is_some_and(|name| !short(name) || name == self.exchange) {
            return refused("alternate_exchange: 1 to 127 bytes, and another one than `exchange`");
        }
        if self.source.is_empty() || self.source.len() > 255 {
            return refused("source: 1 to 255 bytes");
        }
        if !(1..=256).contains(&self.partitions) {
            return refused("partitions: 1 to 256");
        }
        if !(1..=64).contains(&self.channels) || self.publish_window == 0 || self.prefetch == 0 {
            return refused("channels: 1 to 64; publish_window and prefetch: at least 1");
        }
        if self.held_bytes_max == 0 || self.in_flight_bytes_max == 0 {
            return refused("held_bytes_max and in_flight_bytes_max: at least 1");
        }
        if self.quiet_check < Duration::from_millis(10) {
            return refused("quiet_check: at least 10 ms");
        }
        bound::check([
            ("heartbeat", self.heartbeat),
            ("connect_deadline", self.connect_deadline),
            ("close_deadline", self.close_deadline),
            ("route_retry", self.route_retry),
            ("quiet_check", self.quiet_check),
        ])
        .or_else(|error| refused(&error.to_string()))
    }

    /// The addresses and the user for each node of the cluster, in the order of the URL.
    pub(super) fn servers(&self) -> Result<Vec<Server>, BrokerError> {
        let shown = redact(&self.url);
        let refused = |why: &str| BrokerError::Refused(format!("the URL {shown}: {why}"));
        each(&self.url).map_err(refused)?.iter().map(|url| self.server(url)).collect()
    }

    /// Reads the URL of one server and checks it.
    fn server(&self, url: &str) -> Result<Server, BrokerError> {
        let shown = redact(&self.url);
        let refused = |why: String| BrokerError::Refused(format!("the URL {shown}: {why}"));
        let decode =
            |text: &str| percent_decode(text).ok_or_else(|| refused("a part is not percent-encoded UTF-8".to_owned()));
        let url = Url::parse(url).map_err(|error| refused(error.to_string()))?;
        let scheme = match url.scheme() {
            "amqp" => AMQPScheme::AMQP,
            "amqps" => AMQPScheme::AMQPS,
            other => return Err(refused(format!("`{other}` is no scheme of RabbitMQ; use amqp:// or amqps://"))),
        };
        if let Some((name, _)) = url.query_pairs().next() {
            return Err(refused(format!("`{name}` is not known here; settings stand under [broker.rabbitmq]")));
        }
        // The parser of the client library is not used: it turns an IPv6 host into `localhost`.
        let host = url.host_str().filter(|host| !host.is_empty()).ok_or_else(|| refused("no host".to_owned()))?;
        let host = decode(host.trim_start_matches('[').trim_end_matches(']'))?;
        let port = url.port().unwrap_or_else(|| scheme.default_port());
        let username = match url.username() {
            "" => "guest".to_owned(),
            name => decode(name)?,
        };
        let password = url.password().map_or(Ok("guest".to_owned()), decode)?;
        let vhost = match url.path() {
            "" | "/" => "/".to_owned(),
            path => decode(&path[1..])?,
        };
        let heartbeat = u16::try_from(self.heartbeat.as_secs().max(1)).unwrap_or(u16::MAX);
        Ok(Server(AMQPUri {
            scheme,
            authority: AMQPAuthority { userinfo: AMQPUserInfo { username, password }, host, port },
            vhost,
            query: AMQPQueryString { heartbeat: Some(heartbeat), ..AMQPQueryString::default() },
        }))
    }
}

// Not derived: the URL contains a password.
impl fmt::Debug for RabbitConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitConfig")
            .field("url", &redact(&self.url))
            .field("exchange", &self.exchange)
            .field("partitions", &self.partitions)
            .field("pipeline_per_key", &self.pipeline_per_key)
            .finish_non_exhaustive()
    }
}

/// The settings of a broker, with what its sessions have learned and share.
#[derive(Debug)]
pub(super) struct Known {
    config: RabbitConfig,
    /// The index of the server that answered last.
    answered_last: AtomicUsize,
    /// The prefetch that each consumer can handle, by consumer.
    bearable: Mutex<HashMap<String, u16>>,
}

impl Deref for Known {
    type Target = RabbitConfig;

    fn deref(&self) -> &RabbitConfig {
        &self.config
    }
}

impl Known {
    pub(super) fn new(config: RabbitConfig) -> Arc<Self> {
        Arc::new(Self { config, answered_last: AtomicUsize::new(0), bearable: Mutex::default() })
    }

    /// The prefetch to ask for instead of `prefetch`: no more than the consumer can handle. The
    /// known limit is doubled for the next call, because its messages may be smaller then.
    pub(super) fn bearable(&self, consumer: &str, prefetch: u16) -> u16 {
        let mut known = self.bearable.lock();
        let Some(bearable) = known.get_mut(consumer) else { return prefetch };
        let asked = prefetch.min(*bearable);
        *bearable = bearable.saturating_mul(2);
        asked
    }

    /// Notes that a consumer can handle this prefetch and no more. Returns it.
    pub(super) fn bear(&self, consumer: &str, prefetch: u16) -> u16 {
        self.bearable.lock().insert(consumer.to_owned(), prefetch);
        prefetch
    }

    /// Asks the servers one after the other, beginning with the one that answered last, until one
    /// is not away. Each has the connect deadline. The error for a server that does not meet it
    /// says what the server did not do: `late`.
    pub(super) async fn ask_in_turn<T, F>(&self, late: &str, ask: impl Fn(Server) -> F) -> Result<T, BrokerError>
    where
        F: Future<Output = Result<T, BrokerError>>,
    {
        let mut servers: Vec<(usize, Server)> = self.servers()?.into_iter().enumerate().collect();
        let last = self.answered_last.load(Ordering::Relaxed).min(servers.len() - 1);
        servers[..=last].rotate_right(1);
        let (mut away, deadline) = (Vec::new(), self.connect_deadline);
        for (index, server) in servers {
            let answer = tokio::time::timeout(deadline, ask(server.clone())).await.unwrap_or_else(|_| {
                Err(BrokerError::Unavailable(format!("RabbitMQ at {server} did not {late} within {deadline:?}")))
            });
            match answer {
                Err(BrokerError::Unavailable(why)) => {
                    away.push(why);
                    continue;
                }
                Ok(_) if self.answered_last.swap(index, Ordering::Relaxed) != index => {
                    tracing::info!(%server, passed_over = away.join("; "), "another node of RabbitMQ is used");
                }
                _ => {}
            }
            return answer;
        }
        Err(BrokerError::Unavailable(away.join("; ")))
    }
}

/// One server of the URL. No `Debug`, because it contains the password.
#[derive(Clone)]
pub(super) struct Server(pub(super) AMQPUri);

impl Server {
    pub(super) fn tls(&self) -> bool {
        self.0.scheme == AMQPScheme::AMQPS
    }

    pub(super) fn host(&self) -> &str {
        &self.0.authority.host
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} (vhost `{}`)", self.host(), self.0.authority.port, self.0.vhost)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_taken_apart_as_people_write_it() {
        let server = |url: &str| RabbitConfig::new(url).servers().map(|mut servers| servers.remove(0));
        let plain = server("amqp://app:p%40ss@rabbit.example:5673/pay%2fments").unwrap();
        assert_eq!(plain.to_string(), "rabbit.example:5673 (vhost `pay/ments`)");
        assert_eq!(plain.0.authority.userinfo.password, "p@ss");
        for slash in ["amqp://h", "amqp://h/", "amqp://h/%2f", "amqp://h/%2F"] {
            assert_eq!(server(slash).unwrap().0.vhost, "/", "{slash}");
        }
        let tls = server("amqps://h").unwrap();
        assert!(tls.tls() && tls.0.authority.port == 5671);
        assert_eq!(server("amqp://[::1]:5672/").unwrap().host(), "::1");
        let three = RabbitConfig::new("amqps://app:p%40ss@a,b:1,[::1]/v").servers().unwrap();
        let shown: Vec<String> =
            three.iter().map(|server| format!("{server} {}", server.0.authority.userinfo.password)).collect();
        assert_eq!(shown, ["a:5671 (vhost `v`) p@ss", "b:1 (vhost `v`) p@ss", "::1:5671 (vhost `v`) p@ss"]);
    }

    #[test]
    fn what_cannot_be_meant_is_refused_without_the_password() {
        for url in [
            "kafka://a:secret@h",
            "amqp://u:secret@a,,b",
            "amqp://u:secret@a:1,b:x",
            "amqp://",
            "amqp://u:secret@h/%zz",
            "amqp://u:secret@h?heartbeat=5",
            "nonsense",
        ] {
            let error = RabbitConfig::new(url).validate().unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
        let refuses = |name: &str, setting: fn(&mut RabbitConfig)| {
            let mut config = RabbitConfig::new("amqp://h");
            config.validate().unwrap();
            setting(&mut config);
            assert!(config.validate().unwrap_err().to_string().contains(name), "{name}");
        };
        refuses("partitions", |config| config.partitions = 0);
        // `send` would wait for ever.
        refuses("held_bytes_max", |config| config.held_bytes_max = 0);
        // A consumer asked the server without a pause.
        refuses("quiet_check", |config| config.quiet_check = Duration::ZERO);
        // The end of a session panicked.
        refuses("close_deadline", |config| config.close_deadline = Duration::MAX);
        assert!(!format!("{:?}", RabbitConfig::new("amqp://u:secret@h")).contains("secret"));
    }
}
