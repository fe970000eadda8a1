//! The control of M114: the same race on a store that looks first and inserts then, without a lock and without a unique key.
//! It must be seen to fail, or the race is no race.

use std::sync::Arc;

use oncebox::sqlx::{self, Row};
use tokio::sync::Barrier;

/// Rounds; one of them must find two payments.
pub(crate) const ROUNDS: usize = 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m114_m118_a_store_that_looks_first_pays_twice_in_the_same_race() {
    crate::postgres::with_database("m114_m118_control", |database| async move {
        database.run("create table careless (key text not null); create table paid (key text not null)").await;
        let mut doubled = 0;
        for round in 0..ROUNDS {
            let key = format!("key-{round}");
            let start = Arc::new(Barrier::new(2));
            let mut both = tokio::task::JoinSet::new();
            for _ in 0..2 {
                let (key, start, pool) = (key.clone(), start.clone(), database.store.clone());
                both.spawn(async move {
                    let pool = oncebox::store::Base::pool(&pool);
                    let mut tx = pool.begin().await.unwrap();
                    start.wait().await;
                    let found = sqlx::query("select 1 from careless where key = $1").bind(&key);
                    if found.fetch_optional(&mut *tx).await.unwrap().is_none() {
                        for sql in ["insert into careless (key) values ($1)", "insert into paid (key) values ($1)"] {
                            sqlx::query(sql).bind(&key).execute(&mut *tx).await.unwrap();
                        }
                    }
                    tx.commit().await.unwrap();
                });
            }
            both.join_all().await;
            let paid = sqlx::query("select count(*) from paid where key = $1").bind(&key);
            let paid: i64 = paid.fetch_one(oncebox::store::Base::pool(&database.store)).await.unwrap().get(0);
            doubled += u32::from(paid == 2);
        }
        assert!(doubled > 0, "in {ROUNDS} rounds nobody was faster than anybody: the race is none");
    })
    .await;
}
