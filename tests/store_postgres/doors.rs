//! The SQL doors: four overloads and the two that the Rust library calls, under the one table of
//! limits.

use std::time::Duration;

use oncebox::sqlx::postgres::PgConnection;
use oncebox::sqlx::{self, AssertSqlSafe, Connection, Executor, Row};
use oncebox::store::{Base, Enqueue, LeaseAnswer, LeaseRequest, Mark, NewEmail, Outbox, OutboxRow, Schema};
use oncebox::{NewMessage, StoreError};
use oncebox_testkit::store::{LimitCase, RawValue, limit_cases};
use uuid::Uuid;

use crate::postgres::{Database, with_database, with_user};
use crate::support::eventually;

/// A literal of standard SQL for an argument of some type.
fn literal(value: &RawValue, as_type: &str) -> Option<String> {
    Some(match value {
        RawValue::Absent | RawValue::Null => "null".to_owned(),
        // What the protocol cannot carry, no door can be given.
        RawValue::Text(text) if text.contains('\0') => return None,
        RawValue::Text(text) if as_type == "bytea" => format!("convert_to('{}', 'UTF8')", text.replace('\'', "''")),
        RawValue::Text(text) => format!("'{}'::{as_type}", text.replace('\'', "''")),
        RawValue::Bytes(bytes) => {
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("'\\x{hex}'::bytea")
        }
        RawValue::Number(number) => number.to_string(),
    })
}

/// How a door is called.
struct DoorCall {
    name: &'static str,
    payload_type: &'static str,
    headers_type: &'static str,
    call: fn(&[String; 7]) -> String,
}

/// Arguments in the order topic, kind, payload, key, headers, content type, id.
const DOORS: [DoorCall; 6] = [
    DoorCall { name: "enqueue(text)", payload_type: "text", headers_type: "jsonb", call: enqueue_sql },
    DoorCall { name: "enqueue(json)", payload_type: "json", headers_type: "jsonb", call: enqueue_sql },
    DoorCall { name: "enqueue(jsonb)", payload_type: "jsonb", headers_type: "jsonb", call: enqueue_sql },
    DoorCall { name: "enqueue(bytea)", payload_type: "bytea", headers_type: "jsonb", call: enqueue_sql },
    DoorCall {
        name: "enqueue_message",
        payload_type: "bytea",
        headers_type: "json",
        call: |[topic, kind, payload, key, headers, content_type, id]| {
            format!(
                "select oncebox.enqueue_message({topic}, {kind}, {payload}, {key}, {headers}, {content_type}, {id}, null, null)"
            )
        },
    },
    DoorCall {
        name: "enqueue_all",
        payload_type: "bytea",
        headers_type: "json",
        call: |[topic, kind, payload, key, headers, content_type, id]| {
            format!(
                "select oncebox.enqueue_all(array['t'::text, {topic}], array['k'::text, {kind}], array['\\x'::bytea, {payload}],
                   array[null::text, {key}], array[null::json, {headers}], array[null::text, {content_type}], array[null::uuid, {id}], null, null)"
            )
        },
    },
];

fn enqueue_sql([topic, kind, payload, key, headers, content_type, id]: &[String; 7]) -> String {
    format!(
        "select oncebox.enqueue(topic => {topic}, kind => {kind}, payload => {payload}, key => {key}, headers => {headers}, content_type => {content_type}, message_id => {id})"
    )
}

/// The statement of a case at a door; none where the types of the door cannot say it.
fn statement(door: &DoorCall, case: &LimitCase) -> Option<String> {
    let raw = &case.message;
    let is_bytes = matches!(raw.payload, RawValue::Bytes(_));
    if is_bytes != (door.payload_type == "bytea") && !matches!(raw.payload, RawValue::Text(_) | RawValue::Null) {
        return None;
    }
    let mut payload = literal(&raw.payload, door.payload_type)?;
    if payload == "null" {
        payload = format!("null::{}", door.payload_type);
    }
    Some((door.call)(&[
        literal(&raw.topic, "text")?,
        literal(&raw.kind, "text")?,
        payload,
        literal(&raw.key, "text")?,
        literal(&raw.headers, door.headers_type)?,
        literal(&raw.content_type, "text")?,
        literal(&raw.message_id, "uuid")?,
    ]))
}

