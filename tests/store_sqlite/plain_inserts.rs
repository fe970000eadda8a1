//! The SQL door of SQLite is a plain insert; its limits are triggers (R13, R34).

use std::time::Duration;

use oncebox::StoreError;
use oncebox::store::sqlite::SqliteStore;
use oncebox::store::{Base, LeaseAnswer, LeaseRequest, Mark, Outbox};
use oncebox_testkit::store::{Fixture, RawMessage, RawValue, Trial, limit_cases};
use sqlx::{AssertSqlSafe, query, query_as, query_scalar};

use crate::fixture::SqliteFile;

/// Every way to insert; the conflict clauses must not soften a limit.
const VERBS: [&str; 6] = [
    "insert into",
    "insert or abort into",
    "insert or fail into",
    "insert or ignore into",
    "insert or replace into",
    "replace into",
];

async fn insert(store: &SqliteStore, verb: &str, raw: &RawMessage, tail: &str) -> Result<u64, StoreError> {
    let values = [
        ("topic", &raw.topic),
        ("key", &raw.key),
        ("kind", &raw.kind),
        ("headers", &raw.headers),
        ("payload", &raw.payload),
        ("content_type", &raw.content_type),
        ("message_id", &raw.message_id),
    ];
    let given: Vec<_> = values.into_iter().filter(|(_, value)| **value != RawValue::Absent).collect();
    let columns: Vec<&str> = given.iter().map(|(column, _)| *column).collect();
    let marks = vec!["?"; columns.len()].join(", ");
    let sql = format!("{verb} oncebox_outbox ({}) values ({marks}){tail}", columns.join(", "));
    let mut insert = query(AssertSqlSafe(sql));
    for (_, value) in given {
        insert = match value {
            RawValue::Absent | RawValue::Null => insert.bind(None::<String>),
            RawValue::Text(text) => insert.bind(text.clone()),
            RawValue::Bytes(bytes) => insert.bind(bytes.clone()),
            RawValue::Number(number) => insert.bind(*number),
        };
    }
    Ok(insert.execute(store.pool()).await?.rows_affected())
}

async fn count(store: &SqliteStore) -> i64 {
    query_scalar("select count(*) from oncebox_outbox").fetch_one(store.pool()).await.unwrap()
}

/// Why triggers: a CHECK lets `insert or ignore` answer Ok and write nothing (tried on SQLite
/// 3.40).
#[tokio::test]
async fn r34_every_limit_holds_for_plain_inserts_whatever_the_conflict_clause() {
    let trial = Trial::<SqliteFile>::start("plain inserts").await.unwrap();
    let mut taken = 0;
    for verb in VERBS {
        for case in limit_cases() {
            let answer = insert(&trial.store, verb, &case.message, "").await;
            case.check(&answer);
            taken += i64::from(case.is_taken());
        }
    }
    for case in limit_cases() {
        let answer = insert(&trial.store, "insert into", &case.message, " on conflict do nothing").await;
        case.check(&answer);
        taken += i64::from(case.is_taken());
    }
    assert_eq!(count(&trial.store).await, taken);
    // What was taken can be read, every row of it.
    let request = LeaseRequest { shard: 0, owner: "a".into(), length: Duration::from_secs(60), read_bytes: 4 << 20 };
    let LeaseAnswer::Taken(mut session) = trial.store.open(&request).await.unwrap() else { panic!() };
    let mut read = 0;
    while read < taken {
        let batch = session.read(1_000).await.unwrap();
        assert!(!batch.rows.is_empty(), "{read} of {taken}");
        read += i64::try_from(batch.rows.len()).unwrap();
        session.checkpoint(Mark { through: Some(batch.batch), ..Mark::default() }).await.unwrap();
    }
    assert_eq!(count(&trial.store).await, 0);
}

