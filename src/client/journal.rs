//! Keys that outlive the process: an operation is written to the disk before it is sent for the
//! first time, so that a program that starts again sends it under the same key (O27).
//!
//! One file for each operation, in a directory that one process has at a time. A file begins with a
//! line of JSON: key, method and time of the first send. Where digests are kept, this line also has
//! URL, headers and the digest of the body. Where bodies are kept, URL, headers and body follow it,
//! encrypted together.
//!
//! Promises:
//!
//! * A file is whole or absent, and durable before the first send: it is written under another
//!   name, synchronised, renamed, and the directory is synchronised. An operation that cannot be
//!   written is not sent.
//! * Only the owner can read a file (mode 600); a directory that the journal makes has mode 700.
//!   A file never holds a header with a credential; it holds a body, or a URL with a credential,
//!   only encrypted.
//! * A key keeps its request: another method, URL or body under the same key is refused.
//! * A file is deleted only when the application acknowledges the result.

mod entry;

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use reqwest::header::HeaderMap;
use sha2::{Digest, Sha256};

use self::entry::Entry;
use super::request::{Request, shown};
use crate::operation::rules::Key;
use crate::text::hex::hex;

/// The name of the lock file. No entry has this name.
const LOCK: &str = "lock";
/// The ending of a file that is being written. Its operation was not sent, so [`KeyJournal::open`]
/// removes it.
const UNFINISHED: &str = "part";
const ENTRY: &str = "key";

/// What is kept of bodies.
#[derive(Clone)]
#[non_exhaustive]
pub enum Bodies {
    /// A SHA-256: a caller that resumes must have the same bytes.
    Digest,
    /// The bytes themselves, encrypted with this secret (XChaCha20-Poly1305), which the application
    /// must keep: the body need not be given again.
    #[cfg(feature = "encrypt")]
    Encrypted([u8; 32]),
}

// The secret is not shown.
impl std::fmt::Debug for Bodies {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Digest => "Digest",
            #[cfg(feature = "encrypt")]
            Self::Encrypted(_) => "Encrypted",
        })
    }
}

/// Why the journal could not write, read or accept an operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// Another process, or another journal of this one, holds the directory. Two would send the
    /// same operations at once.
    #[error("{} is locked by another process, or by another journal of this one", .0.display())]
    Locked(PathBuf),
    /// The file system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory that the error is about.
        path: PathBuf,
        /// The error of the file system.
        #[source]
        source: io::Error,
    },
    /// A file cannot be read or written as an entry: it is not one, or another secret encrypted
    /// it. It may be a pending operation, so it is never skipped.
    #[error("the entry {} cannot be used: {why}; move it away once it is known what became of its operation", path.display())]
    Unreadable {
        /// The file or directory that the error is about.
        path: PathBuf,
        /// What is wrong with the file, in words.
        why: String,
    },
    /// The journal holds the key with another method or URL.
    #[error("the key is that of another request")]
    OtherRequest,
    /// The body is not that of the first send.
    #[error("the body is not that of the first send")]
    OtherBody,
    /// The journal keeps a digest of the body, and no body was given.
    #[error("the journal does not keep the body: give the same bytes again")]
    BodyNeeded,
}

/// An operation whose result no application acknowledged.
#[derive(Clone)]
pub struct Pending {
    /// The idempotency key that the operation was sent under.
    pub key: Key,
    /// The HTTP method of the request.
    pub method: String,
    /// The URL that the request was sent to.
    pub url: String,
    /// Its headers, without credentials.
    pub headers: HeaderMap,
    /// The body of the request; `None` if the journal keeps only its digest. Then a caller that
    /// resumes gives the same bytes again.
    pub body: Option<Vec<u8>>,
    digest: [u8; 32],
    /// When it was sent first, as far as the client knew when it was journalled.
    pub first_sent_at: SystemTime,
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pending({:?}, {} {})", self.key, self.method, shown(&self.url))
    }
}

impl Pending {
    fn has_body(&self, body: &[u8]) -> bool {
        self.digest[..] == Sha256::digest(body)[..]
    }

