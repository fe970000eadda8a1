//! `oncebox config`: prints the template, or the settings in force with their origins. Secrets are
//! never shown.

use clap::Subcommand;
use comfy_table::{Table, presets};

use super::common::{CommonArgs, Output, failed};
use oncebox::app::AppError;
use oncebox::app::config::{Loaded, Secret, TEMPLATE};

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
        ConfigCommand::Template if output == Output::Json => {
            Err(AppError::usage("the template is a TOML file: leave out `--output json`"))
        }
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
    let rows: Vec<(String, toml::Value, String)> = rows
        .into_iter()
        .map(|(path, value)| {
            let shown = shown(&path, &value);
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
        // A URL stands without quotes, so that it can be copied.
        let value = value.as_str().filter(|_| path.ends_with("url")).map_or_else(|| value.to_string(), str::to_owned);
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

/// A value that may be printed: a URL without its password, and nothing of a password or of a
/// property of librdkafka, which may be one.
fn shown(path: &str, value: &toml::Value) -> toml::Value {
    let is_hidden = path.contains("password") || path.contains("properties");
    match value.as_str() {
        // Hidden as a whole, also where it looks like a URL.
        Some(text) if is_hidden && !text.is_empty() => "***".into(),
        Some(text) if path.ends_with("url") => format!("{:?}", Secret(text.to_owned())).into(),
        _ => value.clone(),
    }
}
