//! The sql handler: values as they were written, mistakes named at start.

use std::collections::BTreeMap;

use oncebox::store::Statements;
use oncebox::{SqlHandler, SqlSpec};
use oncebox_testkit::memory::MemoryBroker;
use uuid::Uuid;

use super::kit::{Sql, World, consumer_options, on_mariadb, on_postgres, sqlite};

pub(super) fn spec(statement: &str, params: &[(&str, &str)], optional: &[&str]) -> SqlSpec {
    SqlSpec {
        statements: vec![statement.to_owned()],
        params: params
            .iter()
            .map(|(name, source)| ((*name).to_owned(), (*source).to_owned()))
            .collect::<BTreeMap<_, _>>(),
        optional: optional.iter().map(|name| (*name).to_owned()).collect(),
    }
}

pub(super) fn deliver(broker: &MemoryBroker, key: &str, payload: &str) {
    let id = Uuid::now_v7().to_string();
    let headers = [("ce_id", id.as_bytes()), ("ce_type", b"made".as_slice()), ("region", b"eu".as_slice())];
    broker.append("t", Some(key.as_bytes()), &headers, Some(payload.as_bytes()));
}

/// One payload with values of every kind, as any JSON library writes them.
const PAYLOAD: &str = r#"{
  "amount": 12345678901234567890.1234567891, "small": -0.0000000001, "exponent": 1.5e3,
  "id": 9007199254740993, "counter": 18446744073709551615, "most": 9223372036854775807, "least": -9223372036854775808,
  "day": "2026-11-01", "at": "2026-11-01 10:11:12.123456", "paid": true, "open": false, "currency": "EUR",
  "extra": {"b": [1, 2.50], "a": null}, "list": [1, "two"], "ref": "0193f0c2-1d3e-7c4a-8b5f-0123456789ab",
  "note": null, "text": "O'Hara; -- \u00e4\u4f60\ud83d\ude00 \\ :id ?", "empty": ""
}"#;

/// A parameter for each member of the payload, and `missing`, `raw`, `region`, `time`.
fn every_kind() -> Vec<(&'static str, &'static str)> {
    let pointers = [
        ("amount", "/amount"),
        ("small", "/small"),
        ("exponent", "/exponent"),
        ("id", "/id"),
        ("counter", "/counter"),
        ("most", "/most"),
        ("least", "/least"),
        ("day", "/day"),
        ("at", "/at"),
        ("paid", "/paid"),
        ("open", "/open"),
        ("currency", "/currency"),
        ("extra", "/extra"),
        ("list", "/list"),
        ("ref", "/ref"),
        ("note", "/note"),
        ("text", "/text"),
        ("empty", "/empty"),
        ("missing", "/nowhere"),
        ("raw", "@payload"),
        ("region", "@header:region"),
        ("time", "@time"),
    ];
    pointers.to_vec()
}

/// Makes a table `payment` whose columns have the names of the parameters, delivers the payload,
/// and compares what stands there. Each column is given with its type, and its value as the
/// database shows it.
async fn arrives<S: Sql + Statements>(
    world: &World<S>,
    columns: &[(&str, &str, &str)],
    as_text: impl Fn(&str) -> String,
) {
    let quote = if S::NAME == "mysql" { "`" } else { "\"" };
    let declared: Vec<String> = columns.iter().map(|(name, kind, _)| format!("{quote}{name}{quote} {kind}")).collect();
    world.run(&format!("create table payment ({})", declared.join(", "))).await;
    let names: Vec<String> = columns.iter().map(|(name, ..)| format!("{quote}{name}{quote}")).collect();
    let values: Vec<String> = columns.iter().map(|(name, ..)| format!(":{name}")).collect();
    let insert = format!("insert into payment ({}) values ({})", names.join(", "), values.join(", "));
    let mut params = every_kind();
    params.retain(|(name, _)| columns.iter().any(|(column, ..)| column == name));
    assert_eq!(params.len(), columns.len());
    let handler = SqlHandler::prepare(&world.store, spec(&insert, &params, &["missing"])).await.unwrap();
    let id = Uuid::now_v7().to_string();
    let headers = [
        ("ce_id", id.as_bytes()),
        ("ce_type", b"made".as_slice()),
        ("ce_time", b"2026-11-01T10:11:12.123456Z"),
        ("region", b"eu"),
    ];
    world.broker.append("t", Some(b"a"), &headers, Some(PAYLOAD.as_bytes()));
    let consumer = world.consumer(consumer_options(), handler);
    super::support::eventually("the row", super::kit::SOON, || async {
        let dead = world.dead().await;
        assert!(dead.is_empty(), "{dead:?}");
        (world.store.texts("select 'there' from payment").await.len() == 1).then_some(())
    })
    .await;
    for (name, kind, wanted) in columns {
        let query = format!("select coalesce({}, 'null') from payment", as_text(&format!("{quote}{name}{quote}")));
        assert_eq!(world.store.texts(&query).await, [*wanted], "{name} {kind}");
    }
    consumer.end().await;
}