    /// The request to send again. Headers that are given replace stored ones of the same name.
    pub(super) fn request(&self, body: Option<Vec<u8>>, headers: &HeaderMap) -> Result<Request, super::ClientError> {
        let body = match (&self.body, body) {
            (Some(kept), None) => kept.clone(),
            (None, None) => return Err(JournalError::BodyNeeded.into()),
            (_, Some(body)) if self.has_body(&body) => body,
            (_, Some(_)) => return Err(JournalError::OtherBody.into()),
        };
        let mut request = Request::with_any_url(&self.method, &self.url, body)?.with_key(self.key.as_str())?;
        request.headers = self.headers.clone();
        // This replaces what is stored under the same names.
        request.headers.extend(headers.clone());
        Ok(request)
    }
}

/// A journal of keys in a directory. Clones share the lock. The last clone releases it, and so
/// does the kernel when the process dies.
#[derive(Debug, Clone)]
pub struct KeyJournal {
    directory: Arc<PathBuf>,
    bodies: Bodies,
    /// The locked file. Its mutex is held while an entry gets its name, so that of two calls under
    /// one key the second one finds the entry of the first.
    lock: Arc<Mutex<File>>,
}

impl KeyJournal {
    /// Opens the journal in a directory, which is made if it is missing, and locks it. Blocks
    /// for a short time, so call it when the program starts.
    ///
    /// # Errors
    /// [`JournalError::Locked`], or an error of the file system.
    pub fn open(directory: impl Into<PathBuf>, bodies: Bodies) -> Result<Self, JournalError> {
        let directory = directory.into();
        let missing: Vec<PathBuf> =
            directory.ancestors().take_while(|path| !path.exists()).map(Path::to_owned).collect();
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(at(&directory))?;
        for made in missing {
            synchronise(made.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")))?;
        }
        let path = directory.join(LOCK);
        let lock = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let lock = lock.map_err(at(&path))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => JournalError::Locked(directory.clone()),
            TryLockError::Error(source) => at(&path)(source),
        })?;
        // An operation is sent only once its file is finished, so these were never sent.
        for path in files(&directory, UNFINISHED)? {
            fs::remove_file(&path).map_err(at(&path))?;
        }
        Ok(Self { directory: Arc::new(directory), bodies, lock: Arc::new(Mutex::new(lock)) })
    }

    /// The operations that were sent, or were about to be sent, and are not acknowledged. The
    /// oldest is first.
    ///
    /// # Errors
    /// [`JournalError::Unreadable`] for the first file that cannot be read; it is never skipped.
    pub async fn pending(&self) -> Result<Vec<Pending>, JournalError> {
        let journal = self.clone();
        blocking(&self.directory, move || {
            let mut pending = Vec::new();
            for path in files(&journal.directory, ENTRY)? {
                match journal.read(&path) {
                    // It was acknowledged meanwhile.
                    Err(JournalError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                    read => pending.push(read?),
                }
            }
            pending.sort_by_key(|one| one.first_sent_at);
            Ok(pending)
        })
        .await
    }

    /// Forgets a key: the application has the result, or gives the operation up. A key that has no
    /// file is no error. After an error, [`KeyJournal::pending`] may return the operation again.
    pub(super) async fn acknowledge(&self, key: &Key) -> Result<(), JournalError> {
        let (directory, path) = (Arc::clone(&self.directory), self.path(key));
        blocking(&self.directory, move || match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(&path)(error)),
            _ => synchronise(&directory),
        })
        .await
    }

    /// Stores the operation durably. `sent_at`: when it may have been sent first, if that is known
    /// from elsewhere; the journal keeps the oldest time that is known. Returns the time of its
    /// first send if it was stored before, and not for this request.
    pub(super) async fn note(
        &self,
        request: &Request,
        sent_at: Option<SystemTime>,
    ) -> Result<Option<SystemTime>, JournalError> {
        let (journal, request) = (self.clone(), request.clone());
        blocking(&self.directory, move || {
            let path = journal.path(&request.key);
            let found = loop {
                if !path.try_exists().map_err(at(&path))? {
                    let bytes = Entry::seal(&request, first_sent_at(&request, sent_at), &journal.bodies);
                    let bytes = bytes.map_err(|why| JournalError::Unreadable { path: path.clone(), why })?;
                    if journal.write(&path, &bytes)? {
                        request.attempts.lock().journalled = true;
                        return Ok(None);
                    }
                }
                match journal.read(&path) {
                    // It was acknowledged meanwhile.
                    Err(JournalError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                    read => break read?,
                }
            };
            if found.method != request.method.as_str() || found.url != request.url.as_str() {
                return Err(JournalError::OtherRequest);
            }
            if !found.has_body(&request.body) {
                return Err(JournalError::OtherBody);
            }
            // The call that wrote the file may have failed to synchronise the directory.
            synchronise(&journal.directory)?;
            Ok(Some(found.first_sent_at).filter(|_| !request.attempts.lock().journalled))
        })
        .await
    }

    /// Writes an entry. Returns false where another call wrote the entry of this key meanwhile.
    fn write(&self, path: &Path, bytes: &[u8]) -> Result<bool, JournalError> {
        let beside = path.with_extension(format!("{}.{UNFINISHED}", uuid::Uuid::now_v7()));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside);
        let mut file = file.map_err(at(&beside))?;
        let named = file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| {
            let _naming = self.lock.lock();
            if path.try_exists()? {
                return Ok(false);
            }
            fs::rename(&beside, path).map(|()| true)
        });
        match named {
            Ok(true) => synchronise(&self.directory).map(|()| true),
            _ => {
                // What stays because of an error here is removed when the journal is opened.
                let _ = fs::remove_file(&beside);
                named.map_err(at(&beside))
            }
        }
    }

    fn read(&self, path: &Path) -> Result<Pending, JournalError> {
        let unreadable = |why: String| JournalError::Unreadable { path: path.to_owned(), why };
        let bytes = fs::read(path).map_err(at(path))?;
        let pending = Entry::open(&bytes, &self.bodies).map_err(unreadable)?;
        if self.path(&pending.key) != path {
            return Err(unreadable("the file name does not match the key in it".to_owned()));
        }
        Ok(pending)
    }

    /// The file of a key. Its name is a digest, which does not show the key.
    fn path(&self, key: &Key) -> PathBuf {
        let digest = Sha256::digest(key.as_str().as_bytes());
        let name = hex(&digest[..16]);
        self.directory.join(name).with_extension(ENTRY)
    }
}