#[tokio::test]
async fn r13_a_position_is_never_given() {
    let trial = Trial::<SqliteFile>::start("given positions").await.unwrap();
    let store = &trial.store;
    let tails = ["", " on conflict do nothing", " on conflict (position) do update set topic = 'stolen'"];
    for round in 0..2 {
        for verb in VERBS {
            for tail in tails {
                for position in [i64::MIN, -5, -1, 0, 1, 7, i64::MAX] {
                    let sql = format!(
                        "{verb} oncebox_outbox (position, topic, kind, payload) values ({position}, 't', 'k', ''){tail}"
                    );
                    let Err(error) = query(AssertSqlSafe(sql.clone())).execute(store.pool()).await else {
                        panic!("{sql}: taken");
                    };
                    let error = StoreError::from(error);
                    assert!(matches!(&error, StoreError::Limit(limit) if limit.limit == "position"), "{sql}: {error}");
                }
            }
        }
        assert_eq!(count(store).await, round);
        // Null is left out, as for any AUTOINCREMENT column.
        let plain = "insert into oncebox_outbox (position, topic, kind, payload) values (null, 't', 'k', '')";
        query(plain).execute(store.pool()).await.unwrap();
    }
    let positions: Vec<i64> =
        query_scalar("select position from oncebox_outbox order by 1").fetch_all(store.pool()).await.unwrap();
    assert_eq!(positions, [1, 2]);
}

#[tokio::test]
async fn what_the_database_decides_is_never_given() {
    let trial = Trial::<SqliteFile>::start("given columns").await.unwrap();
    for (column, value) in [("bucket", "1"), ("bucket", "'x'"), ("created_at", "0"), ("created_at", "'now'")] {
        let sql = format!("insert into oncebox_outbox (topic, kind, payload, {column}) values ('t', 'k', '', {value})");
        let error = StoreError::from(query(AssertSqlSafe(sql)).execute(trial.store.pool()).await.unwrap_err());
        assert!(matches!(&error, StoreError::Limit(limit) if limit.limit == column), "{column}: {error}");
    }
}

/// Text in a database can be any bytes; a key that nobody can decode would stop every reader.
#[tokio::test]
async fn text_that_is_not_utf_8_is_refused() {
    let trial = Trial::<SqliteFile>::start("no UTF-8").await.unwrap();
    let bad =
        ["ff", "61ff", "c3", "c328", "e282", "eda080", "edbfbf", "c080", "e08080", "f0828282", "f4908080", "80", "fb"];
    for bytes in bad {
        for column in ["topic", "key", "kind", "content_type"] {
            let others: Vec<&str> = ["topic", "kind"].into_iter().filter(|other| *other != column).collect();
            let sql = format!(
                "insert into oncebox_outbox ({column}, {}, payload) values (cast(x'{bytes}' as text), {} '')",
                others.join(", "),
                "'t', ".repeat(others.len())
            );
            let error = StoreError::from(query(AssertSqlSafe(sql)).execute(trial.store.pool()).await.unwrap_err());
            assert!(matches!(&error, StoreError::Limit(limit) if limit.limit == column), "{column} {bytes}: {error}");
        }
    }
    // A payload is bytes, whatever it is called.
    let payload = "insert into oncebox_outbox (topic, kind, payload) values ('t', 'k', cast(x'ff00' as text))";
    query(payload).execute(trial.store.pool()).await.unwrap();
    let length = "select length(cast(payload as blob)) from oncebox_outbox";
    assert_eq!(query_scalar::<_, i64>(length).fetch_one(trial.store.pool()).await.unwrap(), 2);
}

