//! The layers of settings: a flag overrides the environment, the environment the file, the file the
//! default. Each value knows its origin.
//!
//! Promise: an error names the setting with its origin and, for an unknown name, the nearest known
//! one. No value that may be a secret and no line of the file is repeated.

use std::ffi::OsString;
use std::path::Path;

use figment::error::{Actual, Kind};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};

use super::{Secret, Settings};

/// Settings and their origins.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The settings in force, after all layers were merged.
    pub settings: Settings,
    figment: Figment,
}

impl Loaded {
    /// Where a value came from: `default`, `file FILE`, `environment NAME` or `flag --NAME`.
    #[must_use]
    pub fn origin(&self, path: &str) -> String {
        let whole = self.figment.find_value("").ok();
        let value = whole.as_ref().and_then(|whole| find(whole, path));
        let metadata = value.and_then(|value| self.figment.get_metadata(value.tag()));
        metadata.map_or_else(|| DEFAULT.to_owned(), |metadata| metadata.name.to_string())
    }

    /// Leaves the broker without a URL where nobody named one and the database is a server. The
    /// default is for a service that is all files: a publisher that took it by mistake would move
    /// the outbox of a server into a file of its directory, and mark the rows as sent.
    pub(crate) fn forget_default_broker(&mut self) {
        let database = self.settings.database.url.0.split_once(':').map_or("", |(scheme, _)| scheme);
        if matches!(database, "postgres" | "postgresql" | "mysql" | "mariadb") && self.origin("broker.url") == DEFAULT {
            self.settings.broker.url = Secret(String::new());
        }
    }
}

/// Finds the value at a path. The names of librdkafka's properties contain dots themselves;
/// positions in a list are numbers.
fn find<'v>(value: &'v Value, path: &str) -> Option<&'v Value> {
    let ends = path.match_indices('.').map(|(dot, _)| dot).chain([path.len()]);
    match value {
        Value::Dict(_, table) => {
            ends.filter_map(|end| Some((table.get(&path[..end])?, path.get(end + 1..)))).find_map(|(inner, rest)| {
                match rest {
                    None => Some(inner),
                    Some(rest) => find(inner, rest),
                }
            })
        }
        Value::Array(_, items) => {
            let (index, rest) = path.split_once('.').map_or((path, None), |(index, rest)| (index, Some(rest)));
            let item = items.get(index.parse::<usize>().ok()?)?;
            rest.map_or(Some(item), |rest| find(item, rest))
        }
        _ => None,
    }
}

const DEFAULT: &str = "default";
const PREFIX: &str = "ONCEBOX_";

/// One origin and the values that it sets.
#[derive(Debug)]
struct Layer {
    origin: String,
    values: Dict,
}

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.origin.clone())
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.values.clone()))
    }
}

impl Layer {
    /// A layer with one value, at the path of its setting.
    fn one(origin: String, path: &str, value: Value) -> Self {
        let values = figment::util::nest(path, value).into_dict().unwrap_or_default();
        Self { origin, values }
    }
}

/// Reads all layers of settings and merges them: of the environment the variables that begin with
/// `ONCEBOX_`; of each flag how it is written, the path of its setting, and the value.
///
/// # Errors
/// A source that cannot be read, an unknown key (with the nearest known one), or a value that
/// cannot be used (with its origin). The text never holds a secret.
pub(crate) fn load(
    file: Option<&Path>,
    environment: &[(OsString, OsString)],
    flags: &[(&str, &str, String)],
) -> Result<Loaded, String> {
    let defaults = table_of(&Settings::default())?;
    let mut figment = Figment::from(Layer { origin: DEFAULT.to_owned(), values: defaults.clone() });
    if let Some(file) = file {
        figment = figment.merge(read(file)?);
    }
    for (name, value) in environment {
        if let Some(layer) = variable(name, value.clone(), &defaults)? {
            figment = figment.merge(layer);
        }
    }
    for (flag, path, value) in flags {
        figment = figment.merge(Layer::one(format!("flag {flag}"), path, value.as_str().into()));
    }
    match figment.extract::<Settings>() {
        Ok(settings) => Ok(Loaded { settings, figment }),
        Err(errors) => Err(errors.into_iter().map(|error| describe(&error)).collect::<Vec<_>>().join("\n")),
    }
}

fn table_of(value: &impl serde::Serialize) -> Result<Dict, String> {
    let value = Value::serialize(value).map_err(|error| error.to_string())?;
    value.into_dict().ok_or_else(|| "settings are a table".to_owned())
}

fn read(file: &Path) -> Result<Layer, String> {
    let shown = file.display();
    let text = std::fs::read_to_string(file).map_err(|error| {
        format!("the configuration file {shown} cannot be read: {error}; `oncebox config template` prints one")
    })?;
    let table: toml::Table = toml::from_str(&text).map_err(|error| {
        // Not as the parser shows it, because the line may hold a password.
        let before = &text[..error.span().map_or(0, |span| span.start.min(text.len()))];
        let (line, column) =
            (before.matches('\n').count() + 1, before.chars().rev().take_while(|c| *c != '\n').count());
        format!("the configuration file {shown} is no TOML at line {line}, column {}: {}", column + 1, error.message())
    })?;
    Ok(Layer { origin: format!("file {shown}"), values: table_of(&table)? })
}

