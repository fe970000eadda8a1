//! A database of its own for every test, and private servers for what holds for a whole server.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use oncebox::NewMessage;
use oncebox::store::mysql::MySqlStore;
use oncebox::store::{
    Base, ConsumerId, ConsumerSpec, Inbox, LeaseAnswer, LeaseRequest, Outbox, RelaySession, Schema, StoreOptions,
};
use sqlx::{AssertSqlSafe, Connection, MySqlConnection};

use crate::support::{service, unique};

pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// A database of this test alone; dropped with it.
pub(crate) struct Db {
    pub(crate) store: MySqlStore,
    pub(crate) url: String,
    admin: String,
    name: String,
}

impl Db {
    /// On the shared server, with the schema; none where there is no server.
    pub(crate) async fn new(test: &str) -> Option<Self> {
        let db = Self::empty(test).await?;
        db.store.migrate().await.unwrap();
        Some(db)
    }

    /// Without the schema.
    pub(crate) async fn empty(test: &str) -> Option<Self> {
        Some(Self::on(&service(test, "ONCEBOX_TEST_MARIADB")?).await)
    }

    /// On any server.
    pub(crate) async fn on(admin: &str) -> Self {
        let name = unique("ob_mysql").replace('-', "_");
        execute(&mut MySqlConnection::connect(admin).await.unwrap(), &format!("create database {name}")).await;
        let mut url = url::Url::parse(admin).unwrap();
        url.set_path(&name);
        let url = url.to_string();
        let store = MySqlStore::connect(&StoreOptions::new(url.as_str())).await.unwrap();
        Self { store, url, admin: admin.to_owned(), name }
    }

    /// A connection of the application's own: not from the store's pool, with the server's
    /// defaults.
    pub(crate) async fn app(&self) -> MySqlConnection {
        MySqlConnection::connect(&self.url).await.unwrap()
    }

    pub(crate) async fn count(&self, table: &str) -> i64 {
        sqlx::query_scalar(AssertSqlSafe(format!("select count(*) from {table}")))
            .fetch_one(self.store.pool())
            .await
            .unwrap()
    }

    /// Waits until so many statements like this one stand still: seen twice, a while apart.
    /// (`innodb_trx` is no use: MariaDB does not renew it while it is read often.)
    pub(crate) async fn until_waiting(&self, count: i64, like: &str) {
        let mut seen = 0;
        let start = Instant::now();
        while seen < 3 {
            let waiting: i64 = sqlx::query_scalar(
                "select count(*) from information_schema.processlist where db = database() and command in ('Query', 'Execute') \
                 and id <> connection_id() and info like ?",
            )
            .bind(like)
            .fetch_one(self.store.pool())
            .await
            .unwrap();
            seen = if waiting == count { seen + 1 } else { 0 };
            assert!(start.elapsed() < DEADLINE, "{count} statements do not wait: {like}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) async fn consumer(&self, name: &str) -> ConsumerId {
        let spec = ConsumerSpec { name: name.to_owned(), id_rule: "envelope".to_owned(), accept: false };
        self.store.register(&spec).await.unwrap()
    }

    pub(crate) async fn session(&self, owner: &str) -> Box<dyn RelaySession> {
        match self.store.open(&lease(owner)).await.unwrap() {
            LeaseAnswer::Taken(session) => session,
            other => panic!("the lease was not taken: {other:?}"),
        }
    }
}

impl Drop for Db {
    fn drop(&mut self) {
        let (admin, name) = (self.admin.clone(), self.name.clone());
        // A test may have panicked: its runtime is of no use any more.
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                if let Ok(mut connection) = MySqlConnection::connect(&admin).await {
                    let drop = AssertSqlSafe(format!("drop database if exists {name}"));
                    let _ = sqlx::query(drop).execute(&mut connection).await;
                }
            });
        });
        let _ = dropping.join();
    }
}

pub(crate) fn lease(owner: &str) -> LeaseRequest {
    LeaseRequest { shard: 0, owner: owner.into(), length: Duration::from_secs(30), read_bytes: 4 << 20 }
}

pub(crate) fn text(topic: &str, key: &str, payload: &str) -> NewMessage {
    NewMessage::text(topic, "test.happened", payload).with_key(key)
}

pub(crate) async fn execute(connection: &mut MySqlConnection, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await.unwrap();
}

/// A server of this test alone; ended with it.
pub(crate) struct PrivateServer {
    server: Child,
    dir: tempfile::TempDir,
}

impl PrivateServer {
    /// None where `mariadbd` is not installed.
    pub(crate) fn start(test: &str, settings: &[&str]) -> Option<Self> {
        if Command::new("mariadbd").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
            assert!(std::env::var("ONCEBOX_TEST_STRICT").as_deref() != Ok("1"), "{test} needs mariadbd");
            eprintln!("SKIPPED: {test} (no mariadbd)");
            return None;
        }
        let dir = tempfile::Builder::new().prefix("ob-mariadb").tempdir().unwrap();
        let data = dir.path().join("data");
        // A starting server removes what looks like a temporary table in its directory: never one
        // that servers share.
        let temporary = dir.path().join("tmp");
        std::fs::create_dir(&temporary).unwrap();
        // The server refuses to run as root; root makes the directory its own.
        let is_root = std::fs::metadata("/proc/self").is_ok_and(|found| {
            use std::os::unix::fs::MetadataExt;
            found.uid() == 0
        });
        let user: &[&str] = if is_root { &["--user=mysql"] } else { &[] };
        if is_root {
            run(Command::new("chown").arg("mysql").args([dir.path(), &temporary]));
            run(Command::new("chmod").arg("755").arg(dir.path()));
        }
        run(Command::new("mariadb-install-db")
            .args(["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"])
            .args(user)
            .env("TMPDIR", &temporary)
            .arg(format!("--tmpdir={}", temporary.display()))
            .arg(format!("--datadir={}", data.display())));
        let server = Command::new("mariadbd")
            .args(["--no-defaults", "--skip-networking", "--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M"])
            .args(user)
            .arg(format!("--tmpdir={}", temporary.display()))
            .arg(format!("--datadir={}", data.display()))
            .arg(format!("--socket={}", dir.path().join("sock").display()))
            .arg(format!("--pid-file={}", dir.path().join("pid").display()))
            .args(settings)
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(dir.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        Some(Self { server, dir })
    }

    /// Its address, once it answers.
    pub(crate) async fn url(&self) -> String {
        let url = format!("mysql://root@localhost/mysql?socket={}", self.dir.path().join("sock").display());
        let start = Instant::now();
        loop {
            match MySqlConnection::connect(&url).await {
                Ok(_) => return url,
                Err(error) => assert!(start.elapsed() < Duration::from_secs(60), "the private server: {error}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for PrivateServer {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn run(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
