//! Layers of settings: flag over environment over file over default; each value knows where it came from.

use std::path::{Path, PathBuf};

use figment::Figment;
use figment::providers::{Env, Format, Serialized, Toml};

use super::Settings;

/// What was given besides the file and the environment.
#[derive(Debug, Clone, Default)]
pub struct Layers {
    /// `--config FILE`.
    pub file: Option<PathBuf>,
    /// Flags by the path of the setting they stand for.
    pub flags: Vec<(&'static str, String)>,
}

/// Settings and their origins.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The settings.
    pub settings: Settings,
    figment: Figment,
}

impl Loaded {
    /// Where a value came from: `default`, `--flag`, `environment` or the file.
    #[must_use]
    pub fn origin(&self, path: &str) -> String {
        let Some(metadata) = self.figment.find_metadata(path) else { return "default".to_owned() };
        match &metadata.source {
            Some(source) => source.to_string(),
            None => metadata.name.to_string(),
        }
    }

    /// Settings as they are, without a file or the environment: for tests and embedding.
    #[must_use]
    pub fn of(settings: Settings) -> Self {
        Self { figment: Figment::from(Serialized::defaults(&settings)), settings }
    }
}

/// Reads all layers.
///
/// # Errors
/// What cannot be read, which key is not known (and the nearest one that is), which value cannot be used and where it came
/// from. Never a secret.
pub fn load(layers: &Layers) -> Result<Loaded, String> {
    let mut figment = Figment::from(Serialized::defaults(Settings::default()));
    if let Some(file) = &layers.file {
        check_readable(file)?;
        figment = figment.merge(Toml::file_exact(file));
    }
    let names_only =
        Env::prefixed("ONCEBOX_").filter(|name| name != "config" && !name.starts_with("test_")).split("__");
    figment = figment.merge(names_only);
    for (path, value) in &layers.flags {
        figment = figment.merge(Serialized::global(path, value));
    }
    match figment.extract::<Settings>() {
        Ok(settings) => Ok(Loaded { settings, figment }),
        Err(errors) => Err(errors.into_iter().map(|error| describe(&error)).collect::<Vec<_>>().join("\n")),
    }
}

fn check_readable(file: &Path) -> Result<(), String> {
    std::fs::File::open(file)
        .map(drop)
        .map_err(|error| format!("the configuration file {} cannot be read: {error}", file.display()))
}

fn describe(error: &figment::Error) -> String {
    let place = error.metadata.as_ref().map(|metadata| match &metadata.source {
        Some(source) => format!("{} ({source})", metadata.name),
        None => metadata.name.to_string(),
    });
    let place = place.map_or(String::new(), |place| format!(" in {place}"));
    let path = error.path.join(".");
    match &error.kind {
        figment::error::Kind::UnknownField(field, known) => {
            let nearest =
                known.iter().max_by(|a, b| strsim::jaro_winkler(field, a).total_cmp(&strsim::jaro_winkler(field, b)));
            let key = if path.is_empty() || path == *field || path.ends_with(&format!(".{field}")) {
                if path.is_empty() { field.clone() } else { path }
            } else {
                format!("{path}.{field}")
            };
            let hint = nearest.map_or(String::new(), |nearest| format!("; did you mean `{nearest}`?"));
            format!("unknown setting `{key}`{place}{hint}")
        }
        // The value itself may be a secret: only what was expected is said for URLs and passwords.
        kind if path.contains("url") || path.contains("password") => {
            let _ = kind;
            format!("the setting `{path}`{place} is not text")
        }
        kind => format!("the setting `{path}`{place}: {kind}"),
    }
}
