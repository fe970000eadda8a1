//! The configuration of Kafka: read from a URL, then changed by settings.
//!
//! Promises: a setting that is invalid or breaks a promise is refused with its name and the remedy.
//! No password is ever shown.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::properties;
use crate::error::{BrokerError, redact};
use crate::text::loopback::is_loopback;
use crate::text::percent::percent_decode;
use crate::time::bound;

const DEFAULT_PORT: u16 = 9092;

/// The configuration of Kafka: `[broker] url` and `[broker.kafka]`.
#[derive(Clone)]
pub struct KafkaConfig {
    /// Bootstrap servers, each as `host:port`; port 9092 where the URL names none.
    pub servers: Vec<String>,
    /// TLS, by the scheme `kafkas://`; the broker's certificate and host name are always verified.
    pub tls: bool,
    /// User name for SASL; `None` connects without SASL.
    pub user: Option<String>,
    /// The password for SASL. It is read only where `user` is set; `None` counts as empty.
    pub password: Option<String>,
    /// The SASL mechanism for user and password.
    pub sasl_mechanism: SaslMechanism,
    /// Certificates that are trusted instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// The name of this client in the broker's logs and quotas.
    pub client_id: String,
    /// The header `ce_source` of every published message.
    pub source: String,
    /// Whether topics that are missing are created.
    pub create_topics: bool,
    /// Partitions of topics that are created here.
    pub partitions: i32,
    /// Replication factor of topics that are created here; -1 takes the broker's default.
    pub replication: i32,
    /// After how long without a heartbeat a member's partitions go to other members.
    pub session_timeout: Duration,
    /// How long the client may wait for more messages before it sends a batch, at most 500 ms.
    /// Default 0: a single message is sent at once, and under load batches fill while earlier ones
    /// are in flight.
    pub linger: Duration,
    /// Most rows that the client holds before the broker has proven them.
    pub publish_rows_max: usize,
    /// Most bytes that the client holds before the broker has proven them.
    pub publish_bytes_max: usize,
    /// Most bytes of deliveries that are not yet acknowledged (one delivery is always allowed).
    pub in_flight_bytes_max: usize,
    /// Settings of librdkafka, passed through; one that breaks a promise is refused by name.
    pub properties: BTreeMap<String, String>,
}

/// How a user name and password are proven to the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaslMechanism {
    /// The password itself, readable on the network unless TLS is used.
    Plain,
    /// SCRAM with SHA-256; needs the feature `kafka-tls`.
    ScramSha256,
    /// SCRAM with SHA-512; needs the feature `kafka-tls`.
    ScramSha512,
}

impl SaslMechanism {
    /// The name that brokers and librdkafka use.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Plain => "PLAIN",
            Self::ScramSha256 => "SCRAM-SHA-256",
            Self::ScramSha512 => "SCRAM-SHA-512",
        }
    }
}

impl FromStr for SaslMechanism {
    type Err = BrokerError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Plain, Self::ScramSha256, Self::ScramSha512]
            .into_iter()
            .find(|mechanism| mechanism.name().eq_ignore_ascii_case(text))
            .ok_or_else(|| refused(format!("`{text}` is no SASL mechanism: PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512")))
    }
}

impl KafkaConfig {
    /// Builds a configuration with defaults from a URL: `kafka://HOST:PORT,HOST:PORT` or
    /// `kafkas://USER:PASSWORD@HOST:PORT`.
    ///
    /// # Errors
    /// [`BrokerError::Refused`] says what is wrong in the URL, without its password.
    pub fn from_url(url: &str) -> Result<Self, BrokerError> {
        let wrong = |what: String| refused(format!("the broker URL `{}`: {what}", redact(url)));
        let (scheme, rest) =
            url.split_once("://").ok_or_else(|| wrong("`kafka://HOST:PORT` is expected".to_owned()))?;
        let tls = match scheme {
            "kafka" => false,
            "kafkas" => true,
            other => return Err(wrong(format!("the scheme is `{other}`, `kafka` or `kafkas` (TLS) is expected"))),
        };
        if rest.contains(['?', '#']) {
            return Err(wrong("it takes no parameters, they belong into `[broker.kafka]`".to_owned()));
        }
        // A password may contain `@` and `/` unescaped: the last `@` stands before the hosts.
        let (user_info, hosts) = match rest.rsplit_once('@') {
            Some((user_info, hosts)) => (Some(user_info), hosts),
            None => (None, rest),
        };
        let hosts = hosts.strip_suffix('/').unwrap_or(hosts);
        let servers = hosts.split(',').map(server).collect::<Result<Vec<_>, _>>().map_err(wrong)?;
        let (user, password) = match user_info.map(|info| info.split_once(':').unwrap_or((info, ""))) {
            None => (None, None),
            Some((user, password)) => {
                let decode = |text: &str, what: &str| {
                    percent_decode(text).ok_or_else(|| wrong(format!("the {what} is not percent-encoded UTF-8")))
                };
                let (user, password) = (decode(user, "user name")?, decode(password, "password")?);
                if user.is_empty() {
                    return Err(wrong("the user name before `@` is empty".to_owned()));
                }
                (Some(user), Some(password))
            }
        };
        Ok(Self {
            servers,
            tls,
            user,
            password,
            sasl_mechanism: SaslMechanism::ScramSha512,
            ca_file: None,
            client_id: "oncebox".to_owned(),
            source: "oncebox".to_owned(),
            create_topics: false,
            partitions: 6,
            replication: -1,
            session_timeout: Duration::from_secs(45),
            linger: Duration::ZERO,
            publish_rows_max: 20_000,
            publish_bytes_max: 64 << 20,
            in_flight_bytes_max: 64 << 20,
            properties: BTreeMap::new(),
        })
    }

