//! What a guard promises, and which servers are none (O25).

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use oncebox::StoreError;
use oncebox::observe::Health;
use oncebox::operation::{
    Durability, Effects, Endpoint, Engine, EngineOptions, Identity, Key, KeyFormat, Mode, Retention, Route, Scope,
    State,
};
use oncebox::store::redis::{RedisKeys, RedisOptions};
use oncebox::store::{Answer, AnswerBody, Basis, Fenced, KeptBody, KeyClaim, Keys, Owned, RunOutcome};
use oncebox_testkit::store::KeysFixture;
use redis::AsyncCommands;
use uuid::Uuid;

use super::prefix::{ANSWER_MAX, Prefix, connection};
use super::proxy::{Failure, Proxy};
use super::support::{eventually, free_port, service};

const LONG: Duration = Duration::from_secs(600);

fn claim(key: &str) -> KeyClaim {
    let scope = Scope::new("t1", "user-7").unwrap();
    let key = Key::parse(format!("{key}-0123456789abcdef").as_bytes(), KeyFormat::Opaque).unwrap();
    KeyClaim {
        identity: Identity::new(&scope, "send_receipt".parse().unwrap(), key),
        principal: format!("sha256:{}", "0b".repeat(32)).parse().unwrap(),
        fingerprint: format!("1:sha256:{}", "0a".repeat(32)).parse().unwrap(),
        mode: Mode::Edge,
        operation_id: Uuid::now_v7(),
        owner: Uuid::now_v7(),
        lease: LONG,
    }
}

async fn take(store: &RedisKeys, claim: &KeyClaim) -> Owned {
    store.claim(claim, Basis::New).await.unwrap().expect("it is free")
}

/// A server of this test's own, killed with it.
struct Server {
    process: Child,
    port: u16,
    directory: tempfile::TempDir,
}

