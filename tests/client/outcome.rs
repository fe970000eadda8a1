//! What ends an operation, and what does not (O26).

use std::sync::Arc;
use std::time::Duration;

use oncebox::client::{Cause, Client, ClientError, ClientOptions};
use tokio::sync::Notify;

use super::server::{Server, Step, client, problem, quick, say};
use super::support::eventually;

fn unknown(error: ClientError) -> Cause {
    match error {
        ClientError::OutcomeUnknown { cause, .. } => cause,
        other => panic!("the outcome is not unknown: {other}"),
    }
}

// Shown by: making the key in `attempt`; ending at the first 500.
#[tokio::test]
async fn m110_whatever_happens_the_same_bytes_go_under_one_key_until_the_answer_is_there() {
    let steps = [
        Step::DropBefore,
        Step::DropAfter,
        Step::Cut,
        say(500, &[], "oops"),
        say(429, &[], ""),
        problem(409, "IDEMPOTENCY_REQUEST_IN_PROGRESS", "in_progress"),
        problem(503, "IDEMPOTENCY_COMMIT_UNKNOWN", "unknown"),
    ];
    let server = Server::start(steps).await;
    let request = server.request();
    let answer = client().send(&request).await.unwrap();
    assert_eq!((answer.status, &answer.key), (201, request.key()));
    assert_eq!(answer.headers.get("location").unwrap(), "/payments/7");
    assert_eq!(answer.body, format!(r#"{{"key":"{}"}}"#, request.key().as_str()).into_bytes());
    assert_eq!(server.all_the_same(), 8);
    assert_eq!(server.effects(), [request.key().as_str()]);
}

// Shown by: ending at any answer of the second attempt.
#[tokio::test]
async fn o26_after_a_lost_answer_a_refusal_is_no_end_and_fresh_credentials_go_on() {
    let refusals = [
        say(400, &[], ""),
        say(401, &[], ""),
        say(403, &[], ""),
        say(404, &[], ""),
        problem(422, "IDEMPOTENCY_KEY_REUSED_WITH_DIFFERENT_REQUEST", "unknown"),
        problem(409, "IDEMPOTENCY_KEY_EXPIRED", "expired"),
        problem(500, "IDEMPOTENCY_TRANSACTION_ENDED", "unknown"),
        // A proxy's JSON is no problem body.
        say(410, &[("content-type", "application/json")], r#"{"key_state":"spent"}"#),
    ];
    for refusal in refusals {
        let server = Server::start([Step::DropAfter, refusal.clone()]).await;
        let request = server.request();
        let cause = unknown(client().send(&request).await.unwrap_err());
        assert!(matches!(cause, Cause::Answer { .. }), "{refusal:?}: {cause}");
        assert_eq!(server.all_the_same(), 2, "it is not repeated in vain");
        let renewed = request.clone().with_header("authorization", "Bearer t1:user-7").unwrap();
        assert_eq!(client().send(&renewed).await.unwrap().status, 201);
        assert_eq!(server.effects(), [request.key().as_str()]);
    }
}

// A server that knows only the draft of the header answers so while the first attempt runs. Shown
// by: taking it for a refusal, which ended the call with an unknown outcome.
#[tokio::test]
async fn o26_a_409_that_says_no_more_is_waited_for_after_a_lost_answer_and_is_the_answer_before() {
    let json = [("content-type", "application/json")];
    let server = Server::start([Step::DropAfter, say(409, &[], ""), say(409, &json, r#"{"error":"in use"}"#)]).await;
    let request = server.request();
    assert_eq!(client().send(&request).await.unwrap().status, 201);
    assert_eq!((server.all_the_same(), server.effects().len()), (4, 1));
    // It waits no longer than the call may last.
    let server = Server::start(std::iter::once(Step::DropAfter).chain((0..200).map(|_| say(409, &[], "")))).await;
    let short = ClientOptions { total: Duration::from_secs(2), ..quick() };
    let cause = unknown(Client::new(short).unwrap().send(&server.request()).await.unwrap_err());
    assert!(matches!(cause, Cause::OutOfTime { .. }), "{cause}");
    let server = Server::start([say(409, &[], "")]).await;
    assert_eq!((client().send(&server.request()).await.unwrap().status, server.came().len()), (409, 1));
}

// Shown by: beginning each call without doubt. Then the refusal was the answer, and a caller that
// takes it for "nothing happened" pays a second time under a new key.
#[tokio::test]
async fn o26_a_request_stays_in_doubt_after_its_call_failed_or_was_dropped() {
    let server = Server::start([Step::DropAfter, say(401, &[], ""), say(403, &[], "")]).await;
    let request = server.request();
    for status in [401, 403] {
        let cause = unknown(client().send(&request.clone()).await.unwrap_err());
        assert_eq!(cause, Cause::Answer { status, code: None });
    }
    assert_eq!((client().send(&request).await.unwrap().status, server.effects().len()), (201, 1));

    let server = Server::start([Step::Hang, say(403, &[], "")]).await;
    let request = server.request();
    let dropped = request.clone();
    let call = tokio::spawn(async move { client().send(&dropped).await });
    eventually("it was sent", Duration::from_secs(60), || async { (!server.came().is_empty()).then_some(()) }).await;
    call.abort();
    unknown(client().send(&request).await.unwrap_err());

    // A refusal without doubt leaves none, and another key is another operation.
    let server = Server::start([say(401, &[], ""), say(400, &[], ""), Step::DropAfter, say(404, &[], "")]).await;
    let request = server.request();
    for status in [401, 400] {
        assert_eq!(client().send(&request).await.unwrap().status, status);
    }
    unknown(client().send(&request).await.unwrap_err());
    server.next([say(404, &[], "")]);
    let other = request.with_key("order-7-0123456789abcdef").unwrap();
    assert_eq!(client().send(&other).await.unwrap().status, 404);
}

// Shown by: asking for doubt at the begin of a call only. The call that was refused then ended with
// the refusal, while the attempt of the other one had had its effect.
#[tokio::test]
async fn o26_a_refusal_is_no_end_while_an_attempt_of_another_call_with_the_same_request_may_have_an_effect() {
    for _ in 0..8 {
        let server = Server::start([Step::Hang, say(401, &[], "")]).await;
        let (client, request) = (client(), server.request());
        let same = request.clone();
        // One of them hangs, whichever came first.
        let refused = tokio::select! {
            ended = client.send(&request) => ended,
            ended = client.send(&same) => ended,
        };
        assert_eq!(unknown(refused.unwrap_err()), Cause::Answer { status: 401, code: None });
        assert_eq!((server.all_the_same(), server.effects().len()), (2, 1));
    }
}

// Shown by: counting every attempt of a call in doubt as one that may have executed.
#[tokio::test]
async fn o26_a_call_that_began_in_doubt_leaves_none_where_every_attempt_was_refused() {
    let answers = Arc::new(Notify::new());
    let server = Server::start([Step::Hold(Arc::clone(&answers)), say(401, &[], "")]).await;
    let (client, request) = (client(), server.request());
    let held = request.clone();
    let first = async {
        let ended = client.send(&held).await;
        assert_eq!(ended.unwrap().status, 403, "no other attempt may have executed it");
    };
    let second = async {
        eventually("it was sent", Duration::from_secs(60), || async { (!server.came().is_empty()).then_some(()) })
            .await;
        unknown(client.send(&request).await.unwrap_err());
        answers.notify_one();
    };
    tokio::join!(first, second);
    server.next([say(400, &[], "")]);
    assert_eq!(client.send(&request).await.unwrap().status, 400);
}

// Shown by: counting the lifetime from the begin of each call.
#[tokio::test]
async fn m110_a_request_that_is_sent_again_later_has_the_age_of_its_first_attempt() {
    let server = Server::start([]).await;
    let options =
        ClientOptions { attempt_timeout: Duration::from_secs(10), lifetime: Duration::from_secs(11), ..quick() };
    let (client, request) = (Client::new(options).unwrap(), server.request());
    let began = std::time::Instant::now();
    assert_eq!(client.send(&request).await.unwrap().status, 201);
    let first_came = began.elapsed();
    eventually("the key is old", Duration::from_secs(60), || async {
        (began.elapsed() > first_came + Duration::from_secs(1)).then_some(())
    })
    .await;
    let cause = unknown(client.send(&request).await.unwrap_err());
    assert!(matches!(cause, Cause::KeyForgotten { .. }), "{cause}");
    assert_eq!(server.came().len(), 1);
}

#[tokio::test]
async fn m110_without_a_lost_answer_a_refusal_is_the_answer() {
    for (status, refusal) in [
        (400, say(400, &[], "")),
        (401, say(401, &[], "")),
        (402, say(402, &[], "no funds")),
        (404, say(404, &[], "")),
        (422, problem(422, "IDEMPOTENCY_KEY_REUSED_WITH_DIFFERENT_REQUEST", "unknown")),
    ] {
        let server = Server::start([problem(503, "IDEMPOTENCY_STORE_UNAVAILABLE", "unknown"), refusal]).await;
        let answer = client().send(&server.request()).await.unwrap();
        assert_eq!((answer.status, server.effects().len()), (status, 0), "{answer:?}");
        assert_eq!(server.all_the_same(), 2);
    }
}

// Shown by: leaving the state out of the table.
#[tokio::test]
async fn o26_a_spent_key_ends_it_also_after_a_lost_answer() {
    let server = Server::start([Step::DropAfter, problem(409, "IDEMPOTENT_RESULT_NOT_RETAINED", "spent")]).await;
    assert_eq!(client().send(&server.request()).await.unwrap().status, 409);
    // The code of an application's own is no hindrance.
    let server = Server::start([Step::DropAfter, problem(402, "INSUFFICIENT_FUNDS", "spent")]).await;
    assert_eq!(client().send(&server.request()).await.unwrap().status, 402);
}

// Shown by: the redirect policy of reqwest in place of none.
#[tokio::test]
async fn o26_a_redirect_is_not_followed_and_carries_the_key_nowhere() {
    let other = Server::start([]).await;
    for status in [301, 302, 303, 307, 308] {
        let place = format!("{}/payments", other.origin);
        let server = Server::start([say(status, &[("location", &place)], "")]).await;
        let request = server.request();
        assert_eq!(client().send(&request).await.unwrap().status, 201, "the next attempt is served");
        assert_eq!(server.all_the_same(), 2);
        let server = Server::start((0..200).map(|_| say(status, &[("location", "/elsewhere")], ""))).await;
        let short = ClientOptions { total: Duration::from_secs(2), ..quick() };
        let cause = unknown(Client::new(short).unwrap().send(&server.request()).await.unwrap_err());
        assert!(matches!(cause, Cause::OutOfTime { .. }), "{cause}");
        assert!(server.came().iter().all(|came| came.line.starts_with("POST /payments ")));
    }
    assert!(other.came().is_empty(), "{:?}", other.came());
}

// Shown by: asking with the operation's own headers; following the Location wherever it points.
#[tokio::test]
async fn o26_an_accepted_operation_is_asked_for_on_its_origin_without_the_key() {
    let done = r#"{"id":"7","status":"succeeded","result":{"status":201,"body":{"id": "pay_7"}}}"#;
    let json = [("content-type", "application/json"), ("x-request-id", "9")];
    let server = Server::start([
        say(202, &[("location", "/operations/7")], ""),
        say(200, &[], r#"{"id":"7","status":"pending","result":null}"#),
        say(503, &[], ""),
        Step::DropBefore,
        say(200, &json, done),
    ])
    .await;
    let request = server.request().with_header("authorization", "Bearer t1:user-7").unwrap();
    let answer = client().send(&request).await.unwrap();
    assert_eq!((answer.status, answer.body.as_slice()), (201, br#"{"id": "pay_7"}"#.as_slice()));
    assert_eq!(answer.headers.len(), 1, "{:?}", answer.headers);
    let came = server.came();
    assert_eq!(came.len(), 5);
    for question in &came[1..] {
        assert_eq!(question.line, "GET /operations/7 HTTP/1.1");
        assert_eq!(question.headers.get("authorization").unwrap(), "Bearer t1:user-7");
        assert!(!question.headers.contains_key("idempotency-key") && question.body.is_empty());
    }
    // A result that is not kept there: the operation itself is sent again, and replayed.
    let gone = r#"{"id":"7","status":"succeeded","result":null}"#;
    let server = Server::start([say(202, &[("location", "/operations/7")], ""), say(200, &[], gone)]).await;
    assert_eq!(client().send(&server.request()).await.unwrap().status, 201);
    let lines: Vec<_> = server.came().iter().map(|came| came.line.clone()).collect();
    assert_eq!(lines, ["POST /payments HTTP/1.1", "GET /operations/7 HTTP/1.1", "POST /payments HTTP/1.1"]);
    // Where that is refused, the first one was accepted all the same.
    let steps = [say(202, &[("location", "/operations/7")], ""), say(200, &[], gone), say(401, &[], "")];
    let server = Server::start(steps).await;
    let cause = unknown(client().send(&server.request()).await.unwrap_err());
    assert!(matches!(cause, Cause::Answer { status: 401, .. }), "{cause}");
}

#[tokio::test]
async fn o26_an_accepted_operation_that_is_not_found_is_unknown_and_another_origin_is_not_asked() {
    let other = Server::start([]).await;
    let server = Server::start([say(202, &[("location", "/operations/7")], ""), say(404, &[], "")]).await;
    assert_eq!(unknown(client().send(&server.request()).await.unwrap_err()), Cause::OperationNotFound);
    let place = format!("{}/operations/7", other.origin);
    let server = Server::start([say(202, &[("location", &place)], "")]).await;
    assert_eq!(client().send(&server.request()).await.unwrap().status, 201);
    assert_eq!(server.all_the_same(), 2);
    assert!(other.came().is_empty());
}
