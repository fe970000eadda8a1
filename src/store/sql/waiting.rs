//! Messages of a consumer that wait for a retry, or behind one, on every database (R25).
//!
//! Guarantees:
//!
//! * A lease begins at the head of a key, under the lock of its row, so a head has one lease at a
//!   time. It may cover the rows behind the head that were never tried. A head that another
//!   transaction has locked is skipped, not waited for.
//! * A row behind a head has a due time only while it is leased, so a poll does not read it. The
//!   transaction that removes a head makes the next row due, after its proof, and a sweep finds
//!   heads that a race left without a due time.
//! * Behind a head at most 8 MiB of payload are leased. So a retrier needs no more memory where
//!   messages are large or many (G11: what a program holds in memory is bounded).
//! * On PostgreSQL a statement that takes a list of rows is planned for each run: the table is
//!   small until something fails, and then large at once, and a kept plan would read all of it.
//! * Rows are updated by their exact numbers: an update that searches would wait for every open
//!   writer (R11).
//! * A message is made dead at its place before its handler runs, and removed after the proof. So a
//!   handler that commits by itself leaves it dead, and loses nothing.
//!
//! Not here: when a retry is due (`time::retry`), acts of operators.

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::inbox::OwnInbox;
use super::message::{error_text, message_columns, message_of};
use super::pieces::exact_rows;
use super::{Row, Session, Statement, Value, refused, sql};
use crate::error::StoreError;
use crate::inbox::port::ConsumerId;
use crate::inbox::port::waiting::{LEASE_END_MAX, LeasedMessage, RowLease, Scope, Waiting};
use crate::message::Message;

/// Rows that one sweep changes at most.
const SWEEP_MAX: i64 = 1_000;

/// A condition on a row: it waits, or it is dead and holds, so later rows of its key stand behind
/// it. On MySQL all other rows have no lane id, so the condition is empty.
macro_rules! and_orders {
    ($row:literal) => {
        concat!(" {pg: and (", $row, ".state = 'waiting' or ", $row, ".holds)}{lite: and ", $row, ".blocks = 1}")
    };
}

/// A condition on a row `w`: its topic or place is in the scope. MySQL keeps names as bytes, so
/// they are compared as hexadecimal digits.
macro_rules! in_scope {
    () => {
        "({pg lite: w.topic {in texts :topics} or w.place {in texts :places}}\
         {my: json_contains(:topics, json_quote(lower(hex(w.topic)))) or json_contains(:places, json_quote(lower(hex(w.place))))})"
    };
}

/// A condition on a row `w`: its kind is in the scope.
macro_rules! of_kinds {
    () => {
        "{pg lite: w.kind {in texts :kinds}}{my: json_contains(:kinds, json_quote(lower(hex(w.kind))))}"
    };
}

/// From `from` on: the first head `w` of a consumer that has a due time and is in the scope. Only a
/// row that waits has a due time. That condition stands here for MySQL alone: with it PostgreSQL
/// chooses a plan that reads all waiting rows.
macro_rules! heads {
    ($due:literal) => {
        concat!(
            " from oncebox.waiting w {my: force index (waiting_due)} where w.consumer_id = :consumer \
             {my: and w.state = 'waiting'} and ",
            $due,
            " and ",
            in_scope!(),
            " {if of_kinds: and ",
            of_kinds!(),
            "} and (w.lane_id is null or {pg: w.sequence = (select o.sequence from oncebox.waiting o \
               where o.consumer_id = w.consumer_id and o.lane_id between w.lane_id and w.lane_id",
            and_orders!("o"),
            " order by o.lane_id, o.sequence limit 1)}{my lite: not exists (select 1 from oncebox.waiting o \
               where o.consumer_id = w.consumer_id and o.lane_id = w.lane_id and o.sequence < w.sequence",
            and_orders!("o"),
            ")}) order by w.due_at{my lite: , w.sequence} limit 1"
        )
    };
}

/// An update of the rows `:rows`, by their numbers.
macro_rules! update_rows {
    ($set:literal, $only:literal) => {
        concat!(
            "{pg: /* planned anew */ }update ",
            exact_rows!("waiting", "w", "sequence"),
            " set ",
            $set,
            " where {pg lite: w.sequence {in ints :rows} and }",
            $only
        )
    };
}

