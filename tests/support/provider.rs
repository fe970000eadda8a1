//! The provider of the examples, as a process.
#![allow(dead_code, clippy::unwrap_used)] // each test binary uses its part

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::support::example;

/// The provider, killed when dropped.
pub(crate) struct ProviderProcess {
    child: Child,
    pub(crate) url: String,
    client: reqwest::Client,
    /// Its books: one line of JSON for each charge.
    pub(crate) books: PathBuf,
    _data: tempfile::TempDir,
}

impl ProviderProcess {
    pub(crate) fn start() -> Self {
        let data = tempfile::tempdir().unwrap();
        let file = data.path().join("charges.jsonl");
        let child = Command::new(example("payments_provider"))
            .args(["--listen", "127.0.0.1:0", "--data", file.to_str().unwrap()])
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        // Before anything can fail: from here on it is killed when dropped.
        let mut started = Self { child, url: String::new(), client, books: file, _data: data };
        let mut line = String::new();
        BufReader::new(started.child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ");
        started.url = format!("http://{}", address.unwrap_or_else(|| panic!("it said {line:?}")));
        started
    }

    pub(crate) async fn fault(&self, name: &str, times: i64, delay_ms: u64) {
        let order = json!({ "fault": name, "times": times, "delayMs": delay_ms }).to_string();
        let answer = self.client.post(format!("{}/admin/faults", self.url)).body(order).send().await.unwrap();
        assert_eq!(answer.status(), 204);
    }

    pub(crate) async fn no_faults(&self) {
        let answer = self.client.delete(format!("{}/admin/faults", self.url)).send().await.unwrap();
        assert_eq!(answer.status(), 204);
    }

    /// Charges, and keys of charges.
    pub(crate) async fn count(&self) -> (i64, i64) {
        let text = self.client.get(format!("{}/charges/count", self.url)).send().await.unwrap().text().await.unwrap();
        let counts: Value = serde_json::from_str(&text).unwrap();
        (counts["count"].as_i64().unwrap(), counts["keys"].as_i64().unwrap())
    }
}

impl Drop for ProviderProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