/// The layer of a variable of the environment, if the variable is a setting.
fn variable(name: &OsString, value: OsString, defaults: &Dict) -> Result<Option<Layer>, String> {
    let name = name.to_string_lossy();
    let Some(path) = name.get(..PREFIX.len()).filter(|prefix| prefix.eq_ignore_ascii_case(PREFIX)) else {
        return Ok(None);
    };
    let path = name[path.len()..].to_ascii_lowercase();
    // `--config` has a variable of its own; tests find their servers by theirs.
    if path == "config" || path.starts_with("test_") {
        return Ok(None);
    }
    let levels: Vec<&str> = path.split("__").collect();
    if levels.iter().any(|level| level.is_empty()) {
        return Err(format!(
            "the variable {name} of the environment names no setting: {PREFIX} and `__` between levels"
        ));
    }
    let value = value.into_string().map_err(|_| format!("the value of {name} in the environment is not UTF-8"))?;
    let default = at(defaults, &levels);
    let value = typed(value, default);
    // Merged, it would hide the variables below it, or be hidden by them.
    if matches!((default, &value), (Some(Value::Dict(..)), Value::String(..))) {
        let path = levels.join(".");
        return Err(format!("the setting `{path}` (environment {name}): found text, expected a table; {HINT}"));
    }
    Ok(Some(Layer::one(format!("environment {name}"), &levels.join("."), value)))
}

fn at<'a>(table: &'a Dict, levels: &[&str]) -> Option<&'a Value> {
    let (first, rest) = levels.split_first()?;
    let value = table.get(*first)?;
    if rest.is_empty() { Some(value) } else { at(value.as_dict()?, rest) }
}

/// Text stays text whatever it looks like, because a password may be a number. Where the default is
/// a number, a boolean, a list or a table, the value is parsed as in the file.
fn typed(text: String, default: Option<&Value>) -> Value {
    let is_text = !matches!(default, Some(Value::Bool(..) | Value::Num(..) | Value::Array(..) | Value::Dict(..)));
    let parsed = if is_text { None } else { toml::from_str::<toml::Table>(&format!("value = {text}")).ok() };
    let value = parsed.and_then(|mut table| table.remove("value")).and_then(|value| Value::serialize(value).ok());
    value.unwrap_or_else(|| text.into())
}

/// The variable that was meant where one `_` stands between two levels: `database_url`.
fn levels_joined(key: &str, field: &str, known: &[&str]) -> Option<String> {
    let above = key.strip_suffix(field)?.replace('.', "__");
    known.iter().find_map(|table| {
        let rest = field.strip_prefix(table)?.strip_prefix('_')?;
        Some(format!("{PREFIX}{above}{table}__{rest}").to_ascii_uppercase())
    })
}

fn describe(error: &figment::Error) -> String {
    let place = error.metadata.as_ref().map_or(String::new(), |metadata| format!(" ({})", metadata.name));
    let path = error.path.join(".");
    match &error.kind {
        Kind::UnknownField(field, known) => {
            let nearest =
                known.iter().max_by(|a, b| strsim::jaro_winkler(field, a).total_cmp(&strsim::jaro_winkler(field, b)));
            let key = if path.is_empty() {
                field.clone()
            } else if path == *field || path.ends_with(&format!(".{field}")) {
                path
            } else {
                format!("{path}.{field}")
            };
            let is_variable = place.starts_with(" (environment ");
            let hint = match (levels_joined(&key, field, known).filter(|_| is_variable), nearest) {
                (Some(variable), _) => format!("; did you mean {variable}, with `__` between two levels?"),
                (None, Some(nearest)) => format!("; did you mean `{nearest}`?"),
                (None, None) => String::new(),
            };
            format!("unknown setting `{key}`{place}{hint}")
        }
        // The value itself may be a secret, so only its type is shown.
        Kind::InvalidType(found, expected) | Kind::InvalidValue(found, expected) => {
            let (found, expected) = (type_of(found), in_words(expected));
            format!("the setting `{path}`{place}: found {found}, expected {expected}; {HINT}")
        }
        Kind::UnknownVariant(found, known) => {
            format!("the setting `{path}`{place}: `{found}` is unknown, use one of: {}", known.join(", "))
        }
        Kind::MissingField(field) => {
            let path = if path.is_empty() { field.to_string() } else { format!("{path}.{field}") };
            format!("the setting `{path}` is missing{place}")
        }
        kind => format!("the setting `{path}`{place}: {kind}; {HINT}"),
    }
}

const HINT: &str = "`oncebox config template` shows how it is written";

/// What serde expects, in plain words.
fn in_words(expected: &str) -> &str {
    match expected {
        "a string" => "text",
        "a sequence" => "a list",
        "a map" => "a table",
        _ if expected.starts_with("struct ") => "a table",
        // Not the name of a type in the code.
        _ if expected.starts_with("enum ") => "one of its words",
        _ if expected.starts_with('u') => "a whole number that is not negative",
        _ if expected.starts_with('i') => "a whole number",
        _ => expected,
    }
}

fn type_of(found: &Actual) -> &'static str {
    match found {
        Actual::Bool(_) => "a boolean",
        Actual::Unsigned(_) | Actual::Signed(_) | Actual::Float(_) => "a number",
        Actual::Char(_) | Actual::Str(_) | Actual::Bytes(_) => "text",
        Actual::Seq => "a list",
        Actual::Map => "a table",
        _ => "something else",
    }
}
