//! `oncebox`: the commands for people and scripts.

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use super::common::{CommonArgs, Output, run};
use super::place::end_with_parent;
use super::{audit, bench, config, consumers, dead, demo, doctor, keys, migrate, operations, queues, status};
use oncebox::app::{AppError, COMMON_OPTIONS, ConsumerArgs, LogFormat, PublisherArgs, program_commands, speak};

/// Exactly-once effects over at-least-once brokers.
#[derive(Debug, Parser)]
#[command(name = "oncebox", version, propagate_version = true)]
struct OnceboxArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// How data is printed; with `json` errors on stderr are JSON too, one object a line
    #[arg(long, value_enum, default_value_t, global = true, help_heading = COMMON_OPTIONS)]
    output: Output,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// See it work: payments, a relay and consumers in processes of their own, with duplicates and
    /// kills
    ///
    /// Everything is its own: a database beside the one that is named (a file by default), and
    /// topics. No setting is read from the environment or from a configuration file, also where the
    /// common options name a variable.
    ///
    /// It removes what it made at its end, and when it is stopped by SIGINT, SIGTERM or SIGHUP.
    /// After SIGKILL it stays, under the names that the first line says: delete the directory, the
    /// database, the topic or exchange, and the groups or queues of both consumers.
    Demo(demo::DemoArgs),
    /// Measure what the promise costs, as ratios inside one run
    ///
    /// Everything is its own: a database beside the one that is named (a file by default), and
    /// topics. No setting is read from the environment or from a configuration file, also where the
    /// common options name a variable.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Make or show the tables
    #[command(subcommand)]
    Migrate(migrate::MigrateCommand),
    /// Show how outbox, consumers, e-mails and operations stand, and what of it is stuck
    Status(status::StatusArgs),
    /// Look at everything the promise rests on; exit code 3 where something breaks it, or is stuck
    Doctor(doctor::DoctorArgs),
    /// List, show, redrive, bury and discard messages that could not be sent or handled
    #[command(subcommand)]
    Dead(dead::DeadCommand),
    /// List consumers and when each was last there; forget one that is gone
    #[command(subcommand)]
    Consumers(consumers::ConsumersCommand),
    /// List what operators did, and why
    #[command(subcommand)]
    Audit(audit::AuditCommand),
    /// Look at idempotency keys: list, show, release, purge; say how an unknown one ended
    #[command(subcommand)]
    Keys(keys::KeysCommand),
    /// Look at operations in phases: list, show; send again, or say how one ended
    #[command(subcommand)]
    Operations(operations::OperationsCommand),
    /// Change the number of queues behind a consumer's topics on RabbitMQ
    #[command(subcommand)]
    Queues(queues::QueuesCommand),
    /// Send queued e-mails: to .eml files, or by SMTP when configured
    #[cfg(feature = "email")]
    Sender(super::sender::SenderArgs),
    /// Print settings: a template, or what is in force
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Print a completion script for a shell
    Completions {
        /// The shell that the script is for
        shell: clap_complete::Shell,
        /// The program that the script is for
        #[arg(default_value = "oncebox", value_parser = ["oncebox", "publisher", "consumer"])]
        program: String,
    },
    /// Run a process of `demo` or `bench` in this binary: `cargo run` builds no other
    #[command(hide = true, subcommand)]
    Run(Program),
}

#[derive(Debug, Subcommand)]
enum Program {
    Publisher(PublisherArgs),
    Consumer(ConsumerArgs),
    #[cfg(feature = "email")]
    Sender(super::sender::SenderArgs),
    Demo(demo::RoleArgs),
    Peer(bench::PeerArgs),
}

/// Runs the command that the arguments name; the answer is the exit code of the process.
pub(super) fn run_named() -> ExitCode {
    let args = match OnceboxArgs::try_parse() {
        Ok(args) => args,
        Err(error) if error.use_stderr() && names_json() => {
            speak(LogFormat::Json);
            let text = error.to_string();
            let text = text.trim_start_matches("error: ").trim_end().to_owned();
            return run(async move { Err(AppError::usage(text)) });
        }
        Err(error) => error.exit(),
    };
    if args.output == Output::Json {
        // A machine that reads JSON reads the errors too.
        speak(LogFormat::Json);
    }
    run(args.run())
}

/// Whether a command line that cannot be read asks for JSON.
fn names_json() -> bool {
    let args: Vec<_> = std::env::args_os().collect();
    args.iter().any(|arg| arg == "--output=json")
        || args.windows(2).any(|pair| pair[0] == "--output" && pair[1] == "json")
}

impl OnceboxArgs {
    async fn run(self) -> Result<(), AppError> {
        match self.command {
            Command::Demo(demo) => demo::run(demo, &self.common, self.output).await,
            Command::Bench(command) => bench::run(command, &self.common, self.output).await,
            Command::Migrate(command) => migrate::run(&command, &self.common, self.output).await,
            Command::Status(args) => status::run(&args, &self.common, self.output).await,
            Command::Config(command) => config::run(&command, &self.common, self.output),
            Command::Doctor(args) => doctor::run(&args, &self.common, self.output).await,
            Command::Dead(command) => dead::run(&command, &self.common, self.output).await,
            Command::Consumers(command) => consumers::run(&command, &self.common, self.output).await,
            Command::Audit(command) => audit::run(&command, &self.common, self.output).await,
            Command::Keys(command) => keys::run(&command, &self.common, self.output).await,
            Command::Queues(command) => queues::run(&command, &self.common, self.output).await,
            Command::Operations(command) => operations::run(&command, &self.common, self.output).await,
            #[cfg(feature = "email")]
            Command::Sender(args) => super::sender::run(&args, &self.common).await,
            Command::Completions { shell, program } => {
                let mut script = Vec::new();
                let mut programs = program_commands().into_iter();
                let mut command = programs.find(|one| one.get_name() == program).unwrap_or_else(Self::command);
                clap_complete::generate(shell, &mut command, program, &mut script);
                data!("{}", String::from_utf8_lossy(&script).trim_end());
                Ok(())
            }
            Command::Run(program) => {
                end_with_parent();
                program.run(&self.common).await
            }
        }
    }
}

impl Program {
    async fn run(self, common: &CommonArgs) -> Result<(), AppError> {
        match self {
            Self::Publisher(args) => args.run(common).await,
            Self::Consumer(args) => args.run(common).await,
            #[cfg(feature = "email")]
            Self::Sender(args) => super::sender::run(&args, common).await,
            Self::Demo(args) => demo::run_role(args, common).await,
            Self::Peer(args) => bench::run_peer(args, common).await,
        }
    }
}
