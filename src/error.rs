//! The errors of stores, brokers and handlers, named by what the caller does next; how relays and
//! consumers end; and the error of a value that cannot be used.
//!
//! Guarantees: adapters classify errors, so no code above them matches on an error of sqlx,
//! librdkafka or lapin; no error text contains a password (URLs are printed by [`redact`]).
//!
//! Not here: how a program prints errors and which exit code it returns (`app`).

pub(crate) mod classify;
#[cfg(feature = "consumer")]
mod hints;

use std::borrow::Cow;
use std::time::Duration;

/// An error of a database, classified by what the caller does with its work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A transient failure: deadlock, serialization failure, lock timeout, busy file. Retry the
    /// same work with jitter; no attempt is counted.
    #[error("the database asks to try again: {}", words(.0))]
    Busy(#[source] sqlx::Error),
    /// The database is away, starting, stopping, full, read-only or out of connections. Wait and
    /// retry; no attempt is counted.
    #[error("the database is not available: {}", words(.0))]
    Unavailable(#[source] sqlx::Error),
    /// The connection was lost during COMMIT. The outcome is unknown: find it out, never guess.
    #[error("the outcome of a commit is unknown: {}", words(.0))]
    CommitUnknown(#[source] sqlx::Error),
    /// The lease, epoch or revision is another's now. End the session and change nothing.
    #[error("fenced: {0}")]
    Fenced(String),
    /// The schema is missing. `oncebox migrate up` creates it.
    #[error("the schema of oncebox is missing: {0}; run `oncebox migrate up`")]
    SchemaMissing(String),
    /// The schema is older than this program needs.
    #[error("the schema is at version {found}, this program needs {needed}; run `oncebox migrate up`")]
    SchemaOld {
        /// The newest version that was applied.
        found: i64,
        /// The version this program was built with.
        needed: i64,
    },
    /// The schema is newer than this program knows.
    #[error("the schema is at version {found}, this program knows up to {known}; update the program")]
    SchemaNewer {
        /// The newest version that was applied.
        found: i64,
        /// The newest version this program knows.
        known: i64,
    },
    /// A setting, a state of the database or a request would break a promise. A person must act.
    #[error("refused: {0}")]
    Refused(String),
    /// A message breaks a limit.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// A row or an answer is not what this program expects. The program does not guess its meaning.
    #[error("unexpected data: {0}")]
    Corrupt(String),
    /// Any other error of the database.
    #[error("{}", words(.0))]
    Other(#[source] sqlx::Error),
}

impl StoreError {
    /// Whether the error is transient: wait, retry the same work, and count no attempt (R27).
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Busy(_) | Self::Unavailable(_) | Self::CommitUnknown(_))
    }

    /// Whether tables of oncebox are missing, as the database said.
    pub(crate) fn is_schema_missing(&self) -> bool {
        match self {
            Self::SchemaMissing(_) => true,
            Self::Other(error) => classify::is_schema_missing(error),
            _ => false,
        }
    }

    /// The same error, as [`Self::SchemaMissing`] where the database said that tables of oncebox
    /// are missing.
    pub(crate) fn or_schema_missing(self) -> Self {
        match &self {
            Self::Other(sqlx::Error::Database(error)) if self.is_schema_missing() => {
                Self::SchemaMissing(classify::message_and_code(error.as_ref()))
            }
            _ => self,
        }
    }

    /// Whether the server's certificate is not trusted, or TLS is required and the server has none.
    /// At start the program ends with this error. During work it is shown and retried, because the
    /// server may get another certificate.
    #[must_use]
    pub(crate) fn is_untrusted(&self) -> bool {
        matches!(self, Self::Unavailable(error) | Self::Other(error) if classify::is_untrusted(error))
    }

    /// Whether a right, the database or the password of its user is missing.
    #[cfg(feature = "programs")]
    #[must_use]
    pub(crate) fn is_for_a_person(&self) -> bool {
        matches!(self, Self::Other(error) if classify::needs_a_person(error))
    }
}

/// A setting, a name, a key or a stored text that cannot be used. It says why in one sentence, for
/// a person to read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(Cow<'static, str>);

impl Invalid {
    pub(crate) fn new(why: impl Into<Cow<'static, str>>) -> Self {
        Self(why.into())
    }
}

/// A message breaks a limit. `limit` is a row of the limits table or a fixed rule, such as `topic`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("limit {limit}: {detail}")]
pub struct LimitError {
    /// The name of the limit, the same for every way to enqueue.
    pub limit: Cow<'static, str>,
    /// What the message has, and what is allowed.
    pub detail: String,
}

impl LimitError {
    /// An error with the name of a limit and a text that tells what breaks it.
    pub(crate) fn new(limit: impl Into<Cow<'static, str>>, detail: impl Into<String>) -> Self {
        Self { limit: limit.into(), detail: detail.into() }
    }
}

/// An error of a broker, classified by what it means for the session.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum BrokerError {
    /// The broker cannot be reached, or the connection ended. Retry; no attempt is counted.
    #[error("the broker is not available: {0}")]
    Unavailable(String),
    /// A topic, queue or exchange does not exist, or access to it is denied.
    #[error("the destination is not available: {0}")]
    Destination(String),
    /// A setting breaks a promise, or the broker refuses a declaration. A person must act.
    #[error("refused: {0}")]
    Refused(String),
    /// User name and password were not accepted. This is retried, because they may be corrected.
    #[error("not authorised: {0}")]
    Unauthorised(String),
    /// The server's certificate is not trusted, or the server has no TLS. At start the program ends
    /// with this error. During work it is shown and retried, because the server may get another
    /// certificate.
    #[error("not trusted: {0}")]
    Untrusted(String),
    /// Any other error: the session ends, and a new one starts from what is proven.
    #[error("{0}")]
    Session(String),
}