    pub(super) fn validate(&self) -> Result<(), BrokerError> {
        if self.servers.is_empty() {
            return Err(refused("no Kafka server is named: `[broker] url = \"kafka://HOST:PORT\"`"));
        }
        if self.tls && !cfg!(feature = "kafka-tls") {
            return Err(needs_tls_feature("`kafkas://`"));
        }
        if self.user.is_some() {
            self.validate_sasl()?;
        }
        if self.ca_file.is_some() && !self.tls {
            return Err(refused("`ca_file` is for TLS: use `kafkas://` in the broker URL"));
        }
        if let Some(file) = self.ca_file.as_ref().filter(|file| !file.is_file()) {
            return Err(refused(format!("`ca_file`: there is no file `{}`", file.display())));
        }
        if self.partitions < 1 || (self.replication < 1 && self.replication != -1) {
            return Err(refused("`partitions` must be at least 1, `replication` too (or -1: the broker's default)"));
        }
        if self.publish_rows_max == 0 || self.publish_bytes_max == 0 || self.in_flight_bytes_max == 0 {
            return Err(refused(
                "`publish_rows_max`, `publish_bytes_max` and `in_flight_bytes_max` must be at least 1",
            ));
        }
        let longest = Duration::from_millis(properties::LINGER_MAX_MS.into());
        if self.linger > longest {
            return Err(refused(format!("`linger` must be at most {longest:?}: {}", properties::LINGER_WHY)));
        }
        bound::check([("session_timeout", self.session_timeout)]).map_err(|error| refused(error.to_string()))?;
        crate::message::limits::check_printable("source", &self.source, 255)
            .map_err(|error| refused(format!("`source` of published messages: {error}")))?;
        properties::check(&self.properties)
    }

    fn validate_sasl(&self) -> Result<(), BrokerError> {
        let is_here = |server: &String| is_loopback(server.rsplit_once(':').map_or(server.as_str(), |(host, _)| host));
        match self.sasl_mechanism {
            SaslMechanism::Plain if !self.tls && !self.servers.iter().all(is_here) => Err(refused(
                "SASL PLAIN sends the password readable: use `kafkas://` (TLS), or SCRAM-SHA-512 as `sasl_mechanism`",
            )),
            SaslMechanism::Plain => Ok(()),
            scram if !cfg!(feature = "kafka-tls") => Err(needs_tls_feature(&format!("SASL {}", scram.name()))),
            _ => Ok(()),
        }
    }

    /// Whether batches are compressed: a message then has another size at the broker.
    pub(super) fn compresses(&self) -> bool {
        let set = ["compression.type", "compression.codec"].iter().find_map(|name| self.properties.get(*name));
        set.is_some_and(|codec| codec != "none")
    }

    /// The servers in the form that Kafka's own tools take.
    pub(super) fn bootstrap(&self) -> String {
        self.servers.join(",")
    }
}

// Not derived: the password and librdkafka's own settings are secrets.
impl fmt::Debug for KafkaConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaConfig")
            .field("servers", &self.servers)
            .field("tls", &self.tls)
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

fn refused(what: impl Into<String>) -> BrokerError {
    BrokerError::Refused(what.into())
}

fn needs_tls_feature(what: &str) -> BrokerError {
    refused(format!("{what} needs the cargo feature `kafka-tls`: build with `--features kafka-tls`"))
}

