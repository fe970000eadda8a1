//! The consumer runtime as a process, with the handlers that the configuration names.

use std::process::ExitCode;

fn main() -> ExitCode {
    oncebox::app::configured_consumer()
}
