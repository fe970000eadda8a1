//! Chooses one of several hosts of a database, and switches to another one after a failover.
//!
//! Guarantees: of several hosts, the first one in the order of the URL that answers and takes
//! writes is used; a standby never is. A host that works is kept. When it no longer answers or
//! takes writes, and another one does, all new connections go there within seconds, and no older
//! connection is taken from the pool again.
//!
//! The name of a single host may lead to another server after a failover. When the server that is
//! used says that it takes no writes, the connections to it are left, and new ones follow the name.
//!
//! Not here: replication. The database and its operators decide which server takes writes; if two
//! do, the first one is used.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sqlx::{ConnectOptions, Connection, Pool};
use tokio::time::timeout;

use super::{Bounded, Remote, silent};
use crate::error::{StoreError, classify, words};
use crate::task;

/// How long the first connection may take if there is only one host. Then an error is returned.
const ONE_MAX: Duration = Duration::from_secs(10);
/// How long each host may take if there are several.
const EACH_MAX: Duration = Duration::from_secs(3);
/// The pause between two checks of the host that is used, and the shortest time after which older
/// connections are left again (see [`Moved::perhaps`]).
const LOOK: Duration = Duration::from_secs(1);

/// How a connection to a database is made.
type Options<Db> = <<Db as sqlx::Database>::Connection as Connection>::Options;

/// The hosts of a URL, in their order.
pub(in crate::store) struct Hosts<Db: Remote> {
    all: Vec<(String, Options<Db>)>,
    current: usize,
    moved: Moved,
}

/// Connections that were made before this moment are not taken from the pool any more: since then
/// another server may be the right one.
#[derive(Debug, Clone, Default)]
pub(in crate::store) struct Moved(Arc<Mutex<Option<Instant>>>);

impl Moved {
    /// How long ago the last move was; `None` if there was none.
    pub(in crate::store) fn since(&self) -> Option<Duration> {
        Some(self.0.lock().as_ref()?.elapsed())
    }

    fn now(&self) {
        *self.0.lock() = Some(Instant::now());
    }

    /// Called when the server said that it takes no writes: older connections are left, and new
    /// ones follow the name. This happens at most once in [`LOOK`], because the name may lead to
    /// the same server for long, and each error would make all connections anew.
    pub(in crate::store) fn perhaps(&self) {
        let mut at = self.0.lock();
        if at.is_none_or(|at| at.elapsed() >= LOOK) {
            *at = Some(Instant::now());
        }
    }
}

enum Wrong {
    Standby,
    Silent(Duration),
    Said(sqlx::Error),
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Standby => f.write_str("it is a standby"),
            Self::Silent(limit) => write!(f, "it did not answer within {limit:?}"),
            Self::Said(error) => f.write_str(&words(error)),
        }
    }
}

impl<Db: Remote> Hosts<Db> {
    /// From at least one host, each with its name for logs and errors.
    pub(in crate::store) fn new(all: Vec<(String, Options<Db>)>) -> Self {
        Self { all, current: 0, moved: Moved::default() }
    }

    pub(in crate::store) fn moved(&self) -> Moved {
        self.moved.clone()
    }

