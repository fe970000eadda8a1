//! Connections whose server must answer within a bound. With a frozen server, a half-open TCP
//! connection or a cut cable no answer comes. Sqlx has no read timeout, and would wait for ever.
//!
//! Guarantees:
//!
//! * Between two parts of an answer at most the answer timeout passes. Then the statement fails
//!   with an I/O error of kind `TimedOut`: a transient error, or an unknown outcome for a COMMIT
//!   (G10, G12).
//! * A connection goes back to the pool only when no statement runs on it. A connection that timed
//!   out or broke, whose statement was dropped half way, or that is dropped inside a transaction,
//!   is closed and never used again. So a `begin` may be dropped at any moment: the transaction
//!   that it opened ends with its connection, and no later write is lost in it.
//! * Returning a connection is bounded too: a server that does not answer keeps no place of the
//!   pool.
//! * What a handler changed in the session (`set`, `set role`, temporary tables, advisory locks) is
//!   reset before the connection is used again.
//!
//! sqlx does not expose its socket, so neither keep-alive nor `TCP_USER_TIMEOUT` can be set on this
//! side of a connection.
//!
//! Not here: what runs on the plain connection. Statements of handlers are bounded by the handler
//! timeout, those of applications and migrations by nothing.

mod ask;
#[cfg(all(feature = "mysql", feature = "operations"))]
mod enqueue;
pub(super) mod hosts;
pub(super) mod rest;

use std::fmt;
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::TryStreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use sqlx::pool::PoolConnection;
use sqlx::{ConnectOptions, Connection, Database, Either, Executor, IntoArguments, Pool, SqlSafeStr, SqlStr};
use sqlx_core::transaction::TransactionManager;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::timeout;

pub(super) use self::ask::{AnyQuery, Ask};
use self::hosts::{Hosts, Moved};
use crate::error::{StoreError, classify};
use crate::outbox::enqueue::commit_error;
use crate::task;

/// A pooled connection that was idle for longer is pinged before it is used.
const RESTED: Duration = Duration::from_secs(1);
/// How long a ping may take. The answer timeout may be shorter.
const SIGN_OF_LIFE_MAX: Duration = Duration::from_secs(5);
/// How long it may take to get a connection. The answer timeout may be shorter.
const CONNECT_MAX: Duration = Duration::from_secs(30);

/// How long the kept connection for pings may take. A firewall may have forgotten it; then there is
/// still time for a new one.
#[cfg(feature = "duties")]
const KEPT_MAX: Duration = Duration::from_secs(2);

/// How often a caller that waits for a new connection checks whether one rests in the pool.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// How long a statement inside a handler's transaction waits for a lock. It is well below the
/// handler timeout, so that a wait for another transaction ends as a lock timeout, which counts no
/// attempt.
pub(super) fn lock_wait(handler_timeout: Duration) -> Duration {
    // Not zero: a server takes zero as no limit.
    (handler_timeout / 2).clamp(Duration::from_millis(100), Duration::from_secs(5))
}

/// One part of an answer: the result of a statement, or a row.
type Part<Db> = Either<<Db as Database>::QueryResult, <Db as Database>::Row>;

/// What is done with each part of an answer.
type Take<'t, Db> = dyn FnMut(Part<Db>) -> ControlFlow<()> + Send + 't;

/// A database behind a network.
pub(super) trait Remote: Database<Arguments: IntoArguments<Self>> {
    /// Sends a statement. With sqlx's `Executor` as a bound, generic futures would not be `Send`.
    fn send(connection: &mut Self::Connection, query: AnyQuery<Self>) -> BoxStream<'_, sqlx::Result<Part<Self>>>;

    /// Has the server parse a statement.
    fn prepare(connection: &mut Self::Connection, sql: SqlStr) -> BoxFuture<'_, sqlx::Result<Self::Statement>>;

    /// Whether the server takes writes, which a standby does not.
    fn is_writable(connection: &mut Self::Connection) -> BoxFuture<'_, sqlx::Result<bool>>;
}

macro_rules! remote {
    ($feature:literal, $db:ty, $is_writable:literal) => {
        #[cfg(feature = $feature)]
        impl Remote for $db {
            fn send(
                connection: &mut Self::Connection,
                query: AnyQuery<Self>,
            ) -> BoxStream<'_, sqlx::Result<Part<Self>>> {
                connection.fetch_many(query)
            }

            fn prepare(connection: &mut Self::Connection, sql: SqlStr) -> BoxFuture<'_, sqlx::Result<Self::Statement>> {
                Executor::prepare(connection, sql)
            }

            fn is_writable(connection: &mut Self::Connection) -> BoxFuture<'_, sqlx::Result<bool>> {
                Box::pin(
                    async move { Ok(sqlx::query_scalar::<_, i64>($is_writable).fetch_one(connection).await? == 1) },
                )
            }
        }
    };
}

