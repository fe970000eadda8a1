//! The doors: the same limits in Rust, as a procedure and as a function; the statement of the Rust
//! door in the caller's hands.

use oncebox::StoreError;
use oncebox::store::{Base, enqueue, enqueue_all};
use oncebox_testkit::store::{LimitCase, RawValue, limit_cases};
use sqlx::mysql::MySqlArguments;
use sqlx::query::Query;
use sqlx::{Connection, MySql, MySqlConnection};

use crate::fixture::{Db, PrivateServer, execute, text};

/// A case as MySQL can say it: parameters have types, so numbers and bytes arrive as text before
/// the door sees them.
fn bind<'q>(case: &LimitCase, sql: &'static str) -> Option<Query<'q, MySql, MySqlArguments>> {
    let raw = &case.message;
    let mut query = sqlx::query(sql);
    for value in [&raw.topic, &raw.key, &raw.kind] {
        query = bind_text(query, value)?;
    }
    query = match &raw.payload {
        RawValue::Text(payload) => query.bind(payload.clone()),
        RawValue::Bytes(payload) => query.bind(payload.clone()),
        RawValue::Null | RawValue::Absent => query.bind(None::<Vec<u8>>),
        RawValue::Number(_) => return None,
    };
    for value in [&raw.content_type, &raw.headers, &raw.message_id] {
        query = bind_text(query, value)?;
    }
    Some(query)
}

fn bind_text<'q>(
    query: Query<'q, MySql, MySqlArguments>,
    value: &RawValue,
) -> Option<Query<'q, MySql, MySqlArguments>> {
    match value {
        RawValue::Text(text) => Some(query.bind(text.clone())),
        RawValue::Null | RawValue::Absent => Some(query.bind(None::<String>)),
        RawValue::Bytes(_) | RawValue::Number(_) => None,
    }
}

async fn run_cases(app: &mut MySqlConnection, sql: &'static str) {
    let mut seen = 0;
    for case in limit_cases() {
        let Some(query) = bind(&case, sql) else { continue };
        seen += 1;
        execute(app, "start transaction").await;
        case.check(&query.execute(&mut *app).await.map_err(StoreError::from));
        execute(app, "rollback").await;
    }
    assert!(seen > 120, "only {seen} cases reached the door");
}

const PROCEDURE: &str = "call oncebox_enqueue_p(?, ?, ?, ?, ?, ?, ?, @id)";
const FUNCTION: &str = "select oncebox_enqueue(?, ?, ?, ?, ?, ?, ?)";

// Shown to fail: with `$` instead of `\z` in the procedure the case "payments\n" is taken.
#[tokio::test(flavor = "multi_thread")]
async fn r34_r12_every_limit_holds_at_the_procedure_in_any_sql_mode() {
    let Some(db) = Db::new("r34_r12_every_limit_holds_at_the_procedure_in_any_sql_mode").await else { return };
    let mut app = db.app().await;
    run_cases(&mut app, PROCEDURE).await;
    execute(&mut app, "set session sql_mode = 'NO_BACKSLASH_ESCAPES,ANSI_QUOTES'; set names latin1").await;
    execute(&mut app, "call oncebox_enqueue_p('t', 'ä', 'k', 'p', null, '{\"a\":\"b\"}', null, @id)").await;
    let refused = sqlx::raw_sql("call oncebox_enqueue_p(concat('t', char(10)), null, 'k', 'p', null, null, null, @id)")
        .execute(&mut app)
        .await;
    assert!(refused.is_err_and(|error| error.to_string().contains("oncebox: limit topic: ")));
}