const TEXT: &str = "O'Hara; -- ä你😀 \\ :id ?";

#[tokio::test]
async fn values_arrive_as_they_were_written_on_postgres() {
    on_postgres("sql_values", |world| async move {
        let columns = [
            ("amount", "numeric(30, 10)", "12345678901234567890.1234567891"),
            ("small", "numeric", "-0.0000000001"),
            ("exponent", "numeric(10, 2)", "1500.00"),
            ("id", "bigint", "9007199254740993"),
            ("counter", "numeric(20)", "18446744073709551615"),
            ("most", "bigint", "9223372036854775807"),
            ("least", "bigint", "-9223372036854775808"),
            ("day", "date", "2026-11-01"),
            ("at", "timestamptz", "2026-11-01 10:11:12.123456+00"),
            ("paid", "boolean", "true"),
            ("open", "boolean", "false"),
            ("currency", "char(3)", "EUR"),
            ("extra", "json", r#"{"b": [1, 2.50], "a": null}"#),
            ("list", "jsonb", r#"[1, "two"]"#),
            ("ref", "uuid", "0193f0c2-1d3e-7c4a-8b5f-0123456789ab"),
            ("note", "integer", "null"),
            ("text", "varchar(100)", TEXT),
            ("empty", "text", ""),
            ("missing", "uuid", "null"),
            ("raw", "bytea", &hex(PAYLOAD)),
            ("region", "text", "eu"),
            ("time", "timestamptz", "2026-11-01 10:11:12.123456+00"),
        ];
        let as_text = |column: &str| match column {
            "\"raw\"" => "encode(\"raw\", 'hex')".to_owned(),
            column => format!("{column}::text"),
        };
        arrives(&world, &columns, as_text).await;
    })
    .await;
}

#[tokio::test]
async fn values_arrive_as_they_were_written_on_mariadb() {
    on_mariadb("sql_values", |world| async move {
        let columns = [
            ("amount", "decimal(30, 10)", "12345678901234567890.1234567891"),
            ("small", "decimal(20, 10)", "-0.0000000001"),
            ("exponent", "decimal(10, 2)", "1500.00"),
            ("id", "bigint", "9007199254740993"),
            ("counter", "bigint unsigned", "18446744073709551615"),
            ("most", "bigint", "9223372036854775807"),
            ("least", "bigint", "-9223372036854775808"),
            ("day", "date", "2026-11-01"),
            ("at", "datetime(6)", "2026-11-01 10:11:12.123456"),
            ("paid", "boolean", "1"),
            ("open", "boolean", "0"),
            ("currency", "char(3)", "EUR"),
            ("extra", "json", r#"{"b": [1, 2.50], "a": null}"#),
            ("list", "json", r#"[1, "two"]"#),
            ("ref", "uuid", "0193f0c2-1d3e-7c4a-8b5f-0123456789ab"),
            ("note", "int", "null"),
            ("text", "varchar(100) character set utf8mb4", TEXT),
            ("empty", "text", ""),
            ("missing", "uuid", "null"),
            ("raw", "longblob", &hex(PAYLOAD)),
            ("region", "varchar(10)", "eu"),
            ("time", "timestamp(6) null", "2026-11-01 10:11:12.123456"),
        ];
        let as_text = |column: &str| match column {
            "`raw`" => "lower(hex(`raw`))".to_owned(),
            column => format!("cast({column} as char(300) character set utf8mb4)"),
        };
        arrives(&world, &columns, as_text).await;
    })
    .await;
}

#[tokio::test]
async fn values_arrive_as_they_were_written_on_sqlite() {
    let world = sqlite().await;
    // The type that SQLite stores comes with the value. It has no decimal type: a column that is to
    // keep all digits is TEXT.
    let columns = [
        ("amount", "text", "text 12345678901234567890.1234567891"),
        ("small", "text", "text -0.0000000001"),
        ("exponent", "text", "text 1.5e3"),
        ("id", "integer", "integer 9007199254740993"),
        ("counter", "text", "text 18446744073709551615"),
        ("most", "integer", "integer 9223372036854775807"),
        ("least", "integer", "integer -9223372036854775808"),
        ("day", "text", "text 2026-11-01"),
        ("at", "text", "text 2026-11-01 10:11:12.123456"),
        ("paid", "integer", "integer 1"),
        ("open", "integer", "integer 0"),
        ("currency", "text", "text EUR"),
        ("extra", "text", r#"text {"b": [1, 2.50], "a": null}"#),
        ("list", "text", r#"text [1, "two"]"#),
        ("ref", "text", "text 0193f0c2-1d3e-7c4a-8b5f-0123456789ab"),
        ("note", "integer", "null"),
        ("text", "text", &format!("text {TEXT}")),
        ("empty", "text", "text "),
        ("missing", "text", "null"),
        ("raw", "blob", &format!("blob {}", hex(PAYLOAD))),
        ("region", "text", "text eu"),
        ("time", "text", "text 2026-11-01T10:11:12.123456Z"),
    ];
    let as_text = |column: &str| match column {
        "\"raw\"" => "typeof(\"raw\") || ' ' || lower(hex(\"raw\"))".to_owned(),
        column => format!("typeof({column}) || ' ' || {column}"),
    };
    arrives(&world, &columns, as_text).await;
}

fn hex(text: &str) -> String {
    text.bytes().map(|byte| format!("{byte:02x}")).collect()
}

/// A ledger adds up in the statement, and finds a row by a number: no digit is lost there either.
async fn counts<S: Sql + Statements>(world: &World<S>, create: &str) {
    world.run(create).await;
    world.run("insert into balance (id, total) values (18446744073709551614, 0), (18446744073709551615, 0)").await;
    let update = "update balance set total = total + :amount, entries = entries + 1 where id = :id";
    let params = [("amount", "/amount"), ("id", "/id")];
    let handler = SqlHandler::prepare(&world.store, spec(update, &params, &[])).await.unwrap();
    for _ in 0..3 {
        deliver(&world.broker, "a", r#"{"id": 18446744073709551615, "amount": 12345678901234567890.0000000001}"#);
    }
    deliver(&world.broker, "a", r#"{"id": 18446744073709551615, "amount": -1}"#);
    let consumer = world.consumer(consumer_options(), handler);
    let total = "select cast(total as char(40)) from balance where entries = 4";
    let seen = super::support::eventually("four entries", super::kit::SOON, || async {
        world.store.texts(total).await.first().cloned()
    })
    .await;
    assert_eq!(seen.trim(), "37037036703703703669.0000000003");
    assert_eq!(world.store.texts("select cast(entries as char(9)) from balance where total = 0").await[0].trim(), "0");
    consumer.end().await;
}

#[tokio::test]
async fn numbers_keep_their_digits_in_what_a_statement_computes_on_postgres() {
    on_postgres("sql_sums", |world| async move {
        counts(&world, "create table balance (id numeric(20), total numeric(30, 10), entries int default 0)").await;
    })
    .await;
}

/// Shown to fail: bound as text, MariaDB added the amounts as floats and found two rows for the
/// number.
#[tokio::test]
async fn numbers_keep_their_digits_in_what_a_statement_computes_on_mariadb() {
    on_mariadb("sql_sums", |world| async move {
        counts(&world, "create table balance (id bigint unsigned, total decimal(40, 10), entries int default 0)").await;
    })
    .await;
}

/// The key of the parameter is missing, or the database refuses its value: the next message is
/// handled.
#[tokio::test]
async fn a_missing_value_is_terminal_and_named_and_a_constraint_at_run_time_is_tried_again() {
    for (payload, reason, says) in
        [(r#"{"other": 1}"#, "terminal", "`amount`"), (r#"{"amount": null}"#, "attempts", "NOT NULL")]
    {
        let world = sqlite().await;
        world.run("create table payment (amount text not null)").await;
        let insert = spec("insert into payment (amount) values (:amount)", &[("amount", "/amount")], &[]);
        let handler = SqlHandler::prepare(&world.store, insert).await.unwrap();
        deliver(&world.broker, "a", payload);
        deliver(&world.broker, "b", r#"{"amount": 1}"#);
        let consumer = world.consumer(consumer_options(), handler);
        world.until_consumer("dead", |ledger| ledger.dead == 1).await;
        let dead = world.dead().await;
        let error = dead[0].error.as_deref().unwrap_or_default();
        assert!(dead[0].reason == reason && error.contains(says), "{payload}: {dead:?}");
        let rows = super::support::eventually("the other", super::kit::SOON, || async {
            Some(world.store.texts("select cast(amount as text) from payment").await).filter(|rows| !rows.is_empty())
        })
        .await;
        assert_eq!(rows, ["1"], "{payload}");
        consumer.end().await;
    }
}

async fn refused<S: Sql + Statements>(world: &World<S>, spec: SqlSpec) -> String {
    SqlHandler::prepare(&world.store, spec).await.unwrap_err().to_string()
}

// Shown to fail by preparing it: the handler fails behind its insert, the inbox row is rolled back,
// and the row comes twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_without_transactions_is_refused_at_start_and_named_on_mariadb() {
    let test = "a_table_without_transactions_is_refused_at_start_and_named_on_mariadb";
    on_mariadb(test, |world: World<oncebox::store::mysql::MySqlStore>| async move {
        world.run("create table Plain (x int) engine = MyISAM").await;
        world.run("create table rows_of (x int) engine = InnoDB").await;
        for statement in
            ["insert into Plain (x) values (:x)", "update rows_of r join `Plain` p on p.x = r.x set r.x = :x"]
        {
            let error = refused(&world, spec(statement, &[("x", "/x")], &[])).await;
            assert!(error.contains(".Plain stands in MyISAM") && error.contains("engine = InnoDB"), "{error}");
        }
        let good = spec("insert into rows_of (x) values (:x)", &[("x", "/x")], &[]);
        SqlHandler::prepare(&world.store, good).await.unwrap();
    })
    .await;
}

async fn ends_it<S: Sql + Statements>(world: &World<S>, statements: &[&str]) {
    for statement in statements {
        let mut two = spec("insert into effect (text) values (:x)", &[("x", "/x")], &[]);
        two.statements.push((*statement).to_owned());
        let error = refused(world, two).await;
        assert!(error.contains(&format!("`{statement}` ends the transaction")), "{error}");
    }
    let good = spec("insert into effect (no, text) values (:x, 'commit; begin') /* commit */", &[("x", "/x")], &[]);
    SqlHandler::prepare(&world.store, good).await.unwrap();
}

/// Shown to fail by preparing them: the first message ended the transaction of its whole batch,
/// which was dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_that_ends_its_transaction_is_refused_at_start_on_every_store() {
    const ALL: [&str; 4] = ["commit", "/* x */ Rollback", "begin", "savepoint s; commit"];
    ends_it(&sqlite().await, &ALL).await;
    on_postgres("sql_ends_its_transaction", |world| async move { ends_it(&world, &ALL).await }).await;
    on_mariadb("sql_ends_its_transaction", |world: World<oncebox::store::mysql::MySqlStore>| async move {
        ends_it(&world, &ALL).await;
        ends_it(&world, &["truncate table effect", "set autocommit = 0", "create table x (a int)"]).await;
    })
    .await;
}

#[tokio::test]
async fn mistakes_are_refused_at_start_and_named() {
    let world = sqlite().await;
    let error = refused(&world, spec("insert into nowhere (x) values (:x)", &[("x", "/x")], &[])).await;
    assert!(error.contains("`insert into nowhere (x) values (:x)` cannot be prepared"), "{error}");
    let error = refused(&world, spec("select :x, :y", &[("x", "/x")], &[])).await;
    assert!(error.contains("uses :y, which `params` does not name"), "{error}");
    let error = refused(&world, spec("select :x", &[("x", "/x"), ("y", "/y")], &[])).await;
    assert!(error.contains("`y` is declared and no statement uses it"), "{error}");
    let error = refused(&world, spec("select :x", &[("x", "amount")], &[])).await;
    assert!(error.contains("`x` reads from `amount`"), "{error}");
    assert!(refused(&world, SqlSpec::default()).await.contains("no statement"));
}
