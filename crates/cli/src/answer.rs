//! An answer that an operator gives: the body from a file, and how long it is replayed.

use std::path::Path;
use std::time::Duration;

use clap::Args;

use oncebox::app::AppError;
use oncebox::operation::Retention;
use oncebox::store::{Answer, AnswerBody, KeptBody};

/// What is replayed to whoever repeats the request.
#[derive(Debug, Clone, Args)]
pub(super) struct AnswerArgs {
    /// The HTTP status of the answer, 200 to 599, by default 200 for a success; for a call of gRPC
    /// its code, 0 to 16, which is 0 for a success
    #[arg(long, value_name = "NUMBER", value_parser = answer_status)]
    status: Option<u16>,
    /// The content type of the answer
    #[arg(long, value_name = "TYPE", default_value = "application/json")]
    content_type: String,
    /// The version of the schema that the file is written in
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    schema_version: u32,
    /// How long the answer is replayed, from now
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = replay_time)]
    ttl: Duration,
}

/// Reads a status that a route can replay.
fn answer_status(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(status @ (0..=16 | 200..=599)) => Ok(status),
        _ => Err("no status of an answer: HTTP has 200 to 599, gRPC 0 to 16".to_owned()),
    }
}

/// Reads how long an answer is replayed. With 0 the key would have expired at once, and the next
/// request under it would execute.
fn replay_time(text: &str) -> Result<Duration, String> {
    match oncebox::app::config::parse_duration(text)? {
        Duration::ZERO => Err("must be longer than zero: else the next request under the key executes".to_owned()),
        ttl => Ok(ttl),
    }
}

impl AnswerArgs {
    /// Reads the answer: this file is its body, and this its status where none was given.
    pub(super) fn read(&self, file: &Path, status: Option<u16>) -> Result<Answer, AppError> {
        let bytes = std::fs::read(file)
            .map_err(|error| AppError::usage(format!("{} cannot be read: {error}", file.display())))?;
        let status = self.status.or(status).ok_or_else(|| AppError::usage("a failure needs its --status"))?;
        let headers = vec![("content-type".to_owned(), self.content_type.clone().into_bytes())];
        let body = AnswerBody::Kept(KeptBody { headers, bytes, format: 0, kid: None });
        Ok(Answer { status, schema_version: self.schema_version, body, resource: None })
    }

    /// How long the answer, its body and the metadata are kept, each counted from now.
    pub(super) fn retention(&self) -> Retention {
        let usual = Retention::default();
        Retention { ttl: self.ttl, body: self.ttl, metadata: usual.metadata.max(self.ttl) }
    }
}
