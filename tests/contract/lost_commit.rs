//! A connection that is lost during COMMIT (G12): a proxy between store and PostgreSQL cuts the request, or the reply.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use oncebox::store::postgres::PostgresStore;
use oncebox::store::{Base, StoreOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::kit::{Act, Does, World, consumer_options};

/// Which COMMITs of transactions that wrote an effect are cut: so many before the server sees them, or after it did.
#[derive(Debug, Default)]
struct Cut {
    before: AtomicU32,
    after: AtomicU32,
}

fn take(count: &AtomicU32) -> bool {
    count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

fn holds(bytes: &[u8], text: &[u8]) -> bool {
    bytes.windows(text.len()).any(|window| window.eq_ignore_ascii_case(text))
}

async fn proxy(server: &str, cut: Arc<Cut>) -> String {
    let mut url = url::Url::parse(server).unwrap();
    let address = format!("{}:{}", url.host_str().unwrap(), url.port().unwrap_or(5432));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    url.set_host(Some("127.0.0.1")).unwrap();
    url.set_port(Some(listener.local_addr().unwrap().port())).unwrap();
    // In clear, so that a COMMIT can be seen.
    url.set_query(Some("sslmode=disable"));
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (address, cut) = (address.clone(), Arc::clone(&cut));
            tokio::spawn(async move { relay(client, &address, &cut).await });
        }
    });
    url.to_string()
}

async fn relay(client: TcpStream, address: &str, cut: &Cut) -> Option<()> {
    let server = TcpStream::connect(address).await.ok()?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let (mut request, mut reply) = (vec![0; 65_536], vec![0; 65_536]);
    let (mut wrote, mut swallow) = (false, false);
    loop {
        tokio::select! {
            read = from_client.read(&mut request) => {
                let bytes = &request[..read.ok().filter(|read| *read > 0)?];
                wrote |= holds(bytes, b"insert into effect");
                if wrote && holds(bytes, b"COMMIT") {
                    wrote = false;
                    if take(&cut.before) {
                        return None;
                    }
                    swallow = take(&cut.after);
                }
                to_server.write_all(bytes).await.ok()?;
            }
            read = from_server.read(&mut reply) => {
                let bytes = &reply[..read.ok().filter(|read| *read > 0)?];
                if swallow {
                    // The server has committed; nobody hears of it.
                    return None;
                }
                to_client.write_all(bytes).await.ok()?;
            }
        }
    }
}

async fn effect_is_once(test: &'static str, before: u32, after: u32) {
    super::postgres::with_database(test, move |database| async move {
        let cut = Arc::new(Cut::default());
        let url = proxy(&database.url, Arc::clone(&cut)).await;
        let store = PostgresStore::connect(&StoreOptions::new(url)).await.unwrap();
        let world = World::on(store).await;
        cut.before.store(before, Ordering::SeqCst);
        cut.after.store(after, Ordering::SeqCst);
        world.deliver_all(&["a1", "b1"]);
        let consumer = world.consumer(consumer_options(), Does(|_: &str, _: &oncebox::Message| Act::Done));
        super::support::eventually("acknowledged", super::kit::SOON, || async {
            (world.broker.committed("ledger", "t", 0) == 2).then_some(())
        })
        .await;
        assert_eq!((cut.before.load(Ordering::SeqCst), cut.after.load(Ordering::SeqCst)), (0, 0), "it was cut");
        assert_eq!(world.effects().await, ["a1", "b1"]);
        assert!(world.dead().await.is_empty());
        consumer.end().await;
        world.store.close().await;
    })
    .await;
}

#[tokio::test]
async fn g12_a_commit_whose_reply_was_lost_is_found_out_and_the_effect_is_there_once() {
    effect_is_once("g12_reply", 0, 1).await;
}

#[tokio::test]
async fn g12_a_commit_that_never_arrived_is_found_out_and_the_effect_is_there_once() {
    effect_is_once("g12_request", 2, 0).await;
}