/// The head that is due first; with `locks`, of those that no other transaction has locked. Only
/// heads are locked: if any row could be, two messages of a key could be leased at once.
pub(in crate::store) const DUE_HEAD: &str = concat!(
    "select w.sequence, w.lease, ",
    message_columns!(),
    heads!("w.due_at <= {now}"),
    " {if locks: {lock free}}"
);

/// In how many microseconds the first head is due.
pub(in crate::store) const NEXT_DUE: &str =
    concat!("select {micros w.due_at} - {micros {now}}", heads!("w.due_at is not null"));

pub(in crate::store) const LEASE: &str =
    update_rows!("lease = :lease, due_at = {now} + {span :length}", "w.state = 'waiting'");

/// These columns of the rows that stand behind a head.
macro_rules! behind {
    ($($columns:tt)*) => {
        concat!(
            "select ",
            $($columns)*,
            " from oncebox.waiting w {my: force index (waiting_lane)} \
              where w.consumer_id = :consumer and w.lane_id = :lane and w.sequence > :head",
            and_orders!("w"),
            " order by w.sequence limit :most"
        )
    };
}

/// The rows behind a head, and for each whether it may be leased with the head: it waits, was
/// never tried or leased, and its kind is in the scope.
pub(in crate::store) const BEHIND: &str = behind!(
    "w.sequence, w.state = 'waiting' and w.attempts = 0 and w.lease is null and w.due_at is null {if of_kinds: and ",
    of_kinds!(),
    "}, ",
    message_columns!()
);

/// The sizes of the payloads behind a head, in bytes.
pub(in crate::store) const BEHIND_BYTES: &str = behind!("{pg my: octet_length(w.payload)}{lite: length(w.payload)}");

/// Rows are leased behind a head up to this many bytes of payload. Each retrier may hold as many.
const BEHIND_BYTES_MAX: u64 = 8 << 20;

const LEASE_BEHIND: &str = update_rows!(
    "lease = :lease, due_at = {now} + {span :length}",
    "w.state = 'waiting' and w.attempts = 0 and w.lease is null and w.due_at is null"
);

const COUNT: &str = "update oncebox.waiting set attempts = :attempts where sequence = :sequence and lease = :lease";

const RENEW: &str =
    "update oncebox.waiting set due_at = {now} + {span :length} where sequence = :sequence and lease = :lease";

const POSTPONE: &str = "update oncebox.waiting set lease = null, due_at = {now} + {span :after}, attempts = :attempts, \
    {pg my: error = :error,} history = {history history :attempts} where sequence = :sequence and lease = :lease";

/// Ends a lease. Rows with a key lose their due time here; `wake` then gives it back to the head.
const GIVE_BACK: &str = update_rows!(
    "lease = null, due_at = case when lane_id is null then {now} end {if tries: , attempts = :tries}",
    "w.lease = :lease"
);

const LEASED: &str = "select w.sequence, w.lane_id from oncebox.waiting w {my: force index (waiting_due)} \
    where w.consumer_id = :consumer and w.due_at is not null and w.lease = :lease";

/// The consumer of a row that we have leased.
const OURS: &str = "select consumer_id from oncebox.waiting where sequence = :sequence and lease = :lease {lock}";

/// Makes leased rows dead, at their places. A row whose dead copy is there already is left out: the
/// unique index allows only one. The copy is looked up for each row by that index. MySQL allows no
/// subquery on a table that it changes, so it joins.
pub(in crate::store) const BURY: &str = concat!(
    "{pg: /* planned anew */ }update ",
    exact_rows!("waiting", "w", "sequence"),
    " {my: left join oncebox.waiting d force index (waiting_dead_once) \
        on d.consumer_id = w.consumer_id and d.message_id = w.message_id and d.dead_hash = w.content_hash} \
     set {my: w.}state = 'dead', {my: w.}lease = null, {my: w.}due_at = null, {my: w.}reason = :reason, \
         {my: w.}dead_at = {clock}, {my: w.}attempts = :attempts, {my: w.}history = {history w.history :attempts}, \
         {pg: holds = :holds and w.lane_id is not null, error = :error}\
         {lite: blocks = (:holds and w.lane_id is not null)}\
         {my: w.dead_hash = w.content_hash, w.lane_id = case when :holds then w.lane_id end, w.error = :error} \
     where {pg lite: w.sequence {in ints :rows} and }w.lease = :lease and w.consumer_id = :consumer and \
       {my: d.sequence}{pg lite: (select d.sequence from oncebox.waiting d \
          where d.consumer_id = w.consumer_id and d.message_id = w.message_id and d.content_hash = w.content_hash \
            and d.state = 'dead' limit 1)} is null"
);