/// Reads `host`, `host:port` or `[v6]:port`. Returns it with a port, 9092 by default.
fn server(text: &str) -> Result<String, String> {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    };
    let port = match port {
        None => DEFAULT_PORT,
        Some(port) => match port.parse() {
            Ok(0) | Err(_) => return Err(format!("`{port}` in `{text}` is no port (1 to 65535)")),
            Ok(port) => port,
        },
    };
    let bracketed = host.starts_with('[') && host.ends_with(']');
    if host.is_empty() || host.contains(['/', ' ', '\0']) || (host.contains(':') && !bracketed) {
        return Err(format!("`{text}` is no HOST:PORT (an IPv6 address stands in brackets)"));
    }
    Ok(format!("{host}:{port}"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn message(result: Result<impl fmt::Debug, BrokerError>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_url_names_servers_tls_and_user() {
        let config = KafkaConfig::from_url("kafka://a:1,b,[::1]:3/").unwrap();
        assert_eq!(config.servers, ["a:1", "b:9092", "[::1]:3"]);
        assert!(!config.tls && config.user.is_none());
        let config = KafkaConfig::from_url("kafkas://app:p%40ss/w@rd@broker:9093").unwrap();
        assert!(config.tls);
        assert_eq!(config.user.as_deref(), Some("app"));
        assert_eq!(config.password.as_deref(), Some("p@ss/w@rd"));
    }

    #[test]
    fn a_wrong_url_says_what_is_wrong_and_never_the_password() {
        for (url, expected) in [
            ("kafka:/a:1", "`kafka://HOST:PORT` is expected"),
            ("http://a:1", "the scheme is `http`"),
            ("kafka://", "is no HOST:PORT"),
            ("kafka://a:0", "`0` in `a:0` is no port"),
            ("kafka://a:70000", "no port"),
            ("kafka://a:b", "no port"),
            ("kafka://a:1,,b:2", "is no HOST:PORT"),
            ("kafka://::1", "in brackets"),
            ("kafka://a:1/topic", "no port"),
            ("kafka://a:1?acks=0", "no parameters"),
            ("kafka://:s3cret@a:1", "the user name before `@` is empty"),
            ("kafka://app:s3cret%zz@a:1", "password is not percent-encoded"),
            ("kafka://app:s3cret@a:x", "no port"),
        ] {
            let text = message(KafkaConfig::from_url(url));
            assert!(text.contains(expected), "{url}: {text}");
            assert!(!text.contains("s3cret"), "{text}");
        }
    }

    #[test]
    fn a_password_is_not_shown_by_debug() {
        let mut config = KafkaConfig::from_url("kafka://app:s3cret@127.0.0.1:1").unwrap();
        config.properties.insert("ssl.key.password".into(), "s3cret".into());
        let shown = format!("{config:?}");
        assert!(!shown.contains("s3cret") && shown.contains("app"), "{shown}");
    }

    #[test]
    fn plain_without_tls_is_refused_unless_it_stays_on_this_machine() {
        let mut config = KafkaConfig::from_url("kafka://app:x@broker:1").unwrap();
        config.sasl_mechanism = SaslMechanism::Plain;
        assert!(message(config.validate()).contains("readable"));
        config.servers = vec!["127.0.0.1:1".into(), "localhost:1".into(), "[::1]:1".into()];
        config.validate().unwrap();
        config.servers.push("broker:1".into());
        assert!(message(config.validate()).contains("readable"), "one server is enough to show the password");
    }

    #[cfg(not(feature = "kafka-tls"))]
    #[test]
    fn what_needs_tls_names_the_feature() {
        let config = KafkaConfig::from_url("kafkas://a:1").unwrap();
        assert!(message(config.validate()).contains("`kafka-tls`"));
        let config = KafkaConfig::from_url("kafka://app:x@localhost:1").unwrap();
        assert!(message(config.validate()).contains("`kafka-tls`"));
    }

    #[test]
    fn settings_that_cannot_hold_are_refused_by_name() {
        let config = KafkaConfig::from_url("kafka://a:1").unwrap();
        config.validate().unwrap();
        let refuses = |change: &dyn Fn(&mut KafkaConfig), expected: &str| {
            let mut config = config.clone();
            change(&mut config);
            let text = message(config.validate());
            assert!(text.contains(expected), "{text}");
        };
        refuses(&|config| config.servers.clear(), "no Kafka server");
        refuses(&|config| config.partitions = 0, "`partitions`");
        refuses(&|config| config.replication = 0, "`replication`");
        refuses(&|config| config.publish_rows_max = 0, "`publish_rows_max`");
        refuses(&|config| config.source = "a\nb".into(), "`source`");
        refuses(&|config| config.ca_file = Some("ca.crt".into()), "`ca_file`");
        assert!(message("DIGEST-MD5".parse::<SaslMechanism>()).contains("SCRAM-SHA-512"));
        assert_eq!("plain".parse::<SaslMechanism>().unwrap(), SaslMechanism::Plain);
    }
}
