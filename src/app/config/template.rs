//! The configuration file that `oncebox config template` prints: every setting with its default and
//! its purpose.
//!
//! Promise: a test reads the file back, uncommented, and compares it with the defaults. Another
//! test fails if a setting has no line in it. Of a `[[consumer]]` they only prove that it is read.

/// The whole file, with every setting commented out.
pub const TEMPLATE: &str = include_str!("../../../config.example.toml");

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use toml::Value;

    use super::*;
    use crate::app::config::Settings;

    /// The lines of the file without the sign of a comment.
    fn lines() -> impl Iterator<Item = &'static str> {
        TEMPLATE.lines().filter_map(|line| line.strip_prefix("# "))
    }

    /// The settings in the file, each with its section.
    fn known() -> BTreeSet<String> {
        let (mut section, mut known) = (String::new(), BTreeSet::new());
        for line in lines() {
            if let Some((name, _)) = line.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
                section = format!("{name}.");
            } else if let Some((key, _)) = line.split_once(" = ") {
                known.insert(format!("{section}{}", key.trim()));
            }
        }
        known
    }

    /// The lines that hold a section, or a setting with a default.
    fn uncommented() -> String {
        let is_key = |key: &str| key.trim().bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        let is_setting =
            |line: &str| line.starts_with('[') || line.split_once(" = ").is_some_and(|(key, _)| is_key(key));
        let lines = lines().filter(|line| is_setting(line) && !line.contains("= \"...\""));
        lines.map(|line| format!("{line}\n")).collect()
    }

    #[test]
    fn the_template_read_back_is_the_defaults_and_a_consumer() {
        let settings: Settings = toml::from_str(&uncommented()).unwrap();
        let consumer = settings.consumer[0].clone();
        assert_eq!((consumer.name.as_str(), consumer.on.len()), ("ledger", 1));
        assert!(consumer.options(false, settings.shutdown_grace).is_ok());
        assert_eq!(Settings { consumer: Vec::new(), ..settings }, Settings::default());
    }

    #[test]
    fn every_setting_has_a_line() {
        fn keys(prefix: &str, value: &Value, found: &mut Vec<String>) {
            for (key, value) in value.as_table().unwrap() {
                let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                match value {
                    Value::Table(table) if !table.is_empty() => keys(&path, value, found),
                    _ => found.push(path),
                }
            }
        }
        let mut found = Vec::new();
        keys("", &Value::try_from(Settings::default()).unwrap(), &mut found);
        let known = known();
        for path in found.iter().filter(|path| *path != "consumer") {
            // A section in which no setting has a default.
            let section = known.iter().any(|known| known.starts_with(&format!("{path}.")));
            assert!(section || known.contains(path), "`{path}` has no line in the template");
        }
    }
}