/// How a relay or a consumer ended without an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd {
    /// The stop was requested.
    Stopped,
    /// Nothing was left to do, and `until_empty` or `until_idle` is set.
    Idle,
}

/// Why a relay or a consumer has to end and needs a person.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The database refuses, or fails in a way that only a person can repair.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The broker refuses, or fails in a way that only a person can repair.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The inbox of a consumer would forget ids of messages that can still come.
    #[error("consumer `{consumer}`: {why}")]
    Horizon {
        /// The name of the consumer whose horizon is too short.
        consumer: String,
        /// Which messages can still come, and for how long.
        why: String,
    },
}

/// The error that a handler returns. `?` turns any error into a retryable one, or into a transient
/// one if it is an error of a database whose code says so, or has one among its sources.
#[derive(Debug)]
pub struct HandlerError {
    /// The text of the handler's error.
    pub message: String,
    /// Whether a retry is pointless: the message becomes dead at once.
    pub terminal: bool,
    /// The time after which the handler asked to be tried again.
    pub retry_after: Option<Duration>,
    transient: bool,
    #[cfg(feature = "consumer")]
    hints: hints::Hints,
}

impl HandlerError {
    /// The message is tried again under the retry policy.
    pub fn retryable(error: impl std::fmt::Display) -> Self {
        Self {
            message: classify::without_frame(error.to_string()),
            terminal: false,
            retry_after: None,
            transient: false,
            #[cfg(feature = "consumer")]
            hints: hints::Hints::default(),
        }
    }

    /// No retry can help: the message becomes dead at once.
    pub fn terminal(error: impl std::fmt::Display) -> Self {
        Self { terminal: true, ..Self::retryable(error) }
    }

    /// The message is tried again after this time. The attempt counts.
    pub fn retry_after(error: impl std::fmt::Display, after: Duration) -> Self {
        Self { retry_after: Some(after), ..Self::retryable(error) }
    }

    /// A transient failure: the database asked to retry or went away. No attempt is counted (R27).
    pub fn transient(error: impl std::fmt::Display) -> Self {
        Self { transient: true, ..Self::retryable(error) }
    }

    /// Whether no attempt is counted for this failure (R27).
    #[must_use]
    pub fn is_transient(&self) -> bool {
        self.transient
    }
}

impl std::fmt::Display for HandlerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

// `HandlerError` itself does not implement `std::error::Error`, so that this conversion can exist
// (as anyhow does it).
impl<E: std::error::Error + Send + Sync + 'static> From<E> for HandlerError {
    fn from(error: E) -> Self {
        let of_database = classify::OfDatabase::find(&error);
        let transient = of_database.is_some_and(classify::OfDatabase::is_transient);
        #[cfg(feature = "consumer")]
        let hints = of_database.map(hints::Hints::of).unwrap_or_default();
        let mut message = String::new();
        let mut next: Option<&(dyn std::error::Error + 'static)> = Some(&error);
        while let Some(cause) = next {
            // The sources of an error of sqlx are already part of its text.
            let of_database = cause.downcast_ref::<sqlx::Error>();
            let text = of_database.map_or_else(|| cause.to_string(), words);
            // If the text above holds this cause in sqlx's own form, the text of `words` replaces
            // it.
            message = of_database.map_or(message.clone(), |error| message.replace(&error.to_string(), &text));
            if !message.contains(&text) {
                message = if message.is_empty() { text } else { format!("{message}: {text}") };
            }
            next = cause.source().filter(|_| of_database.is_none());
        }
        Self {
            transient,
            #[cfg(feature = "consumer")]
            hints,
            ..Self::retryable(message)
        }
    }
}

/// Turns an error into a terminal one at the end of a call: `parse(x).terminal()?`.
pub trait Terminal<T> {
    /// Marks the error as terminal.
    ///
    /// # Errors
    /// The error itself, marked as terminal: no retry can help.
    fn terminal(self) -> Result<T, HandlerError>;
}

impl<T, E: std::fmt::Display> Terminal<T> for Result<T, E> {
    fn terminal(self) -> Result<T, HandlerError> {
        self.map_err(HandlerError::terminal)
    }
}

