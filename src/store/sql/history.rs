//! The word `{history ..}`: a history of errors with one more error appended.

use super::Writing;
use crate::store::statements::Dialect;

impl Writing<'_> {
    /// Writes a history, oldest first, with the error `:error` appended; at 50 errors the oldest
    /// goes.
    pub(super) fn history(&mut self, history: &'static str, attempt: &'static str) {
        // `~` is the history, `@` the number of the try.
        let text = match self.dialect {
            Dialect::Postgres => {
                "case when jsonb_array_length(~) >= 50 then ~ - 0 else ~ end || \
                 jsonb_build_object('at', clock_timestamp(), 'attempt', (@)::integer, 'error', :error::text)"
            }
            Dialect::MySql => {
                "json_array_append(case when json_length(~) >= 50 then json_remove(~, '$[0]') else ~ end, '$', \
                 json_object('at', date_format(utc_timestamp(6), '%Y-%m-%dT%H:%i:%s.%fZ'), 'attempt', @, 'error', :error))"
            }
            Dialect::Sqlite => {
                "json_insert(case when json_array_length(~) >= 50 then json_remove(~, '$[0]') else ~ end, '$[#]', \
                 json_object('at', strftime('%Y-%m-%dT%H:%M:%fZ', 'now'), 'attempt', @, 'error', :error))"
            }
        };
        for part in text.split_inclusive(['~', '@']) {
            self.write(part.trim_end_matches(['~', '@']));
            match part.chars().next_back() {
                Some('~') => self.write(history),
                Some('@') => self.write(attempt),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::store::sql::sql;
    use crate::store::statements::Dialect;

    #[test]
    fn a_history_may_be_a_column_or_a_value() {
        let text = |dialect| {
            let text = sql("update t set history = {history :history{pg: ::jsonb} attempts}");
            text.bind("history", "[]").bind("error", "no").in_words_of(dialect).expect("bound").0
        };
        assert_eq!(
            text(Dialect::Postgres),
            "update t set history = case when jsonb_array_length($1::jsonb) >= 50 then $1::jsonb - 0 else $1::jsonb end \
             || jsonb_build_object('at', clock_timestamp(), 'attempt', (attempts)::integer, 'error', $2::text)"
        );
        assert_eq!(
            text(Dialect::MySql),
            "update t set history = json_array_append(case when json_length(?) >= 50 then json_remove(?, '$[0]') else ? end, '$', \
             json_object('at', date_format(utc_timestamp(6), '%Y-%m-%dT%H:%i:%s.%fZ'), 'attempt', attempts, 'error', ?))"
        );
        assert_eq!(
            text(Dialect::Sqlite),
            "update t set history = json_insert(case when json_array_length(?1) >= 50 then json_remove(?1, '$[0]') else ?1 end, \
             '$[#]', json_object('at', strftime('%Y-%m-%dT%H:%M:%fZ', 'now'), 'attempt', attempts, 'error', ?2))"
        );
    }
}