/// Shown by leaving out single checks of `check_message`, and by `$` patterns in MySQL style: their
/// cases fail at all doors.
#[tokio::test]
async fn r34_every_limit_holds_at_every_sql_door() {
    with_database("r34_every_limit_holds_at_every_sql_door", |database| async move {
        let mut connection = database.connection().await;
        for door in &DOORS {
            let mut ran = 0;
            for case in limit_cases() {
                let Some(statement) = statement(door, &case) else { continue };
                ran += 1;
                let name = format!("{}: {}", door.name, case.name);
                let outcome = connection.execute(AssertSqlSafe(statement)).await;
                let by_type = |error: &sqlx::Error| match error {
                    // A type, not a limit, refuses it before the function sees it: text for a uuid,
                    // no JSON, no such function.
                    sqlx::Error::Database(error) => {
                        matches!(error.code().as_deref(), Some("22P02" | "22P05" | "42883" | "42804"))
                    }
                    _ => false,
                };
                match outcome {
                    Ok(_) if case.is_taken() => {}
                    // An exact duplicate is gone before jsonb can be looked at; any payload is
                    // checked as JSON by its type.
                    Ok(_) if door.headers_type == "jsonb" && case.name == "headers: a name twice" => {}
                    // The type takes any spelling of a UUID; what is stored and sent is the
                    // canonical one.
                    Ok(_) if case.refused_by == ["message_id"] => {}
                    Err(error) if case.is_taken() && by_type(&error) && door.payload_type.starts_with("json") => {}
                    Err(error) if !case.is_taken() && by_type(&error) => {}
                    outcome => LimitCase { name, ..case }.check(&outcome.map_err(StoreError::from)),
                }
            }
            assert!(ran > 100, "only {ran} cases reach {}", door.name);
        }
    })
    .await;
}

/// All committed rows, as a relay reads them.
async fn rows(database: &Database) -> Vec<OutboxRow> {
    let request = LeaseRequest { shard: 0, owner: "t".into(), length: Duration::from_secs(60), read_bytes: 4 << 20 };
    let LeaseAnswer::Taken(mut session) = database.store.open(&request).await.unwrap() else { panic!("no lease") };
    let batch = session.read(1_000).await.unwrap();
    session.checkpoint(Mark::default()).await.unwrap();
    batch.rows
}