remote!("postgres", sqlx::Postgres, "select (not pg_is_in_recovery())::int::bigint");
// MariaDB returns a word from version 12 on, not a number.
remote!("mysql", sqlx::MySql, "select cast(@@global.read_only in ('0', 'OFF') as signed)");

#[derive(Debug)]
pub(super) struct BoundedPool<Db: Remote> {
    pool: Pool<Db>,
    answer_timeout: Duration,
    /// The connection for pings.
    pulse: Arc<Mutex<Option<Bounded<Db>>>>,
    /// The statements that reset a session after a handler used it.
    reset: Arc<str>,
    /// What attends to resting connections and switches between several hosts, as long as a clone
    /// of this pool exists.
    beside: Arc<JoinSet<()>>,
    /// With a single host: set when it says that it takes no writes, so that older connections are
    /// left. With several, `beside` switches.
    moved: Option<Moved>,
}

impl<Db: Remote> Clone for BoundedPool<Db> {
    fn clone(&self) -> Self {
        Self {
            pool: self.pool.clone(),
            answer_timeout: self.answer_timeout,
            pulse: Arc::clone(&self.pulse),
            reset: Arc::clone(&self.reset),
            beside: Arc::clone(&self.beside),
            moved: self.moved.clone(),
        }
    }
}

/// The options of every pool: connecting is bounded, a connection that was idle is pinged before
/// use, and sqlx starts no task of its own (see [`rest`]). A ping before every use would cost a
/// round trip. `at_release`: statements that a connection runs before it is used again.
pub(super) fn pool_options<Db: Remote>(
    connections_max: u32,
    answer_timeout: Duration,
    at_release: Option<String>,
    hosts: &Hosts<Db>,
) -> sqlx::pool::PoolOptions<Db> {
    let moved = hosts.moved();
    let sign_of_life_max = answer_timeout.min(SIGN_OF_LIFE_MAX);
    sqlx::pool::PoolOptions::new()
        .max_connections(connections_max)
        .acquire_timeout(answer_timeout.min(CONNECT_MAX))
        .test_before_acquire(false)
        .idle_timeout(None)
        .max_lifetime(None)
        .after_release(move |connection: &mut Db::Connection, rest| {
            let at_release = at_release.clone();
            Box::pin(async move {
                if rest::is_old(&rest) {
                    return Ok(false);
                }
                if let Some(statements) = at_release {
                    run::<Db>(connection, statements).await?;
                }
                Ok(true)
            })
        })
        .before_acquire(move |connection: &mut Db::Connection, rest| {
            let is_elsewhere = moved.since().is_some_and(|since| rest.age > since);
            Box::pin(async move {
                if is_elsewhere {
                    return Ok(false);
                }
                if rest.idle_for > RESTED {
                    let alive = timeout(sign_of_life_max, connection.ping()).await;
                    alive.map_err(|_| silent(sign_of_life_max))??;
                }
                Ok(true)
            })
        })
}

impl<Db: Remote> BoundedPool<Db> {
    /// `rests_max`: a resting connection is touched after this time.
    pub(super) fn new(
        pool: Pool<Db>,
        answer_timeout: Duration,
        rests_max: Duration,
        reset: String,
        hosts: Hosts<Db>,
    ) -> Self {
        let pulse = Arc::default();
        let moved = (!hosts.are_several()).then(|| hosts.moved());
        let mut beside = JoinSet::new();
        beside.spawn(task::boxed(rest::attend(pool.clone(), rests_max, answer_timeout.min(SIGN_OF_LIFE_MAX))));
        if hosts.are_several() {
            beside.spawn(task::boxed(hosts::watch(hosts, pool.clone(), Arc::clone(&pulse))));
        }
        Self { pool, answer_timeout, pulse, reset: reset.into(), beside: Arc::new(beside), moved }
    }

    /// The pool as sqlx has it.
    pub(super) fn plain(&self) -> &Pool<Db> {
        &self.pool
    }

