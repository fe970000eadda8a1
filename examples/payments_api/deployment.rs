//! Which deployment the service belongs to where `--deployment` does not say it: this machine
//! remembers it, so that a service on a clone of the database does not charge (O22).
//!
//! A clone has the id of its origin. So what is remembered stands beside the database: a file for
//! each URL, which is written as long as the database has no operation.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use oncebox::StoreError;
use oncebox::app::AppError;
use oncebox::store::OperationFilter;
use uuid::Uuid;

use crate::args::{Args, Deployment};
use crate::books::Books;

/// What the database says of itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    id: Uuid,
    has_operations: bool,
}

impl Found {
    pub(crate) async fn read<S: Books>(store: &S) -> Result<Self, StoreError> {
        let id = store.deployment().await?;
        let found = store.operations(&OperationFilter { limit: 1, ..OperationFilter::default() }).await?;
        Ok(Self { id, has_operations: !found.operations.is_empty() || !found.unreadable.is_empty() })
    }

    /// The deployment of this service. Refused where the database may be a clone.
    pub(crate) fn ours(self, args: &Args) -> Result<Uuid, AppError> {
        match args.deployment {
            Some(Deployment::Id(id)) => Ok(id),
            Some(Deployment::Database) => Ok(self.id),
            // Without a provider nothing is sent.
            None if args.provider.is_none() => Ok(self.id),
            None => self.remembered(&directory()?.join(name(&args.database))),
        }
    }

    fn remembered(self, file: &Path) -> Result<Uuid, AppError> {
        let Self { id, has_operations } = self;
        if !has_operations {
            // What a database was that had this URL before does not matter. Of two processes that
            // start at once each writes the same: whoever finds an operation finds the file too.
            write(file, id).map_err(|error| unusable(file, &error))?;
            return Ok(id);
        }
        let known = match std::fs::read_to_string(file) {
            Ok(known) if known.trim() == id.to_string() => return Ok(id),
            Ok(known) => format!("{} says {}", file.display(), known.trim()),
            Err(error) if error.kind() == ErrorKind::NotFound => format!("{} is not there", file.display()),
            Err(error) => return Err(unusable(file, &error)),
        };
        Err(AppError::refused(format!(
            "the database has operations of deployment {id}, and this machine does not know it as that one ({known}): \
             a clone must not charge. Where it is no clone, give --deployment {id}; `--deployment database` charges from \
             a clone too"
        )))
    }
}

/// Where a machine keeps the state of programs.
fn directory() -> Result<PathBuf, AppError> {
    let named = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = named("HOME").map(|home| home.join(".local/state"));
    let places = [named("XDG_STATE_HOME"), home, Some(std::env::temp_dir())].into_iter().flatten();
    let mut places = places.map(|place| place.join("payments_api"));
    places.find(|place| std::fs::create_dir_all(place).is_ok()).ok_or_else(|| {
        AppError::failed(
            "no directory can be made to remember the deployment in: set XDG_STATE_HOME, or give --deployment",
        )
    })
}

/// The name of the file for a URL. It has nothing of a password, not even its hash.
fn name(url: &str) -> String {
    let shown = oncebox::error::redact(url);
    // The same name in another directory is another database.
    let file =
        shown.strip_prefix("sqlite:").map(|file| file.trim_start_matches("//").split('?').next().unwrap_or(file));
    let whole = file.and_then(|file| std::fs::canonicalize(file).ok()).map(|file| file.display().to_string());
    oncebox::message::identity("payments_api", &whole.unwrap_or(shown)).uuid().to_string()
}

/// Writes the file whole or not at all.
fn write(file: &Path, id: Uuid) -> std::io::Result<()> {
    let new = file.with_extension(std::process::id().to_string());
    std::fs::write(&new, format!("{id}\n"))?;
    std::fs::rename(&new, file)
}

fn unusable(file: &Path, error: &std::io::Error) -> AppError {
    AppError::failed(format!("{} cannot be used: {error}; give --deployment", file.display()))
}
