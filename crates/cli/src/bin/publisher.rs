//! The relay as a process: outbox to broker.

use std::process::ExitCode;

fn main() -> ExitCode {
    oncebox::app::plain_publisher()
}