    pub(super) async fn acquire(&self) -> sqlx::Result<Bounded<Db>> {
        let held = Held::Pooled(self.pooled().await?);
        let mut connection = Bounded::new(held, self.answer_timeout);
        connection.reset = Some(Arc::clone(&self.reset));
        connection.moved.clone_from(&self.moved);
        Ok(connection)
    }

    /// A connection of the pool, within the pool's limit for that.
    ///
    /// sqlx looks for a resting connection once and then connects, again and again where the server
    /// takes no more connections. So from time to time the resting ones are looked at here.
    async fn pooled(&self) -> sqlx::Result<PoolConnection<Db>> {
        let found = timeout(self.pool.options().get_acquire_timeout(), async {
            loop {
                // The future has room for a whole connect, 14 KiB: boxed, it is not moved with
                // every future that acquires.
                let mut acquired = Box::pin(self.pool.acquire());
                loop {
                    match timeout(LOOK_AGAIN, acquired.as_mut()).await {
                        Ok(acquired) => return acquired,
                        Err(_) if self.pool.num_idle() > 0 => break,
                        Err(_) => {}
                    }
                }
            }
        });
        match found.await {
            Ok(acquired) => acquired,
            Err(_) if self.pool.size() < self.pool.options().get_max_connections() => Err(self.why_none().await),
            Err(_) => Err(sqlx::Error::PoolTimedOut),
        }
    }

    /// Why no connection was made in time: sqlx tried again and again, and does not say how that
    /// failed.
    async fn why_none(&self) -> sqlx::Error {
        match timeout(SIGN_OF_LIFE_MAX, self.fresh()).await {
            Ok(Err(why)) => why,
            Ok(Ok(_)) | Err(_) => sqlx::Error::PoolTimedOut,
        }
    }

    /// A pool of one connection to the same server, beside this one.
    #[cfg(all(feature = "duties", feature = "postgres"))]
    pub(super) fn single(&self) -> sqlx::Pool<Db> {
        let options = sqlx::pool::PoolOptions::new().max_connections(1).max_lifetime(None).idle_timeout(None);
        options.acquire_timeout(CONNECT_MAX).connect_lazy_with((*self.pool.connect_options()).clone())
    }

    /// Takes a connection out of the pool for good: it is never returned.
    pub(super) async fn dedicated(&self) -> sqlx::Result<Bounded<Db>> {
        let held = Held::Own(self.pooled().await?.detach());
        let mut connection = Bounded::new(held, self.answer_timeout);
        // What it hears of its server holds for the connections that are left in the pool.
        connection.moved.clone_from(&self.moved);
        Ok(connection)
    }

    /// Makes a connection outside the pool. It can ask the server about a connection that does not
    /// answer, even if that is the pool's only one.
    pub(super) async fn fresh(&self) -> sqlx::Result<Bounded<Db>> {
        let (options, limit) = (self.pool.connect_options(), self.answer_timeout.min(CONNECT_MAX));
        let connection = timeout(limit, options.connect()).await.map_err(|_| silent(limit))??;
        Ok(Bounded::new(Held::Own(connection), self.answer_timeout))
    }

