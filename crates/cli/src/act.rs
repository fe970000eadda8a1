//! What all acts of an operator have in common: who, why, and how carefully.
//!
//! Not here: the act itself (`store`).

use std::io::Write;

use clap::Args;
use serde_json::json;

use super::common::Output;
use super::progress::shown;
use oncebox::app::{AppError, say};
use oncebox::store::ActContext;

/// The most items that an act changes without a confirmation.
const UNASKED_MAX: usize = 1;

/// Who, why, and how carefully.
#[derive(Debug, Clone, Args)]
pub(super) struct Act {
    /// Why; stored in the audit row
    #[arg(long, value_name = "TEXT", value_parser = said)]
    pub(super) why: String,
    /// Who acts, for the audit row; by default the user of this shell, or its number
    #[arg(long, value_name = "NAME", value_parser = said)]
    by: Option<String>,
    /// Only say what would be done
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Act without asking for confirmation
    #[arg(long)]
    pub(super) yes: bool,
}

impl Act {
    pub(super) fn context(&self, dry_run: bool) -> ActContext {
        let actor = self.by.clone().unwrap_or_else(actor);
        ActContext { actor, reason: self.why.clone(), dry_run, redrive_age_max: None }
    }

    /// Whether each run of the act is a dry one. Everything runs as a dry run first: if one item is
    /// refused, the others stay as they are.
    pub(super) fn runs(&self) -> &'static [bool] {
        if self.dry_run { &[true] } else { &[true, false] }
    }

    /// What stands before the verb where nothing is done.
    pub(super) fn would(&self) -> &'static str {
        if self.dry_run { "would " } else { "" }
    }

    /// Prints what was done, or would be, and on which of these; as JSON also how many more match
    /// and stay.
    pub(super) fn told(
        &self,
        verb: &str,
        kind: &str,
        names: &[String],
        remaining: usize,
        output: Output,
    ) -> Result<(), AppError> {
        if output == Output::Json {
            let mut value = json!({ "act": verb, "dry_run": self.dry_run });
            value[kind] = names.into();
            if remaining > 0 {
                value["remaining"] = remaining.into();
            }
            data!("{value}");
            return Ok(());
        }
        data!("{}{verb} {}:{}", self.would(), names.len(), shown(names));
        Ok(())
    }

    /// Asks for the count before an act on more than one item, unless `--yes` or `--dry-run` is
    /// given. An error means that nothing may be done.
    pub(super) fn confirm(&self, count: usize, what: &str, verb: &str) -> Result<(), AppError> {
        if count <= UNASKED_MAX { Ok(()) } else { self.ask(count, what, verb) }
    }

    /// As [`Act::confirm`], for what cannot be undone: on a terminal it asks before a single item
    /// too.
    pub(super) fn confirm_loss(&self, count: usize, what: &str, verb: &str) -> Result<(), AppError> {
        let is_asked = count > UNASKED_MAX || (count > 0 && std::io::IsTerminal::is_terminal(&std::io::stdin()));
        if is_asked { self.ask(count, what, verb) } else { Ok(()) }
    }

    fn ask(&self, count: usize, what: &str, verb: &str) -> Result<(), AppError> {
        if self.dry_run || self.yes {
            return Ok(());
        }
        if !std::io::IsTerminal::is_terminal(&std::io::stdin()) {
            return Err(AppError::refused(format!(
                "{count} {what} would be {verb}\nhint: look with --dry-run, then give --yes"
            )));
        }
        let mut stderr = std::io::stderr();
        let asked = write!(stderr, "{count} {what} will be {verb}. Type the number to go on: ");
        if let Err(error) = asked.and_then(|()| stderr.flush()) {
            return Err(AppError::refused(format!("the question cannot be asked, so nothing was done: {error}")));
        }
        let mut line = String::new();
        let read = std::io::stdin().read_line(&mut line);
        if read.is_ok() && line.trim() == count.to_string() {
            return Ok(());
        }
        Err(AppError::refused("nothing was done"))
    }
}

/// Reads what stands in the audit row: an empty text tells nobody why or who.
pub(super) fn said(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        Err("it stands in the audit row, and is empty".to_owned())
    } else {
        Ok(text.to_owned())
    }
}

/// Names in the question what the act is on: `many`, or, where more match, of how many. A hint says
/// then that the others stay.
pub(super) fn of_all(meant: usize, remaining: usize, many: &str) -> String {
    if remaining == 0 {
        return many.to_owned();
    }
    say("INFO", &format!("hint: {remaining} more match and stay as they are; `--all` without `--limit` takes all"));
    format!("of {} {many}", meant + remaining)
}

/// The user of this shell, or its number: a container may have no name for it.
pub(super) fn actor() -> String {
    let named = ["USER", "LOGNAME"].into_iter().filter_map(|name| std::env::var(name).ok());
    let mut named = named.filter(|name| !name.trim().is_empty());
    named.next().unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()))
}

/// Turns the refusal of an act into exit code 4.
pub(super) fn refused(error: oncebox::StoreError) -> AppError {
    match error {
        oncebox::StoreError::Refused(why) => AppError::refused(why),
        other => other.into(),
    }
}
