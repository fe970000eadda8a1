//! The configuration file that `oncebox config template` prints: every setting with its default and
//! its purpose.
//!
//! Promise: a test reads the file back, uncommented, and compares it with the defaults. Another
//! test fails if a setting has no line here.

use std::fmt::Write as _;

use toml::Value;

use super::Settings;

/// A section and its settings, each with its purpose.
type Section = (&'static str, &'static [(&'static str, &'static str)]);

const SECTIONS: &[Section] = &[
    ("", &[("shutdown_grace", "how long a stop waits for what runs")]),
    (
        "database",
        &[
            (
                "url",
                "postgres://, mysql:// (also MariaDB) or sqlite://FILE; TLS is verified unless the host is loopback",
            ),
            (
                "connections_max",
                "connections of the pool at most; a consumer process takes at least lanes + retriers + 1 for each of \
                 its consumers (9 by default); a publisher on PostgreSQL has one more for each shard",
            ),
            (
                "answer_timeout",
                "how long the server may be silent in the middle of a statement, for example \"65s\": its connection is then given \
                 up and another one made; absent: just above the longest wait for a lock, which follows handler_timeout",
            ),
            ("ca_file", "certificate authorities to verify the server with, PEM"),
        ],
    ),
    (
        "broker",
        &[
            (
                "url",
                "kafka://HOST:PORT,HOST:PORT  kafkas://  amqp://  amqps://  embedded://FILE; \
                 TLS with kafkas:// and amqps:// only",
            ),
            ("ca_file", "certificate authorities to verify the server with, PEM"),
            (
                "in_flight_bytes_max",
                "bytes of a consumer's deliveries that are not yet acknowledged, at most; one delivery is always allowed",
            ),
        ],
    ),
    (
        "broker.kafka",
        &[
            ("create_topics", "create topics that are not there"),
            ("partitions", "partitions of created topics; more later moves keys to other partitions"),
            ("replication", "replicas of created topics; -1: as many as the broker gives by default"),
            (
                "sasl_mechanism",
                "PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512, which is the default (SCRAM needs the feature kafka-tls)",
            ),
            ("username", "user, where it does not stand in the URL"),
            ("password", "password, where it does not stand in the URL"),
            ("session_timeout", "how long a consumer may be silent before its partitions go to another"),
            ("properties", "settings of librdkafka, passed through; one that breaks a promise is refused by name"),
        ],
    ),
    (
        "broker.rabbitmq",
        &[
            ("exchange", "the exchange, durable, of type topic; publisher and consumer declare it"),
            ("alternate_exchange", "where unroutable messages go, set when the exchange is made"),
            (
                "pipeline_per_key",
                "true gives up one unconfirmed publish per key: faster for few keys, and a nack may reorder a key",
            ),
            (
                "partitions",
                "queues per topic and consumer, behind a consistent-hash exchange where more than one; changed by `oncebox queues repartition`",
            ),
        ],
    ),
    (
        "broker.embedded",
        &[
            ("partitions", "partitions of a topic, fixed when it is made"),
            ("session_timeout", "how long a consumer may be silent before its partitions go to another"),
            (
                "retention",
                "how long messages are kept that every consumer has handled, for example \"7d\", or never: for ever",
            ),
        ],
    ),
    (
        "publisher",
        &[
            ("source", "ce_source of every message: 1 to 255 bytes of printable ASCII"),
            (
                "lease",
                "length of the lease of a shard: a standby takes over within it, a short freeze does not lose it",
            ),
            ("batch_rows", "rows of one read at most; more than 10000 counts as 10000"),
            (
                "read_bytes",
                "bytes of one read at most, unless a single message is larger: with window_bytes it bounds memory",
            ),
            (
                "window_rows",
                "rows from the oldest that is not proven to the last that was read: what a crash sends again",
            ),
            ("window_bytes", "bytes sent and not proven at most: bounds memory"),
            ("poll_max", "the longest pause between reads that found nothing: the delay after a quiet time"),
            (
                "held_rows_max",
                "held messages of a shard at most, with the dead ones that hold them; beyond it reading stops, visibly",
            ),
            ("dead_rows_max", "dead messages at most, those under skip too; beyond it reading stops, visibly"),
            ("dead", "what a message that cannot be sent does to its key: hold (order is kept) or skip"),
            ("dead_topics", "the same for single topics, for example { audit = \"skip\" }"),
            (
                "publish_stall",
                "how long the broker may leave messages unanswered before their topic is held; shorter (1 s or 5 s) \
                 where they hold up messages of other topics",
            ),
            ("probe", "how often a blocked topic is tried, beside the others; one that says nothing ever more rarely"),
            (
                "redrive_age_max",
                "dead messages older than this need a new id to be redriven: inboxes may have forgotten the old one",
            ),
        ],
    ),
    (
        "email",
        &[
            ("from", "the sender's address"),
            ("directory", "where .eml files go while no SMTP server is set"),
            ("smtp_url", "smtp://USER:PASSWORD@HOST:PORT?tls=required or smtps://; absent: files"),
            ("attempts_max", "tries of one e-mail; then it is failed"),
            (
                "content_kept",
                "how long recipient, subject, body and error are kept of what was sent; then they are blank",
            ),
            (
                "keys_kept",
                "how long its row and unique key are kept, for example \"90d\"; longer than its effect can come again; or never: for ever",
            ),
        ],
    ),
    ("http", &[("listen", "address of /livez, /readyz, /metrics, for example \"127.0.0.1:9090\"; absent: not served")]),
    ("log", &[("format", "text or json"), ("filter", "what is logged, as in RUST_LOG, which decides over it")]),
];

