//! A fuzzer of the example service over HTTP, driven by the OpenAPI document that it serves.
//!
//! Good requests are made from the schemas, each is twisted in one way, and both are sent, again
//! and under each other's keys. What must hold: an answer is one that the document declares, with
//! the members that it requires; what is refused burns no key; the same request again gets the same
//! answer; every key that succeeded has one effect, and nothing else has any (accounts, which need
//! no key, are not looked at); nobody panics. The seed is printed; `ONCEBOX_FUZZ_SEED` repeats it.

mod document;
mod twists;
mod wire;

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use oncebox::operation::Code;
use serde_json::Value;

use self::document::{Operation, Sampler};
use self::twists::{Must, TWISTS, Twist};
use self::wire::{Framing, Request};
use super::kit::*;
use super::provider::ProviderProcess;
use super::service::{Service, count, messages};

/// How long it goes on at least.
const BUDGET: Duration = Duration::from_secs(3);
/// The databases, each of which takes its share of what is tried for certain: every twist of every
/// operation.
const SHARES: usize = 3;
/// What an account has that nobody has put anything into.
const BALANCE: i64 = 1_000_000_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_service_holds_to_its_document_whatever_comes_on_sqlite() {
    let directory = tempfile::tempdir().unwrap();
    fuzz(&format!("sqlite://{}", directory.path().join("payments.db").display()), 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_service_holds_to_its_document_whatever_comes_on_mariadb() {
    let test = "the_service_holds_to_its_document_whatever_comes_on_mariadb";
    let Some(database) = crate::mysql::Db::empty(test).await else { return };
    fuzz(&database.url, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_service_holds_to_its_document_whatever_comes_on_postgres() {
    let test = "the_service_holds_to_its_document_whatever_comes_on_postgres";
    crate::postgres::with_database(test, |database| async move { fuzz(&database.url, 2).await }).await;
}

async fn fuzz(database: &str, share: usize) {
    let given = std::env::var("ONCEBOX_FUZZ_SEED").ok().map(|seed| seed.parse().unwrap());
    let seed: u64 = given.unwrap_or_else(|| fastrand::u64(..u64::from(u32::MAX)));
    println!("ONCEBOX_FUZZ_SEED={seed}");
    let (provider, directory) = (ProviderProcess::start(), tempfile::tempdir().unwrap());
    let log = directory.path().join("service.log");
    let flags = ["--provider", &provider.url, "--deployment", "database", "--charge-budget", "20"];
    let service = Service::ready(Service::begin_logged(database, &flags, &log)).await;
    let document = service.get("/openapi.json").await.json();
    let operations = Operation::all(&document);
    published(&service, &operations).await;
    let (writes, reads): (Vec<_>, Vec<_>) = operations.into_iter().partition(|operation| operation.body.is_some());
    assert!(writes.len() % SHARES != 0 && reads.len() % SHARES != 0, "each share takes each operation now and then");
    let address = service.url.trim_start_matches("http://").to_owned();
    let mut fuzz = Fuzz { address, made: BTreeMap::new(), earlier: BTreeMap::new() };
    let mut applied = HashSet::new();
    let begun = Instant::now();
    let mut number = share;
    while number < TWISTS.len() * writes.len() || begun.elapsed() < BUDGET {
        let operation = &writes[number % writes.len()];
        let (name, twist) = TWISTS[number / writes.len() % TWISTS.len()];
        println!("case {number}: {name}, {}", operation.path);
        if fuzz.case(Sampler::new(seed + number as u64), operation, twist).await {
            applied.insert(name);
        }
        number += SHARES;
    }
    // What did not apply to the operations of this share applies to another one.
    for &(name, twist) in TWISTS {
        for operation in writes.iter().cycle().take(8 * writes.len()) {
            if applied.contains(name) {
                break;
            }
            println!("case {number}: {name}, {}", operation.path);
            if fuzz.case(Sampler::new(seed + number as u64), operation, twist).await {
                applied.insert(name);
            }
            number += SHARES;
        }
        assert!(applied.contains(name), "{name}: it applies to nothing");
    }
    for number in (share..TWISTS.len() * reads.len()).step_by(SHARES) {
        let operation = &reads[number % reads.len()];
        let (name, twist) = TWISTS[number / reads.len()];
        println!("read {number}: {name}, {}", operation.path);
        fuzz.read(Sampler::new(seed + number as u64), operation, twist).await;
    }
    fuzz.effects(database, &provider).await;
    for gauge in ["in_progress_age_max", "unknown_state_count"] {
        assert_eq!(service.metric(&format!("oncebox_idempotency_{gauge}")).await, 0.0, "{gauge}");
    }
    let said = std::fs::read_to_string(&log).unwrap();
    assert!(!said.contains("panicked"), "{said}");
}

/// What the document protects is what `/.well-known/idempotency` publishes.
async fn published(service: &Service, operations: &[Operation]) {
    let known = service.get("/.well-known/idempotency").await.json();
    let known = known["operations"].as_array().unwrap().iter();
    let known: HashSet<_> = known.map(|one| (one["method"].to_string(), one["path"].to_string())).collect();
    let keyed = operations.iter().filter(|operation| operation.key.is_some());
    let text = |text: &str| Value::from(text).to_string();
    let keyed: HashSet<_> = keyed.map(|operation| (text(&operation.method), text(&operation.path))).collect();
    assert_eq!(keyed, known);
}

/// Who asks, and under which key.
type Asked = (Vec<u8>, Vec<u8>);

struct Fuzz {
    address: String,
    /// By path: the resource that each key made.
    made: BTreeMap<String, BTreeMap<Asked, String>>,
    /// By path: bodies that were sent.
    earlier: BTreeMap<String, Vec<Value>>,
}

impl Fuzz {
    fn good(&mut self, operation: &Operation, sampler: &mut Sampler) -> Request {
        let mut headers = vec![("authorization".to_owned(), b"Bearer t1:p1".to_vec())];
        let mut body = Vec::new();
        if let Some(schema) = &operation.body {
            let earlier = self.earlier.entry(operation.path.clone()).or_default();
            // Now and then the same order under another key.
            let at = if earlier.is_empty() || sampler.chance.u8(..8) > 0 {
                earlier.push(sampler.value(schema));
                earlier.len() - 1
            } else {
                sampler.chance.usize(..earlier.len())
            };
            body = earlier[at].to_string().into_bytes();
            headers.push(("content-type".to_owned(), b"application/json".to_vec()));
        }
        if let Some(schema) = &operation.key {
            headers.push(("idempotency-key".to_owned(), sampler.text(schema).into_bytes()));
        }
        let id = operation.id.as_ref().map(|schema| sampler.text(schema)).unwrap_or_default();
        let id: String = id.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let target = operation.path.replace("{id}", &id);
        Request { method: operation.method.clone(), target, headers, body, framing: Framing::Length }
    }

    async fn send(&self, operation: &Operation, request: &Request) -> Http {
        let answer = request.send(&self.address).await.unwrap_or_else(|| panic!("no answer: {request:?}"));
        operation.declares(&answer);
        assert!(answer.status < 500, "{answer:?} to {request:?}");
        answer
    }

    // Shown by: `route_layer` around a whole router (a 405 burnt its key); an example that took a
    // text with NUL (503 of PostgreSQL), compared content types by their case, or called a body
    // that was cut off too long.
    /// Gives whether the twist applied.
    async fn case(&mut self, mut sampler: Sampler, operation: &Operation, twist: Twist) -> bool {
        let mut good = self.good(operation, &mut sampler);
        let mut twisted = good.clone();
        let must = twist(&mut twisted, operation, &mut sampler);
        if let Some(must @ (Must::Refuse(_) | Must::NotReach(_))) = must {
            self.refused(operation, &twisted, must, false).await;
        }
        if must == Some(Must::BeTheSame) && sampler.chance.bool() {
            std::mem::swap(&mut good, &mut twisted);
        }
        let first = if sampler.chance.u8(..8) == 0 {
            self.twins(operation, &good).await
        } else {
            let answer = self.send(operation, &good).await;
            self.first(operation, &good, answer).await
        };
        self.again(operation, &good, &first).await;
        match must {
            None => return false,
            Some(Must::BeTheSame) => self.again(operation, &twisted, &first).await,
            Some(Must::BeAnother) => {
                let answer = self.send(operation, &twisted).await;
                let other = self.first(operation, &twisted, answer).await;
                self.again(operation, &twisted, &other).await;
            }
            Some(Must::Mismatch) => _ = self.send(operation, &twisted).await.is(Code::KeyReused),
            Some(must) => self.refused(operation, &twisted, must, true).await,
        }
        self.again(operation, &good, &first).await;
        true
    }

    async fn refused(&self, operation: &Operation, twisted: &Request, must: Must, is_known: bool) {
        match must {
            Must::Refuse(code) => {
                let answer = self.send(operation, twisted).await;
                // The layer compares before the handler reads.
                if !(is_known && answer.code() == Code::KeyReused.as_str()) {
                    answer.is(code);
                }
            }
            Must::NotReach(statuses) => match twisted.send(&self.address).await {
                None => assert!(statuses.contains(&0), "no answer to {twisted:?}"),
                Some(answer) => assert!(statuses.contains(&answer.status), "{answer:?} to {twisted:?}"),
            },
            Must::BeTheSame | Must::BeAnother | Must::Mismatch => unreachable!("{must:?} is no refusal"),
        }
    }

    /// A first answer: noted as an effect where it is one. Gives the answer that stands for its
    /// key.
    async fn first(&mut self, operation: &Operation, request: &Request, mut answer: Http) -> Http {
        assert!(!answer.is_replayed(), "a key that nobody used: {answer:?} to {request:?}");
        if operation.key.is_none() {
            assert_eq!(answer.status, 200, "{answer:?}");
            return answer;
        }
        let deadline = Instant::now() + SOON;
        while answer.status == 202 {
            assert!(Instant::now() < deadline, "it stays pending: {answer:?}");
            answer = self.send(operation, request).await;
        }
        let made = self.made.entry(operation.path.clone()).or_default();
        match answer.status {
            201 => {
                let asked = (request.header("authorization").to_vec(), request.header("idempotency-key").to_vec());
                let id = answer.json()["id"].as_str().unwrap().to_owned();
                assert!(made.values().all(|other| *other != id), "{id} was made twice");
                made.insert(asked, id);
            }
            200 => {
                let of = answer.json()["duplicate_of"].as_str().unwrap().to_owned();
                // Of a payment of its own tenant (O14: a reference is unique for each tenant).
                let tenant = &request.header("authorization")[.."Bearer t1".len()];
                let is_ours = made.iter().any(|((who, _), id)| *id == of && who.starts_with(tenant));
                assert!(is_ours, "{answer:?} of nothing");
            }
            // A refusal that holds: of more than any account has.
            402 => {
                let asked: Value = serde_json::from_slice(&request.body).unwrap();
                let is_too_much = asked["amountMinor"].as_i64().is_some_and(|amount| amount > BALANCE);
                assert!(operation.path == "/payments" && is_too_much, "{answer:?} to {request:?}");
                assert_eq!(answer.json()["key_state"], "spent", "{answer:?}");
            }
            _ => panic!("{answer:?} to {request:?}"),
        }
        answer
    }

    /// The same at once, twice: one is the first, the other is told to come again or gets its
    /// answer.
    async fn twins(&mut self, operation: &Operation, request: &Request) -> Http {
        let (one, two) = tokio::join!(self.send(operation, request), self.send(operation, request));
        let is_first =
            |answer: &Http| !answer.is_replayed() && (answer.status != 409 || answer.json()["key_state"] == "spent");
        let (first, other) = if is_first(&one) { (one, two) } else { (two, one) };
        if operation.key.is_some() {
            if other.is_replayed() {
                assert_eq!((other.status, &other.body), (first.status, &first.body));
            } else {
                other.is(Code::InProgress);
            }
        }
        self.first(operation, request, first).await
    }

    async fn again(&self, operation: &Operation, request: &Request, first: &Http) {
        let again = self.send(operation, request).await;
        assert_eq!((again.status, &again.body), (first.status, &first.body), "{request:?}");
        assert_eq!(again.is_replayed(), operation.key.is_some(), "{again:?}");
    }

    /// A request that changes nothing, and what is done to it.
    async fn read(&mut self, mut sampler: Sampler, operation: &Operation, twist: Twist) {
        let mut good = self.good(operation, &mut sampler);
        let of = operation.path.trim_end_matches("/{id}");
        let known = self.made.get(of).and_then(|made| made.iter().next());
        if let Some(((who, _), id)) = known.filter(|_| operation.id.is_some()) {
            good.with("authorization", who.clone());
            good.target = operation.path.replace("{id}", id);
        }
        let is_there = operation.id.is_none() || known.is_some();
        let first = self.send(operation, &good).await;
        assert_eq!(first.status, if is_there { 200 } else { 404 }, "{good:?}");
        let mut twisted = good.clone();
        match twist(&mut twisted, operation, &mut sampler) {
            Some(Must::BeTheSame) => {
                let again = self.send(operation, &twisted).await;
                assert_eq!(again.status, first.status, "{twisted:?}");
                // Metrics, for one, change in between; a resource does not.
                assert!(operation.id.is_none() || again.body == first.body, "{twisted:?}");
            }
            Some(must) => self.refused(operation, &twisted, must, false).await,
            None => {}
        }
    }

    /// What stands in the tables is what was answered, one by one.
    // Shown by: a note that is written twice.
    async fn effects(&mut self, database: &str, provider: &ProviderProcess) {
        let mut shown: BTreeMap<&str, i64> = BTreeMap::new();
        for (path, made) in &self.made {
            let of = if path == "/charges" { "/payments" } else { path };
            for ((who, _), id) in made {
                let headers = vec![("authorization".to_owned(), who.clone())];
                let target = format!("{of}/{id}");
                let read =
                    Request { method: "GET".to_owned(), target, headers, body: Vec::new(), framing: Framing::Length };
                let seen = read.send(&self.address).await.unwrap();
                assert_eq!((seen.status, seen.json()["id"].as_str()), (200, Some(id.as_str())), "{path}");
                *shown.entry(path).or_default() += 1;
            }
        }
        println!("{shown:?}");
        let [payments, charges, notes] = ["/payments", "/charges", "/notes"].map(|path| shown[path]);
        assert_eq!(count(database, "select count(*) from payment").await, payments);
        assert_eq!(count(database, "select count(*) from charge").await, charges);
        assert_eq!(count(database, "select count(*) from note").await, notes);
        assert_eq!(messages(database, "payment.created").await, payments + charges);
        assert_eq!(provider.count().await, (charges, charges));
    }
}
