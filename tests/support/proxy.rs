//! A proxy before a server, a database's or a broker's, whose network can fail: in the middle of a
//! request, or between a request and its answer.
#![allow(dead_code, clippy::unwrap_used)] // each test binary uses its part

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;

/// How the network fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// Connections are closed, new ones refused.
    Cut,
    /// Nothing is closed and nothing arrives: a frozen server, a half-open connection. The server's
    /// end is closed with the client's.
    Silence,
    /// As above, and the server hears nothing of an end either: its session stays until it ends it
    /// by itself.
    Deafness,
}

/// When it fails: before the request arrives at the server, or after the server has answered and
/// before that arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    BeforeRequest,
    BeforeAnswer,
}

/// What makes it fail.
#[derive(Debug, Clone)]
struct Armed {
    /// Requests that come through before.
    requests: u32,
    /// Only those that hold the second text, on a connection that has sent the first one.
    text: Option<(&'static str, &'static str)>,
    when: When,
    failure: Failure,
    /// How long; then new connections work.
    lasts: Duration,
    /// So many more such requests in a row fail after this one.
    again: u32,
}

#[derive(Debug)]
struct Shared {
    server: String,
    /// An address of the server as it stands in its answers, and the proxy's that takes its place.
    instead: Option<([u8; 13], [u8; 13])>,
    /// What is wrong, and how often something went wrong so far: a connection of an earlier time
    /// never works again.
    state: watch::Sender<(Option<Failure>, u32)>,
    armed: Mutex<Option<Armed>>,
    /// Failures that began since the last one was armed, and requests that were met and whose
    /// failure has not begun.
    failed: AtomicU32,
    met: AtomicU32,
    requests: AtomicU32,
}

impl Shared {
    fn arm(&self, armed: Armed) {
        let mut slot = self.armed.lock().unwrap();
        self.failed.store(0, Ordering::SeqCst);
        *slot = Some(armed);
    }
}

/// One address in place of a server's.
#[derive(Debug)]
pub(crate) struct Proxy {
    pub(crate) url: String,
    shared: Arc<Shared>,
}

impl Proxy {
    /// Before the server of this URL, in clear text.
    pub(crate) fn before(server: &str, clear: &str) -> Self {
        Self::with_query(server, Some(clear))
    }

    /// Before a broker. A Kafka tells its clients where to go on; they are told to come here.
    pub(crate) fn before_broker(server: &str) -> Self {
        Self::with_query(server, None)
    }

    fn with_query(server: &str, query: Option<&str>) -> Self {
        let mut url = url::Url::parse(server).unwrap();
        let default = match url.scheme() {
            "mysql" => 3306,
            "amqp" => 5672,
            "kafka" => 9092,
            _ => 5432,
        };
        let address = format!("{}:{}", url.host_str().unwrap(), url.port().unwrap_or(default));
        // Bound and never listening: the port stays ours while nobody listens, and connecting to it
        // is refused.
        let reserved = socket("127.0.0.1:0".parse().unwrap());
        let here = reserved.local_addr().unwrap();
        url.set_host(Some("127.0.0.1")).unwrap();
        url.set_port(Some(here.port())).unwrap();
        let at = |port: u16| {
            // The host, and the port as the four bytes behind it.
            let mut bytes = *b"127.0.0.1\0\0\0\0";
            bytes[11..].copy_from_slice(&port.to_be_bytes());
            bytes
        };
        let instead = (url.scheme() == "kafka")
            .then(|| (at(address.rsplit_once(':').unwrap().1.parse().unwrap()), at(here.port())));
        url.set_query(query);
        let state = watch::Sender::new((None, 0));
        let requests = AtomicU32::new(0);
        let (armed, failed, met) = (Mutex::new(None), AtomicU32::new(0), AtomicU32::new(0));
        let shared = Arc::new(Shared { server: address, instead, state, armed, failed, met, requests });
        let serving = Arc::clone(&shared);
        let listener = listen(here);
        tokio::spawn(async move {
            let _reserved = reserved;
            serve(listener, here, serving).await;
        });
        Self { url: url.to_string(), shared }
    }

