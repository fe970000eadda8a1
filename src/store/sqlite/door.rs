//! `enqueue` in Rust on SQLite: one statement per call, whatever the number of messages.
//!
//! Several messages are sent as one blob with all their parts, and one JSON array with the place of
//! each part. So only SQLite's limit on the size of a value bounds a call (1,000,000,000 bytes for
//! all its messages). Positions ascend in the order given: `json_each` reads an array in order, and
//! AUTOINCREMENT counts up as rows arrive.
//!
//! The triggers apply the limits (R13): where one message of a call breaks a limit, nothing of the
//! call is written.

use sqlx::sqlite::SqliteConnection;
use uuid::Uuid;

use super::message::headers_to_json;
use super::now_ms;
use crate::error::StoreError;
use crate::message::NewMessage;
use crate::outbox::enqueue::{Enqueue, NewEmail};

const ONE: &str = "\
insert into oncebox_outbox (message_id, topic, key, kind, headers, payload, content_type) values (?, ?, ?, ?, ?, ?, ?)";

/// `?1` is the blob of parts, `?2` their places: for each message seven pairs of start (from 1) and
/// length, null where a part is missing.
const MANY: &str = "\
insert into oncebox_outbox (message_id, topic, key, kind, headers, payload, content_type)
select cast(substr(?1, m.value ->> 0, m.value ->> 1) as text), cast(substr(?1, m.value ->> 2, m.value ->> 3) as text),
       cast(substr(?1, m.value ->> 4, m.value ->> 5) as text), cast(substr(?1, m.value ->> 6, m.value ->> 7) as text),
       cast(substr(?1, m.value ->> 8, m.value ->> 9) as text), substr(?1, m.value ->> 10, m.value ->> 11),
       cast(substr(?1, m.value ->> 12, m.value ->> 13) as text)
  from json_each(?2) as m";

const QUEUE_EMAIL: &str = concat!(
    "insert into oncebox_email (unique_key, recipient, subject, body, due_at, created_at) values (?, ?, ?, ?, ",
    now_ms!(),
    ", ",
    now_ms!(),
    ") on conflict (unique_key) do nothing"
);

/// A message in the form of the columns.
struct Row {
    id: Uuid,
    message: NewMessage,
    headers: String,
}

impl Row {
    fn new(mut message: NewMessage) -> Result<Self, StoreError> {
        message.settle_trace()?;
        let headers = headers_to_json(&message.headers, message.trace.as_ref());
        Ok(Self { id: message.id.unwrap_or_else(Uuid::now_v7), message, headers })
    }
}

/// All parts of all messages, concatenated, and their places.
#[derive(Default)]
struct Parts {
    bytes: Vec<u8>,
    places: Vec<[Option<usize>; 14]>,
}

impl Parts {
    fn push(&mut self, row: &Row) {
        let id = row.id.to_string();
        let message = &row.message;
        let parts: [Option<&[u8]>; 7] = [
            Some(id.as_bytes()),
            Some(message.topic.as_bytes()),
            message.key.as_deref().map(str::as_bytes),
            Some(message.kind.as_bytes()),
            Some(row.headers.as_bytes()),
            Some(&message.payload),
            message.content_type.as_deref().map(str::as_bytes),
        ];
        let mut places = [None; 14];
        for (part, place) in parts.into_iter().zip(places.chunks_exact_mut(2)) {
            if let Some(part) = part {
                place.copy_from_slice(&[Some(self.bytes.len() + 1), Some(part.len())]);
                self.bytes.extend_from_slice(part);
            }
        }
        self.places.push(places);
    }
}

impl Enqueue for SqliteConnection {
    async fn write(&mut self, messages: Vec<NewMessage>) -> Result<Vec<Uuid>, StoreError> {
        let rows = messages.into_iter().map(Row::new).collect::<Result<Vec<_>, _>>()?;
        let ids = rows.iter().map(|row| row.id).collect();
        match rows.len() {
            0 => {}
            1 => {
                for Row { id, message, headers } in rows {
                    let insert = sqlx::query(ONE).bind(id.to_string()).bind(message.topic).bind(message.key);
                    let insert = insert.bind(message.kind).bind(headers).bind(message.payload);
                    insert.bind(message.content_type).execute(&mut *self).await?;
                }
            }
            _ => {
                let mut parts = Parts::default();
                rows.iter().for_each(|row| parts.push(row));
                let places = serde_json::to_string(&parts.places)
                    .map_err(|error| StoreError::Corrupt(format!("places of messages: {error}")))?;
                sqlx::query(MANY).bind(parts.bytes).bind(places).execute(&mut *self).await?;
            }
        }
        Ok(ids)
    }

    async fn queue_email(&mut self, email: &NewEmail) -> Result<bool, StoreError> {
        let queue = sqlx::query(QUEUE_EMAIL).bind(&email.unique_key).bind(&email.recipient);
        Ok(queue.bind(&email.subject).bind(&email.body).execute(self).await?.rows_affected() == 1)
    }
}