const CONSUMER: &str = r#"
# Consumers of the `consumer` program. Each reads its topics and commits the effects of its handlers exactly once.
# name, topics, group, queues and [[consumer.on]] show examples; the other lines show defaults.
#
# [[consumer]]
# name   = "ledger"            # inbox key, Kafka group, part of the queue names
# topics = ["payments"]
# group  = "ledger"            # the group in Kafka; absent: the name
# queues = { payments = "payments.ledger" }  # names of queues by topic; absent: <topic>.<name>
# id     = "envelope"          # where the id stands: envelope, header:NAME, payload:/POINTER, coordinates
# id_epoch = "1"               # part of the identity by coordinates: change it when a topic is made anew
# lanes  = 4                   # transactions at once, 1 to 64; a key keeps its lane; always 1 on SQLite
# retriers = 4                 # waiting keys that are tried at once, 1 to 64; always 1 on SQLite
# batch_max = 100              # messages of one transaction at most, 1 to 10000
# in_flight_max = 2000         # deliveries that run or wait for their turn at most
# aside_max = 20000            # deliveries behind another process's open transaction at most; more count as in flight
# unacknowledged_max = 200000  # not acknowledged at most, finished ones behind an unfinished one included
# dead_rows_max = 100000       # dead messages at most; nothing more is taken beyond, until some are redriven or discarded
# waiting_rows_max = 1000000   # waiting and dead messages at most; nothing more is taken beyond, until a tenth of them is gone
# handler_timeout = "30s"      # 2s on SQLite, where a handler runs inside the write lock
# dead   = "hold"              # later messages of a key behind a dead one: hold or skip
# unhandled = "acknowledge"    # a kind that no handler takes: acknowledge (counted) or dead
# horizon = "never"            # how long the inbox remembers, for example "30d"; longer than a message can come again
# drain  = "10s"               # how long a revoked partition may drain
#
# [consumer.retry]
# in_place = 2                 # quick tries before the message is stored as waiting
# in_place_delay = "50ms"
# attempts_max = 20            # tries in all; then the message is dead
# base   = "1s"                # the first wait; each further one doubles
# cap    = "10m"               # the longest wait
#
# [[consumer.on]]
# kind    = "payment.created"  # absent: every kind
# handler = "sql"              # statements in the inbox transaction; values are bound, never spliced
#   # A unique key (entry_type, source_payment_id) keeps one entry for each payment, also where it comes under a second message id.
#   # On MariaDB and MySQL write `on duplicate key update entry_type = entry_type` for `on conflict do nothing`.
# sql     = ["insert into ledger_entry (entry_type, source_payment_id, account_id, amount_minor) values ('payment', :payment, :account, :amount) on conflict do nothing"]
# params  = { payment = "/paymentId", account = "/accountId", amount = "/amountMinor" }  # JSON pointers; also @id @key @kind @topic @time @payload @header:NAME
# optional = []                # parameters that are null where their source is missing
"#;