#[tokio::test]
async fn r33_text_and_json_payloads_are_kept_byte_for_byte_jsonb_as_its_text_bytes_as_they_are() {
    let test = "r33_text_and_json_payloads_are_kept_byte_for_byte_jsonb_as_its_text_bytes_as_they_are";
    with_database(test, |database| async move {
        let mut connection = database.connection().await;
        for call in [
            r#"select oncebox.enqueue('t', 'k', '{"b": 1,  "a":2, "a":3}')"#,
            r#"select oncebox.enqueue('t', 'k', '{"b": 1,  "a":2, "a":3}'::json)"#,
            r#"select oncebox.enqueue('t', 'k', '{"b": 1,  "a":2, "a":3}'::jsonb)"#,
            r"select oncebox.enqueue('t', 'k', '\x00ff'::bytea)",
            // The calls of the documentation.
            r#"select oncebox.enqueue(topic => 'payments', key => 'acc-7', kind => 'payment.created',
                 payload => '{"paymentId":"pay_789"}', headers => '{"tenant":"t1"}'::jsonb)"#,
            r"select oncebox.enqueue(topic => 'blobs', key => null, kind => 'blob.stored', payload => '\x0001'::bytea,
                 content_type => 'application/octet-stream')",
            // By position: topic, kind, payload, key, headers, content_type, message_id.
            r#"select oncebox.enqueue('t', 'k', 'p', 'key', '{"a":"b"}', 'text/plain', '9f7a4f6e-5b1d-4f0e-8a55-0d6f1f9c1a2b')"#,
        ] {
            connection.execute(call).await.unwrap();
        }
        let rows = rows(&database).await;
        let payloads: Vec<&[u8]> = rows.iter().map(|row| row.message.payload.as_slice()).collect();
        let kept = br#"{"b": 1,  "a":2, "a":3}"#.as_slice();
        assert_eq!(payloads[..4], [kept, kept, br#"{"a": 3, "b": 1}"#, b"\x00\xff"]);
        let types: Vec<&str> = rows.iter().map(|row| row.message.content_type.as_str()).collect();
        let (json, bytes) = ("application/json", "application/octet-stream");
        assert_eq!(types, [json, json, json, bytes, json, bytes, "text/plain"]);
        let last = &rows[6].message;
        assert_eq!((last.topic.as_str(), last.kind.as_str(), last.key.as_deref()), ("t", "k", Some("key")));
        assert_eq!(last.headers, [("a".to_owned(), "b".to_owned())]);
        assert_eq!(last.id.to_string(), "9f7a4f6e-5b1d-4f0e-8a55-0d6f1f9c1a2b");
        for row in &rows {
            assert_eq!(row.bucket, oncebox::message::bucket(row.message.key.as_deref(), row.message.id));
        }
        let made = &rows[0].message;
        assert_eq!((made.id.get_version_num(), made.id.get_variant()), (7, uuid::Variant::RFC4122));
        let (seconds, _) = made.id.get_timestamp().unwrap().to_unix();
        assert!(seconds.abs_diff(made.created_at.timestamp().unsigned_abs()) <= 1);
    })
    .await;
}