    /// Connects once and chooses the host. So an error shows at once: a pool would retry a server
    /// that refuses connections for 30 s, and then report only a timeout. A single host is used
    /// even if it is a standby.
    ///
    /// # Errors
    /// The error of a single host. With several hosts: `StoreError::Unavailable` with the error
    /// of each, where one of them may become available later; otherwise the error of the last one.
    pub(in crate::store) async fn choose(&mut self) -> Result<&Options<Db>, StoreError> {
        if let [(_, only)] = self.all.as_slice() {
            let connecting = async { only.connect().await?.close().await };
            timeout(ONE_MAX, connecting).await.map_err(|_| StoreError::Unavailable(silent(ONE_MAX)))??;
            return Ok(only);
        }
        let mut all_wrong = Vec::new();
        for (index, (name, options)) in self.all.iter().enumerate() {
            match writable::<Db>(options).await {
                Ok(connection) => {
                    drop(timeout(EACH_MAX, connection.close()).await);
                    self.current = index;
                    for (host, wrong) in &all_wrong {
                        tracing::warn!(host, used = name, why = %wrong, "a host of the database is passed over");
                    }
                    return Ok(options);
                }
                Err(wrong) => all_wrong.push((name.as_str(), wrong)),
            }
        }
        let may_come = |wrong: &Wrong| match wrong {
            Wrong::Said(error) => classify::is_transient(error) && !classify::is_untrusted(error),
            Wrong::Standby | Wrong::Silent(_) => true,
        };
        if !all_wrong.iter().any(|(_, wrong)| may_come(wrong))
            && let Some((_, Wrong::Said(error))) = all_wrong.pop()
        {
            return Err(error.into());
        }
        let said: Vec<String> = all_wrong.iter().map(|(name, wrong)| format!("{name}: {wrong}")).collect();
        Err(StoreError::Unavailable(sqlx::Error::Io(io::Error::other(said.join("; ")))))
    }

    /// Returns an error where there are several hosts and this connection leads to a standby.
    pub(in crate::store) async fn refuse_standby(several: bool, connection: &mut Db::Connection) -> sqlx::Result<()> {
        if several && !Db::is_writable(connection).await? {
            return Err(sqlx::Error::Io(io::Error::other("this host is a standby; another one is looked for")));
        }
        Ok(())
    }

    pub(in crate::store) fn are_several(&self) -> bool {
        self.all.len() > 1
    }
}

/// Connects to a host, and returns what is wrong if it does not take writes.
async fn writable<Db: Remote>(options: &Options<Db>) -> Result<Db::Connection, Wrong> {
    let connecting = async {
        let mut connection: Db::Connection = options.connect().await?;
        let is_writable = Db::is_writable(&mut connection).await?;
        Ok((connection, is_writable))
    };
    match timeout(EACH_MAX, connecting).await {
        Err(_) => Err(Wrong::Silent(EACH_MAX)),
        Ok(Err(error)) => Err(Wrong::Said(error)),
        Ok(Ok((_, false))) => Err(Wrong::Standby),
        Ok(Ok((connection, true))) => Ok(connection),
    }
}

/// Checks the host and switches to another one, until the pool is closed.
pub(super) async fn watch<Db: Remote>(
    mut hosts: Hosts<Db>,
    pool: Pool<Db>,
    pulse: Arc<tokio::sync::Mutex<Option<Bounded<Db>>>>,
) {
    let mut kept: Option<Db::Connection> = None;
    while !pool.is_closed() {
        tokio::time::sleep(LOOK).await;
        let (name, options) = &hosts.all[hosts.current];
        let looked = match kept.take() {
            Some(mut connection) => match timeout(EACH_MAX, Db::is_writable(&mut connection)).await {
                Ok(Ok(true)) => Ok(connection),
                // Perhaps only the connection is gone, so the host gets a new one.
                _ => writable::<Db>(options).await,
            },
            None => writable::<Db>(options).await,
        };
        let wrong = match looked {
            Ok(connection) => {
                kept = Some(connection);
                continue;
            }
            Err(wrong) => wrong,
        };
        for (index, (other, options)) in hosts.all.iter().enumerate() {
            let Ok(connection) = writable::<Db>(options).await else { continue };
            kept = Some(connection);
            if index != hosts.current {
                tracing::warn!(from = name, to = other, why = %wrong, "another host of the database is used from now on");
                pool.set_connect_options(options.clone());
                hosts.moved.now();
                hosts.current = index;
                // The kept connection of the pings leads to the former host. A ping holds this lock
                // while it waits for that host, and the checks go on meanwhile.
                let pulse = Arc::clone(&pulse);
                task::spawn(async move { drop(pulse.lock().await.take()) });
            }
            break;
        }
    }
}
