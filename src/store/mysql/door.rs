//! `enqueue` in Rust: any number of messages in one statement, which also checks the limits of the
//! database.
//!
//! The messages are sent as one JSON list, so the statement is the same for one message and for a
//! thousand. All values in it are hexadecimal or base64, so neither the character set nor the SQL
//! mode of the caller's connection can change a byte. The statement writes all rows or none: none
//! where a value of `oncebox_limits` is exceeded, or an id is too far from the database's clock.
//! Then, and before a large call, another statement finds out which limit is broken.
//!
//! Not here: the SQL doors (`oncebox_enqueue_p`, `oncebox_enqueue`), which are in the migrations,
//! with the same limits.

use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sqlx::Row;
use sqlx::mysql::MySqlConnection;
use uuid::Uuid;

use super::inserted;
use crate::error::{LimitError, StoreError};
use crate::message::{Limits, MessageId, NewMessage, TraceContext, bucket};
use crate::outbox::enqueue::{Enqueue, NewEmail};
use crate::store::headers::headers_json;
use crate::text::hex::hex;

/// Lengths are twice those of the columns, because values are hexadecimal digits. Each limit that
/// holds counts one row of `oncebox_limits`, so a missing row refuses every message.
const INSERT: &str = "\
insert into oncebox_outbox \
  (bucket, message_id, topic, `key`, kind, headers, payload, content_type, traceparent, tracestate, created_at) \
select m.bucket, unhex(m.id), unhex(m.topic), unhex(m.k), unhex(m.kind), convert(unhex(m.headers) using utf8mb4), \
       from_base64(m.payload), convert(unhex(m.content_type) using ascii), convert(unhex(m.traceparent) using ascii), \
       convert(unhex(m.tracestate) using ascii), utc_timestamp(6) \
  from json_table(?, '$[*]' columns ( \
         o for ordinality, \
         bucket int path '$.b', \
         id varchar(32) path '$.i', \
         topic varchar(498) path '$.t', \
         k longtext path '$.k', \
         kind varchar(510) path '$.n', \
         headers longtext path '$.h', \
         payload longtext path '$.p', \
         content_type varchar(510) path '$.c', \
         traceparent varchar(110) path '$.tp', \
         tracestate varchar(1024) path '$.ts')) m \
 where 9 = (select count(*) from oncebox_limits l \
             where (l.name = 'topic_length_max' and l.value >= ?) \
                or (l.name = 'key_bytes_max' and l.value >= ?) \
                or (l.name = 'kind_bytes_max' and l.value >= ?) \
                or (l.name = 'headers_max' and l.value >= ?) \
                or (l.name = 'header_name_bytes_max' and l.value >= ?) \
                or (l.name = 'headers_bytes_max' and l.value >= ?) \
                or (l.name = 'content_type_bytes_max' and l.value >= ?) \
                or (l.name = 'message_bytes_max' and l.value >= ?) \
                or (l.name = 'id_skew_seconds' \
                    and (cast(? as signed) is null or cast(l.value as signed) * 1000 >= greatest( \
                      timestampdiff(microsecond, '1970-01-01 00:00:00', utc_timestamp(6)) div 1000 - cast(? as signed), \
                      cast(? as signed) - timestampdiff(microsecond, '1970-01-01 00:00:00', utc_timestamp(6)) div 1000)))) \
 order by m.o";

const LIMITS: &str = "\
select cast(l.name as char) as name, cast(l.value as signed) as value, cast(@@max_allowed_packet as signed) as packet, \
       timestampdiff(microsecond, '1970-01-01 00:00:00', utc_timestamp(6)) div 1000 as millis \
  from oncebox_limits l";

/// A call up to this size fits the packet of a server at its defaults, so the packet limit is not
/// read first.
const PACKET_UNASKED_MAX: i64 = 1_000_000;

/// The most bytes of the columns of an e-mail.
const UNIQUE_KEY_BYTES_MAX: usize = 255;
const TEXT_BYTES_MAX: usize = 65_535;

/// How often the statement runs before the call fails: again each time with ids that were made from
/// the database's time.
const TRIES_MAX: usize = 3;

