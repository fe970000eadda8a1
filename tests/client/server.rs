//! A server on a real socket that keeps keys as it should, and answers what it is told to.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncebox::client::{Client, ClientOptions, Request};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

/// What happens to one request.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// It is served: the effect once for each key, and the same answer each time.
    Serve,
    /// The connection is closed before anything happens.
    DropBefore,
    /// The effect happens, and the connection is closed without an answer.
    DropAfter,
    /// The effect happens, and half of the answer is sent.
    Cut,
    /// The effect happens, and nothing is answered for as long as the client waits.
    Hang,
    /// This is answered, and nothing happens.
    Say(String),
    /// The names in this directory are noted at the moment at which the request has come, and
    /// nothing is answered.
    List(PathBuf),
    /// Nothing happens, and 403 is answered after a notice.
    Hold(Arc<Notify>),
}

/// A request as it came.
#[derive(Debug, Clone)]
pub(crate) struct Came {
    pub(crate) line: String,
    pub(crate) headers: HashMap<String, String>,
    pub(crate) body: Vec<u8>,
}

#[derive(Debug, Default)]
struct Book {
    steps: VecDeque<Step>,
    came: Vec<Came>,
    effects: Vec<String>,
    listed: Vec<PathBuf>,
}

/// The server; it ends with the test.
#[derive(Debug, Clone)]
pub(crate) struct Server {
    pub(crate) origin: String,
    book: Arc<Mutex<Book>>,
}

/// An answer's bytes.
pub(crate) fn answer(status: u16, headers: &[(&str, &str)], body: &str) -> String {
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    format!("HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n{body}", body.len())
}

/// A step that says this.
pub(crate) fn say(status: u16, headers: &[(&str, &str)], body: &str) -> Step {
    Step::Say(answer(status, headers, body))
}

/// A problem body.
pub(crate) fn problem(status: u16, code: &str, key_state: &str) -> Step {
    let body = format!(r#"{{"status":{status},"code":"{code}","key_state":"{key_state}"}}"#);
    say(status, &[("content-type", "application/problem+json")], &body)
}

impl Server {
    /// Takes these steps, one for each request, and serves from then on.
    pub(crate) async fn start(steps: impl IntoIterator<Item = Step>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let origin = format!("http://{}", listener.local_addr().unwrap());
        let book = Arc::new(Mutex::new(Book { steps: steps.into_iter().collect(), ..Book::default() }));
        let server = Self { origin, book };
        let serving = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = serving.clone();
                tokio::spawn(async move { server.serve(stream).await });
            }
        });
        server
    }

    async fn serve(&self, stream: TcpStream) -> Option<()> {
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).await.ok().filter(|&read| read > 0)?;
        let mut headers = HashMap::new();
        loop {
            let mut header = String::new();
            stream.read_line(&mut header).await.ok()?;
            let Some((name, value)) = header.trim_end().split_once(':') else { break };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.ok()?;
        let key = headers.get("idempotency-key").cloned();
        let step = {
            let mut book = self.book.lock().unwrap();
            book.came.push(Came { line: line.trim_end().to_owned(), headers, body });
            let step = book.steps.pop_front().unwrap_or(Step::Serve);
            if let Step::List(directory) = &step {
                book.listed.extend(std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()));
            }
            if !matches!(step, Step::DropBefore | Step::Say(_) | Step::Hold(_) | Step::List(_)) {
                let key = key.clone().unwrap_or_default();
                if !book.effects.contains(&key) {
                    book.effects.push(key);
                }
            }
            step
        };
        let served =
            answer(201, &[("location", "/payments/7")], &format!(r#"{{"key":"{}"}}"#, key.unwrap_or_default()));
        match step {
            Step::DropBefore | Step::DropAfter => return None,
            Step::Hang | Step::List(_) => std::future::pending().await,
            Step::Cut => stream.write_all(&served.as_bytes()[..served.len() - 5]).await.ok()?,
            Step::Hold(notice) => {
                notice.notified().await;
                stream.write_all(answer(403, &[], "").as_bytes()).await.ok()?;
            }
            Step::Say(text) => stream.write_all(text.as_bytes()).await.ok()?,
            Step::Serve => stream.write_all(served.as_bytes()).await.ok()?,
        }
        stream.shutdown().await.ok()
    }

    /// What came so far.
    pub(crate) fn came(&self) -> Vec<Came> {
        self.book.lock().unwrap().came.clone()
    }

    /// The keys under which something happened.
    pub(crate) fn effects(&self) -> Vec<String> {
        self.book.lock().unwrap().effects.clone()
    }

    /// What stood in the directory of a [`Step::List`] when its request had come.
    pub(crate) fn listed(&self) -> Vec<PathBuf> {
        self.book.lock().unwrap().listed.clone()
    }

    /// Says what the next requests meet.
    pub(crate) fn next(&self, steps: impl IntoIterator<Item = Step>) {
        self.book.lock().unwrap().steps.extend(steps);
    }

    /// An operation of this server.
    pub(crate) fn request(&self) -> Request {
        let url = format!("{}/payments", self.origin);
        Request::json(&url, &serde_json::json!({"accountId": "acc-7", "amountMinor": 100})).unwrap()
    }

    /// Every request was the same operation: one key, the same bytes. Gives their number.
    pub(crate) fn all_the_same(&self) -> usize {
        let came = self.came();
        for one in &came {
            assert_eq!(one.headers.get("idempotency-key"), came[0].headers.get("idempotency-key"));
            assert_eq!((&one.line, &one.body), (&came[0].line, &came[0].body));
        }
        came.len()
    }
}

/// Settings with short pauses, and all the time that a busy machine takes for an attempt: tests
/// count them.
pub(crate) fn quick() -> ClientOptions {
    ClientOptions {
        attempt_timeout: Duration::from_secs(15),
        total: Duration::from_secs(60),
        backoff: Duration::from_millis(10),
        backoff_max: Duration::from_millis(50),
        ..ClientOptions::default()
    }
}

/// A client with short pauses.
pub(crate) fn client() -> Client {
    Client::new(quick()).unwrap()
}
