//! Cases of enqueuing from Rust: the message and its transaction, ids, limits, trace context.

use uuid::Uuid;

use super::trial::{effect, new_message, payloads, read_rows};
use super::{Fixture, Trial, limit_cases};
use oncebox::error::StoreError;
use oncebox::message::{NewMessage, TraceContext, bucket};

/// After a rollback there is neither the outbox row nor the business row. A dropped transaction
/// leaves nothing either.
pub async fn g1_what_is_rolled_back_never_existed<F: Fixture>(trial: &Trial<F>) {
    let mut tx = trial.begin().await;
    effect::<F>(&mut tx, "m", "1").await.unwrap();
    oncebox::store::enqueue(&mut *tx, new_message("k", "1")).await.unwrap();
    tx.rollback().await.unwrap();
    let mut dropped = trial.begin().await;
    oncebox::store::enqueue(&mut *dropped, new_message("k", "2")).await.unwrap();
    drop(dropped);
    // This message proves that the reader works.
    trial.enqueue(vec![new_message("k", "3")]).await;
    let mut session = trial.session("a").await;
    assert_eq!(payloads(&read_rows(&mut session, 1).await.0), ["3"]);
    assert_eq!(trial.effects("m").await, 0);
}

/// After the commit both the outbox row and the business row are there.
pub async fn g1_what_is_committed_is_there_with_the_rows_beside_it<F: Fixture>(trial: &Trial<F>) {
    let mut tx = trial.begin().await;
    effect::<F>(&mut tx, "m", "1").await.unwrap();
    let id = oncebox::store::enqueue(&mut *tx, new_message("k", "1")).await.unwrap();
    oncebox::store::commit(tx).await.unwrap();
    let mut session = trial.session("a").await;
    let (rows, _) = read_rows(&mut session, 1).await;
    assert_eq!(rows[0].message.id, id);
    assert_eq!(trial.effects("m").await, 1);
}

