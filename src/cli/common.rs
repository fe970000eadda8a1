//! What the commands share with the programs, and how data is printed.

use comfy_table::{ContentArrangement, Table, presets};

pub(super) use crate::app::{CommonArgs, run};

/// Prints a line of data to stdout; where it cannot be written (a full disk, a reader that went away), that is an error.
macro_rules! data {
    ($($argument:tt)*) => {{
        use std::io::Write as _;
        writeln!(std::io::stdout(), $($argument)*)
            .map_err(|error| $crate::app::AppError::failed(format!("stdout cannot be written: {error}")))?
    }};
}

/// How data is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(super) enum Output {
    /// For people.
    #[default]
    Table,
    /// For machines.
    Json,
}

/// A table for people: on a terminal long cells are wrapped, in a pipe every row is one line.
pub(super) fn table<const COLUMNS: usize>(header: [&str; COLUMNS]) -> Table {
    const WIDTH: u16 = 120;
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(header);
    if std::io::IsTerminal::is_terminal(&std::io::stdout()) {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(WIDTH);
    }
    table
}
