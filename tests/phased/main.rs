//! Phased operations: operations in phases, against real databases, and against the provider of the
//! examples with all its faults.
#![allow(clippy::unwrap_used)]

/// The adapter of the example service: it is no part of what is tested.
#[path = "../../examples/payments_api/cards.rs"]
mod cards;
mod clashes;
mod compensation;
mod cut;
mod evidence;
mod faults;
mod flow;
#[path = "../support/observed.rs"]
#[allow(dead_code)] // its part
mod hearing;
mod keyring;
#[path = "../store_mysql/fixture.rs"]
#[allow(dead_code)]
mod mysql;
mod observed;
mod operator;
#[path = "../support/postgres.rs"]
mod postgres;
#[path = "../support/provider.rs"]
mod provider;
#[path = "../support/proxy.rs"]
mod proxy;
mod quota;
mod recovery;
mod registration;
mod room;
mod scripted;
#[path = "../support/standstill.rs"]
mod standstill;
mod steps;
mod stopping;
#[path = "../support/mod.rs"]
mod support;
mod swallowed;
mod unended;
mod world;

macro_rules! on_sqlite {
    ($($name:ident;)*) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let directory = tempfile::tempdir().unwrap();
                super::$name(crate::world::sqlite(directory.path()).await).await;
            })*
        }
    };
}
pub(crate) use on_sqlite;

macro_rules! on_postgres {
    ($($name:ident;)*) => {
        mod on_postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                crate::postgres::with_database(stringify!($name), |database| async move {
                    super::$name(crate::world::prepared(database.store).await).await;
                })
                .await;
            })*
        }
    };
}
pub(crate) use on_postgres;

macro_rules! on_mariadb {
    ($($name:ident;)*) => {
        mod on_mariadb {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let Some(database) = crate::mysql::Db::new(stringify!($name)).await else { return };
                super::$name(crate::world::prepared(database.store.clone()).await).await;
            })*
        }
    };
}
pub(crate) use on_mariadb;

/// The same tests on SQLite and on PostgreSQL.
macro_rules! on_both {
    ($($name:ident;)*) => {
        crate::on_sqlite! { $($name;)* }
        crate::on_postgres! { $($name;)* }
    };
}
pub(crate) use on_both;

/// The same tests where two write at once.
macro_rules! on_servers {
    ($($name:ident;)*) => {
        crate::on_postgres! { $($name;)* }
        crate::on_mariadb! { $($name;)* }
    };
}
pub(crate) use on_servers;

/// The same tests on all three.
macro_rules! on_all {
    ($($name:ident;)*) => {
        crate::on_sqlite! { $($name;)* }
        crate::on_servers! { $($name;)* }
    };
}
pub(crate) use on_all;
