//! Programs as a person or script sees them: started with an environment of their own, in a
//! directory of their own; what they print and how they end is kept, and a secret must never be in
//! it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::database::Database;
use super::support::{service, without_settings};

/// Long enough for a busy machine; what is waited for ends the wait at once.
pub(crate) const SOON: Duration = Duration::from_secs(120);
/// The password of every URL, property and setting here. It must not occur in anything that a
/// program prints.
pub(crate) const SECRET: &str = "hunter2-secret";

pub(crate) const ONCEBOX: &str = env!("CARGO_BIN_EXE_oncebox");
pub(crate) const PUBLISHER: &str = env!("CARGO_BIN_EXE_publisher");
pub(crate) const CONSUMER: &str = env!("CARGO_BIN_EXE_consumer");

/// Asks again and again until the answer is there; fails with `what` after the deadline.
pub(crate) fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < SOON, "{what}: not within {SOON:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a future to its end: tests here wait for processes, so they are not async themselves.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// A pipe without a reader.
pub(crate) fn closed() -> std::fs::File {
    std::os::fd::OwnedFd::from(std::io::pipe().unwrap().1).into()
}

/// A program that is about to be started. Nothing of this test's own environment reaches its
/// settings.
#[derive(Debug)]
pub(crate) struct Program(Command);

impl Program {
    pub(crate) fn new(path: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new(path);
        without_settings(&mut command);
        command.env_remove("RUST_LOG").env_remove("RUST_BACKTRACE").args(arguments).stdin(Stdio::null());
        Self(command)
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.0.env(name, value);
        self
    }

    pub(crate) fn within(mut self, directory: &Path) -> Self {
        self.0.current_dir(directory);
        self
    }

    /// What a person types.
    pub(crate) fn saying(mut self, text: &str) -> Self {
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(text.as_bytes()).unwrap();
        self.0.stdin(reader);
        self
    }

    /// Where its data goes, instead of to the test.
    pub(crate) fn stdout(mut self, to: std::fs::File) -> Done {
        self.0.stdout(to);
        self.start_with(false).ends()
    }

    /// Where its log and its errors go, instead of to the test; its exit code.
    pub(crate) fn stderr(mut self, to: std::fs::File) -> Option<i32> {
        let child = self.0.stdout(Stdio::null()).stderr(to).spawn().unwrap();
        let lines = mpsc::channel().1;
        let mut running = Running { shown: String::new(), child, stdout: None, lines, said: Vec::new(), address: None };
        eventually("the program ends", || running.child.try_wait().unwrap()).code()
    }

    /// Starts it and waits for its end.
    pub(crate) fn run(self) -> Done {
        self.start().ends()
    }

    pub(crate) fn start(self) -> Running {
        self.start_with(true)
    }

    fn start_with(mut self, capture: bool) -> Running {
        if capture {
            self.0.stdout(Stdio::piped());
        }
        // Arguments may hold a password of a real server too.
        let arguments = self.0.get_args().map(|argument| oncebox::error::redact(&argument.to_string_lossy()));
        let shown: Vec<String> = std::iter::once(self.0.get_program().display().to_string()).chain(arguments).collect();
        let shown = shown.join(" ");
        let mut child = self.0.stderr(Stdio::piped()).spawn().unwrap();
        let stdout = child.stdout.take().map(|mut pipe| {
            std::thread::spawn(move || {
                let mut text = String::new();
                pipe.read_to_string(&mut text).unwrap();
                text
            })
        });
        let (sender, lines) = mpsc::channel();
        let pipe = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || {
            // What is no UTF-8 is kept too: a secret may stand in it.
            for line in pipe.split(b'\n').map_while(Result::ok) {
                if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    break;
                }
            }
        });
        Running { shown, child, stdout, lines, said: Vec::new(), address: None }
    }
}

/// A program that runs; it is stopped when the test is done with it.
#[derive(Debug)]
pub(crate) struct Running {
    shown: String,
    child: Child,
    stdout: Option<std::thread::JoinHandle<String>>,
    lines: Receiver<String>,
    said: Vec<String>,
    address: Option<SocketAddr>,
}