    /// The network fails at the request that comes after so many others, and works again a moment
    /// later.
    pub(crate) fn fail_after(&self, requests: u32, when: When, failure: Failure) {
        let lasts = Duration::from_millis(150);
        self.shared.arm(Armed { requests, text: None, when, failure, lasts, again: 0 });
    }

    /// It fails at a request with the text `at` on a connection that has sent `since`, after so
    /// many others of that kind; other connections go on.
    pub(crate) fn fail_at(&self, since: &'static str, at: &'static str, requests: u32, when: When, failure: Failure) {
        let (text, lasts) = (Some((since, at)), Duration::ZERO);
        self.shared.arm(Armed { requests, text, when, failure, lasts, again: 0 });
    }

    /// It fails so many times in a row at such a request: armed at once, since a retry may come
    /// before anybody could arm it anew.
    pub(crate) fn fail_times_at(
        &self,
        times: u32,
        since: &'static str,
        at: &'static str,
        when: When,
        failure: Failure,
    ) {
        let (text, lasts) = (Some((since, at)), Duration::ZERO);
        self.shared.arm(Armed { requests: 0, text, when, failure, lasts, again: times - 1 });
    }

    /// How many pieces of requests came from clients. A large request comes in several, and several
    /// small ones that follow each other may come in one.
    pub(crate) fn requests(&self) -> u32 {
        self.shared.requests.load(Ordering::Relaxed)
    }

    /// What was armed has failed as often as it was to, and lasts no more for new connections.
    pub(crate) fn has_failed(&self) -> bool {
        let is_over = self.shared.armed.lock().unwrap().is_none() && self.shared.met.load(Ordering::SeqCst) == 0;
        is_over && self.shared.failed.load(Ordering::SeqCst) > 0 && self.shared.state.borrow().0.is_none()
    }

    /// Fails now, for all connections, until [`Proxy::works`].
    pub(crate) fn fails(&self, failure: Failure) {
        self.shared.state.send_modify(|(now, times)| (*now, *times) = (Some(failure), *times + 1));
    }

    /// New connections work.
    pub(crate) fn works(&self) {
        self.shared.state.send_modify(|(now, _)| *now = None);
    }
}

fn socket(address: SocketAddr) -> TcpSocket {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(address).unwrap();
    socket
}

fn listen(address: SocketAddr) -> TcpListener {
    socket(address).listen(128).unwrap()
}

