//! Dead messages that were refused, as too old or from the future. They have no inbox row, so
//! another copy of such a message may run later, fail, and become dead too (R31).
//!
//! Guarantee: the row of the refused copy then makes room for the row of the failure, because there
//! is one dead row for a message. If the refused row stayed, the failure would be shown nowhere and
//! would hold no key, and a redrive would take the message for handled and delete it.

use std::collections::HashSet;

use uuid::Uuid;

use super::{Session, sql};
use crate::error::StoreError;
use crate::inbox::port::ConsumerId;
use crate::inbox::rules::horizon::Verdict;
use crate::message::Message;

/// The dead rows of some message ids. Without the name of the index SQLite would read all dead rows
/// of the consumer.
pub(in crate::store) const DEAD: &str = "\
    {pg: /* planned anew */ }select d.sequence, d.message_id, d.content_hash, d.reason from \
    {pg my: {each waiting d ids message_id :ids waiting_message_id}}\
    {lite: oncebox.waiting as d indexed by oncebox_waiting_dead where d.message_id {in ids :ids}} \
    and d.consumer_id = :consumer and d.state = 'dead'";

const DELETE: &str = "{pg: /* planned anew */ }delete {my: d }from {each waiting d ints sequence :rows primary} \
    and d.consumer_id = :consumer and d.state = 'dead'";

/// Deletes the refused copies of messages that become dead and have their inbox rows. Returns how
/// many there were.
pub(super) async fn make_room(
    session: &mut dyn Session,
    consumer: ConsumerId,
    messages: &[&Message],
) -> Result<u64, StoreError> {
    if messages.is_empty() {
        return Ok(0);
    }
    let ids: Vec<Uuid> = messages.iter().map(|message| message.id.uuid()).collect();
    let contents = messages.iter().map(|message| (message.id.uuid(), Uuid::from_bytes(message.content_hash())));
    let contents: HashSet<(Uuid, Uuid)> = contents.collect();
    let mut refused: Vec<i64> = Vec::new();
    for row in session.rows(sql(DEAD).bind("consumer", consumer).bind("ids", ids)).await? {
        let (content, reason): ((Uuid, Uuid), String) = ((row.get(1)?, row.get(2)?), row.get(3)?);
        if Verdict::left_no_inbox_row(&reason) && contents.contains(&content) {
            refused.push(row.get(0)?);
        }
    }
    if refused.is_empty() {
        return Ok(0);
    }
    session.run(sql(DELETE).bind("consumer", consumer).bind("rows", refused)).await
}
