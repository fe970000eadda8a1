//! The words that become a text: short ones, by a table, and the two longer ones, `{piece NAME}`
//! and `{each ..}`. Pieces are texts that several statements share; `each` stands for the rows of a
//! table that a list names. The macro [`exact_rows`] is for such rows in an UPDATE.
//!
//! Guarantee: every piece can be written for every database. Not here: the words that decide what
//! is written, `{if ..}` and the databases (`sql`).

use super::Writing;
use crate::store::statements::Dialect;

/// The short words: what each becomes on PostgreSQL, MySQL and SQLite, where `~` is what stands
/// behind the word. The first entry that fits is meant.
///
/// `now` is the start of the statement: an index cannot be used to compare a time with the running
/// clock. SQLite needs no lock: a transaction that writes has that of the whole file.
const WORDS: [(&str, [&str; 3]); 14] = [
    ("now", ["statement_timestamp()", "utc_timestamp(6)", NOW_LITE]),
    ("clock", ["clock_timestamp()", "utc_timestamp(6)", NOW_LITE]),
    (
        "micros ~",
        [
            "(extract(epoch from ~) * 1000000)::bigint",
            "timestampdiff(microsecond, timestamp'1970-01-01 00:00:00', ~)",
            "(~) * 1000",
        ],
    ),
    (
        "age ~",
        [
            "(extract(epoch from clock_timestamp() - ~) * 1000000)::bigint",
            "timestampdiff(microsecond, ~, utc_timestamp(6))",
            "(cast(round(unixepoch('subsec') * 1000) as integer) - ~) * 1000",
        ],
    ),
    ("span ~", ["~ * interval '1 microsecond'", "interval ~ microsecond", "~"]),
    ("lease", ["lease_seconds", "lease_seconds", "lease_ms"]),
    (
        "lease of ~",
        [
            "~.lease_seconds * interval '1 second'",
            "interval round(~.lease_seconds * 1000000) microsecond",
            "~.lease_ms",
        ],
    ),
    ("lease ~", ["~ / 1e6", "~ / 1e6", "~"]),
    ("key", ["key", "`key`", "key"]),
    ("lock", ["for update", "for update", ""]),
    ("lock free", ["for update skip locked", "for update skip locked", ""]),
    ("or update ~", ["on conflict (~) do update set", "on duplicate key update", "on conflict (~) do update set"]),
    ("new ~", ["excluded.~", "values(~)", "excluded.~"]),
    ("greatest", ["greatest", "greatest", "max"]),
];

/// The clock of SQLite, in milliseconds.
const NOW_LITE: &str = "cast(round(unixepoch('subsec') * 1000) as integer)";

/// True where no run of the record that lost its lease has left evidence with one of these
/// verdicts. Such evidence means that something did happen. Newer evidence of an operator overrules
/// it.
macro_rules! none_late {
    ($verdicts:literal) => {
        concat!(
            "not exists (select 1 from oncebox.operation_evidence e \
              where e.operation_id = oncebox.idempotency_request.operation_id \
                and e.kind = 'run' and e.verdict in (",
            $verdicts,
            ") and not exists (select 1 from oncebox.operation_evidence w \
                     where w.operation_id = e.operation_id and w.evidence_id > e.evidence_id and w.kind = 'operator'))"
        )
    };
}

/// The table of an UPDATE of the rows `:rows`, by their numbers, under a short name. (`{each ..}`
/// cannot stand there: SET comes before the conditions.) MySQL and MariaDB would lock other rows
/// too, so there it joins the list, and the rows are read by the key, in the order of the list.
/// Elsewhere the statement itself adds the condition `in ints :rows`.
macro_rules! exact_rows {
    ($table:literal, $row:literal, $number:literal) => {
        concat!(
            "{my: json_table(:rows, '$[*]' columns (",
            $number,
            " bigint path '$')) j straight_join oncebox.",
            $table,
            " ",
            $row,
            " force index (primary) on ",
            $row,
            ".",
            $number,
            " = j.",
            $number,
            "}{pg lite: oncebox.",
            $table,
            " as ",
            $row,
            "}"
        )
    };
}
pub(super) use exact_rows;

/// What `{piece NAME}` becomes.
const PIECES: [(&str, &str); 8] = [
    ("look", LOOK),
    ("requests", REQUESTS),
    ("open", OPEN),
    ("conflict", CONFLICT),
    ("outlives", OUTLIVES),
    ("no late end", none_late!("'success', 'failure'")),
    ("no late success", none_late!("'success'")),
    ("lease is over", LEASE_IS_OVER),
];

