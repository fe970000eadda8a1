//! Statements within the answer timeout: how they are sent, and how their rows are converted.
//!
//! Promise: the code that sends a statement and reads its rows depends neither on the type of sqlx
//! that the statement was built with nor on the type of its rows. So it is compiled once for each
//! database, and not for each query.

use std::future::Future;
use std::ops::ControlFlow;

use sqlx::error::BoxDynError;
use sqlx::query::{Query, QueryAs, QueryScalar};
use sqlx::{Database, Either, Execute, FromRow, RawSql, SqlStr};

use super::{Bounded, Remote};

/// A statement with its values, whichever of sqlx's types it was built with.
pub(in crate::store) struct AnyQuery<Db: Database> {
    sql: SqlStr,
    statement: Option<Db::Statement>,
    arguments: Result<Option<Db::Arguments>, BoxDynError>,
    persistent: bool,
}

impl<Db: Database> AnyQuery<Db> {
    pub(in crate::store) fn of<'q>(mut query: impl Execute<'q, Db>) -> Self {
        let (statement, persistent) = (query.statement().cloned(), query.persistent());
        Self { arguments: query.take_arguments(), sql: query.sql(), statement, persistent }
    }
}

impl<Db: Database> Execute<'_, Db> for AnyQuery<Db> {
    fn sql(self) -> SqlStr {
        self.sql
    }

    fn statement(&self) -> Option<&Db::Statement> {
        self.statement.as_ref()
    }

    fn take_arguments(&mut self) -> Result<Option<Db::Arguments>, BoxDynError> {
        std::mem::replace(&mut self.arguments, Ok(None))
    }

    fn persistent(&self) -> bool {
        self.persistent
    }
}

/// The rows of an answer.
async fn rows<Db: Remote>(query: AnyQuery<Db>, connection: &mut Bounded<Db>) -> sqlx::Result<Vec<Db::Row>> {
    let mut rows = Vec::new();
    let mut take = |part| {
        if let Either::Right(row) = part {
            rows.push(row);
        }
        ControlFlow::Continue(())
    };
    connection.parts(query, &mut take).await?;
    Ok(rows)
}

/// The result of a statement, without its rows.
async fn result<Db: Remote>(query: AnyQuery<Db>, connection: &mut Bounded<Db>) -> sqlx::Result<Db::QueryResult> {
    let mut result = Db::QueryResult::default();
    let mut take = |part| {
        if let Either::Left(done) = part {
            result.extend([done]);
        }
        ControlFlow::Continue(())
    };
    connection.parts(query, &mut take).await?;
    Ok(result)
}

/// Runs a statement and converts its rows, as sqlx's `fetch_all` and `fetch_one` do, but within the
/// answer timeout.
pub(in crate::store) trait Ask<'q, Db: Remote>: Execute<'q, Db> + 'q {
    /// The type that a row is converted to.
    type Answer: Send;

    fn answer(row: Db::Row) -> sqlx::Result<Self::Answer>;

    /// Runs the statement and returns all its rows, converted, in order.
    fn all(self, connection: &mut Bounded<Db>) -> impl Future<Output = sqlx::Result<Vec<Self::Answer>>> + Send {
        let rows = rows(AnyQuery::of(self), connection);
        async move { rows.await?.into_iter().map(Self::answer).collect() }
    }

    /// The first row, where there is one.
    fn optional(self, connection: &mut Bounded<Db>) -> impl Future<Output = sqlx::Result<Option<Self::Answer>>> + Send {
        let rows = rows(AnyQuery::of(self), connection);
        async move { rows.await?.into_iter().next().map(Self::answer).transpose() }
    }

    /// The first row; no row at all is the error `RowNotFound`.
    fn one(self, connection: &mut Bounded<Db>) -> impl Future<Output = sqlx::Result<Self::Answer>> + Send {
        let rows = rows(AnyQuery::of(self), connection);
        async move { Self::answer(rows.await?.into_iter().next().ok_or(sqlx::Error::RowNotFound)?) }
    }

    /// Runs a statement and returns its result, without its rows.
    fn run(self, connection: &mut Bounded<Db>) -> impl Future<Output = sqlx::Result<Db::QueryResult>> + Send {
        result(AnyQuery::of(self), connection)
    }
}

impl<'q, Db: Remote> Ask<'q, Db> for Query<'q, Db, Db::Arguments> {
    type Answer = Db::Row;

    fn answer(row: Db::Row) -> sqlx::Result<Db::Row> {
        Ok(row)
    }
}

impl<Db: Remote> Ask<'_, Db> for RawSql {
    type Answer = Db::Row;

    fn answer(row: Db::Row) -> sqlx::Result<Db::Row> {
        Ok(row)
    }
}

impl<'q, Db: Remote, O> Ask<'q, Db> for QueryAs<'q, Db, O, Db::Arguments>
where
    O: for<'r> FromRow<'r, Db::Row> + Send + 'q,
{
    type Answer = O;

    fn answer(row: Db::Row) -> sqlx::Result<O> {
        O::from_row(&row)
    }
}

impl<'q, Db: Remote, O> Ask<'q, Db> for QueryScalar<'q, Db, O, Db::Arguments>
where
    O: Send + 'q,
    (O,): for<'r> FromRow<'r, Db::Row>,
{
    type Answer = O;

    fn answer(row: Db::Row) -> sqlx::Result<O> {
        <(O,)>::from_row(&row).map(|(answer,)| answer)
    }
}
