//! How long a client waits, and when it stops (M110).

use std::time::{Duration, Instant, SystemTime};

use oncebox::BreakerOptions;
use oncebox::client::{Cause, Client, ClientError, ClientOptions};
use tokio::net::TcpSocket;

use super::server::{Server, Step, client, quick, say};

// Shown by: reading neither form.
#[tokio::test]
async fn m110_the_servers_time_is_kept_in_both_forms() {
    let began = Instant::now();
    let server = Server::start([say(503, &[("retry-after", "1")], "")]).await;
    client().send(&server.request()).await.unwrap();
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
    // A date has whole seconds: three from now are more than two.
    let began = Instant::now();
    let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(3));
    let server = Server::start([say(429, &[("retry-after", &date)], "")]).await;
    client().send(&server.request()).await.unwrap();
    assert!(began.elapsed() >= Duration::from_millis(1_900), "{:?}", began.elapsed());
}

// Shown by: sleeping before the time is compared.
#[tokio::test]
async fn m110_a_wait_beyond_the_time_of_the_call_is_not_waited() {
    let server = Server::start([say(503, &[("retry-after", "3600")], "")]).await;
    let (client, request) = (client(), server.request());
    let sent = tokio::time::timeout(quick().total, client.send(&request)).await;
    let error = sent.expect("it waits for nothing").unwrap_err();
    assert!(matches!(error, ClientError::OutcomeUnknown { cause: Cause::OutOfTime { .. }, .. }), "{error}");
    assert_eq!(server.came().len(), 1);
}

#[tokio::test]
async fn m110_an_attempt_ends_by_its_timeout_and_leaves_doubt() {
    let server = Server::start([Step::Hang, Step::Serve]).await;
    let options = ClientOptions { attempt_timeout: Duration::from_secs(5), ..quick() };
    let request = server.request();
    assert_eq!(Client::new(options.clone()).unwrap().send(&request).await.unwrap().status, 201);
    assert_eq!((server.all_the_same(), server.effects().len()), (2, 1));
    let server = Server::start((0..100).map(|_| Step::Hang)).await;
    let (attempt_timeout, total) = (Duration::from_secs(2), Duration::from_secs(5));
    let options = ClientOptions { attempt_timeout, total, ..options };
    let error = Client::new(options).unwrap().send(&server.request()).await.unwrap_err();
    assert!(matches!(error, ClientError::OutcomeUnknown { .. }), "{error}");
}

// Shown by: taking every error of reqwest for an unknown outcome.
#[tokio::test]
async fn o26_what_was_never_sent_is_not_in_doubt() {
    let server = Server::start([]).await;
    let request = server.request();
    // A port that nobody listens on, and that nobody else gets meanwhile.
    let reserved = TcpSocket::new_v4().unwrap();
    reserved.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let closed = reserved.local_addr().unwrap();
    let elsewhere = oncebox::client::Request::new("POST", &format!("http://{closed}/payments"), "{}").unwrap();
    let options = ClientOptions { total: Duration::from_secs(2), ..quick() };
    let error = Client::new(options).unwrap().send(&elsewhere).await.unwrap_err();
    assert!(matches!(error, ClientError::NotSent { .. }), "{error}");
    // Too old before the first attempt: nothing is sent at all.
    let options = ClientOptions { lifetime: Duration::from_secs(4), ..quick() };
    let error = Client::new(options).unwrap().send(&request).await.unwrap_err();
    assert!(matches!(error, ClientError::NotSent { cause: Cause::KeyForgotten { .. }, .. }), "{error}");
    assert!(server.came().is_empty());
}

#[tokio::test]
async fn m110_the_lifetime_of_keys_is_read_where_the_server_publishes_it() {
    let body = r#"{"operations":[
        {"operation":"create_payment","path":"/payments","method":"POST","required":true,"ttl":"PT24H","mode":"same_tx","mismatchStatus":422},
        {"operation":"create_note","path":"/notes","method":"POST","required":true,"ttl":"PT20S","mode":"edge","mismatchStatus":422}]}"#;
    for (attempt, fits) in [(15, true), (25, false)] {
        let server = Server::start([say(200, &[("content-type", "application/json")], body)]).await;
        let options = ClientOptions { attempt_timeout: Duration::from_secs(attempt), ..quick() };
        let client = Client::new(options).unwrap();
        let client = client.as_advertised(&format!("{}/payments?x=1", server.origin)).await.unwrap();
        assert_eq!(server.came()[0].line, "GET /.well-known/idempotency HTTP/1.1");
        // Twenty seconds are the shortest lifetime, and an attempt must fit into it.
        let sent = client.send(&server.request()).await;
        assert_eq!(sent.is_ok(), fits, "{sent:?}");
        assert_eq!(server.came().len(), if fits { 2 } else { 1 });
    }
}

// Shown by: a breaker that is never told.
#[tokio::test]
async fn m110_an_origin_that_fails_is_left_alone_for_a_while() {
    let open = Duration::from_millis(700);
    let options = ClientOptions { breaker: Some(BreakerOptions { failures: 3, open }), ..quick() };
    let server = Server::start((0..3).map(|_| say(500, &[], ""))).await;
    let client = Client::new(options).unwrap();
    let began = Instant::now();
    assert_eq!(client.send(&server.request()).await.unwrap().status, 201);
    assert!(began.elapsed() >= open, "{:?}", began.elapsed());
    assert_eq!(server.all_the_same(), 4);
}