const REMOVE_LEASED: &str = "{pg: /* planned anew */ }delete {my: w} from \
    {each waiting w ints sequence :rows primary} and w.consumer_id = :consumer and w.lease = :lease";

pub(in crate::store) const REMOVE_BURIED: &str = "{pg: /* planned anew */ }delete {my: w} from \
    {each waiting w ints sequence :rows primary} and w.consumer_id = :consumer and w.state = 'dead'";

/// The first row of each of these keys, if it waits without a due time.
pub(in crate::store) const TO_WAKE: &str = concat!(
    "{pg: /* planned anew */ }select w.sequence from (select (select o.sequence from oncebox.waiting o {my: force index (waiting_lane)} \
        where o.consumer_id = :consumer and o.lane_id = {pg: l.lane_id}{my: unhex(l.lane_id)}{lite: unhex(l.value)}",
    and_orders!("o"),
    " order by o.sequence limit 1) as sequence \
       from {pg: unnest(:lanes) l (lane_id)}{my: json_table(:lanes, '$[*]' columns (lane_id varchar(32) path '$')) l}\
            {lite: json_each(:lanes) l}) h \
     {my: straight_join}{pg lite: join} oncebox.waiting w {my: force index (primary)} on w.sequence = h.sequence \
     where w.state = 'waiting' and w.due_at is null"
);

pub(in crate::store) const MAKE_DUE: &str = update_rows!("due_at = {now}", "w.state = 'waiting' and w.due_at is null");

/// Leases that end later than any lease can, because the clock went back (R22).
pub(in crate::store) const LEASED_TOO_LONG: &str = "select sequence from oncebox.waiting {my: force index (waiting_due)} \
    where consumer_id = :consumer and due_at > {now} + {span :lease_max} and lease is not null limit :most";

const END_LEASES: &str = update_rows!("due_at = {now}", "w.lease is not null and w.due_at > {now} + {span :lease_max}");

/// Heads without a due time, found by a loose scan of the index over the keys: as many steps as
/// there are keys, not rows.
pub(in crate::store) const LOST_HEADS: &str = concat!(
    "{pg: /* planned anew */ }{pg lite: with recursive lanes(lane_id) as (\
       select (select w.lane_id from oncebox.waiting w where w.consumer_id = :consumer and w.lane_id is not null",
    and_orders!("w"),
    "   order by w.lane_id limit 1) \
       union all \
       select (select w.lane_id from oncebox.waiting w where w.consumer_id = :consumer and w.lane_id > lanes.lane_id",
    and_orders!("w"),
    "   order by w.lane_id limit 1) from lanes where lanes.lane_id is not null), \
     heads(sequence) as (\
       select (select w.sequence from oncebox.waiting w where w.consumer_id = :consumer and w.lane_id = lanes.lane_id",
    and_orders!("w"),
    "   order by w.sequence limit 1) from lanes where lanes.lane_id is not null) \
     select w.sequence from heads h join oncebox.waiting w on w.sequence = h.sequence}\
     {my: select w.sequence from (select min(sequence) as sequence from oncebox.waiting force index (waiting_lane) \
          where consumer_id = :consumer group by consumer_id, lane_id) h \
        straight_join oncebox.waiting w force index (primary) on w.sequence = h.sequence} \
     where w.lane_id is not null and w.state = 'waiting' and w.due_at is null limit :most"
);

