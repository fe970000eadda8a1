//! `enqueue` in Rust: calls the same SQL functions as every other language, so limits, ids, buckets
//! and times are those of the database (R1).

use sqlx::{PgConnection, Postgres, QueryBuilder, Row};
use uuid::Uuid;

use crate::error::{LimitError, StoreError};
use crate::message::{Limits, NewMessage};
use crate::outbox::enqueue::{Enqueue, NewEmail};
use crate::store::headers::headers_json;

/// PostgreSQL stores no value of 1 GiB or more.
const VALUE_BYTES_MAX: usize = (1 << 30) - 1;

/// Bounds that no setting of the database can raise. The check against them also refuses what
/// PostgreSQL would refuse without naming a limit (a NUL in text).
const WIDEST: Limits = Limits {
    topic_length_max: 249,
    key_bytes_max: VALUE_BYTES_MAX,
    kind_bytes_max: 255,
    headers_max: usize::MAX,
    header_name_bytes_max: 255,
    headers_bytes_max: 65_536,
    content_type_bytes_max: 255,
    message_bytes_max: VALUE_BYTES_MAX,
};

const QUEUE_EMAIL: &str = "insert into oncebox.email (unique_key, recipient, subject, body) values ($1, $2, $3, $4) \
  on conflict (unique_key) do nothing";

impl Enqueue for PgConnection {
    async fn write(&mut self, messages: Vec<NewMessage>) -> Result<Vec<Uuid>, StoreError> {
        let messages = checked(messages)?;
        if messages.is_empty() {
            return Ok(Vec::new());
        }
        let mut query = QueryBuilder::new("select ");
        push_call(&mut query, &messages);
        let row = query.build().fetch_one(self).await?;
        let ids: Vec<Uuid> = if messages.len() == 1 { vec![row.try_get(0)?] } else { row.try_get(0)? };
        if ids.len() != messages.len() {
            return Err(StoreError::Corrupt(format!(
                "{} messages were given, {} ids came back",
                messages.len(),
                ids.len()
            )));
        }
        Ok(ids)
    }

    async fn queue_email(&mut self, email: &NewEmail) -> Result<bool, StoreError> {
        let queue = sqlx::query(QUEUE_EMAIL).bind(&email.unique_key).bind(&email.recipient);
        Ok(queue.bind(&email.subject).bind(&email.body).execute(self).await?.rows_affected() == 1)
    }
}

/// Checks the messages, and returns them in the form that [`push_call`] takes.
pub(super) fn checked(mut messages: Vec<NewMessage>) -> Result<Vec<NewMessage>, StoreError> {
    let mut bytes = 0_usize;
    for message in &mut messages {
        WIDEST.check(message)?;
        let headers: usize = message.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        let key = message.key.as_ref().map_or(0, String::len);
        bytes = [headers, key, message.payload.len()].into_iter().fold(bytes, usize::saturating_add);
    }
    if bytes > VALUE_BYTES_MAX {
        let why = format!("{bytes} bytes in one call are more than the {VALUE_BYTES_MAX} that PostgreSQL takes");
        return Err(LimitError::new("message_bytes", why).into());
    }
    Ok(messages)
}

/// Appends a call that enqueues one or more messages that were [`checked`]. Its value is an id or
/// an array of ids, and never null.
pub(super) fn push_call(query: &mut QueryBuilder<Postgres>, messages: &[NewMessage]) {
    match messages {
        [message] => push_one(query, message),
        many => push_many(query, many),
    }
}

fn push_one(query: &mut QueryBuilder<Postgres>, message: &NewMessage) {
    query.push("oncebox.enqueue_message(");
    query
        .separated(", ")
        .push_bind(&message.topic)
        .push_bind(&message.kind)
        .push_bind(&message.payload)
        .push_bind(&message.key)
        .push_bind(headers_json(&message.headers))
        .push_unseparated("::text::json")
        .push_bind(&message.content_type)
        .push_bind(message.id)
        .push_bind(message.trace.as_ref().map(|trace| &trace.traceparent))
        .push_bind(message.trace.as_ref().and_then(|trace| trace.tracestate.as_ref()))
        .push_bind(message.id.is_none().then(random_end));
    query.push(")");
}

/// The part of a new id behind its time, which is the database's: a random number is cheaper here.
fn random_end() -> String {
    Uuid::now_v7().to_string().split_off(14)
}

fn push_many(query: &mut QueryBuilder<Postgres>, messages: &[NewMessage]) {
    fn column<'a, T>(messages: &'a [NewMessage], of: impl Fn(&'a NewMessage) -> T) -> Vec<T> {
        messages.iter().map(of).collect()
    }
    let trace = |message: &NewMessage| message.trace.as_ref().map(|trace| trace.traceparent.clone());
    let state = |message: &NewMessage| message.trace.as_ref().and_then(|trace| trace.tracestate.clone());
    query.push("oncebox.enqueue_all(");
    query
        .separated(", ")
        .push_bind(column(messages, |message| message.topic.as_str()))
        .push_bind(column(messages, |message| message.kind.as_str()))
        .push_bind(column(messages, |message| message.payload.as_slice()))
        .push_bind(column(messages, |message| message.key.as_deref()))
        .push_bind(unless_all_none(column(messages, |message| headers_json(&message.headers))))
        .push_unseparated("::text[]::json[]")
        .push_bind(column(messages, |message| message.content_type.as_deref()))
        .push_bind(unless_all_none(column(messages, |message| message.id)))
        .push_bind(unless_all_none(column(messages, trace)))
        .push_bind(unless_all_none(column(messages, state)));
    query.push(")");
}

/// None where all members are none: the functions read a null array as nulls throughout.
fn unless_all_none<T>(column: Vec<Option<T>>) -> Option<Vec<Option<T>>> {
    column.iter().any(Option::is_some).then_some(column)
}
