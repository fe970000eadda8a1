//! Reads the outcome of a run from the response of its handler: the tag, and the part that can be
//! stored.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::response::Response;
use futures_util::StreamExt;
use futures_util::stream;

use crate::operation::rules::Outcome;
use crate::operation::{Ended, Kept, Reply};

/// The outcome of the operation, as an extension of its response:
/// `response.extensions_mut().insert(OutcomeTag(..))`.
#[derive(Debug, Clone)]
pub struct OutcomeTag(pub Outcome<()>);

/// The part of a response that can be stored. A stream is never collected, because that would delay
/// the client (pitfall 19). A body that does not end within the completion budget is sent and not
/// stored: a run that waits for it would keep its claim, and the connections of its guard, too
/// long.
pub(super) async fn ended(response: Response, kept_max: usize, within: Duration) -> Ended<Response> {
    let tag = response.extensions().get::<OutcomeTag>().map(|tag| tag.0.clone());
    let head = head(&response);
    let status = head.status;
    match response.body().size_hint().upper() {
        None => {
            if cfg!(debug_assertions) {
                tracing::error!(
                    status,
                    "a protected route answers with a stream: it is sent, and never replayed; leave the route unprotected"
                );
            }
            Ended { tag, kept: Kept::Stream(head), answer: response }
        }
        Some(upper) if upper > kept_max as u64 => Ended { tag, kept: Kept::Oversize(head), answer: response },
        Some(_) => {
            let (parts, body) = response.into_parts();
            match read_whole(body, kept_max, within).await {
                Ok(bytes) => {
                    let kept = Kept::Whole(Reply { body: bytes.clone(), ..head });
                    Ended { tag, kept, answer: Response::from_parts(parts, Body::from(bytes)) }
                }
                // The handler has ended, its body has not. The effects of the handler stay, and the
                // client gets what comes, up to the error.
                Err(unended) => {
                    tracing::warn!(status, "an answer is not kept: its body {}", unended.why);
                    Ended { tag, kept: Kept::Stream(head), answer: Response::from_parts(parts, unended.body) }
                }
            }
        }
    }
}

fn head(response: &Response) -> Reply {
    let headers = response.headers().iter();
    let headers = headers.map(|(name, value)| (name.as_str().to_owned(), value.as_bytes().to_vec()));
    Reply { headers: headers.collect(), ..Reply::new(response.status().as_u16()) }
}

/// Reads a response completely within this time; else an error that says why it cannot be read.
pub(super) async fn reply_of(response: Response, within: Duration) -> Result<Reply, String> {
    let (head, body) = (head(&response), response.into_body());
    let Some(upper) = body.size_hint().upper() else {
        return Err("the answer is a stream, and a guard commits a whole answer".to_owned());
    };
    let body = read_whole(body, usize::try_from(upper).unwrap_or(usize::MAX), within).await;
    Ok(Reply { body: body.map_err(|unended| format!("the body of the answer {}", unended.why))?, ..head })
}

struct Unended {
    /// What the body did instead of ending, as the rest of a sentence.
    why: String,
    /// The whole body, with what was read already.
    body: Body,
}

async fn read_whole(body: Body, max: usize, within: Duration) -> Result<Vec<u8>, Unended> {
    let until = tokio::time::Instant::now() + within;
    let (mut read, mut length, mut rest) = (Vec::new(), 0, body.into_data_stream());
    loop {
        let (why, failed) = match tokio::time::timeout_at(until, rest.next()).await {
            Ok(None) => return Ok(read.concat()),
            Ok(Some(Ok(data))) => {
                length += data.len();
                read.push(data);
                if length <= max {
                    continue;
                }
                ("is longer than it said".to_owned(), None)
            }
            Ok(Some(Err(error))) => (format!("failed: {error}"), Some(Err(error))),
            Err(_) => (format!("did not end within {}", humantime::format_duration(within)), None),
        };
        let read = stream::iter(read.into_iter().map(Ok).chain(failed));
        return Err(Unended { why, body: Body::from_stream(read.chain(rest)) });
    }
}