#[tokio::test]
async fn the_door_of_the_manual_fills_in_the_rest() {
    let trial = Trial::<SqliteFile>::start("defaults").await.unwrap();
    let store = &trial.store;
    let text = "insert into oncebox_outbox (topic, key, kind, payload) values ('payments', 'acc-7', 'payment.created', \
                '{\"paymentId\":\"pay_789\"}') returning message_id";
    let id: String = query_scalar(text).fetch_one(store.pool()).await.unwrap();
    let blob = "insert into oncebox_outbox (topic, key, kind, payload, headers, content_type, message_id, bucket, created_at) \
                values ('blobs', null, 'blob.stored', x'0001', null, null, null, null, null)";
    query(blob).execute(store.pool()).await.unwrap();
    let request = LeaseRequest { shard: 0, owner: "a".into(), length: Duration::from_secs(60), read_bytes: 4 << 20 };
    let LeaseAnswer::Taken(mut session) = store.open(&request).await.unwrap() else { panic!() };
    let rows = session.read(10).await.unwrap().rows;
    let [first, second] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!(first.message.id.to_string(), id);
    for message in [&first.message, &second.message] {
        let (seconds, nanos) = message.id.get_timestamp().unwrap().to_unix();
        let millis = seconds * 1_000 + u64::from(nanos) / 1_000_000;
        let created = u64::try_from(message.created_at.timestamp_millis()).unwrap();
        assert!(millis.abs_diff(created) < 60_000, "the id carries the time of the database");
        assert!(message.headers.is_empty() && message.trace.is_none());
    }
    assert_ne!(first.message.id, second.message.id);
    assert_eq!((first.message.content_type.as_str(), first.message.payload.len()), ("application/json", 23));
    assert_eq!(second.message.content_type, "application/octet-stream");
    assert_eq!((second.message.key.as_deref(), second.message.payload.as_slice()), (None, [0, 1].as_slice()));
}

/// Many rows of one statement have different ids, of a canonical form.
#[tokio::test]
async fn generated_ids_are_canonical_and_differ() {
    let trial = Trial::<SqliteFile>::start("ids").await.unwrap();
    let many = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 2000) \
                insert into oncebox_outbox (topic, kind, payload) select 't', 'k', '' from n";
    query(many).execute(trial.store.pool()).await.unwrap();
    let ids: Vec<String> =
        query_scalar("select message_id from oncebox_outbox").fetch_all(trial.store.pool()).await.unwrap();
    let distinct: std::collections::HashSet<&String> = ids.iter().collect();
    assert_eq!(distinct.len(), 2_000);
    for id in &ids {
        let uuid = uuid::Uuid::try_parse(id).unwrap();
        assert_eq!(&uuid.to_string(), id);
        assert_eq!((uuid.get_version_num(), uuid.get_variant()), (7, uuid::Variant::RFC4122));
    }
}

#[tokio::test]
async fn rows_are_immutable_and_stay_until_they_are_proven() {
    let trial = Trial::<SqliteFile>::start("immutable").await.unwrap();
    let store = &trial.store;
    query("insert into oncebox_outbox (topic, kind, payload) values ('t', 'k', '')")
        .execute(store.pool())
        .await
        .unwrap();
    for sql in [
        "update oncebox_outbox set topic = 'x'",
        "update oncebox_outbox set position = 5",
        "update or ignore oncebox_outbox set payload = null",
        "update or replace oncebox_outbox set content_type = null",
        "delete from oncebox_outbox",
        "delete from oncebox_outbox where position = 1",
    ] {
        let error = query(sql).execute(store.pool()).await.unwrap_err();
        assert!(error.to_string().contains("oncebox: "), "{sql}: {error}");
    }
    let row: (i64, String, String) =
        query_as("select position, topic, content_type from oncebox_outbox").fetch_one(store.pool()).await.unwrap();
    assert_eq!(row, (1, "t".into(), "application/json".into()));
}

