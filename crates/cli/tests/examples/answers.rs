//! What the payments service's provider sender makes of answers.

use std::collections::BTreeMap;

use axum::Router;
use axum::http::HeaderMap;
use axum::response::Response;
use axum::routing::post;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, StoreOptions};
use tokio::net::TcpListener;

use crate::stage::{ONCEBOX, SOON, Stage, until};
use crate::support::example;

/// Shown by: a sender that takes 404 for a refusal, one that takes rows by their key alone, and one
/// that follows redirects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_what_the_provider_refuses_for_good_is_refused_and_nothing_stands_in_the_way() {
    let stage = Stage::new(None, None);
    let binary = example("payments");
    stage.run(ONCEBOX, &["migrate", "up"]);
    stage.run(&binary, &["tables"]);
    let store = SqliteStore::connect(&StoreOptions::new(stage.settings.database.url.0.clone())).await.unwrap();
    // The provider answers as the key says; the last one is no header value. More rows than are
    // taken at once never succeed.
    let keys = ["200", "307", "400", "401", "404", "409", "413", "422", "429", "no\nvalue"].map(str::to_owned);
    for key in keys.into_iter().chain((0..40).map(|number| format!("{number:02} 500"))) {
        sqlx::query("insert into provider_notification (provider_key, body) values ($1, '{}')")
            .bind(key)
            .execute(store.pool())
            .await
            .unwrap();
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let provider = format!("http://{}/notifications", listener.local_addr().unwrap());
    let router = Router::new().route("/notifications", post(as_asked)).route("/elsewhere", post(async || "well"));
    tokio::spawn(async move { axum::serve(listener, router).await });

    let states = async || {
        let rows = "select provider_key || ' ' || state, attempts from provider_notification";
        let rows: Vec<(String, i64)> = sqlx::query_as(rows).fetch_all(store.pool()).await.unwrap();
        rows.into_iter().collect::<BTreeMap<_, _>>()
    };
    let sender = stage.command(&binary, &["provider-sender", "--provider", &provider], None);
    let mut sender = stage.start(sender, "provider-sender");
    until("each pending row is tried again", || {
        sender.check();
        async { states().await.iter().all(|(row, attempts)| !row.ends_with("pending") || *attempts > 2) }
    })
    .await;
    let mut seen = states().await;
    seen.retain(|row, _| !row.ends_with(" 500 pending"));
    let expected = [
        "200 delivered",
        "307 pending",
        "400 refused",
        "401 pending",
        "404 pending",
        "409 pending",
        "413 refused",
        "422 refused",
        "429 pending",
        "no\nvalue refused",
    ];
    assert_eq!(seen.keys().collect::<Vec<_>>(), expected);
    assert!(seen.iter().all(|(row, attempts)| row.ends_with("pending") || *attempts == 1), "{seen:?}");
    sender.stop(SOON);
}

async fn as_asked(headers: HeaderMap) -> Response {
    let key = headers["idempotency-key"].to_str().unwrap();
    let status: u16 = key[key.len() - 3..].parse().unwrap();
    let answer = Response::builder().status(status).header("location", "/elsewhere");
    answer.body("so it is".into()).unwrap()
}
