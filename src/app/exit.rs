//! Exit codes: 0 done, 1 failed, 2 usage, 3 not ready or a check failed, 4 refused for safety.

use std::process::ExitCode;

use crate::error::{BrokerError, RunError, StoreError};

/// The result of a program, for scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exit {
    Done = 0,
    Failed = 1,
    Usage = 2,
    NotReady = 3,
    Refused = 4,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why a program ends, other than with its work done: an error or a stop, with the exit code.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct AppError {
    /// A text for the operator: what failed, on which named thing, and the remedy.
    pub message: String,
    pub(super) exit: Exit,
}

impl AppError {
    /// A wrong command or setting: ends the program with 2.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), exit: Exit::Usage }
    }

    /// The work failed: ends the program with 1.
    pub fn failed(message: impl Into<String>) -> Self {
        Self { message: message.into(), exit: Exit::Failed }
    }

    /// Something is not ready, or a check failed: ends the program with 3.
    pub fn not_ready(message: impl Into<String>) -> Self {
        Self { message: message.into(), exit: Exit::NotReady }
    }

    /// It is not safe to go on: ends the program with 4.
    pub fn refused(message: impl Into<String>) -> Self {
        Self { message: message.into(), exit: Exit::Refused }
    }

    /// A stop came before the work began: ends the program with 0.
    pub fn stopped(message: impl Into<String>) -> Self {
        Self { message: message.into(), exit: Exit::Done }
    }

    /// Adds the name of the thing that failed.
    #[must_use]
    pub fn on(mut self, thing: &str) -> Self {
        self.message = format!("{thing}: {}", self.message);
        self
    }
}

impl From<StoreError> for AppError {
    fn from(error: StoreError) -> Self {
        let exit = match &error {
            StoreError::SchemaMissing(_)
            | StoreError::SchemaOld { .. }
            | StoreError::SchemaNewer { .. }
            | StoreError::Refused(_) => Exit::NotReady,
            error if error.is_for_a_person() => Exit::NotReady,
            _ => Exit::Failed,
        };
        Self { message: error.to_string(), exit }
    }
}

impl From<BrokerError> for AppError {
    fn from(error: BrokerError) -> Self {
        let needs_a_person = matches!(error, BrokerError::Refused(_) | BrokerError::Untrusted(_));
        let exit = if needs_a_person { Exit::NotReady } else { Exit::Failed };
        Self { message: error.to_string(), exit }
    }
}

impl From<RunError> for AppError {
    fn from(error: RunError) -> Self {
        match error {
            RunError::Store(error) => error.into(),
            RunError::Broker(error) => error.into(),
            error @ RunError::Horizon { .. } => Self::refused(error.to_string()),
        }
    }
}