impl Enqueue for MySqlConnection {
    async fn write(&mut self, mut messages: Vec<NewMessage>) -> Result<Vec<Uuid>, StoreError> {
        let mut largest = Largest::default();
        for message in &mut messages {
            CEILINGS.check(message)?;
            // A trace context that was put together by hand may be malformed. Headers were checked
            // above.
            if let Some(trace) = &message.trace {
                message.trace =
                    Some(TraceContext::parse(&trace.traceparent, trace.tracestate.as_deref()).ok_or_else(|| {
                        LimitError::new("trace", format!("`{}` is not of the W3C form", trace.traceparent))
                    })?);
            }
            largest.measure(message);
        }
        // Ids are made with the clock of this host; the statement refuses them where that clock is
        // wrong.
        let mut made: Vec<Uuid> = messages.iter().map(|message| message.id.unwrap_or_else(Uuid::now_v7)).collect();
        // A message above the default limit of its size may not even fit into a packet, and the
        // server closes the connection on one that is too large. So the limits are checked first.
        if largest.message > 900_000 || largest.all > PACKET_UNASKED_MAX {
            explain(self, &mut messages, largest.all).await?;
        }
        for _ in 0..TRIES_MAX {
            let times = made.iter().filter_map(|id| MessageId::from(*id).unix_millis());
            let times: Vec<i64> = times.filter_map(|millis| i64::try_from(millis).ok()).collect();
            let (first, last) = (times.iter().min().copied(), times.iter().max().copied());
            let written = sqlx::query(INSERT)
                .bind(list(&messages, &made))
                .bind(largest.topic)
                .bind(largest.key)
                .bind(largest.kind)
                .bind(largest.headers)
                .bind(largest.header_name)
                .bind(largest.header_bytes)
                .bind(largest.content_type)
                .bind(largest.message)
                .bind(first)
                .bind(first)
                .bind(last)
                .execute(&mut *self)
                .await?
                .rows_affected();
            match usize::try_from(written) {
                Ok(written) if written == messages.len() => return Ok(made),
                Ok(0) => {}
                _ => {
                    let wanted = messages.len();
                    return Err(StoreError::Corrupt(format!("the outbox took {written} of {wanted} messages")));
                }
            }
            let now = explain(self, &mut messages, largest.all).await?;
            // No limit is broken, so the clock of this host is wrong: the ids made here get the
            // database's time.
            for (id, message) in made.iter_mut().zip(&messages) {
                if message.id.is_none() {
                    let random = Uuid::now_v7().into_bytes();
                    let mut tail = [0; 10];
                    tail.copy_from_slice(&random[6..]);
                    *id = uuid::Builder::from_unix_timestamp_millis(now, &tail).into_uuid();
                }
            }
        }
        Err(StoreError::Corrupt("the outbox refuses messages that break no limit".to_owned()))
    }

    async fn queue_email(&mut self, email: &NewEmail) -> Result<bool, StoreError> {
        // The connection may be the application's, with any SQL mode, so lengths are checked here:
        // without strict mode the server would shorten what is too long.
        for (what, value, max) in [
            ("unique key", &email.unique_key, UNIQUE_KEY_BYTES_MAX),
            ("recipient", &email.recipient, TEXT_BYTES_MAX),
            ("subject", &email.subject, TEXT_BYTES_MAX),
        ] {
            if value.len() > max {
                let has = value.len();
                return Err(StoreError::Refused(format!(
                    "the {what} of an e-mail has {has} bytes, at most {max} are allowed"
                )));
            }
        }
        // The unique key decides. Where it is there, the error 1062 undoes only this statement.
        let outcome = sqlx::query(
            "insert into oncebox_email (unique_key, recipient, subject, body, state, due_at, lease, attempts, created_at) \
             values (?, ?, ?, ?, 'pending', utc_timestamp(6), null, 0, utc_timestamp(6))",
        )
        .bind(email.unique_key.as_bytes())
        .bind(&email.recipient)
        .bind(&email.subject)
        .bind(&email.body)
        .execute(self)
        .await;
        Ok(inserted(outcome)?)
    }
}