#[async_trait]
impl<S: OwnInbox> Waiting for S {
    async fn lease_due(
        &self,
        consumer: ConsumerId,
        scope: &Scope,
        lease: &RowLease,
    ) -> Result<Option<LeasedMessage>, StoreError> {
        // Most polls find nothing, and a plain read is enough for them.
        if self.reader().await?.rows(in_scope(DUE_HEAD, consumer, scope)).await?.is_empty() {
            return Ok(None);
        }
        let mut transaction = self.begin_sql().await?;
        let due = in_scope(DUE_HEAD, consumer, scope).bind("locks", true);
        let Some(row) = transaction.session().first(due).await? else {
            transaction.rollback().await?;
            return Ok(None);
        };
        let head = leased_of(&*row, lease, row.get_opt::<Uuid>(1)?.is_some())?;
        let leased = sql(LEASE).bind("rows", vec![head.sequence]).bind("lease", lease.token);
        transaction.session().run(leased.bind("length", lease.length)).await?;
        transaction.commit().await?;
        Ok(Some(head))
    }

    async fn lease_behind(
        &self,
        consumer: ConsumerId,
        head: &LeasedMessage,
        scope: &Scope,
        limit: usize,
        lease: &RowLease,
    ) -> Result<Vec<LeasedMessage>, StoreError> {
        let Some(lane) = head.message.lane_id().filter(|_| limit > 0) else { return Ok(Vec::new()) };
        let of_lane = |statement: Statement, most: usize| {
            statement.bind("lane", Uuid::from_bytes(lane)).bind("head", head.sequence).bind("most", most)
        };
        let mut reader = self.reader().await?;
        let sizes = of_lane(sql(BEHIND_BYTES).bind("consumer", consumer), limit);
        let sizes: Vec<u64> = reader.column(sizes).await?;
        let fits = |bytes: &mut u64, size: u64| {
            *bytes += size;
            (*bytes <= BEHIND_BYTES_MAX).then_some(())
        };
        let most = sizes.into_iter().scan(0, fits).count();
        if most == 0 {
            return Ok(Vec::new());
        }
        let mut run = Vec::new();
        for row in reader.rows(of_lane(in_scope(BEHIND, consumer, scope), most)).await? {
            if row.get_bool(1)? != Some(true) {
                break;
            }
            run.push(leased_of(&*row, lease, false)?);
        }
        // The pool may have only one connection.
        drop(reader);
        if run.is_empty() {
            return Ok(run);
        }
        let leased = sql(LEASE_BEHIND).bind("rows", numbers(&run)).bind("lease", lease.token);
        if self.run_alone(leased.bind("length", lease.length)).await? != run.len() as u64 {
            // Another process leased or changed one of the rows. Without it the others are no
            // longer the next messages in order, so all are given back.
            self.give_back(consumer, &run).await?;
            run.clear();
        }
        Ok(run)
    }

    async fn count_try(&self, leased: &LeasedMessage) -> Result<bool, StoreError> {
        Ok(self.run_alone(tried(COUNT, leased)).await? == 1)
    }

    async fn renew(&self, leased: &LeasedMessage, length: Duration) -> Result<bool, StoreError> {
        let renewed = sql(RENEW).bind("sequence", leased.sequence).bind("lease", leased.lease);
        Ok(self.run_alone(renewed.bind("length", length)).await? == 1)
    }

    async fn next_due(&self, consumer: ConsumerId, scope: &Scope) -> Result<Option<Duration>, StoreError> {
        let Some(row) = self.reader().await?.first(in_scope(NEXT_DUE, consumer, scope)).await? else {
            return Ok(None);
        };
        Ok(Some(Duration::from_micros(u64::try_from(row.get::<i64>(0)?).unwrap_or(0))))
    }

    async fn postpone(&self, leased: &LeasedMessage, after: Duration, error: &str) -> Result<bool, StoreError> {
        let postponed = tried(POSTPONE, leased).bind("after", after).bind("error", error_text(error));
        Ok(self.run_alone(postponed).await? == 1)
    }

