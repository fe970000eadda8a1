//! The sql handler: values as they were written, mistakes named at start.

use std::collections::BTreeMap;

use oncebox::broker::memory::MemoryBroker;
use oncebox::runtime::{SqlHandler, SqlSpec, SqlSpecError};
use oncebox::store::Statements;
use uuid::Uuid;

use super::kit::{Sql, World, consumer_options, on_postgres, sqlite};

fn spec(statement: &str, params: &[(&str, &str)], optional: &[&str]) -> SqlSpec {
    SqlSpec {
        statements: vec![statement.to_owned()],
        params: params
            .iter()
            .map(|(name, source)| ((*name).to_owned(), (*source).to_owned()))
            .collect::<BTreeMap<_, _>>(),
        optional: optional.iter().map(|name| (*name).to_owned()).collect(),
    }
}

fn deliver(broker: &MemoryBroker, key: &str, payload: &str) {
    let id = Uuid::now_v7().to_string();
    let headers = [("ce_id", id.as_bytes()), ("ce_type", b"made".as_slice()), ("region", b"eu".as_slice())];
    broker.append("t", Some(key.as_bytes()), &headers, Some(payload.as_bytes()));
}

const INSERT: &str = "insert into payment (amount, note, extra, paid, raw, region, comment) values \
    (:amount, :note, :extra, :paid, :raw, :region, :comment)";
const PARAMS: [(&str, &str); 7] = [
    ("amount", "/amount"),
    ("note", "/note"),
    ("extra", "/extra"),
    ("paid", "/paid"),
    ("raw", "@payload"),
    ("region", "@header:region"),
    ("comment", "/comment"),
];

#[tokio::test]
async fn values_arrive_as_they_were_written_on_postgres() {
    on_postgres("sql_values", |world| async move {
        world
            .run(
                "create table payment (amount numeric(30, 2), note text, extra jsonb, paid boolean, raw bytea, region text, \
                 comment text)",
            )
            .await;
        let handler = SqlHandler::prepare(&world.store, spec(INSERT, &PARAMS, &["comment"])).await.unwrap();
        let payload = r#"{"amount": 12345678901234567890.10, "note": null, "extra": {"b": [1, 2]}, "paid": true}"#;
        deliver(&world.broker, "a", payload);
        let consumer = world.consumer(consumer_options(), handler);
        let row = "select concat_ws('|', amount, coalesce(note, 'null'), extra, paid, convert_from(raw, 'UTF8') = \
                   '{\"amount\": 12345678901234567890.10, \"note\": null, \"extra\": {\"b\": [1, 2]}, \"paid\": true}', region, \
                   coalesce(comment, 'null')) from payment";
        let seen = super::support::eventually("the row", super::kit::SOON, || async {
            world.store.texts(row).await.first().cloned()
        })
        .await;
        assert_eq!(seen, r#"12345678901234567890.10|null|{"b": [1, 2]}|t|t|eu|null"#);
        consumer.end().await;
    })
    .await;
}

#[tokio::test]
async fn a_value_that_is_missing_is_terminal_and_names_the_parameter() {
    let world = sqlite().await;
    world.run("create table payment (amount text not null)").await;
    let insert = spec("insert into payment (amount) values (:amount)", &[("amount", "/amount")], &[]);
    let handler = SqlHandler::prepare(&world.store, insert).await.unwrap();
    deliver(&world.broker, "a", r#"{"other": 1}"#);
    deliver(&world.broker, "b", r#"{"amount": 1}"#);
    let consumer = world.consumer(consumer_options(), handler);
    world.until_consumer("dead", |ledger| ledger.dead == 1).await;
    let dead = world.dead().await;
    assert!(dead[0].reason == "terminal" && dead[0].error.as_deref().unwrap().contains("`amount`"), "{dead:?}");
    let rows = super::support::eventually("the other", super::kit::SOON, || async {
        Some(world.store.texts("select cast(amount as text) from payment").await).filter(|rows| !rows.is_empty())
    })
    .await;
    assert_eq!(rows, ["1"]);
    consumer.end().await;
}

#[tokio::test]
async fn a_constraint_at_run_time_is_a_failure_of_that_message_only() {
    let world = sqlite().await;
    world.run("create table payment (amount text not null)").await;
    let insert = spec("insert into payment (amount) values (:amount)", &[("amount", "/amount")], &[]);
    let handler = SqlHandler::prepare(&world.store, insert).await.unwrap();
    deliver(&world.broker, "a", r#"{"amount": null}"#);
    deliver(&world.broker, "b", r#"{"amount": 2}"#);
    let consumer = world.consumer(consumer_options(), handler);
    world.until_consumer("dead", |ledger| ledger.dead == 1).await;
    assert_eq!(world.dead().await[0].reason, "attempts");
    assert_eq!(world.store.texts("select cast(amount as text) from payment").await, ["2"]);
    consumer.end().await;
}

async fn refused<S: Sql + Statements>(world: &World<S>, spec: SqlSpec) -> SqlSpecError {
    SqlHandler::prepare(&world.store, spec).await.unwrap_err()
}

#[tokio::test]
async fn mistakes_are_refused_at_start_and_named() {
    let world = sqlite().await;
    let error = refused(&world, spec("insert into nowhere (x) values (:x)", &[("x", "/x")], &[])).await;
    assert!(matches!(&error, SqlSpecError::Refused { statement, .. } if statement.contains("nowhere")), "{error}");
    let error = refused(&world, spec("select :x, :y", &[("x", "/x")], &[])).await;
    assert!(matches!(&error, SqlSpecError::Undeclared { name, .. } if name == "y"), "{error}");
    let error = refused(&world, spec("select :x", &[("x", "/x"), ("y", "/y")], &[])).await;
    assert!(matches!(&error, SqlSpecError::Unused(name) if name == "y"), "{error}");
    let error = refused(&world, spec("select :x", &[("x", "amount")], &[])).await;
    assert!(matches!(&error, SqlSpecError::UnknownSource { name, .. } if name == "x"), "{error}");
    assert!(matches!(refused(&world, SqlSpec::default()).await, SqlSpecError::NoStatement));
}
