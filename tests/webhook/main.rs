//! What phased operations send to others, on real sockets: webhooks and e-mails (O28).
#![cfg(all(feature = "client", feature = "email", feature = "sqlite"))]
#![allow(clippy::unwrap_used)]

mod email;
#[allow(dead_code)]
#[path = "../client/server.rs"]
mod server;
mod service;
#[path = "../contract/smtp.rs"]
mod smtp;
#[path = "../support/mod.rs"]
mod support;

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::FutureExt as _;
use hmac::{Hmac, KeyInit, Mac};
use oncebox::BreakerOptions;
use oncebox::operation::phased::webhook::{SendWebhook, WebhookOptions, WebhookSecret, Webhooks};
use oncebox::operation::provider::KeyWindow;
use oncebox::operation::{Delivery, DriveSettings};
use server::{Came, Server, Step, say};
use service::Service;
use sha2::Sha256;
use uuid::Uuid;

const SOON: Duration = Duration::from_secs(60);
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const BODY: &str = r#"{"type":"payment.created","paymentId":"pay_789"}"#;

fn settings() -> DriveSettings {
    DriveSettings {
        attempts_max: 10,
        calls_per_drive: 1,
        backoff_first: Duration::from_millis(20),
        backoff_max: Duration::from_millis(100),
        ..DriveSettings::default()
    }
}

fn options() -> WebhookOptions {
    WebhookOptions { allowed_hosts: ["127.0.0.1".to_owned()].into(), ..WebhookOptions::default() }
}

async fn start(options: WebhookOptions, settings: DriveSettings) -> Service {
    let webhooks = Webhooks::new(options, |_| vec![SECRET.parse::<WebhookSecret>().unwrap()]).unwrap();
    let window = KeyWindow { retention: Duration::from_secs(86_400), max_in_flight: Duration::from_secs(60) };
    Service::over(Webhooks::endpoint(), webhooks.flow(window).unwrap(), settings).await
}

fn webhook(url: &str) -> SendWebhook {
    SendWebhook { url: url.to_owned(), content_type: "application/json".to_owned(), body: BODY.to_owned() }
}

/// Whether the signature is that of this very request.
fn is_signed(came: &Came) -> bool {
    let header = |name: &str| came.headers.get(name).unwrap();
    let secret = STANDARD.decode(SECRET.strip_prefix("whsec_").unwrap()).unwrap();
    let mut mac = Hmac::<Sha256>::new_from_slice(&secret).unwrap();
    mac.update(format!("{}.{}.", header("webhook-id"), header("webhook-timestamp")).as_bytes());
    mac.update(&came.body);
    *header("webhook-signature") == format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
}

// Shown by: signing when the bytes are prepared; an id made by each send.
#[tokio::test]
async fn o28_a_webhook_is_repeated_under_one_id_with_the_same_bytes_and_a_fresh_signature() {
    let service = start(options(), settings()).await;
    let receiver = Server::start([
        Step::DropAfter,
        say(500, &[], ""),
        say(429, &[("retry-after", "2")], ""),
        say(404, &[], "a refusal of a later send is none"),
    ])
    .await;
    let (event, url) = (Uuid::now_v7(), format!("{}/hook", receiver.origin));
    let (first, second) = tokio::join!(service.ask(event, webhook(&url)), service.ask(event, webhook(&url)));
    drop((first, second));
    assert_eq!(service.becomes("it is sent", |state| state == Delivery::Sent).await.to_string(), "sent");
    let came = receiver.came();
    assert_eq!(came.len(), 5);
    for one in &came {
        assert_eq!((&one.line, one.body.as_slice()), (&"POST /hook HTTP/1.1".to_owned(), BODY.as_bytes()));
        assert_eq!(one.headers.get("webhook-id"), came[0].headers.get("webhook-id"));
        assert_eq!(one.headers.get("idempotency-key"), one.headers.get("webhook-id"));
        assert!(is_signed(one), "{one:?}");
    }
    let time = |at: usize| came[at].headers.get("webhook-timestamp").unwrap().parse::<u64>().unwrap();
    assert!(time(3) > time(0), "the pause shows that a later send has a time of its own");
    // Asked for again, it is not sent again.
    assert_eq!(service.outcome(event, webhook(&url)).await, 200);
    assert_eq!((receiver.came().len(), receiver.effects().len()), (5, 1));
}