    async fn give_back(&self, consumer: ConsumerId, leased: &[LeasedMessage]) -> Result<u64, StoreError> {
        let Some(first) = leased.first() else { return Ok(0) };
        let mut transaction = self.begin_sql().await?;
        let mut given_back = 0;
        // Messages of one lease have the same number of tries, except for a head that was tried
        // before.
        for group in leased.chunk_by(|one, next| one.tries == next.tries) {
            let tries = group.first().map_or(0, |one| one.tries);
            let back = sql(GIVE_BACK).bind("rows", numbers(group)).bind("lease", first.lease);
            given_back += transaction.session().run(back.bind("tries", tries)).await?;
        }
        wake(transaction.session(), consumer, first.message.lane_id().as_slice()).await?;
        transaction.commit().await?;
        Ok(given_back)
    }

    async fn give_back_all(&self, consumer: ConsumerId, lease: &RowLease) -> Result<u64, StoreError> {
        let leased = sql(LEASED).bind("consumer", consumer).bind("lease", lease.token);
        let (mut rows, mut lanes) = (Vec::new(), Vec::new());
        for row in self.reader().await?.rows(leased).await? {
            rows.push(row.get::<i64>(0)?);
            lanes.extend(row.get_opt::<Uuid>(1)?.map(Uuid::into_bytes));
        }
        if rows.is_empty() {
            return Ok(0);
        }
        lanes.dedup();
        let mut transaction = self.begin_sql().await?;
        let back = sql(GIVE_BACK).bind("rows", rows).bind("lease", lease.token);
        let given_back = transaction.session().run(back).await?;
        wake(transaction.session(), consumer, &lanes).await?;
        transaction.commit().await?;
        Ok(given_back)
    }

    async fn bury(&self, leased: &LeasedMessage, reason: &str, error: &str, holds: bool) -> Result<bool, StoreError> {
        let mut transaction = self.begin_sql().await?;
        let session = transaction.session();
        let Some(row) = session.first(tried(OURS, leased)).await? else {
            transaction.rollback().await?;
            return Ok(false);
        };
        let (consumer, run) = (ConsumerId(row.get(0)?), std::slice::from_ref(leased));
        if bury(session, consumer, run, reason, error, holds).await?.is_none() {
            transaction.rollback().await?;
            return Ok(false);
        }
        wake(session, consumer, leased.message.lane_id().as_slice()).await?;
        transaction.commit().await?;
        Ok(true)
    }

    async fn wake(&self, consumer: ConsumerId, lanes: &[[u8; 16]]) -> Result<(), StoreError> {
        let heads: Vec<i64> = self.reader().await?.column(to_wake(consumer, lanes)).await?;
        if !heads.is_empty() {
            self.run_alone(sql(MAKE_DUE).bind("rows", heads)).await?;
        }
        Ok(())
    }

    async fn sweep(&self, consumer: ConsumerId) -> Result<u64, StoreError> {
        self.make_room().await?;
        let of = |text| sql(text).bind("consumer", consumer).bind("most", SWEEP_MAX).bind("lease_max", LEASE_END_MAX);
        let mut changed = 0;
        for (found, change) in [(LEASED_TOO_LONG, END_LEASES), (LOST_HEADS, MAKE_DUE)] {
            let rows: Vec<i64> = self.reader().await?.column(of(found)).await?;
            if !rows.is_empty() {
                changed += self.run_alone(of(change).bind("rows", rows)).await?;
            }
        }
        Ok(changed)
    }
}

fn in_scope(text: &'static str, consumer: ConsumerId, scope: &Scope) -> Statement {
    sql(text)
        .bind("consumer", consumer)
        .bind("topics", Value::Foreigns(scope.topics.clone()))
        .bind("places", Value::Foreigns(scope.places.clone()))
        .bind("of_kinds", scope.kinds.is_some())
        .bind("kinds", Value::Foreigns(scope.kinds.clone().unwrap_or_default()))
}

/// A statement about one leased row, with its lease and the number of this try bound.
fn tried(text: &'static str, leased: &LeasedMessage) -> Statement {
    let attempts = leased.message.attempt;
    sql(text).bind("sequence", leased.sequence).bind("lease", leased.lease).bind("attempts", attempts)
}

