//! The sql handler with sets: whatever the statements and the values are, the tables and the error
//! are those of running message by message.

use std::collections::{BTreeMap, BTreeSet};

use oncebox::store::mysql::MySqlStore;
use oncebox::store::postgres::PostgresStore;
use oncebox::store::{Base, SqlValue, Statements};
use oncebox::{HandlerError, Handlers, SqlHandler};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::kit::{SOON, Sql, World, consumer_options, on_mariadb, on_postgres, on_servers};
use super::sql::{deliver, spec};
use super::support::eventually;

on_servers! {
    a_message_that_fails_in_a_set_is_taken_out,
}

/// How many lists of statements and messages are tried on each database.
const CASES: usize = 30;

type Values = BTreeMap<String, SqlValue>;

/// What every database runs: rows that several messages change, that one message makes and the next
/// one changes or takes away, sums over what earlier messages did, and constraints that fail.
const STATEMENTS: [&str; 8] = [
    "update account set balance = balance + :n where id = :id",
    "insert into entry (id, note) values (:id, :s)",
    "delete from entry where id = :id",
    "insert into log (note, total) select :s, sum(balance) from account",
    "update entry set note = coalesce(nullif(:s, note), '?') where note = :s or id = :id -- it sees what came before",
    "select id from account where id = :id and balance > :n;",
    "update account set seen = :t where id = :id",
    "insert into raw (bytes, json) values (:b, :j)",
];

fn number() -> impl Strategy<Value = SqlValue> {
    let digits = ["1", "2", "-3", "0.25", "1.5e1", "12345678901234567890", "0.1234567891", "90000"];
    prop_oneof![
        8 => select(digits.to_vec()).prop_map(|digits| SqlValue::Number(digits.to_owned())),
        1 => Just(SqlValue::Null),
        1 => any::<bool>().prop_map(|yes| SqlValue::Number(u8::from(yes).to_string())),
    ]
}

fn text() -> impl Strategy<Value = SqlValue> {
    let texts = ["a", "A", "b", "", "null", "NULL", "ä你😀", "O'Hara; -- {\"a\",\\b} ? :n", "$oncebox0$ ' \t\n", "1"];
    prop_oneof![
        9 => select(texts.to_vec()).prop_map(|text| SqlValue::Text(text.to_owned())),
        1 => Just(SqlValue::Null),
    ]
}