/// R1: whoever could insert on his own would choose positions and buckets; whoever could read would
/// see payloads.
#[tokio::test]
async fn r1_an_application_may_call_the_doors_and_nothing_else() {
    with_database("r1_an_application_may_call_the_doors_and_nothing_else", |database| async move {
        let role = format!("app_{}", database.name);
        database.run(&format!("create role {role} login password 'x'; grant oncebox_app to {role}")).await;
        let outsider = format!("out_{}", database.name);
        database.run(&format!("create role {outsider} login password 'x'")).await;
        let mut app = PgConnection::connect(&with_user(&database.url, &role, "x")).await.unwrap();
        // A search path of the caller's own, with a table that shadows ours, leads nowhere.
        app.execute("create temp table outbox (x int); create temp table limits (name text, value bigint)").await.unwrap();
        app.execute("set search_path = pg_temp, public").await.unwrap();
        let id = oncebox::store::enqueue(&mut app, NewMessage::text("t", "k", "{}")).await.unwrap();
        let many = vec![NewMessage::text("t", "k", "{}"), NewMessage::bytes("t", "k", [0_u8])];
        assert_eq!(oncebox::store::enqueue_all(&mut app, many).await.unwrap().len(), 2);
        for payload in ["'{}'::text", "'{}'::json", "'{}'::jsonb", "''::bytea"] {
            let call = format!("select oncebox.enqueue('t', 'k', {payload})");
            app.execute(AssertSqlSafe(call.clone())).await.unwrap();
            let mut other = PgConnection::connect(&with_user(&database.url, &outsider, "x")).await.unwrap();
            assert_eq!(denied(&mut other, &call).await, "42501");
        }
        for forbidden in [
            "insert into oncebox.outbox (bucket, message_id, topic, kind, payload, content_type) values (0, gen_random_uuid(), 't', 'k', '', 'x')",
            "select * from oncebox.outbox",
            "select * from oncebox.limits",
            "update oncebox.limits set value = 1",
            "delete from oncebox.outbox_p1",
            "truncate oncebox.outbox",
            "select nextval('oncebox.outbox_position_seq')",
            "select setval('oncebox.outbox_position_seq', 1)",
            "update oncebox.shard set epoch = 0",
            "select oncebox.check_message('t', 'k', '', null, null, null, null, null, null)",
            "select oncebox.attach_outbox_range(1, 2, 3)",
            "select oncebox.uuid_v7()",
            "create table oncebox.mine (x int)",
        ] {
            assert_eq!(denied(&mut app, forbidden).await, "42501", "{forbidden}");
        }
        // The grant of docs/guides/production.md lets a service queue e-mails, and read none.
        let email = NewEmail {
            unique_key: "receipt_1".to_owned(),
            recipient: "ann@example.org".to_owned(),
            subject: "Receipt".to_owned(),
            body: "Hello".to_owned(),
        };
        assert!(app.queue_email(&email).await.is_err(), "an e-mail without a grant");
        database.run(&format!("grant insert, select (unique_key) on oncebox.email to {role}")).await;
        assert!(app.queue_email(&email).await.unwrap());
        assert!(!app.queue_email(&email).await.unwrap(), "it is there already");
        assert_eq!(denied(&mut app, "select recipient from oncebox.email").await, "42501");
        database.run(&format!("revoke insert, select (unique_key) on oncebox.email from {role}")).await;
        drop(app);
        let there: i64 = database.value("select count(*) from oncebox.outbox").await;
        assert_eq!(there, 7);
        assert!(!id.is_nil());
        let pool = database.store.pool();
        // Its temporary tables go with its connection, a moment later.
        eventually("the roles are dropped", Duration::from_secs(60), || async {
            let drop_roles = format!("drop role if exists {role}; drop role if exists {outsider}");
            sqlx::raw_sql(AssertSqlSafe(drop_roles)).execute(pool).await.ok()
        })
        .await;
    })
    .await;
}

async fn denied(connection: &mut PgConnection, statement: &str) -> String {
    match connection.execute(AssertSqlSafe(statement.to_owned())).await {
        Err(sqlx::Error::Database(error)) => error.code().unwrap_or_default().into_owned(),
        other => panic!("{statement}: {other:?}"),
    }
}

