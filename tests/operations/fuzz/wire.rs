//! Requests as bytes on a socket: what no well-behaved client sends too.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::kit::{Http, SOON};

/// How the length of a body is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    /// As it is.
    Length,
    /// In so many bytes at a time.
    Chunked(usize),
    /// In chunks, with a trailer.
    Trailer,
    /// As it is, and only so many bytes come before the client hangs up.
    Cut(usize),
    /// With these words.
    Said(&'static str),
}

#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) body: Vec<u8>,
    pub(crate) framing: Framing,
}

impl Request {
    /// Without this header.
    pub(crate) fn without(&mut self, name: &str) {
        self.headers.retain(|(given, _)| given != name);
    }

    /// With this header once.
    pub(crate) fn with(&mut self, name: &str, value: impl Into<Vec<u8>>) {
        self.without(name);
        self.headers.push((name.to_owned(), value.into()));
    }

    pub(crate) fn header(&self, name: &str) -> &[u8] {
        self.headers.iter().find(|(given, _)| given == name).map_or(b"", |(_, value)| value)
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out =
            format!("{} {} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n", self.method, self.target).into_bytes();
        for (name, value) in &self.headers {
            out.extend_from_slice(name.as_bytes());
            out.extend_from_slice(b": ");
            out.extend_from_slice(value);
            out.extend_from_slice(b"\r\n");
        }
        match self.framing {
            Framing::Length | Framing::Cut(_) => {
                out.extend_from_slice(format!("content-length: {}\r\n\r\n", self.body.len()).as_bytes());
                let sent = if let Framing::Cut(at) = self.framing { at } else { self.body.len() };
                out.extend_from_slice(&self.body[..sent]);
            }
            Framing::Said(length) => out.extend_from_slice(format!("content-length: {length}\r\n\r\n").as_bytes()),
            Framing::Chunked(size) => {
                out.extend_from_slice(b"transfer-encoding: chunked\r\n\r\n");
                chunks(&mut out, &self.body, size);
                out.extend_from_slice(b"0\r\n\r\n");
            }
            Framing::Trailer => {
                out.extend_from_slice(b"transfer-encoding: chunked\r\ntrailer: x-fuzz\r\n\r\n");
                chunks(&mut out, &self.body, usize::MAX);
                out.extend_from_slice(b"0\r\nx-fuzz: 1\r\n\r\n");
            }
        }
        out
    }

    /// Sends it to an address. None: no answer came, the connection just ended.
    pub(crate) async fn send(&self, address: &str) -> Option<Http> {
        let mut stream = TcpStream::connect(address).await.unwrap();
        // A server that has answered already reads no more.
        let sent = stream.write_all(&self.bytes()).await;
        if matches!(self.framing, Framing::Cut(_)) {
            let _ = stream.shutdown().await;
        }
        let mut answer = Vec::new();
        let read = tokio::time::timeout(SOON, stream.read_to_end(&mut answer)).await;
        let read = read.unwrap_or_else(|_| panic!("no answer and no end: {self:?}"));
        assert!(sent.is_ok() && read.is_ok() || self.framing != Framing::Length, "{sent:?} {read:?}");
        parsed(&answer)
    }
}

fn chunks(out: &mut Vec<u8>, body: &[u8], size: usize) {
    for chunk in body.chunks(size) {
        out.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
        out.extend_from_slice(chunk);
        out.extend_from_slice(b"\r\n");
    }
}

fn parsed(answer: &[u8]) -> Option<Http> {
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n")?;
    let (head, body) = (std::str::from_utf8(&answer[..end]).unwrap(), &answer[end + 4..]);
    let mut lines = head.split("\r\n");
    let status = lines.next()?.split(' ').nth(1)?.parse().unwrap();
    let mut headers = reqwest::header::HeaderMap::new();
    for line in lines {
        let (name, value) = line.split_once(": ").unwrap();
        let name: reqwest::header::HeaderName = name.parse().unwrap();
        headers.append(name, value.parse().unwrap());
    }
    let length = headers.get("content-length").map(|length| length.to_str().unwrap().parse::<usize>().unwrap());
    assert!(length.is_none_or(|length| length == body.len()), "the whole of it: {head}");
    Some(Http { status, headers, body: body.to_vec() })
}