fn to_wake(consumer: ConsumerId, lanes: &[[u8; 16]]) -> Statement {
    let lanes: Vec<Uuid> = lanes.iter().copied().map(Uuid::from_bytes).collect();
    sql(TO_WAKE).bind("consumer", consumer).bind("lanes", lanes)
}

/// Makes the first row of each of these keys due, if it waits without a due time. It runs in a
/// transaction that may have removed the row before it.
pub(in crate::store) async fn wake(
    session: &mut dyn Session,
    consumer: ConsumerId,
    lanes: &[[u8; 16]],
) -> Result<(), StoreError> {
    if lanes.is_empty() {
        return Ok(());
    }
    let heads: Vec<i64> = session.column(to_wake(consumer, lanes)).await?;
    if !heads.is_empty() {
        session.run(sql(MAKE_DUE).bind("rows", heads)).await?;
    }
    Ok(())
}

/// The rows of messages whose handlers run: what [`bury`] made dead and [`finish`] removes.
#[derive(Debug, Default)]
pub(in crate::store) struct Buried {
    pub(in crate::store) rows: Vec<i64>,
    /// How many of them are dead. The others had a dead copy, and are removed already.
    dead: u64,
}

/// Makes leased messages of one key dead, after as many tries as the `attempt` of each says. None
/// where the lease is not ours any more: then roll back.
pub(in crate::store) async fn bury(
    session: &mut dyn Session,
    consumer: ConsumerId,
    leased: &[LeasedMessage],
    reason: &str,
    error: &str,
    holds: bool,
) -> Result<Option<Buried>, StoreError> {
    let Some(first) = leased.first() else { return Ok(None) };
    let bury = sql(BURY).bind("lease", first.lease).bind("consumer", consumer);
    let bury = bury.bind("reason", reason).bind("holds", holds).bind("error", error_text(error));
    let (all, mut dead) = (leased.len() as u64, bury_all(session, &bury, leased).await?);
    if dead < all {
        // A row that is left has a dead copy. If that copy was only refused (as too old, for one),
        // it is deleted, and the row takes its place.
        let messages: Vec<&Message> = leased.iter().map(|one| &one.message).collect();
        if refused::make_room(session, consumer, &messages).await? > 0 {
            dead += bury_all(session, &bury, leased).await?;
        }
    }
    // What is still leased has a dead copy: one row is enough.
    let copies = all - dead;
    let remove = sql(REMOVE_LEASED).bind("rows", numbers(leased)).bind("lease", first.lease).bind("consumer", consumer);
    if copies > 0 && session.run(remove).await? != copies {
        return Ok(None);
    }
    Ok(Some(Buried { rows: numbers(leased), dead }))
}

/// Makes dead those of the messages that are still leased; one statement for each number of tries.
async fn bury_all(session: &mut dyn Session, bury: &Statement, leased: &[LeasedMessage]) -> Result<u64, StoreError> {
    let mut dead = 0;
    for group in leased.chunk_by(|one, next| one.message.attempt == next.message.attempt) {
        let attempts = group.first().map_or(0, |one| one.message.attempt);
        dead += session.run(bury.clone().bind("rows", numbers(group)).bind("attempts", attempts)).await?;
    }
    Ok(dead)
}

/// Removes what [`bury`] made dead in the same transaction. False where not all of it is there.
pub(in crate::store) async fn finish(
    session: &mut dyn Session,
    consumer: ConsumerId,
    buried: &Buried,
) -> Result<bool, StoreError> {
    if buried.dead == 0 {
        return Ok(true);
    }
    let removed = sql(REMOVE_BURIED).bind("rows", buried.rows.clone()).bind("consumer", consumer);
    Ok(session.run(removed).await? == buried.dead)
}

fn numbers(leased: &[LeasedMessage]) -> Vec<i64> {
    leased.iter().map(|one| one.sequence).collect()
}

/// Reads a leased message: its number in the first column, the message from the third on.
fn leased_of(row: &dyn Row, lease: &RowLease, suspect: bool) -> Result<LeasedMessage, StoreError> {
    let mut message = message_of(row, 2)?;
    let tries = message.attempt;
    message.attempt += 1;
    Ok(LeasedMessage { sequence: row.get(0)?, lease: lease.token, tries, suspect, message })
}