/// The columns that [`look_of`](super::records::look_of) reads. A phased record has the lease of
/// its operation.
const LOOK: &str = "{micros n.at}, {micros p.purged_below}, r.tenant, r.operation, r.{key}, r.principal, r.fingerprint, \
    r.mode, r.state, r.epoch, {micros coalesce(r.lease_until, o.lease_until)}, \
    {pg: (coalesce(r.lease_seconds, o.lease_seconds) * 1000000)::bigint}\
    {my: cast(round(coalesce(r.lease_seconds, o.lease_seconds) * 1000000) as signed)}\
    {lite: coalesce(r.lease_ms, o.lease_ms) * 1000}, \
    r.generation, r.operation_id, r.attempts, o.parked is not null, {micros r.created_at}, {micros r.outcome_at}, \
    {micros r.expires_at}, r.answer_status, r.schema_version, r.body, {micros r.body_expires_at}, r.resource_kind, \
    r.resource_id, r.resource_location, r.error_code";

/// The records `r` without an outcome; a text that uses this piece also needs [`OPEN`]. PostgreSQL
/// reads them from the index by operation and time of the outcome, where they follow the records
/// with an outcome. It searches that index once for each operation. An index of their own would
/// cost every claim an entry that is useless milliseconds later.
///
/// The operations are found from the last to the first, so that each search lands at the end of an
/// operation's entries, where the open records are. The front holds entries of purged records until
/// the next vacuum.
const REQUESTS: &str = "{my lite: oncebox.idempotency_request as r}{pg: (with recursive operations (operation) as ( \
      (select r.operation from oncebox.idempotency_request r order by r.operation desc limit 1) \
      union all \
      select (select r.operation from oncebox.idempotency_request r where r.operation < o.operation \
              order by r.operation desc limit 1) \
        from operations o where o.operation is not null) \
    select r.* from operations o \
      join oncebox.idempotency_request r on r.operation = o.operation and r.outcome_at is null) r}";
/// A record without an outcome. MySQL tests the column with which its index begins.
const OPEN: &str = "{pg lite: r.outcome_at is null}{my: r.open_since is not null}";

/// True where the operation `o` has a conflict that no person has judged: evidence of an effect
/// contradicts the decision, or the operation failed with an effect that was not undone. Such an
/// operation is listed, and kept until it is judged. A mismatch was shown to an operator already,
/// so the operator's evidence about it is the judgement. After an operator accepted a duplicate, a
/// failure of that second send proves nothing about the first one. The rule for evidence alone is
/// [`Evidence::contradicts`](crate::operation::rules::provider::Evidence::contradicts).
const CONFLICT: &str = "(o.outcome_at is not null and (exists (select 1 from oncebox.operation_evidence e \
      join oncebox.operation_intent i on i.operation_id = e.operation_id and i.effect = e.effect \
      where e.operation_id = o.operation_id and e.kind <> 'operator' and (e.verdict = 'mismatch' or e.verdict = \
        case when coalesce(i.outcome, case o.state when 'SUCCEEDED' then 'succeeded' else 'failed' end) = 'succeeded' \
             then 'failure' else 'success' end) \
        and not exists (select 1 from oncebox.operation_evidence w \
             where w.operation_id = e.operation_id and w.evidence_id > e.evidence_id and w.kind = 'operator' \
               and w.effect in (e.effect, '') \
               and (w.verdict = 'indefinite' or (e.verdict = 'mismatch' and w.verdict <> 'waived'))) \
        and not (e.verdict = 'failure' and e.send > 0 and exists (select 1 from oncebox.operation_evidence v \
             where v.operation_id = e.operation_id and v.effect = e.effect and v.kind = 'operator' \
               and v.verdict = 'waived' and v.send > 0 \
               and not exists (select 1 from oncebox.operation_evidence n where n.operation_id = v.operation_id \
                    and n.effect = v.effect and n.send = v.send and n.verdict = 'not-sent')))) \
    or (o.state = 'FAILED' and exists (select 1 from oncebox.operation_intent i \
      where i.operation_id = o.operation_id and i.outcome = 'succeeded' and i.undoes is null and i.strategy <> 'repeatable' \
        and not exists (select 1 from oncebox.operation_intent u \
             where u.operation_id = i.operation_id and u.undoes = i.effect and u.outcome = 'succeeded') \
        and not exists (select 1 from oncebox.operation_evidence w \
             where w.operation_id = i.operation_id and w.kind = 'operator' and w.verdict = 'indefinite' \
               and w.effect in (i.effect, ''))))))";

/// True where operation and evidence must be kept although the record `r` is purged: the operation
/// has a conflict, or a run succeeded after it lost its lease while the record says that it failed.
const OUTLIVES: &str = "(exists (select 1 from oncebox.operation o where o.operation_id = r.operation_id and {piece conflict}) \
    or (r.state in ('FAILED_REPLAYABLE', 'FAILED_RETRYABLE') and exists (select 1 from oncebox.operation_evidence e \
        where e.operation_id = r.operation_id and e.kind = 'run' and e.verdict = 'success')))";

