//! Door B: operations in phases, against real databases, and against the provider of the examples with all its faults.
#![allow(clippy::unwrap_used)]

/// The adapter of the example service: it is no part of what is tested.
#[path = "../../examples/payments_api/cards.rs"]
mod cards;
mod compensation;
mod faults;
mod flow;
#[path = "../support/postgres.rs"]
mod postgres;
#[path = "../support/provider.rs"]
mod provider;
mod recovery;
mod registration;
mod scripted;
mod steps;
#[path = "../support/mod.rs"]
mod support;
mod world;

/// The same test on SQLite and on PostgreSQL.
macro_rules! on_both {
    ($($(#[$attribute:meta])* $name:ident;)*) => {
        mod sqlite {
            $($(#[$attribute])* #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let directory = tempfile::tempdir().unwrap();
                super::$name(crate::world::sqlite(directory.path()).await).await;
            })*
        }
        mod on_postgres {
            $($(#[$attribute])* #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                crate::postgres::with_database(stringify!($name), |database| async move {
                    super::$name(crate::world::prepared(database.store).await).await;
                })
                .await;
            })*
        }
    };
}
pub(crate) use on_both;
