//! What every test against a real service needs: its address or a visible skip, names of its own,
//! and the built examples.
#![allow(dead_code, clippy::unwrap_used)] // each test binary uses its part

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime};

/// The value of an environment variable that names a service. Where it is missing the test is
/// skipped, visibly, unless `ONCEBOX_TEST_STRICT=1` makes that a failure.
pub(crate) fn service(test: &str, variable: &str) -> Option<String> {
    match std::env::var(variable) {
        Ok(value) if !value.is_empty() => Some(value),
        _ => {
            assert!(std::env::var("ONCEBOX_TEST_STRICT").as_deref() != Ok("1"), "{test} needs {variable}");
            eprintln!("SKIPPED: {test} (no {variable})");
            None
        }
    }
}

/// Takes the settings of oncebox in this test's own environment away from a program, but for those
/// that the test gave it: a shell that worked through the README has a database in them.
pub(crate) fn without_settings(command: &mut std::process::Command) {
    let given: Vec<_> = command.get_envs().map(|(name, _)| name.to_owned()).collect();
    for (name, _) in std::env::vars_os().filter(|(name, _)| !given.contains(name)) {
        if name.to_string_lossy().to_ascii_uppercase().starts_with("ONCEBOX_") {
            command.env_remove(name);
        }
    }
}

/// A name that no other test, and no earlier run, has used.
pub(crate) fn unique(prefix: &str) -> String {
    format!("{prefix}-{}", &uuid::Uuid::now_v7().simple().to_string()[16..])
}

/// A port for a server of a test's own, which binds it itself. It is below the ports that the
/// system gives to whoever asks for any: another program could get one of those before the server
/// is there. This process keeps the UDP port of the same number, which no server uses, until it
/// ends: so no other test gets the number meanwhile.
pub(crate) fn free_port() -> u16 {
    let is_free = |port: &u16| {
        let address = ("127.0.0.1", *port);
        let Ok(ours) = std::net::UdpSocket::bind(address) else { return false };
        let is_free = std::net::TcpListener::bind(address).is_ok();
        if is_free {
            Box::leak(Box::new(ours));
        }
        is_free
    };
    (0..1_000).map(|_| fastrand::u16(12_000..30_000)).find(is_free).expect("a free port")
}

/// Asks again and again until the answer is there; fails with `what` after the deadline. A question
/// that is on its way then gets a minute more.
pub(crate) async fn eventually<T, F>(what: &str, deadline: Duration, mut ask: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let start = Instant::now();
    loop {
        let left = deadline.saturating_sub(start.elapsed()) + Duration::from_secs(60);
        let Ok(answer) = tokio::time::timeout(left, ask()).await else {
            panic!("{what}: it was asked, and for {:?} nothing answers", start.elapsed())
        };
        if let Some(answer) = answer {
            return answer;
        }
        assert!(start.elapsed() < deadline, "{what}: not within {deadline:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Runs a test of this program in processes of its own, one after the other, until one ends well.
/// Returns how many died before it, and what it said.
pub(crate) async fn deaths_of(test: &'static str, variables: Vec<(String, String)>) -> (u32, String) {
    let variables: Vec<_> = variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let mut deaths = 0;
    loop {
        let (is_well, said) = in_a_process(test, &variables).await;
        if is_well {
            return (deaths, said);
        }
        deaths += 1;
        assert!(deaths < 8, "it dies without end: {said}");
    }
}

/// Runs a test of this program in a process of its own: whether it ended well, and what it said. It
/// gets as long as the slowest of them needs several times over.
pub(crate) async fn in_a_process(test: &'static str, variables: &[(&str, &str)]) -> (bool, String) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).envs(variables.iter().copied());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file.reopen().unwrap());
    let mut child = Killed(command.spawn().unwrap());
    let start = Instant::now();
    let is_well = loop {
        if let Some(status) = child.0.try_wait().unwrap() {
            break status.success();
        }
        let said = || std::fs::read_to_string(file.path()).unwrap_or_default();
        assert!(start.elapsed() < Duration::from_secs(240), "{test} does not end in its process: {}", said());
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    (is_well, String::from_utf8_lossy(&std::fs::read(file.path()).unwrap()).into_owned())
}

/// A child that does not outlive its test.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _gone = self.0.wait();
    }
}

/// The program of an example, which cargo builds beside this test. `cargo test --test NAME` builds
/// none: a program that is missing, or older than its sources, fails the test.
pub(crate) fn example(name: &str) -> String {
    let this = std::env::current_exe().unwrap();
    let binary = this.ancestors().nth(2).unwrap().join("examples").join(name);
    let built = |path: &Path| path.metadata().and_then(|data| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    let sources = std::fs::read_to_string(binary.with_extension("d")).unwrap_or_default();
    // Of the crate too: an example of yesterday's crate writes what today's does not read.
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let repository = package.ancestors().find(|folder| folder.join("Cargo.lock").exists()).unwrap();
    let own = |source: &&str| Path::new(source).starts_with(repository);
    let newest = sources.split_whitespace().skip(1).filter(own).map(|source| built(Path::new(source))).max();
    assert!(
        newest.is_some_and(|newest| newest <= built(&binary)),
        "{} is missing or older than its sources: `cargo build --workspace --all-features --examples` makes it",
        binary.display()
    );
    binary.to_str().unwrap().to_owned()
}