/// Finds out by name which limit a message breaks. Returns the database's time in milliseconds
/// where no limit is broken. `bytes` is the size of the call.
async fn explain(connection: &mut MySqlConnection, messages: &mut [NewMessage], bytes: i64) -> Result<u64, StoreError> {
    let mut limits = Limits::default();
    let (mut skew, mut now, mut packet, mut found) = (0_u64, 0_u64, i64::MAX, 0);
    for row in sqlx::query(LIMITS).fetch_all(connection).await? {
        let (name, value): (String, i64) = (row.try_get("name")?, row.try_get("value")?);
        now = u64::try_from(row.try_get::<i64, _>("millis")?).unwrap_or(0);
        packet = row.try_get("packet")?;
        let value = u64::try_from(value).unwrap_or(0);
        if name == "id_skew_seconds" {
            skew = value;
            found += 1;
        } else if limits.set(&name, usize::try_from(value).unwrap_or(usize::MAX)) {
            found += 1;
        }
    }
    if found != Limits::COUNT + 1 {
        return Err(StoreError::Refused(
            "a row of oncebox_limits is missing; `oncebox migrate print` shows all".to_owned(),
        ));
    }
    for message in messages.iter_mut() {
        limits.check(message)?;
        let given = message.id.and_then(|id| MessageId::from(id).unix_millis());
        if let Some(given) = given
            && given.abs_diff(now) > skew * 1_000
        {
            let detail = format!("the time in the given id is more than {skew} s from the clock of the database");
            return Err(LimitError::new("id_skew_seconds", detail).into());
        }
    }
    if bytes > packet {
        return Err(StoreError::Refused(format!(
            "{} messages in one call need a packet of {bytes} bytes, and max_allowed_packet of the server is {packet}; \
             enqueue fewer in one call, or raise it",
            messages.len()
        )));
    }
    Ok(now)
}

/// Bounds that no value in the database can raise. Other limits are checked by the statement.
const CEILINGS: Limits = Limits {
    topic_length_max: 249,
    key_bytes_max: 65_535,
    kind_bytes_max: 255,
    headers_max: usize::MAX,
    header_name_bytes_max: 255,
    headers_bytes_max: 65_536,
    content_type_bytes_max: 255,
    message_bytes_max: usize::MAX,
};

/// The largest value of each measure over all messages of a call; the statement compares them with
/// the limits.
#[derive(Debug, Default)]
struct Largest {
    topic: i64,
    key: i64,
    kind: i64,
    headers: i64,
    header_name: i64,
    header_bytes: i64,
    content_type: i64,
    message: i64,
    /// About how many bytes all messages have as they are sent: rather more than less.
    all: i64,
}

impl Largest {
    fn measure(&mut self, message: &NewMessage) {
        let raise = |largest: &mut i64, measure: usize| {
            *largest = (*largest).max(i64::try_from(measure).unwrap_or(i64::MAX));
        };
        let header_bytes: usize = message.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        let key = message.key.as_ref().map_or(0, String::len);
        raise(&mut self.topic, message.topic.len());
        raise(&mut self.key, key);
        raise(&mut self.kind, message.kind.len());
        raise(&mut self.headers, message.headers.len());
        raise(&mut self.header_name, message.headers.iter().map(|(name, _)| name.len()).max().unwrap_or(0));
        raise(&mut self.header_bytes, header_bytes);
        raise(&mut self.content_type, content_type(message).len());
        raise(&mut self.message, key + header_bytes + message.payload.len());
        let names =
            message.topic.len() + key + message.kind.len() + header_bytes * 2 + content_type(message).len() + 600;
        let weight = i64::try_from(names * 2 + message.payload.len() / 3 * 4 + 200).unwrap_or(i64::MAX);
        self.all = self.all.saturating_add(weight);
    }
}

fn content_type(message: &NewMessage) -> &str {
    message.content_type.as_deref().unwrap_or("application/octet-stream")
}

fn list(messages: &[NewMessage], ids: &[Uuid]) -> String {
    let bytes: usize = messages.iter().map(|message| message.payload.len() * 3 / 2 + 400).sum();
    let mut list = String::with_capacity(bytes);
    for (message, id) in messages.iter().zip(ids) {
        list.push(if list.is_empty() { '[' } else { ',' });
        let bucket = bucket(message.key.as_deref(), *id);
        let _ = write!(list, r#"{{"b":{bucket},"i":"{}""#, hex(id.as_bytes()));
        let mut member = |name: &str, value: &str| {
            let _ = write!(list, r#","{name}":"{}""#, hex(value.as_bytes()));
        };
        member("t", &message.topic);
        member("n", &message.kind);
        member("c", content_type(message));
        // A member that is left out is read as null.
        if let Some(key) = &message.key {
            member("k", key);
        }
        if let Some(headers) = headers_json(&message.headers) {
            member("h", &headers);
        }
        if let Some(trace) = &message.trace {
            member("tp", &trace.traceparent);
            if let Some(state) = &trace.tracestate {
                member("ts", state);
            }
        }
        list.push_str(r#","p":""#);
        STANDARD.encode_string(&message.payload, &mut list);
        list.push_str("\"}");
    }
    list.push(']');
    list
}
