//! Databases of their own on the PostgreSQL server of the tests, and private servers that may be
//! killed.
#![allow(dead_code, clippy::unwrap_used)] // each test binary uses its part

use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use oncebox::sqlx::postgres::{PgConnectOptions, PgConnection};
use oncebox::sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, Row};
use oncebox::store::postgres::PostgresStore;
use oncebox::store::{Base, Schema, StoreOptions};

use super::support::{free_port, service, unique};

/// A database of its own, migrated.
#[derive(Debug, Clone)]
pub(crate) struct Database {
    pub(crate) url: String,
    pub(crate) name: String,
    pub(crate) store: PostgresStore,
}

impl Database {
    /// A plain connection, as an application has it.
    pub(crate) async fn connection(&self) -> PgConnection {
        PgConnection::connect(&self.url).await.unwrap()
    }

    /// Another store on this database, with its own pool.
    pub(crate) async fn another_store(&self) -> PostgresStore {
        PostgresStore::connect(&StoreOptions::new(self.url.clone())).await.unwrap()
    }

    /// One value.
    pub(crate) async fn value<T>(&self, query: &str) -> T
    where
        T: for<'r> oncebox::sqlx::Decode<'r, oncebox::sqlx::Postgres> + oncebox::sqlx::Type<oncebox::sqlx::Postgres>,
    {
        self.store.pool().fetch_one(AssertSqlSafe(query.to_owned())).await.unwrap().try_get(0).unwrap()
    }

    /// Runs statements, each committed by itself.
    pub(crate) async fn run(&self, statements: &str) {
        oncebox::sqlx::raw_sql(AssertSqlSafe(statements.to_owned())).execute(self.store.pool()).await.unwrap();
    }
}

/// Runs a test in a database of its own, which is dropped afterwards, also when the test fails.
pub(crate) async fn with_database<F>(test: &str, body: impl FnOnce(Database) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let Some(server) = service(test, "ONCEBOX_TEST_POSTGRES") else { return };
    on_server(&server, body).await;
}

