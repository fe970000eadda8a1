//! The plain SQL of each database.

#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

/// A list as a JSON array, for a database without arrays.
#[cfg(any(feature = "mysql", feature = "sqlite"))]
fn json_list<T: serde::Serialize>(all: &[T]) -> String {
    serde_json::json!(all).to_string()
}

/// Statements that every database has in its own dialect.
///
/// `$read` and `$unmarked` select rows of the outbox and of its copy; `$row` turns such a row into
/// position and message. `$id` and `$list` turn an id and a list into what is bound.
macro_rules! plain_sql {
    (business: $business:literal, append: $append:literal, all: $all:literal, effects: $effects:literal, payment: $payment:literal, standing: $standing:literal, open: $open:literal, debit: $debit:literal, inbox: $inbox:literal, ids: $ids:literal, forget: $forget:literal, claim: $claim:literal, answer: $answer:literal, mark: $mark:literal, read: $read:expr, unmarked: $unmarked:expr, row: $row:path, id: $id:expr, list: $list:expr) => {
        async fn read_plainly(&self, after: i64) -> Result<Vec<(i64, OutgoingMessage)>, StoreError> {
            let rows = sqlx::query($read).bind(after).fetch_all(self.pool()).await?;
            rows.iter().map($row).collect()
        }

        async fn read_unmarked(&self) -> Result<Vec<(i64, OutgoingMessage)>, StoreError> {
            let rows = sqlx::query($unmarked).fetch_all(self.pool()).await?;
            rows.iter().map($row).collect()
        }

        async fn mark(&self, position: i64) -> Result<(), StoreError> {
            sqlx::query($mark).bind(position).execute(self.pool()).await?;
            Ok(())
        }

        async fn business(connection: &mut Connection<Self>, account: i64) -> Result<(), StoreError> {
            // A write that changes no row costs nothing and would make every figure wrong.
            match sqlx::query($business).bind(account).execute(connection).await?.rows_affected() {
                1 => Ok(()),
                rows => Err(StoreError::Corrupt(format!("account {account} has {rows} rows"))),
            }
        }

        async fn append_by_hand(
            connection: &mut Connection<Self>,
            id: Uuid,
            message: NewMessage,
        ) -> Result<(), StoreError> {
            let NewMessage { topic, key, kind, payload, content_type, .. } = message;
            let bucket = i16::from(oncebox::message::bucket(key.as_deref(), id));
            let insert = sqlx::query($append).bind(bucket).bind($id(id)).bind(topic).bind(key).bind(kind);
            let insert = insert.bind(None::<String>).bind(payload).bind(content_type.unwrap_or_default());
            insert.execute(connection).await?;
            Ok(())
        }

        async fn business_all(connection: &mut Connection<Self>, accounts: &[i64]) -> Result<(), StoreError> {
            let different = accounts.iter().collect::<std::collections::HashSet<_>>().len() as u64;
            match sqlx::query($all).bind($list(accounts)).execute(connection).await?.rows_affected() {
                rows if rows == different => Ok(()),
                rows => Err(StoreError::Corrupt(format!("{different} accounts have {rows} rows"))),
            }
        }

        async fn handle_all_by_hand(&self, batch: &[(Uuid, i64)], effects: Effects) -> Result<(), StoreError> {
            let (ids, accounts): (Vec<Uuid>, Vec<i64>) = batch.iter().copied().unzip();
            let mut tx = self.pool().begin().await?;
            let new = sqlx::query($ids).bind($list(&ids)).execute(&mut *tx).await?.rows_affected();
            if new != batch.len() as u64 {
                return Err(StoreError::Corrupt(format!("{} messages have {new} new ids", batch.len())));
            }
            match effects {
                Effects::Together => Self::business_all(&mut tx, &accounts).await?,
                Effects::Each => {
                    for account in accounts {
                        Self::business(&mut tx, account).await?;
                    }
                }
            }
            tx.commit().await?;
            Ok(())
        }

        async fn forget_by_hand(&self) -> Result<(), StoreError> {
            sqlx::query($forget).execute(self.pool()).await?;
            Ok(())
        }

        async fn effects(&self) -> Result<usize, StoreError> {
            let count: i64 = sqlx::query_scalar($effects).fetch_one(self.pool()).await?;
            usize::try_from(count).map_err(|error| StoreError::Corrupt(error.to_string()))
        }

        async fn pay(connection: &mut Connection<Self>, id: Uuid, account: i64, amount: i64) -> Result<(), StoreError> {
            let (id, account) = (format!("pay_{}", id.simple()), format!("acc-{account}"));
            let payment = sqlx::query($payment).bind("t1").bind(&id).bind(&account).bind(amount).bind("EUR");
            payment.bind(&id).bind("web").execute(&mut *connection).await?;
            let standing = sqlx::query_scalar::<_, String>($standing).bind("t1").bind(&account).bind(&id);
            let standing = standing.fetch_one(&mut *connection).await?;
            sqlx::query($open)
                .bind("t1")
                .bind(&account)
                .bind($crate::bench::yard::BALANCE)
                .execute(&mut *connection)
                .await?;
            let debit = sqlx::query($debit).bind(amount).bind("t1").bind(&account).bind(amount);
            match debit.execute(connection).await?.rows_affected() {
                1 if standing == id => Ok(()),
                rows => {
                    Err(StoreError::Corrupt(format!("payment {id}: {standing} stands, and {account} has {rows} rows")))
                }
            }
        }

        async fn claim_by_hand(connection: &mut Connection<Self>, id: Uuid) -> Result<(), StoreError> {
            sqlx::query($claim).bind($id(id)).execute(connection).await?;
            Ok(())
        }

        async fn answer_by_hand(
            connection: &mut Connection<Self>,
            id: Uuid,
            answer: Vec<u8>,
        ) -> Result<(), StoreError> {
            match sqlx::query($answer).bind(answer).bind($id(id)).execute(connection).await?.rows_affected() {
                1 => Ok(()),
                rows => Err(StoreError::Corrupt(format!("request {id} has {rows} rows"))),
            }
        }

        async fn handle_by_hand(&self, id: Uuid, account: i64) -> Result<(), StoreError> {
            let mut tx = self.pool().begin().await?;
            let new = sqlx::query($inbox).bind($id(id)).execute(&mut *tx).await?.rows_affected();
            if new == 1 {
                sqlx::query($business).bind(account).execute(&mut *tx).await?;
            }
            tx.commit().await?;
            Ok(())
        }
    };
}
pub(crate) use plain_sql;
