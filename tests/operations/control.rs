//! The control of M114: the same race over HTTP against two servers whose store looks first and
//! inserts then, without a lock and without a unique key. It must be seen to pay twice, or the race
//! is no race.

use std::sync::Arc;

use axum::Router;
use axum::http::HeaderMap;
use axum::routing::post as route_post;
use oncebox::sqlx::{self, PgPool};
use oncebox::store::Base;
use tokio::sync::Barrier;

use super::kit::*;
use super::service::payment;

/// Rounds; of a careless service one of them must find two payments.
pub(crate) const ROUNDS: usize = 20;

/// These requests at once; gives their answers.
pub(crate) async fn race<const N: usize>(requests: [reqwest::RequestBuilder; N]) -> Vec<Http> {
    let start = Arc::new(Barrier::new(N));
    let mut racing = tokio::task::JoinSet::new();
    for request in requests {
        let start = start.clone();
        racing.spawn(async move {
            start.wait().await;
            send(request).await
        });
    }
    racing.join_all().await
}

/// `POST /payments` as it is often written.
async fn careless(pool: PgPool) -> String {
    let pay = move |headers: HeaderMap| {
        let (pool, key) = (pool.clone(), headers["idempotency-key"].to_str().unwrap().to_owned());
        async move {
            let mut tx = pool.begin().await.unwrap();
            let found = sqlx::query("select 1 from careless where key = $1").bind(&key).fetch_optional(&mut *tx).await;
            if found.unwrap().is_none() {
                for sql in ["insert into paid (key) values ($1)", "insert into careless (key) values ($1)"] {
                    sqlx::query(sql).bind(&key).execute(&mut *tx).await.unwrap();
                }
            }
            tx.commit().await.unwrap();
            (axum::http::StatusCode::CREATED, "{}")
        }
    };
    serve(Router::new().route("/payments", route_post(pay))).await
}

// Shown by: inserting first (`on conflict do nothing` on a unique key): no round finds two
// payments.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m114_m118_a_store_that_looks_first_pays_twice_in_the_same_race() {
    crate::postgres::with_database("m114_m118_control", |database| async move {
        database.run("create table careless (key text not null); create table paid (key text not null)").await;
        let (one, two) = (database.another_store().await, database.another_store().await);
        let urls = [careless(one.pool().clone()).await, careless(two.pool().clone()).await];
        // More than others have: on a machine that runs them one after the other, few meet.
        let rounds = 10 * ROUNDS;
        for round in 0..rounds {
            let (key, body) = (format!("{K1}-{round}"), payment(1, &format!("order-{round}")));
            let ask = |number: usize| post(&format!("{}/payments", urls[number]), &key, body.as_str());
            let answers = race([0, 1, 0, 1].map(ask)).await;
            assert!(answers.iter().all(|answer| answer.status == 201), "{answers:?}");
            let paid: i64 = database.value(&format!("select count(*) from paid where key = '{key}'")).await;
            assert!(paid >= 1);
            if paid > 1 {
                return;
            }
        }
        panic!("in {rounds} rounds nobody was faster than anybody: the race is none");
    })
    .await;
}