impl Server {
    fn launch(port: u16, directory: &std::path::Path, arguments: &[&str]) -> Child {
        let port = port.to_string();
        let mut server = Command::new("redis-server");
        server.args(["--port", &port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes"]);
        server.args(["--appendfsync", "always"]).args(arguments).arg("--dir").arg(directory);
        server.stdout(Stdio::null()).spawn().unwrap()
    }

    /// None, with a line on stderr, where Redis is not installed.
    async fn start(test: &str, arguments: &[&str]) -> Option<Self> {
        if Command::new("redis-server").arg("--version").stdout(Stdio::null()).status().is_err() {
            assert!(std::env::var("ONCEBOX_TEST_STRICT").as_deref() != Ok("1"), "{test} needs redis-server");
            eprintln!("SKIPPED: {test} (no redis-server)");
            return None;
        }
        let port = free_port();
        let directory = tempfile::tempdir().unwrap();
        let server = Self { process: Self::launch(port, directory.path(), arguments), port, directory };
        server.serves().await;
        Some(server)
    }

    fn options(&self) -> RedisOptions {
        self.at(format!("redis://127.0.0.1:{}", self.port))
    }

    fn at(&self, url: String) -> RedisOptions {
        RedisOptions { answer_timeout: ANSWER_MAX, ..RedisOptions::new(url) }
    }

    async fn connection(&self) -> redis::RedisResult<redis::aio::MultiplexedConnection> {
        connection(&self.options().url).await
    }

    async fn serves(&self) {
        eventually("the server answers", Duration::from_secs(60), || async {
            let mut connection = self.connection().await.ok()?;
            redis::cmd("PING").query_async::<String>(&mut connection).await.ok()
        })
        .await;
    }

    async fn set(&self, name: &str, value: &str) {
        let mut connection = self.connection().await.unwrap();
        redis::cmd("CONFIG").arg("SET").arg(name).arg(value).exec_async(&mut connection).await.unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Shown to fail: with `ca_file` left out of the client the good one is refused, with `#insecure`
/// the others are taken.
#[tokio::test]
async fn a_certificate_is_verified_and_what_cannot_be_meant_is_refused() {
    let test = "a_certificate_is_verified_and_what_cannot_be_meant_is_refused";
    let (Some(ca), Some(other)) = (service(test, "ONCEBOX_TEST_CA"), service(test, "ONCEBOX_TEST_OTHER_CA")) else {
        return;
    };
    let directory = std::path::Path::new(&ca).parent().unwrap().to_path_buf();
    let file = |name: &str| directory.join(name).display().to_string();
    let (port, certificate, key) = (free_port().to_string(), file("server.crt"), file("server.key"));
    let tls = ["--tls-port", &port, "--tls-cert-file", &certificate, "--tls-key-file", &key];
    let arguments = [&tls[..], &["--tls-ca-cert-file", &ca, "--tls-auth-clients", "no"]].concat();
    let arguments = [&arguments[..], &["--bind", "127.0.0.1", "127.0.0.2"]].concat();
    let Some(server) = Server::start(test, &arguments).await else { return };
    let connect = async |url: String, ca: Option<&str>| {
        RedisKeys::connect(RedisOptions { ca_file: ca.map(Into::into), ..server.at(url) }).await
    };
    let tls = |host: &str| format!("rediss://{host}:{port}");
    let store = connect(tls("localhost"), Some(&ca)).await.unwrap();
    take(&store, &claim("k")).await;
    for (url, ca, why) in [
        (tls("localhost"), Some(other.as_str()), "not trusted"),
        (tls("localhost"), None, "not trusted"),
        // The certificate is for localhost and 127.0.0.1.
        (tls("127.0.0.2"), Some(ca.as_str()), "not trusted"),
        (tls("localhost").replace("rediss", "redis"), Some(ca.as_str()), "use `rediss://`"),
        (format!("{}/#insecure", tls("localhost")), Some(ca.as_str()), "insecure"),
        (tls("a,b"), Some(ca.as_str()), "one host is used"),
        (tls("localhost"), Some("/no/such/file"), "/no/such/file"),
    ] {
        let error = connect(url.clone(), ca).await.err().unwrap_or_else(|| panic!("{url} was accepted"));
        assert!(matches!(&error, StoreError::Refused(said) if said.contains(why)), "{url}: {error}");
    }
}

#[tokio::test]
async fn o25_a_guard_takes_no_route_that_needs_a_memory() {
    let Some(fixture) = Prefix::start("o25_a_guard_takes_no_route_that_needs_a_memory").await else { return };
    assert_eq!(fixture.store().durability(), Durability::Guard);
    let engine = Engine::new(fixture.store().clone(), EngineOptions::default());
    let refused = engine.protect(Endpoint::raw("send_receipt", Route::new(Mode::Edge))).unwrap_err();
    assert!(refused.to_string().starts_with("a guard store forgets"), "{refused}");
    fixture.end().await;
}

// Shown by: leaving the check out (every request is then answered 503, for the store cannot say).
#[tokio::test]
async fn m120_o25_a_quota_on_stored_bytes_is_refused_at_start() {
    let Some(fixture) = Prefix::start("m120_o25_a_quota_on_stored_bytes_is_refused_at_start").await else { return };
    let repeatable = Route { effects: Effects::Repeatable, ..Route::new(Mode::Edge) };
    let bounded = Engine::new(
        fixture.store().clone(),
        EngineOptions { stored_bytes_per_tenant_max: Some(1 << 20), ..EngineOptions::default() },
    );
    let refused = bounded.protect(Endpoint::raw("send_receipt", repeatable.clone())).unwrap_err();
    assert!(refused.to_string().contains("stored_bytes_per_tenant_max"), "{refused}");
    Engine::new(fixture.store().clone(), EngineOptions::default())
        .protect(Endpoint::raw("send_receipt", repeatable))
        .unwrap();
    fixture.end().await;
}

// `allkeys-lru` evicted live claims. Shown by: leaving the check out.
#[tokio::test]
async fn o25_a_server_that_may_forget_is_refused() {
    let test = "o25_a_server_that_may_forget_is_refused";
    let Some(server) = Server::start(test, &["--maxmemory-policy", "allkeys-lru"]).await else { return };
    for policy in ["allkeys-lru", "volatile-ttl", "allkeys-random"] {
        server.set("maxmemory-policy", policy).await;
        let refused = RedisKeys::connect(server.options()).await.unwrap_err();
        assert!(matches!(&refused, StoreError::Refused(why) if why.contains(policy)), "{refused}");
    }
    server.set("maxmemory-policy", "noeviction").await;
    let store = RedisKeys::connect(server.options()).await.unwrap();
    take(&store, &claim("k")).await;
    // The settings of a running server may change, and then it says so.
    server.set("maxmemory-policy", "allkeys-lfu").await;
    assert!(matches!(store.check().await, Err(StoreError::Refused(_))));
    server.set("maxmemory-policy", "noeviction").await;
    let mut connection = server.connection().await.unwrap();
    redis::cmd("REPLICAOF").arg("127.0.0.1").arg(1).exec_async(&mut connection).await.unwrap();
    let refused = RedisKeys::connect(server.options()).await.unwrap_err();
    assert!(matches!(&refused, StoreError::Refused(why) if why.contains("role:slave")), "{refused}");
}

#[tokio::test]
async fn o25_a_cluster_is_refused() {
    let bus = free_port().to_string();
    let arguments = ["--cluster-enabled", "yes", "--cluster-port", &bus];
    let Some(server) = Server::start("o25_a_cluster_is_refused", &arguments).await else { return };
    let refused = RedisKeys::connect(server.options()).await.unwrap_err();
    assert!(matches!(&refused, StoreError::Refused(why) if why.contains("cluster_enabled:1")), "{refused}");
}

// A failover behind the same name. Shown by: asking the server at the first connection only.
#[tokio::test]
async fn o25_a_server_that_is_connected_to_anew_is_asked_again_whether_it_may_forget() {
    let test = "o25_a_server_that_is_connected_to_anew_is_asked_again";
    let Some(server) = Server::start(test, &[]).await else { return };
    let store = RedisKeys::connect(server.options()).await.unwrap();
    take(&store, &claim("k")).await;
    server.set("maxmemory-policy", "allkeys-lru").await;
    let identity = claim("k").identity;
    store.find(&identity).await.expect("the connection that was asked about goes on");
    let mut connection = server.connection().await.unwrap();
    let kill = redis::cmd("CLIENT").arg("KILL").arg("TYPE").arg("normal").arg("SKIPME").arg("yes").to_owned();
    kill.exec_async(&mut connection).await.unwrap();
    eventually("it is refused", Duration::from_secs(60), || async {
        matches!(store.find(&identity).await, Err(StoreError::Refused(why)) if why.contains("allkeys-lru"))
            .then_some(())
    })
    .await;
    server.set("maxmemory-policy", "noeviction").await;
    store.find(&identity).await.expect("it is trusted again");
}

// A failover behind the same name, whose former primary keeps its connections. Shown by: keeping a
// connection that takes no writes (it was used for ever).
#[tokio::test]
async fn o25_a_primary_that_became_a_replica_is_left_for_a_new_connection() {
    let test = "o25_a_primary_that_became_a_replica_is_left_for_a_new_connection";
    let Some(server) = Server::start(test, &[]).await else { return };
    let store = RedisKeys::connect(server.options()).await.unwrap();
    let mut connection = server.connection().await.unwrap();
    redis::cmd("REPLICAOF").arg("127.0.0.1").arg(1).exec_async(&mut connection).await.unwrap();
    let written = store.claim(&claim("k"), Basis::New).await.unwrap_err();
    assert!(matches!(&written, StoreError::Unavailable(_)) && written.to_string().contains("ReadOnly"), "{written}");
    // Only a new connection asks the server what it is.
    let anew = store.claim(&claim("k"), Basis::New).await.unwrap_err();
    assert!(matches!(&anew, StoreError::Refused(why) if why.contains("role:slave")), "{anew}");
    redis::cmd("REPLICAOF").arg("NO").arg("ONE").exec_async(&mut connection).await.unwrap();
    take(&store, &claim("k")).await;
}

// The host of the primary goes away without a word, and the name soon leads to another one. Shown
// to fail: keeping a connection whose ping was dropped, which TCP ends after a quarter of an hour.
#[tokio::test]
async fn o25_an_outage_without_a_word_ends_once_the_name_leads_to_a_server_again() {
    let test = "o25_an_outage_without_a_word_ends_once_the_name_leads_to_a_server_again";
    let Some(server) = Server::start(test, &[]).await else { return };
    let proxy = Proxy::before_broker(&server.options().url);
    let store = RedisKeys::connect(server.at(proxy.url.clone())).await.unwrap();
    let health = Health::default();
    let engine = Engine::new(store, EngineOptions { health: health.clone(), ..EngineOptions::default() });
    engine.measure().await.unwrap();
    proxy.fails(Failure::Silence);
    eventually("the outage is known", LONG, || async { (!health.is_ready()).then_some(()) }).await;
    proxy.works();
    eventually("its end is known", ANSWER_MAX / 2, || async { health.is_ready().then_some(()) }).await;
    engine.measure().await.unwrap();
}

// Shown to fail: a check that does not note that its connection is lost.
#[tokio::test]
async fn o25_a_check_on_a_lost_connection_is_followed_by_one_on_a_new_connection() {
    let test = "o25_a_check_on_a_lost_connection_is_followed_by_one_on_a_new_connection";
    let Some(server) = Server::start(test, &[]).await else { return };
    let proxy = Proxy::before_broker(&server.options().url);
    let store = RedisKeys::connect(server.at(proxy.url.clone())).await.unwrap();
    proxy.fails(Failure::Cut);
    let lost = eventually("it is lost", ANSWER_MAX, || async { store.check().await.err() }).await;
    assert!(matches!(lost, StoreError::Unavailable(_)), "{lost}");
    proxy.works();
    eventually("the server is checked", ANSWER_MAX, || async { store.check().await.ok() }).await;
}

// Shown to fail: without the case of the client's own error for a password.
#[tokio::test]
async fn a_wrong_password_is_refused() {
    let Some(server) = Server::start("a_wrong_password_is_refused", &[]).await else { return };
    server.set("requirepass", "right").await;
    let at = |login: &str| format!("redis://{login}127.0.0.1:{}", server.port);
    for (login, words) in [
        ("", [at(""), "asks for a password".to_owned()]),
        (":wrong@", [at(":***@"), "refuses the user or the password".to_owned()]),
        ("nobody:right@", [at("nobody:***@"), "refuses the user or the password".to_owned()]),
    ] {
        let refused = RedisKeys::connect(server.at(at(login))).await.unwrap_err();
        let said = refused.to_string();
        let is_said = said.contains("Redis") && words.iter().all(|word| said.contains(word));
        assert!(matches!(refused, StoreError::Refused(_)) && is_said, "{login}: {said}");
    }
    RedisKeys::connect(server.at(format!("redis://:right@127.0.0.1:{}", server.port))).await.unwrap();
}

// Shown by: `volatile` keys for claims; a connection that is kept after it failed.
#[tokio::test]
async fn o25_duplicates_are_suppressed_while_the_server_keeps_its_data_and_a_server_that_is_away_is_none() {
    let test = "o25_duplicates_are_suppressed_while_the_server_keeps_its_data";
    let Some(mut server) = Server::start(test, &[]).await else { return };
    let store = RedisKeys::connect(server.options()).await.unwrap();
    let (mine, running) = (claim("k"), claim("running"));
    let owner = take(&store, &mine).await;
    take(&store, &running).await;
    server.process.kill().unwrap(); // SIGKILL
    server.process.wait().unwrap();
    for _ in 0..2 {
        let away = store.claim(&claim("other"), Basis::New).await.unwrap_err();
        assert!(matches!(away, StoreError::Unavailable(_)), "{away}");
        let named = format!("Redis at redis://127.0.0.1:{}: ", server.port);
        assert!(away.to_string().contains(&named), "{away}");
    }
    server.process = Server::launch(server.port, server.directory.path(), &[]);
    server.serves().await;
    let claimed = eventually("it is used again", Duration::from_secs(60), || async {
        store.claim(&running, Basis::New).await.ok()
    })
    .await;
    assert!(claimed.is_none());
    assert_eq!(store.find(&running.identity).await.unwrap().record.unwrap().state, State::InProgress);
    assert_eq!(store.finish(&owner, &RunOutcome::Unknown, &Retention::default()).await.unwrap(), Fenced::Done);
}

// Shown by: a time to live at the claim (`PX` = lease let a second claim run beside the first).
#[tokio::test]
async fn o25_a_lease_that_is_over_takes_no_claim_away_and_only_an_outcome_has_a_time_to_live() {
    let Some(fixture) = Prefix::start("o25_a_lease_that_is_over_takes_no_claim_away").await else { return };
    let mut connection = fixture.connection.clone();
    let stale = KeyClaim { lease: Duration::from_millis(1), ..claim("stale") };
    take(&fixture.store, &stale).await;
    eventually("the lease is over", Duration::from_secs(60), || async {
        let look = fixture.store.find(&stale.identity).await.unwrap();
        look.record.unwrap().lease_left(look.now).is_zero().then_some(())
    })
    .await;
    assert!(fixture.store.claim(&stale, Basis::New).await.unwrap().is_none());
    let unknown = take(&fixture.store, &claim("unknown")).await;
    fixture.store.finish(&unknown, &RunOutcome::Unknown, &Retention::default()).await.unwrap();
    for key in fixture.keys("").await {
        let left: i64 = connection.ttl(&key).await.unwrap();
        assert_eq!(left, -1, "{key} would go by itself");
    }
    let done = take(&fixture.store, &claim("done")).await;
    let body = AnswerBody::Kept(KeptBody { bytes: b"{}".to_vec(), ..KeptBody::default() });
    let outcome = RunOutcome::Completed(Answer { status: 201, schema_version: 1, body, resource: None });
    let retention = Retention { ttl: LONG, body: LONG / 2, metadata: LONG * 2 };
    fixture.store.finish(&done, &outcome, &retention).await.unwrap();
    let mut lives = Vec::new();
    for key in fixture.keys("").await {
        lives.push(connection.ttl::<_, i64>(&key).await.unwrap());
    }
    lives.retain(|&left| left != -1);
    lives.sort_unstable();
    assert!(matches!(lives[..], [body, record] if (240..=300).contains(&body) && (1_140..=1_200).contains(&record)));
    fixture.end().await;
}

// Shown by: counting epochs in the record.
#[tokio::test]
async fn o25_no_epoch_is_given_twice_also_after_the_record_is_gone() {
    let Some(fixture) = Prefix::start("o25_no_epoch_is_given_twice").await else { return };
    let mut before = 0;
    for _ in 0..5 {
        let owned = take(&fixture.store, &claim("k")).await;
        assert!(owned.epoch > before);
        before = owned.epoch;
        fixture.store.release(&owned).await.unwrap();
    }
    assert_eq!(fixture.records().await, 0);
    fixture.end().await;
}

// A route whose metadata lived an hour, then two, then seven days.
// Shown to fail: the shortest retention for ever (a key whose request had never arrived was too old
// for ever); without `below` (a key of the first hour was new again); without `next`.
#[tokio::test]
async fn o23_a_longer_retention_counts_once_all_records_with_a_shorter_one_are_gone() {
    let Some(fixture) = Prefix::start("o23_a_longer_retention_counts").await else { return };
    let mut connection = fixture.connection.clone();
    let hour = 3_600_000_000_i64;
    let outcome = async |key: &str, hours: u32| {
        let owned = take(&fixture.store, &claim(key)).await;
        let metadata = Duration::from_secs(3_600) * hours;
        let retention = Retention { ttl: LONG, body: LONG, metadata };
        let failed = RunOutcome::FailedRetryable { error_code: None };
        fixture.store.finish(&owned, &failed, &retention).await.unwrap();
        let look = fixture.store.find(&claim("other").identity).await.unwrap();
        (look.now.micros, look.purged_below.map(|bound| bound.micros - 60_000_000))
    };
    let (now, bound) = outcome("a", 1).await;
    assert_eq!(bound, None);
    let [forgotten] = fixture.keys("forgotten:").await.try_into().unwrap();
    // As if the first outcome were ten hours old.
    let _: () = connection.hset(&forgotten, "first", now - 10 * hour).await.unwrap();
    for (key, hours) in [("b", 168), ("c", 2), ("d", 168)] {
        let (now, bound) = outcome(key, hours).await;
        assert_eq!(bound, Some(now - hour), "records that live an hour may be gone");
    }
    // As if an hour had passed since the last of them.
    let used = now - hour - 1;
    let _: () = connection.hset(&forgotten, "used", used).await.unwrap();
    let (now, bound) = outcome("e", 168).await;
    assert_eq!(bound, Some(used), "what was forgotten stays forgotten, and later keys are new");
    // As if that were long ago: the records of two hours may be gone, too.
    let _: () = connection.hset(&forgotten, "below", now - 9 * hour).await.unwrap();
    let (now, bound) = outcome("f", 168).await;
    assert_eq!(bound, Some(now - 2 * hour));
    fixture.end().await;
}
