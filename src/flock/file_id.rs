//! Tells whether a path still names the file that was opened.
//!
//! Why: SQLite in WAL mode does not ask. A process whose file was deleted or replaced goes on in
//! the old one, which no process that starts later can open.

use std::io;
use std::path::Path;

/// The identity of a file. No other file has it while the file is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileId {
    device: u64,
    number: u64,
}

impl FileId {
    /// The file that has this path now.
    ///
    /// # Errors
    /// That of the system, also where there is no such file.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let metadata = std::fs::metadata(path)?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            Ok(Self { device: metadata.dev(), number: metadata.ino() })
        }
        // Elsewhere an open file of SQLite can be neither deleted nor replaced.
        #[cfg(not(unix))]
        {
            let _ = metadata;
            Ok(Self { device: 0, number: 0 })
        }
    }

    /// Whether the path still names this file.
    pub(crate) fn is_still_at(self, path: &Path) -> bool {
        Self::of(path).is_ok_and(|now| now == self)
    }
}