// Shown by: following redirects; taking a 3xx for taken.
#[tokio::test]
async fn o28_a_redirect_is_a_failure_and_is_not_followed() {
    let service = start(options(), settings()).await;
    let other = Server::start([]).await;
    let receiver =
        Server::start([say(307, &[("location", &other.origin)], ""), say(302, &[("location", "/x")], "")]).await;
    service.ask(Uuid::now_v7(), webhook(&format!("{}/hook", receiver.origin))).await;
    service.becomes("it is sent", |state| state == Delivery::Sent).await;
    assert_eq!(receiver.all_the_same(), 3);
    assert!(other.came().is_empty());
}

#[tokio::test]
async fn o28_the_only_sends_refusal_is_the_end_and_is_remembered() {
    let service = start(options(), settings()).await;
    let receiver = Server::start([say(410, &[], "")]).await;
    let (event, url) = (Uuid::now_v7(), format!("{}/hook", receiver.origin));
    service.ask(event, webhook(&url)).await;
    service.becomes("it is refused", |state| state == Delivery::Refused).await;
    assert_eq!(service.outcome(event, webhook(&url)).await, 422);
    assert_eq!(receiver.came().len(), 1);
}

// A page of 100 KiB, and a body that breaks off. Shown by: reading the answer to its end (both were
// sent again).
#[tokio::test]
async fn o28_a_receivers_status_is_its_answer_whatever_becomes_of_its_body() {
    let page = "x".repeat(100 << 10);
    let broken = "HTTP/1.1 200 X\r\nconnection: close\r\ncontent-length: 100\r\n\r\nthanks".to_owned();
    for step in [say(200, &[], &page), Step::Say(broken)] {
        let service = start(options(), settings()).await;
        let receiver = Server::start([step, say(500, &[], "one send too many")]).await;
        service.ask(Uuid::now_v7(), webhook(&format!("{}/hook", receiver.origin))).await;
        service.becomes("it is sent", |state| state == Delivery::Sent).await;
        assert_eq!(receiver.came().len(), 1);
    }
}

// Shown by: leaving the check of names out.
#[tokio::test]
async fn o28_a_private_address_is_refused_before_a_byte_leaves() {
    // A connection alone would show, whatever is said on it.
    let receiver = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = receiver.local_addr().unwrap().port();
    // By address: nothing is even intended.
    let settings = DriveSettings { attempts_max: 2, ..settings() };
    let service = start(WebhookOptions::default(), settings).await;
    assert_eq!(service.outcome(Uuid::now_v7(), webhook(&format!("https://127.0.0.1:{port}/hook"))).await, 422);
    assert_eq!(service.outcome(Uuid::now_v7(), webhook(&format!("http://example.com:{port}/hook"))).await, 422);
    // What no request can say.
    let odd = SendWebhook { content_type: "text/plain\n".to_owned(), ..webhook("https://example.com/hook") };
    assert_eq!(service.outcome(Uuid::now_v7(), odd).await, 422);
    assert_eq!(service.state().await, None);
    // By name: known only when it is resolved, and the next answer may be another one. It is not
    // refused, but given up in the end.
    service.ask(Uuid::now_v7(), webhook(&format!("https://localhost:{port}/hook"))).await;
    service.becomes("it waits", |state| state == Delivery::Waiting || state == Delivery::Dead(0)).await;
    service.becomes("it is dead", |state| state == Delivery::Dead(0)).await;
    assert!(receiver.accept().now_or_never().is_none(), "somebody has connected");
}

