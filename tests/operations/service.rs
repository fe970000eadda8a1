//! The example service as a process, and requests to it.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use oncebox::sqlx::{self, AssertSqlSafe, Connection};

use crate::kit::*;
use crate::support::example;

/// A process, killed when dropped: also by a test that fails before the process listens.
#[derive(Debug)]
pub(crate) struct Killed(pub(crate) Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process of the service that listens.
pub(crate) struct Service {
    child: Killed,
    pub(crate) url: String,
}

impl Service {
    pub(crate) fn begin(database: &str, flags: &[&str]) -> Killed {
        Killed(Self::command(database, flags).spawn().unwrap())
    }

    /// With what it says on stderr in a file.
    pub(crate) fn begin_logged(database: &str, flags: &[&str], log: &Path) -> Killed {
        Killed(Self::command(database, flags).stderr(File::create(log).unwrap()).spawn().unwrap())
    }

    /// On a machine whose state is in this directory, with what it says on stderr in a file of it.
    pub(crate) fn begin_on(machine: &Path, database: &str, flags: &[&str]) -> Killed {
        let mut command = Self::command(database, flags);
        command.env("XDG_STATE_HOME", machine).stderr(File::create(machine.join("log")).unwrap());
        Killed(command.spawn().unwrap())
    }

    fn command(database: &str, flags: &[&str]) -> Command {
        let mut command = Command::new(example("payments_api"));
        command.args(["--listen", "127.0.0.1:0", "--database", database]).args(flags);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command
    }

    pub(crate) async fn ready(mut child: Killed) -> Self {
        let out = child.0.stdout.take().unwrap();
        let said = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            BufReader::new(out).read_line(&mut line).unwrap();
            line
        });
        // Its tables are made first, by several processes at once.
        let said = tokio::time::timeout(SOON * 6, said).await.expect("it listens").unwrap();
        let address =
            said.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("it said {said:?}")).to_owned();
        Self { child, url: format!("http://{address}") }
    }

    /// SIGKILL, and gone.
    pub(crate) fn kill(mut self) {
        self.child.0.kill().unwrap();
        self.child.0.wait().unwrap();
    }

    pub(crate) async fn post(&self, path: &str, key: &str, body: &str) -> Http {
        send(self.ask(path, key, body)).await
    }

    pub(crate) fn ask(&self, path: &str, key: &str, body: &str) -> reqwest::RequestBuilder {
        self.ask_as("t1:p1", path, key, body)
    }

    pub(crate) fn ask_as(&self, who: &str, path: &str, key: &str, body: &str) -> reqwest::RequestBuilder {
        post(&format!("{}{path}", self.url), key, body).header("authorization", format!("Bearer {who}"))
    }

    pub(crate) async fn get(&self, path: &str) -> Http {
        send(client().get(format!("{}{path}", self.url)).header("authorization", "Bearer t1:p1")).await
    }

    /// The sum of a metric over its labels.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let text = String::from_utf8(self.get("/metrics").await.body).unwrap();
        let lines: Vec<&str> = text.lines().filter(|line| line.split(['{', ' ']).next() == Some(name)).collect();
        assert!(!lines.is_empty(), "{name} is missing");
        lines.iter().map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
    }
}

pub(crate) fn payment(amount: i64, reference: &str) -> String {
    format!(r#"{{"accountId":"acc-7","amountMinor":{amount},"currency":"EUR","merchantReference":"{reference}"}}"#)
}

/// Counts rows of a database, by a connection of its own.
pub(crate) async fn count(url: &str, sql: &str) -> i64 {
    let sql = AssertSqlSafe(sql.to_owned());
    if url.starts_with("sqlite") {
        let mut connection = sqlx::SqliteConnection::connect(url).await.unwrap();
        sqlx::query_scalar(sql).fetch_one(&mut connection).await.unwrap()
    } else if url.starts_with("mysql") {
        let mut connection = sqlx::MySqlConnection::connect(url).await.unwrap();
        sqlx::query_scalar(sql).fetch_one(&mut connection).await.unwrap()
    } else {
        let mut connection = sqlx::PgConnection::connect(url).await.unwrap();
        sqlx::query_scalar(sql).fetch_one(&mut connection).await.unwrap()
    }
}

/// The records of keys.
pub(crate) async fn records(url: &str) -> i64 {
    let table = if url.starts_with("postgres") { "oncebox.idempotency_request" } else { "oncebox_idempotency_request" };
    count(url, &format!("select count(*) from {table}")).await
}

/// The outbox messages of a kind.
pub(crate) async fn messages(url: &str, kind: &str) -> i64 {
    let table = if url.starts_with("postgres") { "oncebox.outbox" } else { "oncebox_outbox" };
    count(url, &format!("select count(*) from {table} where kind = '{kind}'")).await
}