    /// Pings the server on a connection outside the pool, which is kept for the next ping. The
    /// error "too many connections" counts as an answer.
    #[cfg(feature = "duties")]
    pub(super) async fn sign_of_life(&self) -> sqlx::Result<()> {
        if self.pool.is_closed() {
            return Err(sqlx::Error::PoolClosed);
        }
        let mut pulse = self.pulse.lock().await;
        if let Some(mut kept) = pulse.take()
            && timeout(KEPT_MAX, kept.within(|connection| Box::pin(connection.ping())))
                .await
                .is_ok_and(|ping| ping.is_ok())
        {
            *pulse = Some(kept);
            return Ok(());
        }
        match self.fresh().await {
            Ok(connection) => *pulse = Some(connection),
            Err(error) if classify::is_without_connections(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Begins a transaction on a connection of the pool. A connection that was not idle long enough
    /// for a ping may have died in the pool: then `BEGIN` fails before anything was done, and the
    /// next one is taken.
    pub(super) async fn begin(&self, statement: impl SqlSafeStr) -> sqlx::Result<Bounded<Db>> {
        let statement = statement.into_sql_str();
        let mut others = self.pool.size();
        loop {
            let mut connection = self.acquire().await?;
            match connection.begin(statement.clone()).await {
                Ok(()) => return Ok(connection),
                Err(error) if others > 0 && ended_at_rest(&error) => others -= 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// Closes the pool. Connections that are still in use after the answer timeout are closed when
    /// they come back.
    pub(super) async fn close(&self) {
        // The call closes the pool, so no further ping begins; its future waits for connections.
        let closing = self.pool.close();
        // A ping that waits for its server holds the lock.
        let pulse = async { drop(self.pulse.lock().await.take()) };
        if timeout(self.answer_timeout, async { tokio::join!(closing, pulse) }).await.is_err() {
            tracing::warn!("connections were still in use when the database was closed");
        }
    }
}

/// Whether a connection had ended while it was idle in the pool. A timeout is no such case, because
/// the next connection would be waited for just as long.
fn ended_at_rest(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(error) => error.kind() != io::ErrorKind::TimedOut,
        sqlx::Error::Protocol(_) => true,
        sqlx::Error::Database(_) => classify::is_unavailable(error),
        _ => false,
    }
}

/// Whether a connection belongs to the pool.
enum Held<Db: Database> {
    Pooled(PoolConnection<Db>),
    Own(Db::Connection),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Rests,
    /// A statement runs, or was dropped while it ran.
    Works,
    /// It timed out or broke, and is not used again.
    GivenUp,
}

/// A connection whose server must answer within the answer timeout.
pub(super) struct Bounded<Db: Remote> {
    held: Option<Held<Db>>,
    state: State,
    in_transaction: bool,
    answer_timeout: Duration,
    reset: Option<Arc<str>>,
    moved: Option<Moved>,
    /// A handler has used the plain connection, so the session must be reset.
    lent: bool,
}

impl<Db: Remote> Bounded<Db> {
    fn new(held: Held<Db>, answer_timeout: Duration) -> Self {
        let (state, in_transaction, reset, moved, lent) = (State::Rests, false, None, None, false);
        Self { held: Some(held), state, in_transaction, answer_timeout, reset, moved, lent }
    }

    /// The plain connection for a handler. The session is reset before the connection is used
    /// again.
    pub(super) fn lend(&mut self) -> &mut Db::Connection {
        self.lent = true;
        self.plain()
    }

    /// The plain connection, without the bound: the caller bounds its own statements.
    pub(super) fn plain(&mut self) -> &mut Db::Connection {
        match &mut self.held {
            Some(Held::Pooled(connection)) => connection,
            Some(Held::Own(connection)) => connection,
            None => unreachable!("`held` is taken only by what consumes or drops this"),
        }
    }

    /// Begins a transaction. Dropped half way, the connection is closed with this value.
    pub(super) async fn begin(&mut self, statement: impl SqlSafeStr) -> sqlx::Result<()> {
        // Set before the statement: if its answer is lost, the transaction may be open.
        self.in_transaction = true;
        let statement = Some(statement.into_sql_str());
        self.within(|connection| Box::pin(Db::TransactionManager::begin(connection, statement))).await
    }

    /// Commits; [`StoreError::CommitUnknown`] where the answer was lost.
    pub(super) async fn commit(&mut self) -> Result<(), StoreError> {
        let done = self.within(|connection| Box::pin(Db::TransactionManager::commit(connection))).await;
        self.in_transaction = done.is_err();
        done.map_err(commit_error)
    }

    /// Rolls back; where that fails, the connection is closed and never used again.
    pub(super) async fn rollback(&mut self) -> sqlx::Result<()> {
        let done = self.within(|connection| Box::pin(Db::TransactionManager::rollback(connection))).await;
        self.in_transaction = done.is_err();
        done
    }

    /// Has the server parse a statement.
    pub(super) async fn prepare(&mut self, sql: impl SqlSafeStr) -> sqlx::Result<Db::Statement> {
        let sql = sql.into_sql_str();
        self.within(|connection| Db::prepare(connection, sql)).await
    }

    /// Gives the connection up: every later statement on it fails at once.
    pub(super) fn give_up(&mut self) {
        self.state = State::GivenUp;
    }

    /// Closes the connection with the closing message of its protocol.
    pub(super) async fn close(mut self) {
        let Some(held) = self.held.take() else { return };
        let closing = async move {
            match held {
                Held::Pooled(connection) => connection.close().await,
                Held::Own(connection) => connection.close().await,
            }
        };
        // An error does not matter: the connection is closed in any case.
        let _ = timeout(self.answer_timeout.min(SIGN_OF_LIFE_MAX), closing).await;
    }

    /// Runs a statement and passes each part of its answer to `take` as it arrives. After a break
    /// the connection cannot be used again, because the rest of the answer was not read.
    pub(super) async fn parts(&mut self, query: AnyQuery<Db>, take: &mut Take<'_, Db>) -> sqlx::Result<()> {
        self.start()?;
        let limit = self.answer_timeout;
        let outcome = {
            let mut parts = Db::send(self.plain(), query);
            loop {
                match timeout(limit, parts.try_next()).await {
                    Ok(Ok(Some(part))) => match take(part) {
                        ControlFlow::Continue(()) => {}
                        ControlFlow::Break(()) => return Ok(()),
                    },
                    Ok(Ok(None)) => break Ok(()),
                    Ok(Err(error)) => break Err(error),
                    Err(_) => break Err(silent(limit)),
                }
            }
        };
        self.settle(&outcome);
        outcome
    }

    async fn within<T>(
        &mut self,
        work: impl for<'c> FnOnce(&'c mut Db::Connection) -> BoxFuture<'c, sqlx::Result<T>>,
    ) -> sqlx::Result<T> {
        self.start()?;
        let limit = self.answer_timeout;
        let outcome = timeout(limit, work(self.plain())).await.unwrap_or_else(|_| Err(silent(limit)));
        self.settle(&outcome);
        outcome
    }

    fn start(&mut self) -> sqlx::Result<()> {
        if self.state == State::GivenUp {
            let why = "the connection was given up";
            return Err(sqlx::Error::Io(io::Error::new(io::ErrorKind::NotConnected, why)));
        }
        self.state = State::Works;
        Ok(())
    }

    fn settle<T>(&mut self, outcome: &sqlx::Result<T>) {
        if let (Some(moved), Err(error)) = (&self.moved, outcome)
            && classify::is_read_only(error)
        {
            moved.perhaps();
        }
        self.state = match outcome {
            Err(sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::Tls(_)) => State::GivenUp,
            _ => State::Rests,
        };
    }
}

impl<Db: Remote> Drop for Bounded<Db> {
    fn drop(&mut self) {
        let Some(Held::Pooled(mut connection)) = self.held.take() else { return };
        let fit = self.state == State::Rests && !self.in_transaction;
        let reset = self.reset.take().filter(|_| self.lent);
        match (tokio::runtime::Handle::try_current(), reset) {
            // What sqlx does at a drop, but with a timeout: a connection that cannot be returned in
            // time is closed, and its place in the pool is free.
            (Ok(runtime), None) if fit => {
                drop(runtime.spawn(task::boxed(timeout(self.answer_timeout, connection.return_to_pool()))));
            }
            (Ok(runtime), Some(reset)) if fit => {
                drop(runtime.spawn(task::boxed(give_back(connection, reset, self.answer_timeout))));
            }
            _ => drop(connection.detach()),
        }
    }
}

/// Runs statements of ours on a plain connection, and reads their answers to the end.
async fn run<Db: Remote>(connection: &mut Db::Connection, statements: String) -> sqlx::Result<()> {
    let query = AnyQuery::of(sqlx::raw_sql(sqlx::AssertSqlSafe(statements)));
    let mut parts = Db::send(connection, query);
    while parts.try_next().await?.is_some() {}
    Ok(())
}

/// Resets the session and returns the connection to its pool; closes it where that fails or takes
/// too long.
async fn give_back<Db: Remote>(mut connection: PoolConnection<Db>, reset: Arc<str>, limit: Duration) {
    match timeout(limit, run::<Db>(&mut connection, reset.to_string())).await {
        Ok(Ok(())) => drop(timeout(limit, connection.return_to_pool()).await),
        failed => {
            // Each costs a new connection. A person should know if it happens after every handler.
            static SAID: AtomicBool = AtomicBool::new(false);
            if SAID.swap(true, Ordering::Relaxed) {
                tracing::debug!(?failed, "a session could not be reset after a handler; its connection is closed");
            } else {
                tracing::warn!(
                    ?failed,
                    "a session could not be reset after a handler; its connection is closed. Later ones are logged at debug"
                );
            }
            drop(connection.detach());
        }
    }
}

impl<Db: Remote> fmt::Debug for Bounded<Db> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (state, in_transaction) = (&self.state, &self.in_transaction);
        f.debug_struct("Bounded").field("state", state).field("in_transaction", in_transaction).finish_non_exhaustive()
    }
}

fn silent(limit: Duration) -> sqlx::Error {
    let what = format!("the server has said nothing for {}", humantime::format_duration(limit));
    sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, what))
}
