//! The sql handler: runs a team's statements in the inbox transaction, so any table becomes an
//! exactly-once sink without Rust code. Several messages are handled in a few round trips where the
//! database can; then the error still tells the message that failed.
//!
//! Promise: values are bound, never spliced into the text. Numbers keep their digits. A parameter
//! whose source is missing is a terminal failure that names it, unless it is listed as optional.

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;

use crate::error::{HandlerError, Invalid, StoreError};
use crate::inbox::handler::{BatchMessageHandler, HandlerTx, MessageHandler};
use crate::message::{Message, pointer};
use crate::store::Store;
use crate::store::statements::{SqlValue, Statements, ends_transaction, names, split};

/// The most bytes of values in one call of the database, if each is as long as its payload. They
/// are held several times at once, here and on the server, which limits what it takes in a call.
const BYTES_MAX: usize = 4 << 20;

/// The configuration of a sql handler.
#[derive(Debug, Clone, Default)]
pub struct SqlSpec {
    /// Statements, run in order.
    pub statements: Vec<String>,
    /// The parameters, each with the source of its value.
    pub params: BTreeMap<String, String>,
    /// Parameters that are null if their source is missing.
    pub optional: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Source {
    Pointer(String),
    Id,
    Key,
    Kind,
    Topic,
    Time,
    Payload,
    Header(String),
}

/// Why a message has no value for a parameter.
enum NoValue {
    /// An optional parameter is null then.
    Missing(String),
    Unreadable(String),
}

impl Source {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "@id" => Self::Id,
            "@key" => Self::Key,
            "@kind" => Self::Kind,
            "@topic" => Self::Topic,
            "@time" => Self::Time,
            "@payload" => Self::Payload,
            _ if text.starts_with('/') => Self::Pointer(text.to_owned()),
            _ => Self::Header(text.strip_prefix("@header:").filter(|name| !name.is_empty())?.to_owned()),
        })
    }

    /// Reads the value from a message.
    fn value(&self, message: &Message) -> Result<SqlValue, NoValue> {
        let text = |text: Option<String>, what: &str| {
            text.map(SqlValue::Text).ok_or_else(|| NoValue::Missing(format!("the message has no {what}")))
        };
        match self {
            Self::Pointer(path) => match pointer::find(&message.payload, path) {
                Ok(pointer::Pointed::Null) => Ok(SqlValue::Null),
                Ok(pointer::Pointed::Bool(value)) => Ok(SqlValue::Bool(value)),
                Ok(pointer::Pointed::Number(digits)) => Ok(SqlValue::Number(digits)),
                Ok(pointer::Pointed::Text(text)) => Ok(SqlValue::Text(text)),
                Ok(pointer::Pointed::Json(json)) => Ok(SqlValue::Json(json)),
                Err(error) if message.payload.is_empty() || error == Invalid::new(pointer::MISSING) => {
                    Err(NoValue::Missing(format!("the payload at `{path}`: {error}")))
                }
                Err(error) => Err(NoValue::Unreadable(format!("the payload at `{path}`: {error}"))),
            },
            Self::Id => text(Some(message.id_text.clone()), "id"),
            Self::Key => text(message.key_text().map(str::to_owned), "key that is text"),
            Self::Kind => text(Some(message.kind.clone()).filter(|kind| !kind.is_empty()), "kind"),
            Self::Topic => text(Some(message.topic.clone()), "topic"),
            Self::Time => {
                let missing = || NoValue::Missing("the message has no time".to_owned());
                message.time.map(SqlValue::Time).ok_or_else(missing)
            }
            Self::Payload => Ok(SqlValue::Bytes(message.payload.clone())),
            Self::Header(name) => {
                text(message.header(name).map(str::to_owned), &format!("header `{name}` that is text"))
            }
        }
    }
}

/// A handler that runs prepared statements with values from the message. It takes single messages
/// and sets.
#[derive(Debug)]
pub struct SqlHandler<S: Statements> {
    statements: Vec<S::Statement>,
    /// The statements for several messages, where the database can run them so.
    set: Option<S::Set>,
    /// How often parameters occur in the statements, at least 1.
    occurrences: usize,
    sources: BTreeMap<String, Source>,
    optional: BTreeSet<String>,
}

