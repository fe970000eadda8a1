//! Finds a counter of positions that is behind a dead or held row, and rows that got a used
//! position (R7): after a restore, or `truncate table`. `mend` repairs both.

use sqlx::{MySql, Row};

use crate::error::StoreError;
use crate::observe::Finding;
use crate::store::bounded::{Ask, Bounded};
use crate::store::mysql::set_back;

const NAME: &str = "sequence behind cursor";

/// The next position, the highest one of a dead or held row, the lowest one that is in both tables,
/// the first and the last one of the outbox, and the first one of a row that was written after the
/// counter was set back.
const STATE: &str = concat!(
    "select cast((select auto_increment from information_schema.tables \
              where table_schema = database() and table_name = 'oncebox_outbox') as unsigned), \
       cast((select max(position) from oncebox_outbox_dead) as unsigned), \
       cast((select min(d.position) from oncebox_outbox_dead d join oncebox_outbox o on o.position = d.position) as unsigned), \
       cast((select min(position) from oncebox_outbox) as unsigned), \
       cast((select max(position) from oncebox_outbox) as unsigned), \
       cast((select min(o.position) from oncebox_outbox o where ",
    set_back!(),
    ") as unsigned)"
);

/// Which positions are in use, and which comes next.
pub(in crate::store::mysql) struct State {
    next: Option<u64>,
    used: Option<u64>,
    twice: Option<u64>,
    below: Option<u64>,
    /// The first and the last position of the outbox.
    pub(in crate::store::mysql) rows: Option<(u64, u64)>,
}

impl State {
    pub(in crate::store::mysql) async fn read(connection: &mut Bounded<MySql>) -> Result<Self, StoreError> {
        let version: String = sqlx::query_scalar("select version()").one(&mut *connection).await?;
        if !version.to_lowercase().contains("mariadb") {
            // MySQL keeps this column of information_schema for a day unless told otherwise.
            sqlx::query("set session information_schema_stats_expiry = 0").run(&mut *connection).await?;
        }
        let row = sqlx::query(STATE).one(connection).await?;
        let rows = row.try_get::<Option<u64>, _>(3)?.zip(row.try_get::<Option<u64>, _>(4)?);
        let (twice, below) = (row.try_get(2)?, row.try_get(5)?);
        Ok(Self { next: row.try_get(0)?, used: row.try_get(1)?, twice, below, rows })
    }

    /// Reads the rows below a position that the counter has already passed, so that no more can
    /// appear.
    pub(in crate::store::mysql) async fn read_below(
        connection: &mut Bounded<MySql>,
        next: u64,
    ) -> Result<Self, StoreError> {
        let row = sqlx::query(
            "select cast((select max(position) from oncebox_outbox_dead) as unsigned), \
                    cast(min(position) as unsigned), cast(max(position) as unsigned) from oncebox_outbox where position < ?",
        )
        .bind(next)
        .one(connection)
        .await?;
        let rows = row.try_get::<Option<u64>, _>(1)?.zip(row.try_get::<Option<u64>, _>(2)?);
        Ok(Self { next: None, used: row.try_get(0)?, twice: None, below: None, rows })
    }

    /// Describes the fault; none where there is none.
    pub(in crate::store::mysql) fn fault(&self) -> Option<String> {
        let used = self.used?;
        match (self.next, self.twice, self.below) {
            (_, Some(twice), _) => {
                Some(format!("the position {twice} is that of a new message and of a dead or held one"))
            }
            (Some(next), ..) if next <= used => Some(format!(
                "the next position is {next}, but a dead or held row stands at {used}: positions would be used twice"
            )),
            (.., Some(below)) => Some(format!(
                "a new message has the position {below}, below that of an older dead or held one at {used}"
            )),
            _ => None,
        }
    }

    /// The highest position that is or was in use.
    pub(in crate::store::mysql) fn top(&self) -> u64 {
        let last = self.rows.map(|(_, last)| last);
        self.used.max(last).max(self.next.map(|next| next.saturating_sub(1))).unwrap_or(0)
    }

    /// By how much the rows of the outbox are moved up.
    pub(in crate::store::mysql) fn shift(&self) -> u64 {
        self.rows.map_or(0, |(first, _)| self.top() + 1 - first)
    }
}

/// Reads the positions, and reports a fault as a refusal.
pub(super) async fn look(connection: &mut Bounded<MySql>) -> Result<Finding, StoreError> {
    let state = State::read(connection).await?;
    Ok(match (state.fault(), state.next, state.used) {
        (Some(fault), ..) => Finding::refused(NAME, fault, "run `oncebox doctor --fix`"),
        (None, Some(next), Some(_)) => Finding::ok(NAME, format!("the next position is {next}")),
        _ => Finding::ok(NAME, "no dead or held row"),
    })
}