#[tokio::test(flavor = "multi_thread")]
async fn r34_every_limit_holds_at_the_function() {
    let test = "r34_every_limit_holds_at_the_function";
    let Some(server) = PrivateServer::start(test, &[]) else { return };
    let db = Db::on(&server.url().await).await;
    oncebox::store::Schema::migrate(&db.store).await.unwrap();
    let mut app = db.app().await;
    run_cases(&mut app, FUNCTION).await;

    // A set-based statement: one message for each row, in the transaction of the caller.
    execute(&mut app, "create table payment (n int); insert into payment values (1), (2), (3); start transaction")
        .await;
    let ids: Vec<String> = sqlx::query_scalar(
        "select oncebox_enqueue('payments', concat('k', n), 'paid', n, null, null, null) from payment",
    )
    .fetch_all(&mut app)
    .await
    .unwrap();
    assert_eq!(ids.iter().collect::<std::collections::HashSet<_>>().len(), 3);
    let there: i64 = sqlx::query_scalar("select count(*) from oncebox_outbox").fetch_one(&mut app).await.unwrap();
    assert_eq!(there, 3);
    execute(&mut app, "rollback").await;
    assert_eq!(db.count("oncebox_outbox").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_procedure_writes_what_the_rust_door_writes() {
    let Some(db) = Db::new("the_procedure_writes_what_the_rust_door_writes").await else { return };
    let mut app = db.app().await;
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let id = uuid::Uuid::now_v7();
    let message = text("payments", "schlüssel 😀", "{\"a\":\"ä\"}")
        .with_id(id)
        .with_header("b", "ä😀")
        .with_header("TraceParent", trace)
        .with_header("tracestate", "v=1");
    enqueue(&mut app, message).await.unwrap();
    let headers = format!(r#"{{"b":"ä\ud83d\ude00","TraceParent":"{trace}","tracestate":"v=1"}}"#);
    sqlx::query(PROCEDURE)
        .bind("payments")
        .bind("schlüssel 😀")
        .bind("test.happened")
        .bind("{\"a\":\"ä\"}")
        .bind(None::<String>)
        .bind(&headers)
        .bind(id.to_string().to_uppercase())
        .execute(&mut app)
        .await
        .unwrap();
    // Without a key the bucket is that of the id.
    sqlx::query("call oncebox_enqueue_p('t', null, 'k', '', null, null, ?, @id)")
        .bind("00000000-0000-0000-0000-000000000007")
        .execute(&mut app)
        .await
        .unwrap();
    let returned: String = sqlx::query_scalar("select cast(@id as char)").fetch_one(&mut app).await.unwrap();
    assert_eq!(returned, "00000000-0000-0000-0000-000000000007");

    let read = db.session("a").await.read(10).await.unwrap();
    let [mut rust, procedure, keyless] = <[_; 3]>::try_from(read.rows).unwrap();
    assert_eq!(rust.bucket, procedure.bucket);
    rust.message.created_at = procedure.message.created_at;
    assert_eq!(rust.message, procedure.message);
    assert_eq!(keyless.bucket, 107, "computed with another language's SHA-256");
}

// Shown to fail: with `insert .. values` and no check of the limits' rows in the statement, the
// lowered limit is not obeyed.
#[tokio::test(flavor = "multi_thread")]
async fn the_rust_door_works_on_the_applications_own_connection_whatever_its_modes() {
    let Some(db) = Db::new("the_rust_door_works_on_the_applications_own_connection_whatever_its_modes").await else {
        return;
    };
    let mut app = db.app().await;
    execute(&mut app, "set session sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES'; set names latin1").await;
    execute(&mut app, "set session transaction isolation level repeatable read").await;
    let payload: Vec<u8> = (0..=255).collect();
    let message = oncebox::NewMessage::bytes("t", "k", payload.clone()).with_key("ä\"'\\").with_header("ä", "\\\"\n");
    let mut transaction = app.begin().await.unwrap();
    enqueue(&mut *transaction, message.clone()).await.unwrap();
    transaction.commit().await.unwrap();
    let read = db.session("a").await.read(10).await.unwrap();
    let got = &read.rows[0].message;
    assert_eq!((&got.payload, &got.key, &got.headers), (&payload, &message.key, &message.headers));

    let made_by_hand = oncebox::message::TraceContext { traceparent: "x".repeat(600), tracestate: None };
    let traced = oncebox::NewMessage { trace: Some(made_by_hand), ..message.clone() };
    let refused = enqueue(&mut app, traced).await.unwrap_err();
    assert!(matches!(&refused, StoreError::Limit(error) if error.limit == "trace"), "{refused:?}");

    execute(&mut app, "update oncebox_limits set value = 3 where name = 'key_bytes_max'").await;
    let refused = enqueue(&mut app, message).await.unwrap_err();
    assert!(matches!(&refused, StoreError::Limit(error) if error.limit == "key"), "{refused:?}");
    execute(&mut app, "delete from oncebox_limits where name = 'headers_max'").await;
    let refused = enqueue(&mut app, text("t", "k", "p")).await.unwrap_err();
    assert!(matches!(&refused, StoreError::Refused(why) if why.contains("oncebox_limits")), "{refused:?}");
    assert_eq!(db.count("oncebox_outbox").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_get_the_databases_time_where_this_hosts_clock_is_off() {
    let Some(db) = Db::new("ids_get_the_databases_time_where_this_hosts_clock_is_off").await else { return };
    let mut app = db.app().await;
    // The database's clock is what is moved: its session believes that it is another day.
    execute(&mut app, "set timestamp = unix_timestamp() - 86400").await;
    let ids = enqueue_all(&mut app, vec![text("t", "k", "1"), text("t", "k", "2")]).await.unwrap();
    let now = uuid::Uuid::now_v7();
    let millis = |id: &uuid::Uuid| u64::from_be_bytes(id.as_bytes()[..8].try_into().unwrap()) >> 16;
    for id in &ids {
        assert_eq!(id.get_version_num(), 7);
        let behind = millis(&now) - millis(id);
        assert!((80_000_000..90_000_000).contains(&behind), "{behind} ms behind");
    }
    let given = enqueue(&mut app, text("t", "k", "3").with_id(now)).await.unwrap_err();
    assert!(matches!(&given, StoreError::Limit(error) if error.limit == "id_skew_seconds"), "{given:?}");
    assert_eq!(db.count("oncebox_outbox").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_no_packet_holds_is_refused_by_its_limit_and_a_raised_one_is_taken() {
    let Some(db) = Db::new("a_message_that_no_packet_holds_is_refused_by_its_limit_and_a_raised_one_is_taken").await
    else {
        return;
    };
    let mut app = db.app().await;
    let large = oncebox::NewMessage::bytes("t", "k", vec![7; 20_000_000]);
    let refused = enqueue(&mut app, large.clone()).await.unwrap_err();
    assert!(matches!(&refused, StoreError::Limit(error) if error.limit == "message_bytes_max"), "{refused:?}");
    execute(&mut app, "update oncebox_limits set value = 30000000 where name = 'message_bytes_max'").await;
    let refused = enqueue(&mut app, large).await.unwrap_err();
    assert!(matches!(&refused, StoreError::Refused(why) if why.contains("max_allowed_packet")), "{refused:?}");
    enqueue(&mut app, oncebox::NewMessage::bytes("t", "k", vec![7; 5_000_000])).await.unwrap();
    let read = db.session("a").await.read(10).await.unwrap();
    assert_eq!(read.rows[0].message.payload, vec![7; 5_000_000]);
    db.store.close().await;
}
