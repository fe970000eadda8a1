//! `oncebox config`: prints the template, or the settings in force with their origins. Secrets are
//! never shown.

use clap::Subcommand;
use comfy_table::{Table, presets};

use super::common::{CommonArgs, Output, failed};
use oncebox::app::AppError;
use oncebox::app::config::{Loaded, TEMPLATE};

/// What to do with settings.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print a configuration file with every setting, its default and what it is for
    Template,
    /// Print what is in force and where it came from, secrets redacted
    Show,
}

pub(super) fn run(command: &ConfigCommand, common: &CommonArgs, output: Output) -> Result<(), AppError> {
    match command {
        ConfigCommand::Template => {
            data!("{}", TEMPLATE.trim_end());
            Ok(())
        }
        ConfigCommand::Show => show(&common.load(None)?, output),
    }
}

fn show(loaded: &Loaded, output: Output) -> Result<(), AppError> {
    let value = toml::Value::try_from(&loaded.settings).map_err(failed)?;
    let mut rows = Vec::new();
    flatten("", &value, &mut rows);
    let rows: Vec<(String, String, String)> = rows
        .into_iter()
        .map(|(path, value)| {
            let shown = if is_secret(&path) { redacted(&value) } else { value.to_string() };
            let origin = loaded.origin(&path);
            (path, shown, origin)
        })
        .collect();
    if output == Output::Json {
        let rows: Vec<_> = rows
            .iter()
            .map(|(path, value, origin)| serde_json::json!({ "setting": path, "value": value, "origin": origin }))
            .collect();
        data!("{}", serde_json::json!({ "settings": rows }));
        return Ok(());
    }
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["setting", "value", "from"]);
    for (path, value, origin) in rows {
        table.add_row([path, value, origin]);
    }
    data!("{table}");
    Ok(())
}

fn flatten(prefix: &str, value: &toml::Value, rows: &mut Vec<(String, toml::Value)>) {
    match value {
        toml::Value::Table(table) if !table.is_empty() => {
            for (key, value) in table {
                let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&path, value, rows);
            }
        }
        toml::Value::Array(items) if items.iter().any(toml::Value::is_table) => {
            for (index, item) in items.iter().enumerate() {
                flatten(&format!("{prefix}.{index}"), item, rows);
            }
        }
        other => rows.push((prefix.to_owned(), other.clone())),
    }
}

/// Whether the value is redacted: URLs and properties of librdkafka may hold passwords.
fn is_secret(path: &str) -> bool {
    path.ends_with("url") || path.contains("password") || path.contains("properties")
}

fn redacted(value: &toml::Value) -> String {
    match value.as_str() {
        Some(text) => format!("{:?}", oncebox::app::config::Secret(text.to_owned())),
        None => value.to_string(),
    }
}