/// R7: a restored or meddled `sqlite_sequence` must not let messages in that are never read.
#[tokio::test]
async fn r7_a_sequence_behind_the_cursor_is_loud() {
    let trial = Trial::<SqliteFile>::start("sequence").await.unwrap();
    let store = &trial.store;
    let insert = "insert into oncebox_outbox (topic, kind, payload) values ('t', 'k', '')";
    for _ in 0..3 {
        query(insert).execute(store.pool()).await.unwrap();
    }
    let request = LeaseRequest { shard: 0, owner: "a".into(), length: Duration::from_secs(60), read_bytes: 4 << 20 };
    let LeaseAnswer::Taken(mut session) = store.open(&request).await.unwrap() else { panic!() };
    let batch = session.read(10).await.unwrap().batch;
    session.checkpoint(Mark { through: Some(batch), ..Mark::default() }).await.unwrap();
    query("update sqlite_sequence set seq = 1 where name = 'oncebox_outbox'").execute(store.pool()).await.unwrap();
    let error = query(insert).execute(store.pool()).await.unwrap_err();
    assert!(error.to_string().contains("sequence behind cursor"), "{error}");
    let read = session.read(10).await;
    assert!(matches!(&read, Err(StoreError::Refused(why)) if why.contains("sequence behind cursor")), "{read:?}");
    let findings = oncebox::store::Schema::check(store).await.unwrap();
    assert!(findings.iter().any(|finding| finding.name == "sequence behind cursor"), "{findings:?}");
}

/// `doctor` says when the limits were taken away.
#[tokio::test]
async fn a_missing_or_changed_trigger_is_refused_by_the_check() {
    let trial = Trial::<SqliteFile>::start("triggers").await.unwrap();
    let empty = "create trigger oncebox_outbox_limits before insert on oncebox_outbox begin select 1; end";
    trial.run(&format!("drop trigger oncebox_outbox_limits; {empty}")).await;
    trial.run("drop trigger oncebox_outbox_keep").await;
    let findings = oncebox::store::Schema::check(&trial.store).await.unwrap();
    let finding = findings.iter().find(|finding| finding.name == "limits").unwrap();
    assert_eq!(finding.severity, oncebox::store::Severity::Refused);
    assert!(finding.detail.contains("oncebox_outbox_limits") && finding.detail.contains("oncebox_outbox_keep"));
    assert!(!finding.detail.contains("immutable"), "{}", finding.detail);
}

/// Limits can be lowered, but not raised over what the brokers take; a row that is gone leaves its
/// default.
#[tokio::test]
async fn limits_keep_within_the_bounds_of_the_brokers() {
    let trial = Trial::<SqliteFile>::start("bounds").await.unwrap();
    trial.run("update oncebox_limits set value = 1000000").await;
    let long = |column: &str, length: usize| {
        let mut values = std::collections::HashMap::from([("topic", "t".to_owned()), ("kind", "k".to_owned())]);
        *values.get_mut(column).unwrap() = "x".repeat(length);
        format!(
            "insert into oncebox_outbox (topic, kind, payload) values ('{}', '{}', '')",
            values["topic"], values["kind"]
        )
    };
    for (column, max) in [("topic", 249), ("kind", 255)] {
        assert!(query(AssertSqlSafe(long(column, max))).execute(trial.store.pool()).await.is_ok());
        assert!(query(AssertSqlSafe(long(column, max + 1))).execute(trial.store.pool()).await.is_err());
    }
    trial.run("delete from oncebox_limits").await;
    for (column, max) in [("topic", 249), ("kind", 255)] {
        assert!(query(AssertSqlSafe(long(column, max))).execute(trial.store.pool()).await.is_ok());
        assert!(query(AssertSqlSafe(long(column, max + 1))).execute(trial.store.pool()).await.is_err());
    }
}

/// Either the door works or it fails: a limit is never skipped without a word.
#[tokio::test]
async fn r13_without_trusted_schema_the_door_is_never_silently_open() {
    let trial = Trial::<SqliteFile>::start("trusted schema").await.unwrap();
    let mut connection = trial.store.pool().acquire().await.unwrap();
    SqliteFile::run(&mut connection, "pragma trusted_schema = off").await.unwrap();
    let bad = "insert into oncebox_outbox (topic, kind, payload, headers) values ('t', 'k', '', '{\"x-match\":\"1\"}')";
    assert!(SqliteFile::run(&mut connection, bad).await.is_err());
    SqliteFile::run(&mut connection, "pragma trusted_schema = on").await.unwrap();
    drop(connection);
    assert_eq!(count(&trial.store).await, 0);
}