/// The whole file, with every setting commented out.
#[must_use]
pub fn template() -> String {
    let defaults = Value::try_from(Settings::default()).unwrap_or(Value::Table(toml::Table::new()));
    let mut text = String::from(
        "# Settings of oncebox. Flag over environment over this file over default. Each line shows the default; \
         ... stands where there is none.\n\
         # In the environment: ONCEBOX_ and __ between levels, for example ONCEBOX_DATABASE__URL.\n\
         # `oncebox config show` prints what is in force and where it came from.\n",
    );
    for (section, settings) in SECTIONS {
        if !section.is_empty() {
            let _ = write!(text, "\n# [{section}]\n");
        } else {
            text.push('\n');
        }
        let table = section.split('.').filter(|name| !name.is_empty()).try_fold(&defaults, |at, name| at.get(name));
        for (key, about) in *settings {
            let line = match table.and_then(|table| table.get(key)) {
                Some(value) => format!("# {key} = {}", inline(value)),
                // There is no default: the user must replace this text.
                None => format!("# {key} = \"...\""),
            };
            let _ = writeln!(text, "{line:<48} # {about}");
        }
    }
    text.push_str(CONSUMER);
    text
}

fn inline(value: &Value) -> String {
    match value {
        Value::Table(table) if table.is_empty() => "{}".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// The settings in the template, by section and key.
    fn known() -> Vec<(String, &'static str)> {
        let path =
            |section: &str, key: &str| if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") };
        SECTIONS
            .iter()
            .flat_map(|(section, settings)| settings.iter().map(move |(key, about)| (path(section, key), *about)))
            .collect()
    }

    /// The lines that begin with `# ` and hold a setting or a section, uncommented.
    fn uncommented(text: &str) -> String {
        let is_setting = |line: &str| {
            line.starts_with('[')
                || line
                    .split_once(" = ")
                    .is_some_and(|(key, _)| key.trim().bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'))
        };
        let lines = text.lines().filter_map(|line| line.strip_prefix("# ")).filter(|line| is_setting(line));
        let lines = lines.filter(|line| !line.contains("= \"...\""));
        lines.map(|line| format!("{line}\n")).collect()
    }

    #[test]
    fn the_template_read_back_is_the_defaults_and_a_consumer() {
        let settings: Settings = toml::from_str(&uncommented(&template())).unwrap();
        let consumer = settings.consumer[0].clone();
        assert_eq!((consumer.name.as_str(), consumer.on.len()), ("ledger", 1));
        assert!(consumer.options(false, settings.shutdown_grace).is_ok());
        assert_eq!(Settings { consumer: Vec::new(), ..settings }, Settings::default());
    }

    #[test]
    fn every_setting_has_a_line() {
        fn keys(prefix: &str, value: &Value, found: &mut Vec<String>) {
            for (key, value) in value.as_table().unwrap() {
                let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                match value {
                    Value::Table(table) if !table.is_empty() => keys(&path, value, found),
                    _ => found.push(path),
                }
            }
        }
        let mut found = Vec::new();
        keys("", &Value::try_from(Settings::default()).unwrap(), &mut found);
        let known: Vec<String> = known().into_iter().map(|(path, _)| path).collect();
        for path in found.iter().filter(|path| *path != "consumer") {
            // A section in which no setting has a default.
            let section = known.iter().any(|known| known.starts_with(&format!("{path}.")));
            assert!(section || known.contains(path), "`{path}` has no line in the template");
        }
    }

    #[test]
    fn the_example_file_is_the_template() {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("config.example.toml");
        let text = std::fs::read_to_string(file).unwrap();
        assert_eq!(text, template(), "run `oncebox config template > config.example.toml`");
    }
}