/// A lease that is over, or that was written before the clock went back (R22).
const LEASE_IS_OVER: &str = "(lease_until <= {clock} or lease_until > {clock} + \
    {pg: lease_seconds * interval '1 second'}{my: interval round(lease_seconds * 1000000) microsecond}{lite: lease_ms})";

impl Writing<'_> {
    /// Writes a word of [`WORDS`]; returns none where it is none of them.
    pub(super) fn short_word(&mut self, word: &'static str) -> Option<()> {
        let inside_of = |name: &str| match name.strip_suffix('~') {
            Some(begin) => word.strip_prefix(begin),
            None => (word == name).then_some(""),
        };
        let (text, inside) =
            WORDS.iter().find_map(|(name, texts)| Some((texts[self.dialect as usize], inside_of(name)?)))?;
        match text.split_once('~') {
            Some((before, after)) => self.around(before, inside, after),
            None => self.text.push_str(text),
        }
        Some(())
    }

    /// Writes a `piece` or an `each`; returns none where the word is neither.
    pub(super) fn longer_word(&mut self, word: &'static str) -> Option<()> {
        if let Some(name) = word.strip_prefix("piece ") {
            let (_, piece) = PIECES.iter().find(|(known, _)| *known == name)?;
            self.write(piece);
            return Some(());
        }
        let words: Vec<&'static str> = word.strip_prefix("each ")?.split(' ').collect();
        let &[table, alias, of, column, list, index] = words.as_slice() else { return None };
        self.rows_of((table, alias), (of, column), list, index);
        Some(())
    }

    /// Writes, after `from`, the rows of a table whose column is in a list; more conditions may
    /// follow. MySQL joins the list, because with a condition on it every row that is read would be
    /// locked.
    fn rows_of(
        &mut self,
        (table, alias): (&'static str, &'static str),
        (of, column): (&'static str, &'static str),
        list: &'static str,
        index: &'static str,
    ) {
        if self.dialect == Dialect::MySql {
            let (kind, value) = if of == "ints" { ("bigint", "v.v") } else { ("varchar(1024)", "unhex(v.v)") };
            self.text.push_str("json_table(");
            self.write(list);
            self.text.push_str(&format!(
                ", '$[*]' columns (v {kind} path '$')) v straight_join oncebox_{table} as {alias} force index ({index}) \
                 on {alias}.{column} = {value} where true"
            ));
            return;
        }
        let prefix = if self.dialect == Dialect::Postgres { "oncebox." } else { "oncebox_" };
        self.text.push_str(&format!("{prefix}{table} as {alias} where {alias}.{column} "));
        self.one_of(of, list);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{asked, sql, write};
    use super::*;

    fn words(text: &'static str, dialect: Dialect) -> String {
        write(&sql(text), dialect).0
    }

    #[test]
    fn every_piece_is_written_for_every_database() {
        for (name, piece) in PIECES {
            // What is asked for is looked up in the texts only, not in their pieces.
            assert_eq!(asked(piece).next(), None, "{name}");
            for dialect in [Dialect::Postgres, Dialect::MySql, Dialect::Sqlite] {
                let text = words(piece, dialect);
                assert!(!text.contains(['{', '}']), "{name}: {text}");
            }
        }
    }

    #[test]
    fn the_rows_of_a_list_are_found_by_an_index() {
        let text = |dialect| {
            let delete = sql("delete {my: o }from {each operation o ids operation_id :of primary} and o.epoch > 1");
            delete.bind("of", vec![uuid::Uuid::nil()]).in_words_of(dialect).expect("all is bound").0
        };
        assert_eq!(
            text(Dialect::Postgres),
            "delete from oncebox.operation as o where o.operation_id = any($1) and o.epoch > 1"
        );
        assert_eq!(
            text(Dialect::MySql),
            "delete o from json_table(?, '$[*]' columns (v varchar(1024) path '$')) v straight_join oncebox_operation as o \
             force index (primary) on o.operation_id = unhex(v.v) where true and o.epoch > 1"
        );
        assert_eq!(
            text(Dialect::Sqlite),
            "delete from oncebox_operation as o where o.operation_id in (select unhex(value) from json_each(?1)) and o.epoch > 1"
        );
    }

    #[test]
    fn a_row_that_is_there_is_changed_in_the_words_of_each_database() {
        let text = |dialect| words("{or update a, b} c = {greatest}(t.c, {new c})", dialect);
        assert_eq!(text(Dialect::Postgres), "on conflict (a, b) do update set c = greatest(t.c, excluded.c)");
        assert_eq!(text(Dialect::MySql), "on duplicate key update c = greatest(t.c, values(c))");
        assert_eq!(text(Dialect::Sqlite), "on conflict (a, b) do update set c = max(t.c, excluded.c)");
    }
}
