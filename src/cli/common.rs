//! What the commands share with the programs, and how data is printed.

pub(super) use crate::app::{CommonArgs, run};

/// How data is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(super) enum Output {
    /// For people.
    #[default]
    Table,
    /// For machines.
    Json,
}