/// When the operation was sent first, as far as this process knows: now, or earlier where an
/// attempt was made without a journal, or `sent_at` says so.
fn first_sent_at(request: &Request, sent_at: Option<SystemTime>) -> SystemTime {
    let now = SystemTime::now();
    let attempt = request.in_doubt_for().and_then(|age| now.checked_sub(age));
    [attempt, sent_at].into_iter().flatten().fold(now, SystemTime::min)
}

fn at(path: &Path) -> impl Fn(io::Error) -> JournalError {
    move |source| JournalError::Io { path: path.to_owned(), source }
}

fn files(directory: &Path, extension: &str) -> Result<Vec<PathBuf>, JournalError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).map_err(at(directory))? {
        let path = entry.map_err(at(directory))?.path();
        if path.extension().is_some_and(|kind| kind == extension) {
            found.push(path);
        }
    }
    Ok(found)
}

/// Makes the names of the files in a directory durable.
fn synchronise(directory: &Path) -> Result<(), JournalError> {
    File::open(directory).and_then(|file| file.sync_all()).map_err(at(directory))
}

/// Runs file operations on a thread for blocking work. They go on if the caller is dropped.
async fn blocking<T: Send + 'static>(
    directory: &Path,
    work: impl FnOnce() -> Result<T, JournalError> + Send + 'static,
) -> Result<T, JournalError> {
    let ended = tokio::task::spawn_blocking(work).await;
    ended.unwrap_or_else(|error| Err(at(directory)(io::Error::other(error))))
}