/// As [`with_database`], on any server.
pub(crate) async fn on_server<F>(server: &str, body: impl FnOnce(Database) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let name = migrated_database(server).await;
    let url = with_path(server, &name);
    let outcome = match PostgresStore::connect(&StoreOptions::new(url.clone())).await {
        Ok(store) => {
            let database = Database { url, name: name.clone(), store: store.clone() };
            let outcome = tokio::spawn(body(database)).await;
            store.close().await;
            outcome.map_err(|error| error.into_panic())
        }
        Err(error) => Err(Box::new(error.to_string()) as Box<dyn std::any::Any + Send>),
    };
    if let Ok(mut admin) = PgConnection::connect(server).await {
        let drop_database = format!("drop database if exists {name} with (force)");
        if let Err(error) = admin.execute(AssertSqlSafe(drop_database)).await {
            eprintln!("{name} is left on the server: {error}");
        }
    }
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

/// Makes a database without the schema; the answer is its name.
pub(crate) async fn empty_database(server: &str) -> String {
    // Copies of template0 do not disturb each other.
    copy_of(server, "template0 encoding 'UTF8'").await
}

/// Makes a database with the schema; the answer is its name. It is a copy of one that was migrated
/// for all tests: to migrate each costs as much as everything else that a short test does. As a
/// database that was not copied, it has a deployment of its own.
pub(crate) async fn migrated_database(server: &str) -> String {
    let name = copy_of(server, &format!("{} strategy file_copy", template(server).await)).await;
    let mut connection = PgConnection::connect(&with_path(server, &name)).await.unwrap();
    connection.execute("update oncebox.deployment set deployment_id = gen_random_uuid()").await.unwrap();
    connection.close().await.unwrap();
    name
}

async fn copy_of(server: &str, template: &str) -> String {
    let name = unique("oncebox_test").replace('-', "_");
    let create = format!("create database {name} template {template}");
    let began = Instant::now();
    // A busy server may ask for a second try.
    loop {
        let made = async {
            PgConnection::connect(server).await?.execute(AssertSqlSafe(create.clone())).await?;
            Ok::<_, oncebox::sqlx::Error>(())
        };
        let Err(error) = made.await else { return name };
        assert!(began.elapsed() < Duration::from_secs(60), "no database of its own: {error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The database that [`migrated_database`] copies, made where it is not there. Its name is that of
/// its schema: a server that outlives a run of the tests may meet another. It gets this name when
/// it is complete.
async fn template(server: &str) -> String {
    let mut hasher = DefaultHasher::new();
    PostgresStore::script().hash(&mut hasher);
    // The schema has partitions for the days to come.
    (std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() / 86_400).hash(&mut hasher);
    let name = format!("oncebox_template_{:016x}", hasher.finish());
    let mut admin = PgConnection::connect(server).await.unwrap();
    let is_there = format!("select exists (select 1 from pg_database where datname = '{name}')");
    let is_there = async |admin: &mut PgConnection| -> bool {
        admin.fetch_one(AssertSqlSafe(is_there.clone())).await.unwrap().try_get(0).unwrap()
    };
    if is_there(&mut admin).await {
        return name;
    }
    // Ends with the connection.
    admin.execute("select pg_advisory_lock(hashtext('the template of the tests'))").await.unwrap();
    if !is_there(&mut admin).await {
        let new = format!("{name}_new");
        for statement in [
            format!("drop database if exists {new} with (force)"),
            format!("create database {new} template template0 encoding 'UTF8'"),
        ] {
            admin.execute(AssertSqlSafe(statement)).await.unwrap();
        }
        migrated(&with_path(server, &new)).await.unwrap().close().await;
        admin.execute(AssertSqlSafe(format!("alter database {new} rename to {name}"))).await.unwrap();
    }
    name
}

async fn migrated(url: &str) -> Result<PostgresStore, oncebox::StoreError> {
    let store = PostgresStore::connect(&StoreOptions::new(url.to_owned())).await?;
    store.migrate().await?;
    Ok(store)
}

/// The same server, another database.
pub(crate) fn with_path(server: &str, database: &str) -> String {
    let mut url = url::Url::parse(server).unwrap();
    url.set_path(database);
    url.to_string()
}

/// The same server, another user.
pub(crate) fn with_user(server: &str, user: &str, password: &str) -> String {
    let mut url = url::Url::parse(server).unwrap();
    url.set_username(user).unwrap();
    url.set_password(Some(password)).unwrap();
    url.to_string()
}

/// A server of its own that may be killed.
#[derive(Debug)]
pub(crate) struct Server {
    bin: PathBuf,
    directory: tempfile::TempDir,
    port: u16,
    process: Option<Child>,
}

impl Server {
    /// Makes and starts a server with these lines in its configuration; none where the programs are
    /// not there.
    pub(crate) async fn start(test: &str, settings: &str) -> Option<Self> {
        let bin = PathBuf::from(service(test, "ONCEBOX_TEST_PG_BIN")?);
        let directory = tempfile::Builder::new().prefix("oncebox-pg-").tempdir().unwrap();
        let port = free_port();
        let mut server = Self { bin, directory, port, process: None };
        if is_root() {
            let path = server.directory.path().to_str().unwrap();
            assert!(Command::new("chown").args(["postgres", path]).status().unwrap().success());
        }
        let data = server.data();
        let initdb = server
            .command("initdb")
            .args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync", "-D"])
            .arg(&data)
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert!(initdb.success(), "initdb failed");
        let fixed = format!(
            "listen_addresses = '127.0.0.1'\nport = {port}\nunix_socket_directories = ''\nmax_prepared_transactions = 10\n{settings}\n"
        );
        let mut configuration = std::fs::read_to_string(data.join("postgresql.conf")).unwrap();
        configuration.push_str(&fixed);
        std::fs::write(data.join("postgresql.conf"), configuration).unwrap();
        server.run().await;
        Some(server)
    }

    /// A standby of this server, which streams from it.
    #[allow(dead_code, reason = "not every test program needs one")]
    pub(crate) async fn standby(&self) -> Self {
        let directory = tempfile::Builder::new().prefix("oncebox-pg-").tempdir().unwrap();
        let mut standby = Self { bin: self.bin.clone(), directory, port: free_port(), process: None };
        if is_root() {
            let path = standby.directory.path().to_str().unwrap();
            assert!(Command::new("chown").args(["postgres", path]).status().unwrap().success());
        }
        let copied = standby
            .command("pg_basebackup")
            .args(["-h", "127.0.0.1", "-p", &self.port.to_string(), "-U", "postgres", "-R", "-c", "fast", "-D"])
            .arg(standby.data())
            .status()
            .unwrap();
        assert!(copied.success(), "pg_basebackup failed");
        let file = standby.data().join("postgresql.conf");
        let configuration = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, format!("{configuration}port = {}\n", standby.port)).unwrap();
        standby.run().await;
        standby
    }

    /// Starts it, or starts it again after a kill. A process of the killed server may hold its
    /// memory for a moment longer: then the new server ends at once, and is started once more.
    pub(crate) async fn run(&mut self) {
        let file = self.directory.path().join("log");
        let options: PgConnectOptions = self.url().parse().unwrap();
        let began = Instant::now();
        loop {
            if self.process.as_mut().is_none_or(|process| process.try_wait().unwrap().is_some()) {
                let log = std::fs::OpenOptions::new().create(true).append(true).open(&file).unwrap();
                let mut command = self.command("postgres");
                command.arg("-D").arg(self.data()).stdout(log.try_clone().unwrap()).stderr(log);
                self.process = Some(command.spawn().unwrap());
            }
            if let Ok(mut connection) = options.connect().await
                && connection.ping().await.is_ok()
            {
                return;
            }
            let said = || std::fs::read_to_string(&file).unwrap_or_default();
            assert!(began.elapsed() < Duration::from_secs(60), "the server does not answer; it said: {}", said());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// Ends it without a word, as a loss of power ends its processes; what the kernel has stays.
    pub(crate) fn kill(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        let pid = process.id().to_string();
        // Its children first hear of it through their pipe; those that write now must not write on.
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        for child in std::iter::once(pid.as_str()).chain(children.split_whitespace()) {
            let _ = Command::new("kill").args(["-KILL", child]).status();
        }
        let _ = process.wait();
    }

    /// Stops all of its processes where they stand: nothing is closed, and nothing answers.
    pub(crate) fn freeze(&self) {
        let pid = self.process.as_ref().unwrap().id().to_string();
        // First the one that makes the others.
        let stop = |pid: &str| Command::new("kill").args(["-STOP", pid]).status().unwrap();
        assert!(stop(&pid).success());
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        children.split_whitespace().for_each(|child| _ = stop(child));
    }

    fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    /// The server refuses to run as root.
    pub(crate) fn command(&self, program: &str) -> Command {
        let program = self.bin.join(program);
        if !is_root() {
            return Command::new(program);
        }
        let mut command = Command::new("setpriv");
        command.args(["--reuid=postgres", "--regid=postgres", "--init-groups", "--"]).arg(program);
        command
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn is_root() -> bool {
    Path::new("/proc/self").metadata().is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0)
}
