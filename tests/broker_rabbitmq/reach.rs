//! Getting there: TLS, credentials, and connections that end or fall silent.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use oncebox::broker::rabbitmq::{RabbitBroker, RabbitConfig};
use oncebox::broker::{Broker, Event};
use oncebox::error::BrokerError;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::fixture::{Corner, SOON, message, numbered, numbers, publish, receive};
use crate::support::{eventually, service};

/// What a proxy does with what it carries.
#[derive(Clone, Copy, PartialEq)]
enum Line {
    Open,
    Frozen,
    Cut,
}

/// Stands before the server on an address of its own.
struct Proxy {
    address: SocketAddr,
    line: watch::Sender<Line>,
    carried: Arc<AtomicUsize>,
}

impl Proxy {
    async fn before(server: &str, listen: &str) -> Self {
        let listener = TcpListener::bind(listen).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (line, seen) = watch::channel(Line::Open);
        let (server, carried) = (server.to_owned(), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&carried);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (server, seen, count) =
                    (TcpStream::connect(&server).await.unwrap(), seen.clone(), Arc::clone(&count));
                tokio::spawn(async move {
                    count.fetch_add(1, Ordering::SeqCst);
                    let (mut from_client, mut to_client) = client.into_split();
                    let (mut from_server, mut to_server) = server.into_split();
                    tokio::join!(
                        carry(&mut from_client, &mut to_server, seen.clone()),
                        carry(&mut from_server, &mut to_client, seen)
                    );
                    count.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { address, line, carried }
    }
}

async fn carry(
    from: &mut (impl AsyncReadExt + Unpin),
    to: &mut (impl AsyncWriteExt + Unpin),
    mut line: watch::Receiver<Line>,
) {
    let mut bytes = vec![0; 64 * 1024];
    loop {
        let read = tokio::select! {
            read = from.read(&mut bytes) => read.unwrap_or(0),
            _ = line.wait_for(|line| *line == Line::Cut) => 0,
        };
        if line.wait_for(|line| *line != Line::Frozen).await.is_err() || read == 0 || *line.borrow() == Line::Cut {
            let _ = to.shutdown().await;
            return;
        }
        if to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
}

/// A corner whose connections go through a proxy.
async fn behind_a_proxy(test: &str) -> Option<(Corner, Proxy)> {
    let mut corner = Corner::of(test).await?;
    let proxy = Proxy::before(&address(&corner.config.url), "127.0.0.1:0").await;
    corner.config.url = format!("amqp://guest:guest@{}/%2f", proxy.address);
    Some((corner, proxy))
}

/// Host and port of a URL.
fn address(url: &str) -> String {
    let rest = url.split_once('@').unwrap().1;
    rest.split('/').next().unwrap().replace("localhost", "127.0.0.1")
}

pub(crate) fn authority(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from)
}

async fn reach(config: RabbitConfig) -> Result<(), BrokerError> {
    let broker = RabbitBroker::new(config)?;
    broker.publisher().await?.close().await;
    broker.check(&[]).await.map(drop)
}

#[tokio::test]
async fn tls_is_verified_a_wrong_authority_and_a_wrong_host_are_refused() {
    let Some(url) = service("tls_is_verified", "ONCEBOX_TEST_RABBITMQ_TLS") else { return };
    let with = |url: &str, ca: Option<PathBuf>| {
        let mut config = RabbitConfig::new(url);
        config.ca_file = ca;
        config
    };
    let Some(other_ca) = service("tls_is_verified", "ONCEBOX_TEST_OTHER_CA") else { return };
    let ca = authority("ONCEBOX_TEST_CA");
    reach(with(&url, ca.clone())).await.unwrap();
    for (why, ca) in [("a wrong authority", Some(PathBuf::from(other_ca))), ("only public authorities", None)] {
        let error = reach(with(&url, ca)).await.unwrap_err();
        assert!(matches!(&error, BrokerError::Untrusted(text) if text.contains("ca_file")), "{why}: {error}");
    }
    let proxy = Proxy::before(&address(&url), "127.0.0.2:0").await;
    let other = format!("amqps://guest:guest@{}/%2f", proxy.address);
    let error = reach(with(&other, ca.clone())).await.unwrap_err();
    assert!(matches!(&error, BrokerError::Untrusted(text) if text.contains("127.0.0.2")), "a wrong host: {error}");
    let error = reach(with(&url, Some("/no/such/file".into()))).await.unwrap_err();
    assert!(matches!(&error, BrokerError::Refused(text) if text.contains("/no/such/file")), "{error}");
    let Some(plain) = service("tls_is_verified", "ONCEBOX_TEST_RABBITMQ") else { return };
    let error = reach(with(&plain.replace("amqp://", "amqps://"), ca)).await.unwrap_err();
    assert!(matches!(&error, BrokerError::Untrusted(text) if text.contains("TLS")), "no TLS there: {error}");
}

// Shown to fail: with the first host alone, and with each new connection beginning at the first one
// again.
#[tokio::test]
async fn of_several_hosts_the_first_that_answers_is_used_until_it_is_away() {
    let Some(mut corner) = Corner::of("of_several_hosts").await else { return };
    let server = address(&corner.config.url);
    let (second, third) = (Proxy::before(&server, "127.0.0.1:0").await, Proxy::before(&server, "127.0.0.1:0").await);
    let carried = || [&second, &third].map(|proxy| proxy.carried.load(Ordering::SeqCst) > 0);
    let hosts = format!("127.0.0.1:1,{},{}", second.address, third.address);
    corner.config.url = format!("amqp://guest:guest@{hosts}/%2f");
    let broker = corner.broker();
    let mut subscriber = broker.subscriber(&corner.subscription()).await.unwrap();
    publish(&broker, numbered(&corner.topic, 1, 10)).await;
    assert_eq!(numbers(&receive(&mut *subscriber, 10).await), (0..10).collect::<Vec<_>>());
    assert_eq!(carried(), [true, false]);
    drop(subscriber);
    second.line.send_replace(Line::Cut);
    let mut subscriber = broker.subscriber(&corner.subscription()).await.unwrap();
    assert_eq!(numbers(&receive(&mut *subscriber, 10).await), (0..10).collect::<Vec<_>>());
    assert!(carried()[1], "another node goes on");
    // That one works, so it is kept.
    second.line.send_replace(Line::Open);
    eventually("the connections of the second host are gone", SOON, || async { (!carried()[0]).then_some(()) }).await;
    let findings = broker.check(&[]).await.unwrap();
    assert!(!carried()[0] && findings[0].detail.contains(&third.address.to_string()), "{findings:?}");
    subscriber.close().await;
    let nobody = RabbitConfig::new("amqp://guest:s3cret@127.0.0.1:1,127.0.0.1:2/%2f");
    let said = reach(nobody).await.unwrap_err().to_string();
    assert!(said.contains("127.0.0.1:1") && said.contains("127.0.0.1:2") && !said.contains("s3cret"), "{said}");
    corner.finish().await;
}

#[tokio::test]
async fn messages_go_over_tls_both_ways() {
    let (Some(url), Some(mut corner)) =
        (service("messages_go_over_tls", "ONCEBOX_TEST_RABBITMQ_TLS"), Corner::of("messages_go_over_tls").await)
    else {
        return;
    };
    corner.config.url = url;
    corner.config.ca_file = authority("ONCEBOX_TEST_CA");
    let mut subscriber = corner.broker().subscriber(&corner.subscription()).await.unwrap();
    publish(&corner.broker(), numbered(&corner.topic, 1, 1_000)).await;
    assert_eq!(numbers(&receive(&mut *subscriber, 1_000).await), (0..1_000).collect::<Vec<_>>());
    subscriber.close().await;
    corner.finish().await;
}

#[tokio::test]
async fn wrong_credentials_and_a_wrong_vhost_name_host_and_user_but_no_password() {
    let Some(url) = service("wrong_credentials", "ONCEBOX_TEST_RABBITMQ") else { return };
    let host = address(&url);
    let error = reach(RabbitConfig::new(format!("amqp://nobody:s3cret@{host}/%2f"))).await.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, BrokerError::Unauthorised(_)), "{text}");
    assert!(text.contains("nobody") && text.contains(&host) && !text.contains("s3cret"), "{text}");
    let error = reach(RabbitConfig::new(format!("amqp://guest:guest@{host}/no-such-vhost"))).await.unwrap_err();
    assert!(matches!(&error, BrokerError::Unauthorised(text) if text.contains("no-such-vhost")), "{error}");
    let error = reach(RabbitConfig::new("amqp://guest:guest@127.0.0.1:1/%2f")).await.unwrap_err();
    assert!(matches!(&error, BrokerError::Unavailable(text) if text.contains("127.0.0.1:1")), "{error}");
}