/// Many messages in one call get ascending positions, and no part of them changes.
pub async fn many_messages_keep_their_order_and_every_part<F: Fixture>(trial: &Trial<F>) {
    let trace = Some(TraceContext {
        traceparent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".to_owned(),
        tracestate: Some("a=b".to_owned()),
    });
    let messages: Vec<NewMessage> = (0_u8..250)
        .map(|i| {
            let mut message = match i % 3 {
                0 => NewMessage::text("payments", "payment.created", format!(r#"{{"n":{i},"s":"ä\"😀"}}"#)),
                1 => NewMessage::bytes("blobs", "blob.stored", vec![i, 0, 255]),
                _ => NewMessage {
                    content_type: Some("image/png".to_owned()),
                    ..NewMessage::bytes("blobs", "blob.empty", Vec::new())
                },
            };
            if i % 4 != 0 {
                message = message.with_key(format!("schlüssel \"{i}\" 'x' \\"));
            }
            if i % 5 == 0 {
                message = message.with_header("tenant", "t\"1\\\n").with_header("b", "ä😀").with_header("a", "");
            }
            if i % 7 == 0 {
                message.trace.clone_from(&trace);
            }
            message
        })
        .collect();
    let ids = trial.enqueue(messages.clone()).await;
    let single = trial.enqueue(vec![messages[0].clone()]).await;
    let mut session = trial.session("a").await;
    let (rows, _) = read_rows(&mut session, 251).await;
    assert!(rows.windows(2).all(|pair| pair[0].position < pair[1].position));
    for (row, (given, id)) in rows.iter().zip(messages.iter().chain(&messages[..1]).zip(ids.iter().chain(&single))) {
        let got = &row.message;
        assert_eq!(got.id, *id);
        assert_eq!((&got.topic, &got.key, &got.kind), (&given.topic, &given.key, &given.kind));
        assert_eq!(got.payload, given.payload);
        assert_eq!(Some(&got.content_type), given.content_type.as_ref());
        assert_eq!(got.trace, given.trace);
        let (mut got_headers, mut given_headers) = (got.headers.clone(), given.headers.clone());
        got_headers.sort();
        given_headers.sort();
        assert_eq!(got_headers, given_headers);
        let age = chrono::Utc::now() - got.created_at;
        assert!(age.num_minutes().abs() < 5, "created_at is now, by the clock of the database: {age}");
    }
}

/// A generated id is a v7 UUID; the same given id twice is published twice.
pub async fn an_id_is_made_unless_given_and_may_be_given_twice<F: Fixture>(trial: &Trial<F>) {
    let given = Uuid::from_u128(0x9f7a_4f6e_5b1d_4f0e_8a55_0d6f_1f9c_1a2b);
    let messages = ["1", "2", "3"].map(|payload| new_message("k", payload));
    let [first, second, third] = messages;
    let ids = trial.enqueue(vec![first.with_id(given), second, third.with_id(given)]).await;
    assert_eq!((ids[0], ids[2]), (given, given));
    assert_eq!(ids[1].get_version_num(), 7);
    let mut session = trial.session("a").await;
    let (rows, _) = read_rows(&mut session, 3).await;
    assert_eq!(rows.iter().map(|row| row.message.id).collect::<Vec<_>>(), ids);
    let buckets: Vec<u8> = rows.iter().map(|row| row.bucket).collect();
    let computed = bucket(Some("k"), given);
    assert!(buckets == [computed; 3] || buckets == [0; 3], "the bucket is the key's, or 0 where there is one shard");
}

/// Runs the table of cases through `enqueue_all`: each message alone, and behind another one.
pub async fn r34_every_limit_holds_at_the_rust_door<F: Fixture>(trial: &Trial<F>) {
    let (mut taken, mut sent) = (0, Vec::new());
    for case in limit_cases() {
        let Some(message) = case.as_new_message() else { continue };
        for bulk in [false, true] {
            let mut tx = trial.begin().await;
            let messages = if bulk { vec![new_message("k", "first"), message.clone()] } else { vec![message.clone()] };
            let answer = oncebox::store::enqueue_all(&mut *tx, messages).await;
            case.check(&answer);
            taken += answer.as_ref().map_or(0, Vec::len);
            if answer.is_ok() && !bulk {
                tx.commit().await.unwrap();
                sent.push(message.clone());
            } else {
                tx.rollback().await.unwrap();
            }
        }
    }
    assert!(taken > 50);
    // What is taken is stored as it was given.
    let mut session = trial.session("a").await;
    let (rows, _) = read_rows(&mut session, sent.len()).await;
    assert_eq!(rows.len(), sent.len());
    for (row, given) in rows.iter().zip(&sent) {
        let got = &row.message;
        assert_eq!((&got.topic, &got.key, &got.kind), (&given.topic, &given.key, &given.kind));
        assert!(got.payload == given.payload, "{} and {} bytes", got.payload.len(), given.payload.len());
    }
}

/// All messages are checked before the first is written.
pub async fn one_bad_message_refuses_the_whole_call<F: Fixture>(trial: &Trial<F>) {
    let mut tx = trial.begin().await;
    let messages = vec![new_message("k", "1"), new_message("", "2"), new_message("k", "3")];
    let answer = oncebox::store::enqueue_all(&mut *tx, messages).await;
    assert!(matches!(&answer, Err(StoreError::Limit(error)) if error.limit == "key"), "{answer:?}");
    // A caller that ignores the error and commits writes none of them.
    let _ = tx.commit().await;
    assert_eq!(trial.rows("outbox").await, 0);
    assert!(trial.enqueue(Vec::new()).await.is_empty());
}

/// A changed limit in the table applies to the next call.
pub async fn limits_are_rows_that_can_be_raised_and_lowered<F: Fixture>(trial: &Trial<F>) {
    let limits = trial.table("limits");
    let long = new_message(&"k".repeat(1_500), "1");
    for (value, is_taken) in [(1_024, false), (2_000, true), (10, false)] {
        trial.run(&format!("update {limits} set value = {value} where name = 'key_bytes_max'")).await;
        let mut tx = trial.begin().await;
        let answer = oncebox::store::enqueue(&mut *tx, long.clone()).await;
        let is_refused = matches!(&answer, Err(StoreError::Limit(error)) if error.limit == "key");
        assert!(if is_taken { answer.is_ok() } else { is_refused }, "{value}: {answer:?}");
        tx.rollback().await.unwrap();
    }
}

/// Headers named `traceparent` and `tracestate`, in upper or lower case, become the trace of the
/// message and are not kept as headers.
pub async fn trace_context_given_as_headers_becomes_the_trace<F: Fixture>(trial: &Trial<F>) {
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let message = new_message("k", "1");
    let message = message.with_header("TraceParent", parent).with_header("tracestate", "a=b").with_header("h", "v");
    trial.enqueue(vec![message]).await;
    let mut session = trial.session("a").await;
    let (rows, _) = read_rows(&mut session, 1).await;
    let trace = TraceContext { traceparent: parent.to_owned(), tracestate: Some("a=b".to_owned()) };
    assert_eq!(rows[0].message.trace, Some(trace));
    assert_eq!(rows[0].message.headers, [("h".to_owned(), "v".to_owned())]);
}
