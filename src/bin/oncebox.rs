//! What a person types: demo, migrate, status, doctor, dead, config, bench.

use std::process::ExitCode;

fn main() -> ExitCode {
    oncebox::cli::oncebox_main()
}