async fn serve(listener: TcpListener, here: SocketAddr, shared: Arc<Shared>) {
    let mut state = shared.state.subscribe();
    let mut listener = Some(listener);
    loop {
        let cut = state.borrow_and_update().0 == Some(Failure::Cut);
        match &listener {
            Some(_) if cut => listener = None,
            None if !cut => listener = Some(listen(here)),
            _ => {}
        }
        let accepted = async {
            match &listener {
                Some(listener) => listener.accept().await.map(|(client, _)| client).ok(),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = state.changed() => if changed.is_err() { return },
            client = accepted => {
                let Some(client) = client else { continue };
                let shared = Arc::clone(&shared);
                tokio::spawn(async move { Connection::run(client, shared).await });
            }
        }
    }
}

struct Connection {
    shared: Arc<Shared>,
    from_client: OwnedReadHalf,
    to_client: OwnedWriteHalf,
    from_server: OwnedReadHalf,
    to_server: OwnedWriteHalf,
    /// It has sent the text since which an armed failure counts.
    since: bool,
    /// The end of what it sent before: a text may come in two pieces.
    tail: Vec<u8>,
}

impl Connection {
    async fn run(client: TcpStream, shared: Arc<Shared>) -> Option<()> {
        let mut state = shared.state.subscribe();
        let (failure, times) = *state.borrow_and_update();
        let server = TcpStream::connect(&shared.server).await.ok()?;
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        let mut this = Self { shared, from_client, to_client, from_server, to_server, since: false, tail: Vec::new() };
        if let Some(failure) = failure {
            return this.fail(failure).await;
        }
        let (mut request, mut answer) = (vec![0; 65_536], vec![0; 65_536]);
        loop {
            tokio::select! {
                changed = state.changed() => {
                    changed.ok()?;
                    let (failure, now) = *state.borrow_and_update();
                    if now > times {
                        return this.fail(failure.unwrap_or(Failure::Cut)).await;
                    }
                }
                read = this.from_client.read(&mut request) => {
                    let bytes = &request[..read.ok().filter(|read| *read > 0)?];
                    this.shared.requests.fetch_add(1, Ordering::Relaxed);
                    match this.take_armed(bytes) {
                        None => this.to_server.write_all(bytes).await.ok()?,
                        Some(armed) => {
                            if armed.when == When::BeforeAnswer {
                                // Some of an answer is proof enough that the server has worked. A
                                // server that goes without one has failed as well.
                                let _gone = this.to_server.write_all(bytes).await;
                                let _gone = this.from_server.read(&mut answer).await;
                            }
                            return this.fail_armed(&armed).await;
                        }
                    }
                }
                read = this.from_server.read(&mut answer) => {
                    let bytes = &mut answer[..read.ok().filter(|read| *read > 0)?];
                    if let Some((theirs, ours)) = &this.shared.instead {
                        // An answer that names it is short, and comes in one piece.
                        let is_there = |at: &usize| bytes[*at..].starts_with(theirs);
                        let places: Vec<usize> = (0..bytes.len()).filter(is_there).collect();
                        for at in places {
                            bytes[at..at + ours.len()].copy_from_slice(ours);
                        }
                    }
                    this.to_client.write_all(bytes).await.ok()?;
                }
            }
        }
    }

    /// The failure that this request was armed with.
    fn take_armed(&mut self, bytes: &[u8]) -> Option<Armed> {
        let before = std::mem::take(&mut self.tail);
        // Of each text all but its last byte may have come before.
        let seen = |text: &str| [&before[before.len().saturating_sub(text.len().saturating_sub(1))..], bytes].concat();
        self.tail = [before.as_slice(), bytes].concat().split_off((before.len() + bytes.len()).saturating_sub(TAIL));
        let mut slot = self.shared.armed.lock().unwrap();
        let armed = slot.as_mut()?;
        if let Some((since, at)) = armed.text {
            self.since |= holds(&seen(since), since);
            if !(self.since && holds(&seen(at), at)) {
                return None;
            }
        }
        let met = match armed.requests.checked_sub(1) {
            Some(left) => {
                armed.requests = left;
                return None;
            }
            None => match armed.again.checked_sub(1) {
                Some(again) => {
                    armed.again = again;
                    Some(armed.clone())
                }
                None => slot.take(),
            },
        };
        self.shared.met.fetch_add(1, Ordering::SeqCst);
        met
    }

    /// This connection alone where the failure lasts no time; else all of them.
    async fn fail_armed(self, armed: &Armed) -> Option<()> {
        if !armed.lasts.is_zero() {
            let (shared, failure, lasts) = (Arc::clone(&self.shared), armed.failure, armed.lasts);
            shared.state.send_modify(|(now, times)| (*now, *times) = (Some(failure), *times + 1));
            tokio::spawn(async move {
                tokio::time::sleep(lasts).await;
                shared.state.send_modify(|(now, _)| *now = None);
            });
        }
        self.shared.failed.fetch_add(1, Ordering::SeqCst);
        self.shared.met.fetch_sub(1, Ordering::SeqCst);
        self.fail(armed.failure).await
    }

    async fn fail(mut self, failure: Failure) -> Option<()> {
        if failure == Failure::Cut {
            return None;
        }
        let mut lost = vec![0; 65_536];
        while self.from_client.read(&mut lost).await.ok()? > 0 {}
        if failure == Failure::Deafness {
            // Until the server has enough of it.
            while self.from_server.read(&mut lost).await.ok()? > 0 {}
        }
        Some(())
    }
}

/// As long as the longest text that a test waits for.
const TAIL: usize = 256;

fn holds(bytes: &[u8], text: &str) -> bool {
    text.is_empty() || bytes.windows(text.len()).any(|window| window.eq_ignore_ascii_case(text.as_bytes()))
}