// Shown by: calling what was given up refused.
#[tokio::test]
async fn o28_what_may_have_arrived_is_said_with_its_number_and_ends_dead() {
    // Once, and not again while this looks.
    let slow = DriveSettings { backoff_first: 10 * SOON, backoff_max: 10 * SOON, ..settings() };
    let service = start(options(), slow).await;
    let receiver = Server::start([say(503, &[], "")]).await;
    service.ask(Uuid::now_v7(), webhook(&format!("{}/hook", receiver.origin))).await;
    let state = service.becomes("a state after its send", |_| receiver.came().len() == 1).await;
    assert!(matches!(state, Delivery::PossiblySent(1)), "{state:?}");
    let service = start(options(), DriveSettings { attempts_max: 2, ..settings() }).await;
    let receiver = Server::start((0..200).map(|_| say(503, &[], ""))).await;
    service.ask(Uuid::now_v7(), webhook(&format!("{}/hook", receiver.origin))).await;
    let dead = service.becomes("it is dead", |state| matches!(state, Delivery::Dead(_))).await;
    let sends = u32::try_from(receiver.came().len()).unwrap();
    assert_eq!(dead, Delivery::Dead(sends));
    assert!(sends >= 2 && receiver.all_the_same() == receiver.came().len());
}

// An operator ends the operation, and its effect has no outcome of its own. Shown by: asking the
// effect alone (it was possibly sent, or waiting, for ever).
#[tokio::test]
async fn o28_what_an_operator_ended_is_not_said_to_be_tried_again() {
    for succeeded in [true, false] {
        let service = start(options(), DriveSettings { attempts_max: 2, ..settings() }).await;
        let receiver = Server::start((0..200).map(|_| say(503, &[], ""))).await;
        service.ask(Uuid::now_v7(), webhook(&format!("{}/hook", receiver.origin))).await;
        let dead = service.becomes("it is dead", |state| matches!(state, Delivery::Dead(_))).await;
        service.resolve(succeeded).await;
        assert_eq!(service.state().await, Some(if succeeded { Delivery::Sent } else { dead }));
    }
}

// Shown by: counting a send that did not leave.
#[tokio::test]
async fn o28_what_did_not_leave_waits_and_an_endpoint_that_fails_is_left_alone() {
    // Bound and never listening: nobody else gets the port meanwhile.
    let reserved = tokio::net::TcpSocket::new_v4().unwrap();
    reserved.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let closed = reserved.local_addr().unwrap();
    let service = start(options(), settings()).await;
    service.ask(Uuid::now_v7(), webhook(&format!("http://{closed}/hook"))).await;
    service.becomes("it waits", |state| state == Delivery::Waiting).await;
    // After two failures in a row the receiver hears nothing for a while.
    let open = Duration::from_millis(1_500);
    let breaker = BreakerOptions { failures: 2, open };
    let service = start(WebhookOptions { breaker, ..options() }, settings()).await;
    let receiver = Server::start((0..2).map(|_| say(500, &[], ""))).await;
    let began = std::time::Instant::now();
    service.ask(Uuid::now_v7(), webhook(&format!("{}/hook", receiver.origin))).await;
    service.becomes("it is sent", |state| state == Delivery::Sent).await;
    assert!(began.elapsed() >= open, "{:?}", began.elapsed());
    assert_eq!(receiver.came().len(), 3);
}

// Shown by: a refusal of a later send that is not in vain (it is sent again at once, until the
// window is over).
#[tokio::test]
async fn o28_a_receiver_that_refuses_what_may_have_arrived_is_not_hammered() {
    let service = start(options(), DriveSettings { attempts_max: 2, ..settings() }).await;
    let refusals = (0..200).map(|_| say(404, &[], ""));
    let receiver = Server::start(std::iter::once(Step::DropAfter).chain(refusals)).await;
    service.ask(Uuid::now_v7(), webhook(&format!("{}/hook", receiver.origin))).await;
    let dead = service.becomes("it is dead", |state| matches!(state, Delivery::Dead(_))).await;
    let sends = receiver.came().len();
    assert_eq!(dead, Delivery::Dead(u32::try_from(sends).unwrap()));
    assert!(sends <= 6, "{sends}");
}