impl Running {
    /// Waits for a line of stderr with these words in it.
    pub(crate) fn says(&mut self, words: &[&str]) -> String {
        let fits = |line: &&String| words.iter().all(|word| line.contains(word));
        if let Some(line) = self.said.iter().find(fits) {
            return line.clone();
        }
        let until = Instant::now() + SOON;
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.said.push(line);
                    if let Some(line) = self.said.last().filter(fits) {
                        return line.clone();
                    }
                }
                Err(why) => panic!("{} did not say {words:?} ({why}):\n{}", self.shown, self.said.join("\n")),
            }
        }
    }

    /// What a path of its listener (`--listen 127.0.0.1:0`) answers: status and body.
    pub(crate) fn get(&mut self, path: &str) -> (u16, String) {
        if self.address.is_none() {
            let line = self.says(&["listening", "/readyz"]);
            let from = line.find("127.0.0.1:").unwrap();
            let text: String =
                line[from..].chars().take_while(|c| c.is_ascii_digit() || matches!(c, '.' | ':')).collect();
            self.address = Some(text.parse().unwrap());
        }
        let mut stream = TcpStream::connect(self.address.unwrap()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(!answer.contains(SECRET), "{answer}");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    /// Waits until `/readyz` answers with this status and these words.
    pub(crate) fn until_ready_says(&mut self, status: u16, words: &[&str]) -> String {
        let what = format!("{} answers /readyz with {status} and {words:?}", self.shown);
        let mut last = String::new();
        let start = Instant::now();
        loop {
            let (code, body) = self.get("/readyz");
            if code == status && words.iter().all(|word| body.contains(word)) {
                return body;
            }
            last.clone_from(&body);
            assert!(start.elapsed() < SOON, "{what}: last it was {code} {last}");
            assert!(self.child.try_wait().unwrap().is_none(), "{what}: it ended");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    /// The same signal twice, as close together as one process can send them.
    pub(crate) fn signal_twice(&self, signal: &str) {
        let pid = self.child.id().to_string();
        let twice = format!("kill {signal} {pid}; kill {signal} {pid}");
        // The first may have ended it.
        let _ = Command::new("sh").args(["-c", &twice]).stderr(Stdio::null()).status().unwrap();
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// SIGTERM, and its end.
    pub(crate) fn stop(self) -> Done {
        self.signal("-TERM");
        self.ends()
    }

    /// Waits for its end.
    pub(crate) fn ends(self) -> Done {
        self.ends_within(SOON)
    }

    pub(crate) fn ends_within(mut self, deadline: Duration) -> Done {
        let until = Instant::now() + deadline;
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) => self.said.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    panic!("{} did not end within {deadline:?}:\n{}", self.shown, self.said.join("\n"))
                }
            }
        }
        let status = self.child.wait().unwrap();
        let stdout = self.stdout.take().map_or_else(String::new, |reader| reader.join().unwrap());
        let done = Done { shown: self.shown.clone(), status, stdout, stderr: self.said.join("\n") };
        assert!(!done.stdout.contains(SECRET) && !done.stderr.contains(SECRET), "a secret is shown: {done:?}");
        assert!(!done.stderr.contains("panicked"), "{done:?}");
        done
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Politely first: it may have processes of its own.
        let is_there = |child: &mut Child| matches!(child.try_wait(), Ok(None));
        if is_there(&mut self.child) {
            self.signal("-TERM");
        }
        let asked = Instant::now();
        while is_there(&mut self.child) && asked.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program that has ended.
#[derive(Debug)]
pub(crate) struct Done {
    shown: String,
    status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Done {
    pub(crate) fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// It did what it was asked to; its data.
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.code(), Some(0), "{}\n{}\n{}", self.shown, self.stdout, self.stderr);
        self.stdout
    }

    /// It ended with 0 and said these words on stderr.
    pub(crate) fn ok_saying(self, words: &[&str]) -> String {
        let text = self.stderr.clone();
        assert!(words.iter().all(|word| text.contains(word)), "{words:?} in {text}");
        self.ok()
    }

    /// It failed with this code, says these words on stderr as an error, and wrote no data.
    pub(crate) fn fails(&self, code: i32, words: &[&str]) {
        assert_eq!(self.stdout, "", "{} wrote data and failed", self.shown);
        self.ends_with(code, words);
    }

    /// As [`Done::fails`], where data is what shows the failure.
    pub(crate) fn ends_with(&self, code: i32, words: &[&str]) {
        let Self { shown, stderr, .. } = self;
        assert_eq!(self.code(), Some(code), "{shown}\n{}\n{stderr}", self.stdout);
        let is_error = |line: &str| line.starts_with("error: ") || line.contains(r#""level":"ERROR""#);
        assert!(stderr.lines().any(is_error), "{shown} says no error:\n{stderr}");
        for word in words {
            assert!(stderr.contains(word), "{shown} does not say `{word}`:\n{stderr}");
        }
    }

    pub(crate) fn json(self) -> Value {
        let text = self.ok();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }
}

/// A directory with a SQLite database and an embedded broker.
#[derive(Debug)]
pub(crate) struct Place {
    directory: tempfile::TempDir,
    database: String,
    broker: String,
    _own: Option<Database>,
}

impl Place {
    /// Nothing is there yet.
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| directory.path().join(name).display().to_string();
        let (database, broker) = (format!("sqlite://{}", file("app.db")), format!("embedded://{}", file("broker.db")));
        Self { directory, database, broker, _own: None }
    }

    /// Another database or broker instead.
    pub(crate) fn on(database: Option<&str>, broker: Option<&str>) -> Self {
        let mut place = Self::new();
        place.database = database.map_or(place.database, str::to_owned);
        place.broker = broker.map_or(place.broker, str::to_owned);
        place
    }

    /// With the tables.
    pub(crate) fn migrated() -> Self {
        let place = Self::new();
        place.oncebox(&["migrate", "up"]).run().ok();
        place
    }

    /// With the tables, in a database of its own on this server; none where there is no server.
    pub(crate) fn on_server(test: &str, variable: &str) -> Option<Self> {
        let own = Database::on(&service(test, variable)?);
        let place = Self { database: own.url.clone(), _own: Some(own), ..Self::new() };
        place.oncebox(&["migrate", "up"]).run().ok();
        Some(place)
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// From now on the broker is reached here.
    pub(crate) fn move_broker(&mut self, url: &str) {
        url.clone_into(&mut self.broker);
    }

    pub(crate) fn database(&self) -> &str {
        &self.database
    }

    pub(crate) fn program(&self, path: &str, arguments: &[&str]) -> Program {
        Program::new(path, arguments)
            .within(self.path())
            .env("ONCEBOX_DATABASE__URL", &self.database)
            .env("ONCEBOX_BROKER__URL", &self.broker)
    }

    pub(crate) fn oncebox(&self, arguments: &[&str]) -> Program {
        self.program(ONCEBOX, arguments)
    }

    pub(crate) fn publisher(&self, arguments: &[&str]) -> Program {
        self.program(PUBLISHER, arguments)
    }

    pub(crate) fn consumer(&self, arguments: &[&str]) -> Program {
        self.program(CONSUMER, arguments)
    }

    /// Writes a configuration file; its path.
    pub(crate) fn config(&self, text: &str) -> String {
        let file = self.path().join(format!("{}.toml", uuid::Uuid::now_v7()));
        std::fs::write(&file, text).unwrap();
        file.display().to_string()
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> PathBuf {
        let file = self.path().join(name);
        std::fs::write(&file, text).unwrap();
        file
    }

    /// Statements on the database.
    pub(crate) fn sql(&self, statements: &str) {
        super::database::run(&self.database, statements).unwrap();
    }

    /// The first column of a query, as text.
    pub(crate) fn column(&self, query: &str) -> Vec<String> {
        super::database::column(&self.database, query)
    }

    /// Relays all there is.
    pub(crate) fn publish(&self) {
        assert_eq!(self.publisher(&["--until-empty"]).run().ok(), "", "it has no data");
    }

    /// A payment in the outbox, by the door of the database.
    pub(crate) fn enqueue(&self, key: &str, payload: &str) {
        self.enqueue_to("payments", key, payload);
    }

    pub(crate) fn enqueue_to(&self, topic: &str, key: &str, payload: &str) {
        self.sql(&super::database::enqueue(&self.database, topic, key, payload));
    }

    /// What a command prints as JSON.
    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        self.oncebox(&[arguments, &["--output", "json"]].concat()).run().json()
    }

    /// What operators did, and why.
    pub(crate) fn audit(&self) -> Vec<String> {
        self.column("select act || ' ' || reason from oncebox_audit order by 1")
    }

    /// A record in the broker that no publisher of ours wrote: these headers and nothing else. The
    /// topic must be there.
    pub(crate) fn append(&self, key: Option<&str>, headers: &[(&str, &str)], payload: &str) {
        let key = key.map_or("null".to_owned(), |key| format!("cast('{key}' as blob)"));
        let headers = serde_json::to_string(headers).unwrap().replace('\'', "''");
        let partition = "(select partition_id from topic_partition join topic using (topic_id) where name = 'payments' and number = 0)";
        let append = format!(
            "begin immediate;
             insert into record select partition_id << 40 | next_offset, {key}, '{headers}', cast('{payload}' as blob),
               unixepoch() * 1000 from topic_partition where partition_id = {partition};
             update topic_partition set next_offset = next_offset + 1 where partition_id = {partition};
             commit"
        );
        super::database::run(&self.broker.replace("embedded:", "sqlite:"), &append).unwrap();
    }

    /// A table for a ledger, and the configuration of the consumer that writes it.
    pub(crate) fn ledger(&self) -> String {
        self.sql(
            "create table ledger_entry (payment_id varchar(64) not null unique, account_id varchar(64) not null, amount_minor bigint)",
        );
        self.config(&format!("{CONSUMER_OF_PAYMENTS}{LEDGER}"))
    }

    /// Payments in the ledger.
    pub(crate) fn entries(&self) -> Vec<String> {
        self.column("select payment_id from ledger_entry order by payment_id")
    }

    /// Consumes all there is.
    pub(crate) fn consume(&self, config: &str) -> Done {
        self.consumer(&["--until-idle", "300ms", "--config", config]).run()
    }
}

/// A consumer that gives up soon.
pub(crate) const CONSUMER_OF_PAYMENTS: &str = r#"
[[consumer]]
name   = "ledger"
topics = ["payments"]
[consumer.retry]
in_place = 1
in_place_delay = "5ms"
attempts_max = 2
base = "20ms"
cap = "50ms"
"#;

/// Its handler.
pub(crate) const LEDGER: &str = r#"
[[consumer.on]]
kind    = "payment.created"
handler = "sql"
sql     = ["insert into ledger_entry (payment_id, account_id, amount_minor) values (:payment, :account, :amount)"]
params  = { payment = "/paymentId", account = "/accountId", amount = "/amountMinor" }
"#;

/// A payload that the ledger takes.
pub(crate) fn payment(id: &str) -> String {
    format!(r#"{{"paymentId":"{id}","accountId":"acc-7","amountMinor":100}}"#)
}
