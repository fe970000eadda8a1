//! A RabbitMQ of our own, for what would disturb everybody on a shared one: alarms, timeouts, kill
//! -9.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::RwLock;

use crate::support::free_port;

/// Where Debian puts the programs; `ONCEBOX_TEST_RABBITMQ_BIN` says otherwise.
const PROGRAMS: &str = "/usr/lib/rabbitmq/bin";
const START: Duration = Duration::from_secs(120);

/// The one that runs, shared by the tests that run at the same time; the last one stops it.
static RUNNING: Mutex<Weak<Private>> = Mutex::new(Weak::new());

pub(crate) struct Private {
    directory: tempfile::TempDir,
    programs: PathBuf,
    port: u16,
    ports: [u16; 2],
    server: Mutex<Option<Child>>,
    /// Erlang's name server; a child of ours, because the one that the server starts by itself
    /// would outlive it.
    names: Mutex<Option<Child>>,
    /// Read by tests that only use it, written by those that make it suffer.
    pub(crate) peace: RwLock<()>,
}

impl Private {
    /// The running one, or a new one; nothing where the programs are missing.
    pub(crate) fn of(test: &str) -> Option<Arc<Self>> {
        let programs = std::env::var_os("ONCEBOX_TEST_RABBITMQ_BIN").map_or_else(|| PROGRAMS.into(), PathBuf::from);
        if !programs.join("rabbitmq-server").exists() {
            assert!(std::env::var("ONCEBOX_TEST_STRICT").as_deref() != Ok("1"), "{test} needs {}", programs.display());
            eprintln!("SKIPPED: {test} (no rabbitmq-server in {}, see ONCEBOX_TEST_RABBITMQ_BIN)", programs.display());
            return None;
        }
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(private) = running.upgrade() {
            return Some(private);
        }
        let private = Arc::new(Self::new(programs));
        *running = Arc::downgrade(&private);
        private.start();
        Some(private)
    }

    fn new(programs: PathBuf) -> Self {
        let mut ports: Vec<u16> = Vec::new();
        while ports.len() < 3 {
            let port = free_port();
            if !ports.contains(&port) {
                ports.push(port);
            }
        }
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        file(
            "rabbitmq.conf",
            &format!(
                "listeners.tcp.default = 127.0.0.1:{}\nvm_memory_high_watermark.absolute = 1GB\n\
                 disk_free_limit.absolute = 50MB\nconsumer_timeout = 3000\nmax_message_size = 200000\n",
                ports[0]
            ),
        );
        // How often a channel looks for deliveries that are not acknowledged in time.
        file("advanced.config", "[{rabbit, [{channel_tick_interval, 1000}]}].\n");
        file("enabled_plugins", "[].\n");
        Self {
            directory,
            programs,
            port: ports[0],
            ports: [ports[1], ports[2]],
            server: Mutex::new(None),
            names: Mutex::new(None),
            peace: RwLock::new(()),
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("amqp://guest:guest@127.0.0.1:{}/%2f", self.port)
    }

    fn command(&self, program: &Path) -> Command {
        let path = |name: &str| self.directory.path().join(name);
        let mut command = Command::new(program);
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("LANG", "C.UTF-8")
            .env("HOME", self.directory.path())
            .env("RABBITMQ_NODENAME", format!("obtest{}@localhost", self.port))
            .env("RABBITMQ_DIST_PORT", self.ports[0].to_string())
            .env("ERL_EPMD_PORT", self.ports[1].to_string())
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_MNESIA_BASE", path("mnesia"))
            .env("RABBITMQ_LOG_BASE", path("log"))
            .env("RABBITMQ_CONFIG_FILE", path("rabbitmq.conf"))
            .env("RABBITMQ_ADVANCED_CONFIG_FILE", path("advanced.config"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", path("enabled_plugins"))
            .env("RABBITMQ_PID_FILE", path("pid"))
            .env("RABBITMQ_FEATURE_FLAGS_FILE", path("ff"))
            .env("RABBITMQ_CONF_ENV_FILE", "/dev/null")
            .env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "-kernel inet_dist_use_interface {127,0,0,1}")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// Starts the server and waits until it takes connections.
    pub(crate) fn start(&self) {
        self.names.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| {
            let port = self.ports[1].to_string();
            self.command(Path::new("epmd")).args(["-port", &port, "-address", "127.0.0.1"]).spawn().unwrap()
        });
        let child = self.command(&self.programs.join("rabbitmq-server")).spawn().unwrap();
        *self.server.lock().unwrap_or_else(PoisonError::into_inner) = Some(child);
        let start = Instant::now();
        while !self.control(&["await_startup"]) {
            assert!(start.elapsed() < START, "the private RabbitMQ does not start");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Runs `rabbitmqctl`; true where it succeeded.
    pub(crate) fn control(&self, arguments: &[&str]) -> bool {
        self.command(&self.programs.join("rabbitmqctl")).args(arguments).status().unwrap().success()
    }

    /// How many lines of the server's log have all these parts.
    pub(crate) fn logged(&self, parts: &[&str]) -> usize {
        let files = std::fs::read_dir(self.directory.path().join("log")).unwrap();
        let texts = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap_or_default());
        texts.map(|text| text.lines().filter(|line| parts.iter().all(|part| line.contains(part))).count()).sum()
    }

    /// The server is gone at once, with whatever it had not written.
    pub(crate) fn kill(&self) {
        // The pid file names the virtual machine; our child is only the shell that started it.
        if let Ok(pid) = std::fs::read_to_string(self.directory.path().join("pid")) {
            let _ = Command::new("kill").args(["-9", pid.trim()]).status();
        }
        if let Some(mut child) = self.server.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // Where it never came up there is no such file, and the shell waits for ever.
            let children = format!("/proc/{0}/task/{0}/children", child.id());
            for pid in std::fs::read_to_string(children).unwrap_or_default().split_whitespace() {
                let _ = Command::new("kill").args(["-9", pid]).status();
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        self.kill();
        if let Some(mut names) = self.names.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = names.kill();
            let _ = names.wait();
        }
    }
}