#[tokio::test]
async fn trace_headers_of_sql_callers_become_the_trace_and_leave_the_others_in_order() {
    with_database("trace_headers_of_sql_callers_become_the_trace_and_leave_the_others_in_order", |database| async move {
        const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let mut connection = database.connection().await;
        let headers = format!(r#"{{"z":"1","TraceParent":"{PARENT}","a":"2","tracestate":"v=1"}}"#);
        let hidden = headers.replace("TraceParent", "\\u0074raceparent");
        for headers in [&headers, &hidden] {
            let one = format!("select oncebox.enqueue_message('t', 'k', '', null, '{headers}', null, null, null, null)");
            connection.execute(AssertSqlSafe(one)).await.unwrap();
            let many = format!("select oncebox.enqueue_all('{{t}}', '{{k}}', array[''::bytea], null, array['{headers}'::json], null, null, null, null)");
            connection.execute(AssertSqlSafe(many)).await.unwrap();
        }
        let rows = rows(&database).await;
        assert_eq!(rows.len(), 4);
        for row in rows {
            let trace = row.message.trace.unwrap();
            assert_eq!((trace.traceparent.as_str(), trace.tracestate.as_deref()), (PARENT, Some("v=1")));
            let names: Vec<&str> = row.message.headers.iter().map(|(name, _)| name.as_str()).collect();
            assert_eq!(names, ["z", "a"]);
        }
    })
    .await;
}

#[tokio::test]
async fn ids_come_back_in_the_order_of_the_messages_and_of_their_positions() {
    with_database("ids_come_back_in_the_order_of_the_messages_and_of_their_positions", |database| async move {
        let mut connection = database.connection().await;
        let many: Vec<NewMessage> = (0..500)
            .map(|n| {
                let message = NewMessage::text("t", "k", n.to_string());
                if n % 3 == 0 { message.with_id(Uuid::now_v7()) } else { message }
            })
            .collect();
        let given: Vec<Option<Uuid>> = many.iter().map(|message| message.id).collect();
        let ids = oncebox::store::enqueue_all(&mut connection, many).await.unwrap();
        for (id, given) in ids.iter().zip(given) {
            assert!(given.is_none_or(|given| given == *id));
        }
        let rows =
            connection.fetch_all("select message_id, payload from oncebox.outbox order by position").await.unwrap();
        assert_eq!((ids.len(), rows.len()), (500, 500));
        for (number, (row, id)) in rows.iter().zip(&ids).enumerate() {
            assert_eq!(row.get::<Uuid, _>(0), *id);
            assert_eq!(row.get::<Vec<u8>, _>(1), number.to_string().into_bytes());
        }
    })
    .await;
}

/// Shown by leaving `pg_catalog.` and `operator(..)` out of `oncebox.enqueue_message`, one at a
/// time.
#[tokio::test]
async fn r33_no_search_path_of_a_caller_leads_a_door_astray() {
    with_database("r33_no_search_path_of_a_caller_leads_a_door_astray", |database| async move {
        database
            .run(
                "create schema astray;
                 do $$ declare f text[]; begin
                   foreach f slice 1 in array array[
                     ['octet_length(text)', 'int'], ['octet_length(bytea)', 'int'], ['to_hex(bigint)', 'text'], ['clock_timestamp()', 'timestamptz'],
                     ['date_part(text, timestamptz)', 'float8'], ['substr(text, int)', 'text'], ['sha256(bytea)', 'bytea'],
                     ['convert_to(text, name)', 'bytea'], ['currval(regclass)', 'bigint'], ['gen_random_uuid()', 'uuid'], ['get_byte(bytea, int)', 'int'],
                     ['joined(text, text)', 'text'], ['compared(text, text)', 'bool'], ['compared(int, int)', 'bool'], ['compared(bigint, bigint)', 'bool'],
                     ['compared(uuid, uuid)', 'bool'], ['multiplied(float8, float8)', 'float8'], ['may_trace(json)', 'bool']] loop
                     execute format('create function astray.%s returns %s language plpgsql as
                       ''begin raise exception $e$led astray$e$; end''', f[1], f[2]);
                   end loop;
                   foreach f slice 1 in array array[['||', 'text', 'joined'], ['~', 'text', 'compared'], ['<>', 'text', 'compared'], ['=', 'text', 'compared'],
                     ['<=', 'int', 'compared'], ['>=', 'int', 'compared'], ['<=', 'bigint', 'compared'], ['>=', 'bigint', 'compared'], ['=', 'uuid', 'compared'],
                     ['*', 'float8', 'multiplied']] loop
                     execute format('create operator astray.%s (leftarg = %s, rightarg = %2$s, function = astray.%3$s)', f[1], f[2], f[3]);
                   end loop;
                 end $$",
            )
            .await;
        let mut connection = database.connection().await;
        connection.execute("set search_path = astray, pg_catalog").await.unwrap();
        assert!(connection.execute("select 'a' || 'b'::text").await.is_err(), "the path of this session leads astray");
        let given = "'9f7a4f6e-5b1d-4f0e-8a55-0d6f1f9c1a2b'";
        let trace = "'00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01', 'v=1'";
        for call in [
            "enqueue('t', 'k', '{}'::text, 'key')".to_owned(),
            "enqueue('t', 'k', '{}'::json)".to_owned(),
            format!(r#"enqueue('t', 'k', '{{}}'::jsonb, 'key', '{{"a":"b"}}', 'text/plain', {given})"#),
            "enqueue('t', 'k', ''::bytea)".to_owned(),
            format!("enqueue_message('t', 'k', '', 'key', null, null, null, {trace})"),
            format!("enqueue_all('{{t,t}}', '{{k,k}}', array['', '']::bytea[], null, array[null, '{{\"a\":\"b\"}}']::json[], null, '{{null,{}}}', null, null)", given.trim_matches('\'')),
        ] {
            connection.execute(AssertSqlSafe(format!("select oncebox.{call}"))).await.unwrap_or_else(|error| panic!("{call}: {error}"));
        }
        let refused = connection.execute("select oncebox.enqueue('t t', 'k', '{}'::text)").await.unwrap_err().to_string();
        assert!(refused.contains("oncebox: limit topic: "), "{refused}");
        assert_eq!(rows(&database).await.len(), 7);
    })
    .await;
}

/// Shown by switching the trigger `compile_limits` off.
#[tokio::test]
async fn r34_a_changed_limit_holds_at_every_door_from_the_next_call_on() {
    with_database("r34_a_changed_limit_holds_at_every_door_from_the_next_call_on", |database| async move {
        let mut connection = database.connection().await;
        let long = || NewMessage::text("t", "k", "{}").with_key("abcd");
        // The plans of this session are made before the change.
        for _ in 0..8 {
            oncebox::store::enqueue(&mut connection, long()).await.unwrap();
            oncebox::store::enqueue_all(&mut connection, vec![long(), long()]).await.unwrap();
        }
        database.run("begin; update oncebox.limits set value = 3 where name = 'key_bytes_max'; rollback").await;
        oncebox::store::enqueue(&mut connection, long()).await.unwrap();
        database.run("update oncebox.limits set value = 3 where name = 'key_bytes_max'").await;
        let one = oncebox::store::enqueue(&mut connection, long()).await.unwrap_err().to_string();
        let many = oncebox::store::enqueue_all(&mut connection, vec![long(), long()]).await.unwrap_err().to_string();
        for refused in [one, many] {
            assert!(refused.contains("has 4 bytes, 1 to 3 are allowed"), "{refused}");
        }
        database.run("update oncebox.limits set value = least(value * 2, 249)").await;
        oncebox::store::enqueue(&mut connection, long()).await.unwrap();
        let heavy = || NewMessage::bytes("t", "k", vec![0; 300]);
        assert!(oncebox::store::enqueue(&mut connection, heavy()).await.is_err());
        database.run("update oncebox.limits set value = 2000000 where name = 'message_bytes_max'").await;
        let heaviest = vec![NewMessage::bytes("t", "k", vec![0; 2_000_000]), heavy()];
        oncebox::store::enqueue_all(&mut connection, heaviest).await.unwrap();
        database.run("delete from oncebox.limits where name = 'headers_max'").await;
        let missing = oncebox::store::enqueue(&mut connection, long()).await.unwrap_err().to_string();
        assert!(missing.contains("oncebox.limits has 8 rows, 9 are needed"), "{missing}");
    })
    .await;
}

/// Shown by leaving `passed_to` out of `oncebox.enqueue_all`, and `not exists` out of
/// `oncebox.enqueue_message`.
#[tokio::test]
async fn r7_a_position_that_the_relay_has_passed_is_refused_at_every_door() {
    with_database("r7_a_position_that_the_relay_has_passed_is_refused_at_every_door", |database| async move {
        let mut connection = database.connection().await;
        let message = || NewMessage::text("t", "k", "{}").with_key("acc-7");
        for _ in 0..8 {
            oncebox::store::enqueue(&mut connection, message()).await.unwrap();
            oncebox::store::enqueue_all(&mut connection, vec![message(), message()]).await.unwrap();
        }
        assert_eq!(rows(&database).await.len(), 24);
        // The bucket of `acc-7` is 85.
        database.run("update oncebox.shard set scanned_to = 100, bucket_to = 85").await;
        let one = oncebox::store::enqueue(&mut connection, message()).await.unwrap_err().to_string();
        let many =
            oncebox::store::enqueue_all(&mut connection, vec![message(), message()]).await.unwrap_err().to_string();
        for refused in [one, many] {
            assert!(refused.contains("sequence behind cursor: the relay has passed position 2"), "{refused}");
        }
        // No relay has passed anything for other buckets.
        database.run("update oncebox.shard set bucket_to = 84").await;
        oncebox::store::enqueue(&mut connection, message()).await.unwrap();
        assert_eq!(oncebox::store::enqueue_all(&mut connection, vec![message(), message()]).await.unwrap().len(), 2);
    })
    .await;
}

/// Shown to fail: a bulk door that compared the cursor with the last value of the sequence, once.
#[tokio::test]
async fn r7_a_sequence_whose_next_position_is_the_cursor_is_refused_in_bulk() {
    with_database("r7_a_sequence_whose_next_position_is_the_cursor_is_refused_in_bulk", |database| async move {
        let mut connection = database.connection().await;
        let two = || (0..2).map(|_| NewMessage::text("t", "k", "{}").with_key("acc-7")).collect::<Vec<_>>();
        oncebox::store::enqueue_all(&mut connection, two()).await.unwrap();
        database.run("update oncebox.shard set scanned_to = 2").await;
        database.run("select setval('oncebox.outbox_position_seq', 2, false)").await;
        let refused = oncebox::store::enqueue_all(&mut connection, two()).await.unwrap_err().to_string();
        assert!(refused.contains("sequence behind cursor: the relay has passed position 2"), "{refused}");
    })
    .await;
}

/// Each position that is drawn and not used is a gap, and the relay keeps only so many. Shown to
/// fail: a door that checked a message in the statement that inserts it.
#[tokio::test]
async fn r9_a_message_that_is_refused_draws_no_position() {
    with_database("r9_a_message_that_is_refused_draws_no_position", |database| async move {
        let mut connection = database.connection().await;
        let plain = || NewMessage::text("t", "k", "{}");
        oncebox::store::enqueue(&mut connection, plain()).await.unwrap();
        let refused = "select oncebox.enqueue('', 'k', '{}'::text)";
        assert!(connection.execute(refused).await.is_err());
        let refused = r#"select oncebox.enqueue('t t', 'k', '{}'::text, headers => '{"a":"b"}')"#;
        assert!(connection.execute(refused).await.is_err());
        oncebox::store::enqueue(&mut connection, plain()).await.unwrap();
        let positions: Vec<i64> = rows(&database).await.into_iter().map(|row| row.position).collect();
        assert_eq!(positions[1], positions[0] + 1);
    })
    .await;
}

/// A function of ours is bound to its operators when it is made. Shown to fail: a migration with
/// the search path of its session.
#[tokio::test]
async fn r33_a_migration_binds_nothing_that_another_role_made() {
    with_database("r33_a_migration_binds_nothing_that_another_role_made", |database| async move {
        database
            .run(
                "drop schema oncebox cascade;
                 create function public.multiplied(float8, int) returns float8 language plpgsql as
                   'begin raise exception $e$led astray$e$; end';
                 create operator public.* (leftarg = float8, rightarg = int, function = public.multiplied);
                 create function public.convert_to(text, text) returns bytea language plpgsql as
                   'begin raise exception $e$led astray$e$; end'",
            )
            .await;
        database.store.migrate().await.unwrap();
        let mut connection = database.connection().await;
        let message = || NewMessage::text("t", "k", "{}").with_key("acc-7");
        oncebox::store::enqueue(&mut connection, message()).await.unwrap();
        oncebox::store::enqueue_all(&mut connection, vec![message(), message()]).await.unwrap();
        assert_eq!(rows(&database).await.len(), 3);
    })
    .await;
}
