//! A directory and settings for what makes its own world: `demo` and `bench`.
//!
//! Promise: without a URL both stand on files in that directory; a file that may hold passwords is readable by its owner only.

use std::path::{Path, PathBuf};

use super::common::CommonArgs;
use crate::app::AppError;
use crate::app::config::{Secret, Settings};

/// Makes a directory that only its owner enters.
pub(super) fn private_directory(dir: &Path) -> Result<(), AppError> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|error| AppError::failed(format!("{} cannot be made: {error}", dir.display())))
}

/// The settings in force; database and broker are files in `dir` unless somebody named others.
pub(super) fn settings_in(common: &CommonArgs, dir: &Path) -> Result<Settings, AppError> {
    let mut settings = common.load_quietly()?.settings;
    if common.database.is_none() && std::env::var_os("ONCEBOX_DATABASE__URL").is_none() && common.config.is_none() {
        settings.database.url = Secret(format!("sqlite://{}", dir.join("payments.db").display()));
    }
    if common.broker.is_none() && std::env::var_os("ONCEBOX_BROKER__URL").is_none() && common.config.is_none() {
        settings.broker.url = Secret(format!("embedded://{}", dir.join("broker.db").display()));
    }
    Ok(settings)
}

/// Settings as a file: URLs with passwords do not stand in command lines of processes.
pub(super) fn write_config(settings: &Settings, dir: &Path) -> Result<PathBuf, AppError> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let text = toml::to_string(settings).map_err(|error| AppError::failed(error.to_string()))?;
    let file = dir.join("oncebox.toml");
    let mut options = std::fs::File::options();
    options
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&file)
        .and_then(|mut open| open.write_all(text.as_bytes()))
        .map_err(|error| AppError::failed(format!("{} cannot be written: {error}", file.display())))?;
    Ok(file)
}