fn values() -> impl Strategy<Value = Values> {
    let id = prop_oneof![
        12 => (0..4_u8).prop_map(|id| SqlValue::Number(id.to_string())),
        1 => Just(SqlValue::Null),
        1 => Just(SqlValue::Text("one".to_owned())),
    ];
    let json = select(vec![r#"{"a": [1, "x"], "b": null}"#, "[]"]).prop_map(|json| SqlValue::Json(json.to_owned()));
    let bytes = proptest::collection::vec(any::<u8>(), 0..6).prop_map(SqlValue::Bytes);
    let time = (0..9_i64).prop_map(|second| {
        let at = chrono::DateTime::from_timestamp(1_790_000_000 + second, 123_456_000);
        at.map_or(SqlValue::Null, SqlValue::Time)
    });
    (id, number(), text(), json, bytes, time).prop_map(|(id, n, s, j, b, t)| {
        [("id", id), ("n", n), ("s", s), ("j", j), ("b", b), ("t", t)]
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    })
}

/// Runs the messages in a transaction that is rolled back: what stood in the tables before that, or
/// which message failed, and why.
async fn run<S: Sql>(
    world: &World<S>,
    statements: &[S::Statement],
    set: Option<&S::Set>,
    messages: &[Values],
) -> Result<Vec<String>, (usize, String)> {
    const ALL: [&str; 4] = [
        "select concat(id, '|', coalesce(balance, 0), '|', coalesce(cast(seen as char(30)), '-')) from account order by id",
        "select concat(id, '|', coalesce(note, '-')) from entry order by id",
        "select concat(coalesce(note, '-'), '|', coalesce(total, 0)) from log order by no",
        "select concat(RAW) from raw order by 1",
    ];
    let raw = if S::NAME == "postgres" { "encode(bytes, 'hex'), json" } else { "hex(bytes), json" };
    let mut connection = world.store.pool().acquire().await.unwrap();
    S::run(&mut connection, "begin").await.unwrap();
    let mut failed = None;
    if let Some(set) = set {
        if let Err((at, error)) = S::execute_set(&mut connection, set, messages).await {
            failed = Some((at.expect("the server tells which message it was"), error));
        }
    } else {
        'all: for (at, values) in messages.iter().enumerate() {
            for statement in statements {
                if let Err(error) = S::execute(&mut connection, statement, values).await {
                    failed = Some((at, error));
                    break 'all;
                }
            }
        }
    }
    let result = match failed {
        Some((at, error)) => Err((at, HandlerError::from(error).message)),
        None => {
            let mut tables = Vec::new();
            for rows in ALL {
                tables.push(S::texts_in(&mut connection, &rows.replace("RAW", raw)).await);
            }
            Ok(tables.concat())
        }
    };
    S::run(&mut connection, "rollback").await.unwrap();
    result
}

/// Draws statements and messages, and runs them one by one and as a set, without each message that
/// fails, until none does.
async fn as_one_by_one<S: Sql>(world: &World<S>, more: &[&'static str]) {
    let mut runner = TestRunner::deterministic();
    let statements = STATEMENTS.iter().chain(more).copied().collect::<Vec<_>>();
    let lists = proptest::collection::vec(select(statements.clone()), 1..4);
    let cases = (lists, proptest::collection::vec(values(), 2..14));
    let (mut failures, mut together, mut drawn) = (0, 0, BTreeSet::new());
    let all = statements.len();
    for _ in 0..CASES {
        let (texts, mut messages) = cases.new_tree(&mut runner).unwrap().current();
        let mut statements = Vec::new();
        drawn.extend(texts.iter().copied());
        for text in &texts {
            statements.push(world.store.prepare(text).await.unwrap());
        }
        let set = world.store.prepare_set(&statements).await.unwrap();
        let set = set.unwrap_or_else(|| panic!("{texts:?} run as a set"));
        while !messages.is_empty() {
            let alone = run(world, &statements, None, &messages).await;
            assert_eq!(run(world, &statements, Some(&set), &messages).await, alone, "{texts:?} with {messages:?}");
            let Err((at, _)) = alone else {
                together += messages.len();
                break;
            };
            failures += 1;
            messages.remove(at);
        }
    }
    assert_eq!(drawn.len(), all, "each statement is in some list");
    assert!(failures > CASES / 2 && together > CASES * 4, "{failures} failed, {together} ran together");
}

#[tokio::test]
async fn a_set_of_messages_is_as_one_message_after_the_other_on_postgres() {
    on_postgres("sql_sets_as_one_by_one", |world: World<PostgresStore>| async move {
        world
            .run(
                "create table account (id int primary key, balance numeric(30, 10) check (balance < 50000), seen timestamptz);
                 insert into account select n, n from generate_series(0, 2) n;
                 create table entry (id int primary key, note varchar(60));
                 create table log (no bigserial, note text, total numeric);
                 create table raw (bytes bytea, json jsonb);
                 create function bump(int, numeric) returns int language sql as
                   'update account set balance = balance * 2 + $2 where id = $1 returning id'",
            )
            .await;
        let more = [
            "insert into entry (id, note) values (:id, :s) on conflict (id) do update set note = entry.note || excluded.note",
            "insert into entry (id, note) values (:id, :s) on conflict do nothing",
            "insert into log (note) values (:s) returning no",
            "select bump(:id, :n)",
            "select from account where id = :id for update",
            "with gone as (delete from entry where id = :id returning note) insert into log (note) select note from gone",
        ];
        as_one_by_one(&world, &more).await;
    })
    .await;
}

#[tokio::test]
async fn a_set_of_messages_is_as_one_message_after_the_other_on_mariadb() {
    on_mariadb("sql_sets_as_one_by_one", |world: World<MySqlStore>| async move {
        world
            .run(
                "create table account (id int primary key, balance decimal(30, 10) check (balance < 50000), seen datetime(6));
                 insert into account (id, balance) values (0, 0), (1, 1), (2, 2);
                 create table entry (id int primary key, note varchar(60) collate utf8mb4_unicode_ci);
                 create table log (no bigint auto_increment primary key, note text, total decimal(40, 10));
                 create table raw (bytes blob, json json);
                 create procedure bump(a int, b decimal(40, 10)) update account set balance = balance * 2 + b where id = a",
            )
            .await;
        let more = [
            "insert into entry (id, note) values (:id, :s) on duplicate key update note = concat(note, values(note))",
            "insert ignore into entry (id, note) values (:id, :s)",
            "replace into entry (id, note) values (:id, :s)",
            "call bump(:id, :n)",
        ];
        as_one_by_one(&world, &more).await;
    })
    .await;
}

/// Statements that stand in no block run message by message, as before.
#[tokio::test]
async fn what_runs_in_no_block_is_not_given_sets() {
    on_postgres("sql_sets_not", |world: World<PostgresStore>| async move {
        for statement in ["savepoint s", "insert into effect (text) values ('x')", "lock table effect"] {
            let handler = SqlHandler::prepare(&world.store, spec(statement, &[], &[])).await.unwrap();
            assert!(!handler.gains_by_sets(), "{statement}");
        }
        let insert = spec("insert into effect (text) values (:x);", &[("x", "/x")], &[]);
        assert!(SqlHandler::prepare(&world.store, insert).await.unwrap().gains_by_sets());
    })
    .await;
}

/// A limit of time is that of all messages of a set, so the one that was running is not to blame. A
/// null stays null whatever the role has set.
#[tokio::test]
async fn what_a_role_has_set_changes_no_message_of_a_set_on_postgres() {
    on_postgres("sql_sets_role", |world: World<PostgresStore>| async move {
        let insert = "insert into effect (text) select :s from pg_sleep(0.05)";
        let set = world.store.prepare_set(&[world.store.prepare(insert).await.unwrap()]).await.unwrap().unwrap();
        let of = |value: SqlValue| BTreeMap::from([("s".to_owned(), value)]);
        let mut connection = world.store.pool().acquire().await.unwrap();
        PostgresStore::run(&mut connection, "begin; set local statement_timeout = '250ms'").await.unwrap();
        let messages = vec![of(SqlValue::Text("a".to_owned())); 20];
        let (at, error) =
            PostgresStore::execute_set(&mut connection, &set, &messages).await.expect_err("it takes a second");
        assert_eq!(at, None, "{error}");
        PostgresStore::run(&mut connection, "rollback; alter table effect alter text drop not null").await.unwrap();
        PostgresStore::run(&mut connection, "begin; set local array_nulls = off").await.unwrap();
        let messages = [of(SqlValue::Null), of(SqlValue::Text("NULL".to_owned()))];
        PostgresStore::execute_set(&mut connection, &set, &messages).await.unwrap();
        let texts = "select coalesce(text, 'none') from effect order by text nulls first";
        assert_eq!(PostgresStore::texts_in(&mut connection, texts).await, ["none", "NULL"]);
        PostgresStore::run(&mut connection, "rollback").await.unwrap();
    })
    .await;
}

/// A prepared block keeps what it read of a view when it was prepared. Shown to fail: a block that
/// stays prepared.
#[tokio::test]
async fn a_set_sees_a_view_as_it_is_now_on_mariadb() {
    on_mariadb("sql_sets_view", |world: World<MySqlStore>| async move {
        world.run("create view word as select 'old' as word").await;
        let insert = "insert into effect (text) select concat(word, :s) from word";
        let set = world.store.prepare_set(&[world.store.prepare(insert).await.unwrap()]).await.unwrap().unwrap();
        let messages: Vec<Values> = ["a", "b"]
            .iter()
            .map(|text| BTreeMap::from([("s".to_owned(), SqlValue::Text((*text).to_owned()))]))
            .collect();
        let mut connection = world.store.pool().acquire().await.unwrap();
        for (word, wanted) in [("old", ["olda", "oldb"]), ("new", ["newa", "newb"])] {
            world.run(&format!("create or replace view word as select '{word}' as word")).await;
            MySqlStore::run(&mut connection, "begin").await.unwrap();
            MySqlStore::execute_set(&mut connection, &set, &messages).await.unwrap();
            assert_eq!(MySqlStore::texts_in(&mut connection, "select text from effect order by text").await, wanted);
            MySqlStore::run(&mut connection, "rollback").await.unwrap();
        }
    })
    .await;
}

/// A null has the type of a text in a set too, so that what is computed with it has the digits that
/// it has alone. Shown to fail: a null as it comes through `using`.
#[tokio::test]
async fn a_null_of_a_set_is_the_null_of_one_message_on_mariadb() {
    on_mariadb("sql_sets_null", |world: World<MySqlStore>| async move {
        let insert = "insert into effect (text) values (coalesce(:n, 12345678901234567890.12345) + 0.1)";
        let insert = world.store.prepare(insert).await.unwrap();
        let nulls = vec![BTreeMap::from([("n".to_owned(), SqlValue::Null)]); 2];
        let mut connection = world.store.pool().acquire().await.unwrap();
        let mut texts = Vec::new();
        for is_set in [false, true] {
            MySqlStore::run(&mut connection, "begin").await.unwrap();
            if is_set {
                let set = world.store.prepare_set(std::slice::from_ref(&insert)).await.unwrap().unwrap();
                MySqlStore::execute_set(&mut connection, &set, &nulls).await.unwrap();
            } else {
                for values in &nulls {
                    MySqlStore::execute(&mut connection, &insert, values).await.unwrap();
                }
            }
            texts.push(MySqlStore::texts_in(&mut connection, "select text from effect").await);
            MySqlStore::run(&mut connection, "rollback").await.unwrap();
        }
        assert_eq!(texts[0], texts[1]);
    })
    .await;
}

/// What the server has counted for this session: bytes, texts run, statements closed and prepared.
async fn counts(connection: &mut sqlx::MySqlConnection) -> [i64; 4] {
    let counts = "select variable_value from information_schema.session_status where variable_name in \
        ('bytes_received', 'com_execute_immediate', 'com_stmt_close', 'com_stmt_prepare') order by variable_name";
    let counts = MySqlStore::texts_in(connection, counts).await;
    let counts: Vec<i64> = counts.iter().map(|count| count.parse().unwrap()).collect();
    counts.try_into().unwrap()
}

/// A set of any number of messages and of any length is run by one of a few statements, which stay
/// prepared. Shown to fail: a block that is prepared anew and closed each time, for which each
/// batch waited 40 ms.
#[tokio::test]
async fn sets_run_by_a_few_statements_that_stay_prepared_on_mariadb() {
    on_mariadb("sql_sets_prepared", |world: World<MySqlStore>| async move {
        let insert = "insert into effect (text) values (concat(:n, :s))";
        let set = world.store.prepare_set(&[world.store.prepare(insert).await.unwrap()]).await.unwrap().unwrap();
        let number =
            |number: usize| SqlValue::Number(if number.is_multiple_of(3) { "0.5".to_owned() } else { "7".to_owned() });
        let mut connection = world.store.pool().acquire().await.unwrap();
        MySqlStore::run(&mut connection, "begin").await.unwrap();
        let (mut all, mut stay) = (0, Vec::new());
        let mut before = counts(&mut connection).await;
        for _ in 0..2 {
            for (count, length) in [(1, 1), (3, 5), (64, 1), (65, 2), (55, 230), (100, 900), (2, 40_000)] {
                let message = |at: usize| {
                    let text = SqlValue::Text("x".repeat(length));
                    BTreeMap::from([("n".to_owned(), number(at)), ("s".to_owned(), text)])
                };
                let messages: Vec<Values> = (0..count).map(message).collect();
                MySqlStore::execute_set(&mut connection, &set, &messages).await.unwrap();
                all += count;
                let now @ [bytes, run, closed, prepared] = counts(&mut connection).await;
                // The server counts the text that a statement runs as prepared and closed.
                assert!(run > before[1], "no set was run");
                assert_eq!(closed - before[2], run - before[1], "closed and run");
                // Each in one record of TLS.
                let each = (bytes - before[0]) / (run - before[1]);
                assert!(each < 16_000 || length > 16_000, "{count} of {length} are {each} bytes a block");
                stay.push(prepared - closed);
                before = now;
            }
        }
        let (first, second) = stay.split_at(stay.len() / 2);
        assert!(second.iter().all(|count| Some(count) == first.last()), "prepared the second time: {stay:?}");
        assert_eq!(
            MySqlStore::texts_in(&mut connection, "select cast(count(*) as char) from effect").await,
            [all.to_string()]
        );
        MySqlStore::run(&mut connection, "rollback").await.unwrap();
    })
    .await;
}

/// One message of many fails by its statement, one by its values: each is dead with its own error,
/// and the others are there once, in the order of their keys.
async fn a_message_that_fails_in_a_set_is_taken_out<S: Sql + Statements>(world: World<S>) {
    let insert = spec("insert into effect (text) values (:text)", &[("text", "/text")], &[]);
    let handler = SqlHandler::prepare(&world.store, insert).await.unwrap();
    assert!(handler.gains_by_sets());
    world.broker.faults().hold_deliveries(true);
    for number in 100..160 {
        let key = ["a", "b", "c", "d", "e"][number % 5];
        let payload = match number {
            127 => r#"{"text": null}"#.to_owned(),
            143 => r#"{"other": 1}"#.to_owned(),
            _ => format!(r#"{{"text": "{key}{number}"}}"#),
        };
        deliver(&world.broker, key, &payload);
    }
    let consumer = world.consumer_of(consumer_options(), Handlers::new().otherwise_batch(handler));
    world.broker.faults().hold_deliveries(false);
    world.until_consumer("dead", |ledger| ledger.dead == 2).await;
    eventually("acknowledged", SOON, || async { (world.broker.committed("ledger", "t", 0) == 60).then_some(()) }).await;
    let mut dead = world.dead().await;
    dead.sort_by_key(|message| message.reason.clone());
    let reasons: Vec<&str> = dead.iter().map(|message| message.reason.as_str()).collect();
    assert_eq!(reasons, ["attempts", "terminal"], "{dead:?}");
    assert!(dead[1].error.as_deref().is_some_and(|error| error.contains("`text`")), "{dead:?}");
    let effects = world.effects().await;
    for (key, last) in [("a", 160), ("b", 160), ("c", 127), ("d", 143), ("e", 160)] {
        let wanted = (100..last).filter(|number| ["a", "b", "c", "d", "e"][number % 5] == key);
        let wanted: Vec<String> = wanted.map(|number| format!("{key}{number}")).collect();
        let came: Vec<&String> = effects.iter().filter(|effect| effect.starts_with(key)).collect();
        assert_eq!(came, wanted.iter().collect::<Vec<_>>(), "each once, in the key's order");
    }
    consumer.end().await;
}