impl<S: Statements> SqlHandler<S> {
    /// Checks the configuration and prepares each statement on the server.
    ///
    /// # Errors
    /// [`StoreError::Refused`], which names the statement or parameter; a transient error as it is.
    pub async fn prepare(store: &S, spec: SqlSpec) -> Result<Self, StoreError> {
        let refused = |why: String| Err(StoreError::Refused(why));
        if spec.statements.is_empty() {
            return refused("the sql handler has no statement".to_owned());
        }
        let mut unused: BTreeSet<&String> = spec.params.keys().collect();
        let (mut statements, mut occurrences) = (Vec::new(), 0);
        for statement in &spec.statements {
            if let Some(words) = ends_transaction(statement, S::dialect()) {
                // It would commit or undo the effects of other messages, and the rows that make
                // each of them happen once.
                return refused(format!(
                    "the statement `{statement}` ends the transaction it runs in ({words}): take it out; what the \
                     statements of a handler write is committed together with its message"
                ));
            }
            for name in names(&split(statement, S::dialect())) {
                occurrences += 1;
                unused.remove(name);
                if !spec.params.contains_key(name) {
                    return refused(format!("the statement `{statement}` uses :{name}, which `params` does not name"));
                }
            }
            statements.push(store.prepare(statement).await.map_err(|error| unprepared(statement, error))?);
        }
        let unknown = spec.optional.iter().find(|name| !spec.params.contains_key(*name));
        if let Some(name) = unused.first().copied().or(unknown) {
            return refused(format!("the parameter `{name}` is declared and no statement uses it"));
        }
        let mut sources = BTreeMap::new();
        for (name, text) in spec.params {
            let Some(source) = Source::parse(&text) else {
                return refused(format!(
                    "the parameter `{name}` reads from `{text}`: use a JSON pointer (`/a/b`) or @id, @key, @kind, \
                     @topic, @time, @payload, @header:NAME"
                ));
            };
            sources.insert(name, source);
        }
        let set = store.prepare_set(&statements).await;
        let set = set.map_err(|error| unprepared(&spec.statements.join("; "), error))?;
        let (occurrences, optional) = (occurrences.max(1), spec.optional.into_iter().collect());
        Ok(Self { statements, set, occurrences, sources, optional })
    }

    /// Whether the database runs the statements for several messages in a few round trips, so that
    /// it gains something to give this handler sets.
    #[must_use]
    pub fn gains_by_sets(&self) -> bool {
        self.set.is_some()
    }

    fn values(&self, message: &Message) -> Result<BTreeMap<String, SqlValue>, HandlerError> {
        let mut values = BTreeMap::new();
        for (name, source) in &self.sources {
            let value = match source.value(message) {
                Ok(value) => value,
                Err(NoValue::Missing(_)) if self.optional.contains(name) => SqlValue::Null,
                Err(NoValue::Missing(why) | NoValue::Unreadable(why)) => {
                    return Err(HandlerError::terminal(format!("the parameter `{name}` has no value: {why}")));
                }
            };
            values.insert(name.clone(), value);
        }
        Ok(values)
    }
}

#[async_trait]
impl<S: Store> MessageHandler<S> for SqlHandler<S> {
    async fn handle(&self, message: &Message, tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError> {
        let values = self.values(message)?;
        for statement in &self.statements {
            S::execute(tx.connection(), statement, &values).await?;
        }
        Ok(())
    }
}

#[async_trait]
impl<S: Store> BatchMessageHandler<S> for SqlHandler<S> {
    async fn handle_batch(&self, messages: &[&Message], tx: &mut HandlerTx<'_, S>) -> Result<(), HandlerError> {
        let mut from = 0;
        while from < messages.len() {
            let end = end_of_part(messages, from, self.occurrences);
            match &self.set {
                Some(set) if end - from > 1 => {
                    let mut values = Vec::with_capacity(end - from);
                    for (index, message) in messages.iter().enumerate().take(end).skip(from) {
                        values.push(self.values(message).map_err(|error| error.of_message(index))?);
                    }
                    if let Err((at, error)) = S::execute_set(tx.connection(), set, &values).await {
                        let error = HandlerError::from(error);
                        return Err(match at {
                            Some(at) => error.of_message(from + at),
                            None => error,
                        });
                    }
                }
                _ => {
                    for (index, message) in messages.iter().enumerate().take(end).skip(from) {
                        self.handle(message, tx).await.map_err(|error| error.of_message(index))?;
                    }
                }
            }
            from = end;
        }
        Ok(())
    }
}

/// Why the server does not take the statement. A transient error says nothing about it.
fn unprepared(statement: &str, error: StoreError) -> StoreError {
    if error.is_transient() {
        return error;
    }
    StoreError::Refused(format!("the statement `{statement}` cannot be prepared: {error}"))
}

/// The end of the messages, at least one, that go to the database together. Each parameter that
/// occurs in a statement may hold the whole payload.
fn end_of_part(messages: &[&Message], from: usize, occurrences: usize) -> usize {
    let mut bytes = 0;
    let fits = |message: &&&Message| {
        bytes += message.payload.len() * occurrences;
        bytes <= BYTES_MAX
    };
    from + messages[from..].iter().take_while(fits).count().max(1)
}
