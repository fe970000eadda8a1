//! The example service as a process, and requests to it.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{eventually, example};

/// Long enough for a busy machine; a condition that holds ends the wait at once.
pub(crate) const SOON: Duration = Duration::from_secs(90);

/// How the service is started.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) database: String,
    pub(crate) provider: Option<String>,
    pub(crate) lease: f64,
    pub(crate) budget: f64,
    pub(crate) recovery: bool,
    pub(crate) pause_at: Option<&'static str>,
}

/// The service; killed when dropped.
pub(crate) struct Api {
    child: Child,
    url: String,
    said: Arc<Mutex<Vec<String>>>,
    client: reqwest::Client,
}

/// An answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) replayed: bool,
    pub(crate) location: Option<String>,
    pub(crate) bytes: Vec<u8>,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes).unwrap_or(Value::Null)
    }

    pub(crate) fn code(&self) -> String {
        self.json()["code"].as_str().unwrap_or_default().to_owned()
    }
}

/// A payment or charge of this reference.
pub(crate) fn body(amount: i64, reference: &str) -> Value {
    json!({ "accountId": "acc-7", "amountMinor": amount, "currency": "EUR", "merchantReference": reference })
}

impl Api {
    pub(crate) async fn start(plan: &Plan) -> Self {
        let mut command = Command::new(example("payments_api"));
        command.args(["--listen", "127.0.0.1:0", "--database", &plan.database, "--lease", &plan.lease.to_string()]);
        command.args(["--recovery", if plan.recovery { "on" } else { "off" }]);
        command.args(["--charge-budget", &plan.budget.to_string()]);
        command.args(plan.provider.iter().flat_map(|url| ["--provider", url, "--deployment", "database"]));
        command.args(plan.pause_at.iter().flat_map(|point| ["--pause-at", point]));
        command.env("RUST_LOG", "warn").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let said = Arc::new(Mutex::new(Vec::new()));
        // Both pipes are read to their ends, or a process that says much stands still.
        let (out, lines) = (BufReader::new(child.stdout.take().unwrap()), Arc::clone(&said));
        std::thread::spawn(move || out.lines().map_while(Result::ok).for_each(|line| lines.lock().unwrap().push(line)));
        let (err, lines) = (BufReader::new(child.stderr.take().unwrap()), Arc::clone(&said));
        std::thread::spawn(move || err.lines().map_while(Result::ok).for_each(|line| lines.lock().unwrap().push(line)));
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let mut api = Self { child, url: String::new(), said, client };
        let address = api.says("listening on ").await;
        api.url = format!("http://{address}");
        api
    }

    /// What stands behind these words in a line, once it is there.
    pub(crate) async fn says(&mut self, words: &str) -> String {
        let start = std::time::Instant::now();
        loop {
            let found = self.said.lock().unwrap().iter().find_map(|line| line.strip_prefix(words).map(str::to_owned));
            if let Some(rest) = found {
                return rest;
            }
            let ended = self.child.try_wait().unwrap();
            let said = self.said.lock().unwrap().join("\n");
            assert!(ended.is_none() && start.elapsed() < SOON, "`{words}` was not said: {ended:?}\n{said}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// SIGKILL, and gone.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn request(&self, path: &str, key: &str, body: &Value) -> reqwest::RequestBuilder {
        self.client
            .post(format!("{}{path}", self.url))
            .header("authorization", "Bearer t1:p1")
            .header("idempotency-key", key)
            .header("content-type", "application/json")
            .body(body.to_string())
    }

    pub(crate) async fn post(&self, path: &str, key: &str, body: &Value) -> Answer {
        answer(self.request(path, key, body).send().await.unwrap()).await
    }

    pub(crate) async fn get(&self, path: &str, tenant: &str) -> Answer {
        let request =
            self.client.get(format!("{}{path}", self.url)).header("authorization", format!("Bearer {tenant}:p1"));
        answer(request.send().await.unwrap()).await
    }

    /// The same request again, as a client does, for as long as the store is said to be away: on a
    /// busy machine it may be.
    pub(crate) async fn post_while_away(&self, path: &str, key: &str, body: &Value) -> Answer {
        eventually("an answer that is no 503", SOON, || async {
            Some(self.post(path, key, body).await).filter(|answer| answer.status != 503)
        })
        .await
    }

    /// The same request again and again, as a client does, until it is answered with an outcome.
    pub(crate) async fn post_until_known(&self, path: &str, key: &str, body: &Value) -> Answer {
        eventually("an outcome", SOON, || async {
            let answer = self.post(path, key, body).await;
            let pending = [202, 409, 503].contains(&answer.status);
            assert!(pending || matches!(answer.status, 200 | 201 | 402), "{answer:?}");
            (!pending).then_some(answer)
        })
        .await
    }
}

async fn answer(response: reqwest::Response) -> Answer {
    let header = |name: &str| response.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    let (replayed, location) = (header("idempotent-replayed").as_deref() == Some("true"), header("location"));
    let status = response.status().as_u16();
    Answer { status, replayed, location, bytes: response.bytes().await.unwrap().to_vec() }
}

impl Drop for Api {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