#[tokio::test]
async fn c6_a_server_that_takes_the_connection_and_says_nothing_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut config = RabbitConfig::new(format!("amqp://guest:guest@{}/%2f", listener.local_addr().unwrap()));
    config.connect_deadline = Duration::from_millis(300);
    let start = Instant::now();
    let error = reach(config).await.unwrap_err();
    assert!(matches!(&error, BrokerError::Unavailable(text) if text.contains("handshake")), "{error}");
    assert!(start.elapsed() < RabbitConfig::new("amqp://127.0.0.1").connect_deadline);
    // The connection that was given up is shut down, not left to its thread.
    let (mut socket, _) = listener.accept().await.unwrap();
    let mut bytes = Vec::new();
    tokio::time::timeout(SOON, socket.read_to_end(&mut bytes)).await.expect("an end").unwrap();
}

#[tokio::test]
async fn a_connection_that_ends_is_told_and_work_goes_on_over_a_new_one() {
    let Some((corner, proxy)) = behind_a_proxy("a_connection_that_ends").await else { return };
    let broker = corner.broker();
    let mut subscriber = broker.subscriber(&corner.subscription()).await.unwrap();
    let mut publisher = broker.publisher().await.unwrap();
    assert!(matches!(subscriber.next().await, Ok(Event::Assigned(_))));
    // From now on it asks the server nothing: only the end of the session is an error.
    assert!(publisher.topic(&corner.topic).await.is_ok());
    publish(&broker, numbered(&corner.topic, 1, 5)).await;
    let held = receive(&mut *subscriber, 5).await;
    proxy.line.send(Line::Cut).unwrap();
    let error = tokio::time::timeout(SOON, subscriber.next()).await.expect("an end").unwrap_err();
    assert!(matches!(error, BrokerError::Unavailable(_)), "{error}");
    // An acknowledgement that cannot arrive is no error: the inbox knows the message.
    subscriber.acknowledge(&held[4].source, held[4].sequence).await.unwrap();
    let start = Instant::now();
    while publisher.topic(&corner.topic).await.is_ok() {
        assert!(start.elapsed() < SOON, "the session does not notice");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    publisher.send(vec![(0, message(&corner.topic, None, 0))]).await.expect_err("the session is over");
    tokio::time::timeout(SOON, publisher.close()).await.expect("a close has a deadline");
    tokio::time::timeout(SOON, subscriber.close()).await.expect("a close has a deadline");
    proxy.line.send(Line::Open).unwrap();
    let mut again = broker.subscriber(&corner.subscription()).await.unwrap();
    let deliveries = receive(&mut *again, 5).await;
    assert_eq!(numbers(&deliveries), [0, 1, 2, 3, 4]);
    again.close().await;
    corner.finish().await;
}

#[tokio::test]
async fn a_server_that_falls_silent_is_found_out_by_its_heartbeat() {
    let Some((mut corner, proxy)) = behind_a_proxy("a_server_that_falls_silent").await else { return };
    corner.config.heartbeat = Duration::from_secs(2);
    corner.config.connect_deadline = Duration::from_secs(20);
    corner.config.close_deadline = Duration::from_millis(300);
    corner.config.quiet_check = Duration::from_secs(600);
    let broker = corner.broker();
    let mut subscriber = broker.subscriber(&corner.subscription()).await.unwrap();
    let mut publisher = broker.publisher().await.unwrap();
    assert!(matches!(subscriber.next().await, Ok(Event::Assigned(_))));
    proxy.line.send(Line::Frozen).unwrap();
    publisher.send(vec![(0, message(&corner.topic, None, 0))]).await.unwrap();
    let mut settled = Vec::new();
    let error = tokio::time::timeout(SOON, publisher.settle(&mut settled)).await.expect("a deadline").unwrap_err();
    assert!(matches!(&error, BrokerError::Unavailable(_)) && settled.is_empty(), "{error}");
    let error = tokio::time::timeout(SOON, subscriber.next()).await.expect("a deadline").unwrap_err();
    assert!(matches!(error, BrokerError::Unavailable(_)), "{error}");
    tokio::time::timeout(SOON, publisher.close()).await.expect("a close has a deadline");
    tokio::time::timeout(SOON, subscriber.close()).await.expect("a close has a deadline");
    proxy.line.send(Line::Cut).unwrap();
    corner.finish().await;
}

/// It fails where the check begins again with each call of `next`. The runtime drops the call at
/// every tick, so the check never ended.
#[tokio::test]
async fn a_server_that_falls_silent_is_found_out_by_the_quiet_check_also_where_next_is_dropped_again_and_again() {
    let Some((mut corner, proxy)) = behind_a_proxy("a_server_that_falls_silent_where_next_is_dropped").await else {
        return;
    };
    // Only the quiet check can find it out.
    corner.config.heartbeat = Duration::from_secs(600);
    corner.config.connect_deadline = Duration::from_secs(3);
    corner.config.close_deadline = Duration::from_millis(300);
    corner.config.quiet_check = Duration::from_millis(100);
    let mut subscriber = corner.broker().subscriber(&corner.subscription()).await.unwrap();
    assert!(matches!(subscriber.next().await, Ok(Event::Assigned(_))));
    proxy.line.send(Line::Frozen).unwrap();
    let found_out = async {
        loop {
            if let Ok(event) = tokio::time::timeout(Duration::from_millis(5), subscriber.next()).await {
                return event;
            }
        }
    };
    let error = tokio::time::timeout(SOON, found_out).await.expect("the check ends").unwrap_err();
    assert!(matches!(&error, BrokerError::Unavailable(why) if why.contains("no answer")), "{error}");
    tokio::time::timeout(SOON, subscriber.close()).await.expect("a close has a deadline");
    proxy.line.send(Line::Cut).unwrap();
    corner.finish().await;
}

#[tokio::test]
async fn g11_send_waits_at_the_bound_of_held_bytes_and_goes_on_when_there_is_room() {
    let Some((mut corner, proxy)) = behind_a_proxy("g11_send_waits_at_the_bound").await else { return };
    corner.config.held_bytes_max = 10_000;
    let queue = corner.queue();
    corner.queue_of(&queue, &corner.topic, &[]).await;
    let mut publisher = corner.broker().publisher().await.unwrap();
    proxy.line.send(Line::Frozen).unwrap();
    // What is handed over at once is taken at once; what comes on top of it waits.
    publisher.send(numbered(&corner.topic, 1, 100)).await.unwrap();
    let more = vec![(100, message(&corner.topic, Some("k0"), 100))];
    {
        let mut sending = std::pin::pin!(publisher.send(more));
        assert!(tokio::time::timeout(Duration::from_millis(200), &mut sending).await.is_err(), "no bound");
        proxy.line.send(Line::Open).unwrap();
        tokio::time::timeout(SOON, sending).await.expect("room").unwrap();
    }
    let mut settled = Vec::new();
    while settled.len() < 101 {
        tokio::time::timeout(SOON, publisher.settle(&mut settled)).await.expect("outcomes").unwrap();
    }
    assert!(settled.iter().all(|one| one.outcome.is_ok()), "{settled:?}");
    publisher.close().await;
    corner.clean(&[&queue]).await;
}

#[tokio::test]
async fn what_is_dropped_leaves_no_connection_behind() {
    let Some((corner, proxy)) = behind_a_proxy("what_is_dropped_leaves_no_connection").await else { return };
    let broker = corner.broker();
    let subscriber = broker.subscriber(&corner.subscription()).await.unwrap();
    let mut publisher = broker.publisher().await.unwrap();
    publisher.send(numbered(&corner.topic, 3, 500)).await.unwrap();
    eventually("both are connected", SOON, async || (proxy.carried.load(Ordering::SeqCst) == 2).then_some(())).await;
    drop(publisher);
    drop(subscriber);
    eventually("both are gone", SOON, async || (proxy.carried.load(Ordering::SeqCst) == 0).then_some(())).await;
    corner.finish().await;
}
