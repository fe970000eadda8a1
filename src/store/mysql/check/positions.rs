//! Repairs a counter of positions that is behind a dead or held row, and rows that got a used
//! position (R7): after a restore, or `truncate table`.
//!
//! Guarantees: the counter is set above every position in use. The rows of the outbox move above
//! all of them in their old order, so that none is before an older held row of its key. A running
//! relay starts again. A message under way may be sent again; none is lost.

use sqlx::{AssertSqlSafe, MySql, Row, raw_sql};

use crate::error::StoreError;
use crate::operator::ActContext;
use crate::store::bounded::{Ask, Bounded, BoundedPool};
use crate::store::mysql::START;
use crate::store::schema::Finding;
use crate::store::sql::audit;
use crate::store::statements::Dialect;

const NAME: &str = "sequence behind cursor";
/// Positions kept free for messages that are written while the counter is being set.
const ROOM: u64 = 1_000_000;

/// The next position, the highest one of a dead or held row, the lowest one that is in both tables,
/// and the first and the last one of the outbox.
const STATE: &str = "\
select cast((select auto_increment from information_schema.tables \
              where table_schema = database() and table_name = 'oncebox_outbox') as unsigned), \
       cast((select max(position) from oncebox_outbox_dead) as unsigned), \
       cast((select min(d.position) from oncebox_outbox_dead d join oncebox_outbox o on o.position = d.position) as unsigned), \
       cast((select min(position) from oncebox_outbox) as unsigned), \
       cast((select max(position) from oncebox_outbox) as unsigned)";

/// Moves the last row first, so that no row takes the position of another.
const MOVE: &str = "update oncebox_outbox set position = position + ? where position < ? order by position desc";

struct State {
    next: Option<u64>,
    used: Option<u64>,
    twice: Option<u64>,
    /// The first and the last position of the outbox.
    rows: Option<(u64, u64)>,
}

impl State {
    async fn read(connection: &mut Bounded<MySql>) -> Result<Self, StoreError> {
        let version: String = sqlx::query_scalar("select version()").one(&mut *connection).await?;
        if !version.to_lowercase().contains("mariadb") {
            // MySQL keeps this column of information_schema for a day unless told otherwise.
            sqlx::query("set session information_schema_stats_expiry = 0").run(&mut *connection).await?;
        }
        let row = sqlx::query(STATE).one(connection).await?;
        let rows = row.try_get::<Option<u64>, _>(3)?.zip(row.try_get::<Option<u64>, _>(4)?);
        Ok(Self { next: row.try_get(0)?, used: row.try_get(1)?, twice: row.try_get(2)?, rows })
    }

    /// Describes the fault; none where there is none.
    fn fault(&self) -> Option<String> {
        let used = self.used?;
        match (self.next, self.twice) {
            (_, Some(twice)) => {
                Some(format!("the position {twice} is that of a new message and of a dead or held one"))
            }
            (Some(next), None) if next <= used => Some(format!(
                "the next position is {next}, but a dead or held row stands at {used}: positions would be used twice"
            )),
            _ => None,
        }
    }

    /// The highest position that is or was in use.
    fn top(&self) -> u64 {
        let last = self.rows.map(|(_, last)| last);
        self.used.max(last).max(self.next.map(|next| next.saturating_sub(1))).unwrap_or(0)
    }

    /// By how much the rows of the outbox are moved up.
    fn shift(&self) -> u64 {
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

/// Repairs the counter, or on a dry run describes the repair. Returns nothing where the counter is
/// sound.
pub(in crate::store::mysql) async fn mend(
    pool: &BoundedPool<MySql>,
    context: &ActContext,
) -> Result<Vec<String>, StoreError> {
    let state = State::read(&mut pool.acquire().await?).await?;
    let Some(fault) = state.fault() else { return Ok(Vec::new()) };
    let mended = format!("{fault}; every message of the outbox gets a position above {}, in order", state.top());
    if context.dry_run {
        return Ok(vec![mended]);
    }
    // This statement waits for every open writer. Positions drawn after it are above those that the
    // moved rows get.
    let next = state.top() + state.rows.map_or(0, |(first, last)| last - first) + ROOM;
    let alter = AssertSqlSafe(format!("alter table oncebox_outbox auto_increment = {next}"));
    raw_sql(alter).run(&mut pool.acquire().await?).await?;

    let mut transaction = pool.begin(START).await?;
    sqlx::query(
        "update oncebox_shard set epoch = epoch + 1, revision = revision + 1, owner = null, lease_until = null, \
         lease_seconds = null",
    )
    .run(&mut transaction)
    .await?;
    let below: State = State::read_below(&mut transaction, next).await?;
    let shift = below.shift();
    if below.rows.is_some_and(|(_, last)| last + shift >= next) {
        transaction.rollback().await?;
        return Err(StoreError::Refused("too much was written meanwhile: run `oncebox doctor --fix` again".to_owned()));
    }
    sqlx::query(MOVE).bind(shift).bind(next).run(&mut transaction).await?;
    audit::mended(&mut transaction, Dialect::MySql, &mended, context).await?;
    transaction.commit().await?;
    Ok(vec![mended])
}

impl State {
    /// Reads the rows below a position that the counter has already passed, so that no more can
    /// appear.
    async fn read_below(connection: &mut Bounded<MySql>, next: u64) -> Result<Self, StoreError> {
        let row = sqlx::query(
            "select cast((select max(position) from oncebox_outbox_dead) as unsigned), \
                    cast(min(position) as unsigned), cast(max(position) as unsigned) from oncebox_outbox where position < ?",
        )
        .bind(next)
        .one(connection)
        .await?;
        let rows = row.try_get::<Option<u64>, _>(1)?.zip(row.try_get::<Option<u64>, _>(2)?);
        Ok(Self { next: None, used: row.try_get(0)?, twice: None, rows })
    }
}