/// The text of an error: the database's own message and its code. The additions of sqlx are left
/// out: that it is an error of a database, and for PostgreSQL the line in the server's source,
/// which readers take for a line of the statement.
#[must_use]
pub fn words(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Database(database) => {
            let said = classify::message_and_code(database.as_ref());
            let remedy = match classify::is_schema_missing(error) {
                true => Some("where the schema of oncebox is missing or old, run `oncebox migrate up`"),
                false => classify::advice(database.as_ref()),
            };
            remedy.map_or(said.clone(), |remedy| format!("{said}; {remedy}"))
        }
        sqlx::Error::Io(error) if classify::is_untrusted_io(error) => format!(
            "its certificate is not trusted ({error}); set `ca_file` to its authority, and use the host name that stands in it"
        ),
        sqlx::Error::Io(error) => error.to_string(),
        sqlx::Error::Tls(error) => classify::of_tls(error.to_string(), sqlx_core::net::tls::available()),
        sqlx::Error::Configuration(error) => error.to_string(),
        sqlx::Error::Protocol(words) => words.clone(),
        sqlx::Error::PoolTimedOut => "no connection was made or came free in time".to_owned(),
        other => other.to_string(),
    }
}

/// A URL in a form that may be printed: the user stays, the password and the values of secret query
/// parameters are replaced. Where an `@` stands behind a `?`, only the first name is left. Of other
/// texts only what stands behind the last `@` is left.
#[must_use]
pub fn redact(url: &str) -> String {
    let Some((scheme, rest)) = split_scheme(url) else {
        return url.rsplit_once('@').map_or_else(|| "***".to_owned(), |(_, tail)| format!("***@{tail}"));
    };
    // The `?` may be one of a password before the host, and the `@` one of a password in the query
    // (`//host/db?password=a@b`): nothing shows where the password ends.
    if rest.split_once('?').is_some_and(|(_, behind)| behind.contains('@')) {
        let first = rest.split([':', '/', '?', '#', '@']).next().unwrap_or_default();
        return format!("{scheme}://{first}:***");
    }
    // A password may contain `/`, `#` and `@` without escapes, so the last `@` ends it.
    let (user_info, tail) = match rest.rsplit_once('@') {
        Some((user_info, tail)) => (Some(user_info), tail),
        None => (None, rest),
    };
    let (path, query) = match tail.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (tail, None),
    };
    let mut shown = format!("{scheme}://");
    if let Some(user_info) = user_info {
        match user_info.split_once(':') {
            Some((user, _)) => shown.push_str(&format!("{user}:***@")),
            None => shown.push_str(&format!("{user_info}@")),
        }
    }
    shown.push_str(path);
    if let Some(query) = query {
        let pairs: Vec<String> = query
            .split('&')
            .map(|pair| match pair.split_once('=') {
                Some((name, _)) if name.to_ascii_lowercase().contains("pass") => format!("{name}=***"),
                _ => pair.to_owned(),
            })
            .collect();
        shown.push_str(&format!("?{}", pairs.join("&")));
    }
    shown
}

/// The scheme of a URL, and what stands behind `://`; `None` for any other text. A `://` behind
/// something else than a scheme may be one of a password.
pub(crate) fn split_scheme(url: &str) -> Option<(&str, &str)> {
    let is_scheme = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    url.split_once("://").filter(|(scheme, _)| is_scheme(scheme))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_never_survives_redaction() {
        for url in [
            "postgres://app:s3cret@localhost/db",
            "postgres://app:s3/cret@localhost/db",
            "amqp://app:s3cret@127.0.0.1:5672/%2f",
            "kafka://app:s3cret@a:1,b:2",
            "mysql://app:p@s3cret@h/db?password=s3cret",
            "postgres://a@b:x/s3cret@localhost/db",
            "postgres://app:x?s3cret@localhost/db",
            "postgres://app:x#s3cret@localhost/db",
            "postgres://app:x@s3?s3cret@localhost/db",
            "postgres:app:s3cret@localhost/db",
            "postgres://db.example/app?user=app&password=s3@s3cret",
            "postgres://db.example:5432/app?password=x@s3cret",
            "app:s3cret@localhost/db",
            "app:s3://cret@localhost/db",
            "host=db password=s3cret",
        ] {
            assert!(!redact(url).contains("s3"), "{}", redact(url));
        }
        assert_eq!(redact("sqlite://file.db"), "sqlite://file.db");
        assert_eq!(redact("postgres://app:x@h:1/db?sslmode=require"), "postgres://app:***@h:1/db?sslmode=require");
    }

    #[test]
    fn any_error_is_retryable_unless_it_says_terminal() {
        let error: HandlerError = std::io::Error::other("x").into();
        assert!(!error.terminal && !error.is_transient());
        assert!(HandlerError::terminal("x").terminal);
        let parsed: Result<i32, _> = "a".parse::<i32>().terminal();
        assert!(parsed.is_err_and(|error| error.terminal));
    }
}
