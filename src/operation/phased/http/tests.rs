//! Tests of what is certain about a call, with real sockets.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

const TIMEOUT: Duration = Duration::from_secs(3);

async fn call(url: &str) -> CallOutcome {
    let caller = HttpCaller::new(TIMEOUT).expect("a client");
    let url = url.parse().expect("a URL");
    caller.call(Method::POST, url, &[("idempotency-key", "op_1")], b"{}".to_vec()).await.expect("good headers")
}

/// Takes one connection, reads a request, answers these bytes and closes; counts connections.
async fn server(answer: &'static [u8]) -> (String, tokio::task::JoinHandle<u32>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}/charges", listener.local_addr().expect("an address"));
    let served = tokio::spawn(async move {
        let mut taken = 0;
        while let Ok(Ok((mut stream, _))) = tokio::time::timeout(Duration::from_millis(500), listener.accept()).await {
            taken += 1;
            let mut buffer = [0; 4_096];
            let _ = stream.read(&mut buffer).await;
            let _ = stream.write_all(answer).await;
        }
        taken
    });
    (url, served)
}

// Shown by: calling every error "not connected".
#[tokio::test]
async fn o7_refused_and_an_unknown_name_are_definitely_not_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let refused = format!("http://{}/", listener.local_addr().expect("an address"));
    drop(listener);
    for url in [refused.as_str(), "http://no-such-host.invalid/"] {
        let outcome = call(url).await;
        assert!(matches!(outcome, CallOutcome::NotConnected(_)), "{url}: {outcome:?}");
    }
    // A server that does not speak TLS.
    let (url, served) = server(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    let outcome = call(&url.replace("http://", "https://")).await;
    assert!(matches!(outcome, CallOutcome::NotConnected(_)), "{outcome:?}");
    served.await.expect("served");
}

// Shown by: a client library's retry (two connections).
#[tokio::test]
async fn o5_o7_what_ends_after_the_connection_is_indefinite_and_is_sent_once() {
    for answer in [&b""[..], b"HTTP/1.1 201 Created\r\ncontent-length: 100\r\n\r\n{\"id\"", b"nonsense\r\n\r\n"] {
        let (url, served) = server(answer).await;
        let outcome = call(&url).await;
        assert!(matches!(outcome, CallOutcome::NoAnswer(_)), "{outcome:?}");
        assert_eq!(served.await.expect("served"), 1);
    }
}

// Shown by: the default redirect policy (a second connection, as GET).
#[tokio::test]
async fn o5_a_redirect_is_an_answer_and_is_not_followed() {
    let answer = b"HTTP/1.1 302 Found\r\nlocation: /elsewhere\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    let (url, served) = server(answer).await;
    let CallOutcome::Answered(response) = call(&url).await else { panic!("an answer") };
    assert_eq!((response.status, served.await.expect("served")), (302, 1));
    assert_eq!(response.answer().verdict(), crate::operation::rules::provider::Verdict::Indefinite);
}

#[tokio::test]
async fn o7_a_pause_is_read_from_the_answer() {
    let answer = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 7\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    let (url, _served) = server(answer).await;
    let CallOutcome::Answered(response) = call(&url).await else { panic!("an answer") };
    assert_eq!(response.retry_after(), Some(Duration::from_secs(7)));
    let waits = crate::operation::rules::provider::Verdict::Wait(Duration::from_secs(7));
    assert_eq!(response.answer().verdict(), waits);
}
