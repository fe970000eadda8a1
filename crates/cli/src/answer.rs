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
    /// The HTTP status of the answer: 200 for a success where none is given
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(200..=599), conflicts_with_all = ["grpc_code", "not_happened"])]
    status: Option<u16>,
    /// The code of the answer to a call of gRPC, in place of a status: 0 for a success
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(0..=16), conflicts_with = "not_happened")]
    grpc_code: Option<u16>,
    /// The content type of the answer
    #[arg(long, value_name = "TYPE", default_value = "application/json")]
    content_type: String,
    /// The version of the schema that the file is written in
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    schema_version: u32,
    /// How long the answer is replayed, from now. At least as long as the route keeps its keys:
    /// after it the next request under the key executes
    #[arg(long, value_name = "DURATION", default_value = "30d", value_parser = replay_time)]
    ttl: Duration,
}

/// What the operator says of the operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Says {
    /// It happened. Its answer may have been a refusal that binds, such as 402.
    Happened,
    Succeeded,
    Failed,
}

impl Says {
    /// The status of the answer where none is given.
    fn usual(self) -> Option<u16> {
        (self != Self::Failed).then_some(200)
    }

    /// Refuses a status that says the opposite, or that no client takes for an outcome.
    fn allows(self, status: u16) -> Result<(), AppError> {
        let (is_right, wanted) = match self {
            Self::Happened => (matches!(status, 0..=16 | 200..=299 | 400..=499), "200 to 299, or 400 to 499"),
            Self::Succeeded => (matches!(status, 0 | 200..=299), "200 to 299, or code 0 of gRPC"),
            Self::Failed => (matches!(status, 1..=16 | 400..=599), "400 to 599, or code 1 to 16 of gRPC"),
        };
        if is_right {
            return Ok(());
        }
        Err(AppError::usage(format!("{status} is no --status or --grpc-code of such an answer: give {wanted}")))
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
    /// Reads the answer; this file is its body.
    pub(super) fn read(&self, file: &Path, says: Says) -> Result<Answer, AppError> {
        let bytes = std::fs::read(file)
            .map_err(|error| AppError::usage(format!("{} cannot be read: {error}", file.display())))?;
        let status = self.status.or(self.grpc_code).or(says.usual());
        let status = status.ok_or_else(|| AppError::usage("a failure needs its --status"))?;
        says.allows(status)?;
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
